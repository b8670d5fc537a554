"""What every store must do, as a suite that a store's own tests subclass.

    class TestMyStore(StoreContract):
        @pytest.fixture(autouse=True)
        def _place(self, tmp_path):
            self.path = tmp_path / "runs"

        def make_store(self, clock):
            return MyStore(self.path, clock=clock)

`make_store` opens the same storage each time it is called within one test: a second store stands for a second process.
"""

from __future__ import annotations

from .claiming import Claiming
from .documents import Documenting
from .ground import (
    ENDINGS,
    RELEASED,
    START,
    Holder,
    SteppedClock,
    at,
    commit,
    everything,
    get,
    ids,
    parked,
    queued,
    record,
    started,
    watch,
)
from .keeping import Keeping
from .queueing import Queueing
from .reading import Reading
from .serving import Serving
from .trimming import Trimming
from .waking import Waking
from .writing import Writing

__all__ = [
    "ENDINGS",
    "RELEASED",
    "START",
    "Holder",
    "SteppedClock",
    "StoreContract",
    "at",
    "commit",
    "everything",
    "get",
    "ids",
    "parked",
    "queued",
    "record",
    "started",
    "watch",
]


class StoreContract(Writing, Waking, Claiming, Queueing, Serving, Reading, Keeping, Trimming, Documenting):
    """Subclass it and write `make_store`; every test of each group must pass."""
