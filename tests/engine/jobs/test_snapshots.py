"""While an old snapshot keeps deleted rows alive, claims begin where the last one got to; nothing is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from duly.db import Database, Statement
from duly.jobs import claim as claim_module
from duly.jobs import sql, walk
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


class Machine:
    """Time as the claims see it: it passes when the test says so, and every statement takes a while."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.takes = 0.0

    def __call__(self) -> float:
        self.now += self.takes
        return self.now


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Where every claim is slow."""
    made = Machine()
    made.takes = walk.CHEAP_CLAIM_SECONDS * 2
    monkeypatch.setattr(claim_module, "monotonic", made)
    return made


async def test_claims_go_on_where_they_were_and_the_walk_finds_the_rest(
    db: Database, dsn: str, machine: Machine
) -> None:
    """E3.4, E3.12: new work at once; what is due before, and leases that ended, with the next whole walk."""
    claims = Claims(handlers(work), worker="w", lease_seconds=60)
    connection = await db.connect()
    now: datetime = value(dsn, "SELECT now()")

    def ago(seconds: float) -> datetime:
        return now - timedelta(seconds=seconds)

    async def take(room: int = 10) -> list[Any]:
        return [job.entity_id for job in await claims.take(connection, room)]

    try:
        assert await take() == []  # slow once
        for entity, seconds in (("a", 30.0), ("b", 20.0), ("c", 10.0)):
            add(dsn, entity, ago(seconds))
        assert await take(2) == ["a", "b"]  # the whole walk, which was slow again
        machine.takes = walk.CHEAP_CLAIM_SECONDS / 2  # from there it is quick
        add(dsn, "straggler", ago(25))
        add(dsn, "urgent", ago(40), priority=1)  # a lane nothing was claimed from yet has no start
        add(dsn, "committed late", ago(20.1))  # within what a commit may take
        assert await take(3) == ["urgent", "committed late", "c"]
        expire_leases(dsn)
        assert await take(2) == ["urgent", "c"]  # the leases of the others ended too, but they lie before
        machine.now += walk.MAX_WALK_PAUSE_SECONDS  # the pause is over
        machine.takes = 0.0  # and the old snapshot gone
        assert await take() == ["a", "straggler", "committed late", "b"]
        add(dsn, "very late", ago(1e6))
        assert await take() == ["very late"]  # from the start, each time
    finally:
        await connection.close()


async def test_an_idle_queue_is_not_walked_from_its_start_again_and_again(
    db: Database, dsn: str, machine: Machine
) -> None:
    """E3.12: a slow claim that finds nothing says where the next ones begin, too; what comes is found at once."""
    claims = Claims(handlers(work), worker="w", lease_seconds=60)
    connection = await db.connect()
    try:
        assert await claims.take(connection, 10) == []
        assert await claims.take(connection, 10) == []
        machine.takes = walk.CHEAP_CLAIM_SECONDS / 2
        now: datetime = value(dsn, "SELECT now()")
        assert all(now.timestamp() - 5 < start < now.timestamp() for start in claims._free.onward()["starts"])
        rows(dsn, "SELECT duly.schedule('work', 'new')")
        assert [job.entity_id for job in await claims.take(connection, 10)] == ["new"]
    finally:
        await connection.close()


async def test_what_becomes_due_while_a_slow_claim_runs_is_found_by_the_next(
    db: Database, dsn: str, machine: Machine
) -> None:
    """E3.3: a claim that took long has not seen what was committed meanwhile, due before the claim ended."""
    claims = Claims(handlers(work), worker="w", lease_seconds=60)
    connection = await db.connect()
    try:
        machine.takes = 3.0
        assert await claims.take(connection, 10) == []
        before: datetime = value(dsn, "SELECT now()")
        assert await claims.take(connection, 10) == []
        add(dsn, "meanwhile", before - timedelta(seconds=1))  # the claim began three seconds ago
        machine.takes = 0.1
        assert [job.entity_id for job in await claims.take(connection, 10)] == ["meanwhile"]
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
            lanes: dict[str, Any] = {
                "names": ["work"],
                "priorities": [3],
                "starts": [start - 0.2],
                "ends": [float("inf")],
            }
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
