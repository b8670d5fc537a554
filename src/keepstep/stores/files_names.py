"""Where a run lies under the root of a files store: names that no id can lead astray."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256

#: Ids that are their own folder names on every common file system, also where upper and lower case are one.
_PLAIN = re.compile(r"[a-z0-9](?:[a-z0-9._\-]{0,98}[a-z0-9_\-])?")
#: Names that mean a device somewhere, whatever follows the dot.
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
#: How much of another id is kept in its folder's name, for the reader, and how much of its hash, for uniqueness.
_KEPT = 60
_HASHED = 24

#: Digits of an entry's number in the name of its file: a million entries sort as they are numbered.
_DIGITS = 6

_ENTRY = re.compile(rf"(\d{{{_DIGITS},}})\.json")


def folder_name(run_id: str) -> str:
    """The name of a run's folder: the id itself if that is safe, else what is safe of it and its hash."""
    if _PLAIN.fullmatch(run_id) and ".." not in run_id and not _RESERVED.fullmatch(run_id):
        return run_id
    kept = re.sub(r"[^a-z0-9_]+", "-", run_id.lower()).strip("-")[:_KEPT]
    return f"{kept}~{_hash(run_id)[:_HASHED]}"


@lru_cache(maxsize=65_536)
def run_folder(run_id: str) -> str:
    """The folder of a run, from the root: a shard of the 256, then its own."""
    return f"runs/{_hash(run_id)[:2]}/{folder_name(run_id)}"


def _hash(run_id: str) -> str:
    return sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()


def entry_name(number: int) -> str:
    """The file of a run's n-th entry."""
    return f"{number:0{_DIGITS}}.json"


def entry_number(name: str) -> int | None:
    """The number of the entry that a file holds, or None if it is something else."""
    found = _ENTRY.fullmatch(name)
    return int(found[1]) if found else None


def attachment_name(number: int, place: int, tag: str, kind: str) -> str:
    """A file beside an entry, its own writer's alone until the entry names it; listed right before the entry."""
    return f"{number:0{_DIGITS}}-{place:03}-{tag}.{kind}"
