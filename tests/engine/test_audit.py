"""The audit: who did what to a run, with the status before and after, the outcome and the reason (K35)."""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import itertools
import os
import socket

import pytest
from msgspec import structs

import keepstep as ks
from keepstep.errors import CheckpointCorrupt
from keepstep.history.audit import audit, incarnations, transitions
from keepstep.history.commands import cancel_now
from keepstep.model import Outcome, Status
from keepstep.ports import Advance, ClaimRequest, Send, Verdict
from tests.engine.lives import parked_child, set_aside
from tests.engine.world import until, until_recorded, until_status

pytestmark = pytest.mark.live_only


def moves(entries):
    return [(entry.before and entry.before.value, entry.after.value) for entry in transitions(entries)]


def chain_holds(entries):
    """Each move begins where the one before it ended."""
    steps = list(transitions(entries))
    return all(a.after is b.before for a, b in itertools.pairwise(steps)) and steps[0].before is None


def only(entries, what):
    [found] = [entry for entry in entries if entry.what == what]
    return found


async def test_audit_lists_the_whole_life_in_order(world):
    tries = []

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0.01))
    async def shaky():
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("once")
        return 1

    @ks.workflow
    async def life():
        return await shaky()

    async with world.engine() as engine:
        run = await engine.start(life)
        await run.result()
        entries = await audit(engine, run.id)
        worker = engine.worker.id
    assert moves(entries) == [(None, "queued"), ("queued", "running"), ("running", "completed")]
    assert [entry.what for entry in entries] == [
        "created",
        "run started",
        "step failed",
        "step completed",
        "run finished",
    ]
    failed = only(entries, "step failed")
    assert (failed.outcome, failed.step, failed.attempt, failed.actor) == (Outcome.FAILURE, "shaky#1", 1, worker)
    assert failed.reason == "ConnectionError: once"
    assert [entry.seq for entry in entries] == [0, 1, 2, 3, 4]
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)


async def test_a_recovery_names_the_dead_owner_and_the_new_one(world):
    gate = asyncio.Event()

    @ks.step
    async def first():
        return 1

    @ks.step
    async def second():
        await gate.wait()

    @ks.workflow
    async def interrupted():
        await first()
        await second()

    dead = await world.started()
    run = await dead.start(interrupted, run_id="r")
    await until_recorded(run, "first#1")
    owner = dead.worker.id
    gate.set()
    fresh = await world.crash_and_recover(dead)
    await (await fresh.get("r")).result()
    entries = await audit(fresh, "r")
    recovered = only(entries, "recovered")
    assert (recovered.before, recovered.after) == (Status.RUNNING, Status.RECOVERING)
    assert recovered.actor == fresh.worker.id
    assert owner in recovered.reason
    assert ("recovering", "running") in moves(entries)
    assert chain_holds(entries)
    await fresh.close()


async def test_a_persons_commands_carry_who_and_why(world):
    @ks.workflow
    async def patient():
        return await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(patient)
        await until_status(run, "waiting")
        await run.pause("the auditors are here")
        await until_status(run, "paused")
        await run.resume("they have left")
        await until_status(run, "waiting")
        await run.cancel("no longer needed")
        with pytest.raises(ks.RunCancelled):
            await run.result()
        entries = await audit(engine, run.id)
    me = getpass.getuser()
    for what, reason in (("paused", "the auditors are here"), ("resumed", "they have left")):
        entry = only(entries, what)
        assert entry.actor.startswith(me)
        assert entry.reason == reason
    assert only(entries, "paused").after is Status.PAUSED
    end = only(entries, "run finished")
    assert (end.after, end.outcome, end.reason) == (Status.CANCELLED, Outcome.CANCELLED, "no longer needed")
    assert end.actor.startswith(me)
    assert chain_holds(entries)


async def test_a_retry_moves_a_failed_run_back_and_says_who_did_it(world):
    broken = [True]

    @ks.step
    async def fragile():
        if broken:
            raise ValueError("broken")
        return 7

    @ks.workflow
    async def mended():
        return await fragile()

    async with world.engine() as engine:
        run = await engine.start(mended)
        with pytest.raises(ks.RunFailed):
            await run.result()
        broken.clear()
        await run.retry("mended the machine")
        assert await run.result() == 7
        entries = await audit(engine, run.id)
    [retry] = [entry for entry in entries if entry.what.startswith("retry")]
    assert (retry.before, retry.after) == (Status.FAILED, Status.QUEUED)
    assert retry.actor.startswith(getpass.getuser())
    assert retry.reason == "mended the machine"
    assert moves(entries)[-1] == ("running", "completed")
    assert chain_holds(entries)


