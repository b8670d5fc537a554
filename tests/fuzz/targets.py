"""Every parser of stored or outside input, each as a function of bytes that lets only documented errors through.

A target returns, or raises what nobody documented. `TARGETS` names them; `make fuzz` and the tests go through it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo, available_timezones

import apsw
import msgspec

from keepstep import cli
from keepstep.care.transfer import import_runs
from keepstep.care.verify import verify
from keepstep.checks import check_id, check_name
from keepstep.cli import errors, formatting, inspect, target
from keepstep.cli import hints as _hints  # noqa: F401 - imported before anything is parsed
from keepstep.engine.encryption import Encryption
from keepstep.engine.handle import RunHandle
from keepstep.engine.process import NoAgents, Process
from keepstep.errors import KeepstepError, NotSerializable, RetryAfter, StoreError
from keepstep.history import rewind as rewinding
from keepstep.history.audit import audit
from keepstep.history.diff import compare
from keepstep.history.retry import plan_retry
from keepstep.kernel.redaction import Redaction
from keepstep.kernel.replay import History
from keepstep.model import FINISHED, Kind, Run, RunQuery, Signal, Status, WorkerInfo
from keepstep.model.ids import child_id
from keepstep.policies import Retry
from keepstep.policies.retry_after import asked_wait
from keepstep.ports import ClaimRequest, Create, Row, Send
from keepstep.records.record import MAX_VALUE, Record, checkpoint, origin, seal, unseal
from keepstep.stores.memory import MemoryStore
from keepstep.stores.open import open_store
from keepstep.stores.os_locks import network_file_system
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.values import Redactor
from keepstep.views import plain
from keepstep.views.facts import Facts
from keepstep.views.overview import Overview
from keepstep.workflows.definition import KNOWN
from keepstep.workflows.files.build import Builder, Names
from keepstep.workflows.files.check import examine
from keepstep.workflows.files.conditions import VARIABLES, compiled
from keepstep.workflows.schema import with_members

from . import program
from .guard import nothing_but_parsing
from .shapes import CODEC, WORKFLOWS, Model, Odd, Order, Packed, Point, Suit

Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {}

NOW = datetime(2026, 11, 15, tzinfo=UTC)


def parser(function: Target) -> Target:
    """Make a function a target, named after itself."""
    TARGETS[function.__name__] = function
    return function


def text_of(data: bytes) -> str:
    """Any text, lone surrogates included, as a file system or a command line gives it."""
    return data.decode("utf-8", "surrogateescape")


@cache
def folder() -> str:
    """Where targets that need files have theirs; gone with the process."""
    made = tempfile.TemporaryDirectory(prefix="keepstep-fuzz-")
    _folders.append(made)
    return made.name


_folders: list[tempfile.TemporaryDirectory[str]] = []


def told(text: str) -> None:
    """As the command line writes it: what cannot be encoded is escaped."""
    text.encode("utf-8", "backslashreplace")


# -- files of workflows ------------------------------------------------------------------------------------------------


@parser
def workflow_yaml(data: bytes) -> None:
    """A workflow's file in YAML: problems or a workflow, and nothing is imported, looked up or executed."""
    _workflow_file(data, "yaml")


@parser
def workflow_json(data: bytes) -> None:
    """The same in JSON."""
    _workflow_file(data, "json")


@cache
def _ready() -> None:
    """The libraries for YAML and for conditions are loaded when they are first needed, which is no part of parsing."""
    for variable in VARIABLES.values():
        compiled(f"{variable}.x == 1", variable)
    examine(b"{}", is_json=False)


def _workflow_file(data: bytes, ending: str) -> None:
    _ready()
    with nothing_but_parsing():
        examined = examine(data, is_json=ending == "json")
        for problem in examined.named(f"file.{ending}"):
            told(str(problem))
            assert problem.what
            assert problem.line >= 1
            assert problem.column >= 1
        if not examined.ok:
            return
        assert examined.value is not None
        others = ANYTHING.keys()
        builder = Builder(examined, Names(functions=ANYTHING, agents=ANYTHING), f"file.{ending}")
        built = builder.build()
        assert (built is None) == bool(builder.problems)
        assert ANYTHING.keys() == others
        if built is not None:
            KNOWN.pop(built.name, None)
            assert built.fingerprint


