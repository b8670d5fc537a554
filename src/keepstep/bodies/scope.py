"""The scope of a body that runs in another process than its worker: what it asks of its run becomes a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import msgspec

from ..errors import DefinitionError, NotSerializable
from ..executors.task import Called, Emitted, Published, Report, Reported, Saved, Spent, Task
from ..kernel.naming import Names, names_in_body
from ..kernel.saved import check_size
from ..values import VALUES, Redactor
from ..values.redact import masked
from ..workflows.call import PlainCall

Tell = Callable[[Report], None]


class _Here:
    """Stands for the engine in the scope of a body."""

    def __init__(self, task: Task) -> None:
        self.redaction = FarRedaction()
        self._task = task

    @property
    def documents(self) -> NoReturn:
        """The store is with the worker, so a memory cannot be reached."""
        self._has_no_store("a ks.Memory")

    @property
    def artifacts(self) -> NoReturn:
        """As `documents`."""
        self._has_no_store("a ks.Artifact")

    def _has_no_store(self, used: str) -> NoReturn:
        raise DefinitionError(
            f"{used} is used in step {self._task.step!r}, whose body runs in another process and has no store; use it "
            "in a step of the worker's own process, and pass its value as an argument"
        )


class FarRedaction:
    """Keeps the secrets that this process has revealed from leaving it. The worker checks everything else."""

    def __init__(self) -> None:
        self._redactor = Redactor()

    def redact(self, text: str) -> str:
        """Return the text without secrets."""
        return self._redactor.text(text)

    def shown(self, data: bytes, key: str) -> bytes:
        """Return the stored form of a token without secrets."""
        if REVEALED.hit(data) is not None:
            data = msgspec.json.encode(masked(msgspec.json.decode(data), self.redact))
            self.check(data, key, "token of step")
        return data

    def check(self, data: bytes, name: str, what: str = "step") -> None:
        """Refuse a value that holds a revealed secret."""
        if REVEALED.hit(data) is not None:
            raise NotSerializable(
                f"{what} {name!r}: its value holds a revealed secret, which must not be stored; pass ks.Secret(name) "
                "and reveal() it where it is used"
            )


#: Finds revealed secrets, and nothing that only looks like one.
REVEALED = Redactor(())


class _Workflow:
    def __init__(self, name: str, carries_state: bool) -> None:
        self.name, self.carries_state = name, carries_state


class _Run:
    """The run of a body, as far as this process knows it."""

    def __init__(self, task: Task) -> None:
        self.id = task.run
        self.workflow = _Workflow(task.workflow, task.in_graph)
        self.host = _Here(task)


class _Called:
    """The call of the step, as far as this process knows it."""

    def __init__(self, task: Task) -> None:
        named = task.agent is not None or task.stage is not None
        self.names = Names(task.agent, task.stage) if named else None


class FarAttempt:
    """The attempt of a step in another process. `tell` sends a message to the worker, from any thread."""

    in_step: ClassVar[bool] = True

    def __init__(self, task: Task, tell: Tell) -> None:
        self._task = task
        self._tell = tell
        self._saved = task.saved
        self.run = _Run(task)
        self.call = _Called(task)
        self._redact = self.run.host.redaction.redact
        self.key = task.step
        self.number = task.attempt

    def call_step(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlainCall[Any]:
        return PlainCall(step.body, args, kwargs)

    def idempotency_key(self) -> str:
        return self._task.idempotency_key

    def emit(self, value: Any) -> None:
        data = VALUES.encode_shown(value, f"step {self.key!r}: emitted")
        self._tell(Emitted(0, self.run.host.redaction.shown(data, self.key), *(names_in_body(self.call) or ())))

    def publish(self, key: str, data: bytes) -> None:
        self.run.host.redaction.check(data, key, "published")
        self._tell(Published(0, key, data, *(names_in_body(self.call) or ())))

    def report_progress(self, fraction: float, text: str) -> None:
        self._tell(Reported(0, fraction, self._redact(text)))

    def spend(self, cost: float, tokens: int, model: str | None, parts: tuple[int, int]) -> None:
        self._tell(Spent(0, cost, tokens, None if model is None else self._redact(model), *parts))

    def call_is(self, operation: str, **more: str) -> None:
        about = {key: self._redact(text) for key, text in more.items() if isinstance(text, str)}
        self._tell(Called(0, operation, about))

    def save_progress(self, value: Any) -> None:
        data = VALUES.for_values(value).encode(value, f"step {self.key!r}: saved progress")
        check_size(data, self.key)
        self.run.host.redaction.check(data, self.key, "saved progress of step")
        self._saved = data
        self._tell(Saved(0, data))

    def saved_progress(self, default: Any) -> Any:
        return default if self._saved is None else VALUES.decode(self._saved, f"step {self.key!r}: saved progress")
