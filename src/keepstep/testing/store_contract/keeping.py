"""What a store must keep: nothing of a removed run, and all of the others, also for those who come later."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from ...model import Kind, RunQuery, Signal, Status, WorkerInfo
from ...ports import Create, OptionalStore, Rekey, Send, Store, Verdict, instant, optional
from ...records.record import unseal
from .ground import (
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
    watch,
)


class Keeping(Ground):
    """Removing, moving, mending and keys, coming back."""

    # -- removing ----------------------------------------------------------------------------------------------------

    def test_a_removed_run_leaves_nothing(self, store: Store) -> None:
        started(store, "r").write(status=Status.COMPLETED, release=True)
        parked(store, "q", wakes=("x",))
        commit(store, Send(Signal("q", "x", id="i")))
        assert store.delete_runs(["r", "q", "q", "nobody"]) == 2
        for name in ("r", "q"):
            assert (store.get_run(name), store.list_checkpoints(name), store.list_signals(name)) == (None, [], [])
        assert store.list_runs(RunQuery()).runs == ()
        assert ids(self.claim(store)) == []

    def test_a_leased_run_is_not_removed(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        commit(store, Create(queued("free")))
        before = get(store, "r")
        assert store.delete_runs(["r", "free"]) == 1
        assert get(store, "r") == before
        clock.advance(store.lease_seconds * 2)
        assert store.delete_runs(["r"]) == 0

    def test_with_finished_only_ended_runs_are_removed(self, store: Store) -> None:
        endings = (Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.SET_ASIDE)
        for ending in endings:
            started(store, ending.value).write(status=ending, release=True)
        commit(store, Create(queued("free")))
        parked(store, "parked", wakes=("x",))
        started(store, "leased")
        names = [*endings, "free", "parked", "leased"]
        assert store.delete_runs(names, finished=True) == 3
        assert {run.id for run in store.list_runs(RunQuery()).runs} == {"set aside", "free", "parked", "leased"}

    def test_a_run_that_goes_on_again_is_no_longer_removed_as_finished(self, store: Store) -> None:
        started(store, "r").write(status=Status.FAILED, release=True)
        claim = self.claim_one(store, "r", "w1", Status.FAILED)
        assert claim is not None
        Holder(store, claim.run).write(status=Status.QUEUED, release=True)
        assert store.delete_runs(["r"], finished=True) == 0
        assert get(store, "r").seq == 3

    def test_a_scrubbed_run_is_gone_and_the_others_are_as_they_were(self, store: Store) -> None:
        writer = started(store, "r", input=b'"a secret"')
        commit(store, Send(Signal("r", "x", b'"another"')))
        writer.write(status=Status.COMPLETED, release=True)
        started(store, "s").write()
        before = everything(store)["s"]
        assert store.delete_runs(["r"], finished=True, scrub=True) == 1
        assert everything(store) == {"s": before}

    def test_scrubbing_a_run_that_is_not_there_removes_nothing(self, store: Store) -> None:
        started(store, "s").write()
        assert store.delete_runs(["r"], finished=True, scrub=True) == 0
        assert set(everything(store)) == {"s"}

    def test_a_rewrite_changes_no_run(self, store: Store) -> None:
        """Only a store that may raise `EraseUnfinished` has one."""
        rewrite = optional(store, OptionalStore.rewrite)
        if rewrite is None:
            return
        started(store, "r").write(status=Status.COMPLETED, release=True)
        started(store, "s").write()
        assert store.delete_runs(["r"], finished=True, scrub=True) == 1
        before = everything(store)
        assert rewrite() == 0
        assert everything(store) == before

    def test_an_id_may_be_used_again_after_removal(self, store: Store) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "x", id="i")))
        writer.write(status=Status.COMPLETED, release=True)
        store.delete_runs(["r"])
        started(store, "r", input=b"2")
        assert commit(store, Send(Signal("r", "x", id="i"))).seq == 1
        assert (get(store, "r").seq, get(store, "r").input) == (1, b"2")
        assert len(store.list_checkpoints("r")) == 1

    def test_many_runs_are_removed(self, store: Store) -> None:
        store.commit([Create(queued(f"r{n}")) for n in range(250)])
        assert store.delete_runs([f"r{n}" for n in range(245)]) == 245
        assert len(store.list_runs(RunQuery()).runs) == 5

    # -- moving, mending, and keys -----------------------------------------------------------------------------------

    def test_a_run_that_comes_from_elsewhere_brings_its_signals(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r", tags={"a": "b"})
        commit(store, Send(Signal("r", "x", b'{"a":1}', id="i")))
        commit(store, Send(Signal("r", "y")))
        writer.write(record("r", Kind.RUN_FINISHED, b"7"), status=Status.COMPLETED, release=True)
        before = everything(store)
        run, rows, signals = get(store, "r"), store.list_checkpoints("r"), store.list_signals("r")
        store.delete_runs(["r"])
        assert commit(store, Create(run, rows, signals)).verdict is Verdict.DONE
        assert everything(store) == before
        assert commit(store, Send(Signal("r", "x", id="i"))).verdict is Verdict.EXISTS
        assert commit(store, Send(Signal("r", "z"))).verdict is Verdict.FINISHED

    def test_signals_that_come_along_are_counted_on(self, store: Store) -> None:
        commit(store, Create(queued("a")))
        commit(store, Send(Signal("a", "x")))
        run, signals = get(store, "a"), store.list_signals("a")
        store.delete_runs(["a"])
        commit(store, Create(run, (), signals))
        assert commit(store, Send(Signal("a", "y"))).seq == 2
        assert [signal.name for signal in store.list_signals("a")] == ["x", "y"]

    def test_a_run_may_not_come_without_the_signals_that_it_counts(self, store: Store) -> None:
        with pytest.raises(ValueError, match="must bring the 2 signals"):
            commit(store, Create(queued("r", signals=2)))
        assert store.get_run("r") is None

    def test_a_signal_has_a_checksum_over_all_of_it(self, store: Store) -> None:
        commit(store, Create(queued("r")))
        for signal in (Signal("r", "x"), Signal("r", "x"), Signal("r", "x", b"2"), Signal("r", "x", id="1")):
            commit(store, Send(signal))
        sums = [signal.checksum for signal in store.list_signals("r")]
        assert len(set(sums)) == 4
        assert all(len(checksum) == 64 for checksum in sums)

    def test_a_repair_puts_a_run_in_place_of_another(self, store: Store) -> None:
        writer = started(store, "r")
        writer.write()
        commit(store, Send(Signal("r", "x")))
        writer.write(status=Status.SET_ASIDE, release=True)
        rows = store.list_checkpoints("r")[:1]
        ((_, checksum),) = unseal(rows, "r", previous="")
        run = replace(get(store, "r"), seq=1, checksum=checksum, signals=0, error=None)
        assert commit(store, Create(run, rows, over=run.epoch + 1)).verdict is Verdict.FENCED
        assert get(store, "r").seq == 3
        assert commit(store, Create(run, rows, over=run.epoch, received=0)).verdict is Verdict.FENCED
        assert get(store, "r").seq == 3
        answer = commit(store, Create(run, rows, over=run.epoch, received=1))
        assert (answer.verdict, answer.seq) == (Verdict.DONE, 1)
        assert get(store, "r") == run
        assert (store.list_checkpoints("r"), store.list_signals("r")) == (rows, [])

    def test_a_leased_run_is_replaced_by_nobody(self, store: Store) -> None:
        started(store, "r").write()
        before = everything(store)
        run = replace(queued("r"), seq=0)
        assert commit(store, Create(run, over=1)).verdict is Verdict.FENCED
        assert everything(store) == before

    def test_a_replacement_of_nothing_is_a_creation(self, store: Store) -> None:
        assert commit(store, Create(queued("r"), over=4)).verdict is Verdict.DONE
        assert get(store, "r").status is Status.QUEUED

    def test_a_data_key_is_kept_and_exchanged_even_under_a_lease(self, store: Store) -> None:
        writer = started(store, "r", data_key="k1:abc", input=b'"long"')
        assert get(store, "r").data_key == "k1:abc"
        assert store.list_runs(RunQuery()).runs[0].data_key == "k1:abc"
        assert commit(store, Rekey("r", "k1:other", "k2:def")).verdict is Verdict.FENCED
        assert commit(store, Rekey("nobody", "", "k2:def")).verdict is Verdict.NOT_FOUND
        assert commit(store, Rekey("r", "k1:abc", "k2:def")).verdict is Verdict.DONE
        run = get(store, "r")
        assert (run.data_key, run.input, run.epoch, run.seq) == ("k2:def", b'"long"', 1, 1)
        assert writer.write().verdict is Verdict.DONE

    def test_a_sound_store_has_no_flaws(self, store: Store) -> None:
        writer = started(store, "r")
        writer.write(record("r"), creates=[Create(queued("child"))])
        parked(store, "p", due_at=at(9), wakes=("x",))
        commit(store, Send(Signal("r", "x")))
        store.delete_runs(["child"])
        before = everything(store)
        assert store.check() == []
        assert store.check(mend=True) == []
        assert everything(store) == before

    def test_a_store_says_by_which_clock_it_judges(self, store: Store, clock: SteppedClock) -> None:
        assert abs(store.clock.now() - clock.now()) < 1
        clock.advance(100)
        assert abs(store.clock.now() - clock.now()) < 1

    # -- coming back -------------------------------------------------------------------------------------------------

    def test_everything_is_there_after_closing(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r", tags={"a": "b"})
        writer.write(record("r"), creates=[Create(queued("child"))])
        parked(store, "p", due_at=at(9), wakes=("x",))
        started(store, "done").write(record("done", Kind.RUN_FINISHED, b"7"), status=Status.COMPLETED, release=True)
        commit(store, Send(Signal("r", "x", b'{"a":1}', id="i")))
        before = everything(store)
        store.close()
        again = self.make_store(clock)
        try:
            assert everything(again) == before
            again.renew_leases(WorkerInfo("w3"))
            watch(again, clock, store.lease_seconds + 1, "w3")
            assert ids(self.claim(again, "w3")) == ["r", "child", "p"]
        finally:
            again.close()

    def test_a_second_store_sees_and_respects_the_first(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        other = self.make_store(clock)
        assert get(other, "r") == get(store, "r")
        assert commit(other, Create(queued("r"))).verdict is Verdict.EXISTS
        assert ids(self.claim(other, "w5")) == []
        writer.write(status=Status.QUEUED, release=True)
        assert ids(self.claim(other, "w5")) == ["r"]
        assert writer.write().verdict is Verdict.FENCED
        other.close()

    def test_closing_twice_is_allowed(self, store: Store) -> None:
        store.close()
        store.close()

    def test_instants_are_kept_to_the_microsecond(self, store: Store) -> None:
        for n, moment in enumerate([instant(1.000001), at(0.999999), datetime(2200, 12, 31, 23, 59, 59, 1, UTC)]):
            commit(store, Create(queued(f"r{n}", created_at=moment, due_at=moment, deadline_at=moment)))
            run = get(store, f"r{n}")
            assert (run.created_at, run.due_at, run.deadline_at) == (moment, moment, moment)
