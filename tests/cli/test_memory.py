"""`memory`: values with their history, from the command line."""

from __future__ import annotations

import keepstep as ks
from keepstep.cli import errors


def test_values_are_set_read_deleted_and_erased(keepstep, folder):
    (folder / ".keepstep").mkdir()
    with ks.open(folder / ".keepstep/runs.db") as engine:
        ks.Memory("notes", engine=engine).put("a/1", (1, 2)).result()
    assert keepstep("memory", "--json").json == {"memories": [{"namespace": "notes", "keys": 1}]}
    assert keepstep("memory", "set", "notes", "b", '{"x": 1}', "--json").json["version"] == 1
    assert keepstep("memory", "set", "notes", "b", "plain text", "--expect", "1").code == 0
    assert keepstep("memory", "set", "notes", "b", "2", "--expect", "1").code == errors.CONFLICT
    assert keepstep("memory", "get", "notes", "b").out == '"plain text"\n'
    listed = keepstep("memory", "list", "notes", "--json").json["values"]
    assert [(one["key"], one["version"], one["value"]) for one in listed] == [
        ("a/1", 1, [1, 2]),
        ("b", 2, "plain text"),
    ]
    assert keepstep("memory", "delete", "notes", "b").code == 0
    assert keepstep("memory", "delete", "notes", "b").code == errors.NOT_FOUND
    assert keepstep("memory", "get", "notes", "b").code == errors.NOT_FOUND
    versions = keepstep("memory", "history", "notes", "b", "--json").json["versions"]
    assert [one["deleted"] for one in versions] == [False, False, True]
    assert keepstep("memory", "erase", "notes", "b", "--json").json["erased"] == 1
    assert keepstep("memory", "history", "notes", "b").code == errors.NOT_FOUND
    assert [one["key"] for one in keepstep("memory", "list", "notes", "a", "--json").json["values"]] == ["a/1"]


def test_wrong_words_are_refused(keepstep, folder):
    (folder / ".keepstep").mkdir()
    with ks.open(folder / ".keepstep/runs.db"):
        pass
    for words in (["get"], ["get", "notes"], ["set", "notes", "a"], ["get", "notes", "a", "1"], ["get", "a/b", "c"]):
        assert keepstep("memory", *words).code == errors.USAGE, words
    assert "ks.Memory" in keepstep("memory").out
