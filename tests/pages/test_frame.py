"""The frame of all pages: signing in, keys, themes, links under a prefix, and what a browser is refused."""

import pytest

from tests.pages.conftest import axe_violations

SECRET = "a-secret-of-the-tests"


def test_pages_are_reached_by_keys(engine, serve, open_page):
    engine.start("approving", 3, run_id="a-1").reached("waiting")
    page = open_page(serve())
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_url("**/runs")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == "a-1"
    page.click("#jump")
    page.keyboard.type("a-")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/a-1")


@pytest.mark.parametrize("dark", [False, True])
def test_frame_is_accessible(engine, serve, open_page, dark):
    engine.start("approving", 3, run_id="a-1").reached("waiting")
    page = open_page(f"{serve()}/runs", dark=dark)
    assert axe_violations(page) == []


def test_browser_signs_in_with_a_token_and_out(engine, serve, open_page):
    engine.start("approving", 3, run_id="a-1").reached("waiting")
    page = open_page(f"{serve('--token', f'ann:act:{SECRET}')}/runs?status=waiting")
    assert "/login?next=" in page.url
    page.fill("#token", "another-secret-of-the-tests")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=not known here")
    page.expected.clear()  # Chromium logs the 401
    page.fill("#token", SECRET)
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs?status=waiting")
    [cookie] = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert SECRET not in cookie["value"]
    page.click("text=Sign out ann")
    page.wait_for_url("**/login")


def test_prefix_holds_in_every_link(engine, serve, open_page):
    engine.start("approving", 3, run_id="a-1").reached("waiting")
    address = serve("--prefix", "/ops")
    assert address.endswith("/ops")
    page = open_page(f"{address}/runs")
    links = page.eval_on_selector_all("a[href], link[href], script[src], form[action]", _ADDRESSES)
    assert links
    assert all(link.startswith(("/ops/", "#", "?")) for link in links)


_ADDRESSES = "all => all.map(one => ['href', 'src', 'action'].map(name => one.getAttribute(name)).find(Boolean))"
