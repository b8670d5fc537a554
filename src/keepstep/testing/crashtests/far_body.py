"""The process of a body in a crash test: that of `executor="process"`, which also reports moments, and dies at one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...bodies import child
from ...bodies.perform import FOUND, step_of
from ...executors.task import Done, Failed, Logged, Lost, Run
from ...ports import CURRENT
from ..faults.recorder import BODY, Recorder
from .effects import Watch
from .far import ALONE, LEVEL, LOGGER, may_die
from .watched import about, in_braces, watched


class WatchedChild(child.Child):
    """A process that performs bodies, reports what happens in them, and dies at the moment of death."""

    def __init__(self, line: Any, settings: dict[str, Any]) -> None:
        super().__init__(line)
        self._folder, self._death = Path(settings["folder"]), settings["death"]
        self._recorder = Recorder(self._folder / "record")
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._watch = Watch(self._recorder, self._folder / "home", self._before_effect)
        self._watch.begin()

    def _performed(self, order: Run, run: Callable[..., Any]) -> Done | Failed | Lost:
        task = order.task
        self._reach(f"{task.run} {task.step} {task.attempt} arrival 1", "before its body begins")
        with contextlib.suppress(Exception):  # the body itself fails by it
            FOUND[task.function] = watched(step_of(task.function), self)
        return super()._performed(order, run)

    def begins(self, step: Any) -> Any:
        scope: Any = CURRENT.get()
        self._watch.catch_clients()
        self.inside(scope, "start", "as its body begins")
        self._recorder.note(BODY, run=scope.run.id, step=scope.key, attempt=scope.number, data=about(step))
        self._watch.bodies.append(scope)
        return scope

    def ends(self, scope: Any) -> None:
        self._watch.bodies.remove(scope)

    def inside(self, scope: Any, what: str, where: str, line: str = "") -> None:
        place = f"{scope.run.id} {scope.key} {scope.number} {what}"
        with self._counting:
            self._counts[place] += 1
            number = self._counts[place]
        self._reach(f"{place} {number}", where.format(n=number), line)

    def _before_effect(self, scope: Any, text: str, line: str) -> None:
        self.inside(scope, "effect", f"before its effect {{n}}: {in_braces(text)}", line)

    def _reach(self, ident: str, where: str, line: str = "") -> None:
        """Tell the worker of a moment, and die there or wait for the worker to die."""
        self._send(Logged(0, LOGGER, LEVEL, json.dumps([ident, where, line])))
        if self._death == ident + ALONE and may_die(self._folder):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._death == ident:
            threading.Event().wait()  # the worker dies when it hears of this moment, and this process with it


def main() -> None:
    """Perform bodies for the life of a crash test."""
    sys.dont_write_bytecode = True
    child.main(lambda line, given: WatchedChild(line, given.settings))
