"""The commands that look after a store and move runs: what they print, their exit codes, and what they refuse."""

from __future__ import annotations

import json
import sqlite3

import pytest

from keepstep.stores import rules

STORE = ".keepstep/runs.db"


@pytest.fixture
def kept(keepstep):
    """A store with two finished runs, a failed one and one that waits."""
    keepstep("run", "program.py:total", "1", "2", "--id", "one")
    keepstep("run", "program.py:echo", "hush-hush", "--id", "two")
    keepstep("run", "program.py:call", "--id", "broken")
    keepstep("start", "program.py:approval", "--id", "waits")
    return keepstep


def damage(statement, *values, store=STORE):
    database = sqlite3.connect(store)
    database.execute(statement, values)
    database.commit()
    database.close()


def edit(run, old, new):
    damage("UPDATE keepstep_checkpoint SET record = replace(record, ?, ?) WHERE run = ?", old, new, run)


# -- verify ------------------------------------------------------------------------------------------------------------


def test_sound_store_is_reported_as_sound(kept):
    done = kept("verify")
    assert done.code == 0
    assert "nothing is damaged" in done.out
    value = kept("verify", "--json").json
    assert value["sound"] is True
    assert value["runs"] == {"total": 4, "valid": 4, "invalid": 0, "legacy": 0}
    assert kept("verify", "one", "two", "--json").json["runs"]["total"] == 2


def test_damage_is_named_and_is_exit_code_1(kept):
    edit("one", '"value":3', '"value":4')
    damage("DELETE FROM keepstep_run WHERE id = 'waits'")
    done = kept("verify")
    assert done.code == 1
    assert "run 'one': chain broken at seq 3" in done.out
    assert "flaw: there is a head of run 'waits'" in done.out
    value = kept("verify", "--json")
    assert value.code == 1
    assert [one["run"] for one in value.json["damaged"]] == ["one"]
    assert value.json["flaws"][0]["kind"] == "dangling"
    assert kept("verify", "two").code == 0


def test_a_run_that_is_not_there_is_exit_code_3(kept):
    assert kept("verify", "nobody").code == 3


# -- repair ------------------------------------------------------------------------------------------------------------


def test_flaw_that_can_be_derived_is_mended(kept):
    damage("UPDATE keepstep_head SET workflow = 'other' WHERE run = 'one'")
    dry = kept("repair", "--dry-run")
    assert dry.code == 1
    assert "not repaired" in dry.out
    done = kept("repair")
    assert done.code == 0
    assert "its head was corrected" in done.out
    assert kept("repair", "--json").json["mended"] == []


def test_a_repair_that_mends_nothing_says_so(kept):
    damage(
        "INSERT INTO keepstep_worker (id, host, pid, started_at, renewed_at, boot, boot_seconds, workflows, progress)"
        " VALUES ('worker-x', 'h', 1, 1, 1, 'b', 1, '{', '{}')"
    )
    for options in ((), ("--dry-run",)):
        done = kept("repair", *options)
        assert done.code == 1
        assert "worker-x" in done.out
        assert "nothing was repaired" in done.out
    assert kept("repair", "--json").json["flaws"][0]["about"] == "worker-x"


def test_a_loss_is_shown_first_and_then_accepted(kept, folder):
    edit("one", '"value":3', '"value":4')
    found = kept("repair")
    assert found.code == 1
    assert "keepstep repair --accept-loss one" in found.out
    dry = kept("repair", "--accept-loss", "one")
    assert dry.code == 0
    assert "steps that a retry repeats: add" in dry.out
    assert "nothing was changed" in dry.out
    assert kept("verify").code == 1
    done = kept("repair", "--accept-loss", "one", "--yes", "--aside", "aside.jsonl", "--reason", "bad disk", "--json")
    assert (done.code, done.json["done"], done.json["repeats"]) == (0, True, ["add#1"])
    assert '"value":4' in (folder / "aside.jsonl").read_text(encoding="utf-8")
    assert kept("verify").code == 0
    assert kept("show", "one", "--json").json["status"] == "set aside"
    assert "bad disk" in kept("audit", "one").out
    assert kept("retry", "one").code == 0
    assert kept("run", "program.py:total", "--id", "one").out.strip() == "3"


def test_invalid_repair_options_are_refused(kept):
    assert kept("repair", "--accept-loss", "one").code == 2
    assert kept("repair", "--accept-loss", "nobody").code == 3
    assert kept("repair", "--yes").code == 2
    edit("one", '"value":3', '"value":4')
    taken = kept("repair", "--accept-loss", "one", "--yes", "--aside", "program.py")
    assert taken.code == 2
    assert "exists already" in taken.err


