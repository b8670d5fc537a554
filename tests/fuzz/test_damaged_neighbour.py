"""A run whose head is damaged: a commit in which it has a part writes the others."""

from __future__ import annotations

import asyncio

import apsw
import pytest

import keepstep as ks
from keepstep.errors import CheckpointCorrupt
from keepstep.workflows.definition import Workflow


async def patient() -> object:
    return await ks.wait_for("answer")


PATIENT = Workflow(patient, name="fuzz patient")


@pytest.mark.parametrize(
    "column, value", [("status", "flying"), ("status", b"\xff"), ("status", 1e300), ("wakes", "{"), ("wakes", '["a')]
)
def test_what_is_sent_beside_a_signal_to_a_damaged_run_arrives(tmp_path, column, value):
    path = tmp_path / "runs.db"

    async def main() -> None:
        async with ks.open(path, workflows=[PATIENT], worker=False) as engine:
            for name in ("damaged", "well"):
                await engine.start(PATIENT, run_id=name)
            damage = apsw.Connection(str(path))
            damage.execute(f"UPDATE keepstep_head SET {column} = ? WHERE run = 'damaged'", (value,))
            damage.close()
            sent = [engine.signal(name, "answer", 1) for name in ("well", "damaged", "well")]
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
            assert [type(one) for one in outcomes] == [type(None), CheckpointCorrupt, type(None)]
            page = await engine.list(status="queued")
            assert [run.id for run in page.runs] == ["well"]
            assert page.unreadable == ("damaged",)

    asyncio.run(main())
