"""The command: `python -m bench [--quick] [--jobs j1,j2] [--peers]`."""

from __future__ import annotations

import argparse
import sys
import time

from . import measure, peers, report


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Keepstep beside its floor.")
    parser.add_argument("--quick", action="store_true", help="small jobs and few rounds: a look, not a measurement")
    parser.add_argument("--jobs", default=",".join(measure.JOBS), help="which ones, separated by commas")
    parser.add_argument("--peers", action="store_true", help="run other libraries beside it (PEERS=FOLDER names them)")
    chosen = parser.parse_args(arguments)
    jobs = [job.strip().lower() for job in chosen.jobs.split(",") if job.strip()]
    unknown = set(jobs) - set(measure.JOBS)
    if unknown:
        parser.error(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(measure.JOBS)}")
    effort = measure.Effort(chosen.quick)
    findings: list[measure.Finding] = []
    for job in jobs:
        began = time.perf_counter()
        findings += measure.JOBS[job](effort)
        report.write(findings, [])  # what is there is kept, should a later job fail
        print(f"{job} took {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(report.table(findings))
    where = report.spent(findings)
    if where:
        print(f"\n{where}")
    beside: list[measure.Finding] = []
    if chosen.peers:
        print("\nbeside other libraries:")
        beside = peers.compare(jobs, effort)
        print(report.table(beside, "theirs"))
    report.write(findings, beside)
    print(f"\nwritten: {report.RESULTS.relative_to(measure.ROOT)}/latest.json and latest.svg")


if __name__ == "__main__":
    main()
