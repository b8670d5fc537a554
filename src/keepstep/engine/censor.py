"""What may be stored and told: nothing that looks like a secret, and no value that is too large."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import NotSerializable
from ..workflows.options import checked_tags

if TYPE_CHECKING:
    from ..values import Redactor
    from ..workflows.definition import Workflow
    from .encryption import Encryption


class Censor:
    """Looks at each value before an engine stores it, and at each text before it is told."""

    def __init__(self, redactor: Redactor, max_value_bytes: int, encryption: Encryption) -> None:
        self._redactor = redactor
        self.max_value_bytes = max_value_bytes
        self._encryption = encryption

    def heed(self, workflow: Workflow[..., Any]) -> None:
        """From now on, keep out what a workflow says must not be stored or told."""
        if workflow.redacting:
            self._redactor = self._redactor.also(workflow.redacting)

    def redact(self, text: str) -> str:
        """The text with secrets taken out; not shown at all if that fails."""
        try:
            return self._redactor.text(text)
        except Exception:  # noqa: BLE001 - better nothing than a secret
            return "[not shown: redaction failed]"

    def check(self, data: bytes, name: str, what: str = "step") -> None:
        """Refuse a value that must not be stored: it is too large, or holds what looks like a secret."""
        if len(data) > self.max_value_bytes:
            raise NotSerializable(
                f"{what} {name!r}: its value takes {len(data):,} bytes, over the limit of {self.max_value_bytes:,}; "
                "store the data elsewhere and return a reference, or raise max_value_bytes"
            )
        if self._encryption.of_everything and what != "tag":
            return  # it is stored encrypted; tags are not
        try:
            path = self._redactor.hit(data)
        except Exception as error:
            raise NotSerializable(f"{what} {name!r} is not stored, because redaction failed: {error!r}") from error
        if path is not None:
            place = _argument(path) if what == "input of workflow" else path
            raise NotSerializable(
                f"{what} {name!r}: {place or 'its value'} looks like a secret, which must not be stored; "
                "pass ks.Secret(name) and reveal() it where it is used"
            )

    def tags(self, tags: dict[str, str] | None) -> dict[str, str]:
        """The tags of a run, if they may be stored."""
        checked = checked_tags(tags)
        for name, text in checked.items():
            self.check(msgspec.json.encode(text), name, "tag")
        return checked

    def input_of(self, workflow: Workflow[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        """The arguments of a run as they are stored."""
        self.heed(workflow)
        data = workflow.values.encode(workflow.stored_arguments(args, kwargs), f"workflow {workflow.name!r}: input")
        self.check(data, workflow.name, "input of workflow")
        return data


def _argument(path: str) -> str:
    """Where in the arguments of a workflow a path into its stored input leads."""
    place = re.match(r"\[0\]\[(\d+)\]|\[1\]\['(\w+)'\]", path)
    if place is None:
        return path
    name = f"argument {int(place[1]) + 1}" if place[1] else f"argument {place[2]!r}"
    return name + path[place.end() :]
