"""What Keepstep promises: each promise is a small class that hears what happens, and looks at what it left behind.

To hold a new feature to its promise, write a class beside those of its subject and put it into `PROMISES`. A promise is
broken with `self.broken`.
"""

from __future__ import annotations

from .graph_promises import GRAPH_PROMISES
from .lease_promises import CrashesAreCounted, OneWriter, RunsBelongToTheirHolder, TheLivingKeepTheirRuns
from .promise import Promise
from .queues import QUEUE_PROMISES
from .run_promises import (
    AcceptedRunsEnd,
    ChainsAreWhole,
    EndsStand,
    LegalMoves,
    NoSilentStall,
    ParkedMeansStill,
    ResultsAreRight,
)
from .services import SERVICE_PROMISES
from .steering_promises import (
    CancelIsFinal,
    CancelReachesChildren,
    DeadlinesHold,
    OneChildPerCall,
    RunsEndByTheirDeadline,
    SignalsAreReadOnce,
)
from .step_promises import (
    AtMostOnce,
    AttemptsAreCounted,
    BackoffsAreKept,
    EveryStepHasALastWord,
    FinishedStepsStayFinished,
    OneKeyPerStep,
    RetriesKeepWhatWasDone,
    ToldWhatIsDurable,
)
from .ticks import TICK_PROMISES
from .undo_promises import UndoneOnceNewestFirst

#: Everything that is held against a history.
PROMISES: list[type[Promise]] = [
    FinishedStepsStayFinished,
    RetriesKeepWhatWasDone,
    ToldWhatIsDurable,
    OneWriter,
    TheLivingKeepTheirRuns,
    ChainsAreWhole,
    LegalMoves,
    EndsStand,
    NoSilentStall,
    ParkedMeansStill,
    AcceptedRunsEnd,
    ResultsAreRight,
    SignalsAreReadOnce,
    OneChildPerCall,
    CancelIsFinal,
    AttemptsAreCounted,
    OneKeyPerStep,
    AtMostOnce,
    DeadlinesHold,
    EveryStepHasALastWord,
    RunsEndByTheirDeadline,
    RunsBelongToTheirHolder,
    CrashesAreCounted,
    BackoffsAreKept,
    CancelReachesChildren,
    UndoneOnceNewestFirst,
    *GRAPH_PROMISES,
    *TICK_PROMISES,
    *QUEUE_PROMISES,
    *SERVICE_PROMISES,
]
