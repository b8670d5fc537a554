"""Pages about everything that is not one run, over real workers, one of them dead; acts are seen in the store."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

import keepstep as ks
from keepstep.engine.services import BreakerInfo
from tests.nightly import case
from tests.pages.conftest import PATIENCE_MS, axe_violations, serving

# Not imported here: its queues would be declared for the stores of other tests, too.
PROGRAM = str(Path(__file__).with_name("fleet_program.py"))
HOSTILE = "<img src=x onerror=alert(1)>"
SECRET = "a-secret-of-the-tests"
expect.set_options(timeout=PATIENCE_MS)


def worker_of(stack, url, *words):
    """Start a worker, and return it when it drives runs."""
    line = [sys.executable, "-m", "tests.pages.fleet_program", url, *words]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    stack.callback(process.stdout.close)
    stack.callback(process.wait, 30)
    stack.callback(process.kill)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A store with a living worker, a dead one, and something of everything; and the address of its server."""
    url = f"sqlite:///{tmp_path_factory.mktemp('fleet')}/runs.db"
    with ExitStack() as stack:
        worker_of(stack, url)
        dead = worker_of(stack, url, "lonely")
        dead.send_signal(signal.SIGKILL)
        address = stack.enter_context(serving(url, PROGRAM))
        with httpx.Client(base_url=f"{address}/api/v1", timeout=30) as client:
            fill(client)
            engine = stack.enter_context(ks.open(url, worker=False, workflows=[]))
            engine.get("p-1").reached("failed")
            engine.get("p-2").reached("failed")
            engine.get("paid-late").reached("waiting")
            engine.get("refused").reached("failed")
            engine.get("m-1").reached("running")
            engine.get("reviewed").result()
            yield engine, address, client, url


def fill(client):
    def post(path, **body):
        answer = client.post(path, json=body)
        assert answer.is_success, answer.text

    for number in (1, 2):
        post("/runs", workflow="mailing", run_id=f"m-{number}", queue="mail", key=f"customer-{number}")
        post("/runs", workflow="paying", run_id=f"p-{number}", args=[number])
    post("/runs", workflow="paying", run_id="paid-late", delay=1.0)
    post("/runs", workflow="refusing", run_id="refused")
    post("/runs", workflow="review", run_id="reviewed")
    post("/runs", workflow="listening", run_id="listens")
    post("/runs", workflow="asking", run_id="asks")
    post("/topics/news/publish", value={"text": HOSTILE})
    post("/queues/mail/set", limits={"max_waiting": "50"}, reason=HOSTILE)


def act(page, button, **fields):
    """Do the act of a button, and return the command line that its dialog has shown."""
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.locator("dialog[open]")
    for name, value in fields.items():
        control = dialog.locator(f"[name={name}]")
        control.select_option(value) if control.evaluate("one => one.tagName") == "SELECT" else control.fill(value)
    line = dialog.locator(".command code").text_content()
    dialog.get_by_role("button", name=button, exact=True).click()
    expect(page.locator("dialog[open]")).to_have_count(0)
    return line


PAGES = {
    "/workflows": ["mailing", "review graph", "Start"],
    "/workflows/refusing": ["What fails most", HOSTILE, "refuse", "0 %"],
    "/workflows/review": ["draft", "critic", "Graph, version 1", "100 %"],
    "/workflows/every/start": ["Where it goes", "What is ordered", "keepstep start fleet_program.py:every"],
    "/queues": ["mail", "concurrency 1", "1 of 1"],
    "/queues/mail": ["customer-1", "m-2", HOSTILE, "of 50 at most"],
    "/services": ["bank", "open", "2"],
    "/services/bank": ["No attempt begins", "Next probes", "Shares of workers"],
    "/schedules": ["nightly", "0 3 * * *", "active"],
    "/schedules/nightly": ["Europe/Berlin", "UTC", "03:00:00"],
    "/agents": ["writer", "healthy", "write"],
    "/agents/writer": ["100 of 100", "failures in a row", "slow", "unseen", "alive"],
    "/messages": ["news", "ops", "served"],
    "/messages/news": ["listens", HOSTILE],
    "/workers": ["alive", "dead", "MB"],
    "/doctor": ["lonely-1", "keepstep worker FILE.py", "Checked"],
}


