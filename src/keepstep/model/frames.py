"""The frames of a stored traceback that belong to the user's own code."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

#: Frames that are kept at most: one half from the outermost call on, the other up to the innermost one.
MAX_FRAMES = 8
#: First line of a note with frames. Notes are part of a traceback, so a run's traceback has the frames of its step too.
HEADING = "in your code (most recent call last):"
#: Attribute of an exception that another process has raised: its traceback there.
FAR_TRACEBACK = "__keepstep_far_traceback__"


class Frame(NamedTuple):
    """One call of a traceback: where it was, in which function, and the text of that line."""

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def brief(self) -> str:
        """The name of the file, the line and the function."""
        return f"{_SEPARATOR.split(self.file)[-1]}:{self.line} in {self.function}"

    def __str__(self) -> str:
        text = f'  File "{self.file}", line {self.line}, in {self.function}'
        return f"{text}\n    {self.source}" if self.source else text


def own_frames(traceback: str) -> tuple[Frame, ...]:
    """Return the frames of the user's code in a traceback's text, innermost last.

    A chain of exceptions has several parts; the last part with such frames counts. Frames of installed packages count
    only where no others are found, because an application may be installed as a package.
    """
    parts = [list(_frames(part)) for part in _PART.split(traceback)]
    for is_left_out in (_is_outside, _is_internal):
        for part in reversed(parts):
            found = [frame for frame in part if not is_left_out(frame.file)]
            if found:
                half = MAX_FRAMES // 2
                return tuple(found if len(found) <= MAX_FRAMES else found[:half] + found[-half:])
    return ()


def add_frames(error: BaseException, frames: Iterable[Frame]) -> None:
    """Show frames below an exception wherever its traceback is printed."""
    frames = tuple(frames)
    if frames:
        add_note(error, "\n".join([HEADING, *map(str, frames)]))


def add_note(error: BaseException, note: str) -> None:
    """Add a note also to an exception that refuses new attributes, such as a frozen dataclass."""
    error.__dict__.setdefault("__notes__", []).append(note)


_SEPARATOR = re.compile(r"[/\\]")
#: The beginning of one exception in the text of a chain or a group of exceptions.
_PART = re.compile(r"^[ |+]*(?:Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE)
_FRAME = re.compile(r'^(?P<margin>[ |]*)File "(?P<file>[^"\n]+)", line (?P<line>\d{1,9}), in (?P<function>.+)$')


def _frames(part: str) -> Iterator[Frame]:
    for line, below in pairwise([*part.splitlines(), ""]):
        found = _FRAME.match(line)
        if found is None or (found["file"] == "<string>" and found["function"].startswith("__")):
            continue  # the second is a method that `dataclass` has generated
        margin = f"{found['margin']}  "  # a source line is indented by two more
        is_source = below.startswith(margin) and _FRAME.match(below) is None
        source = below[len(margin) :].strip() if is_source else ""
        yield Frame(found["file"], int(found["line"]), found["function"], source)


#: The folders of Keepstep and of the standard library in this process.
_HERE = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parent.parent, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
)
#: Folders of installed packages, on any machine.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
#: The standard library of another machine, and code without a file.
_ELSEWHERE = re.compile(r"[/\\]lib(?:64)?[/\\]python3\.\d+t?[/\\]|^<frozen ")


def is_own(file: str) -> bool:
    """Whether a file is the user's own, or of an installed package other than Keepstep."""
    return not _is_internal(file)


def _is_internal(file: str) -> bool:
    """Whether a file belongs to Keepstep or to the standard library."""
    installed = _INSTALLED.search(file)
    if installed is not None:  # below the folder of the standard library, yet not part of it
        return file[installed.end() :].startswith(("keepstep/", "keepstep\\"))
    return file.startswith(_HERE) or _ELSEWHERE.search(file) is not None


def _is_outside(file: str) -> bool:
    """Whether a file is internal, or part of an installed package."""
    return _is_internal(file) or _INSTALLED.search(file) is not None
