"""The pages of workers and of the doctor: who drives runs, and whether each run can go on."""

from __future__ import annotations

from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as segment

import msgspec

from ...errors import RunNotFound
from ...model import Status
from ...model.agent import agent_of
from ...model.keepers import is_reserved
from ...records.counts import Rates, counts_in
from ...views import plain, wording
from ...views.doctor import commands_in, examined
from .fleet import act
from .table import Look, Moved, Shown, page

if TYPE_CHECKING:
    from ...model import WorkerInfo


async def _worker(look: Look, worker: WorkerInfo) -> dict[str, Any]:
    counts = counts_in(worker.progress)
    used, alive = counts.resources, worker.alive
    shown = {
        **plain.worker_data(worker),
        **plain.counts_data(counts),
        "rates": _rates(counts.rates),
        "memory": f"{used.resident_bytes / 2**20:,.0f} MB" if used.resident_bytes and alive else "–",
        "processor": f"{100 * counts.rates.processors:.0f} %" if used.processor_seconds and alive else "–",
        "processor_time": f"{wording.duration(used.processor_seconds)} in all" if used.processor_seconds else "",
        "threads": used.threads,
        "lag": wording.duration(used.lag_seconds) if alive else "–",
        "damage": worker.damage,
        "workflows": [one for one in worker.known if not is_reserved(one) and agent_of(one) is None],
        "pins": dict(worker.pins),
    }
    return await look.redacted(shown)


def _rates(rates: Rates) -> dict[str, float]:
    return {"runs": rates.runs, "steps": rates.steps, "failures": rates.failures}


@page("/workers")
async def list_workers(look: Look) -> Shown:
    """Show the workers that are alive or hold a run."""
    found = [await _worker(look, one) for one in await look.engine.workers()]
    living = [one for one in found if one["alive"]]
    data = {
        "workers": sorted(found, key=lambda one: (one["alive"], one["id"])),
        "living": len(living),
        "dead": len(found) - len(living),
        "leases": sum(one["leases"] for one in found),
        "rates": {name: sum(one["rates"][name] for one in living) for name in ("runs", "steps", "failures")},
    }
    return Shown("workers.html", data)


@page("/workers/{worker}")
async def show_worker(look: Look) -> Shown:
    """Show one worker: what it does, what it uses, and what it knows."""
    engine, name = look.engine, look.path["worker"]
    workers = await engine.call(partial(engine.store.list_workers, gone=True))
    worker = next((one for one in workers if one.id == name), None)
    if worker is None:
        raise RunNotFound(f"no worker {name!r} has been here lately", name)
    words = "It claims runs and drives them."
    if not worker.alive:
        words = (
            f"Its lease has ended; living workers take over its {worker.leases} runs."
            if worker.leases
            else "It is gone."
        )
    elif worker.drain_at is not None:
        words = "It claims no more runs, and ends when it has none."
    acts = []
    if worker.claims:
        acts.append(
            act(
                "Drain",
                f"/workers/{segment(name, safe='')}/drain",
                role="admin",
                danger=True,
                text="It claims no more runs, finishes the steps that run, and ends.",
                command=f"keepstep drain {quote(name)}",
                done="The worker drains",
            )
        )
    slow = sorted(counts_in(worker.progress).slow.items(), key=lambda one: -one[1].seconds)
    return Shown("worker.html", {"one": await _worker(look, worker), "acts": acts, "words": words, "slow": slow})


class Check(msgspec.Struct, forbid_unknown_fields=True):
    """Whether to examine the store again."""

    check: bool = False


@page("/doctor", query=Check)
async def show_doctor(look: Look) -> Shown | Moved:
    """Show the last examination of the store, and make one if there is none."""
    found = await examined(look.engine, again=look.query.check)
    if look.query.check:
        return Moved("/doctor")
    report = found.report
    data: dict[str, Any] = {"at": found.at, "seconds": found.seconds, "began": found.began_at, "findings": []}
    if report is not None:
        findings = [{**plain.finding_data(one), "commands": commands_in(one)} for one in report.findings]
        runs = {status.value: count for status, count in report.runs.items() if count}
        data |= {
            "findings": await look.redacted(findings),
            "severities": [
                (name, word if number != 1 else word.removesuffix("s"), number)
                for name, word in (("error", "errors"), ("warning", "warnings"), ("note", "notes"))
                if (number := sum(one["severity"] == name for one in findings))
            ],
            "runs": runs,
            "unfinished": sum(count for status, count in report.runs.items() if status in Status),
            "living": sum(one.alive for one in report.workers),
        }
    return Shown("doctor.html", data)
