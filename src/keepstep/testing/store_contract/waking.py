"""What a store must do for runs that wait: their wake-ups, signals, children and messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ...model import Kind, Signal, Status
from ...model.series import SERIES
from ...ports import Create, Send, Store, Verdict
from ...records.record import seal
from ...stores.rules import seal_signal
from .ground import (
    ENDINGS,
    Ground,
    Holder,
    SteppedClock,
    at,
    commit,
    everything,
    get,
    ids,
    parked,
    queued,
    record,
    started,
)


class Waking(Ground):
    """Letting go and waking, signals, children and messages, transactional steps."""

    # -- letting go and waking ---------------------------------------------------------------------------------------

    def test_a_parked_run_holds_its_wake_ups(self, store: Store) -> None:
        parked(store, "r", due_at=at(60), wakes=("a", "b"))
        run = get(store, "r")
        assert (run.status, run.worker, run.due_at, run.wakes) == (Status.WAITING, None, at(60), ("a", "b"))

    def test_a_run_handed_back_is_due_at_once(self, store: Store, clock: SteppedClock) -> None:
        clock.advance(3)
        started(store, "r").write(status=Status.QUEUED, release=True)
        assert get(store, "r").due_at == at(3)
        (claim,) = self.claim(store, "w2").claims
        assert (claim.run.status, claim.run.epoch, claim.run.recoveries, claim.taken_from) == (
            Status.RUNNING,
            2,
            0,
            None,
        )

    def test_a_parked_run_is_claimed_when_its_time_has_come(self, store: Store, clock: SteppedClock) -> None:
        parked(store, "r", due_at=at(60), wakes=("a",))
        assert ids(self.claim(store)) == []
        clock.advance(60)
        (claim,) = self.claim(store).claims
        assert (claim.run.status, claim.run.due_at, claim.run.wakes) == (Status.RUNNING, None, ())
        assert claim.run == get(store, "r")

    def test_only_a_signal_that_it_waits_for_wakes_a_parked_run(self, store: Store, clock: SteppedClock) -> None:
        parked(store, "r", due_at=at(1000), wakes=("approved", "ks:cancel"))
        for name in ("other", "approve", "approved "):
            assert commit(store, Send(Signal("r", name))).verdict is Verdict.DONE
        clock.advance(5)
        assert get(store, "r").due_at == at(1000)
        assert ids(self.claim(store)) == []
        commit(store, Send(Signal("r", "approved")))
        assert get(store, "r").due_at == at(5)
        assert ids(self.claim(store)) == ["r"]

    def test_a_signal_wakes_a_run_that_waits_for_no_time(self, store: Store) -> None:
        parked(store, "r", wakes=("go",))
        assert get(store, "r").due_at is None
        commit(store, Send(Signal("r", "go")))
        assert ids(self.claim(store)) == ["r"]

    def test_a_signal_never_makes_a_run_due_later(self, store: Store, clock: SteppedClock) -> None:
        parked(store, "r", due_at=at(1), wakes=("go",))
        clock.advance(10)
        commit(store, Send(Signal("r", "go")))
        assert get(store, "r").due_at == at(1)

    def test_a_signal_to_a_leased_run_changes_nothing_but_the_count(self, store: Store) -> None:
        started(store, "r")
        before = get(store, "r")
        commit(store, Send(Signal("r", "go")))
        assert get(store, "r") == replace(before, signals=1)

    def test_a_paused_run_wakes_by_its_signal(self, store: Store) -> None:
        started(store, "r").write(status=Status.PAUSED, release=True, wakes=("ks:resume",))
        assert ids(self.claim(store)) == []
        commit(store, Send(Signal("r", "ks:resume")))
        (claim,) = self.claim(store).claims
        assert claim.run.status is Status.RUNNING

    @pytest.mark.parametrize("new", [Status.WAITING, Status.COMPLETED])
    def test_parking_and_finishing_are_refused_when_signals_were_missed(self, store: Store, new: Status) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "go")))
        before = everything(store)
        assert writer.write(status=new, release=True, signals_seen=0).verdict is Verdict.MISSED
        assert everything(store) == before
        assert writer.write(status=new, release=True, signals_seen=1).verdict is Verdict.DONE

    def test_a_signal_in_the_same_batch_is_missed_or_wakes(self, store: Store) -> None:
        # Whichever comes first, the run is not left asleep with a signal that it waits for.
        a, b = started(store, "a"), started(store, "b")
        park = {"status": Status.WAITING, "release": True, "signals_seen": 0, "wakes": ("go",)}
        answers = store.commit([Send(Signal("a", "go")), a.change(**park), b.change(**park), Send(Signal("b", "go"))])
        assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.MISSED, Verdict.DONE, Verdict.DONE]
        assert ids(self.claim(store, "w2")) == ["b"]

    def test_a_run_that_signals_itself_while_it_parks_wakes(self, store: Store) -> None:
        writer = started(store, "r")
        answer = writer.write(
            status=Status.WAITING, release=True, signals_seen=0, wakes=("go",), sends=[Send(Signal("r", "go"))]
        )
        assert answer.verdict is Verdict.DONE
        assert ids(self.claim(store)) == ["r"]
        assert get(store, "r").signals == 1

    def test_a_run_that_signals_itself_while_it_ends_keeps_the_signal(self, store: Store) -> None:
        writer = started(store, "r")
        end = writer.change(record("r", Kind.RUN_FINISHED), status=Status.COMPLETED, sends=[Send(Signal("r", "late"))])
        assert commit(store, end).verdict is Verdict.DONE
        assert [signal.name for signal in store.list_signals("r")] == ["late"]
        assert get(store, "r").signals == 1

    # -- signals -----------------------------------------------------------------------------------------------------

    def test_signals_are_numbered_without_gaps_for_each_run(self, store: Store, clock: SteppedClock) -> None:
        started(store, "a")
        commit(store, Create(queued("b")))
        sent = [Signal(run, f"n{n}", b'{"n":%d}' % n, sender="me") for n in range(3) for run in ("a", "b")]
        clock.advance(2)
        answers = store.commit([Send(signal) for signal in sent])
        assert [answer.seq for answer in answers] == [1, 1, 2, 2, 3, 3]
        for run in ("a", "b"):
            mine = [signal for signal in sent if signal.run == run]
            expected = [seal_signal(signal, n, at(2)) for n, signal in enumerate(mine, 1)]
            assert store.list_signals(run) == expected
            assert get(store, run).signals == 3

    def test_a_signal_keeps_its_own_time(self, store: Store) -> None:
        started(store, "r")
        commit(store, Send(Signal("r", "go", sent_at=at(1.5))))
        assert store.list_signals("r")[0].sent_at == at(1.5)

    def test_two_signals_with_one_id_are_one(self, store: Store) -> None:
        started(store, "r")
        started(store, "q")
        commit(store, Send(Signal("r", "x")))
        assert commit(store, Send(Signal("r", "go", b"1", id="i"))).seq == 2
        again = commit(store, Send(Signal("r", "stop", b"2", id="i")))
        assert (again.verdict, again.seq) == (Verdict.EXISTS, 2)
        assert commit(store, Send(Signal("q", "go", b"1", id="i"))).verdict is Verdict.DONE
        assert [signal.payload for signal in store.list_signals("r")] == [b"true", b"1"]
        assert get(store, "r").signals == 2

    def test_signals_without_an_id_are_all_kept(self, store: Store) -> None:
        started(store, "r")
        answers = store.commit([Send(Signal("r", "go"))] * 3)
        assert [answer.seq for answer in answers] == [1, 2, 3]

    def test_a_repeated_signal_does_not_wake(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "go", id="i")))
        writer.write(status=Status.WAITING, release=True, signals_seen=1, wakes=("go",))
        commit(store, Send(Signal("r", "go", id="i")))
        assert ids(self.claim(store)) == []

    def test_a_signal_to_nobody_is_not_found(self, store: Store) -> None:
        answer = commit(store, Send(Signal("nobody", "go")))
        assert (answer.verdict, answer.about) == (Verdict.NOT_FOUND, "nobody")
        assert store.list_signals("nobody") == []

    @pytest.mark.parametrize("end", ENDINGS)
    def test_a_finished_run_takes_no_signal(self, store: Store, end: Status) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "early", id="i")))
        writer.write(status=end, release=True)
        answer = commit(store, Send(Signal("r", "late")))
        assert answer.verdict is (Verdict.FINISHED if end.finished else Verdict.DONE)
        repeated = commit(store, Send(Signal("r", "early", id="i")))
        assert (repeated.verdict, repeated.seq) == (Verdict.EXISTS, 1)

    def test_signals_are_paged(self, store: Store) -> None:
        started(store, "r")
        store.commit([Send(Signal("r", f"n{n}")) for n in range(1, 8)])
        assert [signal.seq for signal in store.list_signals("r", after=2, limit=3)] == [3, 4, 5]
        assert store.list_signals("r", after=7) == []

    # -- children and messages in the same commit ----------------------------------------------------------------------

    def test_children_and_messages_are_written_with_the_step(self, store: Store) -> None:
        parent, _ = started(store, "parent"), started(store, "other", "w2")
        answer = parent.write(
            creates=[Create(queued("child", parent="parent", parent_key="k"))],
            sends=[Send(Signal("other", "hello", id="k")), Send(Signal("child", "welcome"))],
        )
        assert answer.verdict is Verdict.DONE
        assert get(store, "child").parent == "parent"
        assert [signal.name for signal in store.list_signals("other")] == ["hello"]
        assert [signal.name for signal in store.list_signals("child")] == ["welcome"]

    def test_a_child_may_be_leased_at_birth(self, store: Store) -> None:
        parent = started(store, "parent")
        first, checksum = seal(record("child", Kind.RUN_STARTED), 1, "")
        child = queued("child", status=Status.RUNNING, worker="w1", epoch=1, seq=1, checksum=checksum, due_at=None)
        assert parent.write(creates=[Create(child, [first])]).verdict is Verdict.DONE
        assert Holder(store, child).write().verdict is Verdict.DONE
        assert [row.seq for row in store.list_checkpoints("child")] == [1, 2]

    def test_a_child_that_is_there_already_is_left_as_it_is(self, store: Store) -> None:
        parent = started(store, "parent")
        child = Create(queued("child", parent="parent", input=b"1"))
        assert parent.write(creates=[child]).verdict is Verdict.DONE
        self.claim(store, "w2")
        before = get(store, "child")
        assert parent.write(creates=[child]).verdict is Verdict.DONE
        assert get(store, "child") == before

    @pytest.mark.parametrize(
        "other",
        [{"workflow": "other"}, {"input": b"2"}, {"parent": None}, {"parent_key": "k#2"}, {"created_by": "someone"}],
    )
    def test_another_run_under_the_childs_id_is_a_conflict(self, store: Store, other: dict[str, Any]) -> None:
        parent = started(store, "parent")
        child = queued("child", parent="parent", parent_key="k#1", created_by="run parent", input=b"1")
        commit(store, Create(replace(child, **other)))
        before = everything(store)
        answer = parent.write(creates=[Create(queued("first", parent="parent")), Create(child)])
        assert (answer.verdict, answer.about) == (Verdict.CONFLICT, "child")
        assert everything(store) == before

    def test_a_run_of_another_series_under_the_successors_id_is_a_conflict(self, store: Store) -> None:
        parent = started(store, "r")
        successor = queued("r~2", created_by="run r", tags={SERIES: "r"}, seed="s")
        commit(store, Create(replace(successor, seed="other")))
        answer = parent.write(creates=[Create(successor)])
        assert (answer.verdict, answer.about) == (Verdict.CONFLICT, "r~2")

    def test_a_message_that_cannot_be_delivered_refuses_the_whole_change(self, store: Store) -> None:
        parent = started(store, "parent")
        started(store, "done").write(status=Status.COMPLETED, release=True)
        started(store, "open")
        before = everything(store)
        for target, verdict in (("nobody", Verdict.NOT_FOUND), ("done", Verdict.FINISHED)):
            answer = parent.write(
                creates=[Create(queued("child", parent="parent"))],
                sends=[Send(Signal("open", "x")), Send(Signal(target, "x"))],
                status=Status.COMPLETED,
                release=True,
            )
            assert (answer.verdict, answer.about) == (verdict, target)
            assert everything(store) == before
        assert commit(store, Send(Signal("open", "y"))).seq == 1

    def test_a_refused_change_does_not_spoil_its_batch(self, store: Store) -> None:
        a, b, c = (started(store, name) for name in "abc")
        child = Create(queued("child", parent="b"))
        answers = store.commit([a.change(), b.change(creates=[child], sends=[Send(Signal("nobody", "x"))]), c.change()])
        assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.NOT_FOUND, Verdict.DONE]
        assert store.get_run("child") is None
        assert [len(store.list_checkpoints(name)) for name in "abc"] == [2, 1, 2]
        assert b.write().verdict is Verdict.DONE

    def test_a_refused_change_leaves_nothing_of_a_child_that_was_leased_at_birth(self, store: Store) -> None:
        parent = started(store, "parent")
        first, checksum = seal(record("child", Kind.RUN_STARTED), 1, "")
        child = queued("child", status=Status.RUNNING, worker="w1", epoch=1, seq=1, checksum=checksum, due_at=None)
        refused = parent.write(creates=[Create(child, [first])], sends=[Send(Signal("nobody", "x"))])
        assert refused.verdict is Verdict.NOT_FOUND
        assert store.list_checkpoints("child") == []
        assert commit(store, Create(child, [first])).verdict is Verdict.DONE
        assert store.list_checkpoints("child") == [first]

    def test_a_repeated_message_is_delivered_once(self, store: Store) -> None:
        a, _ = started(store, "a"), started(store, "b")
        for _ in range(2):
            assert a.write(sends=[Send(Signal("b", "x", id="i"))]).verdict is Verdict.DONE
        assert a.write(sends=[Send(Signal("b", "x", id="j"))] * 2).verdict is Verdict.DONE
        assert [signal.id for signal in store.list_signals("b")] == ["i", "j"]

    def test_a_message_from_a_step_wakes_a_parked_run(self, store: Store) -> None:
        parked(store, "parent", wakes=("ks:child:k",))
        child = started(store, "child")
        child.write(status=Status.COMPLETED, release=True, sends=[Send(Signal("parent", "ks:child:k", id="k"))])
        assert ids(self.claim(store)) == ["parent"]

    def test_a_fenced_change_writes_no_children_and_no_messages(self, store: Store) -> None:
        a, _ = started(store, "a"), started(store, "b")
        before = everything(store)
        a.epoch = 7
        assert a.write(creates=[Create(queued("c"))], sends=[Send(Signal("b", "x"))]).verdict is Verdict.FENCED
        assert everything(store) == before

    # -- transactional steps -----------------------------------------------------------------------------------------

    def test_a_function_within_the_commit_runs_only_where_the_store_can(self, store: Store) -> None:
        writer = started(store, "r")
        change = writer.change(rows=[], checksum="")
        rows, checksum = writer.sealed([record("r")])

        def within(_tx: Any) -> None:
            change.rows, change.checksum = rows, checksum

        change.within = within
        answer = commit(store, change)
        if store.transactional:
            assert answer.verdict is Verdict.DONE
            assert store.list_checkpoints("r", after=1) == rows
        else:
            assert answer.verdict is Verdict.FAILED
            assert answer.error is not None
            assert get(store, "r").seq == 1

    def test_a_function_that_fails_refuses_its_change_only(self, store: Store) -> None:
        a, b = started(store, "a"), started(store, "b")
        error = RuntimeError("no")

        def within(_tx: Any) -> None:
            raise error

        refused, done = store.commit([a.change(within=within), b.change()])
        assert (refused.verdict, done.verdict) == (Verdict.FAILED, Verdict.DONE)
        assert refused.error is error or not store.transactional
        assert get(store, "a").seq == 1

    def test_rows_that_a_function_fills_in_must_extend_the_head(self, store: Store) -> None:
        writer = started(store, "r")
        change = writer.change(rows=[], checksum="")
        writer.seq += 1  # so that one is left out
        rows, checksum = writer.sealed([record("r")])

        def within(_tx: Any) -> None:
            change.rows, change.checksum = rows, checksum

        change.within = within
        assert commit(store, change).verdict is (Verdict.FENCED if store.transactional else Verdict.FAILED)
        assert get(store, "r").seq == 1
        assert [row.seq for row in store.list_checkpoints("r")] == [1]

    def test_a_function_is_not_called_without_the_lease(self, store: Store) -> None:
        called: list[Any] = []
        change = started(store, "r").change(within=called.append, epoch=5)
        assert commit(store, change).verdict is Verdict.FENCED
        assert called == []
