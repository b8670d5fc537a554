"""One life of a process in a crash test: it drives the workflow in virtual time, and dies at a given moment.

A life is a real process, so its death is a real one: threads, locks, open files and everything in memory are gone. Only
the disk, the record of effects and the outside world remain.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...engine.engine import Engine
from ...engine.handle import RunHandle
from ...engine.parts import Parts
from ...engine.reader import Reader
from ...engine.worker import Worker
from ...kernel import children  # noqa: F401 - with all that workflows call: loaded once, not in each process
from ...kernel.step import perform
from ...model import Kind, Run, RunQuery, Status, ids
from ...model.signal import CHILD, GO, RESERVED, RESOLVE, callback_of
from ...ports import CURRENT
from ...records.record import unseal
from ...values import VALUES
from ...workflows.definition import Workflow
from ..faults.crash import MemoryDisk, SQLiteDisk
from ..faults.recorder import Recorder
from ..virtual import EPOCH, VirtualClock, VirtualLoop, attend
from .crash_points import Moment, MortalStore
from .effects import Watch
from .far import LocalProcesses
from .nondeterminism import notice
from .watched import about, in_braces, watched

#: Id of the run in every life, so that ids, idempotency keys and random values are the same each time.
RUN = "crashtest"
#: Exit codes of a process: it reached its end, it died at its moment, or it needs a SQLite store.
ENDED, DIED, WANTS_SQLITE = 40, 41, 42
#: Kind of a line in the record: the workflow's own code read a clock or drew a random value.
CHANCE = "chance"
#: Longest single wait of a loop, in seconds.
MAX_SELECT_SECONDS = 86_400.0
#: Delay in seconds of a timer that always exists and never fires.
FAR_SECONDS = 1e12
#: Number of passes without progress, although something is due, after which a run counts as stuck.
PATIENCE = 200
#: Number of waits for children to end after their parent has ended.
OVERTIME = 20
#: Real time in seconds to wait for a step that awaits something unknown to the loop.
STILL_SECONDS = 1.0
#: Real time in seconds up to which work outside the loop takes no virtual time, so that quick steps in threads produce
#: the same times in every run.
QUICK_SECONDS = 0.25
#: Name prefixes of threads that the loop knows of.
_KNOWN_THREADS = ("keepstep-", "asyncio_", "ThreadPoolExecutor-")


#: Kinds of answers: a signal, a question that expects a reply, and the completion of a callback.
SIGNAL, QUESTION, CALLBACK = "signal", "question", "callback"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer from outside: the name of the signal or of the callback, the payload, and its kind."""

    name: str
    payload: Any
    kind: str = SIGNAL

    def fits(self, signal: str) -> bool:
        """Whether it answers a wait for this signal."""
        return callback_of(signal) == self.name if self.kind == CALLBACK else signal == self.name


