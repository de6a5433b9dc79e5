"""What an operator does with webhooks, in the one registry: forms, API and commands run these."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import AwareDatetime, BeforeValidator, Field, SecretStr

from duly.db import Tx, settings_of
from duly.messages import check_text
from duly.operate.actions import Action, Arguments, Limit, Result, Text, register
from duly.operate.arguments import BULK_LIMIT, LARGEST_ID
from duly.operate.counts import CAP, Count
from duly.webhooks import deliveries, subscriptions
from duly.webhooks.receive import add_provider_secret
from duly.webhooks.sealing import Keyring
from duly.webhooks.signing import LONGEST_SECRET
from duly.webhooks.subscriptions import (
    LONGEST_DESCRIPTION,
    LONGEST_OVERLAP_HOURS,
    LONGEST_TIMEOUT_SECONDS,
    MOST_IN_FLIGHT,
    Created,
    Subscription,
)

MOST_PATTERNS = 100
SHORTEST_SECRET = 16
OPERATOR = "operator"


def _listed(given: Any) -> Any:
    """A form sends one text: patterns by line, comma or space."""
    return [part for part in re.split(r"[\s,]+", given) if part] if isinstance(given, str) else given


def _aware(given: Any) -> Any:
    """A form's field for a time knows no zone."""
    if not isinstance(given, str):
        return given
    try:
        moment = datetime.fromisoformat(given)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("write it as 2026-03-01T09:00:00+01:00") from None


def _ticked(given: Any) -> Any:
    """A box in a form is on, or not sent at all."""
    return True if given == "on" else given


Url = Annotated[str, Field(min_length=8, max_length=2_000)]
Patterns = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=200)]],
    BeforeValidator(_listed),
    Field(min_length=1, max_length=MOST_PATTERNS, description="Types or topics, with * as wildcard."),
]
Secret = Annotated[SecretStr, Field(min_length=SHORTEST_SECRET, max_length=LONGEST_SECRET)]
Description = Annotated[str, Field(max_length=LONGEST_DESCRIPTION)]
InFlight = Annotated[int, Field(ge=1, le=MOST_IN_FLIGHT)]
Seconds = Annotated[int, Field(ge=1, le=LONGEST_TIMEOUT_SECONDS)]
Moment = Annotated[
    AwareDatetime, BeforeValidator(_aware), Field(description="Without an offset from UTC, it is UTC.")
]  # fmt: skip


class NewSubscription(Arguments):
    """Who wants which events, where."""

    url: Url
    events: Patterns
    secret: Secret | None = None
    description: Description = ""
    owner: Text = OPERATOR
    max_in_flight: InFlight = 5
    timeout_seconds: Seconds = 15


class SubscriptionChange(Arguments):
    """What of a subscription is to change; with ``expected_version`` an edit made from an old page is refused."""

    may_be_empty = frozenset({"description"})

    id: UUID
    url: Url | None = None
    events: Patterns | None = None
    description: Description | None = None
    max_in_flight: InFlight | None = None
    timeout_seconds: Seconds | None = None
    expected_version: int | None = None


class Rotation(Arguments):
    """A new secret; the old one stays valid for the overlap."""

    id: UUID
    secret: Secret | None = None
    overlap_hours: Annotated[float, Field(ge=0, le=LONGEST_OVERLAP_HOURS)] = 24


class NewProviderSecret(Arguments):
    """What a provider signs with from now on; the last one stays valid for the overlap."""

    provider: Text
    secret: Secret | None = None
    overlap_hours: Annotated[float, Field(ge=0, le=LONGEST_OVERLAP_HOURS)] = 24


class OfSubscription(Arguments):
    """A subscription."""

    id: UUID


class OfDelivery(Arguments):
    """A delivery."""

    id: UUID


class OfRange(Arguments):
    """What a subscription was to be sent in a time: what failed for good, or everything that is over.

    ``after`` goes on where another answer ended.
    """

    id: UUID
    since: Moment
    until: Moment
    everything: Annotated[bool, BeforeValidator(_ticked)] = False
    after: Annotated[int, Field(ge=0, le=LARGEST_ID)] = 0
    limit: Limit = BULK_LIMIT


async def _add(tx: Tx, given: NewSubscription, actor: str, reason: str | None) -> Result:
    settings = settings_of(tx)
    made = await subscriptions.create_subscription(
        tx, settings, Keyring.open(settings), owner=check_text(given.owner, "the owner"), url=given.url,
        patterns=given.events, secret=_opened(given.secret), description=given.description,
        max_in_flight=given.max_in_flight, timeout_seconds=given.timeout_seconds, actor=actor, reason=reason,
    )  # fmt: skip
    return _made(made)


async def _edit(tx: Tx, given: SubscriptionChange, actor: str, reason: str | None) -> Result:
    after = await subscriptions.edit_subscription(
        tx, settings_of(tx), given.id, url=given.url, patterns=given.events, description=given.description,
        max_in_flight=given.max_in_flight, timeout_seconds=given.timeout_seconds, version=given.expected_version,
        actor=actor, reason=reason,
    )  # fmt: skip
    return _said(after)


async def _rotate(tx: Tx, given: Rotation, actor: str, reason: str | None) -> Result:
    made = await subscriptions.rotate_secret(
        tx, Keyring.open(settings_of(tx)), given.id, secret=_opened(given.secret), overlap_hours=given.overlap_hours,
        actor=actor, reason=reason,
    )  # fmt: skip
    return _made(made)


