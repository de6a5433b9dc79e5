"""What commerce does because it is time."""

from __future__ import annotations

from uuid import UUID

import structlog

from apps.commerce import service
from apps.commerce.model import OrderNotFound
from apps.commerce.service import ORDER_EXPIRATION, PAYMENT_TIMEOUT, Sweep, Timeout
from duly import Cancel, Done, Duly, Fail, JobContext, Outcome, Snooze, Tx, schedule

log = structlog.get_logger("apps.commerce")
PAYMENT_EXPIRATION = "PaymentExpiration"
REST = "rest"  # the entity of a run that goes on where the one before it reached its limit


def register(app: Duly) -> None:
    """Add the jobs; the schedules of those that recur come with the migration."""

    @app.job(PAYMENT_TIMEOUT, max_retries=2)
    async def time_out_payment(ctx: JobContext, tx: Tx) -> Outcome:
        return await _time_out(ctx, tx)

    @app.job(ORDER_EXPIRATION)
    async def expire_order(ctx: JobContext, tx: Tx) -> Outcome:
        outcome = await _time_out(ctx, tx)
        if outcome == EXPIRED:  # two days late: its own timer and hundreds of sweeps have failed
            log.warning("order_expired_by_the_last_net", order_id=ctx.entity_id)
        return outcome

    @app.job(PAYMENT_EXPIRATION)
    async def expire_overdue(ctx: JobContext, tx: Tx) -> Done:
        sweep = await service.expire_overdue(tx)
        if sweep.count:  # each of them had a timer, which did not do it
            log.warning("payments_swept", count=sweep.count, has_more=sweep.has_more)
        return await _done(ctx, tx, sweep, f"expired {sweep.count} that their timers missed")

    @app.job("CartAbandonment")
    async def abandon_carts(ctx: JobContext, tx: Tx) -> Done:
        sweep = await service.abandon_carts(tx)
        return await _done(ctx, tx, sweep, f"{sweep.count} carts are abandoned")

    @app.job("TokenCleanup")
    async def forget_links(ctx: JobContext, tx: Tx) -> Done:
        sweep = await service.forget_links(tx)
        return await _done(ctx, tx, sweep, f"deleted {sweep.count} expired tokens")

    @app.job("commerce.forget-carts")
    async def forget_carts(ctx: JobContext, tx: Tx) -> Done:
        sweep = await service.forget_carts(tx)
        return await _done(ctx, tx, sweep, f"forgot {sweep.count} carts")


EXPIRED = Done("the order and its payment have expired")


async def _time_out(ctx: JobContext, tx: Tx) -> Outcome:
    try:
        order_id = UUID(ctx.entity_id or "")
    except ValueError:
        return Fail("this timer is about no order: its entity is no id of one")
    try:
        found = await service.time_out_order(tx, order_id)
    except OrderNotFound as absent:
        return Cancel(str(absent))
    return _say(found)


def _say(found: Timeout) -> Outcome:
    if found.has_expired:
        return EXPIRED
    if found.wait:
        return Snooze(found.wait, "the payment is not due yet")
    return Done(f"nothing to do: the order is {found.order.status.value}")


async def _done(ctx: JobContext, tx: Tx, sweep: Sweep, message: str) -> Done:
    """A commit is bounded; what is left is for a run of its own, at once."""
    if sweep.has_more:
        await schedule(tx, ctx.name, REST)
        return Done(f"{message}; the rest follows")
    return Done(message)
