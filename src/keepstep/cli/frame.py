"""What every command shares: the options that all of them take, the store they talk to, and how they answer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import exits

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.handle import RunHandle
    from ..ports import Store

T = TypeVar("T")

DEFAULT_STORE = ".keepstep/runs.db"
#: Stores that are made on a server; only they can tell whether they are there.
_SERVER = re.compile(r"postgres(ql)?:", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.\-]+:", re.IGNORECASE)


class Settings:
    """What the options that all commands take were set to."""

    def __init__(self) -> None:
        self.store = DEFAULT_STORE
        self.json = False
        self.debug = False

    def engine(self, *, create: bool = False, worker: bool = False, **options: Any) -> Engine:
        """An engine on the chosen store. One that only looks or steers never makes a store that is not there."""
        from ..engine.engine import Engine
        from ..stores.keys import Keys

        self._check(create=create)
        if not create:
            options |= self._makes(create=False)
        return Engine(self.store, worker=worker, keys=Keys.if_in_env(), **options)

    @contextmanager
    def reading(self, *, create: bool = False) -> Iterator[Store]:
        """The chosen store itself, for a command that needs no engine."""
        from ..stores.open import open_store

        self._check(create=create)
        store = open_store(self.store, **self._makes(create=create))
        try:
            yield store
        finally:
            store.close()

    def making(self) -> AbstractContextManager[Store]:
        """The chosen store itself, made if it is not there."""
        return self.reading(create=True)

    def _makes(self, *, create: bool) -> dict[str, Any]:
        """What a store is told that must know itself whether it is there: one on a server, or of another package."""
        from ..stores.open import has_option

        return {"create": create} if _SERVER.match(self.store) or has_option(self.store, "create") else {}

    def _check(self, *, create: bool) -> None:
        path = _path_of(self.store)
        empty = path is not None and _is_empty(path, self.store)
        if path is None or (path.exists() and not empty):
            return
        if not create:
            raise exits.Refused(
                f"there is no store at {self.store}"
                + (f": the {'folder' if path.is_dir() else 'file'} is empty" if empty else ""),
                "name another with --store or KEEPSTEP_STORE, or make this one with `keepstep run` or `start`",
                exits.STORE,
            )
        if self.store == DEFAULT_STORE:
            _make_folder(path.parent)

    def talk(self, act: Callable[[Engine], Awaitable[T]]) -> T:
        """Do something with an engine that only talks to the store."""
        import asyncio

        async def inside() -> T:
            async with self.engine() as engine:
                return await act(engine)

        return asyncio.run(inside())

    def answer(self, value: Any, text: str | Callable[[], str] = "") -> None:
        """Say it: as JSON for a program, else as text for a person."""
        if self.json:
            click.echo(json.dumps(value, ensure_ascii=False))
            return
        shown = text() if callable(text) else text
        if shown:
            click.echo(shown)


def _path_of(store: str) -> Path | None:
    """The file or folder that a store is in, if it is in one."""
    scheme, _, path = store.partition(":")
    if scheme.lower() in ("sqlite", "files"):
        return Path(path.removeprefix("///"))
    return None if _SCHEME.match(store) else Path(store)


def _is_empty(path: Path, store: str) -> bool:
    """Whether there is nothing yet where a store should be."""
    if path.is_dir():
        return store.lower().startswith("files:") and not any(path.iterdir())
    return path.is_file() and path.stat().st_size == 0


def _make_folder(folder: Path) -> None:
    """The default folder holds data of this machine, so it keeps itself out of version control."""
    try:
        folder.mkdir(exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="ascii")
    except OSError as error:
        raise exits.Refused(f"the folder {folder} cannot be made: {error.strerror}", code=exits.STORE) from None


# -- options -----------------------------------------------------------------------------------------------------------


def common_options() -> list[click.Parameter]:
    """The options that may stand before or after the name of a command."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None and value is not False:
            setattr(ctx.ensure_object(Settings), str(param.name), value)
            if param.name == "store":  # one that the shell names anyway need not be named to it
                exits.HERE.store = "" if value in (DEFAULT_STORE, os.environ.get("KEEPSTEP_STORE")) else value

    store = click.Option(
        ["--store"],
        metavar="URL",
        envvar="KEEPSTEP_STORE",
        callback=keep,
        expose_value=False,
        help=f"Where runs are kept: a path, or a URL like sqlite:///runs.db, files:runs.  [default: {DEFAULT_STORE}]",
        show_envvar=True,
    )
    as_json = click.Option(
        ["--json"], is_flag=True, callback=keep, expose_value=False, help="Answer as JSON, for programs."
    )
    debug = click.Option(["--debug"], is_flag=True, callback=keep, expose_value=False, help="Show tracebacks.")
    return [store, as_json, debug]


def command(name: str, **options: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command; it is given the settings first."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(click.get_current_context().obj, *args, **kwargs)

        decorator: Any = click.command(name, **options)
        made: click.Command = decorator(called)
        shared = common_options()
        for option in shared:
            if option.name == "store":
                option.envvar = None  # the group has read it: an option given before the command must win
        made.params.extend(shared)
        return made

    return decorate


RUN = click.argument("run_id", metavar="RUN")
MODULE = click.option(
    "--module",
    "module",
    multiple=True,
    metavar="FILE.py|MODULE|FILE.yaml",
    help="Where a YAML or JSON file finds its functions and child workflows; may be given several times.",
)
WORKFLOW = click.option(
    "--workflow", "target", metavar="TARGET", help="Whose types and schema the new values are held to: FILE.py:NAME."
)
REASON = click.option("--reason", default="", metavar="TEXT", help="Why, for the audit.")


# -- finding a run -----------------------------------------------------------------------------------------------------


async def find(engine: Engine, run_id: str) -> RunHandle[Any]:
    """The run with this id; if there is none, the error suggests those whose ids are near."""
    from ..errors import RunNotFound

    try:
        return await engine.get(run_id)
    except RunNotFound:
        near = await _near(engine, run_id)
        hint = f"did you mean {' or '.join(near)}?" if near else f"{exits.line('list')} shows the runs that there are"
        raise exits.Refused(f"no run {run_id!r} in {shown_url(engine.store)}", hint, exits.NOT_FOUND) from None


async def _near(engine: Engine, run_id: str) -> list[str]:
    import difflib

    run_id = run_id[:200]  # no id is longer
    for length in range(len(run_id), max(len(run_id) // 2, 2), -1):
        page = await engine.list(id_prefix=run_id[:length], limit=4)
        if page.runs:
            found = [run.id for run in page.runs]
            return found if len(found) < 4 else difflib.get_close_matches(run_id, found, n=3, cutoff=0.0)
    newest = await engine.list(limit=200)
    return difflib.get_close_matches(run_id, [run.id for run in newest.runs], n=3, cutoff=0.7)


async def unattended(engine: Engine, workflow: str) -> bool:
    """Whether no living worker knows a workflow, so that what was asked of a run of it has to wait."""
    workers = await engine.call(engine.store.list_workers)
    return not any(one.alive and workflow in one.workflows for one in workers)


def shown_url(store: Store) -> str:
    """The store, as briefly as it can be named from here."""
    scheme = "files:" if store.url.startswith("files:") else ""
    url = store.url.removeprefix("sqlite:///").removeprefix("files:")
    try:
        url = os.path.relpath(url) if url.startswith(os.getcwd()) else url  # noqa: PTH109 - compared as text
    except OSError:
        return store.url
    return scheme + url
