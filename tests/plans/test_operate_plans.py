"""With a million runs and events in history, what an operator asks reads only what it shows: E1.8, E3.8, E7.1.

The tables that are polled hold 200,000 rows each here; the other files have a million of them.

Rows read are counted from EXPLAIN ANALYZE: they do not depend on the machine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from duly.console import sql as console_sql
from duly.db import Database, Statement, Tx, fetch
from duly.operate import sql, sql_maintenance, sql_why
from duly.operate.counts import CAP, NAMES_LIMIT
from duly.testing import BusinessClock, TestServer

pytestmark = pytest.mark.timeout(300)  # the rows are made once, on a machine that may be busy
ROWS = 200_000
HISTORY = 1_000_000
FIRST_PAGE = {"before_at": None, "before_id": None, "limit": 50}

# History lies in the daily partitions of a month, as it does after a month's work. It is noon: soon after midnight a
# day's partition has a page of rows, and is read whole for any of them.
FILL = """
SELECT duly.create_partitions('events', current_date - 30, 30),
       duly.create_partitions('executions', current_date - 30, 30);
INSERT INTO duly.jobs (name, entity_id, run_at, due_at, created_at, priority)
SELECT 'name-' || n % 5, 'order-' || n, now() + (n - 100000) * interval '1 second', now(), now(),
       1 + n % 4
FROM generate_series(1, 200000) n;
INSERT INTO duly.dead_letters (id, name, entity_id, payload, priority, due_at, created_at, original_delay, retry_count,
                               source, reason, error, error_kind, buried_at)
SELECT 1000000 + n, 'name-' || n % 5, 'order-' || n, '{}', 3, now(), now(), '0', 3, 'Deferred',
       'retries_used_up', 'boom', 'Kind' || n % 3, now() - n * interval '1 second'
FROM generate_series(1, 200000) n;
INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, created_at)
SELECT duly.uuid7(), 'order.placed', 'shop', 'order-' || n, '{}', now() FROM generate_series(1, 199900) n;
INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, created_at, attempts, failed_at, last_error)
SELECT duly.uuid7(), 'order.placed', 'shop', 'failed-' || n, '{}', now(), 5, now(), 'no'
FROM generate_series(1, 50) n;
INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, created_at, parked)
SELECT duly.uuid7(), 'order.placed', 'shop', 'failed-' || n, '{}', now(), true FROM generate_series(1, 50) n;
INSERT INTO duly.events (id, seq, type, topic, aggregate_id, payload, headers, created_at, published_at, attempts)
SELECT duly.uuid7(now() - n * interval '2.5 seconds'), n, 'order.placed', 'shop', 'order-' || n, '{}', '{}',
       now(), now(), 0
FROM generate_series(1, 1000000) n;
INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded,
                             outcome, retry_count, worker, lease_token)
SELECT duly.uuid7(now() - n * interval '2.5 seconds'), n, 'name-' || n % 5, 'order-' || n, 'Deferred', now(),
       now() - n * interval '2.5 seconds', true, 'done', 0, 'w1', 1
FROM generate_series(1, 1000000) n;
INSERT INTO duly.audit (at, actor, action, subject)
SELECT now() - n * interval '1 minute', 'alice', 'job.cancelled', 'job:' || n FROM generate_series(1, 50000) n;
INSERT INTO duly.audit (at, actor, action, subject, before)
SELECT now() - n * interval '1 minute', 'alice', CASE WHEN n % 5 = 0 THEN 'event.discarded' ELSE 'event.requeued' END,
       'event:' || duly.uuid7(), jsonb_build_object('aggregate_id', 'order-' || n, 'type', 'order.placed')
