"""A recorded error: enough to read, group and decide, without any executable content."""

from __future__ import annotations

from dataclasses import dataclass

from .frames import Frame, own_frames

ExceptionClass = type[BaseException]


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """A recorded error. `caused_by` holds the sequence numbers of the step failures that led to it."""

    type: str
    message: str
    error_class: str = "unknown"
    code: str | None = None
    traceback: str = ""
    attempt: int = 0
    id: str = ""
    caused_by: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the class without its module: the same wherever the class was defined and who drove the run."""
        return self.type.rpartition(".")[2]

    def is_a(self, kind: ExceptionClass | str) -> bool:
        """Whether the error is of this class, given as the class or as its name, with or without its module.

        A class of a file that was run as a program has no module in the records, so only its name counts. The classes
        that a class inherits from are not recorded, so a class matches only itself.
        """
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        wanted, own = _known_as(name).split("."), _known_as(self.type).split(".")
        short = min(len(wanted), len(own))
        return wanted[-short:] == own[-short:]

    @property
    def is_wrapper(self) -> bool:
        """Whether the error only reports the failure of a step or a run."""
        return self.type.startswith("keepstep.") and self.name in _WRAPPERS

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The calls of the user's own code that led to the error, innermost last."""
        return own_frames(self.traceback)

    @property
    def summary(self) -> str:
        """The class and the message; only the message if it already names a step or run and its error."""
        module, _, name = self.type.rpartition(".")
        if module not in ("keepstep", "keepstep.errors"):
            return f"{self.type}: {self.message}"
        return self.message if name in _WRAPPERS else f"{name}: {self.message}"


def _known_as(name: str) -> str:
    """Return the name of a class without the module of a program, and of Keepstep's own as users write it."""
    name = name.removeprefix("builtins.").removeprefix("__main__.")
    return name.replace("keepstep.errors.", "keepstep.", 1) if name.startswith("keepstep.errors.") else name


#: Keepstep's errors whose messages name a failed step or run, and the error in it.
_WRAPPERS = frozenset(("StepFailed", "ExecutionError", "RunFailed"))
