"""Keys for encryption at rest: one master key wraps the data key of each run, which the run's cipher uses.

Every ciphertext is bound to its run and its place there, so it cannot be decrypted anywhere else.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointCorrupt, DefinitionError, EncryptionError

#: Environment variable in which the command line looks for keys.
VARIABLE = "KEEPSTEP_KEYS"

KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")
#: Word among the keys of the environment that stands for `plaintext=True`.
_PLAINTEXT = "plaintext"
_WRAPPED = "1"

Material = bytes | str


class Keys:
    """The master keys of a store's runs: the current one, and older ones for reading.

    `keys` maps ids to 32 bytes each, raw or as base64, or is a function that returns a key for an id, called once per
    id. New runs are encrypted with the key named `current`. A run in plain text is refused, unless `plaintext` is true,
    for stores with earlier runs in plain text. Neither `repr` nor an error shows a key, and keys cannot be pickled.
    """

    def __init__(
        self, current: str, keys: Mapping[str, Material] | Callable[[str], Material], *, plaintext: bool = False
    ) -> None:
        self.current = _checked_id(current)
        self.plaintext = plaintext
        self._ask = keys if callable(keys) else None
        self._known: dict[str, Any] = {}
        if not callable(keys):
            self._known = {_checked_id(name): _aead(_material(name, key)) for name, key in keys.items()}
            if current not in self._known:
                raise DefinitionError(f"the current key {current!r} is not among the keys: {', '.join(keys) or 'none'}")

    @classmethod
    def from_env(cls, variable: str = VARIABLE) -> Keys:
        """Return the keys from an environment variable, or from the file that it names as `@path`. It must be set.

        Keys are written `id=base64`, separated by commas or spaces; the first is the current one. The word `plaintext`
        among them admits runs that are not encrypted.
        """
        keys = cls.if_in_env(variable)
        if keys is None:
            raise DefinitionError(
                f"the environment variable {variable} is not set, or empty, so there are no keys. "
                "To store runs in plain text, omit keys="
            )
        return keys

    @classmethod
    def if_in_env(cls, variable: str = VARIABLE) -> Keys | None:
        """Return the keys from the environment, or None, for no encryption, if the variable is not set or empty."""
        text = os.environ.get(variable, "").strip()
        if not text:
            return None
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise DefinitionError(f"the file that {variable} names cannot be read: {error}") from None
        words = [word for word in re.split(r"[,\s]+", text) if word]
        found: dict[str, Material] = {}
        for place, word in enumerate((word for word in words if word != _PLAINTEXT), 1):
            name, equals, key = word.partition("=")
            if (
                not equals or not key.strip("=") or not _ID.fullmatch(name) or name in found
            ):  # the text is not shown, because it may be a key
                raise DefinitionError(f"entry {place} of {variable} is not id=base64, or its id occurs twice")
            found[name] = key
        if not found:
            raise DefinitionError(f"{variable} holds no key; write id=base64")
        return cls(next(iter(found)), found, plaintext=_PLAINTEXT in words)

    def __repr__(self) -> str:
        return f"<Keys current={self.current!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys cannot be pickled, because the copy would not be protected")

    def check(self) -> None:
        """Fetch the current key, so that a missing key is reported at once."""
        self._key(self.current, "")

    def new_cipher(self, run: str) -> tuple[str, Cipher]:
        """Return a new data key for a run, wrapped with the current key, and its cipher."""
        data_key = os.urandom(KEY_BYTES)
        return self._wrap(run, data_key), Cipher(run, data_key)

    def cipher(self, run: str, wrapped: str) -> Cipher:
        """Return the cipher of a run, from its wrapped data key."""
        return Cipher(run, self._unwrap(run, wrapped))

    def rewrap(self, run: str, wrapped: str) -> str:
        """Return the same data key, wrapped with the current key."""
        return self._wrap(run, self._unwrap(run, wrapped))

    def _wrap(self, run: str, data_key: bytes) -> str:
        sealed = _encrypt(self._key(self.current, run), data_key, _about(run, "data key", self.current))
        return f"{_WRAPPED}:{self.current}:{base64.b64encode(sealed).decode('ascii')}"

    def _unwrap(self, run: str, wrapped: str) -> bytes:
        name = key_id(wrapped)
        key = self._key(name, run)
        try:
            sealed = base64.b64decode(wrapped.rpartition(":")[2], validate=True)
            return _decrypt(key, sealed, _about(run, "data key", name))
        except (ValueError, binascii.Error, _Refused):
            raise EncryptionError(
                f"run {run!r}: the key {name!r} given here is not the one that its data key was encrypted with, "
                "or its data key was changed",
                name,
                wrong=True,
            ) from None

    def _key(self, name: str, run: str) -> Any:
        found = self._known.get(name)
        if found is not None:
            return found
        wanted = f"run {run!r} is encrypted with the key {name!r}" if run else f"the key {name!r} is needed"
        if self._ask is None:
            raise EncryptionError(f"{wanted}; known here: {', '.join(map(repr, self._known))}", name)
        try:
            material = self._ask(name)
        except Exception as error:  # noqa: BLE001 - its text is not shown: it may hold secrets
            raise EncryptionError(f"{wanted}, which could not be fetched ({type(error).__name__})", name) from None
        self._known[name] = found = _aead(_material(name, material))
        return found


class Cipher:
    """Encrypts and decrypts the values of one run. Every encryption uses a fresh nonce."""

    __slots__ = ("_aead", "run")

    def __init__(self, run: str, data_key: bytes) -> None:
        self.run = run
        self._aead = _aead(data_key)

    def hide(self, plain: bytes, what: str, *details: Material) -> bytes:
        """Return a ciphertext that `reveal` decrypts only for the same run, kind of value and details."""
        return _encrypt(self._aead, plain, _about(self.run, what, *details))

    def reveal(self, data: bytes, what: str, *details: Material) -> bytes:
        """Return the plain text. Raise `CheckpointCorrupt` if the ciphertext is not the one written here."""
        try:
            return _decrypt(self._aead, data, _about(self.run, what, *details))
        except _Refused:
            raise CheckpointCorrupt(
                f"run {self.run!r}: its {what} cannot be decrypted: it was changed, cut short, or belongs elsewhere"
            ) from None

    def hide_text(self, plain: bytes, what: str, *details: Material) -> bytes:
        """Return a ciphertext as JSON text, otherwise like `hide`."""
        return b'{"$":"encrypted","v":"%s"}' % base64.b64encode(self.hide(plain, what, *details))

    def reveal_text(self, text: bytes, what: str, *details: Material) -> bytes:
        """Decrypt JSON text, otherwise like `reveal`; refuse text that is not encrypted."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise CheckpointCorrupt(f"run {self.run!r}: its {what} is not encrypted, as everything of this run must be")
        return self.reveal(base64.b64decode(found[1] + b"=" * (-len(found[1]) % 4)), what, *details)


