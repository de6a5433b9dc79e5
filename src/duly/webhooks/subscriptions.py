"""What a subscriber, an operator or the console does with subscriptions; every change is audited with it.

Functions get a transaction and never end it. ``owner`` limits them to that caller's own; None is for operators.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from duly.db import Row, Tx, fetch
from duly.errors import Conflict, Fault, Forbidden, Invalid, NotFound
from duly.ids import uuid7
from duly.inbox.receive import check_consumer
from duly.messages import check_text, is_internal
from duly.operate.arguments import page_size, signed
from duly.settings import Settings
from duly.webhooks import sql_operate as sql
from duly.webhooks.addresses import check_url
from duly.webhooks.admit import CONSUMER, admit, share_of
from duly.webhooks.deliver import allowed_by
from duly.webhooks.receive import reseal_provider_secrets
from duly.webhooks.sealing import Keyring, subscription_place
from duly.webhooks.signing import check_secret, new_secret

MOST_OWN = 1_000
MOST_IN_FLIGHT = 100
LONGEST_TIMEOUT_SECONDS = 30
LONGEST_DESCRIPTION = 500
LONGEST_OVERLAP_HOURS = 24 * 30
SUBJECT = "webhook_subscription"


class InternalEvent(Invalid):
    """Events of this type are not sent outside."""


@dataclass(frozen=True)
class Subscription:
    """Who wants which events, where, and how that goes. Its secrets are numbers here."""

    id: UUID
    owner: str
    url: str
    description: str
    patterns: list[str]
    status: str
    max_in_flight: int
    timeout_seconds: int
    failures: int
    failing_since: datetime | None
    open_until: datetime | None
    disabled_reason: str | None
    version: int
    created_at: datetime
    updated_at: datetime
    secrets: list[int]


@dataclass(frozen=True)
class Created:
    """A new subscription or secret; ``secret`` only when it was made here, and only this once."""

    subscription: Subscription
    secret: str | None = field(default=None, repr=False)


async def create_subscription(
    tx: Tx,
    settings: Settings,
    keyring: Keyring,
    *,
    owner: str,
    url: str,
    patterns: Sequence[str],
    secret: str | None = None,
    description: str = "",
    max_in_flight: int = 5,
    timeout_seconds: int = 15,
    actor: str,
    reason: str | None = None,
) -> Created:
    """From now on, every event that a pattern fits is delivered to the URL."""
    signature = signed(actor=actor, reason=reason)
    id = uuid7()
    given = {
        "url": check_url(url, allowed_by(settings)),
        "description": _description(description),
        "patterns": _patterns(patterns),
        "max_in_flight": _between("max_in_flight", max_in_flight, MOST_IN_FLIGHT),
        "timeout_seconds": _between("timeout_seconds", timeout_seconds, LONGEST_TIMEOUT_SECONDS),
    }
    used = check_secret(secret) if secret is not None else new_secret()
    await fetch(tx, sql.LOCK_PATTERNS)
    if (await fetch(tx, sql.COUNT_OWN_SUBSCRIPTIONS, owner=owner))[0][0] >= MOST_OWN:
        raise Conflict(f"one caller has at most {MOST_OWN} subscriptions: delete some first")
    await fetch(tx, sql.ADD_SUBSCRIPTION, id=id, owner=owner, **given)
    await _add_secret(tx, keyring, id, used)
    await fetch(tx, sql.KEEP_PATTERNS)
    made = await find_subscription(tx, id)
    await _audit(tx, "created", id, signature, after=made)
    return Created(made, None if secret is not None else used)


async def find_subscription(tx: Tx, id: UUID, *, owner: str | None = None) -> Subscription:
    """One of them; NotFound when there is none, Forbidden when it is somebody else's."""
    return _checked(await fetch(tx, sql.FIND_SUBSCRIPTION, id=id), id, owner)


async def list_subscriptions(
    tx: Tx, *, owner: str | None = None, before: UUID | None = None, limit: int = 50
) -> list[Subscription]:
    """One page, newest first; the next page is ``before=last.id``."""
    values = {"before": before, "limit": page_size(limit)}
    if owner is None:
        rows = await fetch(tx, sql.LIST_SUBSCRIPTIONS, **values)
    else:
        rows = await fetch(tx, sql.LIST_OWN_SUBSCRIPTIONS, owner=owner, **values)
    return [_subscription(row) for row in rows]


