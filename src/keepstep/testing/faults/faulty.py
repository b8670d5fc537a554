"""Shared parts of faulty disks: which calls fail, and which pending writes survive a power cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

#: The type of a fault.
F = TypeVar("F")

#: Size in bytes of the smallest unit that a disk writes atomically; SQLite relies on no more.
SECTOR = 512


class Faults(Generic[F]):
    """Counts the calls of a disk from 1; `calls` lists the kind of each."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.repair()

    def fail(self, number: int, fault: F, times: int = 1) -> None:
        """Fail the call of this number, and the following ones, `times` in all."""
        self.fail_when(lambda call, _: fault if number <= call < number + times else None)

    def fail_when(self, fault: Callable[[int, str], F | None]) -> None:
        """Call `fault` before every call, with its number and kind, to decide whether and how it fails."""
        self._fault = fault

    def repair(self) -> None:
        """Stop failing."""
        self.fail_when(lambda _number, _call: None)

    def fault_of(self, call: str) -> F | None:
        """Count a call; return its fault, or None."""
        self.calls.append(call)
        return self._fault(len(self.calls), call)


class Chance:
    """Decides which pending writes survive a power cut; the same seed draws the same subset.

    Each sector of a file is as last synced, or as after any later write, independent of its neighbours: so writes are
    lost, kept, reordered and torn. A file may have grown without its new sectors having been written: they hold zeros,
    or old content of the disk. A name leads to anything that it led to since the last sync.
    """

    def __init__(self, seed: object, sector: int = SECTOR) -> None:
        self._random = random.Random(repr(seed))  # noqa: S311 - reproducible from its seed, not secret
        self._sector = sector

    def content(self, name: str, versions: Sequence[bytes]) -> bytes:
        draw, last = self._random, len(versions) - 1
        if last == 0:
            return versions[0]
        # Mostly lost, mostly kept, or random: each finds other weaknesses.
        kept = draw.choice((0.05, 0.5, 0.95))
        picks = [last if draw.random() < kept else draw.randint(0, last) for _ in range(2)]
        size = len(versions[picks[0]])
        junk = draw.random() < 0.3
        pieces = []
        for start in range(0, size, self._sector):
            end = min(start + self._sector, size)
            if all(version[start:end] == versions[0][start:end] for version in versions[1:]):
                pieces.append(versions[0][start:end])
                continue
            version = versions[last if draw.random() < kept else draw.randint(0, last)]
            piece = version[start:end]
            missing = end - start - len(piece)
            pieces.append(piece + (draw.randbytes(missing) if junk else bytes(missing)))
        return b"".join(pieces)

    def file(self, name: str, versions: Sequence[int | None]) -> int | None:
        return self._random.choice(versions)


class Fixed:
    """Keeps pending writes of files with these name endings, loses the others; `names` does the same for names."""

    def __init__(self, *, kept: tuple[str, ...] = (), names: bool = False) -> None:
        self._kept = kept
        self._names = names

    def content(self, name: str, versions: Sequence[bytes]) -> bytes:
        return versions[-1 if any(name.endswith(end) for end in self._kept) else 0]

    def file(self, name: str, versions: Sequence[int | None]) -> int | None:
        return versions[-1 if self._names else 0]


#: All pending writes are lost; all pending writes are kept.
LOSE = Fixed()
KEEP = Fixed(kept=("",), names=True)
