"""Findings about topics: who does not read, and who waits."""

from datetime import UTC, datetime, timedelta

from keepstep.care.topic_findings import topic_concerns
from keepstep.kernel.topic import Publisher, Subscriber, TopicState

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def ago(**span):
    return NOW - timedelta(**span)


def found(state):
    return [(one.code, one.runs) for one in topic_concerns(state, NOW)]


def test_healthy_topic_has_no_finding():
    readers = [Subscriber("a", "a", 900, ago(hours=1)), Subscriber("b", "b", 500, ago(minutes=1))]
    waits = [Publisher("p", ago(seconds=10))]
    assert found(TopicState("t", published=1000, subscribers=readers, publishers=waits)) == []


def test_subscriber_that_does_not_read_is_named():
    readers = [Subscriber("a", "a", 200, ago(hours=1))]
    assert found(TopicState("t", published=1000, subscribers=readers)) == [("topic-unread", ("a",))]


def test_publisher_that_waits_long_is_named():
    readers = [Subscriber("a", "a", 200, ago(minutes=5))]
    waits = [Publisher("p", ago(minutes=2)), Publisher("q", ago(seconds=2))]
    state = TopicState("t", published=1000, subscribers=readers, publishers=waits)
    assert found(state) == [("topic-full", ("p",))]
    (concern,) = topic_concerns(state, NOW)
    assert "run p waits to publish, because run a does not read" in concern.message
