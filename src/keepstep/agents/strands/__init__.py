"""Strands: its agents inside workflows, and its sessions in a store."""

from __future__ import annotations

try:
    import strands.middleware  # noqa: F401 - the extra is asked for before its parts are
except ImportError as error:
    raise ImportError(
        "keepstep.agents.strands needs the package strands-agents, 1.62 or later; "
        "install it with: pip install 'keepstep[strands]'"
    ) from error

from .agents import approvals, durable
from .sessions import KeepstepSessionManager

__all__ = ["KeepstepSessionManager", "approvals", "durable"]
