"""What a store must tell: pages of checkpoints and runs, and what others wrote."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from ...errors import DefinitionError
from ...model import Kind, Run, RunQuery, Signal, Status
from ...model.run import HANDED_OVER
from ...ports import Create, Row, Send, Store, Verdict
from ...records.record import StoredError
from .ground import Ground, SteppedClock, at, commit, get, parked, queued, record, started


class Reading(Ground):
    """Reading pages, news."""

    # -- reading pages -----------------------------------------------------------------------------------------------

    def test_checkpoints_are_paged_in_order(self, store: Store) -> None:
        writer = started(store, "r")
        other = started(store, "r2")
        for _ in range(9):
            store.commit([other.change(), writer.change()])
            writer.seq += 1
            other.seq += 1
        assert [row.seq for row in store.list_checkpoints("r")] == list(range(1, 11))
        assert [row.seq for row in store.list_checkpoints("r", after=4, limit=3)] == [5, 6, 7]
        assert store.list_checkpoints("r", after=10) == []
        assert store.list_checkpoints("r", limit=0) == []

    def test_checkpoints_are_listed_by_kind(self, store: Store) -> None:
        kinds = [Kind.TIMER, Kind.STEP_COMPLETED, Kind.STATE, Kind.TIMER, Kind.STATE]
        started(store, "r").write(*(record("r", kind) for kind in kinds))
        assert [row.seq for row in store.list_checkpoints("r", kinds=[Kind.TIMER])] == [2, 5]
        assert [row.seq for row in store.list_checkpoints("r", kinds=(Kind.TIMER, Kind.STATE), limit=3)] == [2, 4, 5]
        assert [row.seq for row in store.list_checkpoints("r", after=4, kinds=iter([Kind.STATE]))] == [6]
        assert store.list_checkpoints("r", kinds=["no such kind"]) == []

    def test_a_page_of_large_checkpoints_is_short(self, store: Store) -> None:
        rows = [Row(n, Kind.STEP_COMPLETED, b"{}", b"x" * 1_500_000) for n in range(2, 8)]
        started(store, "r").write(rows=rows, checksum="x")
        seen: list[int] = []
        while page := store.list_checkpoints("r", after=seen[-1] if seen else 0):
            assert sum(len(row.body or b"") for row in page) < 6_000_000
            seen += [row.seq for row in page]
        assert seen == list(range(1, 8))

    def test_one_checkpoint_is_given_however_large_it_is(self, store: Store) -> None:
        started(store, "r").write(rows=[Row(2, Kind.STATE, b"{}", b"x" * 9_000_000)], checksum="x")
        assert [row.seq for row in store.list_checkpoints("r", after=1)] == [2]

    def test_runs_are_listed_newest_first_in_pages(self, store: Store) -> None:
        for n in range(7):
            commit(store, Create(queued(f"r{n}", created_at=at(n), due_at=at(n))))
        seen: list[str] = []
        query = RunQuery(limit=3)
        for expected in (3, 3, 1):
            page = store.list_runs(query)
            assert len(page.runs) == expected
            seen += [run.id for run in page.runs]
            query = replace(query, after=page.next)
        assert query.after is None
        assert seen == [f"r{n}" for n in reversed(range(7))]
        assert store.list_runs(RunQuery()).runs[0] == replace(get(store, "r6"), input=b"")
        assert store.list_runs(RunQuery()).unreadable == ()

    def test_runs_of_one_commit_are_listed_in_the_order_of_their_creation(self, store: Store) -> None:
        parent = started(store, "p")
        fenced = parent.change(epoch=9, creates=[Create(queued("f"))])
        early = Send(Signal("x", "go", b"1"))
        children = parent.change(creates=[Create(queued("c")), Create(queued("b"))])
        answers = store.commit([early, fenced, children, *(Create(queued(run)) for run in "axf")])
        verdicts = [answer.verdict for answer in answers]
        assert verdicts == [Verdict.NOT_FOUND, Verdict.FENCED, *[Verdict.DONE] * 4]
        assert [run.id for run in store.list_runs(RunQuery()).runs] == ["f", "x", "a", "b", "c", "p"]

    def test_lists_hold_inputs_only_if_they_are_asked_for(self, store: Store) -> None:
        commit(store, Create(queued("r", input=b'"' + b"x" * 1_000_000 + b'"')))
        whole = get(store, "r")
        assert len(whole.input) == 1_000_002
        for query in (RunQuery(), RunQuery(status=frozenset({whole.status})), RunQuery(workflow=whole.workflow)):
            assert store.list_runs(query).runs == (replace(whole, input=b""),)
            assert store.list_runs(replace(query, with_input=True)).runs == (whole,)

    def test_an_unknown_page_is_refused(self, store: Store) -> None:
        with pytest.raises(DefinitionError, match="not the `next`"):
            store.list_runs(RunQuery(after="no page; DROP TABLE"))

    def test_a_full_last_page_ends_the_list(self, store: Store) -> None:
        store.commit([Create(queued(f"r{n}")) for n in range(4)])
        assert store.list_runs(RunQuery(limit=4)).next is None
        assert store.list_runs(RunQuery(limit=0)).runs == ()

    def test_a_page_is_not_disturbed_by_what_comes_and_goes(self, store: Store) -> None:
        for n in range(6):
            commit(store, Create(queued(f"r{n}", created_at=at(n))))
        page = store.list_runs(RunQuery(limit=2))
        commit(store, Create(queued("r9", created_at=at(9))))
        store.delete_runs(["r4", "r3"])
        assert [run.id for run in store.list_runs(RunQuery(limit=9, after=page.next)).runs] == ["r2", "r1", "r0"]

    def test_a_run_that_goes_from_status_to_status_is_in_every_page(self, store: Store) -> None:
        writer = started(store, "r", workflow="w")
        statuses = (Status.WAITING, Status.RUNNING)
        ended = threading.Event()

        def move() -> None:
            while not ended.is_set():
                for status in statuses:
                    assert writer.write(status=status).verdict is Verdict.DONE

        with ThreadPoolExecutor(1) as pool:
            moving = pool.submit(move)
            try:
                for query in (RunQuery(workflow="w"), RunQuery(status=frozenset(statuses))):
                    for _ in range(40):
                        assert [run.id for run in store.list_runs(query).runs] == ["r"]
            finally:
                ended.set()
            moving.result()

    def test_keepers_are_listed_only_on_request(self, store: Store) -> None:
        commit(store, Create(queued("ks:schedule:x", workflow="keepstep.schedule:x")))
        commit(store, Create(queued("run")))

        def listed(**query: Any) -> set[str]:
            return {run.id for run in store.list_runs(RunQuery(**query)).runs}

        assert listed() == listed(status=frozenset({Status.QUEUED})) == {"run"}
        assert listed(id_prefix="ks:") == listed(workflow="keepstep.schedule:x") == set()
        assert listed(system=True) == {"ks:schedule:x", "run"}
        assert listed(system=True, id_prefix="ks:") == {"ks:schedule:x"}

    @pytest.mark.parametrize(
        "query, expected",
        [
            (RunQuery(), "abcdefg"),
            (RunQuery(workflow="w"), "bc"),
            (RunQuery(version="2"), "c"),
            (RunQuery(version="2", workflow="f"), ""),
            (RunQuery(status=frozenset({Status.RUNNING})), "cd"),
            (RunQuery(status=frozenset({Status.RUNNING, Status.COMPLETED})), "cde"),
            (RunQuery(status=frozenset({Status.QUEUED}), workflow="w"), "b"),
            (RunQuery(parent="a"), "bf"),
            (RunQuery(ids=frozenset({"run-a", "run-d", "run-e", "ég", "run-z"})), "adeg"),
            (RunQuery(ids=frozenset({"run-a", "run-d"}), status=frozenset({Status.RUNNING})), "d"),
            (RunQuery(ids=frozenset({"run-a", "run-d"}), id_prefix="run-a"), "a"),
            (RunQuery(ids=frozenset()), ""),
            (RunQuery(worker="w1"), "c"),
            (RunQuery(tags={"team": "x"}), "fg"),
            (RunQuery(tags={"team": "x", "env": "p"}), "g"),
            (RunQuery(tags={"team' OR 1=1 --": "x"}), ""),
            (RunQuery(tags={"$.team": "x"}), ""),
            (RunQuery(created_before=at(2)), "ab"),
            (RunQuery(created_after=at(4)), "fg"),
            (RunQuery(created_after=at(1), created_before=at(4)), "cd"),
            (RunQuery(updated_before=at(3)), "abcf"),
            (RunQuery(id_prefix="run-c"), "c"),
            (RunQuery(id_prefix="run-"), "abcde"),
            (RunQuery(id_prefix="run_"), ""),
            (RunQuery(id_prefix="RUN"), ""),
            (RunQuery(id_prefix="%"), "f"),
            (RunQuery(id_prefix="é"), "g"),
            (RunQuery(workflow="' OR 1=1 --"), ""),
            (RunQuery(workflows=frozenset({"w", "digest"})), "abcdefg"),
            (RunQuery(workflows=frozenset({"w", "none"})), "bc"),
            (RunQuery(workflows=frozenset({"w", "none"}), status=frozenset({Status.RUNNING})), "c"),
            (RunQuery(workflow="digest", workflows=frozenset({"w"})), ""),
            (RunQuery(not_workflows=frozenset({"w", "none"})), "adefg"),
            (RunQuery(not_workflows=frozenset({"digest"}), status=frozenset({Status.QUEUED})), "b"),
            (RunQuery(not_workflows=frozenset({"digest"}), workflows=frozenset({"w", "digest"})), "bc"),
            (RunQuery(queue="q' OR 1=1"), "g"),
            (RunQuery(queue="default", workflow="w"), "bc"),
            (RunQuery(queue="none"), ""),
            (RunQuery(updated_after=at(4)), "eg"),
            (RunQuery(updated_after=at(2), updated_before=at(6)), "d"),
            (RunQuery(id_prefix="run-", created_after=at(1), status=frozenset({Status.RUNNING})), "cd"),
            (RunQuery(tags={"team": "x"}, status=frozenset({Status.QUEUED}), workflow="digest"), "fg"),
            (RunQuery(tags={"team": "x"}, status=frozenset({Status.RUNNING})), ""),
        ],
    )
    def test_a_query_finds_the_runs_that_match_it(self, store: Store, query: RunQuery, expected: str) -> None:
        commit(store, Create(queued("run-a", created_at=at(0))))
        commit(store, Create(queued("run-b", created_at=at(1), workflow="w", parent="a")))
        started(store, "run-c", created_at=at(2), workflow="w", version="2")
        started(store, "run-d", "w2", created_at=at(3))
        started(store, "run-e", created_at=at(4)).write(status=Status.COMPLETED, release=True, at=at(9))
        other = {"team": "x", "env": "q"}
        commit(store, Create(queued("%f", created_at=at(5), parent="a", tags=other, updated_at=at(2))))
        commit(store, Create(queued("ég", created_at=at(6), tags={**other, "env": "p"}, queue="q' OR 1=1")))
        assert "".join(sorted(run.id[-1] for run in store.list_runs(query).runs)) == expected
        assert sorted(self._paged(store, replace(query, limit=1))) == list(expected)
        assert store.list_runs(replace(query, count_to=100)).count == len(expected)

    def test_a_count_is_of_the_whole_filter_and_capped(self, store: Store) -> None:
        store.commit([Create(queued(f"r{n}", workflow="w" if n % 2 else "digest")) for n in range(9)])
        started(store, "s", workflow="w")
        assert store.list_runs(RunQuery()).count is None
        for query, number in (
            (RunQuery(), 10),
            (RunQuery(workflow="w"), 5),
            (RunQuery(workflow="w", status=frozenset({Status.QUEUED})), 4),
            (RunQuery(status=frozenset({Status.QUEUED, Status.RUNNING})), 10),
            (RunQuery(ids=frozenset({"r1", "r2", "s"}), status=frozenset({Status.QUEUED})), 2),
            (RunQuery(open_failure=True, status=frozenset({Status.QUEUED})), 0),
        ):
            page = store.list_runs(replace(query, limit=2, count_to=50))
            assert (page.count, len(page.runs)) == (number, min(number, 2))
            rest = store.list_runs(replace(query, limit=0, count_to=3, after=page.next))
            assert (rest.count, rest.runs) == (min(number, 3), ())

    def test_runs_are_found_by_the_signal_they_wait_for(self, store: Store, clock: SteppedClock) -> None:
        soon = at(clock.seconds + 3600)
        parked(store, "a", wakes=("approve", "ks:cancel"), due_at=soon)
        parked(store, "b", wakes=("ks:cancel", "deny,", 'appr"ove'))
        parked(store, "answered", wakes=("approve",))
        commit(store, Send(Signal("answered", "approve")))
        started(store, "driven")

        def listed(name: str, **query: Any) -> list[str]:
            found = RunQuery(awaits=name, **query)
            runs = [run.id for run in store.list_runs(found).runs]
            assert store.list_runs(replace(found, count_to=9)).count == len(runs)
            return runs

        assert listed("approve") == listed("approve", status=frozenset({Status.WAITING})) == ["a"]
        assert listed("deny,") == listed('appr"ove') == ["b"]
        assert listed("ks:cancel") == ["b", "a"]
        assert (
            listed(",") == listed("approv") == listed("") == listed("approve", status=frozenset({Status.FAILED})) == []
        )
        clock.advance(3600.0)
        assert listed("approve") == []

    def test_runs_that_need_a_person_are_found(self, store: Store, clock: SteppedClock) -> None:
        soon = at(clock.seconds + 3600)
        parked(store, "signal", wakes=("ks:cancel", "approve"), due_at=soon, workflow="w")
        parked(store, "verdict", wakes=("ks:resolve:pay#1", "ks:cancel"))
        parked(store, "stop", wakes=("ks:go:pay#1.before",))
        started(store, "paused").write(status=Status.PAUSED, release=True, wakes=("ks:resume", "ks:cancel"))
        self._ended(store, "aside", Status.SET_ASIDE)
        parked(store, "child", wakes=("ks:child:pay,#1", "ks:cancel"))
        parked(store, "timer", wakes=("ks:cancel",), due_at=soon)
        parked(store, "answered", wakes=("approve",))
        commit(store, Send(Signal("answered", "approve")))
        self._ended(store, "moved", Status.SET_ASIDE, HANDED_OVER.capitalize())
        self._ended(store, "failed", Status.FAILED)
        commit(store, Create(queued("queued")))
        started(store, "driven")

        def listed(**query: Any) -> list[str]:
            found = RunQuery(needs_person=True, **query)
            runs = [run.id for run in store.list_runs(found).runs]
            assert store.list_runs(replace(found, count_to=9)).count == len(runs)
            assert sorted(run.id for page in self._pages(store, replace(found, limit=1)) for run in page) == sorted(
                runs
            )
            return runs

        assert listed() == ["aside", "paused", "stop", "verdict", "signal"]
        assert listed(status=frozenset({Status.WAITING, Status.FAILED})) == ["stop", "verdict", "signal"]
        assert listed(workflow="w") == listed(awaits="approve") == ["signal"]
        assert listed(status=frozenset({Status.FAILED})) == []

    def test_failures_are_open_until_a_fork_completes(self, store: Store) -> None:
        self._ended(store, "failed", Status.FAILED)
        self._ended(store, "aside", Status.SET_ASIDE)
        self._ended(store, "moved", Status.SET_ASIDE, HANDED_OVER.capitalize())
        self._ended(store, "mended", Status.FAILED)
        self._ended(store, "fork of mended", Status.COMPLETED, origin="mended")
        self._ended(store, "fork of failed", Status.FAILED, origin="failed")
        self._ended(store, "completed", Status.COMPLETED)
        started(store, "driven", origin="aside")

        def listed(**query: Any) -> list[str]:
            found = RunQuery(open_failure=True, **query)
            runs = [run.id for run in store.list_runs(found).runs]
            assert store.list_runs(replace(found, count_to=9)).count == len(runs)
            return runs

        assert listed() == ["fork of failed", "aside", "failed"]
        assert listed(status=frozenset({Status.SET_ASIDE, Status.COMPLETED})) == ["aside"]
        assert listed(status=frozenset({Status.COMPLETED})) == []
        assert listed(needs_person=True) == ["aside"]

    @staticmethod
    def _ended(store: Store, run_id: str, status: Status, error: str = "Boom", **fields: Any) -> None:
        kind = Kind.ERROR if status is Status.SET_ASIDE else Kind.RUN_FINISHED
        outcome = "success" if status is Status.COMPLETED else "failure"
        failure = None if status is Status.COMPLETED else StoredError(error, 'no "type":"Copy"')
        last = record(run_id, kind, outcome=outcome, error=failure)
        assert started(store, run_id, **fields).write(last, status=status, release=True).verdict is Verdict.DONE

    @staticmethod
    def _pages(store: Store, query: RunQuery) -> Iterator[tuple[Run, ...]]:
        while True:
            page = store.list_runs(query)
            yield page.runs
            if page.next is None:
                return
            query = replace(query, after=page.next)

    @staticmethod
    def _paged(store: Store, query: RunQuery) -> Iterator[str]:
        while True:
            page = store.list_runs(query)
            yield from (run.id[-1] for run in page.runs)
            if page.next is None:
                return
            query = replace(query, after=page.next)

    # -- news --------------------------------------------------------------------------------------------------------

    def test_news_names_my_runs_that_were_signalled(self, store: Store) -> None:
        for name, worker in (("mine", "w1"), ("mine too", "w1"), ("theirs", "w2")):
            started(store, name, worker)
        commit(store, Create(queued("free")))
        cursor = store.news("w1", 0).cursor
        store.commit([Send(Signal(run, "x")) for run in ("theirs", "mine", "free", "mine")])
        news = store.news("w1", cursor)
        assert (news.runs, news.changed) == (("mine",), True)
        assert news.cursor > cursor
        assert store.news("w1", news.cursor).runs == ()
        assert store.news("w1", cursor).runs == ("mine",)
        assert store.news("w2", cursor).runs == ("theirs",)

    def test_news_from_the_beginning_names_all(self, store: Store) -> None:
        for name in ("a", "b", "c"):
            started(store, name)
        store.commit([Send(Signal(run, "x")) for run in ("c", "a")])
        news = store.news("w1", 0)
        assert sorted(news.runs) == ["a", "c"]
        assert store.news("w1", news.cursor).runs == ()

    def test_the_cursor_never_goes_back(self, store: Store) -> None:
        started(store, "r")
        commit(store, Create(queued("gone")))
        store.commit([Send(Signal("r", "x")), Send(Signal("gone", "x"))])
        cursor = store.news("w1", 0).cursor
        store.delete_runs(["gone"])
        assert store.news("w1", cursor).cursor >= cursor
        commit(store, Send(Signal("r", "y")))
        assert store.news("w1", cursor).runs == ("r",)

    def test_nothing_written_is_no_news(self, store: Store) -> None:
        cursor = store.news("w1", 0).cursor
        news = store.news("w1", cursor)
        assert (news.cursor, news.runs, news.changed) == (cursor, (), False)

    def test_what_the_worker_itself_writes_is_no_news(self, store: Store) -> None:
        writer = started(store, "r")
        cursor = store.news("w1", 0).cursor
        store.news("w2", 0)
        writer.write()
        assert store.news("w1", cursor).changed is False
        assert store.news("w2", cursor).changed is True
        assert store.news("w2", cursor).changed is False

    def test_what_others_write_is_news(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        cursor = store.news("w1", 0).cursor
        other = self.make_store(clock)
        commit(other, Create(queued("new")))
        assert store.news("w1", cursor).changed is True
        assert store.news("w1", cursor).changed is False
        commit(other, Send(Signal("r", "x")))
        news = store.news("w1", cursor)
        assert (news.runs, news.changed) == (("r",), True)
        other.close()
