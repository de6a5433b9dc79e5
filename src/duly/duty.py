"""What every background duty has in common: one bounded cycle, a loop around it, and a health that people can read."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass, field
from typing import Any

import structlog

from duly.clock import monotonic
from duly.db import Database, is_disconnect
from duly.errors import Refused
from duly.ids import uuid7
from duly.telemetry import DUTY_UP
from duly.wakeup import Wakeup, wait_for_any

log = structlog.get_logger("duly.duty")
OUTAGE_BACKOFF_SECONDS = (0.1, 5.0)


@dataclass
class Health:
    """Whether a duty does its work, and since when not."""

    up: bool = True
    detail: str = "starting"
    since: float = field(default_factory=monotonic)

    def set(self, up: bool, detail: str) -> None:
        """Change it; ``since`` moves only when up turns to down or back."""
        if up != self.up:
            self.since = monotonic()
        self.up, self.detail = up, detail


@dataclass(frozen=True)
class Cycle:
    """What one cycle did, and how long the next may wait (None: the poll interval)."""

    done: int = 0
    wait_seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Duty:
    """A named loop. Subclasses implement ``cycle``; ``run_once`` is one cycle, ``run`` repeats it until stopped.

    A database that goes away pauses the loop and is retried with a bounded backoff; the process stays up.
    """

    name = "duty"
    channel = ""
    via = ""  # the broker it reads from, if it does
    poll_seconds = 1.0
    deaf_poll_seconds = 0.1  # while no wake-up can reach us

    def __init__(self, db: Database, *, wakeup: Wakeup | None = None) -> None:
        self.db = db
        self.wakeup = wakeup
        self.health = Health()
        self.identity = f"{socket.gethostname()}:{os.getpid()}:{self.name}:{uuid7().hex[-6:]}"
        self._woken = wakeup.subscribe(self.channel) if wakeup and self.channel else asyncio.Event()
        self._connection: Any = None

    async def cycle(self) -> Cycle:
        """One bounded piece of work."""
        raise TypeError("a duty implements cycle()")

    async def run_once(self) -> Cycle:
        """One cycle, then hang up. Errors reach the caller."""
        try:
            return await self.cycle()
        finally:
            await self.close()

    async def run(self, stop: asyncio.Event) -> None:
        """Repeat the cycle until ``stop``; heal from outages."""
        delay = OUTAGE_BACKOFF_SECONDS[0]
        try:
            while not stop.is_set():
                self._woken.clear()
                try:
                    result = await self.cycle()
                except Exception as error:
                    if isinstance(error, Refused):  # its sentence says what to do; where the code is, helps nobody
                        log.error("duty_refused", duty=self.name, reason=str(error))
                    elif not is_disconnect(error):
                        log.exception("duty_failed", duty=self.name)
                    self._went_down(error)
                    await self.close()
                    await wait_for_any(delay, stop)
                    delay = min(delay * 2, OUTAGE_BACKOFF_SECONDS[1])
                    continue
                delay = OUTAGE_BACKOFF_SECONDS[0]
                self._came_up()
                if not result.done:
                    await wait_for_any(self._pause(result), stop, self._woken)
        finally:
            await self.close()

    async def connection(self) -> Any:
        """This duty's own asyncpg connection, opened when needed."""
        if self._connection is None or self._connection.is_closed():
            self._connection = await self.db.connect(application=f"duly-{self.name}")
        return self._connection

    async def close(self) -> None:
        """Drop the connection; the next cycle opens another."""
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            try:
                await connection.close(timeout=2)
            except Exception:  # noqa: BLE001 - whatever is wrong with it, it is gone now
                connection.terminate()

    def _pause(self, result: Cycle) -> float:
        deaf = self.wakeup is None or not self.wakeup.listening
        longest = self.deaf_poll_seconds if deaf and self.channel else self.poll_seconds
        return longest if result.wait_seconds is None else max(0.0, min(longest, result.wait_seconds))

    def _went_down(self, error: BaseException) -> None:
        if self.health.up or self.health.detail == "starting":
            log.error("duty_down", duty=self.name, error=type(error).__name__)
        self.health.set(False, f"{type(error).__name__}: {error}"[:300])
        DUTY_UP.labels(self.name).set(0)

    def _came_up(self) -> None:
        if not self.health.up:
            log.info("duty_up", duty=self.name)
        self.health.set(True, "working")
        DUTY_UP.labels(self.name).set(1)
