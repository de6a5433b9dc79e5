"""Jobs: claimed once, run, settled with their token (E3)."""

from __future__ import annotations

from typing import Any

import psycopg

from duly.db import Database
from duly.jobs.handlers import Handler, JobContext
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker


def rows(dsn: str, query: str, *values: Any) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(query, values).fetchall()  # type: ignore[call-overload, no-any-return]


async def test_success_deletes_the_row_and_writes_one_execution(db: Database, dsn: str) -> None:
    seen: list[str | None] = []

    async def work(ctx: JobContext) -> None:
        seen.append(ctx.entity_id)

    async with db.transaction() as tx:
        await schedule(tx, "A", "e1")
        await schedule(tx, "A", "e2")
    worker = Worker(db, {"A": Handler("A", work)})
    print(await worker.run_once())
    assert sorted(map(str, seen)) == ["e1", "e2"]
    assert rows(dsn, "SELECT * FROM duly.jobs") == []
    print(rows(dsn, "SELECT * FROM duly.executions"))
    assert rows(dsn, "SELECT outcome, succeeded, source FROM duly.executions") == [("done", True, "Deferred")] * 2
