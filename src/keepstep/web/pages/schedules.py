"""The pages of schedules: when each ticks, what its ticks have started, and how it stands."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as segment

from ...model import RunQuery
from ...views import plain, wording
from .fleet import act
from .table import Look, Shown, page

if TYPE_CHECKING:
    from ...engine.schedules import ScheduleInfo

#: Ticks in advance on the page of a schedule.
NEXT_TICKS = 8


async def _schedule(look: Look, info: ScheduleInfo) -> dict[str, Any]:
    standing = wording.schedule_standing(info)
    looks = {"active": ("s-healthy", "completed"), "paused": ("s-paused", "paused")}
    look_, sign = looks.get(standing, ("s-waiting", "warning"))
    if not info.attended:
        look_ = "s-failed"
    words = {"text": str(info.when), "standing": standing, "look": look_, "sign": sign, "problem": _problem(info)}
    return await look.redacted({**plain.schedule_data(info), **words})


def _problem(info: ScheduleInfo) -> str:
    if not info.attended:
        whose = "declares it" if info.declared else f"knows workflow {info.workflow!r}"
        return f"No living worker {whose}, so it makes no ticks. Start one: keepstep worker FILE.py"
    if info.waiting and info.open:
        return f"{len(info.waiting)} of its ticks wait until run {info.open[0]} ends."
    return ""


@page("/schedules")
async def list_schedules(look: Look) -> Shown:
    """Show all schedules."""
    return Shown(
        "schedules.html", {"schedules": [await _schedule(look, one) for one in await look.engine.schedules.list()]}
    )


@page("/schedules/{name}")
async def show_schedule(look: Look) -> Shown:
    """Show one schedule: its rules, its next and last ticks, and its changes."""
    engine, name = look.engine, look.path["name"]
    info = await engine.schedules.get(name, ticks=NEXT_TICKS)
    one = await _schedule(look, info)
    ids = frozenset(past.run for past in info.recent if past.run is not None)
    runs = (await engine.call(engine.store.list_runs, RunQuery(ids=ids, limit=len(ids)))).runs if ids else ()
    statuses = {run.id: run.status.value for run in runs}
    for past in one["recent"]:
        past["status"] = statuses.get(past["run"], "")
    when = info.when
    rules = [("Overlap", str(when.overlap)), ("Missed ticks", str(when.catch_up))]
    rules += [("Jitter", f"up to {wording.duration(when.jitter)}")] if when.jitter else []
    rules += [("Until", plain.iso(when.until) or "")] if when.until else []
    zone = getattr(when, "tz", None)
    data = {"one": one, "rules": rules, "zone": str(zone) if zone and str(zone) != "UTC" else "UTC"}
    return Shown("schedule.html", {**data, "acts": _acts(info)})


def _acts(info: ScheduleInfo) -> list[dict[str, Any]]:
    path, word = f"/schedules/{segment(info.name, safe='')}", quote(info.name)
    found = [
        act(
            "Trigger now",
            f"{path}/trigger",
            main=True,
            text="Start a run now. Unless runs may overlap, it starts when the runs before it have ended.",
            command=f"keepstep schedules trigger {word}[ --reason {{reason}}]",
            done="The schedule starts a run",
        )
    ]
    if info.paused:
        text = "It goes on. Its rule for missed ticks decides about those that it has missed."
        command = f"keepstep schedules resume {word}[ --reason {{reason}}]"
        found.append(act("Resume", f"{path}/resume", text=text, command=command, done="The schedule goes on"))
    else:
        text = "It makes no ticks until it is resumed. Its runs go on."
        command = f"keepstep schedules pause {word}[ --reason {{reason}}]"
        found.append(act("Pause", f"{path}/pause", text=text, command=command, done="The schedule is paused"))
    now = datetime.now(UTC).replace(microsecond=0)
    found.append(
        act(
            "Backfill",
            f"{path}/backfill",
            role="admin",
            text="Start the runs of past ticks that do not exist, the newest 1,000 at most.",
            fields=[
                {
                    "name": "first",
                    "label": "First tick from",
                    "required": True,
                    "value": plain.iso(now - timedelta(days=1)),
                },
                {"name": "last", "label": "Last tick until", "required": True, "value": plain.iso(now)},
            ],
            command=f"keepstep schedules backfill {word} --from {{first}} --to {{last}}[ --reason {{reason}}]",
            done="The past ticks start their runs",
        )
    )
    return found
