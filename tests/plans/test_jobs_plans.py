"""What the queue costs with a million rows in it: index scans only, few pages, few statements (E3.12)."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.dialects import postgresql

from duly.db import Database, Statement, Tx
from duly.jobs import sql, walk
from duly.jobs.worker import Worker
from duly.testing import TestServer
from tests.engine.jobs.wire import breaking_wire
from tests.engine.jobs.witness import schedule_numbers
from tests.support import handlers, rows

WAITING = 1_000_000
NAMES = ["expire", "remind", "notify", "sweep", "report"]

# Three in ten are due, the others lie ahead; every fifth is of each name, every fourth of each priority; some run,
# and of some of these the lease has ended. The indexes are made afterwards, which is faster.
FILL = f"""
INSERT INTO duly.jobs (name, entity_id, is_unique, unique_key, priority, run_at, due_at, created_at)
SELECT name, n::text, true, name || ' ' || n, 1 + n / 5 % 4, run_at, run_at, now()
FROM (SELECT n, ('{{{",".join(NAMES)}}}'::text[])[1 + n % 5] AS name,
             now() + make_interval(secs => n - {WAITING} * 0.3) AS run_at
      FROM generate_series(1, {WAITING}) AS n) AS made;
"""
LEASE = """
UPDATE duly.jobs SET lease_token = id, leased_by = 'w', unique_key = NULL, claimed_at = now(),
    lease_expires_at = now() + CASE WHEN id % 3 = 0 THEN interval '-1 minute' ELSE interval '1 hour' END
WHERE id <= 300;
"""


@pytest.fixture(scope="module")
def crowded(server: TestServer) -> Iterator[str]:
    """A database with a million waiting jobs."""
    with server.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            indexes = connection.execute("""
                SELECT format('DROP INDEX %I.%I', schemaname, indexname), indexdef FROM pg_indexes
                WHERE schemaname = 'duly' AND tablename = 'jobs' AND indexname <> 'jobs_pkey'
            """).fetchall()
            connection.execute("SET synchronous_commit = off; SET maintenance_work_mem = '256MB'")
            connection.execute("ALTER TABLE duly.jobs SET UNLOGGED")
            for drop, _ in indexes:
                connection.execute(drop)
            connection.execute(FILL.encode())
            for _, create in indexes:
                connection.execute(create)
            connection.execute(LEASE)
            connection.execute("VACUUM (ANALYZE) duly.jobs")
        yield dsn


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every node of a plan."""
    yield plan
    for inner in plan.get("Plans", []):
        yield from nodes(inner)


def pages(plan: dict[str, Any]) -> int:
    """How many pages it touched."""
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def assert_by_index(plan: dict[str, Any], *, at_most_pages: int) -> None:
    """No scan of a whole queue, and no more pages than the work needs."""
    scans = [node for node in nodes(plan) if node.get("Relation Name") == "jobs" and "Scan" in node["Node Type"]]
    assert {node["Node Type"] for node in scans} <= {
        "Index Scan", "Index Only Scan", "Bitmap Heap Scan", "Tid Scan"
    }, json.dumps(plan)[:2000]  # fmt: skip
    assert pages(plan) <= at_most_pages, f"{pages(plan)} pages"


Explain = Callable[..., dict[str, Any]]
ExplainInside = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(params=["force_custom_plan", "force_generic_plan"])
def explain(crowded: str, request: pytest.FixtureRequest) -> Iterator[Explain]:
    """Explains a statement as it really runs, planned for its values and planned once for all; nothing stays."""
    with psycopg.connect(crowded) as connection:
        connection.execute(f"SET plan_cache_mode = {request.param}".encode())

        def run(statement: Statement, **values: Any) -> dict[str, Any]:
            connection.execute(f"PREPARE explained AS {statement.numbered}".encode())
            given = ", ".join(_literal(one) for one in statement.args(values))
            query = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE explained({given})"
            found = connection.execute(query.encode()).fetchone()
            assert found is not None
            connection.execute("DEALLOCATE explained")
            plan: dict[str, Any] = found[0][0]["Plan"]
            return plan

        yield run
        connection.rollback()


def _literal(given: Any) -> str:
    if isinstance(given, list):
        return "ARRAY[" + ", ".join(map(_literal, given)) + "]"
    if isinstance(given, UUID):
        return f"uuid '{given}'"
    return f"'{given}'" if isinstance(given, str) else str(given)


