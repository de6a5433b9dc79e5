"""The database went away under a handler's transaction: nobody's attempt, but not for ever (E3.11, E3.15)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from duly.db import Database, Tx
from duly.jobs import run as run_module
from duly.jobs.handlers import JobContext
from duly.jobs.outcomes import Snooze
from duly.jobs.worker import Worker
from duly.testing import BusinessClock
from tests.engine.jobs.wire import breaking_wire
from tests.engine.jobs.witness import is_empty, outcomes, queue, terminate_backends, until, working
from tests.support import handlers, rows, value

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
RELEASES = 2
BACKEND = "SELECT pg_backend_pid()"
FAIL_WITH = """
CREATE FUNCTION fail_with(state text) RETURNS void LANGUAGE plpgsql
AS $$ BEGIN RAISE EXCEPTION 'as told' USING ERRCODE = state; END $$
"""
KILLED_AT_COMMIT = """
CREATE TABLE fatal (id int);
CREATE FUNCTION end_this_connection() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(5); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON fatal DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION end_this_connection()
"""

Execute = Callable[[str], Awaitable[Any]]
Body = Callable[[JobContext, Execute], Coroutine[Any, Any, Any]]
"""What a handler does, whichever kind of transaction it is given: it gets a function that runs one query."""


def in_session(body: Body) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: Tx) -> Any:
        async def execute(query: str) -> Any:
            return (await tx.execute(text(query))).scalar()

        return await body(ctx, execute)

    return work


def in_connection(body: Body) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: AsyncConnection) -> Any:
        async def execute(query: str) -> Any:
            return (await tx.execute(text(query))).scalar()

        return await body(ctx, execute)

    return work


def in_asyncpg(body: Body) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: asyncpg.Connection) -> Any:
        return await body(ctx, tx.fetchval)

    return work


def in_sync_session(body: Body) -> Callable[..., Any]:
    def work(ctx: JobContext, tx: Session) -> Any:
        async def execute(query: str) -> Any:
            return tx.execute(text(query)).scalar()

        return asyncio.run(body(ctx, execute))  # in the thread of this handler

    return work


Kind = Callable[[Body], Callable[..., Any]]
any_transaction = pytest.mark.parametrize(
    "kind", [in_session, in_connection, in_asyncpg, in_sync_session], ids=lambda kind: kind.__name__
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer releases until it counts than in production."""
    monkeypatch.setattr(run_module, "MAX_RELEASES", RELEASES)


def ends_its_connection(dsn: str, times: int | None = None) -> Body:
    """A body whose own backend is terminated under it, always or the first few times; what it returns then is None."""
    ended: list[int] = []

    async def body(_ctx: JobContext, execute: Execute) -> None:
        if times is None or len(ended) < times:
            ended.extend(await asyncio.to_thread(terminate_backends, dsn, f"pid = {await execute(BACKEND)}"))
        await execute("SELECT 1")

    return body


async def runs(dsn: str, clock: BusinessClock, count: int) -> None:
    """Let a running worker make this many runs more, a second of business time before each but the first."""
    before = len(outcomes(dsn))

    def has_made(number: int) -> bool:
        return len(outcomes(dsn)) >= before + number

    for number in range(1, count + 1):
        if number > 1:
            clock.advance(seconds=1)
        await until(partial(has_made, number), what=f"run {number} of {count}")
    assert len(outcomes(dsn)) == before + count


@any_transaction
@pytest.mark.usefixtures("few")
async def test_a_handler_that_always_ends_its_own_connection_ends_in_the_dead_letters(
    db: Database, dsn: str, clock: BusinessClock, kind: Kind
) -> None:
    """E3.7, E3.15: released so many times one after the other, then it counts as an attempt like any failure."""
    clock.freeze(NOON)
    rows(dsn, "SELECT duly.schedule('work', 'e', max_retries => 1)")
    known = handlers(kind(ends_its_connection(dsn)), backoff_seconds=[1])
    async with working(Worker(db, known)):
        await runs(dsn, clock, 1)
        assert queue(dsn) == [("e", "Pending", 0)]
        assert rows(dsn, "SELECT waits, run_at - duly.now() = interval '1 second' FROM duly.jobs") == [
            ("released", True)
        ]
        clock.advance(seconds=1)
        await runs(dsn, clock, 2 * RELEASES + 1)
        assert is_empty(dsn)
    attempt = [("e", "released")] * RELEASES
    assert [row[:2] for row in outcomes(dsn)] == [*attempt, ("e", "retried"), *attempt, ("e", "buried")]
    assert [row[2] for row in outcomes(dsn)] == [0] * (RELEASES + 1) + [1] * (RELEASES + 1)
    assert rows(dsn, "SELECT entity_id, reason, retry_count FROM duly.dead_letters") == [("e", "retries_used_up", 1)]
    assert rows(dsn, "SELECT kind, subject FROM duly.alerts") == [("dead_letter", "work")]


