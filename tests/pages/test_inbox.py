"""The inbox: what waits for a person, each decision by clicks, and what others have decided meanwhile."""

import os
import subprocess
import sys

import pytest
from playwright.sync_api import expect

import keepstep as ks
from tests.pages import program
from tests.pages.conftest import axe_violations

HOSTILE = "<img src=x onerror=\"document.body.dataset.hacked='1'\">"


def item(page, run):
    return page.locator("li.item", has=page.get_by_role("link", name=run, exact=True))


def decided(page, run):
    return page.locator("table tr", has=page.get_by_role("link", name=run, exact=True))


def confirm(page, label):
    page.get_by_role("dialog").get_by_role("button", name=label, exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_person_approves_denies_and_edits_what_is_asked(engine, serve, open_page):
    engine.start("approving", 3, HOSTILE, run_id="a-1").reached("waiting")
    engine.start("approving", 4, run_id="a-2").reached("waiting")
    engine.start("refunding", run_id="r-1").reached("waiting")
    page = open_page(f"{serve()}/inbox")
    expect(page.locator("li.item h2").first).to_contain_text("approve:c1")  # the one with a deadline
    expect(item(page, "a-1").locator("h2")).to_contain_text(HOSTILE)
    expect(page.locator("#inbox-count")).to_have_text("3")
    item(page, "a-1").get_by_role("button", name="Approve", exact=True).click()
    expect(page.locator("dialog .command code")).to_have_text("keepstep approve a-1 approved")
    confirm(page, "Approve")
    expect(decided(page, "a-1")).to_contain_text("approved")
    item(page, "a-2").get_by_role("button", name="Deny").click()
    confirm(page, "Deny")
    expect(decided(page, "a-2")).to_contain_text("denied")
    item(page, "r-1").get_by_role("button", name="Approve with changes").click()
    page.get_by_label("Arguments").fill('{"eur": 2}')
    confirm(page, "Approve with changes")
    expect(decided(page, "r-1")).to_contain_text('{"eur": 2}')
    expect(decided(page, "r-1")).to_contain_text("web")
    assert engine.get("a-1").result() == 6
    assert engine.get("a-2").result() == "denied"
    assert engine.get("r-1").result() == "answered {'eur': 2}"
    expect(page.get_by_text("Nothing waits for a person")).to_be_visible()
    assert page.evaluate("document.body.dataset.hacked") is None


def test_second_of_two_people_is_told_of_the_first(url, serve, open_page):
    with ks.open(url, workflows=program.WORKFLOWS) as engine:
        engine.start("approving", 3, run_id="a-1").reached("waiting")
    address = f"{serve()}/inbox"  # no worker is there, so the run itself does not move
    ann, ben = open_page(address), open_page(address)
    ben.expected.clear()
    item(ben, "a-1").get_by_role("button", name="Deny").click()
    item(ann, "a-1").get_by_role("button", name="Approve", exact=True).click()
    confirm(ann, "Approve")
    ben.get_by_role("dialog").get_by_role("button", name="Deny").click()
    expect(ben.get_by_role("alert")).to_contain_text("has moved on")
    ben.expected.clear()  # Chromium logs the 409
    ben.keyboard.press("Escape")
    expect(decided(ben, "a-1")).to_contain_text("approved")
    with ks.open(url, workflows=program.WORKFLOWS) as engine:
        assert engine.get("a-1").result() == 6


def test_item_that_comes_and_is_decided_elsewhere_is_shown(engine, serve, open_page):
    page = open_page(f"{serve()}/inbox")
    expect(page.get_by_text("Nothing waits for a person")).to_be_visible()
    engine.start("approving", 3, run_id="a-1").reached("waiting")
    expect(item(page, "a-1")).to_be_visible()
    engine.get("a-1").by("ann").signal("approved")
    expect(decided(page, "a-1")).to_contain_text("ann")
    expect(item(page, "a-1")).to_have_count(0)


def test_paused_run_is_resumed_by_keyboard_with_a_reason(engine, serve, open_page):
    run = engine.start("approving", 3, run_id="a-1")
    run.reached("waiting")
    run.by("ann").pause("looking at it")
    run.reached("paused")
    page = open_page(f"{serve()}/inbox?kind=paused")
    expect(item(page, "a-1")).to_contain_text("looking at it")
    expect(item(page, "a-1").locator("h2")).to_contain_text("Paused by ann")
    page.keyboard.press("j")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.type("it is fine")
    page.keyboard.press("Enter")
    expect(decided(page, "a-1")).to_contain_text("it is fine")
    assert run.reached("waiting") == "waiting"


def crashed(url):
    """Kill a process in the body of an at-most-once step, so that the step is in doubt."""
    code = "import sys, keepstep as ks; from tests.pages import program\n"
    code += "with ks.open(sys.argv[1]) as engine: engine.start('charging_page', run_id='c-1').result()"
    subprocess.run(
        [sys.executable, "-c", code, url], env={**os.environ, "KEEPSTEP_TEST_KILL": "1"}, check=False, timeout=60
    )


def test_step_in_doubt_is_resolved_with_a_result(url, serve, open_page):
    crashed(url)
    with ks.open(url, workflows=program.WORKFLOWS) as engine:
        run = engine.get("c-1")
        run.reached("waiting")
        page = open_page(f"{serve()}/inbox")
        expect(item(page, "c-1").locator("h2")).to_contain_text("Did charge happen?")
        item(page, "c-1").get_by_role("button", name="It happened").click()
        page.get_by_label("Result").fill('"paid by hand"')
        page.get_by_label("Reason").fill("seen at the bank")
        confirm(page, "It happened")
        expect(decided(page, "c-1")).to_contain_text("resolved with a result")
        expect(decided(page, "c-1")).to_contain_text("seen at the bank")
        assert run.result() == "paid by hand"


def test_run_that_is_set_aside_is_retried_or_dropped(url, serve, open_page, monkeypatch):
    with ks.open(url, workflows=program.WORKFLOWS) as engine:
        for name in ("c-1", "c-2"):
            engine.start("changing", run_id=name).reached("waiting")
    monkeypatch.setattr(program, "CHANGED", [True])
    with ks.open(url, workflows=program.WORKFLOWS) as engine:
        for name in ("c-1", "c-2"):
            engine.get(name).signal("approved")
            assert engine.get(name).reached("set aside") == "set aside"
    monkeypatch.undo()
    page = open_page(f"{serve()}/inbox")
    expect(item(page, "c-1")).to_contain_text("ReplayMismatch")
    for name, label in (("c-1", "Retry"), ("c-2", "Drop")):
        item(page, name).get_by_role("button", name=label).click()
        page.get_by_label("Reason").fill("mended")
        confirm(page, label)
    expect(decided(page, "c-1")).to_contain_text("retried")
    expect(decided(page, "c-2")).to_contain_text("mended")
    with ks.open(url, workflows=program.WORKFLOWS) as engine:
        assert engine.get("c-1").result() == 2
        assert engine.get("c-2").status() == "cancelled"


def test_read_only_inbox_shows_no_acts(engine, serve, open_page):
    engine.start("approving", 3, run_id="a-1").reached("waiting")
    page = open_page(f"{serve('--read-only')}/inbox")
    expect(item(page, "a-1")).to_be_visible()
    assert page.locator("[data-act]").count() == 0


def test_filters_of_the_inbox_are_in_the_address(engine, serve, open_page):
    engine.start("approving", 3, run_id="a-1").reached("waiting")
    engine.start("refunding", run_id="r-1").reached("waiting")
    page = open_page(f"{serve()}/inbox")
    page.get_by_label("Workflow", exact=True).fill("refunding")
    page.keyboard.press("Enter")
    page.wait_for_url("**/inbox?workflow=refunding**")
    expect(item(page, "r-1")).to_be_visible()
    expect(item(page, "a-1")).to_have_count(0)
    page.goto(page.url.replace("workflow=refunding", "workflow=refunding&older=1d"))
    expect(page.get_by_text("Nothing like that waits")).to_be_visible()


@pytest.mark.parametrize("dark", [False, True])
def test_inbox_is_accessible(engine, serve, open_page, dark):
    engine.start("approving", 3, run_id="a-1").reached("waiting")
    engine.start("refunding", run_id="r-1").reached("waiting")
    page = open_page(f"{serve()}/inbox", dark=dark)
    item(page, "r-1").get_by_role("button", name="Deny").click()
    confirm(page, "Deny")
    expect(decided(page, "r-1")).to_be_visible()
    assert axe_violations(page) == []
