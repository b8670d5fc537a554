"""Who may be given up for dead: by the end of its process, or by its silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from keepstep.stores import watch
from keepstep.stores.watch import Watch, has_ended, process_identity
from keepstep.testing.store_contract import SteppedClock

LEASE = 15.0


@pytest.fixture
def clock():
    return SteppedClock()


@pytest.fixture
def observed(clock):
    """A watch by `me`, which has just seen a heartbeat of `you`."""
    one = Watch(clock, LEASE)
    one.renewed("me")
    one.observe({"you": 1})
    return one


def beat(observed, clock, times):
    for _ in range(times):
        clock.advance(LEASE / 3)
        observed.renewed("me")


def test_silence_for_the_whole_lease_is_death(observed, clock):
    beat(observed, clock, 3)
    assert not observed.is_silent("me", "you", LEASE)
    clock.advance(0.001)
    assert observed.is_silent("me", "you", LEASE)


def test_a_heartbeat_ends_the_silence(observed, clock):
    beat(observed, clock, 3)
    observed.observe({"you": 2})
    beat(observed, clock, 3)
    assert not observed.is_silent("me", "you", LEASE)


def test_a_failed_renewal_of_the_observer_starts_its_observation_again(observed, clock):
    beat(observed, clock, 2)
    observed.failed("me")
    clock.advance(1)
    assert not observed.is_silent("me", "you", LEASE)
    observed.renewed("me")
    beat(observed, clock, 3)
    assert not observed.is_silent("me", "you", LEASE)
    clock.advance(0.001)
    assert observed.is_silent("me", "you", LEASE)


def test_observer_that_was_stopped_marks_nobody_dead(observed, clock):
    beat(observed, clock, 1)
    clock.advance(LEASE)
    assert not observed.is_silent("me", "you", LEASE)
    observed.renewed("me")
    assert not observed.is_silent("me", "you", LEASE)


def test_observer_that_never_renewed_marks_nobody_dead(observed, clock):
    beat(observed, clock, 9)
    assert not observed.is_silent("operator", "you", LEASE)


@pytest.mark.parametrize("stored", [None, "x", float("nan"), float("inf"), -1.0])
def test_a_lease_that_cannot_be_read_lasts_as_long_as_the_observers(observed, clock, stored):
    beat(observed, clock, 3)
    assert not observed.is_silent("me", "you", stored)
    clock.advance(0.001)
    assert observed.is_silent("me", "you", stored)


def test_a_longer_lease_is_respected(observed, clock):
    beat(observed, clock, 11)
    assert not observed.is_silent("me", "you", 4 * LEASE)
    beat(observed, clock, 2)
    assert observed.is_silent("me", "you", 4 * LEASE)


# -- processes of this machine -----------------------------------------------------------------------------------------

PROGRAM = "from keepstep.stores.watch import process_identity; print(process_identity(), flush=True); input()"


@pytest.fixture
def process():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.identity = process.stdout.readline().strip()
        yield process
        process.kill()


def test_a_process_that_ended_is_known_to_have(process):
    assert not has_ended(process.identity)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process.identity), "nobody has waited for it yet"
    process.wait()
    assert has_ended(process.identity)


def test_a_stopped_process_has_not_ended(process):
    os.kill(process.pid, signal.SIGSTOP)
    assert not has_ended(process.identity)


def test_a_number_that_another_process_has_now_is_no_proof_of_life():
    mine = process_identity()
    assert not has_ended(mine)
    before, _, started = mine.rpartition(" ")
    assert has_ended(f"{before} {int(started) + 1}")


@pytest.mark.parametrize("part", [0, 1, 2])
def test_another_host_boot_or_namespace_proves_nothing(process, part):
    words = process.identity.split(" ")
    process.kill()
    process.wait()
    words[part] = "other"
    assert not has_ended(" ".join(words))


@pytest.mark.parametrize("identity", ["", "x", "here 0 1", "a b c 99999999999 1", "a b c 1", "\x00 1 1"])
def test_invalid_identity_proves_nothing(identity):
    assert not has_ended(identity)


def test_process_has_no_identity_without_proc(monkeypatch):
    monkeypatch.setattr(watch, "_place", lambda pid: None)
    assert process_identity() == ""
