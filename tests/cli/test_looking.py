"""`list`, `show`, `history`, `watch`, `audit` and `version`: what is told, and that looking changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys

import click
import pytest

import keepstep as ks
from keepstep.cli import errors
from tests.cli.conftest import ROOT


@pytest.fixture
def three(keepstep):
    """A finished run, a failed one, and one that waits for a worker."""
    keepstep("run", "program.py:total", "1", "--id", "done-1")
    keepstep("run", "program.py:call", "--id", "bad-1")
    keepstep("start", "program.py:approval", "--id", "new-1", "--tag", "a=b")


@pytest.mark.usefixtures("three")
def test_list_shows_the_newest_first(keepstep):
    done = keepstep("list")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["RUN", "new-1", "bad-1", "done-1"]
    assert "a worker" in done.out


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    "words, found",
    [
        (["--status", "failed"], ["bad-1"]),
        (["--status", "failed", "--status", "completed"], ["bad-1", "done-1"]),
        (["--status", "unfinished"], ["new-1"]),
        (["--status", "set-aside"], []),
        (["--workflow", "total"], ["done-1"]),
        (["--workflow", "total", "--workflow", "call"], ["bad-1", "done-1"]),
        (["--not-workflow", "total", "--not-workflow", "call"], ["new-1"]),
        (["--queue", "default", "--needs-person"], []),
        (["--queue", "other"], []),
        (["--open-failures"], ["bad-1"]),
        (["--awaits", "approve"], []),
        (["--since", "1h", "--created-after", "1h", "--before", "2999-01-01", "--workflow", "total"], ["done-1"]),
        (["--since", "2999-01-01"], []),
        (["--created-before", "1h"], []),
        (["--prefix", "n"], ["new-1"]),
        (["--tag", "a=b"], ["new-1"]),
        (["--tag", "a=c"], []),
        (["--limit", "2"], ["new-1", "bad-1"]),
    ],
)
def test_list_filters_runs(keepstep, words, found):
    assert [run["id"] for run in keepstep("list", "--json", *words).json["runs"]] == found


@pytest.mark.usefixtures("three")
def test_list_goes_on_where_a_page_ended(keepstep):
    seen, after = [], []
    for _ in range(3):
        page = keepstep("list", "--json", "--limit", "1", *after).json
        seen += [run["id"] for run in page["runs"]]
        after = ["--after", page["next"]]
    assert seen == ["new-1", "bad-1", "done-1"]
    assert page["next"] is None
    assert "keepstep list --after" in keepstep("list", "--limit", "1").out


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("words", [["--status", "flying"], ["--after", "x"], ["--limit", "0"], ["--tag", "x"]])
def test_list_refuses_what_it_does_not_know(keepstep, words):
    assert keepstep("list", *words).code == 2


@pytest.mark.usefixtures("three")
def test_show_reports_where_a_run_stands(keepstep):
    done = keepstep("show", "done-1")
    assert "completed" in done.out
    assert "result" in done.out
    assert "11" in done.out
    failed = keepstep("show", "bad-1")
    assert "ConnectionError" in failed.out
    assert "keepstep retry bad-1" in failed.out
    assert r"\x1b[31mdown" in failed.out
    assert "Traceback" not in failed.out
    assert "Traceback" in keepstep("show", "bad-1", "--traceback").out


def test_show_reports_what_was_spent(keepstep, folder):
    (folder / "spending.py").write_text(
        """
import keepstep as ks

@ks.step
async def ask(cost: float, tokens: int) -> None:
    ks.spend(cost, tokens, model="small")

@ks.workflow(budget=ks.Budget(tokens=3000))
async def research(cost: float) -> None:
    with ks.acting("critic"):
        for _ in range(5):
            await ask(cost, 1500)
"""
    )
    keepstep("run", "spending.py:research", "0.25", "--id", "costly")
    shown = keepstep("show", "costly")
    assert "cost 0.5, 3,000 tokens, in 2 steps" in shown.out
    assert "'ask#3' was not started: the budget of run 'costly' is used up, 3,000 of 3,000 tokens" in shown.out
    assert [line.split()[:3] for line in shown.out.splitlines() if line.startswith("by ")] == [
        ["by", "model", "small"],
        ["by", "agent", "critic"],
        ["by", "step", "ask"],
    ]
    whole = {"cost": 0.5, "tokens": 3000}
    parts = {"by_step": {"ask": whole}, "by_agent": {"critic": whole}, "by_model": {"small": whole}}
    assert keepstep("show", "costly", "--json").json["spent"] == {"steps": 2, **whole, **parts}


def test_a_run_whose_step_is_not_ready_is_shown_as_blocked(keepstep, folder):
    (folder / "closed.py").write_text(
        """
