"""Deliveries among a million: by index, at a cost of what is taken (E6.1, E6.2).

200 subscriptions have 4,000 deliveries each; one that is down has 200,000, which wait. A plan is looked at in both ways
PostgreSQL may plan a prepared statement, for these values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from duly.db import Statement
from duly.testing import TestServer
from duly.webhooks import sql, sql_look, sql_operate
from tests.plans.test_transfers_plans import any_planning, explain, fetch, prepare

DOWN = "00000000-0000-7000-8000-000000000001"
BUSY = "00000000-0000-7000-8000-000000000005"
DELIVERY = "00000000-0000-7000-8000-000000099999"
FILL = """
INSERT INTO duly.webhook_subscriptions (id, owner, url, patterns, created_at, updated_at)
SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 'owner' || n % 50, 'https://example.com/', '{*}',
       '2026-01-01', '2026-01-01'
FROM generate_series(1, 201) AS n;
INSERT INTO duly.webhook_secrets (subscription_id, number, key_id, sealed, created_at)
SELECT id, 1, 'k', repeat('x', 60)::bytea, '2026-01-01' FROM duly.webhook_subscriptions;
INSERT INTO duly.webhook_deliveries (id, subscription_id, event_id, event_type, aggregate_id, event_created_at, status,
                                     attempts, tries, next_attempt_at, created_at, finished_at)
SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid,
       ('00000000-0000-7000-8000-' || lpad((CASE WHEN n % 5 = 0 THEN 1 ELSE 2 + n / 5 % 200 END)::text, 12, '0'))::uuid,
       gen_random_uuid(), 'order.placed', 'a' || n, '2026-01-01', status, 1, 1,
       CASE WHEN status = 'RETRYING' THEN timestamptz '2030-01-01' END, '2026-01-01'::timestamptz + n * interval '1 s',
       CASE WHEN status IN ('DELIVERED', 'PERMANENTLY_FAILED') THEN timestamptz '2026-01-02' END
FROM generate_series(1, 1000000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n % 5 = 0 THEN 'WAITING' WHEN n % 4001 = 0 THEN 'PERMANENTLY_FAILED'
                                WHEN n % 3001 = 0 THEN 'RETRYING' ELSE 'DELIVERED' END) AS made(status)
