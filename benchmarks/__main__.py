"""duly beside hand-written SQL that writes the same rows, in one run on one PostgreSQL: ratios count."""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
import structlog
import uvloop

from duly import Database, Event, NewEvent, NewJob, Relay, Tx, Worker, emit, schedule, schedule_many
from duly.app import Duly
from duly.clock import monotonic
from duly.jobs import sql
from duly.jobs.handlers import JobContext
from duly.testing import TestServer
from duly.wakeup import Wakeup

ROUNDS = 3
JOBS = 20_000
TX_JOBS = 2_000
EVENTS = 10_000
BATCH = 500
LATENCY_JOBS = 150

Figure = Callable[[Database], Awaitable[float]]


def application() -> Duly:
    """Handlers that do nothing."""
    app = Duly()

    @app.job("noop")
    async def noop(ctx: JobContext) -> None: ...

    @app.job("noop-tx")
    async def noop_tx(ctx: JobContext, tx: Tx) -> None: ...

    @app.job("noop-group", group=100)
    async def noop_group(ctx: JobContext, tx: Tx) -> None: ...

    @app.consumer("each", on="bench.each")
    async def each(event: Event, tx: Tx) -> None: ...

    @app.consumer("many", on="bench.many", batch=200)
    async def many(events: list[Event], tx: Tx) -> None: ...

    @app.consumer("in-order", on="bench.ordered", ordered=True)
    async def in_order(event: Event, tx: Tx) -> None: ...

    return app


APP = application()


async def fill(db: Database, name: str, count: int) -> None:
    """Put jobs into the queue."""
    for _ in range(0, count, 5_000):
        async with db.transaction() as tx:
            await schedule_many(tx, [NewJob(name)] * min(5_000, count))


async def drain(db: Database, count: int, *, concurrency: int = 10) -> float:
    """Jobs a second until ``count`` are done."""
    worker = Worker(db, APP.handlers, concurrency=concurrency)
    stop = asyncio.Event()
    began = monotonic()
    task = asyncio.create_task(worker.run(stop))
    while worker.counts.get("done", 0) < count:
        await asyncio.sleep(0.005)
    rate = count / (monotonic() - began)
    stop.set()
    await task
    return rate


RAW_SETTLE = """
WITH gone AS (DELETE FROM duly.jobs WHERE id = ANY($1) AND lease_token = $2 RETURNING *)
INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded,
    outcome, retry_count, worker, lease_token, correlation_id)
SELECT gen_random_uuid(), id, name, entity_id, source, now(), now(), true, 'done', 0, 'raw', lease_token, correlation_id
FROM gone
"""


async def raw_loop(db: Database) -> float:
    """The same claim and the same rows written, by a bare asyncpg loop without handlers."""
    await fill(db, "noop", JOBS)
    connection = await db.connect()
    done, began = 0, monotonic()
    values = {"names": ["noop"], "limit": BATCH, "worker": "raw", "lease_seconds": 300.0}
    while done < JOBS:
        rows = await connection.fetch(sql.CLAIM_JOBS.numbered, *sql.CLAIM_JOBS.args(values))
        await connection.execute(RAW_SETTLE, [row["id"] for row in rows], rows[0]["lease_token"])
        done += len(rows)
    rate = done / (monotonic() - began)
    await connection.close()
    return rate


async def noop_jobs(db: Database) -> float:
    """No-op handlers without a transaction, one process."""
    await fill(db, "noop", JOBS)
    return await drain(db, JOBS)


async def tx_jobs(db: Database) -> float:
    """A transaction each: writes and completion in one commit."""
    await fill(db, "noop-tx", TX_JOBS)
    return await drain(db, TX_JOBS)


async def group_jobs(db: Database) -> float:
    """A hundred jobs in a transaction."""
    await fill(db, "noop-group", JOBS)
    return await drain(db, JOBS)


async def raw_tx(db: Database) -> float:
    """One commit a job by hand: 10 connections, each BEGIN, the settle statement, COMMIT."""
    await fill(db, "noop", TX_JOBS)
    connection = await db.connect()
    values = {"names": ["noop"], "limit": TX_JOBS, "worker": "raw", "lease_seconds": 300.0}
    rows = await connection.fetch(sql.CLAIM_JOBS.numbered, *sql.CLAIM_JOBS.args(values))
    await connection.close()
    queue = [(row["id"], row["lease_token"]) for row in rows]
    connections = [await db.connect() for _ in range(10)]

    async def one(connection: Any) -> None:
        while queue:
            job, token = queue.pop()
            async with connection.transaction():
                await connection.execute(RAW_SETTLE, [job], token)

    began = monotonic()
    await asyncio.gather(*(one(connection) for connection in connections))
    rate = TX_JOBS / (monotonic() - began)
    await asyncio.gather(*(connection.close() for connection in connections))
    return rate


async def enqueue_bulk(db: Database) -> float:
    """Bulk enqueue, 5,000 jobs a statement."""
    began = monotonic()
    await fill(db, "noop", JOBS)
    rate = JOBS / (monotonic() - began)
    await truncate(db)
    return rate


