"""A workflow in a file, review.yaml, and its functions: it waits for a person, through any number of restarts."""

import asyncio
from pathlib import Path

import keepstep as ks

written: list[str] = []


async def write(topic: str) -> str:
    written.append(topic)
    return f"All about {topic}."


def critic(state):
    return {"score": state.get("score", 0.0) + 0.5}


def publish(state):
    return {"title": state["text"].upper()}


async def send(state):
    return {"sent": len(state["title"])}


def shelve(state):
    return {"shelved": True}


FUNCTIONS = {"write": write, "critic": critic, "publish": publish, "send": send, "shelve": shelve}
review = ks.load(Path(__file__).with_name("review.yaml"), functions=FUNCTIONS)


async def main() -> None:
    async with ks.open("reviews.db") as engine:
        await engine.start(review, topic="gardens", run_id="gardens")
        await engine.start(review, topic="taxes", run_id="taxes")

    # Another program, another day: what was finished in the first is not done again.
    async with ks.open("reviews.db") as engine:
        await engine.signal("gardens", "approved", True)
        await engine.signal("taxes", "approved", False)
        sent = await (await engine.get("gardens")).result()
        shelved = await (await engine.get("taxes")).result()
    assert sent["sent"] == [18, 18]
    assert shelved["shelved"]
    assert sorted(written) == ["gardens", "gardens", "taxes", "taxes"]  # each twice, for its critic, and never again
    print("sent:", sent["title"])


if __name__ == "__main__":
    asyncio.run(main())
