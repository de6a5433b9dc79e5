"""``duly why`` for a delivery and for a subscription."""

from __future__ import annotations

from uuid import UUID

from duly.db import fetch
from duly.ids import parse_uuid
from duly.operate.why import add_answer
from duly.operate.why_look import Look, say_audit
from duly.operate.words import listing, when
from duly.webhooks import sql_operate as sql
from duly.webhooks.deliveries import Delivery
from duly.webhooks.look import find_any, host_of, say_delivery, say_standing


async def why_delivery(look: Look, asked: str) -> list[str]:
    """Everything known about one delivery; nothing when there is none."""
    id = parse_uuid(asked)
    rows = await fetch(look.tx, sql.FIND_DELIVERY, id=id) if id is not None else []
    if not rows:
        return []
    one = Delivery(*rows[0])
    subscription = await find_any(look.tx, one.subscription_id)
    to = host_of(subscription.url) if subscription is not None else "a subscriber that is gone"
    return [
        f"{id} is the delivery of event {one.event_id} ({one.event_type}, of {one.aggregate_id}) to {to}, for "
        f"subscription {one.subscription_id}, made at {when(one.created_at, look.now)}.",
        *await say_delivery(look.tx, one, subscription, look.now),
        *await say_audit(look, f"webhook_delivery:{id}"),
    ]


async def why_subscription(look: Look, asked: str) -> list[str]:
    """How one subscription is doing; nothing when there is none."""
    id: UUID | None = parse_uuid(asked)
    one = await find_any(look.tx, id) if id is not None else None
    if one is None:
        return []
    return [
        f"{id} is the webhook subscription of {one.owner} to {listing(one.patterns)}, sent to {host_of(one.url)}.",
        *await say_standing(look.tx, one, look.now),
        *await say_audit(look, f"webhook_subscription:{id}"),
    ]


add_answer("webhook_delivery", why_delivery)
add_answer("webhook_subscription", why_subscription)
