"""Data model: frozen records that need only the standard library and do no I/O."""

from .checkpoint import Checkpoint, Kind, Outcome, Trigger
from .error import ErrorInfo
from .event import Event
from .flaw import Flaw, Hindrance
from .gate import Ask, AtService, GateChange, GateInfo, Grant, QueueCounts, Share
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
    "Ask",
    "AtService",
    "Checkpoint",
    "Claim",
    "Claims",
    "ErrorInfo",
    "Event",
    "Flaw",
    "GateChange",
    "GateInfo",
    "Grant",
    "Hindrance",
    "Kind",
    "Lease",
    "News",
    "Outcome",
    "QueueCounts",
    "Run",
    "RunPage",
    "RunQuery",
    "Share",
    "Signal",
    "State",
    "Status",
    "Trigger",
    "WorkerInfo",
    "may_move",
]
