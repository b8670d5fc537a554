"""A crash before and after every write of a run that gives tasks to a team, and of the hosts that perform them."""

from __future__ import annotations

import asyncio

import pytest

import keepstep as ks
from keepstep.testing.faults.crash import crash_everywhere
from tests.nightly import cases

from . import programs
from .test_every_write import Bench

pytestmark = pytest.mark.crash


async def refuses(task):
    raise ks.AgentRefused("not mine")


async def adds(task):
    return await programs.add(await programs.add(task, 1), 10)


async def halves(task):
    return task // await programs.add(1, 1)


def agents():
    return [
        ks.Agent("a", perform=refuses, capabilities=["add"]),
        ks.Agent("b", perform=adds, capabilities=["add"]),
        ks.Agent("c", perform=halves, capabilities=["halve"]),
    ]


@programs.workflow
async def teaming():
    total = await ks.perform("add", 1, wait=True)
    both = await ks.gather(ks.perform("halve", total, wait=True), ks.perform("b", total, wait=True))
    return [await programs.add(total, 0), *both]


async def play_teaming(engine):
    return await (await engine.start(teaming, run_id="main")).result()


#: One task is refused by the first agent, so there are four children of three tasks.
EXAMPLE = programs.Example("teaming", play_teaming, [12, 6, 23], children=4, done=("add#1",))


@pytest.mark.parametrize("store", cases(("memory", "sqlite", "files", "postgres"), ("memory", "sqlite")))
def test_a_crash_at_any_write_of_a_team_changes_nothing(store, tmp_path):
    bench = Bench(EXAMPLE, store, tmp_path)

    async def main():
        return await crash_everywhere(
            bench.disk, play_teaming, bench.judge, recorder=bench.recorder, clock=bench.clock, agents=agents()
        )

    assert asyncio.run(main()) >= 20
