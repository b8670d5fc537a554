"""Encryption at rest: nothing readable is left in a store, and nothing else changes."""

from __future__ import annotations

import asyncio
import io
import os
from dataclasses import replace

import pytest

import keepstep as ks
from keepstep.care.copying import copy_runs
from keepstep.care.doctor import examine
from keepstep.care.transfer import export_runs, import_runs
from keepstep.engine import worker as worker_module
from keepstep.errors import EncryptionError
from keepstep.history.audit import audit
from keepstep.kernel.driver import RunDriver
from keepstep.model import Signal
from keepstep.ports import Create, Rekey, Send
from keepstep.records.keys import Keys, key_id
from keepstep.records.record import origin
from keepstep.stores import encrypted
from keepstep.stores.encrypted import EncryptedStore
from keepstep.stores.memory import MemoryStore
from keepstep.testing import History, replay
from tests import postgres
from tests.engine.world import until, until_status

OLD, NEW = os.urandom(32), os.urandom(32)
MARK = "MARK-of-a-user's-value"


def keys(current="old", **known):
    return Keys(current, known or {"old": OLD})


def everything_in(world):
    """All bytes that the store has kept."""
    if world.kind == "memory":
        return repr({name: value for name, value in vars(world._memory).items() if name != "_lock"}).encode()
    files = [path for path in world.path.parent.iterdir() if path.is_file()]
    return b"".join(path.read_bytes() for path in files)


@ks.step
async def tell(text):
    ks.publish("from step", text)
    ks.emit(text)
    ks.progress(0.5, text)
    return {"told": text, MARK: 1}


@ks.step
async def break_down(text):
    raise ValueError(f"no {text}")


@ks.workflow(name="sealed child")
async def child(text):
    return text + "!"


@ks.workflow(name="sealed")
async def busy(text, again=True):
    if again:
        ks.continue_as(text, again=False)
    ks.publish("shown", text)
    told = await tell(text)
    with pytest.raises(ks.StepFailed, match=MARK):
        await break_down(text)
    born = await ks.start(child, text)
    assert await born == MARK + "!"
    await ks.signal(ks.run_id(), "self", text)
    assert await ks.wait_for("self") == MARK
    question = await ks.wait_for("question")
    question.reply([question.payload, text])
    return [told, await ks.wait_for("go")]


@ks.workflow(name="sealed waiter")
async def waiter(text):
    return [text, await ks.wait_for("go")]


async def play(engine):
    run = await engine.start(busy, MARK, run_id="r")
    assert await run.ask("question", MARK) == [MARK, MARK]
    await run.signal("go", {"v": MARK})
    assert await run.result(60) == [{"told": MARK, MARK: 1}, {"v": MARK}]
    return run


async def test_nothing_that_the_code_said_can_be_read_from_the_store(world):
    async with world.engine(keys=keys()) as engine:
        run = await play(engine)
        assert await run.input() == [[MARK], {}]
        assert (await run.published())["shown"] == MARK
        newest = await run.latest()
        assert [one.error.message for one in await newest.checkpoints(failed=True)] == [f"no {MARK}"]
        tokens = [event.data["value"] async for event in run.watch() if event.name == "token.emitted"]
        assert set(tokens) == {MARK}
        assert (await examine(engine, deep=True)).healthy
        assert MARK.encode() not in everything_in(world)
    found = everything_in(world)
    assert MARK.encode() not in found
    assert b"tell#1" in found  # what operations need stays readable
    assert b"ValueError" in found


async def test_a_known_id_gives_the_run_with_the_same_input_only(world):
    async with world.engine(keys=keys()) as engine:
        await engine.start(waiter, MARK, run_id="r")
        await (await engine.start(waiter, MARK, run_id="r")).signal("go", 1)
        with pytest.raises(ks.RunConflict, match="with another input"):
            await engine.start(waiter, "other", run_id="r")
        assert await (await engine.get("r")).result(30) == [MARK, 1]


