"""`keepstep schedules`: what people type to see and change schedules."""

from __future__ import annotations

import pytest

from keepstep.cli import errors

PROGRAM = """
import keepstep as ks

@ks.workflow
async def greet(name: str, times: int = 1) -> str:
    return f"hello {name}" * times
"""


@pytest.fixture
def greeting(folder, keepstep):
    (folder / "greeting.py").write_text(PROGRAM, encoding="utf-8")
    told = keepstep("schedules", "add", "hi", "greeting.py:greet", "ada", "times=2", "--cron", "0 7 * * mon-fri")
    assert told.code == errors.OK
    assert "hi starts greet; the next tick is" in told.out
    assert "no worker drives 'greet' yet" in told.err
    return keepstep


def test_a_schedule_is_added_listed_and_shown(greeting):
    (one,) = greeting("schedules", "--json").json["schedules"]
    assert (one["schedule"], one["workflow"], one["declared"], one["attended"]) == ("hi", "greet", False, False)
    assert len(one["next"]) == 5
    assert "no worker knows its workflow" in greeting("schedules", "list").out
    shown = greeting("schedules", "show", "hi", "--ticks", "2", "--json").json
    assert shown["when"] == {"expression": "0 7 * * mon-fri"}
    assert len(shown["next"]) == 2
    assert "0 7 * * mon-fri (UTC); catch up: one, overlap: skip" in greeting("schedules", "show", "hi").out
    assert greeting("list", "--json").json["runs"] == []
    assert [run["id"] for run in greeting("list", "--prefix", "ks:", "--json").json["runs"]] == ["ks:schedule:hi"]


def test_a_worker_does_what_people_asked_for(greeting):
    for act in ("pause", "resume"):
        assert greeting("schedules", act, "hi", "--reason", "a test").code == errors.OK
    run = greeting("schedules", "trigger", "hi").out.strip()
    assert run.startswith("hi@")
    assert "ticks backfilled" in greeting("schedules", "backfill", "hi", "--from", "7d", "--to", "2d").out
    assert greeting("schedules", "remove", "hi").code == errors.OK
    assert greeting("schedules").out.strip() == "no schedules"
    assert greeting("show", "ks:schedule:hi").code == errors.OK
    assert greeting("history", "ks:schedule:hi").code == errors.OK
    assert greeting("audit", "ks:schedule:hi").code == errors.OK
    assert greeting("verify").code == errors.OK


@pytest.mark.parametrize(
    "words, code, problem",
    [
        ("show nobody", errors.NOT_FOUND, "no schedule 'nobody'"),
        ("pause nobody", errors.NOT_FOUND, "there are: hi"),
        ("shwo hi", errors.USAGE, "did you mean show"),
        ("add x greeting.py:greet ada", errors.USAGE, "use either --cron or --every"),
        ("add x greeting.py:greet ada --cron never", errors.USAGE, "has 1 fields, not 5"),
        ("add x greeting.py:greet ada --every 60 --tz UTC", errors.USAGE, "--tz is the time zone of --cron"),
        ("add x greeting.py:greet --every 60", errors.USAGE, "missing a required argument"),
        ("add x/y greeting.py:greet ada --every 60", errors.USAGE, "holds a path separator"),
    ],
)
def test_mistakes_get_a_sentence(greeting, words, code, problem):
    told = greeting("schedules", *words.split())
    assert told.code == code
    assert problem in told.err
    assert "Traceback" not in told.err
