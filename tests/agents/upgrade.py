"""Conversations that an older version of a framework began go on with a newer one, at whatever record it was killed.

`python -m tests.agents.upgrade NAME OLD_PYTHON` plays the conversations of tests/agents/test_NAME.py. It begins each
with the other Python, in whose environment the older version is, and ends it with this one.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from keepstep.agents import contract
from keepstep.workflows.definition import Workflow

#: Seconds that one process may take.
PATIENCE_SECONDS = 120.0


def subjects(name: str) -> dict[str, contract.AgentContract]:
    """The contracts of an adapter, as its tests write them."""
    found = vars(importlib.import_module(f"tests.agents.test_{name}")).values()
    kinds = [one for one in found if inspect.isclass(one) and issubclass(one, contract.AgentContract)]
    return {one.__name__: one() for one in kinds if one is not contract.AgentContract}


def live(name: str, kind: str, conversation: str, folder: Path, kill_after: int | None) -> None:
    """Have a conversation in this process, which kills itself after a number of commits."""
    script, options = contract.CONVERSATIONS[conversation]
    talk = contract.Talk(script, path=folder / "effects", **options)
    workflow = Workflow(subjects(name)[kind].build(talk), name="agent-contract")
    play = contract._Play(talk, workflow, folder, replaying=False)
    asyncio.run(play._have(kill_after))


def process(python: str, name: str, kind: str, conversation: str, folder: Path, *, kill_after: int = 0) -> bool:
    """Have it in a process of that Python; return whether that was killed."""
    command = [python, "-m", "tests.agents.upgrade", "--live", name, kind, conversation]
    command += [str(folder), str(kill_after)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{conversation}, killed after {kill_after}: exit {done.returncode}\n{done.stderr[-4000:]}")
    return done.returncode != 0


def main(name: str, old: str) -> None:
    found = subjects(name)
    if not found:
        print(f"{name}: its tests have no conversations of the contract")
    for kind, subject in found.items():
        upgrade(name, kind, old, subject.lacks)


def upgrade(name: str, kind: str, old: str, lacks: Mapping[str, str]) -> None:
    """Begin each conversation with the other Python, kill it after each commit, and end it with this one."""
    for conversation in contract.CONVERSATIONS:
        if conversation == "single tools" and "parallel tools" not in lacks:
            continue
        if conversation in lacks:
            print(f"{conversation}: {lacks[conversation]}")
            continue
        kill_after, whole = 1, None
        while True:
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                killed = process(old, name, kind, conversation, folder, kill_after=kill_after)
                lines = (folder / "effects").read_text().count("\n") if (folder / "effects").exists() else 0
                finished = _finished(folder)
                if killed:
                    process(sys.executable, name, kind, conversation, folder)
                effects = [json.loads(line) for line in (folder / "effects").read_text().splitlines()]
                again = [one for one in effects[lines:] if (one[1], one[2]) in finished]
                result = json.loads((folder / "result").read_text())
                calls = {one[0] for one in effects}
            if again or (whole is not None and whole != (result, calls)):
                where = f"{conversation}, killed after {kill_after}"
                raise SystemExit(f"{where}: repeated {again}; {result}, {calls} and not {whole}")
            whole = (result, calls)
            if not killed:
                break
            kill_after += 1
        print(f"{conversation}: {kill_after - 1} times killed with the older version, and ended with the newer one")


def _finished(folder: Path) -> set[tuple[str, str]]:
    talk = contract.Talk({}, path=folder / "effects")
    workflow = Workflow(lambda question: question, name="agent-contract")
    return contract._Play(talk, workflow, folder, replaying=False).finished_steps()


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")
    if sys.argv[1] == "--live":
        live(*sys.argv[2:5], Path(sys.argv[5]), int(sys.argv[6]) or None)
    else:
        main(*sys.argv[1:])