async def test_child_of_a_known_id_is_reused_if_its_call_is_the_same(world):
    """Two ciphertexts of one input differ, so what they say decides."""

    @ks.workflow(name="sealed parent")
    async def parent(text):
        first = await ks.start(child, MARK, run_id="c")
        with pytest.raises(ks.StepFailed, match="is taken"):
            await ks.start(child, text, run_id="c")
        return await first

    async with world.engine(keys=keys()) as engine:
        run = await engine.start(parent, "other")
        assert await run.result(30) == MARK + "!"
        await run.rewind(0)
        assert await run.result(30) == MARK + "!"
        assert len((await engine.list()).runs) == 2


async def test_secrets_may_be_stored_but_not_as_tags(world):
    token = "ghp_" + "Ab3" * 12
    async with world.engine(keys=keys(), on_suspect="refuse") as engine:
        run = await engine.start(waiter, token)
        await run.signal("go", token)
        assert await run.result(30) == [token, token]
        with pytest.raises(ks.NotSerializable, match="tag"):
            await engine.start(waiter, 1, tags={"t": token})
    assert token.encode() not in everything_in(world)


# -- without the key ---------------------------------------------------------------------------------------------------


async def test_below_one_can_look_but_not_read_and_not_write(world):
    async with world.engine(keys=keys()) as engine:
        await play(engine)
        await engine.start(waiter, MARK, run_id="w")
    if world.kind != "memory":  # a store that is handed over open is not looked through
        with pytest.raises(EncryptionError, match="encrypted with the key 'old', but keys= is not set") as told:
            await world.started(keys=None)
        assert told.value.key_id == "old"
    async with world.engine(worker=False, keys=None) as engine:
        assert [run.id for run in (await engine.list(status="completed")).runs][-1] == "r"
        run = await (await engine.get("r")).latest()
        assert (await run.run()).output is None
        found = await run.checkpoints()
        assert not any(one.value or one.digest for one in found)
        assert [one.error.message for one in found if one.error] == ["(encrypted)"]
        assert [one.error.type for one in found if one.error] == ["ValueError"]
        assert (await examine(engine, deep=True)).healthy
        assert "completed" in str((await run.audit())[-1])
        assert [event.seq async for event in run.watch()] == [one.seq for one in found]
        assert await run.progress() is None
        for refused in (run.result, run.input, run.published):
            with pytest.raises(EncryptionError, match="encrypted"):
                await refused()
        if world.kind != "memory":
            with pytest.raises(EncryptionError, match="keys= is not set"):
                await engine.start(waiter, 1)
            waits = await engine.get("w")
            for refused in (waits.signal("go"), waits.cancel(), waits.pause()):
                with pytest.raises(EncryptionError, match="'w' is encrypted"):
                    await refused
        with pytest.raises(EncryptionError, match="'w' is encrypted"):
            await engine.cancel_now("w")


async def test_audit_below_counts_leases_that_recorded_nothing(world, monkeypatch):
    @ks.workflow
    async def broken():
        raise ValueError(MARK)

    async with world.engine(keys=keys()) as engine:
        run = await engine.start(broken, run_id="r")
        await until_status(run, "failed")
        monkeypatch.setattr(RunDriver, "count_unrecorded", lambda driver, last: setattr(driver, "unrecorded", 2))
        await run.retry()
        await until_status(run, "failed")
    async with world.engine(worker=False, keys=None) as engine:
        told = [entry.reason for entry in await (await engine.get("r")).audit()]
        assert "2 leases before it recorded nothing" in told


@pytest.mark.parametrize("wrong", [Keys("new", {"new": NEW}), Keys("old", {"old": NEW})], ids=["missing", "wrong"])
async def test_worker_without_the_right_key_leaves_the_run_to_others(world, wrong, logged, monkeypatch):
    monkeypatch.setattr(worker_module, "KEY_SECONDS", 0.05)
    async with world.engine(keys=keys(), worker=False) as engine:
        await engine.start(waiter, MARK, run_id="r")
        await engine.signal("r", "go", 2)
    async with world.engine(keys=wrong) as engine:
        run = await engine.get("r")

        async def claimed_twice():
            return (await run.run()).epoch >= 2

        await until(claimed_twice)
        assert (await run.run()).recoveries == 0
        with pytest.raises(EncryptionError, match="'old'"):
            await run.input()
        with pytest.raises(EncryptionError, match="'old'"):
            await run.signal("go")
        told = [line for line in logged() if "'old'" in line]
        assert len(told) == 1, told
        assert "left to other workers" in told[0]
    async with world.engine(keys=keys()) as engine:
        assert await (await engine.get("r")).result(30) == [MARK, 2]


