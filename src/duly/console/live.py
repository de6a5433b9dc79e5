"""Live numbers: one reader for all viewers of a process, and a bounded stream of server-sent events for each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import structlog

from duly.console.overview import read_pulse
from duly.console.rollup import series
from duly.console.sessions import find_alive
from duly.errors import Unavailable

if TYPE_CHECKING:
    from duly.console.app import Console

log = structlog.get_logger("duly.console")
TICK_SECONDS = 2.0
TICKS = 300  # ten minutes; then the browser connects anew
STREAMS_LIMIT = 100
OWN_STREAMS_LIMIT = 20  # of one session: many tabs, and nobody takes everybody's
RETRY_MILLISECONDS = 3_000


class Live:
    """Reads every two seconds while somebody looks; the cost does not grow with the number of people."""

    def __init__(self, console: Console, stop: asyncio.Event, *, tick_seconds: float = TICK_SECONDS) -> None:
        self._console = console
        self._stop = stop
        self.tick_seconds = tick_seconds
        self._viewers: dict[int, bytes] = {}
        self._next_viewer = 0
        self._reader: asyncio.Task[None] | None = None
        self._tick = asyncio.Event()  # replaced at each tick, so that everybody who waits for it goes on
        self._message = ""
        self._alive: frozenset[bytes] = frozenset()

    @property
    def viewers(self) -> int:
        """How many look."""
        return len(self._viewers)

    def check_room(self, id_hash: bytes) -> None:
        """Refuse one more than there is room for, in all or for one session."""
        own = sum(viewer == id_hash for viewer in self._viewers.values())
        if len(self._viewers) >= STREAMS_LIMIT or own >= OWN_STREAMS_LIMIT or self._stop.is_set():
            raise Unavailable("too many live pages are open; the numbers are right each time the page is loaded")

    async def stream(self, id_hash: bytes) -> AsyncIterator[bytes]:
        """The events for one viewer, until the session or ten minutes end."""
        viewer, self._next_viewer = self._next_viewer, self._next_viewer + 1
        self._viewers[viewer] = id_hash
        try:
            yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
            for _ in range(TICKS):
                tick = self._start()
                if not await self._wait(tick) or id_hash not in self._alive:
                    return
                if self._message:
                    yield self._message.encode()
        finally:
            del self._viewers[viewer]

    async def close(self) -> None:
        """Stop reading, and let everybody go."""
        self._stop.set()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})

    def _start(self) -> asyncio.Event:
        if self._reader is None or self._reader.done():
            self._tick = asyncio.Event()
            self._reader = asyncio.create_task(self._read(), name="duly-console-live")
        return self._tick

    async def _wait(self, tick: asyncio.Event) -> bool:
        """Whether the next tick came; not when the process stops, or nothing is heard of the reader."""
        waiting = [asyncio.ensure_future(event.wait()) for event in (tick, self._stop)]
        try:
            await asyncio.wait(waiting, timeout=self.tick_seconds + 15, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        return tick.is_set() and not self._stop.is_set()

    async def _read(self) -> None:
        """Until nobody looks any more."""
        while self._viewers:
            try:
                await self._read_once()
            except Exception as error:  # noqa: BLE001 - a live page outlives an outage of the database
                log.warning("console_live_not_read", error=type(error).__name__)
                self._message = _event("away", self._console.fragment("live_away.html"))
                self._alive = frozenset(self._viewers.values())
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.tick_seconds):
                    await self._stop.wait()
                    return

    async def _read_once(self) -> None:
        console = self._console
        self._alive = await find_alive(console.db, list(set(self._viewers.values())))
        await console.rollup.refresh(patience_seconds=0.5)
        async with console.reading() as look:
            pulse = await read_pulse(look)
        points = console.rollup.points(pulse.now)
        parts = {
            "pulse": console.fragment("live_pulse.html", pulse=pulse, now=pulse.now),
            "attention": console.fragment("live_attention.html", pulse=pulse, now=pulse.now),
            "queue": console.fragment("live_queue.html", pulse=pulse, now=pulse.now),
            "chart": console.fragment("live_chart.html", series=series(points)),
        }
        self._message = "".join(_event(name, html) for name, html in parts.items())


def _event(name: str, html: str) -> str:
    lines = "".join(f"data: {line}\n" for line in html.splitlines() if line.strip())
    return f"event: {name}\n{lines}\n"
