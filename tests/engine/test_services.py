"""Services with limits, as a program meets them: places, rates, spend, breakers, parked runs, changes by a person."""

import asyncio
import threading
import time

import pytest

import keepstep as ks
from keepstep.cli.formatting import waits_for
from keepstep.engine.shares import Retries
from keepstep.kernel import attempt, parking
from keepstep.policies.service import DECLARED
from keepstep.workflows.definition import SERVICES
from tests.engine.world import until, until_status

pytestmark = pytest.mark.on_postgres


class Gauge:
    """How many bodies run at once, the most there ever were, and when each began."""

    def __init__(self):
        self.now, self.most, self.began = 0, 0, []
        self._lock = threading.Lock()

    def enter(self, name):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.began.append(name)

    def leave(self):
        with self._lock:
            self.now -= 1

    async def hold(self, name, seconds=0.01):
        self.enter(name)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.leave()


@pytest.fixture
def gauge():
    return Gauge()


def calling(gauge, service, seconds=0.01, **options):
    @ks.step(service=service, **options)
    async def call(name):
        await gauge.hold(name, seconds)
        return name

    @ks.workflow
    async def calling(name):
        return await call(name)

    return calling


async def test_no_more_attempts_run_at_once_than_there_are_places(world, gauge):
    program = calling(gauge, ks.Service("api", concurrency=2))
    async with world.engine() as engine:
        handles = [await engine.start(program, n) for n in range(8)]
        assert [await handle.result(60) for handle in handles] == list(range(8))
    assert gauge.most == 2


async def test_branches_of_one_run_share_the_places(world, gauge):
    ks.Service("api", concurrency=2)

    @ks.step(service="api")
    async def call(n):
        await gauge.hold(n)
        return n

    @ks.workflow
    async def mapping():
        return await ks.map(call, range(7))

    async with world.engine() as engine:
        assert await (await engine.start(mapping)).result(60) == list(range(7))
    assert gauge.most == 2


async def test_an_undeclared_service_lets_all_pass(world, gauge):
    program = calling(gauge, "unknown")
    async with world.engine() as engine:
        handles = [await engine.start(program, n) for n in range(5)]
        assert [await handle.result(60) for handle in handles] == list(range(5))
        info = await engine.services.get("unknown")
    assert (str(info.limits), info.breaker, info.is_set) == ("no limit", None, False)


@pytest.mark.live_only
async def test_a_thread_that_outlives_its_timeout_keeps_its_place(world):
    release, begun = threading.Event(), []
    service = ks.Service("api", concurrency=1)

    @ks.step(service=service, timeout=0.05)
    def stuck():
        begun.append("stuck")
        release.wait(30)

    @ks.step(service=service)
    async def quick():
        begun.append(f"quick, released {release.is_set()}")
        return 1

    @ks.workflow
    async def sticking():
        try:
            await stuck()
        except ks.StepTimedOut:
            return "late"

    @ks.workflow
    async def following():
        return await quick()

    async with world.engine() as engine:
        first = await engine.start(sticking)
        assert await first.result(60) == "late"
        second = await engine.start(following)
        await until(lambda: _asked(engine, "api"))
        assert begun == ["stuck"]
        release.set()
        assert await second.result(60) == 1
    assert begun == ["stuck", "quick, released True"]


def _asked(engine, service):
    """Whether an attempt waits for a place in the process of an engine."""
    return bool(engine.shares.of(service)._line)


async def test_a_backoff_holds_no_place(world, gauge, effects):
    ks.Service("api", concurrency=1)

    @ks.step(service="api", retry=ks.Retry(attempts=2, base_seconds=1.0))
    async def flaky():
        effects.append("flaky")
        if effects.count("flaky") == 1:
            raise ConnectionError("no")
        return "flaky"

    @ks.step(service="api")
    async def other():
        effects.append("other")
        return "other"

    @ks.workflow
    async def retrying():
        return await flaky()

    @ks.workflow
    async def beside():
        return await other()

    async with world.engine() as engine:
        first = await engine.start(retrying)
        await until(lambda: _backs_off(engine, first) and engine.shares.of("api").running == 0)
        second = await engine.start(beside)
        assert await second.result(60) == "other"
        assert await first.result(60) == "flaky"
    assert effects == ["flaky", "other", "flaky"]


