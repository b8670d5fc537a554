"""`recover` and `aside`: what a recovery would do, asking for it, and the runs that wait for a person."""

from __future__ import annotations

import pytest

from tests.cli.test_runs import wait_for

ASKING = """
import keepstep as ks


@ks.step
async def prepare():
    return 1


@ks.workflow(name="asking", version="1")
async def asking():
    await prepare()
    return await ks.wait_for("approved")
"""

GRAPH = """
import keepstep as ks

graph = ks.Graph("review")


@graph.step
async def draft(state):
    return {"text": "first"}


@graph.step
async def judge(state):
    if "score" not in state:
        raise LookupError("no score")
    return {"done": True}


graph.edge("draft", "judge")
graph.entry("draft")
graph.exit("judge")
"""


@pytest.fixture
def status(keepstep):
    return lambda run: keepstep("show", run, "--json").json["status"]


@pytest.fixture
def aside(keepstep, folder):
    """Two runs that are set aside, because their workflow has another version now."""
    (folder / "first.py").write_text(ASKING, encoding="utf-8")
    (folder / "changed.py").write_text(ASKING.replace('version="1"', 'version="2"'), encoding="utf-8")
    for name in ("a", "b"):
        assert keepstep("start", "first.py:asking", "--id", name, "--tag", f"letter={name}").code == 0
    assert keepstep("worker", "first.py", "--until-idle").code == 0
    for name in ("a", "b"):
        keepstep("signal", name, "approved")
    keepstep("worker", "changed.py", "--until-idle")


@pytest.mark.usefixtures("aside")
def test_aside_lists_reason_phase_and_attempts(keepstep):
    done = keepstep("aside")
    assert done.code == 0
    assert done.out.count("workflow 'asking' has changed") == 2
    answer = keepstep("aside", "list", "--tag", "letter=a", "--json").json
    [one] = answer["runs"]
    assert (one["id"], one["kind"], one["phase"], one["attempts"]) == ("a", "DefinitionChanged", "validate", 1)
    assert one["problems"] == [one["reason"]]
    assert keepstep("aside", "list", "--status", "failed").code == 2
    assert keepstep("aside", "lst").code == 2


@pytest.mark.usefixtures("aside")
def test_aside_retry_and_drop_take_a_run_or_filters(keepstep, status):
    assert keepstep("aside", "retry").code == 2
    assert keepstep("aside", "retry", "--tag", "letter=a").code == 2  # without --yes
    assert keepstep("aside", "retry", "--tag", "letter=a", "--yes").out == "1 run retried\n"
    assert [status(name) for name in "ab"] == ["queued", "set aside"]
    refused = keepstep("aside", "drop", "a")
    assert (refused.code, "not set aside" in refused.err) == (7, True)
    assert keepstep("aside", "drop", "b", "--reason", "a test").out == "b is dropped\n"
    assert status("b") == "cancelled"
    assert keepstep("aside", "drop", "nobody").code == 3
    assert keepstep("aside", "drop", "--workflow", "asking", "--yes").out.startswith("no run in ")
    assert keepstep("worker", "first.py", "--until-idle").code == 0
    assert status("a") == "completed"


def test_aside_edit_changes_states_in_bulk(keepstep, folder, status):
    (folder / "graphs.py").write_text(GRAPH, encoding="utf-8")
    (folder / "other.py").write_text(GRAPH.replace('"review"', '"review", version="2"'), encoding="utf-8")
    for name in ("x", "y"):
        keepstep("start", "graphs.py:graph", "--id", name)
    keepstep("worker", "graphs.py", "--until-idle")
    for name in ("x", "y"):
        keepstep("retry", name)
    keepstep("worker", "other.py", "--until-idle")
    assert [status(name) for name in "xy"] == ["set aside", "set aside"]
    assert "LookupError: no score" in keepstep("aside").out
    assert keepstep("aside", "edit", "x").code == 2
    done = keepstep("aside", "edit", "--workflow", "review", "--set", "score=1", "--yes", "--json").json
    assert (done["matched"], done["changed"]) == (2, 2)
    assert keepstep("worker", "graphs.py", "--until-idle").code == 0
    assert [status(name) for name in "xy"] == ["completed", "completed"]


@pytest.mark.usefixtures("aside")
def test_dry_run_tells_whether_and_how_and_changes_nothing(keepstep, status):
    can = keepstep("recover", "a", "first.py:asking", "--dry-run", "--json")
    assert can.code == 0
    assert {name: can.json[name] for name in ("recoverable", "handler", "next", "checked")} == {
        "recoverable": True,
        "handler": "continue",
        "next": ["wait_for:approved#1"],
        "checked": True,
    }
    cannot = keepstep("recover", "a", "changed.py:asking", "--dry-run")
    assert (cannot.code, "cannot be recovered" in cannot.out) == (1, True)
    assert "has changed since the run began" in cannot.out
    assert status("a") == "set aside"


