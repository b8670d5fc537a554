"""The identities of a run's trace, derived from the run, so that every process gives its spans the same ids."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from hashlib import blake2b

#: The form of a W3C `traceparent` of version 00, with a trace and a span that are not all zeros.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")

#: Between the parts of what is hashed. No id, key or time contains it.
_BETWEEN = "\0"


def trace_id(run: str, created_at: datetime) -> str:
    """Return the id of a run's trace, as 32 hexadecimal digits. A later run with the same id has another trace."""
    text = f"{run}{_BETWEEN}{created_at.astimezone(UTC).isoformat()}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16, person=b"keepstep trace").hexdigest()


def span_id(trace: str, generation: int = 0, step: str = "", attempt: int = 0) -> str:
    """Return the id of the span of a run, of one of its steps, or of an attempt, as 16 hexadecimal digits.

    A retry or a rewind by a person begins another generation, in which steps and attempts have other spans.
    """
    text = _BETWEEN.join((trace, str(generation), step, str(attempt))) if step else trace
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8, person=b"keepstep span").hexdigest()


def traceparent(trace: str, span: str, *, sampled: bool) -> str:
    """Return the W3C `traceparent` of a span."""
    return f"00-{trace}-{span}-{'01' if sampled else '00'}"


def parsed_traceparent(text: str | None) -> tuple[str, str, bool] | None:
    """Return the trace, the span and the sampled flag of a `traceparent`; None for any other text."""
    found = _TRACEPARENT.fullmatch(text or "")
    return None if found is None else (found[1], found[2], bool(int(found[3], 16) & 1))
