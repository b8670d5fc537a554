"""What becomes of a run whose workflow is no longer what it was started under: the workflow's policy decides."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import msgspec

from ..errors import StoreError
from ..model import Kind
from ..model.signal import RESERVED
from ..ports import Advance, Verdict
from ..stores.records import Record, seal, unseal
from ..workflows.migration import MigrationInfo
from .history import Superseded

if TYPE_CHECKING:
    from ..model import Run
    from ..ports import Row
    from ..workflows.definition import Workflow
    from ..workflows.graph import Graph
    from .context import RunContext
    from .engine import Engine
    from .position import Position

#: A definition of more text than this is not kept with each run; then only the versions are told of a change.
MAX_DEFINITION = 16_000
#: So many changed lines of a definition are told.
MOST_LINES = 20


class Objection(msgspec.Struct, frozen=True):
    """Why a run is left to a person: under which name, in which words, and how far it came."""

    kind: str
    reason: str
    phase: str = "validate"


def definition_of(workflow: Workflow[..., Any]) -> dict[str, str]:
    """What is kept of a definition in the first record of each run, if there is text and not too much of it."""
    kept = _TEXTS.get(workflow)
    if kept is None or kept[0] != workflow.fingerprint:
        text = workflow.definition()
        fits = text and len(text.encode("utf-8", "replace")) <= MAX_DEFINITION
        told = {"definition": text} if fits else {}
        schema = getattr(workflow, "schema", None)
        if schema is not None:  # so that an edit knows of it where the code is not at hand
            told["schema"] = schema.cls.__name__
        kept = _TEXTS[workflow] = workflow.fingerprint, told
    return kept[1]


#: Made once for each definition, not for each run.
_TEXTS: WeakKeyDictionary[Any, tuple[str, dict[str, str]]] = WeakKeyDictionary()


class Before(msgspec.Struct, frozen=True):
    """The definition that a run was started under, or migrated to last."""

    version: str
    fingerprint: str
    definition: str = ""
    schema: str = ""


async def before(engine: Engine, run: Run) -> Before:
    """Read from the records what the run was last made to fit."""
    kinds = (Kind.RUN_STARTED.value, Kind.SUPERSEDED.value)
    gone, found = Superseded(), []
    text, schema, after = "", "", 0
    while rows := await engine.read(engine.store.list_checkpoints, run.id, after, 1000, kinds):
        for row in rows:
            after = row.seq
            record, _ = next(unseal([row], run.id, row.seq - 1))
            data = record.data or {}
            if record.kind == Kind.RUN_STARTED:
                text, schema = data.get("definition", ""), data.get("schema", "")
            else:
                gone.add(record)
                if data.get("act") == "migrate":
                    found.append(record)
    for record in reversed(found):
        data = record.data or {}
        if record.seq not in gone:
            told = [data.get(key, "") for key in ("fingerprint", "definition", "schema")]
            return Before(str(data.get("version", "")), *told)
    return Before(run.version, run.fingerprint, text, schema)


async def judge(context: RunContext) -> Objection | list[Record] | None:
    """What the policy says about a run of another definition: None lets it go on, records make it fit."""
    workflow = context.workflow
    old = await before(context.engine, context.run)
    if old.fingerprint == workflow.fingerprint:
        return None
    if workflow.migrate is not None:
        return await _migrated(context, old)
    if workflow.on_change == "compatible":
        return _missing(context)
    advice = "deploy the old version beside the new one, or give the workflow on_change='compatible' or a migrate="
    if workflow.place.is_data:
        advice = "deploy the old version beside the new one, or write policies.resilience.on_change: compatible"
    if workflow.on_change == "pin":
        advice = "give the changed definition another version, so that a worker with the old one takes the run"
    told = difference(workflow, old)
    return Objection("DefinitionChanged", f"{told}\n  {advice}" if "\n" in told else f"{told}; {advice}")


def difference(workflow: Workflow[..., Any], old: Before) -> str:
    """What is other about a definition, in a sentence with a line for each part that changed."""
    versions = f"version {old.version!r}"
    if old.version != workflow.version:
        versions += f", and this worker has {workflow.version!r}"
    told = f"workflow {workflow.name!r} has changed since the run began under {versions}"
    new = workflow.definition()
    if not old.definition or not new:
        return told
    lines = changed_lines(old.definition, new)
    more = [f"… and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return "\n  ".join([f"{told}:", *lines[:MOST_LINES], *more])


def changed_lines(old: str, new: str) -> list[str]:
    """The lines of two definitions that are only in one of them: `- ` for the old, `+ ` for the new."""
    found = difflib.ndiff(old.splitlines(), new.splitlines())
    return [line for line in found if line.startswith(("- ", "+ "))]


def _missing(context: RunContext) -> Objection | None:
    """Under `compatible` every recorded step must still be there; of a function only the replay can tell."""
    shape = getattr(context.workflow, "shape", None)
    if shape is None:
        return None
    known = {node.name for node in shape().nodes}
    gone = [repr(name) for name in _recorded(context) if name not in known]
    if context.workflow.carries_state and not gone:
        gone = _lost_inside(context, cast("Graph", context.workflow))
    if not gone:
        return None
    named = ", ".join(gone)
    migrate = "" if context.workflow.place.is_data else "give the workflow a migrate=, "
    return Objection(
        "DefinitionChanged",
        f"workflow {context.workflow.name!r} no longer has {named}, which the run has recorded; put it back, {migrate}"
        "or rewind the run to before it",
    )


def _recorded(context: RunContext) -> Iterable[str]:
    """The names of the steps that the run has passed, in order."""
    names: dict[str, None] = {}
    position = context.position
    if position is not None:
        names.update(dict.fromkeys(position.counts))
    for entry in context.history.order if context.history is not None else ():
        first = entry.key.partition("/")[0]
        if not first.startswith(RESERVED) and "#" in first:
            name = first.partition("#")[0]
            waited = entry.cancelled or (entry.kind == Kind.CHILD and not entry.child)  # for what a child gives
            names.setdefault(name.removesuffix(".result") if waited else name)
    return names


def _lost_inside(context: RunContext, graph: Graph) -> list[str]:
    """What the run has recorded inside parallel parts and maps, and the graph no longer has there."""
    keys = [entry.key for entry in context.history.order] if context.history is not None else []
    found = dict.fromkeys(_lost(graph, key) for key in keys if "/" in key and not key.startswith(RESERVED))
    return [one for one in found if one is not None]


def _lost(graph: Graph, key: str) -> str | None:
    """The first part of a recorded key, as `send#1.mail/write#1`, that leads nowhere in the graph, in words."""
    from ..workflows.graph import MapNode, ParallelNode  # noqa: PLC0415 - needed by few

    parts = key.split("/")
    for part, following in pairwise([*parts, ""]):
        name, _, visit = part.partition("#")
        node, branch = graph.nodes.get(name), visit.partition(".")[2]
        if node is None:
            return repr(name)
        if not branch or following.startswith(f"wait_for:{RESERVED}"):  # its own call, or a breakpoint's
            return None
        if isinstance(node, MapNode):
            step = following.partition("#")[0]
            return None if step == node.step.name else f"step {step!r} in map {name!r}"
        if not isinstance(node, ParallelNode) or branch not in node.branches:
            return f"branch {branch!r} of {name!r}"
    return None


# -- migration ---------------------------------------------------------------------------------------------------------


async def _migrated(context: RunContext, old: Before) -> Objection | list[Record]:
    """Ask the workflow's own function how the run is to fit, and put that into records."""
    workflow, history = context.workflow, context.history
    order = history.order if history is not None else ()
    keys = tuple(entry.key for entry in order if not entry.key.startswith(RESERVED))
    info = MigrationInfo(context.id, old.version, old.fingerprint, old.definition, keys)
    data: dict[str, Any] = {
        "act": "migrate",
        "version": workflow.version,
        "fingerprint": workflow.fingerprint,
        "from": old.version,
        **definition_of(workflow),
    }
    record = Record(context.id, Kind.SUPERSEDED.value, worker=context.worker, trigger="recovery", data=data)
    try:
        if workflow.carries_state:
            record.value = msgspec.Raw(b"{}")
            return [record, await _moved(context, cast("Graph", workflow), info)]
        renames = _renames(context, _asked(workflow, info))
        if renames:
            data["renames"] = renames
        return [record]
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's own code, whose failure leaves the run to a person
        told = f"migrate= of workflow {workflow.name!r} failed for version {old.version!r}: {type(error).__name__}: "
        return Objection("MigrationFailed", f"{told}{error}", "rebuild")


