"""`crashtest` on the command line: what it prints and writes, its exit codes, and how it refuses nonsense."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

PROGRAM = """
from pathlib import Path
import keepstep as ks
from keepstep.testing import effect


@ks.step
async def charge(order: str, keyed: bool) -> str:
    effect("charge", order, key=ks.idempotency_key() if keyed else None)
    return Path("prefix.txt").read_text() + order if Path("prefix.txt").exists() else order


@ks.workflow
async def pay(order: str = "o-1", keyed: bool = True) -> str:
    return await charge(order, keyed)


@ks.workflow
async def talk() -> list:
    await ks.sleep(days=400)
    said = await ks.wait_for("say")
    said.reply("yes")
    return [said.payload, await ks.wait_for("go")]


@ks.workflow
async def hooked(name: str = "") -> int:
    return await (await ks.callback(name)).wait()


def make_prefix():
    Path("prefix.txt").write_text("p-")


lives = []


def live():
    make_prefix()


def broken():
    raise RuntimeError("no server")


number = 3
"""


SLOW = """
import os, time
from pathlib import Path
import keepstep as ks

PIDS = Path("pids").resolve()


@ks.step
def slow() -> None:
    with PIDS.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.3)


@ks.workflow
async def many() -> None:
    for _ in range(20):
        await slow()
