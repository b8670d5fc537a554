"""Effects of a workflow on the outside world: requests, mail, processes, files, and declared effects.

Python reports them itself (`sys.addaudithook`), so the workflow needs no change. An audit hook stays for the life of
its process; it is only added in processes that a crash test ends itself.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ...ports import CURRENT
from ..faults.recorder import Recorder

#: Kinds of lines in the record: an effect, or the idempotency key of the last effect.
EFFECT = "effect"
KEYED = "keyed"

#: HTTP methods that may be repeated, by the definition of HTTP.
REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})

_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/\d")
_KEY_HEADER = re.compile(rb"^(?:x-)?idempoten\w+-key:[ \t]*([^\r\n]+)", re.IGNORECASE | re.MULTILINE)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Prefix of Keepstep's own modules; the line of the user's code is above them on the stack.
_OURS = str(Path(__file__).parents[2]) + os.sep
_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def effect(name: str, *details: Any, key: str | None = None) -> None:
    """Declare an effect on the outside world; outside a crash test this does nothing.

    With a `key`, the receiver performs a repeated effect only once, as with `ks.idempotency_key()`.
    """
    if _watch is not None:
        text = " ".join([name, *(str(detail) for detail in details)])
        _watch.happened("effect", text, key=key, twice=True)


class Watch:
    """Records every effect with its step; `before` is called first, and may end the process."""

    def __init__(self, recorder: Recorder, home: Path, before: Callable[[Any, str, str], None]) -> None:
        self.bodies: list[Any] = []  # attempts whose bodies are running
        self._recorder = recorder
        self._home = str(home) + os.sep
        self._temporary = os.path.realpath(tempfile.gettempdir()) + os.sep
        self._before = before
        self._inside = threading.local()
        self._requests: dict[int, str] = {}
        self._events: dict[str, Callable[..., None]] = {
            "open": self._open,
            "subprocess.Popen": self._process,
            "os.system": self._system,
            "os.exec": self._process,
            "http.client.send": self._http_client,
            "smtplib.send": self._mail,
            "socket.connect": self._connect,
            "sqlite3.connect": self._database,
            "os.remove": lambda path, *_: self._file("removed", path),
            "os.rename": lambda old, new, *_: self._file("renamed", old, new),
            "os.mkdir": lambda path, *_: self._file("made", path),
            "os.rmdir": lambda path, *_: self._file("removed", path),
            "os.truncate": lambda path, *_: self._file("changed", path),
            "os.link": lambda old, new, *_: self._file("linked", old, new),
            "os.symlink": lambda old, new, *_: self._file("linked", old, new),
        }

    def begin(self) -> None:
        """Watch effects until the process ends."""
        global _watch  # noqa: PLW0603 - one per process
        _watch = self
        sys.addaudithook(self._audit)
        self.catch_clients()

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        handler = self._events.get(event)
        if handler is None or getattr(self._inside, "busy", False):
            return
        if CURRENT.get() is None and not self.bodies:
            return
        self._inside.busy = True
        try:
            handler(*args)
        except (TypeError, ValueError, OSError):
            return  # Python will refuse these arguments, too
        finally:
            self._inside.busy = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Record nothing that this thread does meanwhile."""
        before, self._inside.busy = getattr(self._inside, "busy", False), True
        try:
            yield
        finally:
            self._inside.busy = before

    # -- recording -----------------------------------------------------------------------------------------------------

    def scope(self) -> Any:
        """Return the attempt or branch of the caller; a thread of the user belongs to the only running body."""
        scope = CURRENT.get()
        if scope is None and len(self.bodies) == 1:
            return self.bodies[0]
        return scope

    def happened(self, kind: str, text: str, *, key: str | None = None, twice: bool, carries: bytes = b"") -> None:
        """Record an effect. `twice`: a repetition matters; `carries`: data that may contain the step's key."""
        scope = self.scope()
        if scope is None or _has_left(scope):
            return
        frame = _their_frame()
        if frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "logging":
            return
        line = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        own = _key_of(scope)
        if key is None and own and own.encode() in carries:
            key = own
        shown = writable(scope.run.host.redaction.redact(text))
        self._before(scope, shown, line)
        data = {"kind": kind, "text": shown, "key": key, "twice": twice, "line": line}
        self._note(EFFECT, scope, data)

    def _note(self, what: str, scope: Any, data: dict[str, Any]) -> None:
        run = scope.run
        step, number = (scope.key, scope.number) if scope.in_step else ("", 0)
        self._recorder.note(what, run=run.id, step=step, attempt=number, worker=getattr(run, "worker", ""), data=data)

    def keyed(self, text: str, carries: bytes) -> None:
        """Record further data of an effect, which may contain the key that makes a repetition harmless."""
        scope = self.scope()
        key = "" if scope is None else _key_of(scope)
        if key and key.encode() in carries:
            self._note(KEYED, scope, {"text": text, "key": key})

    # -- files ---------------------------------------------------------------------------------------------------------

    def _open(self, path: Any, mode: str | None, flags: int) -> None:
        if isinstance(path, int) or not flags & _WRITES:
            return
        if flags & os.O_APPEND:
            self._file("appended to", path, twice=True)
        elif flags & (os.O_TRUNC | os.O_EXCL):
            self._file("written", path)
        else:
            self._file("changed", path)

    def _file(self, verb: str, *paths: Any, twice: bool = False) -> None:
        names = [name for name in map(self._named, paths) if name]
        if names:
            self.happened("file", f"{' to '.join(names)} {verb}", twice=twice)

    def _named(self, path: Any) -> str:
        """Return a path as the user knows it; empty for system, temporary and Python's own files."""
        if isinstance(path, int):
            return ""
        full = os.path.realpath(os.fsdecode(path))
        if full.startswith(self._home):
            return full.removeprefix(self._home)
        foreign = full.startswith((self._temporary, "/dev/", "/proc/", "/sys/"))
        return "" if foreign or "__pycache__" in full else full

    def _database(self, path: Any) -> None:
        if os.fsdecode(path) != ":memory:":
            self._file("opened as a database", path)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _process(self, executable: Any, args: Any, *_: Any) -> None:
        words = [os.fsdecode(word) for word in ([args] if isinstance(args, str | bytes) else args or [executable])]
        if words[:1] == ["/bin/sh"] and words[1:2] == ["-c"]:
            words = words[2:]
        text = " ".join(words)
        self.happened("process", _brief(text), twice=True, carries=text.encode("utf-8", "replace"))

    def _system(self, command: Any) -> None:
        self._process("", os.fsdecode(command))

    # -- the network ---------------------------------------------------------------------------------------------------

    def _connect(self, _: Any, address: Any) -> None:
        where = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else os.fsdecode(address)
        self.happened("connection", f"connected to {where}", twice=False)

    def _http_client(self, connection: Any, data: Any) -> None:
        if not isinstance(data, bytes | bytearray):
            return
        found = _REQUEST.match(data)
        if found is None:
            self.keyed(self._requests.get(id(connection), ""), bytes(data))
            return
        secure = connection.default_port == 443
        port = "" if connection.port == connection.default_port else f":{connection.port}"
        url = f"{'https' if secure else 'http'}://{connection.host}{port}{found[2].decode('latin-1')}"
        header = _KEY_HEADER.search(data)
        key = header[1].decode("latin-1").strip() if header else None
        self._requests[id(connection)] = self.request(found[1].decode(), url, key, bytes(data))

    def request(self, method: str, url: str, key: str | None, carries: bytes = b"") -> str:
        """Record a request of any library, without its query, which may contain a secret."""
        text = f"{method} {url.partition('?')[0]}"
        self.happened("request", text, key=key, twice=method not in REPEATABLE, carries=carries)
        return text

    def _mail(self, _: Any, data: Any) -> None:
        text = data.decode("utf-8", "replace") if isinstance(data, bytes) else str(data)
        if text[:10].lower() == "mail from:":
            self.happened("mail", f"mail from {text[10:].split()[0]}", twice=True)

    def catch_clients(self) -> None:
        """Watch the loaded HTTP clients that Python does not report."""
        httpx, aiohttp = sys.modules.get("httpx"), sys.modules.get("aiohttp")
        if httpx is not None:
            for client in (httpx.Client, httpx.AsyncClient):
                _report_first(client, "send", self._httpx)
        if aiohttp is not None:
            _report_first(aiohttp.ClientSession, "_request", self._aiohttp)

    def _httpx(self, _: Any, request: Any, **__: Any) -> None:
        carries = b" ".join(value for _, value in request.headers.raw) + getattr(request, "_content", b"")
        self.request(request.method, str(request.url), _key_among(request.headers), carries)

    def _aiohttp(self, _: Any, method: str, url: Any, **options: Any) -> None:
        headers = dict(options.get("headers") or {})
        carries = repr([headers, options.get("json"), options.get("data")]).encode("utf-8", "replace")
        self.request(method.upper(), str(url), _key_among(headers), carries)


