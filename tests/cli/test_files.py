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
    assert keepstep(*STORE, "doctor").code == 0


@pytest.mark.parametrize(
    "made, said",
    [
        (lambda place: None, "there is no store"),
        (lambda place: place.mkdir(), "is empty"),
        (lambda place: place.write_text("x"), "it is a file"),
        (lambda place: (place.mkdir(), (place / "cat.jpg").write_text("x")), "something else"),
        (lambda place: (place.mkdir(), (place / "keepstep.json").write_text('{"layout": 99}')), "upgrade"),
    ],
)
def test_what_is_no_store_is_told_and_left_alone(keepstep, folder, made, said):
    made(folder / "orders")
    before = sorted(folder.rglob("*"))
    found = keepstep(*STORE, "list")
    assert found.code == 6
    assert said in found.err
    assert sorted(folder.rglob("*")) == before
