"""Consumers whose only work is to write down that they worked, so that once, never and twice can be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import text

from duly import Database, Duly, Event, Relay, Tx, emit
from duly.messages import NewEvent
from tests.support import rows

CREATE_EFFECTS = """
CREATE TABLE effects (
    id bigint GENERATED ALWAYS AS IDENTITY, consumer text NOT NULL, aggregate text NOT NULL, n int NOT NULL,
    event_id uuid NOT NULL
)
"""
INSERT_EFFECT = text(
    "INSERT INTO effects (consumer, aggregate, n, event_id) VALUES (:consumer, :aggregate, :n, :event_id)"
)
# As if the worker had been dead for longer than its lease; that is real time, which a test cannot move.
EXPIRE_LEASES = (
    "UPDATE duly.jobs SET lease_expires_at = clock_timestamp() - interval '1 ms' WHERE lease_token IS NOT NULL"
)


def effect(consumer: str, event: Event) -> dict[str, Any]:
    """The row that tells of one handling."""
    return {"consumer": consumer, "aggregate": event.aggregate_id, "n": event.payload["n"], "event_id": event.id}


async def record(tx: Tx, consumer: str, event: Event) -> None:
    """Write it in the handler's own transaction."""
    await tx.execute(INSERT_EFFECT, effect(consumer, event))


def register_shop(app: Duly) -> None:
    """One consumer that keeps the order, one that does not."""

    @app.consumer("ledger", on="order.*", ordered=True)
    async def ledger(event: Event, tx: Tx) -> None:
        await record(tx, "ledger", event)

    @app.consumer("mail", on="order.*")
    async def mail(event: Event, tx: Tx) -> None:
        await record(tx, "mail", event)


async def prepare(app: Duly, db: Database, dsn: str) -> None:
    """The consumers' rows, and the table of effects."""
    rows(dsn, CREATE_EFFECTS)
    await app.prepare(db)


async def emit_numbers(db: Database, aggregates: Sequence[str], numbers: Sequence[int]) -> list[UUID]:
    """One transaction for each number, one event in it for each aggregate."""
    ids: list[UUID] = []
    for n in numbers:
        async with db.transaction() as tx:
            events = (NewEvent("order.changed", "shop", aggregate, {"n": n}) for aggregate in aggregates)
            ids += await emit(tx, *events)
    return ids


async def publish_numbers(db: Database, aggregates: Sequence[str], numbers: Sequence[int]) -> list[UUID]:
    """The same, and relayed."""
    ids = await emit_numbers(db, aggregates, numbers)
    relay = Relay(db)
    while (await relay.cycle()).done:
        pass
    await relay.close()
    return ids


def effects(dsn: str, consumer: str) -> dict[str, list[int]]:
    """What a consumer did for each aggregate, in order, repetitions too."""
    found: dict[str, list[int]] = {}
    for aggregate, n in rows(
        dsn, "SELECT aggregate, n FROM effects WHERE consumer = %(consumer)s ORDER BY id", {"consumer": consumer}
    ):
        found.setdefault(aggregate, []).append(n)
    return found


def outcomes(dsn: str) -> list[str]:
    """How the runs ended, in order."""
    return [row[0] for row in rows(dsn, "SELECT outcome FROM duly.executions ORDER BY completed_at, execution_id")]


def dead_letters_back_to_the_queue(dsn: str) -> None:
    """What an operator's retry does: under the same id, due now."""
    rows(
        dsn,
        "WITH gone AS (DELETE FROM duly.dead_letters RETURNING *)"
        " INSERT INTO duly.jobs (id, name, entity_id, payload, priority, run_at, due_at, created_at, original_delay,"
        " source, waits, event_id, order_key, correlation_id, causation_id, traceparent)"
        " SELECT id, name, entity_id, payload, priority, duly.now(), due_at, created_at, original_delay,"
        " source, 'requeued', event_id, order_key, correlation_id, causation_id, traceparent FROM gone",
    )
