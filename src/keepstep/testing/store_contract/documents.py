"""What a store must do with documents, if it has them: versions, batches, ranges of keys, owners and ends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ...errors import DefinitionError
from ...model import Status
from ...ports import Create, Document, DocumentQuery, OptionalStore, Put, Store, Verdict, Written, optional
from ...records.record import MAX_VALUE
from .ground import Ground, SteppedClock, at, commit, queued, started

#: Keys in the order of their bytes; many a database would order them by another rule.
ORDERED = ["A", "B", "a", "a b", "a-b", "a/b", "a/b/c", "ab", "b", "ä", "é", "\ue000", "\U0001f600"]


def _write(store: Any, *batches: list[Put]) -> list[Written]:
    found: list[Written] = store.write_documents(batches)
    return found


def _put(store: Any, key: str, value: bytes | None = b"1", **more: Any) -> Written:
    return _write(store, [Put("c", key, value, **more)])[0]


def _list(store: Any, collection: str = "c", **more: Any) -> list[Document]:
    found: list[Document] = store.list_documents(DocumentQuery(collection, **more))
    return found


def _keys(store: Any, **more: Any) -> list[str]:
    return [one.key for one in _list(store, **more)]


class Documenting(Ground):
    """Documents: writing, reading, removing, and the runs that own them."""

    @pytest.fixture
    def documents(self, store: Store) -> Any:
        """The store under test, if it keeps documents."""
        if optional(store, OptionalStore.write_documents) is None:
            pytest.skip(f"{type(store).__name__} has no write_documents, so it keeps no documents")
        return store

    # -- versions ------------------------------------------------------------------------------------------------------

    def test_document_gets_one_version_after_the_other(self, documents: Any, clock: SteppedClock) -> None:
        assert _put(documents, "k", b"one", writer="w", expires_at=at(100)) == Written(Verdict.DONE, (1,))
        clock.advance(5)
        assert _put(documents, "k", b"two") == Written(Verdict.DONE, (2,))
        assert _list(documents) == [Document("c", "k", 2, b"two", at(5))]
        assert _list(documents, all_versions=True) == _list(documents)

    def test_document_keeps_its_newest_versions(self, documents: Any) -> None:
        for number in range(1, 7):
            assert _put(documents, "k", b"%d" % number, keep=3).versions == (number,)
        assert [(one.version, one.value) for one in _list(documents, all_versions=True)] == [
            (4, b"4"),
            (5, b"5"),
            (6, b"6"),
        ]
        _put(documents, "k", b"7")
        assert [one.version for one in _list(documents, all_versions=True)] == [7]

    def test_document_is_written_only_over_the_expected_version(self, documents: Any) -> None:
        assert _put(documents, "k", expect=1) == Written(Verdict.CONFLICT, (0,), 0)
        assert _put(documents, "k", expect=0).versions == (1,)
        assert _put(documents, "k", b"late", expect=0) == Written(Verdict.CONFLICT, (1,), 0)
        assert _put(documents, "k", b"2", expect=1).versions == (2,)
        assert _put(documents, "k", None, expect=1) == Written(Verdict.CONFLICT, (2,), 0)
        assert [one.value for one in _list(documents)] == [b"2"]
        assert _put(documents, "k", None, expect=2) == Written(Verdict.DONE, (0,))
        assert _list(documents) == []

    def test_document_is_written_once_by_each_writer(self, documents: Any) -> None:
        assert _put(documents, "k", b"1", writer="a", keep=3).versions == (1,)
        assert _put(documents, "k", b"other", writer="a", keep=3).versions == (1,)
        assert _put(documents, "k", b"2", writer="b", keep=3, expect=1).versions == (2,)
        assert _put(documents, "k", b"other", writer="b", keep=3, expect=1) == Written(Verdict.DONE, (2,))
        assert _put(documents, "k", b"other", writer="a", keep=3).versions == (1,)
        assert [one.value for one in _list(documents, all_versions=True)] == [b"1", b"2"]

    def test_removed_document_begins_again(self, documents: Any) -> None:
        _put(documents, "k", keep=5)
        _put(documents, "k", keep=5)
        _put(documents, "k", None)
        assert _list(documents, all_versions=True) == []
        assert _put(documents, "k", expect=0).versions == (1,)

    def test_copied_document_brings_its_version_and_time(self, documents: Any) -> None:
        copied = {"keep": 5, "version": 7, "at": at(-50), "writer": "w"}
        assert _put(documents, "k", b"7", **copied).versions == (7,)
        assert _put(documents, "k", b"7", **copied) == Written(Verdict.DONE, (7,))
        assert _put(documents, "k", b"6", keep=5, version=6, at=at(-60)).verdict is Verdict.CONFLICT
        assert _put(documents, "k", b"8", keep=5).versions == (8,)
        assert [(one.version, one.at) for one in _list(documents, all_versions=True)] == [(7, at(-50)), (8, at(0))]

    # -- batches -------------------------------------------------------------------------------------------------------

    def test_batch_of_documents_is_written_as_a_whole_or_not_at_all(self, documents: Any) -> None:
        _put(documents, "there")
        batch = [Put("c", "new", b"1"), Put("other", "new", b"1"), Put("c", "there", b"2", expect=0)]
        good = [Put("other", "a", b"1", keep=2), Put("c", "there", None)]
        refused, done = _write(documents, batch, good)
        assert refused == Written(Verdict.CONFLICT, (0, 0, 1), 2)
        assert done == Written(Verdict.DONE, (1, 0))
        assert (_keys(documents), [one.key for one in _list(documents, "other")]) == ([], ["a"])

    def test_later_batch_of_documents_sees_the_earlier_one(self, documents: Any) -> None:
        answers = _write(
            documents,
            [Put("c", "k", b"1", expect=0), Put("c", "k", b"2", expect=1, keep=2)],
            [Put("c", "k", b"3", expect=0)],
            [Put("c", "k", None, expect=2), Put("c", "k", b"4", expect=0)],
            [Put("c", "k", b"5", writer="w", keep=9), Put("c", "k", b"6", writer="w", keep=9)],
        )
        assert [one.verdict.value for one in answers] == ["done", "conflict", "done", "done"]
        assert [one.versions for one in answers] == [(1, 2), (2,), (0, 1), (2, 2)]
        assert [one.value for one in _list(documents, all_versions=True)] == [b"4", b"5"]

    def test_no_documents_are_no_work(self, documents: Any) -> None:
        assert _write(documents) == []
        assert _write(documents, []) == [Written(Verdict.DONE, ())]
        assert (_list(documents), _remove(documents, "c")) == ([], 0)

    # -- reading -------------------------------------------------------------------------------------------------------

    def test_documents_are_in_the_order_of_their_bytes(self, documents: Any) -> None:
        _write(documents, [Put("c", key, key.encode()) for key in reversed(ORDERED)], [Put("d", "a", b"")])
        assert _keys(documents) == ORDERED
        assert _keys(documents, reverse=True) == ORDERED[::-1]
        assert [one.value.decode() for one in _list(documents)] == ORDERED

    @pytest.mark.parametrize("reverse", [False, True])
    def test_documents_are_found_by_prefix_and_range(self, documents: Any, reverse: bool) -> None:
        _write(documents, [Put("c", key, b"1") for key in ORDERED])
        for query in (
            {"prefix": "a"},
            {"prefix": "a", "after": "a b"},
            {"prefix": "a", "after": "A"},
            {"prefix": "a", "after": "a/b", "before": "ab"},
            {"prefix": "a/", "before": "b"},
            {"after": "b"},
            {"before": "a b"},
            {"prefix": "\U0001f600"},
            {"prefix": "\ud7ff"},
            {"prefix": "none"},
            {"after": "b", "before": "a"},
        ):
            low, high, prefix = query.get("after", ""), query.get("before", ""), query.get("prefix", "")
            wanted = [key for key in ORDERED if key > low and (not high or key < high) and key.startswith(prefix)]
            assert _keys(documents, **query, reverse=reverse) == wanted[:: -1 if reverse else 1], query
            assert _keys(documents, **query, reverse=reverse, limit=2) == wanted[:: -1 if reverse else 1][:2], query

    def test_documents_are_found_by_key(self, documents: Any) -> None:
        _write(documents, [Put("c", key, key.encode(), keep=2) for key in ("a", "b", "c", "a")])
        assert [(one.key, one.version) for one in _list(documents, keys=("a",))] == [("a", 2)]
        assert [one.key for one in _list(documents, keys=("c", "no", "a"))] == ["a", "c"]
        assert [one.version for one in _list(documents, keys=("a",), all_versions=True)] == [1, 2]
        assert _list(documents, keys=("no",)) == []

    def test_page_of_documents_ends_after_a_whole_key(self, documents: Any) -> None:
        for number in range(6):
            _write(documents, [Put("c", f"k{number // 2}", b"x" * 1_500_000, keep=2)])
        assert [len(one.value) for one in _list(documents, keys=("k1",), all_versions=True)] == [1_500_000] * 2
        assert [one.key for one in _list(documents, all_versions=True)] == ["k0", "k0", "k1", "k1"]
        assert _keys(documents, all_versions=True, after="k1") == ["k2", "k2"]
        assert _keys(documents, all_versions=True, limit=1) == ["k0", "k0"]
        assert _keys(documents, all_versions=True, values=False) == ["k0", "k0", "k1", "k1", "k2", "k2"]
        assert [one.value for one in _list(documents, values=False)] == [b"", b"", b""]

    def test_collections_of_documents_are_named_and_counted(self, documents: Any) -> None:
        assert documents.list_collections() == {}
        _write(documents, [Put("My notes: 1.b", "k", b"1"), Put("c", "a", b"1", keep=2), Put("c", "b", b"1")])
        _put(documents, "a", keep=2)
        assert documents.list_collections() == {"My notes: 1.b": 1, "c": 2}

    def test_document_of_any_bytes_is_kept(self, documents: Any) -> None:
        values = [b"", b"\n", b"\x00\xff\n{", bytes(range(256)) * 10, '{"text": "ä"}'.encode()]
        for number, value in enumerate(values):
            _put(documents, f"k{number}", value)
        assert [one.value for one in _list(documents)] == values

    def test_document_of_any_key_is_kept(self, documents: Any) -> None:
        keys = ["..", ".", "/", "../../etc/passwd", "%41", "a" * 500, "ä" * 250, "~", "nul", "A", "\\", "'", " "]
        _write(documents, [Put("c", key, key.encode()) for key in keys])
        assert {one.key: one.value.decode() for one in _list(documents)} == {key: key for key in keys}
        for key in keys:
            assert [one.key for one in _list(documents, keys=(key,))] == [key]

    def test_unusable_document_is_refused(self, documents: Any) -> None:
        wrongs: tuple[dict[str, Any], ...] = (
            {"key": ""},
            {"key": "a\0b"},
            {"key": "a\nb"},
            {"key": "a" * 501},
            {"key": "\ud800"},
            {"key": 5},
            {"collection": "a/b"},
            {"collection": ""},
            {"value": "text"},
            {"value": b"x" * (MAX_VALUE + 1)},
            {"expect": -1},
            {"keep": 0},
            {"owner": "a/b"},
            {"writer": "a\0b"},
            {"expires_at": at(1).replace(tzinfo=None)},
            {"version": 0},
        )
        for wrong in wrongs:
            with pytest.raises(DefinitionError):
                _write(documents, [Put(**{"collection": "c", "key": "k", "value": b"1", **wrong})])
        assert _list(documents) == []

    # -- ends ----------------------------------------------------------------------------------------------------------

    def test_documents_are_removed_by_prefix(self, documents: Any) -> None:
        _write(documents, [Put("c", key, b"1") for key in ORDERED], [Put("d", "a", b"1")])
        assert _remove(documents, "c", "a/") == 2
        assert _keys(documents) == [key for key in ORDERED if not key.startswith("a/")]
        assert _remove(documents, "c") == len(ORDERED) - 2
        assert documents.list_collections() == {"d": 1}

    def test_expired_document_counts_as_absent(self, documents: Any, clock: SteppedClock) -> None:
        _put(documents, "k", b"1", expires_at=at(10))
        _put(documents, "stays", b"1")
        clock.advance(9)
        assert _keys(documents) == ["k", "stays"]
        assert documents.remove_documents("", expired=True) == 0
        clock.advance(1)
        assert (_keys(documents), _keys(documents, keys=("k",)), _keys(documents, all_versions=True)) == (
            ["stays"],
            [],
            ["stays"],
        )
        assert _put(documents, "k", b"2", expect=0, expires_at=at(20)).verdict is Verdict.DONE
        assert [one.value for one in _list(documents, keys=("k",))] == [b"2"]
        clock.advance(10)
        assert documents.remove_documents("", expired=True) == 1
        assert documents.remove_documents("", expired=True) == 0
        assert documents.list_collections() == {"c": 1}

    def test_documents_go_with_their_run(self, documents: Any, clock: SteppedClock) -> None:
        started(documents, "leased")
        for run in ("mine", "other"):
            assert commit(documents, Create(queued(run, status=Status.COMPLETED, due_at=None))).verdict is Verdict.DONE
        _write(
            documents,
            [Put("c", "a", b"1", owner="mine"), Put("d", "b", b"1", owner="mine"), Put("c", "c", b"1", owner="other")],
            [Put("c", "free", b"1"), Put("c", "leased", b"1", owner="leased")],
        )
        assert documents.delete_runs(["mine", "leased"]) == 1
        assert (_keys(documents), documents.list_collections()) == (["c", "free", "leased"], {"c": 3})
        assert documents.delete_runs(["other"], scrub=True) == 1
        assert _keys(documents) == ["free", "leased"]
        clock.advance(timedelta(hours=2).total_seconds())
        assert documents.remove_documents("", expired=True) == 0

    def test_documents_of_a_run_that_is_long_gone_are_swept(self, documents: Any, clock: SteppedClock) -> None:
        _put(documents, "k", owner="never")
        assert documents.remove_documents("", expired=True) == 0
        clock.advance(timedelta(hours=2).total_seconds())
        assert documents.remove_documents("", expired=True) == 1
        assert _keys(documents) == []

    def test_erased_documents_leave_the_store(self, documents: Any) -> None:
        _write(documents, [Put("c", "a/1", b"secret"), Put("c", "b", b"1")])
        assert documents.remove_documents("c", "a/", scrub=True) == 1
        assert _keys(documents) == ["b"]

    def test_documents_are_there_for_another_process(self, documents: Any, clock: SteppedClock) -> None:
        _put(documents, "k", b"1")
        other = self.make_store(clock)
        try:
            if other is not documents and _keys(other) != ["k"]:
                assert _keys(other) == []  # a store in memory may be its own
                return
            assert _put(other, "k", b"2", expect=1).versions == (2,)
            assert _put(documents, "k", b"3", expect=1) == Written(Verdict.CONFLICT, (2,), 0)
        finally:
            if other is not documents:
                other.close()


def _remove(store: Any, collection: str, prefix: str = "") -> int:
    removed: int = store.remove_documents(collection, prefix)
    return removed
