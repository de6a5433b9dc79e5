"""Procrastinate: psycopg with its C part, many concurrent async jobs over one pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import procrastinate
import psycopg
from drivers.frame import Driver, Tally, main


class ProcrastinateDriver(Driver):
    """It fetches and finishes jobs one by one, so connections in parallel are what makes it faster."""

    tuned = {  # noqa: RUF012 - never changed
        "noop": {"concurrency": 10, "pool": 5},
        "enqueue_bulk": {"batch": 1_000},
        "latency": {"concurrency": 10, "pool": 5},
    }

    def application(self, pool: int) -> procrastinate.App:
        """The application, its pool opened at full size."""
        connector = procrastinate.PsycopgConnector(conninfo=self.dsn, min_size=pool, max_size=pool)
        return procrastinate.App(connector=connector)

    async def install(self) -> None:
        async with (app := self.application(1)).open_async():
            await app.schema_manager.apply_schema_async()

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[None]:
        self.connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        async with (app := self.application(1)).open_async():
            self.deferrer = app.configure_task("noop")
            yield
        await self.connection.close()

    async def enqueue_one(self, number: int) -> None:
        await self.deferrer.defer_async(number=number)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        await self.deferrer.batch_defer_async(*({"number": number} for number in numbers))

    async def analyze(self) -> None:
        await self.connection.execute("ANALYZE")

    @asynccontextmanager
    async def worker(self, tally: Tally) -> AsyncIterator[None]:
        logging.getLogger("procrastinate").setLevel(logging.WARNING)
        self.connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        app = self.application(self.settings["pool"])

        @app.task(name="noop")
        async def noop(number: int) -> None:
            tally.mark(number)

        async with app.open_async():
            task = asyncio.create_task(
                app.run_worker_async(
                    concurrency=self.settings["concurrency"],
                    install_signal_handlers=False,
                )
            )
            yield
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def remaining(self) -> int:
        cursor = await self.connection.execute(
            "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
        )
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])


if __name__ == "__main__":
    main(ProcrastinateDriver)
