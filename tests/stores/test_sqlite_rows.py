"""Damaged rows of a SQLite store: each is told with the run it belongs to, and keeps nobody from the others."""

from __future__ import annotations

import apsw
import pytest

from keepstep.errors import CheckpointCorrupt
from keepstep.model import RunQuery, Signal, Status, WorkerInfo
from keepstep.ports import ClaimRequest, Create, Send, Verdict
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import SteppedClock, at, commit, get, queued, started

ALL = frozenset(Status)

#: What may be wrong with a run's rows, and a word of what is said about it.
DAMAGE = {
    "tags that are no JSON": ("UPDATE keepstep_run SET tags = '{\"a'", "truncated"),
    "tags that are a list": ("UPDATE keepstep_run SET tags = '[1]'", "object"),
    "text that is no UTF-8": ("UPDATE keepstep_run SET version = CAST(x'ff31' AS TEXT)", "version"),
    "a time that is text": ("UPDATE keepstep_run SET created_at = 'noon'", "created_at is 'noon'"),
    "a time beyond the calendar": ("UPDATE keepstep_run SET created_at = 4611686018427387904", "beyond the calendar"),
    "a time beyond all": ("UPDATE keepstep_run SET deadline_at = 9e999", "out of range"),
    "a status that nobody wrote": ("UPDATE keepstep_head SET status = 'flying'", "'flying' is not a valid Status"),
    "a status that is no UTF-8": ("UPDATE keepstep_head SET status = CAST(x'ff' AS TEXT)", "status"),
    "wake-ups that are no list": ("UPDATE keepstep_head SET wakes = '{}'", "array"),
    "a sequence that is text": ("UPDATE keepstep_head SET seq = 'many'", "h.seq is 'many'"),
    "a head that is gone": ("DELETE FROM keepstep_head", "h.status is None"),
}
DELETES_HEAD = "a head that is gone"
CLAIM_MENDS = "wake-ups that are no list"  # whoever claims a run writes none


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


@pytest.fixture
def store(path):
    """Three queued runs, the middle one with tags."""
    store = SQLiteStore(path, clock=SteppedClock())
    for name in ("a", "b", "c"):
        commit(store, Create(queued(name, tags={"x": "1"})))
    yield store
    store.close()


def damage(path, statement, column="id", value="b"):
    column = "run" if "keepstep_head" in statement else column
    database = apsw.Connection(str(path))
    database.execute(f"{statement} WHERE {column} = ?", (value,))
    database.close()


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_is_named_and_the_others_are_listed(store, path, what):
    statement, said = DAMAGE[what]
    damage(path, statement)
    page = store.list_runs(RunQuery())
    assert ([run.id for run in page.runs], page.unreadable) == (["c", "a"], ("b",))
    with pytest.raises(CheckpointCorrupt, match="run 'b': its row cannot be read") as caught:
        store.get_run("b")
    assert said in str(caught.value)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_exists_and_can_be_replaced(store, path, what):
    damage(path, DAMAGE[what][0])
    answers = store.commit([Create(queued("d")), Create(queued("b")), Create(queued("e"))])
    assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.EXISTS, Verdict.DONE]
    assert answers[1].run is None
    assert commit(store, Create(queued("b", input=b"2"), over=0)).verdict is Verdict.DONE
    assert get(store, "b").input == b"2"


@pytest.mark.parametrize("what", [one for one in DAMAGE if one != DELETES_HEAD])
@pytest.mark.parametrize("status", [ALL, frozenset({Status.QUEUED})], ids=["all", "queued"])
def test_a_damaged_run_is_named_on_a_page_of_statuses_too(store, path, what, status):
    damage(path, DAMAGE[what][0])
    page = store.list_runs(RunQuery(status=status))
    assert ([run.id for run in page.runs], page.unreadable) == (["c", "a"], ("b",))


def test_a_head_without_its_run_is_named_on_a_page_of_statuses(store, path):
    damage(path, "DELETE FROM keepstep_run")
    assert store.list_runs(RunQuery(status=ALL)).unreadable == ("b",)


def test_a_query_by_tags_names_the_run_whose_tags_cannot_be_read(store, path):
    damage(path, "UPDATE keepstep_run SET tags = '{'")
    page = store.list_runs(RunQuery(tags={"x": "1"}))
    assert ([run.id for run in page.runs], page.unreadable) == (["c", "a"], ("b",))


def test_damaged_runs_count_on_their_page_and_are_named_once(store, path):
    damage(path, "UPDATE keepstep_run SET tags = '{'")
    pages, after = [], None
    for _ in range(3):
        page = store.list_runs(RunQuery(limit=1, after=after))
        pages.append(([run.id for run in page.runs], page.unreadable))
        after = page.next
    assert (pages, after) == ([(["c"], ()), ([], ("b",)), (["a"], ())], None)


@pytest.mark.parametrize("what", [one for one in DAMAGE if one not in {DELETES_HEAD, CLAIM_MENDS}])
def test_a_damaged_run_keeps_no_worker_from_the_others(store, path, what):
    damage(path, DAMAGE[what][0])
    store.renew_leases(WorkerInfo("w1"))
    claims = store.claim_runs(ClaimRequest("w1", workflows=frozenset({get(store, "a").workflow}), limit=9))
    assert [claim.run.id for claim in claims.claims] == ["a", "c"]


def test_a_run_that_is_started_again_is_there_though_it_is_damaged(store, path):
    damage(path, "UPDATE keepstep_run SET tags = '{'")
    answers = store.commit([Create(queued("b")), Create(queued("d"))])
    assert [answer.verdict for answer in answers] == [Verdict.EXISTS, Verdict.DONE]
    assert answers[0].run is None
    assert get(store, "d").id == "d"


@pytest.mark.parametrize(
    "setting", ["payload = '{'", "sent_at = 'noon'", "name = x'00'", "payload = CAST(x'ff' AS TEXT)"]
)
def test_damaged_signal_is_reported_with_its_run(store, path, setting):
    store.commit([Send(Signal("b", "go")), Send(Signal("c", "go"))])
    damage(path, f"UPDATE keepstep_signal SET {setting}", "run")
    with pytest.raises(CheckpointCorrupt, match="run 'b': its signal 1 cannot be read"):
        store.list_signals("b")
    assert len(store.list_signals("c")) == 1


@pytest.mark.parametrize(
    "setting", ["workflows = '{'", "progress = 'x'", "pid = 'many'", "started_at = 'noon'", "boot_seconds = 'x'"]
)
def test_damaged_row_of_a_live_worker_is_mended_by_its_heartbeat(store, path, setting):
    store.renew_leases(WorkerInfo("w1", started_at=at(0), workflows=("digest",)))
    other = SQLiteStore(path, clock=SteppedClock())
    other.renew_leases(WorkerInfo("w2"))
    damage(path, f"UPDATE keepstep_worker SET {setting}", value="w1")
    [first, second] = other.list_workers()
    assert (first.id, first.alive, second.damage) == ("w1", True, "")
    assert setting.startswith("boot") or "its row cannot be read" in first.damage
    other.claim_runs(ClaimRequest("w2", workflows=frozenset({"digest"}), limit=1))  # is not stopped by it
    assert store.renew_leases(WorkerInfo("w1", started_at=at(0), workflows=("digest",)))
    assert other.list_workers()[0].damage == ""
    other.close()


def test_progress_that_cannot_be_read_is_none(store, path):
    started(store, "r")
    damage(path, "UPDATE keepstep_worker SET progress = '{'", value=get(store, "r").worker)
    assert get(store, "r").progress is None
