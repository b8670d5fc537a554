"""A fleet of worker processes whose paths, server and clock fail under them: nobody loses what it is working on."""

from __future__ import annotations

import asyncio

import pytest

from tests.fleet import Fleet


@pytest.mark.crash
def test_a_fleet_keeps_its_runs_through_cuts_outages_and_clock_steps(tmp_path):
    """No process dies here, so nobody is given up, and no recovery is counted."""
    fleet = Fleet(tmp_path, seed=1)
    try:
        asyncio.run(fleet.start(12, seconds=6.0))
        fleet.cut()
        fleet.end_sessions()
        fleet.stall()
        fleet.step_clock()
        fleet.outage()
        runs = asyncio.run(fleet.drain())
        report = fleet.judge(runs)
        assert report.good, str(report)
        assert (report.finished, report.recoveries) == (12, 0), str(report)
        assert fleet.given_up() == []
        fleet.kill()
        asyncio.run(fleet.start(4, seconds=0.1))
        report = fleet.judge(asyncio.run(fleet.drain()))
        assert report.good, str(report)
        assert report.finished == 16
    finally:
        fleet.close()
