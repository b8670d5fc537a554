"""One line for the many items of a map: in `run`, `watch`, `show` and `explain`."""

import re
from datetime import UTC, datetime

import pytest

from keepstep.cli import progress
from keepstep.cli.progress import Lines
from keepstep.model import Event
from keepstep.records.progress import MapProgress

PROGRAM = """
import keepstep as ks


@ks.step
async def fetch(page: int) -> int:
    if page % 50 == 49:
        raise ks.Permanent("gone")
    return page


@ks.workflow
async def crawl(pages: int) -> int:
    found = await ks.map(fetch, range(pages), concurrency=10, collect=True)
    return len(found.failures)
"""


@pytest.fixture
def ended(monkeypatch):
    """Give `Lines` the end of items of a map, with its own clock."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def give(lines, first, last, failed=()):
        for number in range(first, last):
            name = "step.failed" if number in failed else "step.completed"
            lines.observe(Event(name, "r", datetime.now(UTC), step=f"1.{number}/fetch#1", attempt=1))
            now[0] += 1.0

    return give


def test_items_after_the_first_get_one_line_now_and_then(ended, capsys):
    with Lines("r", live=False) as lines:
        ended(lines, 0, 23)
        assert capsys.readouterr().err.count("/fetch") == progress.MOST_ITEMS
        lines.maps.totals([MapProgress("fetch", "1", 20, 0, 100)])
        ended(lines, 23, 31, failed={24})
        assert capsys.readouterr().err.split("\n")[0].endswith("map fetch: 25 of 100 done, 1 failed")
        lines.observe(Event("step.completed", "r", datetime.now(UTC), step="report#1", attempt=1))
        told = capsys.readouterr().err
        assert told.index("map fetch: 30 of 100 done, 1 failed") < told.index("report")
        ended(lines, 31, 33)
    assert "map fetch: 32 of 100 done, 1 failed" in capsys.readouterr().err


def test_attempts_that_are_made_again_are_no_failed_items(ended, capsys):
    with Lines("r", live=False) as lines:
        ended(lines, 0, 25)
        again = {"error": "late", "retry_at": datetime.now(UTC).isoformat()}
        lines.observe(Event("step.failed", "r", datetime.now(UTC), step="1.30/fetch#1", attempt=1, data=again))
    assert "map fetch: 25 done" in capsys.readouterr().err


def test_run_and_watch_tell_a_map_in_one_line(keepstep, tmp_path):
    (tmp_path / "maps.py").write_text(PROGRAM)
    done = keepstep("run", f"{tmp_path / 'maps.py'}:crawl", "200", "--id", "r")
    assert done.out.strip() == "4"
    assert len(re.findall("/fetch", done.err)) == progress.MOST_ITEMS
    assert re.search(r"map fetch: 196( of 200)? done, 4 failed", done.err)
    watched = keepstep("watch", "r").out
    assert watched.count("/fetch") == progress.MOST_ITEMS
    assert "map fetch: 196 done, 4 failed" in watched
    assert keepstep("watch", "r", "--full").out.count("/fetch") == 200
