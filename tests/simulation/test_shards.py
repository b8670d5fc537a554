"""What breaks and what holds if rows that share a transaction lie on two shards."""

from __future__ import annotations

from itertools import islice

from tests.simulation import draw, play
from tests.simulation.seeds import FIRST_SEED
from tests.simulation.shards import GatesApart, RunsApart, RunsApartWithOutbox, play_apart

#: A seed in which a process dies after it has written a parent, and before the child on the other shard.
LOST_CHILD = 46
#: Histories with a queue that are played.
HISTORIES = 12


def test_only_a_rate_is_lost_if_the_row_of_a_gate_is_committed_after_its_leases():
    with_queue = (plan for plan in map(draw, range(FIRST_SEED, FIRST_SEED + 1000)) if "queue" in plan)
    deaths, broken = 0, set()
    for plan in islice(with_queue, HISTORIES):
        outcome, died = play_apart(plan, GatesApart)
        deaths += died
        broken |= {what.partition(":")[0] for what in outcome.broken}
    assert deaths
    assert broken <= {"runs of a queue begin no faster than its rate"}


def test_a_parent_waits_forever_if_its_child_is_written_in_another_transaction():
    outcome, deaths = play_apart(draw(LOST_CHILD), RunsApart)
    assert deaths
    assert any(what.startswith("every accepted run ends") for what in outcome.broken)


def test_an_outbox_in_the_first_transaction_brings_the_child_back():
    outcome, deaths = play_apart(draw(LOST_CHILD), RunsApartWithOutbox)
    assert deaths
    assert not outcome.broken
    assert not play(draw(LOST_CHILD)).broken
