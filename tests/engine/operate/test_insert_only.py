"""The execution log and the audit are insert-only (E3.8): the database refuses anything else, the clean-up aside."""

from __future__ import annotations

import psycopg
import pytest

from duly.db import Database
from duly.operate import maintenance
from duly.testing import BusinessClock
from tests.engine.operate.conftest import Make
from tests.support import value

RUN = """
INSERT INTO duly.executions (execution_id, job_id, name, source, started_at, completed_at, succeeded, outcome,
                             retry_count, worker, lease_token)
SELECT duly.uuid7(), 1, 'expire', 'Deferred', at, at, true, 'done', 0, 'w', 1
FROM (VALUES (duly.now()), (duly.now() - interval '300 days')) AS moments(at)
"""
NOTE = "INSERT INTO duly.audit (at, actor, action, subject) VALUES (duly.now(), 'alice', 'job.cancelled', 'job:1')"
CHANGES = [
    "UPDATE duly.executions SET succeeded = false",
    "DELETE FROM duly.executions",
    "DELETE FROM duly.executions_default",
    "TRUNCATE duly.executions",
    "UPDATE duly.audit SET actor = 'mallory'",
    "DELETE FROM duly.audit",
    "TRUNCATE duly.audit",
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_written_is_neither_changed_nor_deleted(make: Make, change: str) -> None:
    make.run(RUN)
    make.run(NOTE)
    with pytest.raises(psycopg.errors.RestrictViolation, match="is insert-only"):
        make.run(change)
    assert make.value("SELECT count(*) FROM duly.executions WHERE succeeded") == 2
    assert make.value("SELECT count(*) FROM duly.audit WHERE actor = 'alice'") == 1


async def test_the_cleanup_still_forgets_what_is_old(db: Database, dsn: str, make: Make, clock: BusinessClock) -> None:
    make.run(RUN)
    make.run(NOTE)
    async with db.transaction() as tx:
        await maintenance.drop_history(tx, events_days=30, executions_days=90)
        await maintenance.forget_audit(tx, days=1)
    assert value(dsn, "SELECT count(*) FROM duly.executions") == 1
    assert value(dsn, "SELECT count(*) FROM duly.audit") == 1


def test_making_a_partition_does_not_leave_the_door_open(make: Make) -> None:
    make.run(RUN)
    with make.connection.transaction():
        make.run("SELECT duly.create_partitions('executions', (duly.now() - interval '300 days')::date, 1)")
        with pytest.raises(psycopg.errors.RestrictViolation, match="is insert-only"), make.connection.transaction():
            make.run("DELETE FROM duly.executions")
    assert make.value("SELECT count(*) FROM duly.executions") == 2
