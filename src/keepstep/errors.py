"""Every error Keepstep raises, grouped by what the reader should do about it.

KeepstepError
├─ DefinitionError        fix the code            InvalidGraph · DuplicateName · NotSerializable · UnknownStore
├─ RunError               ask about this run      RunNotFound · RunFailed · RunCancelled · RunTimedOut · RunSetAside
│                                                 RunConflict · AlreadyFinished · TimedOut · ExecutionError
├─ StepError              catch in the workflow   StepFailed · StepTimedOut · StepInDoubt · BreakerOpen
│                                                 BudgetExceeded
├─ ReplayMismatch         version the workflow
├─ RecoveryError          read its list           LoadFailed · ValidationFailed · RebuildFailed · HandlerMissing
│                                                 ResumeFailed
├─ StoreError             look at storage         LeaseLost · StoreUnavailable · CheckpointCorrupt · SchemaMismatch
│                                                 StoreFull · EncryptionError
└─ AgentError             look at the agent       AgentUnavailable · AgentRefused

raise to steer a retry:   Permanent(...) · RetryAfter(seconds)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import ErrorInfo, Run
    from .workflows.shape import Problem


class KeepstepError(Exception):
    """The root of every error that Keepstep raises."""


# -- fix the code ---------------------------------------------------------------------------------------------------


class DefinitionError(KeepstepError):
    """A workflow, step or option is written in a way that cannot work."""


class InvalidGraph(DefinitionError):
    """A graph or dag has problems; the message lists all errors, `problems` holds each, and the warnings."""

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class DuplicateName(DefinitionError):
    """Two things that must be told apart share a name."""


class NotSerializable(DefinitionError):
    """A value cannot be stored exactly; the message names the step and the key."""


class UnknownStore(DefinitionError):
    """No store is registered for the scheme of a URL."""


# -- ask about this run ---------------------------------------------------------------------------------------------


class RunError(KeepstepError):
    """Something about one run; `run_id` names it."""

    def __init__(self, message: str, run_id: str = "") -> None:
        super().__init__(message)
        self.run_id = run_id


class RunNotFound(RunError):
    """No run has this id in this store."""


class RunFailed(RunError):
    """The run ended with an error; `error` holds what was recorded."""

    def __init__(self, message: str, run_id: str = "", error: ErrorInfo | None = None) -> None:
        super().__init__(message, run_id)
        self.error = error


class RunTimedOut(RunFailed):
    """The run's deadline passed before it finished."""


class ExecutionError(RunFailed):
    """A graph or dag stopped at a step: `step` is its key, `path` the steps before it, `state` what they had made.

    Its cause is chained. `result()` of the run's handle raises it too, with the step and the path.
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
    """The run was cancelled, which is final."""


class RunSetAside(RunError):
    """The run waits for a person: it crashed its workers, or its history no longer fits its code."""

    def __init__(self, message: str, run_id: str = "", error: ErrorInfo | None = None) -> None:
        super().__init__(message, run_id)
        self.error = error


class RunConflict(RunError):
    """The run id is taken by a run of another workflow or with another input."""

    def __init__(self, message: str, run_id: str = "", existing: Run | None = None) -> None:
        super().__init__(message, run_id)
        self.existing = existing


class AlreadyFinished(RunError):
    """The run has ended, so it can no longer be signalled, paused or recovered."""


class TimedOut(RunError):
    """A wait ended before what it waited for came."""


# -- catch in the workflow ------------------------------------------------------------------------------------------


class StepError(KeepstepError):
    """A step did not give a result; `step` is its key, `error` what was recorded, `seq` where."""

    def __init__(self, message: str, step: str = "", error: ErrorInfo | None = None, seq: int = 0) -> None:
        super().__init__(message)
        self.step = step
        self.error = error
        self.seq = seq


class StepFailed(StepError):
    """Every attempt that the step's policy allows has failed."""


class StepTimedOut(StepFailed):
    """The step's time ran out."""


class StepInDoubt(StepError):
    """An at-most-once step may or may not have happened, and was not repeated."""


class BudgetExceeded(StepError):
    """The step was not started, because the run's budget is used up; the message says of what, and how much."""


class BreakerOpen(StepError):
    """The circuit breaker of a service refused the step."""


# -- version the workflow -------------------------------------------------------------------------------------------


class ReplayMismatch(KeepstepError):
    """The code asked another question than the recorded one; nothing new has run."""


class RecoveryError(KeepstepError):
    """A run could not be taken up; `phase` says how far it came, `problems` lists everything that was found.

    It is the cause of the `RunSetAside` that asking for the run's result raises.
    """

    phase = ""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class LoadFailed(RecoveryError):
    """What is recorded of the run cannot be read."""

    phase = "load"


class ValidationFailed(RecoveryError):
    """The run must not be taken up: its definition has changed, or it has crashed its workers too often."""

    phase = "validate"


class RebuildFailed(RecoveryError):
    """The run's input or state cannot be restored, or its migration failed."""

    phase = "rebuild"


class HandlerMissing(RecoveryError):
    """The code of what comes next is not there."""

    phase = "handler"


class ResumeFailed(RecoveryError):
    """The run could not go on from its history: its code asked another question, or the engine failed."""

    phase = "resume"


#: By phase, in their order.
RECOVERY_PHASES: dict[str, type[RecoveryError]] = {
    one.phase: one for one in (LoadFailed, ValidationFailed, RebuildFailed, HandlerMissing, ResumeFailed)
}


# -- look at storage ------------------------------------------------------------------------------------------------


class StoreError(KeepstepError):
    """The store could not do what was asked; `denied` says that whoever asks may only look at it."""

    denied = False


class LeaseLost(StoreError):
    """Another worker owns the run now; this one must not go on."""


class StoreUnavailable(StoreError):
    """The store does not answer or refuses to write; `unknown` says that a commit may have happened.

    `held` says that someone else has locked what this concerns: nothing was written, and others may be.
    """

    held = False

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


class StoreFull(StoreUnavailable):
    """There is no room left on the store's device."""


class CheckpointCorrupt(StoreError):
    """A stored record is not the one that was written; the message says where the chain breaks."""


class EncryptionError(StoreError):
    """A run is encrypted with a key that is not at hand, or is not encrypted where it must be; `key_id` is wanted.

    `wrong` says that a key of that id is here, but is not the one.
    """

    def __init__(self, message: str, key_id: str = "", *, wrong: bool = False) -> None:
        super().__init__(message)
        self.key_id = key_id
        self.wrong = wrong


class SchemaMismatch(StoreError):
    """The store was written by a newer Keepstep, or is not a Keepstep store."""


# -- look at the agent ----------------------------------------------------------------------------------------------


class AgentError(KeepstepError):
    """An agent did not perform a step."""


class AgentUnavailable(AgentError):
    """The agent cannot be reached or takes no work."""


class AgentRefused(AgentError):
    """The agent declined the step."""


# -- raise to steer a retry -----------------------------------------------------------------------------------------


class Permanent(KeepstepError):
    """Raise it in a step to say that another attempt cannot help."""


class RetryAfter(KeepstepError):
    """Raise it in a step to say when the next attempt may start."""

    def __init__(self, seconds: float, message: str = "") -> None:
        super().__init__(message or f"retry after {seconds:g} s")
        self.seconds = float(seconds)
