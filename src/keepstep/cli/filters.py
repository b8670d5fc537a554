"""The options that select runs, shared by `list`, `aside`, `retry`, `cancel`, `export` and `copy`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from . import errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from ..model import RunQuery

STATUSES = ("queued", "running", "waiting", "paused", "recovering", "completed", "failed", "cancelled", "set aside")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def status_of(value: str) -> str:
    """Parse a status as a person may write it: set-aside, set_aside or "set aside"."""
    status = value.replace("-", " ").replace("_", " ").strip().lower()
    known = [*STATUSES, "unfinished"]
    if status not in known:
        raise click.BadParameter(
            f"{value!r} is not a status{errors.nearest(status, known)} (there are {', '.join(known)})"
        )
    return status


def tag_of(value: str) -> tuple[str, str]:
    """Parse a tag written name=value."""
    name, equals, text = value.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"must be written name=value, got {value!r}")
    return name, text


def instant_of(value: str) -> datetime:
    """Parse an age such as 30d, 12h or 90m, or a date such as 2026-11-01 in this machine's time zone."""
    from datetime import UTC, datetime, timedelta

    age = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])", value.strip().lower())
    try:
        if age is not None:
            return datetime.now(UTC) - timedelta(seconds=float(age[1]) * _UNITS[age[2]])
        return datetime.fromisoformat(value.strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"must be an age such as 30d, 12h or 90m, or a date such as 2026-11-01, got {value!r}"
        ) from None


def filters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select runs."""
    options = (
        click.option(
            "--status",
            type=status_of,
            multiple=True,
            help="Only runs with this status; 'unfinished' means all that have not ended.",
        ),
        click.option("--workflow", multiple=True, metavar="NAME", help="Only runs of this workflow."),
        click.option("--not-workflow", multiple=True, metavar="NAME", help="No runs of this workflow."),
        click.option("--version", metavar="VERSION", help="Only runs that were started under this version."),
        click.option("--queue", metavar="NAME", help="Only runs of this queue."),
        click.option("--parent", metavar="RUN", help="Only children of this run."),
        click.option("--prefix", metavar="TEXT", help="Only runs whose id begins with this."),
        click.option("--tag", type=tag_of, multiple=True, metavar="NAME=VALUE", help="Only runs with this tag."),
        click.option(
            "--before",
            "--older-than",
            "before",
            type=instant_of,
            metavar="DATE|AGE",
            help="Only runs last written before this, as 30d or 2026-11-01.",
        ),
        click.option(
            "--since",
            type=instant_of,
            metavar="DATE|AGE",
            help="Only runs last written after this, as 1h or 2026-11-01.",
        ),
        click.option("--created-before", type=instant_of, metavar="DATE|AGE", help="Only runs created before this."),
        click.option("--created-after", type=instant_of, metavar="DATE|AGE", help="Only runs created after this."),
        click.option("--awaits", metavar="SIGNAL", help="Only parked runs that wait for this signal."),
        click.option("--needs-person", is_flag=True, help="Only runs that a person can move on."),
        click.option("--open-failures", is_flag=True, help="Only runs that failed or are set aside, and are open."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def is_filtered(given: dict[str, Any]) -> bool:
    """Whether any of the options was used."""
    return any(value for value in given.values())


def query_of(
    *,
    status: tuple[str, ...] = (),
    workflow: tuple[str, ...] = (),
    not_workflow: tuple[str, ...] = (),
    version: str | None = None,
    queue: str | None = None,
    parent: str | None = None,
    prefix: str | None = None,
    tag: tuple[tuple[str, str], ...] = (),
    before: datetime | None = None,
    since: datetime | None = None,
    created_before: datetime | None = None,
    created_after: datetime | None = None,
    awaits: str | None = None,
    needs_person: bool = False,
    open_failures: bool = False,
) -> RunQuery:
    """Return the query for the options."""
    from ..model import FINISHED, RunQuery, Status
    from ..model.keepers import KEEPER_ID

    wanted = {Status(one) for one in status if one != "unfinished"}
    if "unfinished" in status:
        wanted |= set(Status) - FINISHED
    return RunQuery(
        workflows=frozenset(workflow),
        not_workflows=frozenset(not_workflow),
        version=version,
        queue=queue,
        status=frozenset(wanted),
        parent=parent,
        id_prefix=prefix,
        tags=dict(tag),
        updated_before=before,
        updated_after=since,
        created_before=created_before,
        created_after=created_after,
        awaits=awaits,
        needs_person=needs_person,
        open_failure=open_failures,
        system=prefix is not None and prefix.startswith(KEEPER_ID),
    )