async def edit_subscription(
    tx: Tx,
    settings: Settings,
    id: UUID,
    *,
    owner: str | None = None,
    url: str | None = None,
    patterns: Sequence[str] | None = None,
    description: str | None = None,
    max_in_flight: int | None = None,
    timeout_seconds: int | None = None,
    version: int | None = None,
    actor: str,
    reason: str | None = None,
) -> Subscription:
    """Change what is given; a new URL starts with a clean record. ``version`` refuses an edit of something older."""
    signature = signed(actor=actor, reason=reason)
    changes: dict[str, Any] = {}
    if url is not None:
        changes["url"] = check_url(url, allowed_by(settings))
    if patterns is not None:
        changes["patterns"] = _patterns(patterns)
    if description is not None:
        changes["description"] = _description(description)
    if max_in_flight is not None:
        changes["max_in_flight"] = _between("max_in_flight", max_in_flight, MOST_IN_FLIGHT)
    if timeout_seconds is not None:
        changes["timeout_seconds"] = _between("timeout_seconds", timeout_seconds, LONGEST_TIMEOUT_SECONDS)
    if patterns is not None:
        await fetch(tx, sql.LOCK_PATTERNS)  # before the subscription: whoever takes both takes them in this order
    before = await _lock(tx, id, owner)
    if version is not None and version != before.version:
        raise Conflict(f"the subscription was changed meanwhile: it is at version {before.version}")
    if url is not None and url != before.url:
        changes |= {"failures": 0, "failing_since": None, "open_until": None}
    after = await _change(tx, settings, before, "edited", signature, **changes)
    if patterns is not None:
        await fetch(tx, sql.KEEP_PATTERNS)
    return after


async def rotate_secret(
    tx: Tx,
    keyring: Keyring,
    id: UUID,
    *,
    owner: str | None = None,
    secret: str | None = None,
    overlap_hours: float = 24,
    actor: str,
    reason: str | None = None,
) -> Created:
    """Sign with a new secret from now on, and with the old one, too, for as long as the overlap lasts."""
    signature = signed(actor=actor, reason=reason)
    if not 0 <= overlap_hours <= LONGEST_OVERLAP_HOURS:
        raise Invalid(f"overlap_hours={overlap_hours:g}: give 0 to {LONGEST_OVERLAP_HOURS}")
    used = check_secret(secret) if secret is not None else new_secret()
    before = await _lock(tx, id, owner)
    await fetch(tx, sql.END_SECRETS, id=id, overlap_seconds=overlap_hours * 3600)
    await _add_secret(tx, keyring, id, used)
    after = await find_subscription(tx, id)
    await _audit(tx, "secret_rotated", id, signature, before=before, after=after)
    return Created(after, None if secret is not None else used)


async def pause_subscription(
    tx: Tx, settings: Settings, id: UUID, *, owner: str | None = None, actor: str, reason: str | None = None
) -> Subscription:
    """Send nothing new; what is under way ends, and what comes is kept."""
    signature = signed(actor=actor, reason=reason)
    before = await _lock(tx, id, owner)
    if before.status != "ACTIVE":
        raise Conflict(f"the subscription is {before.status}: only an ACTIVE one can be paused")
    return await _change(tx, settings, before, "paused", signature, status="PAUSED")


async def resume_subscription(
    tx: Tx, settings: Settings, id: UUID, *, owner: str | None = None, actor: str, reason: str | None = None
) -> Subscription:
    """Send again, what was kept first, in the order in which it came; with a clean record."""
    signature = signed(actor=actor, reason=reason)
    before = await _lock(tx, id, owner)
    if before.status == "ACTIVE" and before.open_until is None:
        raise Conflict("the subscription is ACTIVE already")
    after = await _change(
        tx, settings, before, "resumed", signature, status="ACTIVE", failures=0, failing_since=None, open_until=None,
        disabled_reason=None,
    )  # fmt: skip
    await fetch(tx, sql.RESOLVE_ALERTS, kinds=["webhook_disabled"], id=str(id))
    return after


async def disable_subscription(
    tx: Tx, settings: Settings, id: UUID, *, owner: str | None = None, actor: str, reason: str | None = None
) -> Subscription:
    """Like pausing, and it says that something is wrong."""
    signature = signed(actor=actor, reason=reason)
    before = await _lock(tx, id, owner)
    if before.status == "DISABLED":
        raise Conflict("the subscription is DISABLED already")
    why = signature["reason"] or f"disabled by {signature['actor']}"
    return await _change(tx, settings, before, "disabled", signature, status="DISABLED", disabled_reason=why)


