"""The commands that move runs: `export`, `import` and `copy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import exits
from .care import instant_of
from .frame import Settings, command
from .look import status_of, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from ..engine.transfer import Transfer
    from ..model import RunQuery

_TOLD = 20


def _filters(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which runs are meant."""
    options = (
        click.option("--workflow", metavar="NAME", help="Only runs of this workflow."),
        click.option(
            "--status", type=status_of, multiple=True, help="Only these; 'unfinished' is all that has not ended."
        ),
        click.option("--tag", type=tag_of, multiple=True, metavar="NAME=VALUE", help="Only runs with this tag."),
        click.option("--before", type=instant_of, metavar="DATE|AGE", help="Only runs last written before, as 30d."),
        click.option("--prefix", metavar="TEXT", help="Only runs whose id begins so."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _query(
    workflow: str | None,
    status: tuple[str, ...],
    tag: tuple[tuple[str, str], ...],
    before: datetime | None,
    prefix: str | None,
) -> RunQuery:
    from ..model import FINISHED, RunQuery, Status

    wanted = {Status(one) for one in status if one != "unfinished"}
    if "unfinished" in status:
        wanted |= set(Status) - FINISHED
    return RunQuery(
        workflow=workflow, status=frozenset(wanted), tags=dict(tag), updated_before=before, id_prefix=prefix
    )


@command("export")
@click.argument("path", metavar="FILE")
@click.argument("run_ids", nargs=-1, metavar="[RUN]...")
@_filters
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def export(settings: Settings, *, path: str, run_ids: tuple[str, ...], force: bool, **filters: Any) -> int:
    """Write runs into one readable archive, word for word; a name that ends in .gz packs it, - is standard output.

    Exit code 1 if some are damaged: they are marked in the archive, and named.
    """
    from .. import __version__
    from ..engine.archive import writing
    from ..engine.transfer import export_runs

    with settings.reading() as store, writing(path, replace=force) as file:
        done = export_runs(store, file, run_ids, _query(**filters), made_by=__version__)
    if path == "-":
        _tell_rest(done)
    else:
        _answer(settings, done, f"written to {path}", file=path)
    return exits.FAILED if done.damaged else exits.OK


@command("import")
@click.argument("path", metavar="FILE")
@click.option("--queue", is_flag=True, help="Runs that had not ended go on here: nobody drives them elsewhere.")
@click.option("--partial", is_flag=True, help="Take up what is whole of an archive that is damaged.")
@click.option("--dry-run", is_flag=True, help="Only verify the archive.")
def import_(settings: Settings, *, path: str, queue: bool, partial: bool, dry_run: bool) -> int:
    """Take up the runs of an archive, each whole and verified, or not at all; the store is made if it is not there.

    The whole archive is verified before the first run is written. A run that is there already is passed over; one that
    is there with other contents is named, and left (exit code 7). A run that had not ended is set aside: it goes on
    when it is retried.
    """
    from ..engine.archive import reading
    from ..engine.handle import this_process
    from ..engine.transfer import check_archive, import_runs

    name = "standard input" if path == "-" else path
    if not partial and (dry_run or path != "-"):
        with reading(path) as file:
            runs = check_archive(file, name)
        if dry_run:
            settings.answer({"file": path, "runs": runs, "sound": True}, f"{runs} runs, as they were written")
            return exits.OK
    if dry_run:
        raise click.UsageError("--dry-run and --partial contradict each other")
    with settings.making() as store, reading(path) as file:
        done = import_runs(store, file, name, actor=this_process(), queue=queue, partial=partial)
    _answer(settings, done, "taken up", file=path)
    return _code(done)


@command("copy")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.argument("run_ids", nargs=-1, metavar="[RUN]...")
@_filters
@click.option("--unfinished", is_flag=True, help="Also hand over runs that have not ended and are not driven.")
def copy(
    settings: Settings, *, source: str, target: str, run_ids: tuple[str, ...], unfinished: bool, **filters: Any
) -> int:
    """Copy runs from one store to another, whichever they are; the second is made if it is not there.

    What is there already is passed over, so a copy that broke off is done again. With --unfinished a run that has not
    ended is set aside in the first store before it is queued in the second, so that it is never driven in both; one
    that is driven, or whose parent or children have not ended, is left. Exit code 1 if runs are damaged, 7 if some are
    there with other contents or had to be left.
    """
    from ..engine.copying import copy_runs, shown
    from ..engine.handle import this_process

    first, second = Settings(), Settings()
    first.store, second.store = source, target
    with first.reading() as origin, second.making() as destination:
        if shown(origin.url) == shown(destination.url):
            raise exits.Refused("a store cannot be copied onto itself")
        done = copy_runs(origin, destination, run_ids, _query(**filters), actor=this_process(), unfinished=unfinished)
    _answer(settings, done, "copied")
    return _code(done, strict=unfinished)


def _code(done: Transfer, *, strict: bool = False) -> int:
    if done.damaged:
        return exits.FAILED
    return exits.CONFLICT if done.conflicts or (strict and done.left) else exits.OK


def _answer(settings: Settings, done: Transfer, participle: str, **more: Any) -> None:
    from . import words

    value = {
        **more,
        "written": done.written,
        "same": done.same,
        "records": done.records,
        "conflicts": done.conflicts,
        "damaged": done.damaged,
        "left": done.left,
    }
    same = f", {done.same} there already" if done.same else ""
    settings.answer(value, f"{words.count(done.written, 'run')} {participle}{same}")
    if not settings.json:
        _tell_rest(done)


def _tell_rest(done: Transfer) -> None:
    from . import words

    for said, runs in (("damaged", done.damaged), ("conflict", done.conflicts), ("left", done.left)):
        for name, why in list(runs.items())[:_TOLD]:
            click.echo(f"{said}: {words.one_line(name)}: {words.printable(why)}", err=True)
        if len(runs) > _TOLD:
            click.echo(f"{said}: {len(runs) - _TOLD} more", err=True)