FROM generate_series(1, 50000) n;
INSERT INTO duly.processed_events SELECT 'audit', gen_random_uuid(), now() - (50000 - n) * interval '1 minute'
FROM generate_series(1, 50000) n;
"""


@pytest.fixture(scope="module")
def filled(server: TestServer) -> Iterator[str]:
    """The address of a database with 200,000 rows in each table that is polled and a million in each history."""
    with server.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = off")
            noon = BusinessClock(dsn).now().replace(hour=12, minute=0, second=0, microsecond=0)
            BusinessClock(dsn).freeze(noon)
            connection.execute(FILL.replace("now()", f"timestamptz '{noon.isoformat()}'"))
            connection.execute("VACUUM ANALYZE")
        yield dsn


@pytest.fixture
async def tx(filled: str) -> AsyncIterator[Tx]:
    """A transaction on it that is rolled back."""
    database = Database(filled)
    async with database.transaction() as session:
        yield session
        await session.rollback()
    await database.close()


async def rows_read(tx: Tx, statement: Statement, values: dict[str, Any]) -> int:
    """How many rows its scans looked at, with those that a filter threw away."""
    explained = await tx.execute(text("EXPLAIN (ANALYZE, FORMAT JSON) " + statement.sql), values)
    plan = explained.scalar_one()
    return _read((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"])


def _read(node: dict[str, Any]) -> int:
    read = 0
    if "Relation Name" in node:
        looked_at = sum(
            float(node.get(part, 0))
            for part in ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
        )
        read = round(looked_at * node["Actual Loops"])
    return read + sum(_read(child) for child in node.get("Plans", []))


NAMES = [f"name-{number}" for number in range(5)]

PAGES: dict[str, tuple[Statement, dict[str, Any]]] = {
    "dead letters": (sql.LIST_DEAD_LETTERS, FIRST_PAGE),
    "dead letters of a name": (sql.LIST_DEAD_LETTERS_OF_NAME, FIRST_PAGE | {"name": "name-1"}),
    "dead letters of an entity": (
        sql.LIST_DEAD_LETTERS_OF_ENTITY,
        FIRST_PAGE | {"entity_id": "order-7", "name": None},
    ),
    "one dead letter": (sql.FIND_DEAD_LETTER, {"id": 1_000_007, "before_at": None, "before_id": None}),
    "dead letters to retry": (sql.CHOOSE_DEAD_LETTERS, {"error_kind": None, "limit": 50}),
    "dead letters of a name to retry": (
        sql.CHOOSE_DEAD_LETTERS_OF_NAME,
        {"error_kind": "Kind1", "name": "name-1", "limit": 50},
    ),
    "names of dead letters": (sql.FIND_DEAD_LETTER_NAMES, {"names_limit": NAMES_LIMIT}),
    "names of jobs": (sql.FIND_JOB_NAMES, {"names_limit": NAMES_LIMIT}),
    "jobs": (sql.LIST_JOBS, {"after": 1000, "status": "Pending", "limit": 50}),
    "jobs of a name": (sql.LIST_JOBS_OF_NAME, {"after": None, "status": None, "limit": 50, "name": "name-1"}),
    "jobs of an entity": (
        sql.LIST_JOBS_OF_ENTITY,
        {"after": None, "status": None, "limit": 50, "name": None, "entity_id": "order-7"},
    ),
    "one job": (sql.FIND_JOB, {"after": None, "status": None, "id": 7}),
    "executions": (sql.LIST_EXECUTIONS, FIRST_PAGE | {"names_limit": NAMES_LIMIT}),
    "executions of a name": (sql.LIST_EXECUTIONS_OF_NAME, FIRST_PAGE | {"name": "name-1"}),
    "executions of an entity": (sql.LIST_EXECUTIONS_OF_ENTITY, FIRST_PAGE | {"name": None, "entity_id": "order-7"}),
    "executions of a job": (sql.LIST_EXECUTIONS_OF_JOB, FIRST_PAGE | {"job_id": 7}),
    "failed events": (sql.LIST_FAILED_EVENTS, {"topic": None, "limit": 50}),
    "failed events to requeue": (sql.FIND_FAILED_EVENTS, {"id": None, "topic": None, "limit": 50}),
    "audit": (sql.LIST_AUDIT, {"before": None, "limit": 50}),
    "audit of a subject": (sql.LIST_AUDIT_OF_SUBJECT, {"before": None, "limit": 50, "subject": "job:7"}),
    "what was discarded": (sql.LIST_DISCARDED, {"aggregate_ids": ["order-7", "order-25000", "x"], "limit": 20}),
    "attempts": (sql_why.FIND_ATTEMPTS, {"job_id": 7, "limit": 20}),
    "the job before it": (sql_why.FIND_ORDER_HEAD, {"name": "name-1", "order_key": "x", "id": 7}),
    "the dead letter before it": (sql_why.FIND_ORDER_DEAD_LETTER, {"name": "name-1", "order_key": "x"}),
    "slots": (sql_why.FIND_SLOTS, {"name": "name-1", "limit": 100}),
    "the next job": (sql_why.FIND_NEXT_JOB, {"name": "name-1"}),
    "an event's holder": (sql_why.FIND_HOLDER, {"aggregate_id": "failed-7", "seq": 199_999}),
    "an event's deliveries": (
        sql_why.FIND_DELIVERIES,
        {"aggregate_id": "order-7", "id": "019c0000-0000-7000-8000-000000000001", "limit": 100},
    ),
}


PARTITIONS = 32  # the newest of a name is looked for in each of them
QUEUE = {"names": NAMES, "since": None, "until": None, "after_at": None, "after_id": None, "status": None, "limit": 51}
RUNS = {"since": None, "until": None, "before_at": None, "before_id": None, "outcome": None, "limit": 51, "scan": 51}
DEAD = {"before_at": None, "before_id": None, "error_kind": None, "limit": 51, "scan": 51}
FOUND = {"before": None, "scan": 5_000, "limit": 51}
CONSOLE: dict[str, tuple[Statement, dict[str, Any], int]] = {
    "the queue by due time": (console_sql.LIST_QUEUE, QUEUE | {"scan": 51}, 5 * 4 * 51),
    "running jobs": (console_sql.LIST_QUEUE, QUEUE | {"scan": 100, "status": "Running"}, 5 * 4 * 100),
    "a later page of the queue": (
        console_sql.LIST_QUEUE,
        QUEUE | {"scan": 51, "names": NAMES[:1], "after_at": "2030-01-01T00:00:00+00:00", "after_id": 1},
        4 * 51,
    ),
    "one job's payload": (console_sql.FIND_PAYLOAD, {"id": 7}, 2),
    "last runs": (console_sql.LIST_LAST_RUNS, {"names": [*NAMES, "never-ran"]}, 6 * PARTITIONS),
    "names that ran": (console_sql.FIND_RUN_NAMES, {"names_limit": 200}, 200),
    "history": (console_sql.LIST_HISTORY, RUNS | {"names": NAMES}, 5 * (51 + PARTITIONS)),
    "history by outcome": (
        console_sql.LIST_HISTORY,
        RUNS | {"names": NAMES, "outcome": "buried", "scan": 200},
        5 * (200 + PARTITIONS),
    ),
    "history of an entity": (
        console_sql.LIST_HISTORY_OF_ENTITY,
        RUNS | {"entity_id": "order-7", "name": None},
        51,
    ),
    "one run": (
        console_sql.FIND_RUN,
        {"job_id": 7, "execution_id": "019c0000-0000-7000-8000-000000000001"},
        10,
    ),
    "dead letters one by one": (console_sql.LIST_DEAD_LETTERS, DEAD, 51),
    "dead letters of a kind": (
        console_sql.LIST_DEAD_LETTERS_OF_NAME,
        DEAD | {"name": "name-1", "error_kind": "Kind1", "scan": 500},
        2 * 500,
    ),
    "dead letters of one entity": (
        console_sql.LIST_DEAD_LETTERS_OF_ENTITY,
        DEAD | {"entity_id": "order-7", "name": None},
        51,
    ),
    "pending events": (console_sql.LIST_PENDING, {"before": None, "limit": 51}, 1_000),
    "failed ones": (console_sql.LIST_FAILED, {"before": None, "limit": 51}, 200),
    "published ones": (console_sql.LIST_PUBLISHED, {"before": None, "limit": 51}, 51 + 31),
    "how many were published lately": (console_sql.COUNT_JUST_PUBLISHED, {"scan": 1_000, "seconds": 300}, 1_000 + 31),
    "the record by who": (console_sql.SEARCH_AUDIT, FOUND | {"actor": "nobody", "action": None}, 2 * 5_000),
    "the record of a subject by what": (
        console_sql.SEARCH_AUDIT_OF_SUBJECT,
        FOUND | {"actor": None, "action": "discarded", "subject": "job:7"},
        10,
    ),
    "how far the record was searched": (console_sql.FIND_AUDIT_REACHED, {"before": None, "scan": 5_000}, 5_000),
}


@pytest.mark.parametrize("page", CONSOLE)
async def test_a_page_of_the_console_reads_little_more_than_it_shows(tx: Tx, page: str) -> None:
    """E7.1: at a million runs, events and hundreds of thousands of dead letters."""
    statement, values, most = CONSOLE[page]
    assert await rows_read(tx, statement, values) <= most


async def test_ten_minutes_of_the_charts_read_those_minutes_and_the_names(tx: Tx) -> None:
    """A run every 2.5 seconds: 240 of them, of a million."""
    found = await tx.execute(text("SELECT date_trunc('minute', duly.now())"))
    until = found.scalar_one()
    since = until - timedelta(minutes=10)
    day = since.replace(hour=0, minute=0)
    values = {"day": day, "since": since, "until": until, "names_limit": 1_000}
    assert await rows_read(tx, console_sql.COUNT_MINUTES, values) <= 240 + 5 + 3 * 10


@pytest.mark.parametrize("page", PAGES)
async def test_a_page_reads_little_more_than_it_shows(tx: Tx, page: str) -> None:
    statement, values = PAGES[page]
    assert await rows_read(tx, statement, values) <= 1_000


async def test_history_holds_a_million_of_each_in_more_partitions_than_one(tx: Tx) -> None:
    for table in ("duly.executions", "duly.events"):
        found = await tx.execute(text("SELECT count(*), count(DISTINCT tableoid) FROM " + table))
        rows, partitions = found.one()
        assert (rows, partitions > 25) == (HISTORY, True)


async def test_the_aggregates_events_are_found_through_their_lane(tx: Tx) -> None:
    values = {"aggregate_id": "order-7", "status": None, "topic": None, "limit": 50}
    assert await rows_read(tx, sql.LIST_EVENTS_OF_AGGREGATE, values) <= ROWS / 64 * 1.3


@pytest.mark.parametrize("statement", [sql.LIST_PENDING_EVENTS, sql.LIST_PUBLISHED_EVENTS])
async def test_listing_events_reads_no_more_than_its_scan_limit(tx: Tx, statement: Statement) -> None:
    assert await rows_read(tx, statement, {"scan": 1_000, "topic": None, "limit": 50}) <= 2_100


async def test_counting_jobs_reads_each_row_at_most_once_and_the_front_twice(tx: Tx) -> None:
    """Five names, four priorities: 5,000 due and 5,000 not due in each, so no cap is reached."""
    values = {"names": NAMES, "cap": CAP + 1, "front": 100}
    assert await rows_read(tx, sql.COUNT_JOBS, values) <= ROWS + 5 * 4 * 101


async def test_counting_jobs_stops_at_the_cap_of_each_name_and_priority(tx: Tx) -> None:
    values = {"names": NAMES, "cap": 101, "front": 10}
    assert await rows_read(tx, sql.COUNT_JOBS, values) <= 5 * 4 * (2 * 101 + 11)


async def test_counting_the_outbox_stops_at_the_cap(tx: Tx) -> None:
    """Of the failed and held ones only themselves are read, not the pending ones between them."""
    assert await rows_read(tx, sql.COUNT_OUTBOX, {"cap": CAP + 1}) <= CAP + 1 + 2 * 100 + 64


async def test_counting_dead_letters_stops_at_the_cap_of_each_name(tx: Tx) -> None:
    grouping = {"cap": 101, "names_limit": NAMES_LIMIT}
    assert await rows_read(tx, sql.GROUP_DEAD_LETTERS, grouping) <= 5 * 101 + 20
    counting = {"names": NAMES, "cap": 101}
    assert await rows_read(tx, sql.COUNT_DEAD_LETTERS_BY_NAME, counting) <= 5 * 101


async def test_counting_what_is_before_a_job_stops_at_its_limit(tx: Tx) -> None:
    last = await tx.execute(text("SELECT max(run_at) FROM duly.jobs WHERE run_at <= duly.now()"))
    values = {"name": "name-1", "priority": 4, "run_at": last.scalar_one(), "id": 2**40, "cap": 1_000}
    assert await rows_read(tx, sql_why.COUNT_JOBS_AHEAD, values) <= 2_100


@pytest.mark.parametrize(
    "statement",
    [
        sql_maintenance.CHOOSE_OLD_DEAD_LETTERS,
        sql_maintenance.FORGET_AUDIT,
        sql_maintenance.FORGET_PROCESSED_EVENTS,
    ],
)
async def test_forgetting_reads_no_more_than_a_few_batches(tx: Tx, statement: Statement) -> None:
    await fetch(tx, sql_maintenance.ALLOW_FORGETTING)
    assert await rows_read(tx, statement, {"days": 1, "batch": 1_000}) <= 5_000
