"""The codec: values to JSON text and back, with equal digests for equal values.

Values of exactly JSON's types are stored as they are. Everything else is an object with the reserved key `$`:
{"$": "tuple", "v": [1, 2]}. A dictionary that has this key itself, or keys that are not text, is stored as pairs
under the tag "dict". Decoding looks up tags among the types that the codec knows; it never imports, evaluates or
unpickles anything.
"""

from __future__ import annotations

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

# Types that need no copy: their values are immutable and are restored exactly.
_IMMUTABLE = frozenset((type(None), bool, int, float, str, bytes))
# Types that are written as they are, and need no copy.
_PLAIN = AS_IT_IS & _IMMUTABLE
_LONGEST_PATH = 300

_C = TypeVar("_C", bound=type)


class Values:
    """A codec that knows the given types, those of its parent, and the built-in types of JSON and Python.

    A value is restored with exactly its types, or refused. `NotSerializable` names `where` and the path to the part;
    `DuplicateName` means that two classes claim one tag. A codec's results share no mutable parts with its arguments.
    `annotations` returns annotations; their classes are learnt when the codec meets its first class.
    """

    def __init__(
        self,
        types: Iterable[type] = (),
        parent: Values | None = None,
        *,
        annotations: Callable[[], Any] | None = None,
        fallback: Callable[[], Values] | None = None,
    ) -> None:
        self._parent = parent
        #: Returns the codec for values that this one refuses.
        self._fallback = fallback
        self._annotated: dict[Any, Values] = {}
        known = KnownTypes(None if parent is None else parent._known, annotations)  # noqa: SLF001 - its own kind
        self._known: KnownTypes = known
        self._write = Writer(known, careful=False, canonical=False).plain
        self._write_sorted = Writer(known, careful=False, canonical=True).plain
        self._read = Reader(known).value
        for cls in types:
            self.register(cls)

    # -- known types

    @property
    def known(self) -> KnownTypes:
        """The types that the codec knows, for writers of parts of values."""
        return self._known

    def register(
        self,
        cls: _C,
        name: str | None = None,
        *,
        to: Callable[[Any], Any] | None = None,
        back: Callable[[Any], Any] | None = None,
    ) -> _C:
        """Register a class under a tag. `to` converts an object to storable data; `back` restores the object.

        Dataclasses, Enums, NamedTuples, Pydantic models, msgspec Structs and exceptions need neither. A class that is
        registered again under another name is read under both names and written under the first. A step that raises a
        registered exception class raises it in the workflow as itself. Returns the class.
        """
        self._known.add(cls, name, to, back)
        return cls

    def for_annotation(self, annotation: Any) -> Values:
        """Return a codec that also knows every class the annotation reaches. Names are resolved when needed."""
        if is_plain(annotation):
            return self
        try:
            known = self._annotated.get(annotation)
        except TypeError:  # unhashable
            return Values(parent=self, annotations=lambda: annotation)
        if known is None:
            known = self._annotated[annotation] = Values(parent=self, annotations=lambda: annotation)
        return known

    def for_values(self, value: Any) -> Values:
        """Return a codec that also knows the classes of the given value and of the items of its containers."""
        return Values(parent=self, annotations=lambda: list(_classes_in(value)))

    def for_callable(
        self,
        function: Callable[..., Any],
        names: Mapping[str, Any] | None = None,
        fallback: Callable[[], Values] | None = None,
    ) -> Values:
        """Return a codec that also knows every class in a function's signature; `names` resolves local names."""
        return Values(parent=self, annotations=lambda: list(hints_of(function, names).values()), fallback=fallback)

    # -- encoding

    def encode(self, value: Any, where: str = "") -> bytes:
        """Return the value as JSON text, with keys in their own order."""
        try:
            data = _to_json(value if type(value) in AS_IT_IS else self._write(value))
            if len(data) >= LONG_DIGITS:
                refuse_long_integers(data)
        except Exception as error:  # noqa: BLE001 - raised again unless the careful writer succeeds
            try:
                data = _to_json(self._carefully(value, where, error))
            except NotSerializable:
                if self._fallback is None:
                    raise
                return self._fallback().encode(value, where)
        return data

    def encode_shown(self, value: Any, where: str = "") -> bytes:
        """Return the value as JSON text; its own classes need not be known. For values that no annotation describes."""
        try:
            return self.encode(value, where)
        except NotSerializable:
            return self.for_values(value).encode(value, where)

    def digest(self, value: Any, where: str = "") -> str:
        """Return 32 hexadecimal digits: equal for equal values of equal types, in any order of keys and sets."""
        try:
            data = to_sorted_json(self._write_sorted(value))
            if len(data) >= LONG_DIGITS:
                refuse_long_integers(data)
        except Exception as error:  # noqa: BLE001 - raised again unless the careful writer succeeds
            try:
                data = to_sorted_json(self._carefully(value, where, error, canonical=True))
            except NotSerializable:
                if self._fallback is None:
                    raise
                return self._fallback().digest(value, where)
        return sha256(data).hexdigest()[:32]

    def _carefully(self, value: Any, where: str, error: Exception, *, canonical: bool = False) -> Any:
        """Return the value as plain data after the quick writer failed with `error`, or raise the precise problem."""
        try:
            if not isinstance(error, ValueError):  # neither a lone surrogate nor a long integer
                raise error
            plain = Writer(self._known, careful=True, canonical=canonical).plain(value)
            _to_json(plain)
        except Refusal as refusal:
            _refuse(where, refusal)
        except RecursionError:
            raise NotSerializable(f"{where or 'value'} is nested too deeply for what is left of the stack") from None
        except RuntimeError as changed:  # a dictionary or set changed size during iteration
            raise NotSerializable(f"{where or 'value'} changed while it was being stored: {changed}") from changed
        return plain

    # -- decoding

    def decode(self, data: bytes, where: str = "") -> Any:
        """Return the encoded value, built again by every call."""
        try:
            plain = _from_json(data)
            if _to_json(plain) != data:  # not in the form that this codec writes
                return self._read(_strictly_from_json(data))
            return plain if data.find(b'"$"') < 0 else self._read(plain)
        except Refusal as refusal:
            if self._fallback is not None:
                return self._fallback().decode(data, where)
            _refuse(where, refusal)
        except RecursionError:
            raise NotSerializable(f"{where or 'value'} is nested too deeply to be read") from None
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise NotSerializable(f"{where or 'value'} is not a stored value: {error}") from error

    def copy(self, value: Any, where: str = "") -> Any:
        """Return the result of `decode(encode(value))`; an immutable value is returned itself."""
        cls = type(value)
        if cls in _IMMUTABLE or (cls is tuple and _IMMUTABLE.issuperset(map(type, value))):
            return value
        return self.decode(self.encode(value, where), where)

    # -- arguments of a call

    def digest_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str = "", names: Sequence[str] = ()
    ) -> str:
        """Return the digest of a call's arguments; `names` are the parameter names of `args`, for messages."""
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
        except Exception:  # noqa: BLE001 - retried argument by argument
            data = self._careful_call(args, kwargs, where, names)
        return sha256(data).hexdigest()[:32]

    def _careful_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str, names: Sequence[str]) -> bytes:
        items: list[Any] = []
        for label, item in _labelled(args, kwargs, where, names):
            try:
                plain = self._write_sorted(item)
                refuse_long_integers(_to_json(plain))
            except Exception as error:  # noqa: BLE001 - raised again unless the careful writer succeeds
                try:
                    plain = self._carefully(item, label, error, canonical=True)
                except NotSerializable as refusal:
                    raise _for_argument(refusal, label) from refusal.__cause__
            items.append(plain)
        try:
            return to_sorted_json((items[: len(args)], dict(zip(kwargs, items[len(args) :], strict=True))))
        except UnicodeEncodeError:
            raise NotSerializable(f"{where or 'call'}: the name of an argument is not text") from None

    def take_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str = "", names: Sequence[str] = ()
    ) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Return the digest of a call's arguments, and the arguments as they would be restored."""
        if _PLAIN.issuperset(map(type, args)) and (not kwargs or _PLAIN.issuperset(map(type, kwargs.values()))):
            try:
                data = to_sorted_json((args, kwargs))
                if len(data) < LONG_DIGITS:
                    return sha256(data).hexdigest()[:32], args, {**kwargs}
            except Exception:  # noqa: BLE001, S110 - the careful writer says what is wrong
                pass
        try:
            digest = self.digest_call(args, kwargs, where, names)
            return digest, *self.copy_call(args, kwargs, where, names)
        except NotSerializable:
            if self._fallback is None:
                raise
            return self._fallback().take_call(args, kwargs, where, names)

    def copy_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str = "", names: Sequence[str] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments as they would be restored, each copied separately."""
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
    """Yield every argument with its name for messages."""
    where = f"{where}: " if where else ""
    for index, item in enumerate(args):
        yield f"{where}argument {names[index]!r}" if index < len(names) else f"{where}argument {index + 1}", item
    for key, item in kwargs.items():
        yield f"{where}argument {key!r}", item


def _for_argument(refusal: NotSerializable, label: str) -> NotSerializable:
    """Return the refusal of a step's argument, with the option that leaves an argument out."""
    name, message = label.rpartition("argument ")[2], str(refusal)
    if "ks.register(" not in message or not name.startswith("'"):
        return refusal
    message = message.replace("return plain data", "pass plain data", 1)
    return NotSerializable(f"{message}; or leave it out of the record with @ks.step(ignore=({name},))")


def refuse_long_integers(data: bytes) -> None:
    """Raise `ValueError`, so that the careful writer is used, if a number may exceed the reader's limit on digits.

    A number of that length covers at least three of every 200th byte. This sample is quick to check; only a hit leads
    to a full search.
    """
    if _DIGITS.search(data[::200]) and b"0" * LONG_DIGITS in data.translate(_DIGITS_AS_ZEROS):
        raise ValueError("a number may be too long")


_DIGITS = re.compile(rb"[0-9]{3}")
_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else ord(" ") for byte in range(256))


def _strictly_from_json(data: bytes) -> Any:
    """Decode JSON text from outside, in which a key may occur twice. The text is known to be JSON."""
    import json  # noqa: PLC0415 - only for text from outside

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


#: The default codec of this process.
VALUES = Values()

register = VALUES.register


def _classes_in(value: Any) -> Iterator[type]:
    """Yield the classes of a value and of its containers' items; annotations lead to the fields of a class."""
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
