"""Every command, with `--json`, gives a program one JSON object on standard output and nothing else there."""

from __future__ import annotations

import json

from keepstep.cli import COMMANDS

GRAPH = """
import keepstep as ks

graph = ks.Graph("reviewed")

@graph.step
async def draft(state):
    return {"text": "first"}

graph.wait("gate", signal="ok", into="ok")
graph.edge("draft", "gate")
graph.entry("draft")
graph.exit("gate")
"""

#: In this order: what each command is asked, and part of its answer.
ASKED = [
    ("run program.py:total 1 --id done", {"run": "done", "status": "completed", "result": 11}),
    ("run program.py:call --id failed", {"run": "failed", "status": "failed"}),
    *[(f"start program.py:approval --id {name}", {"run": name, "status": "queued"}) for name in ("a", "b", "c", "d")],
    ("start graphs.py:graph --id g", {"run": "g", "status": "queued"}),
    ("start program.py:total 1 --id t", {"run": "t"}),
    ("start program.py:call --id u", {"run": "u"}),
    (
        "worker program.py graphs.py --until-idle",
        {"left": "idle", "drove": {"completed": 1, "failed": 1, "waiting": 5}},
    ),
    ("schedules", {"schedules": []}),
    ("list --limit 1", {}),
    ("explain done", {"run": "done", "status": "completed"}),
    ("show done", {"id": "done", "status": "completed", "result": 11}),
    ("history done", {"run": "done"}),
    ("audit done", {"run": "done"}),
    ("diff done 1 2", {}),
    ("replay a program.py:approval", {"run": "a"}),
    ("check program.py", {}),
    ("doctor", {"healthy": True}),
    ("queues", {"queues": []}),
    ("memory", {"memories": []}),
    ("artifacts", {"artifacts": []}),
    ("services", {"services": []}),
    ("workers", {"workers": []}),
    ("top", {"workers": [], "halted": 0, "services": []}),
    ("channels", {"channels": []}),
    ("topics", {"topics": []}),
    ("topics publish news [1]", {"topic": "news", "published": True}),
    ("topics show news", {"topic": "news", "published": 0, "recent": [[1]]}),
    ("agents", {"agents": []}),
    ("drain --all", {"drained": [], "alive": []}),
    ("verify", {"sound": True}),
    ("repair", {}),
    ("signal a approved true", {"run": "a", "sent": True, "awaited": True}),
    ("approve b --deny", {"run": "b", "approved": False, "awaited": True}),
    ("pause c", {"run": "c", "asked": "pause"}),
    ("resume c", {"run": "c", "asked": "resume"}),
    ("cancel d --force", {"run": "d", "cancelled": True}),
    ("state g", {"text": "first"}),
    ("consolidate g", {"run": "g", "consolidated": True}),
    ("edit g --set text=1", {"run": "g", "set": ["text"]}),
    ("graph graphs.py:graph", {}),
    ("fork done --id f", {"run": "f"}),
    ("rewind f --to 1", {"run": "f"}),
    ("aside", {"runs": []}),
    ("recover failed --dry-run", {"run": "failed", "recoverable": True, "handler": None}),
    ("retry failed", {"run": "failed", "status": "queued"}),
    ("validate flow.json", {}),
    ("export all.jsonl done", {"written": 1}),
    ("import all.jsonl --store new.db", {"written": 1}),
    ("copy new.db files:new", {"written": 1}),
    ("retain --store new.db", {"removed": 0}),
    ("purge --all --store new.db", {"removed": 1}),
    ("erase done", {}),
    ("version", {}),
]
#: These have tests of their own: they need a process to be killed, a key, a server, a question, or go on until stopped.
ELSEWHERE = {"ask", "complete", "crashtest", "demo", "divide", "mcp", "rekey", "resolve", "serve", "skip", "watch"}


def test_a_program_is_given_one_object_by_every_command(keepstep, folder):
    (folder / "graphs.py").write_text(GRAPH, encoding="utf-8")
    (folder / "flow.json").write_text('{"metadata": {"name": "x"}}', encoding="utf-8")
    assert {words.split()[0] for words, _ in ASKED} | ELSEWHERE == set(COMMANDS)
    for words, expected in ASKED:
        told = keepstep(*words.split(), "--json")
        assert told.out.count("\n") == 1, (words, told)
        answer = json.loads(told.out)
        assert isinstance(answer, dict), words
        assert {key: answer.get(key) for key in expected} == expected, words
