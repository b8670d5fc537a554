"""Every error Keepstep raises, grouped by what the reader should do about it.

KeepstepError
├─ DefinitionError        fix the code            InvalidGraph · DuplicateName · NotSerializable · UnknownStore
├─ RunError               ask about this run      RunNotFound · RunFailed · RunCancelled · RunTimedOut · RunSetAside
│                                                 RunConflict · AlreadyFinished · TimedOut · ExecutionError
│                                                 UnknownToken · SignalsFull · QueueFull
├─ StepError              catch in the workflow   StepFailed · StepTimedOut · StepInDoubt · BodyLost · BudgetExceeded
│                                                 BreakerOpen · WaitFailed · BatchFailed · AgentUnavailable
├─ ReplayMismatch         version the workflow
├─ RecoveryError          read its list           LoadFailed · ValidationFailed · RebuildFailed · HandlerFailed
│                                                 HandlerMissing · ResumeFailed
└─ StoreError             look at storage         StoreUnavailable · StoreFull · CheckpointCorrupt · SchemaMismatch
                                                  EncryptionError · EraseUnfinished · DocumentConflict

raise to steer a retry:   Permanent(...) · RetryAfter(seconds) · AgentRefused(...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import ErrorInfo, Run
    from .model.problem import Problem


class KeepstepError(Exception):
    """Base class of every error that Keepstep raises."""


# -- fix the code ---------------------------------------------------------------------------------------------------


class DefinitionError(KeepstepError):
    """A workflow, step or option is defined incorrectly."""


class InvalidGraph(DefinitionError):
    """A graph or dag is invalid. The message lists all errors; `problems` holds every error and warning."""

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class DuplicateName(DefinitionError):
    """Two definitions that must have different names share one."""


class NotSerializable(DefinitionError):
    """A value cannot be stored exactly; the message names the step and the key."""


class UnknownStore(DefinitionError):
    """No store is registered for the scheme of a URL."""


# -- ask about this run ---------------------------------------------------------------------------------------------


class RunError(KeepstepError):
    """An error about one run; `run_id` is its id."""

    def __init__(self, message: str, run_id: str = "") -> None:
        super().__init__(message)
        self.run_id = run_id


class RunNotFound(RunError):
    """The store has no run with this id."""


class UnknownToken(RunNotFound):
    """No callback has this token. The message does not repeat the token, which is a secret."""


class RunFailed(RunError):
    """The run ended with an error; `error` is the recorded one, and `root` the one behind failed steps and children.

    `undone` tells that the run has undone its steps, so that it cannot be retried.
    """

    def __init__(self, message: str, run_id: str = "", error: ErrorInfo | None = None) -> None:
        super().__init__(message, run_id)
        self.error = error
        self.root = error
        self.undone = False


class RunTimedOut(RunFailed):
    """The run's deadline passed before it finished."""


class ExecutionError(RunFailed):
    """A graph or dag stopped at a step.

    `step` is the key of that step, `path` lists the steps before it, and `state` is the state they left. The cause is
    chained. `result()` of the run's handle raises this error too, with the step and the path.
    """

    def __init__(
        self,
        message: str,
        run_id: str = "",
        error: ErrorInfo | None = None,
        *,
        step: str = "",
        path: Sequence[str] = (),
        state: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(message, run_id, error)
        self.step = step
        self.path = tuple(path)
        self.state = state


class RunCancelled(RunError):
    """The run was cancelled; a cancellation is final."""


class RunSetAside(RunError):
    """The run waits for a person, because it crashed its workers or its history no longer matches its code."""

    def __init__(self, message: str, run_id: str = "", error: ErrorInfo | None = None) -> None:
        super().__init__(message, run_id)
        self.error = error


class RunConflict(RunError):
    """The run id belongs to a run of another workflow, or to one with another input."""

    def __init__(self, message: str, run_id: str = "", existing: Run | None = None) -> None:
        super().__init__(message, run_id)
        self.existing = existing


class AlreadyFinished(RunError):
    """The run has finished, so it can no longer be signalled, paused or recovered."""


class SignalsFull(RunError):
    """The run has too many unread signals to accept another one; nothing was sent."""


class QueueFull(RunError):
    """As many runs wait in the queue as its `max_waiting` allows, so no other is started there."""


class TimedOut(RunError):
    """A wait timed out."""


# -- catch in the workflow ------------------------------------------------------------------------------------------


class StepError(KeepstepError):
    """A step has no result. `step` is its key, `error` the recorded error, `seq` the number of that record.

    `root` is the error behind it: of a failed child, that of the step that failed the child; else `error` itself.
    """

    def __init__(self, message: str, step: str = "", error: ErrorInfo | None = None, seq: int = 0) -> None:
        super().__init__(message)
        self.step = step
        self.error = error
        self.root = error
        self.seq = seq


class StepFailed(StepError):
    """Every attempt that the step's retry policy allows failed."""


class StepTimedOut(StepFailed):
    """The step exceeded its timeout."""


class BodyLost(StepFailed):
    """The process or the node that ran the step's body has ended without an outcome."""


class StepInDoubt(StepError):
    """An at-most-once step may have run, and was not repeated. Its body raises this if it does not know."""


class BreakerOpen(StepError):
    """The breaker of the step's service is open, so no attempt is made: the service has failed too often."""


class BudgetExceeded(StepError):
    """The step did not start because the run's budget is exhausted; the message names the limit and the use."""


class WaitFailed(StepFailed):
    """The sender of a signal, or the holder of a callback's token, reported an error; `error` is what they sent."""


class AgentUnavailable(StepError):
    """No agent performs the task: none that can has a living host, is healthy and has not been tried.

    The message names the agents that were looked at, each with the reason.
    """


class BatchFailed(StepError):
    """Too many items of a `ks.map` or `ks.gather` with `ks.Tolerate` failed. `batch` has the outcome of each item."""

    def __init__(self, message: str, batch: Any = None) -> None:
        super().__init__(message)
        self.batch = batch


# -- version the workflow -------------------------------------------------------------------------------------------


class ReplayMismatch(KeepstepError):
    """The workflow code made a different call than the recorded one; no new step has run."""


class RecoveryError(KeepstepError):
    """A run could not be recovered. `phase` names the phase that failed; `problems` lists everything found.

    `kind` is the type of the error that is stored with the run. This error is the cause of the `RunSetAside` that
    `result()` raises for the run.
    """

    phase = ""

    def __init__(self, message: str, problems: Sequence[str] = (), kind: str = "") -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)
        self.kind = kind or type(self).__name__


