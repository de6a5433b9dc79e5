"""Wakes duties after a commit. A wake-up is a hint: a lost one costs a poll interval, nothing else.

NOTIFY inside a transaction is the quickest way to a worker, but it takes a global lock until its COMMIT: eight busy
writers fell from 8,800 to 3,300 commits a second. So a process that writes now and then notifies inside its
transaction, and one that writes a lot after it, for all its writers at once, on a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from duly.clock import monotonic

QUIET_SECONDS = 0.01  # whoever wakes more often than that is busy
GATHER_SECONDS = 0.002  # between two wake-ups of a busy process
NOTIFY = "SELECT pg_notify('duly', channel) FROM unnest($1::text[]) AS channel"


class Poker:
    """What one process sends."""

    def __init__(
        self, connect: Callable[[], Awaitable[Any]], *, is_disconnect: Callable[[BaseException], bool]
    ) -> None:
        self._connect = connect
        self._is_disconnect = is_disconnect
        self._wanted: set[str] = set()
        self._asked_at: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._connection: Any = None

    def is_quiet(self, channel: str) -> bool:
        """Whether the one who asks may notify inside its transaction: nobody has asked for a moment."""
        now = monotonic()
        before = self._asked_at.get(channel, float("-inf"))
        self._asked_at[channel] = now
        return now - before >= QUIET_SECONDS

    def poke(self, channels: Iterable[str]) -> None:
        """Ask for a wake-up; returns at once."""
        wanted = set(channels)
        if not wanted:
            return
        self._wanted |= wanted
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        while self._wanted:
            wanted, self._wanted = self._wanted, set()
            try:
                if self._connection is None or self._connection.is_closed():
                    self._connection = await self._connect()
                    await self._connection.execute("SET synchronous_commit = off")
                await self._connection.execute(NOTIFY, sorted(wanted))
            except Exception as error:
                if not self._is_disconnect(error):
                    raise
                return  # polling finds the work
            await asyncio.sleep(GATHER_SECONDS)

    async def close(self) -> None:
        """Finish what was asked for and hang up."""
        if self._task is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._task, 2)
        if self._connection is not None and not self._connection.is_closed():
            with contextlib.suppress(Exception):
                await self._connection.close(timeout=2)
