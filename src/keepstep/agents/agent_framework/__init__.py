"""Microsoft Agent Framework: its agents and workflows inside Keepstep workflows, and its checkpoints in a store."""

from __future__ import annotations

try:
    import agent_framework  # noqa: F401 - the extra is asked for before its parts are
except ImportError as error:
    raise ImportError(
        "keepstep.agents.agent_framework needs the package agent-framework-core; "
        "install it with: pip install 'keepstep[agent-framework]'"
    ) from error

from .agents import approvals, durable, responses
from .checkpoints import KeepstepCheckpointStorage

__all__ = ["KeepstepCheckpointStorage", "approvals", "durable", "responses"]
