"""What faulty disks have in common: which of their calls fail, and what of the pending outlives a power cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

#: What is wrong with a call.
F = TypeVar("F")

#: The smallest piece that a disk writes whole; SQLite counts on no more.
SECTOR = 512


class Faults(Generic[F]):
    """Counts the calls of a disk from 1; `calls` lists what each was."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.repair()

    def fail(self, number: int, fault: F, times: int = 1) -> None:
        """Have the call of this number fail so, and those after it until so many have failed."""
        self.fail_when(lambda call, _: fault if number <= call < number + times else None)

    def fail_when(self, fault: Callable[[int, str], F | None]) -> None:
        """Ask before every call, with its number and what it is, whether and how it fails."""
        self._fault = fault

    def repair(self) -> None:
        """Fail no more."""
        self.fail_when(lambda _number, _call: None)

    def fault_of(self, call: str) -> F | None:
        """Count a call; what is wrong with it, or None."""
        self.calls.append(call)
        return self._fault(len(self.calls), call)


class Chance:
    """Decides what of the pending outlives a power cut; the drawn subset is the same for the same seed.

    Each sector of a file is as it was last synced or as it was after any of the writes since, whatever became of its
    neighbours: that loses, keeps, reorders and tears. A file may have grown without its new sectors having been
    written: they hold zeros, or what lay on the disk before. A name leads to what it led to at any time since.
    """

    def __init__(self, seed: object, sector: int = SECTOR) -> None:
        self._random = random.Random(repr(seed))  # noqa: S311 - drawn again from its seed, not secret
        self._sector = sector

    def content(self, name: str, versions: Sequence[bytes]) -> bytes:
        draw, last = self._random, len(versions) - 1
        if last == 0:
            return versions[0]
        # Mostly lost, mostly kept, or anything: each finds other weaknesses than the two others.
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
    """Keeps the pending of the files whose names end so, loses that of the others; `names` says the same of names."""

    def __init__(self, *, kept: tuple[str, ...] = (), names: bool = False) -> None:
        self._kept = kept
        self._names = names

    def content(self, name: str, versions: Sequence[bytes]) -> bytes:
        return versions[-1 if any(name.endswith(end) for end in self._kept) else 0]

    def file(self, name: str, versions: Sequence[int | None]) -> int | None:
        return versions[-1 if self._names else 0]


#: Everything pending is lost; everything pending is kept.
LOSE = Fixed()
KEEP = Fixed(kept=("",), names=True)