@pytest.mark.parametrize("dark", [case(False, nightly=False), case(True, nightly=True)])
def test_pages_show_what_there_is_to_everybody(fleet, open_page, dark):
    _, address, *_ = fleet
    page = open_page(f"{address}/workers", dark=dark)
    expect(page.locator(".s-dead")).to_have_count(1)
    for path, texts in PAGES.items():
        page.goto(address + path)
        for text in texts:
            expect(page.locator("main")).to_contain_text(text)
        assert axe_violations(page) == [], path
    page.goto(f"{address}/workers")
    page.locator("tr", has_text="alive").get_by_role("link").click()
    expect(page.locator("main")).to_contain_text("It claims runs and drives them")
    assert axe_violations(page) == []


def test_pages_of_an_empty_store_say_what_to_type(url, engine, serve, open_page):
    address = serve()
    page = open_page(f"{address}/queues")
    for path, text in {
        "/queues": "keepstep queues set NAME",
        "/services": "keepstep services set NAME",
        "/schedules": "keepstep schedules add NAME",
        "/agents": "keepstep worker FILE.py --agents FILE.py",
        "/messages": "keepstep topics publish NAME",
        "/doctor": "All is well",
        "/workflows/approving": "It has no runs yet",
    }.items():
        page.goto(address + path)
        expect(page.locator("main")).to_contain_text(text)
        assert axe_violations(page) == [], path


def test_limits_of_a_queue_are_set_and_reset(fleet, open_page):
    engine, address, *_ = fleet
    page = open_page(f"{address}/queues/mail")
    line = act(page, "Set limits", concurrency="3", rate="50/1/2", reason="more room")
    assert line == "keepstep queues set mail --concurrency 3 --rate 50/1/2 --reason 'more room'"
    expect(page.locator("main")).to_contain_text("of 3 places")
    info = engine.queues.get("mail")
    assert (info.limits.concurrency, info.limits.rate) == (3, ks.Rate(50.0, 1.0, 2))
    assert (info.log[-1].actor, info.log[-1].reason) == ("web", "more room")
    engine.get("m-2").reached("running")
    page.get_by_role("button", name="Set limits").click()
    page.locator("dialog[open] [name=concurrency]").fill("many")
    page.locator("dialog[open]").get_by_role("button", name="Set limits").click()
    expect(page.locator("dialog[open] [role=alert]")).to_contain_text("concurrency")
    page.keyboard.press("Escape")
    act(page, "Stop")
    expect(page.locator("main")).to_contain_text("This queue is stopped")
    act(page, "Reset")
    expect(page.locator("main")).to_contain_text("From the code")
    assert engine.queues.get("mail").limits.concurrency == 1
    page.expected.clear()  # Chromium logs the 422


def test_breaker_is_opened_closed_and_reset(fleet, open_page):
    engine, address, *_ = fleet
    page = open_page(f"{address}/services/bank")
    expect(page.locator("main")).to_contain_text("Next probes")
    act(page, "Close breaker", reason="it is well")
    expect(page.locator("main")).to_contain_text("A person holds it")
    assert engine.services.get("bank").breaker.status == "closed"
    engine.get("paid-late").reached("failed")  # its attempt began
    act(page, "Open breaker")
    expect(page.get_by_role("button", name="Open breaker")).to_have_count(0)
    assert engine.services.get("bank").breaker.by_hand
    act(page, "Set limits", concurrency="none", breaker="9/60/5")
    expect(page.locator("main")).to_contain_text("opens after 9 failures")
    assert engine.services.get("bank").limits.concurrency is None
    act(page, "Reset")
    expect(page.get_by_role("button", name="Reset")).to_have_count(0)
    assert engine.services.get("bank").breaker == BreakerInfo()


