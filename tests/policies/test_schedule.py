"""The ticks of schedules: after each other, at matching local times, and each one once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import DefinitionError
from keepstep.policies.cron import parse
from keepstep.policies.schedule import MOST_MISSED, Cron, Every, restored, tick_of, tick_text

BERLIN = "Europe/Berlin"
#: Zones with whole and half hours, a shift of half an hour, a shift at midnight, and a left-out day.
ZONES = ["UTC", BERLIN, "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "America/Sao_Paulo", "Pacific/Apia"]
#: Instants near which those zones change their offset, and ordinary ones.
TURNS = [
    datetime(2026, 3, 29, 1, tzinfo=UTC),
    datetime(2026, 10, 25, 1, tzinfo=UTC),
    datetime(2026, 3, 8, 7, tzinfo=UTC),
    datetime(2026, 4, 4, 15, tzinfo=UTC),
    datetime(2018, 11, 4, 3, tzinfo=UTC),
    datetime(2011, 12, 30, 10, tzinfo=UTC),
    datetime(2024, 2, 29, tzinfo=UTC),
]
MINUTE = timedelta(minutes=1)


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def field(low, high):
    number = st.integers(low, high)
    spans = st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}")
    steps = st.integers(1, high).map(lambda step: f"*/{step}")
    return st.one_of(st.just("*"), number.map(str), spans, steps, st.lists(number.map(str), min_size=2).map(",".join))


expressions = st.tuples(field(0, 59), field(0, 23), field(1, 28), field(1, 12), field(0, 7)).map(" ".join)
instants = st.builds(
    lambda turn, seconds: turn + timedelta(seconds=seconds), st.sampled_from(TURNS), st.integers(-90_000, 90_000)
)


def scanned(expression, zone, first, last):
    """Return the ticks of a time by trying every local minute, as the rule says: shifted if skipped, once if twice."""
    fields, found = parse(expression), set()
    local = first.astimezone(ZoneInfo(zone)).replace(tzinfo=None, second=0, microsecond=0) - timedelta(days=2)
    while local < last.astimezone(ZoneInfo(zone)).replace(tzinfo=None) + timedelta(days=2):
        if local.minute in fields.minutes and local.hour in fields.hours and fields.matches_date(local.date()):
            found.add(local.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC))
        local += MINUTE
    return sorted(tick for tick in found if first < tick <= last)


@settings(max_examples=60, deadline=None)
@given(expressions, st.sampled_from(ZONES), instants)
def test_the_ticks_of_two_days_are_those_of_a_scan_of_every_minute(expression, zone, first):
    last = first + timedelta(days=2)
    cron, found, tick = Cron(expression, tz=zone), [], first
    while (tick := cron.after(tick)) is not None and tick <= last:
        found.append(tick)
    assert found == scanned(expression, zone, first, last)
    assert cron.between(first + timedelta(microseconds=1), last, 10_000) == found


@settings(max_examples=100, deadline=None)
@given(expressions, st.sampled_from(ZONES), instants)
def test_ticks_follow_each_other_and_match(expression, zone, first):
    cron, fields, tick = Cron(expression, tz=zone), parse(expression), first
    for _ in range(20):
        following = cron.after(tick)
        assert following is not None
        assert following > tick
        assert cron.before(following) == following
        assert cron.before(following - timedelta(microseconds=1)) in (None, *([tick] if tick != first else [])) or (
            tick == first
        )
        local = following.astimezone(ZoneInfo(zone))
        skipped = local.utcoffset() != (following - timedelta(days=1)).astimezone(ZoneInfo(zone)).utcoffset()
        if not skipped:
            assert local.minute in fields.minutes
            assert local.hour in fields.hours
            assert fields.matches_date(local.date())
        tick = following


@pytest.mark.parametrize(
    "expression, tz, after, ticks",
    [
        ("30 2 * * *", BERLIN, "2026-03-28", ["2026-03-28T01:30", "2026-03-29T01:30", "2026-03-30T00:30"]),
        ("30 2 * * *", BERLIN, "2026-10-24", ["2026-10-24T00:30", "2026-10-25T00:30", "2026-10-26T01:30"]),
        ("0 7 * * mon-fri", "UTC", "2026-11-20T07:00", ["2026-11-23T07:00"]),
        ("0 0 * * fri-sun", "UTC", "2026-11-19", ["2026-11-20", "2026-11-21", "2026-11-22", "2026-11-27"]),
        ("0 0 13 * fri", "UTC", "2026-11-10", ["2026-11-13", "2026-11-20"]),
        ("0 0 29 2 *", "UTC", "2096-03-01", ["2104-02-29"]),
        ("@weekly", "UTC", "2026-11-18", ["2026-11-22"]),
        ("5/20 0 1 JAN *", "UTC", "2026-11-18", ["2027-01-01T00:05", "2027-01-01T00:25", "2027-01-01T00:45"]),
    ],
)
def test_a_cron_expression_ticks_at_its_local_times(expression, tz, after, ticks):
    cron, tick = Cron(expression, tz=tz), at(after)
    for wanted in ticks:
        tick = cron.after(tick)
        assert tick == at(wanted)


@pytest.mark.parametrize(
    "make, problem",
    [
        (lambda: Cron("0 7 * *"), "has 4 fields"),
        (lambda: Cron("61 * * * *"), "the minute '61' is not a number from 0 to 59"),
        (lambda: Cron("0 0 * * mno"), "one of sun, mon"),
        (lambda: Cron("0 0 L * *"), "the day of the month"),
        (lambda: Cron("10-5 * * * *"), "ends before it begins"),
        (lambda: Cron("*/0 * * * *"), "a step below 1"),
        (lambda: Cron("0 0 31 2 *"), "never matches"),
        (lambda: Cron("0 0 * * *", tz="Europe/Atlantis"), "no time zone"),
        (lambda: Cron("0 0 * * *", overlap="never"), "overlap="),
        (lambda: Cron("0 0 * * *", catch_up="none"), "catch_up="),
        (lambda: Cron("0 0 * * *", until="2026-01-01"), "with a time zone"),
        (lambda: Cron(7), "must be a text"),
        (lambda: Every(0.5), "at least|from 1"),
        (lambda: Every(60, jitter=61), "longer than the interval"),
        (lambda: Every(float("nan")), "finite"),
    ],
)
def test_what_cannot_tick_is_refused_with_the_reason(make, problem):
    with pytest.raises(DefinitionError, match=problem):
        make()


seconds = st.one_of(st.integers(1, 10_000), st.floats(1, 10_000))
catch_ups = st.sampled_from(["one", "all", "skip"])


@given(seconds, instants)
def test_an_interval_ticks_at_equal_distances_whatever_the_start(span, first):
    every = Every(span)
    tick = every.after(first)
    assert first < tick <= first + timedelta(seconds=span, microseconds=1)
    assert every.before(tick) == tick
    assert every.after(tick) - tick == timedelta(microseconds=round(span * 1_000_000))
    assert Every(timedelta(seconds=span)) == every


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        lambda span, share, catch_up: Every(span, jitter=span * share, catch_up=catch_up),
        st.integers(1, 500),
        st.floats(0, 1),
        catch_ups,
    )
    | st.builds(
        lambda text, tz, catch_up: Cron(text, tz=tz, catch_up=catch_up),
        st.sampled_from(["*/7 * * * *", "30 2 * * *", "0 */2 * * mon-fri"]),
        st.sampled_from(ZONES),
        catch_ups,
    ),
    instants,
    st.lists(st.integers(-100_000, 50_000), max_size=12),
)
def test_a_tick_fires_at_most_once_however_the_clock_jumps(schedule, start, jumps):
    last, now, fired = start, start, []
    for jump in jumps:
        now += timedelta(seconds=jump)
        due = schedule.due("nightly", last, now)
        assert due.last >= last
        assert all(last < tick <= due.last for tick in due.ticks)
        assert all(schedule.before(tick) == tick for tick in due.ticks)
        assert due.last == last or schedule.fires_at("nightly", due.last) <= now
        last = due.last
        fired += due.ticks
        following = schedule.after(last)
        assert following > last
        assert schedule.fires_at("nightly", following) > now
    assert fired == sorted(set(fired))


@given(st.integers(1, 300), instants, st.integers(0, 400_000))
def test_missed_ticks_are_caught_up_as_the_schedule_says(span, last, away):
    now = last + timedelta(seconds=away)
    missed = Every(span).between(last + timedelta(microseconds=1), now, 10**6)
    assert Every(span, catch_up="all").due("n", last, now).ticks == tuple(missed[-MOST_MISSED:])
    assert Every(span, catch_up="one").due("n", last, now).ticks == tuple(missed[-1:])
    late = missed and (now - missed[-1]).total_seconds() > 60
    assert Every(span, catch_up="skip").due("n", last, now).ticks == (() if late else tuple(missed[-1:]))


@given(instants, st.floats(0, 300))
def test_jitter_delays_a_tick_by_its_name_and_instant(first, jitter):
    every = Every(300, jitter=jitter)
    tick = every.after(first)
    fires = every.fires_at("a", tick)
    assert tick <= fires <= tick + timedelta(seconds=jitter)
    assert fires == every.fires_at("a", tick)
    if jitter > 1:
        assert len({every.fires_at(name, tick) for name in "abcdefgh"}) > 1


def test_no_tick_lies_after_the_end():
    until = at("2026-01-01T10:00")
    every = Every(600, until=until)
    assert every.after(at("2026-01-01T09:55")) == until
    assert every.after(until) is None
    assert every.before(at("2027-01-01")) == until
    assert every.due("n", until, at("2027-01-01")).ticks == ()


@given(
    st.builds(Every, seconds, catch_up=catch_ups, until=st.none() | instants)
    | st.builds(Cron, expressions, tz=st.sampled_from(ZONES), jitter=st.floats(0, 50), until=st.none() | instants)
)
def test_a_stored_schedule_is_restored(schedule):
    assert restored(schedule.stored()) == schedule
    assert str(schedule)


@given(instants)
def test_a_tick_is_written_in_utc_and_read_again(tick):
    text = tick_text(tick.astimezone(ZoneInfo(BERLIN)))
    assert text.endswith("Z")
    assert tick_of(text) == tick
