"""How a stored schema is brought up to date: numbered SQL scripts, one folder per database, applied in order."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ...errors import SchemaMismatch


class Script(NamedTuple):
    """One step forward; `number` is the version of the schema that it leaves behind."""

    number: int
    name: str
    sql: str


def scripts(database: str) -> list[Script]:
    """Every script for one kind of database, oldest first. A new one is a new file like `0002_what_it_does.sql`."""
    found = []
    for path in sorted((Path(__file__).parent / database).glob("[0-9]*.sql")):
        number, _, name = path.stem.partition("_")
        found.append(Script(int(number), name, path.read_text(encoding="utf-8")))
    if [script.number for script in found] != list(range(1, len(found) + 1)):
        raise AssertionError(f"the {database} migrations are not numbered 1, 2, 3, …")
    return found


def pending(database: str, version: int, where: str) -> list[Script]:
    """The scripts that a schema of this version still needs; a schema newer than this program is refused."""
    known = scripts(database)
    if version > len(known):
        raise SchemaMismatch(
            f"{where} has schema {version}, and this Keepstep knows schemas up to {len(known)}: it was written by a "
            "newer Keepstep, so upgrade this one"
        )
    return known[version:]
