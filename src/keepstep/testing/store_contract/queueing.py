"""What a store must do about queues with limits: places, keys, turns, rates, deduplication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ...errors import RunConflict
from ...model import GateChange, Run, Status
from ...model.gate import MOST_CHANGES, QUEUE
from ...ports import ClaimRequest, Create, Store, Verdict
from .ground import RELEASED, START, Ground, Holder, SteppedClock, at, commit, get, ids, queued, started


def declare(store: Store, name: str = "mail", **limits: Any) -> None:
    """Declare a queue as a process does when it opens the store."""
    store.change_gate(QUEUE, name, GateChange(START, "test", "declare", limits))


def mail(run_id: str, key: str | None = None, **fields: Any) -> Run:
    """A run of the queue `mail` that is free and due."""
    return queued(run_id, queue="mail", key=key, **fields)


class Queueing(Ground):
    """Queues with limits."""

    def add(self, store: Store, *runs: Run) -> None:
        """Create runs."""
        assert all(answer.verdict is Verdict.DONE for answer in store.commit([Create(run) for run in runs]))

    # -- gates ---------------------------------------------------------------------------------------------------------

    def test_a_declared_queue_is_listed(self, store: Store) -> None:
        declare(store, concurrency=2, rate={"count": 1, "per": 2.0, "burst": 3})
        (gate,) = store.list_gates(QUEUE)
        assert (gate.name, gate.limits["concurrency"], gate.limits["rate"]["per"]) == ("mail", 2, 2.0)
        assert store.list_gates("service") == []

    def test_a_declaration_that_changes_nothing_is_not_recorded(self, store: Store) -> None:
        for _ in range(3):
            declare(store, concurrency=2)
        (gate,) = store.list_gates(QUEUE)
        assert len(gate.log) == 1

    def test_what_a_person_has_set_wins_until_it_is_reset(self, store: Store) -> None:
        declare(store, concurrency=2)
        store.change_gate(QUEUE, "mail", GateChange(at(1), "ann", "set", {"concurrency": 9}, "a rush"))
        declare(store, concurrency=3)
        (gate,) = store.list_gates(QUEUE)
        assert (gate.limits, gate.declared) == ({"concurrency": 9}, {"concurrency": 3})
        assert [(one.actor, one.act, one.reason) for one in gate.log][1] == ("ann", "set", "a rush")
        before = store.change_gate(QUEUE, "mail", GateChange(at(2), "ann", "reset"))
        assert before == gate
        assert store.list_gates(QUEUE)[0].limits == {"concurrency": 3}

    def test_the_last_changes_are_kept(self, store: Store) -> None:
        for n in range(MOST_CHANGES + 5):
            store.change_gate(QUEUE, "mail", GateChange(at(n), "ann", "set", {"concurrency": n}))
        log = store.list_gates(QUEUE)[0].log
        assert [one.at for one in log] == [at(n) for n in range(5, MOST_CHANGES + 5)]

    # -- places --------------------------------------------------------------------------------------------------------

    def test_no_more_runs_are_driven_than_there_are_places(self, store: Store) -> None:
        declare(store, concurrency=3)
        self.add(store, *(mail(f"r{n}") for n in range(9)))
        assert ids(self.claim(store, "w1", limit=2)) == ["r0", "r1"]
        assert ids(self.claim(store, "w2")) == ["r2"]
        assert ids(self.claim(store, "w1")) == ids(self.claim(store, "w2")) == []

    def test_runs_created_before_the_queue_was_declared_are_served(self, store: Store) -> None:
        self.add(store, mail("a"), mail("b", "k"), mail("c", "k"), mail("d"))
        declare(store, concurrency=3, per_key=1)
        assert sorted(ids(self.claim(store))) == ["a", "b", "d"]

    def test_runs_held_before_the_queue_was_declared_hold_places(self, store: Store) -> None:
        self.add(store, mail("a"), mail("b", "k"))
        assert ids(self.claim(store)) == ["a", "b"]
        declare(store, concurrency=3, per_key=1)
        self.add(store, mail("c"), mail("d"), mail("e", "k"))
        assert ids(self.claim(store)) == ["c"]

    def test_other_queues_are_not_limited(self, store: Store) -> None:
        declare(store, concurrency=0)
        self.add(store, mail("a"), queued("b"), queued("c", queue="other", key="k"))
        assert sorted(ids(self.claim(store))) == ["b", "c"]

    @pytest.mark.parametrize("status", RELEASED)
    def test_a_released_run_gives_its_place_back(self, store: Store, status: Status) -> None:
        declare(store, concurrency=1)
        self.add(store, mail("a"))
        (claim,) = self.claim(store).claims
        self.add(store, mail("b", due_at=at(-5)))
        assert ids(self.claim(store)) == []
        assert Holder(store, claim.run).write(status=status, release=True).verdict is Verdict.DONE
        assert ids(self.claim(store, "w2")) == ["b"]

    def test_a_parked_run_needs_a_place_to_go_on(self, store: Store, clock: SteppedClock) -> None:
        declare(store, concurrency=1)
        self.add(store, mail("a"))
        (claim,) = self.claim(store).claims
        Holder(store, claim.run).write(status=Status.WAITING, release=True, due_at=at(5))
        self.add(store, mail("b"))
        (second,) = self.claim(store).claims
        clock.advance(6)
        assert ids(self.claim(store)) == []
        Holder(store, second.run).write(status=Status.COMPLETED, release=True)
        assert ids(self.claim(store)) == ["a"]

    def test_a_dead_worker_holds_no_place_and_its_run_needs_one(self, store: Store, clock: SteppedClock) -> None:
        declare(store, concurrency=2)
        self.add(store, mail("a"), mail("b"), mail("c"))
        assert ids(self.claim(store, "w1", limit=1)) == ["a"]
        assert ids(self.claim(store, "w2", limit=1)) == ["b"]
        self.kill(store, clock, "w1")
        claims = self.claim(store, "w2")
        assert ids(claims) == ["a"]
        assert claims.claims[0].taken_from == "w1"
        assert ids(self.claim(store, "w2")) == []

    def test_orphans_that_a_worker_does_not_know_hide_no_others(self, store: Store, clock: SteppedClock) -> None:
        declare(store, concurrency=50)
        self.add(store, *(mail(f"foreign{n:02}", workflow="other", priority=1) for n in range(20)), mail("mine"))
        assert len(self.claim(store, "w1", limit=30, workflows=("other", "digest")).claims) == 21
        self.kill(store, clock, "w1")
        assert ids(self.claim(store, "w2", limit=5)) == ["mine"]

    def test_a_queue_that_was_empty_is_asked_again(self, store: Store) -> None:
        declare(store, concurrency=5, per_key=2)
        self.add(store, mail("late", "z"))
        assert ids(self.claim(store)) == ["late"]
        assert ids(self.claim(store)) == []
        self.add(store, mail("early", "a"), mail("again", "z"), mail("plain"))  # keys before and after the last turn
        assert sorted(ids(self.claim(store))) == ["again", "early", "plain"]

    def test_a_worker_has_places_of_its_own(self, store: Store) -> None:
        declare(store, per_worker=2)
        self.add(store, *(mail(f"r{n}") for n in range(5)))
        assert len(ids(self.claim(store, "w1"))) == 2
        assert len(ids(self.claim(store, "w2"))) == 2
        assert ids(self.claim(store, "w1")) == []

    def test_a_lower_limit_holds_as_places_fall_free(self, store: Store) -> None:
        declare(store, concurrency=3)
        self.add(store, *(mail(f"r{n}") for n in range(5)))
        claims = self.claim(store).claims
        declare(store, concurrency=1)
        for claim in claims[:2]:
            Holder(store, claim.run).write(status=Status.COMPLETED, release=True)
            assert ids(self.claim(store)) == []
        Holder(store, claims[2].run).write(status=Status.COMPLETED, release=True)
        assert ids(self.claim(store)) == ["r3"]

    def test_a_run_that_is_named_to_be_driven_needs_a_place(self, store: Store) -> None:
        declare(store, concurrency=1, per_key=1)
        self.add(store, mail("a", "k"), mail("b", "k"))
        (claim,) = self.claim(store).claims
        request = ClaimRequest("w2", run="b", statuses=frozenset({Status.QUEUED}), drives=True)
        assert ids(store.claim_runs(request)) == []
        Holder(store, claim.run).write(status=Status.QUEUED, release=True)
        assert ids(store.claim_runs(request)) == []
        assert ids(store.claim_runs(replace(request, run="a"))) == ["a"]

    def test_a_run_that_a_person_names_needs_no_place(self, store: Store) -> None:
        declare(store, concurrency=1, per_key=1)
        self.add(store, mail("a", "k"), mail("b", "k"))
        assert ids(self.claim(store)) == ["a"]
        claim = self.claim_one(store, "b", "w2")
        assert claim is not None
        Holder(store, claim.run).write(status=Status.QUEUED, release=True)
        assert ids(self.claim(store)) == []

    def test_only_the_queues_of_a_worker_are_served(self, store: Store) -> None:
        declare(store, concurrency=5)
        declare(store, "other", concurrency=5)
        self.add(store, mail("a"), queued("b", queue="other"), queued("c"))
        assert ids(self.claim(store, queues=frozenset({"other"}))) == ["b"]
        assert ids(self.claim(store, queues=frozenset({"mail"}))) == ["a"]
        assert ids(self.claim(store)) == ["c"]

    def test_each_queue_comes_first_in_turn(self, store: Store) -> None:
        declare(store, concurrency=50)
        self.add(store, *(mail(f"m{n}") for n in range(9)), *(queued(f"d{n}") for n in range(9)))
        first = [ids(self.claim(store, limit=2))[0][0] for _ in range(4)]
        assert sorted(first) == ["d", "d", "m", "m"]

    # -- keys ----------------------------------------------------------------------------------------------------------

    def test_a_key_lets_its_runs_begin_one_after_the_other(self, store: Store) -> None:
        declare(store, per_key=1)
        self.add(store, *(mail(f"r{n}", "k") for n in range(3)))
        for n in range(3):
            claims = self.claim(store).claims
            assert [claim.run.id for claim in claims] == [f"r{n}"]
            assert ids(self.claim(store, "w2")) == []
            Holder(store, claims[0].run).write(status=Status.COMPLETED, release=True)

    @pytest.mark.parametrize("status", RELEASED)
    def test_a_run_holds_its_key_until_it_ends(self, store: Store, status: Status) -> None:
        declare(store, per_key=1)
        self.add(store, mail("a", "k"), mail("b", "k"))
        (claim,) = self.claim(store).claims
        due = None if status in (Status.PAUSED, Status.WAITING) else at(60)
        Holder(store, claim.run).write(status=status, release=True, due_at=due)
        ended = status.finished or status is Status.SET_ASIDE
        assert ids(self.claim(store)) == (["b"] if ended else [])

    def test_a_run_that_has_begun_goes_on_though_its_key_is_full(self, store: Store) -> None:
        declare(store, per_key=1)
        self.add(store, mail("a", "k"), mail("b", "k"))
        (claim,) = self.claim(store).claims
        Holder(store, claim.run).write(status=Status.WAITING, release=True, due_at=at(0))
        assert ids(self.claim(store)) == ["a"]

    def test_a_delayed_run_does_not_hold_up_its_key(self, store: Store, clock: SteppedClock) -> None:
        declare(store, per_key=1)
        self.add(store, mail("late", "k", due_at=at(10)), mail("a", "k"))
        claims = self.claim(store)
        assert (ids(claims), claims.next_due_at) == (["a"], at(10))
        clock.advance(11)
        assert ids(self.claim(store)) == []
        Holder(store, claims.claims[0].run).write(status=Status.COMPLETED, release=True)
        assert ids(self.claim(store)) == ["late"]

    def test_keys_take_turns(self, store: Store) -> None:
        declare(store, concurrency=2)
        self.add(store, *(mail(f"a{n}", "a") for n in range(4)), mail("b0", "b"), mail("c0", "c"))
        served: list[str] = []
        for _ in range(3):
            claims = self.claim(store).claims
            served += [claim.run.id for claim in claims]
            for claim in claims:
                Holder(store, claim.run).write(status=Status.COMPLETED, release=True)
        assert sorted(served[:3]) == ["a0", "b0", "c0"]
        assert served[3:] == ["a1", "a2", "a3"]

    def test_one_key_alone_may_use_every_place(self, store: Store) -> None:
        declare(store, concurrency=8)
        self.add(store, *(mail(f"r{n}", "k") for n in range(9)))
        assert ids(self.claim(store, limit=20)) == [f"r{n}" for n in range(8)]

    def test_places_alternate_between_the_line_and_the_keys(self, store: Store) -> None:
        declare(store, concurrency=4)
        keyed = [mail(f"k{n}", f"key{n}") for n in range(6)]
        self.add(store, *keyed, *(mail(f"u{n}") for n in range(6)))
        assert sorted(run[0] for run in ids(self.claim(store))) == ["k", "k", "u", "u"]

    def test_priority_comes_before_turns(self, store: Store) -> None:
        declare(store, concurrency=3)
        self.add(store, mail("low", "a"), mail("plain"), mail("high", "b", priority=5), mail("higher", priority=6))
        assert ids(self.claim(store, limit=2)) == ["higher", "high"]

    def test_a_child_shares_the_place_of_its_parent(self, store: Store) -> None:
        declare(store, per_key=1)
        self.add(store, mail("parent", "k"))
        assert ids(self.claim(store)) == ["parent"]
        self.add(store, mail("child", "k", parent="parent", parent_key="c", holds=2), mail("other", "k"))
        (claim,) = self.claim(store).claims
        assert claim.run.id == "child"
        Holder(store, claim.run).write(status=Status.COMPLETED, release=True)
        assert ids(self.claim(store)) == []

    def test_a_retried_run_waits_for_its_key_again(self, store: Store) -> None:
        declare(store, per_key=1)
        self.add(store, mail("a", "k"), mail("b", "k"))
        (claim,) = self.claim(store).claims
        Holder(store, claim.run).write(status=Status.FAILED, release=True)
        (second,) = self.claim(store).claims
        retried = self.claim_one(store, "a", "w2")
        assert retried is not None
        Holder(store, retried.run).write(status=Status.QUEUED, release=True)
        assert ids(self.claim(store)) == []
        Holder(store, second.run).write(status=Status.COMPLETED, release=True)
        assert ids(self.claim(store)) == ["a"]

    def test_a_worker_takes_only_what_it_knows_behind_a_key(self, store: Store) -> None:
        declare(store, per_key=1)
        self.add(store, mail("foreign", "k", workflow="other"), mail("mine", "k"), mail("pinned", "p", version="2"))
        assert ids(self.claim(store, versions={"digest": "1"})) == ["mine"]

    def test_a_deleted_run_frees_its_key(self, store: Store) -> None:
        declare(store, per_key=1)
        self.add(store, mail("a", "k"), mail("b", "k"))
        (claim,) = self.claim(store).claims
        Holder(store, claim.run).write(status=Status.PAUSED, release=True)
        assert store.delete_runs(["a"]) == 1
        assert ids(self.claim(store)) == ["b"]

    def test_many_full_keys_do_not_hide_a_free_one(self, store: Store) -> None:
        declare(store, per_key=1)
        self.add(store, *(mail(f"first{n:03}", f"k{n:03}") for n in range(250)))
        claims: list[Any] = []
        while more := self.claim(store, limit=300).claims:
            claims += more
        assert len(claims) == 250
        self.add(store, *(mail(f"second{n:03}", f"k{n:03}") for n in range(250)))
        Holder(store, claims[-1].run).write(status=Status.COMPLETED, release=True)
        free = claims[-1].run.id.replace("first", "second")
        assert free in [run for _ in range(3) for run in ids(self.claim(store))]

    # -- rates ---------------------------------------------------------------------------------------------------------

    def test_runs_begin_at_the_rate(self, store: Store, clock: SteppedClock) -> None:
        declare(store, rate={"count": 1, "per": 10.0, "burst": 2})
        self.add(store, *(mail(f"r{n}") for n in range(3)), *(mail(f"k{n}", "k") for n in range(3)))
        claims = self.claim(store)
        assert len(ids(claims)) == 2
        assert claims.next_due_at is not None
        assert at(0) < claims.next_due_at <= at(10)
        assert ids(self.claim(store, "w2")) == []
        clock.advance(10)
        assert len(ids(self.claim(store, "w2"))) == 1
        clock.advance(100)
        assert len(ids(self.claim(store))) == 2

    def test_a_rate_survives_the_process(self, store: Store, clock: SteppedClock) -> None:
        declare(store, rate={"count": 1, "per": 10.0, "burst": 1})
        self.add(store, mail("a"), mail("b"))
        (claim,) = self.claim(store).claims
        Holder(store, claim.run).write(status=Status.COMPLETED, release=True)
        if store.url == "memory:":
            return
        store.close()
        store = self.make_store(clock)
        assert ids(self.claim(store, "w3")) == []
        clock.advance(10)
        assert ids(self.claim(store, "w3")) == ["b"]
        store.close()

    def test_runs_that_have_begun_need_no_token(self, store: Store, clock: SteppedClock) -> None:
        declare(store, rate={"count": 1, "per": 100.0, "burst": 1})
        self.add(store, *(mail(f"r{n}") for n in range(3)))
        (claim,) = self.claim(store).claims
        Holder(store, claim.run).write(status=Status.WAITING, release=True, due_at=at(1))
        clock.advance(2)
        assert ids(self.claim(store)) == ["r0"]

    def test_a_clock_set_back_costs_one_interval(self, store: Store, clock: SteppedClock) -> None:
        declare(store, rate={"count": 1, "per": 10.0, "burst": 1})
        self.add(store, mail("a", due_at=at(-9998)), mail("b", due_at=at(-9999)))
        assert ids(self.claim(store, limit=1)) == ["b"]
        clock.advance(-3600)
        assert ids(self.claim(store)) == []
        clock.advance(20)
        assert ids(self.claim(store)) == ["a"]

    # -- deduplication -------------------------------------------------------------------------------------------------

    def test_a_second_start_finds_the_first(self, store: Store) -> None:
        self.add(store, mail("a", dedupe="x"))
        answer = commit(store, Create(mail("b", dedupe="x")))
        assert (answer.verdict, answer.about) == (Verdict.EXISTS, "a")
        assert answer.run is not None
        assert answer.run.id == "a"
        assert store.get_run("b") is None
        assert commit(store, Create(queued("c", dedupe="x"))).verdict is Verdict.DONE
        assert commit(store, Create(mail("d", dedupe="y"))).verdict is Verdict.DONE

    def test_two_starts_in_one_batch_make_one_run(self, store: Store) -> None:
        answers = store.commit([Create(mail("a", dedupe="x")), Create(mail("b", dedupe="x"))])
        assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.EXISTS]

    @pytest.mark.parametrize("status", RELEASED)
    def test_a_finished_run_frees_its_dedupe(self, store: Store, status: Status) -> None:
        writer = started(store, "a", queue="mail", dedupe="x")
        writer.write(status=status, release=True)
        answer = commit(store, Create(mail("b", dedupe="x")))
        assert answer.verdict is (Verdict.DONE if status.finished else Verdict.EXISTS)

    def test_a_finished_run_does_not_go_on_beside_its_twin(self, store: Store) -> None:
        writer = started(store, "a", queue="mail", dedupe="x")
        writer.write(status=Status.FAILED, release=True)
        self.add(store, mail("b", dedupe="x"))
        with pytest.raises(RunConflict, match="'b'"):
            self.claim_one(store, "a", "w2")
        (claim,) = self.claim(store).claims
        Holder(store, claim.run).write(status=Status.COMPLETED, release=True)
        assert self.claim_one(store, "a", "w2") is not None

    def test_dedupe_is_kept(self, store: Store) -> None:
        self.add(store, mail("a", "k", dedupe="x"))
        assert (get(store, "a").dedupe, get(store, "a").key) == ("x", "k")

    # -- counts --------------------------------------------------------------------------------------------------------

    def test_the_runs_of_a_queue_are_counted(self, store: Store) -> None:
        declare(store, concurrency=2, per_key=1)
        self.add(store, mail("a", "k"), mail("b", "k"), mail("c"), mail("d"), mail("e", due_at=at(60)))
        assert len(ids(self.claim(store))) == 2
        counts = store.count_queue("mail")
        assert (counts.driven, counts.waiting, counts.keys) == (2, 3, (("k", 1),))
        assert counts.oldest_at is not None
