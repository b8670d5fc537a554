"""What is read from YAML and JSON, where it stands, and what is refused: tags, bombs, and whatever is not data."""

import json
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.workflows.files import read as declarative_read
from keepstep.workflows.files.read import MAX_BYTES, MAX_DEPTH, Spot, Unreadable, read


def yaml(text):
    return read(text.encode(), is_json=False)[0].plain()


def refused(text, *, is_json=False):
    """Why a text is not read, and where."""
    content = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(Unreadable) as caught:
        read(content, is_json=is_json)
    return caught.value


# -- values ------------------------------------------------------------------------------------------------------------


def test_a_plain_scalar_means_what_yaml_1_2_says():
    text = "[yes, no, on, 010, 0o10, 0x1F, 1_000, 1.5, 1e3, .5, ~, null, true, False, 2026-01-01, 12:30, =, '1', \"x\"]"
    assert yaml(text) == [
        *("yes", "no", "on", 10, 8, 31, "1_000", 1.5, 1000.0, 0.5, None, None, True, False),
        *("2026-01-01", "12:30", "=", "1", "x"),
    ]


def test_every_value_and_key_knows_its_place():
    value, wrong = read(b"a: 1\nb:\n  - x\n  - {c:  2}\n", is_json=False)
    assert wrong == []
    assert (value.data["a"].key, value.data["a"].at) == (Spot(1, 1), Spot(1, 4))
    second = value.data["b"].data[1]
    assert (value.data["b"].key, second.at) == (Spot(2, 1), Spot(4, 5))
    assert (second.data["c"].key, second.data["c"].at) == (Spot(4, 6), Spot(4, 10))


def test_json_gives_the_same_values_and_places():
    text = '{\n  "a": [1, -2.5e1, "\\u00fc", null, true, {}],\n  "b": []\n}'
    value, _ = read(text.encode(), is_json=True)
    assert value.plain() == json.loads(text)
    assert (value.data["b"].key, value.data["b"].at) == (Spot(3, 3), Spot(3, 8))
    assert value.data["a"].data[5].at == Spot(2, 42)


def test_json_is_read_without_any_other_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    assert read(b'{"a": 1}', is_json=True)[0].plain() == {"a": 1}
    assert refused("a: 1").how == "install keepstep[yaml], or write the file as JSON"


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5).filter(lambda key: key != "<<"), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(TREES, st.sampled_from([None, 2]))
def test_json_text_is_read_back(tree, indent):
    text = json.dumps(tree, indent=indent)
    assert read(text.encode(), is_json=True)[0].plain() == tree


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200))
def test_text_is_json_exactly_if_it_is_for_python(text):
    try:
        expected = json.loads(text, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        with pytest.raises(Unreadable):
            read(text.encode("utf-8", "replace"), is_json=True)
    else:
        assert read(text.encode(), is_json=True)[0].plain() == expected


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, is_json", [("a: 1\nb: 2\na: 3\n", False), ('{"a": 1,\n"b": 2,\n"a": 3}', True)], ids=["yaml", "json"]
)
def test_key_that_is_given_twice_is_reported_with_both_lines(text, is_json):
    value, [wrong] = read(text.encode(), is_json=is_json)
    assert (wrong.what, wrong.at) == ("'a' is given twice, first in line 1", Spot(3, 1))
    assert value.plain() == {"a": 1, "b": 2}


def test_merge_keys_and_keys_that_are_no_text_are_reported():
    _, wrong = read(b"<<: {a: 1}\n1: x\nnull: y\n", is_json=False)
    assert [one.what for one in wrong] == [
        "merge keys (<<) are not part of YAML 1.2",
        "a key must be a text, not 1",
        "a key must be a text, not nothing",
    ]


# -- tricks ------------------------------------------------------------------------------------------------------------

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
TOWER = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200))


