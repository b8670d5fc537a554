"""The judge of a crash test: it compares each crash with the undisturbed runs, and gives advice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..faults.recorder import BODY, Effect, repeated
from . import trial
from .effects import EFFECT, KEYED, is_theirs
from .far import HERE_INSTEAD, is_alone
from .process import CHANCE, End
from .trial import Trial

ERROR, WARNING, NOTE = "error", "warning", "note"
#: Maximum number of characters of a value in a message.
MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Finding:
    """An error or a warning: what it is, where, and how to fix it."""

    severity: str
    code: str
    message: str
    advice: str = ""
    step: str = ""
    line: str = ""


@dataclass(slots=True)
class Crash:
    """The result of one crash: where the process died, whether the workflow ended the same, what was repeated."""

    id: str
    where: str
    step: str = ""
    line: str = ""
    reached: bool = True
    ended: str = ""
    repeated: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not any(finding.severity == ERROR for finding in self.findings)


def short(key: str) -> str:
    """Return a step's key in short form: its name, and its number from the second call on."""
    return key.rpartition("/")[2].removesuffix("#1")


def name_of(key: str) -> str:
    """Return the name of the step of a key."""
    return key.rpartition("/")[2].partition("#")[0]


# -- effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deed:
    """An effect on the outside world; two with the same key count as one."""

    run: str
    step: str
    kind: str
    text: str
    key: str | None
    twice: bool
    line: str


def deeds(record: Sequence[Effect], ignore: Sequence[str] = ()) -> list[Deed]:
    """Return the effects in order, without those that the user called harmless."""
    found: list[Deed] = []
    for one in record:
        data = one.data
        if one.what == EFFECT and not any(fnmatch(data["text"], f"*{pattern}*") for pattern in ignore):
            found.append(Deed(one.run, one.step, data["kind"], data["text"], data["key"], data["twice"], data["line"]))
        elif one.what == KEYED:
            for place in range(len(found) - 1, -1, -1):
                last = found[place]
                if (last.run, last.step, last.text) == (one.run, one.step, data["text"]):
                    found[place] = Deed(last.run, last.step, last.kind, last.text, data["key"], last.twice, last.line)
                    break
    return found


def _counts(done: Sequence[Deed]) -> Counter[tuple[str, str, str]]:
    """Return how often each effect happened; effects with the same key count once."""
    seen: set[tuple[str, str, str, str]] = set()
    counts: Counter[tuple[str, str, str]] = Counter()
    for deed in done:
        if not deed.twice:
            continue
        place = (deed.run, deed.step, deed.text)
        if deed.key is None:
            counts[place] += 1
        elif (*place, deed.key) not in seen:
            seen.add((*place, deed.key))
            counts[place] += 1
    return counts


def _bodies(record: Sequence[Effect]) -> Counter[tuple[str, str]]:
    return Counter((one.run, one.step) for one in record if one.what == BODY)


# -- the judge ---------------------------------------------------------------------------------------------------------


