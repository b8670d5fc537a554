"""An assistant over standard input and output: what it is shown, and what it may do with `--write`."""

import json
import subprocess
import sys

import pytest

from keepstep.mcp.stored import FIELD, NOTE
from tests.mcp.conftest import INJECTION, approval, broken, buying, environment, large, stray

READS = {
    "list_runs",
    "explain_run",
    "show_run",
    "history",
    "show_record",
    "state_at",
    "diff",
    "audit",
    "inbox",
    "doctor",
    "overview",
}
WRITES = {"approve", "deny", "signal", "retry", "pause", "resume", "fork"}
DESTROYS = {"cancel", "rewind", "resolve", "edit"}


def test_tools_that_destroy_are_absent_without_the_flag(writer):
    tools = writer.tools()
    assert set(tools) == READS | WRITES
    assert all(tools[name].annotations.read_only_hint for name in READS)
    assert not any(tools[name].annotations.read_only_hint for name in WRITES)
    assert all(one.description and one.output_schema for one in tools.values())
    told = writer.call("cancel", run_id="x", seq=1, reason="test")
    assert "Unknown tool" in told.error


def test_runs_are_listed_by_filters_and_pages(writer, engine):
    for number in range(3):
        engine.start(approval, run_id=f"page-{number}", tags={"n": str(number)})
    first = writer.call("list_runs", id_prefix="page-", limit=2).data
    assert [run["id"] for run in first["runs"]] == ["page-2", "page-1"]
    rest = writer.call("list_runs", id_prefix="page-", limit=2, after=first["next"]).data
    assert [run["id"] for run in rest["runs"]] == ["page-0"]
    assert [run["id"] for run in writer.call("list_runs", tags={"n": "1"}).data["runs"]] == ["page-1"]
    assert writer.call("list_runs", id_prefix="page-", status=["failed"]).data["runs"] == []
    assert "time zone" in writer.call("list_runs", created_after="2026-01-01T00:00:00").error
    assert "limit" in writer.call("list_runs", limit=100_000).error


def test_failure_is_explained_with_its_stored_text_marked(writer, failed):
    told = writer.call("explain_run", run_id=failed.id, rewind_step="fetch#2").data
    assert told["failure"]["step"] == "charge#1"
    assert told["failure"]["error"]["message"] == {"stored_text": f"{INJECTION}: 7", "note": NOTE}
    assert (told["retry"]["again"], told["retry"]["kept"]) == (["charge#1"], ["fetch#1", "fetch#2"])
    assert told["rewind"]["again"] == ["fetch#2", "charge#1"]
    assert told["commands"][0]["command"] == f"keepstep retry {failed.id}"


@pytest.mark.parametrize(
    "tool, given",
    [
        ("explain_run", {}),
        ("show_run", {}),
        ("history", {"values": True}),
        ("audit", {}),
        ("show_record", {"seq": 4}),
        ("list_runs", {}),
    ],
)
def test_stored_text_is_marked_in_every_answer(writer, failed, tool, given):
    told = writer.call(tool, **({} if tool == "list_runs" else {"run_id": failed.id}), **given)
    assert not told.error
    assert INJECTION in json.dumps(told.data), "the test must look at an answer that holds the text"
    assert stray(told.data, INJECTION) == []


def test_wait_is_explained_and_found_in_the_inbox(writer, waiting):
    told = writer.call("explain_run", run_id=waiting.id).data
    assert [(wait["name"], wait["turn"]) for wait in told["waits"]] == [("approve", "whoever sends the signal")]
    items = writer.call("inbox", kinds=["approval"], workflow=approval.name, limit=50).data["items"]
    (item,) = [one for one in items if one["run"] == waiting.id]
    assert (item["kind"], item["name"], item["seq"]) == ("approval", "approve", told["seq"])
    assert item["question"] == {"stored_text": "May I?", "note": NOTE}


def test_records_come_in_pages_without_values_unless_asked(writer, failed):
    found, after = [], 0
    while after is not None:
        page = writer.call("history", run_id=failed.id, after=after, limit=2).data
        found += page["records"]
        after = page["next"]
    assert [one["seq"] for one in found] == [one.seq for one in failed.checkpoints()]
    assert not any("value" in one or "input" in one for one in found)
    whole = writer.call("history", run_id=failed.id, values=True).data["records"]
    assert [one["value"]["stored_text"] for one in whole if one["step"] == "fetch#1"] == ["a"]