import keepstep as ks

@ks.step(ready=lambda: False, ready_every=3600)
async def sell() -> None: ...

@ks.workflow
async def shop() -> None:
    await sell()
"""
    )
    keepstep("start", "closed.py:shop", "--id", "shut")
    keepstep("worker", "closed.py", "--until-idle")
    assert "sell to be ready" in keepstep("show", "shut").out
    assert "sell to be ready" in keepstep("list").out
    assert keepstep("show", "shut", "--json").json["blocked"] == ["sell#1"]
    assert "run shut (shop) is blocked: sell#1 is not ready" in keepstep("doctor").out


@pytest.mark.usefixtures("three")
def test_history_shows_attempts_durations_and_failures(keepstep):
    done = keepstep("history", "bad-1")
    assert "attempt 1" in done.out
    assert "again after" in done.out
    assert "2 attempts failed" in done.out
    found = keepstep("history", "bad-1", "--json").json
    assert [(one["kind"], one["attempt"]) for one in found["checkpoints"]] == [
        ("run started", 0),
        ("step failed", 1),
        ("step failed", 2),
        ("run finished", 0),
    ]
    assert len(keepstep("history", "bad-1", "--failed", "--json").json["checkpoints"]) == 3
    assert len(keepstep("history", "bad-1", "--limit", "1", "--json").json["checkpoints"]) == 1
    assert keepstep("history", "bad-1", "--limit", "1").out.endswith(
        "\nbad-1: failed, 0 steps completed, 2 attempts failed\n"
    )


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    "words, end",
    [
        (["bad-1", "--failed"], "\n\nbad-1: failed, 2 attempts failed\n"),
        (["done-1", "--failed"], "done-1: completed, nothing has failed\n"),
        (["new-1"], "new-1: queued, nothing is recorded yet; waits for a worker\n"),
        (["new-1", "--failed"], "new-1: queued, nothing has failed; waits for a worker\n"),
    ],
)
def test_history_ends_with_the_run_in_a_sentence(keepstep, words, end):
    assert keepstep("history", *words).out.endswith(end)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("run, code", [("done-1", 0), ("bad-1", 1)])
def test_watch_shows_every_event_and_ends_as_the_run_did(keepstep, run, code):
    done = keepstep("watch", run, "--json")
    assert done.code == code
    events = [json.loads(line) for line in done.out.splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["name"] == "run.finished"
    first = keepstep("watch", run, "--json", "--after", "2").out.splitlines()[0]
    assert json.loads(first)["seq"] == 3
    assert "run.finished" in keepstep("watch", run).out


@pytest.mark.usefixtures("three")
def test_audit_shows_every_change_of_status(keepstep):
    done = keepstep("audit", "done-1")
    assert "queued → running" in done.out
    entries = keepstep("audit", "done-1", "--json").json["entries"]
    assert [(one["before"], one["after"]) for one in entries if one["before"] != one["after"]] == [
        (None, "queued"),
        ("queued", "running"),
        ("running", "completed"),
    ]
    assert len(keepstep("audit", "done-1", "--moves", "--json").json["entries"]) == 3


LONG = "x" * 5000


@pytest.mark.parametrize("command", ["history", "watch"])
def test_a_long_value_is_shown_in_brief_and_whole_when_asked_for(keepstep, command):
    keepstep("run", "program.py:echo", LONG, "--id", "e")
    brief = keepstep(command, "e").out
    assert "x" * 150 in brief
    assert "x" * 250 not in brief
    assert LONG in keepstep(command, "e", "--full").out


@pytest.mark.parametrize("command", ["history", "watch"])
def test_lines_fit_the_terminal(keepstep, command, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    keepstep("run", "program.py:echo", LONG, "--id", "e")
    lines = click.unstyle(keepstep(command, "e").out).splitlines()
    assert any(line.endswith("…") for line in lines)
    assert max(map(len, lines)) <= 60
    assert LONG in keepstep(command, "e", "--full").out


def test_version_is_printed(keepstep):
    assert ks.__version__ in keepstep("version").out
    assert keepstep("version", "--json").json["keepstep"] == ks.__version__
    assert keepstep("--version").out == f"keepstep {ks.__version__}\n"


# -- runs and stores that are not there --------------------------------------------------------------------------------

ABOUT_A_RUN = [
    ["show"],
    ["history"],
    ["watch"],
    ["audit"],
    ["pause"],
    ["resume"],
    ["cancel"],
    ["cancel", "--force"],
    ["retry"],
    ["approve"],
]


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("words", ABOUT_A_RUN, ids=" ".join)
def test_an_unknown_run_ends_with_3_and_suggests_the_nearest(keepstep, words):
    done = keepstep(words[0], "done-2", *words[1:])
    assert done.code == 3
    assert "did you mean done-1?" in done.err


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    "words", [["signal", "x", "go"], ["ask", "x", "go"], ["resolve", "x", "pay", "--again"]], ids=" ".join
)
def test_an_unknown_run_ends_with_3_for_the_others_too(keepstep, words):
    assert keepstep(*words).code == 3


@pytest.mark.parametrize("words", [["list"], ["doctor"], *([*one, "x"] for one in ABOUT_A_RUN)], ids=" ".join)
def test_looking_never_makes_a_store(keepstep, folder, words):
    done = keepstep(*words)
    assert done.code == 6
    assert "no store at .keepstep/runs.db" in done.err
    assert sorted(path.name for path in folder.iterdir()) == ["program.py"]


@pytest.mark.usefixtures("three")
def test_looking_changes_nothing(keepstep, folder):
    before = keepstep("show", "new-1", "--json").out
    for words in (["list"], ["show", "new-1"], ["history", "new-1"], ["audit", "new-1"], ["doctor"]):
        assert keepstep(*words).code == 0
    assert keepstep("show", "new-1", "--json").out == before


def test_another_applications_database_is_left_alone(keepstep, folder):
    import sqlite3

    with sqlite3.connect(folder / "other.db") as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()
    before = (folder / "other.db").read_bytes()
    done = keepstep("list", "--store", "other.db")
    assert done.code == 6
    assert "another application" in done.err
    assert (folder / "other.db").read_bytes() == before


def test_file_that_is_no_database_is_refused(keepstep, folder):
    (folder / "notes.txt").write_text("hello " * 200, encoding="utf-8")
    done = keepstep("list", "--store", "notes.txt")
    assert done.code == 6
    assert "not a SQLite database" in done.err


@pytest.mark.parametrize("words", [["list"], ["show", "x"], ["doctor"]], ids=" ".join)
def test_an_empty_file_is_no_store_and_stays_empty(keepstep, folder, words):
    (folder / "empty.db").touch()
    done = keepstep(*words, "--store", "empty.db")
    assert done.code == 6
    assert "no store at empty.db: the file is empty" in done.err
    assert (folder / "empty.db").read_bytes() == b""


def damaged(folder, statement):
    """The store of this folder, changed by a statement, as its path."""
    import apsw

    with contextlib.closing(apsw.Connection(str(folder / ".keepstep" / "runs.db"))) as database:
        database.execute(statement)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    "statement, said",
    [
        ("UPDATE keepstep_meta SET value = '99' WHERE name = 'schema'", "written by a newer Keepstep"),
        ("UPDATE keepstep_meta SET value = 'x' WHERE name = 'schema'", "its schema is 'x', which no Keepstep wrote"),
        ("DROP TABLE keepstep_head", "not a complete Keepstep store (no such table: keepstep_head)"),
    ],
)
def test_store_of_another_schema_is_refused(keepstep, folder, statement, said):
    damaged(folder, statement)
    for words in (["list"], ["show", "new-1"]):
        done = keepstep(*words)
        assert done.code == 6
        assert said in done.err
    done = keepstep("doctor")
    assert done.code in (1, 6)
    assert said in done.out + done.err


def test_commands_in_hints_name_the_store_that_was_named(keepstep, monkeypatch):
    there = ("--store", "my runs.db")
    name = "--store 'my runs.db'"
    started = keepstep("start", "program.py:approval", "--id", "w", *there)
    assert f"keepstep worker program.py {name}" in started.err
    shown = keepstep(*there, "show", "w").out
    assert f"keepstep history w {name}" in shown
    assert f"keepstep worker FILE.py {name}" in shown
    assert f"keepstep {name} worker FILE.py" in keepstep("doctor", *there).out
    failed = keepstep("run", "program.py:call", "--id", "bad", *there)
    assert f"keepstep retry bad {name} lets it go on" in failed.err
    assert f"keepstep list {name} lists" in keepstep("show", "zzz", *there).err
    monkeypatch.setenv("KEEPSTEP_STORE", "my runs.db")
    assert "--store" not in keepstep("show", "w").out


@pytest.mark.parametrize(
    "store, said",
    [
        ("postgresql://ann:s3cret@host:5432/db", "'postgresql://ann:***@host:5432/db'"),
        ("postgresql://ann:p@s:s3cret@host/db", "'postgresql://ann:***@host/db'"),
        ("postgresql://ann@host:5432/db", "postgresql://ann@host:5432/db"),
        ("postgresql://host/db?user=ann&password=s3cret", "'postgresql://host/db?user=ann&password=***'"),
        ("files:a@b", "files:a@b"),
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
    ],
)
def test_a_password_is_in_no_hint(store, said, monkeypatch):
    monkeypatch.setattr(errors.HERE, "store", store)
    assert errors.line("list") == f"keepstep list --store {said}"
    assert errors.advice("keepstep repair mends") == f"keepstep --store {said} repair mends"


DAMAGE = {
    "tags": "UPDATE keepstep_run SET tags = '{' WHERE id = 'new-1'",
    "status": "UPDATE keepstep_head SET status = 'flying' WHERE run = 'new-1'",
    "text": "UPDATE keepstep_run SET version = CAST(x'ff' AS TEXT) WHERE id = 'new-1'",
    "head": "DELETE FROM keepstep_run WHERE id = 'new-1'",
}


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_is_named_by_list_and_doctor(keepstep, folder, what):
    damaged(folder, DAMAGE[what])
    done = keepstep("list", *(["--status", "unfinished"] if what == "head" else []))
    assert done.code == 6
    assert "unreadable, because their rows are damaged: new-1 (keepstep doctor has details)" in done.err
    told = keepstep("list", "--json", "--status", "unfinished", "--status", "failed")
    assert (told.code, told.json["unreadable"], [run["id"] for run in told.json["runs"]]) == (6, ["new-1"], ["bad-1"])
    doctor = keepstep("doctor", "--json")
    assert doctor.code == 1
    [finding] = doctor.json["findings"]
    assert (finding["code"], finding["runs"]) == ("corrupt", ["new-1"])
    assert "run 'new-1': " in finding["message"]
    assert "restore the store from a backup" in finding["advice"]
    assert "keepstep repair --accept-loss new-1 shows" in finding["advice"]
    deep = keepstep("doctor", "--deep", "--json").json["findings"]
    assert [one["runs"] for one in deep if one["runs"]] == [["new-1"]]  # and what SQLite itself finds amiss


@pytest.mark.usefixtures("three")
def test_damaged_run_is_reported_and_not_shown(keepstep, folder):
    damaged(folder, DAMAGE["tags"])
    for words in (["show", "new-1"], ["history", "new-1"], ["signal", "new-1", "go"], ["cancel", "new-1"]):
        done = keepstep(*words)
        assert done.code == 6
        assert "run 'new-1': its row cannot be read" in done.err


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    "statement, said",
    [
        ("UPDATE keepstep_checkpoint SET record = '{' WHERE run = 'done-1' AND seq = 2", "the record at seq 2"),
        ("UPDATE keepstep_checkpoint SET body = 5 WHERE run = 'done-1' AND seq = 2", "the value at seq 2"),
        ("DELETE FROM keepstep_checkpoint WHERE run = 'done-1' AND seq = 2", "seq 2"),
        ("UPDATE keepstep_signal SET payload = '{' WHERE run = 'new-1'", "its signal 1 cannot be read"),
        ("UPDATE keepstep_signal SET sent_at = 'x' WHERE run = 'new-1'", "its signal 1 cannot be read"),
    ],
)
def test_damage_behind_a_run_is_found_by_the_deep_doctor(keepstep, folder, statement, said):
    keepstep("signal", "new-1", "early")
    damaged(folder, statement)
    assert keepstep("list").code == 0
    doctor = keepstep("doctor", "--deep", "--json")
    assert doctor.code == 1
    [found] = [one for one in doctor.json["findings"] if one["severity"] == "error"]
    assert said in found["message"]
    assert found["runs"] == ["done-1" if "done-1" in statement else "new-1"]


@pytest.mark.usefixtures("three")
def test_damaged_row_of_a_worker_is_found_by_the_doctor(keepstep, folder):
    damaged(folder, "INSERT INTO keepstep_worker VALUES ('w', 'h', 'x', 0, 0, 'b', 0, '', '{}', NULL, NULL, NULL)")
    doctor = keepstep("doctor", "--json")
    assert [(one["code"], one["worker"]) for one in doctor.json["findings"] if one["worker"]] == [("worker-row", "w")]
    assert keepstep("show", "new-1").code == 0


def test_a_folder_is_no_store(keepstep, folder):
    (folder / "dir.db").mkdir()
    done = keepstep("list", "--store", "dir.db")
    assert done.code == 6
    assert "it is a folder" in done.err


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    "words, name",
    [
        (["list", "--nope"], "usage"),
        (["show", "nobody"], "not-found"),
        (["list", "--store", "none.db"], "store"),
        (["retry", "done-1"], "conflict"),
        (["ask", "new-1", "go", "--timeout", "0.05"], "timed-out"),
    ],
)
def test_an_error_as_json_has_a_name_that_stays(keepstep, words, name):
    from keepstep.cli import errors

    done = keepstep(*words, "--json")
    told = json.loads(done.err)
    assert list(told) == ["error", "message", "hint", "exit"]
    assert (told["error"], told["exit"]) == (name, done.code)
    assert errors.NAMES[done.code] == name
    assert told["message"]


def test_an_unknown_kind_of_store_is_a_usage_error(keepstep):
    done = keepstep("list", "--store", "redis://x")
    assert done.code == 2
    assert "redis:" in done.err


def test_missing_folder_is_reported(keepstep):
    done = keepstep("run", "program.py:total", "1", "--store", "nowhere/runs.db")
    assert done.code == 6
    assert "does not exist" in done.err


@pytest.mark.usefixtures("three")
def test_store_is_chosen_by_option_or_by_the_environment(keepstep, monkeypatch):
    keepstep("start", "program.py:total", "1", "--store", "other.db", "--id", "x")
    for words in (["--store", "other.db", "list", "--json"], ["list", "--store", "other.db", "--json"]):
        assert [run["id"] for run in keepstep(*words).json["runs"]] == ["x"]
    monkeypatch.setenv("KEEPSTEP_STORE", "other.db")
    assert [run["id"] for run in keepstep("list", "--json").json["runs"]] == ["x"]
    assert len(keepstep("--store", ".keepstep/runs.db", "list", "--json").json["runs"]) == 3


def test_the_default_folder_keeps_itself_out_of_version_control(keepstep, folder):
    keepstep("start", "program.py:total", "1")
    assert (folder / ".keepstep" / ".gitignore").read_text(encoding="ascii") == "*\n"


# -- the door itself ---------------------------------------------------------------------------------------------------


def test_help_names_every_command(keepstep):
    from keepstep.cli import COMMANDS

    done = keepstep("--help")
    assert done.code == 0
    width = max(map(len, COMMANDS))
    for name, (_, text) in COMMANDS.items():
        assert f"\n  {name:<{width}}  {text}\n" in done.out
        told = keepstep(name, "--help")
        assert told.code == 0
        assert "--json" in told.out
        assert "--store" in told.out


@pytest.mark.parametrize("words", [["lst"], ["list", "--nope"], ["show"], ["list", "extra"]])
def test_wrong_usage_ends_with_2(keepstep, words):
    assert keepstep(*words).code == 2


def test_a_misspelt_command_is_corrected(keepstep):
    assert "did you mean list?" in keepstep("lst").err


def test_unexpected_error_is_brief_and_whole_with_debug(keepstep, monkeypatch):
    from keepstep.cli.settings import Settings

    def broken(*_, **__):
        raise ZeroDivisionError("inside Keepstep")

    monkeypatch.setattr(Settings, "talk", broken)
    done = keepstep("doctor")
    assert done.code == 70
    assert "ZeroDivisionError: inside Keepstep" in done.err
    assert "--debug" in done.err
    assert "Traceback" in keepstep("doctor", "--debug").err


@pytest.mark.usefixtures("three")
def test_a_reader_that_leaves_early_is_no_error(folder):
    command = (
        f"{sys.executable} -c 'from keepstep.cli import main; import sys; sys.exit(main())' history bad-1 --values"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} | true"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    "words,code",
    [("list >&-", 0), ("--json show done-1 >&-", 0), ("show nobody 2>&-", 3), ("list <&- >&- 2>&-", 0)],
)
def test_closed_streams_change_no_exit_code(folder, words, code):
    command = f"{sys.executable} -c 'from keepstep.cli import main; import sys; sys.exit(main())' {words}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("words", [["--help"], ["list"], ["show", "done-1"], ["history", "done-1"]], ids=" ".join)
def test_commands_start_without_slow_imports(words):
    script = "import sys; from keepstep.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    slow = {
        "rich",
        "pydantic",
        "importlib.metadata",
        "subprocess.Popen",
        "keepstep.testing",
        "unittest",
        "multiprocessing",
    }
    assert slow & set(done.stderr.split()) == set()


def test_values_of_unknown_types_are_shown_as_plain_data(keepstep, folder):
    (folder / "typed.py").write_text(
        "from dataclasses import dataclass\nimport keepstep as ks\n\n\n@dataclass\nclass Spot:\n    x: int\n\n\n"
        "ks.register(Spot)\n\n\n@ks.workflow\nasync def place() -> Spot:\n    ks.publish('where', Spot(1))\n"
        "    return Spot(2)\n",
        encoding="utf-8",
    )
    assert keepstep("run", "typed.py:place", "--id", "p").code == 0
    shown = keepstep("show", "p", "--json").json
    assert (shown["result"], shown["published"]) == ({"x": 2}, {"where": {"x": 1}})
    assert '{"x": 1}' in keepstep("show", "p").out


def test_inputs_of_steps_are_shown_where_they_are_stored(keepstep, folder):
    (folder / "inputs.py").write_text(
        """