class _Anything(dict[str, Any]):
    """A function for every name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Any:
        return _any_function

    def keys(self) -> Any:
        return ["any_function"]


def _any_function(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("loading a file called a function")


ANYTHING = _Anything()


# -- values and records ------------------------------------------------------------------------------------------------


@parser
def value(data: bytes) -> None:
    """A stored value comes back as what can be stored again, with the same digest."""
    with nothing_but_parsing():
        try:
            found = CODEC.decode(data, "fuzz")
        except KeepstepError:
            return
        try:
            again = CODEC.encode(found, "fuzz")
        except NotSerializable:
            return  # JSON of someone else's, nested deeper than we write it
        assert CODEC.digest(CODEC.decode(again, "fuzz")) == CODEC.digest(found)
    formatting.brief(plain.value_of(data))


@parser
def shown(data: bytes) -> None:
    """Whatever is stored can be shown, on any terminal, as JSON or on a line."""
    with nothing_but_parsing():
        shown_value = plain.value_of(data)
        told(formatting.brief(shown_value))
        told(json.dumps(shown_value, ensure_ascii=False))
        run = Run("r", "w", Status.RUNNING, NOW, input=data, output=data, progress=data)
        told(json.dumps(plain.run_data(run, whole=True), ensure_ascii=False))
        view = Overview(run, None, None, (), (), None, None, None)
        told(inspect._shown(Facts(view, {"key": shown_value}, None, None), traceback=True))


@parser
def record(data: bytes) -> None:
    """One row of a history, with or without a value beside it."""
    text, _, body = data.partition(b"\0")
    kind = next((one.value for one in Kind if one.value.encode() in text), "step completed")
    with nothing_but_parsing(), contextlib.suppress(StoreError):
        for found, checksum in unseal([Row(1, kind, text, body or None)], "r"):
            shown_checkpoint(checkpoint(found, checksum))


def shown_checkpoint(one: Any) -> None:
    told(json.dumps(plain.record_data(one), ensure_ascii=False))
    run = Run(one.run, "w", Status.RUNNING, NOW)
    told(inspect._timeline(run, [one], set(), full=True))
    formatting.local(one.finished_at)


def resealed(lines: list[bytes], run: Run) -> Create:
    """A run with records of one chain that holds, whatever else is wrong with them."""
    rows: list[Row] = []
    checksum = origin(run)
    for line in lines:
        text, _, body = line.partition(b"\0")
        try:
            found = msgspec.json.decode(text, type=Record)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        found.run = run.id
        row, checksum = seal(found, len(rows) + 1, checksum)
        if body and row.body is None:
            row, checksum = Row(row.seq, row.kind, row.record, body), sha256(row.record + body).hexdigest()
        rows.append(row)
    return Create(replace(run, seq=len(rows), checksum=checksum), rows)


@parser
def archive(data: bytes) -> None:
    """Lines of an archive: what is taken up is whole, whatever is wrong with the rest; an error names its line."""
    with nothing_but_parsing():
        store = MemoryStore()
        with contextlib.suppress(KeepstepError):
            import_runs(store, io.BytesIO(data), "runs.jsonl", actor="fuzz", partial=True)
        assert verify(store).sound
        with contextlib.suppress(StoreError):
            import_runs(MemoryStore(), io.BytesIO(data), "runs.jsonl", actor="fuzz")


class Looking(Process):
    """As much of an engine as looking at a run needs."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._given = {}
        self.hosting = NoAgents()
        self.live = {}
        self.closed = True  # so that values are worked on where they are
        self.encryption = Encryption(None)
        self.redaction = Redaction(Redactor(()), MAX_VALUE, self.encryption)
        self.own_actor = "fuzz"
        self.waiting = self
        self.changes = 0

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def ended(self, run_id: str, seen: int) -> None:
        raise StoreError("nothing changes here")

    async def changed(self, seconds: float | None = None) -> bool:
        raise StoreError("nothing changes here")

    def reader(self, *runs: str) -> Any:
        return contextlib.nullcontext(self)

    def follow(self, *runs: str) -> None:
        pass


@parser
def history(data: bytes) -> None:
    """A whole history, one record per line, sealed so that only what the records say can be wrong."""
    status = [*FINISHED, Status.SET_ASIDE][data[0] % 4] if data else Status.FAILED
    create = resealed(data[1:].split(b"\n"), Run("r", "w", status, NOW, updated_at=NOW))
    if not create.rows:
        return
    store = MemoryStore()
    store.commit([create])
    engine: Any = Looking(store)
    with nothing_but_parsing():
        asyncio_run(read_history(engine, create.run, [*create.rows]))


