"""The examples are crash-proof: no false alarm, and what is found in two of them is what they show on purpose."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from keepstep.testing import Ask, crashtest
from keepstep.workflows.definition import KNOWN
from tests.nightly import cases

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.crash


@pytest.fixture
def example():
    """Load an example; it is forgotten afterwards."""
    known, modules = dict(KNOWN), set(sys.modules)

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    KNOWN.clear()
    KNOWN.update(known)
    for name in set(sys.modules) - modules:
        if name.startswith("example_"):
            del sys.modules[name]


def test_every_example_is_here():
    tested = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.stem}"' in tested, path.stem


#: These give tasks to agents. `tests/engine/test_agents.py` crashes such runs, and their hosts, at every write.
PERFORMED = {"debate", "handoff", "newsdesk"}

CASES = {
    "agent": lambda m: (m.agent, ["How warm is it?"], {}),
    "approval": lambda m: (m.expense, ["Bob", 5000], {"answers": {"approve": {"ok": True, "by": "Dora"}}}),
    "build": lambda m: (m.build, [], {"url": "here", "docs": True, "at_most": 15}),
    "chat": lambda m: (m.conversation, ["weather"], {"answers": [("say", Ask("hello")), ("say", Ask("bye"))]}),
    "newsroom": lambda m: (m.newsroom, [{"topic": "x"}], {"answers": {"agreed": True}, "at_most": 15}),
    "nightly": lambda m: (m.nightly, [], {"day": "sunday"}),
    "order": lambda m: (m.fulfil, [m.Order("2", "piano", 990_000)], {}),
    "poller": lambda m: (m.poller, [], {"answers": {"stop": True}}),
    "report": lambda m: (m.report, [list(range(6))], {}),
    "review": lambda m: (m.review, [{"topic": "gardens"}], {"answers": {"approved": True}, "at_most": 15}),
    # These keep a file to show what ran, which grows when a step is repeated.
    "crash_and_recover": lambda m: (m.crawl, [["home", "news"]], {"ignore": ["effects.txt"]}),
    "provision": lambda m: (m.provision, ["mail"], {"set_up": m.PROVIDER.mkdir, "ignore": ["provider/pings"]}),
}


@pytest.mark.parametrize("crashes", cases([8, 60], quick=[8]))
@pytest.mark.parametrize("name", CASES)
def test_an_example_is_crash_proof(name, crashes, example):
    workflow, args, options = CASES[name](example(name))
    options["at_most"] = min(crashes, options.get("at_most", crashes))
    report = crashtest(workflow, *args, **options)
    assert report.findings == [], f"{report}"
    assert report.crashes


def test_the_file_that_an_example_keeps_is_noticed(example):
    report = crashtest(example("crash_and_recover").crawl, ["home"])
    assert [finding.message.rpartition(": ")[2] for finding, _ in report.findings] == ["effects.txt appended to"]
