"""A real browser on a real server: `keepstep serve` over a SQLite file that the test itself opens, too.

Every page that a test opens is held to no error in its console, no answer of 500, and nothing that the policy for
content refuses.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import keepstep as ks
from tests.pages import program

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROGRAM = Path(program.__file__)
#: Pages may be slow on a busy machine; one that is quick answers in milliseconds.
PATIENCE_MS = 30_000


# Playwright's loop runs in this thread while it is open, so it is closed before tests with loops of their own.
@pytest.fixture(scope="package")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (on Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        words = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
        words += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=words)
        yield started
        started.close()


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/runs.db"


@pytest.fixture
def engine(url):
    """An engine of the test's own on the served store, which drives the workflows of `program`."""
    with ks.open(url, workflows=program.WORKFLOWS) as opened:
        yield opened


@contextmanager
def serving(url, *words, program=PROGRAM, environment=None):
    """Run `keepstep serve` over a store, and give its address."""
    line = [sys.executable, "-m", "keepstep", "--store", url, "serve", str(program), "--port", "0", *words]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})
    try:
        yield re.search(r"http://[^;]+", process.stdout.readline())[0].rstrip("/")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.stdout.close()


@pytest.fixture
def serve(url):
    """Start servers over the store of the test: `serve("--read-only")` gives an address."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(serving(url, *words, **options))


@pytest.fixture
def open_page(browser):
    """Open pages in a context of their own, and hold them to a clean console at the end."""
    contexts, wrong = [], []

    def opened(address, *, dark=False, **options):
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = browser.new_context(color_scheme="dark" if dark else "light", reduced_motion="reduce", **options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("response", lambda got: wrong.append(f"{got.status} {got.url}") if got.status >= 500 else None)
        page.expected = wrong  # a test that provokes an error takes it out of this list
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def axe_violations(page):
    """Return what axe finds wrong with a page, in short."""
    import axe_playwright_python

    script = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    page.evaluate(script)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{one['id']}: {one['nodes'][0]['target']} {one['help']}" for one in found["violations"]]