async def test_a_result_under_a_key_that_is_not_here_is_refused(world):
    async with world.engine(keys=keys()) as engine:
        await play(engine)
    async with world.engine(keys=keys("new", new=NEW), worker=False) as engine:
        run = await engine.get("r")
        with pytest.raises(EncryptionError, match="is encrypted with the key 'old'; known here: 'new'"):
            await run.result()
        assert (await engine.list()).runs


# -- plain text where none may be --------------------------------------------------------------------------------------


async def test_a_run_in_plain_text_is_refused_unless_that_is_asked_for(world, logged, monkeypatch):
    monkeypatch.setattr(worker_module, "KEY_SECONDS", 0.05)
    async with world.engine(worker=False, keys=None) as engine:
        await engine.start(waiter, MARK, run_id="before")
    async with world.engine(keys=keys()) as engine:
        await until(lambda: any("'before' is not encrypted" in line for line in logged()))
        with pytest.raises(EncryptionError, match="'before' is not encrypted"):
            await engine.signal("before", "go")
        with pytest.raises(EncryptionError, match="'before' is not encrypted"):
            await engine.start(waiter, MARK, run_id="before")
        with pytest.raises(EncryptionError, match="plaintext=True"):
            await engine.get("before")
    async with world.engine(keys=Keys("old", {"old": OLD}, plaintext=True), on_suspect="refuse") as engine:
        run = await engine.get("before")
        await run.signal("go", 1)
        assert await run.result(30) == [MARK, 1]
        after = await engine.start(waiter, "hidden" + MARK, run_id="after")
        await after.signal("go", 2)
        assert await after.result(30) == ["hidden" + MARK, 2]
        assert (await after.run()).data_key
        with pytest.raises(ks.NotSerializable):  # it might be stored in plain text
            await engine.start(waiter, "ghp_" + "Ab3" * 12)
    assert b"hidden" not in everything_in(world)


async def test_signal_in_plain_text_is_ignored(world, logged):
    async with world.engine(keys=keys()) as engine:
        run = await engine.start(waiter, MARK, run_id="r")
        await until_status(run, "waiting")
        below = engine.encryption.store.inner
        below.commit([Send(Signal("r", "go", b'"forged"', "f")), Send(Signal("r", "ks:cancel", b"true", "c"))])
        await run.signal("go", "true")
        assert await run.result(30) == [MARK, "true"]


async def test_signal_to_an_unknown_run_raises_run_not_found(world):
    @ks.workflow(name="sealed lonely")
    async def lonely():
        with pytest.raises(ks.RunNotFound):
            await ks.signal("nobody", "go", MARK)
        return "told"

    async with world.engine(keys=keys()) as engine:
        with pytest.raises(ks.RunNotFound):
            await engine.signal("nobody", "go")
        assert await (await engine.start(lonely)).result(30) == "told"


async def test_signal_that_cannot_be_encrypted_fails_only_its_step(world):
    @ks.workflow(name="sealed sender")
    async def sender():
        with pytest.raises(ks.StepFailed, match="'plain' is not encrypted"):
            await ks.signal("plain", "go", MARK)
        return "told"

    async with world.engine(keys=None, worker=False) as engine:
        await engine.start(waiter, 1, run_id="plain", delay=1000)
    async with world.engine(keys=keys()) as engine:
        beside = await engine.start(waiter, 1)
        assert await (await engine.start(sender)).result(30) == "told"
        await beside.signal("go")
        assert await beside.result(30) == [1, True]


# -- another key -------------------------------------------------------------------------------------------------------


