"""The pages of queues and services: their load, their limits and who has set them."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as segment

from ...model import FINISHED, RunQuery, Status
from ...policies.queue import Limits
from ...policies.service import ServiceLimits
from ...views import plain
from ...views.queues import all_queues, is_served
from .fleet import act, gate_words, limits_rows, with_words
from .table import Look, Shown, page

if TYPE_CHECKING:
    from ...engine.queues import QueueInfo
    from ...engine.services import ServiceInfo

#: Unfinished runs that the page of a queue shows.
MOST_RUNS = 50
_UNFINISHED = frozenset(Status) - FINISHED
_NUMBER = "a number, or none"
_RATE = "COUNT/SECONDS or COUNT/SECONDS/BURST, or none"


def _field(name: str, label: str, help_: str, now: Any) -> dict[str, Any]:
    return {"name": name, "label": label, "type": "text", "help": f"{help_}. Now: {'no limit' if now is None else now}"}


async def _queue(look: Look, info: QueueInfo) -> dict[str, Any]:
    found = {**plain.queue_data(info), **gate_words(info)}
    served = await is_served(look.engine, info.name)
    return await look.redacted({**found, "served": served, "stopped": info.limits.concurrency == 0})


@page("/queues")
async def list_queues(look: Look) -> Shown:
    """Show the queues that have limits, that workers serve, or in which runs wait."""
    infos = await all_queues(look.engine)
    shown = [await _queue(look, one) for one in infos]
    return Shown("queues.html", {"queues": shown, "any_limits": any(one["text"] != "no limit" for one in shown)})


@page("/queues/{name}")
async def show_queue(look: Look) -> Shown:
    """Show one queue: its load, limits, keys, unfinished runs and last changes."""
    engine, name = look.engine, look.path["name"]
    info = await engine.queues.get(name)
    found = await _queue(look, info)
    query = RunQuery(queue=name, status=_UNFINISHED, limit=MOST_RUNS)
    runs = await engine.call(engine.store.list_runs, query)
    held = [run for run in runs.runs if run.key and run.status is not Status.QUEUED]
    holders = {key: [run for run in held if run.key == key][:5] for key in found["keys"]}
    limits, word = info.limits, quote(name)
    options = (
        ("concurrency", "Concurrency", f"Runs that workers drive at once: {_NUMBER}; 0 stops the queue"),
        ("per_worker", "Per worker", f"Runs that one worker drives at once: {_NUMBER}"),
        ("per_key", "Per key", f"Runs of one key that have begun and not ended: {_NUMBER}"),
        ("rate", "Rate", f"How often runs begin: {_RATE}"),
        ("max_waiting", "Most waiting", f"Runs that may wait to begin: {_NUMBER}"),
    )
    full: dict[str, Any] = {"name": "when_full", "label": "When full", "type": "select", "value": ""}
    full |= {"options": [["", "as it is"], ["fail", "fail the start"], ["wait", "let the start wait"]]}
    words = "".join(f"[ --{one.replace('_', '-')} {{{one}}}]" for one in (*(one for one, *_ in options), "when_full"))
    acts = [
        act(
            "Set limits",
            f"/queues/{segment(name, safe='')}/set",
            role="admin",
            main=True,
            text="Limits that are left empty stay as they are. What is set here wins over the code until it is reset.",
            into="limits",
            fields=[*(_field(*one, getattr(limits, one[0])) for one in options), full],
            command=f"keepstep queues set {word}{words}[ --reason {{reason}}]",
            done="The limits are set",
        )
    ]
    if info.limits.concurrency != 0:
        acts.append(
            act(
                "Stop",
                f"/queues/{segment(name, safe='')}/set",
                role="admin",
                text="No run of this queue is driven until its concurrency is set again. Steps that run go on.",
                body={"limits": {"concurrency": 0}},
                command=f"keepstep queues set {word} --concurrency 0[ --reason {{reason}}]",
                danger=True,
                done="The queue is stopped",
            )
        )
    if info.is_set:
        acts.append(_reset("queues", name))
    data = {
        "one": {**found, "log": await look.redacted(with_words(found["log"], Limits))},
        "limits": limits_rows([*(one for one, *_ in options), "when_full"], info.limits, info.declared),
        "acts": acts,
        "runs": runs.runs,
        "more": runs.next is not None,
        "holders": holders,
    }
    return Shown("queue.html", data)


def _reset(kind: str, name: str) -> dict[str, Any]:
    return act(
        "Reset",
        f"/{kind}/{segment(name, safe='')}/reset",
        role="admin",
        text="The limits that code declares hold again.",
        command=f"keepstep {kind} reset {quote(name)}[ --reason {{reason}}]",
        done="The limits of the code hold again",
    )


# -- services ----------------------------------------------------------------------------------------------------------


async def _service(look: Look, info: ServiceInfo) -> dict[str, Any]:
    held, need = sum(one.held for one in info.shares), sum(one.need for one in info.shares)
    load = {"held": held, "waiting": max(need - held, 0)}
    return await look.redacted({**plain.service_data(info), **gate_words(info), **load})


@page("/services")
async def list_services(look: Look) -> Shown:
    """Show the services that code has declared or a person has changed."""
    return Shown(
        "services.html", {"services": [await _service(look, one) for one in await look.engine.services.list()]}
    )


_BREAKERS = {
    "closed": "Attempts begin.",
    "open": "No attempt begins.",
    "half-open": "A few attempts begin as probes.",
}


@page("/services/{name}")
async def show_service(look: Look) -> Shown:
    """Show one service: its breaker, limits, shares, waiting runs and last changes."""
    name = look.path["name"]
    info = await look.engine.services.get(name)
    one = await _service(look, info)
    path, word = f"/services/{segment(name, safe='')}", quote(name)
    options = (
        ("concurrency", "Concurrency", f"Attempts whose bodies run at once: {_NUMBER}"),
        ("rate", "Rate", f"How often attempts begin: {_RATE}"),
        ("spend", "Spend", f"How much attempts may spend: {_RATE}"),
        ("breaker", "Breaker", "FAILURES/WITHIN/OPEN seconds, default, or none"),
    )
    open_: dict[str, Any] = {"name": "when_open", "label": "While the breaker is open", "type": "select", "value": ""}
    open_ |= {"options": [["", "as it is"], ["wait", "attempts wait"], ["fail", "attempts fail"]]}
    words = "".join(
        f"[ --{name.replace('_', '-')} {{{name}}}]" for name in (*(one for one, *_ in options), "when_open")
    )
    acts = []
    breaker, words_now = info.breaker, ""
    if breaker is not None:
        words_now = _BREAKERS[breaker.status] + (" A person holds it." if breaker.by_hand else "")
        for label, does, verb in (
            ("Open breaker", "No attempt begins until it is closed or reset by hand.", "open"),
            ("Close breaker", "Attempts begin, whatever fails, until it is opened or reset by hand.", "close"),
        ):
            if not (breaker.by_hand and breaker.status.startswith(verb)):
                command = f"keepstep services {verb} {word}[ --reason {{reason}}]"
                acts.append(
                    act(label, f"{path}/{verb}", role="admin", text=does, command=command, danger=verb == "open")
                )
    acts.append(
        act(
            "Set limits",
            f"{path}/set",
            role="admin",
            main=True,
            text="Limits that are left empty stay as they are. What is set here wins over the code until it is reset.",
            into="limits",
            fields=[*(_field(*one, getattr(info.limits, one[0])) for one in options), open_],
            command=f"keepstep services set {word}{words}[ --reason {{reason}}]",
            done="The limits are set",
        )
    )
    if info.is_set or (breaker is not None and breaker.by_hand):
        acts.append(_reset("services", name))
    data = {
        "one": {**one, "log": await look.redacted(with_words(one["log"], ServiceLimits))},
        "words": words_now,
        "limits": limits_rows([*(one for one, *_ in options), "when_open"], info.limits, info.declared),
        "acts": acts,
    }
    return Shown("service.html", data)
