"""How a store is found."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import keepstep
from keepstep.errors import DefinitionError, UnknownStore
from keepstep.stores import open as open_module
from keepstep.stores.memory import MemoryStore
from keepstep.stores.open import open_store, schemes
from keepstep.stores.sqlite import SQLiteStore
from keepstep.testing.store_contract import SteppedClock

asked = []


def open_fake(url, *, clock=None, **options):
    """What another package registers."""
    asked.append((url, clock, options))
    return MemoryStore(clock=clock)


@pytest.mark.parametrize("form", ["{}/runs.db", "sqlite:///{}/runs.db", "sqlite:{}/runs.db"])
def test_a_path_or_a_url_means_sqlite(tmp_path, form):
    store = open_store(form.format(tmp_path))
    assert isinstance(store, SQLiteStore)
    assert store.url == f"sqlite:///{tmp_path.resolve()}/runs.db"
    assert (tmp_path / "runs.db").exists()
    store.close()
    open_store(store.url).close()
    assert [file.name for file in tmp_path.glob("*.db")] == ["runs.db"]


def test_a_relative_url_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///one.db", "two.db", Path("three.db")):
        open_store(url).close()
    assert sorted(file.name for file in tmp_path.glob("*.db")) == ["one.db", "three.db", "two.db"]


def test_a_path_may_hold_anything(tmp_path):
    path = tmp_path / "memory:a b%20?.db"
    open_store(path).close()
    assert path.exists()


def test_options_and_the_clock_are_passed_on(tmp_path):
    clock = SteppedClock()
    store = open_store(tmp_path / "runs.db", clock=clock, power_loss="may_lose_last")
    assert store.clock is clock
    assert store._writer.connection.pragma("synchronous") == 1
    store.close()
    assert open_store("memory:", clock=clock).clock is clock
    with pytest.raises(TypeError):
        open_store("memory:", power_loss="may_lose_last")


def test_memory_is_new_each_time():
    one = open_store("memory:")
    assert isinstance(one, MemoryStore)
    assert one is not open_store("memory:")


def test_a_store_passes_through():
    store = MemoryStore()
    assert open_store(store) is store
    with pytest.raises(DefinitionError, match="open already"):
        open_store(store, power_loss="may_lose_last")
    with pytest.raises(DefinitionError, match="not from int"):
        open_store(7)


@pytest.mark.parametrize("url", ["sqlite:", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://host/x"])
def test_a_url_without_a_file_is_refused(url):
    with pytest.raises(DefinitionError, match="names no file"):
        open_store(url)


def test_an_unknown_scheme_lists_the_known_ones():
    with pytest.raises(UnknownStore, match=r"'redis:'.*memory:.*sqlite:"):
        open_store("redis://host/0")


def test_another_package_adds_a_store(monkeypatch):
    point = EntryPoint("fake", f"{__name__}:open_fake", open_module.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _: open_fake)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point] if group == "keepstep.stores" else [])
    assert {"fake", "memory", "sqlite"} <= set(schemes())
    clock = SteppedClock()
    asked.clear()
    assert isinstance(open_store("fake://there", clock=clock, colour="red"), MemoryStore)
    assert asked == [("fake://there", clock, {"colour": "red"})]
    with pytest.raises(UnknownStore, match="fake:"):
        open_store("other://there")


def test_what_is_not_used_is_not_loaded():
    program = "import sys, keepstep.stores.open as o; o.open_store('memory:'); sys.exit('apsw' in sys.modules)"
    source = str(Path(keepstep.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": source}, check=False).returncode == 0
