"""What an engine offers for the care of its store, while it drives runs."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

import keepstep as ks
from keepstep.stores.memory import MemoryStore
from tests.care.stored import TOTAL, contents, driven, tampered


def test_a_store_is_looked_after_while_runs_go_on(store, tmp_path):
    tampered(store, "done", rows=lambda rows: [*rows[:-1]], status=ks.Status.WAITING, checksum="x")
    archive, aside = str(tmp_path / "runs.jsonl.gz"), str(tmp_path / "aside.jsonl")

    async def look_after(engine):
        care = engine.care
        going = await engine.start(TOTAL, *range(20), run_id="going")
        found = await care.verify()
        assert list(found.damaged) == ["done"]
        assert (await care.verify("neighbour")).sound
        assert await going.result() == 190
        assert await care.repair() == []
        assert (await care.assess("done")).repeats == ["add#3"]
        await care.accept_loss("done", aside, "a test")
        assert (await care.verify()).sound
        assert (await care.export(archive, status=frozenset({ks.Status.COMPLETED}))).whole
        other = MemoryStore()
        assert (await care.copy_to(other, "neighbour")).written == 1
        assert (await care.purge(before=timedelta(days=1))).removed == 0
        assert (await care.purge(status="failed", dry_run=True)).removed == 1
        assert (await care.retain(ks.Retain(days=0, count=0))).removed == 4
        with pytest.raises(ks.RunNotFound):
            await engine.get("neighbour")
        assert (await care.load(archive)).written == 3
        await care.erase("neighbour")
        with pytest.raises(ks.DefinitionError, match="time zone"):
            await care.purge(before=datetime(2026, 1, 1))  # noqa: DTZ001 - that is what is refused
        return [run.id for run in (await engine.list(limit=100)).runs]

    left = driven(store, look_after)
    assert "neighbour" not in left
    assert {"done", "waits", "going"} <= set(left)
    assert len(left) == len(contents()) - 1


def test_a_closed_engine_takes_care_of_nothing(store):
    engine = driven(store, keep)
    with pytest.raises(ks.DefinitionError, match="closed"):
        _ = engine.care


async def keep(engine):
    return engine


def test_blocking_code_looks_after_a_store_too(store):
    with ks.open(store, workflows=[TOTAL], worker=False) as engine:
        assert engine.care.verify().sound
        assert engine.care.purge(dry_run=True).removed == 4
        with pytest.raises(ks.RunNotFound):
            engine.care.erase("nobody")
        with pytest.raises(AttributeError):
            engine.care.burn()
