"""Which seeds the tests play: another thousand for every commit, the same for every run of one."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: How many seeds every run of the tests plays, in so many cases.
SEEDS, CASES = 1000, 20


def first_seed() -> int:
    """The number that the commit gives; without git always the same."""
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 20261115
    return int(asked.stdout[:7], 16)


FIRST_SEED = first_seed()

if __name__ == "__main__":
    print(f"simulated histories: seeds {FIRST_SEED} to {FIRST_SEED + SEEDS - 1}, and all that are kept")
