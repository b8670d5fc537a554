"""The pages of agents, topics and channels: who performs tasks, and what runs tell each other and people."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as segment

from ...policies import health
from ...views import plain, wording
from .fleet import act
from .table import Look, Shown, page

if TYPE_CHECKING:
    from ...engine.agents import AgentInfo
    from ...engine.channels import ChannelInfo

#: Newest messages on the page of a topic.
MOST_MESSAGES = 20

#: The look and the sign of each status of an agent.
_LOOKS = {
    "healthy": ("s-healthy", "completed"),
    "degraded": ("s-degraded", "warning"),
    "unhealthy": ("s-unhealthy", "failed"),
    "draining": ("s-paused", "paused"),
}


async def _agent(look: Look, info: AgentInfo) -> dict[str, Any]:
    shape, sign = _LOOKS.get(info.status, ("s-dead", "crash"))
    more = {"look": shape, "sign": sign, "living": sum(one.alive for one in info.hosts)}
    return await look.redacted({**plain.agent_data(info), **more})


@page("/agents")
async def list_agents(look: Look) -> Shown:
    """Show all agents with their health."""
    return Shown("agents.html", {"agents": [await _agent(look, one) for one in await look.engine.agents.list()]})


_WORDS = {
    "healthy": "It gets tasks.",
    "degraded": "It gets tasks, after healthier agents.",
    "unhealthy": "It gets no tasks until it is better.",
    "offline": "It has no living host, so it gets no tasks.",
    "draining": "It gets no more tasks; its current ones go on.",
    "refused": "An older host has its name, and it may have only one.",
}


@page("/agents/{name}")
async def show_agent(look: Look) -> Shown:
    """Show one agent: its health with its parts, its load, its hosts and their records."""
    info = await look.engine.agents.get(look.path["name"])
    path, word = f"/agents/{segment(info.name, safe='')}", quote(info.name)
    acts = [
        act(
            "Probe now",
            f"{path}/probe",
            reason=False,
            text="Its hosts probe it with their next heartbeat; the answer comes within seconds.",
            command=f"keepstep agents probe {word}",
            done="The agent was probed",
        )
    ]
    if info.status == "draining" or any(one.is_draining for one in info.hosts):
        command = f"keepstep agents resume {word}[ --reason {{reason}}]"
        text = "It gets tasks again, on all its hosts."
        acts.append(act("Resume", f"{path}/resume", role="admin", text=text, command=command, main=True))
    if info.status != "draining":
        where: dict[str, Any] = {"name": "worker", "label": "Where", "type": "select", "value": ""}
        where |= {"options": [["", "on all hosts"], *([one.worker, f"on {one.worker} only"] for one in info.hosts)]}
        command = f"keepstep agents drain {word}[ --worker {{worker}}][ --reason {{reason}}]"
        text = "It gets no more tasks; its current ones go on."
        acts.append(
            act("Drain", f"{path}/drain", role="admin", text=text, fields=[where], command=command, danger=True)
        )
    data = {"one": await _agent(look, info), "acts": acts, "words": _WORDS.get(info.status, ""), "parts": _parts(info)}
    return Shown("agent.html", data)


def _parts(info: AgentInfo) -> list[tuple[str, str, float]]:
    """Return the parts of the score: the name, what the host tells, and the points that it has cost."""
    points = dict(info.health.parts)
    if "no living host" in points or not info.hosts:
        return [("no living host", "all of its hosts are gone", points.get("no living host", 100.0))]
    host = max(
        (one for one in info.hosts if one.alive), key=lambda one: not one.agent.refused_by, default=info.hosts[0]
    )
    record = host.agent.record
    mean = (
        "no task was measured yet" if record.mean_seconds is None else f"{wording.duration(record.mean_seconds)} a task"
    )
    rate = "too few results yet" if record.success_rate is None else f"{record.success_rate:.0%} of {record.results}"
    return [
        ("slow", f"{mean}; slow from {wording.duration(host.agent.slow_seconds)}", points.get("slow", 0.0)),
        (
            "success rate",
            f"{rate}; below {health.LEAST_SUCCESS:.0%} each percent costs one",
            points.get("failures", 0.0),
        ),
        (
            "failures in a row",
            f"{record.failures_in_a_row}; from {health.FAILURES_IN_A_ROW} on they cost {health.FOR_FAILURES:g}",
            points.get("failures in a row", 0.0),
        ),
        (
            "unseen",
            f"seen {wording.ago(host.last_seen_at)}; {health.UNSEEN_SECONDS:g} s cost {health.FOR_UNSEEN:g}",
            points.get("unseen", 0.0),
        ),
    ]


# -- topics and channels -----------------------------------------------------------------------------------------------


def _publish(topic: str) -> dict[str, Any]:
    fields: list[dict[str, Any]] = [
        {"name": "value", "label": "Message", "type": "json", "required": True, "value": {}}
    ]
    return act(
        "Publish",
        f"/topics/{segment(topic, safe='')}/publish",
        text="Every subscriber reads it.",
        reason=False,
        main=True,
        fields=fields,
        command=f"keepstep topics publish {quote(topic)} {{value}}",
        done="The message is published",
    )


async def _channel(look: Look, info: ChannelInfo) -> dict[str, Any]:
    test = act(
        "Test",
        f"/channels/{segment(info.name, safe='')}/test",
        text="Send it a notice, which is delivered like any other.",
        reason=False,
        fields=[{"name": "text", "label": "Text", "value": "this is a test"}],
        command=f"keepstep channels test {quote(info.name)}[ {{text}}]",
        done="The notice is on its way",
    )
    return {**await look.redacted(plain.channel_data(info)), "act": test}


@page("/messages")
async def list_messages(look: Look) -> Shown:
    """Show topics and channels."""
    topics = [await look.redacted(plain.topic_data(one)) for one in await look.engine.topics.list()]
    channels = [await _channel(look, one) for one in await look.engine.channels.list()]
    return Shown("messages.html", {"topics": topics, "channels": channels})


@page("/messages/{name}")
async def show_topic(look: Look) -> Shown:
    """Show one topic: its subscribers, the publishers that wait, and its newest messages."""
    topics, name = look.engine.topics, look.path["name"]
    info = await topics.get(name)
    one = await look.redacted(plain.topic_data(info, await topics.recent_raw(name, MOST_MESSAGES)))
    return Shown("topic.html", {"one": one, "acts": [_publish(name)]})
