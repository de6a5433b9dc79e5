"""The engine's own clean-up: each call is bounded, and says in a sentence what it did."""

from __future__ import annotations

from typing import Any

from duly.db import Statement, Tx, fetch, request_poke
from duly.errors import Invalid
from duly.failpoints import failpoint
from duly.idempotency.sql import FORGET_KEYS
from duly.operate import sql_maintenance as sql
from duly.operate.alerts import resolve_idle_dead_letter_alerts
from duly.operate.arguments import BULK_LIMIT, bulk_size
from duly.operate.sql import LOCK_ORDER_OF_DEAD_LETTERS
from duly.operate.words import plural

RESOLVED_ALERT_DAYS = 90
SILENT_PROCESS_DAYS = 1
IDLE_CURSOR_DAYS = 365
BATCH = 5_000
BATCHES = 20
MAX_DAYS_AHEAD = 399


async def create_partitions(tx: Tx, *, days_ahead: int = 7) -> str:
    """Make the daily partitions of both histories from today on."""
    if not 1 <= days_ahead <= MAX_DAYS_AHEAD:
        raise Invalid(f"days_ahead={days_ahead}: give 1 to {MAX_DAYS_AHEAD}")
    await fetch(tx, sql.BOUND_LOCK_WAIT)
    made = {
        parent: (await fetch(tx, sql.CREATE_PARTITIONS, parent=parent, days=days_ahead + 1))[0][0]
        for parent in ("events", "executions")
    }
    failpoint("maintenance.created")
    return f"made {plural(made['events'], 'partition')} of events and {made['executions']} of executions"


async def drop_history(tx: Tx, *, events_days: int, executions_days: int) -> str:
    """Drop the partitions that are older than the retention; what a waiting job still needs stays."""
    await fetch(tx, sql.BOUND_LOCK_WAIT)
    said = []
    for parent, kept_days, strays in (
        ("events", events_days, sql.FORGET_STRAY_EVENTS),
        ("executions", executions_days, sql.FORGET_STRAY_EXECUTIONS),
    ):
        days = _days(kept_days)
        dropped = (await fetch(tx, sql.DROP_PARTITIONS, parent=parent, days=days))[0][0]
        failpoint("maintenance.dropped")
        kept = (await fetch(tx, sql.COUNT_KEPT_PARTITIONS, parent=parent, days=days))[0][0]
        gone, more = await _in_batches(tx, strays, days=days, batch=BATCH, batches=BATCHES)
        said.append(_dropped(parent, dropped, kept, gone))
        if more:
            await _go_on(tx, "duly.drop-history")
    return "; ".join(said)


async def forget_processed_events(tx: Tx, *, days: int, batch: int = BATCH, batches: int = BATCHES) -> str:
    """Forget which events each consumer has handled, once no redelivery can be that late."""
    gone, more = await _in_batches(tx, sql.FORGET_PROCESSED_EVENTS, days=_days(days), batch=batch, batches=batches)
    if more:
        await _go_on(tx, "duly.forget-processed-events")
    return _forgot(plural(gone, "processed event"), more)


async def forget_received(tx: Tx, *, days: int, batch: int = BATCH, batches: int = BATCHES) -> str:
    """Forget what brokers brought, unless a job or dead letter needs it, and cursors of streams long gone."""
    gone, more = await _in_batches(tx, sql.FORGET_RECEIVED, days=_days(days), batch=batch, batches=batches)
    cursors, more_cursors = await _in_batches(
        tx, sql.FORGET_CURSORS, days=IDLE_CURSOR_DAYS, batch=batch, batches=batches
    )
    if more or more_cursors:
        await _go_on(tx, "duly.forget-received")
    return _forgot(f"{plural(gone, 'received event')} and {plural(cursors, 'cursor')}", more or more_cursors)


async def forget_idempotency_keys(tx: Tx, *, batch: int = BATCH, batches: int = BATCHES) -> str:
    """Forget the keys whose time is over."""
    gone = 0
    for _ in range(batches):
        found = (await fetch(tx, FORGET_KEYS, batch=batch))[0][0]
        gone += found
        if found < batch:
            return _forgot(plural(gone, "idempotency key"), False)
    await _go_on(tx, "duly.forget-idempotency-keys")
    return _forgot(plural(gone, "idempotency key"), True)


