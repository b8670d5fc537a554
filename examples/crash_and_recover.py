"""A program is killed in the middle of its work; the same program, run again, goes on where it was.

The effects file is written by the step bodies themselves, so it shows what really ran, whatever the store says.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import keepstep as ks

PAGES = ["home", "news", "shop", "help"]


@ks.step
def fetch(page: str) -> int:
    with Path("effects.txt").open("a") as effects:
        effects.write(f"{page}\n")
    return len(page) * 100


@ks.workflow
async def crawl(pages: list[str]) -> int:
    total = 0
    for page in pages:
        total += await fetch(page)
        if page == "news" and os.environ.get("CRASH"):
            os.kill(os.getpid(), signal.SIGKILL)  # no warning, no clean-up: as when the power goes
    return total


def program() -> None:
    """What the user writes. A known run_id gives the run that is already there."""
    print("result:", ks.run(crawl, PAGES, url="crawl.db", run_id="crawl-1"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "program"]
        killed = subprocess.run(command, cwd=folder, env={**os.environ, "CRASH": "1"}, check=False)
        assert killed.returncode == -signal.SIGKILL
        print("first run: killed after", Path(folder, "effects.txt").read_text().split())

        again = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        effects = Path(folder, "effects.txt").read_text().split()
        print("second run:", again.stdout.strip(), "- it fetched", effects[2:])
        assert again.stdout == "result: 1600\n"
        assert effects == PAGES  # nothing lost, nothing twice


if __name__ == "__main__":
    program() if sys.argv[1:] else main()
