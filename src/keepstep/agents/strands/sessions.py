"""Sessions of Strands as documents of a store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from strands.session.repository_session_manager import RepositorySessionManager
from strands.session.session_repository import SessionRepository
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage, decode_bytes_values, encode_bytes_values

from ...engine.documents import Documents
from ...errors import DocumentConflict

if TYPE_CHECKING:
    from strands.multiagent import MultiAgentBase


class KeepstepSessionManager(RepositorySessionManager, SessionRepository):
    """A session manager over the documents of a store: `engine.documents`, or `Documents.open`.

    It keeps messages, state and interrupts of the agents of a session, and the state of graphs and swarms.
    """

    def __init__(self, session_id: str, documents: Documents, *, collection: str = "strands", **kwargs: Any) -> None:
        self._documents = documents.blocking
        self._collection = collection
        super().__init__(session_id=session_id, session_repository=self, **kwargs)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def create_session(self, session: Session, **kwargs: Any) -> Session:
        """Create a session that must not exist."""
        self._create(_key(session.session_id, "session"), session.to_dict(), f"session {session.session_id}")
        return session

    def read_session(self, session_id: str, **kwargs: Any) -> Session | None:
        found = self._read(_key(session_id, "session"))
        return None if found is None else Session.from_dict(found)

    def delete_session(self, session_id: str, **kwargs: Any) -> None:
        """Remove a session with its agents and messages."""
        if not self._documents.remove(self._collection, prefix=_key(session_id, "")):
            raise SessionException(f"session {session_id} does not exist")

    # -- agents ------------------------------------------------------------------------------------------------------

    def create_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        name = session_agent.agent_id
        self._create(_key(session_id, "agent", name), session_agent.to_dict(), f"agent {name} of session {session_id}")

    def read_agent(self, session_id: str, agent_id: str, **kwargs: Any) -> SessionAgent | None:
        found = self._read(_key(session_id, "agent", agent_id))
        return None if found is None else SessionAgent.from_dict(found)

    def update_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        before = self.read_agent(session_id, session_agent.agent_id)
        if before is None:
            raise SessionException(f"agent {session_agent.agent_id} of session {session_id} does not exist")
        session_agent.created_at = before.created_at
        self._write(_key(session_id, "agent", session_agent.agent_id), session_agent.to_dict())

    # -- messages ----------------------------------------------------------------------------------------------------

    def create_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Create a message. Another process that has the same session may not have created it."""
        number = session_message.message_id
        self._create(
            _message_key(session_id, agent_id, number), session_message.to_dict(), f"message {number} of {agent_id}"
        )

    def read_message(self, session_id: str, agent_id: str, message_id: int, **kwargs: Any) -> SessionMessage | None:
        found = self._read(_message_key(session_id, agent_id, message_id))
        return None if found is None else SessionMessage.from_dict(found)

    def update_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        before = self.read_message(session_id, agent_id, session_message.message_id)
        if before is None:
            raise SessionException(f"message {session_message.message_id} of agent {agent_id} does not exist")
        session_message.created_at = before.created_at
        self._write(_message_key(session_id, agent_id, session_message.message_id), session_message.to_dict())

    def list_messages(
        self, session_id: str, agent_id: str, limit: int | None = None, offset: int = 0, **kwargs: Any
    ) -> list[SessionMessage]:
        wanted = None if limit is None else offset + limit
        found = self._documents.list(self._collection, prefix=_key(session_id, "message", agent_id, ""), limit=wanted)
        return [SessionMessage.from_dict(json.loads(one.value)) for one in found[offset:]]

    # -- graphs and swarms -------------------------------------------------------------------------------------------

    def create_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        self._write(_key(session_id, "group", multi_agent.id), encode_bytes_values(multi_agent.serialize_state()))

    def read_multi_agent(self, session_id: str, multi_agent_id: str, **kwargs: Any) -> dict[str, Any] | None:
        found: dict[str, Any] | None = decode_bytes_values(self._read(_key(session_id, "group", multi_agent_id)))
        return found

    def update_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        if self.read_multi_agent(session_id, multi_agent.id) is None:
            raise SessionException(f"group {multi_agent.id} of session {session_id} does not exist")
        self.create_multi_agent(session_id, multi_agent)

    # -- documents ---------------------------------------------------------------------------------------------------

    def _create(self, key: str, value: dict[str, Any], what: str) -> None:
        try:
            self._write(key, value, expect=0)
        except DocumentConflict as error:
            raise SessionException(f"{what} exists already; one process at a time may have a session") from error

    def _write(self, key: str, value: dict[str, Any], expect: int | None = None) -> None:
        try:
            data = json.dumps(value, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise SessionException(f"{key} cannot be stored, since JSON cannot hold it: {error}") from error
        self._documents.put(self._collection, key, data, expect=expect)

    def _read(self, key: str) -> dict[str, Any] | None:
        found = self._documents.get(self._collection, key)
        if found is None:
            return None
        value: dict[str, Any] = json.loads(found.value)
        return value


def _key(*parts: str) -> str:
    return "/".join(quote(part, safe=" ") for part in parts)


def _message_key(session_id: str, agent_id: str, number: int) -> str:
    """Return the key of a message; the keys of an agent's messages sort by number."""
    return _key(session_id, "message", agent_id, f"{number:010d}")