class LoadFailed(RecoveryError):
    """The run's records cannot be read."""

    phase = "load"


class ValidationFailed(RecoveryError):
    """The run must not continue: its definition has changed, or it has crashed its workers too often."""

    phase = "validate"


class RebuildFailed(RecoveryError):
    """The run's input or state cannot be restored, or its migration failed."""

    phase = "rebuild"


class HandlerFailed(RecoveryError):
    """The recovery handler raised an error, answered with something unknown, or its answer cannot be carried out."""

    phase = "handler"


class HandlerMissing(HandlerFailed):
    """No recovery handler has this name, or the code of the next step is missing."""


class ResumeFailed(RecoveryError):
    """The run could not continue from its history: its code made a different call, or the engine failed."""

    phase = "resume"


#: Recovery errors by phase, in the order of the phases.
RECOVERY_PHASES: dict[str, type[RecoveryError]] = {
    one.phase: one for one in (LoadFailed, ValidationFailed, RebuildFailed, HandlerFailed, ResumeFailed)
}


# -- look at storage ------------------------------------------------------------------------------------------------


class StoreError(KeepstepError):
    """The store could not perform an operation. `denied` is true if the caller has read access only."""

    denied = False


class StoreUnavailable(StoreError):
    """The store does not answer or refuses to write. `unknown` is true if the commit may have happened.

    `held` is true if another client has locked a row of this change. Nothing was written; other changes may succeed.
    """

    held = False

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


class StoreFull(StoreUnavailable):
    """The store's device is full."""


class CheckpointCorrupt(StoreError):
    """A stored record differs from the one that was written; the message says where the chain breaks."""


class EraseUnfinished(StoreError):
    """The runs are removed, but unused parts of the store's files hold their text until the files are rewritten."""


class DocumentConflict(StoreError):
    """A document was not written, because its current `version` is not the expected one; 0 means that there is none."""

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class EncryptionError(StoreError):
    """A run needs a key that is missing, or is stored in plain text where encryption is required.

    `key_id` is the id of the required key. `wrong` is true if a key with that id is present but does not fit.
    """

    def __init__(self, message: str, key_id: str = "", *, wrong: bool = False) -> None:
        super().__init__(message)
        self.key_id = key_id
        self.wrong = wrong


class SchemaMismatch(StoreError):
    """The store was written by a newer Keepstep, or is not a Keepstep store."""


# -- raise to steer a retry -----------------------------------------------------------------------------------------


class Permanent(KeepstepError):
    """Raise this in a step when another attempt cannot help."""


class AgentRefused(KeepstepError):
    """Raise this in the `perform` of an agent that does not take a task: the next agent is tried."""


class RetryAfter(KeepstepError):
    """Raise this in a step to set the time before the next attempt."""

    def __init__(self, seconds: float, message: str = "") -> None:
        super().__init__(message or f"retry after {seconds:g} s")
        self.seconds = float(seconds)
