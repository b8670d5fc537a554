"""The children of a run in memory: those in progress, and the recorded outcomes of those that have ended."""

from __future__ import annotations

from typing import Any


class ChildRuns:
    """The children of one run, by the keys of the calls that started them."""

    __slots__ = ("cancelled", "open", "starts", "words")

    def __init__(self) -> None:
        #: Ids of children whose outcome was not yet delivered to the code.
        self.open: dict[str, str] = {}
        #: The calls that started them (`StartCall`).
        self.starts: dict[str, Any] = {}
        #: Outcomes of the other children, as recorded.
        self.words: dict[str, bytes] = {}
        #: Whether the cancel of the run was passed on to its children.
        self.cancelled = False

    def called(self, key: str, start: Any) -> None:
        """Note the call that starts a child."""
        self.starts[key] = start

    def started(self, key: str, child: str) -> None:
        """Note that a child exists, whether or not the code still waits for its start."""
        self.open[key] = child

    def ended(self, key: str, word: bytes) -> None:
        """Note that the outcome of a child is delivered to the code."""
        self.words[key] = word
        self.open.pop(key, None)
        self.starts.pop(key, None)

    def cancel_passed_on(self) -> None:
        """Note that the children are being cancelled; children that the clean-up starts later are not."""
        self.cancelled = True
