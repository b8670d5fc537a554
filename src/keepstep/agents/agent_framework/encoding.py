"""Values of the framework's checkpoints as JSON: known classes by name, and everything else refused."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

import agent_framework
from agent_framework import WorkflowCheckpointException, WorkflowEvent, WorkflowMessage
from pydantic import BaseModel

from ...errors import DefinitionError

#: The key of an object that stands for a value which JSON does not have: the name of its class.
_CLASS = "$"
#: Classes of the framework whose objects are in checkpoints. Later versions may lack some of them.
_FRAMEWORK = (
    *("AgentExecutorRequest", "AgentExecutorResponse", "AgentResponse", "AgentResponseUpdate", "AgentSession"),
    *("ChatResponse", "ChatResponseUpdate", "Content", "Message", "SubWorkflowRequestMessage"),
    *("SubWorkflowResponseMessage", "WorkflowMessage"),
)
#: Classes that a request may name as the type of its response, beside those with fields.
_PLAIN = (str, int, float, bool, dict, list, tuple, set, bytes, type(None), object, datetime, date, UUID)


class Encoding:
    """Encodes values as JSON and decodes them, with the classes that it knows and no others."""

    def __init__(self, types: Iterable[type]) -> None:
        own = [one for name in _FRAMEWORK if isinstance(one := getattr(agent_framework, name, None), type)]
        self._names: dict[type, str] = {one: f"agent_framework:{one.__name__}" for one in own}
        #: The kind of a message, which has no public name.
        self._names[type(WorkflowMessage(None, "").type)] = "agent_framework:MessageType"
        for one in types:
            if not isinstance(one, type) or not _has_form(one):
                raise DefinitionError(
                    f"`types` must hold dataclasses, enums, Pydantic models or classes with to_dict and from_dict, got "
                    f"{one!r}"
                )
            self._names[one] = f"{one.__module__}:{one.__qualname__}"
        self._classes = {name: one for one, name in self._names.items()}
        self._plain = {f"builtin:{one.__name__}": one for one in _PLAIN}

    def encode(self, value: Any, where: str) -> Any:
        """Return a value as JSON. `where` names it in the error for one that JSON cannot hold."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return self._items(value, where)
        if type(value) is dict:
            if all(isinstance(key, str) for key in value) and _CLASS not in value:
                return {key: self.encode(one, f"{where}[{key!r}]") for key, one in value.items()}
            return {_CLASS: "dict", "of": [self._items(pair, where) for pair in value.items()]}
        if isinstance(value, WorkflowEvent):
            return {_CLASS: "event", "of": self._event(value, where)}
        for kind, write, _ in _SIMPLE:
            if type(value) is kind:
                return {_CLASS: kind.__name__, "of": self.encode(write(value), where)}
        name = self._names.get(type(value))
        if name is None:
            raise _refusal(where, type(value))
        return {_CLASS: name, "of": self.encode(_parts(value), f"{where}<{type(value).__name__}>")}

    def decode(self, value: Any) -> Any:
        """Return the value that JSON stands for."""
        if isinstance(value, list):
            return [self.decode(one) for one in value]
        if not isinstance(value, dict):
            return value
        if _CLASS not in value:
            return {key: self.decode(one) for key, one in value.items()}
        name, of = value[_CLASS], self.decode(value["of"])
        if name == "dict":
            return dict(of)
        if name == "event":
            return WorkflowEvent.request_info(**{**of, "response_type": self._type_named(of["response_type"])})
        for kind, _, read in _SIMPLE:
            if kind.__name__ == name:
                return read(of)
        return _made(self._known(name), of)

    def _items(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.encode(one, f"{where}[{number}]") for number, one in enumerate(values)]

    def _event(self, event: WorkflowEvent[Any], where: str) -> dict[str, Any]:
        if event.type != "request_info":
            raise _refusal(where, type(event))
        return {
            "request_id": event.request_id,
            "source_executor_id": event.source_executor_id,
            "request_data": self.encode(event.data, f"{where}<request>"),
            "response_type": self._name_of(event.response_type, where),
        }

    def _name_of(self, kind: Any, where: str) -> str:
        names = {one: name for name, one in self._plain.items()} | self._names
        if not isinstance(kind, type) or kind not in names:
            raise _refusal(f"{where}<response_type>", kind)
        return names[kind]

    def _type_named(self, name: str) -> type:
        return self._plain.get(name) or self._known(name)

    def _known(self, name: str) -> type:
        if name not in self._classes:
            raise WorkflowCheckpointException(
                f"the checkpoint holds a {name}, which this storage does not know; name its class in types="
            )
        return self._classes[name]


#: Classes of values that JSON lacks, how each is written, and how it is read.
_SIMPLE: tuple[tuple[type, Any, Any], ...] = (
    (tuple, list, tuple),
    (set, list, set),
    (frozenset, list, frozenset),
    (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    (datetime, datetime.isoformat, datetime.fromisoformat),
    (date, date.isoformat, date.fromisoformat),
    (timedelta, timedelta.total_seconds, lambda seconds: timedelta(seconds=seconds)),
    (UUID, str, UUID),
)


def _has_form(kind: type) -> bool:
    return issubclass(kind, Enum | BaseModel) or is_dataclass(kind) or _converts(kind)


def _converts(kind: type) -> bool:
    return callable(getattr(kind, "to_dict", None)) and callable(getattr(kind, "from_dict", None))


def _parts(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if _converts(type(value)) and not isinstance(value, WorkflowMessage):
        return value.to_dict()
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def _made(kind: Any, parts: Any) -> Any:
    if issubclass(kind, Enum):
        return kind(parts)
    if issubclass(kind, BaseModel):
        return kind.model_validate(parts)
    if _converts(kind) and not issubclass(kind, WorkflowMessage):
        return kind.from_dict(parts)
    return kind(**parts)


def _refusal(where: str, kind: Any) -> WorkflowCheckpointException:
    name = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else repr(kind)
    return WorkflowCheckpointException(
        f"{where} is of {name}, which a checkpoint in JSON cannot hold; name the class in types=, as a dataclass, an "
        "enum, a Pydantic model or a class with to_dict and from_dict"
    )
