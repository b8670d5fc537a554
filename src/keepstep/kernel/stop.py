"""The stop state of a run in memory: four small states, and the moves between them.

    phase     DRIVING ⇄ RELEASING, then FINISHING, then DETACHED; FINISHING → DRIVING to undo steps
    cancel    NONE → SETTLING → RECORDED → DELIVERED
    deadline  NONE → RECORDED → DELIVERED
    wish      NONE, PAUSE, DRAIN, PAUSE_AND_DRAIN, REPLAY_ONLY

`Stop` is the only writer of these. Everything else reads them and asks for a move. A replay delivers a cancel or a
deadline that is recorded already, straight from NONE.
"""

from __future__ import annotations

import asyncio
from enum import Enum

from ..model import Signal


class Phase(Enum):
    """The activity of this process with the run."""

    DRIVING = "driving"
    #: The commit that releases the run is in progress; the store may refuse it.
    RELEASING = "releasing"
    #: The code has ended, and its end is being written.
    FINISHING = "finishing"
    #: The run is no longer here; nothing that its code does counts.
    DETACHED = "detached"


class Order(Enum):
    """The progress of a cancel or the deadline on its way to the code."""

    NONE = "none"
    #: The cancel waits for an at-most-once step, whose outcome it must not leave in doubt.
    SETTLING = "settling"
    #: Its record is being written, or waits to be delivered.
    RECORDED = "recorded"
    DELIVERED = "delivered"


class Wish(Enum):
    """The reason to put the run away as soon as nothing is in progress."""

    NONE = "none"
    #: A person has asked for it.
    PAUSE = "pause"
    #: The engine is closing.
    DRAIN = "drain"
    #: Both: the run is paused.
    PAUSE_AND_DRAIN = "pause and drain"
    #: A dry replay: the run stays, and begins nothing.
    REPLAY_ONLY = "replay only"


DRIVING, RELEASING, FINISHING, DETACHED = Phase
SETTLING, RECORDED, DELIVERED = Order.SETTLING, Order.RECORDED, Order.DELIVERED
_PAUSES = {Wish.NONE: Wish.PAUSE, Wish.DRAIN: Wish.PAUSE_AND_DRAIN}
_PAUSE_ENDS = {Wish.PAUSE: Wish.NONE, Wish.PAUSE_AND_DRAIN: Wish.DRAIN}
_DRAINS = {Wish.NONE: Wish.DRAIN, Wish.PAUSE: Wish.PAUSE_AND_DRAIN}

#: The reachable combinations of wish, cancel, deadline and phase: each row allows every combination of its values. A
#: cancel overrules a pause, and a dry replay never releases its run.
ALLOWED: tuple[tuple[set[Wish], set[Order], set[Order], set[Phase]], ...] = (
    ({Wish.NONE, Wish.DRAIN}, set(Order), {Order.NONE, RECORDED, DELIVERED}, set(Phase)),
    ({Wish.PAUSE, Wish.PAUSE_AND_DRAIN}, {Order.NONE}, {Order.NONE, RECORDED, DELIVERED}, set(Phase)),
    ({Wish.REPLAY_ONLY}, set(Order), {Order.NONE, RECORDED, DELIVERED}, {DRIVING, FINISHING, DETACHED}),
)
#: The allowed moves between phases.
NEXT_PHASES = {
    DRIVING: {RELEASING, FINISHING, DETACHED},
    RELEASING: {DRIVING, FINISHING, DETACHED},
    FINISHING: {DRIVING, DETACHED},
    DETACHED: set(),
}


