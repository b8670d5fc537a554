"""What every store must do, as a suite that a store's own tests subclass.

    class TestMyStore(StoreContract):
        @pytest.fixture(autouse=True)
        def _place(self, tmp_path):
            self.path = tmp_path / "runs"

        def make_store(self, clock):
            return MyStore(self.path, clock=clock)

`make_store` opens the same storage each time it is called within one test: a second store stands for a second process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from ..errors import CheckpointCorrupt, DefinitionError
from ..model import (
    MOVES,
    Claim,
    Claims,
    ErrorInfo,
    Kind,
    Run,
    RunQuery,
    Signal,
    Status,
    WorkerInfo,
    may_move,
)
from ..ports import Advance, Answer, Change, ClaimRequest, Clock, Create, Rekey, Row, Send, Store, Verdict, instant
from ..stores.records import Record, StoredError, seal, unseal
from ..stores.rules import seal_signal

#: When the clock of a test starts.
START = datetime(2030, 1, 1, tzinfo=UTC)

#: How a claimed run is led to each status in which it can be claimed by name.
ENDINGS = [Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.SET_ASIDE]
RELEASED = [Status.QUEUED, Status.WAITING, Status.PAUSED, *ENDINGS]


class SteppedClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.boot_id = "boot-1"

    def now(self) -> float:
        return START.timestamp() + self.seconds

    def boot(self) -> tuple[str, float]:
        return self.boot_id, 1000.0 + self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


def at(seconds: float) -> datetime:
    """The instant so many seconds after the start."""
    return START + timedelta(seconds=seconds)


def queued(run_id: str, **fields: Any) -> Run:
    """A run that is free and due."""
    defaults: dict[str, Any] = {"workflow": "digest", "status": Status.QUEUED, "created_at": START, "due_at": START}
    return Run(id=run_id, **{**defaults, **fields})


def record(run_id: str, kind: Kind = Kind.STEP_COMPLETED, value: bytes | None = b"1", **fields: Any) -> Record:
    """An unsealed record."""
    raw = msgspec.UNSET if value is None else msgspec.Raw(value)
    return Record(run=run_id, kind=kind, value=raw, finished_at=START, **fields)


class Holder:
    """A lease holder that seals what it writes, as the engine does."""

    def __init__(self, store: Store, run: Run) -> None:
        self.store = store
        self.run = run.id
        self.worker = run.worker or ""
        self.epoch = run.epoch
        self.seq = run.seq
        self.checksum = run.checksum

    def sealed(self, records: Sequence[Record]) -> tuple[list[Row], str]:
        rows, checksum = [], self.checksum
        for number, unsealed in enumerate(records, self.seq + 1):
            row, checksum = seal(unsealed, number, checksum)
            rows.append(row)
        return rows, checksum

    def change(self, *records: Record, **fields: Any) -> Advance:
        """The change that writes these records after the head, or one plain step if none are given."""
        rows, checksum = self.sealed(records or [record(self.run)])
        head = {"worker": self.worker, "epoch": self.epoch, "after": self.seq}
        return Advance(self.run, **{**head, "rows": rows, "checksum": checksum, **fields})

    def write(self, *records: Record, **fields: Any) -> Answer:
        """Commit such a change; a written one becomes the head."""
        change = self.change(*records, **fields)
        answer = commit(self.store, change)
        if answer.verdict is Verdict.DONE and change.rows:
            self.seq, self.checksum = change.rows[-1].seq, change.checksum
        return answer


def commit(store: Store, change: Change) -> Answer:
    """The answer to one change."""
    (answer,) = store.commit([change])
    return answer


def started(store: Store, run_id: str, worker: str = "w1", **fields: Any) -> Holder:
    """A run that is leased at birth, with its first record."""
    first, checksum = seal(record(run_id, Kind.RUN_STARTED), 1, "")
    run = queued(
        run_id,
        **{
            "status": Status.RUNNING,
            "worker": worker,
            "epoch": 1,
            "seq": 1,
            "due_at": None,
            "checksum": checksum,
            **fields,
        },
    )
    assert commit(store, Create(run, [first])).verdict is Verdict.DONE
    return Holder(store, run)


def parked(store: Store, run_id: str, **fields: Any) -> Holder:
    """A run that waits, for nothing unless told."""
    writer = started(
        store, run_id, **{key: fields.pop(key) for key in ("workflow", "version", "worker") if key in fields}
    )
    assert writer.write(status=Status.WAITING, release=True, **fields).verdict is Verdict.DONE
    return writer


def get(store: Store, run_id: str) -> Run:
    """The run, which must be there."""
    run = store.get_run(run_id)
    assert run is not None
    return run


def everything(store: Store) -> dict[str, tuple[Run, list[Row], list[Signal]]]:
    """All that a store holds about its runs."""
    runs = store.list_runs(RunQuery(limit=1000)).runs
    return {run.id: (get(store, run.id), store.list_checkpoints(run.id), store.list_signals(run.id)) for run in runs}


def ids(claims: Claims) -> list[str]:
    """Which runs were claimed, in order."""
    return [claim.run.id for claim in claims.claims]


class StoreContract:
    """Subclass it and write `make_store`; every test here must pass."""

    def make_store(self, clock: Clock) -> Store:
        """Open the store that is to be tested, with this clock; within one test always the same storage."""
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> SteppedClock:
        return SteppedClock()

    @pytest.fixture
    def store(self, clock: SteppedClock) -> Iterator[Store]:
        """The store under test, with the workers w1 and w2 enrolled."""
        store = self.make_store(clock)
        for worker in ("w1", "w2"):
            assert store.renew_leases(WorkerInfo(worker, host="here", pid=1))
        yield store
        store.close()

    @staticmethod
    def claim(
        store: Store, worker: str = "w1", limit: int = 10, workflows: Sequence[str] = ("digest",), **more: Any
    ) -> Claims:
        """Claim as a worker does."""
        return store.claim_runs(ClaimRequest(worker, frozenset(workflows), limit, **more))

    def claim_one(self, store: Store, run_id: str, worker: str = "w1", *statuses: Status) -> Claim | None:
        """Claim one run by its name."""
        request = ClaimRequest(worker, run=run_id, statuses=frozenset(statuses or Status))
        claims = store.claim_runs(request).claims
        return claims[0] if claims else None

    @staticmethod
    def kill(store: Store, clock: SteppedClock, worker: str, survivor: str = "w2") -> None:
        """Let a worker's lease run out while the other renews its own."""
        assert worker != survivor
        clock.advance(store.lease_seconds - 1)
        assert store.renew_leases(WorkerInfo(survivor))
        clock.advance(2)

    # -- creating ----------------------------------------------------------------------------------------------------

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url

    def test_a_run_is_kept_as_it_was_given(self, store: Store) -> None:
        given = queued(
            "r",
            version="7",
            fingerprint="f",
            input='{"text": "déjà vu 🙂", "n": [1, 2.5, null]}'.encode(),
            seed="s",
            parent="p",
            parent_key="k#1",
            origin="o",
            queue="slow",
            priority=-3,
            key="dedup",
            tags={"team": "a b", "it's": 'a "quoted" %_ value'},
            deadline_at=at(99.5),
            traceparent="00-ab-cd-01",
            created_at=at(0.000001),
            created_by="ann@host (pid 7)",
            due_at=at(1.234567),
            wakes=("one", "two words"),
        )
        answer = commit(store, Create(given))
        assert answer.verdict is Verdict.DONE
        stored = replace(given, updated_at=given.created_at)
        assert get(store, "r") == answer.run == stored

    def test_there_is_no_unknown_run(self, store: Store) -> None:
        assert store.get_run("nobody") is None
        assert store.list_checkpoints("nobody") == []
        assert store.list_signals("nobody") == []

    def test_an_existing_id_is_answered_and_never_changed(self, store: Store) -> None:
        commit(store, Create(queued("r", input=b"1", tags={"a": "b"})))
        before = everything(store)
        answer = commit(store, Create(queued("r", workflow="other", input=b"2", due_at=at(50))))
        assert answer.verdict is Verdict.EXISTS
        assert answer.run == get(store, "r")
        assert everything(store) == before

    def test_the_second_of_two_creates_in_one_batch_finds_the_first(self, store: Store) -> None:
        first, second = store.commit([Create(queued("r", input=b"1")), Create(queued("r", input=b"2"))])
        assert (first.verdict, second.verdict) == (Verdict.DONE, Verdict.EXISTS)
        assert second.run is not None
        assert second.run.input == b"1"

    def test_a_run_can_be_leased_at_birth(self, store: Store) -> None:
        writer = started(store, "r")
        run = get(store, "r")
        assert (run.status, run.worker, run.epoch, run.seq) == (Status.RUNNING, "w1", 1, 1)
        assert [row.seq for row in store.list_checkpoints("r")] == [1]
        assert ids(self.claim(store, "w2")) == []
        assert writer.write().verdict is Verdict.DONE

    def test_a_queued_run_without_a_time_is_due_at_once(self, store: Store) -> None:
        commit(store, Create(queued("r", due_at=None)))
        assert get(store, "r").due_at == START
        assert ids(self.claim(store)) == ["r"]

    def test_a_run_whose_rows_do_not_fit_is_an_error_and_nothing_is_written(self, store: Store) -> None:
        row = Row(2, Kind.STEP_COMPLETED, b"{}")
        for wrong in (Create(queued("r", seq=1), [row]), Create(queued("r", seq=1)), Create(queued("r"), [row])):
            with pytest.raises(ValueError, match="'r'"):
                store.commit([Create(queued("other")), wrong])
        with pytest.raises(ValueError, match="'r'"):
            store.commit([Create(queued("r", status=Status.RUNNING))])
        assert everything(store) == {}

    # -- extending the history ---------------------------------------------------------------------------------------

    def test_rows_come_back_as_they_were_given(self, store: Store) -> None:
        writer = started(store, "r")
        for n in range(3):
            assert writer.write(record("r", value=b'"%d"' % n), record("r", value=None)).verdict is Verdict.DONE
        large = b'"' + b"x" * 200_000 + b'"'
        assert writer.write(record("r", value=large)).verdict is Verdict.DONE
        rows = store.list_checkpoints("r")
        assert [row.seq for row in rows] == list(range(1, 9))
        assert rows[-1].body is not None
        checked = list(unseal(rows, "r", previous=""))
        assert checked[-1][0].value == msgspec.Raw(large)
        assert checked[-1][1] == get(store, "r").checksum == writer.checksum

    def test_any_bytes_come_back(self, store: Store) -> None:
        # A store that is encrypted keeps ciphertext.
        body = bytes(range(256))
        rows = [Row(2, "step completed", body, body), Row(3, "step completed", b"", None)]
        started(store, "r").write(rows=rows, checksum="x")
        assert store.list_checkpoints("r", after=1) == rows

    def test_an_answer_says_where_the_head_is_now(self, store: Store) -> None:
        writer = started(store, "r")
        assert writer.write(record("r"), record("r")).seq == 3
        run = get(store, "r")
        assert (run.seq, run.checksum) == (3, writer.checksum)

    def test_a_change_says_when_it_was_made(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        writer.write(at=at(5.25))
        assert get(store, "r").updated_at == at(5.25)
        clock.advance(9)
        writer.write()
        assert get(store, "r").updated_at == at(9)

    def test_a_change_without_rows_leaves_the_head(self, store: Store) -> None:
        writer = started(store, "r")
        before = get(store, "r")
        answer = writer.write(rows=[], checksum="")
        assert (answer.verdict, answer.seq) == (Verdict.DONE, 1)
        after = get(store, "r")
        assert (after.seq, after.checksum) == (before.seq, before.checksum)

    @pytest.mark.parametrize(
        "wrong", [{"epoch": 0}, {"epoch": 2}, {"worker": "w2"}, {"after": 0}, {"after": 2}, {"run": "nobody"}]
    )
    @pytest.mark.parametrize("status", [None, Status.COMPLETED])
    def test_a_write_without_the_lease_or_the_head_is_fenced(
        self, store: Store, wrong: dict[str, Any], status: Status | None
    ) -> None:
        change = started(store, "r").change(status=status)
        for name, value in wrong.items():
            setattr(change, name, value)
        if "after" in wrong:
            change.rows = [msgspec.structs.replace(row, seq=change.after + 1) for row in change.rows]
        before = everything(store)
        assert commit(store, change).verdict is Verdict.FENCED
        assert everything(store) == before

    def test_the_same_write_twice_is_fenced(self, store: Store) -> None:
        change = started(store, "r").change()
        assert [answer.verdict for answer in store.commit([change, change])] == [Verdict.DONE, Verdict.FENCED]
        assert commit(store, change).verdict is Verdict.FENCED
        assert get(store, "r").seq == 2

    def test_rows_with_a_gap_are_refused(self, store: Store) -> None:
        writer = started(store, "r")
        good = writer.change(record("r"), record("r"), record("r"))
        before = everything(store)
        for rows in (
            [good.rows[1]],
            [good.rows[0], good.rows[2]],
            good.rows[1:],
            [good.rows[1], good.rows[0]],
            [*good.rows, good.rows[2]],
        ):
            assert commit(store, msgspec.structs.replace(good, rows=rows)).verdict is Verdict.FENCED
        assert everything(store) == before

    def test_a_refused_change_leaves_the_others_committed(self, store: Store) -> None:
        a, b, c = (started(store, name) for name in "abc")
        stale = b.change(epoch=9)
        answers = store.commit([a.change(), stale, c.change(), Create(queued("a")), Send(Signal("nobody", "x"))])
        assert [answer.verdict for answer in answers] == [
            Verdict.DONE,
            Verdict.FENCED,
            Verdict.DONE,
            Verdict.EXISTS,
            Verdict.NOT_FOUND,
        ]
        assert [get(store, name).seq for name in "abc"] == [2, 1, 2]

    def test_changes_of_one_run_in_one_batch_build_on_each_other(self, store: Store) -> None:
        writer = started(store, "r")
        first = writer.change()
        writer.seq, writer.checksum = 2, first.checksum
        second = writer.change(status=Status.COMPLETED, release=True)
        writer.seq = 3
        third = writer.change()
        verdicts = [answer.verdict for answer in store.commit([first, second, third])]
        assert verdicts == [Verdict.DONE, Verdict.DONE, Verdict.FENCED]
        assert list(unseal(store.list_checkpoints("r"), "r", previous=""))

    def test_an_empty_batch_is_answered(self, store: Store) -> None:
        assert store.commit([]) == []

    def test_a_commit_that_may_not_wait_is_made_when_nobody_writes(self, store: Store) -> None:
        (answer,) = store.commit([started(store, "r").change()], wait=False)
        assert answer.verdict is Verdict.DONE

    # -- status ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("new", list(Status))
    @pytest.mark.parametrize("old", [Status.RUNNING, Status.RECOVERING])
    def test_only_the_moves_of_the_table_are_made(
        self, store: Store, clock: SteppedClock, old: Status, new: Status
    ) -> None:
        writer = started(store, "r")
        if old is Status.RECOVERING:
            self.kill(store, clock, "w1")
            (claim,) = self.claim(store, "w2").claims
            writer = Holder(store, claim.run)
        assert get(store, "r").status is old
        before = everything(store)
        answer = writer.write(status=new, release=not new.active)
        if may_move(old, new):
            assert answer.verdict is Verdict.DONE
            assert get(store, "r").status is new
        else:
            assert answer.verdict is Verdict.ILLEGAL
            assert everything(store) == before

    @pytest.mark.parametrize("held", [Status.WAITING, Status.PAUSED, Status.QUEUED])
    def test_a_run_that_is_held_without_running_must_run_before_it_ends(
        self, store: Store, clock: SteppedClock, held: Status
    ) -> None:
        writer = started(store, "r")
        assert writer.write(status=held).verdict is Verdict.DONE
        before = everything(store)
        for new in Status:
            if (held, new) not in MOVES and new is not held:
                assert writer.write(status=new, release=True).verdict is Verdict.ILLEGAL
        assert everything(store) == before
        self.kill(store, clock, "w1")
        (claim,) = self.claim(store, "w2").claims
        # Its owner died, but not while executing it.
        assert (claim.taken_from, claim.run.status, claim.run.recoveries) == ("w1", Status.RUNNING, 0)

    def test_a_run_cannot_be_let_go_while_it_is_said_to_run(self, store: Store) -> None:
        writer = started(store, "r")
        assert writer.write(release=True).verdict is Verdict.ILLEGAL
        assert writer.write(release=True, status=Status.RUNNING).verdict is Verdict.ILLEGAL
        assert get(store, "r").worker == "w1"

    @pytest.mark.parametrize("end", ENDINGS)
    @pytest.mark.parametrize("release", [True, False])
    def test_an_ended_run_has_no_owner_and_no_wake_up(self, store: Store, end: Status, release: bool) -> None:
        writer = started(store, "r")
        assert writer.write(status=end, release=release, due_at=at(1), wakes=("x",)).verdict is Verdict.DONE
        run = get(store, "r")
        assert (run.status, run.worker, run.due_at, run.wakes) == (end, None, None, ())
        assert writer.write().verdict is Verdict.FENCED
        assert ids(self.claim(store, "w2")) == []

    # -- what a reader is shown of the end ---------------------------------------------------------------------------

    def test_a_completed_run_shows_its_output(self, store: Store) -> None:
        writer = started(store, "r")
        assert get(store, "r").output is None
        final = record("r", Kind.RUN_FINISHED, b'{"answer":42}', data={"continued_as": "r2"})
        writer.write(record("r"), final, status=Status.COMPLETED, release=True)
        run = get(store, "r")
        assert (run.output, run.error, run.continued_as) == (b'{"answer":42}', None, "r2")

    def test_a_large_output_is_unpacked(self, store: Store) -> None:
        large = b'"' + b"y" * 300_000 + b'"'
        started(store, "r").write(record("r", Kind.RUN_FINISHED, large), status=Status.COMPLETED, release=True)
        assert get(store, "r").output == large

    @pytest.mark.parametrize("end", [Status.FAILED, Status.CANCELLED, Status.SET_ASIDE])
    def test_another_end_shows_its_error(self, store: Store, end: Status) -> None:
        kind = Kind.ERROR if end is Status.SET_ASIDE else Kind.RUN_FINISHED
        error = StoredError("ValueError", "no", "permanent", caused_by=(1,))
        outcome = "cancelled" if end is Status.CANCELLED else "failure"
        final = record("r", kind, None, outcome=outcome, error=error)
        started(store, "r").write(final, status=end, release=True)
        run = get(store, "r")
        assert run.output is None
        assert run.error == ErrorInfo("ValueError", "no", "permanent", caused_by=(1,))

    @pytest.mark.parametrize("end", [Status.COMPLETED, Status.FAILED, Status.CANCELLED])
    @pytest.mark.parametrize("outcome", ["success", "failure", "cancelled"])
    def test_an_end_that_is_not_what_its_record_says_is_damage(self, store: Store, end: Status, outcome: str) -> None:
        said = {"success": Status.COMPLETED, "failure": Status.FAILED, "cancelled": Status.CANCELLED}[outcome]
        started(store, "r").write(record("r", Kind.RUN_FINISHED, outcome=outcome), status=end, release=True)
        if end is said:
            assert get(store, "r").status is end
        else:
            with pytest.raises(CheckpointCorrupt, match="'r'"):
                store.get_run("r")
        assert len(store.list_runs(RunQuery()).runs) == 1

    def test_the_newest_end_counts_and_a_run_that_goes_on_has_none(self, store: Store) -> None:
        def failure(message: str) -> Record:
            return record("r", Kind.RUN_FINISHED, None, outcome="failure", error=StoredError("E", message))

        started(store, "r").write(failure("first"), status=Status.FAILED, release=True)
        claim = self.claim_one(store, "r")
        assert claim is not None
        writer = Holder(store, claim.run)
        assert get(store, "r").error is None
        writer.write(record("r"), failure("second"), status=Status.FAILED, release=True)
        error = get(store, "r").error
        assert error is not None
        assert error.message == "second"

    def test_progress_comes_from_the_heartbeat_of_the_owner(self, store: Store) -> None:
        started(store, "r")
        started(store, "q", "w2")
        assert get(store, "r").progress is None
        store.renew_leases(WorkerInfo("w1", progress={"r": b'{"done":3}', "q": b"9"}))
        assert get(store, "r").progress == b'{"done":3}'
        assert get(store, "q").progress is None
        store.renew_leases(WorkerInfo("w1"))
        assert get(store, "r").progress is None

    # -- letting go and waking ---------------------------------------------------------------------------------------

    def test_a_parked_run_holds_its_wake_ups(self, store: Store) -> None:
        parked(store, "r", due_at=at(60), wakes=("a", "b"))
        run = get(store, "r")
        assert (run.status, run.worker, run.due_at, run.wakes) == (Status.WAITING, None, at(60), ("a", "b"))

    def test_a_run_handed_back_is_due_at_once(self, store: Store, clock: SteppedClock) -> None:
        clock.advance(3)
        started(store, "r").write(status=Status.QUEUED, release=True)
        assert get(store, "r").due_at == at(3)
        (claim,) = self.claim(store, "w2").claims
        assert (claim.run.status, claim.run.epoch, claim.run.recoveries, claim.taken_from) == (
            Status.RUNNING,
            2,
            0,
            None,
        )

    def test_a_parked_run_is_claimed_when_its_time_has_come(self, store: Store, clock: SteppedClock) -> None:
        parked(store, "r", due_at=at(60), wakes=("a",))
        assert ids(self.claim(store)) == []
        clock.advance(60)
        (claim,) = self.claim(store).claims
        assert (claim.run.status, claim.run.due_at, claim.run.wakes) == (Status.RUNNING, None, ())
        assert claim.run == get(store, "r")

    def test_only_a_signal_that_it_waits_for_wakes_a_parked_run(self, store: Store, clock: SteppedClock) -> None:
        parked(store, "r", due_at=at(1000), wakes=("approved", "ks:cancel"))
        for name in ("other", "approve", "approved "):
            assert commit(store, Send(Signal("r", name))).verdict is Verdict.DONE
        clock.advance(5)
        assert get(store, "r").due_at == at(1000)
        assert ids(self.claim(store)) == []
        commit(store, Send(Signal("r", "approved")))
        assert get(store, "r").due_at == at(5)
        assert ids(self.claim(store)) == ["r"]

    def test_a_signal_wakes_a_run_that_waits_for_no_time(self, store: Store) -> None:
        parked(store, "r", wakes=("go",))
        assert get(store, "r").due_at is None
        commit(store, Send(Signal("r", "go")))
        assert ids(self.claim(store)) == ["r"]

    def test_a_signal_never_makes_a_run_due_later(self, store: Store, clock: SteppedClock) -> None:
        parked(store, "r", due_at=at(1), wakes=("go",))
        clock.advance(10)
        commit(store, Send(Signal("r", "go")))
        assert get(store, "r").due_at == at(1)

    def test_a_signal_to_a_leased_run_changes_nothing_but_the_count(self, store: Store) -> None:
        started(store, "r")
        before = get(store, "r")
        commit(store, Send(Signal("r", "go")))
        assert get(store, "r") == replace(before, signals=1)

    def test_a_paused_run_wakes_by_its_signal(self, store: Store) -> None:
        started(store, "r").write(status=Status.PAUSED, release=True, wakes=("ks:resume",))
        assert ids(self.claim(store)) == []
        commit(store, Send(Signal("r", "ks:resume")))
        (claim,) = self.claim(store).claims
        assert claim.run.status is Status.RUNNING

    @pytest.mark.parametrize("new", [Status.WAITING, Status.COMPLETED])
    def test_parking_and_finishing_are_refused_when_signals_were_missed(self, store: Store, new: Status) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "go")))
        before = everything(store)
        assert writer.write(status=new, release=True, signals_seen=0).verdict is Verdict.MISSED
        assert everything(store) == before
        assert writer.write(status=new, release=True, signals_seen=1).verdict is Verdict.DONE

    def test_a_signal_in_the_same_batch_is_missed_or_wakes(self, store: Store) -> None:
        # Whichever comes first, the run is not left asleep with a signal that it waits for.
        a, b = started(store, "a"), started(store, "b")
        park = {"status": Status.WAITING, "release": True, "signals_seen": 0, "wakes": ("go",)}
        answers = store.commit([Send(Signal("a", "go")), a.change(**park), b.change(**park), Send(Signal("b", "go"))])
        assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.MISSED, Verdict.DONE, Verdict.DONE]
        assert ids(self.claim(store, "w2")) == ["b"]

    def test_a_run_that_signals_itself_while_it_parks_wakes(self, store: Store) -> None:
        writer = started(store, "r")
        answer = writer.write(
            status=Status.WAITING, release=True, signals_seen=0, wakes=("go",), sends=[Send(Signal("r", "go"))]
        )
        assert answer.verdict is Verdict.DONE
        assert ids(self.claim(store)) == ["r"]
        assert get(store, "r").signals == 1

    # -- signals -----------------------------------------------------------------------------------------------------

    def test_signals_are_numbered_without_gaps_for_each_run(self, store: Store, clock: SteppedClock) -> None:
        started(store, "a")
        commit(store, Create(queued("b")))
        sent = [Signal(run, f"n{n}", b'{"n":%d}' % n, sender="me") for n in range(3) for run in ("a", "b")]
        clock.advance(2)
        answers = store.commit([Send(signal) for signal in sent])
        assert [answer.seq for answer in answers] == [1, 1, 2, 2, 3, 3]
        for run in ("a", "b"):
            mine = [signal for signal in sent if signal.run == run]
            expected = [seal_signal(signal, n, at(2)) for n, signal in enumerate(mine, 1)]
            assert store.list_signals(run) == expected
            assert get(store, run).signals == 3

    def test_a_signal_keeps_its_own_time(self, store: Store) -> None:
        started(store, "r")
        commit(store, Send(Signal("r", "go", sent_at=at(1.5))))
        assert store.list_signals("r")[0].sent_at == at(1.5)

    def test_two_signals_with_one_id_are_one(self, store: Store) -> None:
        started(store, "r")
        started(store, "q")
        commit(store, Send(Signal("r", "x")))
        assert commit(store, Send(Signal("r", "go", b"1", id="i"))).seq == 2
        again = commit(store, Send(Signal("r", "stop", b"2", id="i")))
        assert (again.verdict, again.seq) == (Verdict.EXISTS, 2)
        assert commit(store, Send(Signal("q", "go", b"1", id="i"))).verdict is Verdict.DONE
        assert [signal.payload for signal in store.list_signals("r")] == [b"true", b"1"]
        assert get(store, "r").signals == 2

    def test_signals_without_an_id_are_all_kept(self, store: Store) -> None:
        started(store, "r")
        answers = store.commit([Send(Signal("r", "go"))] * 3)
        assert [answer.seq for answer in answers] == [1, 2, 3]

    def test_a_repeated_signal_does_not_wake(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "go", id="i")))
        writer.write(status=Status.WAITING, release=True, signals_seen=1, wakes=("go",))
        commit(store, Send(Signal("r", "go", id="i")))
        assert ids(self.claim(store)) == []

    def test_a_signal_to_nobody_is_not_found(self, store: Store) -> None:
        answer = commit(store, Send(Signal("nobody", "go")))
        assert (answer.verdict, answer.about) == (Verdict.NOT_FOUND, "nobody")
        assert store.list_signals("nobody") == []

    @pytest.mark.parametrize("end", ENDINGS)
    def test_a_finished_run_takes_no_signal(self, store: Store, end: Status) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "early", id="i")))
        writer.write(status=end, release=True)
        answer = commit(store, Send(Signal("r", "late")))
        assert answer.verdict is (Verdict.FINISHED if end.finished else Verdict.DONE)
        repeated = commit(store, Send(Signal("r", "early", id="i")))
        assert (repeated.verdict, repeated.seq) == (Verdict.EXISTS, 1)

    def test_signals_are_paged(self, store: Store) -> None:
        started(store, "r")
        store.commit([Send(Signal("r", f"n{n}")) for n in range(1, 8)])
        assert [signal.seq for signal in store.list_signals("r", after=2, limit=3)] == [3, 4, 5]
        assert store.list_signals("r", after=7) == []

    # -- children and messages in the same commit ----------------------------------------------------------------------

    def test_children_and_messages_are_written_with_the_step(self, store: Store) -> None:
        parent, _ = started(store, "parent"), started(store, "other", "w2")
        answer = parent.write(
            creates=[Create(queued("child", parent="parent", parent_key="k"))],
            sends=[Send(Signal("other", "hello", id="k")), Send(Signal("child", "welcome"))],
        )
        assert answer.verdict is Verdict.DONE
        assert get(store, "child").parent == "parent"
        assert [signal.name for signal in store.list_signals("other")] == ["hello"]
        assert [signal.name for signal in store.list_signals("child")] == ["welcome"]

    def test_a_child_may_be_leased_at_birth(self, store: Store) -> None:
        parent = started(store, "parent")
        first, checksum = seal(record("child", Kind.RUN_STARTED), 1, "")
        child = queued("child", status=Status.RUNNING, worker="w1", epoch=1, seq=1, checksum=checksum, due_at=None)
        assert parent.write(creates=[Create(child, [first])]).verdict is Verdict.DONE
        assert Holder(store, child).write().verdict is Verdict.DONE
        assert [row.seq for row in store.list_checkpoints("child")] == [1, 2]

    def test_a_child_that_is_there_already_is_fine(self, store: Store) -> None:
        parent = started(store, "parent")
        child = Create(queued("child", parent="parent", input=b"1"))
        assert parent.write(creates=[child]).verdict is Verdict.DONE
        self.claim(store, "w2")
        before = get(store, "child")
        assert parent.write(creates=[child]).verdict is Verdict.DONE
        assert get(store, "child") == before

    @pytest.mark.parametrize("other", [{"workflow": "other"}, {"input": b"2"}, {"parent": None}])
    def test_another_run_under_the_childs_id_is_a_conflict(self, store: Store, other: dict[str, Any]) -> None:
        parent = started(store, "parent")
        child = queued("child", parent="parent", input=b"1")
        commit(store, Create(replace(child, **other)))
        before = everything(store)
        answer = parent.write(creates=[Create(queued("first", parent="parent")), Create(child)])
        assert (answer.verdict, answer.about) == (Verdict.CONFLICT, "child")
        assert everything(store) == before

    def test_a_message_that_cannot_be_delivered_refuses_the_whole_change(self, store: Store) -> None:
        parent = started(store, "parent")
        started(store, "done").write(status=Status.COMPLETED, release=True)
        started(store, "open")
        before = everything(store)
        for target, verdict in (("nobody", Verdict.NOT_FOUND), ("done", Verdict.FINISHED)):
            answer = parent.write(
                creates=[Create(queued("child", parent="parent"))],
                sends=[Send(Signal("open", "x")), Send(Signal(target, "x"))],
                status=Status.COMPLETED,
                release=True,
            )
            assert (answer.verdict, answer.about) == (verdict, target)
            assert everything(store) == before
        assert commit(store, Send(Signal("open", "y"))).seq == 1

    def test_a_refused_change_does_not_spoil_its_batch(self, store: Store) -> None:
        a, b, c = (started(store, name) for name in "abc")
        child = Create(queued("child", parent="b"))
        answers = store.commit([a.change(), b.change(creates=[child], sends=[Send(Signal("nobody", "x"))]), c.change()])
        assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.NOT_FOUND, Verdict.DONE]
        assert store.get_run("child") is None
        assert [len(store.list_checkpoints(name)) for name in "abc"] == [2, 1, 2]
        assert b.write().verdict is Verdict.DONE

    def test_a_refused_change_leaves_nothing_of_a_child_that_was_leased_at_birth(self, store: Store) -> None:
        parent = started(store, "parent")
        first, checksum = seal(record("child", Kind.RUN_STARTED), 1, "")
        child = queued("child", status=Status.RUNNING, worker="w1", epoch=1, seq=1, checksum=checksum, due_at=None)
        refused = parent.write(creates=[Create(child, [first])], sends=[Send(Signal("nobody", "x"))])
        assert refused.verdict is Verdict.NOT_FOUND
        assert store.list_checkpoints("child") == []
        assert commit(store, Create(child, [first])).verdict is Verdict.DONE
        assert store.list_checkpoints("child") == [first]

    def test_a_repeated_message_is_fine(self, store: Store) -> None:
        a, _ = started(store, "a"), started(store, "b")
        for _ in range(2):
            assert a.write(sends=[Send(Signal("b", "x", id="i"))]).verdict is Verdict.DONE
        assert a.write(sends=[Send(Signal("b", "x", id="j"))] * 2).verdict is Verdict.DONE
        assert [signal.id for signal in store.list_signals("b")] == ["i", "j"]

    def test_a_message_from_a_step_wakes_a_parked_run(self, store: Store) -> None:
        parked(store, "parent", wakes=("ks:child:k",))
        child = started(store, "child")
        child.write(status=Status.COMPLETED, release=True, sends=[Send(Signal("parent", "ks:child:k", id="k"))])
        assert ids(self.claim(store)) == ["parent"]

    def test_a_fenced_change_writes_no_children_and_no_messages(self, store: Store) -> None:
        a, _ = started(store, "a"), started(store, "b")
        before = everything(store)
        a.epoch = 7
        assert a.write(creates=[Create(queued("c"))], sends=[Send(Signal("b", "x"))]).verdict is Verdict.FENCED
        assert everything(store) == before

    # -- transactional steps -----------------------------------------------------------------------------------------

    def test_a_function_within_the_commit_runs_only_where_the_store_can(self, store: Store) -> None:
        writer = started(store, "r")
        change = writer.change(rows=[], checksum="")
        rows, checksum = writer.sealed([record("r")])

        def within(_tx: Any) -> None:
            change.rows, change.checksum = rows, checksum

        change.within = within
        answer = commit(store, change)
        if store.transactional:
            assert answer.verdict is Verdict.DONE
            assert store.list_checkpoints("r", after=1) == rows
        else:
            assert answer.verdict is Verdict.FAILED
            assert answer.error is not None
            assert get(store, "r").seq == 1

    def test_a_function_that_fails_refuses_its_change_only(self, store: Store) -> None:
        a, b = started(store, "a"), started(store, "b")
        error = RuntimeError("no")

        def within(_tx: Any) -> None:
            raise error

        refused, done = store.commit([a.change(within=within), b.change()])
        assert (refused.verdict, done.verdict) == (Verdict.FAILED, Verdict.DONE)
        assert refused.error is error or not store.transactional
        assert get(store, "a").seq == 1

    def test_a_function_is_not_called_without_the_lease(self, store: Store) -> None:
        called: list[Any] = []
        change = started(store, "r").change(within=called.append, epoch=5)
        assert commit(store, change).verdict is Verdict.FENCED
        assert called == []

    # -- claiming ----------------------------------------------------------------------------------------------------

    def test_a_claim_gives_the_whole_run_and_its_lease(self, store: Store) -> None:
        commit(store, Create(queued("r", input=b"[1,2]", tags={"a": "b"}, traceparent="t")))
        (claim,) = self.claim(store).claims
        assert (claim.lease.run, claim.lease.worker, claim.lease.epoch) == ("r", "w1", 1)
        assert (claim.run.status, claim.run.worker, claim.run.epoch) == (Status.RUNNING, "w1", 1)
        assert (claim.run.input, claim.run.tags, claim.run.traceparent) == (b"[1,2]", {"a": "b"}, "t")
        assert (claim.taken_from, claim.run.recoveries) == (None, 0)
        assert claim.run == get(store, "r")

    def test_a_claim_tells_what_the_run_was_before_and_since_when(self, store: Store, clock: SteppedClock) -> None:
        commit(store, Create(queued("r")))
        clock.advance(1)
        (first,) = self.claim(store, "w1").claims
        assert (first.before, first.since, first.run.updated_at) == (Status.QUEUED, at(0), at(1))
        clock.advance(1)
        Holder(store, first.run).write(rows=[], checksum="", status=Status.WAITING, release=True, due_at=at(0))
        clock.advance(1)
        (second,) = self.claim(store, "w1").claims
        assert (second.before, second.since, second.taken_from) == (Status.WAITING, at(2), None)
        self.kill(store, clock, "w1")
        (third,) = self.claim(store, "w2").claims
        assert (third.before, third.since, third.taken_from) == (Status.RUNNING, at(3), "w1")

    def test_a_run_is_claimed_once(self, store: Store) -> None:
        commit(store, Create(queued("r")))
        assert ids(self.claim(store, "w1")) == ["r"]
        assert ids(self.claim(store, "w2")) == []
        assert ids(self.claim(store, "w1")) == []

    def test_the_epoch_grows_with_every_claim(self, store: Store) -> None:
        commit(store, Create(queued("r")))
        for epoch in (1, 2, 3):
            (claim,) = self.claim(store).claims
            assert claim.lease.epoch == epoch
            assert Holder(store, claim.run).write(status=Status.QUEUED, release=True).verdict is Verdict.DONE

    def test_an_old_epoch_of_the_same_worker_is_fenced(self, store: Store) -> None:
        writer = started(store, "r")
        late = writer.change()
        writer.write(rows=[], checksum="", status=Status.QUEUED, release=True)
        assert ids(self.claim(store, "w1")) == ["r"]
        assert commit(store, late).verdict is Verdict.FENCED

    def test_the_most_urgent_come_first_then_the_oldest(self, store: Store, clock: SteppedClock) -> None:
        runs = [("late", 0, 3), ("urgent-late", 5, 2), ("early", 0, 1), ("low", -1, 0), ("urgent-early", 5, 1)]
        store.commit([Create(queued(name, priority=priority, due_at=at(due))) for name, priority, due in runs])
        clock.advance(10)
        assert ids(self.claim(store, limit=3)) == ["urgent-early", "urgent-late", "early"]
        assert ids(self.claim(store, limit=3)) == ["late", "low"]

    def test_many_priorities_are_all_served(self, store: Store, clock: SteppedClock) -> None:
        later = {1: at(45), **{n: at(50) for n in range(3, 30, 2)}}
        store.commit([Create(queued(f"r{n:02}", priority=n, due_at=later.get(n, START))) for n in range(30)])
        assert ids(self.claim(store, limit=40)) == [f"r{n:02}" for n in range(28, -1, -2)]
        clock.advance(44)
        claims = self.claim(store, limit=40)
        assert (ids(claims), claims.next_due_at) == ([], at(45))
        clock.advance(6)
        assert ids(self.claim(store, limit=40)) == [f"r{n:02}" for n in range(29, -1, -2)]

    def test_order_holds_across_workflows(self, store: Store) -> None:
        for n, (workflow, priority) in enumerate([("a", 0), ("b", 1), ("a", 1), ("b", 0)]):
            commit(store, Create(queued(f"r{n}", workflow=workflow, priority=priority, due_at=at(-n))))
        assert ids(self.claim(store, workflows=["a", "b"])) == ["r2", "r1", "r3", "r0"]

    def test_no_more_than_asked_for_are_claimed(self, store: Store) -> None:
        store.commit([Create(queued(f"r{n}")) for n in range(5)])
        assert len(self.claim(store, limit=0).claims) == 0
        assert len(self.claim(store, limit=2).claims) == 2
        assert len(self.claim(store, limit=9).claims) == 3

    def test_only_known_workflows_are_claimed(self, store: Store) -> None:
        store.commit([Create(queued("a", workflow="a")), Create(queued("b", workflow="b"))])
        assert ids(self.claim(store, workflows=[])) == []
        assert ids(self.claim(store, workflows=["c"])) == []
        assert ids(self.claim(store, workflows=["b"])) == ["b"]

    def test_foreign_runs_ahead_do_not_hide_known_ones(self, store: Store, clock: SteppedClock) -> None:
        store.commit([Create(queued(f"foreign{n}", workflow="a", priority=9, due_at=at(-9))) for n in range(20)])
        commit(store, Create(queued("mine", workflow="b")))
        assert ids(self.claim(store, limit=1, workflows=["b", "c"])) == ["mine"]

    def test_a_pinned_workflow_is_claimed_in_its_version_only(self, store: Store, clock: SteppedClock) -> None:
        for version in ("1", "2"):
            commit(store, Create(queued(f"a{version}", workflow="a", version=version)))
            commit(store, Create(queued(f"b{version}", workflow="b", version=version)))
            started(store, f"c{version}", workflow="a", version=version)
        later = queued("later", workflow="a", version="1", due_at=at(1), created_at=START)
        commit(store, Create(later))
        claims = self.claim(store, "w2", workflows=["a", "b"], versions={"a": "2"})
        assert sorted(ids(claims)) == ["a2", "b1", "b2"]
        assert claims.next_due_at is None
        self.kill(store, clock, "w1")
        assert ids(self.claim(store, "w2", workflows=["a", "b"], versions={"a": "2"})) == ["c2"]
        assert ids(self.claim(store, "w2", workflows=["a"])) == ["c1", "a1", "later"]

    def test_the_next_time_is_told(self, store: Store, clock: SteppedClock) -> None:
        assert self.claim(store).next_due_at is None
        commit(store, Create(queued("soon", due_at=at(7.5))))
        commit(store, Create(queued("urgent", due_at=at(9), priority=3)))
        commit(store, Create(queued("sooner", due_at=at(5), workflow="foreign")))
        commit(store, Create(queued("now")))
        claims = self.claim(store)
        assert (ids(claims), claims.next_due_at) == (["now"], at(7.5))
        assert self.claim(store).next_due_at == at(7.5)
        clock.advance(8)
        assert self.claim(store).next_due_at == at(9)

    def test_ended_runs_are_never_claimed_by_themselves(self, store: Store, clock: SteppedClock) -> None:
        for end in ENDINGS:
            started(store, str(end)).write(status=end, release=True, due_at=at(0))
        clock.advance(store.lease_seconds * 3)
        assert ids(self.claim(store, "w2")) == []

    @pytest.mark.parametrize("status", RELEASED)
    def test_a_person_may_claim_a_free_run_by_name(self, store: Store, status: Status) -> None:
        started(store, "r").write(status=status, release=True, due_at=at(500))
        assert self.claim_one(store, "r", "w2", *(set(Status) - {status})) is None
        claim = self.claim_one(store, "r", "w2", status)
        if status is Status.CANCELLED:
            assert claim is None
            assert get(store, "r").status is Status.CANCELLED
            return
        assert claim is not None
        assert (claim.run.status, claim.run.worker, claim.run.epoch) == (Status.RUNNING, "w2", 2)
        assert (claim.taken_from, claim.run.recoveries, claim.run.due_at) == (None, 0, None)
        assert Holder(store, claim.run).write(status=Status.QUEUED, release=True).verdict is Verdict.DONE

    def test_a_leased_run_is_not_claimed_by_name(self, store: Store) -> None:
        started(store, "r")
        assert self.claim_one(store, "r", "w2") is None
        assert self.claim_one(store, "r", "w1") is None
        assert self.claim_one(store, "nobody", "w2") is None

    # -- taking over from the dead -----------------------------------------------------------------------------------

    def test_the_run_of_a_dead_worker_is_taken_over(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        late = writer.change()
        self.kill(store, clock, "w1")
        (claim,) = self.claim(store, "w2").claims
        assert (claim.taken_from, claim.lease.epoch) == ("w1", 2)
        assert (claim.run.status, claim.run.worker, claim.run.recoveries) == (Status.RECOVERING, "w2", 1)
        assert commit(store, late).verdict is Verdict.FENCED
        assert store.renew_leases(WorkerInfo("w1")) is False

    def test_the_run_of_a_living_worker_is_left_alone(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        for _ in range(4):
            clock.advance(store.lease_seconds - 1)
            assert store.renew_leases(WorkerInfo("w1"))
            assert store.renew_leases(WorkerInfo("w2"))
            assert ids(self.claim(store, "w2")) == []
        assert writer.write().verdict is Verdict.DONE

    def test_a_lease_lasts_as_long_as_it_says(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        clock.advance(store.lease_seconds - 0.001)
        assert ids(self.claim(store, "w2")) == []
        clock.advance(0.002)
        assert ids(self.claim(store, "w2")) == ["r"]

    def test_a_worker_that_was_late_but_not_given_up_may_go_on(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        clock.advance(store.lease_seconds * 2)
        assert store.renew_leases(WorkerInfo("w1"))
        assert store.renew_leases(WorkerInfo("w2"))
        assert ids(self.claim(store, "w2")) == []
        assert writer.write().verdict is Verdict.DONE

    def test_a_worker_does_not_take_over_from_itself(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        clock.advance(store.lease_seconds * 2)
        assert ids(self.claim(store, "w1")) == []

    def test_a_reboot_ends_every_lease(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        clock.boot_id = "boot-2"
        assert store.renew_leases(WorkerInfo("w3"))
        assert ids(self.claim(store, "w3")) == ["r"]

    def test_the_wall_clock_ends_no_lease(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        real = clock.now

        def tomorrow() -> float:
            return real() + 86_400

        clock.now = tomorrow  # type: ignore[method-assign]
        assert ids(self.claim(store, "w2")) == []

    def test_a_worker_given_up_for_dead_stays_so(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        self.kill(store, clock, "w1")
        self.claim(store, "w2")
        commit(store, Create(queued("new")))
        for _ in range(2):
            assert store.renew_leases(WorkerInfo("w1")) is False
            assert ids(self.claim(store, "w1")) == []

    def test_a_lease_of_nobody_is_free(self, store: Store) -> None:
        started(store, "r", "never enrolled")
        (claim,) = self.claim(store, "w2").claims
        assert claim.taken_from == "never enrolled"

    def test_a_lease_of_someone_without_a_name_is_free(self, store: Store) -> None:
        """No worker is called so: only damage makes such a lease, and nobody would ever give it back."""
        started(store, "r", "")
        assert ids(self.claim(store)) == ["r"]

    def test_crashes_without_progress_are_counted(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r", "w0")
        for count in (1, 2, 3):
            worker = f"w{count + 2}"
            store.renew_leases(WorkerInfo(worker))
            (claim,) = self.claim(store, worker).claims
            assert (claim.run.recoveries, claim.run.status) == (count, Status.RECOVERING)
            clock.advance(store.lease_seconds + 1)
        writer = Holder(store, claim.run)
        writer.write(progress=False)
        assert (get(store, "r").recoveries, get(store, "r").status) == (3, Status.RECOVERING)
        writer.write(rows=[], checksum="")
        assert (get(store, "r").recoveries, get(store, "r").status) == (3, Status.RECOVERING)
        writer.write()
        assert (get(store, "r").recoveries, get(store, "r").status) == (0, Status.RUNNING)

    def test_waking_and_handing_back_are_not_crashes(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r", "w0")
        (claim,) = self.claim(store, "w1").claims
        assert claim.run.recoveries == 1
        Holder(store, claim.run).write(rows=[], checksum="", status=Status.WAITING, release=True, due_at=at(0))
        (claim,) = self.claim(store, "w1").claims
        assert (claim.run.recoveries, claim.run.status) == (1, Status.RUNNING)
        Holder(store, claim.run).write(rows=[], checksum="", status=Status.QUEUED, release=True)
        (claim,) = self.claim(store, "w2").claims
        assert (claim.run.recoveries, claim.run.status) == (1, Status.RUNNING)
        Holder(store, claim.run).write()
        assert get(store, "r").recoveries == 0

    def test_a_person_takes_a_run_from_a_dead_owner(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        self.kill(store, clock, "w1")
        claim = self.claim_one(store, "r", "w2", Status.RUNNING)
        assert claim is not None
        assert (claim.taken_from, claim.run.status, claim.run.recoveries) == ("w1", Status.RECOVERING, 1)

    def test_the_dead_come_before_the_new(self, store: Store, clock: SteppedClock) -> None:
        started(store, "old")
        commit(store, Create(queued("new", priority=99)))
        self.kill(store, clock, "w1")
        assert ids(self.claim(store, "w2", limit=1)) == ["old"]
        assert ids(self.claim(store, "w2", limit=1)) == ["new"]

    def test_every_run_of_the_dead_is_reached_page_by_page(self, store: Store, clock: SteppedClock) -> None:
        for n in range(25):
            started(store, f"r{n:02}", f"dead{n % 2}", workflow="known" if n % 5 == 4 else "foreign")
        taken: list[str] = []
        while page := ids(self.claim(store, "w2", limit=2, workflows=["known"])):
            assert len(page) <= 2
            taken += page
        assert sorted(taken) == ["r04", "r09", "r14", "r19", "r24"]

    def test_runs_of_the_dead_wait_for_those_who_know_them(self, store: Store, clock: SteppedClock) -> None:
        started(store, "mine", workflow="a")
        started(store, "foreign", workflow="b")
        before = get(store, "foreign")
        self.kill(store, clock, "w1")
        assert ids(self.claim(store, "w2", workflows=["a"])) == ["mine"]
        assert get(store, "foreign") == before
        (claim,) = self.claim(store, "w2", workflows=["b"]).claims
        assert (claim.run.id, claim.taken_from) == ("foreign", "w1")

    # -- workers -----------------------------------------------------------------------------------------------------

    def test_workers_are_listed_as_their_heartbeats_show_them(self, store: Store, clock: SteppedClock) -> None:
        info = WorkerInfo("w1", "host", 42, workflows=("a", "b"), progress={"r": b'"half"'})
        started(store, "r")
        clock.advance(3)
        store.renew_leases(info)
        one, two = store.list_workers()
        assert one == replace(info, started_at=START, renewed_at=at(3), leases=1)
        assert (two.id, two.leases, two.alive) == ("w2", 0, True)

    def test_a_worker_says_when_it_started(self, store: Store) -> None:
        store.renew_leases(WorkerInfo("w3", started_at=at(-5)))
        assert store.list_workers()[-1].started_at == at(-5)

    def test_a_dead_worker_is_shown_so_while_it_owns_something(self, store: Store, clock: SteppedClock) -> None:
        started(store, "a", workflow="a")
        self.kill(store, clock, "w1")
        assert [(w.id, w.alive, w.leases) for w in store.list_workers()] == [("w1", False, 1), ("w2", True, 0)]
        self.claim(store, "w2", workflows=["b"])
        assert [(w.id, w.alive, w.leases) for w in store.list_workers()] == [("w1", False, 1), ("w2", True, 0)]
        self.claim(store, "w2", workflows=["a"])
        assert [(w.id, w.alive, w.leases) for w in store.list_workers()] == [("w2", True, 1)]

    def test_a_worker_that_left_is_gone(self, store: Store) -> None:
        assert store.renew_leases(WorkerInfo("w1"), leaving=True)
        assert [worker.id for worker in store.list_workers()] == ["w2"]

    def test_a_claim_enrols_the_worker(self, store: Store) -> None:
        commit(store, Create(queued("r")))
        assert ids(self.claim(store, "w9")) == ["r"]
        assert "w9" in [worker.id for worker in store.list_workers()]
        assert ids(self.claim(store, "w2")) == []

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
        assert store.list_runs(RunQuery()).runs[0] == get(store, "r6")
        assert store.list_runs(RunQuery()).unreadable == ()

    def test_a_page_that_never_was_is_refused(self, store: Store) -> None:
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

    @pytest.mark.parametrize(
        "query, expected",
        [
            (RunQuery(), "abcdefg"),
            (RunQuery(workflow="w"), "bc"),
            (RunQuery(status=frozenset({Status.RUNNING})), "cd"),
            (RunQuery(status=frozenset({Status.RUNNING, Status.COMPLETED})), "cde"),
            (RunQuery(status=frozenset({Status.QUEUED}), workflow="w"), "b"),
            (RunQuery(parent="a"), "bf"),
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
        ],
    )
    def test_runs_are_found_by_what_is_asked(self, store: Store, query: RunQuery, expected: str) -> None:
        commit(store, Create(queued("run-a", created_at=at(0))))
        commit(store, Create(queued("run-b", created_at=at(1), workflow="w", parent="a")))
        started(store, "run-c", created_at=at(2), workflow="w")
        started(store, "run-d", "w2", created_at=at(3))
        started(store, "run-e", created_at=at(4)).write(status=Status.COMPLETED, release=True, at=at(9))
        other = {"team": "x", "env": "q"}
        commit(store, Create(queued("%f", created_at=at(5), parent="a", tags=other, updated_at=at(2))))
        commit(store, Create(queued("ég", created_at=at(6), tags={**other, "env": "p"})))
        assert "".join(sorted(run.id[-1] for run in store.list_runs(query).runs)) == expected
        assert sorted(self._paged(store, replace(query, limit=1))) == list(expected)

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

    # -- removing ----------------------------------------------------------------------------------------------------

    def test_a_removed_run_leaves_nothing(self, store: Store) -> None:
        started(store, "r").write(status=Status.COMPLETED, release=True)
        parked(store, "q", wakes=("x",))
        commit(store, Send(Signal("q", "x", id="i")))
        assert store.delete_runs(["r", "q", "q", "nobody"]) == 2
        for name in ("r", "q"):
            assert (store.get_run(name), store.list_checkpoints(name), store.list_signals(name)) == (None, [], [])
        assert store.list_runs(RunQuery()).runs == ()
        assert ids(self.claim(store)) == []

    def test_a_leased_run_is_not_removed(self, store: Store, clock: SteppedClock) -> None:
        started(store, "r")
        commit(store, Create(queued("free")))
        before = get(store, "r")
        assert store.delete_runs(["r", "free"]) == 1
        assert get(store, "r") == before
        clock.advance(store.lease_seconds * 2)
        assert store.delete_runs(["r"]) == 0

    def test_with_finished_only_ended_runs_are_removed(self, store: Store) -> None:
        endings = (Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.SET_ASIDE)
        for ending in endings:
            started(store, ending.value).write(status=ending, release=True)
        commit(store, Create(queued("free")))
        parked(store, "parked", wakes=("x",))
        started(store, "leased")
        names = [*endings, "free", "parked", "leased"]
        assert store.delete_runs(names, finished=True) == 3
        assert {run.id for run in store.list_runs(RunQuery()).runs} == {"set aside", "free", "parked", "leased"}

    def test_a_run_that_goes_on_again_is_no_longer_removed_as_finished(self, store: Store) -> None:
        started(store, "r").write(status=Status.FAILED, release=True)
        claim = self.claim_one(store, "r", "w1", Status.FAILED)
        assert claim is not None
        Holder(store, claim.run).write(status=Status.QUEUED, release=True)
        assert store.delete_runs(["r"], finished=True) == 0
        assert get(store, "r").seq == 3

    def test_a_scrubbed_run_is_gone_and_the_others_are_as_they_were(self, store: Store) -> None:
        writer = started(store, "r", input=b'"a secret"')
        commit(store, Send(Signal("r", "x", b'"another"')))
        writer.write(status=Status.COMPLETED, release=True)
        started(store, "s").write()
        before = everything(store)["s"]
        assert store.delete_runs(["r"], finished=True, scrub=True) == 1
        assert everything(store) == {"s": before}

    def test_an_id_may_be_used_again_after_removal(self, store: Store) -> None:
        writer = started(store, "r")
        commit(store, Send(Signal("r", "x", id="i")))
        writer.write(status=Status.COMPLETED, release=True)
        store.delete_runs(["r"])
        started(store, "r", input=b"2")
        assert commit(store, Send(Signal("r", "x", id="i"))).seq == 1
        assert (get(store, "r").seq, get(store, "r").input) == (1, b"2")
        assert len(store.list_checkpoints("r")) == 1

    def test_many_runs_are_removed(self, store: Store) -> None:
        store.commit([Create(queued(f"r{n}")) for n in range(250)])
        assert store.delete_runs([f"r{n}" for n in range(245)]) == 245
        assert len(store.list_runs(RunQuery()).runs) == 5

    # -- moving, mending, and keys -----------------------------------------------------------------------------------

    def test_a_run_that_comes_from_elsewhere_brings_its_signals(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r", tags={"a": "b"})
        commit(store, Send(Signal("r", "x", b'{"a":1}', id="i")))
        commit(store, Send(Signal("r", "y")))
        writer.write(record("r", Kind.RUN_FINISHED, b"7"), status=Status.COMPLETED, release=True)
        before = everything(store)
        run, rows, signals = get(store, "r"), store.list_checkpoints("r"), store.list_signals("r")
        store.delete_runs(["r"])
        assert commit(store, Create(run, rows, signals)).verdict is Verdict.DONE
        assert everything(store) == before
        assert commit(store, Send(Signal("r", "x", id="i"))).verdict is Verdict.EXISTS
        assert commit(store, Send(Signal("r", "z"))).verdict is Verdict.FINISHED

    def test_signals_that_come_along_are_counted_on(self, store: Store) -> None:
        commit(store, Create(queued("a")))
        commit(store, Send(Signal("a", "x")))
        run, signals = get(store, "a"), store.list_signals("a")
        store.delete_runs(["a"])
        commit(store, Create(run, (), signals))
        assert commit(store, Send(Signal("a", "y"))).seq == 2
        assert [signal.name for signal in store.list_signals("a")] == ["x", "y"]

    def test_a_run_may_not_come_without_the_signals_that_it_counts(self, store: Store) -> None:
        with pytest.raises(ValueError, match="must bring the 2 signals"):
            commit(store, Create(queued("r", signals=2)))
        assert store.get_run("r") is None

    def test_a_signal_has_a_checksum_over_all_of_it(self, store: Store) -> None:
        commit(store, Create(queued("r")))
        for signal in (Signal("r", "x"), Signal("r", "x"), Signal("r", "x", b"2"), Signal("r", "x", id="1")):
            commit(store, Send(signal))
        sums = [signal.checksum for signal in store.list_signals("r")]
        assert len(set(sums)) == 4
        assert all(len(checksum) == 64 for checksum in sums)

    def test_a_repair_puts_a_run_in_place_of_another(self, store: Store) -> None:
        writer = started(store, "r")
        writer.write()
        commit(store, Send(Signal("r", "x")))
        writer.write(status=Status.SET_ASIDE, release=True)
        rows = store.list_checkpoints("r")[:1]
        ((_, checksum),) = unseal(rows, "r", previous="")
        run = replace(get(store, "r"), seq=1, checksum=checksum, signals=0, error=None)
        assert commit(store, Create(run, rows, over=run.epoch + 1)).verdict is Verdict.FENCED
        assert get(store, "r").seq == 3
        assert commit(store, Create(run, rows, over=run.epoch, heard=0)).verdict is Verdict.FENCED
        assert get(store, "r").seq == 3
        answer = commit(store, Create(run, rows, over=run.epoch, heard=1))
        assert (answer.verdict, answer.seq) == (Verdict.DONE, 1)
        assert get(store, "r") == run
        assert (store.list_checkpoints("r"), store.list_signals("r")) == (rows, [])

    def test_a_leased_run_is_replaced_by_nobody(self, store: Store) -> None:
        started(store, "r").write()
        before = everything(store)
        run = replace(queued("r"), seq=0)
        assert commit(store, Create(run, over=1)).verdict is Verdict.FENCED
        assert everything(store) == before

    def test_a_replacement_of_nothing_is_a_creation(self, store: Store) -> None:
        assert commit(store, Create(queued("r"), over=4)).verdict is Verdict.DONE
        assert get(store, "r").status is Status.QUEUED

    def test_a_data_key_is_kept_and_exchanged_even_under_a_lease(self, store: Store) -> None:
        writer = started(store, "r", data_key="k1:abc", input=b'"long"')
        assert get(store, "r").data_key == "k1:abc"
        assert store.list_runs(RunQuery()).runs[0].data_key == "k1:abc"
        assert commit(store, Rekey("r", "k1:other", "k2:def")).verdict is Verdict.FENCED
        assert commit(store, Rekey("nobody", "", "k2:def")).verdict is Verdict.NOT_FOUND
        assert commit(store, Rekey("r", "k1:abc", "k2:def")).verdict is Verdict.DONE
        run = get(store, "r")
        assert (run.data_key, run.input, run.epoch, run.seq) == ("k2:def", b'"long"', 1, 1)
        assert writer.write().verdict is Verdict.DONE

    def test_a_sound_store_has_no_flaws(self, store: Store) -> None:
        writer = started(store, "r")
        writer.write(record("r"), creates=[Create(queued("child"))])
        parked(store, "p", due_at=at(9), wakes=("x",))
        commit(store, Send(Signal("r", "x")))
        store.delete_runs(["child"])
        before = everything(store)
        assert store.check() == []
        assert store.check(mend=True) == []
        assert everything(store) == before

    def test_a_store_says_by_which_clock_it_judges(self, store: Store, clock: SteppedClock) -> None:
        assert abs(store.clock.now() - clock.now()) < 1
        clock.advance(100)
        assert abs(store.clock.now() - clock.now()) < 1

    # -- coming back -------------------------------------------------------------------------------------------------

    def test_everything_is_there_after_closing(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r", tags={"a": "b"})
        writer.write(record("r"), creates=[Create(queued("child"))])
        parked(store, "p", due_at=at(9), wakes=("x",))
        started(store, "done").write(record("done", Kind.RUN_FINISHED, b"7"), status=Status.COMPLETED, release=True)
        commit(store, Send(Signal("r", "x", b'{"a":1}', id="i")))
        before = everything(store)
        store.close()
        again = self.make_store(clock)
        try:
            assert everything(again) == before
            clock.advance(store.lease_seconds + 1)
            again.renew_leases(WorkerInfo("w3"))
            assert ids(self.claim(again, "w3")) == ["r", "child", "p"]
        finally:
            again.close()

    def test_a_second_store_sees_and_respects_the_first(self, store: Store, clock: SteppedClock) -> None:
        writer = started(store, "r")
        other = self.make_store(clock)
        assert get(other, "r") == get(store, "r")
        assert commit(other, Create(queued("r"))).verdict is Verdict.EXISTS
        assert ids(self.claim(other, "w5")) == []
        writer.write(status=Status.QUEUED, release=True)
        assert ids(self.claim(other, "w5")) == ["r"]
        assert writer.write().verdict is Verdict.FENCED
        other.close()

    def test_closing_twice_is_fine(self, store: Store) -> None:
        store.close()
        store.close()

    def test_instants_are_kept_to_the_microsecond(self, store: Store) -> None:
        for n, moment in enumerate([instant(1.000001), at(0.999999), datetime(2200, 12, 31, 23, 59, 59, 1, UTC)]):
            commit(store, Create(queued(f"r{n}", created_at=moment, due_at=moment, deadline_at=moment)))
            run = get(store, f"r{n}")
            assert (run.created_at, run.due_at, run.deadline_at) == (moment, moment, moment)
