"""A crash test finds what is wrong with a workflow, says what to do about it, and leaves a good one alone."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import socketserver
import threading
import time
from pathlib import Path

import psutil
import pytest

import keepstep as ks
from keepstep.errors import DefinitionError, NotSerializable
from keepstep.testing import Ask, Complete, crashproof, crashtest, effect
from keepstep.testing.crashtests.crash_points import Moment
from keepstep.testing.crashtests.crashtest import sample
from keepstep.testing.crashtests.findings import _agrees
from keepstep.testing.faults.crash import MemoryDisk
from tests.nightly import case

from . import flawed

pytestmark = pytest.mark.crash


def errors(report):
    return [finding for finding, _ in report.findings if finding.severity == "error"]


def only(report, code):
    """The one thing that is wrong."""
    [found] = errors(report)
    assert found.code == code, f"{report}"
    assert not report.ok
    return found


def line_of(text):
    """Where something stands in the flawed workflows."""
    lines = Path(flawed.__file__).read_text(encoding="utf-8").splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if text in line]
    return f"{flawed.__file__}:{number}"


# -- effects -----------------------------------------------------------------------------------------------------------


def test_doubled_effect_is_found():
    report = crashtest(flawed.double_charge)
    found = only(report, "doubled")
    assert (found.step, found.line) == ("charge", line_of("# doubled"))
    assert "charge order-1" in found.message
    assert "ks.idempotency_key()" in found.advice
    assert "at_most_once" in found.advice
    [step] = report.steps
    assert (step.name, step.effects) == ("charge", ["charge order-1"])
    assert step.doubled == 3  # at its await, at its end, before its checkpoint
    assert "is not crash-proof" in report.verdict


def test_the_process_dies_at_every_moment_that_counts():
    report = crashtest(flawed.double_charge)
    assert [(crash.where, crash.ok) for crash in report.crashes] == [
        ("after the run is created", True),
        ("as its body begins", True),
        ("before its effect 1: charge order-1", True),
        ("at its await 1", False),
        ("after its body, before its result is recorded", False),
        ("before the checkpoint of charge", False),
        ("after the checkpoint of charge", True),
        ("before the end of the run", True),
        ("after the end of the run", True),
    ]
    assert [crash.repeated for crash in report.crashes] == [[], [], *[["charge"]] * 4, [], [], []]
    assert {crash.ended for crash in report.crashes} == {"completed"}


def test_a_child_that_goes_on_without_its_parent_is_crashed_too():
    found = only(crashtest(flawed.leaves_child), "doubled")
    assert found.message.endswith("charge from a child")


def test_a_child_that_goes_on_for_ever_is_left_behind():
    assert crashtest(flawed.leaves_child_for_ever, at_most=3).ok


def test_key_that_is_new_each_time_is_found():
    found = only(crashtest(flawed.useless_key), "doubled")
    assert "differs each time" in found.advice


def test_line_appended_twice_is_found():
    found = only(crashtest(flawed.appends), "doubled")
    assert "log.txt appended to" in found.message
    assert found.line == line_of('Path("log.txt").open("a")')


@pytest.mark.parametrize("workflow", [flawed.processes, flawed.async_processes], ids=str)
def test_program_started_twice_is_found(workflow):
    found = only(crashtest(workflow), "doubled")
    assert "-c pass" in found.message


def test_what_a_thread_of_a_step_does_belongs_to_the_step():
    assert only(crashtest(flawed.threads), "doubled").step == "charge_in_thread"


class Server(http.server.ThreadingHTTPServer):
    """Counts what it is asked for."""

    def __init__(self):
        self.asked = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def do_GET(self):
                server.asked.append(self.command)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/pay"


@contextlib.contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_request_sent_twice_is_found():
    with serving(Server()) as server:
        report = crashtest(flawed.posts, f"{server.url}?colour=blue")
        found = only(report, "doubled")
        assert f"POST {server.url}" in found.message
        assert "colour" not in str(report)  # a query may hold what is nobody's business
        assert "Idempotency-Key" in found.advice
        assert len(server.asked) > len(report.crashes) + 2


@pytest.mark.parametrize("place", ["header", "own header", "body"])
def test_a_request_with_a_key_may_be_sent_twice(place):
    with serving(Server()) as server:
        assert crashtest(flawed.posts, server.url, place).ok


def test_a_request_that_only_reads_may_be_sent_twice():
    with serving(Server()) as server:
        report = crashtest(flawed.gets, server.url)
        assert report.ok
        assert f"GET {server.url}" in report.steps[0].effects


@pytest.mark.parametrize(
    "library, keyed",
    [
        case(library, keyed, id=f"{library}-{keyed}", nightly=keyed and library != "httpx")
        for library in ("requests", "httpx", "async httpx", "aiohttp")
        for keyed in (False, True)
    ],
)
def test_requests_of_other_libraries_are_seen(library, keyed):
    pytest.importorskip(library.split()[-1])
    from . import clients

    with serving(Server()) as server:
        report = crashtest(clients.WORKFLOWS[library], server.url, keyed)
        assert f"POST {server.url}" in report.steps[0].effects
        if keyed:
            assert report.findings == [], f"{report}"
        else:
            only(report, "doubled")


class MailServer(socketserver.ThreadingTCPServer):
    """Takes any mail."""

    daemon_threads = True

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.wfile.write(b"220 here\r\n")
            text = False
            for line in self.rfile:
                word = line[:4].lower()
                if text and line != b".\r\n":
                    continue
                text = word == b"data"
                self.wfile.write(b"354 go on\r\n" if text else b"221 bye\r\n" if word == b"quit" else b"250 fine\r\n")


def test_mail_sent_twice_is_found():
    with serving(MailServer(("127.0.0.1", 0), MailServer.Handler)) as server:
        found = only(crashtest(flawed.mails, server.server_address[1]), "doubled")
        assert "mail from <a@example.org>" in found.message


def test_secrets_are_kept_out_of_the_report():
    report = crashtest(flawed.careless)
    assert only(report, "doubled").message.endswith("-c pass password=[redacted]")
    assert "hunter2" not in json.dumps(report.as_json())


def test_file_with_a_strange_name_is_reported(capfd):
    report = crashtest(flawed.strange_name)
    assert "appended to" in only(report, "doubled").message
    print(report)  # which a terminal can show
    print(json.dumps(report.as_json(), ensure_ascii=False))


def test_an_effect_that_is_called_harmless_is_left_alone():
    assert crashtest(flawed.double_charge, ignore=["charge order"]).ok
    assert crashtest(flawed.appends, ignore=["log.txt"]).ok


def test_ignored_effect_that_never_happens_is_reported():
    [(finding, _)] = crashtest(flawed.double_charge, ignore=["charge", "chrage"]).findings
    assert (finding.severity, finding.code) == ("warning", "ignored-nothing")
    assert "'chrage'" in finding.message


def test_what_may_not_be_stored_is_refused_before_anything_is_run(monkeypatch):
    monkeypatch.setattr(ks.Secret, "revealed", {})
    monkeypatch.setenv("PHRASE", "correct horse battery")
    with pytest.raises(ks.NotSerializable, match="argument 1 holds a revealed secret"):
        crashtest(flawed.double_charge, ks.Secret("PHRASE").reveal())


def test_outside_a_crash_test_an_effect_is_nothing():
    assert effect("charge", 1, key="k") is None


# -- the workflow's own code -------------------------------------------------------------------------------------------


def test_effect_outside_any_step_is_found():
    found = only(crashtest(flawed.effect_outside), "outside-step")
    assert found.line == line_of('effect("mail", "somebody")')
    assert "move it into a step" in found.advice


def test_a_file_that_is_written_outside_any_step_is_worth_a_warning():
    report = crashtest(flawed.file_outside)
    assert report.ok
    assert [finding.code for finding, _ in report.findings] == ["outside-step"]


@pytest.mark.parametrize(
    "workflow, called, line, instead",
    [
        (flawed.chance, "random.randint", "# drawn", "ks.random()"),
        (flawed.clock, "datetime.now", "# looked at", "ks.now()"),
        (flawed.identity, "uuid.uuid4", "# made up", "ks.uuid()"),
    ],
    ids=str,
)
def test_chance_in_the_workflow_is_named_with_its_line(workflow, called, line, instead):
    found = only(crashtest(workflow), "not-replayable")
    assert "note#1 was recorded with another input" in found.message
    assert called in found.advice
    assert instead in found.advice
    assert found.line == line_of(line)


def test_a_clock_that_changes_nothing_is_worth_a_warning():
    report = crashtest(flawed.harmless_clock)
    assert report.ok
    assert {finding.code for finding, _ in report.findings} == {"chance"}


def test_result_that_varies_is_reported_and_not_compared():
    report = crashtest(flawed.random_result)
    assert report.ok
    assert {finding.code for finding, _ in report.findings} == {"varies", "chance"}


def test_value_that_was_only_in_memory_is_found():
    found = only(crashtest(flawed.memory), "memory")
    assert "-1 instead of 42" in found.message
    assert "return it from a step" in found.advice
    assert flawed.remembered == {}  # no life was lived in this process


def test_times_in_a_result_may_differ_after_a_crash():
    report = crashtest(flawed.only_time)
    assert [finding.code for finding, _ in report.findings] == ["varies"], f"{report}"


def test_what_does_not_vary_is_compared_all_the_same():
    report = crashtest(flawed.memory_and_time)
    assert only(report, "memory")
    assert [finding.code for finding, _ in report.findings] == ["memory", "varies"], f"{report}"


@pytest.mark.parametrize(
    "first, second, other, same",
    [
        (1, 1, 2, False),
        (1, 2, 3, True),
        ([1, "a"], [2, "a"], [3, "a"], True),
        ([1, "a"], [2, "a"], [3, "b"], False),
        ([1, "a"], [2, "a"], [3], False),
        ({"t": 1, "x": [1]}, {"t": 2, "x": [1]}, {"t": 3, "x": [2]}, False),
        ({"t": 1, "x": 1}, {"t": 2, "x": 1}, {"t": 3}, False),
        ({"t": 1}, {"u": 1}, {"v": 1}, True),
        ([1], [1, 2], [], True),
        ([1], [2], {"a": 1}, True),
    ],
)
def test_values_are_compared_in_what_does_not_vary(first, second, other, same):
    assert _agrees(first, second, other) is same


def test_step_that_removes_what_it_reads_is_found():
    def set_up():
        Path("lines.txt").write_text("one\ntwo\nthree")

    report = crashtest(flawed.takes, set_up=set_up)
    codes = {finding.code: finding for finding in errors(report)}
    assert codes.keys() == {"not-deterministic", "file"}
    assert codes["not-deterministic"].step == "take"
    assert '"two" instead of "one"' in codes["not-deterministic"].message
    assert "lines.txt" in codes["file"].message


def test_file_that_a_crash_leaves_behind_is_found():
    report = crashtest(flawed.leaves_half)
    assert any(finding.code == "left-behind" for finding, _ in report.findings), f"{report}"


# -- workflows that do not end -----------------------------------------------------------------------------------------


def test_signal_that_nobody_sends_is_found():
    report = crashtest(flawed.never_told)
    assert "--signal go=JSON" in only(report, "stuck").advice
    assert not report.crashes


def test_step_that_hangs_is_found():
    found = only(crashtest(flawed.hangs, life_seconds=4.0), "hangs")
    assert found.line == line_of("threading.Event().wait()")


def test_step_that_awaits_for_ever_is_found():
    found = only(crashtest(flawed.awaits_for_ever), "stuck")
    assert "await_for_ever" in found.message


def test_workflow_that_exits_is_found():
    assert "SystemExit: 3" in only(crashtest(flawed.leaves), "fails").message


def test_workflow_that_ends_its_process_is_found():
    assert "exit code 3" in only(crashtest(flawed.dies), "died").message


def test_workflow_that_raises_is_found_unless_it_may_fail():
    found = only(crashtest(flawed.fails), "fails")
    assert "ValueError: no" in found.message
    assert found.line == line_of("raise ValueError(text)")
    report = crashtest(flawed.fails, may_fail=True)
    assert report.ok
    assert report.crashes


def test_workflow_that_hangs_only_after_a_crash_is_found():
    report = crashtest(flawed.hangs_after_crash, life_seconds=4.0, at_most=4)
    assert only(report, "hangs").message.startswith("after a crash")
    assert any(crash.ok for crash in report.crashes)


# -- workflows without a flaw ------------------------------------------------------------------------------------------


@pytest.mark.nightly  # `make test` crashes this workflow ten times, as a test with the decorator
def test_a_good_workflow_is_clean():
    report = crashtest(flawed.good, answers={"approve": "yes"})
    assert report.ok, f"{report}"
    assert report.findings == []
    assert len(report.crashes) > 50
    assert all(crash.reached for crash in report.crashes)
    assert '"yes"' in report.result
    assert report.virtual_seconds > 60 * 86_400
    inside = {crash.step for crash in report.crashes if crash.step}
    assert any(key.endswith("write#1") for key in inside)
    assert "is crash-proof" in report.verdict


def test_a_plain_def_workflow_is_clean():
    report = crashtest(flawed.plain)
    assert report.findings == [], f"{report}"
    assert {crash.step for crash in report.crashes} == {"", "write#1", "charge_once#1"}


def test_work_of_other_threads_during_a_kill_is_not_durable(monkeypatch):
    image = MemoryDisk.image

    def slow_image(disk):
        taken = image(disk)
        time.sleep(0.05)  # in which the loop would go on, and commit what is not in the image
        return taken

    monkeypatch.setattr(MemoryDisk, "image", slow_image)
    report = crashtest(flawed.blocking_side_by_side)
    assert report.ok, str(report)


def test_races_cancels_and_timeouts_are_clean():
    report = crashtest(flawed.races, at_most=30)
    assert report.findings == [], f"{report}"
    assert all(crash.reached for crash in report.crashes)
    assert report.result == '["b cancelled too late","d",1]'


def test_an_at_most_once_step_is_left_to_a_person():
    report = crashtest(flawed.at_most_once)
    assert report.ok
    assert [finding.code for finding, _ in report.findings] == ["in-doubt"]
    assert "left the run to a person" in report.verdict
    doubtful = [crash for crash in report.crashes if crash.ended == "in doubt"]
    assert (
        len(doubtful) == 5
    )  # after the start mark, at the start, before the effect, at the end, before the checkpoint
    assert not any(crash.repeated for crash in doubtful)


def test_at_most_once_step_with_verify_is_clean():
    report = crashtest(flawed.verified)
    assert report.findings == [], f"{report}"


def test_transactional_steps_are_tested_on_sqlite():
    report = crashtest(flawed.books)
    assert report.findings == [], f"{report}"
    assert report.result == "2"


def test_successors_are_tested_too():
    report = crashtest(flawed.counts_down)
    assert report.findings == [], f"{report}"


def test_each_signal_is_sent_once_whatever_crashes():
    report = crashtest(flawed.relays, answers=[("word", "a"), ("word", "b"), ("word", "c")])
    assert report.findings == [], f"{report}"
    assert report.result == '["a","b","c"]'


def test_a_question_is_asked():
    report = crashtest(flawed.talks, answers=[("say", Ask("hello"))])
    assert report.findings == [], f"{report}"
    assert report.result == '"hello"'


@pytest.mark.parametrize("name", ["payment", ""])
def test_a_callback_is_completed_by_its_name(name):
    report = crashtest(flawed.pays_by_hook, name, answers={name: Complete("paid")})
    assert report.findings == [], f"{report}"
    assert report.result == '"paid"'


def test_a_callback_reads_the_same_after_every_crash():
    report = crashtest(flawed.gives_up)
    assert report.findings == [], f"{report}"
    told = ["callback 'payment' was not completed within 3600 s", "<callback 'payment'>"]
    assert json.loads(report.result) == told


def test_a_callback_that_nobody_completes_is_named_without_a_number():
    found = only(crashtest(flawed.waits_for_ever), "stuck")
    assert found.message == "undisturbed, it waits for callback payment, which nobody completes"
    assert found.advice == "complete it: --complete payment=JSON, or answers={'payment': Complete(...)}"


def test_a_completion_that_nothing_waits_for_is_reported():
    report = crashtest(flawed.double_charge, ignore=["charge"], answers={"payment": Complete()})
    [(found, _)] = report.findings
    assert found.message == "callback payment was not sent: nothing has waited for it"
    assert "ks.callback" in found.advice


@pytest.mark.parametrize("workflow, result", [(flawed.stops, '{"count":2}'), (flawed.stops_in_a_child, "2")])
def test_breakpoints_are_resumed(workflow, result):
    report = crashtest(workflow, at_most=60)
    assert report.findings == [], f"{report}"
    assert report.result == result


def test_signal_that_nothing_waits_for_is_reported():
    report = crashtest(flawed.double_charge, ignore=["charge"], answers={"go": 1})
    assert [finding.message for finding, _ in report.findings] == ["signal go was not sent: nothing has waited for it"]


def test_it_may_be_called_while_a_loop_runs():
    async def main():
        return crashtest(flawed.double_charge)

    assert not asyncio.run(main()).ok


# -- how it goes about it ----------------------------------------------------------------------------------------------


def test_a_long_workflow_is_sampled_and_says_so():
    report = crashtest(flawed.many, at_most=12)
    assert report.ok
    assert len(report.crashes) == 12
    assert report.moments > 400
    assert f"a sample of {report.moments} moments" in report.verdict


def test_the_sample_is_even_and_the_same_for_a_seed():
    moments = [Moment(str(number), "") for number in range(1000)]
    chosen = [int(moment.id) for moment in sample(moments, 10, seed=1)]
    assert [number // 100 for number in chosen] == list(range(10))
    assert chosen == [int(moment.id) for moment in sample(moments, 10, seed=1)]
    assert chosen != [int(moment.id) for moment in sample(moments, 10, seed=2)]
    assert sample(moments, 1000, seed=1) == moments


def test_each_crash_has_a_world_of_its_own(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").write_text("x")
    before, entered, left = Path.cwd(), [], []

    @contextlib.contextmanager
    def world():
        entered.append(Path.cwd())
        assert [path.name for path in Path.cwd().iterdir()] == ["data"]
        yield
        left.append(Path.cwd())

    def in_each_life():
        with Path("../lives").open("a") as file:
            file.write("x")

    report = crashtest(
        flawed.appends, set_up=world, each_life=in_each_life, files=[tmp_path / "data"], ignore=["log.txt"]
    )
    assert report.ok
    assert len(entered) == len(left) == len(report.crashes) + 2
    assert len(set(entered)) == len(entered)
    assert Path.cwd() == before
    assert not any(path.exists() for path in entered)


def test_nothing_is_left_running():
    before = psutil.Process().children(recursive=True)
    assert crashtest(flawed.double_charge).crashes
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_a_file_that_was_not_copied_is_named_as_the_cause():
    @ks.step
    def read() -> str:
        return Path("data.txt").read_text(encoding="utf-8")

    @ks.workflow
    async def reads() -> str:
        return await read()

    [(finding, _)] = crashtest(reads).findings
    assert finding.code == "fails"
    assert "--file PATH" in finding.advice


def test_progress_is_reported():
    seen = []
    report = crashtest(flawed.double_charge, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(number, len(report.crashes)) for number in range(1, len(report.crashes) + 1)]


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: crashtest(len), "not a workflow"),
        (lambda: crashtest(flawed.good, 1, 2, 3), "cannot be started with this input"),
        (lambda: crashtest(flawed.good, answers={"": 1}), "signal"),
        (lambda: crashtest(flawed.good, files=["nowhere"]), "nowhere"),
        (lambda: crashproof(answer={"approve": True}), "no option 'answer'; did you mean answers"),
        (lambda: crashproof(zzz=1), "no option 'zzz'; its options are answers, set_up"),
    ],
)
def test_what_cannot_be_tested_is_refused(call, said):
    with pytest.raises(DefinitionError, match=said):
        call()


def test_what_cannot_be_stored_is_refused():
    with pytest.raises(DefinitionError, match="argument 'order' of workflow"):
        crashtest(flawed.double_charge, object())
    with pytest.raises(NotSerializable):
        crashtest(flawed.anything, object())


# -- as a test ---------------------------------------------------------------------------------------------------------


@crashproof(answers={"approve": True}, at_most=10)
def test_the_decorator_passes_what_is_good():
    return flawed.good.bind("order-2")


def test_decorator_fails_a_flawed_workflow():
    @crashproof
    def test_it():
        return flawed.double_charge.bind()

    with pytest.raises(AssertionError, match=r"(?s)is not crash-proof.*charge order-1.*idempotency_key"):
        test_it()


def test_the_decorator_wants_a_workflow():
    @crashproof
    async def test_it():
        return flawed.double_charge.bind()

    with pytest.raises(DefinitionError, match=r"return workflow\.bind"):
        test_it()


@ks.workflow(name="kept for a day", retain=ks.Retain(days=1, count=3))
async def kept_for_a_day():
    await ks.sleep(days=365)
    return "x"


def test_retention_does_not_use_up_virtual_time():
    """A rule of a workflow would otherwise look at the store for every ten minutes of a skipped year."""
    report = crashtest(kept_for_a_day)
    assert report.ok
    assert len(report.crashes) < 20
