"""Schedules: workers start the run of each tick once, as the schedule says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.errors import DefinitionError, RunNotFound
from keepstep.kernel import keeper
from keepstep.kernel.schedule import ScheduleKeeper
from keepstep.model.keepers import schedule_id
from keepstep.testing import world
from keepstep.workflows.definition import KNOWN

pytestmark = pytest.mark.usefixtures("nothing_known")

#: The virtual clock begins on a full day.
HOUR = 3600.0


def runs_of(w, name, **filters):
    found = w.list(limit=1000, **filters).runs
    return sorted(run.id for run in found if run.id.startswith(f"{name}@"))


def ticks_of(w, name):
    return [run.partition("@")[2] for run in runs_of(w, name)]


def hours(w, count):
    w.advance(hours=count)


def declared(schedule, seconds=0.0, name="report"):
    @ks.workflow(name=name, schedule=schedule)
    async def report():
        if seconds:
            await ks.sleep(seconds)
        return ks.run_id()

    return report


def test_each_tick_starts_one_run_named_by_its_instant():
    declared(ks.Every(HOUR))
    with world() as w:
        begin = w.now
        w.advance(hours=3, minutes=1)
        ticks = [datetime.fromisoformat(tick) for tick in ticks_of(w, "report")]
        assert [tick for tick in ticks if tick.tzinfo is not None] == ticks
        assert len(ticks) == 3
        assert all((tick - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() % HOUR == 0 for tick in ticks)
        assert begin < ticks[0] <= begin + timedelta(hours=1)
        (newest,) = [run for run in w.list().runs if run.id.endswith(ticks_of(w, "report")[-1])]
        assert newest.status == "completed"
        assert newest.parent is None
        assert newest.tags["ks:schedule"] == "report"


def test_a_cron_schedule_ticks_by_local_time_across_a_change_of_clocks():
    declared(ks.Cron("30 2 * * *", tz="Europe/Berlin"))
    with world() as w:
        w.advance(days=366)
        ticks = [datetime.fromisoformat(tick) for tick in ticks_of(w, "report")]
        assert len(ticks) in (365, 366, 367)
        assert len({tick.date() for tick in ticks}) == len(ticks)


def test_a_worker_of_one_queue_serves_the_schedules_that_it_declares():
    @ks.workflow(name="report", schedule=ks.Every(HOUR), queue="reports")
    async def report():
        return ks.run_id()

    with world(queues=["reports"]) as w:
        hours(w, 2.5)
        assert len(runs_of(w, "report", status=frozenset({"completed"}))) == 2


def test_a_keeper_is_listed_only_on_request():
    declared(ks.Every(HOUR))
    with world() as w:
        hours(w, 2)
        assert all(not run.id.startswith("ks:") for run in w.list().runs)
        assert [run.id for run in w.list(system=True).runs if run.id.startswith("ks:")] == [schedule_id("report")]


def test_a_keeper_is_neither_retried_nor_rewound_nor_forked_nor_edited():
    declared(ks.Every(HOUR))
    with world() as w:
        hours(w, 2)
        kept = w.get(schedule_id("report"))
        for command in (kept.retry, lambda: kept.rewind(1), kept.replay, lambda: w.fork(kept.id, 1)):
            with pytest.raises(DefinitionError, match="is a keeper"):
                command()
        with pytest.raises(DefinitionError, match="is a keeper"):
            kept.edit({"a": 1})


def test_names_of_keepers_are_refused_to_users():
    async def report(): ...

    with pytest.raises(DefinitionError, match="Keepstep's own"):
        ks.workflow(name="keepstep.report")(report)
    mine = ks.workflow(report)
    with world() as w, pytest.raises(DefinitionError, match="Keepstep's own"):
        w.start(mine, run_id="ks:mine")


def test_a_schedule_needs_a_workflow_without_arguments():
    with pytest.raises(DefinitionError, match="starts it without arguments"):

        @ks.workflow(schedule=ks.Every(60))
        async def report(day): ...

    with pytest.raises(DefinitionError, match=r"takes a ks.Cron"):
        ks.workflow(schedule="0 7 * * *")(report_without_arguments)


async def report_without_arguments(): ...


# -- overlaps --------------------------------------------------------------------------------------------------------


def test_skip_leaves_out_ticks_while_a_run_goes_on():
    declared(ks.Every(HOUR, overlap="skip"), seconds=2.5 * HOUR)
    with world() as w:
        w.advance(hours=7, minutes=59)
        info = w.schedules.get("report")
        assert len(runs_of(w, "report")) == info.fired == 3
        assert info.skipped in (4, 5)
        assert all("has not ended" in one.why for one in info.recent if one.run is None)


def test_queue_starts_each_tick_when_the_run_before_it_has_ended():
    declared(ks.Every(HOUR, overlap="queue"), seconds=1.5 * HOUR)
    with world() as w:
        w.advance(hours=9, minutes=59)
        info = w.schedules.get("report")
        assert info.fired in (6, 7)
        assert len(info.open) == 1
        assert len(info.waiting) + info.fired in (9, 10)
        w.schedules.pause("report")
        w.advance(minutes=1)
        ran = sorted((run.created_at, run.updated_at) for run in w.list(status="completed", limit=100).runs)
        assert all(before[1] <= after[0] for before, after in pairwise(ran))


def test_cancel_ends_the_earlier_run_before_the_next_one_starts():
    declared(ks.Every(HOUR, overlap="cancel"), seconds=10 * HOUR)
    with world() as w:
        w.advance(hours=4, minutes=5)
        ids = runs_of(w, "report")
        assert len(ids) == 4
        states = [str(w.get(run).status()) for run in ids]
        assert states == ["cancelled"] * 3 + ["waiting"]


def test_allow_lets_runs_overlap():
    declared(ks.Every(HOUR, overlap="allow"), seconds=10 * HOUR)
    with world() as w:
        w.advance(hours=4, minutes=5)
        assert len(runs_of(w, "report", status="waiting")) == 4
        assert w.schedules.get("report").open == ()


# -- what people do -------------------------------------------------------------------------------------------------


def test_a_paused_schedule_makes_no_ticks_and_catches_up_as_it_says():
    declared(ks.Every(HOUR, catch_up="all"))
    with world() as w:
        w.advance(minutes=1)
        w.schedules.pause("report", "maintenance")
        hours(w, 5)
        assert runs_of(w, "report") == []
        info = w.schedules.get("report")
        assert info.paused
        assert info.status == "paused"
        assert [(one.act, one.reason) for one in info.changes] == [("pause", "maintenance")]
        w.schedules.resume("report")
        w.advance(seconds=1)
        assert len(runs_of(w, "report")) == 5
        assert not w.schedules.get("report").paused


def test_pause_and_cancel_of_the_keeper_itself_work():
    declared(ks.Every(HOUR))
    with world() as w:
        w.advance(minutes=1)
        kept = w.get(schedule_id("report"))
        kept.pause("later")
        w.advance(hours=2)
        assert runs_of(w, "report") == []
        assert kept.status() == "paused"
        kept.cancel("no longer needed")
        w.advance(hours=2)
        assert kept.status() == "cancelled"
        assert w.schedules.list() == []


def test_a_schedule_is_triggered_also_while_it_is_paused():
    declared(ks.Every(HOUR))
    with world() as w:
        w.advance(minutes=1)
        w.schedules.pause("report")
        run = w.schedules.trigger("report", "now, please")
        w.advance(seconds=1)
        assert w.get(run).result() == run
        assert runs_of(w, "report") == [run]


def test_a_backfill_starts_the_ticks_that_have_no_run():
    declared(ks.Every(HOUR, catch_up="skip"))
    with world() as w:
        w.advance(hours=1, minutes=1)
        w.schedules.pause("report")
        w.advance(hours=10)
        w.schedules.resume("report")
        w.advance(minutes=1)
        before = set(runs_of(w, "report"))
        count = w.schedules.backfill("report", w.now - timedelta(hours=6), w.now)
        w.advance(minutes=10)
        assert count == 6
        assert len(set(runs_of(w, "report")) - before) == 6


def test_a_schedule_can_be_added_with_arguments_and_removed():
    @ks.workflow
    async def greet(name, *, word="hello"):
        return f"{word} {name}"

    with world() as w:
        w.schedule("greetings", greet, ks.Every(HOUR), "ada", word="hi")
        w.advance(hours=2, minutes=1)
        (first, second) = runs_of(w, "greetings")
        assert w.get(first).result() == "hi ada"
        info = w.schedules.get("greetings")
        assert info.workflow == "greet"
        assert not info.declared
        assert info.attended
        assert len(info.next) == 5
        w.schedules.remove("greetings")
        w.advance(hours=3)
        assert runs_of(w, "greetings") == [first, second]
        with pytest.raises(RunNotFound, match="no schedule 'greetings'"):
            w.schedules.get("greetings")
        w.schedule("greetings", greet, ks.Every(HOUR), "eve")
        w.advance(hours=1)
        assert w.get(runs_of(w, "greetings")[-1]).result() == "hello eve"


def test_a_schedule_that_code_declares_is_not_removed_while_a_worker_lives():
    declared(ks.Every(HOUR))
    with world() as w:
        w.advance(minutes=1)
        with pytest.raises(DefinitionError, match="declared by the code of a living worker"):
            w.schedules.remove("report")
        with pytest.raises(DefinitionError, match="exists already, declared in code"):
            w.schedule("report", declared(ks.Every(HOUR), name="other"), ks.Every(60))


def test_a_changed_declaration_takes_effect_and_is_remembered(caplog):
    with world() as w:
        store = w.store
        declared(ks.Every(HOUR))
        w.advance(hours=1, minutes=1)
        before = runs_of(w, "report")
        declared(ks.Every(60))
        w.advance(minutes=5)
        assert len(runs_of(w, "report")) >= len(before) + 4
        assert "changes from every 1:00:00 to every 0:01:00" in caplog.text
        assert store is w.store
        assert [one.act for one in w.schedules.get("report").changes] == ["declare"]


def test_an_id_that_another_run_has_counts_as_fired():
    report = declared(ks.Every(HOUR))
    with world() as w:
        w.advance(minutes=1)
        taken = f"report@{w.schedules.get('report').next[0].isoformat().replace('+00:00', 'Z')}"
        w.start(report, run_id=taken)
        hours(w, 2)
        info = w.schedules.get("report")
        assert "is taken by another run" in info.recent[0].why
        assert len(runs_of(w, "report")) == 2


def test_ticks_go_on_when_the_worker_comes_back():
    declared(ks.Every(HOUR, catch_up="one"))
    with world() as w:
        w.advance(hours=1, minutes=1)
        fired = w.schedules.get("report").fired
        w.advance(hours=2)
        assert w.schedules.get("report").fired == fired + 2


def test_events_tell_of_fired_and_skipped_ticks():
    declared(ks.Every(HOUR, overlap="skip"), seconds=1.5 * HOUR)
    with world() as w:
        w.advance(hours=3, minutes=1)
        names = [event.name for event in w.events]
        assert names.count("schedule.fired") == 2
        assert names.count("schedule.skipped") == 1


def test_a_schedule_that_ends_has_no_further_ticks():
    with world() as w:
        declared(ks.Every(HOUR, until=w.now + timedelta(hours=2)))
        w.advance(hours=6)
        assert len(runs_of(w, "report")) == 2
        assert w.schedules.get("report").next == ()


# -- the doctor ------------------------------------------------------------------------------------------------------


def findings(w, code):
    return [one for one in w._do(examine(w._target)).findings if one.code == code]


def test_the_doctor_names_a_schedule_that_no_living_worker_declares():
    declared(ks.Every(HOUR))
    with world() as w:
        hours(w, 2)
        assert w._do(examine(w._target)).findings == []
        KNOWN.clear()
        w._target.worker.beat_once()
        (found,) = findings(w, "schedule-unattended")
        assert "schedule report makes no ticks: no living worker declares it" in found.message
        assert "keepstep schedules remove report" in found.advice
        w.schedules.remove("report")
        assert w.schedules.list() == []


def test_the_doctor_names_a_schedule_that_waits_for_over_two_intervals():
    declared(ks.Every(HOUR, overlap="queue"), seconds=30 * HOUR)
    with world() as w:
        w.advance(hours=2, minutes=30)
        assert findings(w, "schedule-late") == []
        w.advance(hours=3)
        (found,) = findings(w, "schedule-late")
        assert "has not ended" in found.message


def test_a_keeper_removes_its_older_records_but_those_of_the_last_hour(monkeypatch):
    monkeypatch.setattr(keeper, "KEPT_RECORDS", 20)
    monkeypatch.setattr(keeper, "TRIM_EVERY", 10)
    declared(ks.Every(240, overlap="allow"))
    with world() as w:
        w.advance(hours=6)
        run = w.get(schedule_id("report"))
        kept = run.checkpoints()
        assert kept[0].kind == "run started"
        assert kept[1].seq == run.run().kept_from > 30
        hour_ago = w.now - timedelta(hours=1)
        assert kept[1].finished_at < hour_ago
        assert len(kept) < 60
        assert w._do(examine(w._target, deep=True)).findings == []
        assert w.schedules.get("report").fired == 90


# -- files -----------------------------------------------------------------------------------------------------------

FILE = """
keepstep: 1
metadata: {name: report}
spec:
  schedule: %s
