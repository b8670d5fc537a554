"""`retry` and `cancel` of every run that a filter selects."""

from __future__ import annotations

import sys

import click
import pytest

from tests.cli.test_looking import damaged


@pytest.fixture
def status(keepstep):
    return lambda run: keepstep("show", run, "--json").json["status"]


@pytest.fixture
def failed(keepstep, folder):
    """Three failed runs of one workflow, and one that is queued."""
    for name in ("a", "b", "c"):
        keepstep("run", "program.py:call", "--id", name, "--tag", f"letter={name}")
    keepstep("start", "program.py:approval", "--id", "q")
    (folder / "mended").touch()


@pytest.mark.usefixtures("failed")
def test_selected_runs_are_counted_and_left_without_yes(keepstep, status):
    done = keepstep("retry", "--workflow", "call")
    assert done.code == 2
    assert "3 runs selected (3 failed)" in done.err
    assert "call: 3" in done.err
    assert "add --yes" in done.err
    assert status("a") == "failed"


@pytest.mark.usefixtures("failed")
def test_yes_retries_the_selected_runs_and_no_other(keepstep, status):
    assert keepstep("retry", "--workflow", "call", "--tag", "letter=b", "--yes").out == "1 run retried\n"
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    assert [status(name) for name in "abc"] == ["failed", "completed", "failed"]
    answer = keepstep("retry", "--status", "failed", "--limit", "1", "--yes", "--json").json
    assert (answer["matched"], answer["changed"], answer["refused"]) == (1, 1, [])


@pytest.mark.usefixtures("failed")
def test_a_question_on_a_terminal_decides(keepstep, status, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", lambda *_, **__: False)
    assert keepstep("cancel", "--workflow", "approval").code == 130
    assert status("q") == "queued"
    monkeypatch.setattr(click, "confirm", lambda *_, **__: True)
    done = keepstep("cancel", "--workflow", "approval", "--reason", "no longer wanted")
    assert (done.code, done.out) == (0, "1 run cancelled\n")
    assert status("q") == "cancelled"
    assert "no longer wanted" in keepstep("show", "q").out


@pytest.mark.usefixtures("failed")
def test_cancel_says_how_many_runs_a_worker_has_yet_to_stop(keepstep, status):
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    keepstep("start", "program.py:approval", "--id", "new")
    done = keepstep("cancel", "--workflow", "approval", "--yes")
    assert done.code == 0
    assert "1 run cancelled" in done.out
    assert "1 run asked to stop; a worker carries this out" in done.out
    assert "no worker drives approval now: keepstep worker FILE.py" in done.err
    assert (status("new"), status("q")) == ("cancelled", "waiting")
    assert keepstep("cancel", "--prefix", "q", "--force", "--yes").out == "1 run cancelled\n"
    assert status("q") == "cancelled"


@pytest.mark.usefixtures("failed")
def test_dry_run_counts_and_an_empty_selection_is_said(keepstep, status):
    done = keepstep("retry", "--status", "failed", "--dry-run")
    assert (done.code, done.out.splitlines()[0]) == (0, "3 runs selected (3 failed)")
    assert keepstep("retry", "--older-than", "1d", "--yes").out.startswith("no run in ")
    assert len(keepstep("list", "--older-than", "0s", "--json").json["runs"]) == 4
    assert keepstep("list", "--older-than", "1d", "--json").json["runs"] == []
    assert status("a") == "failed"


@pytest.mark.usefixtures("failed")
@pytest.mark.parametrize(
    "words, message",
    [
        (["retry"], "name the RUN to retry, or select runs"),
        (["cancel", "--yes"], "name the RUN to cancel, or select runs"),
        (["retry", "a", "--status", "failed"], "not both"),
        (["cancel", "q", "--dry-run"], "not for a single RUN"),
        (["retry", "--status", "completed"], "a run that is completed cannot be retried"),
        (["cancel", "--status", "failed"], "a run that is failed cannot be cancelled"),
    ],
)
def test_an_unclear_selection_is_refused(keepstep, status, words, message):
    done = keepstep(*words)
    assert done.code == 2
    assert message in done.err
    assert (status("a"), status("q")) == ("failed", "queued")


@pytest.mark.usefixtures("failed")
def test_a_run_that_cannot_be_changed_is_named_and_stops_no_other(keepstep, status, monkeypatch):
    from keepstep import errors
    from keepstep.engine.handle import RunHandle

    retry = RunHandle.retry

    async def flaky(self, *args, **kwargs):
        if self.id == "b":
            raise errors.RunConflict("run 'b' is driven by another", "b")
        await retry(self, *args, **kwargs)

    monkeypatch.setattr(RunHandle, "retry", flaky)
    done = keepstep("retry", "--status", "failed", "--yes")
    assert done.code == 7
    assert "2 runs retried" in done.out
    assert "refused: run 'b' is driven by another" in done.out
    assert (status("a"), status("b"), status("c")) == ("queued", "failed", "queued")


@pytest.mark.usefixtures("failed")
def test_damaged_runs_are_named_and_do_not_stop_the_others(keepstep, folder):
    damaged(folder, "UPDATE keepstep_run SET tags = '{' WHERE id = 'b'")
    counted = keepstep("retry", "--workflow", "call", "--dry-run", "--json")
    assert (counted.code, counted.json["matched"], counted.json["unreadable"]) == (6, 2, ["b"])
    done = keepstep("retry", "--workflow", "call", "--yes")
    assert (done.code, done.out) == (6, "2 runs retried\n")
    assert "unreadable, because their rows are damaged: b" in done.err
