"""The command `memory`: lists memories and their values, shows the history of one, and changes or erases it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .settings import Settings, command

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.memory import Memory

_ACTS = ("list", "get", "set", "delete", "history", "erase")


@command("memory")
@click.argument("act", default="list", type=click.Choice(_ACTS), metavar="[ACT]")
@click.argument("namespace", required=False, metavar="[NAMESPACE]")
@click.argument("key", required=False, metavar="[KEY]")
@click.argument("value", required=False, metavar="[JSON]")
@click.option(
    "--expect", type=int, metavar="VERSION", help="With set: only if this is the current version, 0 for none."
)
@click.option("--yes", is_flag=True, help="With erase: do not ask.")
def memory(
    settings: Settings,
    *,
    act: str,
    namespace: str | None,
    key: str | None,
    value: str | None,
    expect: int | None,
    yes: bool,
) -> None:
    """List memories or their values, get, set or delete a value, or show its history.

    ACT is list, get, set, delete, history or erase. Without NAMESPACE, list shows all memories; with a KEY, it shows
    the values whose keys begin with it. A value is JSON, or else text. A deleted value stays in the history; erase
    removes every value whose key begins with KEY, with its history, from the files of the store.
    """
    if namespace is None:
        if act != "list":
            raise click.UsageError(f"name the memory: keepstep memory {act} NAMESPACE")
        _list_all(settings)
        return
    if act == "list":
        _list(settings, namespace, key or "")
        return
    if key is None:
        raise click.UsageError(f"name the key: keepstep memory {act} {namespace} KEY")
    if (value is None) == (act == "set"):
        raise click.UsageError("keepstep memory set NAMESPACE KEY JSON; the other acts take no value")
    if act == "history":
        _history(settings, namespace, key)
    elif act == "get":
        _get(settings, namespace, key)
    else:
        if act == "erase" and not yes and not settings.json:
            click.confirm(f"Erase {key}… of memory {namespace}, with all history?", abort=True)
        _change(settings, act, (namespace, key), None if value is None else _parsed(value), expect)


def _memory(engine: Engine, namespace: str) -> Memory:
    from ..engine.memory import Memory

    return Memory(namespace, engine=engine)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _list_all(settings: Settings) -> None:
    from ..engine.memory import MEMORY
    from . import formatting

    async def look(engine: Engine) -> dict[str, int]:
        return await engine.documents.collections()

    found = {name.removeprefix(MEMORY): count for name, count in settings.talk(look).items() if name.startswith(MEMORY)}

    def shown() -> str:
        rows = [(name, str(count)) for name, count in found.items()]
        return formatting.table(("MEMORY", "KEYS"), rows) if rows else "no memory; ks.Memory(...) makes one"

    settings.answer({"memories": [{"namespace": name, "keys": count} for name, count in found.items()]}, shown)


def _list(settings: Settings, namespace: str, prefix: str) -> None:
    async def look(engine: Engine) -> Any:
        return await _plain(engine, namespace, prefix=prefix)

    found = settings.talk(look)
    settings.answer({"namespace": namespace, "values": found}, lambda: _table(found, "no value"))


def _history(settings: Settings, namespace: str, key: str) -> None:
    async def look(engine: Engine) -> Any:
        return await _plain(engine, namespace, keys=(key,), all_versions=True)

    found = settings.talk(look)
    if not found:
        raise errors.Refused(f"memory {namespace!r} has no value {key!r}", "", errors.NOT_FOUND)
    settings.answer({"namespace": namespace, "key": key, "versions": found}, lambda: _table(found, "no value"))


async def _plain(engine: Engine, namespace: str, **query: Any) -> list[dict[str, Any]]:
    """Return versions as plain data: the classes of values need not be known here."""
    from ..engine.memory import Memory
    from ..views.plain import memory_data

    documents = await engine.documents.list(Memory(namespace).collection, **query)
    return [memory_data(one) for one in documents if one.value or query.get("all_versions")]


def _get(settings: Settings, namespace: str, key: str) -> None:
    async def look(engine: Engine) -> Any:
        return await _plain(engine, namespace, keys=(key,))

    found = settings.talk(look)
    if not found:
        raise errors.Refused(f"memory {namespace!r} has no value {key!r}", "", errors.NOT_FOUND)
    settings.answer({"namespace": namespace, **found[0]}, lambda: json.dumps(found[0]["value"], ensure_ascii=False))


def _change(settings: Settings, act: str, name: tuple[str, str], value: Any, expect: int | None) -> None:
    namespace, key = name

    async def change(engine: Engine) -> Any:
        one = _memory(engine, namespace)
        if act == "set":
            return await one.put(key, value, expect=expect)
        return await (one.delete(key) if act == "delete" else one.erase(key))

    done = settings.talk(change)
    if act == "delete" and not done:
        raise errors.Refused(f"memory {namespace!r} has no value {key!r}", "", errors.NOT_FOUND)
    word = {"set": "version", "delete": "deleted", "erase": "erased"}[act]
    text = {"set": f"version {done}", "delete": "deleted", "erase": f"erased {done}"}[act]
    settings.answer({"namespace": namespace, "key": key, word: done}, text)


def _table(found: list[dict[str, Any]], none: str) -> str:
    from . import formatting

    rows = [
        (
            formatting.one_line(one["key"]),
            str(one["version"]),
            one["at"],
            "deleted" if one["deleted"] else formatting.one_line(json.dumps(one["value"], ensure_ascii=False)),
        )
        for one in found
    ]
    return formatting.table(("KEY", "VERSION", "AT", "VALUE"), rows) if rows else none
