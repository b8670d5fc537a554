"""The codec: values to JSON text and back, with a digest that is equal for equal values.

JSON's own types are stored as they are, when they are exactly of those types. Everything else is an object under the
reserved key `$`: {"$": "tuple", "v": [1, 2]}. A dictionary that has this key itself, or keys that are not text, is
stored as pairs under the tag "dict". Reading looks a tag up among the types that the codec knows, and never imports,
evaluates or unpickles anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NoReturn, TypeVar

import msgspec

from ..errors import NotSerializable
from .annotations import hints_of, is_plain
from .kinds import LONG_DIGITS, Refusal
from .known import KnownTypes
from .plain import AS_IT_IS, Reader, Writer, to_sorted_json

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode

# What needs no copy: nobody can change it, and it comes back exactly.
_IMMUTABLE = frozenset((type(None), bool, int, float, str, bytes))
_LONGEST_PATH = 300

_C = TypeVar("_C", bound=type)


class Values:
    """A codec that knows the given types, those of its parent, and what JSON and Python have built in.

    A value comes back with exactly its types, or is refused: with `NotSerializable`, which names `where` and the path
    to the part, or with `DuplicateName` if two classes claim one tag. What a codec returns shares nothing that can
    change with what it was given. `annotations` gives annotations whose classes are learnt when the first is met.
    """

    def __init__(
        self,
        types: Iterable[type] = (),
        parent: Values | None = None,
        *,
        annotations: Callable[[], Any] | None = None,
    ) -> None:
        self._parent = parent
        self._annotated: dict[Any, Values] = {}
        known = KnownTypes(None if parent is None else parent._known, annotations)  # noqa: SLF001 - its own kind
        self._known: KnownTypes = known
        self._write = Writer(known, careful=False, canonical=False).plain
        self._write_sorted = Writer(known, careful=False, canonical=True).plain
        self._read = Reader(known).value
        for cls in types:
            self.register(cls)

    # -- what it knows

    @property
    def known(self) -> KnownTypes:
        """The types that it knows, for those who write parts of values."""
        return self._known

    def register(
        self,
        cls: _C,
        name: str | None = None,
        *,
        to: Callable[[Any], Any] | None = None,
        back: Callable[[Any], Any] | None = None,
    ) -> _C:
        """Make a class known under a tag; `to` turns a value into storable data and `back` turns that into the value.

        Dataclasses, Enums, NamedTuples, Pydantic models and msgspec Structs need neither. A class that is registered
        again under another name is read under both and written under the first. Returns the class.
        """
        self._known.add(cls, name, to, back)
        return cls

    def for_annotation(self, annotation: Any) -> Values:
        """A codec that also knows every class that the annotation reaches. Names are resolved when they are needed."""
        if is_plain(annotation):
            return self
        try:
            known = self._annotated.get(annotation)
        except TypeError:  # it cannot be hashed
            return Values(parent=self, annotations=lambda: annotation)
        if known is None:
            known = self._annotated[annotation] = Values(parent=self, annotations=lambda: annotation)
        return known

    def for_values(self, value: Any) -> Values:
        """A codec that also knows the classes of what is given, in whatever lists and dictionaries it stands."""
        return Values(parent=self, annotations=lambda: list(_classes_in(value)))

    def for_callable(self, function: Callable[..., Any], names: Mapping[str, Any] | None = None) -> Values:
        """A codec that also knows every class in a function's signature; `names` helps to resolve local ones."""
        return Values(parent=self, annotations=lambda: list(hints_of(function, names).values()))

    # -- there

    def encode(self, value: Any, where: str = "") -> bytes:
        """The value as JSON text, keys in the order in which they are."""
        try:
            data = _to_json(self._write(value))
            if len(data) >= LONG_DIGITS:
                refuse_long_integers(data)
        except Exception as error:  # noqa: BLE001 - raised again unless care helps
            data = _to_json(self._carefully(value, where, error))
        return data

    def digest(self, value: Any, where: str = "") -> str:
        """32 hexadecimal digits, equal for equal values of equal types, whatever the order of keys and sets."""
        try:
            data = to_sorted_json(self._write_sorted(value))
            if len(data) >= LONG_DIGITS:
                refuse_long_integers(data)
        except Exception as error:  # noqa: BLE001 - raised again unless care helps
            data = to_sorted_json(self._carefully(value, where, error, canonical=True))
        return sha256(data).hexdigest()[:32]

    def _carefully(self, value: Any, where: str, error: Exception, *, canonical: bool = False) -> Any:
        """The value as plain data after the quick way has failed with `error`, or what is wrong with it."""
        try:
            if not isinstance(error, ValueError):  # neither a lone surrogate nor a long integer
                raise error
            plain = Writer(self._known, careful=True, canonical=canonical).plain(value)
            _to_json(plain)
        except Refusal as refusal:
            _refuse(where, refusal)
        except RecursionError:
            raise NotSerializable(f"{where or 'value'} is nested too deeply for what is left of the stack") from None
        except RuntimeError as changed:  # a dictionary or a set that grows while it is read
            raise NotSerializable(f"{where or 'value'} changed while it was being stored: {changed}") from changed
        return plain

    # -- and back

    def decode(self, data: bytes, where: str = "") -> Any:
        """The value that was encoded, made anew by every call."""
        try:
            plain = _from_json(data)
            if _to_json(plain) != data:  # not as this codec writes it
                return self._read(_strictly_from_json(data))
            return plain if data.find(b'"$"') < 0 else self._read(plain)
        except Refusal as refusal:
            _refuse(where, refusal)
        except RecursionError:
            raise NotSerializable(f"{where or 'value'} is nested too deeply to be read") from None
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise NotSerializable(f"{where or 'value'} is not a stored value: {error}") from error

    def copy(self, value: Any, where: str = "") -> Any:
        """What `decode(encode(value))` gives; what nobody can change is returned itself."""
        cls = type(value)
        if cls in _IMMUTABLE or (cls is tuple and _IMMUTABLE.issuperset(map(type, value))):
            return value
        return self.decode(self.encode(value, where), where)

    # -- the arguments of a call

    def digest_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str = "", names: Sequence[str] = ()
    ) -> str:
        """The digest of a call's arguments; `names` are the parameters that `args` stand for, for messages."""
        try:
            if AS_IT_IS.issuperset(map(type, args)) and (not kwargs or AS_IT_IS.issuperset(map(type, kwargs.values()))):
                data = to_sorted_json((args, kwargs))
            else:
                plain = self._write_sorted
                data = to_sorted_json(
                    ([plain(item) for item in args], {key: plain(item) for key, item in kwargs.items()})
                )
            if len(data) >= LONG_DIGITS:
                refuse_long_integers(data)
        except Exception:  # noqa: BLE001 - once more, argument by argument
            data = self._careful_call(args, kwargs, where, names)
        return sha256(data).hexdigest()[:32]

    def _careful_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str, names: Sequence[str]) -> bytes:
        items: list[Any] = []
        for label, item in _labelled(args, kwargs, where, names):
            try:
                plain = self._write_sorted(item)
                refuse_long_integers(_to_json(plain))
            except Exception as error:  # noqa: BLE001 - raised again unless care helps
                plain = self._carefully(item, label, error, canonical=True)
            items.append(plain)
        try:
            return to_sorted_json((items[: len(args)], dict(zip(kwargs, items[len(args) :], strict=True))))
        except UnicodeEncodeError:
            raise NotSerializable(f"{where or 'call'}: the name of an argument is not text") from None

    def copy_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str = "", names: Sequence[str] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments as they would come back, each by itself."""
        if _IMMUTABLE.issuperset(map(type, args)) and (not kwargs or _IMMUTABLE.issuperset(map(type, kwargs.values()))):
            return args, {**kwargs}
        try:
            return tuple([self.copy(item) for item in args]), {key: self.copy(item) for key, item in kwargs.items()}
        except NotSerializable:
            for label, item in _labelled(args, kwargs, where, names):
                self.copy(item, label)
            raise


def _labelled(
    args: tuple[Any, ...], kwargs: dict[str, Any], where: str, names: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Every argument with how it is called in a message."""
    where = f"{where}: " if where else ""
    for index, item in enumerate(args):
        yield f"{where}argument {names[index]!r}" if index < len(names) else f"{where}argument {index + 1}", item
    for key, item in kwargs.items():
        yield f"{where}argument {key!r}", item


