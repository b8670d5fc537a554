"""`topics`: what there is, who has read how far, and a message by hand."""

from __future__ import annotations

PROGRAM = """
import keepstep as ks

news = ks.Topic("news")

@ks.workflow
async def reader():
    async with news.subscribe() as messages:
        first = await messages.next()
        await ks.wait_for("go on")
    return first

@ks.workflow
async def meets():
    await ks.barrier("start", parties=2, group="g", timeout=None)

@ks.workflow
async def asks(other):
    return await ks.ask(other, "question", timeout=None)
"""


def test_topics_are_listed_shown_and_published_to(keepstep, folder):
    (folder / "reading.py").write_text(PROGRAM, encoding="utf-8")
    keepstep("start", "reading.py:reader", "--id", "r")
    assert keepstep("topics").out.startswith("no topic")
    assert "no topic 'news'" in keepstep("topics", "show", "news").err
    keepstep("worker", "reading.py", "--until-idle")
    assert "a message of topic news" in keepstep("show", "r").out
    assert keepstep("topics", "publish", "news", '{"a": 1}').code == 0
    keepstep("worker", "reading.py", "--until-idle")
    assert "signal go on" in keepstep("show", "r").out
    found = keepstep("topics", "show", "news", "--json").json
    assert (found["published"], found["recent"]) == (1, [{"a": 1}])
    assert [(one["run"], one["status"], one["unread"]) for one in found["subscribers"]] == [("r", "waiting", 1)]
    (listed,) = keepstep("topics", "--json").json["topics"]
    assert listed["topic"] == "news"
    shown = keepstep("topics", "show", "news").out
    assert "SUBSCRIBER" in shown
    assert '"a": 1' in shown or "'a': 1" in shown
    findings = keepstep("doctor", "--json").json["findings"]
    assert [one["code"] for one in findings] == ["no-worker"], "a topic that has nothing to do needs nobody"


def test_bad_use_is_explained(keepstep):
    assert "name the topic" in keepstep("topics", "show").err
    assert "as JSON" in keepstep("topics", "publish", "news").err
    assert "not JSON" in keepstep("topics", "publish", "news", "{").err
    assert "given with publish" in keepstep("topics", "show", "news", "1").err


def test_show_says_why_a_run_waits_for_others(keepstep, folder):
    (folder / "reading.py").write_text(PROGRAM, encoding="utf-8")
    keepstep("start", "reading.py:meets", "--id", "m")
    keepstep("start", "reading.py:reader", "--id", "r")
    keepstep("start", "reading.py:asks", "r", "--id", "a")
    keepstep("worker", "reading.py", "--until-idle")
    assert "the other parties of barrier g:start" in keepstep("show", "m").out
    assert "the reply to question" in keepstep("show", "a").out
