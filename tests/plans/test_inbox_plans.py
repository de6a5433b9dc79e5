"""The receiver's statements beside a long history: they look at their own rows, whatever else there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from duly.inbox import sql
from duly.testing import TestServer
from tests.plans.test_outbox_plans import any_planning, execute

FILL = """
SELECT duly.create_partitions('events', '2033-01-01', 10);
INSERT INTO duly.events
SELECT duly.uuid7(at), n, 'order.changed', 'shop', 'a' || n % 1000, '{}', '{}', at, at, 0
FROM generate_series(1, 50000) AS n,
     LATERAL (SELECT timestamptz '2033-01-01 12:00 UTC' + n % 10 * interval '1 day') AS day(at);
INSERT INTO duly.received
SELECT gen_random_uuid(), 'socket', 'order.changed', 'shop', 'a' || n % 1000, '{}', '{}', '2033-01-01', '2033-01-01',
       'log'
FROM generate_series(1, 100000) AS n;
INSERT INTO duly.consumers (name, patterns, ordered, registered_at, via, via_since)
VALUES ('ledger', '{*}', true, '2033-01-01', 'socket', '2033-01-01');
INSERT INTO duly.jobs (name, entity_id, order_key, run_at, due_at, created_at, event_id, waits)
SELECT 'consumer:ledger', aggregate_id, aggregate_id, CASE WHEN seq > 20000 THEN 'infinity' ELSE created_at END,
       created_at, created_at, id, CASE WHEN seq > 20000 THEN 'behind' ELSE 'due' END FROM duly.events;
INSERT INTO duly.dead_letters (id, name, entity_id, order_key, payload, priority, due_at, created_at, original_delay,
    retry_count, source, reason, error, error_kind, buried_at)
SELECT -n, 'receive:socket', 'd' || n, NULL, '{}', 3, now(), now(), '0', 5, 'Deferred', 'failed_for_good', '', '', now()
FROM generate_series(1, 50000) AS n
"""
BATCH = 100
IDS = [str(uuid4()) for _ in range(BATCH)]


@pytest.fixture(scope="module")
def connection(server: TestServer) -> Iterator[psycopg.Connection[Any]]:
    """A database with all of it; no test changes it."""
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as made:
        made.execute("SET statement_timeout = 0")
        for statement in FILL.split(";\n"):
            made.execute(statement.encode())
        made.execute("VACUUM ANALYZE")
        yield made


@any_planning
def test_storing_a_batch_touches_its_own_rows_only(connection: psycopg.Connection[Any], generic: bool) -> None:
    """With the jobs of an ordered consumer, beside 50,000 jobs, 50,000 events and 100,000 received ones."""
    plan = execute(
        connection, sql.RECEIVE_EVENTS, generic, via="'socket'", ids=IDS, types=["order.changed"] * BATCH,
        topics=["shop"] * BATCH, aggregate_ids=["a7"] * BATCH, payloads=['"{}"'] * BATCH, headers=['"{}"'] * BATCH,
        moments=["2033-01-02"] * BATCH, positions=["log"] * BATCH, routed_ids=IDS, consumers=["ledger"] * BATCH,
        ordered=[True] * BATCH,
    )  # fmt: skip
    filled = {one for one in plan.tables_read_whole() if one.startswith("events_p2033") or not one.startswith("events")}
    assert filled <= {"consumers"}, plan.text
    assert plan.buffers <= 20_000, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_counting_what_waits_stops_at_the_limit(connection: psycopg.Connection[Any], generic: bool) -> None:
    plan = execute(connection, sql.COUNT_AHEAD, generic, via="'socket'", limit=1_000)
    assert plan.tables_read_whole() <= {"consumers"}, plan.text
    assert plan.buffers <= 1_500, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_what_was_received_is_found_by_its_id(connection: psycopg.Connection[Any], generic: bool) -> None:
    plan = execute(connection, sql.LOAD_RECEIVED, generic, consumer="'ledger'", ids=IDS)
    assert plan.tables_read_whole() <= {"processed_events"}, plan.text  # there are none of those
    assert plan.buffers <= 1_000, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_burying_looks_for_the_same_message_only(connection: psycopg.Connection[Any], generic: bool) -> None:
    plan = execute(
        connection, sql.BURY_MESSAGES, generic, name="'receive:socket'", marks=IDS, payloads=['"{}"'] * BATCH,
        errors=["x"] * BATCH,
    )  # fmt: skip
    assert plan.tables_read_whole() == set(), plan.text
    assert plan.buffers <= 5_000, f"{plan.buffers} buffers\n{plan.text}"
