"""Secrets: never stored, never told. The judge is a search through every byte of the files, logs, events and output."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from functools import partial

import pytest

import keepstep as ks
from keepstep.errors import NotSerializable
from keepstep.values.secret import Secret
from tests.engine.world import until_status

pytestmark = pytest.mark.plaintext

#: One that the built-in patterns know, and one that only `reveal` makes known.
TOKEN = "ghp_" + "Ab3" * 10
PHRASE = "correct horse battery"
BOTH = pytest.mark.parametrize("secret", [TOKEN, PHRASE])
#: The reason of a refusal: the value looks like a secret, or holds a revealed one.
SECRET = r"(looks like a secret, and the engine has on_suspect='refuse'|holds a revealed secret)"


@pytest.fixture(autouse=True)
def phrase(monkeypatch):
    monkeypatch.setattr(Secret, "revealed", {})
    monkeypatch.setenv("PHRASE", PHRASE)
    assert ks.Secret("PHRASE").reveal() == PHRASE


class Ear(logging.Handler):
    """Hears what a log file would hold."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def ear():
    logger, heard = logging.getLogger("keepstep"), Ear()
    logger.addHandler(heard)
    yield heard
    logger.removeHandler(heard)


def stored(world):
    """Every byte of the store."""
    if world.kind == "sqlite":
        return b"".join(path.read_bytes() for path in world.path.parent.glob(f"{world.path.name}*") if path.is_file())
    if world.kind == "files":
        return b"".join(path.read_bytes() for path in world.path.rglob("*") if path.is_file())
    return repr(vars(world._memory)).encode()


def nowhere(secret, world, *told):
    assert secret.encode() not in stored(world)
    for one in told:
        assert secret not in str(one)


@BOTH
async def test_an_input_that_holds_a_secret_is_refused_with_its_place(world, secret):
    @ks.workflow
    async def fetch(url, headers=None):
        return url

    async with world.engine(worker=False, on_suspect="refuse") as engine:
        with pytest.raises(NotSerializable, match=rf"input of workflow 'fetch': argument 1 {SECRET}") as one:
            await engine.start(fetch, secret)
        with pytest.raises(NotSerializable, match=rf"argument 'headers'\['auth'\]\[0\] {SECRET}") as two:
            await engine.start(fetch, "x", headers={"auth": [secret]})
        with pytest.raises(NotSerializable, match=f"tag 'team': its value {SECRET}") as three:
            await engine.start(fetch, "x", tags={"team": secret})
        assert (await engine.list()).runs == ()
    nowhere(secret, world, one.value, two.value, three.value)


async def test_a_reference_is_stored_and_the_secret_is_not(world):
    used = []

    @ks.step
    async def call(key):
        used.append(key.reveal())
        return len(used[-1])

    @ks.workflow
    async def fetch(token):
        return await call(token), token

    async with world.engine() as engine:
        run = await engine.start(fetch, ks.Secret("PHRASE"))
        assert await run.result() == (len(PHRASE), ks.Secret("PHRASE"))
        assert await run.input() == [[ks.Secret("PHRASE")], {}]
    assert PHRASE in used
    assert b"PHRASE" in stored(world)
    nowhere(PHRASE, world)


@BOTH
@pytest.mark.live_only
async def test_secret_that_a_run_would_store_is_refused_and_shown_nowhere(world, secret, ear):
    """Results, published values, replies, signals, children, successors: the run fails, and says where."""

    @ks.step
    async def leaky():
        return {"token": secret}

    @ks.workflow
    async def child(x):
        return x

    async def step_result():
        await leaky()

    async def result():
        return [secret]

    async def published():
        ks.publish("shown", secret)

    async def sent():
        await ks.signal("nobody", "word", secret)

    async def started():
        await ks.start(child, secret)

    async def continued():
        ks.continue_as(secret)

    events = []
    async with world.engine(observers=[events.append, "log"], on_suspect="refuse") as engine:
        for number, code in enumerate(
            (step_result, result, published, sent, started, partial(_tagged, child, secret), continued)
        ):
            workflow = ks.workflow(name=f"leak{number}")(_taking(code))
            run = await engine.start(workflow)
            with pytest.raises(ks.RunFailed, match=SECRET) as caught:
                await run.result()
            told = await run.audit()
            nowhere(secret, world, caught.value, told, await run.checkpoints())
    nowhere(secret, world, events, ear.lines)
    assert ear.lines


