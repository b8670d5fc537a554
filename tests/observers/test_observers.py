"""Observers are told of everything and can break nothing."""

import asyncio
import logging
from datetime import UTC, datetime

import pytest

from keepstep import observers
from keepstep.errors import DefinitionError
from keepstep.model import Event
from keepstep.observers import LogObserver, Observers, resolve


def event(name="step.completed", **options):
    return Event(name, run="digest-42", at=datetime(2026, 1, 1, tzinfo=UTC), **options)


class Recording:
    def __init__(self):
        self.seen = []

    def observe(self, event):
        self.seen.append(event.name)


class Failing(Recording):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def observe(self, event):
        super().observe(event)
        raise self.error


# -- several -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError(), RecursionError(), SystemExit(1)])
def test_failing_observer_is_reported_once_and_stops_no_other(error, caplog):
    before, failing, after = Recording(), Failing(error), Recording()
    together = Observers([before, failing, after])
    for name in ("run.started", "step.completed", "run.completed"):
        together.observe(event(name))
    assert before.seen == failing.seen == after.seen == ["run.started", "step.completed", "run.completed"]
    [report] = caplog.records
    assert report.levelno == logging.WARNING
    assert report.name == "keepstep"
    assert "Failing" in report.getMessage()
    assert "run.started" in report.getMessage()
    assert report.exc_info[1] is error


def test_each_failing_observer_is_reported(caplog):
    Observers([Failing(ValueError()), Failing(ValueError())]).observe(event())
    assert len(caplog.records) == 2


def test_keyboard_interrupt_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        Observers([Failing(KeyboardInterrupt())]).observe(event())


def test_observers_are_true_if_there_are_any():
    assert not Observers()
    assert Observers([Recording()])


async def wait_for_it(event):
    """What an observer must not be."""


class Async:
    async def observe(self, event):
        """Nothing."""


@pytest.mark.parametrize("member", [Async(), Recording, object(), None])
def test_what_cannot_observe_is_refused(member):
    with pytest.raises(DefinitionError):
        Observers([member])


# -- by name -----------------------------------------------------------------------------------------------------------


def kinds(spec, **options):
    return [type(one).__name__ for one in resolve(spec, **options)]


def test_names_instances_functions_and_lists_are_resolved():
    assert kinds(None) == []
    assert kinds("none") == []
    assert kinds([]) == []
    assert kinds("log") == ["LogObserver"]
    assert kinds(Recording()) == ["Recording"]
    assert kinds(print) == ["FunctionObserver"]
    assert kinds(["log", None, ("none", Recording()), Observers([Recording()])]) == [
        "LogObserver",
        "Recording",
        "Recording",
    ]
    assert kinds(["mine", "log"], names={"mine": Recording}) == ["Recording", "LogObserver"]


def test_function_gets_the_event():
    seen = []
    resolve(seen.append).observe(event())
    assert seen == [event()]


def test_an_installed_package_registers_a_name(tmp_path, monkeypatch):
    info = tmp_path / "loud-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[keepstep.observers]\nloud = loud:Loud\n")
    (tmp_path / "loud.py").write_text("class Loud:\n    def observe(self, event): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert kinds("loud") == ["Loud"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DefinitionError, match=r"'lgo'; known observers are log, mine, none"):
        resolve("lgo", names={"mine": Recording})


@pytest.mark.parametrize("spec", [7, LogObserver, Async(), wait_for_it, [7]])
def test_nonsense_is_refused(spec):
    with pytest.raises(DefinitionError):
        resolve(spec)


def test_all_lists_the_observers():
    assert set(observers.__all__) >= {"LogObserver", "Observers", "resolve"}


# -- the log -----------------------------------------------------------------------------------------------------------


def logged(caplog, *events):
    with caplog.at_level(logging.INFO, logger="keepstep"):
        for one in events:
            LogObserver().observe(one)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_event_is_logged_as_one_readable_line(caplog):
    told = event(
        workflow="digest", step="fetch#1", attempt=2, seq=7, worker="w-1", data={"seconds": 0.25, "why": "a b"}
    )
    assert logged(caplog, told) == [
        (
            "INFO",
            (
                "step.completed run=digest-42 workflow=digest step=fetch#1 attempt=2 seq=7 worker=w-1 "
                "seconds=0.25 why='a b'"
            ),
        )
    ]


@pytest.mark.parametrize(
    "name, level",
    [
        ("run.started", "INFO"),
        ("step.failed", "WARNING"),
        ("run.failed", "ERROR"),
        ("run.set_aside", "ERROR"),
        ("lease.lost", "WARNING"),
        ("budget.nearly_spent", "WARNING"),
        ("mine.unknown", "INFO"),
    ],
)
def test_worse_events_have_a_higher_level(name, level, caplog):
    assert logged(caplog, event(name))[0][0] == level


@pytest.mark.parametrize("value", ["two\nlines", "\x1b[31mred", "a\u2028b", "", "k=v", "x" * 5_000, "100 %s %d"])
def test_a_value_never_breaks_the_line(value, caplog):
    [(_, line)] = logged(caplog, event(data={"value": value}))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert len(line) < 300


def test_nothing_is_formatted_for_a_disabled_level():
    class Unreadable:
        def __str__(self):
            raise AssertionError("looked at")

    logger = logging.getLogger("tests.quiet")
    logger.setLevel(logging.CRITICAL)
    LogObserver(logger).observe(event(data={"value": Unreadable()}))