def refuse_long_integers(data: bytes) -> None:
    """Sends a value to the careful writer if a number in it could be too long for the limits of whoever reads it.

    So many digits in a row hold at least three of every 200th byte, which is quickly seen; then all are looked at.
    """
    if _DIGITS.search(data[::200]) and b"0" * LONG_DIGITS in data.translate(_DIGITS_AS_ZEROS):
        raise ValueError("a number may be too long")


_DIGITS = re.compile(rb"[0-9]{3}")
_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else ord(" ") for byte in range(256))


def _strictly_from_json(data: bytes) -> Any:
    """Reads text that someone else wrote, in which a key may stand twice. That it is JSON is known."""
    return json.loads(data, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise Refusal(f"has the key {key!r} twice")
        value[key] = item
    return value


def _refuse(where: str, refusal: Refusal) -> NoReturn:
    path = "".join(reversed(refusal.path))
    if len(path) > _LONGEST_PATH:
        path = f"{path[: _LONGEST_PATH // 2]}...{path[-_LONGEST_PATH // 2 :]}"
    raise NotSerializable(f"{where or 'value'}{path} {refusal.reason}") from refusal.__cause__


#: What every codec of this process knows.
VALUES = Values()

register = VALUES.register


def _classes_in(value: Any) -> Iterator[type]:
    """The classes of a value, and of the items of containers in it; annotations of a class tell of its fields."""
    todo, seen = [value], set[int]()
    while todo:
        item = todo.pop()
        yield type(item)
        if id(item) in seen:  # a list that contains itself is refused when it is written
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
