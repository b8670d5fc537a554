"""What a files store writes for people: names that no id leads astray, and text that gives back every byte."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from pathlib import PurePosixPath, PureWindowsPath

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepstep.errors import CheckpointCorrupt
from keepstep.records.record import Claimed, Record, StoredError
from keepstep.stores.files.names import entry_name, entry_number, folder_name, run_folder
from keepstep.stores.files.text import _FIELDS, put, sealed, take, unsealed

# -- names -------------------------------------------------------------------------------------------------------------

HOSTILE = st.sampled_from(
    ["..", ".", "/etc/passwd", "a/../../b", "..\\..\\x", "con", "NUL", "com1.txt", "aux.", "a\0b", "\n", "A", "a",
     "Ä", "a\u0308", "trailing.", "trailing ", "x" * 300, "~", "a~b", "C:\\x", "", "ﬁ", "run-1", "-rf", ".hidden"]
)  # fmt: skip
IDS = HOSTILE | st.text(max_size=220) | st.text("aAbB.-_~/\\ ", max_size=12)


@given(IDS)
@example("0..0")
def test_a_folder_is_always_one_harmless_name(run_id):
    name = folder_name(run_id)
    assert re.fullmatch(r"[a-z0-9_\-][a-z0-9._~\-]*|~[0-9a-f]+", name)
    assert ".." not in name
    assert not name.endswith((".", " "))
    assert len(name) <= 100
    assert not re.fullmatch(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name)
    assert PurePosixPath(name).name == PureWindowsPath(name).name == name
    whole = os.path.normpath(f"/store/{run_folder(run_id)}")
    assert re.fullmatch(r"/store/runs/[0-9a-f]{2}/[^/]+", whole)


@given(IDS, IDS)
@example("Run", "run")
@example("a", "A")
@example("Ä", "A\u0308")
@example("x" * 200, "x" * 199 + "y")
@example("a b", "a-b")
def test_two_ids_have_two_folders_even_without_case_and_accents(one, two):
    def folded(run_id):
        return unicodedata.normalize("NFKD", folder_name(run_id)).casefold()

    assert (folded(one) == folded(two)) is (one == two)


def test_a_plain_id_is_its_own_folder():
    for run_id in ("run-4k2", "digest-42", "a", "2030-01-01.report_7"):
        assert folder_name(run_id) == run_id


def test_entries_sort_as_they_are_numbered():
    names = [entry_name(n) for n in (1, 9, 10, 999, 1000, 123456)]
    assert names == sorted(names)
    assert [entry_number(name) for name in names] == [1, 9, 10, 999, 1000, 123456]
    assert entry_number("latest") is None
    assert entry_number("000001-001-abc.json") is None


# -- text --------------------------------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
KEYS = st.text('abcé\u2028"\\', max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
#: Texts that say the same as another text, or nothing that a decoder takes.
ODD = st.sampled_from(
    [b"", b" 1", b"1e400", b"1E5", b"-0", b"1.0e0", b'{"a":1,"a":2}', b'"\\u00e9"', b'"\\/"', b"NaN", b"\xff\xfe", b"{",
     b'{"b":1, "a":2}', b'[{"a":1,"b":2},{"b":1,"a":2}]', b"[" * 400 + b"]" * 400, b'"\\ud800"', b'{"seal":"x"}',
     b"100000000000000000000.0", b'{"run":1,"kind":2,"seq":{"seq":1,"kind":2,"run":3}}']
)  # fmt: skip
TEXTS = ODD | st.binary(max_size=40) | VALUES.map(msgspec.json.encode) | VALUES.map(lambda v: json.dumps(v).encode())


@given(TEXTS, st.booleans())
def test_every_text_comes_back_byte_for_byte(data, record):
    fields = {"run": "r"}
    put(fields, "value", data, record=record)
    file = sealed(fields)
    assert take(unsealed(file, "it"), "value", record=record) == data
    assert file.endswith(b"}\n")


@given(VALUES, st.booleans())
def test_a_file_may_be_indented_and_sorted_anew(value, record):
    """As an editor or another tool does it: what it says is what counts."""
    data = msgspec.json.encode(value)
    fields = {}
    put(fields, "value", data, record=record)
    file = json.loads(sealed(fields))
    again = msgspec.json.format(msgspec.json.encode(dict(reversed(file.items()))), indent=4)
    assert take(unsealed(again, "it"), "value", record=record) == data


@given(st.binary(max_size=300), st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_bit_is_found(data, place, flip):
    fields = {"run": "r", "entry": 7}
    put(fields, "value", data)
    file = bytearray(sealed(fields))
    file[place % len(file)] ^= flip
    try:
        found = unsealed(bytes(file), "it")
    except CheckpointCorrupt:
        return
    assert found == unsealed(sealed(fields), "it")  # it was only white space


def test_keys_are_sorted_and_the_text_is_indented():
    fields = {"run": "r"}
    put(fields, "input", b'{"b":1,"a":{"y":[1,{"d":1,"c":2}],"x":null}}')
    text = sealed(fields).decode()
    assert json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n" == text
    assert json.loads(text)["input_order"] == [["b", "a"], ["y", "x"], ["d", "c"]]


def test_the_order_of_a_records_fields_is_fixed():
    """Text that was sealed stays as it is: fields may be added to a record, at any place, but not moved."""
    for kind, where in ((Record, ""), (StoredError, "error"), (Claimed, "claimed")):
        assert kind.__struct_fields__ == _FIELDS[where]


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"null", b'{"seal":1}', b"\xff", b'{"a":1,"seal":"0"}', b"[" * 9999]
)
def test_file_of_another_program_is_refused_by_name(text):
    with pytest.raises(CheckpointCorrupt, match=r"000007\.json"):
        unsealed(text, "000007.json")