def _backs_off(engine, handle):
    """Whether a run in memory waits for a time."""
    context = engine.live.get(handle.id)
    return context is not None and any(wait.due is not None for wait in context.waits.values())


async def test_a_step_that_is_not_ready_holds_no_place(world, effects):
    ks.Service("api", concurrency=1)
    doors = {"open": False}

    @ks.step(service="api", ready=lambda: doors["open"], ready_every=0.05)
    async def later():
        effects.append("later")

    @ks.step(service="api")
    async def now():
        effects.append("now")
        doors["open"] = True

    @ks.workflow
    async def waiting():
        await later()

    @ks.workflow
    async def going():
        await now()

    async with world.engine() as engine:
        first = await engine.start(waiting)
        await until(lambda: _is_live(engine, first))
        await (await engine.start(going)).result(60)
        await first.result(60)
    assert effects == ["now", "later"]


def _is_live(engine, handle):
    return handle.id in engine.live


async def test_a_step_in_doubt_needs_a_place_once_it_is_resolved(world, effects):
    ks.Service("api", concurrency=1)

    @ks.step(service="api", at_most_once=True, in_doubt="repeat")
    async def pay():
        effects.append("pay")
        if len(effects) == 1:
            await asyncio.sleep(3600)
        return "paid"

    @ks.workflow
    async def paying():
        return await pay()

    engine = await world.started()
    handle = await engine.start(paying, run_id="pay")
    await until(lambda: effects)
    await engine.services.set("api", concurrency=0)
    engine = await world.crash_and_recover(engine)
    await until(lambda: _asked(engine, "api"))
    assert effects == ["pay"]
    await engine.services.set("api", concurrency=1)
    handle = await engine.get("pay")
    assert await handle.result(60) == "paid"
    await engine.close()


# -- parked runs -------------------------------------------------------------------------------------------------------


async def test_a_run_that_waits_for_a_place_is_parked(world, gauge):
    program = calling(gauge, ks.Service("api", concurrency=0))
    async with world.engine(linger_seconds=0.01) as engine:
        handle = await engine.start(program, 1)
        await until_status(handle, "waiting")
        run = await handle.run()
        assert (run.service, run.due_at) == ("api", None)
        assert waits_for(run) == "api (concurrency)"
        assert (await engine.services.get("api")).parked == 1
        await engine.services.set("api", concurrency=1, reason="it is open")
        assert await handle.result(60) == 1
        info = await engine.services.get("api")
        assert (info.parked, info.is_set, info.log[-1].reason) == (0, True, "it is open")
        assert str((await engine.services.reset("api")).limits) == "concurrency 0"
    assert gauge.began == [1]


async def test_a_parked_run_goes_on_when_a_place_falls_free(world, gauge):
    service = ks.Service("api", concurrency=1)
    program = calling(gauge, service)
    release = asyncio.Event()

    @ks.step(service=service)
    async def hold():
        gauge.enter("hold")
        await release.wait()
        gauge.leave()

    @ks.workflow
    async def holding():
        await hold()

    async with world.engine(linger_seconds=0.01) as engine, world.engine(linger_seconds=0.01):
        first = await engine.start(holding)
        await until(lambda: gauge.began)
        others = [await engine.start(program, n) for n in range(3)]
        for one in others:
            await until_status(one, "waiting")
        release.set()
        await first.result(60)
        assert [await one.result(60) for one in others] == [0, 1, 2]
    assert gauge.most == 1


async def test_a_parked_run_can_be_cancelled(world, gauge):
    program = calling(gauge, ks.Service("api", concurrency=0))
    async with world.engine(linger_seconds=0.01) as engine:
        handle = await engine.start(program, 1)
        await until_status(handle, "waiting")
        await handle.cancel()
        with pytest.raises(ks.RunCancelled):
            await handle.result(60)
    assert gauge.began == []


async def test_the_deadline_of_a_parked_run_holds(world, gauge):
    program = calling(gauge, ks.Service("api", concurrency=0))
    async with world.engine(linger_seconds=0.01) as engine:
        handle = await engine.start(program, 1, deadline=0.5)
        with pytest.raises(ks.RunTimedOut):
            await handle.result(60)
    assert gauge.began == []


