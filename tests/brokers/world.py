"""A broker, a database, and the processes between them: what each test of the suite works with."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg

from duly import Database, emit
from duly.brokers import connect
from duly.messages import NewEvent
from duly.operate.consumers import move_consumer
from tests.brokers import shop
from tests.brokers.process import Part
from tests.brokers.servers import Foreign, Kind, Server
from tests.engine.inbox.effects import CREATE_EFFECTS
from tests.support import rows

SECONDS = 90.0
EFFECTS = "SELECT aggregate, n FROM effects WHERE consumer = %(consumer)s ORDER BY id"
LEASE_SECONDS = "4"  # of lanes and of jobs: so long somebody who was killed holds up the others


class World:
    """One test's topic on a broker, its database, and whatever it starts; what was started ends with it."""

    def __init__(self, kind: Kind, server: Server, db: Database, dsn: str, directory: Path) -> None:
        self.kind, self.server, self.db, self.dsn = kind, server, db, dsn
        mark = uuid4().hex[:8]
        self.topic, self.group = f"shop-{mark}", f"duly-{mark}"
        self.url = kind.url(server)
        self._directory = directory
        self._parts: list[Part] = []
        self._strangers: list[Foreign] = []
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    async def prepare(self, *, moved: Sequence[str] = shop.CONSUMERS) -> None:
        """Tables and consumers; those named get their events from the broker."""
        rows(self.dsn, CREATE_EFFECTS)
        rows(self.dsn, shop.CREATE_MENDED)
        await shop.app.prepare(self.db)
        for name in moved:
            async with self.db.transaction() as tx:
                await move_consumer(tx, name, via=self.kind.name, actor="test")

    async def set_up(self) -> None:
        """What ``duly brokers setup`` does, for this test's topic."""
        async with asyncio.timeout(SECONDS):
            await connect.setup(self.url, topics=[self.topic], group=self.group)

    async def close(self) -> None:
        """End everything that still runs."""
        for stranger in self._strangers:
            with contextlib.suppress(Exception):
                await stranger.close()
        for part in self._parts:
            part.kill()
        if self._connection is not None:
            self._connection.close()

    # -- processes -----------------------------------------------------------------------------------------------

    def run(self, *kinds: str, failpoints: str = "", lane_seconds: str = LEASE_SECONDS, **settings: Any) -> Part:
        """Start a process with these duties; a wave may take half of what lanes are leased for."""
        given = {f"DULY_{name.upper()}": str(setting) for name, setting in settings.items()}
        given["LANE_LEASE_SECONDS"] = lane_seconds
        log = self._directory / f"{len(self._parts)}-{'-'.join(kinds)}.log"
        self._parts.append(Part(kinds, self.environment(failpoints) | given, log))
        return self._parts[-1]

    def environment(self, failpoints: str = "") -> dict[str, str]:
        """What a process of this test is told."""
        return {
            **self.kind.environment,
            "DATABASE_URL": self.dsn,
            "DULY_APP": "tests.brokers.shop:app",
            "DULY_ALLOW_UNSAFE_DATABASE": "1",
            "DULY_LOG_FORMAT": "json",
            "DULY_BROKER": self.url,
            "DULY_RECEIVE": self.url,
            "DULY_RECEIVE_TOPICS": self.topic,
            "DULY_RECEIVE_GROUP": self.group,
            "DULY_LEASE_SECONDS": LEASE_SECONDS,
            "DULY_FAILPOINTS": failpoints,
        }

    def said(self) -> str:
        """The last that each process wrote, for whoever reads why a test failed."""
        return "\n".join(f"--- {part.kinds}\n{part.said[-1500:]}" for part in self._parts)

    # -- events --------------------------------------------------------------------------------------------------

    async def emit(self, aggregates: Sequence[str], numbers: Sequence[int], **payload: Any) -> list[UUID]:
        """One transaction for each number, one event in it for each aggregate."""
        ids: list[UUID] = []
        for n in numbers:
            async with self.db.transaction() as tx:
                ids += await emit(tx, *(self.event(aggregate, n, **payload) for aggregate in aggregates))
        return ids

    def event(self, aggregate: str, n: int, *, headers: Mapping[str, str] | None = None, **payload: Any) -> NewEvent:
        """One that is not written yet."""
        return NewEvent("order.changed", self.topic, aggregate, {"n": n, **payload}, dict(headers or {}))

    def stranger(self) -> Foreign:
        """A client of the broker that knows nothing of us."""
        self._strangers.append(self.kind.foreign(self.server))
        return self._strangers[-1]

    # -- facts ---------------------------------------------------------------------------------------------------

    def effects(self, consumer: str = "ledger") -> dict[str, list[int]]:
        """What a consumer did for each aggregate, in order, repetitions too."""
        found: dict[str, list[int]] = {}
        for aggregate, n in self._ask(EFFECTS, {"consumer": consumer}):
            found.setdefault(aggregate, []).append(n)
        return found

    def value(self, query: str, **values: Any) -> Any:
        """One value of the database."""
        return self._ask(query, values)[0][0]

    def _ask(self, query: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """On a connection that is kept, for whoever waits asks often; another one when the database has ended it."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.OperationalError):
                return self._connection.execute(query.encode(), values).fetchall()
            self._connection.close()
        self._connection = psycopg.connect(self.dsn, autocommit=True)
        return self._connection.execute(query.encode(), values).fetchall()

    async def until(self, fact: Callable[[], Any], what: str, *, seconds: float = SECONDS) -> None:
        """Wait for something to become true."""
        ends_at = time.monotonic() + seconds
        while not fact():
            assert time.monotonic() < ends_at, f"{what}: not within {seconds:.0f} s\n{self.said()}"
            await asyncio.sleep(0.05)

    async def until_done(self, aggregates: Sequence[str], numbers: Sequence[int], *, seconds: float = SECONDS) -> None:
        """Until both consumers have handled all of these: each once, the ordered one in order, and nothing is left."""
        expected = {aggregate: list(numbers) for aggregate in aggregates}
        count = len(aggregates) * len(numbers)
        for name in shop.CONSUMERS:
            await self.until(
                lambda name=name: sum(map(len, self.effects(name).values())) >= count,  # type: ignore[misc]  # mypy knows no lambda defaults
                f"{name} has {sum(map(len, self.effects(name).values()))} of {count}",
                seconds=seconds,
            )
        assert self.effects("ledger") == expected, self.said()
        assert {aggregate: sorted(found) for aggregate, found in self.effects("mail").items()} == expected
        await self.until(lambda: self.value("SELECT count(*) FROM duly.outbox") == 0, "the outbox is empty")
        await self.until(lambda: self.value("SELECT count(*) FROM duly.jobs") == 0, "no job is left")
        assert self.value("SELECT count(*) FROM duly.dead_letters") == 0


@contextlib.asynccontextmanager
async def create_world(kind: Kind, server: Server, dsn: str, directory: Path) -> AsyncIterator[World]:
    """A world for one test."""
    db = Database(dsn)
    world = World(kind, server, db, dsn, directory)
    try:
        await world.prepare()
        await world.set_up()
        yield world
    finally:
        await world.close()
        await db.close()
