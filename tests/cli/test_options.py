"""Options reach what they are for: each is followed from the command line to what it changes."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from keepstep.cli import exits
from keepstep.cli import worker as worker_command
from keepstep.engine.engine import Engine
from keepstep.model import RunQuery
from keepstep.stores.open import open_store

PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"


def stored(run_id):
    store = open_store(".keepstep/runs.db")
    try:
        return next(run for run in store.list_runs(RunQuery()).runs if run.id == run_id)
    finally:
        store.close()


def test_the_exit_codes_are_those_of_the_page():
    page = PAGE.read_text(encoding="utf-8").partition("## Exit codes")[2]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    names = {int(code): name for name, code in re.findall(r"`([a-z-]+)` \((\d+)\)", page)}
    assert told == {exits.OK, *exits.NAMES}
    assert names == exits.NAMES
    assert (exits.FAILED, exits.USAGE, exits.NOT_FOUND, exits.CANCELLED, exits.SET_ASIDE) == (1, 2, 3, 4, 5)
    assert (exits.STORE, exits.CONFLICT, exits.TIMED_OUT, exits.INTERNAL, exits.INTERRUPTED) == (6, 7, 8, 70, 130)


def test_what_start_is_told_is_stored(keepstep):
    words = "--priority 7 --delay 3600 --deadline 7200 --tag team=a --tag kind=b --queue slow"
    assert keepstep("start", "program.py:total", "1", "--id", "t", *words.split()).code == 0
    run = stored("t")
    assert (run.priority, run.queue, run.tags) == (7, "slow", {"team": "a", "kind": "b"})
    waits, ends = ((at - run.created_at).total_seconds() for at in (run.due_at, run.deadline_at))
    assert (round(waits), round(ends)) == (3600, 7200)


def test_what_run_is_told_is_stored(keepstep):
    assert keepstep("run", "program.py:total", "1", "--id", "t", "--deadline", "7200", "--tag", "team=a").code == 0
    run = stored("t")
    assert run.tags == {"team": "a"}
    assert run.deadline_at > datetime.now(UTC)


def test_a_run_that_misses_its_deadline_ends_with_1(keepstep):
    told = keepstep("run", "program.py:stuck", "--id", "s", "--deadline", "0.2", "--json")
    assert (told.code, told.json["status"], told.json["error"]["code"]) == (1, "failed", "ks:run-timed-out")


@pytest.fixture
def seen(monkeypatch):
    """What an engine is given by `worker`, which leaves at once."""
    given = {}
    make = Engine.__init__

    def made(engine, url, **options):
        given.update(options)
        make(engine, url, **options)

    async def idle(engine):
        """Nothing is waited for."""

    monkeypatch.setattr(Engine, "__init__", made)
    monkeypatch.setattr(worker_command, "_idle", idle)
    return given


def test_what_a_worker_is_told_reaches_its_engine(keepstep, seen):
    words = "--max-runs 3 --retain-days 2 --retain-count 5"
    assert keepstep("worker", "program.py", "--until-idle", *words.split()).code == 0
    assert (seen["max_runs"], seen["retain"].days, seen["retain"].count) == (3, 2.0, 5)


def test_a_worker_keeps_all_that_it_was_not_told_to_remove(keepstep, seen):
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    assert (seen["max_runs"], seen.get("retain")) == (1000, None)


def reasons(keepstep, run):
    return {entry["reason"] for entry in keepstep("audit", run, "--json").json["entries"]}


def test_reasons_are_in_the_audit(keepstep):
    keepstep("start", "program.py:approval", "--id", "a")
    for command in ("pause", "resume", "cancel"):
        assert keepstep(command, "a", "--reason", f"to {command} it").code == 0
    assert {"to pause it", "to resume it", "to cancel it"} <= reasons(keepstep, "a")
    keepstep("run", "program.py:call", "--id", "c")
    assert keepstep("retry", "c", "--reason", "the line is mended").code == 0
    assert keepstep("cancel", "c", "--force", "--reason", "no longer wanted").code == 0
    assert {"the line is mended", "no longer wanted"} <= reasons(keepstep, "c")


def test_a_signal_with_an_id_is_sent_once(keepstep):
    keepstep("start", "program.py:approval", "--id", "a")
    for _ in range(2):
        assert keepstep("signal", "a", "approved", "true", "--id", "once").code == 0
    assert stored("a").signals == 1


def test_the_doctor_is_as_strict_and_as_patient_as_it_is_told(keepstep, monkeypatch):
    keepstep("start", "program.py:total", "1", "--id", "t")
    assert keepstep("doctor").code == 0  # nobody is there to drive it: a warning
    told = keepstep("doctor", "--strict", "--json")
    assert (told.code, told.json["healthy"], [one["code"] for one in told.json["findings"]]) == (
        1,
        False,
        ["no-worker"],
    )
    patience = []

    async def examine(engine, *, stale_seconds, deep):
        patience.append((stale_seconds, deep))
        return await real(engine, stale_seconds=stale_seconds, deep=deep)

    from keepstep.engine import doctor

    real = doctor.examine
    monkeypatch.setattr(doctor, "examine", examine)
    keepstep("doctor", "--stale", "2", "--deep")
    keepstep("doctor")
    assert patience == [(120, True), (1800, False)]