async def test_rekey_beside_a_worker_makes_the_old_key_superfluous(world):
    @ks.workflow(name="sealed counter")
    async def counting():
        return len([await tell(await ks.wait_for("next")) for _ in range(6)])

    async with world.engine(keys=keys()) as engine:
        done = await engine.start(child, MARK, run_id="done")
        await done.result(30)
    async with world.engine(keys=keys("old", old=OLD, new=NEW)) as engine:  # it knows the new one, for reading
        live = await engine.start(counting, run_id="live")
        for number in range(3):
            await live.signal("next", MARK, id=str(number))
        async with world.engine(keys=keys("new", old=OLD, new=NEW), worker=False) as turner:
            first = await turner.rekey()
            assert (first.runs, first.changed, first.left) == (2, 2, {})
            again = await turner.rekey()
            assert again.changed == 0
        for number in range(3, 6):
            await live.signal("next", MARK, id=str(number))
        assert await live.result(60) == 6
    async with world.engine(keys=keys("new", new=NEW)) as engine:
        assert {key_id(run.data_key) for run in (await engine.list()).runs} == {"new"}
        assert await (await engine.get("done")).result() == MARK + "!"
        assert await (await engine.get("live")).result() == 6
        assert len(await (await engine.get("live")).checkpoints()) > 12
    async with world.engine(keys=keys(), worker=False) as engine:
        with pytest.raises(EncryptionError, match="'new'"):
            await (await engine.get("done")).result()


async def test_rekey_goes_on_after_the_first_page(world, monkeypatch):
    """Else whoever then drops the old key loses the rest."""
    monkeypatch.setattr(encrypted, "REKEY_BATCH", 2)

    @ks.workflow
    async def quick(number):
        return number

    async with world.engine(keys=keys()) as engine:
        for number in range(5):
            await (await engine.start(quick, number, run_id=f"r{number}")).result()
    async with world.engine(keys=keys("new", old=OLD, new=NEW), worker=False) as engine:
        done = await engine.rekey()
        assert (done.runs, done.changed) == (5, 5)
    async with world.engine(keys=keys("new", new=NEW)) as engine:
        assert [await (await engine.get(f"r{number}")).result() for number in range(5)] == list(range(5))


async def test_rekey_counts_and_leaves_runs_whose_key_is_gone(world):
    async with world.engine(keys=keys(), worker=False) as engine:
        await engine.start(child, MARK, run_id="lost")
    async with world.engine(keys=keys("new", new=NEW), worker=False) as engine:
        await engine.start(child, MARK, run_id="found")
        done = await engine.rekey()
        assert (done.runs, done.changed, done.plain, done.left) == (2, 0, 0, {"old": 1})
    async with world.engine(worker=False, keys=None) as engine:
        with pytest.raises(EncryptionError, match="rekey needs a current key"):
            await engine.rekey()


