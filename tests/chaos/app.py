"""The application under chaos: every kind of job and consumer, and routes that write row, event and timer at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from duly import Duly, Event, Fail, JobContext, NewEvent, Snooze, Tx, cancel, emit, schedule
from duly.errors import Conflict
from duly.failpoints import arm
from duly.http.transactions import RequestTx, Router

PATIENT = 60  # retries of work that is no poison: kills and take-overs count as attempts, and must never use them up
POISON_RETRIES = 2
LIMIT = 2
BLOCKED_SECONDS = 4.5
STALL_SECONDS = 2.0
EXTRAS = ("grouped", "limited", "flaky", "snooze", "sync", "raw", "plain", "slow")
POISONS = ("raise", "kill", "hang", "block", "fail")
CRON_ALL, CRON_ONCE = "chaos.every-minute", "chaos.folded"

EFFECT = text("""
INSERT INTO chaos.effects (kind, key, aggregate, seq, saw, job_id, began_at, due_at)
VALUES (:kind, :key, :aggregate, :seq, :saw, :job_id, :began_at, :due_at)
""")
EFFECT_RAW = "INSERT INTO chaos.effects (kind, key, job_id, due_at) VALUES ($1, $2, $3, $4)"
READ_LAST = text("SELECT coalesce(max(seq), 0) FROM chaos.effects WHERE kind = 'ordered' AND aggregate = :aggregate")
READ_CLOCK = text("SELECT clock_timestamp()")
COUNT_SNOOZED = text("SELECT count(*) FROM chaos.effects WHERE key = :key AND kind = 'snoozed'")
NEXT_SEQ = text("UPDATE chaos.accounts SET seq = seq + 1 WHERE id = :id RETURNING seq, duly.now()")
ADD_ORDER = text("""
INSERT INTO chaos.orders (op, account, seq, extra, poison, nonce)
VALUES (:op, :account, :seq, :extra, :poison, :nonce)
""")
ADD_CANCEL = text("INSERT INTO chaos.cancels (op, target, n) VALUES (:op, :target, :n)")
COUNT_PENDING = text("""
SELECT count(*), duly.now() FROM duly.jobs
WHERE name = 'chaos.unique' AND entity_id = :entity AND lease_token IS NULL AND waits = 'due'
""")
ADD_NUDGE = text("""
INSERT INTO chaos.nudges (op, entity, job_id, run_at, pending) VALUES (:op, :entity, :job_id, :run_at, :pending)
""")
ADD_NOTE = text("INSERT INTO chaos.notes (op) VALUES (:op)")
HOLD = text("SELECT pg_sleep(:seconds)")


@dataclass(frozen=True)
class Witness:
    """A file outside the database; each line is one write, and survives whoever wrote it."""

    path: str

    def note(self, *words: object) -> None:
        """Append one line."""
        line = " ".join(map(str, (*words, time.monotonic_ns(), os.getpid()))) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


async def note(tx: Any, kind: str, key: str, **more: Any) -> None:
    """Write an effect in the handler's transaction."""
    values = {"aggregate": None, "seq": None, "saw": None, "job_id": None, "began_at": None, "due_at": None} | more
    await tx.execute(EFFECT, {"kind": kind, "key": key, **values})


def entity(ctx: JobContext) -> str:
    """Whose job it is."""
    return ctx.entity_id or ""


def chance(op: str, share: int, salt: str) -> bool:
    """Whether this operation is one of the some in a hundred that misbehave; the same answer in every process."""
    return sum(map(ord, op + salt)) * 7919 % 100 < share


def create_app(*, version: int, witness: str, cron: bool = True) -> Duly:
    """The application; version 1 does not know ``chaos.v2``."""
    app = Duly()
    out = Witness(witness)
    add_jobs(app, out)
    add_poison(app)
    add_stalls(app, out)
    add_consumers(app, out)
    if version >= 2:
        add_second_version(app)
    if cron:
        add_cron(app)
    app.include_router(create_router())
    return app


