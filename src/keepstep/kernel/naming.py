"""The agent and the stage that the code names for its calls; every record that such a call causes carries them."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..checks import check_name
from ..ports import CURRENT

if TYPE_CHECKING:
    from ..records.record import Record
    from ..workflows.definition import Workflow


class Names(NamedTuple):
    """The agent that acts, and the stage of the work. Keys and digests of calls do not hold them."""

    agent: str | None = None
    stage: str | None = None

    def put_on(self, record: Record) -> None:
        """Write the names into a record."""
        record.agent, record.stage = self


def names_of_workflow(workflow: Workflow[..., Any]) -> Names | None:
    """Return the names for all records of a workflow's runs: the agent whose tasks they are."""
    return None if workflow.agent is None else Names(workflow.agent)


#: The names that a step's body has given. The code of a workflow keeps its own in the branch, which its tasks inherit.
_IN_BODY: ContextVar[Names | None] = ContextVar("keepstep_names", default=None)


def names_in_body(call: Any) -> Names | None:
    """Return the names for what a step's body records: its own, or those of its call."""
    given = _IN_BODY.get()
    return call.names if given is None else given


def joined(around: Names | None, agent: str | None, stage: str | None) -> Names | None:
    """Return the names within a block or a part that names an agent, a stage, both or neither."""
    if agent is None and stage is None:
        return around
    outer = around or Names()
    return Names(agent or outer.agent, stage or outer.stage)


class _Naming:
    """A block of code that names an agent or a stage. It may be entered again."""

    def __init__(self, agent: str | None, stage: str | None) -> None:
        self._agent, self._stage = agent, stage
        self._entered: list[tuple[Any, Any]] = []

    def __enter__(self) -> Self:
        scope = CURRENT.get()
        if scope is None:
            self._entered.append((None, None))
        elif scope.in_step:
            names = joined(names_in_body(scope.call), self._agent, self._stage)
            self._entered.append((None, _IN_BODY.set(names)))
        else:
            self._entered.append((scope, scope.names))
            scope.names = joined(scope.names, self._agent, self._stage)
        return self

    def __exit__(self, *_: object) -> None:
        branch, before = self._entered.pop()
        if branch is not None:
            branch.names = before
        elif isinstance(before, Token):
            _IN_BODY.reset(before)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


class acting(_Naming):  # noqa: N801 - used like a function: `with ks.acting("critic"):`
    """Name the agent that acts in a block of code: every record that its calls cause carries the name.

    Tasks and branches that the block makes inherit the name. A replay does not depend on it. Outside a run, the block
    runs as it is.
    """

    def __init__(self, agent: str) -> None:
        super().__init__(check_name(agent, "agent"), None)


class stage(_Naming):  # noqa: N801 - used like a function: `with ks.stage("research"):`
    """Name the stage that a block of code belongs to: every record that its calls cause carries the name.

    Tasks and branches that the block makes inherit the name. A replay does not depend on it. Outside a run, the block
    runs as it is.
    """

    def __init__(self, name: str) -> None:
        super().__init__(None, check_name(name, "stage"))