@pytest.fixture
def explain_inside(crowded: str) -> Iterator[ExplainInside]:
    """Explains what a function does inside, which EXPLAIN does not show: every statement in it that reads the queue."""
    with psycopg.connect(crowded) as connection:
        connection.execute("""
            LOAD 'auto_explain';
            SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;
            SET auto_explain.log_analyze = on; SET auto_explain.log_buffers = on; SET auto_explain.log_format = json;
            SET client_min_messages = log
        """)
        said: list[str] = []
        connection.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))

        def run(query: str) -> list[dict[str, Any]]:
            said.clear()
            connection.execute(query.encode())
            plans = [json.loads(line[line.index("{") :])["Plan"] for line in said if "plan:" in line]
            inner = [plan for plan in plans if any(node.get("Relation Name") == "jobs" for node in nodes(plan))]
            assert inner
            return inner

        yield run
        connection.rollback()


# -- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 100, 500])
def test_a_claim_reads_what_it_takes_and_no_more(explain: Explain, limit: int) -> None:
    """E3.12: with a million waiting, the claim is an index scan whose cost follows the number of jobs claimed."""
    plan = explain(sql.CLAIM_JOBS, names=NAMES, limit=limit, worker="w", lease_seconds=300.0)
    assert plan["Actual Rows"] == limit
    assert_by_index(plan, at_most_pages=150 + 30 * limit)


def test_a_claim_that_finds_nothing_reads_next_to_nothing(explain: Explain) -> None:
    """E3.12: an idle worker among a million jobs of the others costs nobody anything."""
    plan = explain(sql.CLAIM_JOBS, names=["unknown", "nothing"], limit=500, worker="w", lease_seconds=300.0)
    assert plan["Actual Rows"] == 0
    assert_by_index(plan, at_most_pages=100)


def test_the_next_due_time_is_a_few_index_probes(explain: Explain) -> None:
    """E3.3: one probe for each name and priority."""
    plan = explain(sql.SECONDS_TO_NEXT_JOB, names=NAMES)
    assert_by_index(plan, at_most_pages=200)


def test_counting_the_backlog_is_bounded(explain: Explain) -> None:
    """E3.12: a thousand of each name and priority are looked at, not three hundred thousand."""
    plan = explain(sql.COUNT_BACKLOG, names=NAMES)
    assert_by_index(plan, at_most_pages=25_000)


def test_finding_unknown_names_hops_along_the_index(explain: Explain) -> None:
    """E3.10: the distinct names among a million rows, without reading them."""
    plan = explain(sql.FIND_UNKNOWN_NAMES, names=NAMES[1:])
    assert_by_index(plan, at_most_pages=1_200)


@pytest.mark.parametrize("statement", ["RENEW_LEASES", "READ_HOLDERS", "RELEASE_JOBS"])
def test_what_is_held_is_found_by_its_id(explain: Explain, statement: str) -> None:
    """E3.5: the heartbeat and a clean stop touch their own rows only."""
    held = list(range(1, 201))
    values = {"ids": held, "tokens": held, "progress": ["x"] * 200, "lease_seconds": 300.0}
    plan = explain(getattr(sql, statement), **values)
    assert_by_index(plan, at_most_pages=3_000)


@pytest.mark.parametrize("statement", ["COMPLETE_JOBS", "POSTPONE_JOBS", "BURY_JOBS"])
@pytest.mark.parametrize("count", [1, 200])
def test_a_settlement_touches_the_jobs_it_settles(explain: Explain, statement: str, count: int) -> None:
    """E3.12: one statement for the batch, by id."""
    outcome = {"COMPLETE_JOBS": "done", "POSTPONE_JOBS": "retried", "BURY_JOBS": "buried"}[statement]
    values = {
        "ids": list(range(1, count + 1)),
        "tokens": list(range(1, count + 1)),
        "execution_ids": [uuid4() for _ in range(count)],
        "seconds": [0.1] * count,
        "outcomes": [outcome] * count,
        "messages": ["m"] * count,
        "waits_seconds": [60.0] * count,
        "reasons": ["retries_used_up"] * count,
        "error_kinds": ["E"] * count,
        "worker": "w",
    }
    plan = explain(getattr(sql, statement), **values)
    assert plan["Actual Rows"] == count
    assert_by_index(plan, at_most_pages=1_000 + 100 * count)


def test_cancelling_finds_its_timer_by_index(explain_inside: ExplainInside) -> None:
    """E3.2: among a million timers, a handful of pages."""
    for plan in explain_inside("SELECT duly.cancel('notify', '777777')"):
        assert_by_index(plan, at_most_pages=60)


@pytest.mark.parametrize("rule", ["replace", "keep", "allow"])
def test_scheduling_touches_its_own_row_only(explain_inside: ExplainInside, rule: str) -> None:
    """E3.2: also when the timer exists already."""
    for plan in explain_inside(f"SELECT duly.schedule('notify', '777777', on_conflict => '{rule}')"):
        assert_by_index(plan, at_most_pages=120)


