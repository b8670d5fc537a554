"""Every act on a page shows a command line that the command line accepts, and every link leads to a page."""

import asyncio
import html
import json
import re
import shlex
from urllib.parse import urljoin

import click
import httpx
import pytest

import keepstep as ks
from keepstep.cli import group
from keepstep.web import app
from tests.engine.world import until_status

pytestmark = [pytest.mark.one_store, pytest.mark.live_only]

BASE = "http://localhost"


@ks.step(at_most_once=True, timeout=0.05)
async def pay_once():
    await asyncio.sleep(60)


@ks.workflow(name="doubtful")
async def doubtful():
    await pay_once()


@ks.workflow(name="asking_first")
async def asking_first():
    await ks.wait_for("approved")


@ks.workflow(name="failing_first")
async def failing_first():
    raise ks.Permanent("no such account")


def graph():
    made = ks.Graph("drawn")
    made.add(lambda state: {"round": 1}, name="draft")
    made.entry("draft")
    made.exit("draft")
    return made


def declared():
    ks.Channel("ops", webhook="http://127.0.0.1:9/none")

    @ks.agent(capabilities=["write"])
    async def writer(task: str) -> str:
        return task

    @ks.workflow(name="nightly_ticks", schedule=ks.Cron("0 3 * * *"))
    async def nightly_ticks():
        return None

    return [nightly_ticks, doubtful, asking_first, failing_first, graph()], [writer]


async def fill(engine):
    """Make a run in each state in which other acts are offered, and one of everything else."""
    for name, workflow, status in (
        ("doubt", doubtful, "waiting"),
        ("asks", asking_first, "waiting"),
        ("paused", asking_first, "waiting"),
        ("failed", failing_first, "failed"),
    ):
        await until_status(await engine.start(workflow, run_id=name, tags={"team": "a"}), status)
    await (await engine.get("paused")).pause("lunch")
    await until_status(await engine.get("paused"), "paused")
    await (await engine.start("drawn", {}, run_id="drawn")).result()
    await engine.queues.set("mail", concurrency=1)
    await engine.services.set("bank", concurrency=1)
    await engine.topics.publish("news", {"number": 1})


async def crawled(client):
    """Open every page that links lead to: the acts and command lines on them, and addresses that lead nowhere."""
    asked, seen, acts, lines, wrong = [f"{BASE}/"], set(), {}, set(), []
    while asked:
        address = asked.pop()
        if address in seen:
            continue
        seen.add(address)
        answer = await client.get(address)
        if answer.status_code != 200:
            wrong.append((answer.status_code, address))
        for spec in re.findall(r'data-act="([^"]*)"', answer.text):
            found = json.loads(html.unescape(spec))
            acts[found["label"], re.sub(r"\d+", "0", found["command"])] = found
        lines |= {html.unescape(line) for line in re.findall(r'data-copy="([^"]*)"', answer.text)}
        links = (html.unescape(link) for link in re.findall(r'href="([^"]*)"', answer.text))
        full = (urljoin(address, link).partition("#")[0] for link in links if "/static/" not in link)
        asked += [one for one in full if one.startswith(BASE)]
    return acts.values(), lines, wrong, seen


def typed(field):
    """What a person might type into a field of a dialog."""
    match field.get("type"):
        case "select":
            first = field["options"][0]
            return first[0] if isinstance(first, list) else first
        case "json":
            return '{"a": 1}'
        case "checkbox":
            return True
        case _:
            return field.get("value") or "none"


def line_of(act, whole):
    """The command line of an act as `commandOf` in keepstep.js makes it, with all fields or only what is required."""
    values = dict(act.get("given", {}))
    values |= {one["name"]: typed(one) for one in act.get("fields", []) if whole or one.get("required")}
    if whole:
        values["reason"] = "it's why"

    def put(found):
        before, option, after, name = found.groups()
        value = values.get(option or name)
        if value in (None, ""):
            return "" if option else name.upper()
        return (before or "") + ("" if value is True else shlex.quote(str(value))) + (after or "")

    return re.sub(r"\[([^\]{]*)\{(\w+)\}([^\]]*)\]|\{(\w+)\}", put, act["command"])


def parse(line):
    """Let the command line read a line, without doing it."""
    program, *words = shlex.split(line)
    assert program == "keepstep"
    command, context = group, group.make_context("keepstep", words)
    while isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


async def test_acts_show_command_lines_and_links_lead_somewhere(world):
    workflows, agents = declared()
    async with world.engine(workflows=workflows, agents=agents) as engine:
        await fill(engine)
        transport = httpx.ASGITransport(app(engine), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, follow_redirects=True, timeout=30) as client:
            acts, lines, wrong, seen = await crawled(client)
    assert wrong == []
    assert len(seen) > 50
    for act in acts:
        for line in (line_of(act, whole=False), line_of(act, whole=True)):
            try:
                parse(line)
            except click.UsageError as error:
                wrong.append((line, error.format_message()))
    assert wrong == []
    for line in lines:
        try:
            parse(line.replace("--result JSON | --failed | --again", "--failed"))  # a person chooses one
        except click.UsageError as error:
            wrong.append((line, error.format_message()))
    assert wrong == []
    assert {act["label"] for act in acts} >= {"Backfill", "Test", "Fork with another state…", "Set limits", "Retry"}