def test_schedule_is_paused_resumed_triggered_and_backfilled(fleet, open_page):
    engine, address, *_ = fleet
    page = open_page(f"{address}/schedules/nightly")
    assert act(page, "Pause", reason="holiday") == "keepstep schedules pause nightly --reason holiday"
    expect(page.locator("main")).to_contain_text("None while it is paused")
    assert engine.schedules.get("nightly").paused
    act(page, "Resume")
    expect(page.get_by_role("button", name="Pause")).to_have_count(1)
    act(page, "Trigger now")
    expect(page.get_by_role("link", name=re.compile("nightly@")).first).to_be_visible()
    assert engine.schedules.get("nightly").fired == 1
    act(page, "Backfill", first="2026-01-01T00:00:00Z", last="2026-01-02T12:00:00Z")
    expect(page.locator("main")).to_contain_text("3 started a run")


def test_agent_is_drained_resumed_and_probed(fleet, open_page):
    engine, address, *_ = fleet
    page = open_page(f"{address}/agents/writer")
    assert act(page, "Drain", reason="update") == "keepstep agents drain writer --reason update"
    expect(page.locator("main")).to_contain_text("It gets no more tasks")
    assert engine.agents.get("writer").status == "draining"
    act(page, "Resume")
    expect(page.locator("main")).to_contain_text("healthy")
    page.get_by_role("button", name="Probe now").click()
    page.locator("dialog[open]").get_by_role("button", name="Probe now").click()
    expect(page.locator("#toasts")).to_contain_text("The agent was probed")
    assert engine.agents.get("writer").hosts[0].agent.record.probed_at is not None


def test_message_is_published_and_channel_tested(fleet, open_page):
    engine, address, *_ = fleet
    page = open_page(f"{address}/messages/news")
    act(page, "Publish", value='{"number": 7}')
    expect(page.locator("main")).to_contain_text('"number": 7')
    assert engine.topics.recent("news")[-1] == {"number": 7}
    page.goto(f"{address}/messages")
    assert act(page, "Test", text="hello") == "keepstep channels test ops hello"
    expect(page.locator("#toasts")).to_contain_text("on its way")


def test_form_starts_a_run_with_every_kind_of_parameter(fleet, open_page):
    engine, address, *_ = fleet
    page = open_page(f"{address}/workflows/every")
    page.get_by_role("link", name="Start a run").click()
    assert axe_violations(page) == []
    page.fill("#in-number", "seven")
    page.fill("#in-address", '{"town": 1}')
    page.fill("#opt-priority", "high")
    page.get_by_role("button", name="Start the run").click()
    for name, problem in {
        "text": "this is required",
        "number": "it must be a whole number, got 'seven'",
        "address": "missing required field `city`",
        "priority": "it must be a whole number",
    }.items():
        expect(page.locator(f"[data-field={name}] [data-wrong]")).to_contain_text(problem)
    assert page.evaluate("document.activeElement.id") == "in-text"
    assert axe_violations(page) == []
    page.fill("#in-text", "it's <b>text</b>")
    page.fill("#in-number", "123456789012345678901")
    page.fill("#in-share", "0.25")
    page.check("#in-yes")
    page.select_option("#in-mode", label="slow")
    page.select_option("#in-colour", label="RED")
    page.fill("#in-day", "2026-01-31")
    page.fill("#in-address", '{"city": "Köln"}')
    page.fill("#in-order", '{"item": "tea", "count": 2}')
    page.fill("#opt-priority", "3")
    page.fill("#opt-run_id", "every-1")
    page.fill("#opt-tags", "team=a\nkind=b c")
    expect(page.locator("[data-command]")).to_contain_text("--id every-1")
    expect(page.locator("[data-wrong]:not(:empty)")).to_have_count(0)
    page.get_by_role("button", name="Start the run").click()
    page.wait_for_url("**/runs/every-1")
    page.expected.clear()  # checks while typing were answered with 422, too
    run = engine.get("every-1")
    expected = {"text": "it's <b>text</b>", "number": 123456789012345678901, "share": 0.25, "yes": True, "mode": "slow"}
    expected |= {"colour": "RED", "day": "2026-01-31", "city": "Köln", "order": {"item": "tea", "count": 2}}
    assert run.result() == {**expected, "note": HOSTILE}
    stored = run.run()
    assert (stored.priority, stored.tags, stored.created_by) == (3, {"team": "a", "kind": "b c"}, "web")
    page.goto(f"{address}/workflows/every/start?like=every-1")
    assert page.input_value("#in-number") == "123456789012345678901"
    assert json.loads(page.input_value("#in-order")) == {"item": "tea", "count": 2}
    assert page.input_value("#in-colour") == '"red"'
    assert page.input_value("#opt-tags") == "team=a\nkind=b c"