@pytest.mark.parametrize("rule", ["replace", "keep"])
def test_scheduling_a_thousand_touches_a_thousand(explain_inside: ExplainInside, rule: str) -> None:
    """E3.2: half of them exist already."""
    query = f"""
        SELECT duly.schedule_many(array_agg('notify'::text), array_agg((n * 1000)::text), array_agg(now()),
                                  array_agg('{{}}'::jsonb), '{rule}')
        FROM generate_series(500, 1499) AS n
    """
    for plan in explain_inside(query):
        assert_by_index(plan, at_most_pages=100_000)


def test_claiming_a_job_without_an_entity_changes_no_index(dsn: str) -> None:
    """E3.12: the lease is in no index, so the claim is a HOT update."""
    rows(dsn, "SELECT duly.schedule('work') FROM generate_series(1, 100)")
    rows(dsn, "VACUUM duly.jobs")
    rows(dsn, sql.CLAIM_JOBS.percent, {"names": ["work"], "limit": 100, "worker": "w", "lease_seconds": 60})
    rows(dsn, "SELECT pg_stat_force_next_flush()")
    updated, hot = rows(dsn, "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'jobs'")[0]
    assert updated == 100
    assert hot > 50


# -- statement counts ----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def counting(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Database, Counter[str]]]:
    """A database behind a wire that counts what is executed; what the driver asks about types is left out."""
    async with breaking_wire(dsn) as wire:
        db = Database(wire.dsn)
        counted: Counter[str] = Counter()
        monkeypatch.setattr(walk, "CHEAP_CLAIM_SECONDS", float("inf"))  # however slow the machine is just now
        yield db, counted
        await db.close()
    for statement, count in wire.sent.items():
        counted[_called(statement)] += count


def _called(statement: str) -> str:
    for name, known in vars(sql).items():
        if isinstance(known, Statement) and statement in (known.numbered, _as_sqlalchemy(known)):
            return name
    if "pg_type" in statement or "current_setting" in statement or "set_config" in statement:
        return "the driver's own"
    return " ".join(statement.split()[:4])


def _as_sqlalchemy(statement: Statement) -> str:
    dialect: Any = postgresql.asyncpg.dialect
    return str(statement.text.compile(dialect=dialect()))


async def noop() -> None:
    """Nothing to do."""


@pytest.mark.parametrize(("concurrency", "claims", "settlements"), [(10, 15, 15), (100, 4, 3)])
async def test_a_hundred_jobs_are_a_few_claims_and_a_few_settlements(
    dsn: str, monkeypatch: pytest.MonkeyPatch, concurrency: int, claims: int, settlements: int
) -> None:
    """E3.12: claims and settlements are batches: one or two for as many jobs as there are slots."""
    schedule_numbers(dsn, "noop", 100)
    async with counting(dsn, monkeypatch) as (db, sent):
        worked = await Worker(db, handlers(noop), concurrency=concurrency).run_once()
    assert worked.done == 100
    assert 1 <= sent.pop("CLAIM_JOBS") <= claims
    assert 1 <= sent.pop("COMPLETE_DONE") <= settlements
    assert sent.pop("SECONDS_TO_NEXT_JOB") <= claims
    del sent["the driver's own"]
    assert sent == {"COUNT_BACKLOG": 1, "FIND_UNKNOWN_NAMES": 1}


async def test_a_transactional_job_costs_its_own_statements_and_three(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3.11: BEGIN, the handler's own, the settlement, COMMIT; no look-ups besides."""

    async def work(tx: Tx) -> None:
        await tx.execute(text("SELECT 'own'"))

    schedule_numbers(dsn, "work", 50)
    async with counting(dsn, monkeypatch) as (db, sent):
        worked = await Worker(db, handlers(work)).run_once()
    assert worked.done == 50
    assert (sent["SELECT 'own'"], sent["COMPLETE_DONE"], sent["COMMIT;"]) == (50, 50, 50)
    assert 50 <= sent["BEGIN;"] <= 52  # SQLAlchemy opens one more when it first meets a server
    assert sent["CLAIM_JOBS"] <= 20
    assert "POSTPONE_JOBS" not in sent


async def test_an_idle_worker_asks_two_questions_a_cycle(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E3.3: is there anything, and when is the next; and two more when it starts."""
    async with counting(dsn, monkeypatch) as (db, sent):
        assert (await Worker(db, handlers(noop)).run_once()).done == 0
    del sent["the driver's own"]
    assert sent == {"COUNT_BACKLOG": 1, "FIND_UNKNOWN_NAMES": 1, "CLAIM_JOBS": 1, "SECONDS_TO_NEXT_JOB": 1}
