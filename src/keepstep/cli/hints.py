"""Commands as the hints of other commands: with the store of this command, and when each fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..views.commands import commands_for
from .errors import line

if TYPE_CHECKING:
    from ..views.commands import Command
    from ..views.waits import Action


def hint(action: Action) -> str:
    """Return the command for an action; two of them where only the code knows which one fits."""
    return "\n".join(map(hint_of, commands_for(action)))


def hint_of(command: Command) -> str:
    """Return a command with the store of this command, what is to be filled in, and when it fits."""
    rest = f" {command.rest}" if command.rest else ""
    note = f"    ({command.note})" if command.note else ""
    return f"{line(*command.words)}{rest}{note}"
