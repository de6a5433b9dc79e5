"""Chancy: jobs as coroutines in the worker's own event loop, fetched eagerly, updates flushed often."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import psycopg
from chancy import Chancy, Queue, Worker, job
from drivers.frame import Driver, Tally, main

TALLY: list[Tally] = []


@job(queue="default")
async def noop(*, number: int) -> None:
    """The job: found by its name, so it stands in the module."""
    TALLY[0].mark(number)


class ChancyDriver(Driver):
    """It keeps finished jobs, and writes what became of jobs in batches, some time after they ran."""

    tuned = {  # noqa: RUF012 - never changed
        "noop": {"concurrency": 1_000, "flush": 0.1, "eager": True},
        "enqueue_bulk": {"batch": 1_000},
        "latency": {"concurrency": 100, "flush": 0.1, "eager": False},
    }

    def application(self, pool: int) -> Chancy:
        """The application, quiet, with its default plugins."""
        log = logging.getLogger("chancy")
        log.setLevel(logging.WARNING)
        return Chancy(self.dsn, min_connection_pool_size=pool, max_connection_pool_size=pool, log=log)

    async def install(self) -> None:
        async with self.application(1) as chancy:
            await chancy.migrate()
            await chancy.declare(
                Queue(
                    "default",
                    executor=Chancy.Executor.Async,
                    concurrency=self.settings.get("concurrency"),
                    eager_polling=self.settings.get("eager", False),
                )
            )

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[None]:
        self.connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        async with self.application(1) as self.chancy:
            yield
        await self.connection.close()

    async def enqueue_one(self, number: int) -> None:
        await self.chancy.push(noop.job.with_kwargs(number=number))

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        jobs = [noop.job.with_kwargs(number=number) for number in numbers]
        async for _ in self.chancy.push_many(jobs, batch_size=len(jobs)):
            pass

    async def analyze(self) -> None:
        await self.connection.execute("ANALYZE")

    @asynccontextmanager
    async def worker(self, tally: Tally) -> AsyncIterator[None]:
        TALLY.append(tally)
        self.connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        async with self.application(10) as chancy:
            worker = Worker(chancy, register_signal_handlers=False)
            worker.send_outgoing_interval = self.settings["flush"]
            async with worker:
                yield

    async def remaining(self) -> int:
        cursor = await self.connection.execute("SELECT count(*) FROM chancy_jobs WHERE state <> 'succeeded'")
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])


if __name__ == "__main__":
    main(ChancyDriver)
