"""Mutants: small defects put into the engine and its store on purpose, each of which the simulation must find.

A mutant replaces a few lines of a function, in this process and for a while. The lines are looked for in the source:
when they are no longer there, the mutant has to be written anew, and says so.

`python -m tests.simulation.mutants` plays histories under each mutant, from seed 0 on, until a promise is broken, and
prints which, after how many histories and in what time; one that chance does not find must fall to the plan that was
kept for it. With `--keep` it also makes the plan that found each mutant short and
writes it to `mutants.json`, from where the tests take it.
"""

from __future__ import annotations
import __future__

import argparse
import inspect
import json
import multiprocessing
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from tests.simulation import Plan, draw, play
from tests.simulation.shrink import shrink

#: A short plan that finds each mutant.
KEPT = Path(__file__).with_name("mutants.json")
#: A mutant that outlives so many histories is not found by chance.
MOST = 1000


@dataclass(frozen=True)
class Patch:
    """Some text of a function, and what stands there instead."""

    where: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A defect, with what it does in one sentence."""

    name: str
    breaks: str
    patches: tuple[Patch, ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the defect inside the block.

        A function is given other code and stays the same object, so that whoever imported it has the defect too.
        """
        with ExitStack() as stack:
            for where in dict.fromkeys(patch.where for patch in self.patches):
                function = found(where)
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = patched(function, [patch for patch in self.patches if patch.where == where])
            yield


