"""The turnstile of writers: who waits comes before who has just left, and nobody stops the others by not coming."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import Counter

import pytest

from keepstep.stores import os_locks
from keepstep.stores.sqlite import writer
from keepstep.stores.sqlite.writer import Turnstile


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
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


class Hand:
    """The time of the turnstiles, moved by hand; with `moves`, their own waits move it, too."""

    def __init__(self, monkeypatch, *, moves=False):
        self.now, self.moves, self.polls = 0.0, moves, Counter()
        monkeypatch.setattr(writer, "time", self)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.polls[threading.current_thread()] += 1
        if self.moves:
            self.now += seconds
        time.sleep(0.0001)


class Waiter(threading.Thread):
    """One that waits for its turn, has it until it is told to leave, and then has no more."""

    def __init__(self, turnstile):
        super().__init__(daemon=True)
        self.turnstile, self.has_it, self.go = turnstile, threading.Event(), threading.Event()
        self.start()

    def run(self):
        assert self.turnstile.enter(60)
        self.has_it.set()
        self.go.wait(60)
        self.turnstile.leave()


def test_waiting_writer_comes_before_one_that_has_just_left(turnstile, path):
    """A lock alone goes to whoever is faster, and that is the one that has not to be woken."""
    busy, quiet = turnstile(), turnstile()
    for _ in range(50):
        assert busy.enter(0)
        waiter = Waiter(quiet)
        until(lambda: is_locked(f"{path}-next"))
        busy.leave()
        assert not busy.enter(0), "it came first, though another waited"
        assert waiter.has_it.wait(60)
        waiter.go.set()
        assert busy.enter(60)
        waiter.join()
        busy.leave()


def test_all_waiting_writers_have_their_turn_before_a_busy_one(turnstile, monkeypatch):
    Hand(monkeypatch)  # nobody is late, however slow the machine is
    busy, others = turnstile(), [turnstile() for _ in range(3)]
    assert busy.enter(0)
    waiters = [Waiter(one) for one in others]
    for waiter in waiters:
        waiter.go.set()
    turns = 0
    while not all(waiter.has_it.is_set() for waiter in waiters):
        time.sleep(0.0005)  # as long as a commit takes, at the least
        busy.leave()
        assert busy.enter(60)
        turns += 1
    busy.leave()
    assert turns < 100


def test_stopped_waiter_stops_no_other_writer(turnstile, path, monkeypatch):
    Hand(monkeypatch, moves=True)
    mine = turnstile()
    stopped = os.open(f"{path}-next", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    assert not mine.enter(0), "it may be about to come"
    assert mine.enter(60)
    mine.leave()
    assert mine.enter(0), "it is not waited for each time"
    mine.leave()
    os.close(stopped)
    assert mine.enter(0)
    assert not is_locked(f"{path}-next")
    mine.leave()


def test_waiters_keep_their_order_during_a_long_turn(turnstile, path, monkeypatch):
    hand = Hand(monkeypatch)
    long, first, second = turnstile(), turnstile(), turnstile()
    assert long.enter(0)
    waiters = [Waiter(first)]
    until(lambda: is_locked(f"{path}-next"))
    waiters.append(Waiter(second))
    until(lambda: hand.polls[waiters[1]])
    hand.now += 10 * writer.YIELD_SECONDS  # the second one has waited for longer than it would for one that is stopped
    seen = hand.polls[waiters[1]] + 1
    until(lambda: hand.polls[waiters[1]] > seen)
    assert not any(waiter.has_it.is_set() for waiter in waiters)
    long.leave()
    assert waiters[0].has_it.wait(60)
    waiters[0].go.set()
    assert waiters[1].has_it.wait(60)
    waiters[1].go.set()
    for waiter in waiters:
        waiter.join()
    assert not is_locked(path)
    assert not is_locked(f"{path}-next")


def test_turnstile_closed_while_it_waits_releases_both_locks(turnstile, path):
    busy, mine = turnstile(), turnstile()
    assert busy.enter(0)
    assert not mine.enter(0.05)
    mine.close()
    busy.leave()
    until(lambda: not is_locked(path) and not is_locked(f"{path}-next"))
    assert busy.enter(60)
    busy.leave()


def test_writer_that_gave_up_waiting_is_not_waited_for(turnstile, path):
    busy, mine = turnstile(), turnstile()
    assert busy.enter(0)
    assert not mine.enter(0.05)
    assert not is_locked(f"{path}-next")
    busy.leave()
    assert busy.enter(0)
    busy.leave()


def test_writer_that_passed_a_stopped_one_waits_for_others_again(turnstile, path, monkeypatch):
    """Else a busy one that was once kept waiting would come before all who wait, for as long as someone does."""
    hand = Hand(monkeypatch, moves=True)
    busy = turnstile()
    someone = os.open(f"{path}-next", os.O_RDWR)
    fcntl.flock(someone, fcntl.LOCK_EX)
    assert busy.enter(60)
    busy.leave()
    for _ in range(3):
        hand.now += writer._BYPASS_SECONDS / 4
        assert busy.enter(0), "it did not go on without the one that is stopped"
        busy.leave()
    hand.now += writer._BYPASS_SECONDS / 4
    assert not busy.enter(0), "it never waits again"
    os.close(someone)


# -- who holds a lock --------------------------------------------------------------------------------------------------


def locks(monkeypatch, tmp_path, *held):
    """Make the system tell of these locks: a kind, a process and a file each."""
    lines = [
        f"{number}: {kind} ADVISORY  WRITE {pid} fe:00:{file.stat().st_ino} 0 EOF"
        for number, (kind, pid, file) in enumerate(held, 1)
    ]
    told = tmp_path / "locks"
    told.write_text("\n".join(lines))
    monkeypatch.setattr(os_locks, "_LOCKS", told)


def test_the_process_that_has_the_turn_is_named_before_one_that_waits_or_reads(monkeypatch, tmp_path):
    turn, shared = tmp_path / "turnstile", tmp_path / "shm"
    turn.touch(), shared.touch()
    own, other = os.getpid(), os.getppid()
    name = os_locks.lock_holder
    locks(monkeypatch, tmp_path, ("POSIX", own, shared), ("POSIX", 4_999_999, shared), ("FLOCK", other, turn))
    assert name(str(turn), str(shared)) == f"process {other}"
    locks(monkeypatch, tmp_path, ("FLOCK", own, turn), ("POSIX", other, shared))
    assert name(str(turn), str(shared)) == f"process {other}"
    locks(monkeypatch, tmp_path, ("FLOCK", own, turn))
    assert name(str(turn), str(shared)) == f"process {own}"
    locks(monkeypatch, tmp_path)
    assert name(str(turn), str(shared)) == "another process"
