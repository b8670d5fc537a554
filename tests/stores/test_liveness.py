"""The turnstile of writers: who waits comes before who has just left, and nobody stops the others by not coming."""

from __future__ import annotations

import fcntl
import os
import threading
import time

import pytest

from keepstep.stores import liveness
from keepstep.stores.liveness import Turnstile


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "turnstile")


@pytest.fixture
def turnstile(path):
    """Turnstiles of several processes: a lock belongs to whoever has opened the file."""
    made = []

    def make():
        made.append(Turnstile(path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def is_locked(path):
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def until(condition):
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


class Waiter(threading.Thread):
    """One that waits for its turn, has it until it is told to leave, and then has no more."""

    def __init__(self, turnstile):
        super().__init__(daemon=True)
        self.turnstile, self.has_it, self.go = turnstile, threading.Event(), threading.Event()
        self.start()

    def run(self):
        assert self.turnstile.enter(20)
        self.has_it.set()
        self.go.wait(20)
        self.turnstile.leave()


def test_who_has_just_left_does_not_come_before_who_waits(turnstile, path):
    """A lock alone goes to whoever is faster, and that is the one that has not to be woken."""
    busy, quiet = turnstile(), turnstile()
    for _ in range(50):
        assert busy.enter(0)
        waiter = Waiter(quiet)
        until(lambda: is_locked(f"{path}-next"))
        busy.leave()
        assert not busy.enter(0), "it came first, though another waited"
        assert waiter.has_it.wait(20)
        waiter.go.set()
        assert busy.enter(20)
        waiter.join()
        busy.leave()


def test_all_who_wait_have_their_turn_before_the_busy_one_has_it_for_long(turnstile):
    busy, others = turnstile(), [turnstile() for _ in range(3)]
    assert busy.enter(0)
    waiters = [Waiter(one) for one in others]
    for waiter in waiters:
        waiter.go.set()
    turns = 0
    while not all(waiter.has_it.is_set() for waiter in waiters):
        time.sleep(0.0005)  # as long as a commit takes, at the least
        busy.leave()
        assert busy.enter(20)
        turns += 1
    busy.leave()
    assert turns < 100


def test_one_that_is_stopped_while_it_is_next_stops_nobody(turnstile, path):
    mine = turnstile()
    stopped = os.open(f"{path}-next", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    assert not mine.enter(0), "it may be about to come"
    assert mine.enter(20)
    mine.leave()
    assert mine.enter(0), "it is not waited for each time"
    mine.leave()
    os.close(stopped)
    assert mine.enter(0)
    assert not is_locked(f"{path}-next")
    mine.leave()


def test_a_long_turn_makes_nobody_impolite(turnstile, path, monkeypatch):
    monkeypatch.setattr(liveness, "COURTESY_SECONDS", 0.01)
    long, first, second = turnstile(), turnstile(), turnstile()
    assert long.enter(0)
    waiters = [Waiter(first)]
    until(lambda: is_locked(f"{path}-next"))
    waiters.append(Waiter(second))
    time.sleep(0.05)  # so that the second one has waited for longer than it would for one that is stopped
    assert not any(waiter.has_it.is_set() for waiter in waiters)
    long.leave()
    assert waiters[0].has_it.wait(20)
    waiters[0].go.set()
    assert waiters[1].has_it.wait(20)
    waiters[1].go.set()
    for waiter in waiters:
        waiter.join()
    assert not is_locked(path)
    assert not is_locked(f"{path}-next")


def test_a_turnstile_that_is_closed_while_it_waits_lets_both_locks_go(turnstile, path):
    busy, mine = turnstile(), turnstile()
    assert busy.enter(0)
    assert not mine.enter(0.05)
    mine.close()
    busy.leave()
    until(lambda: not is_locked(path) and not is_locked(f"{path}-next"))
    assert busy.enter(20)
    busy.leave()


def test_who_has_waited_in_vain_is_not_waited_for(turnstile, path):
    busy, mine = turnstile(), turnstile()
    assert busy.enter(0)
    assert not mine.enter(0.05)
    assert not is_locked(f"{path}-next")
    busy.leave()
    assert busy.enter(0)
    busy.leave()


def test_who_did_not_wait_for_one_that_was_stopped_waits_again_for_others(turnstile, path, monkeypatch):
    """Else a busy one that was once kept waiting would come before all who wait, for as long as someone does."""
    monkeypatch.setattr(liveness, "_DISCOURTESY_SECONDS", 0.1)
    busy = turnstile()
    someone = os.open(f"{path}-next", os.O_RDWR)
    fcntl.flock(someone, fcntl.LOCK_EX)
    assert busy.enter(20)
    busy.leave()
    ends, turns = time.monotonic() + 0.2, 0
    while time.monotonic() < ends:
        if busy.enter(0):
            turns += 1
            busy.leave()
    assert turns, "it did not go on without the one that is stopped"
    assert not busy.enter(0), "it never waits again"
    os.close(someone)
