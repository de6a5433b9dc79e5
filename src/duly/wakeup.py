"""Listens for wake-ups on one connection per process. They are a hint; polling is the truth."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import structlog

from duly.db import Database, is_disconnect
from duly.failpoints import failpoint

log = structlog.get_logger("duly.wakeup")
CHANNEL = "duly"
CHECK_SECONDS = 10.0
RECONNECT_SECONDS = (0.1, 5.0)


class Wakeup:
    """Turns NOTIFY into events that duties wait for; re-subscribes by itself, and wakes everybody when it did."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._events: dict[str, list[asyncio.Event]] = {}
        self.listening = False

    def subscribe(self, channel: str) -> asyncio.Event:
        """An event that is set at each wake-up of ``jobs``, ``outbox`` or ``schedules``."""
        event = asyncio.Event()
        self._events.setdefault(channel, []).append(event)
        return event

    def wake(self, channel: str) -> None:
        """Wake this process's own duties without the detour through the database."""
        for event in self._events.get(channel, ()):
            event.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Listen until told to stop."""
        delay = RECONNECT_SECONDS[0]
        while not stop.is_set():
            try:
                await self._listen(stop)
                delay = RECONNECT_SECONDS[0]
            except Exception as error:
                if not is_disconnect(error):
                    raise
                if self.listening:
                    log.warning("wakeup_lost", error=type(error).__name__)
                self.listening = False
                await wait_for_any(delay, stop)
                delay = min(delay * 2, RECONNECT_SECONDS[1])

    async def _listen(self, stop: asyncio.Event) -> None:
        connection = await self._db.connect(application="duly-listen")
        gone = asyncio.Event()
        try:
            connection.add_termination_listener(lambda *_: gone.set())
            await connection.add_listener(CHANNEL, self._received)
            failpoint("wakeup.subscribed")
            self.listening = True
            for channel in self._events:  # whatever was committed while we were deaf
                self.wake(channel)
            while not stop.is_set() and not gone.is_set():
                await wait_for_any(CHECK_SECONDS, stop, gone)
                if not gone.is_set() and not stop.is_set():
                    await connection.execute("SELECT 1")  # a half-open connection is found out here
            if gone.is_set() and not stop.is_set():
                raise ConnectionResetError("the listening connection was closed")
        finally:
            with contextlib.suppress(Exception):
                await connection.close(timeout=2)

    def _received(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        self.wake(payload)


async def wait_for_any(timeout_seconds: float, *events: asyncio.Event) -> bool:
    """Wait until one of the events is set, or the time is over; whether one was set."""
    if any(event.is_set() for event in events):
        return True
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiters, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for waiter in waiters:
            waiter.cancel()
