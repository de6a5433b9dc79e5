"""How webhooks are doing, for people: what is delivered of an event, who is in trouble, and why nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from duly.db import Tx, fetch
from duly.operate.arguments import page_size
from duly.operate.counts import Count
from duly.operate.words import moment, short, span, when
from duly.webhooks import sql_look as sql
from duly.webhooks.deliveries import Delivery
from duly.webhooks.model import MOST_TRIES
from duly.webhooks.subscriptions import Subscription

SCAN = 5_000  # deliveries that are looked through for a type
PROBES = 20_000  # pairs of event and subscription that are looked up at once
MOST_PAGES = 10  # of so many pairs, for whoever wants all deliveries of some events
EVENTS_AT_ONCE = 1_000
SUBSCRIPTIONS_LIMIT = 5_000
EACH_ATTEMPTS = 8
COUNT_CAP = 1_000
TROUBLES_LIMIT = 100
FAILURES = {
    "status": "not a 2xx answer", "redirect": "a redirect, which is not followed", "no_answer": "no answer",
    "refused_address": "the address is not public", "dns": "the name was not resolved", "connect": "no connection",
    "tls": "TLS was refused", "timeout": "no answer in time", "slow_body": "the answer did not end in time",
    "protocol": "the answer is not HTTP", "connection_lost": "the connection was lost",
    "event_gone": "the event is no longer in the history", "event_internal": "the event is internal by now",
    "dead_letter": "its job is a dead letter",
}  # fmt: skip
COUNTED = ("WAITING", "QUEUED", "RETRYING", "PERMANENTLY_FAILED")


@dataclass(frozen=True)
class Secret:
    """A valid secret without the secret."""

    number: int
    key_id: str
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True)
class ProviderSecret(Secret):
    """The same of somebody who calls us."""

    provider: str


@dataclass(frozen=True)
class Tried:
    """One attempt, in short."""

    delivery_id: UUID
    number: int
    started_at: datetime
    latency_ms: int
    outcome: str
    http_status: int | None
    error: str | None

    @property
    def answer(self) -> str:
        """How it ended: ``500``, ``timeout``."""
        return str(self.http_status) if self.http_status is not None else self.error or "delivered"


@dataclass(frozen=True)
class AllOfEvents:
    """The deliveries of some events with their addresses, the newest first; ``is_whole``: there are no others."""

    deliveries: list[tuple[Delivery, str]]
    is_whole: bool


@dataclass(frozen=True)
class InTrouble:
    """A subscription that needs a person, or time. ``open_until`` only while its circuit is open."""

    id: UUID
    url: str
    status: str
    disabled_reason: str | None
    failures: int
    failing_since: datetime | None
    open_until: datetime | None
    alert: str | None
    failed: int

    @property
    def host(self) -> str:
        """Where it sends, without what may be a secret of its own."""
        return host_of(self.url)


def host_of(url: str) -> str:
    """The host of a URL: its path may be a secret of the receiver's."""
    return urlsplit(url).netloc or url


async def list_of_type(
    tx: Tx, subscription_id: UUID, *, event_type: str, status: str | None, before: int | None, limit: int
) -> tuple[list[Delivery], int | None]:
    """Deliveries of one event type, the newest first; and how far was looked, if there is more to look through."""
    values: dict[str, Any] = {"subscription_id": subscription_id, "before": before, "scan": SCAN}
    listing, reached = sql.LIST_OF_TYPE, sql.FIND_REACHED
    if status is not None:
        listing, reached = sql.LIST_OF_TYPE_AND_STATUS, sql.FIND_REACHED_OF_STATUS
        values["status"] = status
    rows = await fetch(tx, listing, **values, event_type=event_type, limit=page_size(limit))
    found = [Delivery(*row) for row in rows]
    if len(found) == limit:
        return found, None
    ended = await fetch(tx, reached, **values)
    return found, ended[0][0] if ended else None


