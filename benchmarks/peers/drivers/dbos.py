"""DBOS queues: workflows without steps, dequeued in batches by polling."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import sqlalchemy
from dbos import DBOS, DBOSClient, DBOSConfig, EnqueueOptions
from drivers.frame import Driver, Tally, main

COUNT = sqlalchemy.text("SELECT count(*) FROM dbos.workflow_status WHERE status <> 'SUCCESS'")
POOL = 20  # the default


class DbosDriver(Driver):
    """A job is a workflow: its input and its outcome are kept. There is no call that enqueues many."""

    has_bulk = False
    tuned = {  # noqa: RUF012 - never changed
        "noop": {"worker_concurrency": 1_000, "poll": 0.01, "threads": 64},
        "latency": {"worker_concurrency": 100, "poll": 0.001, "threads": 64},
    }

    def launch(self) -> None:
        """Start DBOS in this process; the queue belongs to the database."""
        config: DBOSConfig = {
            "name": "peer",
            "system_database_url": self.dsn,
            "application_version": "1",
            "executor_id": "one",
            "log_level": "WARNING",
            "sys_db_pool_size": POOL,
            "max_executor_threads": self.settings.get("threads", 64),
        }
        DBOS(config=config)
        DBOS.launch()

    async def install(self) -> None:
        self.engine = sqlalchemy.create_engine(self.dsn.replace("postgresql://", "postgresql+psycopg://"))
        self.launch()
        DBOS.destroy()

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[None]:
        self.client = DBOSClient(system_database_url=self.dsn, system_database_pool_size=1)
        self.options: EnqueueOptions = {"workflow_name": "noop", "queue_name": "noop", "app_version": "1"}
        yield
        self.client.destroy()

    async def enqueue_one(self, number: int) -> None:
        self.client.enqueue(self.options, number)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        with self.engine.begin() as connection:
            for number in numbers:
                self.client.enqueue_in_transaction(connection, self.options, number)

    async def analyze(self) -> None:
        with self.engine.connect() as connection:
            connection.execute(sqlalchemy.text("ANALYZE"))
            connection.commit()

    @asynccontextmanager
    async def worker(self, tally: Tally) -> AsyncIterator[None]:
        self.engine = sqlalchemy.create_engine(self.dsn.replace("postgresql://", "postgresql+psycopg://"))

        @DBOS.workflow(name="noop")
        def noop(number: int) -> None:
            tally.mark(number)

        self.launch()
        await DBOS.register_queue_async(
            "noop",
            worker_concurrency=self.settings["worker_concurrency"],
            polling_interval_sec=self.settings["poll"],
        )
        yield

    async def remaining(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(COUNT).scalar_one())


if __name__ == "__main__":
    main(DbosDriver)
