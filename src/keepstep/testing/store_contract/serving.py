"""What a store must do about services: shares, rates, spend, breakers, and the runs that wait there."""

from __future__ import annotations

from typing import Any

import pytest

from ...model import Ask, Claims, GateChange, GateInfo, Grant, Run, Signal, Status, WorkerInfo
from ...model.gate import MOST_CHANGES, SERVICE
from ...ports import Create, OptionalStore, Send, Store, Verdict, optional
from .ground import START, Ground, Holder, SteppedClock, at, commit, get, ids, parked, queued, started, watch
from .queueing import declare as declare_queue


def declare(store: Store, name: str = "bank", **limits: Any) -> None:
    """Declare a service as a process does when it opens the store."""
    store.change_gate(SERVICE, name, GateChange(START, "test", "declare", limits))


def change(store: Store, act: str, name: str = "bank", **limits: Any) -> GateInfo:
    """Change a service by hand."""
    return store.change_gate(SERVICE, name, GateChange(at(1), "ann", act, limits or None, "a reason"))


def ask(store: Store, worker: str = "w1", service: str = "bank", **need: Any) -> Grant:
    """Tell a service the need of a worker."""
    (grant,) = store.pass_gates(worker, [Ask(service, **need)])
    return grant


def shares(store: Store) -> dict[str, int]:
    """Return the places that each living worker holds."""
    (gate,) = store.list_gates(SERVICE)
    return {share.worker: share.held for share in gate.shares}


def waits(store: Store, run_id: str, service: str = "bank", **fields: Any) -> Holder:
    """A run that is parked at a service."""
    names = ("workflow", "version", "queue", "key", "priority")
    writer = started(store, run_id, **{name: fields.pop(name) for name in names if name in fields})
    done = writer.write(status=Status.WAITING, release=True, service=service, **fields)
    assert done.verdict is Verdict.DONE
    return writer


#: A breaker that opens at the second failure.
BREAKER = {"failures": 2, "within": 10.0, "open_seconds": 30.0, "probes": 2, "successes": 2}


