"""What a store must do when it is written to: new runs, longer histories, and their ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ...errors import CheckpointCorrupt
from ...model import MOVES, ErrorInfo, Kind, RunQuery, Signal, Status, WorkerInfo, may_move
from ...ports import Create, Row, Send, Store, Verdict
from ...records.record import Record, StoredError, unseal
from .ground import (
    ENDINGS,
    START,
    Ground,
    Holder,
    SteppedClock,
    at,
    commit,
    everything,
    get,
    ids,
    queued,
    record,
    started,
)


class Writing(Ground):
    """Creating, extending the history, status, and what a reader is shown of the end."""

    # -- creating ----------------------------------------------------------------------------------------------------

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url

    def test_a_run_is_kept_as_it_was_given(self, store: Store) -> None:
        given = queued(
            "r",
            version="7",
            fingerprint="f",
            input='{"text": "déjà vu 🙂", "n": [1, 2.5, null]}'.encode(),
            seed="s",
            parent="p",
            parent_key="k#1",
            origin="o",
            queue="slow",
            priority=-3,
            key="dedup",
            tags={"team": "a b", "it's": 'a "quoted" %_ value'},
            deadline_at=at(99.5),
            traceparent="00-ab-cd-01",
            created_at=at(0.000001),
            created_by="ann@host (pid 7)",
            due_at=at(1.234567),
            wakes=("one", "two words"),
        )
        answer = commit(store, Create(given))
        assert answer.verdict is Verdict.DONE
        stored = replace(given, updated_at=given.created_at)
        assert get(store, "r") == answer.run == stored

    def test_an_unknown_run_is_not_found(self, store: Store) -> None:
        assert store.get_run("nobody") is None
        assert store.list_checkpoints("nobody") == []
        assert store.list_signals("nobody") == []

    def test_an_existing_id_is_answered_and_never_changed(self, store: Store) -> None:
        commit(store, Create(queued("r", input=b"1", tags={"a": "b"})))
        before = everything(store)
        answer = commit(store, Create(queued("r", workflow="other", input=b"2", due_at=at(50))))
        assert answer.verdict is Verdict.EXISTS
        assert answer.run == get(store, "r")
        assert everything(store) == before

    def test_the_second_of_two_creates_in_one_batch_finds_the_first(self, store: Store) -> None:
        first, second = store.commit([Create(queued("r", input=b"1")), Create(queued("r", input=b"2"))])
        assert (first.verdict, second.verdict) == (Verdict.DONE, Verdict.EXISTS)
        assert second.run is not None
        assert second.run.input == b"1"

    def test_a_run_can_be_leased_at_birth(self, store: Store) -> None:
        writer = started(store, "r")
        run = get(store, "r")
        assert (run.status, run.worker, run.epoch, run.seq) == (Status.RUNNING, "w1", 1, 1)
        assert [row.seq for row in store.list_checkpoints("r")] == [1]
        assert ids(self.claim(store, "w2")) == []
        assert writer.write().verdict is Verdict.DONE

    def test_a_queued_run_without_a_time_is_due_at_once(self, store: Store) -> None:
        commit(store, Create(queued("r", due_at=None)))
        assert get(store, "r").due_at == START
        assert ids(self.claim(store)) == ["r"]

    def test_a_run_whose_rows_do_not_fit_is_an_error_and_nothing_is_written(self, store: Store) -> None:
        row = Row(2, Kind.STEP_COMPLETED, b"{}")
        for wrong in (Create(queued("r", seq=1), [row]), Create(queued("r", seq=1)), Create(queued("r"), [row])):
            with pytest.raises(ValueError, match="'r'"):
                store.commit([Create(queued("other")), wrong])
        with pytest.raises(ValueError, match="'r'"):
            store.commit([Create(queued("r", status=Status.RUNNING))])
        assert everything(store) == {}

    # -- extending the history ---------------------------------------------------------------------------------------

    def test_rows_come_back_as_they_were_given(self, store: Store) -> None:
        writer = started(store, "r")
        for n in range(3):
            assert writer.write(record("r", value=b'"%d"' % n), record("r", value=None)).verdict is Verdict.DONE
        large = b'"' + b"x" * 200_000 + b'"'
        assert writer.write(record("r", value=large)).verdict is Verdict.DONE
        rows = store.list_checkpoints("r")
        assert [row.seq for row in rows] == list(range(1, 9))
        assert rows[-1].body is not None
        checked = list(unseal(rows, "r", previous=""))
        assert checked[-1][0].value == msgspec.Raw(large)
        assert checked[-1][1] == get(store, "r").checksum == writer.checksum

    def test_any_bytes_come_back(self, store: Store) -> None:
        # A store that is encrypted keeps ciphertext.
        body = bytes(range(256))
        rows = [Row(2, "step completed", body, body), Row(3, "step completed", b"", None)]
        started(store, "r").write(rows=rows, checksum="x")
        assert store.list_checkpoints("r", after=1) == rows

    def test_an_answer_says_where_the_head_is_now(self, store: Store) -> None:
        writer = started(store, "r")
        assert writer.write(record("r"), record("r")).seq == 3
        run = get(store, "r")
        assert (run.seq, run.checksum) == (3, writer.checksum)

    def test_a_change_says_when_it_was_made(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        writer.write(at=at(5.25))
        assert get(store, "r").updated_at == at(5.25)
        clock.advance(9)
        writer.write()
        assert get(store, "r").updated_at == at(9)

    def test_a_change_without_rows_leaves_the_head(self, store: Store) -> None:
        writer = started(store, "r")
        before = get(store, "r")
        answer = writer.write(rows=[], checksum="")
        assert (answer.verdict, answer.seq) == (Verdict.DONE, 1)
        after = get(store, "r")
        assert (after.seq, after.checksum) == (before.seq, before.checksum)

    @pytest.mark.parametrize(
        "wrong", [{"epoch": 0}, {"epoch": 2}, {"worker": "w2"}, {"after": 0}, {"after": 2}, {"run": "nobody"}]
    )
    @pytest.mark.parametrize("status", [None, Status.COMPLETED])
    def test_a_write_without_the_lease_or_the_head_is_fenced(
        self, store: Store, wrong: dict[str, Any], status: Status | None
    ) -> None:
        change = started(store, "r").change(status=status)
        for name, value in wrong.items():
            setattr(change, name, value)
        if "after" in wrong:
            change.rows = [msgspec.structs.replace(row, seq=change.after + 1) for row in change.rows]
        before = everything(store)
        assert commit(store, change).verdict is Verdict.FENCED
        assert everything(store) == before

    def test_the_same_write_twice_is_fenced(self, store: Store) -> None:
        change = started(store, "r").change()
        assert [answer.verdict for answer in store.commit([change, change])] == [Verdict.DONE, Verdict.FENCED]
        assert commit(store, change).verdict is Verdict.FENCED
        assert get(store, "r").seq == 2

    def test_rows_with_a_gap_are_refused(self, store: Store) -> None:
        writer = started(store, "r")
        good = writer.change(record("r"), record("r"), record("r"))
        before = everything(store)
        for rows in (
            [good.rows[1]],
            [good.rows[0], good.rows[2]],
            good.rows[1:],
            [good.rows[1], good.rows[0]],
            [*good.rows, good.rows[2]],
        ):
            assert commit(store, msgspec.structs.replace(good, rows=rows)).verdict is Verdict.FENCED
        assert everything(store) == before

    def test_a_refused_change_leaves_the_others_committed(self, store: Store) -> None:
        a, b, c = (started(store, name) for name in "abc")
        stale = b.change(epoch=9)
        answers = store.commit([a.change(), stale, c.change(), Create(queued("a")), Send(Signal("nobody", "x"))])
        assert [answer.verdict for answer in answers] == [
            Verdict.DONE,
            Verdict.FENCED,
            Verdict.DONE,
            Verdict.EXISTS,
            Verdict.NOT_FOUND,
        ]
        assert [get(store, name).seq for name in "abc"] == [2, 1, 2]

    def test_changes_of_one_run_in_one_batch_build_on_each_other(self, store: Store) -> None:
        writer = started(store, "r")
        first = writer.change()
        writer.seq, writer.checksum = 2, first.checksum
        second = writer.change(status=Status.COMPLETED, release=True)
        writer.seq = 3
        third = writer.change()
        verdicts = [answer.verdict for answer in store.commit([first, second, third])]
        assert verdicts == [Verdict.DONE, Verdict.DONE, Verdict.FENCED]
        assert list(unseal(store.list_checkpoints("r"), "r", previous=""))

    def test_an_empty_batch_is_answered(self, store: Store) -> None:
        assert store.commit([]) == []

    def test_a_commit_that_may_not_wait_is_made_when_nobody_writes(self, store: Store) -> None:
        (answer,) = store.commit([started(store, "r").change()], wait=False)
        assert answer.verdict is Verdict.DONE

    # -- status ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("new", list(Status))
    @pytest.mark.parametrize("old", [Status.RUNNING, Status.RECOVERING])
    def test_only_the_moves_of_the_table_are_made(
        self, store: Store, clock: SteppedClock, old: Status, new: Status
    ) -> None:
        writer = started(store, "r")
        if old is Status.RECOVERING:
            self.kill(store, clock, "w1")
            (claim,) = self.claim(store, "w2").claims
            writer = Holder(store, claim.run)
        assert get(store, "r").status is old
        before = everything(store)
        answer = writer.write(status=new, release=not new.active)
        if may_move(old, new):
            assert answer.verdict is Verdict.DONE
            assert get(store, "r").status is new
        else:
            assert answer.verdict is Verdict.ILLEGAL
            assert everything(store) == before

    @pytest.mark.parametrize("held", [Status.WAITING, Status.PAUSED, Status.QUEUED])
    def test_a_run_that_is_held_without_running_must_run_before_it_ends(
        self, store: Store, clock: SteppedClock, held: Status
    ) -> None:
        writer = started(store, "r")
        assert writer.write(status=held).verdict is Verdict.DONE
        before = everything(store)
        for new in Status:
            if (held, new) not in MOVES and new is not held:
                assert writer.write(status=new, release=True).verdict is Verdict.ILLEGAL
        assert everything(store) == before
        self.kill(store, clock, "w1")
        (claim,) = self.claim(store, "w2").claims
        # Its owner died, but not while executing it.
        assert (claim.taken_from, claim.run.status, claim.run.recoveries) == ("w1", Status.RUNNING, 0)

    def test_a_running_run_is_not_released(self, store: Store) -> None:
        writer = started(store, "r")
        assert writer.write(release=True).verdict is Verdict.ILLEGAL
        assert writer.write(release=True, status=Status.RUNNING).verdict is Verdict.ILLEGAL
        assert get(store, "r").worker == "w1"

    @pytest.mark.parametrize("end", ENDINGS)
    @pytest.mark.parametrize("release", [True, False])
    def test_an_ended_run_has_no_owner_and_no_wake_up(self, store: Store, end: Status, release: bool) -> None:
        writer = started(store, "r")
        assert writer.write(status=end, release=release, due_at=at(1), wakes=("x",)).verdict is Verdict.DONE
        run = get(store, "r")
        assert (run.status, run.worker, run.due_at, run.wakes) == (end, None, None, ())
        assert writer.write().verdict is Verdict.FENCED
        assert ids(self.claim(store, "w2")) == []

    # -- what a reader is shown of the end ---------------------------------------------------------------------------

    def test_a_completed_run_shows_its_output(self, store: Store) -> None:
        writer = started(store, "r")
        assert get(store, "r").output is None
        final = record("r", Kind.RUN_FINISHED, b'{"answer":42}', data={"continued_as": "r2"})
        writer.write(record("r"), final, status=Status.COMPLETED, release=True)
        run = get(store, "r")
        assert (run.output, run.error, run.continued_as) == (b'{"answer":42}', None, "r2")

    def test_a_large_output_is_unpacked(self, store: Store) -> None:
        large = b'"' + b"y" * 300_000 + b'"'
        started(store, "r").write(record("r", Kind.RUN_FINISHED, large), status=Status.COMPLETED, release=True)
        assert get(store, "r").output == large

    @pytest.mark.parametrize("end", [Status.FAILED, Status.CANCELLED, Status.SET_ASIDE])
    def test_another_end_shows_its_error(self, store: Store, end: Status) -> None:
        kind = Kind.ERROR if end is Status.SET_ASIDE else Kind.RUN_FINISHED
        error = StoredError("ValueError", "no", "permanent", caused_by=(1,))
        outcome = "cancelled" if end is Status.CANCELLED else "failure"
        final = record("r", kind, None, outcome=outcome, error=error)
        started(store, "r").write(final, status=end, release=True)
        run = get(store, "r")
        assert run.output is None
        assert run.error == ErrorInfo("ValueError", "no", "permanent", caused_by=(1,))

    @pytest.mark.parametrize("end", [Status.COMPLETED, Status.FAILED, Status.CANCELLED])
    @pytest.mark.parametrize("outcome", ["success", "failure", "cancelled"])
    def test_an_end_that_is_not_what_its_record_says_is_damage(self, store: Store, end: Status, outcome: str) -> None:
        said = {"success": Status.COMPLETED, "failure": Status.FAILED, "cancelled": Status.CANCELLED}[outcome]
        started(store, "r").write(record("r", Kind.RUN_FINISHED, outcome=outcome), status=end, release=True)
        if end is said:
            assert get(store, "r").status is end
        else:
            with pytest.raises(CheckpointCorrupt, match="'r'"):
                store.get_run("r")
        assert len(store.list_runs(RunQuery()).runs) == 1

    def test_the_newest_end_counts_and_a_run_that_goes_on_has_none(self, store: Store) -> None:
        def failure(message: str) -> Record:
            return record("r", Kind.RUN_FINISHED, None, outcome="failure", error=StoredError("E", message))

        started(store, "r").write(failure("first"), status=Status.FAILED, release=True)
        claim = self.claim_one(store, "r")
        assert claim is not None
        writer = Holder(store, claim.run)
        assert get(store, "r").error is None
        writer.write(record("r"), failure("second"), status=Status.FAILED, release=True)
        error = get(store, "r").error
        assert error is not None
        assert error.message == "second"

    def test_progress_comes_from_the_heartbeat_of_the_owner(self, store: Store) -> None:
        started(store, "r")
        started(store, "q", "w2")
        assert get(store, "r").progress is None
        store.renew_leases(WorkerInfo("w1", progress={"r": b'{"done":3}', "q": b"9"}))
        assert get(store, "r").progress == b'{"done":3}'
        assert get(store, "q").progress is None
        store.renew_leases(WorkerInfo("w1"))
        assert get(store, "r").progress is None