_TEXT = re.compile(rb'\{"\$":\s*"encrypted",\s*"v":\s*"([A-Za-z0-9+/]+)={0,2}"\}')


def is_encrypted(text: bytes) -> bool:
    """Whether JSON text is a Keepstep ciphertext."""
    return _TEXT.fullmatch(text) is not None


def key_id(wrapped: str) -> str:
    """Return the id of the master key that wraps a run's data key."""
    version, _, rest = wrapped.partition(":")
    name = rest.rpartition(":")[0]
    if version != _WRAPPED or not _ID.fullmatch(name):
        raise EncryptionError("a run's data key is not readable: it was changed, or written by a newer Keepstep")
    return name


def is_wrapped(text: str) -> bool:
    """Whether a text has the form of a wrapped data key; damaged text does not."""
    try:
        key_id(text)
        sealed = base64.b64decode(text.rpartition(":")[2], validate=True)
    except (EncryptionError, ValueError):
        return False
    return len(sealed) == _NONCE_BYTES + KEY_BYTES + _TAG_BYTES


class _Refused(Exception):
    """A ciphertext that is not authentic."""


def _encrypt(aead: Any, plain: bytes, about: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + aead.encrypt(nonce, plain, about)  # type: ignore[no-any-return]


def _decrypt(aead: Any, data: bytes, about: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - only installed with an extra

    if len(data) < _NONCE_BYTES + _TAG_BYTES:
        raise _Refused
    try:
        return aead.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], about)  # type: ignore[no-any-return]
    except InvalidTag:
        raise _Refused from None


def _about(run: str, what: str, *details: Material) -> bytes:
    """Return the associated data of a ciphertext, encoded so that different lists of parts never collide."""
    parts = (run, what, *details)
    return b"".join(map(_part, parts))


def _part(part: Material) -> bytes:
    data = part.encode() if isinstance(part, str) else part
    return len(data).to_bytes(8, "big") + data


def _aead(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - only installed with an extra
    except ImportError:
        raise DefinitionError("encryption needs the package cryptography: pip install 'keepstep[encryption]'") from None
    return AESGCM(key)


def _checked_id(name: str) -> str:
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise DefinitionError(
            f"a key's id must be up to 64 letters, digits, dots, dashes and underscores, not {str(name)[:70]!r}"
        )
    return name


def _material(name: str, key: Material) -> bytes:
    data = key
    if isinstance(key, str):
        try:
            data = base64.b64decode(key.strip() + "=" * (-len(key.strip()) % 4), altchars=None, validate=True)
        except (ValueError, binascii.Error):
            raise DefinitionError(f"the key {name!r} is not base64; make one with: openssl rand -base64 32") from None
    if not isinstance(data, bytes | bytearray) or len(data) != KEY_BYTES:
        raise DefinitionError(f"the key {name!r} must be {KEY_BYTES} bytes, or their base64; openssl rand -base64 32")
    return bytes(data)
