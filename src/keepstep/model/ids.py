"""Ids and names: how they are made, and which are refused."""

from __future__ import annotations

import hashlib
import re
import secrets
import unicodedata

from ..errors import DefinitionError

#: Longest id or name: it must fit a file name on every common file system with room for a suffix.
MAX_ID = 200

#: Where chance comes from, for every id and seed; a simulated world puts a seeded source here.
draw = secrets.token_bytes

_NAME = re.compile(r"[^\W\d][\w .:\-]*\Z")

#: Digits of base 32 in the order of their values, as text sorts them, two at a time.
_DIGITS = "0123456789abcdefghijklmnopqrstuv"
_PAIRS = [a + b for a in _DIGITS for b in _DIGITS]
#: Bits of an id, and how many of them in a run's id are chance.
_ID_BITS, _CHANCE_BITS = 80, 55
#: Bits of the digest in a derived id.
_DIGEST_BITS = 130
#: Bytes of a step's name in the id of its child; the rest of the id is the parent's.
_MAX_CHILD_NAME = 64
_DOTS = re.compile(r"\.{2,}")


def new_id(prefix: str) -> str:
    """A random id that is easy to read aloud and to paste."""
    return f"{prefix}-{_digits(int.from_bytes(draw(_ID_BITS // 8), 'big'))}"


def new_run_id(now: float) -> str:
    """The id of a run that is made now: its second, for a year, and chance.

    Runs of one time are neighbours in the indexes of a store, so that writing them all at once touches a few pages,
    not a page each; and two ids can only be the same if they were made in the same second.
    """
    chance = int.from_bytes(draw(7), "big") >> (56 - _CHANCE_BITS)
    second = int(now) % (1 << (_ID_BITS - _CHANCE_BITS))
    return f"run-{_digits(second << _CHANCE_BITS | chance)}"


def _digits(number: int, bits: int = _ID_BITS) -> str:
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(bits - 10, -1, -10)])


def new_seed(module: str = "") -> str:
    """What a run's own chance is drawn from; `module` as in `seed_in`."""
    return seed_in(draw(8).hex(), module)


def seed_in(chance: str, module: str) -> str:
    """A seed that also says in which module the run's workflow is defined, if only that tells it from a namesake."""
    return f"{chance}@{module}" if module else chance


def module_in(seed: str) -> str:
    """The module that a seed names; empty for a workflow whose name was given, and for runs of earlier versions."""
    return seed.partition("@")[2]


def check_id(value: str, what: str = "run id") -> str:
    """The id itself, or a clear error: no id may be empty, over-long, or look like a path."""
    if not isinstance(value, str):
        raise DefinitionError(f"a {what} must be a str, not {type(value).__name__}")
    problem = _problem(value)
    if problem:
        raise DefinitionError(f"{what} {value[:60]!r} is refused: it {problem}")
    return value


def is_id(value: object) -> bool:
    """Whether a value from outside could be an id."""
    return isinstance(value, str) and not _problem(value)


def _problem(value: str) -> str:
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


def check_name(value: str, what: str) -> str:
    """A workflow's, step's or signal's name, or a clear error."""
    if not isinstance(value, str) or not _NAME.match(value) or len(value.encode()) > MAX_ID:
        raise DefinitionError(
            f"{what} name {_brief(value)} is refused: it must begin with a letter and hold only letters, digits, "
            f"spaces and _ . : - (at most {MAX_ID} bytes)"
        )
    return value


def check_text(value: str, what: str) -> str:
    """The text itself, or a clear error: bytes that a command line could not decode are no text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DefinitionError(f"{what} {_brief(value)} is refused: it is not Unicode text") from None
    return value


def _brief(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_ID else f"{shown[:MAX_ID]}..."


def child_id(parent: str, key: str, generation: int) -> str:
    """The one id of the child that a step of a run starts: the same after any crash, and no other call's."""
    name = key.rsplit("/", 1)[-1].split("#", 1)[0].encode()[:_MAX_CHILD_NAME].decode("utf-8", "ignore")
    return with_tail(parent, f".{name}-{digest_of(parent, key, str(generation))}")


def is_child_id(child: str, parent: str, key: str, generation: int) -> bool:
    """Whether an id was made for the child of this call; earlier versions kept only 40 bits of the digest."""
    if child == child_id(parent, key, generation):
        return True
    digest = hashlib.sha256(f"{parent}\0{key}\0{generation}".encode()).hexdigest()[:10]
    tail = f".{key.rsplit('/', 1)[-1].split('#', 1)[0]}-{digest}"
    room = MAX_ID - len(tail.encode())
    return child == parent.encode()[:room].decode("utf-8", "ignore") + tail


def digest_of(*parts: str) -> str:
    """26 digits that only these texts have: 130 bits of SHA-256, so that no two are ever the same by chance."""
    number = int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest(), "big")
    return _digits(number >> (256 - _DIGEST_BITS), _DIGEST_BITS)


def with_tail(text: str, tail: str) -> str:
    """An id that ends with `tail`: the text before it is shortened to fit."""
    start = text.encode()[: MAX_ID - len(tail.encode())].decode("utf-8", "ignore")
    return _DOTS.sub(".", start + tail)
