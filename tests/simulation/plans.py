"""Plans: what a seed draws before a history begins.

A plan is plain JSON, so it can be kept, and parts of it deleted. To have something new befall the world, write a
function that makes it happen and one that draws it, and put them into
`FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from . import services
from .bodies import CLIENT
from .dags import draw_dag
from .graphs import draw_graph
from .programs import Maker
from .queues import Jobs, draw_act, draw_change, draw_queue
from .ticks import draw_schedule, purge

if TYPE_CHECKING:
    from .process import Process
    from .world import World

Event = dict[str, Any]
Plan = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """How a fault is drawn, and what it does; `moments` says what its moment counts."""

    happen: Callable[[World, Process, Event], None]
    draw: Callable[[Random], Event]
    moments: tuple[str, ...]
    weight: int = 2


# -- faults of a process -----------------------------------------------------------------------------------------------


def _kill(world: World, process: Process, event: Event) -> None:
    world.back_after[process.slot] = event["back"]
    process.die("between two callbacks")


def _kill_at_call(world: World, process: Process, event: Event) -> None:
    world.back_after[process.slot] = event["back"]
    world.next_fate[process.slot] = f"die {event['when']}"


def _pause(world: World, process: Process, event: Event) -> None:
    process.paused_until = world.now + event["seconds"]
    world.tell(f"{process} is paused for {event['seconds']} s")


def _stop(world: World, process: Process, event: Event) -> None:
    world.back_after[process.slot] = event["back"]
    world.tell(f"{process} is told to stop")
    process.loop.call_soon(process.stop.set)


def _deploy(world: World, process: Process, event: Event) -> None:
    world.codes[process.slot] += 1
    _stop(world, process, event)


def _set_clock(world: World, process: Process, event: Event) -> None:
    world.offsets[process.slot] += event["by"]
    world.tell(f"the wall clock of {process} is set by {event['by']} s")


# -- faults of the store -----------------------------------------------------------------------------------------------


def _fail(world: World, process: Process, event: Event) -> None:
    world.next_fate[process.slot] = event["how"]


def _lose_claim(world: World, process: Process, event: Event) -> None:
    world.lost_claims.add(process.slot)


def _slow(world: World, process: Process, event: Event) -> None:
    world.slow[process.slot], world.slow_calls[process.slot] = event["by"], event["calls"]
    world.tell(f"the store is slow for {process}")


def _outage(world: World, process: Process, event: Event) -> None:
    world.down_until = max(world.down_until, world.now + event["seconds"])
    world.tell(f"the store is down for {event['seconds']} s")


def _deafen(world: World, process: Process, event: Event) -> None:
    world.deaf[process.slot] = (event["how"], world.now + event["seconds"])
    world.tell(f"notifications to {process} are {event['how']} for {event['seconds']} s")


# -- what people do ----------------------------------------------------------------------------------------------------


def _cancel(world: World, process: Process, event: Event) -> None:
    world.client.does(world.now, event["run"], "cancel")


def _pause_run(world: World, process: Process, event: Event) -> None:
    world.client.does(world.now, event["run"], "pause", event["seconds"])


def _rewind(world: World, process: Process, event: Event) -> None:
    world.client.does(world.now, event["run"], "rewind", event["part"])


def _edit(world: World, process: Process, event: Event) -> None:
    world.client.does(world.now, event["run"], "edit", event["value"])


def _fork(world: World, process: Process, event: Event) -> None:
    world.client.does(world.now, event["run"], "fork", event["part"])


def _retry(world: World, process: Process, event: Event) -> None:
    world.client.does(world.now, event["run"], "retry")


def _purge(world: World, process: Process, event: Event) -> None:
    purge(world)


def _cancel_job(world: World, process: Process, event: Event) -> None:
    world.jobs.does(Jobs.cancel, event)


def _mend_job(world: World, process: Process, event: Event) -> None:
    world.jobs.does(Jobs.mend, event)


def _limit(world: World, process: Process, event: Event) -> None:
    world.jobs.does(Jobs.limit, event)


def _limit_service(world: World, process: Process, event: Event) -> None:
    world.calls_of_service.limit(event)


def _seconds(random: Random, *choices: float) -> float:
    return round(random.choice(choices) * (0.5 + random.random()), 3)


#: Everything that may befall a history.
FAULTS: dict[str, Fault] = {
    "kill": Fault(_kill, lambda r: {"back": _seconds(r, 0.1, 1.0, 4.0)}, ("callback", "time", "body"), 6),
    "kill at call": Fault(
        _kill_at_call,
        lambda r: {"back": _seconds(r, 0.1, 1.0, 4.0), "when": r.choice(("before", "after"))},
        ("call",),
        6,
    ),
    "pause": Fault(
        _pause, lambda r: {"seconds": _seconds(r, 0.5, 3.0, 3.0, 6.0, 10.0)}, ("callback", "time", "body", "claim"), 4
    ),
    "stop": Fault(_stop, lambda r: {"back": _seconds(r, 0.1, 2.0)}, ("callback", "time"), 2),
    "deploy": Fault(_deploy, lambda r: {"back": _seconds(r, 0.1, 2.0)}, ("time",), 1),
    "set clock": Fault(_set_clock, lambda r: {"by": r.choice((-1, 1)) * _seconds(r, 0.3, 3.0, 20.0)}, ("time",), 2),
    "fail": Fault(_fail, lambda r: {"how": r.choice(("fail", "lose", "lose", "vanish"))}, ("call",), 6),
    "lose claim": Fault(_lose_claim, lambda _: {}, ("claim",), 2),
    "slow": Fault(
        _slow, lambda r: {"by": _seconds(r, 0.05, 0.5, 4.0), "calls": int(2 ** (5 * r.random()))}, ("call", "time"), 3
    ),
    "outage": Fault(_outage, lambda r: {"seconds": _seconds(r, 0.2, 1.0, 4.0)}, ("time",), 2),
    "deafen": Fault(
        _deafen,
        lambda r: {"how": r.choice(("lost", "late", "twice")), "seconds": _seconds(r, 1.0, 5.0)},
        ("time",),
        2,
    ),
    "cancel": Fault(_cancel, lambda r: {}, ("time",), 2),
    "pause run": Fault(_pause_run, lambda r: {"seconds": _seconds(r, 0.5, 3.0)}, ("time",), 2),
    # What came later is drawn apart, so that every seed goes on to mean what it meant before.
    "rewind": Fault(_rewind, lambda r: {"part": round(r.random(), 3)}, ("time",), 0),
    "fork": Fault(_fork, lambda r: {"part": round(r.random(), 3)}, ("time",), 0),
    "edit": Fault(_edit, lambda r: {"value": r.randint(1, 9)}, ("time",), 0),
    "retry": Fault(_retry, lambda _: {}, ("time",), 0),
    "purge": Fault(_purge, lambda _: {}, ("time",), 0),
    "cancel job": Fault(_cancel_job, draw_act, ("time",), 0),
    "mend job": Fault(_mend_job, draw_act, ("time",), 0),
    "limit": Fault(_limit, draw_change, ("time",), 0),
    "limit service": Fault(_limit_service, services.draw_change, ("time",), 0),
}
#: How often what came later befalls a history.
_LATER = {"rewind": 0.1, "fork": 0.06}
#: What is done to graphs only, as often as this.
_TO_GRAPHS = {"edit": 0.3}
_OF_PEOPLE = ("cancel", "pause run", "rewind", "edit", "fork", "retry")
#: How often steps of a run are broken until a person mends them and retries it.
_BROKEN = 0.15
#: How many moments of each kind there may be before it, as powers of two: callbacks, calls, bodies that begin, claims.
_MOMENTS = {"callback": 9, "call": 7, "body": 4, "claim": 2}
#: These may befall the client's own process as well.
_ALSO_CLIENT = ("fail", "slow", "deafen", "pause")


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(f"plan {seed}")
    workers = random.choice((1, 2, 2, 2, 3))
    runs = [_draw_run(random, number, workers) for number in range(random.choice((1, 1, 1, 2, 3)))]
    plan: Plan = {
        "seed": seed,
        "workers": workers,
        "lease": 2.0,
        "latency": random.choice((0.0, 0.001, 0.02)),
        "limit": random.choice((2, 3, 50, 50)),
        "runs": runs,
        "events": sorted(
            (
                _draw_event(random, workers, [run["id"] for run in runs])
                for _ in range(random.choice((0, 1, 2, 3, 4, 6)))
            ),
            key=str,
        ),
    }
    if random.random() < 0.08:
        plan["limit"] = 3
        plan["poison"] = {str(random.randint(1, 8)): random.choice((1, 2, 100))}
    _draw_later(Random(f"later {seed}"), plan)
    _draw_broken(Random(f"broken {seed}"), plan)
    _draw_schedule(Random(f"schedule {seed}"), plan)
    _draw_queue(Random(f"queue {seed}"), plan)
    _draw_service(Random(f"service {seed}"), plan)
    _draw_limits(Random(f"limits of service {seed}"), plan)
    return plan


def _draw_schedule(random: Random, plan: Plan) -> None:
    """Have workers start runs by a schedule, whose finished runs a person may remove."""
    schedule = draw_schedule(random)
    if schedule is None:
        return
    plan["schedule"] = schedule
    others = ("kill", "kill at call", "pause", "stop", "fail", "purge", "set clock")
    ids = [run["id"] for run in plan["runs"]]
    for what in random.choices(others, k=random.choice((0, 1, 2, 3))):
        plan["events"].append(_draw_event(random, plan["workers"], ids, what))


def _draw_queue(random: Random, plan: Plan) -> None:
    """Have runs wait in a queue with limits, which a person may change."""
    queue = draw_queue(random, plan["workers"])
    if queue is None:
        return
    plan["queue"] = queue
    others = ("kill", "kill at call", "pause", "stop", "fail", "lose claim", "cancel job", "mend job", "limit")
    ids = [run["id"] for run in plan["runs"]]
    for what in random.choices(others, k=random.choice((0, 1, 2, 3, 4))):
        plan["events"].append(_draw_event(random, plan["workers"], ids, what))


def _draw_service(random: Random, plan: Plan) -> None:
    """Have runs call a service with limits."""
    service = services.draw_service(random, plan["workers"])
    if service is None:
        return
    plan["service"] = service
    others = ("kill", "kill", "kill at call", "pause", "stop", "fail", "lose claim")
    ids = [run["id"] for run in plan["runs"]]
    for what in random.choices(others, k=random.choice((0, 1, 2, 3, 4))):
        plan["events"].append(_draw_event(random, plan["workers"], ids, what))


def _draw_limits(random: Random, plan: Plan) -> None:
    """Limit what the calls of a service spend, and have a person change its limits for a while."""
    if "service" not in plan:
        return
    spend = services.draw_spend(random)
    if spend is not None:
        plan["service"]["limits"]["spend"] = spend
    if random.random() < 0.5:
        ids = [run["id"] for run in plan["runs"]]
        plan["events"].append(_draw_event(random, plan["workers"], ids, "limit service"))


def _draw_later(random: Random, plan: Plan) -> None:
    """Draw what the first plans did not know: graphs and dags instead of programs, and what else may befall a run."""
    kind = random.random()
    if kind < 0.25:
        plan["runs"][0].update(draw_graph(random) if kind < 0.17 else draw_dag(random))
        if any(event["what"] == "set clock" for event in plan["events"]):
            plan["runs"][0]["stops"] = 0  # a clock that is behind lets a run sleep on at each of them
    ids = [run["id"] for run in plan["runs"]]
    graphs = [run["id"] for run in plan["runs"] if run["workflow"] == "graph"]
    for what, share in _LATER.items():
        if random.random() < share:
            plan["events"] += [_draw_event(random, plan["workers"], ids, what) for _ in range(random.choice((1, 1, 2)))]
    for what, share in _TO_GRAPHS.items() if graphs else ():
        if random.random() < share:
            plan["events"].append(_draw_event(random, plan["workers"], graphs, what))


def _draw_broken(random: Random, plan: Plan) -> None:
    """Have steps of a run fail until a person mends them; a fork of that run would fail on its own."""
    if random.random() >= _BROKEN:
        return
    run = random.choice(plan["runs"])
    run["broken"] = sorted({random.randint(1, 12) for _ in range(random.choice((1, 1, 2, 4)))})
    plan["events"] = [one for one in plan["events"] if not (one["what"] == "fork" and one["run"] == run["id"])]
    plan["events"].append(_draw_event(random, plan["workers"], [run["id"]], "retry"))


def _draw_run(random: Random, number: int, workers: int) -> dict[str, Any]:
    maker = Maker(random)
    run: dict[str, Any] = {
        "id": f"run-{number}",
        "workflow": random.choice(("program", "program", "program", "buffered")),
        "parts": [maker.several(1, 5) for _ in range(random.choice((1, 1, 1, 2)))],
        "by": random.choice((CLIENT, *range(workers))),
        "at": round(random.random(), 3),
    }
    if random.random() < 0.25:
        run["deadline"] = _seconds(random, 1.0, 5.0)
    if random.random() < 0.1:
        run["delay"] = _seconds(random, 0.5, 3.0)
    return run


def _draw_event(random: Random, workers: int, runs: list[str], what: str = "") -> Event:
    what = what or random.choices(list(FAULTS), [fault.weight for fault in FAULTS.values()])[0]
    fault = FAULTS[what]
    counts = random.choice(fault.moments)
    if counts == "time":
        moment: float = round(random.random() ** 2 * 12.0, 3)
    else:
        moment = int(2 ** (random.random() * _MOMENTS[counts]))
    slots = [*range(workers), *([CLIENT] if what in _ALSO_CLIENT else [])]
    event: Event = {"what": what, "slot": random.choice(slots), "at": [counts, moment], **fault.draw(random)}
    if what in _OF_PEOPLE:
        event["slot"], event["run"] = CLIENT, random.choice(runs)
    return event
