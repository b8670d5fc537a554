"""Keeps the files of a test session in memory, where a sync takes no time, if there is room for them.

A session writes some hundred thousand records, each with a sync, and would mostly wait for its disk. Power cuts are
simulated, so no test needs a real one. `TMPDIR` chooses another place; `make nightly` uses the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from tests import postgres

MEMORY = Path("/dev/shm")
_PREFIX = "keepstep-tests-"
#: Bytes that must be free, in the file system and in the machine. A session needs a third of this.
_ROOM = 3 * 2**30


def begin_session() -> None:
    """Called once, by the process that starts the others: choose where temporary files are made."""
    if "TMPDIR" in os.environ or not _has_room():
        return
    _sweep()
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=MEMORY))
    place.chmod(0o755)  # a server of PostgreSQL runs as somebody else
    (place / "owner").write_text(str(os.getpid()))
    os.environ["TMPDIR"] = str(place)
    tempfile.tempdir = None  # which was read before


def end_session() -> None:
    """Called once, by the process that began the session."""
    place = Path(os.environ.get("TMPDIR", "/"))
    if place.name.startswith(_PREFIX) and _owner(place) == os.getpid():
        del os.environ["TMPDIR"]
        tempfile.tempdir = None
        shutil.rmtree(place, ignore_errors=True)


def _has_room() -> bool:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        return os.access(MEMORY, os.W_OK) and min(available, shutil.disk_usage(MEMORY).free) > _ROOM
    except (OSError, StopIteration):
        return False


def _sweep() -> None:
    """Remove the files of sessions that were killed before they could."""
    for place in MEMORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if not Path(f"/proc/{_owner(place)}").exists():
                postgres.sweep(place)
                shutil.rmtree(place, ignore_errors=True)


def _owner(place: Path) -> int:
    return int((place / "owner").read_text())
