"""Handling of a run whose workflow's definition has changed since its start, according to the workflow's policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import msgspec

from ..errors import StoreError
from ..model import Kind
from ..model.checkpoint import ABOUT_CHILD
from ..model.signal import RESERVED
from ..ports import Advance, Send, Verdict
from ..records.data import Data, DefinitionData, RunStartedData, SupersededData, data_of, new_data
from ..records.record import Record, seal, unseal
from .replay import Superseded, kept_state

if TYPE_CHECKING:
    from ..model import Run
    from ..ports import Row
    from ..workflows.definition import Workflow
    from ..workflows.graph import Graph
    from ..workflows.migration import MigrationInfo
    from .driver import RunDriver
    from .graph.position import Position
    from .host import StoredRuns

#: Characters up to which a definition is kept with each run. Beyond this, only the versions of a change are reported.
MAX_DEFINITION = 16_000
#: Changed lines of a definition that are reported at most.
MOST_LINES = 20


class Objection(msgspec.Struct, frozen=True):
    """The reason to set a run aside: its error type, its text, and the phase."""

    kind: str
    reason: str
    phase: str = "validate"


def definition_of(workflow: Workflow[..., Any]) -> DefinitionData:
    """Return the definition for the first record of each run, if there is one and it is short enough."""
    kept = _TEXTS.get(workflow)
    if kept is None or kept[0] != workflow.fingerprint:
        text = workflow.definition()
        fits = text and len(text.encode("utf-8", "replace")) <= MAX_DEFINITION
        data: DefinitionData = {"definition": text} if fits else {}
        schema = getattr(workflow, "schema", None)
        if schema is not None:  # so that an edit knows the schema without the code
            data["schema"] = schema.cls.__name__
        kept = _TEXTS[workflow] = workflow.fingerprint, data
    return kept[1]


#: Made once for each definition, not for each run.
_TEXTS: WeakKeyDictionary[Any, tuple[str, DefinitionData]] = WeakKeyDictionary()


class Before(msgspec.Struct, frozen=True):
    """The definition that a run was started under, or last migrated to."""

    version: str
    fingerprint: str
    definition: str = ""
    schema: str = ""


async def before(host: StoredRuns, run: Run) -> Before:
    """Read the definition that the run last fitted from its records."""
    kinds = (Kind.RUN_STARTED.value, Kind.SUPERSEDED.value)
    gone, found = Superseded(), []
    text, schema, after = "", "", 0
    kept = await kept_state(host, run)
    while rows := await host.records(run.id, after, 1000, kinds):
        for row in rows:
            after = row.seq
            record, _ = next(unseal([row], run.id, row.seq - 1))
            if record.kind == Kind.RUN_STARTED:
                began = data_of(record, RunStartedData)
                text, schema = began.get("definition", ""), began.get("schema", "")
            else:
                gone.add(record)
                if data_of(record, SupersededData).get("act") == "migrate":
                    found.append(record)
    for record in reversed(found):
        if record.seq not in gone:
            fits = data_of(record, SupersededData)
            text, schema = fits.get("definition", ""), fits.get("schema", "")
            return Before(str(fits.get("version", "")), fits.get("fingerprint", ""), text, schema)
    if kept is not None and kept.fits:  # the record of its migration was removed
        return Before(**kept.fits)
    return Before(run.version, run.fingerprint, text, schema)


async def judge(context: RunDriver) -> Objection | list[Record] | None:
    """Apply the policy to a run of another definition: None lets it go on, records make it fit."""
    workflow = context.workflow
    old = await before(context.host, context.run)
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
    change = difference(workflow, old)
    return Objection("DefinitionChanged", f"{change}\n  {advice}" if "\n" in change else f"{change}; {advice}")


def difference(workflow: Workflow[..., Any], old: Before) -> str:
    """Describe the change of a definition, with a line for each part that changed."""
    versions = f"version {old.version!r}"
    if old.version != workflow.version:
        versions += f", and this worker has {workflow.version!r}"
    change = f"workflow {workflow.name!r} has changed since the run began under {versions}"
    new = workflow.definition()
    if not old.definition or not new:
        return change
    lines = changed_lines(old.definition, new)
    more = [f"… and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return "\n  ".join([f"{change}:", *lines[:MOST_LINES], *more])


def changed_lines(old: str, new: str) -> list[str]:
    """The lines of two definitions that are only in one of them: `- ` for the old, `+ ` for the new."""
    import difflib  # noqa: PLC0415 - needed only for a changed definition

    found = difflib.ndiff(old.splitlines(), new.splitlines())
    return [line for line in found if line.startswith(("- ", "+ "))]


def _missing(context: RunDriver) -> Objection | None:
    """Check under `compatible` that every recorded step still exists; for a function only the replay can do so."""
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
        f"workflow {context.workflow.name!r} no longer has {named}, which the run has recorded; restore it, {migrate}"
        "or rewind the run to before it",
    )


def _recorded(context: RunDriver) -> Iterable[str]:
    """Return the names of the steps that the run has passed, in order."""
    names: dict[str, None] = {}
    position = context.position
    if position is not None:
        names.update(dict.fromkeys(position.counts))
    for entry in context.history.order if context.history is not None else ():
        first = entry.key.partition("/")[0]
        if not first.startswith(RESERVED) and "#" in first:
            name = first.partition("#")[0]
            waited = entry.cancelled or (entry.kind in ABOUT_CHILD and not entry.child)  # a wait for a child's result
            names.setdefault(name.removesuffix(".result") if waited else name)
    return names


def _lost_inside(context: RunDriver, graph: Graph) -> list[str]:
    """Return recorded steps inside parallel parts and maps that the graph no longer has."""
    keys = [entry.key for entry in context.history.order] if context.history is not None else []
    found = dict.fromkeys(_lost(graph, key) for key in keys if "/" in key and not key.startswith(RESERVED))
    return [one for one in found if one is not None]


def _lost(graph: Graph, key: str) -> str | None:
    """Describe the first part of a recorded key, as `send#1.mail/write#1`, that the graph does not have, or None."""
    from ..workflows.graph import MapNode, ParallelNode  # noqa: PLC0415 - rarely needed

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


async def _migrated(context: RunDriver, old: Before) -> Objection | list[Record]:
    """Ask the workflow's `migrate=` how the run is to fit, and return the records."""
    workflow, history = context.workflow, context.history
    order = history.order if history is not None else ()
    keys = tuple(entry.key for entry in order if not entry.key.startswith(RESERVED))
    from ..workflows.migration import MigrationInfo  # noqa: PLC0415 - needed only for a changed definition

    info = MigrationInfo(context.id, old.version, old.fingerprint, old.definition, keys)
    fits = new_data(SupersededData, act="migrate", version=workflow.version, fingerprint=workflow.fingerprint)
    data: Data = {**fits, "from": old.version, **definition_of(workflow)}
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
    except Exception as error:  # noqa: BLE001 - a failure of the user's code sets the run aside
        problem = f"migrate= of workflow {workflow.name!r} failed for version {old.version!r}: {type(error).__name__}: "
        return Objection("MigrationFailed", f"{problem}{error}", "rebuild")


