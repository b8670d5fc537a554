"""The parts that all commands share: common options, opening the store, and answering as text or JSON."""

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

from . import errors

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.handle import RunHandle
    from ..model import Run
    from ..ports import Store

T = TypeVar("T")

DEFAULT_STORE = ".keepstep/runs.db"
#: Stores on a server. Only the server knows whether they exist.
_SERVER = re.compile(r"postgres(ql)?:", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.\-]+:", re.IGNORECASE)


class Settings:
    """The values of the common options."""

    def __init__(self) -> None:
        self.store = DEFAULT_STORE
        self.json = False
        self.debug = False
        self.on_suspect = "store"
        self.replica = ""

    def engine(self, *, create: bool = False, worker: bool = False, **options: Any) -> Engine:
        """Open an engine on the chosen store. Unless `create` is set, a missing store is an error."""
        from ..engine.engine import Engine
        from ..records.keys import Keys

        options = {"on_suspect": self.on_suspect, **self._replica(), **options}
        self._check(create=create)
        if not create:
            options |= self._makes(create=False)
        return Engine(self.store, worker=worker, keys=Keys.if_in_env(), **options)

    @contextmanager
    def reading(self, *, create: bool = False, looking: bool = False) -> Iterator[Store]:
        """Open the chosen store without an engine; only to look, if `looking`, so that a replica may answer."""
        from ..ports import OptionalStore, optional
        from ..stores.open import open_store

        options = self._replica() if looking else {}
        self._check(create=create)
        store = open_store(self.store, **self._makes(create=create), **options)
        look = optional(store, OptionalStore.looking) if looking else None
        try:
            yield (look() if look is not None else None) or store
        finally:
            store.close()

    def making(self) -> AbstractContextManager[Store]:
        """Open the chosen store without an engine, and create it if it is missing."""
        return self.reading(create=True)

    def _makes(self, *, create: bool) -> dict[str, Any]:
        """Return options for stores that must check their existence themselves: on a server, or of another package."""
        from ..stores.open import has_option

        return {"create": create} if _SERVER.match(self.store) or has_option(self.store, "create") else {}

    def _replica(self) -> dict[str, Any]:
        """Return the option for a store with a replica."""
        if self.replica and not _SERVER.match(self.store):
            raise errors.Refused(
                f"--replica is for a PostgreSQL store, and the store is {self.store}",
                "leave out --replica and KEEPSTEP_REPLICA, or name the primary with --store postgresql://…",
                errors.STORE,
            )
        return {"replica": self.replica} if self.replica else {}

    def _check(self, *, create: bool) -> None:
        path = _path_of(self.store)
        empty = path is not None and _is_empty(path, self.store)
        if path is None or (path.exists() and not empty):
            return
        if not create:
            raise errors.Refused(
                f"no store at {self.store}"
                + (f": the {'folder' if path.is_dir() else 'file'} is empty" if empty else ""),
                "name another with --store or KEEPSTEP_STORE, or create this one with `keepstep run` or `start`",
                errors.STORE,
            )
        if self.store == DEFAULT_STORE:
            _make_folder(path.parent)

    def talk(self, act: Callable[[Engine], Awaitable[T]], *, looking: bool = False) -> T:
        """Call `act` with an engine that drives no runs."""
        import asyncio

        from ..ports import LOOKS

        async def inside() -> T:
            async with self.engine() as engine:
                LOOKS.set(looking)
                return await act(engine)

        return asyncio.run(inside())

    def look(self, look: Callable[[Engine], Awaitable[T]]) -> T:
        """Call `look` with an engine, for a command that only shows what there is: a replica may answer."""
        return self.talk(look, looking=True)

    def answer(self, value: Any, text: str | Callable[[], str] = "") -> None:
        """Print the answer: JSON for a program, text for a person."""
        if self.json:
            click.echo(json.dumps(value, ensure_ascii=False))
            return
        shown = text() if callable(text) else text
        if shown:
            click.echo(shown)


def _path_of(store: str) -> Path | None:
    """Return the file or folder of a store, or None if it has none."""
    scheme, _, path = store.partition(":")
    if scheme.lower() in ("sqlite", "files"):
        return Path(path.removeprefix("///"))
    return None if _SCHEME.match(store) else Path(store)


def _is_empty(path: Path, store: str) -> bool:
    """Whether a store's place exists but is empty."""
    if path.is_dir():
        return store.lower().startswith("files:") and not any(path.iterdir())
    return path.is_file() and path.stat().st_size == 0