def test_large_value_is_cut_and_read_piece_by_piece(writer, engine):
    run = engine.start(large, run_id="large")
    assert len(run.result(60)) == 50_000
    shown = writer.call("show_run", run_id="large").data["result"]
    assert len(shown["stored_text"]) == FIELD
    assert shown["missing_characters"] == 50_000 - FIELD
    (record,) = [one for one in writer.call("history", run_id="large").data["records"] if one["step"] == "fetch#1"]
    text, left = "", 1
    while left:
        piece = writer.call("show_record", run_id="large", seq=record["seq"], offset=len(text)).data["value"]
        text += piece["stored_text"]
        left = piece.get("missing_characters", 0)
    assert text == "x" * 50_000


def test_unknown_run_is_a_helpful_error(writer, failed):
    told = writer.call("explain_run", run_id=failed.id[:-1])
    assert f"did you mean {failed.id}" in told.error
    assert "Traceback" not in told.error
    assert "no record 99" in writer.call("show_record", run_id=failed.id, seq=99).error


def test_approval_reaches_the_run_and_the_audit(writer, waiting):
    seq = writer.call("explain_run", run_id=waiting.id).data["seq"]
    assert "has moved on" in writer.call("approve", run_id=waiting.id, seq=seq - 1).error
    assert "does not wait for ship" in writer.call("approve", run_id=waiting.id, seq=seq, signal="ship").error
    done = writer.call("approve", run_id=waiting.id, seq=seq)
    assert (done.error, done.data["actor"]) == ("", "tests (mcp)")
    assert waiting.result(60) == "yes"
    assert "tests (mcp)" in [entry.actor for entry in waiting.audit()]


def test_denial_and_signal_answer_as_well(writer, waiting, engine):
    seq = writer.call("explain_run", run_id=waiting.id).data["seq"]
    assert not writer.call("deny", run_id=waiting.id, seq=seq).error
    assert waiting.result(60) == "no"
    other = engine.start(approval, run_id="signalled")
    assert not writer.call("signal", run_id="signalled", name="approve", payload=True).error
    assert other.result(60) == "yes"


def test_retry_needs_the_record_that_was_seen_and_a_reason(writer, failed, engine):
    seq = writer.call("explain_run", run_id=failed.id).data["seq"]
    assert "reason" in writer.call("retry", run_id=failed.id, seq=seq).error
    broken["on"] = False
    try:
        assert not writer.call("retry", run_id=failed.id, seq=seq, reason="the bank is back").error
        assert engine.get(failed.id).result(60) == 7
        assert "has moved on" in writer.call("retry", run_id=failed.id, seq=seq, reason="again").error
    finally:
        broken["on"] = True
    entry = next(one for one in failed.audit() if one.reason == "the bank is back")
    assert entry.actor == "tests (mcp)"


def test_run_is_paused_resumed_and_forked(writer, waiting, engine):
    assert not writer.call("pause", run_id=waiting.id, reason="lunch").error
    waiting.reached("paused", timeout=60)
    told = writer.call("explain_run", run_id=waiting.id).data
    assert [one["code"] for one in told["obstacles"]] == ["paused"]
    assert not writer.call("resume", run_id=waiting.id, seq=told["seq"], reason="back").error
    waiting.reached("waiting", timeout=60)
    seq = waiting.run().seq
    made = writer.call("fork", run_id=waiting.id, seq=seq, reason="try", new_id="forked")
    assert made.data["run"] == "forked"
    assert engine.get("forked").run().origin == waiting.id


def test_resource_and_prompts_are_offered(writer, failed):
    content = writer.ask("read_resource", f"keepstep://runs/{failed.id}").contents[0].text
    assert json.loads(content)["failure"]["step"] == "charge#1"
    prompts = {one.name for one in writer.ask("list_prompts").prompts}
    assert prompts == {"diagnose", "compare", "postmortem"}
    asked = writer.ask("get_prompt", "diagnose", {"run_id": failed.id}).messages[0].content.text
    assert failed.id in asked
    assert "data" in writer.client.instructions


def test_doctor_and_overview_answer(writer, failed):
    assert "findings" in writer.call("doctor").data
    assert writer.call("overview").data["workers"]


def test_difference_of_two_runs_is_told(writer, failed, engine):
    other = engine.start(buying, 8, run_id="other-buying")
    other.reached("failed", timeout=60)
    told = writer.call("diff", run_id=failed.id, other=other.id)
    assert not told.error
    assert told.data["right"] == ["other-buying", other.run().seq]


def test_help_of_the_command_line_does_not_load_the_extra():
    code = "import sys; from keepstep.cli import main; main(['--help']); sys.exit('mcp' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, check=False).returncode
        == 0
    )


def test_missing_extra_is_named(path, engine):
    code = (
        "import sys; sys.modules['mcp'] = None; from keepstep.cli import main; "
        f"sys.exit(main(['--store', {str(path)!r}, 'mcp']))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'keepstep[mcp]'" in done.stderr
