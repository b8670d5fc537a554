"""Watches where runs in memory stand: every combination of states that a run reaches must be in the kernel's table."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from keepstep.kernel.stop import ALLOWED, DELIVERED, DETACHED, NEXT_PHASES, Order, Phase, Stop, Wish

#: Wish, cancel, deadline and phase.
Combination = tuple[Wish, Order, Order, Phase]

TABLE: frozenset[Combination] = frozenset(one for row in ALLOWED for one in product(*row))
#: What runs have reached that the table does not allow.
WRONG: list[str] = []


def standing(stop: Stop) -> Combination:
    return stop.wish, stop.cancel, stop.deadline, stop.phase


def faults_of(stop: Stop) -> list[str]:
    """What is wrong with where a run stands."""
    wish, cancel, deadline, phase = now = standing(stop)
    on_its_way = cancel in (Order.SETTLING, Order.RECORDED) or deadline is Order.RECORDED
    rules = {
        "it is not in the table": now in TABLE,
        "a run is detached for a reason": (phase is DETACHED) == bool(stop.detached),
        "a cancel is kept while it settles": (cancel is Order.SETTLING) == (stop.cancel_signal is not None),
        "nothing new starts": stop.holding == (on_its_way or wish is not Wish.NONE),
        "the code cleans up": stop.is_ending == (cancel is not Order.NONE or deadline is DELIVERED),
    }
    return [f"{rule}: {' '.join(one.name for one in now)}" for rule, holds in rules.items() if not holds]


def watch() -> None:
    """Look at every move of every run from now on."""
    before: dict[int, tuple[Stop, Phase]] = {}  # the runs themselves, too, so that no other gets the id of one

    def watched(move: Callable[[Stop], None]) -> Callable[[Stop], None]:
        def moved(self: Stop) -> None:
            move(self)
            WRONG.extend(faults_of(self))
            _, old = before.pop(id(self), (self, Phase.DRIVING))
            if old is not self.phase and self.phase not in NEXT_PHASES[old]:
                WRONG.append(f"a run went from {old.name} to {self.phase.name}")
            if self.phase is not DETACHED:
                before[id(self)] = (self, self.phase)

        return moved

    Stop._moved = watched(Stop._moved)  # type: ignore[method-assign]
    Stop._phase_moved = watched(Stop._phase_moved)  # type: ignore[method-assign]