import keepstep as ks

@ks.step
async def price(item, count):
    return len(item) * count

@ks.step
async def measure(text):
    return len(text)

@ks.workflow(record_input=True)
async def recorded():
    await price("chair", count=3)
    await measure("x" * 200_000)

@ks.workflow
async def plain():
    await price("chair", count=3)
"""
    )
    assert keepstep("run", "inputs.py:recorded", "--id", "with").code == 0
    assert keepstep("run", "inputs.py:plain", "--id", "without").code == 0
    shown = keepstep("history", "with", "--full").out
    assert 'input item="chair", count=3' in shown
    assert "input of 200,011 bytes, too large to be stored" in shown
    assert "chair" not in keepstep("history", "with").out
    steps = [one for one in keepstep("history", "with", "--json").json["checkpoints"] if one["step"]]
    assert [(one["input"], one["input_bytes"]) for one in steps] == [
        ({"item": "chair", "count": 3}, None),
        (None, 200_011),
    ]
    assert "stored of 2 steps (keepstep history with --full)" in keepstep("show", "with").out
    assert keepstep("show", "with", "--json").json["step_inputs"] == 2
    assert "not stored; record_input=True of a step or workflow stores them" in keepstep("show", "without").out
    assert keepstep("show", "without", "--json").json["step_inputs"] == 0


@pytest.mark.usefixtures("three")
def test_show_reports_requests_that_are_not_done_yet(keepstep):
    keepstep("pause", "new-1")
    assert "to pause, by " in keepstep("show", "new-1").out
    keepstep("resume", "new-1")
    assert "not done yet" not in keepstep("show", "new-1").out
    assert keepstep("worker", "program.py", "--until-idle").code == 0  # a run that has not begun would end at once
    keepstep("cancel", "new-1")
    shown = keepstep("show", "new-1").out
    assert "to cancel, by " in shown
    assert "not done yet" in shown
    assert keepstep("show", "new-1", "--json").json["asked"]["for"] == "cancel"


PATCHED = """
import keepstep as ks


