"""The safeguards, and how to switch each off: in a chaos process or database. Production code has no switch.

Each replaces exactly one thing, and refuses when what it replaces is not there any more: a safeguard that was moved
must not look like one that was switched off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from duly.db import Database, Statement
from duly.errors import OutcomeUnknown, Unavailable
from duly.http import transactions
from duly.idempotency import guard
from duly.inbox.receive import Consumer
from duly.jobs import run, settle
from duly.jobs import schedule as duly_schedule
from duly.jobs import sql as jobs_sql
from duly.jobs.heartbeat import Heartbeat
from duly.outbox import emit as duly_emit
from duly.outbox import sql as outbox_sql
from duly.schedules import sql as schedules_sql
from duly.schedules import tick


class NotThere(Exception):
    """What should be switched off was not found: the engine has changed, and this file must follow."""


@dataclass(frozen=True)
class Safeguard:
    """One of them: what it promises, and the scenario that shows its absence."""

    name: str
    promise: str
    scenario: str
    in_process: Callable[[], None] | None = None
    in_database: Callable[[psycopg.Connection[Any]], None] | None = None


SAFEGUARDS: dict[str, Safeguard] = {}


def switch_off(name: str) -> None:
    """In a process that starts; no name, nothing happens."""
    if name and (off := SAFEGUARDS[name].in_process):
        off()


def switch_off_in_database(name: str, dsn: str) -> None:
    """In the database of a run, before anybody works on it."""
    if name and (off := SAFEGUARDS[name].in_database):
        with psycopg.connect(dsn, autocommit=True) as connection:
            off(connection)


def _in_process(name: str, promise: str, scenario: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(off: Callable[[], None]) -> Callable[[], None]:
        SAFEGUARDS[name] = Safeguard(name, promise, scenario, in_process=off)
        return off

    return register


def _reword(
    name: str, promise: str, scenario: str, statements: Statement | tuple[Statement, ...], text: str, by: str = ""
) -> None:
    """Statements without a part of them, changed in place, so that whoever imported them has the new text."""

    def off() -> None:
        pattern = r"\s+".join(map(re.escape, text.split()))
        for statement in statements if isinstance(statements, tuple) else (statements,):
            changed, times = re.subn(pattern, lambda _: by, statement.sql, count=1)
            if not times:
                raise NotThere(f"{name}: {text!r} is not in the statement any more")
            Statement.__init__(statement, changed)

    SAFEGUARDS[name] = Safeguard(name, promise, scenario, in_process=off)


def _rewrite(name: str, promise: str, scenario: str, function: str, *changes: tuple[str, str]) -> None:
    """A function of the database without a part of it."""

    def off(connection: psycopg.Connection[Any]) -> None:
        row = connection.execute("SELECT pg_get_functiondef(CAST(%s AS regproc))", [function]).fetchone()
        assert row is not None
        source: str = row[0]
        for text, by in changes:
            pattern = r"\s+".join(map(re.escape, text.split()))
            source, times = re.subn(pattern, lambda _, by=by: by, source, count=1)  # type: ignore[misc]  # a default binds
            if not times:
                raise NotThere(f"{name}: {text!r} is not in {function} any more")
        connection.execute(source.encode())

    SAFEGUARDS[name] = Safeguard(name, promise, scenario, in_database=off)


def _replace(owner: Any, name: str, by: Any) -> Any:
    """Put something in the place of a function; the function."""
    if not hasattr(owner, name):
        raise NotThere(f"{owner!r} has no {name} any more")
    old = getattr(owner, name)
    setattr(owner, name, by)
    return old


# -- leases --------------------------------------------------------------------------------------------------------

_CLAIMS = (jobs_sql.CLAIM_JOBS, jobs_sql.CLAIM_JOBS_FROM)
_TOKEN = "AND (id, lease_token) IN (SELECT g.id, g.token FROM given g)"
_COMPLETES = (jobs_sql.COMPLETE_JOBS, jobs_sql.COMPLETE_DONE)
_reword("fence_complete", "only the holder completes", "zombie_done", _COMPLETES, _TOKEN)
_reword("fence_postpone", "only the holder postpones", "zombie_raise", jobs_sql.POSTPONE_JOBS, _TOKEN)
_reword("fence_bury", "only the holder buries", "zombie_fail", jobs_sql.BURY_JOBS, _TOKEN)
_reword(
    "claim_lease", "a living lease is not taken", "busy", _CLAIMS,
    "AND (j.lease_expires_at IS NULL OR j.lease_expires_at < clock_timestamp())",
)  # fmt: skip
_reword("claim_lock", "each job is claimed once", "burst", _CLAIMS, "FOR UPDATE SKIP LOCKED")
_reword("run_at", "nothing before its time", "busy", _CLAIMS, "AND j.run_at <= duly.now()")
_reword(
    "takeover_counts", "a crash is an attempt", "killer", _CLAIMS,
    "retry_count = retry_count + (lease_token IS NOT NULL)::int", "retry_count = retry_count",
)  # fmt: skip
_reword(
    "retry_counts", "a failure is an attempt", "busy", jobs_sql.POSTPONE_JOBS,
    "retry_count = retry_count + (SELECT (g.outcome = 'retried')::int FROM given g WHERE g.id = duly.jobs.id)",
    "retry_count = retry_count",
)  # fmt: skip
_reword(
    "limit_count", "no more of a name at once than its limit", "limited", jobs_sql.COUNT_FREE_SLOTS,
    "greatest(0, CAST(:slots AS int) - count(*))", "(CAST(:slots AS int) + 0 * count(*))",
)  # fmt: skip


@_in_process("all_ours", "what a zombie wrote is rolled back", "zombie_done")
def _() -> None:
    _replace(settle, "check_all_ours", lambda *_: None)


@_in_process("one_commit", "effect and settlement are one commit", "dies_before_settling")
def _() -> None:
    async def settle_apart(self: Any, tx: Any, settlements: Any) -> None:
        if isinstance(tx, AsyncSession):
            await tx.commit()
        else:
            await tx.execute("COMMIT; BEGIN")
        await together(self, tx, settlements)

    together = _replace(run.Runner, "_settle", settle_apart)


@_in_process("rollback", "what a failed handler wrote is rolled back", "busy")
def _() -> None:
    async def keep(self: Any, handler: Any, jobs: Any, tx: Any) -> Any:
        try:
            return await handle(self, handler, jobs, tx)
        except RuntimeError:
            if isinstance(tx, AsyncSession):
                await tx.commit()
            raise

    handle = _replace(run.Runner, "_handle", keep)


@_in_process("heartbeat", "a lease is renewed while its handler lives", "long")
def _() -> None:
    async def skip(_self: Any) -> None:
        return None

    _replace(Heartbeat, "beat", skip)


@_in_process("max_attempts", "what fails too often is buried", "poisoned")
def _() -> None:
    def never(job: Any, handler: Any, error: BaseException, seconds: float) -> Any:
        return decide(job, dataclasses.replace(handler, max_retries=30_000), error, seconds)

    decide = _replace(settle, "decide_failure", never)


# -- events --------------------------------------------------------------------------------------------------------


@_in_process("inbox_mark", "a redelivered event is skipped", "redelivered")
def _() -> None:
    async def ignore(self: Any, tx: Any, jobs: Any) -> set[int]:
        await mark(self, tx, jobs)
        return set()

    mark = _replace(Consumer, "mark", ignore)


@_in_process("inbox_unmark", "an event that is snoozed is not marked", "busy")
def _() -> None:
    async def keep(_self: Any, _tx: Any, _jobs: Any) -> None:
        return None

    _replace(Consumer, "unmark", keep)


def _elsewhere(module: Any, statement: Statement) -> None:
    """A statement in a transaction of its own, committed at once."""

    async def apart(tx: Any, given: Statement, **values: Any) -> Any:
        if given is not statement or not isinstance(tx, AsyncSession | AsyncConnection):
            return await fetch(tx, given, **values)
        engine = tx.engine if isinstance(tx, AsyncConnection) else tx.bind
        assert isinstance(engine, AsyncEngine)
        async with engine.begin() as own:
            return await fetch(own, given, **values)

    fetch = _replace(module, "fetch", apart)


@_in_process("emit_same_commit", "an event exists if and only if its row does", "exploding")
def _() -> None:
    _elsewhere(duly_emit, duly_emit.EMIT)


@_in_process("schedule_same_commit", "a timer exists if and only if its row does", "exploding")
def _() -> None:
    _elsewhere(duly_schedule, duly_schedule.SCHEDULE)


_reword(
    "behind", "an ordered consumer's event waits for the one before", "hot", outbox_sql.PUBLISH_EVENTS,
    "CASE WHEN behind THEN 'infinity' ELSE duly.now() END", "duly.now()",
)  # fmt: skip
_reword(
    "park", "nothing overtakes an event that the broker refused", "broker", outbox_sql.FETCH_EVENTS,
    "AND (b.parked OR b.attempts > 0 OR b.retry_at IS NOT NULL) LIMIT 1) AS held", "AND false LIMIT 1) AS held",
)  # fmt: skip
_reword("lane_lock", "one relay at a time serves a lane", "broker", outbox_sql.LOCK_LANES, "FOR UPDATE SKIP LOCKED")
_rewrite(
    "lock_order", "adding to an order and letting the next one run take turns", "warm", "duly.lock_order",
    ("PERFORM pg_advisory_xact_lock(sorted.hash)", "PERFORM sorted.hash"),
)  # fmt: skip
_rewrite(
    "dead_letter_holds", "a dead letter holds back its aggregate", "poisoned", "duly.release_next",
    (
        "AND NOT EXISTS (SELECT 1 FROM duly.dead_letters d WHERE d.name = OLD.name AND d.order_key = OLD.order_key)",
        "",
    ),
)  # fmt: skip


# -- requests ------------------------------------------------------------------------------------------------------


@_in_process("key_reserve", "a key takes effect once", "duplicated")
def _() -> None:
    async def nothing(*_: Any, **__: Any) -> None:
        return None

    _replace(transactions, "reserve", nothing)
    _replace(transactions, "store", nothing)


@_in_process("key_same_commit", "a key is kept if and only if its effect is", "api_dies")
def _() -> None:
    async def reserve_apart(tx: Any, request: Any, **options: Any) -> Any:
        async with AsyncSession(tx.bind) as own:
            found = await reserve(own, request, **options)
            await own.commit()
            return found

    async def store_apart(tx: Any, request: Any, answer: Any) -> None:
        async with AsyncSession(tx.bind) as own:
            await store(own, request, answer)
            await own.commit()

    reserve = _replace(transactions, "reserve", reserve_apart)
    store = _replace(transactions, "store", store_apart)


@_in_process("fingerprint", "a key with another request is refused", "busy")
def _() -> None:
    def trusting(request: Any, row: Any) -> Any:
        return read(dataclasses.replace(request, fingerprint=bytes(row[0])), row)

    read = _replace(guard, "_read", trusting)


@_in_process("unknown_is_not_failure", "a COMMIT without an answer is looked up, not repeated", "commit_reply_lost")
def _() -> None:
    async def no(_self: Any, _mark: str) -> bool:
        return False

    _replace(Database, "_committed", no)


@_in_process("unknown_is_not_success", "a COMMIT without an answer is not taken for granted", "commit_lost")
def _() -> None:
    async def hope(*given: Any, **named: Any) -> None:
        with contextlib.suppress(OutcomeUnknown, Unavailable):
            await commit(*given, **named)

    commit = _replace(Database, "_commit", hope)


# -- timers and schedules ------------------------------------------------------------------------------------------

_rewrite(
    "unique_timer", "one pending timer for each (name, entity)", "nudged", "duly.schedule_many",
    ("CASE WHEN on_conflict <> 'allow' THEN n.name || ' ' || n.entity_id END", "NULL"),
)  # fmt: skip
_rewrite(
    "cancel", "what is cancelled does not run", "cancelled", "duly.cancel",
    ("DELETE FROM duly.jobs j", "SELECT 1 FROM duly.jobs j"), ("RETURNING 1", ""),
)  # fmt: skip
_reword("tick_lock", "each occurrence is fired by one scheduler", "cron", schedules_sql.CHOOSE_DUE_SCHEDULES,
        "FOR UPDATE SKIP LOCKED")  # fmt: skip


@_in_process("tick_one_commit", "occurrence and next time are one commit", "cron_dies")
def _() -> None:
    _replace(tick, "atomic", lambda _connection: contextlib.nullcontext())


@_in_process("misfire", "a schedule that runs all runs all", "cron_jumps")
def _() -> None:
    def fold(cron: Any, **given: Any) -> Any:
        return plan(cron, **(given | {"misfire": "run_once"}))

    plan = _replace(tick, "plan_due", fold)
