"""The current run and step: their ids, the attempt, a logger, and whether the code is being replayed."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from ..errors import DefinitionError
from ..ports import CURRENT


def run_id() -> str | None:
    """Return the id of the current run, in a workflow or a step; None outside."""
    scope = CURRENT.get()
    return None if scope is None else scope.run.id


def in_workflow() -> bool:
    """Whether the caller is the code of a workflow in a run, where a step that is called is recorded."""
    scope = CURRENT.get()
    return scope is not None and not scope.in_step


def in_step() -> bool:
    """Whether the caller is the body of a step in a run."""
    scope = CURRENT.get()
    return scope is not None and scope.in_step


def replaying() -> bool:
    """Whether the code of the workflow repeats what is recorded. It is False in a step and outside a run."""
    scope = CURRENT.get()
    return scope is not None and not scope.in_step and scope.run.is_replaying


def attempt() -> int:
    """Return the number of the current attempt of the step, beginning with 1; it is 1 outside a run."""
    scope = CURRENT.get()
    if scope is None:
        return 1
    if not scope.in_step:
        raise DefinitionError("ks.attempt is called in the workflow itself; call it in a step")
    return scope.number  # type: ignore[no-any-return]


def idempotency_key() -> str:
    """Return a key for outside services, the same for every attempt and recovery of this step.

    Outside a run, every call returns a new key.
    """
    scope = CURRENT.get()
    if scope is None:
        return secrets.token_hex(20)
    if not scope.in_step:
        raise DefinitionError("ks.idempotency_key is called in the workflow itself; call it in the step that uses it")
    return scope.idempotency_key()  # type: ignore[no-any-return]


class RunLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages name the run and the step. It logs nothing while the code is replayed."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name that logging gives it
        return self.logger.isEnabledFor(level) and not replaying()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        text, scope = str(msg) % args if args else str(msg), CURRENT.get()
        if scope is not None:
            step, number = (scope.key, scope.number) if scope.in_step else ("", 0)
            kwargs["extra"] = {"run_id": scope.run.id, "step": step, "attempt": number, **(kwargs.get("extra") or {})}
            where = f"run {scope.run.id}, {step}" if step else f"run {scope.run.id}"
            text = f"{where}: {scope.run.host.redaction.redact(text)}"
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # names the line of the caller, not this one
        self.logger.log(level, "%s", text, **kwargs)


#: Logger for the code of workflows and steps.
log = RunLogger(logging.getLogger("keepstep.run"), {})
