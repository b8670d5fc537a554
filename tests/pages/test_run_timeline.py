"""The timeline of a run: live over crashes and cuts, quick with 50,000 records, usable by keys alone."""

import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import pytest

import keepstep as ks
from keepstep.model import Kind, Status
from keepstep.records.record import Record
from keepstep.stores.open import open_store
from keepstep.testing.store_contract.ground import START, started
from tests.pages.conftest import PROGRAM, serving

MANY = 50_000
#: Seconds until a timeline of MANY records must be usable, from the navigation on.
USABLE_SECONDS = 1.5


@contextmanager
def working(url):
    """A worker in a process of its own."""
    line = [sys.executable, "-m", "keepstep", "--store", url, "worker", str(PROGRAM)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def eventually(found, seconds=30.0):
    """Wait for something outside of the page."""
    until = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < until, "nothing came"
        time.sleep(0.01)
    return value


def shown(page):
    """The numbers of all records that the timeline holds, in order."""
    return page.evaluate("document.querySelector('ks-timeline').data.seq")


def test_crash_and_recovery_are_seen_while_they_happen(url, tmp_path, serve, open_page):
    go = tmp_path / "go"
    with ks.open(url, worker=False) as client:
        with working(url) as first:
            run = client.start("lingering_pages", str(go), run_id="l-1")
            eventually((tmp_path / "go.began").exists)
            page = open_page(f"{serve()}/runs/l-1")
            page.wait_for_selector("ks-timeline .row >> text=double")
            first.send_signal(signal.SIGKILL)
            first.wait(30)
            began = time.monotonic()
            page.wait_for_selector("ks-timeline .crash")
            seen = time.monotonic() - began
            page.wait_for_selector("dl.facts .s-dead")
        with working(url):
            eventually(lambda: client.get("l-1").run().status is Status.RECOVERING)
            began = time.monotonic()
            page.wait_for_selector("h1 .s-recovering")
            recovery_seen = time.monotonic() - began
            go.touch()
            assert run.result(timeout=60) == 6
            page.wait_for_selector("h1 .s-completed")
            page.wait_for_selector("ks-timeline .row.crash >> text=recovered by")
        assert shown(page) == list(range(1, client.get("l-1").run().seq + 1))
    print(f"the crash was seen after {seen:.2f} s, the recovery after {recovery_seen:.2f} s")
    assert max(seen, recovery_seen) < 5  # about one second on an idle machine


def test_cut_in_the_stream_loses_and_doubles_nothing(engine, url, open_page):
    run = engine.start("approving", 3, run_id="a-1")
    run.reached("waiting")
    with serving(url) as address:
        page = open_page(f"{address}/runs/a-1")
        page.wait_for_selector("ks-timeline .row >> text=publish")
        before = shown(page)
    run.signal("approved")
    assert run.result(timeout=30) == 6
    page.wait_for_selector("#cut >> text=The server does not answer. This page shows the state of")
    page.expected.clear()  # Chromium logs the refused connections
    with serving(url, "--port", address.rpartition(":")[2]):
        page.wait_for_selector("h1 .s-completed")
        page.wait_for_selector("ks-timeline .row >> text=run finished")
        assert before == shown(page)[: len(before)]
        assert shown(page) == list(range(1, run.run().seq + 1))
        page.wait_for_selector("#cut", state="detached")
        page.close()
    page.expected.clear()


def build(url, run_id, count):
    """Write a run of so many records, which waits for a signal, straight through the store."""
    store = open_store(url)
    try:
        holder = started(store, run_id, workflow="counting_page")
        value = msgspec.Raw(b'{"page": "some text of a page", "number": 12345}')
        for first in range(2, count, 1000):
            records = [
                Record(
                    run=run_id,
                    kind=Kind.STEP_COMPLETED.value,
                    step=f"{('fetch', 'parse', 'save')[number % 3]}#{number}",
                    attempt=1,
                    worker="w1",
                    outcome="success",
                    started_at=START + timedelta(milliseconds=10 * number),
                    finished_at=START + timedelta(milliseconds=10 * number + 8),
                    value=value,
                )
                for number in range(first, min(first + 1000, count + 1))
            ]
            last = first + 1000 > count
            parts = {"status": Status.WAITING, "release": True, "wakes": ("more",)} if last else {}
            holder.write(*records, **parts)
    finally:
        store.close()


def test_fifty_thousand_records_are_usable_at_once(url, open_page):
    build(url, "big", MANY)
    with serving(url) as address:
        page = open_page(f"{address}/runs")
        began = time.monotonic()
        page.goto(f"{address}/runs/big")
        page.wait_for_selector("ks-timeline .row >> text=parse")
        usable = time.monotonic() - began
        page.wait_for_selector(f"ks-timeline output:text-is('{MANY:,} records')")
        whole = time.monotonic() - began
        print(f"usable after {usable:.2f} s, all {MANY:,} records after {whole:.2f} s")
        assert page.locator("ks-timeline .row").count() < 100
        view = page.locator("ks-timeline .view")
        view.focus()
        page.keyboard.press("End")
        page.wait_for_selector(f"ks-timeline .row[aria-selected=true] .seq:text-is('{MANY}')")
        page.keyboard.press("Enter")
        page.wait_for_selector(f".record h2:text-is('Record {MANY}: step completed')")
        assert page.url.endswith(f"#{MANY}")
        frames = page.evaluate(_SCROLL)
        print(f"{frames['count']} frames in {frames['seconds']:.2f} s, the longest {frames['worst']:.0f} ms")
        assert page.locator("ks-timeline .row").count() < 100
        page.fill("#tl-q", "#25000")
        page.wait_for_selector("output:text('1 of 50,000 records')")
        page.fill("#tl-q", "")
        page.check("#tl-fold")
        page.wait_for_selector("ks-timeline .row.group >> text=× 16,66")
        page.close()  # before its stream is cut
    assert usable < 4 * USABLE_SECONDS  # the machine of a test may be busy


#: Scroll through all rows for a second, and measure the frames.
_SCROLL = """async () => {
  const view = document.querySelector('ks-timeline .view'), times = [], began = performance.now();
  let last = began;
  while (last - began < 1000) {
    view.scrollTop = view.scrollHeight * (last - began) / 1000;
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last); last = now;
  }
  return { count: times.length, seconds: (last - began) / 1000, worst: Math.max(...times) };
}"""


def test_timeline_is_used_by_keys_alone(engine, serve, open_page):
    engine.start("failing_page", run_id="f-1").reached("failed")
    page = open_page(f"{serve()}/runs/f-1")
    page.wait_for_selector("ks-timeline .row >> text=explode")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.wait_for_selector("ks-timeline .row[aria-selected=true] >> text=double")
    page.keyboard.press("Enter")
    page.wait_for_selector(".record h2:text-is('Record 2: step completed')")
    page.keyboard.press("]")
    page.wait_for_selector(".record h2:text-is('Record 3: step failed')")
    assert "no such account" in page.inner_text(".record")
    assert page.url.endswith("#3")
    page.keyboard.press("[")
    page.wait_for_selector(".record h2:text-is('Record 2: step completed')")
    page.keyboard.press("k")
    page.wait_for_selector(".record h2:text-is('Record 1: run started')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".record", state="hidden")
    page.keyboard.press("/")
    page.keyboard.type("explode")
    page.wait_for_selector("output:text('1 of')")
    page.reload()  # the filter is in the URL
    page.wait_for_selector("output:text('1 of')")
    assert re.search(r"\?q=explode", page.url)


def test_drag_over_the_strip_shows_only_that_time(engine, serve, open_page):
    engine.start("failing_page", run_id="f-1").reached("failed")
    page = open_page(f"{serve()}/runs/f-1")
    page.wait_for_selector("ks-timeline .row >> text=explode")
    box = page.locator("ks-timeline canvas").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.up()
    page.click("text=Whole time")
    page.wait_for_selector("ks-timeline output:text-is('4 records')")
    page.keyboard.press("+")
    page.wait_for_selector("text=Whole time")
    page.keyboard.press("0")
    page.wait_for_selector("text=Whole time", state="hidden")


def test_link_to_a_record_opens_it(engine, serve, open_page):
    engine.start("failing_page", run_id="f-1").reached("failed")
    page = open_page(f"{serve()}/runs/f-1?show=failed#3")
    page.wait_for_selector(".record h2:text-is('Record 3: step failed')")
    assert page.locator(".record a", has_text="Fork or rewind").get_attribute("href").endswith("/runs/f-1/travel?at=3")
    assert page.locator("ks-timeline .row:visible").count() == 2  # the step and the end of the run


@pytest.mark.parametrize("verb", ["rewind", "retry"])
def test_records_that_no_longer_count_are_struck_through(engine, serve, open_page, verb):
    run = engine.start("failing_page", run_id="f-1")
    run.reached("failed")
    page = open_page(f"{serve()}/runs/f-1")
    page.wait_for_selector("ks-timeline .row >> text=explode")
    if verb == "retry":
        run.retry()
    else:
        run.rewind(2)
    page.wait_for_selector("ks-timeline .row.gone .name:text-is('explode')")
