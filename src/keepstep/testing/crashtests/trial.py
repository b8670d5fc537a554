"""One trial of a crash test: a fresh world, a process that dies at a chosen moment, and one that recovers."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ...errors import DefinitionError
from ..faults.recorder import Effect, Recorder
from .crash_points import Moment
from .effects import writable
from .far import has_died
from .process import DIED, ENDED, WANTS_SQLITE, End, Life, LifeLoop, Plan

#: Time in seconds after which a process of a crash test counts as hanging.
LIFE_SECONDS = 10.0
#: Time in seconds that a hanging process has to report where it hangs.
WORDS_SECONDS = 2.0
#: Interval in seconds of polling a process.
LOOK_SECONDS = 0.001
#: Maximum number of characters of a process's output to keep.
MAX_PRINTED = 200_000
#: Size in bytes above which files are not compared.
MAX_COMPARED = 10_000_000
_BROKEN = 70


@dataclass(slots=True)
class Trial:
    """The result of one trial: how it ended, its effects, and what it left behind."""

    moment: Moment | None
    end: End
    lives: int = 1
    crashed: bool = False
    record: list[Effect] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    printed: str = ""
    seconds: float = 0.0
    wants_sqlite: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """The surroundings of a trial: its preparation and cleanup, and how long a life may last."""

    set_up: Callable[[], Any] | None = None
    files: tuple[Path, ...] = ()
    seconds: float = LIFE_SECONDS


def run_trials(
    plan: Plan, setting: Setting, moments: Sequence[Moment | None], jobs: int, *, curious: bool = False
) -> Iterator[Trial]:
    """Run a trial for each moment, several at once; yield them as they finish."""
    waiting = list(reversed(moments))
    living: dict[int, tuple[_Steps, float]] = {}
    try:
        while waiting or living:
            while waiting and len(living) < jobs:
                steps = _trial(plan, setting, waiting.pop(), curious=curious)
                living[next(steps)] = (steps, time.monotonic() + setting.seconds)
            for pid, (steps, until) in list(living.items()):
                status = _ended(pid, late=time.monotonic() > until)
                if status is None:
                    continue
                del living[pid]
                try:
                    living[steps.send(status)] = (steps, time.monotonic() + setting.seconds)
                except StopIteration as done:
                    yield done.value
            time.sleep(LOOK_SECONDS)
    finally:
        for pid, (steps, _) in living.items():
            _kill(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            steps.close()


#: A trial yields the pid of each process that it starts, and is sent how that ended: its exit code, or LATE.
_Steps = Generator[int, int, Trial]
LATE = 1000


def _ended(pid: int, *, late: bool) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        return os.waitstatus_to_exitcode(status)
    if not late:
        return None
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)  # it reports where it hangs, and dies
    until = time.monotonic() + WORDS_SECONDS
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > until:
            _kill(pid)
        time.sleep(LOOK_SECONDS)
    return LATE


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _trial(plan: Plan, setting: Setting, moment: Moment | None, *, curious: bool) -> _Steps:
    began = time.monotonic()
    with _world(setting) as folder:
        trial = Trial(moment, End("died"))
        death = moment.id if moment is not None else None
        pids = []
        try:
            while True:
                pid = _fork(plan, folder, trial.lives, death, curious=curious)
                pids.append(pid)
                code = yield pid
                if code != DIED or death is None:
                    break
                death, trial.crashed = None, True
                trial.lives += 1
        finally:
            for pid in pids:
                _kill(pid)  # ends processes that were started and left behind
        trial.crashed |= has_died(folder)
        trial.wants_sqlite = code == WANTS_SQLITE
        trial.end = _end(folder, code)
        trial.printed = (folder / "printed").read_text(encoding="utf-8", errors="replace")[-MAX_PRINTED:]
        trial.record = _record(folder)
        if code == ENDED and (folder / "end").exists():
            trial.values = json.loads((folder / "values").read_text(encoding="utf-8"))
            trial.moments = pickle.loads((folder / "moments").read_bytes())  # noqa: S301 - written by our own process
        trial.files = dict(_fingerprints(folder / "home"))
        trial.seconds = time.monotonic() - began
        return trial


@contextmanager
def _world(setting: Setting) -> Iterator[Path]:
    """Yield a folder for one trial, prepared by the user's `set_up`."""
    with (
        tempfile.TemporaryDirectory(prefix="keepstep-crashtest-", ignore_cleanup_errors=True) as name,
        ExitStack() as stack,
    ):
        folder = Path(os.path.realpath(name))
        home = folder / "home"
        home.mkdir()
        (folder / "printed").touch()
        for path in setting.files:
            copied = home / path.name
            shutil.copytree(path, copied) if path.is_dir() else shutil.copy2(path, copied)
        if setting.set_up is not None:
            with _in_folder(home):
                _make_ready(setting.set_up, stack)
        yield folder


