"""The routes of webhook subscriptions (F13): a caller sees and changes its own, and nobody else's."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Query, Request, Response
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, SecretStr

from duly.auth.http import require
from duly.auth.principals import Principal
from duly.errors import Invalid
from duly.http.transactions import HEADER, RequestTx, Router
from duly.settings import Settings
from duly.webhooks import deliveries, subscriptions
from duly.webhooks.deliveries import Attempt, Delivery
from duly.webhooks.sealing import Keyring
from duly.webhooks.subscriptions import Created, Subscription

SCOPE, ROLE = "webhooks", "WEBHOOK_ADMIN"
Admin = Annotated[Principal, require(SCOPE, ROLE)]
PATTERN = r"^[A-Za-z*][A-Za-z0-9_.:*-]{0,199}$"
URL_PATTERN = r"^https?://[!-~]+$"
SECRET_PATTERN = r"^[!-~]{16,200}$"  # noqa: S105 - what one looks like
ONE_LINE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
BRING_YOUR_OWN = (
    "give a secret of your own, or leave the Idempotency-Key out: the answer is stored under the key, "
    "and a secret is never stored in clear"
)
router = Router(prefix="/v1/webhooks", tags=["webhooks"])


Url = Annotated[str, Field(min_length=8, max_length=2_000, pattern=URL_PATTERN)]
Patterns = Annotated[list[Annotated[str, Field(pattern=PATTERN)]], Field(min_length=1, max_length=100)]
Secret = Annotated[SecretStr, Field(min_length=16, max_length=200, json_schema_extra={"pattern": SECRET_PATTERN})]
Description = Annotated[str, Field(max_length=500, pattern=ONE_LINE)]
InFlight = Annotated[int, Field(ge=1, le=100, strict=True)]
TimeoutSeconds = Annotated[int, Field(ge=1, le=30, strict=True)]
PageSize = Annotated[int, Query(ge=1, le=200)]


class NewSubscription(BaseModel):
    """Where to send which events; without a secret one is made, and shown once."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    url: Url
    events: Patterns
    secret: Secret | None = None
    description: Description = ""
    max_in_flight: Annotated[InFlight, Field(alias="maxInFlight")] = 5
    timeout_seconds: Annotated[TimeoutSeconds, Field(alias="timeoutSeconds")] = 15


class Changes(BaseModel):
    """What is left out stays as it is."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    url: Url | None = None
    events: Patterns | None = None
    description: Description | None = None
    max_in_flight: Annotated[InFlight | None, Field(alias="maxInFlight")] = None
    timeout_seconds: Annotated[TimeoutSeconds | None, Field(alias="timeoutSeconds")] = None


class Rotation(BaseModel):
    """A new secret; the old one stays valid for the overlap."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    secret: Secret | None = None
    overlap_hours: Annotated[float, Field(ge=0, le=720, alias="overlapHours")] = 24


class Range(BaseModel):
    """What was made in this time; ``after`` goes on where the last answer's ``next`` ended."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    since: AwareDatetime
    until: AwareDatetime
    only_failed: Annotated[bool, Field(alias="onlyFailed", strict=True)] = True
    after: Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)] = 0


class SubscriptionView(BaseModel):
    """A subscription. Its secrets are never shown."""

    id: UUID
    url: str
    events: list[str]
    description: str
    status: Literal["ACTIVE", "PAUSED", "DISABLED"]
    disabledReason: str | None
    maxInFlight: int
    timeoutSeconds: int
    failures: int
    failingSince: datetime | None
    openUntil: datetime | None
    validSecrets: int
    version: int
    createdAt: datetime
    updatedAt: datetime


class CreatedView(SubscriptionView):
    """With the secret that was made, this once."""

    secret: str | None = None


class SubscriptionPage(BaseModel):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[SubscriptionView]
    next: UUID | None


class DeliveryView(BaseModel):
    """One event for one subscription."""

    id: UUID
    number: int
    subscriptionId: UUID
    eventId: UUID
    eventType: str
    status: Literal["WAITING", "QUEUED", "RETRYING", "DELIVERED", "PERMANENTLY_FAILED", "CANCELLED"]
    attempts: int
    nextAttemptAt: datetime | None
    lastHttpStatus: int | None
    lastError: str | None
    createdAt: datetime
    finishedAt: datetime | None


class AttemptView(BaseModel):
    """One request and its answer."""

    number: int
    startedAt: datetime
    latencyMs: int
    outcome: Literal["DELIVERED", "FAILED"]
    httpStatus: int | None
    error: str | None
    requestHeaders: dict[str, str]
    requestBytes: int
    responseHeaders: dict[str, str]
    responseExcerpt: str


class DeliveryWithAttemptsView(DeliveryView):
    """With its attempts, the newest first, and the body as it is sent."""

    log: list[AttemptView]
    body: str | None


class DeliveryPage(BaseModel):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[DeliveryView]
    next: int | None


class Redelivered(BaseModel):
    """How many go again; ``next`` is the ``after`` for the rest, if there is any."""

    count: int
    next: int | None


@router.post("/subscriptions", status_code=201)
async def create_subscription(
    new: NewSubscription, caller: Admin, tx: RequestTx, request: Request, response: Response
) -> CreatedView:
    """Subscribe to events."""
    secret = _given_secret(request, new.secret)
    settings: Settings = request.app.state.settings
    created = await subscriptions.create_subscription(
        tx, settings, Keyring.open(settings), owner=caller.caller, url=new.url, patterns=new.events, secret=secret,
        description=new.description, max_in_flight=new.max_in_flight, timeout_seconds=new.timeout_seconds,
        actor=_actor(caller),
    )  # fmt: skip
    response.headers["Location"] = f"/v1/webhooks/subscriptions/{created.subscription.id}"
    return _created(created, response)


@router.get("/subscriptions")
async def list_subscriptions(
    caller: Admin, tx: RequestTx, before: UUID | None = None, limit: PageSize = 50
) -> SubscriptionPage:
    """A page of the caller's own."""
    found = await subscriptions.list_subscriptions(tx, owner=caller.caller, before=before, limit=limit)
    return SubscriptionPage(
        items=[SubscriptionView(**_shown(one)) for one in found], next=found[-1].id if len(found) == limit else None
    )


