"""The suite that every adapter of an agent framework must pass: the adapter's own tests subclass it.

    class TestMyAdapter(AgentContract):
        lacks = {"approval": "the framework cannot stop before a tool"}

        def build(self, talk):
            async def model(messages):                  # the framework's own test model
                turn = talk.think("main", results_in(messages))
                return answer(turn.text, turn.calls)

            async def look(word: str) -> str:           # a tool of the framework
                return await talk.use("look", word)

            agent = durable(Agent(model, [look, ...]), **talk.options)

            async def converse(question: str) -> dict:
                return {"answer": (await agent.run(question)).text}

            return converse

`build` makes, with the framework and its own test model, an agent named `main` and the code of a workflow around it.
The contract plays conversations with it. `talk.think` and `talk.use` report every call that really runs; they are the
whole content of the model and of the tools. Each tool takes one text, `word`:

| tool | in the framework |
|---|---|
| `look` | an ordinary tool |
| `meet` | an ordinary tool; two of them are asked for at once, and each waits for the other |
| `flaky` | an ordinary tool; its first call raises `OSError`, and Keepstep retries it |
| `broken` | a tool that always raises `Trouble`, which reaches the model in the way of the framework |
| `slow` | an ordinary tool that waits until it is cancelled |
| `pay` | a tool that needs approval; the workflow asks with `keepstep.agents.calls.approval` |
| `ask` | the agent `helper`, which has the tool `look`, and is not reported itself |

The code of the workflow returns a dictionary with the `answer` of the agent and, if you like, more that must be equal
after every crash. If `talk.streamed`, it uses the framework's streaming, and calls `talk.saw(item)` for each item that
arrives; the test model then sends `turn.pieces` and awaits `talk.sent()` after each.

The class needs no fixtures and no plugin. `lacks` names capabilities that the framework cannot have, each with the
reason, which is printed. `LACKABLE` lists them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Sized
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from ..engine.engine import Engine
from ..errors import RunCancelled, RunFailed
from ..kernel.doubt import Done
from ..model import Kind, RunQuery, Status
from ..policies import Retry
from ..ports import CURRENT, Advance, Answer, Change
from ..stores.memory import MemoryStore
from ..stores.sqlite.store import SQLiteStore
from ..workflows.definition import Workflow
from .calls import CallOptions

#: Capabilities that an adapter may declare absent.
LACKABLE = {
    "approval": "a call waits for a person",
    "cancel": "a cancelled run ends the body of a tool",
    "call ids": "the key of a tool call holds the id that the model gave",
    "failing tools": "the model is told that a tool has failed",
    "outside": "the agent runs outside a workflow, too",
    "parallel tools": "tools that are asked for at once run at once",
    "parking": "a run that waits for an approval leaves memory",
    "retries": "Keepstep retries a tool that raises",
    "streaming": "items of a model call arrive while it goes on",
    "sub-agents": "an agent asks another one",
    "timeouts": "the timeout of a tool's step ends its body",
    "usage": "tokens of model calls are counted",
}

#: Seconds that a test waits for a moment before it reports that the moment never came.
PATIENCE_SECONDS = 30.0
#: Seconds between two looks at a moment that no event names.
_LOOK_SECONDS = 0.002
_RUN = "talk"


class Trouble(Exception):
    """The failure of the tool `broken`."""


class AgentOptions(TypedDict):
    """Options that every adapter's `durable` takes."""

    model: CallOptions
    tool: CallOptions
    tools: dict[str, CallOptions | None]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for."""

    tool: str
    id: str
    word: str

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments by name."""
        return {"word": self.word}


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer of a model: either calls of tools, or the text that ends the conversation."""

    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    #: Tokens that the call has used: the test model reports them as input tokens.
    tokens: int = 7

    @property
    def pieces(self) -> tuple[str, ...]:
        """The text in the pieces in which a model streams it."""
        return tuple(self.text.replace(" ", " \n").split("\n"))


@dataclass(frozen=True, slots=True)
class Effect:
    """A call that really ran: what it was, in which step, and what a model was told by then."""

    name: str
    run: str
    step: str
    seen: Any = None


@dataclass
class Talk:
    """A conversation that a test model and its tools play; every call that really runs is noted in a file."""

    script: Mapping[str, Sequence[Turn]]
    streamed: bool = False
    tools: dict[str, CallOptions | None] = field(default_factory=dict)
    question: str = "What is it?"
    path: Path = Path()
    _seen: int = 0
    _sent: int = 0

    @property
    def options(self) -> AgentOptions:
        """The options for `durable`."""
        once: CallOptions = {"retry": Retry.none()}
        return {"model": once, "tool": once, "tools": self.tools}

    @property
    def answer(self) -> str:
        """The answer at the end of the conversation."""
        return self.script["main"][-1].text

    # -- for the test model and the tools ------------------------------------------------------------------------------

    def think(self, agent: str, results: Mapping[str, Any] | Sized) -> Turn:
        """Return what an agent's model answers now, and report the call.

        `results` are the results of tools in the messages, by call id; without ids, anything with their number.
        """
        asked = 0
        for number, turn in enumerate(self.script[agent], 1):
            asked += len(turn.calls)
            left = (
                [one for one in turn.calls if one.id not in results]
                if isinstance(results, Mapping)
                else asked > len(results)
            )
            if left or not turn.calls:
                seen = (
                    {key: str(value) for key, value in results.items()}
                    if isinstance(results, Mapping)
                    else len(results)
                )
                self._note(f"model {agent} {number}", seen)
                return turn
        raise AssertionError(f"the model of {agent} was called after its answer, with {results}")

    async def use(self, tool: str, word: str) -> str:
        """Do what a tool does, and report the call."""
        began = self._note(f"tool {tool} {word}")
        if tool == "slow":
            try:
                await asyncio.sleep(PATIENCE_SECONDS)
            finally:
                self._note(f"ended {tool} {word}")
        while tool == "meet" and len(self.named("tool meet")) < 2:
            _check(
                time.monotonic() - began < PATIENCE_SECONDS, "tools that the model asks for at once must run at once"
            )
            await asyncio.sleep(_LOOK_SECONDS)
        return self._outcome(tool, word)

    def use_in_thread(self, tool: str, word: str) -> str:
        """`use` for a plain function."""
        return asyncio.run(self.use(tool, word))

    def _outcome(self, tool: str, word: str) -> str:
        if tool == "broken":
            raise Trouble(f"no {word} today")
        if tool == "flaky" and len(self.named("tool flaky")) < 2:
            raise OSError("the line is dead")
        return f"<{word}>"

    async def sent(self) -> None:
        """Wait, in a test model that has sent a piece, until an item has arrived."""
        self._sent += 1
        began = time.monotonic()
        while not self._seen:
            _check(time.monotonic() - began < PATIENCE_SECONDS / 4, "items must arrive while the model still speaks")
            await asyncio.sleep(_LOOK_SECONDS)

    def saw(self, item: object) -> None:
        """Report that an item of a stream has arrived in the code of the workflow."""
        self._seen += 1

    # -- for the contract ----------------------------------------------------------------------------------------------

    def _note(self, name: str, seen: Any = None) -> float:
        scope = CURRENT.get()
        run, step = (scope.run.id, scope.key) if scope is not None and scope.in_step else ("", "")
        line = json.dumps([name, run, step, seen]) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())
        return time.monotonic()

    def effects(self) -> list[Effect]:
        """Return every call that really ran, in order."""
        if not self.path.exists():
            return []
        return [Effect(*json.loads(line)) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def named(self, start: str) -> list[Effect]:
        """Return the calls whose names begin so."""
        return [one for one in self.effects() if one.name.startswith(start)]


def _turns(*asked: str, text: str) -> tuple[Turn, ...]:
    """Return the turns of a model: each text holds calls, `tool word`, that it asks for at once."""
    turns, number = [], 0
    for calls in asked:
        made = []
        for call in calls.split(", "):
            number += 1
            tool, word = call.split()
            made.append(ToolCall(tool, f"{text.split(maxsplit=1)[0]}-{number}", word))
        turns.append(Turn(tuple(made)))
    return (*turns, Turn(text=text))


def _check(holds: object, message: str) -> None:
    if not holds:
        raise AssertionError(message)


class AgentContract:
    """Subclass it and write `build`; every test must pass."""

    #: Capabilities that the framework cannot have, each with the reason.
    lacks: ClassVar[Mapping[str, str]] = {}

    def build(self, talk: Talk) -> Callable[[str], Awaitable[dict[str, Any]]]:
        """Return the code of a workflow that has this conversation with an agent."""
        raise NotImplementedError("write `build(self, talk)`: see keepstep.agents.contract")

    # -- crashes -------------------------------------------------------------------------------------------------------

    def test_no_finished_call_repeats_after_a_kill(self) -> None:
        """Kill a conversation of five tools after each record, and go on in a new process."""
        self._kill_everywhere("single tools" if "parallel tools" in self.lacks else "parallel tools")

    def test_no_finished_call_of_a_sub_agent_repeats(self) -> None:
        """Kill an agent that asks another one after each record."""
        self._kill_everywhere("sub-agents")

    def test_no_finished_streamed_call_repeats(self) -> None:
        """Kill a streamed conversation after each record."""
        self._kill_everywhere("streaming")

    def test_no_approved_call_repeats(self) -> None:
        """Kill a conversation with an approval after each record."""
        self._kill_everywhere("approval")

    def test_no_failed_call_repeats(self) -> None:
        """Kill a conversation with a tool that fails after each record."""
        self._kill_everywhere("failing tools")

    # -- conversations -------------------------------------------------------------------------------------------------

    def test_every_call_is_a_step_of_its_own(self) -> None:
        """Each model and tool call is one step; the key of a tool's step holds the call's id."""
        for talk, play in self._played({"main": _turns("look a, look b", "look c", text="all is well")}):

            async def steps_are_calls(play: _Play = play, talk: Talk = talk) -> None:
                async with play.engine() as engine:
                    run = await engine.start(play.workflow, talk.question, run_id=_RUN)
                    self._check_end(talk, await run.result(PATIENCE_SECONDS))
                    done = [one.step for one in await run.checkpoints() if one.kind is Kind.STEP_COMPLETED]
                effects = talk.effects()
                _check(all(one.step for one in effects), f"these calls ran outside a step: {effects}")
                _check(len(effects) == 6, f"each call must run once: {[one.name for one in effects]}")
                used = [one.step for one in effects]
                _check(len(set(used)) == 6, f"each call must be a step of its own: {used}")
                _check(set(used) <= set(done), f"each call must be recorded: {sorted(set(used) - set(done))}")
                if "call ids" not in self.lacks:
                    for call in (call for turn in talk.script["main"] for call in turn.calls):
                        _check(any(call.id in step for step in done), f"no key holds the call id {call.id}: {done}")

            asyncio.run(steps_are_calls())

    def test_agent_outside_a_workflow_only_runs(self) -> None:
        """A plain call of the code gives the same answer."""
        self._needs("outside")
        with _played(self, {"main": _turns("look a, look b", text="all is well")}) as (talk, play):
            self._check_end(talk, asyncio.run(play.converse(talk.question)))
            _check(len(talk.effects()) == 4, f"each call must run once: {talk.effects()}")

    def test_parallel_tools_overlap(self) -> None:
        """Two tools that the model asks for at once run at once."""
        self._needs("parallel tools")
        self._converse({"main": _turns("meet a, meet b", text="all is well")}, calls=4)

    def test_calls_of_a_sub_agent_are_steps(self) -> None:
        """An agent that another one asks has steps of its own."""
        self._needs("sub-agents")
        for effects in self._converse(_WITH_HELPER, calls=5):
            _check(all(one.step for one in effects), f"these calls ran outside a step: {effects}")

    def test_stream_arrives_while_the_model_speaks(self) -> None:
        """Items reach the code of the workflow and the watchers of the run; a replay calls no model."""
        self._needs("streaming")
        for talk, play in self._played({"main": _turns("look a", text="all is well")}, streamed=True):

            async def items_arrive(play: _Play = play, talk: Talk = talk) -> None:
                async with play.engine() as engine:
                    run = await engine.start(play.workflow, talk.question, run_id=_RUN)
                    self._check_end(talk, await run.result(PATIENCE_SECONDS))
                    emitted = [event async for event in run.watch() if event.name == "token.emitted"]
                _check(talk._sent, "the test model must stream: call talk.sent() after each piece")  # noqa: SLF001
                _check(emitted, "the body of a streamed call must give its items to ks.emit, too")
                _check(len(talk.effects()) == 3, f"each call must run once: {talk.effects()}")

            asyncio.run(items_arrive())

    def test_failing_tool_is_told_to_the_model(self) -> None:
        """The conversation goes on with the error that the framework tells the model; a replay tells the same."""
        self._needs("failing tools")
        for effects in self._converse({"main": _turns("broken a", "look b", text="all is well")}, calls=5):
            seen = effects[-1].seen
            if isinstance(seen, dict):
                _check(seen.get("all-1", "<a>") != "<a>", f"the model must be told of the failure, not {seen}")

    def test_retries_of_tools_are_keepsteps(self) -> None:
        """A tool that raises is called again as its step's `retry` says, and the model sees only the result."""
        self._needs("retries")
        again: CallOptions = {"retry": Retry(attempts=2, base_seconds=0.0)}
        script = {"main": _turns("flaky a", text="all is well")}
        for effects in self._converse(script, calls=4, tools={"flaky": again}):
            seen = effects[-1].seen
            _check(seen in (1, {"all-1": "<a>"}), f"the model must see the result of the second attempt, not {seen}")

    def test_usage_of_models_is_counted(self) -> None:
        """The tokens that the framework reports are those of the run."""
        self._needs("usage")
        for talk, play in self._played({"main": _turns("look a", text="all is well")}):

            async def tokens_count(play: _Play = play, talk: Talk = talk) -> None:
                async with play.engine() as engine:
                    run = await engine.start(play.workflow, talk.question, run_id=_RUN)
                    await run.result(PATIENCE_SECONDS)
                    tokens = (await run.spent()).tokens
                _check(tokens >= 2 * Turn().tokens, f"two calls of 7 tokens must count as 14 or more, not {tokens}")

            asyncio.run(tokens_count())

    # -- people and time -----------------------------------------------------------------------------------------------

    def test_approval_waits_for_the_signal(self) -> None:
        """The tool runs after the signal `approve:CALL_ID` with True, and only then, in another process."""
        self._approval(True, ["model main 1", "tool pay a", "model main 2"])

    def test_denied_call_does_not_run(self) -> None:
        """The tool does not run after the signal with False; the model is told."""
        self._approval(False, ["model main 1", "model main 2"])

    def test_cancel_ends_the_body_of_a_tool(self) -> None:
        """A run that is cancelled while a tool runs ends that tool, and does nothing more."""
        self._needs("cancel")
        for talk, play in self._played({"main": _turns("slow a", text="all is well")}):

            async def cancel_in_tool(play: _Play = play, talk: Talk = talk) -> None:
                async with play.engine() as engine:
                    run = await engine.start(play.workflow, talk.question, run_id=_RUN)
                    await _until(lambda: talk.named("tool slow"), "the tool never began")
                    await run.cancel("the contract")
                    with suppress(RunCancelled):
                        await run.result(PATIENCE_SECONDS)
                    _check(
                        await run.status() is Status.CANCELLED, f"the run must be cancelled, not {await run.status()}"
                    )
                    await _until(lambda: talk.named("ended slow"), "the body of the tool never ended")
                _check(len(talk.named("model")) == 1, "no model may be called after a cancel")

            asyncio.run(cancel_in_tool())

    def test_timeout_ends_the_body_of_a_tool(self) -> None:
        """The timeout of a tool's step ends the tool; the model is told, or the run fails."""
        self._needs("timeouts")
        soon: CallOptions = {"retry": Retry.none(), "timeout": 0.05}
        for talk, play in self._played({"main": _turns("slow a", text="all is well")}, tools={"slow": soon}):

            async def time_out(play: _Play = play, talk: Talk = talk) -> None:
                async with play.engine() as engine:
                    run = await engine.start(play.workflow, talk.question, run_id=_RUN)
                    with suppress(RunFailed):
                        self._check_end(talk, await run.result(PATIENCE_SECONDS))
                    status = await run.status()
                    _check(status in (Status.COMPLETED, Status.FAILED), f"the run must end, but is {status}")
                _check(len(talk.named("ended slow")) == 1, f"the tool must have ended: {talk.effects()}")
                _check(len(talk.named("tool slow")) == 1, "a tool with one attempt must run once")

            asyncio.run(time_out())

    def test_result_that_a_person_gives_is_told_to_the_model(self) -> None:
        """A plain value that settles a call in doubt is the result of the tool."""
        self._needs("timeouts")
        once: CallOptions = {"at_most_once": True, "timeout": 0.05}
        for talk, play in self._played({"main": _turns("look a", "slow b", text="all is well")}, tools={"slow": once}):

            async def settle(play: _Play = play, talk: Talk = talk) -> None:
                async with play.engine() as engine:
                    run = await engine.start(play.workflow, talk.question, run_id=_RUN)
                    await _until(lambda: talk.named("ended slow"), "the timeout never ended the tool")
                    await run.resolve(talk.named("tool slow")[0].step, "result", "paid 5")
                    self._check_end(talk, await run.result(PATIENCE_SECONDS))
                _check(len(talk.named("tool slow")) == 1, f"the tool must run once: {talk.effects()}")
                seen = talk.effects()[-1].seen
                if isinstance(seen, dict):
                    expected = seen["all-1"].replace("<a>", "paid 5")
                    _check(seen["all-2"] == expected, f"the model must be told {expected!r}, not {seen['all-2']!r}")

            asyncio.run(settle())

    def test_verify_gets_the_arguments_of_the_tool(self) -> None:
        """The answer of `verify`, which knows the tool's arguments, settles a call in doubt."""
        self._needs("timeouts")
        asked: list[Any] = []

        def verify(arguments: Any) -> Done:
            asked.append(arguments)
            return Done("paid 5")

        once: CallOptions = {"at_most_once": True, "timeout": 0.05, "verify": verify}
        self._converse({"main": _turns("slow b", text="all is well")}, calls=4, tools={"slow": once})
        _check(asked == [{"word": "b"}] * 2, f"verify must get the arguments of the tool, not {asked}")

    # -- how it is played ----------------------------------------------------------------------------------------------

    def _needs(self, capability: str) -> None:
        unknown = set(self.lacks) - set(LACKABLE)
        _check(not unknown, f"lacks= names unknown capabilities {sorted(unknown)}; there are {sorted(LACKABLE)}")
        if capability in self.lacks:
            raise unittest.SkipTest(f"no {capability}: {self.lacks[capability]}")

    def _check_end(self, talk: Talk, result: Any) -> None:
        _check(isinstance(result, dict) and "answer" in result, f"return a dictionary with an answer, not {result!r}")
        _check(result["answer"] == talk.answer, f"the answer must be {talk.answer!r}, not {result['answer']!r}")

    def _played(self, script: Mapping[str, Sequence[Turn]], **options: Any) -> Iterator[tuple[Talk, _Play]]:
        """Yield the conversation to be played live, and again where the engine forgets the run after every record."""
        for replaying in (False, True):
            with _played(self, script, replaying=replaying, **options) as made:
                yield made

    def _converse(self, script: Mapping[str, Sequence[Turn]], *, calls: int, **options: Any) -> list[list[Effect]]:
        """Play a conversation in both modes: it must come to the same end, with this number of calls; return them."""
        effects, ends = [], []
        for talk, play in self._played(script, **options):

            async def converse(play: _Play = play, talk: Talk = talk) -> Any:
                async with play.engine() as engine:
                    run = await engine.start(play.workflow, talk.question, run_id=_RUN)
                    return await run.result(PATIENCE_SECONDS)

            ends.append(asyncio.run(converse()))
            self._check_end(talk, ends[-1])
            effects.append(talk.effects())
            names = [one.name for one in effects[-1]]
            _check(len(names) == calls, f"there must be {calls} calls, not {names}")
        _check(ends[0] == ends[1], f"replayed, the conversation ends with {ends[1]} and not with {ends[0]}")
        return effects

    def _approval(self, verdict: bool, expected: list[str]) -> None:
        self._needs("approval")
        for talk, play in self._played({"main": _turns("pay a", text="all is well")}):

            async def approve(play: _Play = play, talk: Talk = talk) -> None:
                async with play.engine() as engine:
                    run = await engine.start(play.workflow, talk.question, run_id=_RUN)
                    if "parking" in self.lacks:
                        await _until(run.published, "the run never asked for the approval")
                    else:
                        await run.reached(Status.WAITING, timeout=PATIENCE_SECONDS)
                    _check(not talk.named("tool pay"), "the tool ran before its approval")
                async with play.engine() as engine:
                    run = await engine.get(_RUN)
                    await run.signal("approve:all-1", verdict)
                    self._check_end(talk, await run.result(PATIENCE_SECONDS))
                names = [one.name for one in talk.effects()]
                _check(names == expected, f"the calls must be {expected}, not {names}")

            asyncio.run(approve())

    def _kill_everywhere(self, conversation: str) -> None:
        """Kill the process of a conversation after each of its commits, and compare with the undisturbed one."""
        self._needs(conversation)
        script, options = CONVERSATIONS[conversation]
        kill_after: int | None = None
        whole: tuple[Any, dict[str, Any]] | None = None
        while True:
            with _played(self, script, **options) as (talk, play):
                killed = play.live(kill_after)
                before, finished = talk.effects(), play.finished_steps()
                if killed:
                    _check(not play.live(None), "the second process was killed, too")
                    outside = [one for one in talk.effects() if not one.step]
                    _check(not outside, f"these calls ran outside a step: {outside}")
                    again = [one for one in talk.effects()[len(before) :] if (one.run, one.step) in finished]
                    _check(not again, f"killed after commit {kill_after}, these finished calls ran again: {again}")
                result = json.loads(play.result.read_text(encoding="utf-8"))
                self._check_end(talk, result)
                seen = {one.name: one.seen for one in talk.effects()}
                if whole is None:
                    _check(len(seen) == len(talk.effects()), f"an undisturbed call ran twice: {talk.effects()}")
                    whole = result, seen
                where = "undisturbed" if kill_after is None else f"killed after commit {kill_after}"
                _check(result == whole[0], f"{where}, the result is {result} instead of {whole[0]}")
                _check(seen == whole[1], f"{where}, the models were told {seen} instead of {whole[1]}")
            if kill_after is not None and not killed:
                return
            kill_after = 1 if kill_after is None else kill_after + 1


