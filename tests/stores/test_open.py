"""How a store is found."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import keepstep
from keepstep.errors import DefinitionError, DuplicateName, UnknownStore
from keepstep.stores import open as open_module
from keepstep.stores.memory import MemoryStore
from keepstep.stores.open import has_option, open_store, schemes
from keepstep.stores.sqlite.store import SQLiteStore
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


def test_open_store_is_returned_as_it_is():
    store = MemoryStore()
    assert open_store(store) is store
    with pytest.raises(DefinitionError, match="open already"):
        open_store(store, power_loss="may_lose_last")
    with pytest.raises(DefinitionError, match="not from int"):
        open_store(7)


@pytest.mark.parametrize("url", ["sqlite:", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://host/x"])
def test_a_url_without_a_file_is_refused(url):
    with pytest.raises(DefinitionError, match="must name a file"):
        open_store(url)


def test_an_unknown_scheme_lists_the_known_ones():
    with pytest.raises(UnknownStore, match=r"'redis:'.*memory:.*sqlite:"):
        open_store("redis://host/0")


def test_mistyped_scheme_is_answered_with_the_nearest():
    with pytest.raises(UnknownStore, match=r"no store is registered for 'sqlit:'; did you mean sqlite:\?"):
        open_store("sqlit:///runs.db")
    with pytest.raises(UnknownStore) as told:
        open_store("postgresqll://ann:hunter2@host/db")
    assert "did you mean postgresql:?" in str(told.value)
    assert "hunter2" not in str(told.value)


def test_a_scheme_may_be_written_in_capitals(tmp_path):
    store = open_store(f"SQLite:///{tmp_path}/runs.db")
    assert isinstance(store, SQLiteStore)
    store.close()
    assert (tmp_path / "runs.db").exists()


@pytest.mark.parametrize("url", ["memory:runs", "memory://runs", "memory:///tmp/runs.db"])
def test_memory_has_no_name(url):
    with pytest.raises(DefinitionError, match="has no name"):
        open_store(url)


@pytest.mark.parametrize("url", ["memory:", "sqlite:///{}/runs.db", "files:{}/runs", "{}/runs.db"])
def test_unknown_option_is_refused_by_name(tmp_path, url):
    with pytest.raises(
        TypeError, match=r"neither ks\.open nor the store for '(memory|sqlite|files):' has an option 'colour'"
    ):
        open_store(url.format(tmp_path), colour="red")
    assert not list(tmp_path.iterdir())


# -- from other packages -----------------------------------------------------------------------------------------------


def registered(monkeypatch, *points):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == "keepstep.stores" else ())


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch):
    registered(monkeypatch, EntryPoint("lost", "no_such_module:open_url", "keepstep.stores"))
    with pytest.raises(DefinitionError, match=r"'lost:', of the package .*no_such_module:open_url.* cannot be loaded"):
        open_store("lost:x")
    registered(monkeypatch, EntryPoint("lost", "json:no_such_name", "keepstep.stores"))
    with pytest.raises(DefinitionError, match="AttributeError"):
        open_store("lost:x")
    registered(monkeypatch, EntryPoint("lost", "json:__name__", "keepstep.stores"))
    with pytest.raises(DefinitionError, match="must be a callable, not"):
        open_store("lost:x")
    open_store("memory:")  # the others are not touched


def test_object_that_is_no_store_is_refused_with_what_it_lacks(monkeypatch):
    registered(monkeypatch, EntryPoint("half", f"{__name__}:open_half", "keepstep.stores"))
    monkeypatch.setattr(EntryPoint, "load", lambda _: lambda url, clock: object())
    with pytest.raises(DefinitionError, match=r"returned object, which is not a store: it lacks .*commit, .*close"):
        open_store("half:x")


def test_function_with_a_wrong_signature_is_named(monkeypatch):
    registered(monkeypatch, EntryPoint("odd", f"{__name__}:open_odd", "keepstep.stores"))
    for odd in (lambda url: None, lambda: None, lambda url, clock, more: None):
        monkeypatch.setattr(EntryPoint, "load", lambda _, odd=odd: odd)
        with pytest.raises(DefinitionError, match=r"'odd:', of .* cannot be opened: its function must take \(url, "):
            open_store("odd:x")
    monkeypatch.setattr(EntryPoint, "load", lambda _: lambda url, clock: len(5))
    with pytest.raises(TypeError, match="len"):  # its own
        open_store("odd:x")


def test_create_option_of_another_package_is_recognised(monkeypatch):
    registered(monkeypatch, EntryPoint("far", f"{__name__}:open_far", "keepstep.stores"))
    monkeypatch.setattr(EntryPoint, "load", lambda _: lambda url, clock=None, create=True: None)
    assert has_option("far:x", "create")
    monkeypatch.setattr(EntryPoint, "load", lambda _: open_fake)
    assert not has_option("far:x", "create")
    assert not has_option("runs.db", "create")


def test_two_packages_for_one_scheme_are_both_named(monkeypatch):
    registered(monkeypatch, *(EntryPoint("twice", f"{one}:open_url", "keepstep.stores") for one in ("one", "two")))
    with pytest.raises(DuplicateName, match=r"twice, by unknown \(one:open_url\) and unknown \(two:open_url\)"):
        open_store("twice:x")


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


def test_stores_that_are_not_used_are_not_loaded():
    program = "import sys, keepstep.stores.open as o; o.open_store('memory:'); sys.exit('apsw' in sys.modules)"
    source = str(Path(keepstep.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": source}, check=False).returncode == 0
