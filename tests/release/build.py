"""Builds the source distribution and the wheel of a commit, without a network."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


def changed() -> list[str]:
    """The files that differ from the newest commit."""
    return [line[3:] for line in git("status", "--porcelain").decode().splitlines()]


def exported(place: Path) -> Path:
    """The files of the newest commit, and nothing else of this folder."""
    place.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        archive.extractall(place, filter="data")
    return place


def build(source: Path, out: Path) -> list[Path]:
    """Build both; the wheel is made from the source distribution, as those make it who take that."""
    seconds = git("log", "-1", "--format=%ct").decode().strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": seconds, "PYTHONHASHSEED": "0"}

    def hatch(where: Path, kind: str) -> Path:
        words = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)]
        done = subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the {kind} cannot be built:\n{done.stdout}{done.stderr}")
        [made] = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
        return made

    packed = hatch(source, "sdist")
    wheel = hatch(source, "wheel")
    inside = out / "unpacked"
    with tarfile.open(packed) as archive:
        archive.extractall(inside, filter="data")
    direct = wheel.read_bytes()
    again = hatch(next(inside.iterdir()), "wheel")
    if again.read_bytes() != direct:
        sys.exit("the wheel differs from the one that the source distribution gives")
    return [packed, wheel]
