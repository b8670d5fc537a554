"""A run whose history is damaged is not gone back in, forked, edited or told of as if it were whole, in any store.

Nothing follows the newest record that would name it; only the head does, and everybody who reads must ask it.
"""

from __future__ import annotations

import asyncio

import keepstep as ks
from keepstep.errors import CheckpointCorrupt
from keepstep.ports import Row
from tests.care.stored import WORKFLOWS, everything, tampered


def edited(place):
    """One record says something else, in a way that no reader of it alone would notice."""

    def damage(rows):
        row = rows[place]
        text = row.record.replace(b'"words":[0', b'"words":[7').replace(b'"yes":true', b'"yes":null')
        assert text != row.record
        return [Row(one.seq, one.kind, text, one.body) if one is row else one for one in rows]

    return damage


TELLING = {
    "diff": lambda engine, run: run.diff(),
    "diff from near the end": lambda engine, run: run.diff(2),
    "replay": lambda engine, run: run.replay(),
    "checkpoints": lambda engine, run: run.checkpoints(),
    "spent": lambda engine, run: run.spent(),
    "audit": lambda engine, run: run.audit(),
}
CHANGING = {
    "rewind": lambda engine, run: run.rewind(1),
    "fork": lambda engine, run: engine.fork(run.id, run_id="fork"),
    "fork from the middle": lambda engine, run: engine.fork(run.id, 2, run_id="fork"),
}
#: What only a graph's run has; all but the last begin at its newest consolidated state.
STATE = {
    "state": lambda engine, run: run.state(),
    "edit": lambda engine, run: run.edit({"words": [0, 1]}),
    "consolidate": lambda engine, run: run.consolidate(),
    "fork with another state": lambda engine, run: engine.fork(run.id, run_id="fork", state={"words": [0, 1]}),
}


def acted(store, run_id, acts):
    """What each act gave that was not refused; nothing was written by one that was. And whether the run can go on."""

    async def main():
        given = {}
        async with ks.Engine(store, workflows=WORKFLOWS, worker=False) as engine:
            run = await engine.get(run_id)
            for name, act in acts.items():
                try:
                    given[name] = await act(engine, run)
                except CheckpointCorrupt as error:
                    told.append(str(error))
            return given, await run.info()

    before, told = everything(store), []
    given, info = asyncio.run(main())
    assert everything(store) == before
    assert all(f"'{run_id}'" in one for one in told)
    return given, info


def test_a_newest_record_that_was_edited_is_found_by_all(store):
    tampered(store, "waits", rows=edited(-1))
    given, info = acted(store, "waits", {**TELLING, **CHANGING})
    assert given == {}
    assert "differs from the one that its head names" in info.why
    assert not info.recoverable


def test_missing_newest_record_is_found_by_all(store, monkeypatch):
    there = store.list_checkpoints
    monkeypatch.setattr(
        store, "list_checkpoints", lambda *words, **more: [r for r in there(*words, **more) if r.seq < 3]
    )
    given, info = acted(store, "waits", {**TELLING, **CHANGING})
    assert given == {}
    assert not info.recoverable


def test_edited_record_before_a_consolidated_state_is_found(store):
    tampered(store, "graph", rows=edited(1))
    acts = {**TELLING, **CHANGING, "state": STATE["state"], "fork it": STATE["fork with another state"]}
    given, info = acted(store, "graph", acts)
    assert given == {"state": {"words": [0, 1, 2, 3]}}  # which begins after it, as a worker does
    assert info.recoverable
    assert "part of its history is lost" in info.why


def test_edited_consolidated_state_is_refused_and_the_run_replays(store):
    tampered(store, "graph", rows=edited(-1))
    given, info = acted(store, "graph", {**TELLING, **CHANGING, **STATE})
    assert list(given) == ["replay"]
    assert given["replay"].fits
    assert info.recoverable
    assert "part of its history is lost" in info.why


def test_undamaged_run_answers_every_reader(store):
    """Or the tests above would hold for want of a run to tell of."""
    assert list(acted(store, "waits", TELLING)[0]) == list(TELLING)
    assert list(acted(store, "graph", {**TELLING, "state": STATE["state"]})[0]) == [*TELLING, "state"]
