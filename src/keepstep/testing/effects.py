"""What a workflow does to the world around it: requests, mail, processes, files, and what its author declares.

Everything is seen where Python itself tells of it (`sys.addaudithook`), so nothing of the workflow has to be changed.
An audit hook stays for the life of its process; it is only ever added in a process that a crash test ends itself.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ..engine.attempt import idempotency_key
from ..ports import CURRENT
from .recorder import Recorder

#: What a line of the record says: something was done, or what was done last carried the step's idempotency key.
EFFECT = "effect"
KEYED = "keyed"

#: Requests that a server may be sent twice, by the definition of HTTP.
REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})

_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/\d")
_KEY_HEADER = re.compile(rb"^(?:x-)?idempoten\w+-key:[ \t]*([^\r\n]+)", re.IGNORECASE | re.MULTILINE)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Modules through which an effect goes on its way, so that the line that meant it is above them.
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def effect(name: str, *details: Any, key: str | None = None) -> None:
    """Declare that something happens to the outside world here; outside a crash test this does nothing.

    With a `key`, the other side is known to do it once however often it is told, as with `ks.idempotency_key()`.
    """
    if _watch is not None:
        text = " ".join([name, *(str(detail) for detail in details)])
        _watch.happened("effect", text, key=key, twice=True)


class Watch:
    """Notes every effect, with the step that it belongs to; `before` is told first, and may end the process."""

    def __init__(self, recorder: Recorder, home: Path, before: Callable[[Any, str, str], None]) -> None:
        self.bodies: list[Any] = []  # the attempts whose bodies are running
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
        """Watch from now on, for as long as the process lives."""
        global _watch  # noqa: PLW0603 - there is one in a process
        _watch = self
        sys.addaudithook(self._heard)
        self.catch_clients()

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        handler = self._events.get(event)
        if handler is None or getattr(self._inside, "busy", False):
            return
        if CURRENT.get() is None and not self.bodies:
            return
        self._inside.busy = True
        try:
            handler(*args)
        except (TypeError, ValueError, OSError):
            return  # arguments that Python will refuse too
        finally:
            self._inside.busy = False

    # -- noting --------------------------------------------------------------------------------------------------------

    def scope(self) -> Any:
        """The attempt or the branch that something happens in; a thread of the user's own belongs to the only body."""
        scope = CURRENT.get()
        if scope is None and len(self.bodies) == 1:
            return self.bodies[0]
        return scope

    def happened(self, kind: str, text: str, *, key: str | None = None, twice: bool, carries: bytes = b"") -> None:
        """Note an effect; `twice` says that doing it again matters, `carries` is what may hold the step's key."""
        scope = self.scope()
        if scope is None or scope.run.detached:
            return
        frame = _their_frame()
        if frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "logging":
            return
        line = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        own = _key_of(scope)
        if key is None and own and own.encode() in carries:
            key = own
        shown = writable(scope.run.engine.censor.redact(text))
        self._before(scope, shown, line)
        data = {"kind": kind, "text": shown, "key": key, "twice": twice, "line": line}
        self._note(EFFECT, scope, data)

    def _note(self, what: str, scope: Any, data: dict[str, Any]) -> None:
        run = scope.run
        step, number = (scope.key, scope.number) if scope.in_step else ("", 0)
        self._recorder.note(what, run=run.id, step=step, attempt=number, worker=run.worker, data=data)

    def keyed(self, text: str, carries: bytes) -> None:
        """More of something that was noted: it may hold the key that makes it harmless."""
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
        """A path as the user knows it; nothing for what is the machine's, temporary, or Python's own."""
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
        """Note a request, whichever library makes it; the query is left out, since it may hold a secret."""
        text = f"{method} {url.partition('?')[0]}"
        self.happened("request", text, key=key, twice=method not in REPEATABLE, carries=carries)
        return text

    def _mail(self, _: Any, data: Any) -> None:
        text = data.decode("utf-8", "replace") if isinstance(data, bytes) else str(data)
        if text[:10].lower() == "mail from:":
            self.happened("mail", f"mail from {text[10:].split()[0]}", twice=True)

    def catch_clients(self) -> None:
        """Listen to the HTTP clients that have a way of their own, if they are loaded."""
        httpx, aiohttp = sys.modules.get("httpx"), sys.modules.get("aiohttp")
        if httpx is not None:
            for client in (httpx.Client, httpx.AsyncClient):
                _tell_first(client, "send", self._httpx)
        if aiohttp is not None:
            _tell_first(aiohttp.ClientSession, "_request", self._aiohttp)

    def _httpx(self, _: Any, request: Any, **__: Any) -> None:
        carries = b" ".join(value for _, value in request.headers.raw) + getattr(request, "_content", b"")
        self.request(request.method, str(request.url), _key_among(request.headers), carries)

    def _aiohttp(self, _: Any, method: str, url: Any, **options: Any) -> None:
        headers = dict(options.get("headers") or {})
        carries = repr([headers, options.get("json"), options.get("data")]).encode("utf-8", "replace")
        self.request(method.upper(), str(url), _key_among(headers), carries)


#: The watch of this process, if it is one of a crash test's.
_watch: Watch | None = None


def _tell_first(owner: Any, name: str, told: Callable[..., None]) -> None:
    """Have a method tell what it is called with before it does anything."""
    method = getattr(owner, name)
    if getattr(method, "tells", False):
        return

    def telling(*args: Any, **kwargs: Any) -> Any:
        told(*args, **kwargs)
        return method(*args, **kwargs)

    telling.tells = True  # type: ignore[attr-defined]
    setattr(owner, name, telling)


def _key_among(headers: Any) -> str | None:
    for name, value in headers.items():
        if _KEY_HEADER.match(f"{name}: {value}".encode("utf-8", "replace")):
            return str(value)
    return None


def _key_of(scope: Any) -> str:
    return idempotency_key(scope.run.id, scope.key, scope.run.generation) if scope.in_step else ""


def _brief(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 120 else flat[:119] + "…"


def _their_frame() -> FrameType | None:
    """The innermost frame that is neither Python's nor a library's nor ours; the logging module's, if it passes it."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else tells where a call comes from
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_globals.get("__name__", "").partition(".")[0] == "logging" or is_theirs(name):
            return frame
        frame = frame.f_back
    return None


def writable(text: str) -> str:
    """Text that every file and terminal can hold: the name of a file may be none."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_theirs(filename: str) -> bool:
    """Whether a file is the user's own code, as far as one can tell."""
    return not filename.startswith((_OURS, "<frozen", *_LIBRARY))
