"""A watch over what a parser does beside parsing: imports, code, processes, and files other than those allowed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.stores import migrations

_FORBIDDEN = frozenset(
    {
        "import",
        "exec",
        "compile",
        "marshal.loads",
        "pickle.find_class",
        "ctypes.dlopen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.startfile",
        "os.system",
        "pty.spawn",
        "socket.bind",
        "socket.connect",
        "socket.getaddrinfo",
        "subprocess.Popen",
        "webbrowser.open",
    }
)
_ON_FILES = frozenset(
    {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
)
#: A zone is read from the system's files, or from the package that holds them where the system has none.
_ZONES = ("/usr/share/zoneinfo", "/usr/lib/zoneinfo", "/usr/share/lib/zoneinfo", "/etc/zoneinfo")


_SCHEMAS = f"{Path(migrations.__file__).parent}/"


class Watch:
    """What was done while somebody watched this thread."""

    def __init__(self, folder: str = "") -> None:
        self.folder = os.path.realpath(folder) if folder else ""
        self.thread = threading.get_ident()
        self.seen: list[str] = []

    def allows(self, path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # a descriptor that is open already
        real = os.path.realpath(os.fsdecode(path))
        if real.startswith(_ZONES) or "/tzdata/" in real or real.startswith(("/proc/", _SCHEMAS)):
            return True
        return bool(self.folder) and real.startswith(self.folder)


_watch: list[Watch] = []


def _hear(event: str, args: tuple[object, ...]) -> None:
    if not _watch or threading.get_ident() != _watch[0].thread:
        return
    watch = _watch.pop()  # what is done to look at the event is not looked at
    try:
        if event in _FORBIDDEN and not (event == "import" and str(args[0]).startswith("tzdata")):
            watch.seen.append(f"{event} {args[0]!r:.200}" if args else event)
        elif event in _ON_FILES and not watch.allows(args[0]):
            watch.seen.append(f"{event} {args[0]!r:.200}")
    finally:
        _watch.append(watch)


sys.addaudithook(_hear)


@contextmanager
def nothing_but_parsing(folder: str = "") -> Iterator[None]:
    """Fail if the block imports, executes, connects, starts a process, or touches a file outside `folder`."""
    watch = Watch(folder)
    _watch.append(watch)
    try:
        yield
    finally:
        _watch.clear()
    assert not watch.seen, f"a parser did more than parse: {watch.seen}"
