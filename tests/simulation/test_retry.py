"""For any program, failure and moment: a retry after mending the cause ends as the undisturbed run would."""

from __future__ import annotations

import os
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation import draw, play
from tests.simulation.bodies import CLIENT
from tests.simulation.dags import draw_dag
from tests.simulation.graphs import draw_graph
from tests.simulation.programs import Maker
from tests.simulation.test_simulation import story


@st.composite
def plans(draws):
    """One run whose steps fail until somebody mends them, and a person who does that and retries it."""
    chance = Random(draws(st.integers(0, 2**32)))
    kind = draws(st.sampled_from(["program", "program", "buffered", "graph", "dag"]))
    run = {"id": "run-0", "workflow": kind, "by": 0, "at": 0.0, "parts": [Maker(chance).several(1, 5)]}
    if kind in ("graph", "dag"):
        run.update(draw_graph(chance) if kind == "graph" else draw_dag(chance))
    run["broken"] = draws(st.lists(st.integers(1, 14), min_size=1, max_size=5, unique=True))
    deadline = draws(st.sampled_from([None, None, None, 0.3, 2.0]))
    if deadline is not None:
        run["deadline"] = deadline
    at = draws(st.floats(0, 20))
    event = {"what": "retry", "slot": CLIENT, "at": ["time", at], "run": "run-0"}
    return {**draw(0), "runs": [run], "events": [event], "workers": draws(st.integers(1, 2)), "limit": 50}


@given(plans())
@settings(max_examples=int(os.environ.get("KEEPSTEP_EXAMPLES", "150")), deadline=None)
def test_retried_run_ends_as_an_undisturbed_one(plan):
    plan.pop("poison", None)
    outcome = play(plan)
    assert not outcome.broken, story(outcome)
