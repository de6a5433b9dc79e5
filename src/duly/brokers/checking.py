"""The check that a broker must pass before anything is sent to it or read from it, whenever it first can be asked."""

from __future__ import annotations

import asyncio

from duly.brokers import Source, Transport
from duly.errors import Unavailable

CHECK_SECONDS = 30.0


class BrokerCheck:
    """Asked at the start of a process, and again before each cycle until it has passed once."""

    def __init__(self, broker: Transport | Source) -> None:
        self._broker = broker
        self._has_passed = False

    async def require(self) -> None:
        """Raise ``Refused`` in the broker's words when it would lose something, ``Unavailable`` while it is away."""
        if self._has_passed:
            return
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await self._broker.check()
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{self._broker.name} is away: {type(error).__name__}: {error}") from error
        self._has_passed = True