@ks.step
async def write():
    return "text"


@ks.workflow
async def article():
    await write()
    {change}
    return await ks.wait_for("go", timeout=3600)
"""


def test_history_shows_the_patch_path_and_audit_no_duration_of_a_wait(keepstep, folder):
    def works(change, *runs):
        (folder / "article.py").write_text(PATCHED.format(change=change), encoding="utf-8")
        for run in runs:
            keepstep("start", "article.py:article", "--id", run)
        assert keepstep("worker", "article.py", "--until-idle").code == 0

    works("", "old")
    keepstep("signal", "old", "go")
    works("ks.patched('note')", "new")
    paths = {
        run: [line for line in keepstep("history", run).out.splitlines() if "note" in line] for run in ("old", "new")
    }
    assert "the old path" in paths["old"][0]
    assert "the new path" in paths["new"][0]
    [waited] = [line for line in keepstep("audit", "new").out.splitlines() if "wait started" in line]
    assert " in " not in waited


def test_show_and_history_name_the_users_line(keepstep, folder):
    (folder / "lines.py").write_text(
        "import keepstep as ks\n\n@ks.step\nasync def parse(data):\n    return data['missing']\n\n"
        "@ks.workflow\nasync def reading():\n    return await parse({})\n",
        encoding="utf-8",
    )
    told = keepstep("run", "lines.py", "--id", "r").err
    assert re.search(r'keepstep: run \'r\' failed: step .*\n +File ".*lines\.py", line 9, in reading', told)
    shown = keepstep("show", "r").out
    assert re.search(r'File ".*lines\.py", line 9, in reading\n +return await parse\(\{\}\)', shown)
    assert re.search(r"File \".*lines\.py\", line 5, in parse\n +return data\['missing'\]", shown)
    assert "site-packages" not in shown
    assert "kernel" not in shown
    assert "keepstep retry r" in shown
    assert "KeyError: 'missing'; lines.py:5 in parse" in keepstep("history", "r").out
    frames = keepstep("show", "r", "--json").json["error"]["frames"]
    assert [(frame["line"], frame["function"], frame["source"]) for frame in frames] == [
        (9, "reading", "return await parse({})"),
        (5, "parse", "return data['missing']"),
    ]
    failed = keepstep("history", "r", "--json", "--failed").json["checkpoints"][0]
    assert [frame["function"] for frame in failed["error"]["frames"]] == ["parse"]


def test_failed_attempt_is_reported_once_with_the_next_one(keepstep, folder, caplog):
    (folder / "flaky.py").write_text(
        "import keepstep as ks\n\n@ks.step(retry=ks.Retry(attempts=2, base_seconds=0.05, jitter=0))\n"
        "async def flaky():\n    raise ValueError('no')\n\n"
        "@ks.workflow\nasync def trying():\n    return await flaky()\n",
        encoding="utf-8",
    )
    done = keepstep("run", "flaky.py", "--id", "r")
    assert done.err.count("attempt 1") == 1
    assert re.search(r"flaky .*attempt 1  ValueError: no  \(again in \d+ ms\)", done.err)
    assert not any("of step flaky#1 failed" in record.getMessage() for record in caplog.records)


FAMILY = """
import keepstep as ks


