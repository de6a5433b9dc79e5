"""The jobs and consumers of the miniature shop. Every third order is paid, every tenth delivery fails at first."""

from __future__ import annotations

import random
from datetime import timedelta
from decimal import Decimal

from sqlalchemy import text

from apps.demo.events import OrderExpired, OrderPaid, OrderPlaced
from duly import Done, Duly, Event, JobContext, Tx, cancel, emit, schedule
from duly.ids import uuid7

PAYMENT_DUE = timedelta(minutes=2)
NOW = text("SELECT duly.now()")


def register(app: Duly) -> None:
    """Add the shop to an application."""

    @app.job("demo.place-order", max_retries=2)
    async def place_order(ctx: JobContext, tx: Tx) -> Done:
        order_id = uuid7().hex[-12:]
        now = (await tx.execute(NOW)).scalar_one()
        amount = Decimal(random.randrange(500, 50_000)) / 100  # noqa: S311 - sample data
        await emit(tx, OrderPlaced(order_id=order_id, amount=amount, currency="PLN"))
        await schedule(tx, "demo.expire-payment", order_id, now + PAYMENT_DUE)
        return Done(f"order {order_id} placed, {amount} PLN due at {now + PAYMENT_DUE:%H:%M:%S} UTC")

    @app.job("demo.expire-payment", max_retries=2)
    async def expire_payment(ctx: JobContext, tx: Tx) -> None:
        assert ctx.entity_id is not None
        await emit(tx, OrderExpired(order_id=ctx.entity_id))
        ctx.report_success(f"order {ctx.entity_id} was not paid in time")

    @app.consumer("demo.payments", on="order.placed")
    async def pay_some(event: Event, tx: Tx) -> None:
        order_id = event.body(OrderPlaced).order_id
        if int(order_id, 16) % 3 == 0 and await cancel(tx, "demo.expire-payment", order_id):
            await emit(tx, OrderPaid(order_id=order_id))

    @app.consumer("demo.deliveries", on="order.*", ordered=True, backoff=[2, 5, 10])
    async def deliver(event: Event) -> None:
        if random.random() < 0.1:  # noqa: S311 - sample data
            raise ConnectionError("the sample courier did not answer")

    @app.job("demo.broken", max_retries=1, backoff=[5])
    async def broken(ctx: JobContext) -> None:
        raise RuntimeError("this job always fails, so that the dead letters are not empty")

    app.cron("demo.place-order", "* * * * *", misfire="skip")
    app.cron("demo.broken", "*/30 * * * *", timezone="Europe/Warsaw", misfire="skip")
