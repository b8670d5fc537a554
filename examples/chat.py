"""A conversation is a run: it lives for as long as people talk to it, and remembers across restarts."""

import asyncio

import keepstep as ks

QUIET_SECONDS = 3600.0


@ks.step
async def answer(history: list[str], message: str) -> str:
    """Stands for a language model that is given the whole conversation."""
    return f"You said {message!r}. We have talked {len(history) // 2} times before."


@ks.workflow
async def conversation(topic: str) -> list[str]:
    history: list[str] = []
    ks.publish("topic", topic)
    while True:
        request = await ks.wait_for("say", timeout=QUIET_SECONDS, default=None)
        if request is None or request.payload == "bye":
            if request is not None:
                request.reply("Good-bye.")
            return history
        said = await answer(history, request.payload)
        history += [request.payload, said]
        request.reply(said)


async def main() -> None:
    async with ks.open("chat.db") as engine:
        run = await engine.start(conversation, "weather")
        assert (await run.ask("say", "hello")).endswith("0 times before.")

    async with ks.open("chat.db") as engine:  # the program was restarted; the conversation was not
        run = await engine.get(run.id)
        reply = await run.ask("say", "still there?")
        print(reply)
        assert reply.endswith("1 times before.")
        assert await run.ask("say", "bye") == "Good-bye."
        assert len(await run.result()) == 4


if __name__ == "__main__":
    asyncio.run(main())
