"""Where a run in memory stands is one of the combinations in the kernel's table, which is the one in the docs."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from keepstep.kernel.stop import ALLOWED, DETACHED, DRIVING, FINISHING, NEXT_PHASES, RELEASING, Order, Stop, Wish
from keepstep.model import Signal
from keepstep.model.signal import CANCEL, PAUSE
from tests import run_states
from tests.run_states import TABLE, faults_of, standing

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "run-states.md"

#: Each move, and when the kernel makes it.
MOVES: dict[str, tuple[Callable[[Stop], object], Callable[[Stop], bool]]] = {
    "cancel_requested": (lambda stop: stop.cancel_requested(Signal("r", CANCEL)), lambda stop: True),
    "cancel_settled": (Stop.cancel_settled, lambda stop: True),
    "cancel_delivered": (Stop.cancel_delivered, lambda stop: True),
    "deadline_passed": (Stop.deadline_passed, lambda stop: True),
    "deadline_delivered": (Stop.deadline_delivered, lambda stop: True),
    "pause_requested": (
        lambda stop: stop.pause_requested(Signal("r", PAUSE)),
        lambda stop: not stop.is_cancelled and stop.phase is not FINISHING,
    ),
    "pause_read": (Stop.pause_read, lambda stop: True),
    "pause_ended": (Stop.pause_ended, lambda stop: True),
    "drain_requested": (Stop.drain_requested, lambda stop: True),
    "replay_only": (Stop.replay_only, lambda stop: stop.phase is DRIVING and stop.wish is Wish.NONE),
    "release_begun": (Stop.release_begun, lambda stop: stop.phase is DRIVING and stop.wish is not Wish.REPLAY_ONLY),
    "release_refused": (Stop.release_refused, lambda stop: True),
    "code_ended": (Stop.code_ended, lambda stop: True),
    "undo_begun": (Stop.undo_begun, lambda stop: stop.phase is FINISHING),
    "left": (lambda stop: stop.left("it ended"), lambda stop: True),
}


def reachable() -> set[run_states.Combination]:
    """Every combination that some order of moves leads to."""
    found: set[run_states.Combination] = set()
    waiting = [Stop()]
    while waiting:
        stop = waiting.pop()
        here = standing(stop)
        if here in found:
            continue
        found.add(here)
        for move, is_made in MOVES.values():
            if stop.phase is not DETACHED and is_made(stop):
                after = copy.copy(stop)
                move(after)
                assert faults_of(after) == []
                assert after.phase is stop.phase or after.phase in NEXT_PHASES[stop.phase]
                waiting.append(after)
    return found


def test_reachable_combinations_are_those_of_the_table():
    assert reachable() == TABLE


def test_every_move_is_tried():
    names = {name for name, value in vars(Stop).items() if callable(value) and not name.startswith("_")}
    moves = {name for name in names if not inspect.iscoroutinefunction(vars(Stop)[name])}  # a wait is no move
    assert moves == set(MOVES)


@pytest.mark.parametrize("move", [Stop.release_refused, Stop.code_ended, lambda stop: stop.left("it ended")])
async def test_whoever_waits_for_the_release_is_told_when_it_is_decided(move):
    stop = Stop()
    await stop.release_decided()
    for decide in (Stop.release_refused, move):
        stop.release_begun()
        waiters = [asyncio.create_task(stop.release_decided()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        await asyncio.sleep(0)
        assert [one.done() for one in waiters] == [True, False, False]
        decide(stop)
        await asyncio.wait_for(asyncio.gather(*waiters[1:]), 5)


def test_combination_outside_the_table_is_found():
    stop = Stop()
    stop.pause_requested(Signal("r", PAUSE))
    stop.cancel = Order.RECORDED
    stop._moved()
    assert run_states.WRONG == ["it is not in the table: PAUSE RECORDED NONE DRIVING"]
    run_states.WRONG.clear()


def test_phase_that_goes_back_is_found():
    stop = Stop()
    stop.code_ended()
    stop.release_begun()
    assert run_states.WRONG == ["a run went from FINISHING to RELEASING"]
    run_states.WRONG.clear()


@pytest.mark.parametrize("first", ["cancel_requested", "deadline_passed"])
def test_resume_does_not_start_what_a_stop_holds_back(first):
    stop = Stop()
    stop.pause_requested(Signal("r", PAUSE))
    MOVES[first][0](stop)
    stop.pause_ended()
    assert stop.holding


def test_refused_release_does_not_revive_code_that_has_ended():
    stop = Stop()
    stop.release_begun()
    stop.code_ended()
    stop.release_refused()
    assert stop.phase is FINISHING


def test_run_that_is_released_may_go_on():
    stop = Stop()
    stop.release_begun()
    assert stop.phase is RELEASING
    stop.release_refused()
    assert (stop.phase, stop.holding) == (DRIVING, False)


def test_page_shows_the_table():
    def cell(values, kind):
        return "any" if values == set(kind) else ", ".join(one.name for one in kind if one in values)

    deadlines = [Order.NONE, Order.RECORDED, Order.DELIVERED]
    kinds = (list(Wish), list(Order), deadlines, list(NEXT_PHASES))
    rows = [f"| {' | '.join(cell(values, kind) for values, kind in zip(row, kinds, strict=True))} |" for row in ALLOWED]
    text = PAGE.read_text(encoding="utf-8")
    assert [row for row in rows if row not in text] == []
    assert f"{len(TABLE)} of {len(list(product(*kinds)))}" in text
