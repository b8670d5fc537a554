"""A build as a dag: each step starts when its needs are done, a slow mirror is not waited for, docs may be skipped."""

import asyncio

import keepstep as ks

build = ks.Dag("build")


@build.step
async def mirror(url: str) -> str:
    await asyncio.sleep(30)  # cancelled when the build is done
    return f"{url} from the mirror"


@build.step(retry=ks.Retry(attempts=3, base_seconds=0.01))
async def origin(url: str) -> str:
    return f"{url} from the origin"


@build.step(needs=["mirror", "origin"], wait=ks.Any())
async def source(mirror=None, origin=None) -> str:
    return mirror or origin


@build.step(needs=["source"])
def lint(source: str) -> int:  # a plain def runs in a thread
    return 0


@build.step(needs=["source"])
async def test(source: str) -> dict[str, int]:
    await asyncio.sleep(0.01)
    return {"passed": 12}


@build.step(needs=["source"], when=ks.when.equals("docs", True))
async def pages(source: str) -> int:
    return 7


@build.step(needs=["source", "lint", "test", "pages"])
async def package(source: str, lint: int, test: dict[str, int], pages: int | None) -> str:
    return f"{source}: {lint} warnings, {test['passed']} tests, {pages or 'no'} pages"


async def main() -> None:
    async with ks.open("build.db") as engine:
        run = await engine.start(build, url="keepstep", docs=False, run_id="build-42")
        result = await run.result()
        steps = {one.step: one.outcome.value for one in await run.checkpoints() if one.step}
    print(result["package"])
    assert result == {"package": "keepstep from the origin: 0 warnings, 12 tests, no pages"}
    assert steps["mirror#1"] == "cancelled"
    assert "pages#1" not in steps


if __name__ == "__main__":
    asyncio.run(main())