async def forget_console_sessions(tx: Tx, *, batch: int = BATCH, batches: int = BATCHES) -> str:
    """Forget who was signed in to the console, once the session has ended anyway."""
    gone = 0
    for _ in range(batches):
        found = (await fetch(tx, sql.FORGET_CONSOLE_SESSIONS, batch=batch))[0][0]
        gone += found
        if found < batch:
            return _forgot(plural(gone, "console session"), False)
    await _go_on(tx, "duly.forget-console-sessions")
    return _forgot(plural(gone, "console session"), True)


async def forget_dead_letters(tx: Tx, *, days: int, batch: int = BULK_LIMIT) -> str:
    """Give up dead letters that nobody cared for; the audit keeps how many of each name."""
    chosen = await fetch(tx, sql.CHOOSE_OLD_DEAD_LETTERS, days=_days(days), batch=bulk_size(batch))
    ids = [row[0] for row in chosen]
    if ids:
        await fetch(tx, LOCK_ORDER_OF_DEAD_LETTERS, ids=ids)
        await fetch(tx, sql.FORGET_DEAD_LETTERS, ids=ids)
        await resolve_idle_dead_letter_alerts(tx)
        request_poke(tx, "jobs")  # the next job of an order may run now
    more = len(ids) == batch
    if more:
        await _go_on(tx, "duly.forget-dead-letters")
    return _forgot(plural(len(ids), "dead letter"), more)


async def forget_audit(tx: Tx, *, days: int, batch: int = BATCH, batches: int = BATCHES) -> str:
    """Forget old audit rows, alerts resolved 90 days ago, and processes that were silent for a day."""
    gone, more = await _in_batches(tx, sql.FORGET_AUDIT, days=_days(days), batch=batch, batches=batches)
    alerts, more_alerts = await _in_batches(
        tx, sql.FORGET_ALERTS, days=RESOLVED_ALERT_DAYS, batch=batch, batches=batches
    )
    processes = len(await fetch(tx, sql.FORGET_PROCESSES, days=SILENT_PROCESS_DAYS, batch=batch))
    if more or more_alerts:
        await _go_on(tx, "duly.forget-audit")
    rest = f"{plural(alerts, 'resolved alert')} and {plural(processes, 'silent process row')}"
    return _forgot(f"{plural(gone, 'audit row')}, {rest}", more or more_alerts)


async def _in_batches(tx: Tx, statement: Statement, *, days: int, batch: int, batches: int) -> tuple[int, bool]:
    """Delete at most ``batch * batches`` rows; how many, and whether the limit was what ended it."""
    if batch < 1 or batches < 1:
        raise Invalid(f"batch={batch}, batches={batches}: give at least 1")
    await fetch(tx, sql.ALLOW_FORGETTING)
    gone = 0
    for _ in range(batches):
        rows: Any = await fetch(tx, statement, days=days, batch=batch)
        failpoint("maintenance.forgot")
        gone += rows[0][0]
        if rows[0][0] < batch:
            return gone, False
    return gone, True


async def _go_on(tx: Tx, name: str) -> None:
    """Queue the next run now: a nightly limit must not let a busy table grow from night to night."""
    await fetch(tx, sql.SCHEDULE_AGAIN, name=name)
    request_poke(tx, "jobs")


def _days(days: int) -> int:
    if not 1 <= days <= 36_500:
        raise Invalid(f"days={days}: give 1 to 36500")
    return days


def _forgot(what: str, more: bool) -> str:
    return f"forgot {what}" + ("; more remain, and the next run is queued" if more else "")


def _dropped(parent: str, dropped: int, kept: int, strays: int) -> str:
    said = f"dropped {plural(dropped, 'partition')} of {parent}"
    if strays:
        said += f" and {plural(strays, 'row')} outside every partition"
    if kept:
        said += f" ({plural(kept, 'older partition')} kept: waiting jobs or dead letters need the events)"
    return said
