"""Repairing a damaged run: it is shown what repeats, then all of it is kept in a file, and only then is it cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.care import repair
from keepstep.care.repair import accept_loss, assess
from keepstep.care.verify import verify
from keepstep.errors import CheckpointCorrupt, DefinitionError, RunConflict, RunNotFound, StoreUnavailable
from keepstep.model import RunQuery, Signal, Status
from keepstep.ports import Row, Send, Verdict
from tests.care.stored import driven, everything, tampered
from tests.care.test_copying import Failing
from tests.care.test_verify import edited, renumbered


@pytest.fixture
def aside(tmp_path):
    return str(tmp_path / "aside.jsonl")


def accepted(store, aside, run_id="done"):
    return accept_loss(store, run_id, aside, actor="ann", reason="disk trouble")


def test_assessment_names_what_would_repeat_and_changes_nothing(store):
    tampered(store, "done", rows=edited(2, b'"value":3', b'"value":4'))
    before = everything(store)
    loss = assess(store, "done")
    assert (loss.kept, loss.repeats, loss.unreadable) == (2, ["add#2", "add#3"], 0)
    assert everything(store) == before


def test_a_repaired_run_goes_on_from_what_is_certain(store, aside):
    tampered(store, "done", rows=edited(2, b'"value":3', b'"value":4'))
    assert accepted(store, aside).kept == 2
    run = store.get_run("done")
    assert run.status is Status.SET_ASIDE
    assert verify(store).sound

    async def go_on(engine):
        handle = await engine.get("done")
        with pytest.raises(ks.RunSetAside):
            await handle.result()
        await handle.retry("it is mended")
        result = await handle.result()
        return result, await handle.audit()

    result, audit = driven(store, go_on)
    assert result == 6
    [told] = [one for one in audit if one.what == "set aside by repair"]
    assert (told.actor, told.before) == ("ann", Status.COMPLETED)
    assert "disk trouble" in told.reason
    assert verify(store).sound


def test_the_whole_run_is_kept_in_a_file_before_anything_changes(store, aside):
    tampered(store, "done", rows=edited(2, b'"value":3', b'"value":4'))
    before = list(store.list_checkpoints("done"))
    with pytest.raises(StoreUnavailable):
        accepted(Failing(store, 0), aside)
    lines = [json.loads(line) for line in Path(aside).read_bytes().splitlines()]
    kept = [line["checkpoint"]["record"] for line in lines if "checkpoint" in line]
    assert kept == [json.loads(row.record) for row in before]
    assert list(store.list_checkpoints("done")) == before


def test_without_a_file_nothing_is_changed(store, tmp_path):
    tampered(store, "done", rows=edited(2, b'"value":3', b'"value":4'))
    before = everything(store)
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        accepted(store, str(tmp_path / "none" / "aside.jsonl"))
    assert everything(store) == before


def test_unreadable_records_are_counted(store, aside):
    tampered(store, "done", rows=lambda rows: [*rows[:2], Row(3, "step completed", b"\xff", None), *rows[3:]])
    loss = accepted(store, aside)
    assert (loss.kept, loss.unreadable, loss.repeats) == (2, 1, ["add#3"])
    assert verify(store).sound


def test_a_lost_tail_is_counted(store, aside):
    rows = list(store.list_checkpoints("waits"))
    tampered(store, "waits", rows=lambda rows: renumbered(rows[:-1]))
    loss = accepted(store, aside, "waits")
    assert loss.kept == len(rows) - 2  # the last that is there is not the one that the head names
    assert verify(store).sound


def test_signals_that_are_lost_leave_their_place(store, aside):
    tampered(
        store,
        "waits",
        signals=lambda all_: [
            all_[0],
            replace(all_[1], payload=b"0"),
        ],
    )
    loss = accepted(store, aside, "waits")
    assert (loss.signals[-1], loss.repeats) == (2, [])
    lost = [one.seq for one in store.list_signals("waits") if one.name == "ks:lost"]
    assert lost == loss.signals
    assert verify(store).sound

    async def go_on(engine):
        handle = await engine.get("waits")
        await handle.retry()
        await handle.signal("last", "end")
        return await handle.result()

    assert driven(store, go_on) == [10, {"yes": True}, "end"]


def test_a_status_that_was_changed_costs_nothing(store, aside):
    tampered(store, "done", status=Status.WAITING)
    loss = accepted(store, aside)
    assert (loss.repeats, loss.kept) == ([], 5)

    async def go_on(engine):
        handle = await engine.get("done")
        await handle.retry()
        return await handle.result()

    assert driven(store, go_on) == 6


@pytest.mark.parametrize(
    "damage", [{"input": b"[[7],{}]"}, {"rows": lambda rows: renumbered(rows[1:])}, {"data_key": "1:one:abcd"}]
)
def test_run_whose_beginning_or_key_is_damaged_is_not_repaired(store, aside, damage):
    tampered(store, "done", **damage)
    before = everything(store)
    with pytest.raises(CheckpointCorrupt, match="from a backup, or erase"):
        accepted(store, aside)
    assert everything(store) == before


def test_a_sound_run_is_not_repaired(store, aside):
    with pytest.raises(DefinitionError, match="not damaged"):
        accepted(store, aside)
    with pytest.raises(RunNotFound):
        accepted(store, aside, "nobody")


def test_a_run_that_is_driven_is_left_to_its_worker(store, aside, tmp_path):
    async def while_driven(engine):
        handle = await engine.start("care patient", 10, run_id="driven")
        while not (await handle.checkpoints())[1:]:
            await engine.changed(0.05)
        run = store.get_run("driven")
        wrong = Tampering(store, "driven")
        with pytest.raises(RunConflict, match="driven by"):
            accept_loss(wrong, "driven", aside, actor="ann")
        return run

    driven(store, while_driven, linger_seconds=60)
    assert not (tmp_path / "aside.jsonl").exists()


class Tampering:
    """A store that shows one run damaged."""

    def __init__(self, store, run_id):
        self._store, self._run = store, run_id

    def __getattr__(self, name):
        return getattr(self._store, name)

    def list_checkpoints(self, run_id, *args):
        rows = self._store.list_checkpoints(run_id, *args)
        bad = run_id == self._run
        return [Row(row.seq, row.kind, row.record + b" ") if bad and row.seq > 1 else row for row in rows]


def test_a_run_is_never_cut_by_itself(store):
    """A worker that meets the damage sets the run aside, and leaves all of it in place."""
    tampered(store, "waits", rows=edited(1, b'"value"', b'"valve"'), due_at=store.get_run("done").created_at)
    rows = list(store.list_checkpoints("waits"))

    async def meet(engine):
        while store.list_runs(RunQuery(id_prefix="waits")).runs[0].status is not Status.SET_ASIDE:
            await engine.changed(0.05)

    driven(store, meet)
    assert list(store.list_checkpoints("waits"))[: len(rows)] == rows


def test_a_signal_that_comes_meanwhile_is_not_lost(store, aside, monkeypatch):
    tampered(store, "waits", rows=lambda rows: renumbered(rows[:-1]))
    keep_whole = repair.keep_whole

    def keep_and_send(*given):
        keep_whole(*given)
        (answer,) = store.commit([Send(Signal("waits", "last"))])
        assert answer.verdict is Verdict.DONE

    monkeypatch.setattr(repair, "keep_whole", keep_and_send)
    with pytest.raises(RunConflict, match="changed by another process"):
        accept_loss(store, "waits", str(aside), actor="ann")
    assert store.list_signals("waits")[-1].name == "last"
    monkeypatch.undo()
    accept_loss(store, "waits", f"{aside}.again", actor="ann")
    assert store.list_signals("waits")[-1].name == "last"
