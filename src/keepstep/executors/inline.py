"""The executor of async bodies, on the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from ..ports import BodyTimedOut, Work


class InlineExecutor:
    """Awaits each body in the task of its step."""

    is_far = adopts = False

    async def execute(self, work: Work, seconds: float | None) -> Any:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await work.call_body()
        except TimeoutError:
            if limit.expired():
                raise BodyTimedOut(seconds or 0.0) from None
            raise
