"""Archives: what goes in comes out word for word, and what is broken is named by its line."""

from __future__ import annotations

import gzip
import io
import json
import re
from dataclasses import fields
from hashlib import sha256

import pytest

from keepstep.care.archive import RunLine, reading, writing
from keepstep.care.transfer import check_archive, export_runs, import_runs
from keepstep.care.verify import verify
from keepstep.errors import CheckpointCorrupt, DefinitionError, RunNotFound, SchemaMismatch, StoreUnavailable
from keepstep.model import FINISHED, Run, RunQuery, Status
from keepstep.stores.memory import MemoryStore
from tests.care.stored import contents, driven, everything, filled, tampered

BIG = b"%d" % 2**61
ENDED = FINISHED | {Status.SET_ASIDE}


def exported(store, *run_ids, query=None):
    file = io.BytesIO()
    done = export_runs(store, file, run_ids, query)
    return file.getvalue(), done


def imported(store, data, **options):
    return import_runs(store, io.BytesIO(data), "runs.jsonl", actor="ann", **options)


def comparable(store):
    """What a store holds, without what says where: who leased a run, and when its row was last written."""
    return everything(store)


# -- there and back ----------------------------------------------------------------------------------------------------


def test_runs_that_have_ended_come_back_word_for_word(store):
    data, done = exported(store, query=RunQuery(status=FINISHED))
    assert done.whole
    target = MemoryStore()
    assert imported(target, data).written == done.written == 4
    before = {name: whole for name, whole in everything(store).items() if whole[0].status in FINISHED}
    assert everything(target) == before
    assert verify(target).sound


def test_an_archive_comes_into_every_store(empty):
    data, _ = exported(filled(MemoryStore()))
    done = imported(empty, data)
    assert (done.written, done.whole) == (len(contents()), True)
    assert verify(empty).sound


def test_imported_unfinished_run_is_set_aside_with_the_reason(empty):
    data, _ = exported(filled(MemoryStore()))
    imported(empty, data)
    run = empty.get_run("waits")
    assert run.status is Status.SET_ASIDE
    assert "was unfinished when it was written to runs.jsonl" in run.error.message
    assert len(empty.list_signals("waits")) == 2


def test_imported_run_goes_on_when_it_is_retried(empty):
    data, _ = exported(filled(MemoryStore()))
    imported(empty, data)

    async def go_on(engine):
        handle = await engine.get("waits")
        await handle.retry("moved")
        await handle.signal("last", "end")
        audit = await handle.audit()
        return await handle.result(), [(one.actor, one.reason) for one in audit if "import" in one.what]

    result, told = driven(empty, go_on)
    assert result == [10, {"yes": True}, "end"]
    assert told
    assert told[0][0] == "ann"


def test_imported_run_goes_on_by_itself_if_queued(empty):
    data, _ = exported(filled(MemoryStore()), "waits")
    imported(empty, data, queue=True)

    async def go_on(engine):
        handle = await engine.get("waits")
        await handle.signal("last", "end")
        return await handle.result()

    assert driven(empty, go_on) == [10, {"yes": True}, "end"]


def test_a_run_that_is_driven_is_exported_as_far_as_it_is():
    store = filled(MemoryStore())

    async def look(engine):
        await engine.start("care patient", 10, run_id="driven")
        return exported(store, "driven")

    data, done = driven(store, look)
    assert done.whole
    target = MemoryStore()
    assert imported(target, data).written == 1
    assert target.get_run("driven").status is Status.SET_ASIDE


# -- twice -------------------------------------------------------------------------------------------------------------


def test_run_that_is_there_already_is_skipped(empty):
    data, _ = exported(filled(MemoryStore()))
    imported(empty, data)
    before = everything(empty)
    again = imported(empty, data)
    assert (again.written, again.same, again.whole) == (0, len(contents()), True)
    assert everything(empty) == before


def test_another_run_of_the_same_id_is_refused_and_left_alone(store):
    data, _ = exported(store, "done", "neighbour")
    target = MemoryStore()
    tampered(store, "done", rows=lambda rows: rows[:2], status=Status.QUEUED, checksum="x")
    before = everything(store)["done"]
    done = imported(store, data)
    assert list(done.conflicts) == ["done"]
    assert (done.same, done.written) == (1, 0)
    assert everything(store)["done"] == before
    assert imported(target, data).written == 2