def add_jobs(app: Duly, out: Witness) -> None:
    """Work that must succeed, exactly once."""

    @app.job("chaos.timer", max_retries=PATIENT, backoff=[0])
    async def timer(ctx: JobContext, tx: Tx) -> None:
        await note(tx, "timer", entity(ctx), job_id=ctx.job_id, due_at=ctx.due_at)
        await emit(tx, NewEvent("timer.fired", "chaos.timers", entity(ctx), {"op": entity(ctx)}))

    @app.job("chaos.unique", max_retries=PATIENT, backoff=[0])
    async def unique(ctx: JobContext, tx: Tx) -> None:
        await note(tx, "unique", entity(ctx), job_id=ctx.job_id, due_at=ctx.due_at)

    @app.job("chaos.grouped", max_retries=PATIENT, backoff=[0], group=10)
    async def grouped(ctx: JobContext, tx: asyncpg.Connection) -> None:
        await tx.execute(EFFECT_RAW, "grouped", entity(ctx), ctx.job_id, ctx.due_at)
        if ctx.retry_count == 0 and chance(entity(ctx), 10, "group"):
            raise RuntimeError("one of the group fails, after it wrote")

    @app.job("chaos.limited", max_retries=PATIENT, backoff=[0], limit=LIMIT)
    async def limited(ctx: JobContext, tx: Tx) -> None:
        began_at = (await tx.execute(READ_CLOCK)).scalar()
        await asyncio.sleep(0.2)
        await note(tx, "limited", entity(ctx), job_id=ctx.job_id, began_at=began_at)

    @app.job("chaos.flaky", max_retries=PATIENT, backoff=[0])
    async def flaky(ctx: JobContext, tx: Tx) -> None:
        await note(tx, "flaky", entity(ctx), job_id=ctx.job_id)
        if ctx.retry_count < 1 + len(entity(ctx)) % 2:
            raise RuntimeError("not yet; what I wrote must not stay")

    @app.job("chaos.snooze", max_retries=PATIENT, backoff=[0])
    async def snooze(ctx: JobContext, tx: Tx) -> Snooze | None:
        if (await tx.execute(COUNT_SNOOZED, {"key": entity(ctx)})).scalar_one() < 2:
            await note(tx, "snoozed", entity(ctx), job_id=ctx.job_id)
            return Snooze(timedelta(milliseconds=200))
        await note(tx, "snooze", entity(ctx), job_id=ctx.job_id)
        return None

    @app.job("chaos.sync", max_retries=PATIENT, backoff=[0])
    def sync(ctx: JobContext, tx: Session) -> None:
        values = {"aggregate": None, "seq": None, "saw": None, "began_at": None, "due_at": None}
        tx.execute(EFFECT, {"kind": "sync", "key": entity(ctx), "job_id": ctx.job_id, **values})

    @app.job("chaos.raw", max_retries=PATIENT, backoff=[0])
    async def raw(ctx: JobContext, tx: asyncpg.Connection) -> None:
        await tx.execute(EFFECT_RAW, "raw", entity(ctx), ctx.job_id, ctx.due_at)

    @app.job("chaos.plain", max_retries=PATIENT, backoff=[0])
    async def plain(ctx: JobContext) -> None:
        out.note("plain", entity(ctx), ctx.execution_id)

    @app.job("chaos.slow", max_retries=PATIENT, backoff=[0])
    async def slow(ctx: JobContext, tx: Tx) -> None:
        await note(tx, "slow", entity(ctx), job_id=ctx.job_id)
        await asyncio.sleep(0.6)


def add_poison(app: Duly) -> None:
    """Work that cannot succeed, or that is bad for its neighbours."""

    @app.job("chaos.raise", max_retries=POISON_RETRIES, backoff=[0])
    async def fail_always(ctx: JobContext, tx: Tx) -> None:
        await note(tx, "raise", entity(ctx), job_id=ctx.job_id)
        raise RuntimeError("always")

    @app.job("chaos.kill", max_retries=POISON_RETRIES, backoff=[0])
    async def kill(ctx: JobContext, tx: Tx) -> None:
        await note(tx, "kill", entity(ctx), job_id=ctx.job_id)
        os.kill(os.getpid(), signal.SIGKILL)

    @app.job("chaos.settle", max_retries=PATIENT, backoff=[0])
    async def die_settling(ctx: JobContext, tx: Tx) -> None:
        await note(tx, "settle", entity(ctx), job_id=ctx.job_id)
        if ctx.retry_count == 0:
            arm("worker.before_settle=kill9")

    @app.job("chaos.hang", max_retries=POISON_RETRIES, backoff=[0], timeout=0.7)
    async def hang(ctx: JobContext, tx: Tx) -> None:
        await note(tx, "hang", entity(ctx), job_id=ctx.job_id)
        await asyncio.sleep(3600)

    @app.job("chaos.block", max_retries=PATIENT, backoff=[0])
    async def block(ctx: JobContext, tx: Tx) -> None:
        began_at = (await tx.execute(READ_CLOCK)).scalar()
        time.sleep(BLOCKED_SECONDS)  # noqa: ASYNC251 - the whole event loop stands still: that is the poison
        await note(tx, "block", entity(ctx), job_id=ctx.job_id, began_at=began_at)

    @app.job("chaos.fail", max_retries=PATIENT, backoff=[0])
    async def fail(ctx: JobContext) -> Fail:
        return Fail("it will never work")


