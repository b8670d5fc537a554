"""Results of steps that serve equal calls of other runs: looked up before an attempt, and kept after a success."""

from __future__ import annotations

import logging
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import DocumentConflict
from ..ports import instant
from ..values import VALUES

if TYPE_CHECKING:
    from ..policies.cache import Cache
    from .attempt import Attempt

log = logging.getLogger("keepstep")

#: Collection of the kept results.
COLLECTION = "cache"


class Kept(msgspec.Struct):
    """A kept result, as stored: the run and the step that made it, and its value."""

    run: str
    step: str
    value: msgspec.Raw


class Found(msgspec.Struct):
    """A result that serves a call: its value, and the run that made it."""

    value: Any
    run: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Kept).decode


async def recall(attempt: Attempt, cache: Cache) -> Found | None:
    """Return the kept result of an equal call, or None. An error is logged, and the body is called."""
    call = attempt.call
    try:
        found = await attempt.run.host.documents.get(COLLECTION, _key(attempt, cache))
        if found is None:
            return None
        kept = _decode(found.value)
        return Found(call.fitted(call.step.values.decode(bytes(kept.value), attempt.key)), kept.run)
    except Exception as error:  # noqa: BLE001 - a function of the program may raise anything; the body is called then
        log.warning("the cached result of step %s cannot be used: %s", attempt.key, error)
        return None


async def keep(attempt: Attempt, cache: Cache, data: bytes) -> None:
    """Keep a result for equal calls, unless there is one of use. It belongs to its run, and is removed with it."""
    host, run = attempt.run.host, attempt.run
    until = cache.expires_at(host.clock.now())
    try:
        name = COLLECTION, _key(attempt, cache), _encode(Kept(run.id, attempt.key, msgspec.Raw(data)))
        options: dict[str, Any] = {"owner": run.id, "expires_at": None if until is None else instant(until)}
        try:
            await host.documents.put(*name, expect=0, **options)
        except DocumentConflict:  # another run was first, or what is there is damaged or of a class that is gone
            if await recall(attempt, cache) is None:
                await host.documents.put(*name, **options)
    except Exception as error:  # noqa: BLE001 - as above; the result itself is good
        log.warning("the result of step %s is not cached: %s", attempt.key, error)


def _key(attempt: Attempt, cache: Cache) -> str:
    call = attempt.call
    identity = cache.identity(call.args, call.kwargs)
    digest = call.digest if identity is None else VALUES.for_values(identity).digest(identity)
    return f"{call.step.name}/{sha256(digest.encode()).hexdigest()[:32]}"