async def _tagged(child, secret):
    await ks.start(child, 1, tags={"team": secret})


def _taking(code):
    async def workflow(x=None):
        return await code()

    return workflow


async def test_lookalike_is_stored_and_paid_work_is_kept(world, ear):
    """Whatever it looks like, the result of a step is what its next call, and a replay, receive."""
    calls = []

    @ks.step(retry=ks.Retry(attempts=3, base_seconds=0.01))
    async def write(topic):
        calls.append(topic)
        return {"text": f"# {topic}: {TOKEN}"}

    @ks.workflow
    async def agent(topic):
        first = await write(topic)
        second = await write(first["text"])
        ks.publish("draft", second["text"])
        return second["text"], await ks.wait_for("message")

    async with world.engine() as engine:
        run = await engine.start(agent, TOKEN, tags={"team": TOKEN})
        await run.signal("message", f"why does {TOKEN} fail?")
        text = f"# # {TOKEN}: {TOKEN}: {TOKEN}"
        assert await run.result(60) == (text, f"why does {TOKEN} fail?")
        assert await run.published() == {"draft": text}
        assert (await run.run()).tags == {"team": TOKEN}
    assert calls == [TOKEN, f"# {TOKEN}: {TOKEN}"]
    assert TOKEN not in str(ear.lines)
    assert len([line for line in ear.lines if line.startswith("step 'write#1': ['text'] looks like a secret")]) == 1
    assert any("on_suspect='refuse'" in line for line in ear.lines)


@pytest.mark.live_only
async def test_lookalike_is_warned_of_once_per_step_key(world, ear):
    @ks.step
    async def write():
        return TOKEN

    @ks.workflow
    async def agent():
        return [await write(), await write()]

    async with world.engine() as engine:
        for _ in range(3):
            await (await engine.start(agent)).result()
    warned = [line.split(":")[0] for line in ear.lines if "looks like a secret" in line]
    assert warned == ["step 'write#1'", "step 'write#2'", "result of workflow 'agent'"]


@pytest.mark.live_only
async def test_revealed_secret_beside_a_lookalike_is_refused(world):
    @ks.workflow
    async def echo(x):
        return x

    async with world.engine() as engine:
        with pytest.raises(NotSerializable, match=r"argument 1\[1\] holds a revealed secret"):
            await engine.start(echo, [TOKEN, PHRASE])


def test_an_unknown_treatment_of_suspects_is_refused():
    with pytest.raises(ks.DefinitionError, match="on_suspect must be 'store' or 'refuse', got 'warn'"):
        ks.Engine("memory:", on_suspect="warn")


@BOTH
@pytest.mark.live_only
async def test_errors_events_logs_and_audit_are_redacted(world, secret, ear):
    @ks.step
    async def refused():
        raise ConnectionError(f"401 for {secret}")

    @ks.workflow
    async def fetch():
        try:
            await refused()
        except ks.StepFailed as error:
            raise ValueError(f"{error} and {secret}") from error

    events = []
    async with world.engine(observers=[events.append, "log"]) as engine:
        run = await engine.start(fetch)
        with pytest.raises(ks.RunFailed, match=re.escape("[redacted]")) as caught:
            await run.result()
        told = await run.audit()
        whole = await run.run()
        log = logging.getLogger("keepstep")
        log.warning("a line with %s", secret)
        try:
            raise ValueError(secret)
        except ValueError:
            log.exception("a traceback")
    nowhere(secret, world, caught.value, told, whole, events, ear.lines)
    assert any("a line with [redacted]" in line for line in ear.lines)
    assert any("ValueError: [redacted]" in line for line in ear.lines)
    assert any("[redacted]" in entry.reason for entry in told)


@BOTH
@pytest.mark.live_only
async def test_secrets_are_redacted_in_reasons_and_refused_in_payloads(world, secret):
    @ks.workflow
    async def patient():
        await ks.wait_for("go")

    async with world.engine(on_suspect="refuse") as engine:
        run = await engine.start(patient)
        with pytest.raises(NotSerializable, match=f"signal 'go': its value {SECRET}"):
            await run.signal("go", secret)
        with pytest.raises(NotSerializable, match=rf"question 'go': \['k'\] {SECRET}"):
            await run.ask("go", {"k": secret})
        with pytest.raises(NotSerializable, match=SECRET):
            await run.resolve("pay#1", "result", secret)
        await run.pause(f"because of {secret}")
        await until_status(run, "paused")
        await run.resume(secret)
        await run.cancel(secret)
        with pytest.raises(ks.RunCancelled):
            await run.result()
        told = await run.audit()
    nowhere(secret, world, told)
    assert [entry.reason for entry in told if entry.what == "paused"] == ["because of [redacted]"]


