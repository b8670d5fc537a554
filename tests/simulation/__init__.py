"""A simulated world for the real engine: workers, leases, recovery and stores under a virtual clock, from one seed.

`play(draw(42))` plays the history of seed 42 and gives its outcome: `broken` lists what was promised and not kept,
`story` who did what when. The same seed gives the same history, byte for byte.

`programs` makes up workflows (`STATEMENTS`), `plans` what befalls them (`FAULTS`), `world` plays a plan with a
`process` for each worker and one for the `client`, and `promises` says what must hold (`PROMISES`). `shrink` makes a
failing plan short enough to read and to keep. `python -m tests.simulation` plays many. To see whether a
broken engine is caught, break it (a mutant is a monkeypatch round `play`), play seeds until `outcome.broken` is not
empty, and look at which promise it names.
"""

from __future__ import annotations

from .plans import FAULTS, Plan, draw
from .promises import PROMISES
from .world import Outcome, World

__all__ = ["FAULTS", "PROMISES", "Outcome", "Plan", "World", "draw", "play"]


def play(plan: Plan) -> Outcome:
    """Play one history."""
    return World(plan).play()
