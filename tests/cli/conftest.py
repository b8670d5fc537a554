"""The command line in a folder of its own: called in this process, or started as a real one."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep import cli
from keepstep.cli import worker as worker_command
from keepstep.workflows.definition import KNOWN

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio
from dataclasses import dataclass
from pathlib import Path

import keepstep as ks


@dataclass
class Parcel:
    weight: float
    to: str


@ks.step
async def add(a, b):
    return a + b


@ks.workflow
async def total(a: int, b: int = 10) -> int:
    return await add(a, b)


@ks.step
async def say(text: str) -> str:
    return text


@ks.workflow
async def echo(text: str) -> int:
    return len(await say(text))


@ks.workflow
async def greet(name: str) -> tuple[str, int]:
    return (f"hello {name}", len(name))


@ks.workflow
async def post(parcel: Parcel) -> str:
    return f"{type(parcel).__name__} of {parcel.weight:g} kg to {parcel.to}"


@ks.step(retry=ks.Retry(attempts=2, base_seconds=0.01))
async def fragile() -> str:
    if not Path("mended").exists():
        raise ConnectionError("the line is \\x1b[31mdown")
    return "up"


@ks.workflow
async def call() -> str:
    return await fragile()


@ks.workflow
async def approval() -> str:
    return "yes" if await ks.wait_for("approved") else "no"


@ks.workflow
async def two() -> list:
    return list(await ks.gather(ks.wait_for("left"), ks.wait_for("right")))


@ks.step
async def hang() -> None:
    Path("hanging").touch()
    await asyncio.sleep(600)


@ks.workflow
async def stuck() -> None:
    await add(1, 1)
    await hang()


@ks.step(at_most_once=True)
async def pay() -> int:
    Path("paying").touch()
    await asyncio.sleep(600)
    return 1


@ks.workflow
async def purchase() -> int:
    return await pay()


@ks.workflow
async def oracle() -> str:
    question = await ks.wait_for("question")
    question.reply({"answer": question.payload})
    return "asked"


def not_a_workflow() -> None:
    pass
"""


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with a program in it, which is also the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KEEPSTEP_STORE", raising=False)
    # A program that is changed within a second, to one of the same length, is the old one to whoever kept it compiled.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


def _is_ours(module):
    """Whether a module is one that a test has loaded, and no part of Python."""
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None) or getattr(spec, "origin", None) or ""
    return file not in ("built-in", "frozen") and not file.startswith((sys.prefix, sys.base_prefix))


@pytest.fixture
def keepstep(folder, capsys, monkeypatch):
    """Call the command line in this process, as a fresh one would be."""
    monkeypatch.setattr(worker_command, "IDLE_SECONDS", 0.2)

    def call(*words):
        known, path, modules = dict(KNOWN), list(sys.path), set(sys.modules)
        filters = list(logging.getLogger("keepstep").filters)
        capsys.readouterr()
        KNOWN.clear()
        names = {path.stem for path in folder.rglob("*.py")}
        others = [name for name in names & set(sys.modules) if _is_ours(sys.modules[name])]
        hidden = {name: sys.modules.pop(name) for name in others}  # of the same name, from other tests
        try:
            code = cli.main([str(word) for word in words])
        finally:
            KNOWN.clear()
            KNOWN.update(known)
            sys.path[:] = path
            logging.getLogger("keepstep").filters[:] = filters
            for name in set(sys.modules) - modules:
                if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
                    del sys.modules[name]
            sys.modules.update(hidden)
        said = capsys.readouterr()
        assert "Traceback" not in said.err or "--debug" in words or "cannot be imported" in said.err
        return Result(code, said.out, said.err)

    return call


@pytest.fixture
def spawn(folder):
    """Start the command line as a process of its own; what is left of them is killed at the end."""
    processes = []

    def start(*words, **options):
        code = "import sys; sys.argv[0] = 'keepstep'; from keepstep.cli import main; sys.exit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()