async def read_history(engine: Any, run: Run, rows: list[Row]) -> None:
    with contextlib.suppress(StoreError):
        found = History(run)
        found.add(rows)
        found.arrange(run)
        found.unasked_before(1)
        found.open_waits()
    handle = RunHandle[Any](engine, "r")
    with contextlib.suppress(KeepstepError):
        for one in await handle.checkpoints():
            shown_checkpoint(one)
    for reading in (handle.run, handle.published_raw, handle.result, handle.latest, handle.published):
        with contextlib.suppress(KeepstepError):
            await reading()
    with contextlib.suppress(KeepstepError):
        async for _ in handle.watch():
            pass
    with contextlib.suppress(KeepstepError):
        await audit(engine, "r")
    with contextlib.suppress(KeepstepError):
        await plan_retry(engine, run)
    for at in (0, run.seq // 2, run.seq - 1):
        with contextlib.suppress(KeepstepError):
            await rewinding.plan_rewind(engine, run, at, None)
        with contextlib.suppress(KeepstepError):
            await compare(engine, ("r", at), ("r", None))
    with contextlib.suppress(KeepstepError):
        await handle.checkpoints(counted=True)


def asyncio_run(coroutine: Any) -> None:
    """Drive a coroutine that never waits for anything; it may let others run, which a bare yield does."""
    with contextlib.suppress(StopIteration):
        while coroutine.send(None) is None:
            pass
        coroutine.close()
        raise AssertionError("it waited")


# -- the rows of a SQLite store ----------------------------------------------------------------------------------------


@cache
def columns() -> list[tuple[str, str]]:
    connection = apsw.Connection(":memory:")
    connection.deserialize("main", program.stored())
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    return [
        (table, row[1])
        for table in sorted(tables)
        if table.startswith("keepstep_")
        for row in connection.execute(f"PRAGMA table_info({table})")
    ]


def cell(data: bytes) -> Any:
    """What a cell may hold: any of SQLite's types, whatever the column says."""
    kind, content = data[:1], data[1:]
    if kind == b"i":
        return int.from_bytes(content[:8], "big", signed=True)
    if kind == b"f":
        return struct.unpack(">d", content[:8].rjust(8, b"\0"))[0]
    if kind == b"t":
        return content.decode("utf-8", "replace")
    if kind == b"b":
        return content
    return None


@parser
def rows(data: bytes) -> None:
    """A store in whose cells anything may stand: `column number, row number, type, content`, parted by two 0xff."""
    path = Path(folder()) / "rows.db"
    clear(path)
    path.write_bytes(program.stored())
    connection = apsw.Connection(str(path))
    for part in data.split(b"\xff\xff")[:20]:
        if len(part) < 3:
            continue
        table, column = columns()[part[0] % len(columns())]
        with contextlib.suppress(apsw.Error):
            keys = "run, seq" if table == "keepstep_checkpoint" else "rowid" if table != "keepstep_head" else "run"
            order = "name" if table == "keepstep_meta" else "id" if table == "keepstep_worker" else keys
            key = order.split(", ")[0]
            where = f"{key} = (SELECT {key} FROM {table} ORDER BY {order} LIMIT 1 OFFSET {part[1] % 8})"
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (cell(part[2:]),))
    connection.close()
    with nothing_but_parsing(folder()):
        use_store(path)


@parser
def database(data: bytes) -> None:
    """A store's file in which bytes were changed: `three bytes of place, one of content`, again and again."""
    image = bytearray(program.stored())
    for place in range(0, len(data) - 3, 4):
        image[int.from_bytes(data[place : place + 3], "big") % len(image)] = data[place + 3]
    path = Path(folder()) / "image.db"
    clear(path)
    path.write_bytes(image)
    with nothing_but_parsing(folder()):
        use_store(path)


def clear(path: Path) -> None:
    """Remove a database and what lies beside it."""
    for one in path.parent.glob(f"{path.name}*"):
        if one.is_dir():
            for inner in one.iterdir():
                inner.unlink()
            one.rmdir()
        else:
            one.unlink()


def use_store(path: Path) -> None:
    """Everything that is asked of a store; each answer is right, or a documented error."""
    try:
        store = SQLiteStore(path, busy_seconds=0.1, lease_seconds=0.0, power_loss="may_lose_last")
    except KeepstepError:
        return
    try:
        for ask in questions(store):
            with contextlib.suppress(KeepstepError):
                ask()
    finally:
        store.close()


