"""Other libraries on the same jobs, when their scripts are at hand: `peer NAME JOB` prints one line of JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from .measure import PATIENCE_SECONDS, ROOT, Effort, Finding, run

#: Who is compared, with the options of the fairest setting: durable after each step.
PEERS: dict[str, list[str]] = {
    "dbos": ["--backend", "sqlite"],
    "langgraph": ["--backend", "sqlite"],
    "restate": [],
    "maf": [],
}
#: What ours is compared on, where it is not SQLite: with a peer that keeps files, files.
OURS: dict[str, dict[str, str]] = {"maf": {"store": "files"}}
#: How many times faster than a peer a job shall be.
LEAST = {
    ("j1", "dbos"): 2.5,
    ("j1", "langgraph"): 2.5,
    ("j2", "dbos"): 40.0,
    ("j2", "langgraph"): 40.0,
    ("j2", "restate"): 5.0,
    ("j3", "restate"): 5.0,
    ("j2", "maf"): 3.0,
}
UNITS = {"j1": "steps/s", "j2": "steps/s", "j3": "runs/s"}


def scripts() -> Path | None:
    """Where the scripts are: the folder that PEERS names, or the one beside this repository."""
    named = Path(os.environ.get("PEERS") or "-")
    for place in (named, ROOT.parent / "shared" / "peers"):
        if (place / "peer").is_file():
            return place.resolve()
    return None


def compare(jobs: list[str], effort: Effort) -> list[Finding]:
    """Each peer beside ours on the same job, in turn."""
    place = scripts()
    if place is None:
        print("no scripts of peers were found; PEERS=FOLDER names them")
        return []
    findings = _on_postgres(place, effort) if "postgres" in jobs else []
    if "agents" in jobs:
        from .agent_calls import beside_dbos

        findings += beside_dbos(effort)
    if "graph" in jobs:
        findings += _graphs(place, effort)
    for job in [job for job in UNITS if job in jobs]:
        for name, options in PEERS.items():
            ours, theirs = [], []
            for _ in range(effort.rounds(3)):
                rate = _peer(place, name, job, options)
                if rate is None:
                    break
                theirs.append(rate)
                ours.append(run("ours", job, **OURS.get(name, {}))["per_second"])
            if not theirs:
                print(f"{name} {job}: no result")
                continue
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            findings.append(
                Finding(
                    job,
                    f"beside {name}",
                    statistics.median(ours),
                    UNITS[job],
                    floor=statistics.median(theirs),
                    ratio=statistics.median(ratios),
                    least_ratio=LEAST.get((job, name)),
                    detail={"ours": ours, "peer": theirs, "ratios": ratios},
                )
            )
            print(f"  {name} {job}: {findings[-1].ratio:.1f} times", flush=True)
    return findings


def _graphs(place: Path, effort: Effort) -> list[Finding]:
    """The same graph in LangGraph and in ours, in turn: one step that is passed again and again."""
    findings = []
    for job, least in (("j1", 2.0), ("j2", 15.0)):
        ours, theirs = [], []
        for _ in range(effort.rounds(3)):
            rate = _peer(place, "langgraph", job, PEERS["langgraph"])
            if rate is None:
                break
            theirs.append(rate)
            ours.append(run("graphs", job)["per_second"])
        if not theirs:
            print(f"langgraph {job}: no result")
            continue
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        findings.append(
            Finding(
                "graph",
                f"{job} beside the same graph in langgraph",
                statistics.median(ours),
                UNITS[job],
                floor=statistics.median(theirs),
                ratio=statistics.median(ratios),
                least_ratio=least,
                detail={"ours": ours, "peer": theirs, "ratios": ratios},
            )
        )
        print(f"  langgraph {job}, as a graph: {findings[-1].ratio:.1f} times", flush=True)
    return findings


def _on_postgres(place: Path, effort: Effort) -> list[Finding]:
    """DBOS and ours on one server, in turn."""
    from . import postgres

    findings = []
    with postgres.server() as dsn:
        port = dsn.rpartition(":")[2].partition("/")[0]
        for job, least in (("j1", None), ("j2", 40.0)):
            ours, theirs = [], []
            for _ in range(effort.rounds(3)):
                rate = _peer(place, "dbos", job, ["--backend", "postgres"], PGPORT=port)
                if rate is None:
                    break
                theirs.append(rate)
                ours.append(postgres.run("ours", job, postgres.fresh(dsn))["per_second"])
            if not theirs:
                print(f"dbos {job} on PostgreSQL: no result")
                continue
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            findings.append(
                Finding(
                    "postgres",
                    f"{job} beside dbos on PostgreSQL",
                    statistics.median(ours),
                    UNITS[job],
                    floor=statistics.median(theirs),
                    ratio=statistics.median(ratios),
                    least_ratio=least,
                    detail={"ours": ours, "peer": theirs, "ratios": ratios},
                )
            )
    return findings


def _peer(place: Path, name: str, job: str, options: list[str], **env: str) -> float | None:
    try:
        done = subprocess.run(
            [str(place / "peer"), name, job, *options],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    answers: list[dict[str, Any]] = [
        json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    return float(answers[-1]["per_s"]) if answers else None
