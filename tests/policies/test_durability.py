"""Durability is a choice with a name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import DefinitionError
from keepstep.policies import Durability


@pytest.mark.parametrize(
    "written, meant",
    [
        (None, Durability.every_step()),
        ("every_step", Durability.every_step()),
        ("at_exit", Durability.at_exit()),
        ("every=5", Durability.every(5)),
        (Durability.every(3), Durability.every(3)),
    ],
)
def test_as_written_at_a_workflow(written, meant):
    assert Durability.named(written) == meant


def test_the_default_flushes_every_step():
    assert Durability().flushes(1)


def test_at_exit_never_flushes_by_itself():
    assert not Durability.at_exit().flushes(1_000_000)


@given(st.integers(1, 50), st.integers(0, 500))
def test_every_n_leaves_at_most_n_minus_one_steps_unflushed(n, steps):
    unflushed = 0
    for _ in range(steps):
        unflushed += 1
        if Durability.every(n).flushes(unflushed):
            unflushed = 0
        assert unflushed <= n - 1
    assert unflushed == steps % n


@pytest.mark.parametrize(
    "value", ["", "never", "every", "every=", "every=0", "every=-1", "every=x", "at_exit=2", 5, "²"]
)
def test_an_unknown_name_is_refused(value):
    with pytest.raises(DefinitionError):
        Durability.named(value)


@pytest.mark.parametrize("options", [("never",), ("every", 0), ("every", 1.5), ("at_exit", 3), ("every_step", 2)])
def test_nonsense_is_refused(options):
    with pytest.raises(DefinitionError):
        Durability(*options)
