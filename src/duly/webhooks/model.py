"""The rules of delivery: when to try again, when to leave a subscriber alone, when to give up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

SubscriptionStatus = Literal["ACTIVE", "PAUSED", "DISABLED", "DELETED"]
DeliveryStatus = Literal["WAITING", "QUEUED", "RETRYING", "DELIVERED", "PERMANENTLY_FAILED", "CANCELLED"]
FINISHED = frozenset({"DELIVERED", "PERMANENTLY_FAILED", "CANCELLED"})
RETRY_WAITS = (
    timedelta(minutes=1), timedelta(minutes=5), timedelta(minutes=30), timedelta(hours=6), timedelta(hours=24),
    timedelta(days=3), timedelta(days=7),
)  # fmt: skip
MOST_TRIES = len(RETRY_WAITS) + 1
LONGEST_RETRY_AFTER = timedelta(hours=24)
CIRCUIT_FAILURES = 5  # in a row: then the subscriber is left alone for a while
CIRCUIT_SECONDS, CIRCUIT_LONGEST_SECONDS = 30.0, 3600.0
GONE = 410
PATIENT_STATUSES = frozenset({429, 503})  # whose Retry-After is heard


@dataclass(frozen=True)
class Standing:
    """How a subscriber has been doing."""

    status: str
    failures: int
    failing_since: datetime | None
    open_until: datetime | None
    disabled_reason: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What becomes of a delivery after an attempt; ``wait`` is set when it is tried again."""

    status: DeliveryStatus
    tries: int
    wait: timedelta | None = None


def judge(*, delivered: bool, tries: int, http_status: int | None, retry_after: timedelta | None) -> Verdict:
    """After an attempt, which was one of ``tries`` + 1 since the delivery was made or redelivered."""
    tries += 1
    if delivered:
        return Verdict("DELIVERED", tries)
    if tries >= MOST_TRIES:
        return Verdict("PERMANENTLY_FAILED", tries)
    if http_status == GONE:
        return Verdict("WAITING", tries)  # the subscription is disabled: kept until somebody enables it
    wait = RETRY_WAITS[tries - 1]
    if retry_after is not None and http_status in PATIENT_STATUSES:
        wait = max(wait, min(retry_after, LONGEST_RETRY_AFTER))
    return Verdict("RETRYING", tries, wait)


def after_success(standing: Standing) -> Standing:
    """Whatever was wrong is over."""
    return replace(standing, failures=0, failing_since=None, open_until=None)


def after_failure(
    standing: Standing, *, now: datetime, http_status: int | None, disable_after: timedelta, jitter: float
) -> Standing:
    """One more failure in a row: perhaps the circuit opens, perhaps the subscription is disabled.

    ``jitter`` is between 0 and 1. What was under way when the circuit opened says nothing new, and is not counted.
    """
    is_open = standing.open_until is not None and standing.open_until > now
    failures = standing.failures + (0 if is_open else 1)
    since = standing.failing_since or now
    after = replace(standing, failures=max(failures, 1), failing_since=since)
    if failures >= CIRCUIT_FAILURES and not is_open:
        after = replace(after, open_until=now + circuit_wait(failures, jitter))
    if standing.status in ("DISABLED", "DELETED"):
        return after
    if http_status == GONE:
        return replace(after, status="DISABLED", open_until=None, disabled_reason="the receiver answered 410 Gone")
    if now - since >= disable_after:
        days = disable_after.total_seconds() / 86_400
        reason = f"nothing but failures for {days:g} days"
        return replace(after, status="DISABLED", open_until=None, disabled_reason=reason)
    return after


def circuit_wait(failures: int, jitter: float) -> timedelta:
    """30 seconds at the fifth failure in a row, doubling to an hour, and up to a quarter more."""
    doubled = CIRCUIT_SECONDS * 2 ** min(failures - CIRCUIT_FAILURES, 20)
    return timedelta(seconds=min(doubled, CIRCUIT_LONGEST_SECONDS) * (1 + jitter / 4))
