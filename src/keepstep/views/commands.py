"""The command line that does what a person can do about a run, for every door."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from ..model import Run, RunQuery
from ..model.signal import callback_of
from .waits import Act, Action, Wait, WaitKind
from .wording import step_name


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its words after `keepstep`, and what it does.

    `rest` is text for a person to fill in, and stands after the options. `note` says when the command fits.
    """

    words: tuple[str, ...]
    does: str
    rest: str = ""
    note: str = ""

    def line(self, *options: str) -> str:
        """Return the command for a shell, with more options, such as the store."""
        return shlex.join(("keepstep", *self.words, *options)) + (f" {self.rest}" if self.rest else "")


def commands_for(action: Action) -> tuple[Command, ...]:
    """Return the commands for an action: two where only the code knows which one fits."""
    run, name = action.run, action.name
    other = Command(("signal", run, name, "JSON"), f"Send {name} with a value.", note="if it waits for another value")
    match action.act:
        case Act.APPROVE:
            yes = Command(
                ("approve", run, name), f"Approve {name}; with --deny, deny it.", note="if it waits for a yes or no"
            )
            return yes, other
        case Act.SIGNAL:
            answer = f"Answer the callback {callback_of(name) or name}."
            return (Command(("signal", run, name, "JSON"), answer, note="or keepstep complete TOKEN JSON"),)
        case Act.RESOLVE:
            step = step_name(name)
            says = f"Tell whether {step} happened."
            return (Command(("resolve", run, step), says, rest="--result JSON | --failed | --again"),)
        case Act.EDIT:
            return (Command(("edit", run, "--set", "KEY=JSON"), "Change its state, and let it go on."),)
        case Act.WORKER:
            note = "a process that drives it, if there is none"
            return (Command(("worker", "FILE.py"), "Start a worker that knows its workflow.", note=note),)
        case Act.RESUME | Act.RETRY | Act.SKIP:
            return (Command((action.act.value, run), _DOES[action.act]),)


_DOES = {
    Act.RESUME: "Let it go on.",
    Act.RETRY: "Let it go on from just before it failed.",
    Act.SKIP: "Accept its failed undo steps as they are.",
}


def commands_about(wait: Wait) -> tuple[Command, ...]:
    """Return the commands that show or change what holds up a run: its queue, or a service."""
    if wait.kind is WaitKind.WORKER and wait.why:
        if wait.why == "unserved":
            return (Command(("worker", "FILE.py", "--queue", wait.queue), f"Start a worker for queue {wait.queue}."),)
        return (Command(("queues", "show", wait.queue), f"Show queue {wait.queue}, its limits and its runs."),)
    if wait.kind is not WaitKind.SERVICE:
        return ()
    show = Command(("services", "show", wait.name), f"Show service {wait.name}, its limits and its breaker.")
    if wait.why != "breaker":
        return (show,)
    tells = Command(show.words, show.does, note="tells when it is tried again")
    return tells, Command(("services", "close", wait.name), f"Close the breaker of {wait.name}.")


def explain_command(run: Run) -> Command:
    """Return the command that explains a run."""
    return Command(("explain", run.id), f"Explain {run.id}.")


def list_command(query: RunQuery) -> Command:
    """Return the command that lists the runs which match a query."""
    words: list[str] = ["list"]
    for option, values in (
        ("--workflow", sorted({*query.workflows, *([query.workflow] if query.workflow else [])})),
        ("--not-workflow", sorted(query.not_workflows)),
        ("--status", sorted(one.value.replace(" ", "-") for one in query.status)),
        ("--tag", [f"{name}={value}" for name, value in query.tags.items()]),
        ("--prefix", [query.id_prefix]),
        ("--version", [query.version]),
        ("--queue", [query.queue]),
        ("--parent", [query.parent]),
        ("--awaits", [query.awaits]),
        ("--created-before", [query.created_before and query.created_before.isoformat(timespec="seconds")]),
        ("--created-after", [query.created_after and query.created_after.isoformat(timespec="seconds")]),
        ("--before", [query.updated_before and query.updated_before.isoformat(timespec="seconds")]),
        ("--since", [query.updated_after and query.updated_after.isoformat(timespec="seconds")]),
    ):
        words += [word for value in values if value for word in (option, value)]
    words += ["--needs-person"] * query.needs_person + ["--open-failures"] * query.open_failure
    return Command(tuple(words), "List these runs.")