class Serving(Ground):
    """Services with limits."""

    def rooms(self, store: Store, worker: str = "w1", limit: int = 10, **rooms: int) -> Claims:
        """Claim with room at services."""
        return self.claim(store, worker, limit, rooms=rooms)

    # -- the gate ------------------------------------------------------------------------------------------------------

    def test_a_declared_service_is_listed_apart_from_queues(self, store: Store) -> None:
        declare(store, concurrency=2, breaker=BREAKER)
        declare_queue(store, "bank", concurrency=9)
        (gate,) = store.list_gates(SERVICE)
        assert (gate.name, gate.limits["concurrency"], gate.breaker, gate.shares) == ("bank", 2, None, ())

    def test_a_service_that_is_not_declared_limits_nothing(self, store: Store) -> None:
        grant = ask(store, running=7, waiting=100)
        assert (grant.share, grant.tokens, grant.probes, grant.why) == (None, None, None, "")
        assert store.list_gates(SERVICE) == []

    def test_a_change_by_hand_holds_until_it_is_reset(self, store: Store) -> None:
        declare(store, concurrency=2)
        change(store, "set", concurrency=4)
        assert ask(store, waiting=9).share == 4
        change(store, "reset")
        assert ask(store, waiting=9).share == 2

    def test_limits_that_cannot_be_counted_limit_nothing(self, store: Store) -> None:
        declare(store, "fast", rate={"count": 1e300, "per": 1e-300, "burst": 1})
        declare(store, "wide", concurrency=2**63)
        declare(store, "newer", concurrency="auto")
        declare(store, concurrency=1)
        asks = [Ask(name, waiting=3, spent=1.0) for name in ("fast", "wide", "newer", "bank")]
        grants = store.pass_gates("w1", asks)
        assert [(grant.share, grant.tokens) for grant in grants] == [(None, None)] * 3 + [(1, None)]

    def test_spend_beyond_all_bounds_is_a_debt_that_ends(self, store: Store, clock: SteppedClock) -> None:
        declare(store, spend={"count": 100.0, "per": 10.0, "burst": 1})
        assert ask(store, waiting=1, spent=1e300, estimate=1e300).tokens == 0
        clock.advance(11)
        assert ask(store, waiting=1, estimate=1e300).tokens == 1
        clock.advance(11)
        assert ask(store, waiting=1, spent=-1e300, estimate=1e-300).tokens == 1

    def test_the_last_changes_of_a_service_are_kept(self, store: Store) -> None:
        for act in ("open", "close") * MOST_CHANGES:
            change(store, act)
        log = store.list_gates(SERVICE)[0].log
        assert [one.act for one in log] == ["open", "close"] * (MOST_CHANGES // 2)
        assert {(one.actor, one.reason) for one in log} == {("ann", "a reason")}

    # -- shares --------------------------------------------------------------------------------------------------------

    def test_shares_never_add_up_to_more_than_the_concurrency(self, store: Store) -> None:
        declare(store, concurrency=5)
        assert ask(store, "w1", waiting=9).share == 5
        second = ask(store, "w2", waiting=9, waited_seconds=1)
        assert (second.share, second.why) == (0, "concurrency")
        # The first one learns that it has to give up places, and does so as its attempts end.
        first = ask(store, "w1", running=5, waiting=4)
        assert (first.share, shares(store)) == (2, {"w1": 5, "w2": 0})
        ask(store, "w1", running=3, waiting=4)
        assert ask(store, "w2", waiting=9, waited_seconds=1).share == 2
        ask(store, "w1", running=2, waiting=4)
        assert ask(store, "w2", running=2, waiting=7, waited_seconds=1).share == 3
        assert shares(store) == {"w1": 2, "w2": 3}

    def test_places_that_nobody_else_wants_stay_with_their_worker(self, store: Store) -> None:
        declare(store, concurrency=4)
        assert ask(store, "w1", running=1).share == 4
        assert ask(store, "w1").share == 4
        assert ask(store, "w2", waiting=3).share == 0
        assert ask(store, "w1", running=1).share == 1
        assert ask(store, "w2", waiting=3).share == 3

    def test_an_idle_worker_gives_its_places_back(self, store: Store) -> None:
        declare(store, concurrency=4)
        ask(store, "w1", running=3)
        ask(store, "w1")
        assert ask(store, "w1").share == 0
        assert shares(store) == {"w1": 0}

    def test_a_place_that_cannot_be_divided_goes_to_the_longest_waiting(self, store: Store) -> None:
        declare(store, concurrency=1)
        assert ask(store, "w1", waiting=1).share == 1
        assert store.renew_leases(WorkerInfo("w3"))
        assert ask(store, "w2", waiting=1, waited_seconds=1).share == 0
        assert ask(store, "w3", waiting=1, waited_seconds=2).share == 0
        assert ask(store, "w1", waiting=1, waited_seconds=0).share == 0
        assert ask(store, "w2", waiting=1, waited_seconds=1).share == 0
        assert ask(store, "w3", waiting=1, waited_seconds=2).share == 1
        # It has waited no longer, so that the next place goes to the one that has waited for the second longest time.
        assert ask(store, "w3", running=1, waiting=1).share == 0
        assert ask(store, "w3", waiting=1).share == 0
        assert ask(store, "w1", waiting=1).share == 0
        assert ask(store, "w2", waiting=1, waited_seconds=1).share == 1

    def test_a_lower_limit_is_reached_as_attempts_end(self, store: Store) -> None:
        declare(store, concurrency=4)
        ask(store, "w1", waiting=4)
        change(store, "set", concurrency=1)
        assert ask(store, "w1", running=4).share == 1
        assert ask(store, "w2", waiting=1).share == 0
        ask(store, "w1", running=1)
        ask(store, "w1", running=0)
        assert ask(store, "w2", waiting=1).share == 1

    def test_the_share_of_a_dead_worker_ends_when_it_is_given_up(self, store: Store, clock: SteppedClock) -> None:
        declare(store, concurrency=3)
        ask(store, "w1", waiting=3)
        watch(store, clock, store.lease_seconds / 2, "w2")
        self.claim(store, "w2")
        assert ask(store, "w2", waiting=1).share == 0
        self.kill(store, clock, "w1")
        self.claim(store, "w2")
        assert ask(store, "w2", waiting=1).share == 3
        assert shares(store) == {"w2": 3}
        late = ask(store, "w1", running=3)
        assert (late.share, late.why) == (0, "lease")
        assert shares(store) == {"w2": 3}

    def test_the_share_of_a_worker_that_leaves_ends_at_once(self, store: Store) -> None:
        declare(store, concurrency=3)
        ask(store, "w1", waiting=3)
        assert store.renew_leases(WorkerInfo("w1"), leaving=True)
        assert ask(store, "w2", waiting=3).share == 3
        assert ask(store, "w2", leaving=True).share == 0
        assert shares(store) == {}

    def test_a_worker_that_the_store_does_not_know_gets_nothing(self, store: Store) -> None:
        declare(store, concurrency=3)
        assert (ask(store, "stranger", waiting=1).share, shares(store)) == (0, {})

    def test_shares_hold_across_processes(self, store: Store, clock: SteppedClock) -> None:
        declare(store, concurrency=3)
        other = self.make_store(clock)
        try:
            ask(store, "w1", waiting=2)
            assert other.renew_leases(WorkerInfo("w3"))
            assert ask(other, "w3", waiting=3).share == 0
            ask(store, "w1", running=2)
            assert ask(other, "w3", waiting=3).share == 1
        finally:
            other.close()

    def test_several_services_are_asked_at_once(self, store: Store) -> None:
        declare(store, "a", concurrency=1)
        declare(store, "b", concurrency=2)
        grants = store.pass_gates("w1", [Ask("a", waiting=5), Ask("b", waiting=5), Ask("c", waiting=5)])
        assert [(grant.service, grant.share) for grant in grants] == [("a", 1), ("b", 2), ("c", None)]

    # -- rate and spend ------------------------------------------------------------------------------------------------

    def test_a_rate_holds_across_workers(self, store: Store, clock: SteppedClock) -> None:
        declare(store, rate={"count": 10, "per": 1.0, "burst": 3})
        begun, start = [], clock.now()
        for _ in range(40):
            for worker in ("w1", "w2"):
                grant = ask(store, worker, waiting=50)
                assert grant.tokens is not None
                assert grant.tokens_seconds <= 1
                begun += [clock.now() - start] * grant.tokens
            clock.advance(0.25)
        for first, at_first in enumerate(begun):
            for last, at_last in enumerate(begun[first:], 1):
                # A token may be used a while later, which is the time that the bound adds.
                assert last <= 3 + 10 * (at_last - at_first + 1 - 0.5) + 1e-6, first
        assert len(begun) >= 100

    def test_tokens_are_divided_among_those_that_wait(self, store: Store, clock: SteppedClock) -> None:
        declare(store, rate={"count": 2, "per": 1.0, "burst": 1})
        got = dict.fromkeys(("w1", "w2"), 0)
        since = dict.fromkeys(got, clock.now())
        for _ in range(40):
            for worker in got:  # the first one always asks first
                tokens = ask(store, worker, waiting=9, waited_seconds=clock.now() - since[worker]).tokens
                if tokens:
                    got[worker] += tokens
                    since[worker] = clock.now()
            clock.advance(0.25)
        assert min(got.values()) >= 8

    def test_a_rate_without_tokens_says_when_to_ask_again(self, store: Store) -> None:
        declare(store, rate={"count": 1, "per": 60.0, "burst": 1})
        assert ask(store, waiting=1).tokens == 1
        grant = ask(store, waiting=1)
        assert (grant.tokens, grant.why, grant.again_seconds) == (0, "rate", 1.0)

    def test_a_clock_set_back_costs_a_rate_one_interval(self, store: Store, clock: SteppedClock) -> None:
        declare(store, rate={"count": 1, "per": 10.0, "burst": 1})
        clock.advance(7200)
        assert ask(store, waiting=1).tokens == 1
        clock.advance(-3600)
        assert ask(store, waiting=1).tokens == 0
        clock.advance(20)
        assert ask(store, waiting=1).tokens == 1

    def test_no_token_is_taken_for_an_attempt_without_a_place(self, store: Store) -> None:
        declare(store, concurrency=1, rate={"count": 1, "per": 60.0, "burst": 1})
        assert ask(store, "w1", waiting=1).tokens == 1
        assert ask(store, "w2", waiting=1).tokens == 0
        assert ask(store, "w1", running=1, waiting=1).tokens == 0

    def test_estimated_spend_is_taken_when_it_is_granted(self, store: Store, clock: SteppedClock) -> None:
        declare(store, spend={"count": 100, "per": 1.0, "burst": 100})
        grant = ask(store, waiting=9, estimate=50)
        assert (grant.tokens, grant.why) == (3, "spend")
        assert ask(store, "w2", waiting=1, estimate=1).tokens == 0
        clock.advance(0.25)
        assert ask(store, "w2", waiting=1, estimate=1).tokens == 1

    def test_a_debt_makes_all_wait(self, store: Store, clock: SteppedClock) -> None:
        declare(store, spend={"count": 100, "per": 10.0, "burst": 1})
        assert ask(store, "w1", waiting=1, estimate=1).tokens == 1
        ask(store, "w1", spent=60)
        grant = ask(store, "w2", waiting=1, estimate=1)
        assert (grant.tokens, grant.why) == (0, "spend")
        clock.advance(5)
        assert ask(store, "w2", waiting=1, estimate=1).tokens == 0
        clock.advance(1.5)
        assert ask(store, "w2", waiting=1, estimate=1).tokens == 1

    def test_a_debt_is_forgotten_after_the_time_of_the_rate(self, store: Store, clock: SteppedClock) -> None:
        declare(store, spend={"count": 100, "per": 10.0, "burst": 1})
        ask(store, "w1", spent=1e9)
        assert ask(store, "w2", waiting=1, estimate=1).tokens == 0
        clock.advance(10.5)
        assert ask(store, "w2", waiting=1, estimate=1).tokens == 1

    def test_spend_that_was_not_used_is_given_back(self, store: Store) -> None:
        declare(store, spend={"count": 1, "per": 1.0, "burst": 100})
        assert ask(store, waiting=1, estimate=100).tokens == 1
        assert ask(store, waiting=1, estimate=100).tokens == 1  # the last one may go into debt
        assert ask(store, waiting=1, estimate=100).tokens == 0
        assert ask(store, waiting=1, estimate=100, spent=-150).tokens == 1

    # -- the breaker ---------------------------------------------------------------------------------------------------

    def open_breaker(self, store: Store) -> None:
        declare(store, breaker=BREAKER)
        ask(store, "w1", failures=1)
        assert ask(store, "w2", failures=1).moved == "opened"

    def test_failures_of_all_workers_open_a_breaker(self, store: Store) -> None:
        self.open_breaker(store)
        grant = ask(store, "w1", waiting=3)
        assert (grant.probes, grant.why, grant.breaker, grant.moved) == (0, "breaker", "open", "")
        assert store.list_gates(SERVICE)[0].breaker == {"opened_at": START.timestamp()}

    def test_old_failures_do_not_count(self, store: Store, clock: SteppedClock) -> None:
        declare(store, breaker=BREAKER)
        for _ in range(4):
            ask(store, failures=1)
            clock.advance(11)
        assert ask(store, waiting=1).probes is None

    def test_a_few_probes_begin_when_a_breaker_has_been_open(self, store: Store, clock: SteppedClock) -> None:
        self.open_breaker(store)
        clock.advance(29)
        assert ask(store, waiting=1).probes == 0
        clock.advance(1)
        first = ask(store, waiting=1)
        assert (first.probes, first.breaker, first.moved) == (1, "half-open", "half-open")
        second = ask(store, "w2", waiting=3)
        assert (second.probes, second.why, second.moved) == (1, "breaker", "")
        assert ask(store, "w1", waiting=3).probes == 0

    def test_probes_that_succeed_close_a_breaker(self, store: Store, clock: SteppedClock) -> None:
        self.open_breaker(store)
        clock.advance(30)
        assert ask(store, waiting=2).probes == 2
        one = ask(store, "w1", passed=1, waiting=5)
        assert (one.probes, one.moved) == (1, "")
        two = ask(store, "w1", passed=1, waiting=5)
        assert (two.probes, two.breaker, two.moved) == (None, "closed", "closed")
        assert store.list_gates(SERVICE)[0].breaker is None

    def test_a_probe_that_fails_opens_a_breaker_again(self, store: Store, clock: SteppedClock) -> None:
        self.open_breaker(store)
        clock.advance(30)
        ask(store, waiting=2)
        assert ask(store, failed=1, waiting=1).moved == "opened"
        clock.advance(29)
        assert ask(store, passed=1, waiting=1).probes == 0
        clock.advance(1)
        assert ask(store, waiting=1).probes == 1

    def test_a_probe_of_a_dead_worker_fails_after_its_time(self, store: Store, clock: SteppedClock) -> None:
        self.open_breaker(store)
        clock.advance(30)
        assert ask(store, "w1", waiting=2, probe_seconds=20.0).probes == 2
        clock.advance(19)
        assert ask(store, "w2", waiting=1).probes == 0
        clock.advance(2)
        late = ask(store, "w2", waiting=1)
        assert (late.probes, late.moved, late.breaker) == (0, "opened", "open")
        clock.advance(30)
        assert ask(store, "w2", waiting=1).probes == 1

    def test_a_probe_that_does_not_begin_counts_as_nothing(self, store: Store, clock: SteppedClock) -> None:
        self.open_breaker(store)
        clock.advance(30)
        assert ask(store, "w1", waiting=2).probes == 2
        ask(store, "w1", unused=2)
        assert ask(store, "w2", waiting=2).probes == 2

    def test_no_probe_is_granted_without_a_place_or_a_token(self, store: Store, clock: SteppedClock) -> None:
        declare(store, breaker=BREAKER, concurrency=1, rate={"count": 1, "per": 60.0, "burst": 1})
        ask(store, "w1", failures=2)
        clock.advance(30)
        assert ask(store, "w1", waiting=2).probes == 1
        assert ask(store, "w2", waiting=2).probes == 0
        ask(store, "w1", unused=1)
        ask(store, "w1")
        assert (ask(store, "w2", waiting=2).probes, ask(store, "w2", waiting=2).tokens) == (0, 0)

    def test_a_breaker_is_held_open_by_hand(self, store: Store, clock: SteppedClock) -> None:
        declare(store, breaker=BREAKER)
        change(store, "open")
        clock.advance(3600)
        grant = ask(store, waiting=1)
        assert (grant.probes, grant.breaker) == (0, "open")
        change(store, "reset")
        assert ask(store, waiting=1).probes is None

    def test_a_breaker_is_held_closed_by_hand(self, store: Store) -> None:
        self.open_breaker(store)
        change(store, "close")
        assert ask(store, waiting=1, failures=9).probes is None
        change(store, "reset")
        assert ask(store, waiting=1, failures=2).probes == 0

    def test_a_clock_set_back_keeps_a_breaker_open_no_longer(self, store: Store, clock: SteppedClock) -> None:
        clock.advance(7200)
        self.open_breaker(store)
        clock.advance(-3600)
        assert ask(store, waiting=1).probes == 0
        clock.advance(30)
        assert ask(store, waiting=1, probe_seconds=5.0).probes == 1
        clock.advance(-1800)
        ask(store)
        clock.advance(6)
        assert ask(store).moved == "opened"

    def test_the_answer_says_what_attempts_do_while_a_breaker_is_open(self, store: Store) -> None:
        declare(store, breaker=BREAKER, when_open="fail")
        assert ask(store).when_open == "fail"

    # -- parked runs ---------------------------------------------------------------------------------------------------

    def test_no_time_makes_a_run_due_that_waits_at_a_service(self, store: Store, clock: SteppedClock) -> None:
        ask(store)
        waits(store, "r")
        clock.advance(1e6)
        assert store.renew_leases(WorkerInfo("w1"))
        claims = self.rooms(store, bank=0)
        assert ids(claims) == []
        assert [(one.service, one.runs) for one in claims.at_services] == [("bank", 1)]
        run = get(store, "r")
        assert (run.service, run.status, run.due_at) == ("bank", Status.WAITING, None)

    def test_a_worker_with_room_claims_runs_that_wait_at_a_service(self, store: Store) -> None:
        ask(store)
        for n in range(4):
            waits(store, f"r{n}")
        claims = self.rooms(store, bank=3)
        assert ids(claims) == ["r0", "r1", "r2"]
        assert [claim.service for claim in claims.claims] == ["bank"] * 3
        assert [(one.service, one.runs, one.since) for one in claims.at_services] == [("bank", 1, START)]
        assert get(store, "r0").service is None
        assert (ids(self.rooms(store, "w2", bank=3)), ids(self.rooms(store, "w2", bank=3))) == (["r3"], [])

    def test_room_at_one_service_is_none_at_another(self, store: Store) -> None:
        ask(store)
        ask(store, service="post")
        waits(store, "r")
        assert ids(self.rooms(store, post=3, bank=0)) == []

    def test_a_claim_takes_no_more_than_its_limit(self, store: Store) -> None:
        ask(store)
        waits(store, "r0")
        waits(store, "r1")
        store.commit([Create(queued("a")), Create(queued("b"))])
        assert len(ids(self.rooms(store, limit=3, bank=5))) == 3
        assert len(ids(self.rooms(store, limit=3, bank=5))) == 1

    def test_runs_at_a_service_go_by_priority_and_keys_take_turns(self, store: Store, clock: SteppedClock) -> None:
        declare(store)
        ask(store)
        waits(store, "low", priority=-1)
        for n in range(3):
            clock.advance(0.001)
            waits(store, f"a{n}", key="a")
            waits(store, f"line{n}")
        waits(store, "b0", key="b")
        waits(store, "high", priority=3)
        found = [ids(self.rooms(store, limit=1, bank=1)) for _ in range(9)]
        order = [run for (run,) in found]
        assert (order[0], order[-1]) == ("high", "low")
        assert [run for run in order if run.startswith("line")] == ["line0", "line1", "line2"]
        assert [run for run in order if run[0] in "ab"] == ["a0", "b0", "a1", "a2"]
        assert {order.index("line0"), order.index("a0")} == {1, 2}

    def test_a_signal_wakes_a_run_that_waits_at_a_service(self, store: Store) -> None:
        ask(store)
        waits(store, "r", wakes=("go",))
        commit(store, Send(Signal("r", "other", b"1")))
        assert ids(self.claim(store)) == []
        commit(store, Send(Signal("r", "go", b"1")))
        assert get(store, "r").service is None
        (claim,) = self.claim(store).claims
        assert (claim.run.id, claim.service) == ("r", None)

    def test_its_time_wakes_a_run_that_waits_at_a_service(self, store: Store, clock: SteppedClock) -> None:
        ask(store)
        waits(store, "r", due_at=at(60))
        commit(store, Send(Signal("r", "other", b"1")))
        claims = self.claim(store)
        assert (ids(claims), claims.next_due_at) == ([], at(60))
        clock.advance(60)
        assert store.renew_leases(WorkerInfo("w1"))
        (claim,) = self.claim(store).claims
        assert (claim.run.id, claim.service) == ("r", None)

    def test_room_wakes_a_run_that_also_waits_for_a_time(self, store: Store) -> None:
        ask(store)
        waits(store, "r", due_at=at(60))
        assert ids(self.rooms(store, bank=1)) == ["r"]

    def test_a_service_that_no_living_worker_uses_lets_all_pass(self, store: Store, clock: SteppedClock) -> None:
        declare(store, concurrency=1)
        ask(store, "w1")
        waits(store, "r")
        assert ids(self.claim(store, "w2")) == []
        self.kill(store, clock, "w1")
        taken = [*self.claim(store, "w2").claims, *self.claim(store, "w2").claims]
        assert [(claim.run.id, claim.service) for claim in taken] == [("r", None)]

    def test_a_service_whose_users_do_not_know_a_workflow_lets_its_runs_pass(self, store: Store) -> None:
        assert store.renew_leases(WorkerInfo("w1", workflows=("other",)))
        declare(store, concurrency=1)
        ask(store, "w1")
        waits(store, "r")
        taken = self.claim(store, "w2").claims
        assert [(claim.run.id, claim.service) for claim in taken] == [("r", None)]

    def test_a_service_limits_the_workflows_that_its_users_know(self, store: Store) -> None:
        assert store.renew_leases(WorkerInfo("w1", workflows=("digest", "digest@1", "other")))
        ask(store, "w1")
        waits(store, "old", version="1")
        waits(store, "new", version="2")
        waits(store, "other", workflow="other")
        both = ("digest", "other")
        assert ids(self.claim(store, "w2", workflows=both, versions={"digest": "1"})) == []
        assert ids(self.claim(store, "w2", workflows=both, versions={"digest": "2"})) == ["new"]

    def test_a_worker_that_drains_keeps_no_run_at_a_service(self, store: Store) -> None:
        drain = optional(store, OptionalStore.drain_worker)
        if drain is None:
            return
        assert store.renew_leases(WorkerInfo("w1", workflows=("digest",)))
        ask(store, "w1")
        waits(store, "r")
        assert ids(self.claim(store, "w2")) == []
        assert drain("w1")
        assert ids(self.claim(store, "w2")) == ["r"]

    def test_a_run_at_a_service_needs_a_place_in_its_queue(self, store: Store) -> None:
        declare_queue(store, "mail", concurrency=1)
        ask(store)
        waits(store, "r", queue="mail")
        store.commit([Create(queued("first", queue="mail")), Create(queued("free"))])
        assert sorted(ids(self.claim(store, limit=2))) == ["first", "free"]
        waits(store, "behind")
        taken = ids(self.rooms(store, bank=1)) + ids(self.rooms(store, bank=1))
        assert taken == ["behind"]  # the one whose queue is full does not hold it up
        (held,) = [claim for claim in [get(store, "first")] if claim.worker == "w1"]
        done = Holder(store, held).write(status=Status.COMPLETED, release=True)
        assert done.verdict is Verdict.DONE
        assert ids(self.rooms(store, bank=1)) == ["r"]

    def test_a_run_at_a_service_can_be_claimed_by_name(self, store: Store) -> None:
        ask(store)
        waits(store, "r")
        claim = self.claim_one(store, "r")
        assert claim is not None
        assert claim.run.service is None
        assert ids(self.rooms(store, bank=1)) == []

    def test_only_a_worker_that_serves_a_run_claims_it_at_a_service(self, store: Store) -> None:
        ask(store)
        waits(store, "other", workflow="other")
        waits(store, "old", version="0")
        waits(store, "mail", queue="mail")
        pinned = self.claim(store, rooms={"bank": 5}, versions={"digest": "1"}, queues=frozenset({"default"}))
        assert (ids(pinned), pinned.at_services) == ([], ())
        assert ids(self.claim(store, rooms={"bank": 5}, queues=frozenset({"mail"}))) == ["mail"]
        assert ids(self.claim(store, rooms={"bank": 5}, workflows=("other",))) == ["other"]

    def test_a_run_that_ends_waits_at_no_service(self, store: Store) -> None:
        ask(store)
        writer = started(store, "r")
        assert writer.write(status=Status.SET_ASIDE, release=True, service="bank").verdict is Verdict.DONE
        assert get(store, "r").service is None
        assert ids(self.rooms(store, bank=1)) == []

    def test_a_run_copied_while_it_waits_at_a_service_goes_on_waiting(self, store: Store) -> None:
        ask(store)
        copied = Run("r", "digest", Status.WAITING, START, epoch=1, service="bank", updated_at=at(-5))
        assert commit(store, Create(copied)).verdict is Verdict.DONE
        assert get(store, "r").service == "bank"
        claims = self.rooms(store, bank=0)
        assert [(one.runs, one.since) for one in claims.at_services] == [(1, at(-5))]
        assert ids(self.rooms(store, bank=1)) == ["r"]

    def test_people_see_the_shares_and_the_runs_that_wait(self, store: Store, clock: SteppedClock) -> None:
        declare(store, concurrency=5)
        ask(store, "w1", running=1, waiting=7, waited_seconds=3)
        waits(store, "a")
        clock.advance(1)
        waits(store, "b")
        (gate,) = store.list_gates(SERVICE)
        (share,) = gate.shares
        assert (share.worker, share.held, share.need, share.since) == ("w1", 5, 8, at(-3).timestamp())
        assert (gate.parked, gate.parked_since) == (2, START)

    @pytest.mark.parametrize("status", [Status.WAITING, Status.QUEUED])
    def test_a_run_parked_without_a_service_is_not_claimed_by_room(self, store: Store, status: Status) -> None:
        ask(store)
        parked(store, "r", due_at=at(60))
        assert ids(self.rooms(store, bank=5)) == []