def _asked(workflow: Workflow[..., Any], info: MigrationInfo) -> Any:
    return workflow.migrate(info) if workflow.migrate is not None else None


async def _moved(context: RunDriver, graph: Graph, info: MigrationInfo) -> Record:
    """Return the whole state from which a graph's run goes on under its new definition; nothing earlier is replayed."""
    from .graph.stored import position_at  # noqa: PLC0415 - rarely needed

    graph.close()
    position = await position_at(context.host, context.run)
    _check_between_steps(context, position)
    answer = _asked(graph, replace(info, state=position.state(graph.trees, context.id), next=position.at))
    state, at = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if state is not None:
        if graph.schema is not None:
            state = graph.schema.plain(state)
        if not isinstance(state, Mapping):
            raise TypeError(f"it must return the new state, (state, next step) or None, got {answer!r}")
        where = f"the migrated state of run {context.id!r}"
        if graph.schema is not None:
            state = graph.schema.first(state, where)
        old = position.levels.get("", {})
        position.levels = {**position.levels, "": graph.trees.lift(dict(state), old, where, careful=True)}
    position.at = position.at if at is None else at
    last = position.trail[-1] if position.trail else graph.entry_name
    for name in (last,) if position.at is None else (position.at,) if position.at else ():
        if name not in graph.nodes:
            raise KeyError(f"graph {graph.name!r} has no step {name!r}; return (state, next step) with an existing one")
    text = position.text(context.facts())
    context.host.redaction.check(text, context.id, "migrated state of run")
    record = Record(context.id, Kind.STATE.value, worker=context.worker, trigger="recovery")
    record.value = msgspec.Raw(text)
    return record


