"""The page of one run: its head, the acts on it by clicks, its tabs, and what it hides."""

import pytest

import keepstep as ks
from tests.pages.conftest import axe_violations

HOSTILE = "<script>alert(1)</script> \"quoted\" 'single' \u202egnol \x1b[31m"


def confirm(page, button):
    """Open the dialog of an act, and do it."""
    page.click(f".acts >> text={button}")
    page.click("dialog .buttons .main")


@pytest.mark.parametrize("dark", [False, True])
def test_page_of_a_run_is_accessible(engine, serve, open_page, dark):
    engine.start("failing_page", HOSTILE, run_id="f-1").reached("failed")
    page = open_page(f"{serve()}/runs/f-1#3", dark=dark)
    page.wait_for_selector(".record h2")
    assert axe_violations(page) == []


def test_approval_by_a_click_moves_the_run_and_its_page(engine, serve, open_page):
    run = engine.start("approving", 3, run_id="a-1")
    run.reached("waiting")
    page = open_page(f"{serve()}/runs/a-1")
    assert "signal approved" in page.inner_text("#live")
    assert "Double 3?" in page.inner_text(".context")
    page.click(".acts >> text=Approve")
    assert page.inner_text("dialog .command code") == "keepstep approve a-1 approved"
    page.click("dialog .buttons .main")
    assert run.result(timeout=20) == 6
    page.wait_for_selector("h1 .s-completed")
    page.wait_for_selector("ks-timeline .row >> text=run finished")


def test_stored_text_stays_text(engine, serve, open_page):
    engine.start("failing_page", HOSTILE + "x" * 1_000_000, run_id="f-1", tags={"a": "<b>"}).reached("failed")
    page = open_page(f"{serve()}/runs/f-1")
    page.wait_for_selector("ks-timeline .row")
    assert "<script>alert(1)</script>" in page.inner_text(".failure")
    assert "\u202e" not in page.content()
    assert len(page.content()) < 60_000


def test_every_tab_opens(engine, serve, open_page):
    run = engine.start("telling_pages", run_id="t-1")
    run.result(timeout=30)
    engine.start("approving", 3, "why not?", run_id="a-1").reached("waiting")
    engine.signal("a-1", "later", {"eur": 5})
    address = serve()
    page = open_page(f"{address}/runs/t-1")
    for tab, text in (
        ("Graph", "tell"),
        ("State", "carries no state"),
        ("Conversation", "No conversation"),
        ("Tokens", "word0 word1 word2"),
        ("Cost", "small"),
        ("Signals", "No signals"),
        ("Audit", "run finished"),
        ("Children", "No children"),
        ("Values", "Input"),
    ):
        page.click(f".tabs >> text={tab}")
        page.wait_for_selector(f"h2:text-is('{tab}')", state="attached")
        assert page.locator(f".tabs [aria-current]:text-is('{tab}')").count() == 1
        assert text in page.inner_text("main"), tab
        assert axe_violations(page) == [], tab
    page.goto(f"{address}/runs/a-1/signals")
    assert "later" in page.inner_text("table")
    assert '"eur": 5' in page.inner_text("table")
    assert "not read" in page.inner_text("table")
    page.goto(f"{address}/runs/a-1/values")
    assert "Double 3? why not?" in page.inner_text("main")


def test_state_and_graph_of_a_graph_are_shown(engine, serve, open_page):
    engine.start("review_of_pages", {"number": 7}, run_id="g-1").result(timeout=30)
    address = serve()
    page = open_page(f"{address}/runs/g-1/state")
    assert '"draft 7"' in page.inner_text("main")
    page.goto(f"{address}/runs/g-1/graph")
    assert page.locator("svg.figure .node.m-completed").count() == 2


def test_calls_of_an_agent_read_like_a_conversation(engine, serve, open_page):
    run = engine.start("chatting_pages", run_id="c-1")
    run.reached("waiting")
    page = open_page(f"{serve()}/runs/c-1/conversation")
    assert "I look it up." in page.inner_text(".t-model")
    assert '"celsius": 21' in page.inner_text(".t-tool")
    run.signal("may_send", {"yes": True})
    page.wait_for_selector(".t-model >> text=It is warm.")  # without a reload
    assert "answered may_send" in page.inner_text(".t-answer")
    assert axe_violations(page) == []
    page.click(".tabs >> text=Cost")
    assert "helper" in page.inner_text("main")
    assert "large" in page.inner_text("main")


def test_tokens_appear_as_they_stream(url, tmp_path, serve, open_page):
    with ks.open(url) as driver:
        run = driver.start("telling_pages", str(tmp_path / "go"), run_id="t-1")
        page = open_page(f"{serve()}/runs/t-1/tokens")
        page.wait_for_selector("ks-tokens pre:text('word0 word1 word2')")
        (tmp_path / "go").touch()
        page.wait_for_selector("ks-tokens section:nth-of-type(2) pre:text-is('word0 word1 ')")
        run.result(timeout=30)


