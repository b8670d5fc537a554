"""Routes of the API about what runs share and keep: memories and artifacts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..engine.artifacts import Artifact
from ..engine.memory import MEMORY, Memory
from ..errors import RunNotFound
from ..views import plain
from .api_runs import JSON, MOST_ROWS
from .routes import Ask, Content, get


@get("/memories", JSON)
async def list_memories(ask: Ask) -> JSON:
    """List the memories, with the number of their keys."""
    found = await ask.engine.documents.collections()
    names = {name.removeprefix(MEMORY): count for name, count in found.items() if name.startswith(MEMORY)}
    return {"memories": [{"namespace": name, "keys": count} for name, count in names.items()]}


class Keys(msgspec.Struct, forbid_unknown_fields=True):
    """The keys with a prefix, after one of them; `history` gives all versions that are stored."""

    prefix: str = ""
    after: str = ""
    history: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)] = 100


@get("/memories/{namespace}", JSON, query=Keys)
async def get_memory(ask: Ask) -> JSON:
    """Return values of a memory by key, page by page."""
    query, name = ask.query, ask.path["namespace"]
    documents = await ask.engine.documents.list(
        Memory(name).collection,
        prefix=query.prefix,
        after=query.after,
        all_versions=query.history,
        limit=query.limit + 1,
    )
    keys = list(dict.fromkeys(one.key for one in documents))
    shown = [
        await ask.shown(plain.memory_data(one), "value")
        for one in documents
        if one.key in keys[: query.limit] and (one.value or query.history)
    ]
    more = len(keys) > query.limit
    return {"namespace": name, "values": shown, "next": keys[query.limit - 1] if more else None}


@get("/artifacts", JSON)
async def list_artifacts(ask: Ask) -> JSON:
    """List the artifacts of the store, with the runs that they belong to."""
    found: JSON = await ask.shown(
        {
            "artifacts": [
                {"digest": one.digest, "size": one.size, "names": list(one.names), "runs": list(one.runs)}
                for one in await ask.engine.artifacts.list()
            ]
        }
    )
    return found


#: Bytes of an artifact up to which it is sent: it is read whole.
MOST_ARTIFACT_BYTES = 50_000_000


@get("/artifacts/{digest}", Content, media_type="application/octet-stream")
async def get_artifact(ask: Ask) -> Content:
    """Return the contents of an artifact, as a file."""
    digest, artifacts = ask.path["digest"], ask.engine.artifacts
    found = next((one for one in await artifacts.list() if one.digest == digest), None)
    if found is None:
        raise RunNotFound(f"no artifact {digest[:80]!r}")
    if found.size > MOST_ARTIFACT_BYTES:
        raise RunNotFound(f"artifact {digest} has {found.size:,} bytes; fetch it with keepstep artifacts get")
    data = await ask.engine.call(artifacts.read, Artifact(found.digest, found.size))
    return Content(data, "application/octet-stream", digest[:16])