async def _renew_provider_secret(tx: Tx, given: NewProviderSecret, actor: str, reason: str | None) -> Result:
    made = await add_provider_secret(
        tx, Keyring.open(settings_of(tx)), given.provider, secret=_opened(given.secret),
        overlap_hours=given.overlap_hours, actor=actor, reason=reason,
    )  # fmt: skip
    return Result(f"{given.provider} has a new secret", facts={"provider": given.provider}, secret=made)


async def _pause(tx: Tx, given: OfSubscription, actor: str, reason: str | None) -> Result:
    return _said(await subscriptions.pause_subscription(tx, settings_of(tx), given.id, actor=actor, reason=reason))


async def _resume(tx: Tx, given: OfSubscription, actor: str, reason: str | None) -> Result:
    return _said(await subscriptions.resume_subscription(tx, settings_of(tx), given.id, actor=actor, reason=reason))


async def _disable(tx: Tx, given: OfSubscription, actor: str, reason: str | None) -> Result:
    return _said(await subscriptions.disable_subscription(tx, settings_of(tx), given.id, actor=actor, reason=reason))


async def _delete(tx: Tx, given: OfSubscription, actor: str, reason: str | None) -> Result:
    await subscriptions.delete_subscription(tx, settings_of(tx), given.id, actor=actor, reason=reason)
    return Result(f"deleted {given.id}")


async def _redeliver(tx: Tx, given: OfDelivery, actor: str, reason: str | None) -> Result:
    again = await deliveries.redeliver(tx, settings_of(tx), given.id, actor=actor, reason=reason)
    return Result(f"delivery {again.id} is {again.status}", facts={"status": again.status})


async def _redeliver_range(tx: Tx, given: OfRange, actor: str, reason: str | None) -> Result:
    number, following = await deliveries.redeliver_range(
        tx, settings_of(tx), given.id, since=given.since, until=given.until, only_failed=not given.everything,
        after=given.after, limit=given.limit, actor=actor, reason=reason,
    )  # fmt: skip
    message = f"sent {number} {'delivery' if number == 1 else 'deliveries'} again"
    rest = None
    if following is not None and (await _count_range(tx, given.model_copy(update={"after": following}), 1)).number:
        rest = {
            "id": str(given.id), "since": given.since.isoformat(), "until": given.until.isoformat(),
            "everything": str(given.everything).lower(), "after": str(following),
        }  # fmt: skip
    return Result(message, number, {"next": following if rest else None}, rest=rest)


async def _count_range(tx: Tx, given: OfRange, cap: int = CAP) -> Count:
    return await deliveries.count_range(
        tx, given.id, since=given.since, until=given.until, only_failed=not given.everything, after=given.after, cap=cap
    )


async def _test(tx: Tx, given: OfSubscription, actor: str, reason: str | None) -> Result:
    made = await deliveries.send_test(tx, settings_of(tx), given.id, actor=actor, reason=reason)
    return Result(f"delivery {made.id} is {made.status}", facts={"delivery_id": str(made.id)})


def _opened(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret is not None else None


def _said(after: Subscription) -> Result:
    return Result(f"subscription {after.id} is {after.status}", facts={"id": str(after.id), "version": after.version})


def _made(created: Created) -> Result:
    said = _said(created.subscription)
    return Result(said.message, facts=said.facts, secret=created.secret)


for _action in (
    Action(
        "webhooks.add", "Subscribe a URL to events.", NewSubscription, _add, verb="Subscribe", makes_secret=True
    ),
    Action(
        "webhooks.edit", "Change a webhook subscription; a new URL starts with a clean record.",
        SubscriptionChange, _edit, verb="Save",
    ),
    Action(
        "webhooks.rotate", "Sign with a new secret, and for a while with the old one, too.",
        Rotation, _rotate, verb="Rotate the secret", makes_secret=True,
    ),
    Action(
        "webhooks.provider-secret", "Believe a provider who signs with a new secret, and for a while the old one, too.",
        NewProviderSecret, _renew_provider_secret, verb="Set the secret", makes_secret=True,
    ),
    Action(
        "webhooks.pause", "Send nothing new to a subscriber; what comes is kept.", OfSubscription, _pause, verb="Pause"
    ),
    Action(
        "webhooks.resume", "Send to a subscriber again, what was kept first.", OfSubscription, _resume, verb="Resume"
    ),
    Action(
        "webhooks.disable", "Send nothing to a subscriber, because something is wrong; what comes is kept.",
        OfSubscription, _disable, True, verb="Disable",
    ),
    Action(
        "webhooks.delete", "Send nothing to a subscriber any more, and forget its secrets.",
        OfSubscription, _delete, True, verb="Delete",
    ),
    Action("webhooks.redeliver", "Send one delivery again.", OfDelivery, _redeliver, verb="Send again"),
    Action(
        "webhooks.redeliver-range", "Send again what a subscriber did not take in a time, the oldest first.",
        OfRange, _redeliver_range, True, _count_range, "Send all again",
    ),
    Action(
        "webhooks.test", "Deliver an event of the type webhook.test to one subscriber.",
        OfSubscription, _test, verb="Send a test",
    ),
):  # fmt: skip
    register(_action)
