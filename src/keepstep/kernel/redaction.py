"""Keeps secrets and oversized values out of the store, and secrets out of texts."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..errors import NotSerializable
from ..values import Redactor
from ..values.redact import masked
from ..workflows.options import checked_tags

if TYPE_CHECKING:
    from ..values import Values
    from ..workflows.definition import Workflow
    from .host import RunKeys

log = logging.getLogger("keepstep")

#: The treatment of a value that only looks like a secret.
OnSuspect = Literal["store", "refuse"]
#: Places that a warning has named; the oldest are forgotten, so that a long-lived process needs bounded memory.
MOST_WARNED = 10_000

_REVEALED = Redactor(())


class Redaction:
    """Checks each value before an engine stores it, and redacts each text before it is shown."""

    def __init__(
        self, redactor: Redactor, max_value_bytes: int, keys: RunKeys, on_suspect: OnSuspect = "store"
    ) -> None:
        self._redactor = redactor
        self.max_value_bytes = max_value_bytes
        self._keys = keys
        self._refuses = on_suspect == "refuse"
        self._warned: dict[tuple[str, str], None] = {}

    def add_rules_of(self, workflow: Workflow[..., Any]) -> None:
        """Apply a workflow's own redaction rules from now on."""
        if workflow.redacting:
            self._redactor = self._redactor.also(workflow.redacting)

    def redact(self, text: str) -> str:
        """Return the text without secrets, or a placeholder if redaction fails."""
        try:
            return self._redactor.text(text)
        except Exception:  # noqa: BLE001 - showing nothing is better than showing a secret
            return "[not shown: redaction failed]"

    def check(self, data: bytes, name: str, what: str = "step") -> None:
        """Refuse a value that is too large or contains a revealed secret; warn of one that only looks like a secret."""
        if len(data) > self.max_value_bytes:
            raise NotSerializable(
                f"{what} {name!r}: its value takes {len(data):,} bytes, over the limit of {self.max_value_bytes:,}; "
                "store the data elsewhere and return a reference, or raise max_value_bytes"
            )
        if self._keys.of_everything and what != "tag":
            return  # the value is stored encrypted; tags are not
        path = self._found(data, name, what)
        if path is not None:
            self._judge(data, path, name, what)

    def _found(self, data: bytes, name: str, what: str) -> str | None:
        """Return the path of something like a secret in a value, or None."""
        try:
            return self._redactor.hit(data)
        except Exception as error:
            raise NotSerializable(f"{what} {name!r} is not stored, because redaction failed: {error!r}") from error

    def _judge(self, data: bytes, suspect: str, name: str, what: str) -> None:
        """Refuse a value that holds a secret, or warn once per place; its work is done, so its looks do not undo it."""
        cure = "pass ks.Secret(name) and reveal() it where it is used"
        revealed = _REVEALED.hit(data)
        if revealed is not None:
            place = _place(revealed, what)
            raise NotSerializable(f"{what} {name!r}: {place} holds a revealed secret, which must not be stored; {cure}")
        place = _place(suspect, what)
        if self._refuses:
            raise NotSerializable(
                f"{what} {name!r}: {place} looks like a secret, and the engine has on_suspect='refuse'; {cure}, or "
                "open the engine with on_suspect='store'"
            )
        if (what, name) in self._warned:
            return
        while len(self._warned) >= MOST_WARNED:
            del self._warned[next(iter(self._warned))]
        self._warned[what, name] = None
        log.warning(
            "%s %r: %s looks like a secret, and is stored in clear; if it is one, %s. on_suspect='refuse' refuses such "
            "values%s",
            what,
            name,
            place,
            cure,
            "" if what == "tag" else ", keys= encrypts them",
        )

    def token(self, value: Any, values: Values, where: str, key: str) -> bytes:
        """Return the stored form of a token. Its texts are redacted, because watchers receive it as an event."""
        return self.shown(values.encode_shown(self.redact(value) if isinstance(value, str) else value, where), key)

    def shown(self, data: bytes, key: str) -> bytes:
        """Return the stored form of a token with its texts redacted."""
        if self._found(data, key, "token of step") is not None:
            data = msgspec.json.encode(masked(msgspec.json.decode(data), self.redact))
        self.check(data, key, "token of step")
        return data

    def tags(self, tags: dict[str, str] | None) -> dict[str, str]:
        """Return the tags of a run if they may be stored."""
        checked = checked_tags(tags)
        for name, text in checked.items():
            self.check(msgspec.json.encode(text), name, "tag")
        return checked

    def input_of(self, workflow: Workflow[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        """Return the stored form of a run's arguments."""
        self.add_rules_of(workflow)
        data = workflow.values.encode(workflow.stored_arguments(args, kwargs), f"workflow {workflow.name!r}: input")
        self.check(data, workflow.name, "input of workflow")
        return data


def _place(path: str, what: str) -> str:
    """Return a path into a value as text: for a workflow's stored input, the argument that it leads to."""
    if what != "input of workflow":
        return path or "its value"
    place = re.match(r"\[0\]\[(\d+)\]|\[1\]\['(\w+)'\]", path)
    if place is None:
        return path or "its value"
    name = f"argument {int(place[1]) + 1}" if place[1] else f"argument {place[2]!r}"
    return name + path[place.end() :]
