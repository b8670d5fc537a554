"""Virtual time for tests: the loop that jumps to its next timer, and its clock."""

from ..engine.virtual import EPOCH, VirtualClock, VirtualLoop, at_work

__all__ = ["EPOCH", "VirtualClock", "VirtualLoop", "at_work"]
