"""Oban for Python: one queue with a high limit, on psycopg and uvloop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import psycopg
from drivers.frame import Driver, Tally, main
from oban import Oban, worker
from oban.job import Job
from oban.schema import install

TALLY: list[Tally] = []


@worker(queue="default")
class Noop:
    """The job: found by its name, so it stands in the module."""

    async def process(self, job: Job) -> None:
        """Start, and be done."""
        TALLY[0].mark(job.args["number"])


class ObanDriver(Driver):
    """It keeps finished jobs until they are pruned; many are inserted or acknowledged row by row in one transaction."""

    tuned = {  # noqa: RUF012 - never changed
        "noop": {"limit": 1_000, "pool": 10},
        "enqueue_bulk": {"batch": 1_000},
        "latency": {"limit": 50, "pool": 10},
    }

    async def install(self) -> None:
        pool = await Oban.create_pool(self.dsn, min_size=1, max_size=1)
        await install(pool)
        await pool.close()

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[None]:
        self.connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        pool = await Oban.create_pool(self.dsn, min_size=1, max_size=1)
        self.oban = Oban(pool=pool)
        yield
        await pool.close()
        await self.connection.close()

    async def enqueue_one(self, number: int) -> None:
        await self.oban.enqueue(Noop.new({"number": number}))

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        await self.oban.enqueue_many([Noop.new({"number": number}) for number in numbers])

    async def analyze(self) -> None:
        await self.connection.execute("ANALYZE")

    @asynccontextmanager
    async def worker(self, tally: Tally) -> AsyncIterator[None]:
        TALLY.append(tally)
        self.connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        size = self.settings["pool"]
        pool = await Oban.create_pool(self.dsn, min_size=size, max_size=size)
        async with Oban(pool=pool, queues={"default": self.settings["limit"]}):
            yield
        await pool.close()

    async def remaining(self) -> int:
        cursor = await self.connection.execute("SELECT count(*) FROM oban_jobs WHERE state <> 'completed'")
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])


if __name__ == "__main__":
    main(ObanDriver)
