"""The executor of bodies on a cluster of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ..checks import check_number, check_seconds
from ..errors import DefinitionError
from .bridge import Bridge, ClusterExecutor, shared

#: Bodies that may usefully be given to a cluster at once; it queues what it cannot run yet.
MOST_AT_ONCE = 1_000
#: Longest clean-up in seconds. A worker gives a body up soon after.
MOST_GRACE = 10.0


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Bodies run as tasks of a Ray cluster, and go on there if their worker ends: the next worker finds them again.

    The worker itself does not load Ray. One process beside it speaks to the cluster for all its bodies.
    """

    #: Address of the cluster: `host:port`, `ray://host:port`, or `auto` for `RAY_ADDRESS` or one on this machine.
    address: str = "auto"
    #: Ray's namespace for Keepstep's part of the cluster. Workers that share runs must share it.
    namespace: str = "keepstep"
    #: Resources of one body, as Ray counts them.
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory_bytes: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: Ray's environment for the body, such as packages and variables.
    runtime_env: Mapping[str, Any] = field(default_factory=dict, hash=False)
    #: Whether functions cross as cloudpickle writes them, so that also inner functions can run there.
    pickled: bool = False
    #: Seconds that a body has for its clean-up when it is stopped.
    grace_seconds: float = 2.0
    #: Seconds without an answer after which Keepstep's part of the cluster counts as lost.
    silent_seconds: float = 60.0
    #: Seconds that a body goes on while no worker asks for it.
    unasked_seconds: float = 600.0
    #: Seconds that an outcome is kept which no worker has recorded.
    kept_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("address", "namespace"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise DefinitionError(f"Ray({name}=) must be text, got {getattr(self, name)!r}")
        for name, least in (("grace_seconds", 0.0), ("silent_seconds", 1.0), ("unasked_seconds", 1.0)):
            object.__setattr__(self, name, check_seconds(getattr(self, name), f"Ray({name}=)", least))
        object.__setattr__(self, "kept_seconds", check_seconds(self.kept_seconds, "Ray(kept_seconds=)", 1.0))
        if self.grace_seconds > MOST_GRACE:
            raise DefinitionError(f"Ray(grace_seconds=) must be at most {MOST_GRACE:g}, got {self.grace_seconds:g}")
        for name in ("num_cpus", "num_gpus"):
            if getattr(self, name) is not None:
                check_number(getattr(self, name), f"Ray({name}=)", 0.0)
        if self.memory_bytes is not None and (not isinstance(self.memory_bytes, int) or self.memory_bytes < 1):
            raise DefinitionError(f"Ray(memory_bytes=) must be a whole number of bytes, got {self.memory_bytes!r}")
        for name in ("resources", "runtime_env"):
            object.__setattr__(self, name, dict(getattr(self, name)))

    def open(self, host: Any) -> ClusterExecutor:
        """Return the executor of a worker. All that name the same cluster share one process."""
        for package in ("ray", *(["cloudpickle"] if self.pickled else [])):
            if find_spec(package) is None:
                raise DefinitionError(
                    f'steps on Ray need {package}, which is not installed here: pip install "keepstep[ray]"'
                )
        settings = {
            "address": self.address,
            "namespace": self.namespace,
            "silent_seconds": self.silent_seconds,
        }
        key = ("ray", self.address, self.namespace)
        bridge = shared(host, key, lambda: Bridge("ray", settings, f"Ray at {self.address}"))
        return ClusterExecutor(host, bridge, self._options(), MOST_AT_ONCE, pickled=self.pickled)

    def _options(self) -> dict[str, Any]:
        """Return the options that go with each body."""
        needs = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "memory": self.memory_bytes,
            "resources": self.resources or None,
            "runtime_env": self.runtime_env or None,
        }
        return {
            "ray": {name: value for name, value in needs.items() if value is not None},
            "grace_seconds": self.grace_seconds,
            "unasked_seconds": self.unasked_seconds,
            "kept_seconds": self.kept_seconds,
        }
