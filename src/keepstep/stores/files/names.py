"""File names of a files store, safe for every id."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256

#: Ids that are valid folder names on every common file system, including case-insensitive ones.
_PLAIN = re.compile(r"[a-z0-9](?:[a-z0-9._\-]{0,98}[a-z0-9_\-])?")
#: Names that mean a device on some systems, with any suffix.
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
#: Characters of an unsafe id to keep in its folder's name, for readers, and of its hash, for uniqueness.
_KEPT = 60
_HASHED = 24

#: Digits of an entry's number in its file name, so that a million entries sort in order.
_DIGITS = 6

_ENTRY = re.compile(rf"(\d{{{_DIGITS},}})\.json")


def folder_name(run_id: str) -> str:
    """Return the name of a run's folder: the id itself if it is safe, else its safe characters and its hash."""
    if _PLAIN.fullmatch(run_id) and ".." not in run_id and not _RESERVED.fullmatch(run_id):
        return run_id
    kept = re.sub(r"[^a-z0-9_]+", "-", run_id.lower()).strip("-")[:_KEPT]
    return f"{kept}~{_hash(run_id)[:_HASHED]}"


@lru_cache(maxsize=65_536)
def run_folder(run_id: str) -> str:
    """Return the folder of a run, relative to the root: one of 256 shards, then its own."""
    return f"runs/{_hash(run_id)[:2]}/{folder_name(run_id)}"


def _hash(run_id: str) -> str:
    return sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()


def entry_name(number: int) -> str:
    """Return the file name of a run's n-th entry."""
    return f"{number:0{_DIGITS}}.json"


def entry_number(name: str) -> int | None:
    """Return the number of the entry in a file, or None if it is another file."""
    found = _ENTRY.fullmatch(name)
    return int(found[1]) if found else None


def attachment_name(number: int, place: int, tag: str, kind: str) -> str:
    """Return the name of a file beside an entry: unique to its writer, and sorted before the entry."""
    return f"{number:0{_DIGITS}}-{place:03}-{tag}.{kind}"
