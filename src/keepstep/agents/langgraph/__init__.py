"""LangGraph and LangChain: graphs and agents whose nodes are steps, a checkpoint saver and a store for memory."""

from __future__ import annotations

try:
    import langgraph.pregel  # noqa: F401 - the extra is asked for before its parts are
except ImportError as error:  # pragma: no cover - the tests have it
    raise ImportError("keepstep.agents.langgraph needs LangGraph: pip install 'keepstep[langgraph]'") from error

from .graph import DurableGraph, durable
from .saver import KeepstepSaver
from .store import KeepstepStore
from .threads import ThreadMoved
from .turns import in_turn

__all__ = ["DurableGraph", "KeepstepSaver", "KeepstepStore", "ThreadMoved", "durable", "in_turn"]
