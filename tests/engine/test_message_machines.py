"""A topic and a barrier under workers that die between any two writes: nothing is lost, doubled or left waiting."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepstep.kernel.barrier import BarrierKeeper, arrival
from keepstep.kernel.keeper import birth, keep
from keepstep.kernel.topic import FULL_AT, MOST_AT_ONCE, MOST_UNREAD, TopicKeeper, act_of, batch_in
from keepstep.kernel.waits import reported_in
from keepstep.model import Run, Signal, Status
from keepstep.model.keepers import BARRIER_WORKFLOW, TELL, TOPIC_WORKFLOW, barrier_id, topic_id
from keepstep.model.signal import MESSAGES, ROOM
from keepstep.ports import Advance, ClaimRequest, Create, Send, Verdict, instant
from keepstep.stores.memory import MemoryStore
from tests.engine.test_schedule_machine import Clock, Died, Worker
from tests.nightly import examples

LEASE = 10.0
BEGIN = datetime(2026, 7, 1, tzinfo=UTC)


class Driven(Worker):
    """A process as a keeper sees it, without workflows of its own."""

    def renew(self):
        self.workflows = {}
        super().renew()


class Keepers(RuleBasedStateMachine):
    """A keeper that is driven by whoever claims it, and runs that talk to it."""

    keeper: object
    workflow: str
    run_id: str
    given: dict[str, str]

    @initialize()
    def begin(self):
        self.store = MemoryStore(clock=Clock(BEGIN), lease_seconds=LEASE)
        self.number, self.runs, self.late = 0, 0, []
        self.commit(birth(self.worker(), self.run_id, type(self).workflow, self.given, actor="x", at=BEGIN, waits=True))

    @property
    def clock(self):
        return self.store.clock

    def worker(self):
        self.number += 1
        return Driven(self, self.number)

    def commit(self, change):
        return self.store.commit([change])[0]

    def new_run(self):
        self.runs += 1
        name = f"run-{self.runs}"
        self.commit(Create(Run(name, "w", Status.WAITING, BEGIN, wakes=("nothing",))))
        return name

    def finish(self, run):
        (claim,) = self.store.claim_runs(ClaimRequest("runner", run=run, statuses=frozenset(Status))).claims
        change = Advance(run, "runner", claim.lease.epoch, 0, status=Status.COMPLETED, release=True)
        assert self.commit(change).verdict is Verdict.DONE

    def tell(self, payload, key="", room=None):
        return self.commit(Send(Signal(self.run_id, TELL, payload, key, "", instant(self.clock.now())), room=room))

    def drive(self, worker, claim):
        try:
            asyncio.run(keep(worker, self.keeper, claim))
        except Died:
            self.store.mark_dead(worker.id)

    def claim(self, worker):
        worker.renew()
        return self.store.claim_runs(ClaimRequest(worker.id, frozenset({type(self).workflow}), 1)).claims

    def settle(self):
        """Let a living worker answer until nothing is due."""
        self.clock.passes(2 * LEASE)
        worker = self.worker()
        while claims := self.claim(worker):
            self.drive(worker, claims[0])
        run = self.store.get_run(self.run_id)
        assert run.status is Status.WAITING, (run.status, run.error)

    @rule(write=st.integers(0, 3), when=st.sampled_from(["before", "after"]))
    def a_worker_answers_or_dies(self, write, when):
        worker = self.worker()
        for claim in self.claim(worker):
            worker.fate = (write, when)
            self.drive(worker, claim)

    @rule()
    def a_worker_is_paused_with_the_keeper(self):
        worker = self.worker()
        self.late += [(worker, claim) for claim in self.claim(worker)]
        self.clock.passes(2 * LEASE)
        self.store.mark_dead(worker.id)

    @precondition(lambda self: self.late)
    @rule()
    def a_paused_worker_goes_on(self):
        self.drive(*self.late.pop())

    @rule(payload=st.sampled_from([b"[]", b'{"do":"nonsense"}', b"1"]))
    def somebody_sends_rubbish(self, payload):
        self.tell(payload)


# -- a topic -----------------------------------------------------------------------------------------------------------


class Reader:
    """A subscriber: the messages that it must get, those that it has read, and its place in its inbox."""

    def __init__(self, run, first):
        self.run, self.first = run, first
        self.read, self.seen = [], 0


class Topics(Keepers):
    """Messages of a topic, its subscribers, and publishers that wait."""

    keeper, workflow, run_id, given = TopicKeeper(), TOPIC_WORKFLOW, topic_id("t"), {"name": "t"}

    def __init__(self):
        super().__init__()
        self.sent, self.readers, self.waiting = 0, [], []

    @rule(count=st.one_of(st.just(1), st.integers(1, MOST_AT_ONCE)))
    def messages_are_published(self, count):
        """Publish as one commit: all messages, or none if there is no room; then a run waits."""
        values = range(self.sent, self.sent + count)
        head = self.store.get_run(self.run_id)
        if head.signals - head.signals_read >= FULL_AT:
            assert self.tell(act_of("publish"), "probe", FULL_AT).verdict is Verdict.FULL
            run = self.new_run()
            self.tell(act_of("wait", run=run))
            self.waiting.append(run)
            return
        for value in values:
            self.tell(act_of("publish", value=msgspec.Raw(b"%d" % value)), f"m{value}")
        self.sent += count

    @precondition(lambda self: self.readers)
    @rule()
    def publishers_go_on_until_they_wait(self):
        for _ in range(6):
            self.messages_are_published(MOST_AT_ONCE)
            worker = self.worker()
            for claim in self.claim(worker):
                self.drive(worker, claim)

    @rule()
    def a_run_subscribes(self):
        if len(self.readers) < 4:
            run = self.new_run()
            for _ in range(2):  # as after a crash
                self.tell(act_of("subscribe", id=run, run=run), f"s{run}")
            self.readers.append(Reader(run, self.sent))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), batches=st.integers(1, 12))
    def a_subscriber_reads(self, data, batches):
        self.reads(data.draw(st.sampled_from(self.readers)), batches)

    def reads(self, reader, batches=10**6):
        for signal in self.store.list_signals(reader.run, reader.seen, 10**6):
            if signal.name == f"{MESSAGES}t" and batches:
                batches -= 1
                reader.seen = signal.seq
                batch = batch_in(signal.payload)
                assert batch.first == self.numbered_from(reader) + len(reader.read)
                reader.read += [int(bytes(one)) for one in batch.messages]
                self.tell(act_of("read", id=reader.run, number=batch.last), f"r{reader.run}:{signal.seq}")

    def numbered_from(self, reader):
        return reader.first + 1

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), tells=st.booleans())
    def a_subscriber_leaves_or_ends(self, data, tells):
        reader = data.draw(st.sampled_from(self.readers))
        self.readers.remove(reader)
        if tells:
            self.tell(act_of("leave", id=reader.run))
        else:
            self.finish(reader.run)

    @invariant()
    def messages_come_in_order_once_and_never_too_many(self):
        for reader in self.readers:
            assert reader.read == list(range(reader.first, reader.first + len(reader.read)))
            assert self.sent - reader.first - len(reader.read) <= MOST_UNREAD

    def teardown(self):
        if not hasattr(self, "store"):
            return
        self.settle()
        for reader in self.readers:
            self.reads(reader)
            assert reader.read == list(range(reader.first, self.sent)), "a message is lost"
        self.settle()
        self.settle()  # it looks for subscribers that have ended
        for run in self.waiting:
            names = [one.name for one in self.store.list_signals(run, 0)]
            assert names == [f"{ROOM}t"], "a publisher waits for ever"


TestTopics = Topics.TestCase
TestTopics.settings = settings(max_examples=examples(40, 1500), stateful_step_count=30, deadline=None)


# -- a barrier ---------------------------------------------------------------------------------------------------------


class Barriers(Keepers):
    """Parties that arrive at a barrier, each at its own pace, and leave or end."""

    keeper, workflow, run_id, given = BarrierKeeper(), BARRIER_WORKFLOW, barrier_id("g", "b"), {"name": "b"}

    def __init__(self):
        super().__init__()
        self.parties, self.arrived, self.gone = {}, {}, set()

    @initialize(count=st.integers(1, 4), seconds=st.sampled_from([None, 30.0]))
    def parties_are_born(self, count, seconds):
        self.count, self.seconds = count, seconds

    def outcomes(self):
        """Return what each call was told: an error, or the parties of its generation."""
        found = {}
        for run in self.parties:
            for signal in self.store.list_signals(run, 0, 1000):
                error = reported_in(signal.payload)
                number = int(signal.name.rpartition("#")[2])
                outcome = error.message if error is not None else msgspec.json.decode(signal.payload)["parties"]
                found.setdefault((number, run), []).append(outcome)
        return found

    def arrive(self, run, number):
        payload = arrival(
            "arrive",
            party=run,
            life=run,
            number=number,
            run=run,
            signal=f"ks:barrier:b:#{number}",
            parties=self.count,
            seconds=self.seconds,
        )
        self.tell(payload)
        self.arrived.setdefault(number, set()).add(run)

    @rule(data=st.data(), again=st.booleans())
    def a_party_arrives(self, data, again):
        if len(self.parties) < self.count:
            self.parties[self.new_run()] = 0
        living = [run for run in self.parties if run not in self.gone]
        if living:
            run = data.draw(st.sampled_from(living))
            told = self.outcomes()
            if self.parties[run] and (self.parties[run], run) not in told:
                number = self.parties[run]  # it waits: a crash repeats its arrival
            else:
                number = self.parties[run] = self.parties[run] + (not again or not self.parties[run])
            self.arrive(run, number)

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds):
        self.clock.passes(seconds)

    @precondition(lambda self: self.parties)
    @rule(data=st.data(), tells=st.booleans())
    def a_party_leaves_or_ends(self, data, tells):
        run = data.draw(st.sampled_from(sorted(self.parties)))
        if run in self.gone:
            return
        self.gone.add(run)
        if tells and self.parties[run]:
            self.tell(arrival("leave", party=run, life=run, number=self.parties[run], run=run))
        else:
            self.finish(run)

    @invariant()
    def all_parties_of_a_generation_get_the_same_outcome(self):
        if not hasattr(self, "store") or not hasattr(self, "count"):
            return
        by_number = {}
        for (number, run), outcomes in self.outcomes().items():
            assert all(one == outcomes[0] for one in outcomes), (number, run, outcomes)
            by_number.setdefault(number, []).append(outcomes[0])
        for number, outcomes in by_number.items():
            assert all(one == outcomes[0] for one in outcomes), (number, outcomes)
            if isinstance(outcomes[0], list):
                assert len(outcomes[0]) == self.count
                assert set(outcomes[0]) <= self.arrived[number]

    def teardown(self):
        if not hasattr(self, "store") or not hasattr(self, "count"):
            return
        self.settle()
        self.settle()  # it looks for parties that have ended
        told = self.outcomes()
        for run, number in self.parties.items():
            complete = len(self.arrived.get(number, ())) >= self.count
            if run not in self.gone and number and (complete or self.gone & self.arrived[number]):
                assert (number, run) in told, "a party waits for ever"


TestBarriers = Barriers.TestCase
TestBarriers.settings = settings(max_examples=examples(60, 2000), stateful_step_count=30, deadline=None)
