"""A store in a package of its own, installed from a folder: the one that the how-to page writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.errors import DefinitionError
from keepstep.stores import open as opening
from keepstep.stores.memory import MemoryStore
from tests import page

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, sys
import keepstep as ks
from keepstep.stores.open import schemes

@ks.workflow
async def hello() -> str:
    return "hello"

async def main():
    async with ks.open(sys.argv[1]) as engine:
        print(type(engine.store).__name__, await (await engine.start(hello, run_id="r")).result(), "keyed" in schemes())

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder in which pip has installed the package; nothing is fetched for it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for block in page.blocks((ROOT / "docs/how-to/write-a-store.md").read_text(encoding="utf-8")):
        if block.file:
            (source / block.file).write_text(block.text, encoding="utf-8")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *quiet, "--target", str(target), str(source)], check=True, timeout=100
    )
    return target


@pytest.fixture
def call(installed, tmp_path):
    """Run Python beside the installed package, and nothing of the folder that it came from."""

    def run(*words):
        path = os.pathsep.join((str(installed), str(ROOT / "src")))
        env = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_an_installed_package_adds_its_scheme(call, tmp_path):
    said = call("-c", PROGRAM, "keyed:runs.map")
    assert (said.stdout.strip(), said.returncode) == ("KeyedStore hello True", 0), said.stderr
    assert (tmp_path / "runs.map").is_file()
    command = "import sys; from keepstep.cli import main; sys.exit(main())"
    listed = call("-c", command, "--store", "keyed:runs.map", "list")
    assert listed.returncode == 0, listed.stderr
    assert "completed" in listed.stdout


def test_a_broken_package_is_named_and_leaves_the_others_alone(call, installed):
    module = installed / "keyed.py"
    whole = module.read_text(encoding="utf-8")
    try:
        module.write_text("import no_such_thing\n", encoding="utf-8")
        said = call("-c", PROGRAM, "keyed:runs.map")
        told = "the store for 'keyed:', of the package 'keepstep-keyed' (keyed:open_url), cannot be loaded"
        assert told in said.stderr
        assert call("-c", PROGRAM, "memory:").stdout.startswith("MemoryStore hello")
    finally:
        module.write_text(whole, encoding="utf-8")


def test_an_unknown_scheme_lists_the_installed_one(call):
    assert "did you mean keyed:?; known here: files:, keyed:, memory:" in call("-c", PROGRAM, "keyd:runs").stderr


# -- while the program runs --------------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(opening, "_OWN", {})


@pytest.mark.usefixtures("own")
def test_a_program_registers_a_store_while_it_runs():
    asked = []

    def open_mine(url, *, clock=None, size=1):
        asked.append((url, size))
        return MemoryStore(clock=clock)

    ks.register_store("Mine", open_mine)
    ks.register_store("mine", open_mine)  # again, as when a module is imported twice
    opening.open_store("mine:here", size=3).close()
    assert asked == [("mine:here", 3)]
    assert "mine" in opening.schemes()
    assert opening.has_option("mine:here", "size")
    with ks.open("mine:there") as engine:
        assert engine.list().runs == ()


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "scheme, opener, told",
    [
        ("sqlite", MemoryStore, "is registered for 'sqlite:' already"),
        ("taken", MemoryStore, "is registered for 'taken:' already"),
        ("x", MemoryStore, "scheme must be two or more letters"),
        ("with space", MemoryStore, "scheme must be two or more letters"),
        ("mine", 5, "open must be a function"),
    ],
)
def test_a_registration_that_cannot_be_meant_is_refused(scheme, opener, told):
    ks.register_store("taken", lambda url, *, clock=None: MemoryStore(clock=clock))
    with pytest.raises(DefinitionError, match=told):
        ks.register_store(scheme, opener)