def _asked(workflow: Workflow[..., Any], info: MigrationInfo) -> Any:
    return workflow.migrate(info) if workflow.migrate is not None else None


async def _moved(context: RunContext, graph: Graph, info: MigrationInfo) -> Record:
    """The state of a graph's run as its new definition is to go on from, whole: nothing before it is replayed."""
    from .states import position_at  # noqa: PLC0415 - needed by few

    graph.close()
    position = await position_at(context.engine, context.run)
    _check_between_steps(context, position)
    answer = _asked(graph, replace(info, state=position.state(graph.trees, context.id), next=position.at))
    state, at = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if state is not None:
        if not isinstance(state, Mapping):
            raise TypeError(f"it gives the new state, (state, next step) or None, not {answer!r}")
        where = f"the migrated state of run {context.id!r}"
        if graph.schema is not None:
            state = graph.schema.converted(state, where)
        old = position.levels.get("", {})
        position.levels = {**position.levels, "": graph.trees.lift(dict(state), old, where, careful=True)}
    position.at = position.at if at is None else at
    last = position.trail[-1] if position.trail else graph.entry_name
    for name in (last,) if position.at is None else (position.at,) if position.at else ():
        if name not in graph.nodes:
            raise KeyError(f"{name!r} is no step of graph {graph.name!r}; give (state, next step) with one that is")
    text = position.text(context.facts())
    context.engine.censor.check(text, context.id, "migrated state of run")
    record = Record(context.id, Kind.STATE.value, worker=context.worker, trigger="recovery")
    record.value = msgspec.Raw(text)
    return record


