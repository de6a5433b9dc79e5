"""Keeps the webhooks' tables small, and finds deliveries that nothing would move any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from duly.db import Statement, Tx, fetch
from duly.jobs.schedule import schedule
from duly.operate.words import plural
from duly.webhooks import sql
from duly.webhooks.admit import Locked, admit, lock
from duly.webhooks.record import Alert, raise_alerts, repairable

SWEEP_JOB = "duly.sweep-webhooks"
REST = "rest"  # the job that goes on where another stopped: there is one of them at a time
BATCH = 2_000
BATCHES = 20
LOOKED_AT = 5_000  # deliveries under way, by one run
ADMITTED_AT_ONCE = 100


@dataclass(frozen=True)
class Place:
    """How far the sweep has got among the deliveries that are under way."""

    subscription_id: UUID
    status: str
    number: int

    @classmethod
    def read(cls, payload: Mapping[str, Any]) -> Place:
        """From the job's payload; the beginning, when it names none."""
        if not payload:
            return BEGINNING
        return cls(UUID(payload["subscription_id"]), str(payload["status"]), int(payload["number"]))


BEGINNING = Place(UUID(int=0), "", 0)


async def sweep(tx: Tx, *, most: int, after: Place = BEGINNING, limit: int = LOOKED_AT) -> str:
    """Take back what was admitted and lost its job, and admit whatever there is room for.

    Of what is under way so many are looked at, from a place on; where there are more, a run that goes on is queued.
    """
    looked = await fetch(tx, sql.FIND_STRAYS, limit=limit, **vars(after))
    strays, reached = _choose(looked)
    idle = await fetch(tx, sql.FIND_IDLE, limit=ADMITTED_AT_ONCE)
    touched: list[UUID] = list(dict.fromkeys([*strays.values(), *(row[0] for row in idle)]))[:ADMITTED_AT_ONCE]
    taken = admitted = 0
    if touched:
        held = await lock(tx, sorted(touched))
        taken = await _take_back(tx, list(strays), held) if strays else 0
        admitted = await admit(tx, sorted(touched), most=most)
    if reached is not None:
        payload = vars(reached) | {"subscription_id": str(reached.subscription_id)}
        await schedule(tx, SWEEP_JOB, REST, payload=payload, on_conflict="keep")
    rest = "; more are under way, and the next run is queued" if reached is not None else ""
    return f"took back {plural(taken, 'stray')} and admitted {admitted}{rest}"


def _choose(looked: Sequence[Any]) -> tuple[dict[UUID, UUID], Place | None]:
    """Strays with their subscriptions, of as many as are locked at once; and where to go on, if there may be more."""
    strays: dict[UUID, UUID] = {}
    chosen: set[UUID] = set()
    reached = BEGINNING
    for id, subscription_id, status, number, is_stray, is_last in looked:
        if is_stray:
            chosen.add(subscription_id)
            if len(chosen) > ADMITTED_AT_ONCE:
                return strays, reached
            strays[id] = subscription_id
        reached = Place(subscription_id, status, number)
        if is_last:
            return strays, reached
    return strays, None


async def _take_back(tx: Tx, strays: list[UUID], held: Sequence[Locked]) -> int:
    """How many wait again, or are given up with their dead letters, which somebody has to hear of."""
    taken = await fetch(tx, sql.TAKE_BACK_STRAYS, ids=strays)
    buried = [row[1] for row in taken if row[2] == "PERMANENTLY_FAILED"]
    message = "the job of a delivery is a dead letter"
    await raise_alerts(tx, [Alert("webhook_failed", id, message) for id in buried if id in repairable(held)])
    return len(taken)


async def forget(tx: Tx, *, days: int, batch: int = BATCH, batches: int = BATCHES) -> str:
    """Forget deliveries and what was received, past their days; secrets past their end; who was deleted, last."""
    await fetch(tx, sql.ALLOW_FORGETTING)
    gone, more = await _in_batches(tx, sql.FORGET_DELIVERIES, days=days, batch=batch, batches=batches)
    deleted, more_deleted = await _in_batches(tx, sql.FORGET_DELETED, days=days, batch=batch, batches=batches)
    received, more_received = await _in_batches(tx, sql.FORGET_RECEIVED, days=days, batch=batch, batches=batches)
    await fetch(tx, sql.FORGET_SUBSCRIPTIONS)
    await fetch(tx, sql.FORGET_SECRETS)
    await fetch(tx, sql.FORGET_PROVIDER_SECRETS)
    is_cut_off = more or more_deleted or more_received
    if is_cut_off:
        await schedule(tx, "duly.forget-webhooks")
    rest = "; more remain, and the next run is queued" if is_cut_off else ""
    return f"forgot {gone + deleted} deliveries and {received} received webhooks{rest}"


async def _in_batches(tx: Tx, statement: Statement, *, days: int, batch: int, batches: int) -> tuple[int, bool]:
    """Delete at most ``batch * batches`` rows; how many, and whether the limit was what ended it."""
    gone = 0
    for _ in range(batches):
        rows = await fetch(tx, statement, days=days, batch=batch)
        gone += rows[0][0]
        if rows[0][0] < batch:
            return gone, False
    return gone, True
