"""What a store must do when a run removes its older records and signals, and when signals are refused or left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ...model import Signal, Status
from ...ports import Create, Row, Send, Store, Verdict
from ...records.record import unseal
from .ground import Ground, Holder, SteppedClock, at, commit, everything, get, queued, record, started


def _seqs(rows: list[Row]) -> list[int]:
    return [row.seq for row in rows]


def _long(store: Store, records: int = 10) -> Holder:
    """A run with so many records."""
    writer = started(store, "r")
    for _ in range(records - 1):
        writer.write()
    return writer


class Trimming(Ground):
    """Removing records and signals, the number of signals that a run has read, and signals that are not sent."""

    # -- records -------------------------------------------------------------------------------------------------------

    def test_trim_keeps_the_first_record_and_those_from_a_number_on(self, store: Store) -> None:
        writer = _long(store)
        assert writer.write(trim=7).verdict is Verdict.DONE
        assert _seqs(store.list_checkpoints("r")) == [1, 7, 8, 9, 10, 11]
        run = get(store, "r")
        assert (run.seq, run.kept_from) == (11, 7)
        checked = [one.seq for one, _ in unseal(store.list_checkpoints("r"), "r", kept_from=7)]
        assert checked == [1, 7, 8, 9, 10, 11]

    def test_pages_of_a_trimmed_run_pass_over_the_gap(self, store: Store) -> None:
        _long(store).write(trim=7)
        assert _seqs(store.list_checkpoints("r", 0, 2)) == [1, 7]
        for after in range(1, 7):
            assert _seqs(store.list_checkpoints("r", after, 2)) == [7, 8]
        assert _seqs(store.list_checkpoints("r", 7)) == [8, 9, 10, 11]

    def test_a_trimmed_run_goes_on_and_is_trimmed_again(self, store: Store) -> None:
        writer = _long(store)
        writer.write(trim=7)
        writer.write(record("r"), record("r"))
        assert _seqs(store.list_checkpoints("r")) == [1, *range(7, 14)]
        writer.write(trim=13)
        assert _seqs(store.list_checkpoints("r")) == [1, 13, 14]
        assert get(store, "r").kept_from == 13

    def test_a_trim_without_a_record_keeps_the_newest_one(self, store: Store) -> None:
        writer = _long(store, 3)
        assert writer.write(rows=(), trim=100).verdict is Verdict.DONE
        assert _seqs(store.list_checkpoints("r")) == [1, 3]
        assert (get(store, "r").seq, get(store, "r").kept_from) == (3, 3)

    def test_rows_of_the_change_itself_are_never_removed(self, store: Store) -> None:
        writer = _long(store, 3)
        writer.write(record("r"), record("r"), trim=100)
        assert _seqs(store.list_checkpoints("r")) == [1, 4, 5]
        assert get(store, "r").kept_from == 4

    def test_a_lower_number_brings_nothing_back_and_removes_nothing(self, store: Store) -> None:
        writer = _long(store)
        writer.write(trim=7)
        writer.write(trim=3)
        writer.write(trim=0)
        assert _seqs(store.list_checkpoints("r")) == [1, *range(7, 14)]
        assert get(store, "r").kept_from == 7

    @pytest.mark.parametrize("trim", [-1, 0, 1, 2])
    def test_a_trim_that_removes_nothing_leaves_the_run_whole(self, store: Store, trim: int) -> None:
        writer = _long(store, 3)
        writer.write(trim=trim)
        assert _seqs(store.list_checkpoints("r")) == [1, 2, 3, 4]
        assert get(store, "r").kept_from == 0

    def test_a_refused_change_removes_nothing(self, store: Store) -> None:
        writer = _long(store)
        before = everything(store)
        assert commit(store, writer.change(trim=7, epoch=9)).verdict is Verdict.FENCED
        assert commit(store, writer.change(trim=7, sends=[Send(Signal("nobody", "x"))])).verdict is Verdict.NOT_FOUND
        assert everything(store) == before

    def test_a_trim_spares_other_runs_and_comes_with_their_changes(self, store: Store) -> None:
        writer, other = _long(store), started(store, "s")
        for _ in range(4):
            other.write()
        answers = store.commit([other.change(), writer.change(trim=7)])
        assert [answer.verdict for answer in answers] == [Verdict.DONE] * 2
        assert _seqs(store.list_checkpoints("s")) == [1, 2, 3, 4, 5, 6]
        assert _seqs(store.list_checkpoints("r")) == [1, *range(7, 12)]

    def test_a_change_may_trim_what_the_same_commit_wrote(self, store: Store) -> None:
        writer = _long(store, 3)
        first = writer.change()
        writer.seq, writer.checksum = first.rows[-1].seq, first.checksum
        store.commit([first, writer.change(trim=5)])
        assert _seqs(store.list_checkpoints("r")) == [1, 5]

    def test_a_trimmed_run_is_claimed_parked_and_ended_like_any(self, store: Store, clock: SteppedClock) -> None:
        writer = _long(store)
        writer.write(trim=7, status=Status.WAITING, release=True, due_at=at(1))
        clock.advance(2)
        claim = self.claim_one(store, "r", "w2")
        assert claim is not None
        assert claim.run.kept_from == 7
        taken = Holder(store, claim.run)
        taken.write(status=Status.SET_ASIDE, release=True)
        assert _seqs(store.list_checkpoints("r")) == [1, *range(7, 13)]
        assert store.check() == []

    def test_a_second_process_sees_what_is_kept(self, store: Store, clock: SteppedClock) -> None:
        writer = _long(store)
        second = self.make_store(clock)
        if second is store:
            return
        try:
            assert len(second.list_checkpoints("r")) == 10
            writer.write(trim=7)
            assert _seqs(second.list_checkpoints("r")) == [1, *range(7, 12)]
            assert commit(second, Send(Signal("r", "x"))).seq == 1
            assert _seqs(second.list_checkpoints("r", 3)) == [*range(7, 12)]
            assert [one.name for one in second.list_signals("r")] == ["x"]
        finally:
            second.close()

    def test_a_trimmed_run_is_copied_with_its_gap(self, store: Store) -> None:
        writer = _long(store)
        commit(store, Send(Signal("r", "x", id="1")))
        writer.write(trim=7, status=Status.SET_ASIDE, release=True)
        run, rows, signals = get(store, "r"), store.list_checkpoints("r"), store.list_signals("r")
        store.delete_runs(["r"])
        assert commit(store, Create(replace(run, error=None), rows, signals)).verdict is Verdict.DONE
        assert replace(get(store, "r"), error=None) == replace(run, error=None)
        assert _seqs(store.list_checkpoints("r")) == [1, *range(7, 12)]
        assert store.list_checkpoints("r") == rows
        assert _seqs(store.list_checkpoints("r", 2, 1)) == [7]

    def test_a_copy_may_not_have_another_gap_than_it_says(self, store: Store) -> None:
        writer = _long(store)
        writer.write(trim=7, status=Status.SET_ASIDE, release=True)
        run, rows = get(store, "r"), store.list_checkpoints("r")
        store.delete_runs(["r"])
        for kept_from, some in ((7, [*rows[:1], *rows[2:]]), (8, rows), (0, rows), (7, rows[1:])):
            with pytest.raises(ValueError, match="numbered from 1"):
                commit(store, Create(replace(run, kept_from=kept_from), some))

    # -- signals -------------------------------------------------------------------------------------------------------

    def test_kept_signals_stay_as_they_are(self, store: Store) -> None:
        writer = started(store, "r")
        for number in range(5):
            commit(store, Send(Signal("r", "x", id=f"id {number}")))
        before = store.list_signals("r")
        writer.write(trim_signals=4)
        kept = store.list_signals("r")
        assert kept[-2:] == before[-2:]
        assert kept in (before, before[3:])
        assert get(store, "r").signals == 5
        assert get(store, "r").signals_from in (0, 4)
        assert store.list_signals("r", 3) == before[3:]
        assert commit(store, Send(Signal("r", "x", id="id 4"))).verdict is Verdict.EXISTS
        assert commit(store, Send(Signal("r", "y"))).seq == 6
        assert store.list_signals("r", 4, 1) == before[4:]

    def test_trimmed_signals_do_not_disturb_news(self, store: Store) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "x")))
        cursor = store.news("w1", 0).cursor
        writer.write(trim_signals=2)
        commit(store, Send(Signal("r", "y")))
        assert store.news("w1", cursor).runs == ("r",)

    # -- bounded signals -----------------------------------------------------------------------------------------------

    def test_a_signal_is_refused_when_so_many_are_unread(self, store: Store) -> None:
        writer = started(store, "r")
        for _ in range(3):
            assert commit(store, Send(Signal("r", "x"), room=3)).verdict is Verdict.DONE
        answer = commit(store, Send(Signal("r", "x"), room=3))
        assert (answer.verdict, answer.about) == (Verdict.FULL, "r")
        assert get(store, "r").signals == 3
        assert commit(store, Send(Signal("r", "x"), room=4)).verdict is Verdict.DONE
        assert commit(store, Send(Signal("r", "x"))).verdict is Verdict.DONE
        writer.write(signals_read=4)
        assert get(store, "r").signals_read == 4
        assert commit(store, Send(Signal("r", "x"), room=2)).verdict is Verdict.DONE
        assert commit(store, Send(Signal("r", "x"), room=2)).verdict is Verdict.FULL

    def test_heard_comes_with_a_park_and_stays(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "x")))
        writer.write(status=Status.WAITING, release=True, due_at=at(1), signals_read=1, signals_seen=1)
        assert get(store, "r").signals_read == 1
        clock.advance(2)
        claim = self.claim_one(store, "r")
        assert claim is not None
        assert claim.run.signals_read == 1
        Holder(store, claim.run).write()
        assert get(store, "r").signals_read == 1

    def test_a_signal_that_is_there_already_is_not_refused(self, store: Store) -> None:
        started(store, "r")
        commit(store, Send(Signal("r", "x", id="1")))
        assert commit(store, Send(Signal("r", "x", id="1"), room=1)).verdict is Verdict.EXISTS

    def test_a_full_run_refuses_the_change_that_sends_to_it(self, store: Store) -> None:
        writer = started(store, "r")
        commit(store, Create(queued("s")))
        commit(store, Send(Signal("s", "x")))
        answer = commit(store, writer.change(sends=[Send(Signal("s", "x"), room=1)]))
        assert (answer.verdict, answer.about) == (Verdict.FULL, "s")
        assert get(store, "r").seq == 1

    # -- optional signals ----------------------------------------------------------------------------------------------

    def test_an_optional_signal_to_nobody_is_left_out(self, store: Store) -> None:
        writer = started(store, "r")
        ended = started(store, "ended")
        ended.write(status=Status.CANCELLED, release=True)
        commit(store, Create(queued("s")))
        sends = [Send(Signal(name, "x"), optional=True) for name in ("nobody", "s", "ended")]
        assert writer.write(sends=sends).verdict is Verdict.DONE
        assert [signal.name for signal in store.list_signals("s")] == ["x"]
        assert store.list_signals("ended") == []
        assert store.get_run("nobody") is None
        assert get(store, "r").seq == 2

    def test_one_that_is_not_optional_still_refuses_the_change(self, store: Store) -> None:
        writer = started(store, "r")
        commit(store, Create(queued("s")))
        sends = [Send(Signal("s", "x")), Send(Signal("nobody", "x"), optional=True), Send(Signal("nobody", "y"))]
        assert commit(store, writer.change(sends=sends)).verdict is Verdict.NOT_FOUND
        assert store.list_signals("s") == []