async def test_a_run_that_is_set_aside_says_why_and_may_be_dropped(world):
    async with set_aside(world) as engine:
        aside = only(await audit(engine, "r"), "set aside")
        assert (aside.after, aside.outcome) == (Status.SET_ASIDE, Outcome.FAILURE)
        assert "version" in aside.reason or "changing:1" in aside.reason
    async with world.engine(worker=False) as engine:
        await cancel_now(engine, "r", "not worth it", "ann")
        entries = await audit(engine, "r")
        assert await engine.call(engine.store.list_workers) == []  # the command took itself off the roll
    end = only(entries, "run finished")
    assert (end.before, end.after) == (Status.SET_ASIDE, Status.CANCELLED)
    assert (end.actor, end.reason, end.outcome) == ("ann", "not worth it", Outcome.CANCELLED)


async def test_audit_lists_unread_signals(world):
    @ks.workflow
    async def later():
        return await ks.wait_for("go")

    async with world.engine(worker=False) as engine:
        run = await engine.start(later)
        await run.signal("go")
        await run.pause("password=hunter2secret")
        entries = await audit(engine, run.id)
    unread = [entry for entry in entries if entry.what.endswith("not read yet")]
    assert [entry.what for entry in unread] == ["signal go sent, not read yet", "pause sent, not read yet"]
    assert all(entry.before is entry.after is Status.QUEUED for entry in unread)
    assert "hunter2" not in unread[1].reason
    assert "password=" in unread[1].reason


async def test_audit_lists_a_read_signal_once(world):
    @ks.workflow
    async def heard():
        return await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(heard)
        await run.signal("go", 5)
        assert await run.result() == 5
        entries = await audit(engine, run.id)
    received = only(entries, "signal received")
    assert received.actor.startswith(getpass.getuser())
    assert not [entry for entry in entries if "not read" in entry.what]


async def test_audit_links_child_and_parent(world):
    @ks.workflow
    async def child():
        return 1

    @ks.workflow
    async def parent():
        return await (await ks.start(child)).result()

    async with world.engine() as engine:
        run = await engine.start(parent)
        assert await run.result() == 1
        page = await engine.list(parent=run.id)
        [born] = page.runs
        entries = await audit(engine, born.id)
        theirs = await audit(engine, run.id)
    assert entries[0].what == "created as a child"
    assert entries[0].actor == f"run {run.id}"
    assert any(entry.what == f"child {born.id} started" for entry in theirs)


async def test_audit_lists_the_newest_move_without_a_record(world):
    @ks.workflow
    async def parked():
        await ks.sleep(hours=1)

    async with world.engine() as engine:
        run = await engine.start(parked)
        await until_status(run, "waiting")
        entries = await audit(engine, run.id)
        assert (entries[-1].what, entries[-1].after) == ("parked", Status.WAITING)


@pytest.mark.plaintext
async def test_audit_lists_creator_workflow_version_and_input(world):
    @ks.workflow(version="7")
    async def made(a):
        return a

    async with world.engine(worker=False) as engine:
        run = await engine.start(made, 1)
        named = await world.started(worker=False, actor="billing")
        other = await named.start(made, 1)
        [mine], [theirs] = await run.audit(), await other.audit()
        await named.close()
    assert mine.actor == f"{getpass.getuser()}@{socket.gethostname()} (pid {os.getpid()})"
    assert theirs.actor == "billing"
    digest = hashlib.sha256(b"[[1],{}]").hexdigest()
    assert mine.data == {"workflow": "made", "version": "7", "input": digest}


async def test_a_command_in_the_name_of_someone_is_theirs(world):
    @ks.workflow
    async def patient():
        return await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(patient)
        await run.by("ann").pause("lunch")
        await until_status(run, "paused")
        await run.by("bob").resume("back")
        await run.by("eve").signal("go", 5)
        assert await run.result() == 5
        entries = await run.audit()
    assert only(entries, "paused").actor == "ann"
    assert only(entries, "resumed").actor == "bob"
    assert only(entries, "signal received").actor == "eve"


