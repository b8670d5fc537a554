"""Stores with runs in them, and ways to damage a run through the port, which works on every store."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import cache

import keepstep as ks
from keepstep.model import RunQuery
from keepstep.ports import Create, Verdict
from keepstep.stores.files.store import FilesStore
from keepstep.stores.memory import MemoryStore
from keepstep.stores.open import open_store
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.workflows.definition import Workflow
from tests.postgres import empty_store

#: Every store that is cared for, by how it is opened in a folder: a new one is one line.
STORES = {
    "memory": lambda _folder: MemoryStore(),
    "files": lambda folder: FilesStore(folder / "runs", power_loss="may_lose_last"),
    "sqlite": lambda folder: SQLiteStore(folder / "runs.db", power_loss="may_lose_last"),
    "postgres": lambda folder: open_store(postgres_url(folder)),
}


def postgres_url(folder):
    with empty_store("_target" if folder.name == "target" else "_care") as url:
        return url


# -- runs of every sort ------------------------------------------------------------------------------------------------


@ks.step
async def add(a: int, b: int) -> int:
    return a + b


@ks.step
async def large(size: int) -> str:
    return "x" * size


@ks.step
async def fragile() -> None:
    raise ValueError("broken on purpose")


async def total(*numbers: int) -> int:
    found = 0
    for number in numbers:
        found = await add(found, number)
    return found


async def patient(size: int = 10) -> object:
    text = await large(size)
    answer = await ks.wait_for("answer")
    return [len(text), answer, await ks.wait_for("last")]


async def breaking() -> None:
    await add(1, 1)
    await fragile()


async def parent() -> int:
    child = await ks.start(TOTAL, 1, 2)
    await ks.wait_for("go")
    return await child.result()


TOTAL = Workflow(total, name="care total")
PATIENT = Workflow(patient, name="care patient")
BREAKING = Workflow(breaking, name="care breaking")
PARENT = Workflow(parent, name="care parent")
GRAPH = ks.Graph("care graph")


@GRAPH.step
async def turn(state):
    return {"words": [*state.get("words", ()), len(state.get("words", ()))]}


@GRAPH.step
async def told(state):
    return {"told": [*state["words"], state["last"]]}


GRAPH.wait("gate", signal="last", into="last")
GRAPH.edge("turn", "turn", when=lambda state: len(state["words"]) < 4)
GRAPH.edge("turn", "gate")
GRAPH.edge("gate", "told")
GRAPH.entry("turn")
GRAPH.exit("told")

WORKFLOWS = [TOTAL, PATIENT, BREAKING, PARENT, GRAPH]


def driven(store, act, **options):
    """Do something with an engine that drives runs of a store, and give what it gives."""

    async def main():
        async with ks.Engine(store, workflows=WORKFLOWS, **{"linger_seconds": 0.02, **options}) as engine:
            async with asyncio.timeout(120):
                return await act(engine)

    return asyncio.run(main())


async def parked(engine, run_id):
    handle = await engine.get(run_id)
    while await handle.status() is not ks.Status.WAITING:
        await engine.changed(0.05)


async def heard(engine, run_id):
    handle = await engine.get(run_id)
    while not any(one.kind == "signal received" for one in await handle.checkpoints()):
        await engine.changed(0.05)


async def fill(engine) -> None:
    """Runs that are done, failed, wait with signals, are to come; a parent; and a graph with a consolidated state."""
    await (await engine.start(TOTAL, 1, 2, 3, run_id="done")).result()
    await (await engine.start(TOTAL, 4, run_id="neighbour", tags={"team": "a"})).result()
    for name, size in (("waits", 10), ("large", 150_000)):
        await engine.start(PATIENT, size, run_id=name)
        await parked(engine, name)
        await engine.signal(name, "answer", {"yes": True}, id="one")
        await engine.signal(name, "early", 7)
        await heard(engine, name)
        await parked(engine, name)
    handle = await engine.start(BREAKING, run_id="failed")
    with contextlib.suppress(ks.RunFailed):
        await handle.result()
    await engine.start(TOTAL, 9, run_id="later", delay=3600)
    graph = await engine.start(GRAPH, run_id="graph")
    await parked(engine, "graph")
    await graph.consolidate()
    await engine.start(PARENT, run_id="parent")
    while not [run for run in (await engine.list(parent="parent")).runs if run.status is ks.Status.COMPLETED]:
        await engine.changed(0.05)
    await parked(engine, "parent")
    while (await (await engine.get("parent")).run()).due_at is not None:  # woken by its child's word: it parks again
        await engine.changed(0.05)


@cache
def contents():
    """What such a store holds, made once: every run with its rows and signals."""
    store = MemoryStore()
    driven(store, fill)
    runs = store.list_runs(RunQuery(limit=1000, with_input=True)).runs
    return [(run, store.list_checkpoints(run.id), store.list_signals(run.id)) for run in reversed(runs)]


def filled(store):
    """Put runs of every sort into a store."""
    answers = store.commit([Create(replace(run, worker=None), rows, signals) for run, rows, signals in contents()])
    assert {answer.verdict for answer in answers} == {Verdict.DONE}
    return store


# -- damage ------------------------------------------------------------------------------------------------------------


def tampered(store, run_id, rows=lambda rows: rows, signals=lambda signals: signals, **head):
    """Put a run back otherwise than it was: a store takes what it is given, and finds out when it is read."""
    run = next(run for run in store.list_runs(RunQuery(limit=1000, with_input=True)).runs if run.id == run_id)
    there, sent = list(store.list_checkpoints(run_id)), list(store.list_signals(run_id))
    changed, told = rows(there), signals(sent)
    run = replace(run, **{"seq": len(changed), "signals": len(told), **head})
    assert store.delete_runs([run_id]) == 1
    (answer,) = store.commit([Create(run, changed, told)])
    assert answer.verdict is Verdict.DONE


def everything(store):
    """All that a store holds, run by run."""
    runs = store.list_runs(RunQuery(limit=1000, with_input=True)).runs
    return {run.id: (run, list(store.list_checkpoints(run.id)), list(store.list_signals(run.id))) for run in runs}
