"""The lookout: of all workers that claim the same runs, one looks for due runs and dead workers on behalf of all.

Its look is the roll call. The roll, with the number of workers and the owners found dead, is one row that the others
read, so that their cost does not grow with the fleet. The row is a hint and no lock: two lookouts cost two looks, and
without one the next worker that finds the row out of date becomes the lookout.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from hashlib import sha256

import msgspec

from ...model.keepers import KEEPER_WORKFLOW
from ...ports import ClaimRequest, Clock
from ..watch import has_ended, process_identity
from .pool import NOT_FLUSHED, Address, Connection

#: Interval in seconds of the looks of the lookout. A look that finds nothing is one statement.
LOOK_SECONDS = 1.25
#: Time in seconds after its last look for which a worker counts as the lookout.
POST_SECONDS = 3.0
#: Interval in seconds at which the workers of a small fleet, taken together, check that there is a lookout. Those of a
#: large one do so with their heartbeats only.
CHECK_SECONDS = 0.25
#: Shortest and longest interval in seconds of the checks of one worker. A heartbeat is a check, too.
SHORTEST_CHECK_SECONDS = 1.0
LONGEST_CHECK_SECONDS = 5.5
#: Mean number of workers that claim at once when runs become due, beside the lookout.
ANSWERING = 3
#: Time in seconds after which the lookout claims, too, in case no other worker has answered.
LATE_SECONDS = 0.03
#: Number of runs from which on a full claim says little: the worker probably has room for more, and claims again.
MANY_RUNS = 100
#: Time in seconds for which the claims of such a worker are full before it calls others. Those who answer have to open
#: connections first, which is not worth it for a short burst.
BURST_SECONDS = 2.0
#: Time after which the row of a lookout is removed: its program is no longer deployed.
_FORGOTTEN = timedelta(hours=1)
_PREFIX = "lookout "


class Roll(msgspec.Struct, frozen=True):
    """The roll as its lookout has written it: until when it counts, how many workers there are, who was found dead."""

    worker: str
    until: float
    workers: int = 1
    dead: tuple[str, ...] = ()
    process: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Roll).decode


def _roll_in(text: str | None) -> Roll | None:
    try:
        return _decode(text) if text else None
    except msgspec.MsgspecError:  # damaged, and replaced by the next lookout
        return None


class Post:
    """The lookout as one worker sees it. `text` is the stored roll."""

    def __init__(self, worker: str, clock: Clock, *, polls: bool) -> None:
        self.worker = worker
        #: Whether it hears of no run, and so looks for due runs itself.
        self.polls = polls
        self.name = ""
        self.text = ""
        #: When the next run is due that this worker is to claim.
        self.next_due_at: datetime | None = None
        self._clock = clock
        self._roll: Roll | None = None
        self._is_valid = False  # when it was seen
        self._looked_at = self._seen_at = float("-inf")
        self._processes: frozenset[str] = frozenset()
        self._full_since = float("inf")

    def belongs_to(self, request: ClaimRequest) -> None:
        """Note which runs the worker claims; another lookout may look for others."""
        queues = None if request.queues is None else sorted(request.queues)
        workflows = [name for name in sorted(request.workflows) if not name.startswith(KEEPER_WORKFLOW)]
        claimed = msgspec.json.encode((workflows, sorted(request.versions.items()), queues))
        name = f"{_PREFIX}{sha256(claimed).hexdigest()[:24]}"
        if name != self.name:
            self.name, self.text, self._roll, self._is_valid = name, "", None, False

    def seen(self, text: str | None) -> None:
        """Note the stored roll."""
        self.text, self._seen_at = text or "", time.monotonic()
        self._roll = _roll_in(text)
        self._is_valid = self._roll is not None and self._clock.now() < self._roll.until
        if self._roll is not None and self._roll.worker != self.worker:
            self._processes = frozenset({self._roll.process})

    def found(self, text: str | None) -> None:
        """Note the stored roll as a heartbeat has found it."""
        if not (self.is_mine and text == self.text):
            self.seen(text)

    def looked(self) -> None:
        """Note that the worker looks for due runs now."""
        self._looked_at = time.monotonic()

    @property
    def is_mine(self) -> bool:
        """Whether this worker is the lookout."""
        return self._roll is not None and self._roll.worker == self.worker

    @property
    def roll(self) -> Roll | None:
        """The roll of a lookout that was there at the last check; None if there was none."""
        return self._roll if self._is_valid else None

    @property
    def workers(self) -> int:
        """Number of workers that know the same workflows, as far as known."""
        return max(1, self._roll.workers) if self._roll is not None else 1

    def must_look(self) -> bool:
        """Whether this worker has to look now: as the lookout, or because there may be none."""
        now = time.monotonic()
        if any(map(has_ended, self._processes)):
            return True
        if self.is_mine or self.polls:
            return now - self._looked_at >= LOOK_SECONDS
        check_seconds = min(max(SHORTEST_CHECK_SECONDS, CHECK_SECONDS * self.workers), LONGEST_CHECK_SECONDS)
        return self.roll is None or now - self._seen_at >= check_seconds

    def is_taken(self) -> bool:
        """Whether another worker is the lookout."""
        roll = self.roll
        return roll is not None and roll.worker != self.worker and not has_ended(roll.process)

    def renewed(self, workers: int = 1, dead: Iterable[str] = ()) -> str:
        """Return the text of a new roll by this worker."""
        until = self._clock.now() + POST_SECONDS
        return _encode(Roll(self.worker, until, workers, tuple(dead), process_identity())).decode()

    def called(self, workers: int, dead: Iterable[str], processes: Iterable[str]) -> None:
        """Note the result of a roll call, which the next look writes."""
        if self._roll is not None:
            self._roll = msgspec.structs.replace(self._roll, workers=workers, dead=tuple(dead))
        self._processes = frozenset(processes) - {process_identity()}

    def next_text(self) -> str:
        """Return the text of the roll that the next look writes."""
        return self.renewed(self.workers, self._roll.dead if self._roll is not None else ())

    def needs_help(self, limit: int, runs: int) -> bool:
        """Whether there may be more runs than this worker takes, after a claim of at most `limit` gave `runs`."""
        now = time.monotonic()
        if not 0 < limit <= runs:
            self._full_since = float("inf")
            return False
        self._full_since = min(self._full_since, now)
        return limit < MANY_RUNS or now - self._full_since >= BURST_SECONDS

    @property
    def is_elsewhere(self) -> bool:
        """Whether another worker looks on behalf of this one."""
        return not (self.is_mine or self.polls) and self.is_taken()

    def claimed(self, next_due_at: datetime | None) -> None:
        """Note when the next run is due. The lookout wakes for it unless it is due before its next look."""
        soon = self._clock.now() + 2 * LOOK_SECONDS
        is_for_me = self.is_mine or self.roll is None
        is_for_me = is_for_me or (next_due_at is not None and next_due_at.timestamp() <= soon)
        self.next_due_at = next_due_at if is_for_me else None


class Lookouts:
    """The posts of the workers of one store object."""

    def __init__(self, address: Address, clock: Clock) -> None:
        meta = address.table("meta")
        self._clock = clock
        self._polls = address.proxy
        self._posts: dict[str, Post] = {}
        self._mutex = threading.Lock()
        self._see = f"SELECT value FROM {meta} WHERE name = %s"
        self._put = (
            f"INSERT INTO {meta} AS m (name, value) VALUES (%s, %s)"
            f" ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE m.value = %s RETURNING {NOT_FLUSHED}"
        )
        self._all = f"SELECT name, value FROM {meta} WHERE name LIKE '{_PREFIX}%%'"
        self._remove = f"DELETE FROM {meta} WHERE name = %s AND value = %s"

    def post_of(self, worker: str) -> Post:
        """Return the post as a worker sees it."""
        with self._mutex:
            post = self._posts.get(worker)
            if post is None:
                post = self._posts[worker] = Post(worker, self._clock, polls=self._polls)
            return post

    def known(self, worker: str) -> Post | None:
        """Return the post of a worker that has looked for runs before."""
        return self._posts.get(worker)

    def left(self, worker: str) -> None:
        """Forget a worker that has left or was given up."""
        with self._mutex:
            self._posts.pop(worker, None)

    def answers_after(self, draw: Callable[[], float] = random.random) -> float | None:
        """Return after how many seconds a worker here answers when runs become due; None if it leaves it to others."""
        with self._mutex:
            posts = list(self._posts.values())
        if not posts or any(draw() * post.workers < ANSWERING for post in posts):
            return 0.0
        return LATE_SECONDS if any(post.is_mine for post in posts) else None

    # -- statements ----------------------------------------------------------------------------------------------------

    def take(self, connection: Connection, post: Post) -> bool:
        """Become the lookout if there is none. Return whether the worker is the lookout now."""
        rows = connection.execute(self._see, (post.name,)).fetchall()
        post.seen(rows[0][0] if rows else None)
        if post.is_taken():
            return False
        mine = post.renewed(post.workers)
        if not connection.execute(self._put, (post.name, mine, post.text)).rowcount:
            return False  # another worker was first
        post.seen(mine)
        self._remove_old(connection)
        return True

    def resign(self, connection: Connection, post: Post) -> None:
        """Leave the post to a worker with more room."""
        connection.execute(self._remove, (post.name, post.text))
        post.seen(None)

    def _remove_old(self, connection: Connection) -> None:
        before = self._clock.now() - _FORGOTTEN.total_seconds()
        for name, text in connection.execute(self._all).fetchall():
            roll = _roll_in(text)
            if roll is None or roll.until < before:
                connection.execute(self._remove, (name, text))