async def test_audit_lists_how_every_lease_began_and_ended(world):
    began, gate = asyncio.Event(), asyncio.Event()

    @ks.step
    async def work(n):
        if n == 3:
            began.set()
            await gate.wait()

    @ks.workflow
    async def long():
        await work(1)
        await ks.wait_for("one")
        await work(2)
        await ks.wait_for("two")
        await work(3)

    first = await world.started()
    run = await first.start(long, run_id="r")
    await until_status(run, "waiting")
    await run.signal("one")
    await until_recorded(run, "work#2")
    await until_status(run, "waiting")
    await first.close()
    second = await world.started()
    run = await second.get("r")
    await run.signal("two")
    await began.wait()
    gate.set()
    third = await world.crash_and_recover(second)
    run = await third.get("r")
    await run.result()
    entries = await run.audit()
    await third.close()
    a, b, c = first.worker.id, second.worker.id, third.worker.id
    leases = incarnations(entries)
    assert [(one.epoch, one.worker, one.ended) for one in leases] == [
        (1, a, "parked"),
        (2, a, "parked"),
        (3, b, "lost"),
        (4, c, "run finished"),
    ]
    assert all(one.since <= one.until for one in leases)
    assert all(before.until <= after.since for before, after in itertools.pairwise(leases))
    assert [entry.what for entry in entries if entry.what in ("woken", "recovered")] == ["woken", "woken", "recovered"]
    assert chain_holds(entries)
    assert all(entry.seconds is not None for entry in entries if entry.what == "step completed")


async def test_audit_lists_a_hand_back_that_the_next_owner_recorded(world):
    began, gate = asyncio.Event(), asyncio.Event()

    @ks.step
    async def slow():
        began.set()
        await gate.wait()

    @ks.step
    async def quick():
        return 1

    @ks.workflow
    async def handed():
        await quick()
        await slow()

    first = await world.started(stop_seconds=0.01)
    run = await first.start(handed, run_id="r")
    await began.wait()
    first.worker.stop_claiming()
    await until(lambda: not first.worker._claiming)  # or it might claim its own run once more, and record nothing
    await first.close()
    gate.set()
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.result()
        entries = await run.audit()
    back = only(entries, "handed back")
    assert (back.actor, back.before, back.after) == (first.worker.id, Status.RUNNING, Status.QUEUED)
    assert [one.ended for one in incarnations(entries)] == ["handed back", "run finished"]
    assert chain_holds(entries)


async def test_an_owner_that_recorded_nothing_is_a_missing_epoch(world):
    @ks.workflow
    async def parked():
        await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(parked, run_id="r")
        await until_status(run, "waiting")
    store = world.store()
    request = ClaimRequest("idler", run="r", statuses=frozenset({Status.WAITING}))
    [claim] = store.claim_runs(request).claims
    back = Advance("r", "idler", claim.lease.epoch, claim.run.seq, status=Status.QUEUED, release=True, progress=False)
    [answer] = store.commit([back])
    assert answer.verdict is Verdict.DONE
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        await run.result()
        entries = await run.audit()
    store.close()
    assert only(entries, "handed back").actor == "a worker that recorded nothing"
    assert [one.epoch for one in incarnations(entries)][:1] == [1]
    assert 2 not in {entry.epoch for entry in entries}


async def test_a_step_that_was_resolved_says_by_whom_and_why(world):
    began = asyncio.Event()

    @ks.step(at_most_once=True)
    async def pay():
        began.set()
        await asyncio.Event().wait()

    @ks.workflow
    async def order():
        return await pay()

    dead = await world.started()
    await dead.start(order, run_id="r")
    await began.wait()
    fresh = await world.crash_and_recover(dead)
    run = await fresh.get("r")
    await run.by("ann").resolve("pay#1", "result", 7, "the bank says so")
    assert await run.result() == 7
    entries = await run.audit()
    await fresh.close()
    done = only(entries, "step completed")
    assert (done.actor, done.reason) == ("ann", "the bank says so")


@pytest.mark.live_only
@pytest.mark.parametrize("crashes", [2, 3])
async def test_audit_lists_every_takeover(world, crashes):
    began, goes_on = asyncio.Event(), asyncio.Event()

    @ks.step
    async def hang():
        began.set()
        await goes_on.wait()

    @ks.workflow
    async def hanging():
        await hang()

    engine = await world.started()
    await engine.start(hanging, run_id="r")
    for _ in range(crashes):
        await began.wait()
        began.clear()
        engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    if crashes == 3:
        await until_status(run, "set aside")
    else:
        await began.wait()
    for _ in range(2):
        entries = await run.audit()
        takeovers = [one for one in entries if one.what.startswith(("taken over", "recovered"))]
        assert len(takeovers) == crashes
        assert len({one.epoch for one in takeovers}) == len(takeovers)
        assert chain_holds(entries)
        goes_on.set()
        await until_status(run, "completed", "set aside")
    await engine.close()


