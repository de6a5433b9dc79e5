"""The raw limit: the same statements' writes by bare asyncpg loops, with no engine around them."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

from benchmarks.application import WRITE_EFFECT
from benchmarks.link import Link
from duly.clock import monotonic
from duly.jobs import sql
from duly.jobs.worker import CLAIM_BATCH
from duly.wakeup import wait_for_any

# What settling writes, without what the engine needs to know about it: one DELETE, one row of history each.
SETTLE = """
WITH gone AS (DELETE FROM duly.jobs WHERE id = ANY($1) AND lease_token = $2 RETURNING *)
INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded,
    outcome, retry_count, worker, lease_token, correlation_id)
SELECT gen_random_uuid(), id, name, entity_id, source, now(), now(), true, 'done', 0, 'raw', lease_token, correlation_id
FROM gone
"""
INSERT = """
INSERT INTO duly.jobs (name, entity_id, run_at, due_at, created_at, correlation_id)
VALUES ($1, $2, now(), now(), now(), $3)
"""
COPY_COLUMNS = ["name", "run_at", "due_at", "created_at", "correlation_id"]
BULK = 5_000
CONNECTIONS = 10
PERIOD_SECONDS = 0.02  # 50 jobs a second
WARM_UP_JOBS = 20  # as many as the peers have


async def connect(dsn: str) -> Any:
    """A bare connection."""
    return await asyncpg.connect(dsn, timeout=10, command_timeout=120)


async def claim(connection: Any, name: str, limit: int) -> list[Any]:
    """duly's own claim, as it is."""
    values = {"names": [name], "limit": limit, "worker": "raw", "lease_seconds": 300.0}
    rows: list[Any] = await connection.fetch(sql.CLAIM_JOBS.numbered, *sql.CLAIM_JOBS.args(values))
    return rows


async def settle(connection: Any, rows: list[Any]) -> None:
    """Delete the jobs of one claim and write their history."""
    await connection.execute(SETTLE, [row["id"] for row in rows], rows[0]["lease_token"])


async def drain_in_turn(link: Link, dsn: str, count: int) -> None:
    """One connection: claim, settle, claim, settle."""
    connection = await connect(dsn)
    if not await link.ready():
        return
    done, began = 0, monotonic()
    while done < count and (rows := await claim(connection, "noop", CLAIM_BATCH)):
        await settle(connection, rows)
        done += len(rows)
    link.tell(rate=done / (monotonic() - began), done=done)
    await connection.close()


async def drain_overlapped(link: Link, dsn: str, count: int) -> None:
    """Two connections: the next claim runs while the last one is settled."""
    claiming, settling = await connect(dsn), await connect(dsn)
    claimed: asyncio.Queue[list[Any]] = asyncio.Queue(maxsize=2)
    if not await link.ready():
        return
    began = monotonic()

    async def claim_all() -> None:
        found = 0
        while found < count and (rows := await claim(claiming, "noop", CLAIM_BATCH)):
            found += len(rows)
            await claimed.put(rows)
        await claimed.put([])

    task = asyncio.create_task(claim_all())
    done = 0
    while rows := await claimed.get():
        await settle(settling, rows)
        done += len(rows)
    link.tell(rate=done / (monotonic() - began), done=done)
    await task
    await claiming.close()
    await settling.close()


async def commit_each(link: Link, dsn: str, count: int, *, writes: bool = False) -> None:
    """As many connections as a worker has slots, each BEGIN, (one row,) the settlement, COMMIT; claimed before."""
    first = await connect(dsn)
    queue = [(row["id"], row["lease_token"]) for row in await claim(first, "noop", count)]
    await first.close()
    connections = [await connect(dsn) for _ in range(CONNECTIONS)]
    if not await link.ready():
        return

    async def one(connection: Any) -> None:
        while queue:
            job, token = queue.pop()
            async with connection.transaction():
                if writes:
                    await connection.execute(WRITE_EFFECT)
                await connection.execute(SETTLE, [job], token)

    done, began = len(queue), monotonic()
    await asyncio.gather(*(one(connection) for connection in connections))
    link.tell(rate=done / (monotonic() - began), done=done)
    await asyncio.gather(*(connection.close() for connection in connections))


async def insert_each(link: Link, dsn: str, count: int) -> None:
    """One connection, one INSERT and one commit a job."""
    connection = await connect(dsn)
    correlation = await connection.fetchval("SELECT gen_random_uuid()")
    for _ in range(WARM_UP_JOBS):
        await connection.execute(INSERT, "warm-up", None, correlation)
    if not await link.ready():
        return
    began = monotonic()
    for _ in range(count):
        await connection.execute(INSERT, "noop", None, correlation)
    link.tell(rate=count / (monotonic() - began), done=count)
    await connection.close()


async def copy_bulk(link: Link, dsn: str, count: int) -> None:
    """The same rows by COPY, as many a statement as the engine's bulk call gets."""
    connection = await connect(dsn)
    now, correlation = await connection.fetchrow("SELECT now(), gen_random_uuid()")
    records = [("warm-up", now, now, now, correlation)] * BULK
    await connection.copy_records_to_table("jobs", schema_name="duly", records=records, columns=COPY_COLUMNS)
    if not await link.ready():
        return
    began = monotonic()
    for start in range(0, count, BULK):
        records = [("noop", now, now, now, correlation)] * min(BULK, count - start)
        await connection.copy_records_to_table("jobs", schema_name="duly", records=records, columns=COPY_COLUMNS)
    link.tell(rate=count / (monotonic() - began), done=count)
    await connection.close()


async def ask(link: Link, dsn: str, count: int) -> None:
    """A client with 50 commits a second: one INSERT and the NOTIFY in one transaction."""
    connection = await connect(dsn)
    correlation = await connection.fetchval("SELECT gen_random_uuid()")
    commits: dict[str, float] = {}
    if not await link.ready():
        return
    began = monotonic() + WARM_UP_JOBS * PERIOD_SECONDS
    for number in range(-WARM_UP_JOBS, count):
        await asyncio.sleep(max(0.0, began + number * PERIOD_SECONDS - monotonic()))
        async with connection.transaction():
            await connection.execute(INSERT, "tick", str(number), correlation)
            await connection.execute("SELECT pg_notify('duly', 'jobs')")
        if number >= 0:
            commits[str(number)] = monotonic()
    link.tell(commits=commits)
    await connection.close()


async def answer(link: Link, dsn: str) -> None:
    """The least a worker can do: LISTEN, claim when told, note the time, settle."""
    listening, working = await connect(dsn), await connect(dsn)
    told = asyncio.Event()
    await listening.add_listener("duly", lambda *_: told.set())
    if not await link.ready():
        return
    while not link.ended.is_set():
        told.clear()
        while rows := await claim(working, "tick", CLAIM_BATCH):
            now = monotonic()
            link.tell(starts={row["entity_id"]: now for row in rows})
            await settle(working, rows)
        await wait_for_any(1.0, told, link.ended)
    await listening.close()
    await working.close()
