"""Which seeds the tests play: always the same in `make test`, and others for every commit in `make nightly`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: How many seeds a run of the tests plays, in so many cases.
SEEDS, CASES = (1000, 20) if os.environ.get("KEEPSTEP_NIGHTLY") else (450, 9)


#: The first seed of `make test`, whose result must not depend on anything but the code.
FIXED_SEED = 20261115


def first_seed() -> int:
    """The fixed number; in `make nightly`, one that the commit gives."""
    if not os.environ.get("KEEPSTEP_NIGHTLY"):
        return FIXED_SEED
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return FIXED_SEED
    return int(asked.stdout[:7], 16)


FIRST_SEED = first_seed()

if __name__ == "__main__":
    print(f"simulated histories: seeds {FIRST_SEED} to {FIRST_SEED + SEEDS - 1}, and all that are kept")
