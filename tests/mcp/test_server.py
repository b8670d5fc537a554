"""The server in this process: encrypted runs, pages for people, errors, and stored text in answers."""

import asyncio
import json

import pytest
from mcp import Client

import keepstep as ks
from keepstep import cli
from keepstep.cli import mcp as command
from keepstep.errors import DefinitionError
from keepstep.mcp import app, server
from keepstep.mcp.stored import ANSWER, NOTE, Answer, Piece
from keepstep.records.keys import Keys
from tests.mcp.conftest import ALL, INJECTION, ME, approval, broken, buying, stray
from tests.mcp.test_stdio import DESTROYS, READS, WRITES


async def call(client, name, **given):
    answer = await client.call_tool(name, given)
    return answer.content[0].text if answer.is_error else answer.structured_content


def test_encrypted_run_is_shown_without_its_values(tmp_path):
    async def told():
        broken["on"] = True
        keys = Keys("2026", {"2026": b"k" * 32})
        async with ks.open(tmp_path / "runs.db", workflows=ALL, keys=keys) as engine:
            await (await engine.start(buying, 7, run_id="secret")).reached("failed", timeout=60)
        async with ks.open(tmp_path / "runs.db", worker=False) as engine, Client(server(engine)) as client:
            return [
                await call(client, "explain_run", run_id="secret"),
                await call(client, "show_run", run_id="secret"),
                await call(client, "history", run_id="secret", values=True),
                await call(client, "show_record", run_id="secret", seq=2),
            ]

    explained, shown, records, record = asyncio.run(told())
    assert explained["hidden"]
    assert shown["input"] == {"hidden": "encrypted with the key '2026', which this server does not have"}
    assert all("stored_text" not in json.dumps(one) for one in (shown, records, record))
    assert INJECTION not in json.dumps([explained, shown, records, record])


@pytest.mark.parametrize(
    "words, names",
    [((), READS), (("--write",), READS | WRITES), (("--destructive",), READS | WRITES | DESTROYS)],
)
def test_flags_of_the_command_decide_about_the_tools(tmp_path, monkeypatch, words, names):
    async def listed(settings, workflows, options):
        async with ks.open(tmp_path / "runs.db", worker=False) as engine, Client(server(engine, **options)) as client:
            found.update(one.name for one in (await client.list_tools()).tools)
        return 0

    found = set()
    monkeypatch.setattr(command, "_over_stdio", listed)
    assert cli.main(["mcp", *words]) == 0
    assert found == names


def test_module_that_prints_does_not_disturb_the_client(tmp_path, monkeypatch, capsys):
    async def spoken(settings, workflows, options):
        return 0

    program = tmp_path / "noisy_program.py"
    program.write_text("print('loaded')\n", encoding="utf-8")
    monkeypatch.setattr(command, "_over_stdio", spoken)
    assert cli.main(["mcp", str(program)]) == 0
    assert capsys.readouterr() == ("", "loaded\n")


@pytest.mark.parametrize(
    "words, message",
    [
        (("--pages-url", "ops.example"), "begins with http"),
        (("--token", "s" * 20), "are for --http"),
        (("--http", "--host", "192.0.2.1"), "needs a token"),
        (("--http", "--host", "0.0.0.0", "--token", "s" * 20), "needs --name HOST"),
    ],
)
def test_unsafe_or_useless_options_are_refused(capsys, words, message):
    assert cli.main(["mcp", *words]) == 2
    assert message in capsys.readouterr().err


def test_people_answer_on_the_pages_if_there_are_some(tmp_path):
    async def told():
        async with ks.open(tmp_path / "runs.db", workflows=ALL) as engine:
            await (await engine.start(approval, run_id="a b")).reached("waiting", timeout=60)
            async with Client(server(engine, write=True, pages_url="http://ops.example/")) as client:
                names = {one.name for one in (await client.list_tools()).tools}
                return names, await call(client, "approval_link", run_id="a b")

    names, link = asyncio.run(told())
    assert not names & {"approve", "deny", "signal"}
    assert {"retry", "approval_link"} <= names
    assert (link["inbox"], link["page"]) == ("http://ops.example/inbox", "http://ops.example/runs/a%20b")


def test_unexpected_error_tells_nothing_of_the_inside(tmp_path, monkeypatch):
    async def told():
        async with ks.open(tmp_path / "runs.db", worker=False) as engine:

            def fail(*_):
                raise RuntimeError("the inside of the server")

            monkeypatch.setattr(engine.store, "list_runs", fail)
            async with Client(server(engine), client_info=ME) as client:
                return await call(client, "list_runs")

    text = asyncio.run(told())
    assert "the log of the server has details" in text
    assert "the inside" not in text


def test_answer_is_cut_as_a_whole():
    data = {"records": [{"value": "x" * 3_000} for _ in range(100)]}
    told = Answer(lambda text: text).of(data)
    shown = [one["value"] for one in told["records"]]
    assert sum(len(one["stored_text"]) for one in shown) == ANSWER
    assert shown[-1] == {"stored_text": "", "note": NOTE, "missing_characters": 3_000}


def test_answer_is_redacted_again_before_it_is_cut():
    def redact(text):
        return text.replace("hunter2", "***")

    data = {"id": "hunter2", "value": {"password": "hunter2"}, "piece": Piece("x" * 10 + "hunter2", 9)}
    told = Answer(redact).of(data)
    assert "hunter2" not in json.dumps(told)
    assert told["piece"]["stored_text"] == "x***"


def test_long_names_and_lists_are_cut():
    told = Answer(lambda text: text).of({"id": "n" * 10_000, "keys": ["k"] * 10_000})
    assert told["id"].endswith("more characters)")
    assert len(told["keys"]) == 500
    assert stray({"a": [{"b": INJECTION}]}, INJECTION) == [".a.0.b"]


def test_unfit_token_is_refused(tmp_path):
    async def told():
        async with ks.open(tmp_path / "runs.db", worker=False) as engine:
            app(engine, tokens=["short"])

    with pytest.raises(DefinitionError, match="at least 16"):
        asyncio.run(told())
