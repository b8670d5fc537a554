"""Options reach what they are for: each is followed from the command line to what it changes."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from keepstep.cli import errors
from keepstep.cli import worker as worker_command
from keepstep.engine.engine import Engine
from keepstep.model import RunQuery
from keepstep.policies import Retain
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
    assert told == {errors.OK, *errors.NAMES}
    assert names == errors.NAMES
    assert (errors.FAILED, errors.USAGE, errors.NOT_FOUND, errors.CANCELLED, errors.SET_ASIDE) == (1, 2, 3, 4, 5)
    assert (errors.STORE, errors.CONFLICT, errors.TIMED_OUT, errors.INTERNAL, errors.INTERRUPTED) == (6, 7, 8, 70, 130)


def test_help_lists_every_exit_code(keepstep):
    listed = keepstep("--help").out.partition("Exit codes:")[2]
    assert {int(code) for code in re.findall(r"\d+", listed)} == {errors.OK, *errors.NAMES}


@pytest.mark.parametrize("words", [["--store", "x" * 300, "list"], ["check", "x" * 300]])
def test_a_path_that_the_system_refuses_is_a_mistake_in_the_usage(keepstep, words):
    assert keepstep("run", "program.py:total", "1").code == errors.OK
    answer = keepstep(*words)
    assert answer.code == errors.USAGE
    assert "too long" in answer.err


def test_options_of_start_are_stored(keepstep):
    words = "--priority 7 --delay 3600 --deadline 7200 --tag team=a --tag kind=b --queue slow"
    assert keepstep("start", "program.py:total", "1", "--id", "t", *words.split()).code == 0
    run = stored("t")
    assert (run.priority, run.queue, run.tags) == (7, "slow", {"team": "a", "kind": "b"})
    waits, ends = ((at - run.created_at).total_seconds() for at in (run.due_at, run.deadline_at))
    assert (round(waits), round(ends)) == (3600, 7200)


def test_options_of_run_are_stored(keepstep):
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


def test_options_of_worker_reach_its_engine(keepstep, seen):
    words = "--max-runs 3 --retain-days 2 --retain-count 5 --queue mail --queue files"
    assert keepstep("worker", "program.py", "--until-idle", *words.split()).code == 0
    assert (seen["max_runs"], seen["retain"].days, seen["retain"].count) == (3, 2.0, 5)
    assert set(seen["queues"]) == {"mail", "files"}


def test_worker_leaves_runs_of_other_queues(keepstep):
    """It does not wait for them either, though they are due."""
    keepstep("start", "program.py:total", "1", "--id", "t", "--queue", "files")
    for queue, status in (("mail", "queued"), ("files", "completed")):
        assert keepstep("worker", "program.py", "--until-idle", "--queue", queue).code == 0
        assert stored("t").status.value == status


def test_worker_says_what_it_keeps_by_default(keepstep, seen):
    told = keepstep("worker", "program.py", "--until-idle")
    assert told.code == 0
    assert "of finished runs it keeps those of the last 30 days, and the newest 1,000 of each workflow" in told.err
    assert "--keep-all keeps all" in told.err
    assert (seen["max_runs"], seen["retain"], seen["queues"]) == (1000, Retain(30.0, 1000), None)


def test_worker_with_keep_all_removes_nothing(keepstep, seen):
    told = keepstep("worker", "program.py", "--until-idle", "--keep-all")
    assert (told.code, seen["retain"]) == (0, False)
    assert "finished runs are all kept (--keep-all)" in told.err


def test_worker_names_the_rule_of_a_workflow(keepstep, folder):
    text = 'import keepstep as ks\n\n\n@ks.workflow(retain="delete_on_success")\nasync def ping():\n    pass\n'
    (folder / "brief.py").write_text(text, encoding="utf-8")
    told = keepstep("worker", "brief.py", "--until-idle").err
    assert "of ping: no completed ones; of the others those of the last 30 days, and the newest 1,000" in told


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


def test_doctor_follows_its_strict_and_stale_options(keepstep, monkeypatch):
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

    from keepstep.care import doctor

    real = doctor.examine
    monkeypatch.setattr(doctor, "examine", examine)
    keepstep("doctor", "--stale", "2", "--deep")
    keepstep("doctor")
    assert patience == [(120, True), (1800, False)]


@pytest.mark.parametrize("words", [["run", "program.py:total", "1"], ["worker", "program.py", "--until-idle"]])
def test_an_executor_is_the_default_of_plain_functions_and_an_unknown_one_is_refused(keepstep, words):
    program = Path("program.py")
    program.write_text(
        program.read_text(encoding="utf-8").replace(
            "async def add(a, b):\n    return a + b", "def add(a, b):\n    import os; return os.getpid()"
        ),
        encoding="utf-8",
    )
    refused = keepstep(*words, "--executor", "proces")
    assert refused.code == errors.USAGE
    assert "did you mean 'process'" in refused.err
    assert not Path(".keepstep").exists()
    assert keepstep("start", "program.py:total", "1", "--id", "t").code == errors.OK
    if words[0] == "run":
        words = ["run", "program.py:total", "--id", "t"]
    assert keepstep(*words, "--executor", "process").code == errors.OK
    assert int(keepstep("run", "program.py:total", "--id", "t").out) != os.getpid()
