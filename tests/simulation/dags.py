"""Dags that a seed makes up: steps with needs, the dag that they become, and what must come of it.

A step is a list: its name, its needs, kind, seconds, whether it is performed at all, and how many of its needs it waits
for. What depends on timing or on a whim is left out of the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keepstep as ks

from .bodies import Body, here, pass_time
from .programs import Maker

if TYPE_CHECKING:
    from random import Random

PREFIX = "sim:dag "
#: How a step may wait for its needs.
_WAITS: dict[str, Any] = {"all": ks.All(), "any": ks.Any(), "two": ks.Quorum(2)}


def dag_of(run: dict[str, Any], code: int) -> ks.Dag:
    """The dag of a run, in the code of one process."""
    dag = ks.Dag(f"{PREFIX}{run['id']}", durability=run["durability"] or None)
    for name, number, needs, kind, seconds, when, wait in run["parts"][0]:
        options: dict[str, Any] = {}
        if kind == "flaky":
            options["retry"] = ks.Retry(attempts=4, base_seconds=0.2, factor=2.0, jitter=0.2)
        dag.add(
            _step(number, kind, seconds, wait),
            name,
            needs=needs,
            when=None if when == "always" else _whim if when == "whim" else _never,
            wait=_WAITS[wait],
            **options,
        )
    if code:
        dag.add(_step(0, "work", 0.0, "all"), f"new{code}")
    return dag


def _whim(_: Any) -> bool:
    return here().chance.random() < 0.5


def _never(_: Any) -> bool:
    return False


def _step(number: int, kind: str, seconds: float, wait: str) -> Any:
    async def step(**given: Any) -> int:
        with Body(number) as attempt:
            await pass_time(seconds)
            if kind == "flaky" and attempt < 3:
                raise ConnectionError("again")
            if kind == "fails":
                raise ks.Permanent(f"step {number} cannot work")
        return _value(number, wait, given)

    def plain(**given: Any) -> int:
        with Body(number):
            return _value(number, wait, given)

    return plain if kind == "plain" else step


def _value(number: int, wait: str, given: dict[str, Any]) -> int:
    """The sum of what was given for sure; what a whim, or who came first, decides is not counted."""
    sure = [value for name, value in given.items() if not name.startswith("whim") and value is not None]
    return number + (sum(sure) if wait == "all" else 0)


def foreseen_dag(run: dict[str, Any]) -> Any:
    """What an undisturbed run gives, or None if it fails: step by step, in the order in which they are written."""
    ends: dict[str, str] = {}
    values: dict[str, int] = {}
    for name, number, needs, kind, _, when, wait in run["parts"][0]:
        counted = [need for need in needs if ends[need] != "skipped" and not need.startswith("whim")]
        done = [need for need in counted if ends[need] == "done"]
        if needs and not counted:
            ends[name] = "skipped"
        elif len(done) < {"all": len(counted), "any": 1, "two": min(2, len(counted))}[wait]:
            ends[name] = "failed"
        elif when == "never":
            ends[name] = "skipped"
        else:
            ends[name] = "failed" if kind == "fails" else "done"
            values[name] = _value(number, wait, {need: values[need] for need in done})
    needed = {need for _, _, needs, *_ in run["parts"][0] for need in needs}
    last = [name for name, *_ in run["parts"][0] if name not in needed]
    if any(ends[name] == "failed" for name in last):
        return None
    return {name: values[name] if ends[name] == "done" else None for name in last}


def draw_dag(random: Random) -> dict[str, Any]:
    """The part of a run's plan that says what its dag is."""
    maker = Maker(random)
    sure: list[list[Any]] = []
    steps: list[list[Any]] = []
    for _ in range(random.randint(2, 8)):
        number = maker.number()
        if random.random() < 0.15:  # it needs nothing, and what comes of it does not count
            steps.append([f"whim{number}", number, [], "work", maker.seconds(), "whim", "all"])
            continue
        needs = [one[0] for one in random.sample(sure, min(len(sure), random.choice((0, 1, 1, 2, 3))))]
        wait = random.choice(("all", "all", *(["any"] if needs else []), *(["two"] if len(needs) > 1 else [])))
        whims = [name for name, *_ in steps if name.startswith("whim")]
        certain = any(name in needs and not theirs and when == "always" for name, _, theirs, _, _, when, _ in sure)
        if wait == "all" and certain and whims and random.random() < 0.6:  # else a whim decides whether it is performed
            needs.append(random.choice(whims))
        kind = random.choices(("work", "flaky", "plain", "fails"), (12, 2, 2, 1))[0]
        when = "never" if random.random() < 0.1 else "always"
        sure.append([f"{kind}{number}", number, needs, kind, maker.seconds(), when, wait])
        steps.append(sure[-1])
    number, whims = maker.number(), [name for name, *_ in steps if name.startswith("whim")]
    sure.append([f"work{number}", number, [], "work", 0.0, "always", "all"])
    steps += [sure[-1], [f"work{number + 1}", number + 1, [sure[-1][0], *whims], "work", 0.0, "always", "all"]]
    return {"workflow": "dag", "parts": [steps], "durability": random.choice(("", "", "", "every=3"))}


def smaller_dag(steps: list[list[Any]]) -> Iterator[list[list[Any]]]:
    """Dags with one step less, which nobody needs then."""
    for index, (gone, *_) in enumerate(steps):
        if len(steps) > 1:
            rest = steps[:index] + steps[index + 1 :]
            left = [
                [name, number, [need for need in needs if need != gone], *more] for name, number, needs, *more in rest
            ]
            if all(len(needs) >= {"all": 0, "any": 1, "two": 2}[more[-1]] for _, _, needs, *more in left):
                yield left
