"""The quality loop: a generator makes a draft, a critic judges it, and the next draft answers the critique."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from ..checks import check_count, check_name, check_number
from ..errors import DefinitionError
from ..ports import CURRENT
from ..workflows.agent import ROUNDS, THRESHOLD, Agent, TaskPlan
from .perform import give, perform
from .publish import publish
from .waits import wait_for

#: A generator or a critic: a capability or an agent by name, a list of capabilities, an agent, or a function.
Mind = str | Sequence[str] | Agent[Any] | Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Refined:
    """The end of a quality loop: the best draft, its score, and whether it is good enough.

    `rounds` is the number of drafts. `accepted_by` is "critic", "person", or nothing. `feedback` is the critique of the
    best draft.
    """

    result: Any
    score: float
    rounds: int
    accepted_by: str = ""
    feedback: Any = None

    @property
    def accepted(self) -> bool:
        """Whether the critic or a person has accepted the result."""
        return bool(self.accepted_by)

    def plain(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


async def refine(
    task: Any,
    *,
    generator: Mind,
    critic: Mind,
    threshold: float = THRESHOLD,
    rounds: int = ROUNDS,
    escalate: str | None = None,
    timeout: float | timedelta | None = None,  # noqa: ASYNC109 - a durable wait for a person
) -> Refined:
    """Let a generator make a draft and a critic judge it, again and again, until the draft is good enough.

    A score of at least `threshold` ends the loop, or a draft without improvement, or the last of the `rounds`. The best
    draft counts. Every call is a task of an agent or an ordinary step, so that a crash repeats none.

    | option | means |
    |---|---|
    | `generator` | gets `{"task", "round", "draft", "feedback"}`, the last two None at first, and returns a draft |
    | `critic` | gets `{"task", "round", "draft"}`, and returns a score, or `{"score", "feedback"}` |
    | `threshold` | the score from which on a draft is accepted; 0.8 by default |
    | `rounds` | drafts that are made at most; 3 by default |
    | `escalate` | the name of a signal: a person decides about a draft that is not good enough |
    | `timeout` | seconds to wait for the person; then the draft counts as not accepted |

    Generator and critic are capabilities or names of agents, agents, steps or functions. The person answers with true
    to accept the best draft, with false not to, or with a better result.
    """
    least = check_number(threshold, "threshold", -1e15, 1e15)
    check_count(rounds, "rounds")
    if escalate is not None:
        check_name(escalate, "signal")
    make, judge = _called(generator, "generator"), _called(critic, "critic")
    best = Refined(None, float("-inf"), 0)
    draft = feedback = None
    for number in range(1, rounds + 1):
        draft = await make({"task": task, "round": number, "draft": draft, "feedback": feedback})
        score, feedback = _judgement(await judge({"task": task, "round": number, "draft": draft}))
        if number > 1 and score <= best.score:  # no better, so the next one would hardly be, either
            best = Refined(best.result, best.score, number, best.accepted_by, best.feedback)
            break
        best = Refined(draft, score, number, "critic" if score >= least else "", feedback)
        if best.accepted:
            return best
    return best if escalate is None else await _asked(best, task, escalate, timeout)


async def _asked(best: Refined, task: Any, signal: str, limit: float | timedelta | None) -> Refined:
    """Let a person decide about the best draft, which is published for them."""
    shown = {"task": task, "draft": best.result, "score": best.score, "feedback": best.feedback}
    publish(signal, shown)
    answer = await wait_for(signal, timeout=limit, default=False)
    if answer is False:
        return best
    result = best.result if answer is True else answer
    return Refined(result, best.score, best.rounds, "person", best.feedback)


def _called(mind: Any, what: str) -> Callable[[Any], Awaitable[Any]]:
    """Return a function that asks a generator or a critic."""
    if isinstance(mind, Agent):
        return lambda ask: perform(mind.name, ask)
    if isinstance(mind, str) or (isinstance(mind, Sequence) and all(isinstance(one, str) for one in mind)):
        return lambda ask: perform(mind, ask)
    if not callable(mind):
        raise DefinitionError(f"{what}= takes a capability, an agent or a function, got {mind!r}")

    async def call(ask: Any) -> Any:
        result = mind(ask)
        return await result if inspect.isawaitable(result) else result

    return call


def _judgement(answer: Any) -> tuple[float, Any]:
    """Return the score and the feedback in the answer of a critic."""
    score, feedback = (answer.get("score"), answer.get("feedback")) if isinstance(answer, Mapping) else (answer, None)
    if isinstance(score, bool) or not isinstance(score, int | float) or score != score:  # noqa: PLR0124 - not a number
        where = f" in run {CURRENT.get().run.id}" if CURRENT.get() is not None else ""
        raise DefinitionError(f"the critic{where} must return a score, or a dict with a score, got {answer!r:.100}")
    return float(score), feedback


async def planned(plan: TaskPlan, task: Any) -> Any:
    """Perform a task as a workflow's file describes it: by an agent, or in a quality loop."""
    if not plan.critic:
        return await give(plan, plan.needs, task)
    return await refine(
        task,
        generator=lambda ask: give(plan, plan.needs, ask),
        critic=lambda ask: give(replace(plan, team=None), plan.critic, ask),  # it may stand outside the team
        threshold=plan.threshold,
        rounds=plan.rounds,
        escalate=plan.escalate,
        timeout=plan.escalate_seconds,
    )
