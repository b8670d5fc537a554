"""Time travel and comparisons: any record of a run, forks with other values, rewinds, and two runs side by side."""

import re

import pytest
from playwright.sync_api import expect

import keepstep as ks
from tests.pages import program
from tests.pages.conftest import axe_violations

HOSTILE = "<img src=x onerror=\"document.body.dataset.hacked='1'\">"


def section(page, name):
    return page.locator(f"section[aria-labelledby={name}]")


def confirm(page):
    page.get_by_role("dialog").get_by_role("button").last.click()


def test_scrubber_moves_by_keys_and_links(engine, serve, open_page):
    assert engine.start("counting_page", 3, run_id="n-1").result() == 6
    page = open_page(f"{serve()}/runs/n-1/travel")
    expect(page.locator("ks-scrubber[data-loaded]")).to_be_visible()
    slider = page.get_by_role("slider")
    expect(slider).to_have_attribute("aria-valuenow", "5")
    page.keyboard.press("[")
    expect(page).to_have_url(re.compile("at=4$"))
    expect(section(page, "this-record")).to_contain_text("double#3")
    slider.focus()
    page.keyboard.press("Home")
    expect(section(page, "this-record")).to_contain_text("before its first record")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("]")
    expect(slider).to_have_attribute("aria-valuetext", "record 2 of 5: step completed · double")
    expect(section(page, "calls").locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name="later").click()
    expect(section(page, "calls").locator("tbody tr")).to_have_count(2)
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 3, box["y"] + 20)
    expect(page).to_have_url(re.compile("at=5$"))


def test_fork_with_another_result_goes_on_with_it(engine, serve, open_page):
    assert engine.start("counting_page", 3, run_id="n-1").result() == 6
    page = open_page(f"{serve()}/runs/n-1/travel?at=3")
    page.get_by_role("button", name="Fork with another result").click()
    page.get_by_label("Result by call").fill('{"double#2": 40}')
    page.get_by_label("Id of the new run").fill("n-2")
    confirm(page)
    page.wait_for_url("**/runs/n-2")
    assert engine.get("n-2").result() == 44
    page.get_by_role("link", name="compare").click()
    page.wait_for_url("**/compare?a=n-1&b=n-2")
    page.goto(page.url.replace("a=n-1&b=n-2", "a=n-2"))
    expect(page.get_by_label("With")).to_have_value("n-2")  # a fork is compared with its origin
    [row] = page.locator("table[aria-labelledby=calls] tbody tr").all()
    expect(row).to_contain_text("double#2")
    expect(row).to_contain_text("other value")
    expect(row).to_contain_text("40")
    page.get_by_role("link", name="all 3").click()
    expect(page.locator("table[aria-labelledby=calls] tbody tr")).to_have_count(3)


def test_strip_grows_with_a_running_run(engine, serve, open_page):
    run = engine.start("approving", 3, run_id="a-1")
    run.reached("waiting")
    page = open_page(f"{serve()}/runs/a-1/travel")
    before = run.run().seq
    expect(page.get_by_text(f"Record {before} of {before}")).to_be_visible()
    run.signal("approved")
    run.result()
    after = run.run().seq
    expect(page.get_by_text(f"Record {after} of {after}")).to_be_visible()
    expect(page.locator(f"ks-scrubber[data-loaded='{after}']")).to_be_visible()


def test_fork_with_another_input_begins_anew(engine, serve, open_page):
    assert engine.start("counting_page", 3, run_id="n-1").result() == 6
    page = open_page(f"{serve()}/runs/n-1/travel?at=0")
    page.get_by_role("button", name="Fork with another input").click()
    page.get_by_label("Arguments").fill('{"args": [], "kwargs": {"steps": 2}}')
    page.get_by_label("Id of the new run").fill("n-2")
    confirm(page)
    page.wait_for_url("**/runs/n-2")
    assert engine.get("n-2").result() == 2


