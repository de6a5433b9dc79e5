"""The claim among 200,000 events: by index, at a cost of what it takes, whatever waits (B3, B7).

150,000 are pending, 120,000 of them overdue; 1,000 are under way, 49,000 are over. A plan is looked at in both ways
PostgreSQL may plan a prepared statement, for these values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import psycopg
import pytest
from sqlalchemy import TextClause

from apps.birthdays import store
from apps.wiring import app
from duly.testing import BusinessClock, TestServer
from tests.plans.test_transfers_plans import any_planning, explain, fetch, prepare

NOW = datetime(2030, 1, 1, tzinfo=UTC)
FILL = """
INSERT INTO birthdays.events (id, user_id, year, target_local, timezone, target_utc, status, processing_at, executed_at,
                              failure_reason, created_at, updated_at)
SELECT gen_random_uuid(), gen_random_uuid(), date_part('year', day), day + '09:00', 'UTC',
       (day + '09:00') AT TIME ZONE 'UTC', status,
       CASE WHEN status <> 'PENDING' THEN (day + '09:00') AT TIME ZONE 'UTC' END,
       CASE WHEN status = 'COMPLETED' THEN (day + '09:00') AT TIME ZONE 'UTC' END,
       CASE WHEN status = 'FAILED' THEN 'the webhook answered 404' END, '2020-01-01', '2020-01-01'
FROM generate_series(1, 200000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n <= 120000 THEN timestamp '2029-12-30' - n % 300 * interval '1 day'
                                WHEN n <= 150000 THEN timestamp '2030-02-01' + n % 300 * interval '1 day'
                                ELSE timestamp '2027-06-01' + n % 700 * interval '1 day' END,
                           CASE WHEN n <= 150000 THEN 'PENDING' WHEN n <= 151000 THEN 'PROCESSING'
                                WHEN n % 50 = 0 THEN 'FAILED' ELSE 'COMPLETED' END) AS made(day, status)
ORDER BY random();
INSERT INTO birthdays.people SELECT user_id, 'A', 'B', '1990-01-01', 'UTC' FROM birthdays.events
"""


@pytest.fixture(scope="module")
def dsn(server: TestServer) -> Iterator[str]:
    """A database with all of it; every test rolls back what it did."""
    with server.database(app) as made:
        with psycopg.connect(made, autocommit=True) as connection:
            connection.execute("SET statement_timeout = 0")
            for statement in FILL.split(";\n"):
                connection.execute(statement.encode())
            connection.execute("VACUUM ANALYZE")
        BusinessClock(made).freeze(NOW)
        yield made


@any_planning
@pytest.mark.parametrize(("most", "taken"), [(1_000, 0), (1_040, 40), (2_000, 100)])
def test_the_claim_looks_at_what_it_takes(dsn: str, generic: bool, most: int, taken: int) -> None:
    """B3: some pages for each that it takes and each that is under way; the 120,000 behind them are not looked at."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, store.LOCK_READY_EVENTS, generic, batch="100", most=str(most))
        found, plan = fetch(connection, call), explain(connection, call)
        assert len([row for row in found if row[3] is not None]) == taken
        assert found[0][1] == most - 1_000
        assert plan.indexes <= {"events_due", "events_processing"}, plan.text
        assert plan.tables_read_whole() <= {"business_clock"}, plan.text
        assert plan.buffers <= 1_100 + 20 * taken, f"{plan.buffers} buffers\n{plan.text}"
        ids, versions = "{" + ",".join(str(row[3]) for row in found) + "}", "{" + ",".join("1" for _ in found) + "}"
        if taken:
            call = prepare(
                connection, store.START_EVENTS, generic, ids=f"'{ids}'", versions=f"'{versions}'", now="'2030-01-01Z'"
            )
            assert len(fetch(connection, call)) == taken
            plan = explain(connection, call)
            assert plan.tables_read_whole() == set(), plan.text
            assert plan.buffers <= 60 * taken, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
@pytest.mark.parametrize(
    ("statement", "indexes", "most_buffers"),
    [
        (store.FIND_MISSED_EVENTS, {"events_due"}, 1_100),
        (store.FIND_STALLED_EVENTS, {"events_processing"}, 1_100),
        (store.FORGET_EVENTS, {"events_over", "events_pkey"}, 800),
        (store.READ_PLANNED_EVENTS, {"events_due"}, 150),
        (store.FIND_OPEN_EVENTS, {"events_one_a_year", "events_one_pending"}, 30),
        (store.LIST_EVENTS, {"events_one_a_year"}, 20),
        (store.DELETE_PENDING, {"events_one_pending", "events_one_a_year"}, 20),
        (store.LOCK_PEOPLE, {"people_pkey"}, 20),
        (store.COMPLETE_EVENT, {"events_pkey"}, 80),
        (store.FAIL_EVENTS, {"events_pkey"}, 80),
        (store.FIND_DELIVERY, {"events_pkey", "people_pkey"}, 20),
    ],
    ids=[
        "find_missed", "find_stalled", "forget", "read_planned", "find_open", "list", "delete_pending", "lock_people",
        "complete", "fail", "find_delivery",
    ],
)  # fmt: skip
def test_whatever_else_is_asked_costs_some_pages(
    dsn: str, generic: bool, statement: TextClause, indexes: set[str], most_buffers: int
) -> None:
    """B1 to B7: beside 200,000 events."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT id, user_id FROM birthdays.events WHERE status = 'PROCESSING' ORDER BY id OFFSET 500 LIMIT 1"
        ).fetchone()
        assert row is not None
        event_id, user_id = row
        call = prepare(
            connection, statement, generic, id=f"'{event_id}'", ids=f"'{{{event_id}}}'", user_id=f"'{user_id}'",
            user_ids=f"'{{{user_id}}}'", limit="1000" if "missed" in statement.text else "100", reason="'r'",
            was="'{PROCESSING}'", seconds="90", minutes="15", years="2", before="9999", days="8",
            after_utc="'2029-12-01Z'", after_id="'00000000-0000-0000-0000-000000000000'",
        )  # fmt: skip
        explain(connection, call)  # the first time a session also looks up the functions that it calls
        plan = explain(connection, call)
    assert plan.indexes, plan.text
    assert plan.indexes <= indexes, plan.text
    assert plan.tables_read_whole() <= {"business_clock"}, plan.text
    assert plan.buffers <= most_buffers, f"{plan.buffers} buffers\n{plan.text}"


def test_a_claim_without_anything_due_reads_next_to_nothing(dsn: str) -> None:
    """B3: most minutes are like this."""
    BusinessClock(dsn).freeze(datetime(2025, 1, 1, tzinfo=UTC))
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            call = prepare(connection, store.LOCK_READY_EVENTS, True, batch="100", most="1000")
            plan = explain(connection, call)
            assert plan.buffers <= 1_100, plan.text
    finally:
        BusinessClock(dsn).freeze(NOW)