async def test_a_run_at_two_services_goes_on_where_there_is_a_place(world, gauge, monkeypatch):
    monkeypatch.setattr(parking, "MANY_SERVICES_SECONDS", 0.1)
    ks.Service("shut", concurrency=0)
    ks.Service("busy", concurrency=0)

    @ks.step(service="shut")
    async def first():
        gauge.enter("first")

    @ks.step(service="busy")
    async def second():
        gauge.enter("second")

    @ks.workflow
    async def both():
        return await ks.gather(first(), second())

    async with world.engine(linger_seconds=0.01) as engine:
        handle = await engine.start(both)
        await until_status(handle, "waiting")
        await engine.services.set("busy", concurrency=1)
        await until(lambda: gauge.began)
        assert gauge.began == ["second"]
        await engine.services.set("shut", concurrency=1)
        await handle.result(60)


async def test_a_run_at_a_service_that_nobody_uses_any_more_goes_on(world, gauge):
    program = calling(gauge, ks.Service("api", concurrency=0))
    async with world.engine(linger_seconds=0.01) as engine:
        handle = await engine.start(program, 1, run_id="one")
        await until_status(handle, "waiting")
    DECLARED.clear()
    SERVICES.clear()

    @ks.step
    async def call(name):
        return name * 10

    @ks.workflow(name="calling")
    async def newer(name):
        return await call(name)

    async with world.engine() as engine:
        assert await (await engine.get("one")).result(60) == 10


async def test_places_of_a_crashed_worker_fall_free(world, gauge):
    program = calling(gauge, ks.Service("api", concurrency=1), seconds=3600)
    engine = await world.started()
    await engine.start(program, 1, run_id="one")
    await until(lambda: gauge.began)
    gauge.began.clear()
    DECLARED.clear()
    ks.Service("api", concurrency=1)
    program = calling(gauge, "api")
    engine = await world.crash_and_recover(engine)
    assert await (await engine.get("one")).result(60) == 1
    assert [share.worker for share in (await engine.services.get("api")).shares] == [engine.worker.id]
    await engine.close()


# -- rate and spend ----------------------------------------------------------------------------------------------------


async def test_attempts_begin_no_more_often_than_the_rate(world, gauge):
    program = calling(gauge, ks.Service("api", rate=ks.Rate(10, per=1, burst=1)), seconds=0)
    async with world.engine() as engine:
        began = time.monotonic()
        handles = [await engine.start(program, n) for n in range(25)]
        for handle in handles:
            await handle.result(60)
        took = time.monotonic() - began
    # At most burst + rate · (w + 1) attempts begin in any w seconds.
    assert took > (25 - 1) / 10 - 1 - 0.1


async def test_a_retry_counts_for_the_rate_too(world, effects):
    ks.Service("api", rate=ks.Rate(1, per=3600, burst=1))

    @ks.step(service="api", retry=ks.Retry(attempts=2, base_seconds=0))
    async def flaky():
        effects.append(1)
        raise ConnectionError("no")

    @ks.workflow
    async def retrying():
        await flaky()

    async with world.engine(linger_seconds=0.01) as engine:
        handle = await engine.start(retrying)
        await until_status(handle, "waiting")
        assert waits_for(await handle.run()) == "api (rate)"
        await engine.services.set("api", rate=None)
        with pytest.raises(ks.RunFailed):
            await handle.result(60)
    assert len(effects) == 2


async def test_attempts_wait_while_too_much_was_spent(world, gauge):
    ks.Service("api", spend=ks.Rate(100, per=3600, burst=100))

    @ks.step(service="api", cost=lambda n: 10)
    async def ask(n):
        gauge.enter(n)
        ks.spend(tokens=150)
        return n

    @ks.workflow
    async def asking(n):
        return await ask(n)

    async with world.engine(linger_seconds=0.01) as engine:
        assert await (await engine.start(asking, 1)).result(60) == 1
        second = await engine.start(asking, 2)
        await until_status(second, "waiting")
        assert waits_for(await second.run()) == "api (spend)"
        await engine.services.set("api", spend=None)
        assert await second.result(60) == 2


