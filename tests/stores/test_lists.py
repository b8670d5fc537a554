"""Lists of runs: every way in which a store reads them gives the same runs, and the indexes fit what they index."""

import random
from dataclasses import replace

import apsw
import pytest

from keepstep.care.verify import verify
from keepstep.model import RunQuery, Status
from keepstep.ports import Create
from keepstep.stores import rules
from keepstep.stores.memory import MemoryStore
from keepstep.stores.postgres import lists as postgres_lists
from keepstep.stores.postgres.store import PostgresStore
from keepstep.stores.sqlite import lists as sqlite_lists
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import SteppedClock, at, parked, queued, started
from keepstep.testing.store_contract.reading import Reading
from tests.postgres import empty_store
from tests.stores.test_postgres import Attentive

#: Values at which a small store is read as a large one: nothing is few, and only one run is near.
LARGE = {"FEW": 0, "MANY": 0, "NEAR": 1, "MOST_WORKFLOWS": 1}
#: Values at which everything is found by the runs that an index names, or by two indexes together.
PLANS = {"few": {}, "large": LARGE, "both": {"FEW": 3}, "near": {"FEW": 0, "MANY": 0, "NEAR": 20}}


def set_limits(monkeypatch, limits):
    for module in (sqlite_lists, postgres_lists):
        for name, value in limits.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