def _make_folder(folder: Path) -> None:
    """Create the default folder. It ignores itself in version control, because its data belongs to this machine."""
    try:
        folder.mkdir(exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="ascii")
    except OSError as error:
        raise errors.Refused(f"the folder {folder} cannot be created: {error.strerror}", code=errors.STORE) from None


# -- options -----------------------------------------------------------------------------------------------------------


def common_options() -> list[click.Parameter]:
    """Return the options that are accepted before or after the name of a command."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None and value is not False:
            setattr(ctx.ensure_object(Settings), str(param.name), value)
            if param.name == "store":  # hints need not repeat a store that is set in the environment
                errors.HERE.store = "" if value in (DEFAULT_STORE, os.environ.get("KEEPSTEP_STORE")) else value

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
    on_suspect = click.Option(
        ["--on-suspect"],
        type=click.Choice(["store", "refuse"]),
        envvar="KEEPSTEP_ON_SUSPECT",
        callback=keep,
        expose_value=False,
        help="Treatment of a value that only looks like a secret: stored with a warning, or refused.  [default: store]",
        show_envvar=True,
    )
    replica = click.Option(
        ["--replica"],
        metavar="URL",
        envvar="KEEPSTEP_REPLICA",
        callback=keep,
        expose_value=False,
        help="Streaming replica of a PostgreSQL store, which answers lists and pages.",
        show_envvar=True,
    )
    return [store, replica, as_json, debug, on_suspect]


def command(name: str, **options: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Turn a function into a command that receives the settings first."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(click.get_current_context().obj, *args, **kwargs)

        decorator: Any = click.command(name, **options)
        made: click.Command = decorator(called)
        shared = common_options()
        for option in shared:
            if option.name in ("store", "replica", "on_suspect"):
                option.envvar = None  # the group has read the variable; an option before the command must win
        made.params.extend(shared)
        return made

    return decorate


RUN = click.argument("run_id", metavar="RUN")
MODULE = click.option(
    "--module",
    "module",
    multiple=True,
    metavar="FILE.py|MODULE|FILE.yaml",
    help="Module with the functions and child workflows of a YAML or JSON file; repeatable.",
)


def _executor(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:  # noqa: ARG001 - of click
    """Refuse a name that no executor has, before anything starts."""
    if value is not None:
        from ..engine.executors import Executors
        from ..errors import DefinitionError

        try:
            Executors(None, value).check_known(value)
        except DefinitionError as error:
            raise errors.Refused(f"--executor: {error}") from None
    return value


EXECUTOR = click.option(
    "--executor",
    metavar="NAME",
    callback=_executor,
    help="Where plain functions run that name no executor: process, ray, dask.  [default: thread]",
)
WORKFLOW = click.option(
    "--workflow", "target", metavar="TARGET", help="Workflow whose types and schema check the new values: FILE.py:NAME."
)
REASON = click.option("--reason", default="", metavar="TEXT", help="Reason, for the audit.")


# -- finding a run -----------------------------------------------------------------------------------------------------


async def find_run(engine: Engine, run_id: str) -> Run:
    """Return the run with this id. If it does not exist, the error suggests similar ids."""
    from ..views.finding import near_ids

    run = await engine.stored_run(run_id)
    if run is not None:
        return run
    near = await engine.call(near_ids, engine.store, run_id)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{errors.line('list')} lists the runs"
    raise errors.Refused(f"no run {run_id!r} in {shown_url(engine.store)}", hint, errors.NOT_FOUND)


async def newest(engine: Engine, run: Run) -> Run:
    """Return the newest run of a series; a run without a successor is not read again."""
    from ..history.series import newest_run

    return run if run.continued_as is None else await engine.ask(newest_run, run)


def handle_on(engine: Engine, run: Run) -> RunHandle[Any]:
    """Return a handle on a run that was read."""
    from ..engine.handle import RunHandle

    return RunHandle(engine, run.id, engine.workflows.get(run.workflow))


async def find(engine: Engine, run_id: str) -> RunHandle[Any]:
    """Return a handle on the run with this id."""
    return handle_on(engine, await find_run(engine, run_id))


def shown_url(store: Store) -> str:
    """Return the shortest name of the store from here."""
    from ..history import go_on

    return go_on.shown_url(store.url)
