"""An A2A agent with the official library, in a process of its own: a2a_clerk.py FOLDER PORT."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn
from a2a.helpers import get_message_text, new_task_from_user_message, new_text_message
from a2a.server.agent_execution import AgentExecutor
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Part
from starlette.applications import Starlette

FOLDER, PORT = Path(sys.argv[1]), int(sys.argv[2])


def note(text):
    with (FOLDER / "effects").open("a") as file:
        file.write(f"{text}\n")


class Clerk(AgentExecutor):
    async def execute(self, context, event_queue):
        text, updater = get_message_text(context.message), TaskUpdater(event_queue, context.task_id, context.context_id)
        if context.current_task is None:
            await event_queue.enqueue_event(new_task_from_user_message(context.message))
        note(f"{text} {context.message.message_id}")
        await updater.start_work()
        if text.startswith("slow"):
            await asyncio.sleep(0.3)
        if text.startswith("never"):
            await asyncio.sleep(60)
        if text.startswith("ask"):
            await updater.requires_input(new_text_message("how many?"))
        elif text.startswith("reject"):
            await updater.reject(new_text_message("not my office"))
        elif text.startswith("fail"):
            await updater.failed(new_text_message("no paper"))
        else:
            await updater.add_artifact([Part(text=f"<{text}>")])
            await updater.complete()

    async def cancel(self, context, event_queue):
        note("cancelled")
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


def losing_the_first_answer(app):
    """Perform a message that says flaky and lose the answer, the first time."""
    lost = []

    async def answer(scope, receive, send):
        parts = []

        async def reading():
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        async def sending(message):
            if b"flaky" in b"".join(parts) and not lost:
                if message["type"] == "http.response.start":
                    message = {**message, "status": 503}
                else:
                    lost.append(True)
            await send(message)

        await app(scope, reading, sending)

    return answer


if __name__ == "__main__":
    card = AgentCard(
        name="clerk",
        description="A clerk",
        version="1",
        capabilities=AgentCapabilities(streaming=False),
        supported_interfaces=[
            AgentInterface(protocol_binding="JSONRPC", protocol_version="1.0", url=f"http://127.0.0.1:{PORT}/")
        ],
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="filing", name="filing", description="files", tags=["paper"])],
    )
    handler = DefaultRequestHandler(Clerk(), InMemoryTaskStore(), card)
    routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/")]
    app = losing_the_first_answer(Starlette(routes=routes))
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
