"""One thread for a client that blocks: its calls come one after the other, and whoever awaits them may go away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

log = structlog.get_logger("duly.kafka")
T = TypeVar("T")


class OneThread:
    """It begins with the first call, and again with a call after its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns; it goes on if nobody waits for it any more, so it has a bound of its own."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def end(self, last: Callable[[], None], *, seconds: float) -> None:
        """Call this last, and wait no longer than this for it."""
        try:
            async with asyncio.timeout(seconds):
                await self.call(last)
        except TimeoutError:
            log.warning("kafka_not_closed", thread=self._name)
        finally:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None
