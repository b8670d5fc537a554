"""How agents are measured: the time that each model or tool call takes longer in a workflow than by itself."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from .conversing import CALLS, JOBS
from .measure import PATIENCE_SECONDS, Effort, Finding, folder, run

#: Milliseconds that a recorded call may take longer.
MOST_MS = 3.0
#: How many times less than the plug-in of DBOS a call shall take longer.
LEAST = 3.0
#: The peer, in an environment of its own.
DBOS = "pydantic-ai-slim[dbos]"


def findings(effort: Effort) -> list[Finding]:
    """Each framework with and without Keepstep on SQLite, durable after each call, in turn."""
    found = []
    for framework in JOBS:
        takes = [added(framework, effort) for _ in range(effort.rounds(5))]
        found.append(
            Finding(
                "agents",
                f"a call of an agent of {framework}, with 20 model and 40 tool calls: added by its record",
                statistics.median(takes),
                "ms",
                most=MOST_MS,
                detail={"takes": takes},
            )
        )
    return found


def added(framework: str, effort: Effort) -> float:
    """Milliseconds that Keepstep adds to each call."""
    times = effort.size(9, 2)
    with_, without = (
        run("conversing", framework, durable=durable, times=times)["seconds"] for durable in (True, False)
    )
    return (with_ - without) / CALLS * 1e3


def beside_dbos(effort: Effort) -> list[Finding]:
    """The same agent of Pydantic AI with the plug-in of DBOS and with ours, in turn."""
    python = _environment()
    if python is None:
        print("dbos agents: no result, because its environment could not be made")
        return []
    ours, theirs = [], []
    for _ in range(effort.rounds(3)):
        theirs.append(_added_by_dbos(python, effort))
        ours.append(added("pydantic_ai", effort))
    ratios = [other / mine for mine, other in zip(ours, theirs, strict=True)]
    return [
        Finding(
            "agents",
            "a call of an agent of pydantic_ai: added, beside what the plug-in of DBOS adds (ratio: times less)",
            statistics.median(ours),
            "ms",
            floor=statistics.median(theirs),
            ratio=statistics.median(ratios),
            least_ratio=LEAST,
            detail={"ours": ours, "peer": theirs, "ratios": ratios},
        )
    ]


def _environment() -> Path | None:
    """The Python of an environment with the framework and DBOS; it is made the first time."""
    place = Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache" / "ks-peers") / "dbos-agents"
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", DBOS]
    return python if subprocess.run(pip, check=False).returncode == 0 else None


def _added_by_dbos(python: Path, effort: Effort) -> float:
    def seconds(durable: str) -> float:
        with folder() as where:
            command = [str(python), str(Path(__file__).with_name("conversing_dbos.py")), str(where), durable]
            done = subprocess.run(
                [*command, str(effort.size(9, 2))],
                env={**os.environ, "PYTHONPATH": ""},
                stdout=subprocess.PIPE,
                timeout=PATIENCE_SECONDS,
                check=True,
            )
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return float(answer["seconds"])

    return (seconds("yes") - seconds("no")) / CALLS * 1e3