def found(where: str) -> FunctionType:
    """The function that `module:Class.name` names, below whatever decorates it."""
    module, _, path = where.partition(":")
    owner = import_module(f"keepstep.{module}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function = inspect.getattr_static(owner, name)
    function = getattr(function, "fget", None) or getattr(function, "__func__", function)
    assert isinstance(function, FunctionType), where
    return function


def patched(function: FunctionType, patches: list[Patch]) -> CodeType:
    """The code of a function with some of its text replaced."""
    where, source = patches[0].where, textwrap.dedent(inspect.getsource(function))
    for patch in patches:
        assert source.count(patch.old) == 1, f"{where} no longer holds, once: {patch.old}"
        source = source.replace(patch.old, patch.new)
    lines = source.splitlines()
    while not lines[0].startswith(("def ", "async def ")):
        del lines[0]  # decorators are applied already
    lines[0] = lines[0].replace(f"def {function.__name__}(", "def mutated(", 1)  # a method may call its namesake
    frees = function.__code__.co_freevars
    around = ["def around():", *(f"    {name} = None" for name in frees), *(f"    {line}" for line in lines)]
    around.append("    return mutated")
    flags = __future__.annotations.compiler_flag
    scope: dict[str, object] = {}
    exec(compile("\n".join(around), f"<mutant of {where}>", "exec", flags, dont_inherit=True), scope)
    code = scope["around"]().__code__
    assert code.co_freevars == frees, f"{where} closes over {frees}"
    return code


def mutant(name: str, breaks: str, *patches: tuple[str, str, str]) -> Mutant:
    return Mutant(name, breaks, tuple(Patch(*patch) for patch in patches))


MEMORY = "stores.memory:MemoryStore"
TRANSITION = "stores.transition:Transition"
JOURNAL = "engine.journal:Journal"
CONTEXT = "kernel.driver:RunDriver"
ENDING = "kernel.finish:Ending"
WORKER = "engine.worker:Worker"
LISTED = "stores.queues:Listed"
SERVICES = "stores.services:_Decision"
WALK = "kernel.graph.walk:Walk"

MUTANTS = [
    # -- one writer ---------------------------------------------------------------------------------------------------
    mutant(
        "no fence",
        "a write of a worker that has lost the run is taken",
        (
            "stores.transition:fence",
            "        or head.worker != change.worker\n        or head.epoch != change.epoch\n",
            "",
        ),
    ),
    mutant(
        "epoch stands still",
        "a claim does not raise the epoch",
        ("stores.claims:leased", "epoch=head.epoch + 1", "epoch=max(head.epoch, 1)"),
    ),
    mutant(
        "live owner robbed",
        "a worker is given up for dead long before its lease is over",
        (
            f"{MEMORY}._bury_the_dead",
            "self._watch.is_silent(asker, worker, self.lease_seconds)",
            "self._watch.is_silent(asker, worker, self.lease_seconds / 8)",
        ),
    ),
    mutant(
        "dead owner kept",
        "the runs of a dead worker are never taken over",
        (f"{MEMORY}._bury_the_dead", "if owner is not None and self._is_proven_dead(owner)", "if owner == asker"),
    ),
    mutant(
        "zombie renews",
        "a worker that was given up for dead renews its leases as if nothing had happened",
        (f"{MEMORY}.renew_leases", "if worker.id in self._gone | self._killed:", "if worker.id in self._killed:"),
    ),
    mutant(
        "zombie goes on",
        "a body starts under a lease that may have run out",
        (f"{CONTEXT}.may_start_body", "if self.host.seconds() < self.host.fresh_until:", "if True:"),
    ),
    # -- the journal --------------------------------------------------------------------------------------------------
    mutant(
        "sequence reused",
        "a row takes the number of another",
        ("stores.transition:fence", "        or head.seq != change.after\n", ""),
        ("stores.transition:fence", "not extends(change.rows, change.after)", "False"),
        (f"{CONTEXT}.committed", "self.seq = change.rows[-1].seq", "self.seq = change.rows[0].seq"),
    ),
    mutant(
        "broken chain",
        "a record does not name the one before it",
        ("records.record:seal", "record.previous = previous", "record.previous = previous if seq < 4 else ''"),
    ),
    mutant(
        "told before the commit",
        "the code is told an outcome before it is durable, so the next step starts too early",
        (
            f"{CONTEXT}.append",
            "    self.unflushed = 0\n",
            """    self.unflushed = 0
    if call is not None:
        self.arrived.append(Draft(record, call))
        draft.call = None
        self.watch()
""",
        ),
    ),
    mutant(
        "answered before the commit",
        "a start or a signal is acknowledged before it is durable",
        (
            f"{JOURNAL}.write",
            "return await future",
            "return await future if isinstance(change, Advance) else Answer(Verdict.DONE)",
        ),
    ),
    mutant(
        "unknown means done",
        "a commit whose answer was lost counts as made",
        (
            f"{JOURNAL}._what_became_of",
            "    if isinstance(change, Send | Rekey):\n        return None",
            "    if True:\n        return Answer(Verdict.DONE)",
        ),
    ),
    mutant(
        "unknown means again",
        "a commit whose answer was lost is made a second time without looking",
        (f"{JOURNAL}._second_try", "if not batch.unknown:", "if True:"),
    ),
    mutant(
        "second half dropped",
        "what must wait for an earlier commit of the run is forgotten",
        ("engine.journal:_until_special", "return pending[:split], pending[split:]", "return pending[:split], []"),
    ),
    mutant(
        "special swallows the rest",
        "a record that must stand alone takes those behind it into oblivion",
        ("engine.journal:_until_special", "return pending[:1], pending[1:]", "return pending[:1], []"),
    ),
    mutant(
        "failed commit forgotten",
        "a run whose commit failed for good is neither halted nor given back",
        (f"{CONTEXT}.halt", "    self.host.give_back_later(", "    max("),
    ),
    mutant(
        "lost claim forgotten",
        "a run that was claimed without the worker's knowing is never looked for",
        (f"{WORKER}.doubt", "self._doubt_until = self.engine.loop.time() + DOUBT_SECONDS", "pass"),
    ),
    # -- recovery -----------------------------------------------------------------------------------------------------
    mutant(
        "recoveries not counted",
        "a run that kills its workers is recovered for ever",
        (
            "stores.claims:leased",
            "head.recoveries + is_recovery(head.status, head.worker)",
            "head.recoveries",
        ),
    ),
    mutant(
        "progress not seen",
        "crashes add up although the run goes on between them",
        ("stores.transition:moved", "recoveries = 0", "pass"),
    ),
    mutant(
        "recovery taken for progress",
        "that a run was recovered is written at once, and counts as progress",
        (f"{JOURNAL}._change", "change.progress = False", "pass"),
        (
            "kernel.recovery:begin",
            '        host.events.observe("run.recovering", run, taken_from=run.claim.taken_from)\n',
            "        host.journal.add(run)\n",
        ),
    ),
    mutant(
        "outcome overlooked",
        "a recovered run does not find the outcome of a step that it recorded",
        (
            "kernel.replay:History._add_outcome",
            "    self._outcomes.append(entry)\n",
            "    if record.seq % 4:\n        self._outcomes.append(entry)\n",
        ),
    ),
    mutant(
        "input not compared",
        "another question than the recorded one is given the recorded answer",
        (
            f"{CONTEXT}.recorded",
            "if entry.digest != call.digest and not call.was_asked_as(entry.digest):",
            "if False:",
        ),
    ),
    mutant(
        "attempts forgotten",
        "a recovered step counts its attempts from one again",
        ("kernel.step:resume", "attempt.number = tried.attempts + 1", "attempt.number = 1"),
    ),
    mutant(
        "backoff forgotten",
        "a recovered step is attempted again at once, not when its backoff is over",
        ("kernel.step:resume", "if tried.retry_at is not None:", "if False:"),
    ),
    mutant(
        "mark ignored",
        "an at-most-once step that may have happened is performed again",
        ("kernel.step:mark", "if not await resolve(call, attempt.number):", "if False:"),
    ),
    mutant(
        "mark not awaited",
        "an at-most-once step starts before its mark is durable",
        (
            "kernel.step:mark",
            "await run.durable(call.record(Kind.STEP_STARTED, attempt=attempt.number, data=kept))",
            "run.append(call.record(Kind.STEP_STARTED, attempt=1))",
        ),
    ),
    mutant(
        "other key for each attempt",
        "the idempotency key of a step changes with the worker",
        ("kernel.attempt:Attempt.idempotency_key", "self.run.generation", "self.run.epoch"),
    ),
    # -- replay -------------------------------------------------------------------------------------------------------
    mutant(
        "outcomes in a heap",
        "the next outcome is told before the code has come to rest after the last",
        (
            f"{CONTEXT}.deliver_next",
            "elif self._deliver_arrived():",
            "elif not self._deliver_arrived():",
        ),
    ),
    mutant(
        "outcome not held back",
        "a replay delivers an outcome before the code has asked for a call that was open when it came",
        ("kernel.delivery:_must_ask_first", "if entry is None", "if True"),
    ),
    mutant(
        "cancel by the code not recorded",
        "a step that its own code cancelled leaves no trace",
        (
            "kernel.calls:DurableCall.cancelled_by_code",
            "run.append(record, then=run.cancel_recorded)",
            "run.cancel_recorded(None)",
        ),
    ),
    mutant(
        "now is the clock's",
        "the code sees the time of the machine, another on replay",
        ("kernel.calls:Branch.now", "return self.run.now_at", "return self.run.time()"),
    ),
    mutant(
        "other dice on replay",
        "what the code draws differs after a recovery",
        (
            "kernel.calls:Branch.generator",
            "{self.run.seed}|{self.path}",
            "{self.run.seed}{self.run.epoch}|{self.path}",
        ),
    ),
    # -- waiting and signals ------------------------------------------------------------------------------------------
    mutant(
        "wake-up lost",
        "a signal does not make the run due that waits for it",
        ("stores.transition:received", "if head.worker is None and signal.name in head.wakes:", "if False:"),
    ),
    mutant(
        "parked unseen",
        "a run is put away although a signal came that it has not seen",
        (
            "stores.transition:fence",
            "if change.signals_seen is not None and head.signals > change.signals_seen:",
            "if False:",
        ),
    ),
    mutant(
        "wake-ups not stored",
        "a run is put away without the names of the signals that it waits for",
        ("kernel.wakeups:wakes", "return (*sorted(names), CANCEL, PAUSE, RESUME)", "return (CANCEL, PAUSE, RESUME)"),
    ),
    mutant(
        "parked with a branch running",
        "a run is put away while the body of a step is under way",
        (
            "kernel.parking:idle",
            "if run.stop.phase is not DRIVING or run.performing or is_writing(run):",
            "if run.stop.phase is not DRIVING or is_writing(run):",
        ),
    ),
    mutant(
        "signal heard twice",
        "a signal that was consumed before a crash is heard again after it",
        ("kernel.wakeups:receive", "if signal.seq in run.inbox.read:", "if False:"),
    ),
    mutant(
        "signal sent twice",
        "a signal that is sent again with the same id arrives a second time",
        (f"{TRANSITION}._refuse_send", "if seq is not None:", "if False:"),
    ),
    mutant(
        "signal swallowed",
        "a signal that came for a wait which lost its race is gone",
        ("kernel.wakeups:put_back", "run.inbox.add(signal)", "pass"),
    ),
    mutant(
        "sleep too short",
        "a sleep ends when half of it is over",
        ("kernel.waits:TimedCall.wait", "self.began_at + self.seconds", "self.began_at + self.seconds / 2"),
    ),
    mutant(
        "sleep starts anew",
        "a recovered run sleeps its whole time again",
        (
            "kernel.waits:TimedCall._begin_clock",
            "self.began_at = recorded.timestamp()",
            "self.began_at = run.host.clock.now()",
        ),
    ),
    mutant(
        "handed back for good",
        "a run that is handed back waits for nothing",
        ("kernel.parking:hand_back", "Status.QUEUED, run.host.clock.now(), ()", "Status.WAITING, None, ()"),
    ),
    # -- ends ---------------------------------------------------------------------------------------------------------
    mutant(
        "cancel forgotten",
        "a cancel that was recorded is not told to the code after a recovery",
        ("kernel.delivery:replay_next", "        control(run, record)\n", ""),
    ),
    mutant(
        "cancel overtaken",
        "a run that was cancelled completes all the same",
        (f"{ENDING}._judge", "if context.stop.is_cancelled:", "if context.stop.is_cancelled and error is not None:"),
    ),
    mutant(
        "end unseen",
        "a run ends although a signal, perhaps a cancel, came that it has not seen",
        (f"{ENDING}._try_to_end", "signals_seen=context.inbox.seen, ", ""),
    ),
    mutant(
        "deadline ignored",
        "a run goes on after its deadline",
        ("kernel.recovery:_arm_deadline", "if deadline is None:", "if True:"),
    ),
    mutant(
        "deadline slept through",
        "a run that is put away does not wake for its deadline",
        ("kernel.wakeups:due_at", "if run.deadline_at is not None and not run.stop.is_timed_out:", "if False:"),
    ),
    # -- children -----------------------------------------------------------------------------------------------------
    mutant(
        "child started twice",
        "a child is started before its parent's record of it is durable, under a name that is drawn",
        (
            "kernel.children:StartCall.begin_live",
            "child = given or child_id(run.id, self.key, run.generation)",
            "child = given or new_id('child')",
        ),
        (
            "kernel.children:StartCall.begin_live",
            'run.append_special(record, {"creates": creates}, made, self._refused, self)',
            "run.host.background(run.host.journal.write(creates[0]))\n    run.append(record, self)",
        ),
    ),
    mutant(
        "child's word lost",
        "a child that ends does not tell its parent",
        (f"{ENDING}._try_to_end", "sends.append(self._word_to_parent(context, status, record, root))", "pass"),
    ),
    mutant(
        "child not cancelled",
        "a cancelled run leaves its children running",
        ("kernel.steering:cancel_children", "for child in run.children.open.values():", "for child in ():"),
    ),
    mutant(
        "signals left behind",
        "what a continued run had not read does not move over to its successor",
        (f"{ENDING}._succeed", "for signal in unread)", "for signal in ())"),
    ),
    mutant(
        "successor lost",
        "a continued run ends without its successor",
        (f"{ENDING}._succeed", "    creates.append(context.host.encryption.born(successor))\n", ""),
    ),
    # -- going back ---------------------------------------------------------------------------------------------------
    mutant(
        "rewind forgotten",
        "what a rewind has left behind is replayed all the same",
        (
            "kernel.replay:Superseded.__contains__",
            "seq in self._after[-1][1] or self.rewound(seq)",
            "seq in self._after[-1][1]",
        ),
    ),
    mutant(
        "rewind one too far",
        "the last record that is to count after a rewind does not",
        (
            "kernel.replay:Superseded.add",
            "(*ranges, (beyond, record.seq))",
            "(*ranges, (beyond - 1, record.seq))",
        ),
    ),
    mutant(
        "rewind not undone",
        "what an earlier rewind had left behind stays so, though a later one goes back to before it",
        (
            "kernel.replay:Superseded.add",
            "_, named, ranges = self._after[max(bisect_right(self._after, beyond, key=_number) - 1, 0)]",
            "pass",
        ),
    ),
    mutant(
        "signals lost in a rewind",
        "what was heard beyond the point that a run goes back to is not heard again",
        ("kernel.inbox:Reads.numbers", "if by_code and is_gone(seq):", "if False:"),
    ),
    mutant(
        "old keys after a rewind",
        "what is done again after a rewind has the idempotency key of the first time, and the children their old ids",
        ("kernel.replay:Superseded.add", "self.generation += 1", "self.generation = 0"),
    ),
    mutant(
        "reactions survive a retry",
        "what the code did because of the failure counts after a retry",
        ("history.retry:_Point._came_after", "return record.asked >= self.seq", "return record.asked > self.seq"),
    ),
    mutant(
        "retry repeats what others did",
        "a retry takes back what other branches had asked for before the failure",
        ("history.retry:_Point._leaves", "return self._came_after(record) or (", "return True or ("),
    ),
    mutant(
        "first word of a child is the last",
        "a parent that is retried takes what its child once said for what the child is now",
        ("kernel.children:ChildResult.begin_live", "if self.run.generation:", "if False:"),
    ),
    mutant(
        "ended run is driven again",
        "a run that had ended is driven again if a command has taken its lease and died",
        ("kernel.recovery:_goes_back", "if ended_as not in ENDED:", "if True:"),
    ),
    mutant(
        "fork waits for a cancelled child",
        "a fork waits for a child that a rewind of the run that it comes from has cancelled",
        ("history.fork:_Copy._share_children", "not all(map(says_cancelled, words))", "words"),
    ),
    mutant(
        "cancel not held back",
        "a cancel is delivered before the code has asked for the call that it cancelled",
        ("kernel.calls:DurableCall.cancelled_by_code", "if self.knew != run.last_delivered:", "if False:"),
    ),
    mutant(
        "fork waits for another's child",
        "a fork does not start its own child where the run that it comes from had one under way",
        ("kernel.children:StartCall._renew", "if not received and not known:", "if False:"),
    ),
    mutant(
        "edit forgotten",
        "what a person made of the state of a graph is not folded in",
        ("kernel.graph.walk:Walk._take_edits", "position.edit(edit)", "pass"),
    ),
    # -- graphs and dags ----------------------------------------------------------------------------------------------
    mutant(
        "removed key stays",
        "the fold of a graph's records forgets that a key was removed",
        ("model.tree:patch", "            del items[key]\n", "            pass\n"),
    ),
    mutant(
        "appended twice",
        "the fold of a graph's records lays what was appended over the list, not behind it",
        ("model.tree:_longer", "FrozenList([*items, *new],", "FrozenList(new,"),
    ),
    mutant(
        "edge decided anew",
        "a recovered graph asks its edges again instead of taking the one that was recorded",
        (
            f"{WALK}.go",
            "at = position.at\n",
            "at = position.at if self.run.history is None or not position.step else None\n",
        ),
        (f"{WALK}._decide", "recorded = run.take_note(key)", "recorded = None"),
    ),
    mutant(
        "edge not recorded",
        "the record of a graph's step does not say which edge was taken, and nothing else does",
        ("kernel.graph.changes:Change.led_to", 'data["next"] = walk.recorded(target)', "pass"),
        (f"{WALK}._write", "run.append(record)", "pass"),
        (f"{WALK}._write", "run.append(record, then=partial(fulfil, waiter))", "fulfil(waiter, None)"),
    ),
    mutant(
        "visits not restored",
        "a graph that goes on from a consolidated state counts its visits from one again",
        ("kernel.graph.walk:walk", "branch.counts.update(position.counts)", "pass"),
    ),
    mutant(
        "consolidated without counters",
        "a consolidated state does not say how often each step was passed",
        ("kernel.graph.position:Position.text", '"counts": self.counts', '"counts": {}'),
    ),
    mutant(
        "consolidated without the signals",
        "a consolidated state does not say which signals were read",
        (f"{CONTEXT}.facts", "facts(self, self.inbox.read)", "facts(self, [])"),
    ),
    mutant(
        "iterations not limited",
        "a graph goes round as often as it likes",
        (f"{WALK}._count", "if passed >= self.graph.max_iterations:", "if False:"),
    ),
    mutant(
        "branches overwrite each other",
        "of what parallel branches give to one key only the last is kept",
        (f"{WALK}._joined", "given.setdefault(key, []).extend(contributions)", "given[key] = list(contributions)"),
    ),
    mutant(
        "branch state lost",
        "what a branch has written is forgotten at the join",
        (f"{WALK}._joined", "keys[key] = now[key]", "pass"),
    ),
    mutant(
        "rewound to a state that is gone",
        "a rewound graph goes on from a consolidated state that no longer counts",
        ("kernel.replay:newest_state", "if limit >= found:", "if True:"),
    ),
    mutant(
        "dag decides anew",
        "a recovered dag asks its predicates again",
        ("kernel.dag:Walk._decide", "choice = decided(self.branch, key)", "choice = None"),
    ),
    mutant(
        "dag does not wait",
        "a step of a dag begins when the first of its needs is done",
        ("kernel.dag:Walk._look", "if verdict is Enough.DONE:", "if self.succeeded[index]:"),
    ),
    mutant(
        "dag forgets what it was given",
        "a step of a dag is not given the result of its last need",
        (
            "kernel.dag:Walk._enough",
            "for name, need, needed in vertex.results:",
            "for name, need, needed in vertex.results[:-1]:",
        ),
    ),
    # -- schedules ----------------------------------------------------------------------------------------------------
    mutant(
        "keeper state not saved",
        "A keeper records the state from before its answer.",
        ("kernel.keeper:Keeper._change", "_encode(reaction.state)", "_encode(self._state)"),
    ),
    mutant(
        "keeper begins anew after a crash",
        "A keeper that is taken over from a dead worker begins with its first state.",
        ("kernel.keeper:Keeper.load", "if not run.seq:", "if not run.seq or run.recoveries:"),
    ),
    mutant(
        "tick by local time",
        "A tick is written in the local time of Berlin, as if that were UTC.",
        ("policies.schedule:tick_text", "tick.astimezone(UTC)", "(tick.astimezone(UTC) + timedelta(hours=1))"),
    ),
    mutant(
        "last tick again",
        "The next tick may be the last one.",
        ("policies.schedule:Schedule.due", "newest is None or newest <= last", "newest is None or newest < last"),
        ("policies.schedule:Schedule.due", "newest > last and", "newest >= last and"),
    ),
    mutant(
        "tick without its run",
        "A keeper writes the tick, and starts its run with the next commit or never.",
        ("kernel.keeper:Keeper._change", "for start in reaction.starts]", "for start in reaction.starts[1:]]"),
    ),
    # -- undo ---------------------------------------------------------------------------------------------------------
    mutant(
        "undo out of order",
        "steps are undone in the order in which they were done",
        ("kernel.undo_records:UndoRecords.left", "key=lambda item: -item.seq", "key=lambda item: item.seq"),
    ),
    mutant(
        "undo twice",
        "what the code has undone is undone again at the end",
        ("kernel.undo_records:UndoRecords.left", "if key not in self.undone and", "if"),
    ),
    mutant(
        "undo forgotten",
        "a run that another worker goes on with is not undone",
        (f"{ENDING}._is_to_undo", "if context.is_undone or", "if context.is_undone or context.run.epoch > 1 or"),
    ),
    mutant(
        "undo decided again",
        "a recovery forgets which steps an undo has undone",
        ("kernel.undo:UndoCall.__init__", "run.can_undo().next_round(item.key)", "run.epoch + tries"),
    ),
    mutant(
        "retry past an undo",
        "a retry takes back the undo, and goes on as if nothing were undone",
        ("history.undone:check_retry", "(is_torn or (is_ended and batches[-1].at_end))", "not batches"),
    ),
    mutant(
        "rewind past an undo",
        "a rewind goes to between a step and its undo",
        ("history.undone:check_not_torn", "if torn is not None:", "if torn is None and torn is not None:"),
    ),
    # -- services -----------------------------------------------------------------------------------------------------
    mutant(
        "service share never given back",
        "a worker keeps every place of a service that it ever had",
        (f"{SERVICES}.passage", "held=max(places, ask.running)", "held=max(places, ask.running, self._before.held)"),
    ),
    mutant(
        "service share of what is granted",
        "places that attempts still use are given to another worker",
        (f"{SERVICES}.passage", "held=max(places, ask.running)", "held=places"),
    ),
    mutant(
        "service shares not counted",
        "each worker gets its part, whatever the others hold",
        (f"{SERVICES}._places", "min(target, max(concurrency - sum(other.held for other in others), 0))", "target"),
    ),
    mutant(
        "service share of the dead",
        "the share of a worker that was given up is kept for ever",
        (f"{MEMORY}._is_given_up", "return worker not in self._workers or worker in self._gone", "return False"),
    ),
    mutant(
        "service rate in memory",
        "each worker has the rate of a service for itself",
        (f"{SERVICES}._tokens", "used_until = there.spend(rate, count)", "pass"),
    ),
    mutant(
        "service spend not taken",
        "what attempts are expected to spend is not owed when they are granted",
        (f"{SERVICES}._tokens", "taken = count * max(ask.estimate, 0.0) * spend.interval", "taken = 0.0"),
    ),
    mutant(
        "service spend not told",
        "what attempts have spent beyond that is not owed",
        (f"{SERVICES}._note_spend", "spent_until += self._ask.spent * spend.interval", "pass"),
    ),
    mutant(
        "service limits of before",
        "a worker goes on with the places that it had before a limit was lowered",
        (
            "engine.shares:ServiceShare.granted",
            "self._places, self.why = grant.share, grant.why",
            "self._places, self.why = self._places or grant.share, grant.why",
        ),
    ),
    mutant(
        "probe without deadline",
        "a probe whose worker dies is waited for for ever",
        ("policies.breaker:Breaker.after_news", "if until < now", "if False"),
    ),
    mutant(
        "parked at a service without room",
        "a run that waits at a service is never claimed",
        ("stores.services:rooms_of", "if room > 0}", "if False}"),
    ),
    # -- queues -------------------------------------------------------------------------------------------------------
    mutant(
        "place of the dead",
        "the runs of a dead worker hold places, so that nobody may take them over",
        (f"{LISTED}.driven", " and not self._is_dead(one.worker)", ""),
    ),
    mutant(
        "place not released",
        "a parked run holds its place, although no worker drives it",
        (f"{LISTED}.driven", "one.worker is not None and", "(one.holds or one.worker is not None) and"),
        (f"{LISTED}.driven", "self._is_dead(one.worker)", "self._is_dead(one.worker or '')"),
    ),
    mutant(
        "place beside the claim",
        "a run of a queue with limits is leased at birth, without a place",
        ("engine.start:new_run", " and not engine.is_limited(queue)", ""),
    ),
    mutant(
        "take-over without a place",
        "the runs of a dead worker are taken over by a worker that has no place for them",
        (
            "stores.queues:decide",
            "return Decision((), (), gate)",
            "return Decision(tuple(ground.orphans(limit)), (), gate)",
        ),
    ),
    mutant(
        "places of one worker not counted",
        "a worker takes its own limit with each claim",
        ("stores.queues:room_of", "limits.per_worker - ground.driven_here()", "limits.per_worker"),
    ),
    mutant(
        "limits of the code alone",
        "a change by a person has no effect",
        ("stores.gates:limits_of", "Limits.of(gate.limits)", "Limits.of(gate.declared or {})"),
    ),
    mutant(
        "key not released",
        "a run that has ended holds its key for ever",
        ("stores.transition:moved", "holds=0 if status in ENDED else head.holds", "holds=head.holds"),
        (f"{MEMORY}._write", "self._open.pop(run_id, None)", "pass"),
    ),
    mutant(
        "key of leased runs only",
        "a parked run does not count for its key",
        (f"{LISTED}.keys", "one.holds == 1", "one.worker is not None"),
    ),
    mutant(
        "key kept over the end",
        "a run that is retried goes on beside the run that has its key now",
        ("stores.transition:moved", "holds=0 if status in ENDED else head.holds", "holds=head.holds"),
    ),
    mutant(
        "key of a child counted",
        "a child waits for the key that its own parent holds",
        (
            "kernel.children:StartCall._child",
            "holds=2 if key is not None and (queue, key) == (run.run.queue, run.run.key) else 0",
            "holds=0",
        ),
    ),
    mutant(
        "rate in memory",
        "each worker counts by itself how often runs begin",
        (
            f"{MEMORY}._claim_queue",
            "decision = queues.decide(self._gates[QUEUE, name], ground",
            """own = self.__dict__.setdefault("own", {})
    gate = replace(self._gates[QUEUE, name], used_until=own.get(request.worker, 0.0))
    decision = queues.decide(gate, ground""",
        ),
        (
            f"{MEMORY}._claim_queue",
            "self._gates[QUEUE, name] = decision.gate",
            "self._gates[QUEUE, name] = decision.gate\n    own[request.worker] = decision.gate.used_until",
        ),
    ),
    mutant(
        "rate of one claim",
        "a claim forgets how many runs it has let begin",
        ("stores.queues:_Claim.gate_after", "if rate is not None and self._fresh:", "if False:"),
    ),
    mutant(
        "dedupe not looked up",
        "a second start with the same dedupe makes a second run",
        (f"{TRANSITION}._create", "run.dedupe is not None and", "False and"),
    ),
    mutant(
        "dedupe forgotten on retry",
        "a failed run is retried beside its twin",
        ("stores.rules:check_twin", "if twin is not None and twin != run", "if False"),
    ),
    mutant(
        "cancel waits for a place",
        "a cancelled run that has not begun ends when a worker has a place for it",
        ("engine.handle:RunHandle._cancel_unbegun", "if run.status is not Status.QUEUED or run.seq:", "if True:"),
    ),
]


# -- finding them ------------------------------------------------------------------------------------------------------


def broken_under(mutant: Mutant, plan: Plan) -> list[str]:
    """The promises that a history breaks under a mutant."""
    with mutant.applied():
        try:
            return play(plan).broken
        except Exception as error:  # what a mutant writes may be so wrong that not even the judge can read it
            return [f"what is written can be read: {type(error).__name__}: {error}"]


@dataclass(frozen=True)
class Kill:
    """How a mutant was found."""

    plan: Plan
    broken: list[str]
    histories: int
    seconds: float

    @property
    def promise(self) -> str:
        return self.broken[0].partition(": ")[0]


def hunt(mutant: Mutant, plans: Iterable[Plan]) -> Kill | None:
    """Play one history after the other until a promise is broken."""
    began = time.perf_counter()
    for histories, plan in enumerate(plans, 1):
        broken = broken_under(mutant, plan)
        if broken:
            return Kill(plan, broken, histories, time.perf_counter() - began)
    return None


def kept_plans() -> dict[str, Plan]:
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def keep(plans: dict[str, Plan]) -> None:
    lines = [f"{json.dumps(one.name)}: {json.dumps(plans[one.name])}" for one in MUTANTS if one.name in plans]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def shortened(mutant: Mutant, kill: Kill) -> Plan:
    """The plan that found a mutant, made short; without the mutant it must break nothing."""

    def play_both(plan: Plan) -> Any:
        return SimpleNamespace(broken=[] if play(plan).broken else broken_under(mutant, plan))

    return shrink(kill.plan, kill.broken, play_both, tries=40)


def _report(job: tuple[str, bool]) -> tuple[Kill | None, Plan | None]:
    name, keeps = job
    (mutant,) = (one for one in MUTANTS if one.name == name)
    kill = hunt(mutant, map(draw, range(MOST)))
    if kill is None:
        kept = kept_plans().get(name)
        found = hunt(mutant, [kept]) if kept is not None else None
        return found and replace(found, histories=0), None
    return kill, shortened(mutant, kill) if keeps else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="how many processes play")
    parser.add_argument("--keep", action="store_true", help="keep a short plan that finds each mutant, for the tests")
    parser.add_argument("names", nargs="*", help="only these mutants")
    options = parser.parse_args(arguments)
    chosen = [one for one in MUTANTS if not options.names or one.name in options.names]
    kept, survived, unlucky = kept_plans(), 0, 0
    print("| mutant | what it does | found by the promise | histories | seconds |")
    print("|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        jobs = pool.imap(_report, [(one.name, options.keep) for one in chosen])
        for one, (kill, plan) in zip(chosen, jobs, strict=True):
            survived += kill is None
            unlucky += kill is not None and not kill.histories
            figures = "SURVIVED | | "
            if kill is not None:
                figures = f"{kill.promise} | {kill.histories or 'the kept plan'} | {kill.seconds:.1f}"
            print(f"| {one.name} | {one.breaks} | {figures} |", flush=True)
            if plan is not None:
                keep(kept := {**kept, one.name: plan})
    by_plan = f", {unlucky} of them only by the plan that was kept" if unlucky else ""
    print(f"\n{len(chosen) - survived} of {len(chosen)} mutants were found{by_plan}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
