"""Ids: generation and validation."""

from __future__ import annotations

import hashlib
import re
import secrets
import unicodedata

#: Maximum length of an id or name in bytes. Fits a file name, with a suffix, on every common file system.
MAX_ID = 200

#: Source of random bytes for every id and seed. A simulation replaces it with a seeded source.
draw = secrets.token_bytes


#: Base-32 digits in an order that text sorting preserves, and all pairs of them: one pair encodes 10 bits.
_DIGITS = "0123456789abcdefghijklmnopqrstuv"
_PAIRS = [a + b for a in _DIGITS for b in _DIGITS]
#: Number of bits in an id, and the number of random bits in a run's id.
_ID_BITS, _CHANCE_BITS = 80, 55
#: Number of digest bits in a derived id.
_DIGEST_BITS = 130
#: Maximum bytes of a step's name in the id of its child, which leaves room for the parent's id.
_MAX_CHILD_NAME = 64
_DOTS = re.compile(r"\.{2,}")


def new_id(prefix: str) -> str:
    """Return a random id that is easy to read aloud and to paste."""
    return f"{prefix}-{_digits(int.from_bytes(draw(_ID_BITS // 8), 'big'))}"


def new_run_id(now: float) -> str:
    """Return an id for a run created now: the current second, modulo about a year, followed by random bits.

    Runs created together are neighbours in a store's indexes, so writing them at once touches few pages. Two ids can
    only collide if they were made in the same second.
    """
    chance = int.from_bytes(draw(7), "big") >> (56 - _CHANCE_BITS)
    second = int(now) % (1 << (_ID_BITS - _CHANCE_BITS))
    return f"run-{_digits(second << _CHANCE_BITS | chance)}"


def _digits(number: int, bits: int = _ID_BITS) -> str:
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(bits - 10, -1, -10)])


def new_seed(module: str = "") -> str:
    """Return a seed for the random values of a run; `module` as in `seed_in`."""
    return seed_in(draw(8).hex(), module)


def seed_in(chance: str, module: str) -> str:
    """Return a seed that also names the workflow's module, if only the module distinguishes it from a namesake."""
    return f"{chance}@{module}" if module else chance


def module_in(seed: str) -> str:
    """Return the module in a seed; empty for workflows with an explicit name and for runs of earlier versions."""
    return seed.partition("@")[2]


def is_id(value: object) -> bool:
    """Whether an untrusted value is a valid id."""
    return isinstance(value, str) and not problem_of(value)


def problem_of(value: str) -> str:
    """Return the reason why a text cannot be an id, or an empty text."""
    if not value:
        return "is empty"
    if len(value.encode("utf-8", "surrogatepass")) > MAX_ID:
        return f"is longer than {MAX_ID} bytes"
    if value != value.strip():
        return "begins or ends with white space"
    if "/" in value or "\\" in value:
        return "holds a path separator"
    if value.startswith("."):
        return "begins with a dot"
    if ".." in value:
        return "holds two dots in a row"
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in value):
        return "holds a control character"
    return ""


def child_id(parent: str, key: str, generation: int) -> str:
    """Return the id of the child that a step starts: stable across crashes and unique to this call."""
    name = key.rsplit("/", 1)[-1].split("#", 1)[0].encode()[:_MAX_CHILD_NAME].decode("utf-8", "ignore")
    return with_tail(parent, f".{name}-{digest_of(parent, key, str(generation))}")


def is_child_id(child: str, parent: str, key: str, generation: int) -> bool:
    """Whether an id belongs to the child of this call. Earlier versions kept only 40 bits of the digest."""
    if child == child_id(parent, key, generation):
        return True
    digest = hashlib.sha256(f"{parent}\0{key}\0{generation}".encode()).hexdigest()[:10]
    tail = f".{key.rsplit('/', 1)[-1].split('#', 1)[0]}-{digest}"
    room = MAX_ID - len(tail.encode())
    return child == parent.encode()[:room].decode("utf-8", "ignore") + tail


def digest_of(*parts: str) -> str:
    """Return 26 digits that identify these texts: 130 bits of SHA-256, enough to rule out collisions."""
    number = int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest(), "big")
    return _digits(number >> (256 - _DIGEST_BITS), _DIGEST_BITS)


def with_tail(text: str, tail: str) -> str:
    """Return an id that ends with `tail`; `text` is shortened to fit."""
    start = text.encode()[: MAX_ID - len(tail.encode())].decode("utf-8", "ignore")
    return _DOTS.sub(".", start + tail)
