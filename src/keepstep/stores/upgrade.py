"""Waits until workers of an older Keepstep have stopped before their store is upgraded, or names them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from ..errors import SchemaMismatch

log = logging.getLogger("keepstep")

#: Seconds to wait for older workers. A worker that is told to stop ends within 30 s, and the lease of a dead one is
#: shorter.
UPGRADE_SECONDS = 40.0
#: Seconds between two looks at them.
LOOK_SECONDS = 0.2
#: Workers that a message names at most.
_NAMED = 5


class OldWorker(NamedTuple):
    """A worker that lives in a store of an older schema."""

    id: str
    host: str
    pid: int
    started_at: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{self.id} (pid {self.pid} on {self.host}, since {since})"


def wait_for_old_workers(where: str, is_pending: Callable[[], bool], living: Callable[[], Sequence[OldWorker]]) -> None:
    """Return when no older worker lives, or when another process has upgraded the store.

    An upgrade changes tables under the feet of such a worker, which knows nothing of it. The wait is bounded: after it,
    raise `SchemaMismatch`, which names the workers.
    """
    until = time.monotonic() + UPGRADE_SECONDS
    was_told = False
    while is_pending() and (workers := living()):
        named = ", ".join(str(worker) for worker in workers[:_NAMED])
        more = f" and {len(workers) - _NAMED} more" if len(workers) > _NAMED else ""
        if time.monotonic() > until:
            raise SchemaMismatch(
                f"{where} must be upgraded, but workers of an older Keepstep are alive after {UPGRADE_SECONDS:g} s: "
                f"{named}{more}; stop them, then open it again. `keepstep drain --all` of their own version stops them"
            )
        if not was_told:
            was_told = True
            log.warning(
                "%s must be upgraded, and workers of an older Keepstep are alive: %s%s; waiting up to %g s for them to "
                "stop",
                where,
                named,
                more,
                UPGRADE_SECONDS,
            )
        time.sleep(LOOK_SECONDS)
