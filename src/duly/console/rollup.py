"""Runs by the minute, for the charts: each minute is counted once in a process that somebody looks at, and kept there.

Nothing is written for it, and the worker pays nothing for it: the rows of a minute are found through the index that
history has anyway.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import structlog

from duly.console import sql

if TYPE_CHECKING:
    from duly.console.app import Look

log = structlog.get_logger("duly.console")
MINUTES = 60
CHUNK_MINUTES = 10
NAMES_LIMIT = 1_000
LATE_MINUTES = 1  # a transaction may commit a little after its time: the last minute is counted again
MINUTE = timedelta(minutes=1)


@dataclass
class Minute:
    """What ended in one minute."""

    at: datetime
    done: int = 0
    failed: int = 0
    buried: int = 0
    other: int = 0
    p50: float | None = None
    p95: float | None = None
    names: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All of them."""
        return self.done + self.failed + self.buried + self.other


class Rollup:
    """The last hour; ``refresh`` reads what is missing, and only one at a time does."""

    def __init__(self, reading: Callable[[], AbstractAsyncContextManager[Look]]) -> None:
        self._reading = reading
        self._minutes: OrderedDict[datetime, Minute] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def points(self, now: datetime) -> list[Minute]:
        """The last sixty whole minutes before an instant, oldest first; those not counted yet are left out."""
        last = _floor(now)
        wanted = (last - MINUTE * back for back in range(MINUTES, 0, -1))
        return [self._minutes[at] for at in wanted if at in self._minutes]

    def is_complete(self, now: datetime) -> bool:
        """Whether the whole hour is known."""
        return len(self.points(now)) == MINUTES

    async def refresh(self, *, patience_seconds: float) -> None:
        """Count what is missing, for a while; the rest is counted in the background."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._fill(), name="duly-console-minutes")
        await asyncio.wait({self._task}, timeout=patience_seconds)

    async def close(self) -> None:
        """Stop counting."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _fill(self) -> None:
        for _ in range(MINUTES // CHUNK_MINUTES + 1):
            try:
                async with self._reading() as look:
                    since, until = self._missing(look.now)
                    if since >= until:
                        return
                    await self._count(look, since, until)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - charts are not worth a page; the next look tries again
                log.warning("console_minutes_not_counted", error=type(error).__name__)
                return

    def _missing(self, now: datetime) -> tuple[datetime, datetime]:
        """The newest stretch that is not counted yet, at most ten minutes of it."""
        last = _floor(now)
        wanted = [last - MINUTE * back for back in range(1, MINUTES + 1)]  # the newest first
        lacking = [at for at in wanted if at not in self._minutes]
        if not lacking:
            return last, last
        newest = lacking[0]
        oldest = newest
        for at in lacking[1:CHUNK_MINUTES]:
            if at != oldest - MINUTE:
                break
            oldest = at
        if newest == wanted[0] and oldest > wanted[-1]:
            oldest -= MINUTE * LATE_MINUTES
        return oldest, newest + MINUTE

    async def _count(self, look: Look, since: datetime, until: datetime) -> None:
        counted = {since + MINUTE * step: Minute(since + MINUTE * step) for step in range((until - since) // MINUTE)}
        day = since.replace(hour=0, minute=0)
        rows = await look.rows(sql.COUNT_MINUTES, day=day, since=since, until=until, names_limit=NAMES_LIMIT)
        for at, name, total, done, failed, buried, seconds in rows:
            minute = counted[at]
            if name is not None:
                minute.names[name] = total
                continue
            minute.done, minute.failed, minute.buried = done, failed, buried
            minute.other = total - done - failed - buried
            minute.p50, minute.p95 = seconds
        self._minutes.update(counted)
        for at in sorted(self._minutes)[: max(0, len(self._minutes) - 2 * MINUTES)]:
            del self._minutes[at]


def _floor(now: datetime) -> datetime:
    return now.replace(second=0, microsecond=0)


def series(points: list[Minute]) -> dict[str, list[float | int | None]]:
    """The columns that the charts draw."""
    return {
        "at": [int(point.at.timestamp()) for point in points],
        "done": [point.done + point.other for point in points],
        "failed": [point.failed for point in points],
        "buried": [point.buried for point in points],
        "p50": [_milliseconds(point.p50) for point in points],
        "p95": [_milliseconds(point.p95) for point in points],
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
