"""PgQueuer: asyncpg, large dequeue batches, the status buffer of the same size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
from drivers.frame import Driver, Tally, main
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.queries import Queries


class PgQueuerDriver(Driver):
    """Its queue empties: a finished job leaves the queue table and stays as a row of its log table."""

    tuned = {  # noqa: RUF012 - never changed
        "noop": {"batch_size": 1_000},
        "enqueue_bulk": {"batch": 1_000},
        "latency": {"batch_size": 1},
    }

    async def install(self) -> None:
        connection = await asyncpg.connect(self.dsn)
        await Queries.from_asyncpg_connection(connection).install()
        await connection.close()

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[None]:
        self.connection = await asyncpg.connect(self.dsn)
        self.queries = Queries.from_asyncpg_connection(self.connection)
        yield
        await self.connection.close()

    async def enqueue_one(self, number: int) -> None:
        await self.queries.enqueue("noop", str(number).encode())

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        await self.queries.enqueue(
            ["noop"] * len(numbers), [str(number).encode() for number in numbers], [0] * len(numbers)
        )

    async def analyze(self) -> None:
        await self.connection.execute("ANALYZE")

    @asynccontextmanager
    async def worker(self, tally: Tally) -> AsyncIterator[None]:
        self.connection = await asyncpg.connect(self.dsn)
        async with asyncpg.create_pool(self.dsn, min_size=3, max_size=5) as pool:
            app = PgQueuer.from_asyncpg_pool(pool)

            @app.entrypoint("noop")
            async def noop(job: Job) -> None:
                tally.mark(int(job.payload or b"0"))

            task = asyncio.create_task(app.qm.run(batch_size=self.settings["batch_size"]))
            yield
            app.shutdown.set()
            await task

    async def remaining(self) -> int:
        return int(await self.connection.fetchval("SELECT count(*) FROM pgqueuer"))


if __name__ == "__main__":
    main(PgQueuerDriver)
