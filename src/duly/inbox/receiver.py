"""The receiver: what a broker brings is stored and made jobs of in one commit, and acknowledged after it.

Handlers then run as jobs, like those of events that never left PostgreSQL. A crash anywhere brings messages again, and
their rows know them. A database that is away, or any other trouble of the moment, gives the batch back: a good message
is never buried for it. A message that cannot be read is buried at once; one that the database cannot store is found by
halving its batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import structlog
from opentelemetry.trace import SpanKind

from duly.brokers import Message, Source
from duly.brokers.checking import BrokerCheck
from duly.clock import monotonic
from duly.db import Database, atomic, fetch, sqlstate
from duly.duty import Cycle, Duty
from duly.errors import Unavailable
from duly.failpoints import failpoint
from duly.inbox import sql
from duly.inbox.store import Batch, Stored, Unreadable, read_batch, store_batch
from duly.telemetry import MESSAGES_KNOWN, MESSAGES_RECEIVED, MESSAGES_UNREADABLE, SOURCE_LAG, span, tracing

log = structlog.get_logger("duly.receiver")
LAG_SECONDS = 15.0
LAG_PATIENCE_SECONDS = 5.0
SOURCE_SECONDS = 30.0  # any one call to the broker, beyond what it is told to wait
GIVE_BACK_SECONDS = 5.0
_DATA_ERRORS = ("22", "23", "54")  # data, integrity, program limits: what one message can do to a transaction


class CursorMoved(Exception):
    """Another receiver has read the same and was faster."""


class Receiver(Duty):
    """One receiver of one source. Several may run; how they share the work is the source's affair."""

    name = "receiver"

    def __init__(
        self, db: Database, source: Source, *, batch: int | None = None, wait_seconds: float | None = None
    ) -> None:
        super().__init__(db)
        self.source = source
        self.via = source.name
        self.broker_check = BrokerCheck(source)
        self.batch = batch or db.settings.receive_batch
        self.wait_seconds = min(db.settings.poll_seconds, 1.0) if wait_seconds is None else wait_seconds
        self.poll_seconds = min(db.settings.poll_seconds, 1.0)
        self._is_reading = False
        self._positions: dict[str, int] = {}
        self._room = 0  # so many jobs may be made before somebody counts again
        self._asked_lag_at = float("-inf")

    async def cycle(self) -> Cycle:
        """Store at most one batch, and acknowledge it; nothing is read before the broker has passed its check."""
        await self.broker_check.require()
        connection = await self.connection()
        if not self._is_reading:
            await self._resume(connection)
        await self._ask_lag()
        if not await self._has_room(connection):
            return Cycle(0, facts={"paused": True})
        messages = await self._ask(self.source.receive(self.batch, wait_seconds=self.wait_seconds), self.wait_seconds)
        if not messages:
            return Cycle(0, wait_seconds=0.0)
        try:
            failpoint("receiver.received")
            stored = await self._store(connection, messages)
        except CursorMoved:
            await self._give_back(messages)
            return Cycle(0, facts={"lost": True})
        except BaseException:
            await self._give_back(messages)
            raise
        self._count(stored)
        await self._acknowledge(messages)
        return Cycle(len(messages), facts=asdict(stored))

    async def run(self, stop: asyncio.Event) -> None:
        """Repeat the cycle until ``stop``, then leave to others at once what was not acknowledged."""
        try:
            await super().run(stop)
        finally:
            await self._hang_up()

    async def run_once(self) -> Cycle:
        """One cycle, then hang up."""
        try:
            return await super().run_once()
        finally:
            await self._hang_up()

    # -- the broker ----------------------------------------------------------------------------------------------

    async def _resume(self, connection: Any) -> None:
        rows = [] if self.source.keeps_position else await fetch(connection, sql.READ_CURSORS, via=self.source.name)
        self._positions = {row[0]: row[1] for row in rows}
        await self._ask(self.source.resume(dict(self._positions)))
        self._is_reading = True

    async def _acknowledge(self, messages: Sequence[Message]) -> None:
        self._is_reading = False  # should this fail, they come again, and are known
        failpoint("receiver.committed")
        await self._ask(self.source.acknowledge(messages))
        failpoint("receiver.acknowledged")
        self._is_reading = True

    async def _give_back(self, messages: Sequence[Message]) -> None:
        """Whatever becomes of this, the next cycle begins where the database says."""
        self._is_reading = False
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                await self.source.release(messages)
        except Exception as error:  # noqa: BLE001 - the error that brought us here is the one to be told
            log.warning("release_failed", via=self.source.name, error=type(error).__name__)

    async def _ask_lag(self) -> None:
        if monotonic() - self._asked_lag_at < LAG_SECONDS:
            return
        self._asked_lag_at = monotonic()
        with contextlib.suppress(OSError, TimeoutError):  # reading will say so
            async with asyncio.timeout(LAG_PATIENCE_SECONDS):
                lag = await self.source.lag()
            if lag is not None:
                SOURCE_LAG.labels(self.source.name).set(lag)

    async def _ask(self, call: Any, more_seconds: float = 0.0) -> Any:
        """An answer of the broker, in time; or Unavailable. After any error the next cycle begins anew."""
        try:
            async with asyncio.timeout(SOURCE_SECONDS + more_seconds):
                return await call
        except BaseException as error:
            self._is_reading = False
            if isinstance(error, OSError | TimeoutError):
                raise Unavailable(f"{self.source.name} is away: {type(error).__name__}: {error}") from error
            raise

    async def _hang_up(self) -> None:
        self._is_reading = False
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                await self.source.close()
        except Exception as error:  # noqa: BLE001 - we are leaving either way
            log.warning("close_failed", via=self.source.name, error=type(error).__name__)

    # -- the database --------------------------------------------------------------------------------------------

    async def _has_room(self, connection: Any) -> bool:
        """Whether workers keep up: else what waits is better kept by the broker."""
        if self._room < self.batch:
            most = self.db.settings.receive_ahead
            waiting = (await fetch(connection, sql.COUNT_AHEAD, via=self.source.name, limit=most))[0][0]
            self._room = most - waiting
        return self._room > 0

    async def _store(self, connection: Any, messages: Sequence[Message]) -> Stored:
        """In one transaction; where one message makes that impossible, in as many as it takes to find it."""
        batch = read_batch(messages)
        try:
            stored = await self._write(connection, messages, batch)
        except Exception as error:
            if not _is_data_error(error):
                raise
            if len(messages) > 1:
                half = len(messages) // 2
                first = await self._store(connection, messages[:half])
                return first.plus(await self._store(connection, messages[half:]))
            if not batch.events:
                raise
            why = f"the database cannot store it: {type(error).__name__}"
            stored = await self._write(connection, messages, Batch(unreadable=[Unreadable(messages[0], why)]))
        self._trace(batch)
        return stored

    async def _write(self, connection: Any, messages: Sequence[Message], batch: Batch) -> Stored:
        positions = self._reached(messages)
        async with atomic(connection):
            if positions:
                await self._move_cursors(connection, positions)
            stored = await store_batch(connection, self.source.name, batch)
            failpoint("receiver.before_commit")
        self._positions |= positions
        self._room -= stored.jobs
        if stored.jobs:
            self.db.poke("jobs")
        return stored

    def _reached(self, messages: Sequence[Message]) -> dict[str, int]:
        """How far these messages bring each shard, where nobody but us keeps that."""
        reached: dict[str, int] = {}
        for message in messages if not self.source.keeps_position else ():
            if message.offset > self._positions.get(message.shard, -1):
                reached[message.shard] = max(message.offset, reached.get(message.shard, 0))
        return reached

    async def _move_cursors(self, connection: Any, positions: dict[str, int]) -> None:
        shards = sorted(positions)
        moved = await fetch(
            connection, sql.MOVE_CURSORS, via=self.source.name, shards=shards,
            before=[self._positions.get(shard) for shard in shards], positions=[positions[shard] for shard in shards],
        )  # fmt: skip
        if len(moved) != len(shards):
            log.info("cursor_moved", via=self.source.name)
            raise CursorMoved

    def _count(self, stored: Stored) -> None:
        via = self.source.name
        for metric, number in (
            (MESSAGES_RECEIVED, stored.received),
            (MESSAGES_KNOWN, stored.known),
            (MESSAGES_UNREADABLE, stored.unreadable),
        ):
            metric.labels(via).inc(number)
        if stored.unreadable:
            log.error("messages_buried", via=via, count=stored.unreadable)

    def _trace(self, batch: Batch) -> None:
        if not tracing():
            return
        for event, _ in batch.events:
            parent = event.headers.get("traceparent")
            attributes = {"duly.event.id": str(event.id), "duly.via": self.source.name}
            kind = SpanKind.CONSUMER
            with span(f"receive {event.type}", kind=kind, parent=str(parent or "") or None, attributes=attributes):
                pass


def _is_data_error(error: BaseException) -> bool:
    """Whether what was to be written is at fault, and not the moment: what the driver cannot encode is a ValueError."""
    state = sqlstate(error)
    return state.startswith(_DATA_ERRORS) if state is not None else isinstance(error, ValueError)