def _make_ready(set_up: Callable[[], Any], stack: ExitStack) -> None:
    try:
        made = set_up()
        if isinstance(made, AbstractContextManager):
            stack.enter_context(made)
    except Exception as error:
        raise DefinitionError(f"set_up failed: {type(error).__name__}: {error}") from error


@contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# -- a process -------------------------------------------------------------------------------------------------------


def _fork(plan: Plan, folder: Path, number: int, death: str | None, *, curious: bool) -> int:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads, which are irrelevant here
        pid = os.fork()
    if pid == 0:
        _live(plan, folder, number, death, curious=curious)
    with suppress(OSError):
        os.setpgid(pid, pid)  # the process does this, too; whichever is first, its whole group can be ended
    return pid


def _live(plan: Plan, folder: Path, number: int, death: str | None, *, curious: bool) -> NoReturn:
    """Run as the process of one life; never return."""
    code = _BROKEN
    try:
        os.setpgid(0, 0)
        gc.freeze()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _redirect(folder / "printed")
        here = str(Path.cwd())
        sys.path[:] = [here if entry == "" else entry for entry in sys.path]
        sys.dont_write_bytecode = True
        os.chdir(folder / "home")
        asyncio.set_event_loop(None)
        life = Life(plan, folder, number, death, curious=curious)
        with asyncio.Runner(loop_factory=LifeLoop) as runner:
            code = runner.run(life.live())
            sys.stdout.flush()
            os._exit(code)
    except BaseException as error:  # noqa: BLE001 - nothing may escape this process
        with suppress(BaseException):
            end = {"status": "broken", "error": str(error), "error_type": type(error).__name__}
            end["traceback"] = traceback.format_exc()
            (folder / "end").write_text(json.dumps(end), encoding="utf-8")
    finally:
        os._exit(code)


def _redirect(printed: Path) -> None:
    """Keep the workflow's output, to be shown only if something goes wrong."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    faulthandler.disable()  # it may have been set to write elsewhere
    faulthandler.enable(sys.stderr)


# -- results ---------------------------------------------------------------------------------------------------------


def _end(folder: Path, code: int) -> End:
    end = folder / "end"
    if code == LATE:
        return End("hangs")
    if end.exists():
        stored = json.loads(end.read_text(encoding="utf-8"))
        lists: dict[str, Any] = {name: tuple(stored.get(name, ())) for name in ("waits", "unsent")}
        return End(**{**stored, **lists})
    if code < 0:
        return End("died", error=f"the process was ended by {signal.Signals(-code).name}")
    return End("died", error=f"the process ended itself with exit code {code}")


def _record(folder: Path) -> list[Effect]:
    record = folder / "record"
    if not record.exists():
        return []
    recorder = Recorder(record)
    try:
        return recorder.effects()
    finally:
        recorder.close()


def _fingerprints(home: Path) -> Iterable[tuple[str, str]]:
    """Yield a digest of every file in a folder."""
    for path in sorted(home.rglob("*")):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_COMPARED:
                yield writable(str(path.relative_to(home))), hashlib.sha256(path.read_bytes()).hexdigest()
