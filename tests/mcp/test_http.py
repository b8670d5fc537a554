"""Assistants over HTTP: the guard of the pages, tokens with roles, and what they may do with `--destructive`."""

import httpx
import pytest

from tests.mcp.conftest import OTHER, SECRETS, buying, over_http, purchase
from tests.mcp.test_stdio import DESTROYS, READS, WRITES

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
ACCEPTS = {"accept": "application/json, text/event-stream"}


def post(url, token=SECRETS["admin"], **headers):
    given = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.post(url, json=PING, headers={**ACCEPTS, **given, **headers}, timeout=60)


def test_foreign_hosts_origins_and_strangers_are_refused(served):
    assert post(served, Host="evil.example").status_code == 421
    assert post(served, Origin="http://evil.example").status_code == 403
    assert post(served, **{"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert post(served, token="").status_code == 401
    assert post(served, token="x" * 20).status_code == 401
    assert post(served).status_code not in (401, 403, 421)


@pytest.mark.parametrize("role, names", [("read", READS), ("act", READS | WRITES)])
def test_role_of_the_token_decides_about_the_tools(served, role, names):
    assistant = over_http(served, role)
    try:
        assert set(assistant.tools()) == names
        assert "Unknown tool" in assistant.call("cancel", run_id="x", seq=1, reason="test").error
    finally:
        assistant.close()


def test_admin_has_all_tools_with_their_hints(admin):
    tools = admin.tools()
    assert set(tools) == READS | WRITES | DESTROYS
    assert {name for name, one in tools.items() if one.annotations.destructive_hint} == DESTROYS


def test_session_belongs_to_the_token_that_began_it(served):
    begin = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "old client", "version": "1"},
        },
    }
    url = served
    made = httpx.post(url, json=begin, headers={**ACCEPTS, "authorization": f"Bearer {SECRETS['act']}"}, timeout=60)
    session = {"mcp-session-id": made.headers["mcp-session-id"], "mcp-protocol-version": "2025-06-18"}
    assert post(url, token=SECRETS["act"], **session).status_code == 200
    assert post(url, token=OTHER, **session).status_code == 404


def test_rewind_is_dry_until_the_seen_record_is_given(admin, failed):
    dry = admin.call("rewind", run_id=failed.id, step="fetch#2", reason="look").data
    assert (dry["dry_run"], dry["again"]) == (True, ["fetch#2", "charge#1"])
    assert failed.run().seq == dry["seq"], "a dry run must write nothing"
    refused = admin.call("rewind", run_id=failed.id, to=dry["to"], reason="go", dry_run=False)
    assert "needs `seq`" in refused.error
    stale = admin.call("rewind", run_id=failed.id, to=dry["to"], reason="go", dry_run=False, seq=dry["seq"] - 1)
    assert "has moved on" in stale.error
    done = admin.call("rewind", run_id=failed.id, to=dry["to"], reason="go", dry_run=False, seq=dry["seq"])
    assert not done.error
    failed.reached("failed", timeout=60)
    again = [one.step for one in failed.checkpoints(counted=True) if one.step]
    assert again.count("fetch#2") == 1
    entry = next(one for one in failed.audit() if one.reason == "go")
    assert entry.actor == "tests (admin-token)"


def test_cancel_needs_the_seen_record(admin, waiting):
    seq = waiting.run().seq
    assert "has moved on" in admin.call("cancel", run_id=waiting.id, seq=seq + 1, reason="no").error
    assert not admin.call("cancel", run_id=waiting.id, seq=seq, reason="not needed").error
    waiting.reached("cancelled", timeout=60)
    assert any(one.reason == "not needed" for one in waiting.audit())


def test_step_in_doubt_is_resolved(admin, engine):
    run = engine.start(purchase, run_id="doubt")
    run.reached("waiting", timeout=60)
    told = admin.call("explain_run", run_id="doubt").data
    assert [one["code"] for one in told["obstacles"]] == ["in-doubt"]
    step = told["waits"][0]["name"]
    done = admin.call(
        "resolve", run_id="doubt", step=step, verdict="result", value=5, seq=told["seq"], reason="the bank says so"
    )
    assert not done.error
    assert run.result(60) == 5


def test_edit_of_a_run_without_a_state_is_refused(admin, failed):
    told = admin.call("edit", run_id=failed.id, seq=failed.run().seq, reason="mend", values={"a": 1})
    assert told.error
    assert "Traceback" not in told.error
    assert buying.name == failed.run().workflow