async def delete_subscription(
    tx: Tx, settings: Settings, id: UUID, *, owner: str | None = None, actor: str, reason: str | None = None
) -> None:
    """Nothing is sent any more, and its secrets are gone at once; its log goes with the clean-up."""
    signature = signed(actor=actor, reason=reason)
    await fetch(tx, sql.LOCK_PATTERNS)
    before = await _lock(tx, id, owner)
    await fetch(tx, sql.DROP_SECRETS, id=id)
    await fetch(tx, sql.CHANGE_SUBSCRIPTION, **_columns(replace(before, status="DELETED", disabled_reason=None)))
    await fetch(tx, sql.KEEP_PATTERNS)
    await fetch(tx, sql.RESOLVE_ALERTS, kinds=["webhook_disabled", "webhook_failed"], id=str(id))
    await _audit(tx, "deleted", id, signature, before=before)


async def reseal_secrets(tx: Tx, keyring: Keyring, *, limit: int = 1_000) -> int:
    """Encrypt with the newest key what is encrypted with another; how many. Again until it is none."""
    rows = await fetch(tx, sql.FIND_OTHER_SECRETS, key_id=keyring.newest, limit=page_size(limit))
    for id, number, key_id, sealed in rows:
        place = subscription_place(id, number)
        fresh = keyring.reseal(key_id, bytes(sealed), place=place)
        await fetch(tx, sql.RESEAL_SECRET, id=id, number=number, key_id=fresh.key_id, sealed=fresh.sealed)
    return len(rows) + await reseal_provider_secrets(tx, keyring, limit=limit)


async def _change(
    tx: Tx, settings: Settings, before: Subscription, action: str, signature: dict[str, str | None], **changes: Any
) -> Subscription:
    """Write it, admit what it lets go, and say who did it."""
    await fetch(tx, sql.CHANGE_SUBSCRIPTION, **_columns(replace(before, **changes)))
    after = await find_subscription(tx, before.id)
    await _audit(tx, action, before.id, signature, before=before, after=after)
    await admit(tx, [before.id], most=share_of(settings.webhook_concurrency))
    return after


async def _lock(tx: Tx, id: UUID, owner: str | None) -> Subscription:
    return _checked(await fetch(tx, sql.LOCK_SUBSCRIPTION, id=id), id, owner)


async def _add_secret(tx: Tx, keyring: Keyring, id: UUID, secret: str) -> None:
    number = (await fetch(tx, sql.NEXT_SECRET, id=id))[0][0]
    sealed = keyring.seal(secret, place=subscription_place(id, number))
    await fetch(tx, sql.ADD_SECRET, id=id, number=number, key_id=sealed.key_id, sealed=sealed.sealed)


async def _audit(
    tx: Tx,
    action: str,
    id: UUID,
    signature: dict[str, str | None],
    *,
    before: Subscription | None = None,
    after: Subscription | None = None,
) -> None:
    await fetch(
        tx, sql.WRITE_AUDIT, action=f"{SUBJECT}.{action}", subject=f"{SUBJECT}:{id}", **signature,
        before=_snapshot(before), after=_snapshot(after),
    )  # fmt: skip


def _snapshot(subscription: Subscription | None) -> str | None:
    return json.dumps(asdict(subscription), default=str) if subscription is not None else None


def _columns(subscription: Subscription) -> dict[str, Any]:
    left_out = ("owner", "version", "created_at", "updated_at", "secrets")
    return {name: value for name, value in vars(subscription).items() if name not in left_out}


def _subscription(row: Row) -> Subscription:
    return Subscription(*row)


def _checked(rows: Sequence[Row], id: UUID, owner: str | None) -> Subscription:
    if not rows:
        raise NotFound(f"no webhook subscription has the id {id}")
    found = _subscription(rows[0])
    if owner is not None and found.owner != owner:
        raise Forbidden("this webhook subscription is somebody else's")
    return found


def _patterns(patterns: Sequence[str]) -> list[str]:
    unique = list(dict.fromkeys(patterns))
    check_consumer(CONSUMER, unique)
    if hidden := [pattern for pattern in unique if is_internal(pattern)]:
        refused = InternalEvent(f"events of the type {hidden[0]} are internal: nobody outside can have them")
        refused.faults = tuple(
            Fault("body", f"$.events[{list(patterns).index(pattern)}]", f"{pattern} is internal: leave it out")
            for pattern in hidden
        )
        raise refused
    return unique


def _description(text: str) -> str:
    if len(check_text(text, "the description")) > LONGEST_DESCRIPTION:
        raise Invalid(f"the description has at most {LONGEST_DESCRIPTION} characters")
    return text


def _between(what: str, value: int, largest: int) -> int:
    if not 1 <= value <= largest:
        raise Invalid(f"{what}={value}: give 1 to {largest}")
    return value