@any_transaction
@pytest.mark.usefixtures("few")
async def test_a_transaction_that_always_dies_at_its_commit_ends_in_the_dead_letters(
    db: Database, dsn: str, clock: BusinessClock, kind: Kind
) -> None:
    """E3.7, E3.11: a deferred trigger ends the connection, so that COMMIT gets no answer, each time anew."""
    rows(dsn, KILLED_AT_COMMIT)

    async def write(_ctx: JobContext, execute: Execute) -> None:
        await execute("INSERT INTO fatal VALUES (1) RETURNING id")

    clock.freeze(NOON)
    rows(dsn, "SELECT duly.schedule('work', 'e', max_retries => 0)")
    async with working(Worker(db, handlers(kind(write)))):
        for _ in range(RELEASES + 1):
            await until(lambda: not value(dsn, "SELECT count(*) FROM duly.jobs WHERE run_at <= duly.now()"))
            clock.advance(seconds=1)
        await until(lambda: is_empty(dsn), what="it is buried")
    assert outcomes(dsn) == [*[("e", "released", 0)] * RELEASES, ("e", "buried", 0)]
    assert value(dsn, "SELECT count(*) FROM fatal") == 0
    assert rows(dsn, "SELECT reason, error FROM duly.dead_letters") == [
        ("retries_used_up", "OutcomeUnknown: the connection was lost before COMMIT")
    ]


