"""Reads JSON as a stream of events with their places, strictly and without recursion; it needs no other package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

#: Longest number that is read.
MAX_DIGITS = 40

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z_]+")
_WORDS = {"null": None, "true": True, "false": False}


class JSONSyntaxError(ValueError):
    """The text is not JSON; `position` is where."""

    def __init__(self, what: str, position: int) -> None:
        super().__init__(f"this is not JSON: {what}")
        self.position = position


def read_json(text: str) -> Iterator[tuple[str, Any, int, int]]:
    """What stands in a JSON text: `{`, `[`, `end`, and `scalar` with its value, each with its line and column."""
    return _Reader(text).events()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.line, self.line_start, self.counted = 1, 0, 0

    def events(self) -> Iterator[tuple[str, Any, int, int]]:
        closing: list[str] = []
        while True:
            # Here a value is wanted.
            char = self.peek("a value")
            if char in "{[":
                yield (char, None, *self.place())
                self.position += 1
                closing.append("}" if char == "{" else "]")
                if self.peek(f"a value or {closing[-1]}") != closing[-1]:
                    if closing[-1] == "}":
                        yield self.key()
                    continue
            else:
                place = self.place()
                yield ("scalar", self.scalar(char), *place)
            # Here a value has ended, or the list or mapping just opened is empty.
            while closing:
                char = self.peek(f", or {closing[-1]}")
                if char == ",":
                    self.position += 1
                    if closing[-1] == "}":
                        yield self.key()
                    break
                if char != closing[-1]:
                    self.fail(f"expected a comma or {closing[-1]}, found {char!r}")
                yield ("end", None, *self.place())
                self.position += 1
                closing.pop()
            else:
                self.skip()
                if self.position < len(self.text):
                    self.fail("something follows the value")
                return

    def key(self) -> tuple[str, Any, int, int]:
        if self.peek("a key") != '"':
            self.fail("a key must be a text in double quotes")
        place = self.place()
        key = self.string()
        if self.peek("a colon") != ":":
            self.fail("expected a colon after the key")
        self.position += 1
        return ("scalar", key, *place)

    def scalar(self, char: str) -> Any:
        if char == '"':
            return self.string()
        number = _NUMBER.match(self.text, self.position)
        if number is not None:
            if len(number[0]) > MAX_DIGITS:
                self.fail(f"the number has more than {MAX_DIGITS} digits")
            self.position = number.end()
            return int(number[0]) if number[1] is None and number[2] is None else float(number[0])
        word = _WORD.match(self.text, self.position)
        if word is None or word[0] not in _WORDS:
            self.fail(f"{(word[0] if word else char)!r:.50} is not a value")
        self.position = word.end()
        return _WORDS[word[0]]

    def string(self) -> str:
        try:
            text, self.position = scanstring(self.text, self.position + 1, True)
        except ValueError as error:
            self.fail(f"{getattr(error, 'msg', error)}", getattr(error, "pos", self.position))
        return str(text)

    def peek(self, wanted: str) -> str:
        self.skip()
        if self.position >= len(self.text):
            self.fail(f"the file ends where {wanted} should be")
        return self.text[self.position]

    def skip(self) -> None:
        found = _SPACE.match(self.text, self.position)
        self.position = found.end() if found else self.position

    def place(self) -> tuple[int, int]:
        """Line and column of the position; lines are counted on from the last one that was asked for."""
        self.line += self.text.count("\n", self.counted, self.position)
        newline = self.text.rfind("\n", self.counted, self.position)
        if newline >= 0:
            self.line_start = newline + 1
        self.counted = self.position
        return self.line, self.position - self.line_start + 1

    def fail(self, what: str, position: int | None = None) -> NoReturn:
        raise JSONSyntaxError(what, self.position if position is None else position)
