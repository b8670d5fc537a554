"""What a store must do about leases: who is given a run, who loses one, and which workers live."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ...model import Status, WorkerInfo
from ...ports import ClaimRequest, Create, OptionalStore, Store, Verdict, optional
from .ground import ENDINGS, RELEASED, START, Ground, Holder, SteppedClock, at, commit, get, ids, queued, started, watch


class Claiming(Ground):
    """Claiming, taking over from the dead, workers."""

    # -- claiming ----------------------------------------------------------------------------------------------------

    def test_a_claim_gives_the_whole_run_and_its_lease(self, store: Store) -> None:
        commit(store, Create(queued("r", input=b"[1,2]", tags={"a": "b"}, traceparent="t")))
        (claim,) = self.claim(store).claims
        assert (claim.lease.run, claim.lease.worker, claim.lease.epoch) == ("r", "w1", 1)
        assert (claim.run.status, claim.run.worker, claim.run.epoch) == (Status.RUNNING, "w1", 1)
        assert (claim.run.input, claim.run.tags, claim.run.traceparent) == (b"[1,2]", {"a": "b"}, "t")
        assert (claim.taken_from, claim.run.recoveries) == (None, 0)
        assert claim.run == get(store, "r")

    def test_a_claim_tells_what_the_run_was_before_and_since_when(self, store: Store, clock: SteppedClock) -> None:
        commit(store, Create(queued("r")))
        clock.advance(1)
        (first,) = self.claim(store, "w1").claims
        assert (first.before, first.since, first.run.updated_at) == (Status.QUEUED, at(0), at(1))
        clock.advance(1)
        Holder(store, first.run).write(rows=[], checksum="", status=Status.WAITING, release=True, due_at=at(0))
        clock.advance(1)
        (second,) = self.claim(store, "w1").claims
        assert (second.before, second.since, second.taken_from) == (Status.WAITING, at(2), None)
        self.kill(store, clock, "w1")
        (third,) = self.claim(store, "w2").claims
        assert (third.before, third.since, third.taken_from) == (Status.RUNNING, at(3), "w1")

    def test_a_run_is_claimed_once(self, store: Store) -> None:
        commit(store, Create(queued("r")))
        assert ids(self.claim(store, "w1")) == ["r"]
        assert ids(self.claim(store, "w2")) == []
        assert ids(self.claim(store, "w1")) == []

    def test_the_epoch_grows_with_every_claim(self, store: Store) -> None:
        commit(store, Create(queued("r")))
        for epoch in (1, 2, 3):
            (claim,) = self.claim(store).claims
            assert claim.lease.epoch == epoch
            assert Holder(store, claim.run).write(status=Status.QUEUED, release=True).verdict is Verdict.DONE

    def test_an_old_epoch_of_the_same_worker_is_fenced(self, store: Store) -> None:
        writer = started(store, "r")
        late = writer.change()
        writer.write(rows=[], checksum="", status=Status.QUEUED, release=True)
        assert ids(self.claim(store, "w1")) == ["r"]
        assert commit(store, late).verdict is Verdict.FENCED

    def test_the_most_urgent_come_first_then_the_oldest(self, store: Store, clock: SteppedClock) -> None:
        runs = [("late", 0, 3), ("urgent-late", 5, 2), ("early", 0, 1), ("low", -1, 0), ("urgent-early", 5, 1)]
        store.commit([Create(queued(name, priority=priority, due_at=at(due))) for name, priority, due in runs])
        clock.advance(10)
        assert ids(self.claim(store, limit=3)) == ["urgent-early", "urgent-late", "early"]
        assert ids(self.claim(store, limit=3)) == ["late", "low"]

    def test_many_priorities_are_all_served(self, store: Store, clock: SteppedClock) -> None:
        later = {1: at(45), **{n: at(50) for n in range(3, 30, 2)}}
        store.commit([Create(queued(f"r{n:02}", priority=n, due_at=later.get(n, START))) for n in range(30)])
        assert ids(self.claim(store, limit=40)) == [f"r{n:02}" for n in range(28, -1, -2)]
        clock.advance(44)
        claims = self.claim(store, limit=40)
        assert (ids(claims), claims.next_due_at) == ([], at(45))
        clock.advance(6)
        assert ids(self.claim(store, limit=40)) == [f"r{n:02}" for n in range(29, -1, -2)]

    def test_a_long_queue_of_many_priorities_is_served_in_order(self, store: Store) -> None:
        runs = [queued(f"r{n:03}", priority=n, due_at=START if n % 3 else at(99)) for n in range(200)]
        store.commit([Create(run) for run in runs])
        expected = [run.id for run in reversed(runs) if run.due_at == START]
        served: list[str] = []
        while claimed := ids(self.claim(store, limit=20)):
            served += claimed
        assert served == expected

    def test_order_holds_across_workflows(self, store: Store) -> None:
        for n, (workflow, priority) in enumerate([("a", 0), ("b", 1), ("a", 1), ("b", 0)]):
            commit(store, Create(queued(f"r{n}", workflow=workflow, priority=priority, due_at=at(-n))))
        assert ids(self.claim(store, workflows=["a", "b"])) == ["r2", "r1", "r3", "r0"]

    def test_no_more_than_asked_for_are_claimed(self, store: Store) -> None:
        store.commit([Create(queued(f"r{n}")) for n in range(5)])
        assert len(self.claim(store, limit=0).claims) == 0
        assert len(self.claim(store, limit=2).claims) == 2
        assert len(self.claim(store, limit=9).claims) == 3

    def test_only_known_workflows_are_claimed(self, store: Store) -> None:
        store.commit([Create(queued("a", workflow="a")), Create(queued("b", workflow="b"))])
        assert ids(self.claim(store, workflows=[])) == []
        assert ids(self.claim(store, workflows=["c"])) == []
        assert ids(self.claim(store, workflows=["b"])) == ["b"]

    def test_foreign_runs_ahead_do_not_hide_known_ones(self, store: Store, clock: SteppedClock) -> None:
        store.commit([Create(queued(f"foreign{n}", workflow="a", priority=9, due_at=at(-9))) for n in range(20)])
        commit(store, Create(queued("mine", workflow="b")))
        assert ids(self.claim(store, limit=1, workflows=["b", "c"])) == ["mine"]

    def test_a_pinned_workflow_is_claimed_in_its_version_only(self, store: Store, clock: SteppedClock) -> None:
        for version in ("1", "2"):
            commit(store, Create(queued(f"a{version}", workflow="a", version=version)))
            commit(store, Create(queued(f"b{version}", workflow="b", version=version)))
            started(store, f"c{version}", workflow="a", version=version)
        later = queued("later", workflow="a", version="1", due_at=at(1), created_at=START)
        commit(store, Create(later))
        claims = self.claim(store, "w2", workflows=["a", "b"], versions={"a": "2"})
        assert sorted(ids(claims)) == ["a2", "b1", "b2"]
        assert claims.next_due_at is None
        self.kill(store, clock, "w1")
        assert ids(self.claim(store, "w2", workflows=["a", "b"], versions={"a": "2"})) == ["c2"]
        assert ids(self.claim(store, "w2", workflows=["a"])) == ["c1", "a1", "later"]

    def test_only_runs_of_the_named_queues_are_claimed(self, store: Store, clock: SteppedClock) -> None:
        for queue in ("mail", "files", "default"):
            commit(store, Create(queued(f"due in {queue}", queue=queue, key="k")))
            commit(store, Create(queued(f"later in {queue}", queue=queue, due_at=at(len(queue)))))
            started(store, f"{len(queue)} held in {queue}", queue=queue)
        claims = self.claim(store, "w2", queues=frozenset({"mail", "none"}))
        assert (ids(claims), claims.next_due_at) == (["due in mail"], at(4))
        assert (claims.claims[0].run.queue, claims.claims[0].run.key) == ("mail", "k")
        assert ids(self.claim(store, "w2", queues=frozenset())) == []
        self.kill(store, clock, "w1")
        two = frozenset({"mail", "files"})
        assert ids(self.claim(store, "w2", queues=two)) == [
            *("5 held in files", "4 held in mail", "due in files", "later in mail", "later in files")
        ]
        assert ids(self.claim(store, "w2", queues=two)) == []
        assert ids(self.claim(store, "w2")) == ["7 held in default", "due in default", "later in default"]

    def test_order_holds_across_queues(self, store: Store) -> None:
        for n, (queue, priority) in enumerate([("a", 0), ("b", 1), ("a", 1), ("b", 0)]):
            commit(store, Create(queued(f"r{n}", queue=queue, priority=priority, due_at=at(-n))))
        assert ids(self.claim(store, limit=3)) == ["r2", "r1", "r3"]
        assert ids(self.claim(store, queues=frozenset({"a", "b"}))) == ["r0"]

    def test_foreign_queues_ahead_do_not_hide_the_named_one(self, store: Store) -> None:
        store.commit([Create(queued(f"foreign{n}", queue="a", priority=9, due_at=at(-9))) for n in range(120)])
        commit(store, Create(queued("mine", queue="b")))
        assert ids(self.claim(store, limit=1, queues=frozenset({"b", "c"}))) == ["mine"]

    def test_a_person_claims_by_name_in_any_queue(self, store: Store) -> None:
        commit(store, Create(queued("r", queue="mail")))
        request = ClaimRequest("w1", run="r", statuses=frozenset(Status), queues=frozenset({"other"}))
        assert ids(store.claim_runs(request)) == ["r"]

    def test_a_claim_gives_the_next_due_time(self, store: Store, clock: SteppedClock) -> None:
        assert self.claim(store).next_due_at is None
        commit(store, Create(queued("soon", due_at=at(7.5))))
        commit(store, Create(queued("urgent", due_at=at(9), priority=3)))
        commit(store, Create(queued("sooner", due_at=at(5), workflow="foreign")))
        commit(store, Create(queued("now")))
        claims = self.claim(store)
        assert (ids(claims), claims.next_due_at) == (["now"], at(7.5))
        assert self.claim(store).next_due_at == at(7.5)
        clock.advance(8)
        assert self.claim(store).next_due_at == at(9)

    def test_ended_runs_are_never_claimed_by_themselves(self, store: Store, clock: SteppedClock) -> None:
        for end in ENDINGS:
            started(store, str(end)).write(status=end, release=True, due_at=at(0))
        clock.advance(store.lease_seconds * 3)
        assert ids(self.claim(store, "w2")) == []

    @pytest.mark.parametrize("status", RELEASED)
    def test_a_person_may_claim_a_free_run_by_name(self, store: Store, status: Status) -> None:
        started(store, "r").write(status=status, release=True, due_at=at(500))
        assert self.claim_one(store, "r", "w2", *(set(Status) - {status})) is None
        claim = self.claim_one(store, "r", "w2", status)
        if status is Status.CANCELLED:
            assert claim is None
            assert get(store, "r").status is Status.CANCELLED
            return
        assert claim is not None
        assert (claim.run.status, claim.run.worker, claim.run.epoch) == (Status.RUNNING, "w2", 2)
        assert (claim.taken_from, claim.run.recoveries, claim.run.due_at) == (None, 0, None)
        assert Holder(store, claim.run).write(status=Status.QUEUED, release=True).verdict is Verdict.DONE

    def test_a_leased_run_is_not_claimed_by_name(self, store: Store) -> None:
        started(store, "r")
        assert self.claim_one(store, "r", "w2") is None
        assert self.claim_one(store, "r", "w1") is None
        assert self.claim_one(store, "nobody", "w2") is None

    # -- taking over from the dead -----------------------------------------------------------------------------------

    def test_the_run_of_a_dead_worker_is_taken_over(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        late = writer.change()
        self.kill(store, clock, "w1")
        (claim,) = self.claim(store, "w2").claims
        assert (claim.taken_from, claim.lease.epoch) == ("w1", 2)
        assert (claim.run.status, claim.run.worker, claim.run.recoveries) == (Status.RECOVERING, "w2", 1)
        assert commit(store, late).verdict is Verdict.FENCED
        assert store.renew_leases(WorkerInfo("w1")) is False

    def test_the_run_of_a_living_worker_is_left_alone(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        for _ in range(4):
            clock.advance(store.lease_seconds - 1)
            assert store.renew_leases(WorkerInfo("w1"))
            assert store.renew_leases(WorkerInfo("w2"))
            assert ids(self.claim(store, "w2")) == []
        assert writer.write().verdict is Verdict.DONE

    def test_a_lease_lasts_as_long_as_it_says(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        watch(store, clock, store.lease_seconds - 0.001, "w2")
        assert ids(self.claim(store, "w2")) == []
        clock.advance(0.002)
        assert ids(self.claim(store, "w2")) == ["r"]

    def test_a_worker_that_was_silent_itself_marks_nobody_dead(self, store: Store, clock: SteppedClock) -> None:
        """After an outage that was longer than a lease, whoever comes back first must not take the others' runs."""
        started(store, "r")
        watch(store, clock, store.lease_seconds * 2, "w1", "w2")
        clock.advance(store.lease_seconds * 2)
        assert ids(self.claim(store, "w2")) == []
        assert store.renew_leases(WorkerInfo("w2"))
        assert ids(self.claim(store, "w2")) == []
        assert self.claim_one(store, "r", "w2") is None
        watch(store, clock, store.lease_seconds - 0.001, "w2")
        assert ids(self.claim(store, "w2")) == []
        assert store.renew_leases(WorkerInfo("w1"))
        assert store.renew_leases(WorkerInfo("w2"))
        watch(store, clock, store.lease_seconds - 0.001, "w2")
        assert ids(self.claim(store, "w2")) == []
        clock.advance(0.002)
        assert ids(self.claim(store, "w2")) == ["r"]

    def test_a_new_worker_marks_nobody_dead_before_a_lease_has_passed(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        clock.advance(store.lease_seconds * 2)
        assert ids(self.claim(store, "w3")) == []
        watch(store, clock, store.lease_seconds - 0.001, "w3")
        assert ids(self.claim(store, "w3")) == []
        clock.advance(0.002)
        assert ids(self.claim(store, "w3")) == ["r"]

    def test_a_worker_is_judged_by_its_own_lease(self, store: Store, clock: SteppedClock) -> None:
        lease = store.lease_seconds
        other = self.make_store_with_lease(clock, lease * 4)
        if other is None:
            pytest.skip("all workers of this store have the same lease")
        assert other.renew_leases(WorkerInfo("patient"))
        started(other, "r", "patient")
        assert store.renew_leases(WorkerInfo("w2"))
        watch(store, clock, lease * 3.9, "w2")
        assert ids(self.claim(store, "w2")) == []
        assert [one.alive for one in store.list_workers() if one.id == "patient"] == [True]
        watch(store, clock, lease * 0.2, "w2")
        assert ids(self.claim(store, "w2")) == ["r"]
        other.close()

    def test_a_worker_that_was_late_but_not_given_up_may_go_on(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        clock.advance(store.lease_seconds * 2)
        assert store.renew_leases(WorkerInfo("w1"))
        assert store.renew_leases(WorkerInfo("w2"))
        assert ids(self.claim(store, "w2")) == []
        assert writer.write().verdict is Verdict.DONE

    def test_a_worker_does_not_take_over_from_itself(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        clock.advance(store.lease_seconds * 2)
        assert ids(self.claim(store, "w1")) == []

    def test_a_reboot_ends_every_lease(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        clock.boot_id = "boot-2"
        assert store.renew_leases(WorkerInfo("w3"))
        assert ids(self.claim(store, "w3")) == ["r"]

    def test_the_wall_clock_ends_no_lease(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        real = clock.now

        def tomorrow() -> float:
            return real() + 86_400

        clock.now = tomorrow  # type: ignore[method-assign]
        assert ids(self.claim(store, "w2")) == []

    def test_a_worker_given_up_for_dead_stays_so(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        self.kill(store, clock, "w1")
        self.claim(store, "w2")
        commit(store, Create(queued("new")))
        for _ in range(2):
            assert store.renew_leases(WorkerInfo("w1")) is False
            assert ids(self.claim(store, "w1")) == []

    def test_a_lease_of_nobody_is_free(self, store: Store) -> None:
        started(store, "r", "never enrolled")
        (claim,) = self.claim(store, "w2").claims
        assert claim.taken_from == "never enrolled"

    def test_a_lease_of_someone_without_a_name_is_free(self, store: Store) -> None:
        """No worker is called so: only damage makes such a lease, and nobody would ever give it back."""
        started(store, "r", "")
        assert ids(self.claim(store)) == ["r"]

    def test_crashes_without_progress_are_counted(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r", "w0")
        for count in (1, 2, 3):
            worker = f"w{count + 2}"
            store.renew_leases(WorkerInfo(worker))
            if count > 1:
                watch(store, clock, store.lease_seconds + 1, worker)
            (claim,) = self.claim(store, worker).claims
            assert (claim.run.recoveries, claim.run.status) == (count, Status.RECOVERING)
        writer = Holder(store, claim.run)
        writer.write(progress=False)
        assert (get(store, "r").recoveries, get(store, "r").status) == (3, Status.RECOVERING)
        writer.write(rows=[], checksum="")
        assert (get(store, "r").recoveries, get(store, "r").status) == (3, Status.RECOVERING)
        writer.write()
        assert (get(store, "r").recoveries, get(store, "r").status) == (0, Status.RUNNING)

    def test_waking_and_handing_back_are_not_crashes(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r", "w0")
        (claim,) = self.claim(store, "w1").claims
        assert claim.run.recoveries == 1
        Holder(store, claim.run).write(rows=[], checksum="", status=Status.WAITING, release=True, due_at=at(0))
        (claim,) = self.claim(store, "w1").claims
        assert (claim.run.recoveries, claim.run.status) == (1, Status.RUNNING)
        Holder(store, claim.run).write(rows=[], checksum="", status=Status.QUEUED, release=True)
        (claim,) = self.claim(store, "w2").claims
        assert (claim.run.recoveries, claim.run.status) == (1, Status.RUNNING)
        Holder(store, claim.run).write()
        assert get(store, "r").recoveries == 0

    def test_a_person_takes_a_run_from_a_dead_owner(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        self.kill(store, clock, "w1")
        claim = self.claim_one(store, "r", "w2", Status.RUNNING)
        assert claim is not None
        assert (claim.taken_from, claim.run.status, claim.run.recoveries) == ("w1", Status.RECOVERING, 1)

    def test_runs_of_dead_workers_come_before_new_ones(self, store: Store, clock: SteppedClock) -> None:
        started(store, "old")
        commit(store, Create(queued("new", priority=99)))
        self.kill(store, clock, "w1")
        assert ids(self.claim(store, "w2", limit=1)) == ["old"]
        assert ids(self.claim(store, "w2", limit=1)) == ["new"]

    def test_every_run_of_the_dead_is_reached_page_by_page(self, store: Store, clock: SteppedClock) -> None:
        for n in range(25):
            started(store, f"r{n:02}", f"dead{n % 2}", workflow="known" if n % 5 == 4 else "foreign")
        taken: list[str] = []
        while page := ids(self.claim(store, "w2", limit=2, workflows=["known"])):
            assert len(page) <= 2
            taken += page
        assert sorted(taken) == ["r04", "r09", "r14", "r19", "r24"]

    def test_runs_of_the_dead_wait_for_those_who_know_them(self, store: Store, clock: SteppedClock) -> None:
        started(store, "mine", workflow="a")
        started(store, "foreign", workflow="b")
        before = get(store, "foreign")
        self.kill(store, clock, "w1")
        assert ids(self.claim(store, "w2", workflows=["a"])) == ["mine"]
        assert get(store, "foreign") == before
        (claim,) = self.claim(store, "w2", workflows=["b"]).claims
        assert (claim.run.id, claim.taken_from) == ("foreign", "w1")

    # -- workers -----------------------------------------------------------------------------------------------------

    def test_workers_are_listed_as_their_heartbeats_show_them(self, store: Store, clock: SteppedClock) -> None:
        info = WorkerInfo("w1", "host", 42, workflows=("a", "b"), progress={"r": b'"half"'})
        started(store, "r")
        clock.advance(3)
        store.renew_leases(info)
        one, two = store.list_workers()
        assert one == replace(info, started_at=START, renewed_at=at(3), leases=1)
        assert (two.id, two.leases, two.alive) == ("w2", 0, True)

    def test_a_worker_says_when_it_started(self, store: Store) -> None:
        store.renew_leases(WorkerInfo("w3", started_at=at(-5)))
        assert store.list_workers()[-1].started_at == at(-5)

    def test_a_dead_worker_is_shown_so_while_it_owns_something(self, store: Store, clock: SteppedClock) -> None:
        started(store, "a", workflow="a")
        self.kill(store, clock, "w1")
        assert [(w.id, w.alive, w.leases) for w in store.list_workers()] == [("w1", False, 1), ("w2", True, 0)]
        self.claim(store, "w2", workflows=["b"])
        assert [(w.id, w.alive, w.leases) for w in store.list_workers()] == [("w1", False, 1), ("w2", True, 0)]
        self.claim(store, "w2", workflows=["a"])
        assert [(w.id, w.alive, w.leases) for w in store.list_workers()] == [("w2", True, 1)]

    def test_a_dead_worker_is_remembered_with_the_progress_of_its_runs(self, store: Store, clock: SteppedClock) -> None:
        started(store, "a", workflow="a")
        store.renew_leases(WorkerInfo("w1", progress={"a": b'"half"'}))
        self.kill(store, clock, "w1")
        assert ids(self.claim(store, "w2", workflows=["a"])) == ["a"]
        assert not store.renew_leases(WorkerInfo("w1", progress={"a": b'"late"'}))
        left = {one.id: (one.alive, one.leases, one.progress) for one in store.list_workers(gone=True)}
        assert left == {"w1": (False, 0, {"a": b'"half"'}), "w2": (True, 1, {})}

    def test_a_worker_that_left_is_gone(self, store: Store) -> None:
        assert store.renew_leases(WorkerInfo("w1"), leaving=True)
        assert [worker.id for worker in store.list_workers()] == ["w2"]

    def test_a_worker_is_marked_as_draining_until_it_leaves(self, store: Store, clock: SteppedClock) -> None:
        drain, is_draining = optional(store, OptionalStore.drain_worker), optional(store, OptionalStore.is_draining)
        if drain is None or is_draining is None:
            return
        assert [one.drain_at for one in store.list_workers()] == [None, None]
        assert not is_draining("w1")
        assert drain("w1")
        marked = store.list_workers()[0].drain_at
        assert marked is not None
        clock.advance(3)
        assert drain("w1")
        assert store.renew_leases(WorkerInfo("w1"))
        assert is_draining("w1")
        assert not is_draining("w2")
        assert [(one.drain_at, one.claims) for one in store.list_workers()] == [(marked, False), (None, True)]
        assert store.renew_leases(WorkerInfo("w1"), leaving=True)
        assert not drain("w1")
        assert not is_draining("w1")
        assert not drain("nobody")

    def test_a_claim_enrols_the_worker(self, store: Store) -> None:
        commit(store, Create(queued("r")))
        assert ids(self.claim(store, "w9")) == ["r"]
        assert "w9" in [worker.id for worker in store.list_workers()]
        assert ids(self.claim(store, "w2")) == []