def _check_between_steps(context: RunContext, position: Position) -> None:
    """A new beginning forgets what is under way: only between two steps is there nothing to forget."""
    if context.marks:
        raise ValueError(f"step {min(context.marks)} may or may not have happened; resolve it first")
    for entry in context.history.order if context.history is not None else ():
        if entry.seq > position.seq and "/" in entry.key:
            raise ValueError(
                f"the run is inside {entry.key.partition('#')[0]!r}, of which {entry.key} is done and would be "
                "repeated; let the old version bring it past that, or rewind it to before"
            )


def _renames(context: RunContext, answer: Any) -> dict[str, str]:
    """Old keys and new ones, checked: what is renamed must be recorded, and nothing may be hidden by it."""
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        raise TypeError(f"it gives {{old key: new key}} or None, not {answer!r}")
    entries = context.history.entries if context.history is not None else {}
    renames = {str(old): str(new) for old, new in answer.items()}
    for old, new in renames.items():
        entry = entries.get(old)
        if entry is None and old not in context.tried and old not in context.marks:
            raise KeyError(f"the run has not recorded {old!r}; it has {', '.join(entries) or 'nothing'}")
        if entry is not None and (entry.kind == Kind.CHILD or entry.child):
            raise ValueError(f"{old!r} is of a child run, which tells its end under that name")
        if old.rpartition("/")[0] != new.rpartition("/")[0] or "#" not in new.rpartition("/")[2]:
            raise ValueError(
                f"{old!r} cannot become {new!r}: a key is a name and its count, as 'fetch#1', in its branch"
            )
        if new in entries and new not in renames:
            raise ValueError(f"{old!r} cannot become {new!r}, which is recorded too")
    if len(set(renames.values())) < len(renames):
        raise ValueError("two recorded steps would get the same key")
    return renames


async def write_migration(context: RunContext, records: Sequence[Record]) -> bool:
    """Make the migration durable before any code is called; False if the lease is lost."""
    engine = context.engine
    rows: list[Row] = []
    checksum, claimed = context.checksum, context.claimed
    for record in records:
        record.finished_at = context.time()
        record.claimed, claimed = claimed, None
        row, checksum = seal(record, context.seq + len(rows) + 1, checksum, context.cipher)
        rows.append(row)
    change = Advance(context.id, context.worker, context.epoch, context.seq, rows=rows, checksum=checksum)
    change.progress = False
    answer = await engine.journal.write(change)
    if answer.verdict is not Verdict.DONE:
        return False
    context.seq, context.checksum, context.claimed = rows[-1].seq, checksum, None
    context.run = replace(context.run, seq=context.seq, checksum=checksum)
    return True
