"""Calls of MCP tools are steps over a session that no run owns, with the official server in a process of its own."""

import asyncio
import os
import signal
import sys
from contextlib import suppress

import pytest
from mcp import MCPError, StdioServerParameters
from mcp.server.mcpserver import MCPServer

import keepstep as ks
from keepstep.agents.mcp import Connection
from tests.agents.lives import HERE, free_port, live, noted, serving
from tests.engine.world import steps_of, until, until_status
from tests.nightly import case


def stdio(folder, **env):
    return StdioServerParameters(command=sys.executable, args=[str(HERE / "mcp_shop.py"), str(folder)], env=env or None)


def text(result):
    return result.content[0].text


@pytest.mark.one_store
async def test_calls_are_steps_and_a_replay_opens_no_session(world, tmp_path):
    @ks.workflow
    async def desk():
        both = await asyncio.gather(
            shop.call_tool("look", {"word": "a"}, call_id="c1"), shop.call_tool("look", {"word": "b"}, call_id="c2")
        )
        await ks.wait_for("go")
        return [text(one) for one in both]

    shop = Connection("shop", stdio(tmp_path))
    async with shop, world.engine() as engine:
        run = await engine.start(desk, run_id="r")
        await until_status(run, "waiting")
    assert sorted(noted(tmp_path)) == ["look a", "look b", "started"]
    async with shop, world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(30) == ["<a>", "<b>"]
        assert sorted(await steps_of(run)) == ["shop.look#@c1", "shop.look#@c2"]
    assert sorted(noted(tmp_path)) == ["look a", "look b", "started"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_question_of_a_server_waits_for_a_person(world, tmp_path):
    shop = Connection("shop", stdio(tmp_path))

    @ks.workflow
    async def desk():
        return [text(await shop.call_tool("refund", {"eur": eur}, call_id=f"c{eur}")) for eur in (5, 6, 7)]

    async with shop, world.engine() as engine:
        run = await engine.start(desk)
        for eur, answer in (5, {"ok": True}), (6, {"action": "accept", "content": {"ok": False}}), (7, False):

            async def asked(eur=eur):
                return next((name for name in await run.published() if name.startswith(f"input:c{eur}:")), None)

            name = await until(asked)
            question = (await run.published())[name]
            assert question["message"] == f"pay {eur}?"
            assert question["requestedSchema"]["properties"]["ok"]["type"] == "boolean"
            await run.signal(name, answer)
        paid, denied, declined = await run.result(30)
        assert (paid, denied) == ("paid 5", "denied")
        assert "decline" in declined
        assert (await steps_of(run))[:2] == ["shop.refund#@c5", "shop.refund#@c5.1"]
    assert noted(tmp_path) == ["started", "refund 5"]


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize("keyed", ["", "yes"])
async def test_answer_reaches_a_server_that_has_restarted(world, tmp_path, keyed):
    """Without keys of its own a server does not know its question again; it asks once more, and the record answers."""
    shop = Connection("shop", stdio(tmp_path, SHOP_KEYED=keyed))

    @ks.workflow
    async def desk():
        return text(await shop.call_tool("refund", {"eur": 5}))

    async with world.engine() as engine:
        async with shop:
            run = await engine.start(desk)
            await until_status(run, "waiting")
        name = next(iter(await run.published()))
        async with shop:
            await run.signal(name, {"ok": True})
            assert await run.result(30) == "paid 5"
    assert noted(tmp_path) == ["started", "started", "refund 5"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_session_is_opened_again_after_its_server_died(world, tmp_path):
    shop = Connection("shop", stdio(tmp_path), tools={"die": {"retry": ks.Retry.by_class()}})

    @ks.workflow
    async def desk():
        first = (await shop.call_tool("process")).structured_content["result"]
        await kill(first)
        second = (await shop.call_tool("process")).structured_content["result"]
        return [first != second, text(await shop.call_tool("die", {"word": "once"}))]

    @ks.step
    async def kill(pid):
        os.kill(pid, signal.SIGKILL)
        session = shop._session()
        await until(lambda: session.has_ended)

    async with shop, world.engine() as engine:
        run = await engine.start(desk)
        assert await run.result(30) == [True, "once"]
        failed = [one for one in await run.checkpoints() if one.error is not None]
        assert [one.error.error_class for one in failed] == ["network"]
    assert noted(tmp_path) == ["started", "started", "started", "die once"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_lost_call_of_a_tool_at_most_once_is_in_doubt(world, tmp_path):
    shop = Connection("shop", stdio(tmp_path), tools={"die": {"at_most_once": True, "in_doubt": "fail"}})

    @ks.workflow
    async def desk():
        try:
            await shop.call_tool("die", {"word": "once"})
        except ks.StepError as error:
            return type(error).__name__

    async with shop, world.engine() as engine:
        assert await (await engine.start(desk)).result(30) == "StepInDoubt"
    assert noted(tmp_path) == ["started"]


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize(
    "given, told, structured",
    [("paid 5", "paid 5", {"result": "paid 5"}), ({"eur": 5}, '{"eur": 5}', {"eur": 5})],
)
async def test_plain_value_that_a_person_gives_is_the_content(world, tmp_path, given, told, structured):
    shop = Connection("shop", stdio(tmp_path), tools={"die": {"at_most_once": True}})

    @ks.workflow
    async def desk():
        result = await shop.call_tool("die", {"word": "once"}, call_id="r1")
        return [text(result), result.structured_content, result.is_error]

    async with shop, world.engine() as engine:
        run = await engine.start(desk)
        await run.resolve("shop.die#@r1", "result", given)
        assert await run.result(30) == [told, structured, False]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_errors_have_classes_and_a_failing_tool_has_a_result(world, tmp_path):
    shop = Connection("shop", stdio(tmp_path))
    nowhere = Connection("nowhere", StdioServerParameters(command="/nonexistent/server"))
    closed = Connection("closed", f"http://127.0.0.1:{free_port()}/mcp")

    @ks.workflow
    async def desk():
        result = await shop.call_tool("fail", {"word": "sorry"})
        classes = []
        for one in nowhere, closed:
            try:
                await one.call_tool("look", {"word": "a"})
            except ks.StepFailed as error:
                classes.append(str(error.error.error_class))
        return [result.is_error, "sorry" in text(result), *classes]

    async with shop, nowhere, closed, world.engine() as engine:
        assert await (await engine.start(desk)).result(30) == [True, True, "unknown", "network"]


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize(
    "code, expected", [(-32602, "validation"), (-32603, "internal"), (-32001, "timeout"), (7, "unknown")]
)
async def test_error_of_the_protocol_has_a_class(world, code, expected):
    server = MCPServer("shop")

    async def refuse() -> str:
        """Refuse."""
        raise MCPError(code, "no")

    server.add_tool(refuse)
    shop = Connection("shop", server)

    @ks.workflow
    async def desk():
        try:
            await shop.call_tool("refuse")
        except ks.StepFailed as error:
            return str(error.error.error_class)

    async with shop, world.engine() as engine:
        assert await (await engine.start(desk)).result(30) == expected


@pytest.mark.one_store
async def test_list_of_tools_is_recorded(world):
    server = MCPServer("shop")

    async def tool() -> str:
        """Do something."""
        return "done"

    server.add_tool(tool, name="first")
    shop = Connection("shop", server)

    @ks.workflow
    async def desk():
        before = [one.name for one in await shop.list_tools()]
        server.add_tool(tool, name="second")
        await ks.wait_for("go")
        return before, [one.name for one in await shop.list_tools()]

    async with shop, world.engine() as engine:
        run = await engine.start(desk)
        await until_status(run, "waiting")
        await run.signal("go")
        before, after = await run.result(30)
    assert before == ["first"]
    assert sorted(after) == ["first", "second"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_key_of_a_call_is_the_same_for_every_attempt(world, tmp_path):
    shop = Connection("shop", stdio(tmp_path), tool={"retry": ks.Retry(attempts=2, base_seconds=0)})

    @ks.workflow
    async def desk():
        for word in "ab":
            await shop.call_tool("keyed", {"word": word})

    async with shop, world.engine() as engine:
        await (await engine.start(desk)).result(30)
    first, again, other, other_again = [one.split()[2] for one in noted(tmp_path) if one.startswith("keyed")]
    assert (first, other) == (again, other_again)
    assert first != other


@pytest.mark.one_store
@pytest.mark.live_only
async def test_cancel_reaches_the_tool_and_leaves_the_session(world, tmp_path):
    shop = Connection("shop", stdio(tmp_path))

    @ks.workflow
    async def desk():
        await shop.call_tool("slow", {"word": "a"})

    async with shop, world.engine() as engine:
        run = await engine.start(desk)
        await until(lambda: "slow a" in noted(tmp_path))
        await run.cancel("enough")
        with pytest.raises(ks.RunCancelled):
            await run.result(30)
        await until(lambda: "ended a" in noted(tmp_path))
        assert text(await shop.call_tool("look", {"word": "after"})) == "<after>"
    assert noted(tmp_path) == ["started", "slow a", "ended a", "look after"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_progress_of_a_tool_is_that_of_its_step(world, tmp_path):
    shop = Connection("shop", stdio(tmp_path))

    @ks.workflow
    async def desk():
        await shop.call_tool("count", {"upto": 4}, call_id="c1")

    async with shop, world.engine() as engine:
        run = await engine.start(desk)

        async def reported():
            return await run.progress() == {"fraction": 0.25, "message": "at 1", "step": "shop.count#@c1"}

        await until(reported)
        await run.cancel("enough")


async def test_calls_outside_a_run_only_run(tmp_path):
    async with Connection("shop", stdio(tmp_path)) as shop:
        assert text(await shop.call_tool("look", {"word": "a"})) == "<a>"
        assert "look" in {one.name for one in await shop.list_tools()}
        with pytest.raises(ks.Permanent, match="asks for input, which only a workflow can wait for"):
            await shop.call_tool("refund", {"eur": 5})


async def test_http_server_may_restart_between_calls(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    async with Connection("old", url, mode="legacy") as old, Connection("new", url) as new:
        for word in "ab":
            with serving("mcp_shop.py", tmp_path, port, port=port):
                assert text(await new.call_tool("look", {"word": word})) == f"<{word}>"
                assert text(await old.call_tool("look", {"word": word})) == f"<{word}>"


@pytest.mark.crash
@pytest.mark.parametrize("transport", [case("stdio", nightly=True), "http"])
def test_a_kill_after_any_commit_repeats_no_finished_call(tmp_path, transport):
    port = free_port()
    with serving("mcp_shop.py", tmp_path, port, port=port):
        kills = 0
        while True:
            folder = tmp_path / f"killed after {kills + 1}"
            folder.mkdir()
            target = stdio(folder) if transport == "stdio" else f"http://127.0.0.1:{port}/mcp"
            if not _is_killed(folder, target, kills + 1):
                break
            kills += 1
            if transport == "http":  # one server for all
                folder = tmp_path
            done = [one for one in noted(folder) if one != "started"]
            (folder / "effects").unlink()
            # Two calls are under way at once, so that a kill after the first leaves the other to be made again.
            assert sorted(set(done)) == ["look a", "look b", "look c", "refund 5"]
            assert len(done) <= 5
            assert done.count("refund 5") == done.count("look c") == 1
    assert kills >= 6


def _is_killed(folder, target, after):
    """Play a conversation that is killed after so many commits, then play it to its end; say whether it was killed."""
    shop = Connection("shop", target)

    @ks.workflow(name="mcp_killed")
    async def desk():
        both = await asyncio.gather(*(shop.call_tool("look", {"word": one}, call_id=one) for one in "ab"))
        paid = await shop.call_tool("refund", {"eur": 5}, call_id="pay")
        return [text(one) for one in (*both, paid, await shop.call_tool("look", {"word": "c"}, call_id="c"))]

    async def play(engine):
        async with shop:
            run = await engine.start(desk, run_id="r")

            async def asked():
                return next(iter(await run.published()), None) or (await run.status()).finished

            name = await until(asked)
            if isinstance(name, str):
                with suppress(ks.AlreadyFinished):
                    await run.signal(name, {"ok": True}, id="answer")
            assert await run.result(60) == ["<a>", "<b>", "paid 5", "<c>"]

    killed = live(folder, play, kill_after=after)
    assert not live(folder, play)
    return killed
