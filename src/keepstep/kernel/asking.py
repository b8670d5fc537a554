"""Messages between runs: a question with its reply, and one signal to many runs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..checks import check_id
from ..errors import DefinitionError, SignalsFull, StepFailed, StoreError
from ..model import FINISHED, Kind, Outcome, Signal
from ..model.ids import new_id
from ..model.signal import MAX_UNREAD, REPLY
from ..ports import Answer, Send, Verdict
from ..records.data import StepCompletedData, new_data
from ..records.record import Record, StoredError
from ..values import VALUES
from ..workflows.call import Call
from .calls import Branch, DurableCall, Task, current_branch
from .children import SendCall
from .waits import MISSING, SignalCall, question, signal_name, timeout_seconds

if TYPE_CHECKING:
    from .driver import RunDriver

#: Seconds for which a question waits for its reply by default.
ASK_SECONDS = 30.0
#: Runs that one broadcast reaches at most, which bounds its commit.
MOST_TARGETS = 1000


def run_of(run: Any) -> str:
    """Return the id of a run that is given by its id or by a handle on it."""
    return check_id(run if isinstance(run, str) else getattr(run, "id", run))


def encoded(run: RunDriver, payload: Any, name: str, what: str) -> bytes:
    """Return the stored form of a message. Raise if it must not be stored."""
    data = VALUES.encode_shown(payload, f"{what} {name!r}")
    run.host.redaction.check(data, name, what)
    return data


class AskCall(SendCall[str]):
    """A question to another run. Its record holds the id of the question, which the reply names."""

    __slots__ = ()

    def message(self, signal_id: str) -> tuple[bytes, bytes | None]:
        return question(signal_id, self.payload, self.run.id), msgspec.json.encode(signal_id)


class ReplyWait(SignalCall):
    """The wait for the reply to a question."""

    __slots__ = ("asked",)

    def __init__(self, branch: Branch, asked: AskCall, question_id: str, seconds: float | None) -> None:
        self.asked = asked
        super().__init__(branch, f"{REPLY}{question_id}", seconds, MISSING, call=f"reply:{asked.name}")

    @property
    def subject(self) -> str:
        return f"reply to {self.asked.name!r} from run {self.asked.target!r}"

    def begin_live(self) -> None:
        question_id = self.name.removeprefix(REPLY)
        if not question_id.startswith(f"{self.run.id}:"):
            self._ask_again()
        super().begin_live()

    def _ask_again(self) -> None:
        """Ask for a fork: the reply to the question of its origin goes there."""
        run, asked = self.run, self.asked
        question_id = f"{run.id}:{asked.key}:{run.generation}"
        self.name = f"{REPLY}{question_id}"
        payload = question(question_id, asked.payload, run.id)
        signal = Signal(asked.target, asked.name, payload, question_id, f"run {run.id}", run.time())

        def sent(_: Answer) -> None:
            run.host.signalled(asked.target)

        run.append_special(None, {"sends": [Send(signal, optional=True)], "progress": False}, sent)


def ask(run: Any, name: str, payload: Any = None, timeout: float | timedelta | None = ASK_SECONDS) -> Call[Any]:
    """Send another run a question, and return the reply that its workflow gives with `request.reply(...)`.

    `run` is the id of the run, or a handle on it. The question is sent exactly once. After the timeout it raises
    `TimedOut`; a run that has ended is `AlreadyFinished`, an unknown one `RunNotFound`.
    """
    target, branch = run_of(run), current_branch("ask")
    data = encoded(branch.run, payload, signal_name(name), "question")
    return Task(branch, _ask(target, name, data, timeout_seconds(timeout)))


async def _ask(target: str, name: str, data: bytes, seconds: float | None) -> Any:
    asked = AskCall(current_branch("ask"), target, name, data, "ask")
    question_id = await asked
    return await ReplyWait(current_branch("ask"), asked, question_id, seconds)


class BroadcastCall(DurableCall[list[str]]):
    """One signal to several runs, in one commit. Runs that have ended are left out."""

    __slots__ = ("name", "payload", "reached", "targets")

    def __init__(self, branch: Branch, targets: tuple[str, ...], name: str, payload: bytes) -> None:
        self.targets, self.name, self.payload = targets, name, payload
        super().__init__(branch, f"broadcast:{name}", VALUES.digest((targets, name, payload), "broadcast"))

    def begin_live(self) -> None:
        self.reached = dict.fromkeys(self.targets, "")
        self._send()

    def _send(self) -> None:
        """Send the signal to the newest run of each series."""
        run = self.run
        signal_id, sender, at = f"{run.id}:{self.key}:{run.generation}", f"run {run.id}", run.time()
        runs = dict.fromkeys(newest or target for target, newest in self.reached.items())
        sends = [Send(Signal(one, self.name, self.payload, signal_id, sender, at), room=MAX_UNREAD) for one in runs]
        data = new_data(StepCompletedData, signal_name=self.name)
        value = msgspec.json.encode(list(self.reached))
        record = self.record(Kind.STEP_COMPLETED, value, attempt=1, data=data)
        run.append_special(record, {"sends": sends}, partial(self._sent, tuple(runs)), self._refused, self)

    def _sent(self, runs: tuple[str, ...], _: Answer) -> None:
        for one in runs:
            self.run.host.signalled(one)

    def _refused(self, answer: Answer) -> None:
        if answer.verdict in (Verdict.FINISHED, Verdict.NOT_FOUND):
            self.run.host.background(self._find(answer.about))
            return
        text = f"run {answer.about!r} has {MAX_UNREAD:,} unread signals, so nothing was sent to any run"
        kind = "SignalsFull"
        if answer.verdict is not Verdict.FULL:
            kind = "StoreError" if answer.error is None else type(answer.error).__name__
            text = f"{answer.error or answer.verdict}"
        error = StoredError(f"keepstep.{kind}", text, "permanent", id=new_id("error"))
        self.run.append(self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=error), self)

    async def _find(self, ended: str) -> None:
        """Send again: to the successor of a run that has ended, or without that run."""
        run, host = self.run, self.run.host
        run.work_began()  # the run must not be parked before the answer
        try:
            newest = await host.newest_of_series(ended)
            if run.stop.detached:
                return
            goes_on = newest is not None and newest.status not in FINISHED
            for target in [one for one, other in self.reached.items() if ended in (one, other)]:
                if goes_on and newest is not None:
                    self.reached[target] = newest.id
                else:
                    del self.reached[target]
            self._send()
        except StoreError as error:
            run.halt(error)
        finally:
            run.work_ended()
            run.watch()

    def failure(self, record: Record) -> BaseException:
        error = record.error
        if error is not None and error.type == "keepstep.SignalsFull":
            return SignalsFull(error.message, "")
        info = None if error is None else error.info()
        return StepFailed("" if error is None else error.message, self.key, info, record.seq)


def targets_of(runs: Iterable[Any]) -> tuple[str, ...]:
    """Return the ids of the runs of a broadcast, or raise a clear error."""
    if isinstance(runs, str):
        raise DefinitionError(f"a broadcast takes several runs, got the text {runs!r}; give a list of ids or handles")
    targets = tuple(dict.fromkeys(map(run_of, runs)))
    if len(targets) > MOST_TARGETS:
        raise DefinitionError(
            f"a broadcast reaches at most {MOST_TARGETS:,} runs, got {len(targets):,}; let them subscribe to a ks.Topic"
        )
    return targets


def broadcast(runs: Iterable[Any], name: str, payload: Any = True) -> Call[list[str]]:
    """Send a signal to several runs in one commit, exactly once. Return the ids of the runs that it was sent to.

    `runs` are ids or handles. Runs that have ended or do not exist are left out.
    """
    targets, branch = targets_of(runs), current_branch("broadcast")
    return BroadcastCall(branch, targets, name, encoded(branch.run, payload, signal_name(name), "signal"))
