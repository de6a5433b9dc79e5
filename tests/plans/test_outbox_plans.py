"""The relay's statements on a million waiting events: indexes only, and a cost that the backlog does not change.

A plan is looked at in both ways PostgreSQL may plan a prepared statement, for these values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from duly.db import Statement
from duly.inbox.receive import LOAD_EVENTS
from duly.outbox import sql
from duly.testing import TestServer

PENDING = 1_000_000
PARKED = 100_000
QUIET_LANE = 63
FILL_OUTBOX = f"""
INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, created_at, attempts, failed_at, last_error, parked)
SELECT gen_random_uuid(), 'order.changed', 'shop', CASE WHEN n <= {PARKED + 1} THEN 'stuck' ELSE 'a' || n % 50000 END,
       '{{}}', '2033-01-01', CASE WHEN n = 1 THEN 5 ELSE 0 END, CASE WHEN n = 1 THEN timestamptz '2033-01-01' END,
       CASE WHEN n = 1 THEN 'no such topic' END, n BETWEEN 2 AND {PARKED + 1}
FROM generate_series(1, {PENDING}) AS n
"""
FILL_HISTORY = """
SELECT duly.create_partitions('events', '2033-01-01', 60);
INSERT INTO duly.events
SELECT duly.uuid7(at), n, 'order.changed', 'shop', 'a' || n % 1000, '{}', '{}', at, at, 0
FROM generate_series(1, 60000) AS n,
     LATERAL (SELECT timestamptz '2033-01-01 12:00 UTC' + n % 60 * interval '1 day') AS day(at);
INSERT INTO duly.processed_events SELECT 'ledger', id, created_at FROM duly.events;
INSERT INTO duly.consumers (name, patterns, ordered, registered_at) VALUES ('ledger', '{*}', true, '2033-01-01');
INSERT INTO duly.jobs (name, entity_id, order_key, run_at, due_at, created_at, event_id, waits)
SELECT 'consumer:ledger', aggregate_id, aggregate_id,
       CASE WHEN seq > 1000 THEN 'infinity' ELSE timestamptz '2033-01-01' END, created_at, created_at, id,
       CASE WHEN seq > 1000 THEN 'behind' ELSE 'retry' END FROM duly.events ORDER BY seq;
INSERT INTO duly.dead_letters (id, name, entity_id, order_key, payload, priority, due_at, created_at, original_delay,
    retry_count, source, reason, error, error_kind, buried_at)
SELECT -n, 'consumer:ledger', 'd' || n, 'd' || n, '{}', 3, now(), now(), '0', 5, 'Deferred', 'worker_died', '', '',
       now()
