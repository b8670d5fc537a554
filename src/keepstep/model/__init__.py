"""What is true: frozen records, standard library only, no input or output."""

from .checkpoint import Checkpoint, Kind, Outcome, Trigger
from .error import ErrorInfo
from .event import Event
from .flaw import Flaw
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
    "Kind",
    "Lease",
    "News",
    "Outcome",
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