def test_an_older_copy_is_not_overwritten(store):
    older, _ = exported(store, "waits")

    async def go_on(engine):
        handle = await engine.get("waits")
        await handle.signal("last", "end")
        return await handle.result()

    driven(store, go_on)
    newer, _ = exported(store, "waits")
    assert imported(store, older).same == 1
    target = MemoryStore()
    imported(target, older, queue=True)
    assert list(imported(target, newer).conflicts) == ["waits"]


# -- broken archives ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archive():
    return exported(filled(MemoryStore()))[0]


def refused(data, match):
    store = MemoryStore()
    with pytest.raises((CheckpointCorrupt, SchemaMismatch), match=match):
        check_archive(io.BytesIO(data), "runs.jsonl")
    with pytest.raises((CheckpointCorrupt, SchemaMismatch), match=match):
        imported(store, data)
    return store


def test_any_line_that_is_changed_is_named(archive):
    lines = archive.splitlines(keepends=True)
    for number in range(1, len(lines)):
        changed = lines[number].replace(b'":', b'": ', 1)
        data = b"".join([*lines[:number], changed, *lines[number + 1 :]])
        store = MemoryStore()
        if number == len(lines) - 1 or b'"end"' in lines[number]:  # white space in lines that seal others
            imported(store, data)
        else:
            with pytest.raises(CheckpointCorrupt, match=r"runs\.jsonl, line "):
                imported(store, data)
        assert verify(store).sound


def test_an_archive_that_is_cut_short_anywhere_is_found(archive):
    lines = archive.splitlines(keepends=True)
    for number in range(len(lines)):
        store = refused(b"".join(lines[:number]), r"runs.jsonl, line \d+: ")
        assert verify(store).sound
    refused(archive[:-5], f"line {len(lines)}")


def test_a_line_that_is_gone_or_exchanged_is_found(archive):
    lines = archive.splitlines(keepends=True)
    for number in range(1, len(lines)):
        refused(b"".join([*lines[:number], *lines[number + 1 :]]), "line ")
    for number in range(1, len(lines) - 1):
        exchanged = [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]]
        refused(b"".join(exchanged), "line ")


@pytest.mark.parametrize(
    "line, said",
    [
        (b"", "not a Keepstep archive"),
        (b"[]", "not a Keepstep archive"),
        (b'{"keepstep":"archive","format":3}', "format 3"),
        (b'{"keepstep":"store","format":1}', "not a Keepstep archive"),
        (b"\xff\xfe", "not a Keepstep archive"),
        (b"[" * 100_000, "not a Keepstep archive"),
    ],
)
def test_file_that_is_no_archive_is_refused(archive, line, said):
    rest = archive.splitlines(keepends=True)[1:]
    refused(b"".join([line + b"\n", *rest]), f"line 1: .*{said}")


HEADER = b'{"keepstep":"archive","format":1}\n'


@pytest.mark.parametrize(
    "line",
    [
        b'{"run":{"id":"../x","workflow":"w","status":"queued","created_at":"2026-01-01T00:00:00Z","input":1}}',
        b'{"run":{"id":"x","workflow":"/w","status":"queued","created_at":"2026-01-01T00:00:00Z","input":1}}',
        b'{"run":{"id":"x","workflow":"w","status":"flying","created_at":"2026-01-01T00:00:00Z","input":1}}',
        b'{"run":{"id":"x","workflow":"w","status":"queued","created_at":"2026-01-01T00:00:00","input":1}}',
        b'{"run":{"id":"x","workflow":"w","status":"queued","created_at":"0001-01-01T00:00:00Z","input":1}}',
        b'{"run":{"id":"x","workflow":"w","status":"queued","created_at":"2026-01-01T00:00:00Z","seq":-1}}',
        b'{"run":{"id":"x","workflow":"w","status":"queued","created_at":"2026-01-01T00:00:00Z","worker":"me"}}',
        b'{"run":{"id":"x","workflow":"w","status":"queued","created_at":"2026-01-01T00:00:00Z","data_key":"x"}}',
        b'{"run":{"id":"x","workflow":"w","status":"queued","created_at":"2026-01-01T00:00:00Z","epoch":%s}}' % BIG,
        b'{"run":{"id":"x","workflow":"w","status":"queued","created_at":"2026-01-01T00:00:00Z","recoveries":%s}}'
        % BIG,
        b'{"checkpoint":{"seq":1,"kind":"x","record_base64":"!"},"run":null,"total":{"runs":1}}',
        b'{"total":{"runs":1}}',
        b'{"nothing":1}',
        b"{}",
        b"null",
        b"\x00",
    ],
)
def test_a_hostile_line_is_refused_with_its_number(line):
    store = refused(HEADER + line + b"\n", "line 2: ")
    assert everything(store) == {}


