"""Two runs side by side, such as a fork and its origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from ...model import Run
from ...views import plain
from ...views.comparison import Aligned, Alike, Comparison, Side, compare, seconds
from ...views.cut import cut
from .table import Look, Shown, page

Seq = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
#: Calls of one page.
ROWS = 200


class Compared(msgspec.Struct, forbid_unknown_fields=True):
    """Two runs, up to a record; `show` selects the calls, and `after` goes on after a record.

    Without `b`, a fork is compared with its origin.
    """

    a: str = ""
    b: str = ""
    at: Seq | None = None
    after: Seq = 0
    show: Literal["different", "all"] = "different"
    page: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1


@page("/compare", query=Compared)
async def show_comparison(look: Look) -> Shown:
    """Show how two runs differ."""
    query = look.query
    a, b = query.a.strip(), query.b.strip()
    left = await _run(look, a) if a else None
    if left is not None and not b and left.origin is not None:
        a, b = left.origin, left.id
        left = await _run(look, a)
    filters = msgspec.structs.asdict(query) | {"a": a, "b": b, "page": None}
    data: dict[str, Any] = {"a": a, "b": b, "at": query.at, "filters": filters, "found": None, "show": query.show}
    if left is None or not b:
        return Shown("compare.html", data)
    found = await compare(look.engine, left, await _run(look, b), query.at, query.after)
    calls = [one for one in found.calls if query.show == "all" or one.alike is not Alike.SAME]
    first = (query.page - 1) * ROWS
    data |= {"found": found, "counts": found.counts, "page": query.page, "pages": -(-len(calls) // ROWS)}
    stored = await look.engine.off_loop(_stored, look, found, calls[first : first + ROWS])
    return Shown("compare.html", data | stored)


def _stored(look: Look, found: Comparison, calls: Sequence[Aligned]) -> dict[str, Any]:
    """Return the stored values that the page shows, which may be large."""
    return {
        "sides": [_side(look, side) for side in (found.left, found.right)],
        "calls": [_call(look, one) for one in calls],
        "values": _values(look, found),
    }


async def _run(look: Look, run_id: str) -> Run:
    return await (await look.engine.get(run_id)).run()


def _side(look: Look, side: Side) -> dict[str, Any]:
    run = side.run
    took = None if run.updated_at is None else (run.updated_at - run.created_at).total_seconds()
    shown: dict[str, Any] = look.clean({"input": side.input, "result": plain.value_of(run.output)})
    is_open = side.locked is None
    return {
        "run": run,
        "took": took,
        "locked": side.locked,
        "input": cut(shown.get("input"), 2000) if is_open else None,
        "result": cut(shown.get("result"), 2000) if is_open and run.output is not None else None,
        "error": look.engine.redaction.redact(f"{run.error.type}: {run.error.message}")
        if run.error and is_open
        else "",
    }


def _call(look: Look, one: Aligned) -> dict[str, Any]:
    sides: list[dict[str, Any] | None] = []
    for record in (one.left, one.right):
        if record is None:
            sides.append(None)
            continue
        record = record if look.may("act") else plain.without_secret(record)  # noqa: PLW2901 - as it is shown
        data = look.clean({"value": plain.value_of(record.value), "error": plain.error_data(record.error)})
        value, left_out = cut(data.get("value"), 2000)
        found = {"seq": record.seq, "outcome": record.outcome.value, "value": value, "left_out": left_out}
        sides.append(
            {**found, "has_value": record.value is not None, "error": data.get("error"), "took": seconds(record)}
        )
    return {"key": one.key, "alike": one.alike, "sides": sides}


def _values(look: Look, found: Comparison) -> dict[str, dict[str, Any]]:
    shown = {}
    for name in ("state", "published"):
        pairs = look.clean(getattr(found, name))
        shown[name] = {key: (cut(old, 5000), cut(new, 5000)) for key, (old, new) in pairs.items()}
    return shown
