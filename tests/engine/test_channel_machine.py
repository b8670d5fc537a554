"""The keeper of a channel, asked by itself: whatever comes when, each notice is delivered once, in few deliveries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from keepstep.kernel.channel import LONGEST_DELIVERY, MOST_COUNTS, MOST_NOTICES, ChannelKeeper, ChannelState
from keepstep.kernel.keeper import MOST_SIGNALS, Message, Moment
from keepstep.model.keepers import TELL
from keepstep.model.signal import PAUSE, RESUME

START = datetime(2026, 1, 1, tzinfo=UTC)
GATHER = 10.0
KEEPER = ChannelKeeper(GATHER)


def notice(number=0, workflow="w"):
    payload = {"act": "notice", "topic": "failed", "about": f"r{number}", "workflow": workflow, "text": "broken"}
    return Message(TELL, payload, "keepstep", START)


def more(count):
    return Message(TELL, {"act": "more", "counts": [["failed", "w", count]]}, "keepstep", START)


def total_of(start):
    digest = msgspec.json.decode(start.input)[0][0]
    assert digest["total"] == sum(one["count"] for one in digest["counts"])
    assert len(digest["notices"]) <= MOST_NOTICES
    return digest["total"]


def at(seconds):
    return START + timedelta(seconds=seconds)


steps = st.tuples(
    st.floats(0, 30),
    st.integers(0, MOST_SIGNALS),
    st.integers(0, 1000),
    st.booleans(),
    st.sampled_from([None, PAUSE, RESUME]),
)


@given(st.lists(steps, max_size=30))
def test_every_notice_is_delivered_once_and_deliveries_do_not_overlap(moves):
    state, seconds, told, delivered, runs, begun_at = ChannelState("ops"), 0.0, 0, 0, [], []
    for passed, notices, others, has_ended, command in moves:
        seconds += passed
        messages = [notice(number) for number in range(notices)] + ([more(others)] if others else [])
        messages += [Message(command, None, "ann", START)] if command else []
        told += notices + others
        ended = frozenset(KEEPER.watched(state)) if has_ended else frozenset()
        open_before = state.open if not has_ended else ""
        was_told_at = state.opened_at
        result = KEEPER.react(state, Moment(at(seconds), messages[:MOST_SIGNALS] or messages, ended))
        told -= sum(_count(one) for one in messages[MOST_SIGNALS:])
        state = msgspec.json.decode(msgspec.json.encode(result.state), type=ChannelState)
        for start in result.starts:
            assert not open_before or at(seconds) - was_told_at > LONGEST_DELIVERY
            assert not state.paused
            delivered += total_of(start)
            runs.append(start.run)
            begun_at.append(seconds)
        if state.since is not None and not state.paused:
            assert result.wake_at is not None, "nothing would deliver what was gathered"
            assert result.gathers
            assert at(seconds) < result.wake_at <= at(seconds + GATHER)
    assert delivered + state.total == told
    assert len(set(runs)) == len(runs)
    assert all(later - earlier >= GATHER for earlier, later in pairwise(begun_at))


def _count(message):
    if message.name != TELL:
        return 0
    return 1 if message.payload["act"] == "notice" else message.payload["counts"][0][2]


def test_a_flood_prolongs_the_gathering_for_a_while():
    flood = [notice(number) for number in range(MOST_SIGNALS)]
    state = KEEPER.react(ChannelState("ops"), Moment(at(0), flood)).state
    assert not KEEPER.react(state, Moment(at(GATHER), flood)).starts
    (start,) = KEEPER.react(state, Moment(at(6 * GATHER), flood)).starts
    assert total_of(start) == 3 * MOST_SIGNALS


def test_counts_of_very_many_workflows_are_bounded():
    state = ChannelState("ops")
    for number in range(2 * MOST_COUNTS):
        state = KEEPER.react(state, Moment(at(0), [notice(number, f"w{number}")])).state
    assert len(state.counts) == MOST_COUNTS + 1
    assert sum(one.count for one in state.counts) == state.total == 2 * MOST_COUNTS


def delivering():
    state = KEEPER.react(ChannelState("ops"), Moment(at(0), [notice(), more(2)])).state
    return KEEPER.react(state, Moment(at(GATHER))).state


def test_a_delivery_counts_only_when_it_has_ended_well():
    state = delivering()
    run = frozenset({state.open})
    assert (state.sent, state.delivered, state.undelivered) == (3, 0, 0)
    well = KEEPER.react(delivering(), Moment(at(20), ended=run)).state
    assert (well.sent, well.delivered, well.undelivered, well.failed) == (0, 3, 0, [])
    failed = KEEPER.react(delivering(), Moment(at(20), ended=run, failed=run)).state
    assert (failed.sent, failed.delivered, failed.undelivered, failed.failed) == (0, 0, 3, [state.open])
    late = KEEPER.react(delivering(), Moment(at(GATHER + 1) + LONGEST_DELIVERY)).state
    assert (late.open, late.undelivered, late.failures) == ("", 3, 1)


def test_a_clock_that_is_set_back_holds_no_notice_up():
    state = KEEPER.react(ChannelState("ops"), Moment(at(0), [notice()])).state
    back = START - timedelta(days=1)
    result = KEEPER.react(state, Moment(back))
    assert result.wake_at == back + timedelta(seconds=GATHER)
    state = delivering()
    state = KEEPER.react(state, Moment(back)).state
    assert not KEEPER.react(state, Moment(back + LONGEST_DELIVERY + timedelta(seconds=1))).state.open


def test_a_number_that_is_taken_is_passed_over():
    state = KEEPER.react(ChannelState("ops"), Moment(at(0), [notice()])).state
    moment = Moment(at(GATHER), taken=frozenset({"keepstep.deliver:ops:1", "keepstep.deliver:ops:2"}))
    (start,) = KEEPER.react(state, moment).starts
    assert start.run == "keepstep.deliver:ops:3"