def questions(store: SQLiteStore) -> Iterator[Callable[[], Any]]:
    names = ["done-1", "fail-1", "again-1", "gone-1", "paused-1", "wait-1", "queued-1"]
    workflows = frozenset({"fuzz everything", "fuzz waiting", "fuzz child", "fuzz broken"})
    engine: Any = Looking(store)
    yield lambda: store.renew_leases(WorkerInfo("w-1", progress={"done-1": b"1"}))
    yield store.list_workers
    for status in [None, *Status]:
        wanted = frozenset() if status is None else frozenset({status})
        yield lambda wanted=wanted: [
            (plain.run_data(run), inspect._row(run, dead=True)) for run in store.list_runs(RunQuery(status=wanted)).runs
        ]
    yield lambda: store.list_runs(RunQuery(tags={"kind": "fuzz"}))
    for name in names:
        yield lambda name=name: [checkpoint(*one) for one in unseal(store.list_checkpoints(name), name)]
        yield lambda name=name: store.list_signals(name)
        yield lambda name=name: asyncio_run(audit(engine, name))
        yield lambda name=name: store.commit([Send(Signal(name, "approved", id="new"))])
        yield lambda name=name: store.commit([Create(Run(name, "w", Status.QUEUED, NOW))])
        yield lambda name=name: store.claim_runs(ClaimRequest("w-1", run=name, statuses=frozenset(Status)))
    yield lambda: store.claim_runs(ClaimRequest("w-1", workflows, limit=3))
    yield lambda: store.claim_runs(ClaimRequest("w-2", workflows, limit=100))
    yield lambda: store.news("w-1", 0)
    yield lambda: store.delete_runs(names)
    yield lambda: store.renew_leases(WorkerInfo("w-1"), leaving=True)


# -- what a person or a program gives ----------------------------------------------------------------------------------


@parser
def input_text(data: bytes) -> None:
    """`--input` of every shape of workflow, up to what would be stored."""
    workflow = WORKFLOWS[data[0] % len(WORKFLOWS)] if data else WORKFLOWS[0]
    text = text_of(data[1:])
    if text.startswith("@") or text == "-":
        return
    with nothing_but_parsing(), contextlib.suppress(KeepstepError, errors.Refused):
        stored_input(workflow, *target.read_input(workflow, text, ()))


for _class in (Order, Packed, Point, Model):  # their annotations are resolved once, before anything is read
    with_members({}, _class)
for _workflow in WORKFLOWS:
    _workflow.types  # noqa: B018 - likewise


@parser
def input_words(data: bytes) -> None:
    """Arguments written after a workflow's name, parted by NUL as an operating system parts them."""
    workflow = WORKFLOWS[data[0] % len(WORKFLOWS)] if data else WORKFLOWS[0]
    with nothing_but_parsing(), contextlib.suppress(KeepstepError, errors.Refused):
        stored_input(workflow, *target.read_input(workflow, None, text_of(data[1:]).split("\0")))


