"""What is written of a run: by its lease, and of two runs of one job only the later (E3.5, E3.8)."""

from __future__ import annotations

import pytest

from duly.db import Database
from duly.jobs import settle
from duly.jobs.claim import Claims
from duly.jobs.settle import Settlement
from tests.engine.jobs.witness import expire_leases, is_empty, schedule_numbers
from tests.support import handlers, rows


async def work() -> None:
    """A handler for claims by hand."""


@pytest.mark.parametrize("outcome", ["done", "retried", "buried"])
async def test_of_two_runs_of_one_job_in_a_batch_only_the_later_is_written(
    db: Database, dsn: str, outcome: str
) -> None:
    """The worker stalled, lost the job, claimed it again, and settles both runs at once."""
    schedule_numbers(dsn, "work", 1)
    claims = Claims(handlers(work), worker="w", lease_seconds=60)
    connection = await db.connect()
    try:
        (zombie,) = await claims.take(connection, 1)
        expire_leases(dsn)
        (holder,) = await claims.take(connection, 1)
        both = [Settlement(job, outcome, 0.1, "m") for job in (holder, zombie)]
        for one in both:
            one.reason, one.error_kind = "failed_for_good", "E"
        assert await settle.write(connection, both, worker="w") == {holder.lease}
    finally:
        await connection.close()
    log = "SELECT lease_token, outcome FROM duly.executions ORDER BY lease_token"
    assert rows(dsn, log) == [(zombie.lease_token, "lost"), (holder.lease_token, outcome)]
    assert is_empty(dsn) == (outcome != "retried")
