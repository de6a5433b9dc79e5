"""The use cases of birthdays: each gets a transaction and never ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import structlog

from apps.birthdays import store
from apps.birthdays.model import (
    DELIVERABLE,
    MISSED_AFTER,
    BirthdayEvent,
    Delivery,
    EventStatus,
    Person,
    PersonNotFound,
    next_target,
    target_in,
)
from apps.birthdays.store import Missed
from apps.users.events import UserBirthdayChanged, UserDeleted, UserRegistered, UserRenamed, UserTimezoneChanged
from duly import Event, NewJob, Tx, find_queued, schedule, schedule_many
from duly.ids import uuid7

log = structlog.get_logger("apps.birthdays")
DELIVER = "birthdays.deliver"
CLAIM_MORE = "birthdays.claim-more"
BATCH = 100
MOST_PROCESSING = 1_000
MISSED_LIMIT = 1_000
STALLED_AFTER_MINUTES = 15
STALLED_LIMIT = 2 * MOST_PROCESSING  # two claims at the same moment may exceed it
ROOM_SECONDS = 1
NO_ROOM_SECONDS = 10  # nothing ended for a second: the webhook is away, or very slow
RECHECK_DAYS = 8
RECHECK_PAGE = 1_000
RECHECK_PAGES = 500
CORRECTED_AT_ONCE = 500
KEPT_YEARS = 3
FORGOTTEN_AT_ONCE = 10_000
GONE = "the user was deleted"
LOST = "its delivery ended without a result: see the dead letters"


@dataclass(frozen=True)
class Claim:
    """What one claim came to; ``missed`` is what it found late, if it looked and found any."""

    claimed: tuple[UUID, ...]
    has_more: bool
    missed: Missed | None = None


@dataclass(frozen=True)
class Rescheduled:
    """What became of a user's events when the user's data changed (B5)."""

    rescheduled: int
    skipped: tuple[UUID, ...]


# -- what users do ---------------------------------------------------------------------------------------------------


async def plan_first(tx: Tx, fact: UserRegistered) -> BirthdayEvent:
    """Keep a copy of a new user and plan the first message, in the transaction that registers the user (B1, B2)."""
    person = Person(fact.user_id, fact.first_name, fact.last_name, fact.date_of_birth, fact.timezone)
    now = await store.insert_person(tx, person)
    target = next_target(person.date_of_birth, person.timezone, now=now)
    (planned,) = await store.insert_events(tx, [(uuid7(), person.user_id, target)])
    return planned


async def drop(tx: Tx, fact: UserDeleted) -> None:
    """Forget a user and what is pending; the person first, so that nobody plans in between (B1)."""
    await store.delete_person(tx, fact.user_id)
    await store.delete_pending(tx, fact.user_id)


async def follow_user(tx: Tx, event: Event) -> Rescheduled | None:
    """Take over what changed, and plan anew what is not under way yet (B5); None when there is nothing to plan.

    Time counts from the change, not from when we hear of it: a birthday that came in between is late, not lost.
    """
    match event.type:
        case UserRenamed.event_type:
            renamed = event.body(UserRenamed)
            await store.change_person(tx, renamed.user_id, first_name=renamed.first_name, last_name=renamed.last_name)
        case UserDeleted.event_type:
            await drop(tx, event.body(UserDeleted))  # done already where users tells us in its own transaction
        case UserBirthdayChanged.event_type:
            change = event.body(UserBirthdayChanged)
            person = await store.change_person(tx, change.user_id, date_of_birth=change.new, timezone=change.timezone)
            return await _reschedule(tx, person, planned_anew_at=event.created_at)
        case UserTimezoneChanged.event_type:
            moved = event.body(UserTimezoneChanged)
            return await _reschedule(tx, await store.change_person(tx, moved.user_id, timezone=moved.new))
    return None


async def _reschedule(tx: Tx, person: Person | None, *, planned_anew_at: datetime | None = None) -> Rescheduled | None:
    """Three layers: what is under way is not touched; nor is what was claimed since we looked; and both are told."""
    if person is None:
        return None
    found = await store.find_open_events(tx, person.user_id)
    rescheduled = 0
    skipped: list[UUID] = []
    for event in found.events:
        if event.status is EventStatus.PROCESSING:
            log.warning("birthday_not_rescheduled", event_id=str(event.id), reason="it is under way")
            skipped.append(event.id)
            continue
        target = (
            event.target.in_zone(person.timezone)
            if planned_anew_at is None
            else next_target(person.date_of_birth, person.timezone, now=planned_anew_at, after_year=found.last_year)
        )
        if target == event.target:
            continue
        if await store.reschedule_event(tx, event, target):
            rescheduled += 1
        else:
            log.warning("birthday_not_rescheduled", event_id=str(event.id), reason="it was claimed meanwhile")
            skipped.append(event.id)
    outcome = Rescheduled(rescheduled, tuple(skipped))
    log.info(
        "birthdays_rescheduled", user_id=str(person.user_id), rescheduled=rescheduled, skipped=len(skipped),
        skipped_event_ids=[str(event_id) for event_id in skipped],
    )  # fmt: skip
    return outcome


# -- claiming --------------------------------------------------------------------------------------------------------


async def claim_ready(tx: Tx, *, looks_for_missed: bool) -> Claim:
    """Take the oldest that are due and hand them to the queue in the same commit (B3, B7).

    Three statements however many there are; one more when something is late, and one when there is more to do. At most
    so many are under way at once; two claims at the same moment may exceed that by one batch.
    """
    ready = await store.lock_ready(tx, batch=BATCH, most=MOST_PROCESSING)
    missed = await _find_missed(tx, ready) if looks_for_missed else None
    claimed: tuple[UUID, ...] = ()
    if ready.events:
        started = await store.start_events(tx, ready)
        claimed = tuple(event_id for event_id, _ in ready.events if event_id in started)
        if lost := [str(event_id) for event_id, _ in ready.events if event_id not in started]:
            log.warning("birthdays_not_claimed", event_ids=lost, reason="they were changed meanwhile")
        await schedule_many(tx, [NewJob(DELIVER, event_id) for event_id in claimed])
    allowed = min(BATCH, max(0, ready.room))
    has_more = ready.oldest is not None and len(ready.events) == allowed
    if has_more:
        is_full = len(ready.events) >= ready.room
        wait = timedelta(seconds=ROOM_SECONDS if ready.events else NO_ROOM_SECONDS)
        await schedule(tx, CLAIM_MORE, "next", ready.now + wait if is_full else None)
    return Claim(claimed, has_more, missed)


async def _find_missed(tx: Tx, ready: store.Ready) -> Missed | None:
    if ready.oldest is None or ready.now - ready.oldest <= MISSED_AFTER:
        return None
    missed = await store.find_missed(tx, seconds=MISSED_AFTER.total_seconds(), limit=MISSED_LIMIT)
    if missed is not None:
        log.warning(
            "missed_birthdays_found", count=missed.count, is_limit=missed.count == MISSED_LIMIT,
            oldest=missed.oldest.isoformat(), newest=missed.newest.isoformat(),
        )  # fmt: skip
    return missed


# -- delivering ------------------------------------------------------------------------------------------------------


async def prepare_delivery(tx: Tx, event_id: UUID) -> Delivery | BirthdayEvent | None:
    """What is to be sent (B4); the event alone when its user is gone; None when there is nothing to send (any more)."""
    found = await store.find_delivery(tx, event_id)
    if found is None or found[0].status not in DELIVERABLE:
        return None
    event, person, now = found
    return event if person is None else Delivery(event, person, now)


async def complete(tx: Tx, event: BirthdayEvent) -> None:
    """It was delivered: write that down, and plan the next year by the newest data, in one commit (B4, B6)."""
    people = await store.lock_people(tx, [event.user_id])
    completed = await store.complete_event(tx, event.id)
    await _plan_next_year(tx, [completed] if completed else [], people)


async def fail(tx: Tx, event: BirthdayEvent, *, reason: str) -> None:
    """It was not delivered and will not be; one bad year does not end all birthdays (B4)."""
    people = await store.lock_people(tx, [event.user_id])
    failed = await store.fail_events(tx, [event.id], was=DELIVERABLE, reason=reason)
    await _plan_next_year(tx, failed, people)


async def recover(tx: Tx) -> int:
    """End what is under way without a job that would deliver it, because workers died over it (B6); how many."""
    stalled = await store.find_stalled(tx, minutes=STALLED_AFTER_MINUTES, limit=STALLED_LIMIT)
    queued = await find_queued(tx, DELIVER, list(stalled))
    lost = [event_id for event_id in stalled if str(event_id) not in queued]
    if not lost:
        return 0
    people = await store.lock_people(tx, [stalled[event_id] for event_id in lost])
    failed = await store.fail_events(tx, lost, was=[EventStatus.PROCESSING], reason=LOST)
    await _plan_next_year(tx, failed, people)
    log.warning("birthdays_recovered", count=len(failed), event_ids=[str(event.id) for event in failed])
    return len(failed)


async def _plan_next_year(tx: Tx, over: Sequence[BirthdayEvent], people: dict[UUID, Person]) -> None:
    """Each year has its message, also one that is past by now: after a long downtime they come one after the other."""
    known = [(event.year + 1, people[event.user_id]) for event in over if event.user_id in people]
    if known:
        planned = [
            (uuid7(), person.user_id, target_in(person.date_of_birth, year, person.timezone)) for year, person in known
        ]
        await store.insert_events(tx, planned)


# -- looking after ---------------------------------------------------------------------------------------------------


async def recheck_zones(tx: Tx, *, limit: int = CORRECTED_AT_ONCE) -> int:
    """Convert what is due in the next days anew: governments change their clocks, some at short notice; how many."""
    after = (datetime.min.replace(tzinfo=UTC), UUID(int=0))
    corrected = 0
    for _ in range(RECHECK_PAGES):
        page = await store.read_planned(tx, days=RECHECK_DAYS, after=after, limit=RECHECK_PAGE)
        for event in page:
            target = event.target.in_zone(event.timezone)
            corrected += target != event.target and await store.reschedule_event(tx, event, target)
            if corrected == limit:
                return corrected
        if len(page) < RECHECK_PAGE:
            return corrected
        after = (page[-1].target_utc, page[-1].id)
    log.warning("birthdays_recheck_stopped", read=RECHECK_PAGES * RECHECK_PAGE, reached=after[0].isoformat())
    return corrected


async def forget_events(tx: Tx, *, years: int = KEPT_YEARS, limit: int = FORGOTTEN_AT_ONCE) -> int:
    """Drop what has been over for years; how many."""
    return await store.forget_events(tx, years=years, limit=limit)


async def list_events(tx: Tx, user_id: UUID, *, before: int, limit: int) -> tuple[list[BirthdayEvent], int | None]:
    """A page of a user's messages, and where the next one begins."""
    if await store.find_person(tx, user_id) is None:
        raise PersonNotFound(f"no user has the id {user_id}")
    found = await store.list_events(tx, user_id, before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1].year if len(found) > limit else None