@pytest.mark.one_store
async def test_run_with_an_erased_runs_id_is_read_with_its_own_key(world):
    store = EncryptedStore(world.store(), keys())
    async with ks.Engine(store, linger_seconds=0.05) as engine:
        await (await engine.start(child, "a", run_id="r")).result(30)
        other = EncryptedStore(store.inner, keys())
        assert other.list_checkpoints("r")[-1].opened
        store.delete_runs(["r"])
        run = await engine.start(waiter, "b", run_id="r")
        await until_status(run, "waiting")
        assert other.list_checkpoints("r")[-1].opened
        other.commit([Send(Signal("r", "go", b"5", "s"))])
        assert await run.result(30) == ["b", 5]
        assert [signal.payload for signal in other.list_signals("r")] == [b"5"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_many_ciphers_are_not_kept_for_ever(world, monkeypatch):
    monkeypatch.setattr("keepstep.stores.encrypted.KEPT_CIPHERS", 3)
    async with world.engine(keys=keys()) as engine:
        runs = [await engine.start(child, str(number)) for number in range(10)]
        assert [await run.result(30) for run in runs] == [f"{number}!" for number in range(10)]
        assert len(engine.encryption.store._ciphers) <= 3


async def test_encrypted_run_is_recovered(world):
    engine = await world.started(keys=keys())
    run = await engine.start(waiter, MARK, run_id="r")
    await until_status(run, "running", "waiting")
    engine = await world.crash_and_recover(engine, keys=keys())
    await engine.signal("r", "go", MARK)
    assert await (await engine.get("r")).result(30) == [MARK, MARK]
    assert [entry.what for entry in await audit(engine, "r")][-1] == "run finished"
    await engine.close()


async def test_a_failed_run_is_retried_and_a_waiting_one_cancelled(world):
    tries = []

    @ks.step
    async def second_time():
        tries.append(1)
        if len(tries) == 1:
            raise ks.Permanent(MARK)
        return MARK

    @ks.workflow(name="sealed retry")
    async def failing():
        return await second_time()

    async with world.engine(keys=keys()) as engine:
        run = await engine.start(failing)
        with pytest.raises(ks.RunFailed, match=MARK):
            await run.result(30)
        assert MARK in (await run.run()).error.message
        await run.retry("because of " + MARK)
        assert await run.result(30) == MARK
        assert any("because of " + MARK in entry.reason for entry in await run.audit())
        other = await engine.start(waiter, 1)
        await other.cancel("no " + MARK)
        with pytest.raises(ks.RunCancelled):
            await other.result(30)
        assert [entry.reason for entry in await other.audit()][-1] == "no " + MARK
    assert MARK.encode() not in everything_in(world)


async def test_run_whose_data_key_was_changed_is_refused_and_kept(world):
    async with world.engine(keys=keys(), worker=False) as engine:
        await engine.start(waiter, MARK, run_id="a")
        await engine.start(waiter, MARK, run_id="b")
        below = engine.encryption.store.inner
        a, b = below.get_run("a").data_key, below.get_run("b").data_key
        below.commit([Rekey("a", a, b), Rekey("b", b, a)])
        with pytest.raises(EncryptionError, match="its data key was changed"):
            await (await engine.get("a")).input()
        below.commit([Rekey("a", b, a), Rekey("b", a, b)])
        assert await (await engine.get("a")).input() == [[MARK], {}]


async def test_the_input_of_another_run_is_refused(world):
    async with world.engine(keys=keys(), worker=False) as engine:
        await engine.start(waiter, MARK, run_id="a")
        below = engine.encryption.store.inner
        run = below.get_run("a")
        other = engine.encryption.store.encrypted_new_run(replace(run, id="x", input=b'[["theirs"],{}]'))[0]
        below.delete_runs(["a"])
        forged = replace(run, input=other.input, checksum="")
        below.commit([Create(replace(forged, checksum=origin(forged)))])
    async with world.engine(keys=keys()) as engine:
        run = await engine.get("a")
        await until_status(run, "set aside")
        assert "its input cannot be decrypted" in (await run.run()).error.message


async def test_doctor_reports_runs_whose_key_is_missing(world):
    async with world.engine(keys=None, worker=False) as engine:
        await engine.start(waiter, 1, run_id="plain")
    async with world.engine(keys=keys(), worker=False) as engine:
        await engine.start(waiter, 1, run_id="old")
    async with world.engine(keys=keys("new", new=NEW), worker=False) as engine:
        await engine.start(waiter, 1, run_id="new")
        report = await examine(engine, deep=True)
        told = {finding.runs: finding.message for finding in report.findings if finding.code == "no-key"}
        assert told == {
            ("old",): "1 run encrypted with the key 'old', which is missing here: old",
            ("plain",): "1 run in plain text, which the keys do not allow: plain",
        }
        assert report.healthy
    async with world.engine(keys=keys("old", old=NEW), worker=False) as engine:
        told = {
            finding.runs: finding.message for finding in (await examine(engine)).findings if finding.code == "no-key"
        }
        assert told["old",] == "1 run encrypted with the key 'old', but the local key of that name is different: old"


async def test_key_holder_replays_a_history_in_plain_text(world, tmp_path):
    async with world.engine(keys=keys()) as engine:
        run = await engine.start(waiter, MARK, run_id="r")
        await run.signal("go", 1)
        await run.result(30)
        below = engine.encryption.store.inner
        with pytest.raises(EncryptionError, match="keys= is not set"):
            History.of(below, "r")
        history = History.of(below, "r", keys=keys())
        assert [row.seq for row in history.rows] == [row.seq for row in History.of(engine.store, "r").rows]
    history.save(tmp_path / "history.json")
    assert MARK in (tmp_path / "history.json").read_text()
    replayed = await asyncio.to_thread(replay, waiter, tmp_path / "history.json")
    assert replayed.run == "r"


def test_engine_refuses_keys_of_another_type():
    with pytest.raises(ks.DefinitionError, match=r"keys= must be a ks\.Keys, got dict"):
        ks.Engine("memory:", keys={"old": OLD})


# -- moved and mended by those who have no key -------------------------------------------------------------------------


async def test_archive_holds_ciphertext_and_needs_the_key_elsewhere(world):
    async with world.engine(keys=keys(), worker=False) as engine:
        await engine.start(waiter, MARK, run_id="r")
        await engine.signal("r", "go", MARK)
        archive = io.BytesIO()
        assert export_runs(engine.store, archive).written == 1
    assert MARK.encode() not in archive.getvalue()
    archive.seek(0)
    elsewhere = MemoryStore()
    assert import_runs(elsewhere, archive, "archive", actor="ann").written == 1
    async with ks.Engine(elsewhere, keys=keys(), linger_seconds=0.05) as engine:
        run = await engine.get("r")
        assert await run.status() == "set aside"
        await run.retry()
        assert await run.result(30) == [MARK, MARK]


async def test_a_run_that_was_handed_over_goes_on_with_its_key(world):
    target = MemoryStore()
    async with world.engine(keys=keys(), worker=False) as engine:
        await engine.start(waiter, MARK, run_id="r")
        await engine.signal("r", "go", MARK)
        done = copy_runs(engine.store, target, actor="ann", unfinished=True)
        assert done.written == 1
        told = await (await engine.get("r")).run()
        assert told.status == "set aside"
        assert "goes on in" in told.error.message
    async with ks.Engine(target, keys=keys(), linger_seconds=0.05) as engine:
        assert await (await engine.get("r")).result(30) == [MARK, MARK]


# -- the other stores --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["files", "postgres"])
def elsewhere(request, tmp_path):
    """A URL, and how all that is kept there is read."""
    if request.param == "files":
        folder = tmp_path / "runs"

        def dump():
            return b"".join(str(path).encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file())

        yield f"files:{folder}", dump
        return
    import psycopg

    with postgres.empty_store() as url:

        def dump():
            told = b""
            with psycopg.connect(postgres.session_dsn()) as connection:
                tables = connection.execute(
                    "SELECT quote_ident(schemaname) || '.' || quote_ident(tablename) FROM pg_tables"
                    " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
                ).fetchall()
                for (table,) in tables:
                    with connection.cursor().copy(f"COPY {table} TO STDOUT (FORMAT binary)") as rows:
                        told += b"".join(bytes(part) for part in rows)
            return told

        yield url, dump


async def test_every_store_keeps_ciphertext_and_lets_keys_be_changed(elsewhere):
    url, dump = elsewhere
    async with ks.Engine(url, keys=keys(), linger_seconds=0.05) as engine:
        await play(engine)
    found = dump()
    assert MARK.encode() not in found
    assert b"tell#1" in found
    with pytest.raises(EncryptionError, match="keys= is not set"):
        async with ks.Engine(url):
            pass
    async with ks.Engine(url, worker=False) as engine:
        run = await engine.get("r")
        assert await run.status() == "completed"
        with pytest.raises(EncryptionError, match="'old'"):
            await run.input()
        with pytest.raises(EncryptionError, match="'old'"):
            await run.result()
    async with ks.Engine(url, worker=False, keys=keys("new", old=OLD, new=NEW)) as engine:
        done = await engine.rekey()
        assert (done.changed, done.left) == (3, {})
    async with ks.Engine(url, keys=keys("new", new=NEW)) as engine:
        run = await engine.get("r")
        assert await run.result() == [{"told": MARK, MARK: 1}, {"v": MARK}]
        assert (await examine(engine, deep=True)).healthy
        other = await engine.start(waiter, MARK, run_id="w")
        await other.signal("go", 1)
        assert await other.result(30) == [MARK, 1]
    assert MARK.encode() not in dump()