_WITH_HELPER = {
    "main": _turns("ask b", text="all is well"),
    "helper": _turns("look b", text="helper agrees"),
}

#: The conversations that are killed, by the capability that each needs, with the options of `Talk`. One of the first
#: two is enough.
CONVERSATIONS: Mapping[str, tuple[Mapping[str, Sequence[Turn]], dict[str, Any]]] = {
    "parallel tools": ({"main": _turns("look a, look b", "look c", "look d", "look e", text="all is well")}, {}),
    "single tools": ({"main": _turns("look a", "look b", "look c", "look d", "look e", text="all is well")}, {}),
    "sub-agents": (_WITH_HELPER, {}),
    "streaming": ({"main": _turns("look a", text="all is well")}, {"streamed": True}),
    "approval": ({"main": _turns("pay a", text="all is well")}, {}),
    "failing tools": ({"main": _turns("broken a", "look b", text="all is well")}, {}),
}


class _Play:
    """A conversation as a workflow, and the store of its run."""

    def __init__(self, talk: Talk, workflow: Workflow[..., Any], folder: Path, *, replaying: bool) -> None:
        self.talk, self.workflow, self.folder = talk, workflow, folder
        self.converse = workflow.fn
        self.result = folder / "result"
        self._replaying = replaying
        self._memory = MemoryStore()

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        """Open an engine on the same store each time."""
        options: dict[str, Any] = {"replay_always": self._replaying, "linger_seconds": 0.05, "stop_seconds": 1.0}
        async with Engine(self._memory, workflows=[self.workflow], **options) as engine:
            yield engine

    def finished_steps(self) -> set[tuple[str, str]]:
        """Return the steps whose results the database holds, with their runs."""

        async def read() -> set[tuple[str, str]]:
            async with Engine(f"sqlite:///{self.folder}/runs.db", worker=False) as engine:
                runs = [run.id for run in engine.store.list_runs(RunQuery(limit=100)).runs]
                return {
                    (run, one.step)
                    for run in runs
                    for one in await (await engine.get(run)).checkpoints()
                    if one.kind is Kind.STEP_COMPLETED
                }

        return asyncio.run(read())

    def live(self, kill_after: int | None) -> bool:
        """Have the conversation in a new process that kills itself after a number of commits; return whether it did."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of threads, which the child never uses
            pid = os.fork()
        if pid == 0:
            self._be_process(kill_after)
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise AssertionError(f"a process came to no end; it wrote:\n{self._printed()}")
            time.sleep(_LOOK_SECONDS)
        code = os.waitstatus_to_exitcode(status)
        _check(code in (0, -signal.SIGKILL), f"a process failed with exit code {code}; it wrote:\n{self._printed()}")
        return code != 0

    def _printed(self) -> str:
        return (self.folder / "printed").read_text(encoding="utf-8", errors="replace")[-5000:]

    def _be_process(self, kill_after: int | None) -> None:
        code = 70
        try:
            out = os.open(self.folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout = sys.stderr = os.fdopen(out, "w")
            asyncio.set_event_loop(None)
            asyncio.run(self._have(kill_after))
            code = 0
        except BaseException:  # noqa: BLE001 - nothing may escape this process
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    async def _have(self, kill_after: int | None) -> None:
        store = _MortalStore(self.folder / "runs.db", power_loss="may_lose_last")
        store.left = kill_after
        async with Engine(store, workflows=[self.workflow], linger_seconds=0.05) as engine:
            run = await engine.start(self.workflow, self.talk.question, run_id=_RUN)
            for turn in self.talk.script["main"]:
                for call in turn.calls:
                    if call.tool == "pay" and not (await run.status()).finished:
                        await run.signal(f"approve:{call.id}", id=call.id)
            self.result.write_text(json.dumps(await run.result(PATIENCE_SECONDS)), encoding="utf-8")
        store.close()


class _MortalStore(SQLiteStore):
    """A store whose process is killed after a number of commits of records."""

    left: int | None = None

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        answers = super().commit(changes, wait=wait)
        if self.left is not None and any(isinstance(change, Advance) and change.rows for change in changes):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return answers


@contextmanager
def _played(
    contract: AgentContract, script: Mapping[str, Sequence[Turn]], *, replaying: bool = False, **options: Any
) -> Iterator[tuple[Talk, _Play]]:
    with tempfile.TemporaryDirectory(prefix="keepstep-contract-") as name:
        folder = Path(name)
        talk = Talk(script, path=folder / "effects", **options)
        workflow = Workflow[..., Any](contract.build(talk), name="agent-contract")
        yield talk, _Play(talk, workflow, folder, replaying=replaying)


async def _until(condition: Callable[[], Any], message: str) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return
        _check(time.monotonic() < until, message)
        await asyncio.sleep(_LOOK_SECONDS)
