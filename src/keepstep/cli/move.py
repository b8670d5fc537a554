"""The commands that move runs: `export`, `import` and `copy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import errors
from .filters import filters, query_of
from .settings import Settings, command

if TYPE_CHECKING:
    from ..care.transfer import Transfer

_SHOWN = 20


@command("export")
@click.argument("path", metavar="FILE")
@click.argument("run_ids", nargs=-1, metavar="[RUN]...")
@filters
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def export(settings: Settings, *, path: str, run_ids: tuple[str, ...], force: bool, **given: Any) -> int:
    """Write runs into one readable archive, word for word; a name that ends in .gz compresses it, - is standard output.

    Exit code 1 if some are damaged: they are marked in the archive and named.
    """
    from .. import __version__
    from ..care.archive import writing
    from ..care.transfer import export_runs

    with settings.reading() as store, writing(path, replace=force) as file:
        done = export_runs(store, file, run_ids, query_of(**given), made_by=__version__)
    if path == "-":
        _tell_rest(done)
    else:
        _answer(settings, done, f"written to {path}", file=path)
    return errors.FAILED if done.damaged else errors.OK


@command("import")
@click.argument("path", metavar="FILE")
@click.option("--queue", is_flag=True, help="Let unfinished runs go on here; they must not go on elsewhere.")
@click.option("--partial", is_flag=True, help="Import the intact runs of a damaged archive.")
@click.option("--dry-run", is_flag=True, help="Only verify the archive.")
def import_(settings: Settings, *, path: str, queue: bool, partial: bool, dry_run: bool) -> int:
    """Import the runs of an archive, each whole and verified or not at all; a missing store is created.

    The whole archive is verified before the first run is written. A run that already exists is skipped; one that exists
    with different contents is named and left (exit code 7). An unfinished run is set aside: it goes on when it is
    retried.
    """
    from ..care.archive import reading
    from ..care.transfer import check_archive, import_runs
    from ..engine.handle import this_process

    name = "standard input" if path == "-" else path
    if not partial and (dry_run or path != "-"):
        with reading(path) as file:
            runs = check_archive(file, name)
        if dry_run:
            settings.answer({"file": path, "runs": runs, "sound": True}, f"{runs} runs, all intact")
            return errors.OK
    if dry_run:
        raise click.UsageError("--dry-run and --partial contradict each other")
    with settings.making() as store, reading(path) as file:
        done = import_runs(store, file, name, actor=this_process(), queue=queue, partial=partial)
    _answer(settings, done, "imported", file=path)
    return _code(done)


@command("copy")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.argument("run_ids", nargs=-1, metavar="[RUN]...")
@filters
@click.option("--unfinished", is_flag=True, help="Also hand over unfinished runs that are not being driven.")
def copy(
    settings: Settings, *, source: str, target: str, run_ids: tuple[str, ...], unfinished: bool, **given: Any
) -> int:
    """Copy runs from one store to another of any kind; a missing target is created.

    Existing runs are skipped, so an interrupted copy can be repeated. With --unfinished, an unfinished run is set aside
    in the first store before it is queued in the second, so that it is never driven in both. A run that is being
    driven, or has an unfinished parent or child, is left. Exit code 1 if runs are damaged, 7 if some exist with
    different contents or had to be left.
    """
    from ..care.copying import copy_runs, shown
    from ..engine.handle import this_process

    first, second = Settings(), Settings()
    first.store, second.store = source, target
    with first.reading() as origin, second.making() as destination:
        if shown(origin.url) == shown(destination.url):
            raise errors.Refused("a store cannot be copied onto itself")
        done = copy_runs(origin, destination, run_ids, query_of(**given), actor=this_process(), unfinished=unfinished)
    _answer(settings, done, "copied")
    return _code(done, strict=unfinished)


def _code(done: Transfer, *, strict: bool = False) -> int:
    if done.damaged:
        return errors.FAILED
    return errors.CONFLICT if done.conflicts or (strict and done.left) else errors.OK


def _answer(settings: Settings, done: Transfer, participle: str, **more: Any) -> None:
    from . import formatting

    value = {
        **more,
        "written": done.written,
        "same": done.same,
        "records": done.records,
        "documents": done.documents,
        "conflicts": done.conflicts,
        "damaged": done.damaged,
        "left": done.left,
    }
    same = f", {done.same} already there" if done.same else ""
    documents = f", with {formatting.count(done.documents, 'document')}" if done.documents else ""
    settings.answer(value, f"{formatting.count(done.written, 'run')} {participle}{documents}{same}")
    if not settings.json:
        _tell_rest(done)


def _tell_rest(done: Transfer) -> None:
    from . import formatting

    for label, runs in (("damaged", done.damaged), ("conflict", done.conflicts), ("left", done.left)):
        for name, why in list(runs.items())[:_SHOWN]:
            click.echo(f"{label}: {formatting.one_line(name)}: {formatting.printable(why)}", err=True)
        if len(runs) > _SHOWN:
            click.echo(f"{label}: {len(runs) - _SHOWN} more", err=True)