"""


@pytest.fixture(autouse=True)
def shop(folder):
    (folder / "shop.py").write_text(PROGRAM, encoding="utf-8")


def test_a_crash_proof_workflow_ends_with_0(keepstep):
    done = keepstep("crashtest", "shop.py:pay")
    assert done.code == 0
    assert "pay is crash-proof" in done.out
    assert done.out.splitlines()[0].split() == ["STEP", "CRASHES", "REPEATED", "DOUBLED", "EFFECTS"]
    assert done.out.splitlines()[1].split() == ["charge", "3", "3", "0", "charge", "o-1"]
    assert done.err == ""


def test_a_finding_ends_with_1_and_says_what_to_do(keepstep):
    done = keepstep("crashtest", "shop.py:pay", "o-2", "keyed=false", "-v")
    assert done.code == 1
    assert "error: step charge did this twice" in done.out
    assert "in shop.py:9" in done.out
    assert "ks.idempotency_key()" in done.out
    assert "inside charge, after its body, before its result is recorded" in done.out
    assert done.out.splitlines()[-1].startswith("pay is not crash-proof: 1 thing is wrong")


def test_the_report_is_json_for_programs(keepstep):
    done = keepstep("crashtest", "shop.py:pay", "keyed=false", "--json")
    assert done.code == 1
    value = done.json
    assert value["ok"] is False
    assert value["workflow"] == "pay"
    assert {finding["code"] for finding in value["findings"]} == {"doubled"}
    assert value["crashes"]


def test_signals_and_questions_are_sent(keepstep):
    done = keepstep("crashtest", "shop.py:talk", "--ask", 'say={"a": 1}', "--signal", "go", "--json")
    assert done.code == 0, done.out
    assert json.loads(done.json["result"]) == [{"a": 1}, True]


def test_a_signal_that_is_missing_is_named(keepstep):
    done = keepstep("crashtest", "shop.py:talk", "--ask", "say=1")
    assert done.code == 1
    assert "it waits for signal go, which nobody sends" in done.out


@pytest.mark.parametrize("option", ["--set-up", "--each-life"])
def test_functions_of_the_file_make_things_ready(keepstep, option):
    name = {"--set-up": "make_prefix", "--each-life": "live"}[option]
    assert keepstep("crashtest", "shop.py:pay", option, name, "--json").json["result"] == '"p-o-1"'


def test_files_are_copied(keepstep, folder):
    (folder / "prefix.txt").write_text("f-")
    assert keepstep("crashtest", "shop.py:pay", "--json").json["result"] == '"o-1"'
    assert keepstep("crashtest", "shop.py:pay", "--file", "prefix.txt", "--json").json["result"] == '"f-o-1"'


def test_crashes_are_limited(keepstep):
    value = keepstep("crashtest", "shop.py:pay", "--at-most", "2", "--json").json
    assert len(value["crashes"]) == 2
    assert "a sample of" in value["verdict"]


def test_process_that_cannot_be_set_up_is_reported(keepstep):
    done = keepstep("crashtest", "shop.py:pay", "--each-life", "broken")
    assert done.code == 1
    assert "RuntimeError: no server" in done.out


def test_ctrl_c_ends_it_and_leaves_nothing_running(spawn, folder):
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    process = spawn("crashtest", "slow.py", start_new_session=True)
    pids = folder / "pids"
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_an_effect_may_be_called_harmless(keepstep):
    assert keepstep("crashtest", "shop.py:pay", "keyed=false", "--ignore", "charge o-1").code == 0


@pytest.mark.parametrize(
    "words, said",
    [
        (["shop.py:nothing"], "no workflow 'nothing'"),
        (["nowhere.py:pay"], "no file nowhere.py"),
        (["shop.py:pay", "--input", "{"], "not JSON"),
        (["shop.py:pay", "1", "2", "3"], "cannot be started with this input"),
        (["shop.py:pay", "--signal", "go={"], "not JSON"),
        (["shop.py:pay", "--signal", "=1"], "has no name"),
        (["shop.py:pay", "--signal", "ks:cancel"], "ks:cancel"),
        (["shop.py:pay", "--set-up", "missing"], "shop.py has no function missing"),
        (["shop.py:pay", "--set-up", "number"], "must be a function"),
        (["shop.py:pay", "--set-up", "broken"], "set_up failed: RuntimeError: no server"),
        (["shop.py:pay", "--file", "gone.txt"], "gone.txt"),
        (["shop.py:pay", "--at-most", "0"], "--at-most"),
    ],
)
def test_invalid_options_are_refused_with_a_sentence(keepstep, words, said):
    done = keepstep("crashtest", *words)
    assert done.code == 2
    assert said in done.err
    assert done.out == ""


FILE = "keepstep: 1\nmetadata: {name: y}\nsteps:\n  a: {next: b}\n  b: {}\n"
FUNCTIONS = 'def a(state):\n    return {"x": 1}\n\n\ndef b(state):\n    return None\n\n\ndef prepare():\n    pass\n'


def test_a_workflow_file_is_crash_tested_with_its_functions(keepstep, folder):
    (folder / "y.yaml").write_text(FILE, encoding="utf-8")
    (folder / "parts.py").write_text(FUNCTIONS, encoding="utf-8")
    without = keepstep("crashtest", "y.yaml")
    assert without.code == 2
    assert "--module FILE.py" in without.err
    done = keepstep("crashtest", "y.yaml", "--module", "parts.py", "--set-up", "prepare", "--at-most", "5")
    assert done.code == 0, done.err
    assert "a " in done.out
    unknown = keepstep("crashtest", "y.yaml", "--module", "parts.py", "--set-up", "prepair")
    assert (unknown.code, "did you mean prepare?" in unknown.err) == (2, True)
    refused = keepstep("crashtest", "program.py:total", "1", "--module", "parts.py")
    assert (refused.code, "--module is for workflows in YAML or JSON files" in refused.err) == (2, True)


@pytest.mark.crash
@pytest.mark.parametrize("words", [("payment", "--complete", "payment=7"), ("--complete", "=7")])
def test_a_callback_is_completed(keepstep, words):
    done = keepstep("crashtest", "shop.py:hooked", *words, "--json")
    assert done.code == 0, done
    assert done.json["result"] == "7"


def test_a_completion_without_name_and_value_is_refused(keepstep):
    done = keepstep("crashtest", "shop.py:hooked", "--complete", "")
    assert done.code == 2
    assert "--complete NAME=JSON" in done.err
