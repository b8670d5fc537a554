"""The saver for LangGraph beside LangGraph's own, on the same graph, with the same durability, in turn."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
import uuid
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, TypedDict

from .measure import Effort, Finding, begin, finish, folder
from .postgres import fresh, server

#: Times as fast as LangGraph's own saver: one step after the other, and with 200 threads at once.
LEAST = {"one": 2.0, "many": 5.0}
WHATS = {
    "one": "a LangGraph graph, one step after the other, beside LangGraph's own saver",
    "many": "200 threads of a LangGraph graph at once, beside LangGraph's own saver",
}


def findings(effort: Effort) -> list[Finding]:
    """Every job on SQLite and on a PostgreSQL server of its own; beside each, the same graph with a saver in memory."""
    with server() as dsn:
        return [_beside(job, store, dsn, effort) for store in ("SQLite", "PostgreSQL") for job in ("one", "many")]


def _beside(job: str, store: str, dsn: str, effort: Effort) -> Finding:
    options = {"one": {"steps": effort.size(500, 100)}, "many": {"threads": effort.size(200, 50), "steps": 10}}[job]
    takes: list[dict[str, dict[str, Any]]] = []
    for _ in range(effort.rounds(5)):
        take = {}
        for saver in ("keepstep", "langgraph", "memory"):
            with folder() as where:
                env = {} if store == "SQLite" else {"BENCH_STORE": fresh(dsn), "BENCH_DSN": dsn}
                take[saver] = finish(begin("saver", job, where, {"saver": saver, **options}, **env))
        takes.append(take)
    ratios = [take["keepstep"]["per_second"] / take["langgraph"]["per_second"] for take in takes]
    return Finding(
        "saver",
        f"{WHATS[job]}, {store}",
        statistics.median(take["keepstep"]["per_second"] for take in takes),
        "steps/s",
        floor=statistics.median(take["langgraph"]["per_second"] for take in takes),
        ratio=statistics.median(ratios),
        least_ratio=LEAST[job],
        detail={
            "ratios": ratios,
            "takes": takes,
            "memory_per_second": statistics.median(take["memory"]["per_second"] for take in takes),
            "cpu_us": statistics.median(take["keepstep"]["cpu_us"] for take in takes),
        },
    )


# -- in a process of its own -------------------------------------------------------------------------------------------


class State(TypedDict):
    i: int
    n: int
    last: dict[str, Any]


def _graph(saver: Any, *, is_async: bool) -> Any:
    """A loop of one node, as the other jobs have it."""
    from langgraph.graph import END, START, StateGraph

    def step(state: State) -> dict[str, Any]:
        return {"i": state["i"] + 1, "last": {"i": state["i"], "ok": True}}

    async def astep(state: State) -> dict[str, Any]:
        return step(state)

    graph = StateGraph(State).add_node("step", astep if is_async else step).add_edge(START, "step")
    graph = graph.add_conditional_edges("step", lambda state: "step" if state["i"] < state["n"] else END, ["step", END])
    return graph.compile(checkpointer=saver)


def _call(steps: int) -> dict[str, Any]:
    config = {"configurable": {"thread_id": uuid.uuid4().hex}, "recursion_limit": 10**6}
    return {"input": {"i": 0, "n": steps, "last": {}}, "config": config, "durability": "sync"}


async def one(where: Path, *, saver: str, steps: int) -> dict[str, Any]:
    with ExitStack() as stack:
        graph = _graph(_blocking_saver(where, saver, stack), is_async=False)
        graph.invoke(**_call(5))
        began, cpu = time.perf_counter(), time.process_time()
        graph.invoke(**_call(steps))
        return _answer(steps, began, cpu)


async def many(where: Path, *, saver: str, threads: int, steps: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        graph = _graph(await _async_saver(where, saver, stack), is_async=True)
        await graph.ainvoke(**_call(5))
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(graph.ainvoke(**_call(steps)) for _ in range(threads)))
        return _answer(threads * steps, began, cpu)


def _answer(count: int, began: float, cpu: float) -> dict[str, Any]:
    seconds = time.perf_counter() - began
    return {
        "count": count,
        "seconds": seconds,
        "per_second": count / seconds,
        "cpu_us": (time.process_time() - cpu) / count * 1e6,
    }


def _ours(where: Path, saver: str) -> Any:
    if saver == "memory":
        from langgraph.checkpoint.memory import InMemorySaver

        return InMemorySaver()
    from keepstep.agents.langgraph import KeepstepSaver

    return KeepstepSaver(os.environ.get("BENCH_STORE") or f"sqlite:///{where}/runs.db")


def _blocking_saver(where: Path, saver: str, stack: ExitStack) -> Any:
    if saver != "langgraph":
        return _ours(where, saver)
    if dsn := os.environ.get("BENCH_DSN"):
        from langgraph.checkpoint.postgres import PostgresSaver

        theirs: Any = stack.enter_context(PostgresSaver.from_conn_string(dsn))
        theirs.setup()
        return theirs
    from langgraph.checkpoint.sqlite import SqliteSaver

    return stack.enter_context(SqliteSaver.from_conn_string(str(where / "theirs.db")))


async def _async_saver(where: Path, saver: str, stack: AsyncExitStack) -> Any:
    if saver != "langgraph":
        return _ours(where, saver)
    if dsn := os.environ.get("BENCH_DSN"):
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
        from psycopg.rows import dict_row
        from psycopg_pool import AsyncConnectionPool

        settings = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
        pool = AsyncConnectionPool(dsn, min_size=10, max_size=20, kwargs=settings, open=False)
        theirs: Any = AsyncPostgresSaver(await stack.enter_async_context(pool))
    else:
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        theirs = await stack.enter_async_context(AsyncSqliteSaver.from_conn_string(str(where / "theirs.db")))
    await theirs.setup()
    return theirs


JOBS = {"one": one, "many": many}
