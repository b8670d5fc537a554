"""The agent and the stage that a workflow names, on the command line."""

from __future__ import annotations

import json

NAMED = """
import keepstep as ks

@ks.step
async def think(text):
    return text

@ks.workflow
async def named():
    with ks.stage("research"), ks.acting("critic"):
        await think("one")
"""


def test_names_are_shown_in_text_and_json(keepstep, folder):
    (folder / "named.py").write_text(NAMED, encoding="utf-8")
    assert keepstep("run", "named.py", "--id", "r1").code == 0
    history = keepstep("history", "r1")
    assert "stage research, agent critic" in history.out
    assert "[stage research, agent critic]" in keepstep("audit", "r1").out
    assert "stage research, agent critic" in keepstep("watch", "r1").out
    shown = keepstep("show", "r1")
    assert "research (1 record)" in shown.out
    assert "critic (1 record)" in shown.out
    told = json.loads(keepstep("--json", "history", "r1").out)["checkpoints"]
    assert ("critic", "research") in [(one["agent"], one["stage"]) for one in told]
    told = json.loads(keepstep("--json", "audit", "r1").out)["entries"]
    assert ("critic", "research") in [(one["agent"], one["stage"]) for one in told]
    told = json.loads(keepstep("--json", "show", "r1").out)
    assert (told["agents"], told["stages"]) == ({"critic": 1}, {"research": 1})
    told = [json.loads(line) for line in keepstep("--json", "watch", "r1").out.splitlines()]
    assert ("critic", "research") in [(one["agent"], one["stage"]) for one in told]
