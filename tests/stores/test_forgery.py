"""Whoever can write to the store but has no key cannot make an encrypted run say anything that it did not say.

Each test does to a store what a forger would, checksums and all, and reads everything: it is refused, or unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keepstep as ks
from keepstep.errors import CheckpointCorrupt, StoreError
from keepstep.model import Status
from keepstep.ports import Row
from keepstep.records.keys import Keys
from keepstep.records.record import origin, unseal
from keepstep.stores import rules
from keepstep.stores.encrypted import EncryptedStore
from keepstep.stores.memory import MemoryStore

KEYS = Keys("one", {"one": b"1" * 32})


@ks.step
async def work(number):
    if number == 2:
        raise ValueError("two")
    return f"result {number}"


@ks.workflow(name="forged")
async def worked(name):
    with contextlib.suppress(ks.StepFailed):
        await work(2)
    heard = [await ks.wait_for("go"), await ks.wait_for("go")]
    return [name, heard, [await work(number) for number in range(2)]]


def filled():
    """Two finished runs in memory, and one that has an unread signal."""

    async def main():
        async with ks.Engine(store, keys=KEYS, linger_seconds=0.01) as engine:
            for name in ("a", "b"):
                run = await engine.start(worked, name, run_id=name)
                await run.signal("go", f"first to {name}", id="first")
                await run.signal("go", f"second to {name}", id="second")
                await run.result(30)

    store = MemoryStore()
    asyncio.run(main())
    return store


STORE = filled()


def copied():
    """The same store again: what the forger does to it is not seen by the next."""
    store = MemoryStore()
    for name, entry in STORE._runs.items():
        twin = replace(entry, rows=list(entry.rows), signals=list(entry.signals), signal_ids=dict(entry.signal_ids))
        store._runs[name] = twin
    return store


def read(store, name="a"):
    """Everything that a reader with the key is told of a run, verified as the engine does it."""
    sealed = EncryptedStore(store, KEYS)
    run = sealed.get_run(name)
    records = list(unseal(sealed.list_checkpoints(name), name, 0, origin(run)))
    if (len(records), records[-1][1]) != (run.seq, run.checksum):
        raise CheckpointCorrupt("the head names another record")
    signals = [(signal.seq, signal.name, signal.payload, signal.id) for signal in sealed.list_signals(name)]
    told = [
        (record.seq, record.kind, record.step, record.outcome, record.raw(), record.digest) for record, _ in records
    ]
    errors = [record.error.info() if record.error else None for record, _ in records]
    data = [record.data for record, _ in records]
    return sealed.cipher(run).reveal_text(run.input, "input"), run.output, run.error, told, errors, data, signals


TRUTH = read(STORE)


def relinked(store, name="a"):
    """Compute every checksum of a run anew, as a forger would."""
    entry = store._runs[name]
    previous = origin(entry.run)
    for place, row in enumerate(entry.rows):
        record = msgspec.json.decode(row.record)
        text = row.record
        if (record["previous"], record["seq"], record["run"]) != (previous, place + 1, name):
            text = msgspec.json.encode({**record, "previous": previous, "seq": place + 1, "run": name})
        entry.rows[place] = Row(place + 1, record["kind"], text, row.body)
        previous = sha256(text + (row.body or b"")).hexdigest()
    entry.signals = [
        rules.seal_signal(replace(signal, run=name), seq, signal.sent_at) for seq, signal in enumerate(entry.signals, 1)
    ]
    entry.head = msgspec.structs.replace(entry.head, seq=len(entry.rows), checksum=previous, signals=len(entry.signals))


def refused_or_unchanged(store):
    try:
        told = read(store)
    except StoreError:
        return
    assert told == TRUTH


def test_untouched_and_relinked_copies_read_the_same():
    store = copied()
    assert read(store) == TRUTH
    relinked(store)
    assert read(store) == TRUTH


@given(st.data(), st.booleans())
def test_flipped_bit_is_refused_or_changes_nothing(data, relink):
    store = copied()
    entry = store._runs["a"]
    where = data.draw(st.sampled_from(["record", "body", "signal", "input", "data_key"]))

    def flip(text):
        place = data.draw(st.integers(0, len(text) * 8 - 1))
        changed = bytearray(text)
        changed[place // 8] ^= 1 << place % 8
        return bytes(changed)

    if where in ("record", "body"):
        place = data.draw(st.integers(0, len(entry.rows) - 1))
        row = entry.rows[place]
        entry.rows[place] = msgspec.structs.replace(row, **{where: flip(getattr(row, where))})
    elif where == "signal":
        place = data.draw(st.integers(0, len(entry.signals) - 1))
        entry.signals[place] = replace(entry.signals[place], payload=flip(entry.signals[place].payload))
    elif where == "input":
        entry.run = replace(entry.run, input=flip(entry.run.input))
    else:
        entry.run = replace(entry.run, data_key=flip(entry.run.data_key.encode()).decode("latin-1"))
    if relink:
        try:
            relinked(store)
        except (ValueError, KeyError, TypeError):  # no longer JSON: the forger gives up
            return
    if where == "signal":  # a payload that is no longer a ciphertext is not heard at all
        try:
            signals = read(store)[-1]
        except StoreError:
            return
        assert [one if one[1] == "go" else TRUTH[-1][one[0] - 1] for one in signals] == TRUTH[-1]
        return
    refused_or_unchanged(store)


@given(st.data(), st.booleans(), st.sampled_from(["body", "row", "row of another run", "body of another run"]))
def test_swapped_records_are_refused_or_change_nothing(data, relink, what):
    store = copied()
    rows, others = store._runs["a"].rows, store._runs["b"].rows
    one, two = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(others) - 1))
    if what == "row":
        rows[one], rows[two] = rows[two], rows[one]
    elif what == "body":
        first, second = rows[one].body, rows[two].body
        rows[one], rows[two] = (
            msgspec.structs.replace(rows[one], body=second),
            msgspec.structs.replace(rows[two], body=first),
        )
    elif what == "row of another run":
        rows[one] = others[two]
    else:
        rows[one] = msgspec.structs.replace(rows[one], body=others[two].body)
    if relink:
        relinked(store)
    refused_or_unchanged(store)


@given(st.data())
def test_removed_or_cut_record_is_refused_or_changes_nothing(data):
    store = copied()
    entry = store._runs["a"]
    place = data.draw(st.integers(0, len(entry.rows) - 1))
    if data.draw(st.booleans()):
        del entry.rows[place]
    else:
        row = entry.rows[place]
        length = data.draw(st.integers(0, len(row.body) - 1))
        entry.rows[place] = msgspec.structs.replace(row, body=row.body[:length] or None)
    relinked(store)
    refused_or_unchanged(store)


@given(st.integers(0, 5), st.sampled_from(["value", "outcome", "step", "data"]))
def test_plain_record_in_place_of_an_encrypted_one_is_refused(place, field):
    store = copied()
    entry = store._runs["a"]
    row = entry.rows[place]
    record = msgspec.json.decode(row.record)
    record.pop("packed")
    record[field] = {"value": "forged", "outcome": "failure", "step": "work#7", "data": {"signal": 1}}[field]
    entry.rows[place] = Row(row.seq, row.kind, msgspec.json.encode(record), None)
    relinked(store)
    with pytest.raises(CheckpointCorrupt, match=r"not encrypted, and must be|cannot be decrypted"):
        read(store)


@pytest.mark.parametrize("field, value", [("outcome", "failure"), ("step", "work#9"), ("attempt", 7), ("ordinal", 9)])
def test_change_of_a_readable_field_is_refused(field, value):
    for place in range(len(STORE._runs["a"].rows)):
        store = copied()
        entry = store._runs["a"]
        record = msgspec.json.decode(entry.rows[place].record)
        if record.get(field) == value:
            continue
        record[field] = value
        entry.rows[place] = msgspec.structs.replace(entry.rows[place], record=msgspec.json.encode(record))
        relinked(store)
        with pytest.raises(CheckpointCorrupt, match=r"cannot be decrypted|last record does not say so"):
            read(store)


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "superseded", "data": {"seqs": [2]}},
        {"kind": "error", "error": {"type": "E", "message": "m", "caused_by": [2]}},
        {"kind": "error", "error": {"type": "E", "message": "m"}, "data": {"signal": 1}},
        {"kind": "error", "error": {"type": "E", "message": "m"}, "value": 1},
        {"kind": "error"},
        {"kind": "step completed", "step": "work#9", "value": 1},
    ],
)
def test_plain_record_that_would_steer_the_run_is_refused(record):
    store = copied()
    entry = store._runs["a"]
    text = {"run": "a", "seq": 9, "format": 2, "previous": "", "finished_at": "2026-01-01T00:00:00Z", **record}
    entry.rows.append(Row(len(entry.rows) + 1, record["kind"], msgspec.json.encode(text)))
    entry.head = msgspec.structs.replace(
        entry.head, status=Status.WAITING
    )  # so that nothing is expected of its last record
    relinked(store)
    with pytest.raises(CheckpointCorrupt, match="is not encrypted, and must be"):
        read(store)


def test_plain_record_that_sets_the_run_aside_is_accepted():
    store = copied()
    entry = store._runs["a"]
    error = {"type": "Repaired", "message": "see to it"}
    text = {
        "run": "a",
        "kind": "error",
        "seq": 9,
        "format": 2,
        "previous": "",
        "error": error,
        "data": {"act": "repair"},
    }
    entry.rows.append(Row(len(entry.rows) + 1, "error", msgspec.json.encode(text)))
    entry.head = msgspec.structs.replace(entry.head, status=Status.SET_ASIDE)
    relinked(store)
    told = read(store)
    assert told[2].message == "see to it"
    assert told[3][:-1] == TRUTH[3]


def test_swapped_messages_are_refused():
    for theirs in (False, True):
        store = copied()
        one, two = store._runs["a"].signals[0], store._runs["b" if theirs else "a"].signals[1]
        store._runs["a"].signals[0] = replace(one, payload=two.payload)
        relinked(store)
        with pytest.raises(CheckpointCorrupt, match="its signal cannot be decrypted"):
            read(store)


def test_whole_run_under_the_name_of_another_is_refused():
    store = copied()
    theirs = STORE._runs["b"]
    store._runs["a"] = replace(theirs, run=replace(theirs.run, id="a"), rows=list(theirs.rows))
    relinked(store)
    with pytest.raises(StoreError):
        read(store)


def test_run_whose_data_key_is_removed_is_refused():
    store = copied()
    entry = store._runs["a"]
    entry.run = replace(entry.run, data_key="")
    with pytest.raises(StoreError, match="'a' is not encrypted"):
        read(store)
