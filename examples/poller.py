"""A loop that never ends: every few rounds it continues as a new run, so its history stays short."""

import asyncio
import itertools

import keepstep as ks

ROUNDS = 3  # a real one would take hundreds

queue = itertools.count(1)  # stands for a mailbox


@ks.step
async def poll() -> int:
    return next(queue)


@ks.workflow
async def poller(total: int = 0) -> int:
    for _ in range(ROUNDS):
        total += await poll()
        if await ks.wait_for("stop", timeout=0.02, default=False):
            return total
    return ks.continue_as(total)


async def main() -> None:
    async with ks.open("poller.db") as engine:
        run = await engine.start(poller)
        async for event in run.watch():
            if event.run != run.id:
                break  # the first run of the series has ended, and its successor is at work
        await run.signal("stop")  # goes to whichever run of the series is there now
        total = await run.result()  # and so does this
        runs = (await engine.list(id_prefix=run.id)).runs
    print(f"total {total} after {len(runs)} runs: {', '.join(sorted(r.id for r in runs))}")
    count = round((2 * total) ** 0.5)
    assert len(runs) > 1
    assert total == sum(range(count + 1))  # nothing was polled and lost


if __name__ == "__main__":
    asyncio.run(main())
