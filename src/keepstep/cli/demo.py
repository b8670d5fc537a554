"""The command `demo`: kills a run half-way, starts it again, and proves that no finished step ran twice."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from . import errors
from .settings import Settings, command

if TYPE_CHECKING:
    import subprocess

    from ..engine.engine import Engine
    from ..model import Checkpoint

#: Step in which the first process is killed: four steps are finished by then, and three follow.
KILLED_IN = "pack"
#: Seconds after which the demo counts as stuck.
PATIENCE_SECONDS = 30.0


class Effect(NamedTuple):
    """A line of the effects file: a body began or ended, with its process and time."""

    at: float
    pid: int
    what: str
    step: str


@command("demo")
@click.option("--keep", is_flag=True, help="Keep the demo's folder, to inspect it with other commands.")
def demo(settings: Settings, *, keep: bool) -> int:
    """Watch a run of eight steps be killed half-way and go on in a new process without repeating a finished step."""
    with _folder(keep=keep) as folder:
        stage = _Stage(settings, folder)
        stage.play()
        stage.judge()
        if keep and not settings.json:
            store = folder / "runs.db"
            click.echo(f"\ninspect it:  keepstep --store {store} history {stage.run}")
        if not stage.proved and not settings.json:
            click.echo("\n".join(stage.problems), err=True)
        return errors.OK if stage.proved else errors.FAILED


@contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    import tempfile

    if keep:
        yield Path(tempfile.mkdtemp(prefix="keepstep-demo-"))
    else:
        with tempfile.TemporaryDirectory(prefix="keepstep-demo-") as name:
            yield Path(name)


class _Stage:
    def __init__(self, settings: Settings, folder: Path) -> None:
        from . import demo_order, formatting

        self.settings = settings
        self.folder = folder
        self.run = demo_order.RUN
        self.steps = [step.name for step in demo_order.STEPS]
        self.effects: list[Effect] = []
        self.problems: list[str] = []
        self.checkpointed: list[str] = []
        self.pids: list[int] = []
        self.started: list[float] = []
        self.resumed_after = 0.0
        self._read = 0
        self._marks = formatting.marks()
        self._told_first = False

    @property
    def proved(self) -> bool:
        return not self.problems

    def say(self, text: str = "") -> None:
        if not self.settings.json:
            click.echo(text)

    # -- the play -----------------------------------------------------------------------------------------------------

    def play(self) -> None:
        from . import formatting

        self._introduce()
        process = self._spawn("a process starts the run")
        try:
            self._follow(process, until=KILLED_IN)
            time.sleep(0.1)
        finally:
            process.kill()  # SIGKILL cannot be caught, so nothing is cleaned up
            process.wait()
        self._look()
        self.say(f"  {click.style(self._marks['failed'], fg='red', bold=True)} SIGKILL in the middle of {KILLED_IN}")
        self.checkpointed = [_step(one) for one in self._history() if one.kind == "step completed"]
        self.say(
            f"    {formatting.count(len(self.checkpointed), 'checkpoint')} in the store, and nobody drives the run\n"
        )
        process = self._spawn("the same program is started again")
        try:
            self._follow(process)
        finally:
            process.kill()
            process.wait()

    def _introduce(self) -> None:
        from . import demo_order

        self.say(click.style("A run of eight steps, killed half-way and started again", bold=True))
        source = Path(demo_order.__file__).read_text(encoding="utf-8")
        parts = [part.partition("# shown]")[0].strip("\n") for part in source.split("# [shown\n")[1:]]
        if not self.settings.json:
            click.echo()
            _show_code("\n\n".join(part.replace("\n\n\n", "\n\n") for part in parts))
            click.echo()

    def _spawn(self, why: str) -> subprocess.Popen[bytes]:
        import subprocess

        self.started.append(time.time())
        with (self.folder / "errors.txt").open("w", encoding="utf-8") as errors:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, with our own module
                [sys.executable, "-m", "keepstep.cli.demo_order", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        self.pids.append(process.pid)
        self._told_first = False
        self.say(f"{click.style(why, bold=True)} (pid {process.pid})")
        return process

    def _follow(self, process: subprocess.Popen[bytes], until: str | None = None) -> None:
        """Print the actions of the process until it begins a certain step or ends."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            for effect in self._look():
                self._tell(effect)
                if until is not None and (effect.what, effect.step) == ("begin", until):
                    return
            if ended:
                if process.returncode:
                    error = (self.folder / "errors.txt").read_text(encoding="utf-8", errors="replace")
                    raise errors.Refused(f"the demo's own program failed:\n{error}", code=errors.INTERNAL)
                return
            time.sleep(0.005)
        raise errors.Refused(f"the demo made no progress within {PATIENCE_SECONDS:g} s", code=errors.INTERNAL)

    def _look(self) -> list[Effect]:
        from . import demo_order

        try:
            text = (self.folder / demo_order.EFFECTS).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        lines = text.split("\n")[:-1]  # the last line is still being written
        fresh = [Effect(float(at), int(pid), what, step) for at, pid, what, step in map(str.split, lines[self._read :])]
        self._read = len(lines)
        self.effects += fresh
        return fresh

    def _tell(self, effect: Effect) -> None:
        if effect.what == "begin" and not self._told_first:
            self._told_first = True
            after = effect.at - self.started[-1]
            if len(self.pids) == 2:
                self.resumed_after = after
                self.say(f"  {self._marks['note']} its first new step begins {after:.2f} s after the process")
        if effect.what == "end":
            self.say(f"  {click.style(self._marks['done'], fg='green')} {effect.step}")

    def _history(self) -> list[Checkpoint]:
        from . import demo_order

        async def look(engine: Engine) -> list[Checkpoint]:
            return await (await engine.get(self.run)).checkpoints()

        store = Settings()
        store.store = str(self.folder / demo_order.STORE)
        return store.talk(look)

    # -- the judge ----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Compare the effects file with the checkpoints."""
        history = self._history()
        completed = [_step(one) for one in history if one.kind == "step completed"]
        begun = {step: self._count("begin", step) for step in self.steps}
        for step in self.checkpointed:
            if sum(begun[step]) != 1:
                self.problems.append(f"{step} had a checkpoint and ran {sum(begun[step])} times")
        for step in self.steps:
            if sum(self._count("end", step)) != 1:
                self.problems.append(f"{step} was finished {sum(self._count('end', step))} times")
        if completed != self.steps or history[-1].kind != "run finished":
            self.problems.append(f"the run is not complete: {', '.join(completed)}")
        if not 0 < len(self.checkpointed) < len(self.steps):
            self.problems.append("the process was not killed half-way")
        self._conclude(begun)

    def _count(self, what: str, step: str) -> list[int]:
        """Count the begins or ends of a body in each of the two processes."""
        return [
            sum(1 for effect in self.effects if (effect.pid, effect.what, effect.step) == (pid, what, step))
            for pid in self.pids
        ]

    def _conclude(self, begun: dict[str, list[int]]) -> None:
        from . import formatting

        rows = []
        for step in self.steps:
            first, second = begun[step]
            fate = "finished" if step in self.checkpointed else "killed in it" if first else ""
            again = "ran again: it had not finished" if first else "ran"
            rows.append((step, fate, again if second else "not run again"))
        self.say()
        self.say(formatting.table(("STEP", "FIRST PROCESS", "SECOND PROCESS"), rows))
        self.say()
        value: dict[str, Any] = {
            "proved": self.proved,
            "problems": self.problems,
            "resumed_after_seconds": round(self.resumed_after, 3),
            "steps": [
                {"step": step, "checkpoint_when_killed": step in self.checkpointed, "began": begun[step]}
                for step in self.steps
            ],
        }
        kept = len(self.checkpointed)
        if self.proved:
            text = click.style(f"{self._marks['done']} proved: ", fg="green", bold=True)
            text += f"{kept} of {kept} finished steps ran once, 8 of 8 completed, resumed in {self.resumed_after:.2f} s"
        else:
            text = click.style(f"{self._marks['failed']} the proof does not hold", fg="red", bold=True)
        self.settings.answer(value, text)


def _step(one: Checkpoint) -> str:
    return one.step.partition("#")[0]


def _show_code(code: str) -> None:
    """Print the program, in colour if possible."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(code, "python", theme="ansi_dark", background_color="default"))
    else:
        click.echo("\n".join(f"    {line}".rstrip() for line in code.splitlines()))