@router.get("/subscriptions/{subscription_id}")
async def read_subscription(subscription_id: UUID, caller: Admin, tx: RequestTx) -> SubscriptionView:
    """One of them."""
    found = await subscriptions.find_subscription(tx, subscription_id, owner=caller.caller)
    return SubscriptionView(**_shown(found))


@router.patch("/subscriptions/{subscription_id}")
async def edit_subscription(
    subscription_id: UUID, changes: Changes, caller: Admin, tx: RequestTx, request: Request
) -> SubscriptionView:
    """Change some of it."""
    after = await subscriptions.edit_subscription(
        tx, request.app.state.settings, subscription_id, owner=caller.caller, url=changes.url,
        patterns=changes.events, description=changes.description, max_in_flight=changes.max_in_flight,
        timeout_seconds=changes.timeout_seconds, actor=_actor(caller),
    )  # fmt: skip
    return SubscriptionView(**_shown(after))


@router.delete("/subscriptions/{subscription_id}", status_code=204)
async def delete_subscription(subscription_id: UUID, caller: Admin, tx: RequestTx, request: Request) -> None:
    """Send nothing any more."""
    await subscriptions.delete_subscription(
        tx, request.app.state.settings, subscription_id, owner=caller.caller, actor=_actor(caller)
    )


@router.post("/subscriptions/{subscription_id}/rotate")
async def rotate_secret(
    subscription_id: UUID, rotation: Rotation, caller: Admin, tx: RequestTx, request: Request, response: Response
) -> CreatedView:
    """Sign with a new secret, and for a while with the old one, too."""
    secret = _given_secret(request, rotation.secret)
    created = await subscriptions.rotate_secret(
        tx, Keyring.open(request.app.state.settings), subscription_id, owner=caller.caller, secret=secret,
        overlap_hours=rotation.overlap_hours, actor=_actor(caller),
    )  # fmt: skip
    return _created(created, response)


@router.post("/subscriptions/{subscription_id}/pause")
async def pause_subscription(subscription_id: UUID, caller: Admin, tx: RequestTx, request: Request) -> SubscriptionView:
    """Keep what comes, and send it later."""
    after = await subscriptions.pause_subscription(
        tx, request.app.state.settings, subscription_id, owner=caller.caller, actor=_actor(caller)
    )
    return SubscriptionView(**_shown(after))


@router.post("/subscriptions/{subscription_id}/resume")
async def resume_subscription(
    subscription_id: UUID, caller: Admin, tx: RequestTx, request: Request
) -> SubscriptionView:
    """Send again, what was kept first."""
    after = await subscriptions.resume_subscription(
        tx, request.app.state.settings, subscription_id, owner=caller.caller, actor=_actor(caller)
    )
    return SubscriptionView(**_shown(after))