def test_whole_runs_can_be_loaded_from_a_broken_archive(archive):
    lines = archive.splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if b'"checkpoint"' in line)
    data = b"".join([*lines[:place], b"garbage\n", *lines[place + 1 :]])
    store = MemoryStore()
    done = imported(store, data, partial=True)
    assert list(done.damaged) == [f"line {place + 1}"]
    assert done.written == len(contents()) - 1
    assert verify(store).sound


def test_a_damaged_run_is_marked_and_refused(store):
    tampered(store, "done", seed="0")
    data, done = exported(store)
    assert list(done.damaged) == ["done"]
    target = MemoryStore()
    with pytest.raises(CheckpointCorrupt, match="'done' was damaged when it was written here"):
        imported(target, data)
    assert imported(target, data, partial=True).whole is False
    assert "done" not in everything(target)
    assert verify(target).sound


# -- the file ----------------------------------------------------------------------------------------------------------


def test_archive_is_readable_json(archive):
    lines = [json.loads(line) for line in archive.splitlines()]
    assert lines[0]["keepstep"] == "archive"
    records = [line["checkpoint"]["record"] for line in lines if "checkpoint" in line]
    assert {"run started", "step completed", "run finished"} <= {record["kind"] for record in records}


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = str(tmp_path / "runs.jsonl")

    def fail():
        with writing(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with writing(path) as file:
        file.write(b"whole")
    with pytest.raises(DefinitionError, match="exists already"), writing(path):
        pass
    assert (tmp_path / "runs.jsonl").read_bytes() == b"whole"


def test_second_writer_of_one_file_is_refused(tmp_path):
    """Both have looked before either was done; what the second has seen may be what the first has left."""
    path = tmp_path / "runs.jsonl"

    def write_both():
        with writing(str(path)) as second:
            second.write(b"2")
            with writing(str(path)) as first:
                first.write(b"1")

    with pytest.raises(DefinitionError, match="exists already"):
        write_both()
    assert path.read_bytes() == b"1"
    assert list(tmp_path.iterdir()) == [path]


def test_an_archive_is_packed_if_its_name_says_so(tmp_path, archive):
    path = tmp_path / "runs.jsonl.gz"
    with writing(str(path)) as file:
        export_runs(filled(MemoryStore()), file)
    assert len(path.read_bytes()) < len(archive) / 2
    with reading(str(path)) as file:
        assert check_archive(file, "x") == len(contents())
    for cut in (5, 100, len(path.read_bytes()) // 2):
        path.write_bytes(path.read_bytes()[:-cut])
        with reading(str(path)) as file, pytest.raises((CheckpointCorrupt, SchemaMismatch), match=r"x, line \d+: "):
            check_archive(file, "x")
    path.write_bytes(gzip.compress(b"[" * 10_000_000))
    with reading(str(path)) as file, pytest.raises(SchemaMismatch):
        check_archive(file, "x")


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(StoreUnavailable, match="cannot be read"), reading(str(tmp_path / "none")):
        pass


def test_a_run_that_is_not_there_is_an_error(store):
    with pytest.raises(RunNotFound):
        exported(store, "nobody")


def test_every_fact_of_a_run_is_in_an_archive():
    left_out = {"worker", "output", "error", "continued_as", "progress"}
    assert {one.name for one in fields(Run)} - left_out == set(RunLine.__struct_fields__) - {"input_base64"}


def test_huge_signal_count_in_an_archive_is_refused(archive):
    """A number in a line must not cost time and memory."""
    lines = archive.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if b'"signals":2' in line)
    end = next(i for i, line in enumerate(lines) if i > first and line.startswith(b'{"end"'))
    lines[first] = lines[first].replace(b'"signals":2', b'"signals":%d' % 2**61)
    digest = sha256(b"".join(lines[first:end])).hexdigest()
    lines[end] = re.sub(rb'"sha256":"\w+"', b'"sha256":"%s"' % digest.encode(), lines[end])
    store = refused(b"".join(lines), "it must bring the")
    assert store.get_run("waits") is None