@BOTH
@pytest.mark.live_only
async def test_tokens_and_progress_are_redacted(world, secret):
    shown = asyncio.Event()

    @ks.step
    async def stream():
        ks.emit(f"the key is {secret}")
        ks.progress(0.5, f"with {secret}")
        await shown.wait()
        ks.emit({"key": ["it", secret]})

    @ks.workflow
    async def talk():
        ks.emit(secret)
        await stream()

    async with world.engine() as engine:
        run = await engine.start(talk)
        while (progress := await run.progress()) is None:
            await engine.changed(0.1)
        shown.set()
        await run.result()
        tokens = [event.data["value"] async for event in run.watch() if event.name == "token.emitted"]
    assert tokens == ["[redacted]", "the key is [redacted]", {"key": ["it", "[redacted]"]}]
    assert progress["message"] == "with [redacted]"
    nowhere(secret, world)


@pytest.mark.live_only
async def test_a_redactor_that_fails_stops_the_write(world):
    class Broken(ks.Redactor):
        def hit(self, value):
            raise OSError("no patterns")

        def text(self, text):
            raise OSError("no patterns")

    @ks.workflow
    async def plain(x):
        raise ValueError("something private")

    async with world.engine(redact=Broken()) as engine:
        with pytest.raises(NotSerializable, match="redaction failed"):
            await engine.start(plain, 1)
        assert (await engine.list()).runs == ()
        engine.redaction._redactor.hit = lambda value: None
        run = await engine.start(plain, 1)
        with pytest.raises(ks.RunFailed, match="not shown: redaction failed"):
            await run.result()
    assert b"something private" not in stored(world)


@pytest.mark.live_only
async def test_redactor_without_patterns_lets_tokens_be_stored(world):
    @ks.workflow
    async def echo(x):
        return x

    async with world.engine(redact=ks.Redactor(())) as engine:
        assert await (await engine.start(echo, TOKEN)).result() == TOKEN
        with pytest.raises(NotSerializable):  # what was revealed is a secret all the same
            await engine.start(echo, PHRASE)
    async with world.engine(redact=ks.Redactor([r"card \d{4}"]), on_suspect="refuse") as engine:
        assert await (await engine.start(echo, TOKEN)).result() == TOKEN
        with pytest.raises(NotSerializable):
            await engine.start(echo, "card 1234")


PROGRAM = f"""
import keepstep as ks

@ks.step
def call(key):
    raise RuntimeError("refused with " + ks.Secret("PHRASE").reveal() + " and {TOKEN}")

@ks.workflow
def fetch(word="x"):
    return call(word).result()
"""


@pytest.mark.live_only
def test_the_command_line_prints_no_secret(tmp_path, monkeypatch):
    (tmp_path / "leak.py").write_text(PROGRAM)

    def keepstep(*words):
        command = [
            sys.executable,
            "-c",
            "import sys; from keepstep.cli import main; sys.exit(main())",
            "--store",
            "runs.db",
            *words,
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    code, out = keepstep("run", "leak.py:fetch", "--id", "r")
    assert code != 0
    assert "refused with [redacted] and [redacted]" in out
    outs = [out]
    for words in (["show", "r", "--traceback"], ["history", "r"], ["audit", "r"], ["list"], ["doctor", "--deep"]):
        outs += [keepstep(*words)[1], keepstep(*words, "--json")[1]]
    code, out = keepstep("start", "leak.py:fetch", TOKEN, "--on-suspect", "refuse")
    assert code != 0
    assert "looks like a secret" in out
    outs += [out, keepstep("signal", "r", "word", f'"{TOKEN}"')[1]]
    monkeypatch.setenv("KEEPSTEP_ON_SUSPECT", "refuse")
    code, out = keepstep("start", "leak.py:fetch", TOKEN)
    assert code != 0
    outs.append(out)
    for secret in (TOKEN, PHRASE):
        assert not [out for out in outs if secret in out]
        assert not [
            path for path in tmp_path.glob("runs.db*") if path.is_file() and secret.encode() in path.read_bytes()
        ]