@pytest.mark.usefixtures("few")
async def test_outages_with_a_run_that_went_well_between_them_are_not_added_up(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.15: a job that looks again and again lives through any number of outages, as long as they end."""
    kill = ends_its_connection(dsn)
    script = ["kill"] * RELEASES + ["snooze"] + ["kill"] * RELEASES + ["end"]

    async def body(ctx: JobContext, execute: Execute) -> Snooze | None:
        step = script.pop(0)
        if step == "kill":
            await kill(ctx, execute)
        return Snooze(timedelta(seconds=1)) if step == "snooze" else None

    clock.freeze(NOON)
    rows(dsn, "SELECT duly.schedule('work', 'e', max_retries => 0)")
    async with working(Worker(db, handlers(in_session(body)))):
        await runs(dsn, clock, 2 * RELEASES + 2)
    released = ["released"] * RELEASES
    assert [outcome for _, outcome, _ in outcomes(dsn)] == [*released, "snoozed", *released, "done"]
    assert rows(dsn, "SELECT error FROM duly.dead_letters") == []


@pytest.mark.usefixtures("few")
async def test_jobs_that_never_came_back_do_not_use_up_the_memory_for_releases(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3.7: released here and deleted since; the next one that always dies is still found out."""
    monkeypatch.setattr(run_module, "MAX_REMEMBERED", 2)
    clock.freeze(NOON)
    rows(dsn, "SELECT duly.schedule('work', n::text, max_retries => 0) FROM generate_series(1, 3) AS n")
    async with working(Worker(db, handlers(in_session(ends_its_connection(dsn))))):
        await until(lambda: len(outcomes(dsn)) == 3)
        rows(dsn, "SELECT duly.cancel('work', n::text) FROM generate_series(1, 3) AS n")
        rows(dsn, "SELECT duly.schedule('work', 'e', max_retries => 0)")
        await runs(dsn, clock, RELEASES + 1)
    assert [row for row in outcomes(dsn) if row[0] == "e"] == [
        *[("e", "released", 0)] * RELEASES,
        ("e", "buried", 0),
    ]


async def test_a_transaction_that_stood_idle_until_it_was_ended_counts_at_once(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3.6, E3.15: after so long a run it was the handler that kept its transaction waiting, not an outage."""
    monkeypatch.setattr(run_module, "MAX_OUTAGE_RUN_SECONDS", 0.05)

    async def dawdle(_ctx: JobContext, execute: Execute) -> None:
        backend = await execute(BACKEND)
        await execute("SET LOCAL idle_in_transaction_session_timeout = '100ms'")
        alive = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {backend}"
        await until(lambda: not value(dsn, alive), what="PostgreSQL ended the idle transaction")
        await execute("SELECT 1")

    rows(dsn, "SELECT duly.schedule('work', 'e')")
    await Worker(db, handlers(in_asyncpg(dawdle), backoff_seconds=[3600])).run_once()
    assert queue(dsn) == [("e", "Pending", 1)]
    assert outcomes(dsn) == [("e", "retried", 0)]


# -- what is an outage, and what is not ----------------------------------------------------------------------------

OUTAGES = ["08000", "08003", "08006", "57P01", "57P02", "57P03", "53300"]
FAILURES = ["53000", "53100", "53200", "53400", "57000", "57014", "57P04", "57P05", "25P03", "58030", "XX000", "22012"]


@any_transaction
async def test_an_error_of_the_database_is_an_outage_only_if_the_connection_is_gone(
    db: Database, dsn: str, clock: BusinessClock, kind: Kind
) -> None:
    """E3.6, E3.15: a full disk or too little memory for what a handler asks is the handler's failure, and counts."""
    rows(dsn, FAIL_WITH)

    async def fail(ctx: JobContext, execute: Execute) -> None:
        await execute(f"SELECT fail_with('{ctx.entity_id}')")

    clock.freeze(NOON)
    for state in OUTAGES + FAILURES:
        rows(dsn, "SELECT duly.schedule('work', %(state)s)", {"state": state})
    await Worker(db, handlers(kind(fail), backoff_seconds=[3600])).run_once()
    found = {state: (outcome, retries) for state, outcome, retries in outcomes(dsn)}
    assert found == dict.fromkeys(OUTAGES, ("released", 0)) | dict.fromkeys(FAILURES, ("retried", 0))
    assert {state: retries for state, _, retries in queue(dsn)} == (
        dict.fromkeys(OUTAGES, 0) | dict.fromkeys(FAILURES, 1)
    )


@any_transaction
@pytest.mark.parametrize("cut", ["statement", "reply"])
async def test_a_connection_that_is_reset_under_a_handler_costs_no_attempt(
    db: Database, dsn: str, clock: BusinessClock, kind: Kind, cut: Any
) -> None:
    """E3.15: the wire breaks at a statement of the handler's; it runs again and is done."""

    async def ask(_ctx: JobContext, execute: Execute) -> None:
        await execute("SELECT 'of the handler'")

    clock.freeze(NOON)
    rows(dsn, "SELECT duly.schedule('work', 'e', max_retries => 0)")
    async with breaking_wire(dsn) as wire:
        wire.statement, wire.cut_next = b"SELECT 'of the handler'", cut
        behind = Database(wire.dsn)
        worker = Worker(behind, handlers(kind(ask)))
        await worker.run_once()
        assert (wire.cuts, queue(dsn)) == (1, [("e", "Pending", 0)])
        clock.advance(seconds=1)
        await worker.run_once()
        await behind.close()
    assert outcomes(dsn) == [("e", "released", 0), ("e", "done", 0)]


async def test_misuse_of_the_driver_is_the_handlers_failure(db: Database, dsn: str) -> None:
    """E3.6: asyncpg calls it an InterfaceError, as it does a closed connection; this one is open."""

    async def two_at_once(tx: asyncpg.Connection) -> None:
        await asyncio.gather(tx.fetchval("SELECT pg_sleep(0.1)"), tx.fetchval("SELECT 1"))

    async def two_in_one_session(tx: Tx) -> None:
        await asyncio.gather(tx.execute(text("SELECT pg_sleep(0.1)")), tx.execute(text("SELECT 1")))

    rows(dsn, "SELECT duly.schedule('two_at_once', '1'), duly.schedule('two_in_one_session', '2')")
    await Worker(db, handlers(two_at_once, two_in_one_session, backoff_seconds=[3600])).run_once()
    assert sorted(queue(dsn)) == [("1", "Pending", 1), ("2", "Pending", 1)]
    assert sorted(row[:2] for row in outcomes(dsn)) == [("1", "retried"), ("2", "retried")]
    message = value(dsn, "SELECT message FROM duly.executions WHERE entity_id = '1'")
    assert message == "InterfaceError: cannot perform operation: another operation is in progress"


@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError, BrokenPipeError, OSError])
async def test_a_partner_that_hangs_up_is_a_failure(db: Database, dsn: str, error: type[Exception]) -> None:
    """E3.6: it was not our database that went away."""

    async def call_partner(tx: Tx) -> None:
        await tx.execute(text("SELECT 1"))
        raise error("the partner's server")

    rows(dsn, "SELECT duly.schedule('call_partner', 'e')")
    await Worker(db, handlers(call_partner, backoff_seconds=[3600])).run_once()
    assert queue(dsn) == [("e", "Pending", 1)]


async def test_an_outage_under_a_handler_without_a_transaction_counts(db: Database, dsn: str) -> None:
    """E3.6, E3.11: what it did before its own connection was lost is done; only a transaction would undo it."""
    kill = ends_its_connection(dsn)

    async def work(ctx: JobContext) -> None:
        async with db.transaction() as own:

            async def execute(query: str) -> Any:
                return (await own.execute(text(query))).scalar()

            await kill(ctx, execute)

    rows(dsn, "SELECT duly.schedule('work', 'e')")
    await Worker(db, handlers(work, backoff_seconds=[3600])).run_once()
    assert queue(dsn) == [("e", "Pending", 1)]