async def copy_bulk(db: Database) -> float:
    """The same rows by COPY from the same driver."""
    connection = await db.connect()
    now = await connection.fetchval("SELECT now()")
    columns = ["name", "run_at", "due_at", "created_at", "correlation_id"]
    correlation = await connection.fetchval("SELECT gen_random_uuid()")
    began = monotonic()
    for _ in range(0, JOBS, 5_000):
        records = [("noop", now, now, now, correlation)] * 5_000
        await connection.copy_records_to_table("jobs", schema_name="duly", records=records, columns=columns)
    rate = JOBS / (monotonic() - began)
    await connection.close()
    await truncate(db)
    return rate


async def truncate(db: Database) -> None:
    """Empty the queue."""
    connection = await db.connect()
    await connection.execute("SET session_replication_role = replica")  # history refuses it otherwise
    await connection.execute("TRUNCATE duly.jobs, duly.executions, duly.outbox, duly.events, duly.processed_events")
    await connection.close()


async def emit_events(db: Database, topic: str, aggregates: int) -> None:
    """Fill the outbox."""
    for start in range(0, EVENTS, 1_000):
        async with db.transaction() as tx:
            await emit(tx, *(NewEvent("bench.event", topic, str(i % aggregates)) for i in range(start, start + 1_000)))


async def relay_all(db: Database) -> float:
    """Events a second from the outbox to the consumers' queue."""
    relay = Relay(db, batch=BATCH)
    done, began = 0, monotonic()
    while done < EVENTS:
        done += (await relay.cycle()).facts["published"]
    rate = EVENTS / (monotonic() - began)
    await relay.close()
    return rate


async def relay_rate(db: Database) -> float:
    """The relay alone, one consumer."""
    await emit_events(db, "bench.each", 1_000)
    rate = await relay_all(db)
    await truncate(db)
    return rate


async def consumers(db: Database, topic: str, count: int) -> float:
    """Consumed events a second, relayed before."""
    await emit_events(db, topic, 1_000)
    await relay_all(db)
    rate = await drain(db, count)
    await truncate(db)
    return rate


async def batch_consumer(db: Database) -> float:
    """Batches of 200 events, one commit each."""
    return await consumers(db, "bench.many", EVENTS)


async def ordered_consumer(db: Database) -> float:
    """One commit an event, order kept within 1,000 aggregates."""
    return await consumers(db, "bench.ordered", EVENTS)


async def latency(db: Database) -> list[float]:
    """Milliseconds from COMMIT to the handler's start, at 50 jobs a second."""
    started: dict[str, float] = {}
    app = Duly()

    @app.job("tick")
    async def tick(ctx: JobContext) -> None:
        started[str(ctx.entity_id)] = monotonic()

    wakeup, stop = Wakeup(db), asyncio.Event()
    worker = Worker(db, app.handlers, wakeup=wakeup)
    tasks = [asyncio.create_task(wakeup.run(stop)), asyncio.create_task(worker.run(stop))]
    await asyncio.sleep(1)
    committed = {}
    for number in range(LATENCY_JOBS):
        async with db.transaction() as tx:
            await schedule(tx, "tick", str(number))
        committed[str(number)] = monotonic()
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    stop.set()
    await asyncio.gather(*tasks)
    return sorted((started[key] - committed[key]) * 1000 for key in committed)


FIGURES: list[tuple[str, Figure, Figure | None]] = [
    ("no-op jobs, no transaction, one process", noop_jobs, raw_loop),
    ("no-op jobs, one commit each", tx_jobs, raw_tx),
    ("no-op jobs, a hundred in a commit", group_jobs, raw_loop),
    ("bulk enqueue", enqueue_bulk, copy_bulk),
    ("relay to one consumer's queue", relay_rate, None),
    ("batch consumer (200 events a commit)", batch_consumer, None),
    ("ordered consumer (one commit an event)", ordered_consumer, None),
]


async def measure(dsn: str) -> None:
    """Print the table."""
    db = Database(dsn)
    await APP.prepare(db)
    print(f"{'what':45} {'duly/s':>9} {'raw/s':>9} {'ratio':>6}   (median of {ROUNDS})", flush=True)
    for name, ours, raw in FIGURES:
        rates: list[float] = []
        raws: list[float] = []
        for _ in range(ROUNDS):
            await truncate(db)
            if raw is not None:
                raws.append(await raw(db))
            await truncate(db)
            rates.append(await ours(db))
        rate, base = statistics.median(rates), statistics.median(raws) if raws else 0.0
        ratio = f"{rate / base:6.2f}" if raws else "     -"
        print(f"{name:45} {rate:9,.0f} {base:9,.0f} {ratio}", flush=True)
    await truncate(db)
    times = await latency(db)
    p50, p95, p99 = (times[int(len(times) * share)] for share in (0.5, 0.95, 0.99))
    print(f"commit to handler start at 50 jobs/s: p50 {p50:.2f} ms, p95 {p95:.2f} ms, p99 {p99:.2f} ms")
    await db.close()


def main() -> int:
    """Start a PostgreSQL with default durability, measure, stop it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="duly-bench-") as directory:
        server = TestServer(Path(directory), durable=True)
        server.start()
        try:
            with server.database() as dsn:
                with psycopg.connect(dsn, autocommit=True) as connection:  # production's clock, not the sandbox's
                    connection.execute(
                        "CREATE OR REPLACE FUNCTION duly.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE "
                        "AS 'SELECT statement_timestamp()'"
                    )
                uvloop.run(measure(dsn))
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
