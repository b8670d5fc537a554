"""A report over many sources at once: the slow do not hold up the fast, and a few may fail."""

import asyncio

import keepstep as ks


@ks.step(retry=ks.Retry(attempts=3, base_seconds=0.01), timeout=5)
async def read(source: int) -> int:
    await asyncio.sleep(0.01 * (source % 3))
    if source % 10 == 7:
        raise ConnectionError(f"source {source} does not answer")
    return source * source


@ks.step  # a plain def runs in a thread, and several of them at once
def render(numbers: list[int], missing: list[int]) -> str:
    return f"{len(numbers)} sources, sum {sum(numbers)}, missing {missing}"


@ks.workflow
async def report(sources: list[int]) -> str:
    answers = await ks.map(read, sources, concurrency=10, collect=True)
    if answers.degraded:  # less than 70 % answered
        raise ks.Permanent("too few sources answered")
    numbers = [answer for answer in answers if answer is not None]
    return await render(numbers, sorted(answers.failures))


async def main() -> None:
    async with ks.open("report.db") as engine:
        run = await engine.start(report, list(range(40)))
        text = await run.result()
        attempts = await run.checkpoints(failed=True)
    print(text)
    assert text.endswith("missing [7, 17, 27, 37]")
    assert len(attempts) == 4 * 3  # every failed attempt is on record


if __name__ == "__main__":
    asyncio.run(main())
