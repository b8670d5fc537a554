"""The types of a workflow's parameters and of its result, as its annotations give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import NotSerializable
from .schema import KeyType, Schema, as_annotated, has_schema, type_for

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class CallTypes:
    """Converts the arguments and the result of a workflow to its annotations; made once per definition.

    A value that is of its type already stays the same object. A parameter without an annotation takes any value.
    """

    def __init__(self, workflow: str, signature: inspect.Signature, hints: Mapping[str, Any]) -> None:
        self._workflow = workflow
        self._hints = {name: known for name, hint in hints.items() if (known := type_for(hint)) is not None}
        self._result = self._hints.pop("return", None)
        parameters = signature.parameters.values()
        self._by_place = [one.name for one in parameters if one.kind in _BY_PLACE]
        self._others = {one.kind: one.name for one in parameters if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
        positional = {one.name for one in parameters if one.kind is one.POSITIONAL_ONLY}
        hints_by_place = [self._hints.get(name) for name in self._by_place]
        #: The types of all arguments by place, if each of them has one.
        self._exact = None if None in hints_by_place else [hint.hint for hint in hints_by_place if hint is not None]
        self._by_name = signature.parameters.keys() - positional - set(self._others.values())

    @property
    def converts(self) -> bool:
        """Whether a parameter has a type."""
        return bool(self._hints)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments converted to the types of their parameters. Refuse one that does not fit."""
        if not self._hints or (not kwargs and [*map(type, args)] == self._exact):
            return [*args], dict(kwargs)
        by_place = [self._converted(self.name_at(index), value) for index, value in enumerate(args)]
        return by_place, {name: self._converted(name, value) for name, value in kwargs.items()}

    def name_at(self, index: int) -> str:
        """Return the name of a positional parameter, or "" if there are too many arguments."""
        if index < len(self._by_place):
            return self._by_place[index]
        return self._others.get(inspect.Parameter.VAR_POSITIONAL, "")

    def hint_of(self, name: str) -> KeyType | None:
        """Return the type of an argument, or None if it takes any value."""
        known = name in self._by_place or name in self._by_name or name in self._others.values()
        return self._hints.get(name if known else self._others.get(inspect.Parameter.VAR_KEYWORD, ""))

    def _converted(self, name: str, value: Any) -> Any:
        hint = self.hint_of(name)
        if hint is None or type(value) is hint.hint:
            return value
        return as_annotated(value, hint, f"argument {name!r} of workflow {self._workflow!r}")

    def result(self, value: Any) -> Any:
        """Return the result of the workflow as the type of its return annotation. Refuse one that does not fit."""
        if self._result is None or type(value) is self._result.hint:
            return value
        return as_annotated(value, self._result, f"the result of workflow {self._workflow!r}")

    def are_same(
        self, stored: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], digest: Callable[[Any], str]
    ) -> bool:
        """Whether stored arguments may come from the given ones, converted now or stored by an older version."""
        before, named = stored
        if len(before) != len(args) or named.keys() != kwargs.keys():
            return False
        made, made_named = self.arguments(args, kwargs)
        triples = [*zip(before, args, made, strict=True)]
        triples += [(named[name], kwargs[name], made_named[name]) for name in kwargs]

        def same(one: Any, other: Any) -> bool:
            try:
                return digest(one) == digest(other)
            except NotSerializable:
                return False

        return all(same(now, old) or same(given, old) or _completed(given, old, same) for old, given, now in triples)


def _completed(given: Any, stored: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Whether a stored instance may be made of a given mapping; a default from a factory differs each time."""
    if not isinstance(given, Mapping) or not has_schema(type(stored)):
        return False
    schema = Schema(type(stored))
    return schema.same_first(schema.plain(stored), given, same)