@pytest.mark.parametrize(
    "text, what",
    [
        (
            "a: !!python/object/apply:os.system [touch hacked]",
            "the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        ("a: !!python/name:os.system", "is not allowed"),
        ("!!map {a: 1}", "is not allowed"),
        ("a: !include /etc/passwd", "the tag '!include' is not allowed"),
        ("a: &a [*a]", "*a would hold itself"),
        ("a: *b", "nothing before this is called &b"),
        (BOMB, "more than 100,000 values"),
        (TOWER, f"nested more than {MAX_DEPTH} deep"),
        ("[" * 100_000, f"nested more than {MAX_DEPTH} deep"),
        ("- " * 5_000, f"nested more than {MAX_DEPTH} deep"),
        ("{a: " * 5_000, f"nested more than {MAX_DEPTH} deep"),
        ("? " * 5_000, "a key must be a text, not a list or a mapping"),
        ("[a]: 1", "a key must be a text, not a list or a mapping"),
        ("a: " + "9" * 5_000, "the number has 5000 digits"),
        ("a: 1e999", "not a number that can be stored"),
        ("a: .nan", "not a number that can be stored"),
        ("a: -.inf", "not a number that can be stored"),
        ('a: "\\uD800"', "half of a character"),
        ('a: "\\U00110000"', "this is not YAML"),
        ("a: \0", "this is not YAML"),
        ("a: [1", "this is not YAML"),
        ("\t- a", "this is not YAML"),
        ("%YAML 1.1\n---\na: yes", "only YAML 1.2 is read"),
        ("a: 1\n---\nb: 2", "the file holds a second document"),
        ("", "the file is empty"),
        (b"a: \xff", "not UTF-8"),
        (b" " * (MAX_BYTES + 1), "at most 1,000,000 are read"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "bytes",
)
def test_yaml_that_is_no_plain_data_is_refused(text, what):
    started = time.monotonic()
    assert what in refused(text).what
    assert time.monotonic() - started < 20  # not a measure of speed: the bombs would take for ever


@pytest.mark.parametrize(
    "text, how",
    [
        ("a:\n\tb: 1", "indent with spaces: YAML takes no tabs"),
        ("a: {{ b }}", "write a text that begins with { or [ in quotes"),
    ],
)
def test_common_yaml_mistakes_get_advice(text, how):
    with pytest.raises(Unreadable) as caught:
        read(text.encode(), is_json=False)
    assert caught.value.how == how


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1,]",
        '{"a" 1}',
        "{'a': 1}",
        "[1] x",
        "NaN",
        "-Infinity",
        "01",
        "1e999",
        '"\\ud800"',
        '"a\nb"',
        "9" * 5000,
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=lambda text: text[:12],
)
def test_text_that_is_no_json_is_refused(text):
    refused(text, is_json=True)


def test_an_anchor_may_be_used_again_within_the_limits():
    assert yaml("a: &r {attempts: 3}\nb: *r\nc: [*r]\n") == {
        "a": {"attempts": 3},
        "b": {"attempts": 3},
        "c": [{"attempts": 3}],
    }


def test_a_refusal_says_where():
    assert refused("a: 1\nb: !x 2\n").at == Spot(2, 4)
    assert refused('{"a": 1,\n "b": ?}', is_json=True).at == Spot(2, 7)
    assert refused(b"a: b\nb: \xff").at == Spot(2, 4)


def test_nothing_of_the_parser_that_makes_objects_is_used(monkeypatch):
    """Only the events of the parser are read: neither its constructors nor its tags can be reached."""
    import ruamel.yaml.constructor

    def never(*_args, **_kwargs):
        raise AssertionError("a constructor was asked")

    monkeypatch.setattr(ruamel.yaml.constructor.BaseConstructor, "construct_object", never)
    monkeypatch.setattr(ruamel.yaml.constructor.BaseConstructor, "construct_document", never)
    assert declarative_read.read(b"a: [1, {b: c}]", is_json=False)[0].plain() == {"a": [1, {"b": "c"}]}
