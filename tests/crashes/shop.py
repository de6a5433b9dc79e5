"""The application that the crash matrix runs: handlers of every kind, whose only work is to leave a witness."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
from sqlalchemy import text
from sqlalchemy.orm import Session

from duly import Database, Duly, Event, JobContext, ThenTogether, Tx
from duly.brokers import Later
from duly.failpoints import failpoint
from duly.jobs.outcomes import Fail
from duly.messages import to_cloudevent
from duly.webhooks.admit import DELIVER_JOB
from duly.webhooks.deliver import Deliverer
from tests.engine.outbox.broker import BrokerTransport
from tests.engine.webhooks.hooks import make_settings

# Nothing here forbids a second effect, so that one would be seen.
TABLES = """
CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, kind text NOT NULL, key text NOT NULL,
                      n int NOT NULL DEFAULT 0);
CREATE TABLE parents (id int PRIMARY KEY);
CREATE TABLE orphans (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED);
"""
EFFECT = text("INSERT INTO effects (kind, key, n) VALUES (:kind, :key, :n)")
BE_REFUSED_AT_COMMIT = text("INSERT INTO orphans VALUES (1)")


@dataclass(frozen=True)
class Manner:
    """How a process does its work."""

    db: Database
    work_seconds: float = 0.0


def effect(kind: str, key: str | None, n: int = 0) -> dict[str, Any]:
    """The row that tells of one run."""
    return {"kind": kind, "key": key or "", "n": n}


def in_transaction(app: Duly, manner: Manner) -> None:
    """One job, one commit; slow where the process is told to be."""

    @app.job("work", backoff=[0])
    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(EFFECT, effect("work", ctx.entity_id))
        failpoint("handler.mid")
        await asyncio.sleep(manner.work_seconds)


def synchronous(app: Duly, manner: Manner) -> None:
    """The same in a thread, on psycopg."""

    @app.job("work", backoff=[0])
    def work(ctx: JobContext, tx: Session) -> None:
        tx.execute(EFFECT, effect("work", ctx.entity_id))
        time.sleep(manner.work_seconds)


def raw(app: Duly, manner: Manner) -> None:
    """The same on a bare asyncpg connection."""

    @app.job("work", backoff=[0])
    async def work(ctx: JobContext, connection: asyncpg.Connection) -> None:
        await connection.execute("INSERT INTO effects (kind, key) VALUES ('work', $1)", ctx.entity_id)
        await asyncio.sleep(manner.work_seconds)


def limited(app: Duly, manner: Manner) -> None:
    """Two at a time, everywhere together."""

    @app.job("work", backoff=[0], limit=2)
    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(EFFECT, effect("work", ctx.entity_id))
        await asyncio.sleep(manner.work_seconds)


def grouped(app: Duly, _manner: Manner) -> None:
    """Three in one commit, which the database refuses when one of them is a poison."""

    @app.job("work", backoff=[0], group=3)
    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(EFFECT, effect("work", ctx.entity_id))
        if str(ctx.entity_id).startswith("poison"):
            await tx.execute(BE_REFUSED_AT_COMMIT)


def together(app: Duly, _manner: Manner) -> None:
    """Calls without a transaction whose results are one commit, which the database refuses for a poison."""

    async def write(tx: Tx, entities: Sequence[str]) -> list[None]:
        for entity in entities:
            await tx.execute(EFFECT, effect("work", entity))
            if entity.startswith("poison"):
                await tx.execute(BE_REFUSED_AT_COMMIT)
        return [None] * len(entities)

    @app.job("work", backoff=[0])
    async def work(ctx: JobContext) -> ThenTogether:
        await asyncio.sleep(0.05)  # so that those of one claim end at one time
        return ThenTogether(write, str(ctx.entity_id))


def without_transaction(app: Duly, manner: Manner) -> None:
    """Its effect is its own affair: at least once."""

    @app.job("work", backoff=[0])
    async def work(ctx: JobContext) -> None:
        await asyncio.sleep(manner.work_seconds)
        async with manner.db.transaction() as own:
            await own.execute(EFFECT, effect("work", ctx.entity_id))


def failing(app: Duly, _manner: Manner) -> None:
    """Some fail at first, one of them twice, some for good."""

    @app.job("work", backoff=[0])
    async def work(ctx: JobContext, tx: Tx) -> Fail | None:
        if str(ctx.entity_id).startswith("hopeless"):
            return Fail("as planned")
        if ctx.retry_count < (2 if str(ctx.entity_id).startswith("stubborn") else 1):
            raise ValueError("not yet")
        await tx.execute(EFFECT, effect("work", ctx.entity_id))
        return None


def consumers(app: Duly, manner: Manner) -> None:
    """One that keeps the order, one that does not and is synchronous."""

    @app.consumer("ledger", on="order.*", ordered=True, backoff=[0])
    async def ledger(event: Event, tx: Tx) -> None:
        await tx.execute(EFFECT, effect("ledger", event.aggregate_id, event.payload["n"]))
        await asyncio.sleep(manner.work_seconds / 2)

    @app.consumer("mail", on="order.*", backoff=[0])
    def mail(event: Event, tx: Session) -> None:
        tx.execute(EFFECT, effect("mail", event.aggregate_id, event.payload["n"]))


def plain_consumer(app: Duly, manner: Manner) -> None:
    """Without a transaction: at least once, noted in the inbox afterwards."""

    @app.consumer("call", on="order.*", ordered=True, backoff=[0])
    async def call(event: Event) -> None:
        async with manner.db.transaction() as own:
            await own.execute(EFFECT, effect("call", event.aggregate_id, event.payload["n"]))


def batch_consumer(app: Duly, _manner: Manner) -> None:
    """Three events in one commit; with a poison among them it fails."""

    @app.consumer("pack", on="order.*", batch=3, max_retries=3, backoff=[0])
    async def pack(events: Sequence[Event], tx: Tx) -> None:
        for event in events:
            await tx.execute(EFFECT, effect("pack", event.aggregate_id, event.payload["n"]))
            if event.aggregate_id.startswith("poison"):
                raise ValueError("poison")


def nothing(_app: Duly, _manner: Manner) -> None:
    """The engine's own jobs alone."""


def webhooks(app: Duly, _manner: Manner) -> None:
    """The engine's own, with a key that every process of the matrix knows."""
    app.handlers[DELIVER_JOB] = Deliverer(make_settings()).create_handler()


KINDS: dict[str, Callable[[Duly, Manner], None]] = {
    kind.__name__: kind
    for kind in (
        in_transaction, synchronous, raw, limited, grouped, together, without_transaction, failing, consumers,
        plain_consumer, batch_consumer, nothing, webhooks,
    )
}  # fmt: skip


def create(kind: str, manner: Manner) -> Duly:
    """The application with handlers of one kind."""
    app = Duly()
    KINDS[kind](app, manner)
    return app


class Transport(BrokerTransport):
    """The broker's client, with the step between sending and the answer named."""

    async def publish(self, events: Sequence[Event]) -> Sequence[str | Later | None]:
        """Send one request and wait for its answer."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            request = {"relay": self._relay, "events": [to_cloudevent(event) for event in events]}
            writer.write(json.dumps(request, default=str).encode() + b"\n")
            await writer.drain()
            failpoint("transport.sent")
            line = await reader.readline()
            if not line:
                raise ConnectionResetError("the broker hung up")
            answers: list[str | None] = json.loads(line)
            return answers
        except BaseException:
            await self.close()
            raise