@pytest.mark.usefixtures("aside")
def test_recover_lets_a_run_go_on_unvalidated(keepstep, status):
    done = keepstep("recover", "a", "--skip-validation", "--reason", "only a comment changed")
    assert (done.code, "asked a worker to recover a" in done.out) == (0, True)
    twice = keepstep("recover", "a")
    assert (twice.code, "is being recovered already" in twice.err) == (7, True)
    assert keepstep("worker", "changed.py", "--until-idle").code == 0
    assert status("a") == "completed"
    complete = keepstep("recover", "a", "--json")
    assert (complete.code, "already complete" in complete.err) == (7, True)
    assert keepstep("recover", "a", "--dry-run").code == 7
    assert "only a comment changed" in keepstep("audit", "a").out


def test_recover_skips_a_failed_step_with_a_value(keepstep, status):
    assert keepstep("run", "program.py:call", "--id", "r").code == 1
    assert keepstep("recover", "r", "--value", "1").code == 2
    assert keepstep("recover", "r", "--handler", "skip step", "--value", "nonsense{").code == 2
    assert keepstep("recover", "nobody").code == 3
    assert (
        keepstep("recover", "r", "--handler", "skip step", "--value", '"by hand"', "--json").json["asked"] == "recover"
    )
    keepstep("worker", "program.py", "--until-idle")
    assert status("r") == "completed"


def test_unknown_handler_sets_the_run_aside_and_tells_what_to_register(keepstep, status):
    keepstep("run", "program.py:call", "--id", "r")
    assert keepstep("recover", "r", "--handler", "page ops").code == 0
    keepstep("worker", "program.py", "--until-idle")
    assert status("r") == "set aside"
    [one] = keepstep("aside", "list", "--json").json["runs"]
    assert (one["kind"], one["phase"]) == ("HandlerMissing", "handler")
    assert "@ks.recovery_handler('page ops')" in one["reason"]


HANGING = """
import asyncio
from pathlib import Path

import keepstep as ks


@ks.step
async def charge():
    return 1


@ks.step
async def ship():
    Path("hanging").touch()
    await asyncio.sleep(600)


@ks.workflow(name="hanging")
async def hanging():
    return await charge(), await ship()
"""


@pytest.mark.crash
def test_run_of_a_killed_worker_is_recovered_by_hand(keepstep, spawn, folder, status):
    (folder / "hanging.py").write_text(HANGING, encoding="utf-8")
    worker = spawn("worker", "hanging.py")
    keepstep("start", "hanging.py:hanging", "--id", "r")
    wait_for((folder / "hanging").exists)
    alive = keepstep("recover", "r", "--handler", "undo")
    assert (alive.code, "which is alive" in alive.err) == (7, True)
    worker.kill()
    worker.wait()
    plan = keepstep("recover", "r", "hanging.py:hanging", "--dry-run")
    assert plan.code == 0
    assert "r can be recovered: its worker is dead" in plan.out
    assert [line.split() for line in plan.out.splitlines()[1:]] == [
        ["last", "success:", "charge#1"],
        ["next:", "ship#1"],
        ["handler:", "continue"],
        ["runs", "again:", "ship#1"],
    ]
    asked = ("--handler", "skip step", "--value", '"by hand"', "--reason", "sent on Monday")
    assert keepstep("recover", "r", *asked).code == 0
    assert keepstep("worker", "hanging.py", "--until-idle").code == 0
    assert keepstep("show", "r", "--json").json["result"] == [1, "by hand"]
    assert "sent on Monday" in keepstep("audit", "r").out


UNDOING = """
import keepstep as ks

graph = ks.Graph("trip")


async def release(after, state):
    pass


@graph.step(undo=release)
async def reserve(state):
    return {"reserved": True}


@graph.step
async def pay(state):
    raise ValueError("no money")


graph.edge("reserve", "pay")
graph.entry("reserve")
graph.exit("pay")
"""


def test_no_command_that_would_be_refused_is_named_after_an_undo(keepstep, folder):
    (folder / "trips.py").write_text(UNDOING, encoding="utf-8")
    failed = keepstep("run", "trips.py:graph", "--id", "t")
    assert (failed.code, "keepstep history t" in failed.err) == (1, True)
    assert "keepstep retry t" not in failed.err
    assert "keepstep edit t" not in failed.err
    before = keepstep("show", "t", "--json").json
    for refused in (keepstep("edit", "t", "--set", "reserved=false"), keepstep("retry", "t")):
        assert (refused.code, "has undone its steps" in refused.err) == (7, True)
    assert keepstep("show", "t", "--json").json == before
    plan = keepstep("rewind", "t", "--to", "1", "--dry-run")
    assert plan.out.splitlines()[1].split(": ")[1] == "reserve#1, pay#1"


