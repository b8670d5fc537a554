"""Keys and ciphers: what is accepted, what is refused, and that a key is shown nowhere."""

from __future__ import annotations

import base64
import pickle
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keepstep as ks
from keepstep.errors import CheckpointCorrupt, EncryptionError
from keepstep.ports import Row
from keepstep.records.keys import Cipher, Keys, is_encrypted, key_id
from keepstep.records.record import Record, StoredError, opened, seal, unseal

ONE, TWO = b"1" * 32, b"2" * 32
TEXT = base64.b64encode(ONE).decode()


def test_the_data_key_of_a_run_comes_back_with_the_same_key_only():
    keys = Keys("one", {"one": ONE})
    wrapped, cipher = keys.new_cipher("r")
    hidden = cipher.hide(b"value", "input")
    assert key_id(wrapped) == "one"
    assert keys.cipher("r", wrapped).reveal(hidden, "input") == b"value"
    with pytest.raises(EncryptionError, match="'one' given here is not the one"):
        Keys("one", {"one": TWO}).cipher("r", wrapped)
    with pytest.raises(EncryptionError, match="is encrypted with the key 'one'; known here: 'two'") as told:
        Keys("two", {"two": TWO}).cipher("r", wrapped)
    assert told.value.key_id == "one"
    with pytest.raises(EncryptionError):
        keys.cipher("another", wrapped)  # the data key of one run is of no use to another


def test_a_key_that_is_wrapped_anew_is_the_same_data_key():
    old, new = Keys("one", {"one": ONE}), Keys("two", {"two": TWO, "one": ONE})
    wrapped, cipher = old.new_cipher("r")
    again = new.rewrap("r", wrapped)
    assert key_id(again) == "two"
    assert Keys("two", {"two": TWO}).cipher("r", again).reveal(cipher.hide(b"v", "input"), "input") == b"v"


@given(st.binary(max_size=60), st.integers(0, 10_000), st.integers(1, 255))
def test_no_changed_byte_is_taken_for_what_was_written(plain, place, change):
    cipher = Cipher("r", ONE)
    hidden = bytearray(cipher.hide(plain, "record", b"text"))
    hidden[place % len(hidden)] ^= change
    with pytest.raises(CheckpointCorrupt):
        cipher.reveal(bytes(hidden), "record", b"text")


@given(st.binary(max_size=40), st.integers(0, 70))
def test_nothing_cut_short_is_taken_for_what_was_written(plain, length):
    cipher = Cipher("r", ONE)
    hidden = cipher.hide(plain, "record", b"text")
    with pytest.raises(CheckpointCorrupt):
        cipher.reveal(hidden[: min(length, len(hidden) - 1)], "record", b"text")


def test_ciphertext_of_another_place_is_refused():
    cipher = Cipher("r", ONE)
    hidden = cipher.hide(b"v", "signal", "go", "id-1")
    assert cipher.reveal(hidden, "signal", "go", "id-1") == b"v"
    for place in [("signal", "go", "id-2"), ("signal", "goid-1"), ("signal", "g", "oid-1"), ("input", "go", "id-1")]:
        with pytest.raises(CheckpointCorrupt):
            cipher.reveal(hidden, *place)
    with pytest.raises(CheckpointCorrupt):
        Cipher("s", ONE).reveal(hidden, "signal", "go", "id-1")


def test_one_value_is_never_hidden_in_the_same_way_twice():
    cipher = Cipher("r", ONE)
    assert len({cipher.hide(b"v", "input")[:12] for _ in range(2000)}) == 2000


@given(st.binary(max_size=50))
def test_text_is_hidden_in_json_text(plain):
    cipher = Cipher("r", ONE)
    text = cipher.hide_text(plain, "input")
    assert is_encrypted(text)
    assert cipher.reveal_text(text, "input") == plain
    assert not is_encrypted(b'{"$":"encrypted"}')
    with pytest.raises(CheckpointCorrupt, match="is not encrypted"):
        cipher.reveal_text(b'"plain"', "input")


# -- where keys come from ----------------------------------------------------------------------------------------------


def test_a_function_is_asked_once_for_each_key():
    asked = []

    def fetch(name):
        asked.append(name)
        return {"one": ONE, "two": TWO}[name]

    wrapped, _ = Keys("one", {"one": ONE}).new_cipher("r")
    keys = Keys("two", fetch)
    for _ in range(3):
        keys.cipher("r", wrapped)
        keys.new_cipher("s")
    assert asked == ["one", "two"]


def test_function_that_fails_is_reported_without_its_message():
    def fetch(name):
        raise RuntimeError(f"no access with token hunter2 to {name}")

    with pytest.raises(EncryptionError, match=r"'one' is needed, which could not be fetched \(RuntimeError\)") as told:
        Keys("one", fetch).check()
    assert "hunter2" not in str(told.value)
    assert told.value.__suppress_context__


def test_keys_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("KEEPSTEP_KEYS", raising=False)
    for unset in (lambda: None, lambda: monkeypatch.setenv("KEEPSTEP_KEYS", " ")):
        unset()
        assert Keys.if_in_env() is None
        with pytest.raises(ks.DefinitionError, match="the environment variable KEEPSTEP_KEYS is not set, or empty"):
            Keys.from_env()
    with pytest.raises(ks.DefinitionError, match="OTHER"):
        Keys.from_env("OTHER")
    two = base64.b64encode(TWO).decode()
    monkeypatch.setenv("KEEPSTEP_KEYS", f"two={two}, one={TEXT}")
    keys = Keys.from_env()
    assert keys.current == "two"
    assert not keys.plaintext
    keys.cipher("r", Keys("one", {"one": ONE}).new_cipher("r")[0])
    (tmp_path / "keys").write_text(f"one={TEXT.rstrip('=')}\nplaintext\n")
    monkeypatch.setenv("KEEPSTEP_KEYS", f"@{tmp_path / 'keys'}")
    assert Keys.from_env().plaintext


