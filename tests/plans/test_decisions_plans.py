"""Decisions among a million log rows and a busy month of observations: a few pages, by index (F11, F14).

A million decisions of two rule sets over thirty days, each day a partition; a key with observations in every minute of
33 days, and 200,000 other keys. A plan is looked at in both ways PostgreSQL may plan a prepared statement.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import psycopg
import pytest

from apps.finance.decisions import sql
from apps.wiring import app
from duly.testing import BusinessClock, TestServer
from tests.plans.test_transfers_plans import Plan, any_planning, explain, fetch, prepare

NOW = datetime(2034, 1, 31, 12, 34, 56, tzinfo=UTC)
FILL = """
SELECT decisions.create_partitions('2034-01-01', 31);
INSERT INTO decisions.log (id, rule_set_id, rule_set_version, snapshot_id, engine, at, decision, facts, matched,
                           incomplete, evaluated, latency_us)
SELECT duly.uuid7(m.at), CASE WHEN n % 10 = 0 THEN 'aml-screening' ELSE 'payment-screening' END, 1, gen_random_uuid(),
       '1', m.at, CASE WHEN n % 50000 = 7 THEN 'REJECT' ELSE 'APPROVE' END, '{"amount": "5"}', '[]', '[]', 3, 40
FROM generate_series(1, 1000000) AS n
CROSS JOIN LATERAL (SELECT timestamptz '2034-01-01' + n * interval '2.5 seconds') AS m(at);
INSERT INTO decisions.buckets
SELECT 'payments', '["busy"]', 'minute', timestamptz '2033-12-29' + n * interval '1 minute', 100, 100, 5
FROM generate_series(0, 33 * 1440 + 754) AS n;
INSERT INTO decisions.buckets
SELECT stream, key, 'hour', date_trunc('hour', start), sum(count), sum(total), max(largest)
FROM decisions.buckets GROUP BY 1, 2, 4;
INSERT INTO decisions.buckets
SELECT 'payments', '["k' || n || '"]', w.width, date_trunc(w.width, m.at), 1, 10, 10
FROM generate_series(1, 200000) AS n CROSS JOIN (VALUES ('minute'), ('hour')) AS w(width)
CROSS JOIN LATERAL (SELECT timestamptz '2034-01-01' + n * interval '13 seconds') AS m(at);
INSERT INTO decisions.sightings
SELECT 'payments', '["busy"]', 'v' || n, timestamptz '2034-01-01' + n * interval '10 seconds'
FROM generate_series(1, 200000) AS n
"""


@pytest.fixture(scope="module")
def dsn(server: TestServer) -> Iterator[str]:
    """A database with all of it; every test rolls back what it did."""
    with server.database(app) as made:
        with psycopg.connect(made, autocommit=True) as connection:
            connection.execute("SET statement_timeout = 0")
            connection.execute("SET TimeZone = 'UTC'")
            for statement in FILL.split(";\n"):
                connection.execute(statement.encode())
            connection.execute("VACUUM ANALYZE decisions.log, decisions.buckets, decisions.sightings")
        BusinessClock(made).freeze(NOW)
        yield made


def whole(plan: Plan) -> list[str]:
    """Partitions that were read from end to end, but for the empty ones."""
    scans = [node for node in plan.nodes if node["Node Type"] == "Seq Scan"]
    return [node["Relation Name"] for node in scans if node["Actual Rows"] or node.get("Rows Removed by Filter")]


def ask(key: str, seconds: int) -> dict[str, str]:
    """Every function at once."""
    functions = ["count", "sum", "max", "distinct"]
    return {
        "id": "'payment-screening'", "functions": f"ARRAY{functions}", "streams": f"ARRAY{['payments'] * 4}",
        "keys": f"ARRAY{[key] * 4}", "windows": f"ARRAY{[seconds] * 4}", "excluded": "ARRAY[NULL, NULL, NULL, NULL]",
        "most_distinct": "1000",
    }  # fmt: skip


@any_planning
@pytest.mark.parametrize(
    ("seconds", "minutes", "most"), [(3_600, 61, 400), (86_400, 1_441, 400), (31 * 86_400, 44_641, 3_000)]
)
def test_a_window_costs_the_same_however_much_was_observed(
    dsn: str, generic: bool, seconds: int, minutes: int, most: int
) -> None:
    """F9, F14: at most an hour of minutes and a month of hours, of a key with six million observations."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, sql.FIND_CURRENT_WITH_VELOCITY, generic, **ask('["busy"]', seconds))
        [(_, now, velocity)] = fetch(connection, call)
        plan = explain(connection, call)
    assert now == NOW
    expected = minutes * 100
    distinct = min(1_000, int((datetime(2034, 1, 24, 3, 33, 20, tzinfo=UTC) - NOW).total_seconds() + seconds) // 10)
    assert [int(one) for one in velocity] == [expected, expected, 5, max(0, distinct)]
    assert plan.tables_read_whole() <= {"rule_sets", "business_clock"}, plan.text
    assert plan.buffers <= most, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_a_decision_is_found_in_its_day_and_a_page_by_its_rule_set(dsn: str, generic: bool) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(b"SELECT id FROM decisions.log ORDER BY id OFFSET 500000 LIMIT 1").fetchone()
        assert row is not None
        call = prepare(connection, sql.FIND_DECISION, generic, id=f"'{row[0]}'")
        plan = explain(connection, call)
        assert plan.buffers <= 8, f"{plan.buffers} buffers\n{plan.text}"
        first = "duly.uuid7_floor('2034-01-01')"
        call = prepare(
            connection, sql.FIND_FACTS, generic, rule_set_id="'aml-screening'", before=f"'{row[0]}'", since=first,
            limit="200",
        )  # fmt: skip
        assert len(fetch(connection, call)) == 200
        plan = explain(connection, call)
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.buffers <= 600, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_the_few_that_were_rejected_are_found_among_a_million(dsn: str, generic: bool) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(
            connection, sql.LIST_FLAGGED, generic, rule_set_id="'payment-screening'", decision="'REJECT'",
            before="NULL", limit="51",
        )  # fmt: skip
        assert len(fetch(connection, call)) == 20
        plan = explain(connection, call)
        assert not whole(plan), plan.text
        assert plan.buffers <= 200, f"{plan.buffers} buffers\n{plan.text}"
        call = prepare(
            connection, sql.LIST_DECISIONS, generic, rule_set_id="'aml-screening'", decision="NULL", before="NULL",
            limit="51",
        )  # fmt: skip
        plan = explain(connection, call)
        assert not whole(plan), plan.text
        assert plan.buffers <= 250, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_logging_a_decision_and_observing_cost_a_few_pages(dsn: str, generic: bool) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(
            connection, sql.INSERT_DECISION, generic, at="duly.now()", rule_set_id="'payment-screening'",
            rule_set_version="1", snapshot_id="gen_random_uuid()", engine="'1'", subject="NULL", decision="'APPROVE'",
            score="NULL", facts="'{}'", matched="'[]'", incomplete="'[]'", evaluated="1", latency_us="1",
        )  # fmt: skip
        plan = explain(connection, call)  # a new connection reads the catalogs of some thirty partitions first
        assert plan.buffers <= 100, f"{plan.buffers} buffers\n{plan.text}"
        call = prepare(
            connection, sql.OBSERVE, generic, streams="ARRAY['payments']", keys="""ARRAY['["busy"]']""",
            amounts="ARRAY[5]", values="ARRAY['v7']", ats="ARRAY[NULL::timestamptz]",
        )  # fmt: skip
        plan = explain(connection, call)
        assert plan.tables_read_whole() <= {"business_clock"}, plan.text
        assert plan.buffers <= 100, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
@pytest.mark.parametrize(
    ("statement", "index"), [("FORGET_BUCKETS", "buckets_start"), ("FORGET_SIGHTINGS", "sightings_seen")]
)
def test_the_clean_up_reads_what_it_takes(dsn: str, generic: bool, statement: str, index: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, getattr(sql, statement), generic, days="10", batch="500")
        assert fetch(connection, call) == [(500,)]
        plan = explain(connection, call)
    assert index in plan.indexes, plan.text
    assert plan.tables_read_whole() <= {"business_clock"}, plan.text
    assert plan.buffers <= 6_000, f"{plan.buffers} buffers\n{plan.text}"
