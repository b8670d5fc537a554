"""An MCP server with the official library, in a process of its own: mcp_shop.py FOLDER [PORT]."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

from mcp.server.mcpserver import Context, Elicit, MCPServer, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.request_state import RequestStateSecurity
from pydantic import BaseModel

FOLDER = Path(sys.argv[1])
KEYED = os.environ.get("SHOP_KEYED")

shop = MCPServer("shop", request_state_security=RequestStateSecurity(keys=[b"0" * 32]) if KEYED else None)


def note(text):
    with (FOLDER / "effects").open("a") as file:
        file.write(f"{text}\n")


def _die_once(word):
    """End the whole process, but only the first time."""
    mark = FOLDER / f"died {word}"
    if not mark.exists():
        mark.touch()
        os._exit(1)


class Answer(BaseModel):
    ok: bool


async def ask(eur: int) -> Elicit[Answer]:
    return Elicit(f"pay {eur}?", Answer)


@shop.tool()
async def look(word: str) -> str:
    note(f"look {word}")
    return f"<{word}>"


@shop.tool()
async def keyed(word: str, ctx: Context) -> str:
    meta = ctx.request_context.meta or {}
    note(f"keyed {word} {meta['keepstep/idempotency-key']}")
    _die_once(word)
    return word


@shop.tool()
async def refund(eur: int, answer: Annotated[Answer, Resolve(ask)]) -> str:
    if not answer.ok:
        return "denied"
    note(f"refund {eur}")
    return f"paid {eur}"


@shop.tool()
async def fail(word: str) -> str:
    note(f"fail {word}")
    raise ToolError(word)


@shop.tool()
async def die(word: str) -> str:
    _die_once(word)
    note(f"die {word}")
    return word


@shop.tool()
async def slow(word: str) -> str:
    note(f"slow {word}")
    try:
        await asyncio.sleep(60)
    finally:
        note(f"ended {word}")
    return word


@shop.tool()
async def count(upto: int, ctx: Context) -> int:
    await ctx.report_progress(1, upto, "at 1")
    await asyncio.sleep(60)
    return upto


@shop.tool()
async def process() -> int:
    return os.getpid()


if __name__ == "__main__":
    note("started")
    if len(sys.argv) > 2:
        shop.run("streamable-http", port=int(sys.argv[2]))
    else:
        shop.run("stdio")
