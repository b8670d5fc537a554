"""One run at a glance: the run itself, its worker, its waits, and the possible actions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from ..errors import EncryptionError
from ..model import Run, Signal, WorkerInfo
from ..model.run import handed_over
from .finding import awaited_children, successor_of
from .queue_waits import with_queue
from .requests import Cancellation, Request, cancellation_of, pending_request, refused_signals
from .waits import Action, Wait, WaitKind, actions_for, waits_of, with_version

if TYPE_CHECKING:
    from ..history.host import CommandHost
    from ..kernel.host import RunKeys


#: Children that an overview looks up at most, so that a parent of thousands is shown at once.
MOST_CHILDREN = 20


class Locked(StrEnum):
    """Why the values of an encrypted run cannot be read here."""

    NO_KEY = "no key"
    OTHER_KEY = "other key"  # the local key of that name is different


@dataclass(frozen=True, slots=True)
class Overview:
    """The data that an interface shows of a run.

    `run` has its input in plain text, unless it is `locked`. `worker` is None also if the worker that `run.worker`
    names is no longer known. `actions` are for `newest`, the newest run of its series, if that is another one.
    `children` are the children that it waits for, each with the key of its call. `refused` are signals that its wait
    has left unread, because they do not fit.
    """

    run: Run
    locked: Locked | None
    worker: WorkerInfo | None
    waits: tuple[Wait, ...]
    actions: tuple[Action, ...]
    request: Request | None
    cancellation: Cancellation | None
    newest: Run | None
    children: tuple[tuple[str, Run], ...] = ()
    refused: tuple[Signal, ...] = ()


async def overview_of(host: CommandHost, run: Run, now: datetime) -> Overview:
    """Collect the overview of a run that was just read."""
    workers = await host.ask(lambda store: store.list_workers())
    newest = await successor_of(host, run)
    plain, locked = readable(host.encryption, run)
    waits = () if handed_over(run) else tuple(with_version(wait, run, workers) for wait in waits_of(run, now))
    waits = await host.ask(lambda store: with_queue(store, run, waits, workers, now))
    keys = [wait.name for wait in waits if wait.kind is WaitKind.CHILD]
    return Overview(
        run=plain,
        locked=locked,
        worker=next((worker for worker in workers if worker.id == run.worker), None),
        waits=waits,
        actions=actions_for(newest or run, now),
        request=await pending_request(host, run),
        cancellation=await cancellation_of(host, run),
        newest=newest,
        children=await awaited_children(host, run, keys[:MOST_CHILDREN]) if keys else (),
        refused=await refused_signals(host, run, waits),
    )


def readable(keys: RunKeys, run: Run) -> tuple[Run, Locked | None]:
    """Return the run with its input in plain text; without the right key, a run without values and the reason."""
    if not run.data_key:
        return run, None
    try:
        return replace(run, input=keys.input(run)), None
    except EncryptionError as error:
        hidden = replace(run, input=b"null", progress=None)
        return hidden, Locked.OTHER_KEY if error.wrong else Locked.NO_KEY
