"""Runs whose records say what no record should: each is set aside or goes on, and none stops its worker."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec

import keepstep as ks
from keepstep.model import Run, RunQuery, Status
from keepstep.ports import Create
from keepstep.stores.memory import MemoryStore

from . import program
from .targets import NOW, resealed

HOSTILE = [
    None,
    True,
    -1,
    2**63,
    1e300,
    "",
    "x",
    "\x00",
    "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00+14:00",
    "2026-01-01T00:00:00",
    [],
    [1],
    [[]],
    {},
    {"$": "ask"},
    {"$": "ask", "v": [1]},
    {"$": "os.system", "v": "true"},
    {"signal": [], "child": {}, "choice": "x", "seqs": 1},
    {"signal": 10**30, "seqs": ["x"]},
    {"child": "nobody"},
    {"child": "nobody", "renew": True},
    {"beyond": 10**30, "act": "migrate", "renames": {"reserve#1": "x"}},
    {"beyond": -1, "renames": {"reserve#1": 1}},
    {"beyond": "x", "definition": 1, "fingerprint": []},
]


@ks.workflow(name="fuzz neighbour")
async def neighbour() -> str:
    return await program.reserve("beside") and "well"


def hostile_histories():
    """The history of a run that is nearly done, each time with one field of one record changed."""
    rows = program.history("done-1")[:-1]
    whole = [msgspec.json.decode(row.record) for row in rows]
    for place, record in enumerate(whole):
        for start, name in enumerate(record):
            for value in HOSTILE[(start + place) % 5 :: 5]:
                changed = [*whole]
                changed[place] = {**record, name: value}
                yield [msgspec.json.encode(one) for one in changed]


def hostile_inputs():
    yield from (
        b"",
        b"null",
        b"[]",
        b"[1,2]",
        b"[[],{}]",
        b"[[1,2,3],{}]",
        b"{",
        b'[[],{"$":"tuple","v":[]}]',
        b"\xff",
        b"[" * 100_000,
    )


def filled() -> tuple[MemoryStore, int]:
    store = MemoryStore()
    base = Run("r", "fuzz everything", Status.QUEUED, NOW, fingerprint="function:fuzz everything:1", seed="s")
    number = 0
    for lines in hostile_histories():
        run = replace(base, id=f"h-{number}", input=b'[["done","x"],{}]')
        store.commit([resealed(lines, run)])
        number += 1
    for text in hostile_inputs():
        store.commit([Create(replace(base, id=f"h-{number}", input=text))])
        number += 1
    return store, number


async def drive(store: MemoryStore) -> list[Run]:
    busy = frozenset({Status.QUEUED, Status.RUNNING, Status.RECOVERING})
    workflows = [program.everything, program.child, neighbour]
    async with ks.open(store, workflows=workflows, linger_seconds=0.01, max_runs=100_000) as engine:
        beside = await engine.start(neighbour)
        assert await beside.result(60) == "well"
        while (await engine.list(status=busy, limit=1)).runs:
            await engine.changed(0.1)
        after = await engine.start(neighbour)
        assert await after.result(60) == "well"
    return list(store.list_runs(RunQuery(workflow="fuzz everything", limit=10**6)).runs)


def test_no_history_stops_a_worker(caplog):
    store, number = filled()
    with caplog.at_level(logging.ERROR, logger="keepstep"):
        runs = asyncio.run(drive(store))
    assert len(runs) == number > 500
    ends = {Status.COMPLETED, Status.FAILED, Status.SET_ASIDE, Status.WAITING, Status.CANCELLED}
    assert {run.status for run in runs} <= ends
    assert {Status.COMPLETED, Status.SET_ASIDE} <= {run.status for run in runs}
    surprises = [one for one in caplog.records if one.exc_info or "background" in one.message]
    assert not surprises, caplog.text[-3000:]
