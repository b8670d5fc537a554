"""Known types: the mapping between classes and tags of a codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ..errors import DuplicateName
from .annotations import reachable
from .classes import checked_kind, kind_for
from .kinds import BUILTIN_BY_NAME, BUILTIN_BY_TYPE, Kind, type_name


class _Table:
    """Kinds by class and by name. A name may lead to several classes; using such a name is an error."""

    __slots__ = ("by_name", "by_type")

    def __init__(self) -> None:
        self.by_type: dict[type, Kind] = {}
        self.by_name: dict[str, list[Kind]] = {}

    def add(self, kind: Kind) -> None:
        first = self.by_type.get(kind.cls)
        if first is None or first.name == kind.name:
            self.by_type[kind.cls] = kind
        others = [other for other in self.by_name.get(kind.name, ()) if not _same(other.cls, kind.cls)]
        self.by_name[kind.name] = [*others, kind]


class KnownTypes:
    """The types of one codec and its parents: registered ones, and those learnt from annotations.

    The annotations are those of registered classes' fields and those that `annotations` returns. They are read when the
    codec meets its first class, so they may name classes that are defined later. A registered name takes precedence
    over a class's own name.
    """

    #: Grows with everything that any codec learns; cached lookups are valid until it changes.
    changes: ClassVar[int] = 0

    def __init__(self, parent: KnownTypes | None = None, annotations: Callable[[], Any] | None = None) -> None:
        self.chain: tuple[KnownTypes, ...] = (*parent.chain, self) if parent is not None else (self,)
        self.annotations = annotations
        self.registered = _Table()
        self.learnt = _Table()
        self.is_learnt = annotations is None
        self.unresolved: list[str] = []
        self.found: dict[type | str, Kind] = {}
        self.found_at = 0

    def add(
        self, cls: type, name: str | None, to: Callable[[Any], Any] | None, back: Callable[[Any], Any] | None
    ) -> None:
        """Register a class; a name that another class has is an error."""
        kind = checked_kind(cls, name, to, back)
        if kind.name in BUILTIN_BY_NAME:
            raise DuplicateName(f"the name {kind.name!r} is reserved; register {type_name(cls)} under another name")
        for known in self.chain:
            for other in known.registered.by_name.get(kind.name, ()):
                if not _same(other.cls, cls):
                    raise _two_classes(kind.name, other.cls, cls)
        self.registered.add(kind)
        self.is_learnt = False
        KnownTypes.changes += 1

    def of_type(self, cls: type) -> Kind | None:
        """Return the kind of a class; an ambiguous name is an error."""
        return self._remembered(cls) or self._remember(cls, self._of_type(cls))

    def named(self, name: str) -> Kind | None:
        """Return the kind with a name; an ambiguous name is an error."""
        return self._remembered(name) or self._remember(name, self._named(name))

    def _remembered(self, key: type | str) -> Kind | None:
        if self.found_at != KnownTypes.changes:
            self.found = {}
            self.found_at = KnownTypes.changes
        return self.found.get(key)

    def _remember(self, key: type | str, kind: Kind | None) -> Kind | None:
        if kind is not None and self.found_at == KnownTypes.changes:
            self.found[key] = kind
        return kind

    def _of_type(self, cls: type) -> Kind | None:
        if cls in BUILTIN_BY_TYPE:
            return BUILTIN_BY_TYPE[cls]
        for again in (False, True):
            for table in self._tables(again=again):
                kind = table.by_type.get(cls)
                if kind is not None:
                    self.named(kind.name)
                    return kind
        return None

    def _named(self, name: str) -> Kind | None:
        if name in BUILTIN_BY_NAME:
            return BUILTIN_BY_NAME[name]
        for again in (False, True):
            found: Kind | None = None
            for table in self._tables(again=again):
                for kind in table.by_name.get(name, ()):
                    if found is not None and found.cls is not kind.cls:
                        raise _two_classes(name, found.cls, kind.cls)
                    found = found or kind
            if found is not None:
                return found
        return None

    def _tables(self, *, again: bool) -> list[_Table]:
        """Return all tables: registered types first, and parents first."""
        for known in self.chain:
            if not known.is_learnt or (again and known.unresolved):
                known.learn()
        return [known.registered for known in self.chain] + [known.learnt for known in self.chain]

    def learn(self) -> None:
        """Read the annotations."""
        classes = [kind.cls for kinds in self.registered.by_name.values() for kind in kinds]
        found, self.unresolved = reachable([*classes, self.annotations() if self.annotations is not None else None])
        learnt = _Table()
        for cls in found:
            name = cls.__qualname__
            kind = kind_for(cls, f"{cls.__module__}.{name}" if name in BUILTIN_BY_NAME else name)
            if kind is not None:
                learnt.add(kind)
        self.learnt = learnt
        self.is_learnt = True
        KnownTypes.changes += 1

    def why_not(self, cls: type) -> str:
        """Return the reason why a class is refused, and a fix."""
        name, short = type_name(cls), cls.__qualname__
        a = "an" if name[0] in "aeiouAEIOU" else "a"
        if isinstance(reason := getattr(cls, "not_a_value", None), str):
            return reason
        if cls.__name__ == "coroutine":
            return "is a coroutine; was an await forgotten?"
        if cls.__name__ in ("SecretStr", "SecretBytes"):
            return f"is a {name}, which would be stored in clear; use ks.Secret, which stores only a name"
        if kind_for(cls, short) is not None:
            lost = [name for known in self.chain for name in known.unresolved]
            hint = f" (the annotation {lost[0]!r} could not be resolved)" if lost else ""
            return f"is {a} {name}, which is not known here; annotate it, or ks.register({short}){hint}"
        for base in (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float):
            if issubclass(cls, base):
                return (
                    f"is {a} {name}, a subclass of {base.__name__} that would not come back as such; convert it "
                    f"with {base.__name__}(...), or ks.register({short}, to=..., back=...)"
                )
        return (
            f"is {a} {name}, which cannot be stored; return plain data, annotate the type, or "
            f"ks.register({short}, to=..., back=...)"
        )


def _two_classes(name: str, one: type, other: type) -> DuplicateName:
    return DuplicateName(
        f"both {type_name(one)} and {type_name(other)} are called {name!r}; ks.register one of them under another name"
    )


def _same(one: type, other: type) -> bool:
    """Whether two classes are the same, or one redefines the other in a notebook or at a prompt."""
    return one is other or (one.__module__ == other.__module__ == "__main__" and one.__qualname__ == other.__qualname__)
