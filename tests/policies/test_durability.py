"""Durability is a choice with a name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import DefinitionError
from keepstep.policies import Durability, when


@pytest.mark.parametrize(
    "written, meant",
    [
        (None, Durability.every_step()),
        ("every_step", Durability.every_step()),
        ("at_exit", Durability.at_exit()),
        ("every=5", Durability.every(5)),
        ("every=0", Durability.off()),
        ("steps=pay,mail", Durability.steps("pay", "mail")),
        ("steps= pay , mail", Durability.steps("pay", "mail")),
        ("manual", Durability.manual()),
        ("off", Durability.off()),
        (Durability.every(3), Durability.every(3)),
    ],
)
def test_every_written_form_is_understood(written, meant):
    assert Durability.named(written) == meant


def test_the_default_flushes_every_step():
    assert Durability().flushes(1)


@pytest.mark.parametrize("choice", ["at_exit", "manual", "off"])
def test_some_never_flush_by_themselves(choice):
    assert not Durability.named(choice).flushes(1_000_000, "pay", {"paid": True})


@pytest.mark.parametrize("text", ["every_step", "every=7", "steps=pay,mail", "manual", "at_exit", "off"])
def test_text_of_a_durability_is_read_back(text):
    assert str(Durability.named(text)) == text


def test_predicate_is_shown_by_its_text():
    assert str(Durability.when(when.exists("paid"))) == "when=exists('paid')"


def test_steps_flush_by_their_name():
    chosen = Durability.steps("pay", "mail")
    assert [chosen.flushes(1, name) for name in ("pay", "mail", "payer", "")] == [True, True, False, False]


def test_predicate_gets_the_state_or_else_the_name():
    assert Durability.when(when.exists("paid")).flushes(1, "pay", {"paid": 1})
    assert not Durability.when(when.exists("paid")).flushes(1, "pay", {})
    assert Durability.when(lambda name: name.startswith("p")).flushes(1, "pay")


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
    "value",
    [
        "",
        "never",
        "every",
        "every=",
        "every=-1",
        "every=x",
        "at_exit=2",
        "steps",
        "steps=",
        "steps=a,",
        "when",
        "off=1",
        5,
        "²",
    ],
)
def test_an_unknown_name_is_refused(value):
    with pytest.raises(DefinitionError):
        Durability.named(value)


@pytest.mark.parametrize(
    "options",
    [
        ("never",),
        ("every", 0),
        ("every", 1.5),
        ("at_exit", 3),
        ("every_step", 2),
        ("steps",),
        ("steps", 1, (3,)),
        ("manual", 1, ("pay",)),
        ("when",),
        ("off", 1, (), print),
    ],
)
def test_nonsense_is_refused(options):
    with pytest.raises(DefinitionError):
        Durability(*options)
