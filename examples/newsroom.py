"""A graph: a text is written until its critic is content, an editor agrees, and it goes out on two channels at once."""

import asyncio

import keepstep as ks

newsroom = ks.Graph("newsroom", reducers={"sent": "append"}, max_iterations=30)


@newsroom.step
async def draft(state):
    number = state.get("drafts", 0) + 1
    return {"drafts": number, "text": f"{state['topic']}, draft {number}"}


@newsroom.step(retry=ks.Retry(attempts=3))
async def critic(state):
    return {"score": state["drafts"] / 3}


@newsroom.step
async def post(state):
    return {"sent": [f"posted: {state['text']}"]}


@newsroom.step
async def mail(state):
    return {"sent": [f"mailed: {state['text']}"]}


@newsroom.step
async def archive(state):
    return {"archived": True}


def too_weak(state):
    return state["score"] < 0.9


newsroom.edge("draft", "critic")
newsroom.edge("critic", "draft", when=too_weak)  # edges in order: the first that holds is taken
newsroom.edge("critic", "editor")
newsroom.wait("editor", signal="agreed", into="agreed")
newsroom.edge("editor", "publish", when=ks.when.equals("agreed", True))
newsroom.edge("editor", "archive")
newsroom.parallel("publish", ["post", "mail"], join="archive")
newsroom.entry("draft")
newsroom.exit("archive")


async def main() -> None:
    async with ks.open("newsroom.db") as engine:
        run = await engine.start(newsroom, topic="Graphs", run_id="today")
        await run.signal("agreed", True)
        final = await run.result()
    print(*final["sent"], sep="\n")
    assert final["drafts"] == 3
    assert sorted(final["sent"]) == ["mailed: Graphs, draft 3", "posted: Graphs, draft 3"]


if __name__ == "__main__":
    asyncio.run(main())  # then: keepstep graph newsroom.py --run today --store newsroom.db