@ks.workflow
async def small() -> str:
    return await ks.wait_for("ready")


@ks.workflow
async def large() -> str:
    child = await ks.start(small, run_id="little")
    return await child.result()


@ks.workflow
async def late() -> str:
    return await ks.wait_for("ok", timeout=0.01, default="nobody")


@ks.workflow
async def cut() -> str:
    try:
        async with ks.timeout(0.01):
            await ks.wait_for("ok")
    except ks.TimedOut:
        return "cut"


asking = ks.Graph("asking")
asking.wait("gate", signal="ok", into="ok", timeout=0.01, default=None)
asking.wait("door", signal="go", into="go", timeout=0.01, default=None)
asking.edge("gate", "door")
asking.entry("gate")
asking.exit("door")
"""


def test_show_of_a_parent_names_its_child_and_how_that_stands(keepstep, folder):
    (folder / "family.py").write_text(FAMILY, encoding="utf-8")
    keepstep("start", "family.py:large", "--id", "big")
    assert keepstep("worker", "family.py", "--until-idle").code == 0
    shown = keepstep("show", "big").out
    assert "child little (small), waiting; it waits for signal ready" in " ".join(shown.split())
    assert "keepstep show little" in shown
    assert keepstep("show", "big", "--json").json["children"][0] | {"call": ""} == {
        "call": "",
        "id": "little",
        "status": "waiting",
    }
    keepstep("pause", "little")
    assert keepstep("worker", "family.py", "--until-idle").code == 0
    assert "child little (small), paused" in " ".join(keepstep("show", "big").out.split())


@pytest.mark.parametrize("workflow, step", [("late", "wait_for:ok"), ("cut", "timeout")])
def test_a_timed_out_wait_is_not_shown_as_done(keepstep, folder, workflow, step):
    (folder / "family.py").write_text(FAMILY, encoding="utf-8")
    told = keepstep("run", f"family.py:{workflow}", "--id", "r")
    assert told.code == 0
    line = next(line for line in told.err.splitlines() if step in line and "timed out" in line)
    assert "✓" not in line
    assert f"✓ {step}" not in told.err
    drawn = keepstep("graph", "--run", "r").out
    assert f"✓ {step}" not in drawn
    assert '"timed out"' in keepstep("graph", "--run", "r", "--json").out


def test_a_wait_of_a_graph_that_timed_out_is_not_drawn_as_done(keepstep, folder):
    (folder / "family.py").write_text(FAMILY, encoding="utf-8")
    keepstep("start", "family.py:asking", "--id", "r")
    keepstep("signal", "r", "ok")
    assert keepstep("worker", "family.py", "--until-idle").code == 0
    drawn = keepstep("graph", "family.py:asking", "--run", "r").out
    assert "✓ gate" in drawn
    assert "◷ door" in drawn


def test_show_names_a_signal_that_does_not_fit_the_wait(keepstep, folder):
    (folder / "typed.py").write_text(
        "from dataclasses import dataclass\nimport keepstep as ks\n\n@dataclass\nclass Verdict:\n    score: float\n\n"
        "@ks.workflow\nasync def judged() -> float:\n    return (await ks.wait_for('verdict', type=Verdict)).score\n",
        encoding="utf-8",
    )
    keepstep("start", "typed.py", "--id", "r")
    assert keepstep("worker", "typed.py", "--until-idle").code == 0
    assert "unread" not in keepstep("show", "r").out
    keepstep("approve", "r", "verdict")
    assert keepstep("worker", "typed.py", "--until-idle").code == 0
    shown = " ".join(keepstep("show", "r").out.split())
    assert "unread signal verdict 1 from" in shown
    assert "does not fit the type of the wait; send one that fits" in shown
    assert keepstep("show", "r", "--json").json["unread"][0]["signal"] == "verdict"
    keepstep("signal", "r", "verdict", '{"score": 0.5}')
    assert keepstep("worker", "typed.py", "--until-idle").code == 0
    assert "unread" not in keepstep("show", "r").out


@pytest.mark.usefixtures("three")
def test_explain_tells_why_a_run_failed_and_what_helps(keepstep):
    told = keepstep("explain", "bad-1", "--rewind-to", "0").out
    assert "Step fragile failed 2 times and had no attempt left." in told
    assert "ConnectionError: the line is \\x1b[31mdown" in told
    assert "program.py" in told
    assert "Called again: fragile." in told
    assert "keepstep retry bad-1" in told
    assert "keepstep rewind bad-1 --to 0" in told
    found = keepstep("explain", "bad-1", "--json").json
    assert (found["failure"]["step"], found["retry"]["again"]) == ("fragile#1", ["fragile#1"])
    assert "keepstep explain bad-1" in keepstep("show", "bad-1").out


@pytest.mark.usefixtures("three")
def test_explain_names_the_store_in_its_commands(keepstep, tmp_path):
    (tmp_path / ".keepstep" / "runs.db").rename(tmp_path / "other.db")
    told = keepstep("--store", "other.db", "explain", "new-1").out
    assert "No living worker knows workflow approval." in told
    assert "keepstep worker FILE.py --store other.db" in told
    assert keepstep("--store", "other.db", "explain", "new-9").code == errors.NOT_FOUND
    assert keepstep("--store", "other.db", "explain", "new-1", "--rewind-to", "1", "--rewind-step", "a").code == 2