async def sleep_deaf(seconds: float) -> None:
    """Sleep through a cancellation, as a handler that is told to stop and does not."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)


def add_stalls(app: Duly, out: Witness) -> None:
    """Work that takes its time and will not be told, so that a stopped worker goes on as a zombie when it wakes."""

    @app.job("stall.done", max_retries=PATIENT, backoff=[0])
    def stall_done(ctx: JobContext, tx: Session) -> None:
        values = {"aggregate": None, "seq": None, "saw": None, "began_at": None, "due_at": None}
        tx.execute(EFFECT, {"kind": "stall.done", "key": entity(ctx), "job_id": ctx.job_id, **values})
        out.note("stalls", entity(ctx), ctx.job_id)
        time.sleep(STALL_SECONDS)

    @app.job("stall.raise", max_retries=PATIENT, backoff=[0])
    async def stall_raise(ctx: JobContext) -> None:
        out.note("stalls", entity(ctx), ctx.job_id)
        await sleep_deaf(STALL_SECONDS)
        if ctx.retry_count < 2:
            raise RuntimeError("later")

    @app.job("stall.fail", max_retries=PATIENT, backoff=[0])
    async def stall_fail(ctx: JobContext) -> Fail:
        out.note("stalls", entity(ctx), ctx.job_id)
        await sleep_deaf(STALL_SECONDS)
        return Fail("never")

    @app.job("stall.long", max_retries=3, backoff=[0])
    async def stall_long(ctx: JobContext, tx: Tx) -> None:
        await asyncio.sleep(BLOCKED_SECONDS)
        await note(tx, "stall.long", entity(ctx), job_id=ctx.job_id)


def add_consumers(app: Duly, out: Witness) -> None:
    """An ordered one, one of batches, one that snoozes and emits, and one that calls the outside."""

    @app.consumer("ordered", on="order.placed", ordered=True, max_retries=12, backoff=[0])
    async def ordered(event: Event, tx: Tx) -> None:
        if event.payload["poison"]:
            raise RuntimeError("a poison event holds its own aggregate, and no other")
        saw = (await tx.execute(READ_LAST, {"aggregate": event.aggregate_id})).scalar()
        op, seq = event.payload["op"], event.payload["seq"]
        await note(tx, "ordered", op, aggregate=event.aggregate_id, seq=seq, saw=saw)

    @app.consumer("batched", on="order.placed", batch=20, max_retries=PATIENT, backoff=[0])
    async def batched(events: list[Event], tx: asyncpg.Connection) -> None:
        await tx.executemany(EFFECT_RAW, [("batched", event.payload["op"], None, None) for event in events])

    @app.consumer("noted", on=["order.placed", "note.taken"], max_retries=PATIENT, backoff=[0])
    async def noted(event: Event, tx: AsyncConnection) -> Snooze | None:
        op = event.payload["op"]
        if chance(op, 20, "noted") and (await tx.execute(COUNT_SNOOZED, {"key": "noted " + op})).scalar_one() < 1:
            await note(tx, "snoozed", "noted " + op)
            return Snooze(timedelta(milliseconds=100))
        await note(tx, "noted", op)
        await emit(tx, NewEvent("order.noted", "chaos.notes", op, {"op": op}))
        return None

    @app.consumer("followed", on=["order.noted"], max_retries=PATIENT, backoff=[0])
    async def followed(event: Event, tx: Tx) -> None:
        await note(tx, "followed", event.payload["op"])

    @app.consumer("fired", on="timer.fired", max_retries=PATIENT, backoff=[0])
    async def fired(event: Event, tx: Tx) -> None:
        await note(tx, "fired", event.payload["op"])

    @app.consumer("outside", on="order.placed", max_retries=PATIENT, backoff=[0])
    async def outside(event: Event) -> None:
        out.note("outside", event.payload["op"], event.id)


def add_second_version(app: Duly) -> None:
    """What only upgraded workers know."""

    @app.job("chaos.v2", max_retries=PATIENT, backoff=[0])
    async def second(ctx: JobContext, tx: Tx) -> None:
        await note(tx, "v2", entity(ctx), job_id=ctx.job_id)


def add_cron(app: Duly) -> None:
    """One schedule whose every occurrence runs, and one that folds what it missed."""

    @app.job(CRON_ALL, max_retries=PATIENT, backoff=[0])
    async def every_minute(ctx: JobContext, tx: Tx) -> None:
        await note(tx, CRON_ALL, ctx.due_at.isoformat(), job_id=ctx.job_id, due_at=ctx.due_at)

    @app.job(CRON_ONCE, max_retries=PATIENT, backoff=[0])
    async def folded(ctx: JobContext, tx: Tx) -> None:
        await note(tx, CRON_ONCE, ctx.due_at.isoformat(), job_id=ctx.job_id, due_at=ctx.due_at)

    app.cron(CRON_ALL, "* * * * *", misfire="run_all")
    app.cron(CRON_ONCE, "*/2 * * * *", misfire="run_once")


class NewOrder(BaseModel):
    """What a client orders."""

    op: str
    account: str
    timer_ms: int = 500
    extra: str = ""
    poison: bool = False
    explode: bool = False


class NewNudge(BaseModel):
    """A timer that is set anew again and again."""

    op: str
    entity: str


class NewNote(BaseModel):
    """A request that comes without a key."""

    op: str


def create_router() -> Router:
    """The routes that clients call."""
    router = Router()

    @router.post("/orders", status_code=201)
    async def place_order(order: NewOrder, tx: RequestTx) -> dict[str, Any]:
        found = (await tx.execute(NEXT_SEQ, {"id": order.account})).one()
        seq, now = int(found[0]), found[1]
        nonce = uuid4().hex
        values = {"op": order.op, "account": order.account, "seq": seq, "poison": order.poison, "nonce": nonce}
        await tx.execute(ADD_ORDER, {**values, "extra": order.extra})
        payload = {"op": order.op, "seq": seq, "poison": order.poison}
        await emit(tx, NewEvent("order.placed", "chaos.orders", order.account, payload))
        await schedule(tx, "chaos.timer", order.op, now + timedelta(milliseconds=order.timer_ms))
        if order.extra:
            await schedule(tx, order.extra, order.op)
        if order.explode:
            raise Conflict("told to fail after everything was written")
        return {"op": order.op, "seq": seq, "nonce": nonce}

    @router.post("/orders/{target}/cancel")
    async def cancel_timer(target: str, body: NewNote, tx: RequestTx) -> dict[str, Any]:
        n = await cancel(tx, "chaos.timer", target)
        await tx.execute(ADD_CANCEL, {"op": body.op, "target": target, "n": n})
        return {"op": body.op, "cancelled": n, "nonce": uuid4().hex}

    @router.post("/nudges", status_code=201)
    async def nudge(body: NewNudge, tx: RequestTx) -> dict[str, Any]:
        before, now = (await tx.execute(COUNT_PENDING, {"entity": body.entity})).one()
        run_at = now + timedelta(milliseconds=400)
        job_id = await schedule(tx, "chaos.unique", body.entity, run_at, payload={"op": body.op})
        after = (await tx.execute(COUNT_PENDING, {"entity": body.entity})).scalar_one()
        pending = max(before, after)
        values = {"op": body.op, "entity": body.entity, "job_id": job_id, "run_at": run_at, "pending": pending}
        await tx.execute(ADD_NUDGE, values)
        return {"op": body.op, "nonce": uuid4().hex}

    @router.post("/notes", status_code=201)
    async def take_note(body: NewNote, tx: RequestTx) -> dict[str, Any]:
        await tx.execute(ADD_NOTE, {"op": body.op})
        await emit(tx, NewEvent("note.taken", "chaos.notes", body.op, {"op": body.op}))
        return {"op": body.op}

    @router.post("/hold", openapi_extra={"x-idempotent": False})
    async def hold(seconds: float, tx: RequestTx) -> dict[str, Any]:
        await tx.execute(HOLD, {"seconds": min(seconds, 5.0)})
        return {}

    return router
