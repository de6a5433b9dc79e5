"""Keeps the webhooks' tables small, and finds deliveries that nothing would move any more."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from duly.db import Statement, Tx, fetch
from duly.jobs.schedule import schedule
from duly.operate.words import plural
from duly.webhooks import sql
from duly.webhooks.admit import Locked, admit, lock
from duly.webhooks.record import Alert, raise_alerts, repairable

BATCH = 2_000
BATCHES = 20
STRAYS = 1_000
ADMITTED_AT_ONCE = 100


async def sweep(tx: Tx, *, most: int) -> str:
    """Take back what was admitted and lost its job, and admit whatever there is room for."""
    found = await fetch(tx, sql.FIND_STRAYS, limit=STRAYS)
    idle = await fetch(tx, sql.FIND_IDLE, limit=ADMITTED_AT_ONCE)
    touched: list[UUID] = list(dict.fromkeys([*(row[1] for row in found), *(row[0] for row in idle)]))
    chosen = set(touched[:ADMITTED_AT_ONCE])
    strays = [id for id, subscription_id in found if subscription_id in chosen]
    taken = admitted = 0
    if chosen:
        held = await lock(tx, sorted(chosen))
        taken = await _take_back(tx, strays, held) if strays else 0
        admitted = await admit(tx, sorted(chosen), most=most)
    return f"took back {plural(taken, 'stray')} and admitted {admitted}"


async def _take_back(tx: Tx, strays: list[UUID], held: Sequence[Locked]) -> int:
    """How many wait again, or are given up with their dead letters, which somebody has to hear of."""
    taken = await fetch(tx, sql.TAKE_BACK_STRAYS, ids=strays)
    buried = [row[1] for row in taken if row[2] == "PERMANENTLY_FAILED"]
    message = "the job of a delivery is a dead letter"
    await raise_alerts(tx, [Alert("webhook_failed", id, message) for id in buried if id in repairable(held)])
    return len(taken)


async def forget(tx: Tx, *, days: int, batch: int = BATCH, batches: int = BATCHES) -> str:
    """Forget deliveries and what was received, past their days; secrets past their end; what was deleted."""
    await fetch(tx, sql.ALLOW_FORGETTING)
    gone, more = await _in_batches(tx, sql.FORGET_DELIVERIES, days=days, batch=batch, batches=batches)
    deleted, more_deleted = await _in_batches(tx, sql.FORGET_DELETED, batch=batch, batches=batches)
    received, more_received = await _in_batches(tx, sql.FORGET_RECEIVED, days=days, batch=batch, batches=batches)
    await fetch(tx, sql.FORGET_SUBSCRIPTIONS)
    await fetch(tx, sql.FORGET_SECRETS)
    await fetch(tx, sql.FORGET_PROVIDER_SECRETS)
    is_cut_off = more or more_deleted or more_received
    if is_cut_off:
        await schedule(tx, "duly.forget-webhooks")
    rest = "; more remain, and the next run is queued" if is_cut_off else ""
    return f"forgot {gone + deleted} deliveries and {received} received webhooks{rest}"


async def _in_batches(
    tx: Tx, statement: Statement, *, batch: int, batches: int, days: int | None = None
) -> tuple[int, bool]:
    """Delete at most ``batch * batches`` rows; how many, and whether the limit was what ended it."""
    values = {} if days is None else {"days": days}
    gone = 0
    for _ in range(batches):
        rows = await fetch(tx, statement, batch=batch, **values)
        gone += rows[0][0]
        if rows[0][0] < batch:
            return gone, False
    return gone, True
