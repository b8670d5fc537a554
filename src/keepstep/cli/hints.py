"""The command for each action that a person can take on a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..views.waits import Act
from . import formatting
from .errors import line

if TYPE_CHECKING:
    from ..views.waits import Action


def hint(action: Action) -> str:
    """Return the command for an action; two of them where only the code knows which one fits."""
    match action.act:
        case Act.APPROVE:
            yes = f"{line('approve', action.run, action.name)}    (if it waits for a yes or no)"
            return f"{yes}\n{line('signal', action.run, action.name, 'JSON')}    (if it waits for another value)"
        case Act.SIGNAL:
            return f"{line('signal', action.run, action.name, 'JSON')}    (or keepstep complete TOKEN JSON)"
        case Act.RESOLVE:
            return (
                f"{line('resolve', action.run, formatting.step_name(action.name))} --result JSON | --failed | --again"
            )
        case Act.EDIT:
            return line("edit", action.run, "--set", "KEY=JSON")
        case Act.WORKER:
            return f"{line('worker', 'FILE.py')}    (a process that drives it, if there is none)"
        case Act.RESUME | Act.RETRY | Act.SKIP:
            return line(action.act.value, action.run)