"""


@pytest.fixture(scope="module")
def dsn(server: TestServer) -> Iterator[str]:
    """A database with all of it; every test rolls back what it did."""
    with server.database() as made:
        with psycopg.connect(made, autocommit=True) as connection:
            connection.execute("SET statement_timeout = 0")
            connection.execute("SET session_replication_role = replica")  # no foreign keys are looked up meanwhile
            for statement in FILL.split(";\n"):
                connection.execute(statement.encode())
            connection.execute("VACUUM ANALYZE")
        yield made


TIMES = {"since": "'2026-01-01'", "until": "'2026-02-01'"}
LOOKED_AT: list[tuple[Statement, dict[str, str], int]] = [
    (sql.ADMIT, {"ids": f"'{{{DOWN}}}'", "most": "25"}, 400),
    (sql.ADMIT, {"ids": f"'{{{BUSY}}}'", "most": "25"}, 200),
    (sql.LOCK_SUBSCRIPTIONS, {"ids": f"'{{{DOWN},{BUSY}}}'"}, 60),
    (sql.TAKE_PLACE, {"id": f"'{DELIVERY}'", "turn": "0", "subscription_id": f"'{BUSY}'", "most": "25"}, 100),
    (sql.READ_DELIVERIES, {"ids": f"'{{{DELIVERY}}}'"}, 100),
    (sql.END_DELIVERIES, {"ids": f"'{{{DELIVERY}}}'", "turns": "'{0}'", "error": "'x'"}, 100),
    (sql.FIND_IDLE, {"limit": "100"}, 3_000),
    (sql_operate.LIST_DELIVERIES, {"before": "NULL", "limit": "50"}, 200),
    (sql_operate.LIST_DELIVERIES, {"before": "500000", "limit": "50"}, 200),
    (sql_operate.LIST_DELIVERIES_OF_SUBSCRIPTION,
     {"subscription_id": f"'{BUSY}'", "before": "NULL", "limit": "50"}, 300),
    (sql_operate.LIST_DELIVERIES_OF_BOTH,
     {"subscription_id": f"'{BUSY}'", "status": "'RETRYING'", "before": "NULL", "limit": "50"}, 200),
    (sql_operate.LIST_DELIVERIES_OF_STATUS, {"status": "'PERMANENTLY_FAILED'", "before": "NULL", "limit": "50"}, 3_000),
    (sql_operate.FIND_DELIVERY, {"id": f"'{DELIVERY}'"}, 20),
    (sql_operate.LIST_ATTEMPTS, {"id": f"'{DELIVERY}'", "limit": "50"}, 20),
    (sql_operate.LIST_OWN_SUBSCRIPTIONS, {"owner": "'owner7'", "before": "NULL", "limit": "50"}, 100),
    (sql_operate.REDELIVER, {"id": f"'{DELIVERY}'"}, 100),
    (sql_operate.REDELIVER_RANGE,
     {"subscription_id": f"'{BUSY}'", "statuses": "'{PERMANENTLY_FAILED}'", "after": "0", "limit": "100", **TIMES},
     500),
    (sql_operate.COUNT_DELIVERIES,
     {"subscription_id": f"'{DOWN}'", "statuses": "'{WAITING,DELIVERED,RETRYING}'", "cap": "10001"}, 12_000),
    (sql_operate.COUNT_RANGE,
     {"subscription_id": f"'{BUSY}'", "statuses": "'{DELIVERED,PERMANENTLY_FAILED,CANCELLED}'", "after": "0",
      "cap": "10001", **TIMES}, 6_000),
    (sql_operate.RESOLVE_FAILED_ALERT, {"id": f"'{BUSY}'"}, 60),
    (sql_look.LIST_OF_TYPE,
     {"subscription_id": f"'{BUSY}'", "before": "NULL", "event_type": "'order.placed'", "scan": "5000", "limit": "51"},
     300),
    (sql_look.LIST_OF_TYPE,
     {"subscription_id": f"'{BUSY}'", "before": "NULL", "event_type": "'none'", "scan": "5000", "limit": "51"}, 6_000),
    (sql_look.LIST_OF_TYPE_AND_STATUS,
     {"subscription_id": f"'{DOWN}'", "status": "'WAITING'", "before": "NULL", "event_type": "'none'", "scan": "5000",
      "limit": "51"}, 6_000),
    (sql_look.FIND_REACHED, {"subscription_id": f"'{DOWN}'", "before": "NULL", "scan": "5000"}, 300),
    (sql_look.FIND_REACHED_OF_STATUS,
     {"subscription_id": f"'{DOWN}'", "status": "'WAITING'", "before": "NULL", "scan": "5000"}, 300),
    (sql_look.LIST_OF_EVENTS,
     {"event_ids": f"'{{{DELIVERY}}}'", "skip": "0", "subscriptions": "5000", "limit": "100"}, 1_500),
    (sql_look.LIST_OF_EVENTS,
     {"event_ids": f"'{{{DELIVERY},{BUSY}}}'", "skip": "100", "subscriptions": "50", "limit": "501"}, 700),
    (sql_look.COUNT_SUBSCRIPTIONS, {"cap": "5000"}, 30),
    (sql_look.LIST_ATTEMPTS_OF, {"ids": f"'{{{DELIVERY}}}'", "each": "8", "limit": "100"}, 60),
    (sql_look.COUNT_OF_SUBSCRIPTIONS,
     {"ids": f"'{{{DOWN},{BUSY}}}'", "statuses": "'{WAITING,QUEUED,RETRYING,PERMANENTLY_FAILED}'", "cap": "1001"},
     300),
    (sql_look.FIND_OLDEST_WAITING, {"id": f"'{DOWN}'"}, 20),
    (sql_look.FIND_ANY_SUBSCRIPTION, {"id": f"'{DOWN}'"}, 30),
    (sql_look.READ_TROUBLE, {"cap": "1001", "limit": "100"}, 100),
    (sql_operate.NOTE_RECEIVED, {"provider": "'p'", "id": "'x'"}, 200),
]  # fmt: skip


@any_planning
@pytest.mark.parametrize(("statement", "values", "most_buffers"), LOOKED_AT)
def test_a_statement_reads_no_more_than_it_takes(
    dsn: str, generic: bool, statement: Statement, values: dict[str, str], most_buffers: int
) -> None:
    with psycopg.connect(dsn, autocommit=False) as connection:
        call = prepare(connection, statement.text, generic, **values)
        plan = explain(connection, call)
        connection.rollback()
    small = {
        "business_clock",
        "webhook_subscriptions",
        "webhook_secrets",
        "webhook_attempts",
        "received_webhooks",
        "alerts",
    }
    whole = {name for name in plan.tables_read_whole() if not name.startswith("events")}
    assert whole <= small, plan.text
    assert plan.buffers <= most_buffers, f"{plan.buffers} buffers\n{plan.text}"


FIRST = {"subscription_id": "'00000000-0000-0000-0000-000000000000'", "status": "''", "number": "0"}
LATER = {"subscription_id": "'00000000-0000-7000-8000-000000000030'", "status": "'RETRYING'", "number": "500000"}


@any_planning
@pytest.mark.parametrize(("place", "limit"), [(FIRST, "5000"), (FIRST, "50"), (LATER, "50")])
def test_the_sweep_looks_at_what_is_under_way(dsn: str, generic: bool, place: dict[str, str], limit: str) -> None:
    with psycopg.connect(dsn, autocommit=False) as connection:
        call = prepare(connection, sql.FIND_STRAYS.text, generic, limit=limit, **place)
        assert len(fetch(connection, call)) > 0
        plan = explain(connection, call)
    assert "webhook_deliveries" not in plan.tables_read_whole(), plan.text
    assert plan.buffers <= 10_000, f"{plan.buffers} buffers\n{plan.text}"


def test_the_clean_up_starts_with_the_oldest(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=False) as connection:
        connection.execute(b"SELECT set_config('duly.forgetting', 'on', true)")
        call = prepare(connection, sql.FORGET_DELIVERIES.text, True, days="1", batch="1000")
        plan = explain(connection, call)
        connection.rollback()
    assert "webhook_deliveries" not in plan.tables_read_whole(), plan.text
    assert plan.buffers <= 40_000, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_the_clean_up_of_what_was_deleted_looks_at_what_was_under_way(dsn: str, generic: bool) -> None:
    """Of a deleted subscription with 200,000 that wait, and of the others nothing."""
    with psycopg.connect(dsn, autocommit=False) as connection:
        connection.execute(b"SELECT set_config('duly.forgetting', 'on', true)")
        connection.execute(
            b"UPDATE duly.webhook_subscriptions SET status = 'DELETED' WHERE id = ANY(%s::uuid[])", [[DOWN, BUSY]]
        )
        call = prepare(connection, sql.FORGET_DELETED.text, generic, days="1", batch="1000")
        plan = explain(connection, call)
        connection.rollback()
    assert "webhook_deliveries" not in plan.tables_read_whole(), plan.text
    assert plan.buffers <= 1_000, f"{plan.buffers} buffers\n{plan.text}"


def test_there_are_a_million(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT count(*) FROM duly.webhook_deliveries").fetchone() == (1_000_000,)
