"""The delivery log: what was sent, how each attempt went, and sending it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, get_args
from uuid import UUID

from duly.db import Row, Tx, fetch, load_json
from duly.errors import Conflict, Forbidden, Invalid, NotFound
from duly.ids import uuid7
from duly.inbox.receive import as_event
from duly.messages import is_internal
from duly.operate.arguments import bulk_size, page_size, signed
from duly.operate.counts import CAP, Count
from duly.settings import Settings
from duly.webhooks import sql as delivery_sql
from duly.webhooks import sql_operate as sql
from duly.webhooks.admit import admit, lock, share_of
from duly.webhooks.deliver import encode_body
from duly.webhooks.model import FINISHED, DeliveryStatus
from duly.webhooks.subscriptions import Subscription, find_subscription

STATUSES: tuple[str, ...] = get_args(DeliveryStatus)
ATTEMPTS_SHOWN = 200
FAILED_STATUSES = ("PERMANENTLY_FAILED",)
TEST_TYPE = "webhook.test"


@dataclass(frozen=True)
class Delivery:
    """One event for one subscription. ``tries`` are those since it was made or redelivered, ``attempts`` all."""

    id: UUID
    number: int
    subscription_id: UUID
    event_id: UUID
    event_type: str
    aggregate_id: str
    event_created_at: datetime
    status: str
    attempts: int
    tries: int
    redeliveries: int
    next_attempt_at: datetime | None
    last_http_status: int | None
    last_error: str | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True)
class Attempt:
    """One request and its answer."""

    number: int
    started_at: datetime
    latency_ms: int
    outcome: str
    http_status: int | None
    error: str | None
    address: str | None
    request_headers: Mapping[str, str]
    request_bytes: int
    response_headers: Mapping[str, str]
    response_excerpt: str
    worker: str


@dataclass(frozen=True)
class DeliveryWithAttempts:
    """A delivery, its attempts (the newest first), and the body as it is sent; None when there is none to send."""

    delivery: Delivery
    attempts: list[Attempt]
    body: bytes | None = field(repr=False)


async def list_deliveries(
    tx: Tx,
    *,
    subscription_id: UUID | None = None,
    status: str | None = None,
    before: int | None = None,
    limit: int = 50,
) -> list[Delivery]:
    """One page, newest first; the next page is ``before=last.number``."""
    if status is not None and status not in STATUSES:
        raise Invalid(f"no delivery is ever {status[:40]!r}: choose one of {', '.join(STATUSES)}")
    values: dict[str, Any] = {"before": before, "limit": page_size(limit)}
    if subscription_id is not None and status is not None:
        statement, values = sql.LIST_DELIVERIES_OF_BOTH, values | {"subscription_id": subscription_id, "status": status}
    elif subscription_id is not None:
        statement, values = sql.LIST_DELIVERIES_OF_SUBSCRIPTION, values | {"subscription_id": subscription_id}
    elif status is not None:
        statement, values = sql.LIST_DELIVERIES_OF_STATUS, values | {"status": status}
    else:
        statement = sql.LIST_DELIVERIES
    return [Delivery(*row) for row in await fetch(tx, statement, **values)]


async def count_deliveries(tx: Tx, subscription_id: UUID) -> dict[str, Count]:
    """How many there are of each status, as far as one counts."""
    rows = await fetch(tx, sql.COUNT_DELIVERIES, subscription_id=subscription_id, statuses=list(STATUSES), cap=CAP + 1)
    return {status: Count.of(counted) for status, counted in rows}


async def find_delivery(tx: Tx, id: UUID, *, owner: str | None = None) -> DeliveryWithAttempts:
    """One of them, with everything that is known of it."""
    delivery = await _find(tx, id, owner, with_deleted=True)
    events = [] if is_internal(delivery.event_type) else await fetch(tx, sql.READ_EVENT, id=delivery.event_id)
    return DeliveryWithAttempts(
        delivery, await list_attempts(tx, id), encode_body(as_event(events[0])) if events else None
    )


async def list_attempts(tx: Tx, delivery_id: UUID, *, limit: int = ATTEMPTS_SHOWN) -> list[Attempt]:
    """The newest first."""
    rows = await fetch(tx, sql.LIST_ATTEMPTS, id=delivery_id, limit=page_size(limit))
    return [_attempt(row) for row in rows]


async def redeliver(
    tx: Tx, settings: Settings, id: UUID, *, owner: str | None = None, actor: str, reason: str | None = None
) -> Delivery:
    """Send it again: what is over gets a new set of tries, what waits for its retry goes now."""
    signature = signed(actor=actor, reason=reason)
    delivery = await _find(tx, id, owner)
    await lock(tx, [delivery.subscription_id])
    if not await fetch(tx, sql.REDELIVER, id=id):
        raise Conflict("the delivery is under way, or waits for its turn")
    await fetch(tx, sql.CANCEL_JOBS, id=str(id))
    await _audit(tx, "webhook_delivery.redelivered", f"webhook_delivery:{id}", signature)
    await admit(tx, [delivery.subscription_id], most=share_of(settings.webhook_concurrency))
    await fetch(tx, sql.RESOLVE_FAILED_ALERT, id=delivery.subscription_id)
    return Delivery(*(await fetch(tx, sql.FIND_DELIVERY, id=id))[0])


async def redeliver_range(
    tx: Tx,
    settings: Settings,
    subscription_id: UUID,
    *,
    since: datetime,
    until: datetime,
    only_failed: bool = True,
    after: int = 0,
    limit: int = 1_000,
    owner: str | None = None,
    actor: str,
    reason: str | None = None,
) -> tuple[int, int | None]:
    """Send again what was made in this time, oldest first; how many, and ``after`` for the rest if there is any."""
    signature = signed(actor=actor, reason=reason)
    statuses = _range(since, until, only_failed=only_failed)
    await find_subscription(tx, subscription_id, owner=owner)
    await lock(tx, [subscription_id])
    rows = await fetch(
        tx, sql.REDELIVER_RANGE, subscription_id=subscription_id, since=since, until=until, statuses=statuses,
        after=after, limit=bulk_size(limit),
    )  # fmt: skip
    what = {"since": since, "until": until, "only_failed": only_failed, "count": len(rows)}
    await _audit(tx, "webhook_subscription.redelivered", f"webhook_subscription:{subscription_id}", signature, what)
    await admit(tx, [subscription_id], most=share_of(settings.webhook_concurrency))
    await fetch(tx, sql.RESOLVE_FAILED_ALERT, id=subscription_id)
    return len(rows), max((row[0] for row in rows), default=0) if len(rows) == limit else None


async def count_range(
    tx: Tx,
    subscription_id: UUID,
    *,
    since: datetime,
    until: datetime,
    only_failed: bool = True,
    after: int = 0,
    cap: int = CAP,
) -> Count:
    """How many ``redeliver_range`` would send again, as far as one counts."""
    statuses = _range(since, until, only_failed=only_failed)
    await find_subscription(tx, subscription_id)
    rows = await fetch(
        tx, sql.COUNT_RANGE, subscription_id=subscription_id, since=since, until=until, statuses=statuses,
        after=after, cap=cap + 1,
    )  # fmt: skip
    return Count.of(rows[0][0], cap=cap)


def _range(since: datetime, until: datetime, *, only_failed: bool) -> list[str]:
    """Which deliveries of a time are meant; Invalid when it is no time."""
    if since.tzinfo is None or until.tzinfo is None or since >= until:
        raise Invalid("give since and until with their offset from UTC, since before until")
    return list(FAILED_STATUSES if only_failed else sorted(FINISHED))


async def send_test(
    tx: Tx,
    settings: Settings,
    subscription_id: UUID,
    *,
    owner: str | None = None,
    actor: str,
    reason: str | None = None,
) -> Delivery:
    """Deliver an event of the type ``webhook.test`` to this subscription and to nobody else."""
    signature = signed(actor=actor, reason=reason)
    subscription: Subscription = await find_subscription(tx, subscription_id, owner=owner)
    headers = json.dumps({"correlation_id": str(uuid7())})
    event = (await fetch(tx, sql.ADD_TEST_EVENT, subscription_id=str(subscription_id), headers=headers))[0]
    id = uuid7()
    await fetch(
        tx, delivery_sql.ADD_DELIVERIES, ids=[id], subscription_ids=[subscription.id], event_ids=[event[0]],
        event_types=[event[1]], aggregate_ids=[event[2]], event_created_ats=[event[3]],
    )  # fmt: skip
    await _audit(tx, "webhook_subscription.tested", f"webhook_subscription:{subscription_id}", signature)
    await lock(tx, [subscription_id])
    await admit(tx, [subscription_id], most=share_of(settings.webhook_concurrency))
    return Delivery(*(await fetch(tx, sql.FIND_DELIVERY, id=id))[0])


async def _find(tx: Tx, id: UUID, owner: str | None, *, with_deleted: bool = False) -> Delivery:
    """One of this owner's; operators may look at what is left of a deleted subscription's, too."""
    rows = await fetch(tx, sql.FIND_DELIVERY, id=id)
    if not rows:
        raise NotFound(f"no webhook delivery has the id {id}")
    delivery = Delivery(*rows[0])
    if with_deleted and owner is None:
        return delivery
    try:
        await find_subscription(tx, delivery.subscription_id, owner=owner)
    except Forbidden:
        raise Forbidden("this webhook delivery is somebody else's") from None
    return delivery


async def _audit(
    tx: Tx,
    action: str,
    subject: str,
    signature: Mapping[str, str | None],
    after: Mapping[str, Any] | None = None,
) -> None:
    shown = json.dumps(after, default=str) if after is not None else None
    await fetch(tx, sql.WRITE_AUDIT, action=action, subject=subject, before=None, after=shown, **signature)


def _attempt(row: Row) -> Attempt:
    values = list(row)
    values[7], values[9] = load_json(values[7]), load_json(values[9])  # the headers of both sides
    return Attempt(*values)
