"""The command line on a store in files."""

from __future__ import annotations

import pytest

STORE = ("--store", "files:orders")


def test_a_run_is_made_and_looked_at(keepstep, folder):
    assert keepstep(*STORE, "run", "program.py:total", "1", "--id", "r").code == 0
    assert (folder / "orders" / "keepstep.json").is_file()
    assert "completed" in keepstep(*STORE, "list").out
    assert keepstep(*STORE, "show", "r").code == 0
    assert "step completed  add" in keepstep(*STORE, "history", "r").out
    done = keepstep(*STORE, "doctor")
    assert done.code == 0
    assert "store    files:orders\n" in done.out
    assert "in files:orders" in keepstep(*STORE, "show", "zzz").err


@pytest.mark.parametrize(
    "made, said",
    [
        (lambda place: None, "no store at"),
        (lambda place: place.mkdir(), "is empty"),
        (lambda place: place.write_text("x"), "it is a file"),
        (lambda place: (place.mkdir(), (place / "cat.jpg").write_text("x")), "holds other files"),
        (lambda place: (place.mkdir(), (place / "keepstep.json").write_text('{"layout": 99}')), "upgrade"),
    ],
)
def test_folder_that_is_no_store_is_reported_and_left_alone(keepstep, folder, made, said):
    made(folder / "orders")
    before = sorted(folder.rglob("*"))
    found = keepstep(*STORE, "list")
    assert found.code == 6
    assert said in found.err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("number", [2, 3])
def test_damage_is_left_to_a_person_who_accepts_the_loss(keepstep, folder, number):
    assert keepstep(*STORE, "run", "program.py:total", "2", "--id", "r").code == 0
    next((folder / "orders" / "runs").glob(f"*/r/00000{number}.json")).write_text("")
    dry, done = keepstep(*STORE, "repair", "--dry-run"), keepstep(*STORE, "repair")
    assert (dry.code, done.code) == (1, 1)
    assert dry.out == done.out
    assert "--accept-loss r" in done.out
    assert keepstep(*STORE, "verify").code == 1
    assert keepstep(*STORE, "doctor", "--deep").code == 1
    shown = keepstep(*STORE, "repair", "--accept-loss", "r", "--json")
    assert (shown.code, shown.json["kept"]) == (0, number - 1)
    assert keepstep(*STORE, "repair", "--accept-loss", "r", "--yes", "--reason", "disk trouble").code == 0
    assert keepstep(*STORE, "verify").code == 0
    assert "disk trouble" in keepstep(*STORE, "audit", "r").out


def test_runs_that_git_brings_are_named_and_taken_up_by_a_repair(keepstep, folder):
    assert keepstep(*STORE, "run", "program.py:total", "1", "--id", "r").code == 0
    assert keepstep("--store", "files:other", "run", "program.py:total", "1", "--id", "s").code == 0
    theirs = next((folder / "other" / "runs").glob("*/s"))
    ours = folder / "orders" / "runs" / theirs.parent.name
    ours.mkdir()
    theirs.rename(ours / "s")
    found = keepstep(*STORE, "verify")
    assert found.code == 1
    assert "run 's': the index does not name it" in found.out
    assert keepstep(*STORE, "repair").code == 0
    assert "\ns " in keepstep(*STORE, "list").out
    (ours / "s").rename(folder / "away")
    assert keepstep(*STORE, "repair").code == 0
    assert "\ns " not in keepstep(*STORE, "list").out
    (folder / "away").rename(ours / "s")
    assert keepstep(*STORE, "repair").code == 0
    assert "\ns " in keepstep(*STORE, "list").out
