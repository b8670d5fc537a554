"""One job in a fresh process: `python -m bench.child ours j1 FOLDER '{"n": 100}'` prints one line of JSON."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
import time
from pathlib import Path


def main(side: str, job: str, where: str, options: str = "{}") -> None:
    began = time.monotonic()
    logging.disable(logging.WARNING)  # that a run of 50,000 steps is a long one is the point here
    module = importlib.import_module(f"bench.{side}")
    imported = time.monotonic()
    answer = asyncio.run(module.JOBS[job](Path(where), **json.loads(options)))
    answer["importing"], answer["imported"] = began, imported
    print(json.dumps(answer), flush=True)
    os._exit(0)  # a writer thread of the floor may still wait for work


if __name__ == "__main__":
    main(*sys.argv[1:])
