"""The executors of a worker: found by name or by what a step names, and opened when a body first needs them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..checks import check_executor, check_name
from ..errors import DefinitionError

if TYPE_CHECKING:
    from ..kernel.host import Host
    from ..ports import Executor
    from ..workflows.definition import Step, Workflow

log = logging.getLogger("keepstep")

#: Executors of Keepstep that a name opens, beside those of this process.
BUILT_IN = {
    "process": "keepstep.executors.process:Process",
    "ray": "keepstep.executors.ray:Ray",
    "dask": "keepstep.executors.dask:Dask",
}
#: The executors of this process. They need not be opened.
LOCAL = ("inline", "thread")
#: Group of entry points under which other packages register executors by name.
ENTRY_POINTS = "keepstep.executors"
#: Seconds that an executor may take to end its bodies when the engine closes.
CLOSE_SECONDS = 15.0


class Executors:
    """The executors of one engine."""

    def __init__(self, given: Mapping[str, Any] | None, default: Any) -> None:
        self._given = dict(given or {})
        for name, one in self._given.items():
            check_name(name, "executor")
            if name in LOCAL:
                raise DefinitionError(f"executors= has {name!r}, which is the worker's own process; name it otherwise")
            check_executor(one, f"executors={{{name!r}: ...}}")
        self._default = None if default is None else check_executor(default, "executor=")
        self._open: dict[Any, Executor] = {}
        #: Parts that executors of one kind share, such as the connection to a cluster.
        self.shared: dict[Any, Any] = {}
        self._stay: set[str] = set()
        self._host: Any = None

    def use(self, host: Host, local: Mapping[str, Executor]) -> None:
        """Serve an engine that opens."""
        self._host = host
        self._open = dict(local)
        if self._default is not None:
            self._opened(self._default)

    def of(self, step: Step[..., Any], workflow: Workflow[..., Any]) -> Executor:
        """Return the executor of a step's bodies.

        A default of the workflow or of the worker is for plain functions that name no executor and can be sent away.
        """
        where = step.executor
        if where == "thread" and step.where is None:
            default = self._default if workflow.executor is None else workflow.executor
            if default is not None and default not in LOCAL and self._can_be_sent(step):
                where = default
        return self._open.get(where) or self._opened(where)

    def width(self, step: Step[..., Any], workflow: Workflow[..., Any]) -> int | None:
        """Return how many bodies of one map may usefully be under way; None if the executor does not say."""
        try:
            return getattr(self.of(step, workflow), "width", None)
        except DefinitionError:  # each body fails with it
            return None

    def _can_be_sent(self, step: Step[..., Any]) -> bool:
        from ..kernel.sent import why_not_sent  # noqa: PLC0415 - only with a default executor

        why = why_not_sent(step) if step.is_sent else "a test has replaced its body"
        if why is None:
            return True
        if step.name not in self._stay:
            self._stay.add(step.name)
            log.info("step %r runs in a thread of the worker, because %s", step.name, why)
        return False

    def _opened(self, where: Any) -> Executor:
        option = self._named(where) if isinstance(where, str) else where
        if self._host is None:
            raise DefinitionError("the engine is not open")
        executor: Executor = self._open.get(option) or self._kept(option.open(self._host))
        self._open[option] = self._open[where] = executor
        return executor

    def _kept(self, executor: Executor) -> Executor:
        """Return an executor whose bodies outlive the runs that a test forgets."""
        forgetting = self._host.forgetting
        return executor if forgetting is None or not executor.is_far else forgetting.executor(executor)

    def _named(self, name: str) -> Any:
        if name in self._given:
            one = self._given[name]
            return self._named(one) if isinstance(one, str) and one != name else one
        if name in BUILT_IN:
            module, _, attribute = BUILT_IN[name].partition(":")
            return getattr(import_module(module), attribute)()
        for point in _installed():
            if point.name == name:
                return check_executor(point.load()(), f"the executor {name!r} of {point.value}")
        raise self._unknown(name)

    def check_known(self, name: str) -> None:
        """Refuse a name that no executor has, without opening any."""
        if name not in self._names():
            raise self._unknown(name)

    def _names(self) -> list[str]:
        return sorted({*LOCAL, *BUILT_IN, *self._given, *(point.name for point in _installed())})

    def _unknown(self, name: str) -> DefinitionError:
        from difflib import get_close_matches  # noqa: PLC0415 - only for a wrong name

        known = self._names()
        near = get_close_matches(name, known, 1)
        return DefinitionError(
            f"this worker has no executor {name!r}{f'; did you mean {near[0]!r}?' if near else ''}; it has "
            f"{', '.join(known)}; give it one with ks.open(executors={{{name!r}: ...}})"
        )

    @property
    def at_work(self) -> int:
        """Bodies that run or wait outside this process's own threads."""
        return sum(getattr(one, "at_work", 0) for one in set(self._open.values()))

    @property
    def lines(self) -> int:
        """Connections to processes of bodies. They need no attention while no body is at work."""
        return sum(getattr(one, "lines", 0) for one in set(self._open.values()))

    async def close(self) -> None:
        """Close what was opened."""
        opened = {id(one): one for one in self._open.values() if hasattr(one, "close")}
        self._open, self.shared = {}, {}
        for one in opened.values():
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await one.close()
            except Exception:  # the engine closes all the same
                log.exception("executor %r could not be closed", one)


def _installed() -> Any:
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import and rarely needed

    return entry_points(group=ENTRY_POINTS)
