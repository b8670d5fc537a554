"""The executors of a crash test: bodies that run elsewhere run in processes of this machine, which die at a moment."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...engine.executors import Executors
from ...executors.process import Process, ProcessPool
from ...executors.task import Ended, Lost
from .crash_points import Moment

if TYPE_CHECKING:
    from ...executors.far import Body
    from ..faults.recorder import Recorder
    from .effects import Watch

#: The logger by which the process of a body tells of a moment, and the level, which is above that of any message.
LOGGER, LEVEL = "keepstep.crashtest", 100
#: Ending of the id of a moment at which the process of a body dies, and not its worker.
ALONE = " alone"
#: Name of the file that is made before the process of a body dies alone, so that only one does.
DIED_ALONE = "died-alone"
#: Kind of a line in the record: an executor whose bodies ran in processes of this machine instead.
HERE_INSTEAD = "here instead"


class Life(Protocol):
    """The life of a crash test, as its executors see it."""

    folder: Path
    #: The id of the moment of death, if this life has one.
    death: str | None
    moments: list[Moment]
    recorder: Recorder
    watch: Watch

    def reach(self, moment: Moment, *others: str) -> None:
        """Die here if this is the moment of death."""


def may_die(folder: Path) -> bool:
    """Whether no process of a body has died alone before; note that one does now."""
    try:
        (folder / DIED_ALONE).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def has_died(folder: Path) -> bool:
    """Whether the process of a body has died alone."""
    return (folder / DIED_ALONE).exists()


class LocalProcesses(Executors):
    """The executors of a life: whatever a step names, its bodies run in processes of this machine."""

    def __init__(self, default: Any, life: Life) -> None:
        super().__init__(None, default)
        self._life = life
        logger = logging.getLogger(LOGGER)
        logger.propagate = False
        logger.addHandler(_Moments(life))

    def _opened(self, where: Any) -> Any:
        if where not in self._open:
            if where != "process" and not isinstance(where, Process):
                name = where if isinstance(where, str) else type(where).__name__
                self._life.recorder.note(HERE_INSTEAD, data={"executor": name})
            spec = where if isinstance(where, Process) else Process()
            self._open[where] = self._open.get(spec) or WatchedPool(spec, self._host, self._life)
            self._open[spec] = self._open[where]
        return self._open[where]


class WatchedPool(ProcessPool):
    """Processes that report what their bodies do, and of which one dies at the moment of death."""

    module = f"{__package__}.far_body"

    def __init__(self, spec: Process, host: Any, life: Life) -> None:
        super().__init__(spec, host)
        self._life = life
        self.settings = {"folder": str(life.folder), "death": life.death or ""}  # type: ignore[misc]

    def _started(self) -> Any:
        with self._life.watch.aside():  # no step has started this process
            return super()._started()

    def ended(self, body: Body, outcome: Ended) -> None:
        task, life = body.task, self._life
        if not isinstance(outcome, Lost):
            ident = f"{task.run} {task.step} {task.attempt} outcome 1{ALONE}"
            life.moments.append(alone(ident, "after its outcome, before that is recorded", task.step, "", task.run))
            if life.death == ident and may_die(life.folder):
                body.place.line.kill()
        super().ended(body, outcome)


class _Moments(logging.Handler):
    """Takes the moments of bodies in other processes."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self._life = life

    def emit(self, record: Any) -> None:
        ident, where, line = json.loads(record.getMessage())
        self._life.moments.append(alone(ident + ALONE, where, record.step, line, record.run_id))
        if " arrival " not in ident:  # for the worker, this is no other moment than the next
            self._life.reach(Moment(ident, where, record.step, line, record.run_id))


def alone(ident: str, where: str, step: str, line: str, run: str) -> Moment:
    """Return a moment at which the process of a body dies alone."""
    return Moment(ident, f"{where} (its process alone)", step, line, run)


def is_alone(moment: Moment) -> bool:
    """Whether the process of a body dies alone at a moment."""
    return moment.id.endswith(ALONE)
