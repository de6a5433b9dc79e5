"""What birthdays does because of an event, or because it is time."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from uuid import UUID

from apps.birthdays import service
from apps.birthdays.gateways import NoWebhook, Webhook, WebhookAway, WebhookRefused
from apps.birthdays.model import BirthdayEvent, Delivery
from apps.birthdays.service import (
    CLAIM_MORE,
    CORRECTED_AT_ONCE,
    DELIVER,
    FORGOTTEN_AT_ONCE,
    GONE,
    MISSED_LIMIT,
    Claim,
)
from apps.users.events import UserBirthdayChanged, UserDeleted, UserRenamed, UserTimezoneChanged
from duly import Cancel, Database, Done, Duly, Event, Fail, JobContext, Outcome, Snooze, Then, Tx
from duly.ids import parse_uuid

AT_ONCE = 10
WAITS_SECONDS = [120 * 2**retry for retry in range(7)]  # 8 tries in four hours and a quarter
LONGEST_RETRY_AFTER_SECONDS = 3_600.0
PATIENCE = timedelta(hours=6)  # a webhook that always asks for a little more time is given no more than this
WITHOUT_WEBHOOK = timedelta(minutes=10)
LONGEST_TRY = timedelta(seconds=60)


def register(app: Duly) -> None:
    """Add the jobs and the consumer to an application; the schedules come with the migration."""
    webhook = Webhook()

    @app.job("birthdays.claim")
    async def claim(tx: Tx) -> Done:
        return Done(_describe(await service.claim_ready(tx, looks_for_missed=True)))

    @app.job(CLAIM_MORE)
    async def claim_more(tx: Tx) -> Done:
        return Done(_describe(await service.claim_ready(tx, looks_for_missed=False)))

    @app.job(DELIVER, limit=AT_ONCE, max_retries=len(WAITS_SECONDS), backoff=WAITS_SECONDS, timeout=LONGEST_TRY)
    async def deliver(ctx: JobContext, db: Database) -> Outcome | Then:
        event_id = parse_uuid(ctx.entity_id or "")
        if event_id is None:
            return Fail("the job's entity is not an event's id")
        return await _deliver(ctx, db, webhook, event_id)

    @app.job("birthdays.recover")
    async def recover(tx: Tx) -> Done:
        return Done(f"ended {await service.recover(tx)} that nobody was delivering")

    @app.job("birthdays.recheck-zones")
    async def recheck_zones(tx: Tx) -> Outcome:
        corrected = await service.recheck_zones(tx)
        return _again_if(corrected == CORRECTED_AT_ONCE, f"corrected {corrected} by today's rules of their zones")

    @app.job("birthdays.forget-events")
    async def forget_events(tx: Tx) -> Outcome:
        forgotten = await service.forget_events(tx)
        return _again_if(forgotten == FORGOTTEN_AT_ONCE, f"forgot {forgotten} events")

    # Who registers is planned for in that transaction: heard of a second time, later, somebody who has been deleted
    # meanwhile would come back.
    changes = [kind.event_type for kind in (UserRenamed, UserBirthdayChanged, UserTimezoneChanged, UserDeleted)]

    @app.consumer("birthdays.follow-user", on=changes, ordered=True)
    async def follow_user(event: Event, tx: Tx) -> None:
        await service.follow_user(tx, event)


async def _deliver(ctx: JobContext, db: Database, webhook: Webhook, event_id: UUID) -> Outcome | Then:
    """Read, call, and return what follows; the call is made while no transaction is open (B4)."""
    async with db.transaction() as tx:
        delivery = await service.prepare_delivery(tx, event_id)
    if delivery is None:
        return Done("there is nothing to deliver any more")
    if isinstance(delivery, BirthdayEvent):
        return Then(partial(_fail, event=delivery, outcome=Cancel(GONE)))
    try:
        await webhook.send(delivery)
    except NoWebhook as unset:
        return Snooze(WITHOUT_WEBHOOK, str(unset))
    except WebhookRefused as refused:
        return Then(partial(_fail, event=delivery.event, outcome=Fail(str(refused))))
    except WebhookAway as away:
        if (wait := _asked_for(away, delivery)) is not None:
            return Snooze(wait, str(away))
        if ctx.retry_count < len(WAITS_SECONDS):
            raise
        gave_up = f"gave up after {ctx.retry_count + 1} tries: {away}"
        return Then(partial(_fail, event=delivery.event, outcome=Fail(gave_up)))
    return Then(partial(_complete, event=delivery.event))


def _asked_for(away: WebhookAway, delivery: Delivery) -> timedelta | None:
    """The wait that the webhook asked for, within bounds."""
    if not 0 < away.retry_after_seconds <= LONGEST_RETRY_AFTER_SECONDS or delivery.tried_for > PATIENCE:
        return None
    return timedelta(seconds=away.retry_after_seconds)


async def _complete(tx: Tx, *, event: BirthdayEvent) -> Done:
    await service.complete(tx, event)
    return Done("delivered")


async def _fail(tx: Tx, *, event: BirthdayEvent, outcome: Fail | Cancel) -> Outcome:
    await service.fail(tx, event, reason=outcome.reason)
    return outcome


def _again_if(is_full: bool, message: str) -> Outcome:
    """Each commit is bounded; where it was full there may be more."""
    return Snooze(timedelta(0), message) if is_full else Done(message)


def _describe(claim: Claim) -> str:
    words = f"claimed {len(claim.claimed)}" + (", more to come" if claim.has_more else "")
    if (missed := claim.missed) is None:
        return words
    count = f"{missed.count}{'+' if missed.count == MISSED_LIMIT else ''}"
    return (
        f"found {count} missed, the oldest of {missed.oldest:%Y-%m-%d %H:%M} UTC, the newest of "
        f"{missed.newest:%Y-%m-%d %H:%M} UTC; {words}"
    )