async def list_of_events(tx: Tx, event_ids: Sequence[UUID], *, limit: int = 100) -> list[tuple[Delivery, str]]:
    """The deliveries of some events and where they go; of many events the first, within a budget of lookups."""
    if not event_ids:
        return []
    many = (await fetch(tx, sql.COUNT_SUBSCRIPTIONS, cap=SUBSCRIPTIONS_LIMIT))[0][0]
    if not many:
        return []
    chosen = list(event_ids)[: max(1, PROBES // many)]
    return await _list_page(tx, chosen, skip=0, subscriptions=SUBSCRIPTIONS_LIMIT, limit=limit)


async def find_all_of_events(
    tx: Tx, event_ids: Sequence[UUID], *, limit: int, most_pages: int = MOST_PAGES
) -> AllOfEvents:
    """The newest deliveries of some events, and whether those are all: for records, which must say what they lack."""
    many = (await fetch(tx, sql.COUNT_SUBSCRIPTIONS, cap=most_pages * PROBES + 1))[0][0]
    pages = []
    for start in range(0, len(event_ids), EVENTS_AT_ONCE):
        chosen = event_ids[start : start + EVENTS_AT_ONCE]
        at_once = PROBES // len(chosen)
        pages += [(chosen, skip, at_once) for skip in range(0, many, at_once)]
    found: list[tuple[Delivery, str]] = []
    for chosen, skip, at_once in pages[:most_pages]:
        found += await _list_page(tx, chosen, skip=skip, subscriptions=at_once, limit=limit + 1)
    found.sort(key=lambda pair: pair[0].number, reverse=True)
    return AllOfEvents(found[:limit], is_whole=len(pages) <= most_pages and len(found) <= limit)


async def _list_page(
    tx: Tx, event_ids: Sequence[UUID], *, skip: int, subscriptions: int, limit: int
) -> list[tuple[Delivery, str]]:
    rows = await fetch(
        tx, sql.LIST_OF_EVENTS, event_ids=list(event_ids), skip=skip, subscriptions=subscriptions,
        limit=page_size(limit),
    )  # fmt: skip
    return [(Delivery(*row[:-1]), row[-1]) for row in rows]


async def list_tried(tx: Tx, ids: Sequence[UUID], *, limit: int = 100) -> list[Tried]:
    """The newest attempts of some deliveries."""
    rows = await fetch(tx, sql.LIST_ATTEMPTS_OF, ids=list(ids), each=EACH_ATTEMPTS, limit=page_size(limit))
    return [Tried(*row) for row in rows]


async def count_of_each(tx: Tx, ids: Sequence[UUID]) -> dict[UUID, dict[str, Count]]:
    """For each of some subscriptions, how many wait and failed; counted up to a thousand."""
    rows = await fetch(tx, sql.COUNT_OF_SUBSCRIPTIONS, ids=list(ids), statuses=list(COUNTED), cap=COUNT_CAP + 1)
    found: dict[UUID, dict[str, Count]] = {}
    for id, status, counted in rows:
        found.setdefault(id, {})[status] = Count.of(counted, cap=COUNT_CAP)
    return found


async def list_secrets(tx: Tx, id: UUID) -> list[Secret]:
    """How old the valid secrets are, the newest first."""
    return [Secret(*row) for row in await fetch(tx, sql.LIST_SECRETS, id=id)]


async def list_provider_secrets(tx: Tx, *, limit: int = 100) -> list[ProviderSecret]:
    """Who may call us and how old the secrets are, by name; those of the configuration are not here."""
    rows = await fetch(tx, sql.LIST_PROVIDER_SECRETS, limit=page_size(limit))
    return [ProviderSecret(*row) for row in rows]


async def find_any(tx: Tx, id: UUID) -> Subscription | None:
    """A subscription, also one that is deleted and not yet cleaned up."""
    rows = await fetch(tx, sql.FIND_ANY_SUBSCRIPTION, id=id)
    return Subscription(*rows[0]) if rows else None


async def list_alerts_of(tx: Tx, id: UUID) -> list[Any]:
    """What is open about a subscription."""
    return await fetch(tx, sql.LIST_OPEN_ALERTS_OF, id=str(id))


async def read_trouble(tx: Tx) -> list[InTrouble]:
    """Who is disabled, who is left alone for a while, and whose deliveries failed for good; the longest first."""
    rows = await fetch(tx, sql.READ_TROUBLE, cap=COUNT_CAP + 1, limit=TROUBLES_LIMIT)
    return [InTrouble(*row) for row in rows]


async def say_standing(tx: Tx, one: Subscription, now: datetime) -> list[str]:
    """Why something is sent to a subscriber now, or is not; what waits, and since when."""
    said = _say_status(one, now)
    if one.failing_since is not None:
        said.append(
            f"Nothing but failures since {when(one.failing_since, now)}: {one.failures} in a row. One delivery at a "
            "time is tried until one is taken."
        )
    if not one.secrets:
        said.append("It has no valid secret: nothing can be signed, and nothing is sent.")
    counts = (await count_of_each(tx, [one.id])).get(one.id, {})
    said.append(_say_counts(counts))
    if counts.get("WAITING", Count(0)).number:
        oldest = await fetch(tx, sql.FIND_OLDEST_WAITING, id=one.id)
        said += [f"The oldest waits since {when(row[0], now)}." for row in oldest]
    return said


def _say_status(one: Subscription, now: datetime) -> list[str]:
    if one.status == "DELETED":
        return ["It is deleted: nothing is sent any more. Its log is kept as long as any, and goes with its last line."]
    if one.status == "PAUSED":
        return [f"It is PAUSED since {when(one.updated_at, now)}: nothing is sent, and what comes is kept."]
    if one.status == "DISABLED":
        return [
            f"It is DISABLED: {short(one.disabled_reason)}. Nothing is sent, and what comes is kept. "
            f"Repair the receiver, then resume it (`duly webhooks resume {one.id}`)."
        ]
    if one.open_until is not None and one.open_until > now:
        return [
            f"Its circuit is open until {when(one.open_until, now)}, after {one.failures} failures in a row: until "
            "then nothing is sent; then one delivery is tried."
        ]
    return ["It is ACTIVE: what comes is sent at once." if one.failing_since is None else "It is ACTIVE, but fails."]


def say_failure(word: str | None) -> str:
    """Why an attempt failed: the word that is kept of it, in words."""
    return FAILURES.get(word or "", short(word))


def _say_counts(counts: dict[str, Count]) -> str:
    parts = [f"{counts.get(status, Count(0))} {status}" for status in COUNTED]
    return "Deliveries: " + ", ".join(parts) + "."


async def say_delivery(tx: Tx, one: Delivery, subscription: Subscription | None, now: datetime) -> list[str]:
    """Where a delivery is, and what has to happen before it moves."""
    said = [_say_where(one, now)]
    last = await fetch(tx, sql.FIND_LAST_ATTEMPT, id=one.id)
    for number, started_at, latency_ms, outcome, http_status, error, address in last:
        ended = "was taken" if outcome == "DELIVERED" else f"failed ({say_failure(error)})"
        answer = f"it answered {http_status}" if http_status is not None else "no answer"
        dialled = f", from {address}" if address else ""
        said.append(f"Attempt {number} at {moment(started_at)} {ended}: {answer} within {latency_ms} ms{dialled}.")
    if not last:
        said.append("It was not attempted yet.")
    if one.redeliveries:
        said.append(f"It was sent again by people {one.redeliveries} times; tries are counted anew each time.")
    if one.status in ("WAITING", "QUEUED", "RETRYING"):
        said += [f"Job {id} {'sends it now' if runs else f'is due at {when(run_at, now)}'}."
                 for id, run_at, runs in await fetch(tx, sql.FIND_JOB_OF, id=str(one.id))]  # fmt: skip
        if subscription is not None:
            said += [f"Its subscription: {sentence}" for sentence in _say_status(subscription, now)]
    return said


def _say_where(one: Delivery, now: datetime) -> str:
    if one.status == "RETRYING":
        assert one.next_attempt_at is not None, "a retry has a time"
        following = when(one.next_attempt_at, now)
        return f"It is RETRYING: {one.tries} of {MOST_TRIES} tries failed, the next is at {following}."
    if one.status == "WAITING":
        return "It is WAITING for its turn: a few of each subscriber are sent at a time, the oldest first."
    if one.status == "QUEUED":
        return "It is QUEUED: its job is due or under way."
    assert one.finished_at is not None, "what is over has its time"
    at = when(one.finished_at, now)
    if one.status == "DELIVERED":
        after = span((one.finished_at - one.event_created_at).total_seconds())
        return f"It was DELIVERED at {at}, {after} after its event."
    if one.status == "PERMANENTLY_FAILED":
        return (
            f"It is PERMANENTLY_FAILED since {at}: {say_failure(one.last_error) or 'no try was left'}. "
            f"Send it again once the receiver is repaired (`duly webhooks redeliver {one.id}`)."
        )
    return f"It was CANCELLED at {at}."
