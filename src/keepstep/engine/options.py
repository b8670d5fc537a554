"""Checks the options of an engine before the store is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..checks import check_name
from ..errors import DefinitionError
from ..policies.queue import queue_name
from ..workflows.definition import Workflow


def check_engine_options(
    max_runs: Any,
    retain: Any,
    seconds: Mapping[str, Any],
    on_suspect: Any = "store",
    *,
    worker: bool,
    queues: Any = None,
    agents: Any = None,
) -> None:
    """Refuse options with which an engine would fail later or never drive a run, and those without effect."""
    is_rule = False
    if retain:
        from ..policies.retention import Retain  # noqa: PLC0415 - only with a retention rule

        is_rule = isinstance(retain, Retain)
    if not worker and (is_rule or queues is not None or agents):
        name = "agents=" if agents else "retain=" if queues is None else "queues="
        raise DefinitionError(f"{name} is for a worker and has no effect with worker=False; leave one of them out")
    if type(max_runs) is not int or max_runs < 1:
        raise DefinitionError(
            f"max_runs must be an integer of at least 1, got {max_runs!r}; open an engine without a worker "
            "with worker=False"
        )
    if retain is not None and retain is not False and not is_rule:
        raise DefinitionError(f"retain= takes a ks.Retain(...), or False, not {retain!r}")
    if on_suspect not in ("store", "refuse"):
        raise DefinitionError(f"on_suspect must be 'store' or 'refuse', got {on_suspect!r}")
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise DefinitionError(f"{name} must be a number of seconds of at least 0, got {value!r}")
        if name == "lease_seconds" and not value:
            raise DefinitionError("lease_seconds must be greater than 0; it is the time that a worker may be silent")


def given_workflows(workflows: Iterable[Any] | None) -> dict[str, Workflow[..., Any]] | None:
    """Return the workflows that a worker drives, by name; None means all decorated ones."""
    if workflows is None:
        return None
    if isinstance(workflows, Workflow | str) or not isinstance(workflows, Iterable):
        raise DefinitionError(f"workflows= must be a list of workflows, got {workflows!r}")
    found = list(workflows)
    for one in found:
        if not isinstance(one, Workflow):
            raise DefinitionError(f"workflows= must hold only workflows, got {one!r}; decorate it with @ks.workflow")
    return {one.name: one for one in found}


def given_queues(queues: Iterable[Any] | None) -> frozenset[str] | None:
    """The queues that a worker is to serve; None means all."""
    if queues is None:
        return None
    if isinstance(queues, str) or not isinstance(queues, Iterable):
        raise DefinitionError(f"queues= takes a list of queues or their names, not {queues!r}")
    found = frozenset(check_name(queue_name(queue), "queue") for queue in queues)
    if not found:
        raise DefinitionError("queues= names no queue; an engine that drives nothing is opened with worker=False")
    return found