class Judge:
    """Judges crashes by the undisturbed runs of the workflow."""

    def __init__(self, first: Trial, second: Trial, ignore: Sequence[str] = ()) -> None:
        self.first, self.second, self.ignore = first, second, ignore
        self.deeds = deeds(first.record, ignore)
        self._effects = _counts(self.deeds) | _counts(deeds(second.record, ignore))
        self._bodies = _bodies(first.record) | _bodies(second.record)
        self._files = {name: seen for name, seen in first.files.items() if second.files.get(name) == seen}
        self._all_files = {*first.files, *second.files}
        self.stable = _outcome(first.end) == _outcome(second.end)
        self.chance = list(dict.fromkeys((d["called"], d["line"], d["instead"]) for d in _chances(first)))

    # -- before the crashes --------------------------------------------------------------------------------------------

    def undisturbed(self, *, may_fail: bool) -> Iterator[Finding]:
        """Yield the findings about the undisturbed runs."""
        end = self.first.end
        if end.status in ("stuck", "hangs", "died", "broken"):
            yield self._dead_end(end, self.first, "undisturbed, ")
            return
        if end.status != "completed" and not may_fail:
            yield Finding(
                ERROR,
                "fails",
                f"undisturbed, the run already ends as {end.status}: {_error(end)}",
                _advice_on_failure(end),
                line=_last_line(end.traceback),
            )
        if not self.stable:
            yield self._unstable()
        for name in dict.fromkeys(end.unsent):
            word = "ks.callback" if name.startswith("callback ") else "ks.wait_for"
            message = f"{name.strip()} was not sent: nothing has waited for it"
            yield Finding(WARNING, "unsent", message, f"remove it, or check that its name is spelt as in {word}")
        yield from self._useless()
        for name in dict.fromkeys(one.data["executor"] for one in self.first.record if one.what == HERE_INSTEAD):
            message = f"bodies of executor {name!r} ran in processes of this machine, by the same protocol"
            yield Finding(NOTE, "here-instead", message, "what its cluster does by itself is not tested")
        for deed in self.deeds:
            if not deed.step:
                severity = ERROR if deed.twice or deed.kind in ("request", "connection") else WARNING
                yield Finding(
                    severity,
                    "outside-step",
                    f"the workflow's own code does this, outside any step: {deed.text}",
                    "every recovery repeats it: move it into a step",
                    line=deed.line,
                )

    def _useless(self) -> Iterator[Finding]:
        """Yield the patterns of `ignore` that match no effect."""
        done = [deed.text for trial in (self.first, self.second) for deed in deeds(trial.record)]
        for pattern in self.ignore:
            if not any(fnmatch(text, f"*{pattern}*") for text in (*done, *self._all_files)):
                message = f"the pattern {pattern!r} in ignore= matches no effect"
                yield Finding(WARNING, "ignored-nothing", message, "see the names of the effects in the table of steps")

    def _unstable(self) -> Finding:
        first, second = _outcome(self.first.end), _outcome(self.second.end)
        steps = [key for key, value in self.first.values.items() if self.second.values.get(key, value) != value]
        why = f"; step {short(steps[0].partition(' ')[2])} is the first that differs" if steps else ""
        return Finding(
            WARNING,
            "varies",
            f"two undisturbed runs end differently ({_brief(first)} and {_brief(second)}){why}",
            "the parts that differ are not compared after crashes; fix the data from outside in the test (input, "
            "stubs, a seed), and leave times out of the result",
            step=name_of(steps[0]) if steps else "",
        )

    # -- after each crash ----------------------------------------------------------------------------------------------

    def judge(self, trial: Trial) -> Crash:
        """Return the result of one crash."""
        moment = trial.moment
        assert moment is not None
        crash = Crash(moment.id, moment.where, moment.step, moment.line, trial.crashed, trial.end.status)
        crash.seconds = trial.seconds
        if not trial.crashed and trial.end.status not in ("hangs", "died", "broken"):
            crash.reached = False
            return crash
        extra = _bodies(trial.record) - self._bodies
        crash.repeated = [short(step) for _, step in extra]
        crash.findings += self._ending(trial, crash)
        crash.findings += self._broken_promises(trial)
        for finding, text in self._doubled(trial):
            crash.doubled.append(text)
            crash.findings.append(finding)
        crash.findings += self._left_files(trial)
        return crash

    def _ending(self, trial: Trial, crash: Crash) -> Iterator[Finding]:
        end, base = trial.end, self.first.end
        if end.status in ("hangs", "died", "broken", "stuck"):
            if any(name.startswith("a decision on") for name in end.waits):
                crash.ended = "in doubt"
                yield self._in_doubt(end)
            else:
                yield self._dead_end(end, trial, "after a crash, ")
        elif end.status == "set aside" and base.status != "set aside":
            yield self._set_aside(end)
        elif not self._ends_the_same(end):
            crash.ended = f"{end.status}: {_brief(_outcome(end))}"
            yield self._differs(trial)

    def _ends_the_same(self, end: End) -> bool:
        """Whether a run ended as the undisturbed ones did, apart from what varies between those."""
        first, second = self.first.end, self.second.end
        if end.status != first.status:
            return second.status == end.status
        if self.stable or first.status != "completed" or second.status != "completed":
            return _outcome(end) == _outcome(first) or not self.stable
        return _agrees(*(json.loads(one.output or "null") for one in (first, second, end)))

    def _in_doubt(self, end: End) -> Finding:
        steps = [name.removeprefix("a decision on ") for name in end.waits if name.startswith("a decision on ")]
        return Finding(
            NOTE,
            "in-doubt",
            f"{', '.join(steps)} was not repeated: it may or may not have happened, so the run waits for a person",
            "at_most_once promises this; with verify= the run decides by itself",
            step=name_of(steps[0]),
        )

    def _dead_end(self, end: End, trial: Trial, when: str) -> Finding:
        if end.status == "stuck":
            signals = [name.removeprefix("signal ") for name in end.waits if name.startswith("signal ")]
            if signals:
                return Finding(
                    ERROR,
                    "stuck",
                    f"{when}it waits for signal {' and '.join(signals)}, which nobody sends",
                    f"give the signal: --signal {signals[0]}=JSON, or answers={{{signals[0]!r}: ...}}",
                )
            callbacks = [name.removeprefix("callback ") for name in end.waits if name.startswith("callback ")]
            if callbacks:
                return Finding(
                    ERROR,
                    "stuck",
                    f"{when}it waits for {' and '.join(_callback(name) for name in callbacks)}, which nobody completes",
                    f"complete it: --complete {callbacks[0]}=JSON, or answers={{{callbacks[0]!r}: Complete(...)}}",
                )
            steps = [name.removeprefix("step ") for name in end.waits if name.startswith("step ")]
            if steps:
                message = f"{when}step {short(steps[0])} awaits something that never comes"
                return Finding(ERROR, "stuck", message, "give it a timeout", name_of(steps[0]))
            message = f"{when}the run has not ended, and nothing can continue it"
            advice = "it awaits something that existed only in its own process (a future, a queue, a thread)"
            return Finding(ERROR, "stuck", message, f"{advice}: wait for it in a step, or use ks.wait_for")
        if end.status == "hangs":
            where = _hanging_at(trial.printed)
            return Finding(
                ERROR,
                "hangs",
                f"{when}it does not end" + (f"; it hangs in {where}" if where else ""),
                "sleep with ks.sleep or asyncio.sleep, whose time is skipped in a crash test; if it only needs longer, "
                "allow more time (--life-seconds)",
                line=where,
            )
        message = end.error or "its process ended without an error message"
        kind = f"{end.error_type}: " if end.error_type else ""
        advice = "" if end.error_type else "the code ends its own process (os._exit, a signal, too little memory)"
        return Finding(ERROR, end.status, f"{when}{kind}{message}", advice, line=_last_line(end.traceback))

    def _set_aside(self, end: End) -> Finding:
        if end.error_type != "ReplayMismatch":
            return Finding(ERROR, "set-aside", f"after a crash the run is set aside: {_error(end)}")
        return Finding(
            ERROR,
            "not-replayable",
            f"after a crash the workflow's code asks for something else than before: {end.error}",
            self._why_not_the_same(),
            line=self.chance[0][1] if self.chance else _last_line(end.traceback),
        )

    def _why_not_the_same(self) -> str:
        if self.chance:
            places = [(called, Path(line).name, instead) for called, line, instead in self.chance[:3]]
            return "; ".join(f"it calls {called} in {place}: use {instead}" for called, place, instead in places)
        return (
            "its steps and their arguments must depend only on its input and on the results of steps; data in memory "
            "(a global, a cache), a clock, randomness or a file may differ after a restart"
        )

    def _differs(self, trial: Trial) -> Finding:
        base, end = self.first, trial.end
        now, then = _brief(_outcome(end)), _brief(_outcome(base.end))
        moment = trial.moment
        if moment is not None and is_alone(moment) and f"{moment.run} {moment.step}" not in trial.values:
            step, result = name_of(moment.step), f"it ends with {now} instead of {then}"
            message = f"step {step} fails when the process of its body dies: {result}"
            return Finding(ERROR, "lost", message, "let another attempt follow: retry=ks.Retry(attempts=3)", step)
        message = f"after a crash it ends with {now} instead of {then}"
        steady = {key: value for key, value in base.values.items() if self.second.values.get(key) == value}
        other = [key for key, value in steady.items() if trial.values.get(key, value) != value]
        again = {f"{run} {step}" for run, step in _bodies(trial.record) - self._bodies}
        for key in other:
            step = key.partition(" ")[2]
            if key in again:
                values = f"{_brief(trial.values[key])} instead of {_brief(steady[key])}"
                return Finding(
                    ERROR,
                    "not-deterministic",
                    f"{message}: step {short(step)}, repeated because its result was not yet recorded, gave {values}",
                    "a step that changes the data it reads must find its own earlier work: look it up by "
                    "ks.idempotency_key(), or read without removing",
                    step=name_of(step),
                )
        if other:
            step = other[0].partition(" ")[2]
            message += f"; step {short(step)} is the first that recorded a different value"
        missing = [name_of(key) for key in steady if key not in trial.values]
        if not other and not missing and not self.chance:
            return Finding(
                ERROR,
                "memory",
                f"{message}, although every step returned the same",
                "the workflow uses data that existed only in the memory of its process (a global, a cache, an object "
                "that a step changed): return it from a step instead",
                line=_last_line(end.traceback),
            )
        return Finding(ERROR, "different-result", message, self._why_not_the_same(), line=_last_line(end.traceback))

    def _broken_promises(self, trial: Trial) -> Iterator[Finding]:
        for body in repeated(trial.record):
            yield Finding(
                ERROR,
                "promise",
                f"step {short(body.step)} ran again although its checkpoint was durable",
                "this is a defect of Keepstep: please report it",
                step=name_of(body.step),
            )
        once = {(one.run, one.step) for one in trial.record if one.what == BODY and one.data.get("once")}
        free = {(one.run, one.step) for one in trial.record if one.what == BODY and one.data.get("verified")}
        for run, step in (_bodies(trial.record) - self._bodies).keys() & (once - free):
            yield Finding(
                ERROR,
                "promise",
                f"step {short(step)} of run {run} is at_most_once and ran twice",
                "this is a defect of Keepstep: please report it",
                step=name_of(step),
            )

    def _doubled(self, trial: Trial) -> Iterator[tuple[Finding, str]]:
        done = deeds(trial.record, self.ignore)
        for (run, step, text), extra in (_counts(done) - self._effects).items():
            deed = next(one for one in done if (one.run, one.step, one.text) == (run, step, text))
            if not step or (deed.kind == "file" and not self._changed(trial, text)):
                continue  # outside a step it was found without a crash; files are compared directly
            times = "twice" if extra == 1 else f"{extra + 1} times"
            keys = {one.key for one in done if (one.run, one.step, one.text) == (run, step, text)}
            yield (
                Finding(
                    ERROR,
                    "doubled",
                    f"step {name_of(step)} did this {times}, because the process died before its checkpoint: {text}",
                    _advice(deed, keys),
                    step=name_of(step),
                    line=deed.line,
                ),
                f"{name_of(step)}: {text}",
            )

    def _changed(self, trial: Trial, text: str) -> bool:
        """Whether the file of an effect differs from the undisturbed runs, as far as known."""
        name = text.removesuffix(" appended to")
        if name not in self._all_files:
            return True
        return name in self._files and trial.files.get(name) != self._files[name]

    def _left_files(self, trial: Trial) -> Iterator[Finding]:
        done = deeds(trial.record, self.ignore)
        more = _counts(done) - self._effects
        for name in sorted({*self._files, *trial.files}):
            if trial.files.get(name) == self._files.get(name) or any(fnmatch(name, f"*{one}*") for one in self.ignore):
                continue
            touched = [deed for deed in done if deed.text.startswith(f"{name} ") or f" {name} " in deed.text]
            if any((deed.run, deed.step, deed.text) in more for deed in touched):
                continue  # reported as doubled
            step = name_of(touched[-1].step) if touched and touched[-1].step else ""
            line = touched[-1].line if touched else ""
            if name in self._files:
                message = f"after a crash the file {name} differs from that of the undisturbed runs"
                advice = "write the whole file under another name and rename it, in one step that may run again"
                yield Finding(ERROR, "file", message, advice, step, line)
            elif name not in self._all_files:
                message = f"a crash leaves the file {name} behind"
                yield Finding(
                    WARNING, "left-behind", message, "use a name that the next attempt finds again", step, line
                )


