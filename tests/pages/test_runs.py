"""The list of runs and the front page: filters in the address, presets, many runs at once, and what is wrong."""

import os
import signal
import subprocess
import sys

import pytest

from tests.pages.conftest import PROGRAM, axe_violations


@pytest.fixture
def populated(engine):
    for number in range(3):
        engine.start("approving", number, run_id=f"a-{number}", tags={"team": "blue"}).reached("waiting")
    engine.start("failing_page", run_id="f-0").reached("failed")
    engine.start("counting_page", 2, run_id="c-0").result()
    return engine


def ids(page):
    return page.eval_on_selector_all("tbody tr td a[href*='/runs/']", "all => all.map(one => one.textContent)")


def test_filters_and_presets_are_in_the_address(populated, serve, open_page):
    page = open_page(f"{serve()}/runs")
    assert ids(page) == ["c-0", "f-0", "a-2", "a-1", "a-0"]
    page.select_option("#f-status", "failed")
    page.wait_for_url("**/runs?status=failed")
    assert ids(page) == ["f-0"]
    assert "no such account" in page.inner_text("tbody")
    page.click("text=Needs you")
    page.wait_for_url("**/runs?needs_person=true")
    assert ids(page) == ["a-2", "a-1", "a-0"]
    assert page.text_content('[aria-label="Presets"] [aria-current]').split() == ["Needs", "you", "3"]
    page.click("text=Clear")
    page.fill("#f-id", "a-")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs?id_prefix=a-")
    assert len(ids(page)) == 3
    assert "keepstep list --prefix a-" in page.inner_text("#live")
    page.goto(page.url.replace("id_prefix=a-", "workflow=nothing"))
    assert "No run matches" in page.inner_text("#live")


def test_chosen_runs_are_counted_and_then_cancelled(populated, serve, open_page):
    page = open_page(f"{serve()}/runs")
    page.check('[aria-label="Choose a-0"]')
    page.check('[aria-label="Choose a-1"]')
    page.check('[aria-label="Choose c-0"]')
    page.click('[data-bulk="cancel"]')
    page.wait_for_selector("dialog .preview >> text=2 waiting")
    page.fill("#act-reason", "no longer needed")
    page.click("dialog .button.danger")
    page.wait_for_selector(".toast")
    for name in ("a-0", "a-1"):
        populated.get(name).reached("cancelled")
    assert populated.get("a-2").status().value == "waiting"
    assert any(entry.reason == "no longer needed" for entry in populated.get("a-0").audit())
    page.wait_for_selector("#row-a-0 >> text=cancelled")


def test_list_shows_new_runs_by_itself(populated, serve, open_page):
    page = open_page(f"{serve()}/runs")
    page.check('[aria-label="Choose a-0"]')
    page.wait_for_selector("text=1 chosen")
    page.evaluate(_COUNT_HIDDEN)
    populated.start("counting_page", 1, run_id="c-1").result()
    page.wait_for_selector("#row-c-1 >> text=completed")
    assert page.is_checked('[aria-label="Choose a-0"]')
    assert page.evaluate("wasHidden") == 0  # the acts on chosen runs do not flicker


_COUNT_HIDDEN = """() => {
    window.wasHidden = 0;
    new MutationObserver(() => { if (document.querySelector("#chosen").hidden) window.wasHidden += 1; })
        .observe(document.body, { subtree: true, childList: true, attributes: true });
}"""


def test_read_role_and_read_only_see_no_acts(populated, serve, open_page):
    page = open_page(f"{serve('--read-only')}/runs")
    assert ids(page)
    assert page.query_selector('[name="run"]') is None
    assert page.query_selector("[data-bulk]") is None


def test_front_page_tells_what_is_wrong(url, populated, serve, open_page):
    page = open_page(serve())
    assert "No alarm, but failed runs are open" in page.inner_text("#live")
    assert "no such account" in page.inner_text('[aria-label="Failed and still open"]')
    assert "a-2" in page.inner_text('section[aria-label="Needs a person"]')
    assert axe_violations(page) == []
    populated.close()
    page.reload()
    page.wait_for_selector("text=No living worker claims runs")


def test_front_page_of_an_empty_store_says_what_to_type(engine, serve, open_page):
    page = open_page(serve(), dark=True)
    assert "keepstep start FILE.py:WORKFLOW" in page.inner_text("#live")
    assert axe_violations(page) == []


def test_killed_worker_is_an_alarm_while_the_page_is_open(url, serve, open_page):
    line = [sys.executable, "-m", "keepstep", "--store", url, "start", f"{PROGRAM}:approving", "--id", "a"]
    subprocess.run(line, check=True, capture_output=True)
    worker = subprocess.Popen([sys.executable, "-m", "keepstep", "--store", url, "worker", str(PROGRAM)])
    try:
        page = open_page(serve())
        page.wait_for_selector("text=All is well")
        os.kill(worker.pid, signal.SIGKILL)
        page.wait_for_selector("text=No living worker claims runs")
    finally:
        worker.kill()
        worker.wait()
