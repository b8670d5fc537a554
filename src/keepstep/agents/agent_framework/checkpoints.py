"""Checkpoints of the framework's workflows as documents of a store, in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from urllib.parse import quote

from agent_framework import WorkflowCheckpoint, WorkflowCheckpointException

from ...engine.documents import Documents
from ...errors import DefinitionError
from ...kernel.context import in_workflow
from ...ports import Put
from .encoding import Encoding


class KeepstepCheckpointStorage:
    """A `CheckpointStorage` of the framework over the documents of a store: `engine.documents`, or `Documents.open`.

    Checkpoints are JSON, and nothing in them is imported or unpickled. Name the classes of your own messages and state
    in `types`: dataclasses, enums, Pydantic models, or classes with `to_dict` and `from_dict`.
    """

    def __init__(
        self, documents: Documents, *, types: Iterable[type] = (), collection: str = "agent-framework"
    ) -> None:
        self._documents = documents
        self._encoding = Encoding(types)
        self._checkpoints = f"{collection}:checkpoints"
        self._order = f"{collection}:order"

    async def save(self, checkpoint: WorkflowCheckpoint) -> str:
        """Write a checkpoint and its place in the order of its workflow, and return its id."""
        if in_workflow():
            raise DefinitionError(
                "a checkpoint is saved in the code of a Keepstep workflow, whose steps are recorded already; "
                "run the framework's workflow there without a checkpoint storage"
            )
        value = json.dumps(self._encoding.encode(checkpoint.to_dict(), "checkpoint"), ensure_ascii=False).encode()
        place = _place(checkpoint)
        puts = [Put(self._checkpoints, checkpoint.checkpoint_id, value), Put(self._order, place, b"{}")]
        before = await self._read(checkpoint.checkpoint_id)
        if before is not None and _place(before) != place:
            puts.append(Put(self._order, _place(before), None))
        await self._documents.write(*puts)
        return checkpoint.checkpoint_id

    async def load(self, checkpoint_id: str) -> WorkflowCheckpoint:
        """Return a checkpoint, or raise the framework's error if there is none."""
        found = await self._read(checkpoint_id)
        if found is None:
            raise WorkflowCheckpointException(f"No checkpoint found with ID {checkpoint_id}")
        return found

    async def list_checkpoints(self, *, workflow_name: str) -> list[WorkflowCheckpoint]:
        """Return the checkpoints of a workflow, oldest first."""
        found = [await self._read(one) for one in await self.list_checkpoint_ids(workflow_name=workflow_name)]
        return [one for one in found if one is not None]

    async def delete(self, checkpoint_id: str) -> bool:
        """Remove a checkpoint, and return whether there was one."""
        found = await self._read(checkpoint_id)
        if found is None:
            return False
        await self._documents.write(Put(self._checkpoints, checkpoint_id, None), Put(self._order, _place(found), None))
        return True

    async def get_latest(self, *, workflow_name: str) -> WorkflowCheckpoint | None:
        """Return the newest checkpoint of a workflow by its timestamp."""
        prefix = _prefix(workflow_name)
        newest = await self._documents.list(self._order, prefix=prefix, reverse=True, limit=1)
        return await self._read(_id_in(newest[0].key)) if newest else None

    async def list_checkpoint_ids(self, *, workflow_name: str) -> list[str]:
        """Return the ids of the checkpoints of a workflow, oldest first."""
        places = await self._documents.list(self._order, prefix=_prefix(workflow_name), values=False)
        return [_id_in(one.key) for one in places]

    async def _read(self, checkpoint_id: str) -> WorkflowCheckpoint | None:
        found = await self._documents.get(self._checkpoints, checkpoint_id)
        if found is None:
            return None
        return WorkflowCheckpoint.from_dict(self._encoding.decode(json.loads(found.value)))


def _prefix(workflow_name: str) -> str:
    return f"{quote(workflow_name, safe=' ')}/"


def _place(checkpoint: WorkflowCheckpoint) -> str:
    """Return the key that sorts the checkpoints of a workflow by time."""
    at = datetime.fromisoformat(checkpoint.timestamp).astimezone(UTC).isoformat(timespec="microseconds")
    return f"{_prefix(checkpoint.workflow_name)}{at}/{checkpoint.checkpoint_id}"


def _id_in(place: str) -> str:
    return place.split("/", 2)[2]