def _callback(name: str) -> str:
    return f"callback {name}" if name else "a callback without a name"


def _advice(deed: Deed, keys: set[str | None]) -> str:
    once = "or mark the step at_most_once, with verify= to find out after a crash"
    if None not in keys and len(keys) > 1:
        return f"its key differs each time: pass ks.idempotency_key(), which stays the same, {once}"
    if deed.kind == "file":
        return "write a separate file, named after ks.idempotency_key(), or check whether the line is there already"
    if deed.kind == "process":
        return f"pass ks.idempotency_key() to the program, if it can recognise a repeated call by it, {once}"
    if deed.kind == "request":
        return f"send ks.idempotency_key() with the request (many services take a header Idempotency-Key), {once}"
    if deed.kind == "mail":
        return f"send it through a service that takes ks.idempotency_key(), {once}"
    return f"pass ks.idempotency_key() to the other side (and as key= to effect), {once}"


def _agrees(first: Any, second: Any, other: Any) -> bool:
    """Whether a value equals two others in everything that these have in common."""
    if first == second:
        return bool(other == first)
    if isinstance(first, dict) and isinstance(second, dict) and isinstance(other, dict):
        if first.keys() != second.keys():
            return True
        return first.keys() == other.keys() and all(_agrees(first[key], second[key], other[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list) and isinstance(other, list):
        if len(first) != len(second):
            return True
        return len(other) == len(first) and all(map(_agrees, first, second, other))
    return True


def _chances(trial: Trial) -> Iterator[dict[str, str]]:
    return (one.data for one in trial.record if one.what == CHANCE)


def _outcome(end: End) -> str:
    if end.status == "completed":
        return end.output or "null"
    return f"{end.error_type}: {end.error}" if end.error_type else end.status


def _error(end: End) -> str:
    return f"{end.error_type.removeprefix('keepstep.errors.')}: {end.error}" if end.error_type else "no reason is known"


def _advice_on_failure(end: End) -> str:
    """Return advice for a workflow that fails undisturbed."""
    message = _error(end)
    if "FileNotFoundError" in message and "'/" not in message:
        return "the workflow runs in its own empty folder: name the files that it reads (--file PATH, files=[...])"
    return (
        "give it an input with which it completes, or allow the failure (--may-fail, may_fail=True): "
        "then it must fail the same way after every crash"
    )


def _brief(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_SHOWN else flat[: MAX_SHOWN - 1] + "…"


def _last_line(traceback: str) -> str:
    """Return the last line of the user's own code in a traceback."""
    found = ""
    for line in traceback.splitlines():
        words = line.strip().split('"')
        if len(words) == 3 and words[0] == "File " and is_theirs(words[1]):
            found = f"{words[1]}:{words[2].split(',')[1].removeprefix(' line ').strip()}"
    return found


def _hanging_at(printed: str) -> str:
    """Return where a process hung, from its output at its end: the innermost line of the user's own code."""
    below = False
    for line in printed.splitlines():
        words = line.strip().split('"')
        if len(words) != 3 or words[0] != "File ":
            below = False  # another thread
        elif words[1] == trial.__file__:
            below = True  # the caller of the crash test
        elif not below and is_theirs(words[1]):
            return f"{words[1]}:{words[2].split(',')[1].removeprefix(' line ').split(' ')[0]}"
    return ""
