"""The threads of a run's plain code, which take turns: one runs, and the others wait."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol


class Code(Protocol):
    """Plain code of a run that waits for its turn in a thread."""

    #: The task that awaits calls for the code.
    task: Any

    def go(self) -> None:
        """Let the code go on."""

    def ask(self, begin: Any, refuse: Any = None) -> Any:
        """Let the task of the code await a call, and return its outcome; called in the thread."""

    def leave(self) -> None:
        """Release waiting code of a run that is no longer driven here."""


class CodeThreads:
    """Gives the threads of one run their turns, in the order in which they are ready; an async workflow has none.

    A thread runs until it waits for a call or ends. The next one goes on when all tasks of the run have come to rest.
    Threads that ran at the same time could meet each other, or a cancel, differently on a replay. `here`, `entered` and
    `ended` are for the threads; all else belongs to the loop's thread.
    """

    __slots__ = ("_codes", "_running", "busy", "ready")

    def __init__(self) -> None:
        self._codes: dict[int, Code] = {}
        self._running: Code | None = None
        #: Code that is ready to go on.
        self.ready: deque[Code] = deque()
        #: Whether code is running, so that nothing may be delivered to the run.
        self.busy = False

    def entered(self, code: Code) -> None:
        """Note that the code begins in the calling thread."""
        self._codes[threading.get_ident()] = code

    def ended(self) -> None:
        """Note that the code in the calling thread has returned or raised."""
        self._codes.pop(threading.get_ident(), None)

    def here(self) -> Code | None:
        """Return the code that runs in the calling thread; None if this thread is not one of the run's."""
        return self._codes.get(threading.get_ident())

    def wants_turn(self, code: Code) -> None:
        """Let code go on after the code that is ready before it."""
        self.ready.append(code)

    def give_turn(self) -> None:
        """Let the code that has been ready for longest go on; the run is at rest."""
        self._running = code = self.ready.popleft()
        self.busy = True
        code.go()

    def end_turn(self, code: Code) -> None:
        """Note that code waits for a call or has ended."""
        if self._running is code:
            self._running = None
            self.busy = False

    def left(self) -> None:
        """Release waiting code after the run has left; it will find that it is detached."""
        self.busy = False
        self._running = None
        self.ready.clear()
        for code in list(self._codes.values()):
            code.leave()


#: The threads of a run that has none. They are never changed.
NO_THREADS = CodeThreads()