steps:
  make: {function: make, exit: true}
"""


@pytest.mark.parametrize(
    "written, schedule",
    [
        (
            "{every: 1h, overlap: queue, catch_up: all, jitter: 5s}",
            ks.Every(3600, overlap="queue", catch_up="all", jitter=5),
        ),
        ("{cron: '0 7 * * mon', tz: Asia/Tokyo}", ks.Cron("0 7 * * mon", tz="Asia/Tokyo")),
        ("{every: 90, until: '2027-01-01T00:00:00+01:00'}", ks.Every(90, until=datetime(2026, 12, 31, 23, tzinfo=UTC))),
    ],
)
def test_a_file_declares_a_schedule_as_code_does(tmp_path, written, schedule):
    (tmp_path / "report.yaml").write_text(FILE % written, encoding="utf-8")
    workflow = ks.load(tmp_path / "report.yaml", functions={"make": lambda state: {"made": True}})
    assert workflow.schedule == schedule


@pytest.mark.parametrize(
    "written, problem",
    [
        ("{cron: '0 7 * *'}", "has 4 fields"),
        ("{every: 1h, cron: '@daily'}", "either cron or every"),
        ("{every: 1h, tz: UTC}", "tz is the time zone of cron"),
        ("{every: 1h, until: soon}", "until is an instant"),
    ],
)
def test_a_wrong_schedule_of_a_file_is_reported_with_its_place(tmp_path, written, problem):
    (tmp_path / "report.yaml").write_text(FILE % written, encoding="utf-8")
    with pytest.raises(DefinitionError, match=rf"report.yaml:5:13: error: spec.schedule: .*{problem}"):
        ks.load(tmp_path / "report.yaml", functions={"make": lambda state: {"made": True}})


def test_the_schedule_of_a_graph_starts_its_runs(tmp_path):
    (tmp_path / "report.yaml").write_text(FILE % "{every: 1h}", encoding="utf-8")
    ks.load(tmp_path / "report.yaml", functions={"make": lambda state: {"made": True}})
    with world() as w:
        hours(w, 2)
        assert w.get(runs_of(w, "report")[0]).result()["made"] is True


# -- what a keeper survives ------------------------------------------------------------------------------------------


def test_an_encrypted_schedule_ticks_and_hides_its_arguments():
    @ks.workflow
    async def greet(name):
        return f"hello {name}"

    with world(keys=ks.Keys("k", {"k": b"k" * 32})) as w:
        w.schedule("greetings", greet, ks.Every(HOUR), "grace hopper")
        w.advance(hours=2, minutes=1)
        assert [w.get(run).result() for run in runs_of(w, "greetings")] == ["hello grace hopper"] * 2
        entry = w.store.inner._runs[schedule_id("greetings")]
        assert b"grace" not in entry.run.input + b"".join(row.record + (row.body or b"") for row in entry.rows)


def test_a_state_of_a_newer_version_is_left_to_newer_workers(monkeypatch, caplog):
    declared(ks.Every(HOUR))
    with world() as w:
        hours(w, 1)
        monkeypatch.setattr(ScheduleKeeper, "version", 2)
        hours(w, 1)
        fired = len(runs_of(w, "report"))
        monkeypatch.setattr(ScheduleKeeper, "version", 1)
        hours(w, 3)
        assert len(runs_of(w, "report")) == fired
        assert w.get(schedule_id("report")).status() == "queued"
        assert "newer than 1" in caplog.text
        monkeypatch.setattr(ScheduleKeeper, "version", 2)
        hours(w, 1)
        assert len(runs_of(w, "report")) > fired


def test_a_keeper_that_fails_is_set_aside_and_declared_anew_after_a_cancel(monkeypatch):
    declared(ks.Every(HOUR))
    with world() as w:
        hours(w, 1)
        with monkeypatch.context() as broken:
            broken.setattr(ScheduleKeeper, "react", lambda *_: 1 / 0)
            hours(w, 1)
        kept = w.get(schedule_id("report"))
        assert kept.status() == "set aside"
        (found,) = findings(w, "set-aside")
        assert "ZeroDivisionError" in found.message
        kept.cancel("broken")
        assert kept.status() == "cancelled"
        before = runs_of(w, "report")
        declared(ks.Every(HOUR))
        hours(w, 3)
        assert len(runs_of(w, "report")) >= len(before) + 2


def test_the_keeper_of_a_removed_schedule_is_purged_after_a_day():
    @ks.workflow
    async def greet(): ...

    with world() as w:
        w.schedule("greetings", greet, ks.Every(HOUR))
        w.advance(minutes=1)
        w.schedules.remove("greetings")
        w.advance(hours=20)
        assert w.list(system=True, id_prefix="ks:").runs
        w.advance(hours=30)
        w._do(w._target.worker.keepers.look())
        assert not w.list(system=True, id_prefix="ks:").runs