async def test_the_audit_costs_no_write_of_its_own(world):
    @ks.step
    async def one():
        return 1

    @ks.workflow
    async def short():
        await one()
        await ks.wait_for("go")
        await one()

    async with world.engine() as engine:
        run = await engine.start(short)
        await until_status(run, "waiting")
        parked = (await run.run()).seq
        await run.signal("go")
        await run.result()
        kinds = [one.kind.value for one in await run.checkpoints()]
    assert parked == 2
    assert kinds == ["run started", "step completed", "signal received", "step completed", "run finished"]


async def test_an_unknown_run_is_an_error(world):
    async with world.engine(worker=False) as engine:
        with pytest.raises(ks.RunNotFound):
            await audit(engine, "nobody")


# -- ending a run that nobody drives -----------------------------------------------------------------------------------


async def test_cancel_now_ends_an_unclaimed_child_and_wakes_its_parent(world):
    born = await parked_child(world)
    async with world.engine(worker=False) as engine:
        await cancel_now(engine, born, "", "ann")
        assert await (await engine.get(born)).status() is Status.CANCELLED
    async with world.engine() as engine:  # the parent hears of it, and fails because of it
        with pytest.raises(ks.RunError):
            await (await engine.get("p")).result(timeout=60)


async def test_cancel_now_reaches_the_children(world):
    born = await parked_child(world)
    async with world.engine(worker=False) as engine:
        await cancel_now(engine, "p", "", "ann")
        with pytest.raises(ks.AlreadyFinished):
            await cancel_now(engine, "p", "", "ann")
    async with world.engine() as engine:
        with pytest.raises(ks.RunCancelled):
            await (await engine.get(born)).result(timeout=60)


@pytest.mark.parametrize("ended", ["child", "p"])
async def test_cancel_now_commits_its_signals_with_the_end(world, monkeypatch, ended):
    """The word to a parent and the cancel of a child must be durable with the end itself, or never come."""
    born = await parked_child(world)
    async with world.engine(worker=False) as engine:
        write = engine.journal.write

        async def write_and_die(change):
            answer = await write(change)
            if isinstance(change, Advance):
                raise KeyError("killed")
            return answer

        monkeypatch.setattr(engine.journal, "write", write_and_die)
        with pytest.raises(KeyError):
            await cancel_now(engine, born if ended == "child" else "p", "", "ann")
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed if ended == "child" else ks.RunCancelled):
            await (await engine.get("p" if ended == "child" else born)).result(timeout=60)


async def test_cancel_now_ends_a_run_with_a_damaged_child(world, monkeypatch):
    born = await parked_child(world)
    async with world.engine(worker=False) as engine:
        commit = engine.store.commit

        def refusing(changes, **options):
            sends = [send for change in changes for send in getattr(change, "sends", ())]
            if any(send.signal.run == born for send in [*sends, *(one for one in changes if isinstance(one, Send))]):
                raise CheckpointCorrupt(f"run {born!r}: its head cannot be read")
            return commit(changes, **options)

        monkeypatch.setattr(engine.store, "commit", refusing)
        await cancel_now(engine, "p", "", "ann")
        assert await (await engine.get("p")).status() is Status.CANCELLED


async def test_cancel_now_never_takes_a_run_from_a_living_worker(world):
    began = asyncio.Event()

    @ks.step
    async def busy():
        began.set()
        await asyncio.Event().wait()

    @ks.workflow
    async def driven():
        await busy()

    async with world.engine() as engine:
        await engine.start(driven, run_id="r")
        await began.wait()
        other = await world.started(worker=False)
        with pytest.raises(ks.RunConflict, match="driven by"):
            await cancel_now(other, "r", "", "ann")
        assert await (await other.get("r")).status() is Status.RUNNING
        await other.close()


async def test_a_retry_that_cannot_read_the_history_leaves_the_run_as_it_is(world):
    @ks.workflow
    async def failing():
        raise ValueError("no")

    async with world.engine() as engine:
        run = await engine.start(failing)
        with pytest.raises(ks.RunFailed):
            await run.result()
        read = engine.store.list_checkpoints

        def damaged(*args, **kwargs):
            return [structs.replace(row, record=row.record[:-2]) for row in read(*args, **kwargs)]

        engine.store.list_checkpoints = damaged
        try:
            with pytest.raises(ks.StoreError):
                await run.retry()
        finally:
            engine.store.list_checkpoints = read
        assert await run.status() is Status.FAILED