class TestLargeSQLite(Reading):
    """The contract of lists in a file that counts as large."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path, monkeypatch):
        self.path = tmp_path / "runs.db"
        set_limits(monkeypatch, LARGE)

    def make_store(self, clock):
        return SQLiteStore(self.path, clock=clock)


class TestLargePostgres(Reading):
    """The contract of lists on a server whose tables count as large."""

    @pytest.fixture(autouse=True)
    def _place(self, monkeypatch):
        set_limits(monkeypatch, LARGE)
        with empty_store() as self.url:
            yield

    def make_store(self, clock):
        return Attentive(self.url, clock=clock)


def fill(store):
    """Write the same runs of many kinds into a store."""
    draw = random.Random(5)
    for number in range(60):
        name = f"{draw.choice(['a', 'b', 'é', 'a-'])}{number}"
        fields = {
            "workflow": draw.choice(["order", "mail", "order", "rare" if number < 5 else "order"]),
            "created_at": at(draw.choice([number, number, number - 30])),
            "queue": draw.choice(["default", "default", "gpu"]),
            "tags": draw.choice([{}, {}, {"team": "x"}, {"team": "y", "env": "p"}]),
        }
        kind = draw.randrange(5)
        if kind == 0:
            store.commit([Create(queued(name, **fields))])
            continue
        writer = started(store, name, draw.choice(["w1", "w2"]), **fields)
        if kind == 1:
            continue
        status = draw.choice([Status.COMPLETED, Status.FAILED, Status.PAUSED, Status.CANCELLED])
        wakes = ("approve", "ks:cancel") if draw.random() < 0.5 else ("ks:child:x#1",)
        if kind == 2:
            writer.write(status=Status.WAITING, release=True, wakes=wakes, at=at(100 + number))
        else:
            writer.write(status=status, release=True, at=at(100 + draw.randrange(60)))


def drawn(draw):
    """Draw a query with some of the filters."""
    chosen = {
        "status": lambda: frozenset(draw.sample(list(Status), draw.randrange(1, 4))),
        "workflow": lambda: draw.choice(["order", "mail", "rare", "none"]),
        "workflows": lambda: frozenset(draw.sample(["order", "mail", "rare", "none"], 2)),
        "not_workflows": lambda: frozenset(draw.sample(["order", "mail", "none"], 1)),
        "queue": lambda: draw.choice(["default", "gpu", "none"]),
        "tags": lambda: draw.choice([{"team": "x"}, {"team": "y", "env": "p"}, {"env": "none"}]),
        "id_prefix": lambda: draw.choice(["a", "a-", "b1", "é", "z"]),
        "worker": lambda: draw.choice(["w1", "w3"]),
        "created_after": lambda: at(draw.randrange(60)),
        "created_before": lambda: at(draw.randrange(60)),
        "updated_after": lambda: at(draw.randrange(160)),
        "updated_before": lambda: at(draw.randrange(160)),
        "awaits": lambda: draw.choice(["approve", "ks:cancel", "none"]),
        "needs_person": lambda: True,
        "open_failure": lambda: True,
    }
    names = draw.sample(sorted(chosen), draw.randrange(1, 4))
    return RunQuery(**{name: chosen[name]() for name in names})


def paged(store, query):
    """Return what a query finds, page by page, and its count."""
    found, count, query = [], store.list_runs(replace(query, count_to=1000)).count, replace(query, limit=7)
    while True:
        page = store.list_runs(query)
        found += [run.id for run in page.runs]
        if page.next is None:
            return found, count
        query = replace(query, after=page.next)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request, tmp_path):
    if request.param == "sqlite":
        store = SQLiteStore(tmp_path / "runs.db", clock=SteppedClock())
        yield store
        store.close()
        return
    with empty_store() as url:
        store = PostgresStore(url, clock=SteppedClock())
        yield store
        store.close()


def test_every_plan_finds_what_the_filters_mean(store, monkeypatch):
    model = MemoryStore(clock=SteppedClock())
    fill(model)
    fill(store)
    draw = random.Random(7)
    for query in [drawn(draw) for _ in range(150)]:
        expected = paged(model, query)
        assert len(expected[0]) == expected[1]
        for name, limits in PLANS.items():
            with monkeypatch.context() as patch:
                set_limits(patch, limits)
                assert paged(store, query) == expected, (name, query)


@pytest.mark.parametrize("prefix", ["a", "az", "ÿ", "\ud7ff", "x\U0010ffff", "\U0010ffff"])
def test_the_end_of_a_prefix_is_after_all_that_begin_with_it(prefix):
    end = rules.end_of_prefix(prefix)
    for longer in (prefix, prefix + "a", prefix + "\U0010ffff\U0010ffff"):
        assert end is None or prefix.encode() <= longer.encode() < end.encode()
    assert end is None or not end.startswith(prefix)


# -- the table of tags -------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


def by_tag(store, **tags):
    page = store.list_runs(RunQuery(tags=tags))
    return [run.id for run in page.runs], list(page.unreadable)


def change(path, sql, *values):
    connection = apsw.Connection(str(path))
    connection.execute(sql, values)
    connection.close()


def test_tags_are_found_after_a_change_by_hand(path):
    store = SQLiteStore(path)
    parked(store, "plain")
    store.commit([Create(queued("a", tags={"team": "x"})), Create(queued("b", tags={"team": "x", "n": "1"}))])
    change(path, "UPDATE keepstep_run SET tags = json_object('team', 'y') WHERE id = 'a'")
    assert (by_tag(store, team="y"), by_tag(store, team="x")) == ((["a"], []), (["b"], []))
    change(path, "UPDATE keepstep_run SET tags = '{damaged' WHERE id = 'b'")
    assert by_tag(store, team="x") == by_tag(store, team="none") == ([], ["b"])
    store.delete_runs(["a"])
    assert by_tag(store, team="y") == ([], ["b"])
    assert change(path, "DELETE FROM keepstep_run") is None
    assert apsw.Connection(str(path)).execute("SELECT count(*) FROM keepstep_tag").fetchall() == [(0,)]
    store.close()


@pytest.mark.parametrize("damage", ["DELETE FROM keepstep_tag", "UPDATE keepstep_tag SET value = 'other'"])
def test_tags_that_do_not_fit_are_found_and_mended(path, damage):
    store = SQLiteStore(path)
    store.commit([Create(queued("a", tags={"team": "x"}))])
    assert verify(store).sound
    change(path, damage)
    change(path, "DROP TRIGGER keepstep_tag_added")
    assert {flaw.about for flaw in verify(store).flaws} == {"keepstep_tag", "keepstep_tag_added"}
    store.check(mend=True)
    assert verify(store).sound
    store.commit([Create(queued("b", tags={"team": "x"}))])
    assert by_tag(store, team="x") == (["b", "a"], [])
    store.close()
