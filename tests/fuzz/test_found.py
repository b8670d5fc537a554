"""What fuzzing has found and no corpus shows as plainly: each stays mended."""

from __future__ import annotations

import asyncio

import apsw
import pytest

import keepstep as ks
from keepstep.errors import CheckpointCorrupt, SchemaMismatch, StoreUnavailable
from keepstep.model import WorkerInfo
from keepstep.policies.retry_after import asked_wait
from keepstep.ports import ClaimRequest
from keepstep.records.record import unseal
from keepstep.stores.open import open_store
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing import run
from keepstep.workflows.definition import Workflow

from . import program
from .targets import called


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "store" / "runs.db"
    path.parent.mkdir()
    path.write_bytes(program.stored())
    return path


def damage(path, sql, *values):
    connection = apsw.Connection(str(path))
    connection.execute(sql, values)
    connection.close()


def test_the_id_of_a_dead_worker_leads_to_no_other_file(path, tmp_path):
    victim = tmp_path / "victim.lock"
    victim.write_text("somebody's", encoding="ascii")
    damage(path, "UPDATE keepstep_worker SET id = '../../victim', boot = 'another'")
    damage(path, "UPDATE keepstep_head SET worker = '../../victim', status = 'running' WHERE run = 'wait-1'")
    store = SQLiteStore(path)
    store.renew_leases(WorkerInfo("w-1"))
    claimed = store.claim_runs(ClaimRequest("w-1", frozenset({"fuzz waiting"}), limit=10)).claims
    assert "wait-1" in {claim.run.id for claim in claimed}
    store.close()
    assert victim.read_text(encoding="ascii") == "somebody's"


def test_number_in_place_of_a_value_is_corruption(path):
    damage(path, "UPDATE keepstep_checkpoint SET body = ? WHERE run = 'done-1' AND seq = 1", 10**12)
    store = SQLiteStore(path)
    with pytest.raises(CheckpointCorrupt):
        list(unseal(store.list_checkpoints("done-1"), "done-1"))
    store.close()


@pytest.mark.parametrize("version", ["", "x", "-1", "1e3", "9" * 5000, b"\xff", 2**62])
def test_a_schema_that_no_store_has_is_refused(path, version):
    damage(path, "UPDATE keepstep_meta SET value = ? WHERE name = 'schema'", version)
    with pytest.raises((SchemaMismatch, CheckpointCorrupt)):
        SQLiteStore(path)


@pytest.mark.parametrize("seconds", [1e10, 1e300, float("inf"), float("nan"), -1.0])
def test_wait_beyond_all_dates_is_refused(seconds):
    async def waits() -> None:
        await ks.wait_for("x", timeout=seconds, default=None)

    async def times_out() -> None:
        async with ks.timeout(seconds):
            pass

    for code in (waits, times_out):
        with pytest.raises(ks.RunFailed, match="must be between 0 and"):
            run(ks.workflow(name=f"fuzz {code.__name__}")(code))


@pytest.mark.parametrize("option", [{"delay": 1e300}, {"delay": float("nan")}, {"deadline": 1e300}])
def test_delay_or_deadline_beyond_all_dates_is_refused(option):
    async def start() -> None:
        async with ks.open("memory:", worker=False) as engine:
            await engine.start(program.waiting, "x", **option)

    with pytest.raises(ks.DefinitionError):
        asyncio.run(start())


def test_arguments_may_have_the_names_of_ours():
    async def anything(**kwargs: int) -> dict[str, int]:
        return kwargs

    workflow = Workflow(anything, name="fuzz anything goes")
    assert workflow.bind(self=1, fn=2).kwargs == {"self": 1, "fn": 2}


@pytest.mark.parametrize("name", ["x" * 5000, f"sqlite:///{'x' * 5000}", "a/" * 3000])
def test_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(StoreUnavailable):
        open_store(name)


@pytest.mark.parametrize("name", ["a\0b", "\udcff.db"])
def test_name_that_sqlite_cannot_open_is_refused(name):
    with pytest.raises(ks.DefinitionError):
        open_store(name)


def test_retry_after_beyond_a_float_is_ignored():
    error = ConnectionError()
    error.retry_after = 10**400
    assert asked_wait(error, 0.0) is None


@pytest.mark.parametrize(
    "words, code",
    [
        (["show", "\udcff"], 2),
        (["signal", "wait-1", "approved", "1", "--id", "\udcff"], 2),
        (["cancel", "wait-1", "--force", "--reason", "\udcff"], 2),
        (["list", "--after", "9" * 30], 2),
        (["show", "x" * 100_000], 3),
    ],
)
def test_malformed_words_give_an_exit_code_and_no_traceback(path, words, code):
    found, _, told = called(path.parent, [words[0], "--store", "runs.db", *words[1:]])
    assert found == code, told
    assert "Traceback" not in told
