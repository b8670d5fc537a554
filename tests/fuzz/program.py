"""Workflows that leave every kind of record, and a store in which they have done so."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import apsw

import keepstep as ks
from keepstep.model import Status
from keepstep.ports import Advance, ClaimRequest
from keepstep.records.record import Record, StoredError, seal
from keepstep.stores.sqlite.store import SQLiteStore

tries: dict[str, int] = {}


@ks.step
async def reserve(item: str) -> dict[str, Any]:
    ks.emit("a token")
    ks.publish("reserved", item)
    return {"item": item, "at": (1, 2)}


@ks.step(retry=ks.Retry(attempts=2, base_seconds=0))
async def pay(item: str) -> int:
    tries[item] = tries.get(item, 0) + 1
    if tries[item] < 2:
        raise ConnectionError("the line is down")
    return tries[item]


@ks.step
async def break_once(item: str) -> str:
    tries[f"break {item}"] = tries.get(f"break {item}", 0) + 1
    if tries[f"break {item}"] < 2:
        raise ValueError("broken")
    return "mended"


@ks.workflow(name="fuzz child")
async def child(item: str) -> str:
    return item


@ks.workflow(name="fuzz everything")
async def everything(item: str, big: str = "") -> list[Any]:
    reserved = await reserve(item)
    paid = await pay(item)
    started = await ks.start(child, item)
    shipped = await started
    ks.publish("paid", paid)
    first = await ks.race(ks.sleep(0), ks.wait_for("never"))
    question = await ks.wait_for("question")
    question.reply("an answer")
    approved = await ks.wait_for("approved", timeout=60)
    await ks.checkpoint()
    return [reserved, shipped, first, approved, ks.patched("new"), big]


@ks.workflow(name="fuzz waiting")
async def waiting(item: str) -> Any:
    return await ks.wait_for("approved")


@ks.workflow(name="fuzz broken")
async def broken(item: str) -> str:
    return await break_once(item)


async def _fill(path: Path) -> None:
    async with ks.open(path, linger_seconds=0.02, power_loss="may_lose_last") as engine:
        done = await engine.start(everything, "done", "x" * 120_000, run_id="done-1", tags={"kind": "fuzz"})
        assert await done.ask("question", 7) == "an answer"
        await done.signal("approved", {"by": "someone"}, id="s-1")
        await done.result()
        for name in ("fail-1", "again-1"):
            handle = await engine.start(broken, name, run_id=name)
            with contextlib.suppress(ks.RunFailed):
                await handle.result()
        await handle.retry("mended")
        await handle.result()
        gone = await engine.start(waiting, "gone", run_id="gone-1")
        await gone.cancel("not wanted")
        paused = await engine.start(waiting, "paused", run_id="paused-1")
        await paused.pause("a moment")
        await engine.start(waiting, "wait", run_id="wait-1", deadline=1e9)
        await engine.start(waiting, "queued", run_id="queued-1", delay=1e6, priority=3)
        for name, status in (("gone-1", "cancelled"), ("paused-1", "paused"), ("wait-1", "waiting")):
            while await (await engine.get(name)).status() != status:
                await engine.changed(0.05)


def _set_aside(path: Path) -> None:
    store = SQLiteStore(path)
    claim = store.claim_runs(ClaimRequest("w-dead", run="queued-1", statuses=frozenset(Status))).claims[0]
    error = StoredError("ReplayMismatch", "the code changed")
    row, checksum = seal(Record("queued-1", "error", outcome="failure", error=error), 1, "")
    aside = Advance("queued-1", "w-dead", claim.lease.epoch, 0, [row], checksum, status=Status.SET_ASIDE, release=True)
    store.commit([aside])
    store.claim_runs(ClaimRequest("w-dead", frozenset({"fuzz child"})))
    store.close()


@cache
def stored() -> bytes:
    """A store, as the bytes of its one file, in which runs have ended, failed, wait, are paused and set aside."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.db"
        asyncio.run(_fill(path))
        _set_aside(path)
        connection = apsw.Connection(str(path))
        connection.execute("VACUUM INTO ?", (f"{folder}/one.db",))
        connection.close()
        return (Path(folder) / "one.db").read_bytes()


@cache
def history(run: str) -> tuple[Any, ...]:
    """The rows of one of these runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.db"
        path.write_bytes(stored())
        store = SQLiteStore(path)
        rows = store.list_checkpoints(run)
        store.close()
        return tuple(rows)