# -- purge, retain, erase ----------------------------------------------------------------------------------------------


def test_finished_runs_are_purged(kept):
    assert kept("purge", "--before", "1d").out.startswith("0 runs removed")
    dry = kept("purge", "--all", "--dry-run", "--json").json
    assert (dry["removed"], dry["statuses"]) == (3, {"failed": 1, "completed": 2})
    assert kept("purge", "--all", "--status", "failed").out.splitlines() == ["1 run removed (1 failed)", "  call: 1"]
    assert kept("purge", "--before", "0s", "--workflow", "total", "--json").json["removed"] == 1
    assert kept("purge", "--before", "2999-01-01", "--limit", "0", "--json").json["removed"] == 0
    assert [one["id"] for one in kept("list", "--json").json["runs"]] == ["waits", "two"]


@pytest.mark.parametrize(
    "words",
    [(), ("--before", "soon"), ("--all", "--before", "1d"), ("--all", "--status", "waiting"), ("--before", "1y")],
)
def test_purge_without_a_clear_filter_is_refused(kept, words):
    assert kept("purge", *words).code == 2
    assert len(kept("list", "--json").json["runs"]) == 4


def test_runs_that_need_not_stay_are_removed(kept):
    assert kept("retain", "--json").json["removed"] == 0
    assert (
        kept("retain", "--days", "0", "--count", "0", "--workflow", "total", "--dry-run", "--json").json["removed"] == 1
    )
    assert kept("retain", "--no-preserve", "--json").json["workflows"] == {"total": 1, "echo": 1}
    assert kept("retain", "--days", "0", "--count", "0", "--failed-days", "9", "--json").json["removed"] == 0
    assert kept("retain", "--days", "0", "--count", "0").out.startswith("1 run removed (1 failed)")


def test_an_erased_run_is_in_no_file(kept, folder):
    held = [one for one in folder.rglob("*") if one.is_file() and b"hush-hush" in one.read_bytes()]
    assert held
    assert kept("erase", "two").out.strip() == "two is erased"
    assert [one for one in folder.rglob("*") if one.is_file() and b"hush-hush" in one.read_bytes()] == []
    assert kept("erase", "two").code == 3
    assert kept("verify").code == 0


def test_a_large_store_leaves_the_rewriting_to_the_operator(kept, folder, monkeypatch):
    def holding():
        return [one for one in folder.rglob("*") if one.is_file() and b"hush-hush" in one.read_bytes()]

    assert kept("erase").code == 2
    with monkeypatch.context() as patch:
        patch.setattr(rules, "REWRITTEN_AT_ONCE", 0)
        done = kept("erase", "two")
        assert done.code == 9
        assert "not yet erased" in done.err
        assert kept("erase", "two", "--json").code == 9
        assert kept("show", "two").code == 3
        assert holding()
        assert "1 removed run not yet erased" in kept("doctor").out
        assert kept("erase", "--rewrite").out.strip() == "1 removed run erased"
        assert holding() == []
        assert "not yet erased" not in kept("doctor").out
        assert kept("erase", "--rewrite", "--json").json == {"erased": 0}
        assert kept("erase", "one", "--rewrite", "--json").json == {"run": "one", "erased": True}


def test_a_run_that_has_not_ended_is_erased_only_by_force(kept):
    refused = kept("erase", "waits")
    assert refused.code == 7
    assert "is queued" in refused.err
    assert kept("erase", "waits", "--force", "--json").json == {"run": "waits", "erased": True}
    assert kept("show", "waits").code == 3


# -- export, import, copy ----------------------------------------------------------------------------------------------


def test_runs_go_out_and_come_in_again(kept, folder):
    done = kept("export", "runs.jsonl", "--status", "completed")
    assert (done.code, done.out.strip()) == (0, "2 runs written to runs.jsonl")
    assert kept("export", "runs.jsonl").code == 2
    assert kept("export", "all.jsonl.gz", "--json").json["written"] == 4
    assert kept("import", "runs.jsonl", "--dry-run").out.strip() == "2 runs, all intact"
    assert kept("import", "all.jsonl.gz", "--store", "new.db", "--json").json["written"] == 4
    assert kept("verify", "--store", "new.db").code == 0
    assert kept("import", "all.jsonl.gz", "--store", "new.db").out.strip() == "0 runs imported, 4 already there"
    assert kept("show", "waits", "--store", "new.db", "--json").json["status"] == "set aside"
    assert kept("import", "all.jsonl.gz", "--store", "queued.db", "--queue").code == 0
    assert kept("show", "waits", "--store", "queued.db", "--json").json["status"] == "queued"


