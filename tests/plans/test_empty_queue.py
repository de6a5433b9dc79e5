"""A session keeps the plans it made while the queue was empty: they must fit it when it is full (E3.12)."""

from __future__ import annotations

import re

import psycopg
import pytest

from duly.db import Statement
from duly.jobs import sql as jobs_sql
from duly.outbox import sql as outbox_sql

STATEMENTS = {
    f"{module.__name__}.{name}": found
    for module in (jobs_sql, outbox_sql)
    for name, found in vars(module).items()
    if isinstance(found, Statement) and name != "RELEASE_UNKNOWN"  # reads the queue on purpose, after a lost claim
}
SCANS = re.compile(r"Seq Scan on (?:jobs|outbox|dead_letters|executions)\w*")


@pytest.mark.parametrize("name", sorted(STATEMENTS))
def test_a_plan_made_on_an_empty_queue_walks_indexes(dsn: str, name: str) -> None:
    """After an idle weekend: vacuumed, analysed, nothing there."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE duly.jobs, duly.outbox, duly.dead_letters")
        rows = connection.execute(f"EXPLAIN (GENERIC_PLAN) {STATEMENTS[name].numbered}".encode())
        plan = "\n".join(row[0] for row in rows)
    assert not SCANS.findall(plan), plan


@pytest.mark.parametrize("entity", ["NULL::text", "'e' || n"])
def test_scheduling_one_by_one_never_reads_the_queue(dsn: str, entity: str) -> None:
    """E3.1: the thousandth timer of a new database costs what the first did."""
    with psycopg.connect(dsn) as connection:
        connection.execute(f"SELECT count(duly.schedule('x', {entity})) FROM generate_series(1, 1000) AS n".encode())
        connection.execute("SELECT duly.cancel('x', 'e' || n) FROM generate_series(1, 100) AS n")
        found = connection.execute("SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = 'jobs'").fetchone()
    assert found == (0,)
