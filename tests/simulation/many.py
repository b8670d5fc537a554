"""Plays histories from free seeds for a while, on several cores, and says what was broken."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import time
from collections import Counter
from typing import Any

from . import draw, play
from .shrink import shrink

#: Seeds that one process plays before it reports.
SHARE = 20


def play_seeds(seeds: range) -> dict[str, Any]:
    """Play some seeds; what befell them, and the plans that broke a promise."""
    counts: Counter[str] = Counter()
    befell: Counter[str] = Counter()
    failed: list[tuple[int, list[str]]] = []
    for seed in seeds:
        outcome = play(draw(seed))
        counts.update(outcome.counts)
        counts["virtual seconds"] += round(outcome.seconds)
        befell.update(outcome.befell)
        if outcome.broken:
            failed.append((seed, outcome.broken))
    return {"histories": len(seeds), "counts": counts, "befell": befell, "failed": failed}


def story_of(seed: int, *, shrunk: bool = True) -> str:
    """What happens under a seed, made as short as it will get, with the plan to keep."""
    plan = draw(seed)
    outcome = play(plan)
    if outcome.broken and shrunk:
        plan = shrink(plan, outcome.broken, play)
        outcome = play(plan)
    lines = [f"seed {seed}: {len(outcome.broken)} broken", *outcome.broken, "", *outcome.story, "", json.dumps(plan)]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Play, and report; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to play")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes play")
    parser.add_argument("--seed", type=int, help="the first seed; without it a free one")
    parser.add_argument("--only", type=int, help="play this one seed and tell its story")
    options = parser.parse_args(arguments)
    if options.only is not None:
        print(story_of(options.only))
        return 0
    first = secrets.randbelow(10**9) if options.seed is None else options.seed
    return report(first, options.seconds, options.jobs)


def report(first: int, seconds: float, jobs: int) -> int:
    """Play from a seed on for so long, and print what came of it."""
    print(f"seeds from {first}, for {seconds:g} s, on {jobs} processes", flush=True)
    began = time.monotonic()
    counts: Counter[str] = Counter()
    befell: Counter[str] = Counter()
    failed: list[tuple[int, list[str]]] = []
    histories, told = 0, began

    def shares() -> Any:
        number = first
        while time.monotonic() - began < seconds:
            yield range(number, number + SHARE)
            number += SHARE

    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, maxtasksperchild=50) as pool:
        waiting: list[Any] = []
        todo = shares()
        while True:
            while len(waiting) < 2 * jobs and (share := next(todo, None)) is not None:
                waiting.append(pool.apply_async(play_seeds, (share,)))
            if not waiting:
                break
            done = waiting.pop(0).get()
            histories += done["histories"]
            counts += done["counts"]
            befell += done["befell"]
            for seed, broken in done["failed"]:
                failed.append((seed, broken))
                print(f"seed {seed}: {broken[0]}", flush=True)
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"{histories} histories, {len(failed)} failed", flush=True)
    minutes = (time.monotonic() - began) / 60
    lines = [
        f"{histories} histories in {60 * minutes:.0f} s: {histories / minutes:.0f} a minute",
        f"in them: {', '.join(f'{count:,} {what}' for what, count in sorted(counts.items()))}",
        f"what befell them: {', '.join(f'{count:,} × {what}' for what, count in sorted(befell.items()))}",
    ]
    print("\n".join(lines), flush=True)
    for seed, _ in failed[:5]:
        print(f"\n{story_of(seed)}", flush=True)
    verdict = (
        f"{len(failed)} seeds broke a promise: {[seed for seed, _ in failed]}" if failed else "every promise was kept"
    )
    print(verdict, flush=True)
    return 1 if failed else 0