@pytest.mark.parametrize(
    "value, said",
    [
        (TEXT, "entry 1 of KEEPSTEP_KEYS is not id=base64"),
        (f"a={TEXT},a={TEXT}", "entry 2"),
        ("a=hunter2hunter2", "the key 'a' must be 32 bytes"),
        ("a=not~base64", "the key 'a' is not base64"),
        ("plaintext", "holds no key"),
        ("@/no/such/file", "cannot be read"),
        ("@/dev/null", "holds no key"),
        (",", "holds no key"),
    ],
)
def test_wrong_environment_is_reported_without_its_value(monkeypatch, value, said):
    monkeypatch.setenv("KEEPSTEP_KEYS", value)
    with pytest.raises(ks.DefinitionError, match=said) as told:
        Keys.from_env()
    assert "hunter2" not in str(told.value)
    assert TEXT[:10] not in str(told.value)


@pytest.mark.parametrize("key", [b"short", "c2hvcnQ=", 7, None])
def test_key_of_a_wrong_size_or_type_is_refused(key):
    with pytest.raises(ks.DefinitionError, match="'one' must be 32 bytes"):
        Keys("one", {"one": key})


def test_current_key_must_be_known_and_have_a_valid_id():
    with pytest.raises(ks.DefinitionError, match="'two' is not among the keys: one"):
        Keys("two", {"one": ONE})
    with pytest.raises(ks.DefinitionError, match="a key's id must be"):
        Keys("o:ne", {"o:ne": ONE})


@pytest.mark.parametrize("wrapped", ["", "1", "1:one", "1::x", "2:one:abcd", "1:o ne:abcd"])
def test_unreadable_data_key_is_refused(wrapped):
    with pytest.raises(EncryptionError, match="not readable"):
        key_id(wrapped)


def test_keys_are_neither_shown_nor_pickled():
    keys = Keys("one", {"one": TEXT})
    assert repr(keys) == "<Keys current='one'>"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(keys)
    assert "1111" not in repr(keys.new_cipher("r")[1])


def test_missing_package_is_reported_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ks.DefinitionError, match=r"pip install 'keepstep\[encryption\]'"):
        Keys("one", {"one": ONE})


# -- the format that is stored -----------------------------------------------------------------------------------------

#: Written by the first version that encrypts, with the key `one`: what was stored then must be readable for ever.
WRAPPED = "1:one:AgICAgICAgICAgICIM37D9WXM1+S4PJpqy5Eh3ewVgInWeQ6dlMr7C6+6lYWIH5iuy0Z94Q5IuWtt8Z7"
INPUT = b'{"$":"encrypted","v":"BAQEBAQEBAQEBAQEtPpqHbXDxhSf0EK2BfvAKQKI8PZiWG/X"}'
PAYLOAD = b'{"$":"encrypted","v":"BQUFBQUFBQUFBQUFNN/VlqZVmlq9txME0Sy2VaE="}'
RECORD = (
    b'{"run":"r","kind":"step failed","seq":7,"step":"pay#1","outcome":"failure","ordinal":1,"attempt":2,"worker":"w",'
    b'"finished_at":"2026-01-01T00:00:00Z","packed":"aes-256-gcm","error":{"type":"E","message":""},"data":{"signal":3},'
    b'"format":2,"previous":"pppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppp"}'
)
BODY = (
    "AwMDAwMDAwMDAwMDkho27J7oQgyPxp1FrTsemcUfgynuqKfB2DKHZM5oqlFLgQuNM27XyZLhGKwhAb9cZ4UzdefP/I1yO6luCzEJnZ+scYcQ8yhw"
    "qxSMoyURIcwfucN9TJ1XjJkRExl3wdOiskXNTVpQoeKBJyGyyUad"
)
CHECKSUM = "5dcb8feb433925903bdf51f1f6ee115edbd7330d8921b5120487bb00babf9063"


def test_values_of_the_first_version_are_read():
    cipher = Keys("one", {"one": ONE}).cipher("r", WRAPPED)
    assert cipher.reveal_text(INPUT, "input") == b"[[1],{}]"
    assert cipher.reveal_text(PAYLOAD, "signal", "go", "i") == b"5"
    row = opened(Row(7, "step failed", RECORD, base64.b64decode(BODY)), cipher)
    ((record, checksum),) = unseal([row], "r", after=6)
    assert checksum == CHECKSUM
    assert (record.raw(), record.digest, record.data) == (b'{"a":1}', "d", {"signal": 3, "reason": "because"})
    assert (record.error.message, record.error.traceback) == ("secret", "tb")


@given(st.integers(0, 300_000), st.booleans())
def test_a_record_of_any_size_comes_back(size, failed):
    cipher = Cipher("r", ONE)
    record = Record("r", "step completed", step="s#1", digest="d", value=msgspec.Raw(b'"%s"' % (b"x" * size)))
    if failed:
        record.error = StoredError("E", "m" * size, traceback="t")
    row, checksum = seal(record, 1, "", cipher)
    assert len(row.body) < 110_000  # what is large is compressed first
    ((back, found),) = unseal([opened(row, cipher)], "r")
    assert (back.raw(), back.error, found) == (record.raw(), record.error, checksum)
    assert back.digest == "d"
    ((hidden, _),) = unseal([row], "r")
    with pytest.raises(EncryptionError, match="its key is needed"):
        hidden.raw()