def test_rewind_shows_what_it_does_before_it_does_it(engine, serve, open_page):
    run = engine.start("counting_page", 3, run_id="n-1")
    assert run.result() == 6
    page = open_page(f"{serve()}/runs/n-1/travel?at=2")
    page.get_by_role("button", name="Rewind to here").click()
    preview = page.locator("dialog .preview")
    expect(preview).to_contain_text("double#2, double#3")
    assert run.run().seq == 5
    page.get_by_label("Reason").fill("look again")
    confirm(page)
    expect(page.locator(".beside .gone")).to_have_count(3)
    assert run.result() == 6
    assert [entry.reason for entry in run.audit() if "rewind" in entry.what] == ["look again"]
    page.keyboard.press("]")
    expect(page.get_by_text("does not count any more")).to_be_visible()


def test_refused_rewind_says_why(engine, serve, open_page):
    run = engine.start("approving", 3, run_id="a-1")
    run.reached("waiting")
    run.cancel("enough")
    run.reached("cancelled")
    page = open_page(f"{serve()}/runs/a-1/travel?at=1")
    with page.expect_console_message(lambda one: "409" in one.text):  # Chromium logs the 409
        page.get_by_role("button", name="Rewind to here").click()
    expect(page.locator("dialog .preview")).to_contain_text("which is final; fork it instead")
    page.expected.clear()


def test_state_of_a_graph_is_shown_compared_and_edited(engine, serve, open_page):
    engine.start("reviewing", {"text": HOSTILE}, run_id="g-1").result()
    page = open_page(f"{serve()}/runs/g-1/travel?at=3")
    state = section(page, "state")
    expect(state).to_contain_text("score")
    expect(state).to_contain_text("<img src=x onerror")
    expect(section(page, "changes")).to_contain_text("0.5")
    expect(page.locator("svg.figure")).to_be_visible()
    page.get_by_label("compare with record").fill("1")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_url("**from=1**")
    expect(section(page, "changes")).to_contain_text("rounds")
    page.get_by_role("button", name="Fork with another state").click()
    page.get_by_label("New values of the state").fill('{"rounds": 5}')
    page.get_by_label("Id of the new run").fill("g-2")
    confirm(page)
    page.wait_for_url("**/runs/g-2")
    assert engine.get("g-2").result()["rounds"] == 6
    assert engine.get("g-1").result()["rounds"] == 2
    assert page.evaluate("document.body.dataset.hacked") is None


def test_travel_needs_the_key_of_an_encrypted_run(url, serve, open_page):
    with ks.open(url, workflows=program.WORKFLOWS, keys=ks.Keys("k", {"k": b"k" * 32})) as engine:
        engine.start("approving", 3, "secret-note", run_id="a-1").reached("waiting")
    address = serve()
    for path in ("/runs/a-1/travel", "/compare?a=a-1&b=a-1", "/inbox"):
        page = open_page(address + path)
        expect(page.get_by_text("Values are hidden").first).to_be_visible()
        assert "secret-note" not in page.content()


def test_read_only_travel_shows_no_acts(engine, serve, open_page):
    engine.start("counting_page", 1, run_id="n-1").result()
    page = open_page(f"{serve('--read-only')}/runs/n-1/travel?at=1")
    expect(section(page, "this-record")).to_be_visible()
    assert page.locator("[data-act]").count() == 0


@pytest.mark.parametrize("dark", [False, True])
def test_travel_and_comparison_are_accessible(engine, serve, open_page, dark):
    engine.start("reviewing", {"text": "a"}, run_id="g-1").result()
    engine.start("reviewing", {"text": "b"}, run_id="g-2").result()
    address = serve()
    page = open_page(f"{address}/runs/g-1/travel?at=3", dark=dark)
    expect(page.locator("ks-scrubber[data-loaded]")).to_be_visible()
    assert axe_violations(page) == []
    page.goto(f"{address}/compare?a=g-1&b=g-2")
    assert axe_violations(page) == []
