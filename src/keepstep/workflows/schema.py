"""The schema of a state: which keys it may have, and of which types."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..errors import DefinitionError


class Schema:
    """Checks changes against a TypedDict, a dataclass, a Pydantic model or a msgspec Struct. It converts nothing."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self._checks: dict[str, Callable[[Any], Any]] | None = None
        if not (isinstance(cls, type) and (_is_pydantic(cls) or _has_fields(cls))):
            raise DefinitionError(
                f"schema= takes a TypedDict, a dataclass, a Pydantic model or a msgspec Struct, not {cls!r}"
            )

    def check(self, changes: Mapping[str, Any], where: str) -> None:
        """Refuse a key that the schema does not have, or a value of another type; `where` says whose it is."""
        checks = self._checks
        if checks is None:  # names in annotations may be defined after the graph
            checks = self._checks = _pydantic_checks(self.cls) if _is_pydantic(self.cls) else _checks(self.cls)
        for key, value in changes.items():
            check = checks.get(key)
            if check is None:
                raise DefinitionError(
                    f"{where}: {self.cls.__name__} has no key {key!r}; it has {', '.join(checks) or 'none'}"
                )
            try:
                check(value)
            except Exception as error:  # noqa: BLE001 - told as what it is: a value that does not fit
                told = " ".join(str(error).split())
                raise DefinitionError(f"{where}: [{key!r}] does not fit {self.cls.__name__}: {told}") from None


def _is_pydantic(cls: type) -> bool:
    return hasattr(cls, "model_fields") and hasattr(cls, "model_validate")


def _has_fields(cls: type) -> bool:
    return typing.is_typeddict(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct)


def _checks(cls: Any) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {key: _convert(_unwrapped(hint)) for key, hint in hints.items()}


def _unwrapped(hint: Any) -> Any:
    """The type inside Required, NotRequired and ReadOnly."""
    while getattr(typing.get_origin(hint), "_name", "") in ("Required", "NotRequired", "ReadOnly"):
        hint = typing.get_args(hint)[0]
    return hint


def _convert(hint: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        return msgspec.convert(value, hint, from_attributes=True, dec_hook=_instance)

    return check


def _instance(cls: type, value: Any) -> Any:
    if isinstance(value, cls):
        return value
    raise TypeError(f"expected {cls.__name__}, got {type(value).__name__}")


def _pydantic_checks(cls: Any) -> dict[str, Callable[[Any], Any]]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - only who has such a model has Pydantic

    checks: dict[str, Callable[[Any], Any]] = {}
    for key, field in cls.model_fields.items():
        annotation = field.annotation
        for part in field.metadata:
            annotation = typing.Annotated[annotation, part]
        checks[key] = TypeAdapter(annotation).validate_python
    return checks