def stored_input(workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bound = workflow.bind(*args, **kwargs)
    workflow.values.encode([[*bound.args], bound.kwargs], "input")


@parser
def names(data: bytes) -> None:
    """Ids and names: refused, or safe to be a file's name and a row's key."""
    text = text_of(data)
    with nothing_but_parsing():
        with contextlib.suppress(KeepstepError):
            found = check_id(text)
            assert os.sep not in found
            assert len(found.encode()) <= 200
            assert check_id(child_id(found, "a/b#1", 0))
        with contextlib.suppress(KeepstepError):
            assert len(check_name(text, "step").encode()) <= 200
        with contextlib.suppress(errors.Refused):
            target.split(text)


@parser
def store_url(data: bytes) -> None:
    """A store is opened, in its folder, or refused."""
    home = Path(folder()) / "urls"
    home.mkdir(exist_ok=True)
    before = Path.cwd()
    opened, SQLiteStore._open = SQLiteStore._open, inside(home)
    os.chdir(home)
    try:
        with contextlib.suppress(KeepstepError):
            open_store(text_of(data)).close()
        with contextlib.suppress(KeepstepError):
            open_store(Path(text_of(data))).close()
    finally:
        os.chdir(before)
        SQLiteStore._open = opened


def inside(home: Path) -> Callable[..., None]:
    """Opens no file outside `home`: what a URL names there is somebody's."""
    real = SQLiteStore._open

    def _open(self: SQLiteStore, *args: Any) -> None:
        if not self._path.startswith(f"{home.resolve()}/"):
            raise StoreError("outside")
        with nothing_but_parsing(str(home)):
            real(self, *args)

    return _open


@parser
def retry_after(data: bytes) -> None:
    """What a service says about when to come back; a wait is finite and not negative."""
    text = text_of(data)
    given = [data, text]
    with contextlib.suppress(ValueError, RecursionError):
        given += [json.loads(text)]
    with nothing_but_parsing():
        for said in given:
            for name in ("Retry-After", "retry-after-ms"):
                error = ConnectionError("busy")
                error.response = type("Response", (), {"headers": {name: said}, "status_code": 429})()  # type: ignore[attr-defined]
                answer = asked_wait(error, 1e9)
                assert answer is None or 0 <= answer.seconds < float("inf")
                Retry(attempts=3).decide(1, "transient", error, now=1e9)
            error = ConnectionError("busy")
            error.retry_after = said  # type: ignore[attr-defined]
            asked_wait(error, 1e9)
            if isinstance(said, int | float):
                with contextlib.suppress(OverflowError):  # of the user's own raise
                    asked_wait(RetryAfter(said), 1e9)


@parser
def mounts(data: bytes) -> None:
    """The system's list of file systems."""
    with nothing_but_parsing("/"):
        network_file_system("/some/where", data.decode("utf-8", "surrogateescape"))


COMMANDS = (
    ["list"],
    ["show"],
    ["history"],
    ["audit"],
    ["doctor"],
    ["signal"],
    ["approve"],
    ["pause"],
    ["resume"],
    ["cancel"],
    ["retry"],
    ["resolve"],
    ["start", "program.py:nothing"],
    ["start", "program.py:plain"],
    ["start", "program.py:rich"],
    ["version"],
    [],
)
#: What would wait for ever, run until it is stopped, take another store, or import what it is told to.
_NOT_FUZZED = {"demo", "run", "start", "worker", "watch", "ask", "crashtest"}

PROGRAM = """
from datetime import date, datetime, timedelta
import keepstep as ks

@ks.workflow
async def nothing(): ...

@ks.workflow
async def plain(name: str, count: int = 1, ratio: float = 1.0, flag: bool = False): ...

@ks.workflow
async def rich(at: datetime, day: date | None = None, span: timedelta = timedelta(), **rest): ...
"""


@parser
def command_line(data: bytes) -> None:
    """A command with any arguments ends with a documented code and a sentence, never with a traceback."""
    command = COMMANDS[data[0] % len(COMMANDS)] if data else []
    given = [word for word in text_of(data[1:]).split("\0") if not word.startswith(("--store", "@", "-h", "--help"))]
    if not command and (not given or any(word in _NOT_FUZZED for word in given)):
        return
    home = Path(folder()) / "cli"
    home.mkdir(exist_ok=True)
    (home / "program.py").write_text(PROGRAM, encoding="utf-8")
    clear(home / "runs.db")
    (home / "runs.db").write_bytes(program.stored())
    code, out, err = called(home, [*command[:1], "--store", "runs.db", *command[1:], *given])
    assert code in range(errors.TIMED_OUT + 1), (code, out, err)
    assert "Traceback" not in err, err


def called(home: Path, argv: list[str]) -> tuple[int, str, str]:
    """Call a command in this process, in a folder, with streams that take only what UTF-8 can say."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before, stdin = Path.cwd(), sys.stdin
    os.chdir(home)
    sys.stdin = io.StringIO("")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(argv)
    finally:
        os.chdir(before)
        sys.stdin = stdin
    return code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


def warm() -> None:
    """Let everything be imported and learnt that a first use imports and learns."""
    CODEC.encode(
        [Order("a"), Suit.HEARTS, Packed(UUID(int=0)), Model(), Point(0), Odd("a"), NOW.astimezone(ZoneInfo("UTC"))]
    )
    CODEC.decode(b'{"$":"Packed","v":{"key":{"$":"uuid","v":"00000000-0000-0000-0000-000000000000"}}}')
    for workflow, text in zip(WORKFLOWS, _INPUTS, strict=True):
        with contextlib.suppress(errors.Refused, KeepstepError):
            stored_input(workflow, *target.read_input(workflow, text, ()))
    error = ConnectionError()
    error.retry_after = "Sun, 15 Nov 2026 00:00:00 GMT"  # type: ignore[attr-defined]
    asked_wait(error, 1e9)
    CODEC.encode("\ud800")
    for key in available_timezones():
        ZoneInfo(key)
    path = Path(folder()) / "warm.db"
    path.write_bytes(program.stored())
    use_store(path)


_INPUTS = ["{}", "[1]", '"a"', '{"order": {"item": "a"}}', '{"packed": {"key": "0"}}', '{"model": {}}', '"a"']

warm()