@router.post("/subscriptions/{subscription_id}/test", status_code=202)
async def send_test(subscription_id: UUID, caller: Admin, tx: RequestTx, request: Request) -> DeliveryView:
    """Deliver an event of the type webhook.test."""
    made = await deliveries.send_test(
        tx, request.app.state.settings, subscription_id, owner=caller.caller, actor=_actor(caller)
    )
    return DeliveryView(**_delivery(made))


@router.get("/subscriptions/{subscription_id}/deliveries")
async def list_deliveries(
    subscription_id: UUID,
    caller: Admin,
    tx: RequestTx,
    status: Literal["WAITING", "QUEUED", "RETRYING", "DELIVERED", "PERMANENTLY_FAILED", "CANCELLED"] | None = None,
    before: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
    limit: PageSize = 50,
) -> DeliveryPage:
    """A page of what was sent, or waits to be."""
    await subscriptions.find_subscription(tx, subscription_id, owner=caller.caller)
    found = await deliveries.list_deliveries(
        tx, subscription_id=subscription_id, status=status, before=before, limit=limit
    )
    return DeliveryPage(
        items=[DeliveryView(**_delivery(one)) for one in found], next=found[-1].number if len(found) == limit else None
    )


@router.post("/subscriptions/{subscription_id}/redeliver")
async def redeliver_range(
    subscription_id: UUID, wanted: Range, caller: Admin, tx: RequestTx, request: Request
) -> Redelivered:
    """Send again what failed in a time, or everything of it; a thousand at a time."""
    count, following = await deliveries.redeliver_range(
        tx, request.app.state.settings, subscription_id, since=wanted.since, until=wanted.until,
        only_failed=wanted.only_failed, after=wanted.after, owner=caller.caller, actor=_actor(caller),
    )  # fmt: skip
    return Redelivered(count=count, next=following)


@router.get("/deliveries/{delivery_id}")
async def read_delivery(delivery_id: UUID, caller: Admin, tx: RequestTx) -> DeliveryWithAttemptsView:
    """One delivery, with every attempt."""
    found = await deliveries.find_delivery(tx, delivery_id, owner=caller.caller)
    log = [AttemptView(**_attempt(one)) for one in found.attempts]
    body = found.body.decode() if found.body is not None else None
    return DeliveryWithAttemptsView(**_delivery(found.delivery), log=log, body=body)


@router.post("/deliveries/{delivery_id}/redeliver")
async def redeliver(delivery_id: UUID, caller: Admin, tx: RequestTx, request: Request) -> DeliveryView:
    """Send one again."""
    after = await deliveries.redeliver(
        tx, request.app.state.settings, delivery_id, owner=caller.caller, actor=_actor(caller)
    )
    return DeliveryView(**_delivery(after))


def _actor(caller: Principal) -> str:
    return caller.subject[:200]


def _given_secret(request: Request, secret: SecretStr | None) -> str | None:
    if secret is None and HEADER in request.headers:
        raise Invalid(BRING_YOUR_OWN)
    return secret.get_secret_value() if secret is not None else None


def _created(created: Created, response: Response) -> CreatedView:
    response.headers["Cache-Control"] = "no-store"
    return CreatedView(**_shown(created.subscription), secret=created.secret)


def _shown(one: Subscription) -> dict[str, Any]:
    return {
        "id": one.id, "url": one.url, "events": one.patterns, "description": one.description, "status": one.status,
        "disabledReason": one.disabled_reason, "maxInFlight": one.max_in_flight,
        "timeoutSeconds": one.timeout_seconds, "failures": one.failures, "failingSince": one.failing_since,
        "openUntil": one.open_until, "validSecrets": len(one.secrets), "version": one.version,
        "createdAt": one.created_at, "updatedAt": one.updated_at,
    }  # fmt: skip


def _delivery(one: Delivery) -> dict[str, Any]:
    return {
        "id": one.id, "number": one.number, "subscriptionId": one.subscription_id, "eventId": one.event_id,
        "eventType": one.event_type, "status": one.status, "attempts": one.attempts,
        "nextAttemptAt": one.next_attempt_at, "lastHttpStatus": one.last_http_status, "lastError": one.last_error,
        "createdAt": one.created_at, "finishedAt": one.finished_at,
    }  # fmt: skip


def _attempt(one: Attempt) -> dict[str, Any]:
    return {
        "number": one.number, "startedAt": one.started_at, "latencyMs": one.latency_ms, "outcome": one.outcome,
        "httpStatus": one.http_status, "error": one.error, "requestHeaders": dict(one.request_headers),
        "requestBytes": one.request_bytes, "responseHeaders": dict(one.response_headers),
        "responseExcerpt": one.response_excerpt,
    }  # fmt: skip