FROM generate_series(1, 50000) AS n;
"""


@pytest.fixture(scope="module")
def connection(server: TestServer) -> Iterator[psycopg.Connection[Any]]:
    """A database with the whole backlog; no test changes it."""
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as made:
        made.execute("SET statement_timeout = 0")
        fill_without_checks(made)
        for statement in FILL_HISTORY.split(";\n"):
            made.execute(statement.encode())
        made.execute("VACUUM ANALYZE duly.outbox")
        made.execute("ANALYZE")
        yield made


def fill_without_checks(connection: psycopg.Connection[Any]) -> None:
    """A million rows in seconds: the indexes and checks are taken away and put back as they were."""
    constraints = connection.execute(
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'duly.outbox'::regclass"
        " AND contype = 'c'"
    ).fetchall()
    indexes = connection.execute(
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'outbox' AND indexname <> 'outbox_pkey'"
    ).fetchall()
    for name, _ in indexes:
        connection.execute(f"DROP INDEX duly.{name}".encode())
    for name, _ in constraints:
        connection.execute(f"ALTER TABLE duly.outbox DROP CONSTRAINT {name}".encode())
    connection.execute(FILL_OUTBOX.encode())
    connection.execute(f"DELETE FROM duly.outbox WHERE lane = {QUIET_LANE}".encode())
    for name, definition in constraints:
        connection.execute(f"ALTER TABLE duly.outbox ADD CONSTRAINT {name} {definition} NOT VALID".encode())
    for _, definition in indexes:
        connection.execute(definition.encode())


# -- looking at plans ------------------------------------------------------------------------------------------------


class Plan:
    """An executed plan, rolled back afterwards."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.nodes = list(self._walk(root["Plan"]))
        self.buffers: int = root["Plan"]["Shared Hit Blocks"] + root["Plan"]["Shared Read Blocks"]
        self.text = "\n".join(
            f"{node['Node Type']} on {node.get('Index Name') or node.get('Relation Name')}: {node['Actual Rows']} rows"
            for node in self.nodes
        )

    def _walk(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield node
        for child in node.get("Plans", ()):
            yield from self._walk(child)

    def tables_read_whole(self) -> set[str]:
        return {node["Relation Name"] for node in self.nodes if node["Node Type"] == "Seq Scan"}

    def partitions(self) -> set[str]:
        """The partitions of the history that were looked into."""
        return {
            node["Relation Name"]
            for node in self.nodes
            if node.get("Relation Name", "").startswith("events") and node["Actual Loops"] > 0
        }


def execute(connection: psycopg.Connection[Any], statement: Statement, generic: bool, **values: Any) -> Plan:
    mode = "force_generic_plan" if generic else "force_custom_plan"
    connection.execute(f"SET plan_cache_mode = {mode}".encode())
    connection.execute(b"DEALLOCATE ALL")
    connection.execute(f"PREPARE looked_at AS {statement.numbered}".encode())
    arguments = ", ".join(literal(values[name]) for name in statement.names)
    with connection.transaction(force_rollback=True):
        call = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE looked_at{f'({arguments})' if arguments else ''}"
        row = connection.execute(call.encode()).fetchone()
    assert row is not None
    return Plan(row[0][0])


def literal(value: Any) -> str:
    if isinstance(value, list):
        return "'{" + ",".join(str(item).lower() if isinstance(item, bool) else str(item) for item in value) + "}'"
    return str(value)


any_planning = pytest.mark.parametrize("generic", [False, True], ids=["for_these_values", "for_any_values"])
LANES = list(range(64))


# -- the outbox ------------------------------------------------------------------------------------------------------


@any_planning
@pytest.mark.parametrize("batch", [100, 1_000])
def test_fetching_a_batch_costs_by_the_batch_and_not_by_the_backlog(
    connection: psycopg.Connection[Any], generic: bool, batch: int
) -> None:
    """E1.3, FAULTS: a handful of buffers for each event, with 900,000 ready and 100,000 parked behind a failed one."""
    plan = execute(connection, sql.FETCH_EVENTS, generic, lanes=LANES, batch=batch, bodies=True)
    assert plan.tables_read_whole() == set(), plan.text
    assert plan.buffers <= 200 + 12 * batch, f"{plan.buffers} buffers\n{plan.text}"
    assert not any(node["Node Type"] == "Bitmap Heap Scan" for node in plan.nodes), plan.text


@any_planning
def test_fetching_for_a_share_of_the_lanes_costs_no_more(connection: psycopg.Connection[Any], generic: bool) -> None:
    """E1.5: with eight relays each asks for eight lanes."""
    plan = execute(connection, sql.FETCH_EVENTS, generic, lanes=LANES[8:16], batch=100, bodies=True)
    assert plan.tables_read_whole() == set(), plan.text
    assert plan.buffers <= 1_400, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_a_lane_without_work_costs_next_to_nothing(connection: psycopg.Connection[Any], generic: bool) -> None:
    """E1.3: the backlog of the other lanes is not looked at."""
    plan = execute(connection, sql.FETCH_EVENTS, generic, lanes=[QUIET_LANE], batch=100, bodies=True)
    assert plan.buffers <= 10, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
@pytest.mark.parametrize(
    ("statement", "values", "most_buffers"),
    [
        (sql.SECONDS_TO_NEXT_EVENT, {}, 10),
        (sql.PARK_EVENTS, {"seqs": list(range(200_000, 200_100))}, 3_000),
        (sql.UNPARK_AGGREGATES, {"aggregates": ["stuck"]}, 40_000),
        (sql.UNPARK_STRAYS, {}, 1_000),
        (
            sql.FAIL_EVENTS,
            {"seqs": list(range(200_000, 200_100)), "errors": ["x"] * 100, "attempts": 5},
            6_000,
        ),
    ],
    ids=["seconds_to_next_event", "park_events", "unpark_aggregates", "unpark_strays", "fail_events"],
)
def test_every_other_statement_on_the_outbox_is_bounded(
    connection: psycopg.Connection[Any], generic: bool, statement: Statement, values: dict[str, Any], most_buffers: int
) -> None:
    """FAULTS: none of them reads the backlog; what they write is at most a thousand rows."""
    plan = execute(connection, statement, generic, **values)
    assert plan.tables_read_whole() <= {"lanes"}, plan.text
    assert plan.buffers <= most_buffers, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_publishing_a_batch_touches_its_own_rows_only(connection: psycopg.Connection[Any], generic: bool) -> None:
    """E1.3: the move to the history and the jobs of an ordered consumer, beside 60,000 jobs and 50,000 dead letters."""
    seqs = list(range(300_000, 300_100))
    plan = execute(
        connection, sql.PUBLISH_EVENTS, generic, seqs=seqs, routed_seqs=seqs, consumers=["ledger"] * 100,
        ordered=[True] * 100,
    )  # fmt: skip
    assert plan.tables_read_whole() == set(), plan.text
    assert plan.buffers <= 20_000, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_the_sweep_for_jobs_that_wait_behind_nothing_costs_by_the_aggregates(
    connection: psycopg.Connection[Any], generic: bool
) -> None:
    """E2.3: a thousand aggregates with sixty jobs each: a few probes for each line, not one for each job."""
    plan = execute(connection, sql.RELEASE_STRAYS, generic)
    assert plan.tables_read_whole() == set(), plan.text
    assert plan.buffers <= 15_000, f"{plan.buffers} buffers\n{plan.text}"


# -- the history -----------------------------------------------------------------------------------------------------


def ids_of_one_day(connection: psycopg.Connection[Any], count: int) -> list[str]:
    rows = connection.execute(f"SELECT id FROM duly.events_p20330131 LIMIT {count}".encode()).fetchall()
    return [str(row[0]) for row in rows]


@pytest.mark.parametrize("events", [1, 100, 500])
def test_events_are_looked_up_in_the_partition_of_their_day_alone(
    connection: psycopg.Connection[Any], events: int
) -> None:
    """E1.8: what a worker loads is of a day or two; the other partitions are not opened, however often it asks."""
    connection.execute(b"SET plan_cache_mode = auto")
    connection.execute(b"DEALLOCATE ALL")
    connection.execute(f"PREPARE looked_at AS {LOAD_EVENTS.numbered}".encode())
    values: dict[str, Any] = {"consumer": "'ledger'", "ids": ids_of_one_day(connection, events)}
    call = f"EXECUTE looked_at({', '.join(literal(values[name]) for name in LOAD_EVENTS.names)})"
    for _ in range(10):  # PostgreSQL may change its mind about a prepared statement after the fifth
        assert len(connection.execute(call.encode()).fetchall()) == events
    row = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}".encode()).fetchone()
    assert row is not None
    plan = Plan(row[0][0])
    assert plan.partitions() == {"events_p20330131"}, plan.text
    assert plan.buffers <= 100 + 12 * events, f"{plan.buffers} buffers\n{plan.text}"