def test_an_archive_goes_through_pipes(kept, spawn):
    done = kept("export", "-", "one", "two")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert lines[-1] == {"total": {"runs": 2}}


def test_a_broken_archive_is_refused_whole(kept, folder):
    kept("export", "runs.jsonl")
    text = (folder / "runs.jsonl").read_text(encoding="utf-8")
    (folder / "bad.jsonl").write_text(text.replace("hush-hush", "hush-rush", 1), encoding="utf-8")
    done = kept("import", "bad.jsonl", "--store", "new.db")
    assert done.code == 6
    assert "bad.jsonl, line " in done.err
    assert not (folder / "new.db").exists()
    partly = kept("import", "bad.jsonl", "--store", "new.db", "--partial", "--json")
    assert (partly.code, partly.json["written"], len(partly.json["damaged"])) == (1, 3, 1)
    assert kept("import", "none.jsonl").code == 6
    assert kept("import", "program.py").code == 6


def test_another_run_of_the_same_id_is_a_conflict(kept):
    kept("export", "runs.jsonl", "one")
    kept("run", "program.py:total", "5", "--id", "one", "--store", "new.db")
    done = kept("import", "runs.jsonl", "--store", "new.db")
    assert done.code == 7
    assert "conflict: one" in done.err
    assert kept("show", "one", "--store", "new.db", "--json").json["result"] == 15


def test_a_damaged_run_is_exported_and_marked(kept):
    edit("one", '"value":3', '"value":4')
    done = kept("export", "runs.jsonl")
    assert done.code == 1
    assert "damaged: one" in done.err
    assert kept("import", "runs.jsonl", "--store", "new.db").code == 6


def test_store_is_copied_and_unfinished_runs_are_handed_over(kept):
    done = kept("copy", STORE, "new.db")
    assert done.code == 0
    assert "3 runs copied" in done.out
    assert "left: waits" in done.err
    moved = kept("copy", STORE, "new.db", "--unfinished", "--json")
    assert (moved.code, moved.json["written"], moved.json["same"]) == (0, 1, 3)
    assert kept("show", "waits", "--json").json["status"] == "set aside"
    assert kept("show", "waits", "--store", "new.db", "--json").json["status"] == "queued"
    assert kept("verify", "--store", "new.db").code == 0


def test_run_that_was_handed_over_does_not_go_on_in_both(kept):
    kept("copy", STORE, "new.db", "--unfinished")
    shown = kept("show", "waits")
    assert "it goes on in sqlite:///" in shown.out
    assert "retry" not in shown.out
    for words in (("retry", "waits"), ("resume", "waits"), ("run", "program.py:approval", "--id", "waits")):
        done = kept(*words)
        assert done.code in (5, 7)
        assert "it goes on in sqlite:///" in done.err
        assert "keepstep retry" not in done.err
    assert "it goes on in sqlite:///" in kept("signal", "waits", "approved").out
    assert "keepstep retry" not in kept("doctor").out
    assert kept("show", "waits", "--json").json["status"] == "set aside"
    assert kept("retry", "waits", "--force").code == 0
    assert kept("show", "waits", "--json").json["status"] == "queued"


def test_erase_of_an_unfinished_run_names_the_option(kept):
    done = kept("erase", "waits")
    assert done.code == 7
    assert "--force" in done.err


def test_copying_onto_itself_or_from_nothing_is_refused(kept):
    assert kept("copy", STORE, STORE).code == 2
    assert kept("copy", "none.db", "new.db").code == 6
    assert kept("copy", STORE, "new.db", "nobody").code == 3


@pytest.mark.parametrize("name", ["verify", "repair", "purge", "retain", "erase", "export", "import", "copy"])
def test_every_command_explains_itself(keepstep, name):
    done = keepstep(name, "--help")
    assert done.code == 0
    assert "--json" in done.out


@pytest.mark.parametrize(
    "target, stays",
    [("program.py", {"waits"}), ("program.py:total", {"waits", "broken", "two"})],
    ids=["all its workflows", "one workflow"],
)
def test_a_worker_removes_what_need_not_stay_of_its_workflows(kept, target, stays):
    for _ in range(5):  # one that has nothing to do leaves at once, perhaps before it has looked at everything
        done = kept("worker", target, "--until-idle", "--retain-days", "0", "--retain-count", "0")
        assert done.code == 0
        left = {one["id"] for one in kept("list", "--json").json["runs"]}
        if left == stays:
            break
    assert left == stays