def test_worker_is_drained_and_doctor_checks_again(url, serve, open_page):
    with ExitStack() as stack:
        process = worker_of(stack, url)
        address = serve(PROGRAM)
        page = open_page(f"{address}/doctor")
        expect(page.locator("main")).to_contain_text("All is well")
        process.send_signal(signal.SIGSTOP)
        page.get_by_role("link", name="Check again").click()
        expect(page.locator(".finding")).to_contain_text(f"kill -CONT {process.pid}")
        assert page.url == f"{address}/doctor"
        process.send_signal(signal.SIGCONT)
        page.goto(f"{address}/workers")
        page.locator("main tbody a").click()
        assert re.fullmatch(r"keepstep drain worker-\w+", act(page, "Drain"))
        expect(page.locator(".s-paused")).to_contain_text("draining")
        engine = stack.enter_context(ks.open(url, worker=False, workflows=[]))
        assert engine.workers()[0].drain_at is not None


def test_admin_acts_are_hidden_from_the_role_act(fleet, open_page):
    _, _, _, url = fleet
    tokens = f"ann:act:{SECRET} bob:read:{SECRET}-too"
    with serving(url, PROGRAM, environment={"KEEPSTEP_TOKEN": tokens}) as address:
        page = open_page(f"{address}/queues/mail")
        page.fill("#token", SECRET)
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("mail")
        hidden = {"/queues/mail": "Set limits", "/services/bank": "Open breaker", "/agents/writer": "Drain"}
        for path, button in hidden.items():
            page.goto(address + path)
            expect(page.get_by_role("button", name=button)).to_have_count(0)
        page.goto(f"{address}/schedules/nightly")
        expect(page.get_by_role("button", name="Trigger now")).to_have_count(1)
        expect(page.get_by_role("button", name="Backfill")).to_have_count(0)
        page.click("text=Sign out ann")
        page.fill("#token", f"{SECRET}-too")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Sign out bob")).to_have_count(1)
        page.goto(f"{address}/workflows/every/start")
        expect(page.locator("main")).to_contain_text("does not have the role act")
        expect(page.locator("form#start")).to_have_count(0)
        page.close()


def test_page_shows_a_change_at_once(fleet, open_page):
    _, address, client, _ = fleet
    page = open_page(f"{address}/queues/mail")
    before = os.urandom(4).hex()
    client.post("/queues/mail/set", json={"limits": {"per_worker": 9}, "reason": before})
    client.post("/runs", json={"workflow": "review"})  # a commit, which the stream tells of
    expect(page.locator("main")).to_contain_text(before)


def test_pages_fit_a_small_screen(fleet, open_page):
    _, address, *_ = fleet
    page = open_page(f"{address}/workers", viewport={"width": 360, "height": 800})
    for path in PAGES:
        page.goto(address + path)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360, (path, width)