#: The watch of this process, if it belongs to a crash test.
_watch: Watch | None = None


def _report_first(owner: Any, name: str, report: Callable[..., None]) -> None:
    """Wrap a method so that `report` receives its arguments before the method runs."""
    method = getattr(owner, name)
    if getattr(method, "reports", False):
        return

    def reporting(*args: Any, **kwargs: Any) -> Any:
        report(*args, **kwargs)
        return method(*args, **kwargs)

    reporting.reports = True  # type: ignore[attr-defined]
    setattr(owner, name, reporting)


def _key_among(headers: Any) -> str | None:
    for name, value in headers.items():
        if _KEY_HEADER.match(f"{name}: {value}".encode("utf-8", "replace")):
            return str(value)
    return None


def _key_of(scope: Any) -> str:
    return scope.idempotency_key() if scope.in_step else ""


def _has_left(scope: Any) -> bool:
    """Whether the run of a body is no longer driven here. A body in another process ends with that instead."""
    stop = getattr(scope.run, "stop", None)
    return stop is not None and bool(stop.detached)


def _brief(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 120 else flat[:119] + "…"


def _their_frame() -> FrameType | None:
    """Return the innermost frame outside Python, libraries and Keepstep; a frame of logging wins if it is passed."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to find the caller
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_globals.get("__name__", "").partition(".")[0] == "logging" or is_theirs(name):
            return frame
        frame = frame.f_back
    return None


def writable(text: str) -> str:
    """Return text that every file and terminal can hold, since a file name may be invalid text."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_theirs(filename: str) -> bool:
    """Whether a file is the user's own code, as far as it can be determined."""
    return not filename.startswith((_OURS, "<frozen", *_LIBRARY))
