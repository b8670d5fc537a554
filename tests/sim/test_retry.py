"""For any program, failure and moment: a retry after mending the cause ends as the undisturbed run would."""

from __future__ import annotations

import os
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.testing.simulation import draw, play
from keepstep.testing.simulation.dags import draw_dag
from keepstep.testing.simulation.graphs import draw_graph
from keepstep.testing.simulation.plans import CLIENT
from keepstep.testing.simulation.programs import Maker
from tests.sim.test_simulation import story


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
def test_run_that_is_retried_ends_as_an_undisturbed_one_and_repeats_nothing_finished_before_the_failure(plan):
    plan.pop("poison", None)
    outcome = play(plan)
    assert not outcome.broken, story(outcome)
