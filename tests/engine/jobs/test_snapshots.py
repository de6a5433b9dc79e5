"""While an old snapshot keeps deleted rows alive, claims begin where the last one got to; nothing is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from duly.db import Database, Statement
from duly.jobs import claim as claim_module
from duly.jobs import sql
from duly.jobs.claim import Claims
from tests.engine.jobs.witness import expire_leases
from tests.support import handlers, rows, value

GONE = 50_000


async def work() -> None:
    """A handler for claims by hand."""


def add(dsn: str, entity: str, run_at: datetime, priority: int = 3) -> None:
    """A job that is due since then."""
    rows(
        dsn,
        "INSERT INTO duly.jobs (name, entity_id, priority, run_at, due_at, created_at) "
        "VALUES ('work', %(entity)s, %(priority)s, %(run_at)s, %(run_at)s, %(run_at)s)",
        {"entity": entity, "run_at": run_at, "priority": priority},
    )


async def test_claims_go_on_where_they_were_and_the_walk_finds_the_rest(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3.4, E3.12: new work at once; what is due before, and leases that ended, with the next whole walk."""
    monkeypatch.setattr(claim_module, "CHEAP_CLAIM_SECONDS", 0.0)  # every walk is slow, and the pause after it long
    monkeypatch.setattr(claim_module, "WALK_PAUSES", 1e9)
    monkeypatch.setattr(claim_module, "MAX_WALK_PAUSE_SECONDS", 1e9)
    claims = Claims(handlers(work), worker="w", lease_seconds=60)
    connection = await db.connect()
    now: datetime = value(dsn, "SELECT now()")

    def ago(seconds: float) -> datetime:
        return now - timedelta(seconds=seconds)

    async def take(room: int = 10) -> list[Any]:
        return [job.entity_id for job in await claims.take(connection, room)]

    try:
        for entity, seconds in (("a", 30.0), ("b", 20.0), ("c", 10.0)):
            add(dsn, entity, ago(seconds))
        assert await take(2) == ["a", "b"]  # the whole walk, which was slow
        add(dsn, "straggler", ago(25))
        add(dsn, "urgent", ago(40), priority=1)  # a lane nothing was claimed from yet has no start
        add(dsn, "committed late", ago(20.1))  # within what a commit may take
        assert await take() == ["urgent", "committed late", "c"]
        expire_leases(dsn)
        assert await take() == ["urgent", "c"]  # the leases of the others ended too, but they lie before
        monkeypatch.setattr(claim_module, "monotonic", lambda: float("inf"))  # the pause is over
        assert await take() == ["a", "straggler", "committed late", "b"]
    finally:
        await connection.close()


async def test_the_claim_reads_little_although_an_old_snapshot_keeps_what_is_gone(db: Database, dsn: str) -> None:
    """E3.4: pages that a claim reads to find its jobs, with fifty thousand deleted rows that cannot be cleaned away."""
    with psycopg.connect(dsn) as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT 1")
        rows(
            dsn,
            "INSERT INTO duly.jobs (name, run_at, due_at, created_at) SELECT 'work', m, m, m FROM "
            f"(SELECT now() - make_interval(secs => {GONE} - n) AS m FROM generate_series(1, {GONE}) AS n) AS t",
        )
        rows(dsn, f"DELETE FROM duly.jobs WHERE id <= {GONE} - 1000")
        rows(dsn, "ANALYZE duly.jobs")
        start = rows(dsn, "SELECT date_part('epoch', min(run_at)) FROM duly.jobs")[0][0]
        connection = await db.connect()
        try:
            values: dict[str, Any] = {"limit": 500, "worker": "w", "lease_seconds": 60.0}
            whole = await buffers(connection, sql.CLAIM_JOBS, names=["work"], **values)
            lanes: dict[str, Any] = {"names": ["work"], "priorities": [3], "starts": [start - 0.2]}
            onward = await buffers(connection, sql.CLAIM_JOBS_FROM, **lanes, **values)
        finally:
            await connection.close()
    assert whole > 1_500
    assert onward < 300


async def buffers(connection: Any, statement: Statement, **values: Any) -> int:
    """How many pages it reads to find the jobs; it is carried out and undone."""
    await connection.execute("BEGIN")
    explained = await connection.fetch(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement.numbered, *statement.args(values)
    )
    await connection.execute("ROLLBACK")
    walks = [node for node in nodes(explained[0][0][0]["Plan"]) if node.get("Index Name") == "jobs_ready"]
    assert walks
    return sum(int(node["Shared Hit Blocks"]) + int(node["Shared Read Blocks"]) for node in walks)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan's nodes, whatever their depth."""
    yield plan
    for part in plan.get("Plans", []):
        yield from nodes(part)