async def test_declared_cost_is_expected_before_a_body_has_told_its_spend(world, gauge, monkeypatch):
    program, asks = calling(gauge, ks.Service("api", spend=ks.Rate(100, per=3600, burst=100)), 1.2, cost=3), []
    async with world.engine() as engine:
        pass_gates = engine.store.pass_gates

        def asked(worker, some):
            asks.extend(some)
            return pass_gates(worker, some)

        monkeypatch.setattr(engine.store, "pass_gates", asked)
        await (await engine.start(program, 1)).result(60)
        await until(lambda: any(ask.begun for ask in asks))
    assert {ask.estimate for ask in asks if ask.begun} == {3.0}


@pytest.mark.parametrize("amount", [{"tokens": 10**400}, {"cost": 1e308}], ids=["tokens", "cost"])
async def test_an_amount_that_is_refused_costs_no_place(world, amount):
    ks.Service("api", concurrency=1, spend=ks.Rate(100))

    @ks.step(service="api", retry=ks.Retry.none())
    async def call(n):
        if n == 0:
            ks.spend(**amount)
        return n

    @ks.workflow
    async def calling(n):
        return await call(n)

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match=r"must be finite and from 0 to 1e\+15"):
            await (await engine.start(calling, 0)).result(60)
        assert await (await engine.start(calling, 1)).result(60) == 1


async def test_a_cost_that_exits_is_replaced_by_the_mean(world, caplog):
    ks.Service("api", spend=ks.Rate(100))

    @ks.step(service="api", cost=lambda n: exec("raise SystemExit(3)") if n else 1.0)
    async def call(n):
        return n

    @ks.workflow
    async def calling(n):
        return await call(n)

    async with world.engine() as engine:
        assert await (await engine.start(calling, 1)).result(60) == 1
    assert "cost= of step call#1 failed: SystemExit: 3" in caplog.text


# -- breakers ----------------------------------------------------------------------------------------------------------


def unwell(effects, open_seconds=0.3, **options):
    """A workflow whose service fails until `effects` is told that it is well."""
    ks.Service("api", breaker=ks.Breaker(failures=2, open_seconds=open_seconds, successes=1), **options)

    @ks.step(service="api")
    async def call(n):
        effects.append(n)
        if "well" not in effects:
            raise ConnectionError("refused")
        return n

    @ks.workflow
    async def calling(n):
        return await call(n)

    return calling


async def _fail(engine, program, n):
    with pytest.raises(ks.RunFailed):
        await (await engine.start(program, n)).result(60)


async def test_an_open_breaker_lets_attempts_wait_until_a_probe_succeeds(world, effects):
    program, seen = unwell(effects), []
    async with world.engine(linger_seconds=0.01, observers=[Seen(seen)]) as engine:
        await _fail(engine, program, 1)
        await _fail(engine, program, 2)
        await until(lambda: "breaker.opened" in seen)
        effects.append("well")
        waiting = [await engine.start(program, n) for n in (3, 4, 5)]
        assert [await one.result(60) for one in waiting] == [3, 4, 5]
        await until(lambda: "breaker.closed" in seen)
        assert (await engine.services.get("api")).breaker.status == "closed"
    assert effects[:3] == [1, 2, "well"]
    assert sorted(effects[3:]) == [3, 4, 5]
    assert [name for name in seen if name.startswith("breaker.")] == [
        *("breaker.opened", "breaker.half_open", "breaker.closed"),
    ]


class Seen:
    """Keeps the names of events."""

    def __init__(self, names):
        self.names = names

    def observe(self, event):
        self.names.append(event.name)


async def test_a_failed_probe_opens_the_breaker_again(world, effects):
    program, seen = unwell(effects), []
    async with world.engine(linger_seconds=0.01, observers=[Seen(seen)]) as engine:
        await _fail(engine, program, 1)
        await _fail(engine, program, 2)
        await until(lambda: "breaker.opened" in seen)
        await _fail(engine, program, 3)
        await until(lambda: seen.count("breaker.opened") == 2)
        effects.append("well")
        assert await (await engine.start(program, 4)).result(60) == 4


