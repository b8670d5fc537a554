"""The command line on an encrypted store, with its keys and without."""

from __future__ import annotations

import base64
import contextlib
import json
import sqlite3

import pytest

from keepstep.cli import errors


def key(letter):
    return base64.b64encode(letter.encode() * 32).decode()


OLD, NEW = f"old={key('o')}", f"new={key('n')}"


@pytest.fixture
def encrypted(keepstep, monkeypatch):
    """A store with one encrypted run, and the keys in the environment."""
    monkeypatch.setenv("KEEPSTEP_KEYS", OLD)
    assert keepstep("run", "program.py:greet", "Annabella", "--id", "r").code == 0
    return keepstep


def test_with_keys_everything_is_shown(encrypted, folder):
    shown = encrypted("show", "r").out
    assert "hello Annabella" in shown
    assert "with the key 'old'" in shown
    value = json.loads(encrypted("show", "r", "--json").out)
    assert (value["encrypted_with"], value["hidden"], value["input"]["args"]) == ("old", False, ["Annabella"])
    assert b"Annabella" not in b"".join(
        path.read_bytes() for path in (folder / ".keepstep").iterdir() if path.is_file()
    )


def test_below_runs_are_listed_and_values_are_hidden(encrypted, monkeypatch):
    monkeypatch.delenv("KEEPSTEP_KEYS")
    assert "greet" in encrypted("list").out
    shown = encrypted("show", "r")
    assert shown.code == 0
    assert "with the key 'old', which is missing here: its values are not shown" in shown.out
    assert "Annabella" not in shown.out
    value = json.loads(encrypted("show", "r", "--json").out)
    assert (value["hidden"], value["result"], value["input"]["args"]) == (True, None, [])
    assert "encrypted with the key 'old'" in encrypted("history", "r").out
    assert encrypted("audit", "r").code == 0
    assert encrypted("watch", "r").code == 0
    assert encrypted("doctor").code == 0
    for words in ("verify", "repair", "export runs.jsonl", "copy .keepstep/runs.db new.db", "purge --all --dry-run"):
        assert encrypted(*words.split()).code == 0  # they need no value
    assert encrypted("signal", "r", "x").code == errors.STORE
    for words in (("run", "program.py:greet", "Bob"), ("start", "program.py:greet", "Bob"), ("rekey",)):
        refused = encrypted(*words)
        assert refused.code in (errors.STORE, errors.USAGE), refused.err
        assert "KEEPSTEP_KEYS" in refused.err


def test_check_below_names_the_key(encrypted, monkeypatch):
    assert encrypted("start", "program.py:greet", "Bob", "--id", "waiting").code == 0
    assert encrypted("check", "program.py").code == 0
    monkeypatch.delenv("KEEPSTEP_KEYS")
    told = encrypted("check", "program.py")
    assert told.code == errors.FAILED
    assert "locked: waiting" in told.out
    assert "with the key 'old'" in told.out
    assert "1 of 1 unfinished runs cannot be checked without their keys; set KEEPSTEP_KEYS" in told.out
    assert "set aside" not in told.out


def test_wrong_key_is_reported(encrypted, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_KEYS", f"old={key('x')}")
    for words in (("show", "r"), ("history", "r")):
        assert (
            "with the key 'old', but the local key of that name is different: its values are not"
            in encrypted(*words).out
        )
    value = json.loads(encrypted("show", "r", "--json").out)
    assert (value["hidden"], value["input"]["args"]) == (True, [])
    monkeypatch.setenv("KEEPSTEP_KEYS", "old=hunter2")
    refused = encrypted("list", "--json")
    assert refused.code == 0  # it needs no keys
    refused = encrypted("show", "r")
    assert refused.code == errors.USAGE
    assert "hunter2" not in refused.err


def test_rekey_reencrypts_every_data_key(encrypted, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_KEYS", NEW)
    left = encrypted("rekey")
    assert left.code == errors.STORE
    assert "1 run encrypted with 'old', a key that KEEPSTEP_KEYS lacks" in left.out
    monkeypatch.setenv("KEEPSTEP_KEYS", f"{NEW},{OLD}")
    done = encrypted("rekey", "--json")
    counts = {"runs": 1, "changed": 1, "plain": 0, "left": {}, "damaged": 0}
    assert (done.code, json.loads(done.out)) == (0, {"current": "new", **counts})
    assert "0 data keys of 1 run" in encrypted("rekey").out
    monkeypatch.setenv("KEEPSTEP_KEYS", NEW)
    assert "hello Annabella" in encrypted("show", "r").out


def test_rekey_reports_that_a_damaged_run_needs_its_old_key(encrypted, folder, monkeypatch):
    """A repair makes its head again, and then its data key is as old as it was."""
    (path,) = folder.rglob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE keepstep_head SET status = 'flying'")
    monkeypatch.setenv("KEEPSTEP_KEYS", f"{NEW},{OLD}")
    told = encrypted("rekey")
    assert told.code == errors.STORE
    assert "1 run damaged, unchanged: keep the older keys" in told.out
    assert "no longer needed" not in told.out
    assert encrypted("repair").code == 0
    assert encrypted("rekey").code == 0
    monkeypatch.setenv("KEEPSTEP_KEYS", NEW)
    assert "hello Annabella" in encrypted("show", "r").out