class Stop:
    """The stop state of one run, and whether anything new may start in it."""

    __slots__ = (
        *("cancel", "cancel_signal", "deadline", "decided", "detached", "holding", "is_ending", "pause", "phase"),
        "wish",
    )

    def __init__(self) -> None:
        self.phase = DRIVING
        self.cancel = Order.NONE
        self.deadline = Order.NONE
        self.wish = Wish.NONE
        #: Why the run is no longer here; empty while it is.
        self.detached = ""
        #: The cancel, while it settles.
        self.cancel_signal: Signal | None = None
        #: A pause that is not yet recorded as read.
        self.pause: Signal | None = None
        # Derived values are stored, because steps read them often. This one says whether nothing new may start.
        self.holding = False
        #: Whether the run is cancelled or timed out, so that its code is cleaning up.
        self.is_ending = False
        #: Done when the commit that releases the run is decided; made while something waits for that.
        self.decided: asyncio.Future[None] | None = None

    def _moved(self) -> None:
        """Update the derived values; every move ends here or in `_phase_moved`."""
        on_its_way = self.cancel is SETTLING or self.cancel is RECORDED or self.deadline is RECORDED
        self.holding = on_its_way or self.wish is not Wish.NONE
        self.is_ending = self.cancel is not Order.NONE or self.deadline is DELIVERED

    def _phase_moved(self) -> None:
        """Tell those who wait for the end of a phase. No derived value depends on the phase."""
        if self.decided is not None and self.phase is not RELEASING:
            self.decided.set_result(None)
            self.decided = None

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        """Whether the run will end as cancelled, even before the cancel is delivered."""
        return self.cancel is not Order.NONE

    @property
    def is_timed_out(self) -> bool:
        """Whether the passed deadline was delivered to the code."""
        return self.deadline is DELIVERED

    @property
    def is_to_pause(self) -> bool:
        """Whether the run is to be paused."""
        return self.wish in _PAUSE_ENDS

    @property
    def is_to_drain(self) -> bool:
        """Whether the engine is closing."""
        return self.wish is Wish.DRAIN or self.wish is Wish.PAUSE_AND_DRAIN

    @property
    def is_dry(self) -> bool:
        """Whether the run is only replayed: nothing that has effects may be called."""
        return self.wish is Wish.REPLAY_ONLY

    # -- a cancel and the deadline ------------------------------------------------------------------------------------

    def cancel_requested(self, signal: Signal) -> None:
        """Take a cancel, which overrules a pause; nothing new starts before it is delivered."""
        if self.cancel is Order.NONE:
            self.cancel, self.cancel_signal = SETTLING, signal
            self.pause, self.wish = None, _PAUSE_ENDS.get(self.wish, self.wish)
            self._moved()

    def cancel_settled(self) -> Signal | None:
        """Return the cancel that is now to be recorded; None if none has waited."""
        signal, self.cancel_signal = self.cancel_signal, None
        if signal is not None:
            self.cancel = RECORDED
            self._moved()
        return signal

    def cancel_delivered(self) -> None:
        """Note that the cancel is delivered, live or on replay. An earlier pause does not stop the clean-up."""
        self.cancel, self.cancel_signal = DELIVERED, None
        self.wish = _PAUSE_ENDS.get(self.wish, self.wish)
        self._moved()

    def deadline_passed(self) -> None:
        """Note that the deadline is to be recorded; nothing new starts before it is delivered."""
        if self.deadline is Order.NONE:
            self.deadline = RECORDED
            self._moved()

    def deadline_delivered(self) -> None:
        """Note that the deadline is delivered, live or on replay. An earlier pause does not stop the clean-up."""
        self.deadline = DELIVERED
        self.wish = _PAUSE_ENDS.get(self.wish, self.wish)
        self._moved()

    # -- a pause, and closing the engine -------------------------------------------------------------------------------

    def pause_requested(self, signal: Signal) -> None:
        """Take a pause; callers ensure that the run is neither cancelled nor finishing."""
        self.pause = signal
        self.wish = _PAUSES.get(self.wish, self.wish)
        self._moved()

    def pause_read(self) -> Signal | None:
        """Return the pause to record as read, if there is one; held calls stay held."""
        signal, self.pause = self.pause, None
        return signal

    def pause_ended(self) -> None:
        """Note that the run is no longer to be paused."""
        self.wish = _PAUSE_ENDS.get(self.wish, self.wish)
        self._moved()

    def drain_requested(self) -> None:
        """Note that the engine is closing."""
        self.wish = _DRAINS.get(self.wish, self.wish)
        self._moved()

    def replay_only(self) -> None:
        """Begin nothing that is not recorded, and stay."""
        self.wish = Wish.REPLAY_ONLY
        self._moved()

    # -- the phases ---------------------------------------------------------------------------------------------------

    def release_begun(self) -> None:
        """Note that the commit that releases the run is in progress."""
        self.phase = RELEASING
        self._phase_moved()

    def release_refused(self) -> None:
        """Note that the store refused that commit; the run stays, and its code may have ended meanwhile."""
        if self.phase is RELEASING:
            self.phase = DRIVING
            self._phase_moved()

    async def release_decided(self) -> None:
        """Wait while the commit that releases the run is in progress. If the run leaves, its tasks are cancelled."""
        if self.phase is RELEASING:
            if self.decided is None:
                self.decided = asyncio.get_running_loop().create_future()
            await asyncio.shield(self.decided)

    def code_ended(self) -> None:
        """Note that the code has returned or raised."""
        self.phase = FINISHING
        self._phase_moved()

    def undo_begun(self) -> None:
        """Note that the run is driven on after the end of its code, to undo its steps."""
        self.phase = DRIVING
        self._phase_moved()

    def left(self, reason: str) -> None:
        """Note that the run is no longer here."""
        self.phase, self.detached = DETACHED, reason
        self._phase_moved()