MISTYPED = """
import keepstep as ks


@ks.step
def reserve(state):
    return {}


@ks.workflow(recovery="skipstep")
async def mistyped():
    return 1
"""

MISTYPED_FILE = """
keepstep: 1
metadata: {name: mistyped-file}
policies:
  resilience:
    recovery: {handler: skipp stp}
steps:
  reserve: {}
"""


def test_mistyped_handler_is_told_before_a_crash(keepstep, folder, caplog):
    (folder / "mistyped.py").write_text(MISTYPED, encoding="utf-8")
    (folder / "mistyped.yaml").write_text(MISTYPED_FILE, encoding="utf-8")
    assert keepstep("worker", "mistyped.py", "--until-idle").code == 0
    [warning] = [one.getMessage() for one in caplog.records if "recovery handler" in one.getMessage()]
    assert "workflow 'mistyped': no recovery handler is named 'skipstep'" in warning
    assert "did you mean 'skip step'?" in warning
    checked = keepstep("validate", "mistyped.yaml", "--module", "mistyped.py")
    assert checked.code == 1
    assert "mistyped.yaml:6:25: error: policies.resilience.recovery: no recovery handler is named" in checked.out
    assert "did you mean 'skip step'?" in checked.out
    alone = keepstep("validate", "mistyped.yaml")
    assert (alone.code, "warning: policies.resilience.recovery" in alone.out) == (0, True)
    assert keepstep("validate", "mistyped.yaml", "--strict").code == 1
    deployed = keepstep("check", "mistyped.py")
    assert (deployed.code, "warning: workflow 'mistyped': no recovery handler is named" in deployed.err) == (0, True)
    strict = keepstep("check", "mistyped.py:mistyped", "--strict", "--json")
    assert (strict.code, len(strict.json["warnings"])) == (1, 1)


DECIDING = """
import keepstep as ks


@ks.step
async def ship():
    raise ks.Permanent("no carrier")


def careful(info):
    return "continue"


@ks.workflow(recovery=ks.Recovery("skip step", value={"by": "hand"}))
async def skipping():
    return await ship()


@ks.workflow(recovery=ks.Recovery("set aside", reason="look first"))
async def leaving():
    return await ship()


@ks.workflow(recovery=careful)
async def asking():
    return await ship()
"""


@pytest.fixture
def deciding(keepstep, folder):
    """Failed runs of workflows with handlers; each run has the name of its workflow."""
    (folder / "deciding.py").write_text(DECIDING, encoding="utf-8")

    def fail(name):
        assert keepstep("run", f"deciding.py:{name}", "--id", name).code == 1
        return lambda *words: keepstep("recover", name, *words)

    return fail


def test_dry_run_tells_what_the_handler_would_do(deciding):
    skipping = deciding("skipping")
    known = skipping("deciding.py:skipping", "--dry-run")
    assert (known.code, "skips:        ship#1, with the result {" in known.out) == (0, True)
    told = skipping("deciding.py:skipping", "--dry-run", "--json").json
    assert (told["handler"], told["skips"], told["value"]) == ("skip step", "ship#1", {"by": "hand"})
    unknown = skipping("--dry-run")
    assert "handler:      that of the workflow, which is unknown here" in unknown.out
    assert skipping("--dry-run", "--json").json["handler"] is None
    asking = deciding("asking")
    assert "handler:      careful, which decides when a worker asks it" in asking("deciding.py:asking", "--dry-run").out


def test_dry_run_of_a_handler_that_sets_the_run_aside_exits_with_1(deciding):
    leaving = deciding("leaving")
    own = leaving("deciding.py:leaving", "--dry-run")
    assert (own.code, "cannot be recovered: its handler 'set aside' leaves it" in own.out) == (1, True)
    assert "look first" in own.out
    assert leaving("--handler", "set aside", "--dry-run").code == 1
    assert leaving("deciding.py:leaving", "--handler", "continue", "--dry-run").code == 0


def test_other_code_and_unknown_handlers_are_refused_with_and_without_a_dry_run(deciding, status):
    asking = deciding("asking")
    for more in ((), ("--dry-run",)):
        other = asking("deciding.py:leaving", *more)
        assert (other.code, "belongs to workflow 'asking', not to 'leaving'" in other.err) == (2, True)
        unknown = asking("deciding.py:asking", "--handler", "restrt", *more)
        assert (unknown.code, "did you mean 'restart'?" in unknown.out + unknown.err) == (1, True)
        assert "which decides" not in unknown.out
    assert status("asking") == "failed"
    done = asking()
    assert (done.code, "with the handler of its workflow" in done.out) == (0, True)
    twice = asking("--dry-run")
    assert (twice.code, "cannot be recovered: it is being recovered already" in twice.out) == (7, True)