def _check_between_steps(context: RunDriver, position: Position) -> None:
    """Raise an error unless the run is between two steps, because a new beginning drops work in progress."""
    if context.marks:
        raise ValueError(f"step {min(context.marks)} may or may not have happened; resolve it first")
    for entry in context.history.order if context.history is not None else ():
        if entry.seq > position.seq and "/" in entry.key:
            raise ValueError(
                f"the run is inside {entry.key.partition('#')[0]!r}, and {entry.key}, which is done, would be "
                "repeated; let the old version finish it, or rewind the run to before it"
            )


def _renames(context: RunDriver, answer: Any) -> dict[str, str]:
    """Check and return the map of old to new keys: each old key must be recorded, and no record may be hidden."""
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        raise TypeError(f"it must return {{old key: new key}} or None, got {answer!r}")
    entries = context.history.entries if context.history is not None else {}
    renames = {str(old): str(new) for old, new in answer.items()}
    for old, new in renames.items():
        entry = entries.get(old)
        if entry is None and old not in context.tried and old not in context.marks:
            raise KeyError(f"the run has not recorded {old!r}; it has {', '.join(entries) or 'nothing'}")
        if entry is not None and (entry.kind in ABOUT_CHILD or entry.child):
            raise ValueError(f"{old!r} belongs to a child run, which sends its outcome under that name")
        if old.rpartition("/")[0] != new.rpartition("/")[0] or "#" not in new.rpartition("/")[2]:
            raise ValueError(
                f"{old!r} cannot become {new!r}: a key must be a name and a count, as in 'fetch#1', in the same branch"
            )
        if new in entries and new not in renames:
            raise ValueError(f"{old!r} cannot become {new!r}, which is recorded too")
    if len(set(renames.values())) < len(renames):
        raise ValueError("two recorded steps would get the same key")
    return renames


def accepted(context: RunDriver) -> list[Record]:
    """Return the record that lets a run go on under a changed definition as it is."""
    workflow = context.workflow
    fits = new_data(SupersededData, act="migrate", version=workflow.version, fingerprint=workflow.fingerprint)
    data: Data = {**fits, "from": context.run.version, **definition_of(workflow)}
    record = Record(context.id, Kind.SUPERSEDED.value, worker=context.worker, trigger="recovery", data=data)
    if workflow.carries_state:
        record.value = msgspec.Raw(b"{}")
    return [record]


async def write_first(context: RunDriver, records: Sequence[Record], sends: Sequence[Send] = ()) -> bool:
    """Make records durable before any code is called, as no progress. Return False if the lease is lost."""
    host = context.host
    rows: list[Row] = []
    checksum, claimed = context.checksum, context.claimed
    for record in records:
        record.finished_at = context.time()
        record.claimed, claimed = claimed, None
        row, checksum = seal(record, context.seq + len(rows) + 1, checksum, context.cipher)
        rows.append(row)
    change = Advance(context.id, context.worker, context.epoch, context.seq, rows=rows, checksum=checksum)
    change.progress, change.sends = False, list(sends)
    answer = await host.journal.write(change)
    if answer.verdict is not Verdict.DONE:
        return False
    context.migrated(rows[-1].seq, checksum)
    return True
