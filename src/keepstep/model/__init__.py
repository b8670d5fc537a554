"""Data model: frozen records that need only the standard library and do no I/O."""

from .checkpoint import Checkpoint, Kind, Outcome, Trigger
from .error import ErrorInfo
from .event import Event
from .flaw import Flaw
from .gate import GateChange, GateInfo, QueueCounts
from .lease import HEARTBEAT_SECONDS, LEASE_SECONDS, Claim, Claims, Lease, WorkerInfo
from .query import News, RunPage, RunQuery
from .run import FINISHED, MOVES, Run, Status, may_move
from .signal import Signal
from .state import State

__all__ = [
    "FINISHED",
    "HEARTBEAT_SECONDS",
    "LEASE_SECONDS",
    "MOVES",
    "Checkpoint",
    "Claim",
    "Claims",
    "ErrorInfo",
    "Event",
    "Flaw",
    "GateChange",
    "GateInfo",
    "Kind",
    "Lease",
    "News",
    "Outcome",
    "QueueCounts",
    "Run",
    "RunPage",
    "RunQuery",
    "Signal",
    "State",
    "Status",
    "Trigger",
    "WorkerInfo",
    "may_move",
]