@dataclass(frozen=True, slots=True)
class Plan:
    """The test: the workflow, its arguments, and the signals from outside."""

    workflow: Workflow[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Answers from outside, each sent once, when a run waits for it.
    answers: tuple[Answer, ...] = ()
    each_life: Callable[[], Any] | None = None
    store: str = "memory"
    #: Time of the clock at the start.
    epoch: float = EPOCH
    #: The executor of plain functions that name none.
    executor: Any = None


@dataclass(frozen=True, slots=True)
class End:
    """The end of a life that was not cut short: the run's status, its result or error, and its waits."""

    status: str
    output: str | None = None
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    waits: tuple[str, ...] = ()
    unsent: tuple[str, ...] = ()
    seconds: float = 0.0


class Life:
    """The activity of one process, from its start to its end."""

    def __init__(self, plan: Plan, folder: Path, number: int, death: str | None, *, curious: bool) -> None:
        self.plan, self.folder, self.number, self.death, self.curious = plan, folder, number, death, curious
        self.moments: list[Moment] = []
        self.recorder = Recorder(folder / "record")
        self.watch = Watch(self.recorder, folder / "home", self._before_effect)
        self._counts: dict[tuple[Any, ...], int] = {}
        self._still_since: float | None = None
        self._patience = PATIENCE
        self._overtime = OVERTIME
        self._lock = threading.Lock()

    async def live(self) -> int:
        """Drive the run to its end, or to the moment of death."""
        self.loop: LifeLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        self.clock = VirtualClock(self.loop, self._clock_stood_at())
        self._make_ids_repeatable()
        self.disk = self._disk()
        self.store = MortalStore(self.disk.open(), self.recorder, self.reach)
        parts = Parts(perform=self._perform)
        self.engine = Engine(self.store, clock=self.clock, linger_seconds=0.01, parts=parts)
        self.engine.executors = LocalProcesses(self.plan.executor, self)
        self.over: asyncio.Future[End] = self.loop.create_future()
        self.answers = Answers(self)
        if self.plan.each_life is not None:
            made = self.plan.each_life()
            if isinstance(made, Awaitable):
                await made
        await self.engine.open()
        self.loop.attend(self)
        self.watch.begin()
        if self.curious:
            notice(self._chance)
        await self.engine.start(self.plan.workflow.bind(*self.plan.args, **self.plan.kwargs), run_id=RUN)
        end = await self.over
        self._leave(end)
        return ENDED

    def _disk(self) -> MemoryDisk | SQLiteDisk:
        if self.plan.store == "sqlite":
            return SQLiteDisk(self.folder / "runs.db", self.clock, power_loss="may_lose_last")
        disk, image = MemoryDisk(self.clock), self.folder / "disk"
        if image.exists():
            disk.restore(image.read_bytes())
        return disk

    def _clock_stood_at(self) -> float:
        clock = self.folder / "clock"
        return float(clock.read_text()) if clock.exists() else self.plan.epoch

    def _make_ids_repeatable(self) -> None:
        """Derive randomness inside Keepstep, including a run's seed, from the number of this life."""
        count = itertools.count()

        def draw(nbytes: int | None = None) -> bytes:
            return hashlib.sha256(f"{self.number}|{next(count)}".encode()).digest()[:nbytes]

        ids.draw = draw

    # -- moments -------------------------------------------------------------------------------------------------------

    def reach(self, moment: Moment, *others: str) -> None:
        """Die here if this is the moment, or one of `others` that coincide with it."""
        self.moments.append(moment)
        if self.death is not None and self.death in (moment.id, *others):
            self.die()

    def inside(self, scope: Any, what: str, where: str, line: str = "") -> None:
        """Reach a moment inside a step's body, numbered among those of its kind."""
        if not scope.in_step:
            return
        place = (scope.run.id, scope.key, scope.number, what)
        with self._lock:
            number = self._counts[place] = self._counts.get(place, 0) + 1
        words = where.format(n=number)
        self.reach(Moment(" ".join(map(str, (*place, number))), words, scope.key, line, scope.run.id))

    def _before_effect(self, scope: Any, text: str, line: str) -> None:
        self.inside(scope, "effect", f"before its effect {{n}}: {in_braces(text)}", line)

    def _chance(self, called: str, line: str, instead: str) -> None:
        self.recorder.note(CHANCE, run=RUN, data={"called": called, "line": line, "instead": instead})

    def die(self) -> None:
        """End this process as a kill would; the disk stays as it is."""
        self._lock.acquire()  # no other thread may die meanwhile
        self.store.stand_still()
        if isinstance(self.disk, MemoryDisk):
            self.disk.mark_dead(self.disk.store, self.store.workers)
        self._save()
        os._exit(DIED)

    def _save(self) -> None:
        if isinstance(self.disk, MemoryDisk):
            (self.folder / "disk").write_bytes(self.disk.image())
        (self.folder / "clock").write_text(repr(self.clock.now()))

    def _leave(self, end: End) -> None:
        self._save()
        (self.folder / "moments").write_bytes(pickle.dumps(self.moments))
        (self.folder / "values").write_text(json.dumps(dict(self._values())), encoding="utf-8")
        (self.folder / "end").write_text(json.dumps(asdict(end)), encoding="utf-8")

    def _values(self) -> Iterator[tuple[str, str]]:
        """Yield the recorded value of each step, in order."""
        for run in reversed(self.store.inner.list_runs(RunQuery(limit=1000)).runs):
            after = 0
            while rows := self.store.inner.list_checkpoints(run.id, after):
                for record, _ in unseal(rows, run.id, after):
                    if record.kind == Kind.STEP_COMPLETED:
                        yield f"{run.id} {record.step}", record.raw().decode("utf-8", "replace")
                after = rows[-1].seq

    # -- the bodies of steps -------------------------------------------------------------------------------------------

    async def _perform(self, call: Any) -> None:
        if call.step.transactional and not self.store.transactional:
            os._exit(WANTS_SQLITE)
        call.step = watched(call.step, self)
        await perform(call)

    def begins(self, step: Any) -> Any:
        """Note that a body begins, and return its scope."""
        scope = CURRENT.get()
        self.watch.catch_clients()
        self.inside(scope, "start", "as its body begins")
        self.recorder.body(**about(step))
        self.watch.bodies.append(scope)
        return scope

    def ends(self, scope: Any) -> None:
        """Note that a body has ended."""
        self.watch.bodies.remove(scope)

    # -- when nothing moves --------------------------------------------------------------------------------------------

    def idle(self) -> float | None:
        """Send the next signal from outside, or return the time until the next event, when only these can move the run.

        None means that something was started instead, or that a step awaits something unknown to the loop.
        """
        if self.over.done():
            return None
        run = self._newest(RUN)
        if run is None:
            return 0.0
        if run.status is Status.SET_ASIDE or (run.status.finished and self._nobody_goes_on()):
            self._conclude(run)
            return None
        if self.answers.give() or self.answers.resume():
            return None
        ahead = self._next_moment()
        if ahead is not None:
            self._still_since = None
        elif self.watch.bodies and not self._is_still():
            return None
        else:
            self._conclude(run)
        return ahead

    def _nobody_goes_on(self) -> bool:
        """Whether no child continues without its parent; one that never ends is left behind."""
        self._overtime -= 1
        return self._overtime < 0 or not self.unfinished()

    def has_threads(self) -> bool:
        """Whether a body may be waiting for a thread of its own; the loop knows those of pools."""
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        return bool(self.watch.bodies) and not all(thread.name.startswith(_KNOWN_THREADS) for thread in others)

    def _is_still(self) -> bool:
        """Whether nothing has happened for a while, in real time."""
        now = time.monotonic()
        if self._still_since is None:
            self._still_since = now
        return now - self._still_since > STILL_SECONDS

    def _newest(self, run_id: str) -> Run | None:
        run = self.store.inner.get_run(run_id)
        while run is not None and run.continued_as:
            run = self.store.inner.get_run(run.continued_as)
        return run

    def unfinished(self) -> list[Run]:
        """Return the unfinished runs: the workflow's own, its children and their successors."""
        return [run for run in self.store.inner.list_runs(RunQuery(limit=1000)).runs if not run.status.finished]

    def _next_moment(self) -> float | None:
        """Return the time until the next timer or due run; None if there is none."""
        now = self.loop.time()
        times = [handle.when() - now for handle in self.loop.timers() if not _is_poll(handle)]
        dues = [run.due_at.timestamp() for run in self.unfinished() if run.worker is None and run.due_at is not None]
        ahead = [due - self.clock.now() for due in dues]
        if ahead:
            self.loop.call_later(max(min(ahead), 0.0), self.engine.claim_soon)
            self._patience = PATIENCE if min(ahead) > 0 else self._patience - 1
            if self._patience < 0:
                return None
        return max(min([*times, *ahead]), 0.0) if times or ahead else None

    def _conclude(self, run: Run) -> None:
        names = [name for one in self.unfinished() for name in self._waited(one)]
        waits = tuple(dict.fromkeys([*names, *(f"step {scope.key}" for scope in self.watch.bodies)]))
        error = run.error
        end = End(
            status=run.status.value if run.status.finished or run.status is Status.SET_ASIDE else "stuck",
            output=None if run.output is None else run.output.decode("utf-8", "replace"),
            error="" if error is None else error.message,
            error_type="" if error is None else error.type,
            traceback="" if error is None else error.traceback,
            waits=waits,
            unsent=self.answers.unsent(),
            seconds=self.clock.now() - self.plan.epoch,
        )
        self.loop.call_soon_threadsafe(self.over.set_result, end)

    def _waited(self, run: Run) -> Iterator[str]:
        """Yield what a run waits for, in words: a signal, a callback, or a person's decision about a step."""
        for name in self.awaited(run):
            callback = callback_of(name)
            if name.startswith(f"{RESOLVE}:"):
                yield f"a decision on {name.removeprefix(f'{RESOLVE}:').removesuffix('#1')}"
            elif callback is not None:
                yield f"callback {callback}"
            elif not name.startswith((RESERVED, CHILD)):
                yield f"signal {name}"

    def awaited(self, run: Run) -> list[str]:
        """Return the names of the signals that a run waits for."""
        context = self.engine.live.get(run.id)
        return [*run.wakes] if context is None else [wait.name for wait in context.waits.values() if wait.name]


def _is_poll(handle: asyncio.TimerHandle) -> bool:
    """Whether a timer only triggers a poll of the engine."""
    function = getattr(handle._callback, "__func__", None)  # type: ignore[attr-defined]  # noqa: SLF001
    return function in (Worker._poll, Reader.poll)  # noqa: SLF001


class Answers:
    """The answers from outside: each is sent once over all crashes, when a run waits for it.

    A run at a breakpoint is resumed each time, because nothing but a person's word is missing there.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        store = life.store.inner
        runs = store.list_runs(RunQuery(limit=1000)).runs
        sent = {signal.id for run in runs for signal in store.list_signals(run.id)}
        self._left = {
            f"{RUN}-{number}": answer
            for number, answer in enumerate(life.plan.answers, 1)
            if f"{RUN}-{number}" not in sent
        }
        self._resumed: set[tuple[str, str]] = set()

    def unsent(self) -> tuple[str, ...]:
        """Return the answers that no run has waited for, in words."""
        kinds = {SIGNAL: SIGNAL, QUESTION: SIGNAL, CALLBACK: CALLBACK}
        return tuple(f"{kinds[one.kind]} {one.name}" for one in self._left.values())

    def give(self) -> bool:
        """Send the first answer that a run waits for; return whether there was one."""
        for ident, answer in self._left.items():
            for run in self._life.unfinished():
                for name in filter(answer.fits, self._life.awaited(run)):
                    del self._left[ident]
                    asyncio.run_coroutine_threadsafe(self._send(run.id, ident, name, answer), self._life.loop)
                    return True
        return False

    def resume(self) -> bool:
        """Resume the first run at a breakpoint; return whether there was one."""
        for run in self._life.unfinished():
            for name in self._life.awaited(run):
                stop = (run.id, name)
                if name.startswith(GO) and stop not in self._resumed and run.due_at is None:
                    self._resumed.add(stop)
                    handle = RunHandle[Any](self._life.engine, run.id)
                    asyncio.run_coroutine_threadsafe(handle.resume(), self._life.loop)
                    return True
        return False

    async def _send(self, run: str, ident: str, name: str, answer: Answer) -> None:
        encoded = VALUES.encode(answer.payload, f"{answer.kind} {answer.name!r}")
        if answer.kind == QUESTION:
            encoded = msgspec.json.encode({"$": "ask", "v": [ident, msgspec.Raw(encoded)]})
        await RunHandle[Any](self._life.engine, run)._send(name, encoded, ident)  # noqa: SLF001 - as `ask` does


class LifeLoop(VirtualLoop):
    """A virtual loop that asks its life what to do when nothing moves."""

    _life: Life | None = None
    _waits = False
    _quick = QUICK_SECONDS

    def advance(self, seconds: float) -> None:
        if self._waits:
            self._quick -= seconds
            if self._quick > 0:
                return
        else:
            self._quick = QUICK_SECONDS
        super().advance(seconds)

    def attend(self, life: Life) -> None:
        """Ask this life from now on."""
        self._life = life
        self._far = self.call_later(FAR_SECONDS, str)  # a loop without any timer would not ask
        attend(self, life.engine)

    def timers(self) -> list[asyncio.TimerHandle]:
        """Return the timers of all others."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return [handle for handle in scheduled if not handle.cancelled() and handle is not self._far]

    def outside(self, registered: int) -> bool:
        self._waits = self._waits_for_outside(registered)
        return self._waits

    def _waits_for_outside(self, registered: int) -> bool:
        life = self._life
        if life is None:
            return super().outside(registered)
        # A connection that stays open while no step runs needs no attention.
        if super().outside(registered if life.watch.bodies else 1) or life.has_threads():
            return True
        if self._ready:  # type: ignore[attr-defined]  # a thread has returned since the selector looked
            return True
        before = self._now
        first = min((handle.when() for handle in self.timers()), default=self._far.when())
        ahead = life.idle()
        if ahead is None:
            return True
        own = min(max(first - before, 0.0), MAX_SELECT_SECONDS)  # the selector jumps this far by itself
        self._now = max(before + ahead - own, before)
        return False
