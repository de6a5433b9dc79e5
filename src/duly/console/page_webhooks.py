"""Webhooks: who subscribed and how that goes, one subscriber with its deliveries, one delivery with its attempts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from fastapi import Request
from fastapi.responses import Response

from duly.console.forms import Wrong
from duly.console.record import read_audit
from duly.console.routes import Pages, Query, read, show, signed_in
from duly.errors import Forbidden, NotFound
from duly.ids import parse_uuid
from duly.webhooks.actions import OPERATOR
from duly.webhooks.deliveries import STATUSES, TEST_TYPE, Delivery, count_deliveries, find_delivery, list_deliveries
from duly.webhooks.look import (
    count_of_each,
    find_any,
    list_alerts_of,
    list_of_type,
    list_provider_secrets,
    list_secrets,
    say_delivery,
    say_standing,
)
from duly.webhooks.model import FINISHED, MOST_TRIES
from duly.webhooks.subscriptions import Subscription, find_subscription, list_subscriptions

if TYPE_CHECKING:
    from duly.console.app import Look

PAGE = 50
ATTEMPTS_LIMIT = 50
DEFAULTS = {
    "url": "", "events": "", "description": "", "max_in_flight": "5", "timeout_seconds": "15", "owner": OPERATOR,
}  # fmt: skip


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/webhooks")(webhooks)
    pages.get("/webhooks/new")(new_webhook)
    pages.get("/webhooks/deliveries/{id}")(delivery)
    pages.get("/webhooks/{id}")(webhook)
    pages.get("/webhooks/{id}/edit")(edit_webhook)
    pages.form("webhooks.add")(refused_webhook)
    pages.form("webhooks.edit")(refused_edit)


async def webhooks(request: Request) -> Response:
    """Every subscription, the newest first, with what waits and what failed."""
    query = Query(request)
    before = query.id("after")
    async with read(request) as look:
        found = await list_subscriptions(look.tx, before=before, limit=PAGE + 1)
        counts = await count_of_each(look.tx, [one.id for one in found[:PAGE]]) if found else {}
        providers = await list_provider_secrets(look.tx) if before is None else []
    more = found[PAGE - 1].id if len(found) > PAGE else None
    return show(
        request, "webhooks.html", now=look.now, subscriptions=found[:PAGE], counts=counts, after=more,
        is_first=before is None, providers=providers,
    )  # fmt: skip


async def new_webhook(request: Request) -> Response:
    """The form for a new one."""
    _check_may_act(request)
    return _editor(request, None, DEFAULTS)


async def edit_webhook(request: Request, id: UUID) -> Response:
    """The form for one that is there."""
    _check_may_act(request)
    async with read(request) as look:
        found = await find_subscription(look.tx, id)
    return _editor(request, found, _values(found))


async def refused_webhook(request: Request, wrong: Wrong) -> Response:
    """The form with what was typed, but for the secret, and what is wrong with it."""
    return _editor(request, None, DEFAULTS, wrong)


async def refused_edit(request: Request, wrong: Wrong) -> Response:
    """The same for one that is there, as the version that was edited: what somebody else changed is not undone."""
    async with read(request) as look:
        id = parse_uuid(wrong.given.get("id", ""))
        found = await find_any(look.tx, id) if id is not None else None
    if found is None:
        raise NotFound("no webhook subscription has this id")
    return _editor(request, found, _values(found), wrong)


def _editor(
    request: Request, found: Subscription | None, values: Mapping[str, str], wrong: Wrong | None = None
) -> Response:
    given = {name: wrong.given.get(name, value) if wrong else value for name, value in values.items()}
    status = wrong.status if wrong else 200
    return show(request, "webhook_edit.html", subscription=found, values=given, wrong=wrong, status=status)


def _values(one: Subscription) -> dict[str, str]:
    return {
        "url": one.url, "events": "\n".join(one.patterns), "description": one.description,
        "max_in_flight": str(one.max_in_flight), "timeout_seconds": str(one.timeout_seconds),
    }  # fmt: skip


async def webhook(request: Request, id: UUID) -> Response:
    """One subscriber: why nothing is delivered now, its secrets' ages, and its deliveries."""
    query = Query(request)
    status, event_type = query.choice("status", STATUSES), query.text("type")
    before = query.number("after")
    async with read(request) as look:
        found = await find_any(look.tx, id)
        audit = await read_audit(request, look, subject=f"webhook_subscription:{id}", limit=20)
        if found is None and not audit:
            raise NotFound("no webhook subscription has this id")
        if found is None:
            return show(request, "webhook.html", now=look.now, id=id, subscription=None, audit=audit)
        sentences = await say_standing(look.tx, found, look.now)
        deliveries, after, has_looked = await _deliveries(look, id, status, event_type, before)
        secrets = await list_secrets(look.tx, id)
        counts = await count_deliveries(look.tx, id)
        alerts = await list_alerts_of(look.tx, id)
    return show(
        request, "webhook.html", now=look.now, id=id, subscription=found, audit=audit, sentences=sentences,
        deliveries=deliveries, after=after, has_looked=has_looked, secrets=secrets, counts=counts, alerts=alerts,
        statuses=STATUSES, chosen=status, event_type=event_type, is_first=before is None, finished=FINISHED,
        soon=look.now + timedelta(minutes=1),
    )  # fmt: skip


async def _deliveries(
    look: Look, id: UUID, status: str | None, event_type: str | None, before: int | None
) -> tuple[list[Delivery], int | None, bool]:
    """A page, where the next begins, and whether that is only as far as was looked."""
    reached = None
    if event_type is None:
        found = await list_deliveries(look.tx, subscription_id=id, status=status, before=before, limit=PAGE + 1)
    else:
        found, reached = await list_of_type(
            look.tx, id, event_type=event_type, status=status, before=before, limit=PAGE + 1
        )
    if len(found) > PAGE:
        return found[:PAGE], found[PAGE - 1].number, False
    return found, reached, reached is not None


async def delivery(request: Request, id: UUID) -> Response:
    """One delivery: where it stands and why, and each attempt; what was sent and answered is for administrators."""
    async with read(request) as look:
        found = await find_delivery(look.tx, id)
        subscription = await find_any(look.tx, found.delivery.subscription_id)
        sentences = await say_delivery(look.tx, found.delivery, subscription, look.now)
        audit = await read_audit(request, look, subject=f"webhook_delivery:{id}", limit=20)
    body = found.body.decode() if found.body is not None else None
    return show(
        request, "delivery.html", now=look.now, delivery=found.delivery, attempts=found.attempts[:ATTEMPTS_LIMIT],
        body=body if signed_in(request).may_act else None, subscription=subscription, sentences=sentences,
        audit=audit, is_gone=body is None, is_test=found.delivery.event_type == TEST_TYPE, finished=FINISHED,
        most_tries=MOST_TRIES,
    )  # fmt: skip


def _check_may_act(request: Request) -> None:
    if not signed_in(request).may_act:
        raise Forbidden("you may look, but not change anything: this needs the role ADMINISTRATOR")