async def test_an_open_breaker_fails_attempts_if_the_service_says_so(world, effects):
    program, seen = unwell(effects, open_seconds=60, when_open="fail"), []

    @ks.step(service="api")
    async def never():
        effects.append("never")

    @ks.workflow
    async def careful():
        try:
            await never()
        except ks.BreakerOpen as error:
            return str(error)

    async with world.engine(observers=[Seen(seen)]) as engine:
        await _fail(engine, program, 1)
        await _fail(engine, program, 2)
        await until(lambda: "breaker.opened" in seen)
        message = await (await engine.start(careful)).result(60)
    assert "breaker of service 'api' is open" in message
    assert "never" not in effects


async def test_errors_of_the_caller_do_not_open_the_breaker(world, effects):
    ks.Service("api", breaker=ks.Breaker(failures=1))

    @ks.step(service="api")
    async def call(n):
        effects.append(n)
        raise ValueError("the input is wrong")

    @ks.workflow
    async def calling(n):
        await call(n)

    async with world.engine() as engine:
        for n in range(3):
            await _fail(engine, calling, n)
        assert (await engine.services.get("api")).breaker.status == "closed"
    assert effects == [0, 1, 2]


async def test_a_person_opens_and_closes_a_breaker(world, effects):
    program = unwell(effects)
    effects.append("well")
    async with world.engine(worker=False) as engine:
        info = await engine.services.open_breaker("api", reason="maintenance")
        assert (info.breaker.status, info.breaker.by_hand) == ("open", True)
    async with world.engine(linger_seconds=0.01) as engine:
        handle = await engine.start(program, 1)
        await until_status(handle, "waiting")
        assert waits_for(await handle.run()) == "api (breaker)"
        assert (await engine.services.close_breaker("api")).breaker.status == "closed"
        assert await handle.result(60) == 1
        assert (await engine.services.reset("api")).breaker.by_hand is False


@pytest.mark.one_store
async def test_a_breaker_that_was_not_declared_is_not_held(world):
    async with world.engine() as engine:
        with pytest.raises(ks.DefinitionError, match="has no breaker"):
            await engine.services.open_breaker("api")


# -- retries and nesting -----------------------------------------------------------------------------------------------


def test_retries_are_a_small_part_of_the_attempts():
    retries = Retries()
    assert retries.wait_seconds(100.0) == 0.0  # one a second is always allowed
    assert retries.wait_seconds(100.1) == pytest.approx(1.0, abs=0.11)
    for _ in range(20):
        retries.begun(100.2)
    allowed = [retries.wait_seconds(100.3) == 0.0 for _ in range(10)]
    assert sum(allowed) == 3  # one fifth of 20, with the first one
    assert retries.wait_seconds(101.4) == 0.0
    assert retries.wait_seconds(130.0) == 0.0


@pytest.mark.live_only
async def test_a_step_in_a_steps_body_passes_no_gate_and_warns_once(world, caplog):
    ks.Service("api", concurrency=0)

    @ks.step(service="api", name="inner step at a service")
    async def inner():
        return 1

    @ks.step
    async def outer():
        return await inner() + await inner()

    @ks.workflow
    async def nesting():
        return await outer()

    async with world.engine() as engine:
        assert await (await engine.start(nesting)).result(60) == 2
    told = [line for line in caplog.messages if "limits of service 'api' do not hold" in line]
    assert len(told) <= 1  # once in a process, whatever the store
    assert any("inner step at a service" in name for pair in attempt._NESTED for name in pair)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"service": 7}, "takes a ks.Service"),
        ({"cost": 1}, "only a step with service="),
        ({"service": "api", "cost": -1}, "cost="),
        ({"service": "a\nb"}, "service"),
    ],
)
def test_a_wrong_service_or_cost_is_refused(options, message):
    with pytest.raises(ks.DefinitionError, match=message):

        @ks.step(**options)
        async def call(): ...


async def test_a_service_that_nobody_declares_is_warned_of_once(world, caplog, monkeypatch):
    monkeypatch.setattr("keepstep.engine.services.SERVICES", {"fsue"})
    async with world.engine() as engine:
        await engine.services.open()
    said = [one.getMessage() for one in caplog.records if "'fsue', which nobody declares" in one.getMessage()]
    assert len(said) == 1
