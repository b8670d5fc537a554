"""What people who tried have broken once, and holds now."""

import asyncio
import logging
import os

import pytest

import keepstep as ks
from keepstep.model import Status
from keepstep.stores.memory import MemoryStore


@ks.step
async def note(what: str) -> str:
    return what


async def until(run, status, seconds=5.0):
    async with asyncio.timeout(seconds):
        while await run.status() is not status:  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.005)


async def test_question_after_continue_as_gets_its_reply():
    @ks.workflow
    async def chat(count: int = 0) -> str:
        for _ in range(2):
            question = await ks.wait_for("message")
            count += 1
            question.reply(count)
        ks.continue_as(count)

    async with ks.open("memory:") as engine:
        run = await engine.start(chat)
        assert [await run.ask("message", timeout=60) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert not (await run.status()).finished
        assert (await run.latest()).id == f"{run.id}~3"


async def test_cancel_waits_for_an_at_most_once_step_under_way():
    begun, seen = asyncio.Event(), []

    @ks.step(at_most_once=True)
    async def pay() -> str:
        begun.set()
        await asyncio.sleep(0.2)
        return "receipt"

    @ks.workflow
    async def order() -> None:
        receipt = None
        try:
            receipt = await pay()
            await ks.wait_for("never")
        finally:
            seen.append(receipt)

    async with ks.open("memory:") as engine:
        run = await engine.start(order)
        await begun.wait()
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(60)
    assert seen == ["receipt"]


async def test_no_step_starts_in_a_run_claimed_after_its_deadline():
    bodies = []

    @ks.step
    async def charge() -> None:
        bodies.append(1)

    @ks.workflow
    async def late() -> None:
        await charge()

    store = MemoryStore()
    async with ks.open(store, worker=False) as engine:
        run = await engine.start(late, deadline=0.02, run_id="late")
        await asyncio.sleep(0.05)
    async with ks.open(store) as engine:
        run = await engine.get("late")
        with pytest.raises(ks.RunTimedOut):
            await run.result(60)
    assert bodies == []


async def test_replaced_workflow_of_the_same_name_is_refused():
    def make(tag):
        @ks.workflow
        async def job() -> str:
            return tag

        return job

    first, second = make("a"), make("b")
    async with ks.open("memory:") as engine:
        assert await (await engine.start(second)).result(30) == "b"
        with pytest.raises(ks.KeepstepError, match="own name="):
            await engine.start(first)


async def test_forgotten_await_is_reported(caplog):
    @ks.workflow
    async def forgetful() -> str:
        note("lost")
        return "done"

    @ks.workflow
    async def forgetful_at_the_end():
        return note("lost")

    async with ks.open("memory:") as engine:
        with caplog.at_level(logging.WARNING, "keepstep"):
            assert await (await engine.start(forgetful)).result(30) == "done"
        assert any("never awaited" in record.getMessage() for record in caplog.records)
        with pytest.raises(ks.RunFailed, match="forget `await`"):
            await (await engine.start(forgetful_at_the_end)).result(30)


async def test_misspelt_status_is_refused():
    async with ks.open("memory:") as engine:
        assert (await engine.list(status="waiting")).runs == ()
        with pytest.raises(ks.DefinitionError, match="wating"):
            await engine.list(status="wating")


@pytest.mark.parametrize("options", [{"priority": "high"}, {"priority": 2**70}, {"tags": {"n": 1}}, {"delay": "x"}])
async def test_unstorable_option_is_refused_on_start(options):
    @ks.workflow
    async def plain() -> str:
        return "ok"

    @ks.workflow
    async def parent() -> None:
        await ks.start(plain, **options)

    async with ks.open("memory:") as engine:
        with pytest.raises(ks.DefinitionError):
            await engine.start(plain, **options)
        with pytest.raises(ks.RunFailed, match="DefinitionError"):
            await (await engine.start(parent)).result(30)
        assert await (await engine.start(plain, delay=0.01)).result(30) == "ok"


async def test_run_survives_a_shutdown_that_cancels_all_tasks(tmp_path):
    begun = asyncio.Event()

    @ks.step
    async def slow() -> str:
        begun.set()
        await asyncio.sleep(0.1)
        return "ok"

    @ks.workflow
    async def work() -> str:
        return await slow()

    path = tmp_path / "runs.db"
    async with ks.open(path) as engine:
        await engine.start(work, run_id="r")
        await begun.wait()
        for context in list(engine.live.values()):
            context.main.cancel()
        await asyncio.sleep(0.05)
    async with ks.open(path) as engine:
        assert await (await engine.get("r")).result(60) == "ok"


async def test_timeout_that_expires_as_its_block_ends_replays():
    @ks.workflow
    async def close_call() -> str:
        try:
            async with ks.timeout(0.02):
                await note("quick")
                await asyncio.sleep(0.02)
        except ks.TimedOut:
            pass
        await ks.wait_for("go")
        return "ok"

    async with ks.open("memory:", linger_seconds=0.01) as engine:
        for _ in range(5):
            run = await engine.start(close_call)
            await until(run, Status.WAITING)
            await run.signal("go")
            assert await run.result(60) == "ok"


async def test_open_branch_is_cancelled_before_the_run_finishes():
    store = MemoryStore()

    @ks.workflow
    async def leaves_a_branch() -> str:
        asyncio.create_task(_forever())  # noqa: RUF006 - that is the point
        await note("one")
        return "ok"

    async def _forever():
        await ks.wait_for("never")

    async with ks.open(store) as engine:
        run = await engine.start(leaves_a_branch)
        assert await run.result(60) == "ok"
        kinds = [one.kind.value for one in await run.checkpoints()]
        assert kinds[-2:] == ["step cancelled", "run finished"]


async def test_cancelled_parent_cancels_a_continued_child():
    @ks.workflow
    async def child(count: int = 0) -> None:
        await ks.wait_for("next")
        ks.continue_as(count + 1)

    @ks.workflow
    async def parent() -> None:
        await (await ks.start(child, run_id="child"))

    async with ks.open("memory:") as engine:
        run = await engine.start(parent)
        async with asyncio.timeout(60):
            while (await engine.list(id_prefix="child")).runs == ():  # noqa: ASYNC110 - the store has no event for it
                await asyncio.sleep(0.005)
        young = await engine.get("child")
        await young.signal("next")
        async with asyncio.timeout(60):
            while (await young.latest()).id == "child":  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await run.cancel()
        await until(young, Status.CANCELLED)


@pytest.mark.parametrize("shape", ["finally", "except", "fallback"])
async def test_retry_completes_a_run_that_cleaned_up_after_failing(shape):
    works, cleaned = [], []

    @ks.step
    async def fragile() -> str:
        if not works:
            raise ValueError("not yet")
        return "ok"

    @ks.step
    async def clean_up() -> None:
        cleaned.append(1)

    @ks.workflow
    async def careful() -> str:
        if shape == "finally":
            try:
                return await fragile()
            finally:
                await clean_up()
        try:
            return await fragile()
        except ks.StepFailed:
            await clean_up()
            if shape == "except":
                raise
            return await fragile()

    async with ks.open("memory:") as engine:
        run = await engine.start(careful)
        with pytest.raises(ks.RunFailed):
            await run.result(60)
        works.append(1)
        await run.retry()
        assert await run.result(60) == "ok"


async def test_edited_last_record_gives_no_result(tmp_path):
    apsw = pytest.importorskip("apsw")

    @ks.workflow
    async def answer() -> int:
        return 41

    path = tmp_path / "runs.db"
    async with ks.open(path) as engine:
        assert await (await engine.start(answer, run_id="r")).result(30) == 41
    connection = apsw.Connection(str(path))
    connection.execute(
        "UPDATE keepstep_checkpoint SET record = replace(record, '41', '42') WHERE kind = 'run finished'"
    )
    connection.close()
    async with ks.open(path, worker=False) as engine:
        with pytest.raises(ks.StoreError, match="chain broken"):
            await (await engine.get("r")).result(30)


def test_blocking_engine_is_refused_in_a_forked_child():
    @ks.workflow
    async def plain() -> str:
        return "ok"

    with ks.open("memory:") as engine:
        child = os.fork()
        if child == 0:
            try:
                engine.start(plain)
            except ks.DefinitionError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
