"""The executor of bodies on a Dask cluster, which outlive their worker and are adopted by the next one."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checks import check_count, check_number, check_seconds
from ..errors import DefinitionError
from .bridge import Bridge, ClusterExecutor, shared
from .connection import levels
from .process import LEAST_MEMORY

#: Bodies that may usefully be given to a cluster at once. It queues them itself.
WIDTH = 1_000


@dataclass(frozen=True, kw_only=True)
class Dask:
    """Bodies run on a Dask cluster, each in a process of its own beside its Dask worker.

    A body goes on when its worker ends, and the next worker that drives the run adopts it. One that crashes, or loses
    its Dask worker or its scheduler, is `ks.BodyLost`. Dask itself never repeats a body.
    """

    #: Address of the scheduler; by default the variable DASK_SCHEDULER_ADDRESS.
    address: str | None = None
    #: Amounts of the resources of Dask workers that a body needs.
    resources: Mapping[str, float] = field(default_factory=dict)
    #: Names or addresses of the Dask workers that may run bodies; by default all.
    workers: Iterable[str] = ()
    #: Priority in Dask's queue; a greater number is sooner.
    priority: int = 0
    #: Whether functions cross pickled, so that any function can be sent and the cluster needs none of the code.
    pickled: bool = False
    #: Largest data of a body's process in bytes; an allocation beyond it raises `MemoryError` in the body.
    memory_bytes: int | None = None
    #: Seconds that a body has for its clean-up when it is stopped.
    grace_seconds: float = 1.0
    #: Seconds after which a scheduler that does not answer counts as lost, with its bodies.
    lost_seconds: float = 60.0
    #: Seconds after which a body ends that no worker asks for, and its outcome is forgotten.
    abandoned_seconds: float = 600.0

    def __post_init__(self) -> None:
        pairs = self.resources.items() if isinstance(self.resources, Mapping) else self.resources
        found = {str(name): check_number(much, f"Dask(resources={{{name!r}: ...}})", 0.0) for name, much in pairs}
        object.__setattr__(self, "resources", _Amounts(found))
        if isinstance(self.workers, str):
            raise DefinitionError(f"Dask(workers=) takes several names, such as ({self.workers!r},)")
        object.__setattr__(self, "workers", tuple(self.workers))
        for name, least in (("grace_seconds", 0.0), ("lost_seconds", 1.0), ("abandoned_seconds", 1.0)):
            object.__setattr__(self, name, check_seconds(getattr(self, name), f"Dask({name}=)", least))
        if self.memory_bytes is not None:
            check_count(self.memory_bytes, "Dask(memory_bytes=)", LEAST_MEMORY)

    def open(self, host: Any) -> ClusterExecutor:
        """Return the executor of a worker."""
        if importlib.util.find_spec("distributed") is None:
            raise DefinitionError('steps on Dask need its library; install it with: pip install "keepstep[dask]"')
        address = self.address or os.environ.get("DASK_SCHEDULER_ADDRESS")
        if not address:
            raise DefinitionError(
                "the address of the Dask scheduler is not known; give ks.executors.Dask(address='tcp://host:8786'), or "
                "set DASK_SCHEDULER_ADDRESS"
            )
        options = {
            "resources": dict(self.resources),
            "workers": list(self.workers),
            "priority": self.priority,
            "memory_bytes": self.memory_bytes or 0,
            "grace_seconds": self.grace_seconds,
        }
        settings = {
            "address": address,
            "lost_seconds": self.lost_seconds,
            "abandoned_seconds": self.abandoned_seconds,
            "program": uuid.uuid4().hex,
            "path": _own_folders(),
            "levels": levels(),
        }
        key = ("dask", address, self.lost_seconds, self.abandoned_seconds)
        bridge = shared(host, key, lambda: Bridge("dask", settings, f"the Dask scheduler at {address}"))
        return ClusterExecutor(host, bridge, options, WIDTH, pickled=self.pickled)


class _Amounts(dict[str, float]):
    """Amounts of resources, which do not change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _own_folders() -> list[str]:
    """Return the folders of the program's own code: those that are not of the Python installation."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = (os.path.abspath(one) for one in sys.path)  # noqa: PTH100 - a Path of "" is "."
    roots = tuple(f"{one}{os.sep}" for one in installed)
    return [one for one in folders if one not in installed and not one.startswith(roots) and Path(one).is_dir()]
