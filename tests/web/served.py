"""A real server for tests of streams: uvicorn on the loop of the test, and a client that reads its messages."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

import httpx
import uvicorn

from keepstep.web import app

#: Seconds that a test waits for a message; most come in milliseconds.
PATIENCE = 30.0


@asynccontextmanager
async def served(engine, **options):
    """The application of an engine on a free port, and a client of it."""
    config = uvicorn.Config(app(engine, **options), port=0, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    task = asyncio.create_task(server.serve(sockets=[listening]))
    base = f"http://127.0.0.1:{listening.getsockname()[1]}/api/v1"
    try:
        async with httpx.AsyncClient(base_url=base, timeout=PATIENCE) as client:
            yield client
    finally:
        server.should_exit = True
        await task


async def messages(client, path, **headers):
    """Yield the messages of a stream as (event, id, data)."""
    async with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        found = {}
        async for line in answer.aiter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                found[name] = value
            elif found:
                number = int(found["id"]) if "id" in found else None
                yield found["event"], number, json.loads(found["data"])
                found = {}


@asynccontextmanager
async def stream(client, path, **headers):
    """A stream whose next message `await one()` returns."""
    async with aclosing(messages(client, path, **headers)) as found:

        async def one():
            async with asyncio.timeout(PATIENCE):
                return await anext(found)

        yield one