def test_children_are_read_when_they_are_opened(engine, serve, open_page):
    engine.start("mother_of_pages", run_id="m-1")
    page = open_page(f"{serve()}/runs/m-1/children")
    page.wait_for_selector(".tree .s-waiting")
    assert "child-1" in page.inner_text("#live .card")
    assert "waits for signal approved" in page.inner_text(".tree")
    page.click(".tree summary")
    page.wait_for_selector(".tree .tree >> text=no children")
    assert axe_violations(page) == []
    page.click(".tree .leaf a:text-is('child-1')")
    page.wait_for_url("**/runs/child-1")
    page.click("dl.facts a:text-is('m-1')")
    page.wait_for_selector("ks-timeline .row >> text=child-1")
    assert axe_violations(page) == []
    page.click("ks-timeline .to")
    page.wait_for_url("**/runs/child-1")
    assert page.locator("dl.facts a", has_text="m-1").count() == 1


def test_deny_and_answers_with_values_reach_the_run(engine, serve, open_page):
    denied, answered = (engine.start("approving", 3, run_id=one) for one in ("a-1", "a-2"))
    denied.reached("waiting")
    answered.reached("waiting")
    address = serve()
    page = open_page(f"{address}/runs/a-1")
    confirm(page, "Deny")
    assert denied.result(timeout=30) == "denied"
    page.goto(f"{address}/runs/a-2")
    page.click(".acts >> text=Answer with a value")
    page.fill("#act-payload", '{"yes": [1, "two"]')
    page.click("dialog .buttons .main")
    page.wait_for_selector("dialog .wrong:not(:empty)")  # not JSON yet
    page.fill("#act-payload", '{"yes": [1, "two"]}')
    assert page.inner_text("dialog .command code") == """keepstep signal a-2 approved '{"yes": [1, "two"]}'"""
    page.click("dialog .buttons .main")
    assert answered.result(timeout=30) == 6


def test_pause_resume_and_cancel_by_clicks(engine, serve, open_page):
    run = engine.start("approving", 3, run_id="a-1")
    run.reached("waiting")
    page = open_page(f"{serve()}/runs/a-1")
    page.click("#commands summary")
    confirm(page, "Pause")
    page.wait_for_selector("h1 .s-paused")
    assert page.locator("#commands[open]").count() == 1  # what a person has opened stays open
    confirm(page, "Resume")
    page.wait_for_selector("h1 .s-waiting")
    page.click(".acts >> text=Cancel run")
    page.fill("#act-reason", "ordered twice")
    page.click("dialog .buttons .main")
    page.wait_for_selector("h1 .s-cancelled")
    assert run.run().status == "cancelled"
    assert "ordered twice" in page.inner_text("#live")


def test_retry_by_a_click_is_on_record(engine, serve, open_page):
    run = engine.start("failing_page", run_id="f-1")
    run.reached("failed")
    seq = run.run().seq
    page = open_page(f"{serve()}/runs/f-1/audit")
    assert "no such account" in page.inner_text(".failure")
    page.click(".acts >> text=Retry")
    page.fill("#act-reason", "the account exists now")
    page.click("dialog .buttons .main")
    page.wait_for_selector("td:text('the account exists now')")
    assert run.run().seq > seq


def test_step_in_doubt_is_resolved_by_a_click(engine, serve, open_page):
    run = engine.start("paying_pages", 5, run_id="p-1")
    run.reached("waiting")
    page = open_page(f"{serve()}/runs/p-1")
    assert "may or may not have happened" in page.inner_text("#live")
    page.wait_for_selector("ks-timeline .l-doubt")
    page.click(".acts >> text=pay happened")
    page.fill("#act-value", "7")
    page.click("dialog .buttons .main")
    assert run.result(timeout=30) == 7


SECRET = "a-secret-of-the-tests"


def test_reader_sees_no_acts_and_no_payloads(engine, serve, open_page):
    engine.start("approving", 3, run_id="a-1").reached("waiting")
    engine.signal("a-1", "later", {"eur": 5})
    address = serve("--token", f"ann:read:{SECRET}")
    page = open_page(f"{address}/login?next=/runs/a-1/signals")
    page.fill("#token", SECRET)
    page.keyboard.press("Enter")
    page.wait_for_url("**/signals")
    assert page.locator(".acts button").count() == 0
    assert "eur" not in page.inner_text("main")
    assert "only for callers who may act" in page.inner_text("main")


def test_values_of_an_encrypted_run_are_hidden(url, serve, open_page):
    with ks.open(url, keys=ks.Keys("k1", {"k1": b"k" * 32})) as driver:
        run = driver.start("approving", 3, "a word that is secret", run_id="e-1")
        run.reached("waiting")
        address = serve()
        page = open_page(f"{address}/runs/e-1#2")
        page.wait_for_selector("ks-timeline .row >> text=publish")
        page.wait_for_selector(".record h2")
        for tab in (
            "",
            "/graph",
            "/state",
            "/conversation",
            "/tokens",
            "/cost",
            "/signals",
            "/audit",
            "/children",
            "/values",
        ):
            page.goto(f"{address}/runs/e-1{tab}")
            assert "encrypted and hidden" in page.inner_text("#live")
            assert "a word that is secret" not in page.content()
