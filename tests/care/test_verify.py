"""Verifying: what was written is found sound, and whatever was changed, removed or exchanged is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.care.verify import Count, check_named, verify
from keepstep.errors import RunNotFound
from keepstep.model import Status
from keepstep.ports import Row
from keepstep.records import record
from tests.care.stored import contents, tampered


def test_a_store_as_it_was_written_is_sound(store):
    found = verify(store)
    assert found.sound
    assert (found.damaged, found.flaws) == ({}, [])
    runs, rows, signals = len(contents()), sum(len(c[1]) for c in contents()), sum(len(c[2]) for c in contents())
    assert found.runs == Count(runs, runs)
    assert found.records == Count(rows, rows)
    assert found.signals == Count(signals, signals)


def test_the_head_of_a_sound_run_is_read_once(store, monkeypatch):
    """A store of a million runs is verified by a few questions for each."""
    asked, get_run = [], store.get_run
    monkeypatch.setattr(store, "get_run", lambda run: asked.append(run) or get_run(run))
    assert verify(store).sound
    assert sorted(asked) == sorted(run.id for run, *_ in contents())


def test_an_empty_store_is_sound(empty):
    assert verify(empty).runs == Count()
    assert verify(empty).sound


def edited(place, old, new):
    def change(rows):
        row = rows[place]
        assert old in row.record
        rows[place] = Row(row.seq, row.kind, row.record.replace(old, new, 1), row.body)
        return rows

    return change


def renumbered(rows):
    return [Row(number, row.kind, row.record, row.body) for number, row in enumerate(rows, 1)]


def swapped(items, a=1, b=2):
    items[a], items[b] = items[b], items[a]
    return items


DAMAGE = {
    "a result was edited": ("done", {"rows": edited(2, b'"value":3', b'"value":4')}, "chain broken at seq 4"),
    "the end was edited": (
        "done",
        {"rows": edited(-1, b'"value":6', b'"value":7')},
        "differs from the one that its head names",
    ),
    "a record is gone": ("done", {"rows": lambda rows: renumbered(rows[:2] + rows[3:])}, "chain broken at seq 3"),
    "the last record is gone": ("waits", {"rows": lambda rows: rows[:-1]}, "differs from the one that its head names"),
    "the first record is gone": ("done", {"rows": lambda rows: renumbered(rows[1:])}, "chain broken at seq 1"),
    "two records are exchanged": ("done", {"rows": lambda rows: renumbered(swapped(rows))}, "chain broken at seq 2"),
    "a record is of another run": (
        "done",
        {"rows": lambda rows: [*rows[:1], contents()[1][1][1], *rows[2:]]},
        "of run 'neighbour'",
    ),
    "a record is no JSON": ("done", {"rows": edited(1, b'{"', b'["')}, "not readable"),
    "a record is said to be of another kind": (
        "done",
        {"rows": lambda rows: [*rows[:-1], Row(rows[-1].seq, "step completed", rows[-1].record)]},
        "kept as a 'step completed'",
    ),
    "a packed value was cut": (
        "large",
        {"rows": lambda rows: [Row(r.seq, r.kind, r.record, r.body and r.body[:-9]) for r in rows]},
        "cut short",
    ),
    "a packed value is gone": (
        "large",
        {"rows": lambda rows: [Row(r.seq, r.kind, r.record) for r in rows]},
        "",
    ),
    "all records are gone": ("done", {"rows": lambda _: []}, "chain broken"),
    "the input was edited": ("done", {"input": b"[[1,2,4],{}]"}, "its input is not what it was created with"),
    "the input of a run to come was edited": ("later", {"input": b"[[8],{}]"}, "its input"),
    "the seed was edited": ("done", {"seed": "0"}, "another fact of its creation"),
    "a tag was edited": ("neighbour", {"tags": {"team": "b"}}, "another fact of its creation"),
    "a data key was written to a run that has none": ("done", {"data_key": "x"}, "its data key cannot be read"),
    "the checksum of the head was edited": (
        "waits",
        {"checksum": "0" * 64},
        "differs from the one that its head names",
    ),
    "a completed run is said to have failed": ("done", {"status": Status.FAILED}, ""),
    "a completed run is said to wait": ("done", {"status": Status.WAITING}, "says completed"),
    "a failed run is said to be completed": ("failed", {"status": Status.COMPLETED}, ""),
    "a waiting run is said to be completed": ("waits", {"status": Status.COMPLETED}, ""),
    "a waiting run is said to be cancelled": ("waits", {"status": Status.CANCELLED}, ""),
    "a run forgot its leases": ("waits", {"epoch": 1}, "its head names lease 1"),
    "a signal was edited": (
        "waits",
        {"signals": lambda all_: [all_[0], replace(all_[1], payload=b"8")]},
        "its signal 2 is not as it was written",
    ),
    "a signal has another name": (
        "waits",
        {"signals": lambda all_: [replace(all_[0], name="other"), all_[1]]},
        "its signal 1 is not as it was written",
    ),
    "two signals are exchanged": (
        "waits",
        {"signals": lambda all_: [replace(all_[1], seq=1), replace(all_[0], seq=2)]},
        "its signal 1 is not as it was written",
    ),
    "a signal that was read is gone": ("waits", {"signals": lambda _: []}, "only 0 were accepted"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_any_change_of_what_was_written_is_found(store, what):
    run_id, damage, said = DAMAGE[what]
    tampered(store, run_id, **damage)
    told = []
    found = verify(store, report=lambda run, problems: told.append(run))
    assert not found.sound
    assert list(found.damaged) == told == [run_id]
    assert said in " ".join(found.damaged[run_id])
    assert (found.runs.invalid, found.runs.total) == (1, len(contents()))
    assert verify(store, ["neighbour" if run_id != "neighbour" else "done"]).sound
    assert not verify(store, [run_id]).sound


def test_the_good_beginning_of_a_broken_chain_is_known(store):
    tampered(store, "done", rows=edited(2, b'"value":3', b'"value":4'))
    check = check_named(store, "done")
    assert check.sound == 2  # the third was edited, or what the fourth names: neither is certain
    assert (check.records.total, check.records.valid, check.records.invalid) == (5, 2, 3)


def test_a_run_that_is_not_there_is_an_error(store):
    with pytest.raises(RunNotFound, match="'nobody'"):
        verify(store, ["done", "nobody"])


def test_signals_without_a_checksum_are_legacy(store):
    tampered(store, "waits", signals=lambda all_: [replace(one, checksum="") for one in all_])
    found = verify(store)
    assert found.sound
    assert (found.signals.legacy, found.runs.legacy) == (2, 1)


def test_packed_value_that_unpacks_too_large_is_damage(store, monkeypatch):
    """Few bytes may unpack to more than a machine has: someone who can write to a store must not stop its workers."""
    monkeypatch.setattr(record, "LARGEST_UNPACKED", 120_000)
    found = verify(store)
    assert list(found.damaged) == ["large"]
    assert "cut short or too large" in found.damaged["large"][0]
