"""The tables of birthdays, and every statement on them.

Locks are taken in one order: people by user, then events. Whoever plans from a person's data holds the person's row,
so that a change of that data comes before or after, never in between. The claim locks events alone, and waits for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    Column,
    Date,
    DateTime,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    select,
    text,
)

from apps.birthdays.model import BirthdayEvent, EventStatus, Person, Target
from duly import Tx

metadata = MetaData(schema="birthdays")

people = Table(
    "people",
    metadata,
    Column("user_id", Uuid, primary_key=True),
    Column("first_name", Text, nullable=False),
    Column("last_name", Text, nullable=False),
    Column("date_of_birth", Date, nullable=False),
    Column("timezone", Text, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("user_id", Uuid, nullable=False),
    Column("year", Integer, nullable=False),
    Column("target_local", DateTime, nullable=False),
    Column("timezone", Text, nullable=False),
    Column("target_utc", DateTime(timezone=True), nullable=False),
    Column("status", Text, nullable=False, server_default=text("'PENDING'")),
    Column("version", Integer, nullable=False, server_default=text("1")),
    Column("processing_at", DateTime(timezone=True)),
    Column("executed_at", DateTime(timezone=True)),
    Column("failure_reason", Text),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("user_id", "year", name="events_one_a_year"),
    CheckConstraint("status IN ('PENDING', 'PROCESSING', 'COMPLETED', 'FAILED')", name="events_status_is_known"),
    CheckConstraint("version >= 1", name="events_version_counts_up"),
    CheckConstraint("year = date_part('year', target_local)", name="events_year_is_the_birthdays"),
    CheckConstraint("CAST(target_local AS time) = '09:00'", name="events_are_at_nine"),
    CheckConstraint(
        "abs(date_part('epoch', target_utc - (target_local AT TIME ZONE 'UTC'))) <= 129600",
        name="events_target_is_one_moment",
    ),
    CheckConstraint(
        "(status = 'PENDING') = (processing_at IS NULL) AND (status = 'COMPLETED') = (executed_at IS NOT NULL)"
        " AND (status = 'FAILED') = (failure_reason IS NOT NULL)",
        name="events_status_is_explained",
    ),
    CheckConstraint("processing_at >= target_utc AND executed_at >= processing_at", name="events_are_never_early"),
    CheckConstraint("length(failure_reason) BETWEEN 1 AND 500", name="events_reason_is_short"),
)
Index("events_one_pending", events.c.user_id, unique=True, postgresql_where=text("status = 'PENDING'"))
Index("events_due", events.c.target_utc, events.c.id, postgresql_where=text("status = 'PENDING'"))
Index("events_processing", events.c.processing_at, events.c.id, postgresql_where=text("status = 'PROCESSING'"))
Index("events_over", events.c.target_utc, events.c.id, postgresql_where=text("status IN ('COMPLETED', 'FAILED')"))

INSERT_PERSON = text("""
INSERT INTO birthdays.people (user_id, first_name, last_name, date_of_birth, timezone)
VALUES (:user_id, :first_name, :last_name, :date_of_birth, :timezone)
RETURNING duly.now() AS now
""")
CHANGE_PERSON = text("""
UPDATE birthdays.people
SET first_name = coalesce(:first_name, first_name), last_name = coalesce(:last_name, last_name),
    date_of_birth = coalesce(CAST(:date_of_birth AS date), date_of_birth), timezone = coalesce(:timezone, timezone)
WHERE user_id = :user_id
RETURNING *
""")
DELETE_PERSON = text("DELETE FROM birthdays.people WHERE user_id = :user_id")
# Two who plan for one person at once may both read; who changes the person waits for them, and they for who does.
LOCK_PEOPLE = text("""
SELECT * FROM birthdays.people WHERE user_id = ANY(CAST(:user_ids AS uuid[])) ORDER BY user_id FOR SHARE
""")
# Another one pending, or one of the same year, is as good: a retried dead letter planned its next year long ago.
INSERT_EVENTS = text("""
INSERT INTO birthdays.events (id, user_id, year, target_local, timezone, target_utc, created_at, updated_at)
SELECT n.id, n.user_id, n.year, n.target_local, n.timezone, n.target_utc, duly.now(), duly.now()
FROM unnest(CAST(:ids AS uuid[]), CAST(:user_ids AS uuid[]), CAST(:years AS int[]), CAST(:locals AS timestamp[]),
            CAST(:timezones AS text[]), CAST(:utcs AS timestamptz[]))
     AS n(id, user_id, year, target_local, timezone, target_utc)
ON CONFLICT DO NOTHING
RETURNING *
""")
DELETE_PENDING = text("DELETE FROM birthdays.events WHERE user_id = :user_id AND status = 'PENDING'")
FIND_OPEN_EVENTS = text("""
SELECT e.*, (SELECT coalesce(max(o.year), 0) FROM birthdays.events o
             WHERE o.user_id = :user_id AND o.status <> 'PENDING') AS last_year
FROM birthdays.events e WHERE e.user_id = :user_id AND e.status IN ('PENDING', 'PROCESSING')
ORDER BY e.year
""")
# The version and the status: whoever claimed it meanwhile keeps it as it was.
RESCHEDULE_EVENT = text("""
UPDATE birthdays.events
SET year = :year, target_local = :target_local, timezone = :timezone, target_utc = :target_utc,
    version = version + 1, updated_at = duly.now()
WHERE id = :id AND version = :version AND status = 'PENDING'
RETURNING id
""")
# One look: what time it is, for how many there is room, since when the oldest waits; and the oldest, locked.
LOCK_READY_EVENTS = text("""
SELECT look.now, look.room, look.oldest, ready.id, ready.version, ready.target_utc
FROM (SELECT duly.now() AS now,
             CAST(:most AS int) - (SELECT count(*) FROM birthdays.events p WHERE p.status = 'PROCESSING') AS room,
             (SELECT o.target_utc FROM birthdays.events o WHERE o.status = 'PENDING' AND o.target_utc <= duly.now()
              ORDER BY o.target_utc, o.id LIMIT 1) AS oldest) AS look
LEFT JOIN LATERAL (
    SELECT e.id, e.version, e.target_utc FROM birthdays.events e
    WHERE e.status = 'PENDING' AND e.target_utc <= duly.now()
    ORDER BY e.target_utc, e.id LIMIT least(CAST(:batch AS int), greatest(look.room, 0)) FOR UPDATE SKIP LOCKED
) AS ready ON true
ORDER BY ready.target_utc, ready.id
""")
START_EVENTS = text("""
UPDATE birthdays.events SET status = 'PROCESSING', version = version + 1, processing_at = :now, updated_at = :now
WHERE id = ANY(CAST(:ids AS uuid[])) AND status = 'PENDING'
  AND (id, version) IN (SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:versions AS int[])))
RETURNING id
""")
FIND_MISSED_EVENTS = text("""
SELECT count(*) AS count, min(missed.target_utc) AS oldest, max(missed.target_utc) AS newest
FROM (SELECT e.target_utc FROM birthdays.events e
      WHERE e.status = 'PENDING' AND e.target_utc < duly.now() - make_interval(secs => :seconds)
      ORDER BY e.target_utc, e.id LIMIT :limit) AS missed
""")
FIND_DELIVERY = text("""
SELECT e.*, duly.now() AS now, p.first_name, p.last_name, p.date_of_birth, p.timezone AS lives_by
FROM birthdays.events e LEFT JOIN birthdays.people p ON p.user_id = e.user_id
WHERE e.id = :id
""")
# A clock that was set back meanwhile makes nothing early.
COMPLETE_EVENT = text("""
UPDATE birthdays.events
SET status = 'COMPLETED', executed_at = greatest(duly.now(), processing_at), failure_reason = NULL,
    version = version + 1, updated_at = duly.now()
WHERE id = :id AND status IN ('PROCESSING', 'FAILED')
RETURNING *
""")
FAIL_EVENTS = text("""
UPDATE birthdays.events SET status = 'FAILED', failure_reason = :reason, version = version + 1, updated_at = duly.now()
WHERE id = ANY(CAST(:ids AS uuid[])) AND status = ANY(CAST(:was AS text[]))
RETURNING *
""")
FIND_STALLED_EVENTS = text("""
SELECT id, user_id FROM birthdays.events
WHERE status = 'PROCESSING' AND processing_at < duly.now() - make_interval(mins => :minutes)
ORDER BY processing_at, id LIMIT :limit
""")
LIST_EVENTS = text("""
SELECT * FROM birthdays.events WHERE user_id = :user_id AND year < :before ORDER BY year DESC LIMIT :limit
""")
READ_PLANNED_EVENTS = text("""
SELECT * FROM birthdays.events
WHERE status = 'PENDING' AND target_utc < duly.now() + make_interval(days => :days)
  AND (target_utc, id) > (CAST(:after_utc AS timestamptz), CAST(:after_id AS uuid))
ORDER BY target_utc, id LIMIT :limit
""")
# Each along the index of its status. What is over is of two kinds in one index: so many are looked through.
LIST_PENDING = text("""
SELECT * FROM birthdays.events WHERE status = 'PENDING'
  AND (target_utc, id) > (CAST(:after_at AS timestamptz), CAST(:after_id AS uuid))
ORDER BY target_utc, id LIMIT :limit
""")
LIST_PROCESSING = text("""
SELECT * FROM birthdays.events WHERE status = 'PROCESSING'
  AND (processing_at, id) > (CAST(:after_at AS timestamptz), CAST(:after_id AS uuid))
ORDER BY processing_at, id LIMIT :limit
""")
LIST_OVER = text("""
SELECT * FROM birthdays.events WHERE status IN ('COMPLETED', 'FAILED')
  AND (target_utc, id) < (CAST(:after_at AS timestamptz), CAST(:after_id AS uuid))
ORDER BY target_utc DESC, id DESC LIMIT :limit
""")
FORGET_EVENTS = text("""
WITH gone AS (
    DELETE FROM birthdays.events WHERE id = ANY(ARRAY(
        SELECT id FROM birthdays.events
        WHERE status IN ('COMPLETED', 'FAILED') AND target_utc < duly.now() - make_interval(years => :years)
        ORDER BY target_utc, id LIMIT :limit))
    RETURNING 1
)
SELECT count(*) FROM gone
""")


@dataclass(frozen=True)
class Ready:
    """What a claim sees: when it looked, for how many there is room, and the oldest that wait, locked."""

    now: datetime
    room: int
    oldest: datetime | None
    events: tuple[tuple[UUID, int], ...]


@dataclass(frozen=True)
class Missed:
    """Events that should have been claimed before: how many, counted up to a limit, from when to when."""

    count: int
    oldest: datetime
    newest: datetime


@dataclass(frozen=True)
class OpenEvents:
    """A user's events that are not over, and the last year that is, or is under way; 0 when there is none."""

    events: tuple[BirthdayEvent, ...]
    last_year: int


# -- people ----------------------------------------------------------------------------------------------------------


async def insert_person(tx: Tx, person: Person) -> datetime:
    """Write a new one; what time it is."""
    now: datetime = (await tx.execute(INSERT_PERSON, vars(person))).scalar_one()
    return now


async def change_person(
    tx: Tx,
    user_id: UUID,
    *,
    first_name: str | None = None,
    last_name: str | None = None,
    date_of_birth: date | None = None,
    timezone: str | None = None,
) -> Person | None:
    """Take over what is given, and be alone with the person until the transaction ends; None when there is none."""
    values = {"user_id": user_id, "first_name": first_name, "last_name": last_name}
    made = await tx.execute(CHANGE_PERSON, {**values, "date_of_birth": date_of_birth, "timezone": timezone})
    row = made.mappings().one_or_none()
    return Person(**row) if row else None


async def delete_person(tx: Tx, user_id: UUID) -> None:
    """Forget one."""
    await tx.execute(DELETE_PERSON, {"user_id": user_id})


async def find_person(tx: Tx, user_id: UUID) -> Person | None:
    """One by its user."""
    row = (await tx.execute(select(people).where(people.c.user_id == user_id))).mappings().one_or_none()
    return Person(**row) if row else None


async def lock_people(tx: Tx, user_ids: Sequence[UUID]) -> dict[UUID, Person]:
    """As they are now and until the transaction ends, by user."""
    found = await tx.execute(LOCK_PEOPLE, {"user_ids": list(user_ids)})
    return {row["user_id"]: Person(**row) for row in found.mappings()}


# -- events: planning ------------------------------------------------------------------------------------------------


async def insert_events(tx: Tx, planned: Sequence[tuple[UUID, UUID, Target]]) -> list[BirthdayEvent]:
    """Write new ones (id, user, target); those that were not there."""
    targets = [target for _, _, target in planned]
    made = await tx.execute(
        INSERT_EVENTS,
        {
            "ids": [event_id for event_id, _, _ in planned],
            "user_ids": [user_id for _, user_id, _ in planned],
            "years": [target.year for target in targets],
            "locals": [target.local for target in targets],
            "timezones": [target.timezone for target in targets],
            "utcs": [target.utc for target in targets],
        },
    )
    return [_event(row) for row in made.mappings()]


async def delete_pending(tx: Tx, user_id: UUID) -> None:
    """Drop what a user has to expect."""
    await tx.execute(DELETE_PENDING, {"user_id": user_id})


async def find_open_events(tx: Tx, user_id: UUID) -> OpenEvents:
    """A user's that are pending or under way."""
    rows = [dict(row) for row in (await tx.execute(FIND_OPEN_EVENTS, {"user_id": user_id})).mappings()]
    last_years = [int(row.pop("last_year")) for row in rows]
    return OpenEvents(tuple(_event(row) for row in rows), max(last_years, default=0))


async def reschedule_event(tx: Tx, event: BirthdayEvent, target: Target) -> bool:
    """Give it another time if it is pending and nobody changed it since it was read."""
    values = {"id": event.id, "version": event.version, "year": target.year, "target_local": target.local}
    made = await tx.execute(RESCHEDULE_EVENT, {**values, "timezone": target.timezone, "target_utc": target.utc})
    return made.one_or_none() is not None


async def read_planned(tx: Tx, *, days: int, after: tuple[datetime, UUID], limit: int) -> list[BirthdayEvent]:
    """A page of what is pending for the next days, the soonest first."""
    values = {"days": days, "after_utc": after[0], "after_id": after[1], "limit": limit}
    return [_event(row) for row in (await tx.execute(READ_PLANNED_EVENTS, values)).mappings()]


# -- events: claiming and delivering ---------------------------------------------------------------------------------


async def lock_ready(tx: Tx, *, batch: int, most: int) -> Ready:
    """The oldest that are due, as many as there is room for; those that others hold are left to them."""
    rows = (await tx.execute(LOCK_READY_EVENTS, {"batch": batch, "most": most})).mappings().all()
    look = rows[0]
    locked = tuple((row["id"], row["version"]) for row in rows if row["id"] is not None)
    return Ready(look["now"], look["room"], look["oldest"], locked)


async def start_events(tx: Tx, ready: Ready) -> set[UUID]:
    """Mark them as under way; those whose version was still the one that was read."""
    values = {"ids": [event_id for event_id, _ in ready.events], "versions": [version for _, version in ready.events]}
    return set((await tx.execute(START_EVENTS, {**values, "now": ready.now})).scalars())


async def find_missed(tx: Tx, *, seconds: float, limit: int) -> Missed | None:
    """What should have been claimed so long ago, the oldest first; None when there is none."""
    row = (await tx.execute(FIND_MISSED_EVENTS, {"seconds": seconds, "limit": limit})).mappings().one()
    return Missed(**row) if row["count"] else None


async def find_delivery(tx: Tx, event_id: UUID) -> tuple[BirthdayEvent, Person | None, datetime] | None:
    """An event, whom it is for (None when that user is gone), and what time it is."""
    row = (await tx.execute(FIND_DELIVERY, {"id": event_id})).mappings().one_or_none()
    if row is None:
        return None
    values = dict(row)
    now = values.pop("now")
    names = {name: values.pop(name) for name in ("first_name", "last_name", "date_of_birth")}
    lives_by = values.pop("lives_by")
    person = Person(user_id=values["user_id"], timezone=lives_by, **names) if lives_by is not None else None
    return _event(values), person, now


async def complete_event(tx: Tx, event_id: UUID) -> BirthdayEvent | None:
    """It was delivered; None when it is over already."""
    row = (await tx.execute(COMPLETE_EVENT, {"id": event_id})).mappings().one_or_none()
    return _event(row) if row else None


async def fail_events(
    tx: Tx, event_ids: Sequence[UUID], *, was: Sequence[EventStatus], reason: str
) -> list[BirthdayEvent]:
    """They were not delivered; those of them that stood like this."""
    values = {"ids": list(event_ids), "was": [status.value for status in was], "reason": reason}
    made = await tx.execute(FAIL_EVENTS, values)
    return [_event(row) for row in made.mappings()]


async def find_stalled(tx: Tx, *, minutes: int, limit: int) -> dict[UUID, UUID]:
    """Those that have been under way for longer than this, the oldest first, and whose they are."""
    found = await tx.execute(FIND_STALLED_EVENTS, {"minutes": minutes, "limit": limit})
    return {row["id"]: row["user_id"] for row in found.mappings()}


# -- events: looking and forgetting ----------------------------------------------------------------------------------


async def list_of_status(
    tx: Tx, status: EventStatus, *, after: tuple[datetime, UUID], limit: int
) -> list[BirthdayEvent]:
    """A page: of what is to come the soonest first, of what is over the newest, both kinds of it."""
    listing = {EventStatus.PENDING: LIST_PENDING, EventStatus.PROCESSING: LIST_PROCESSING}.get(status, LIST_OVER)
    found = await tx.execute(listing, {"after_at": after[0], "after_id": after[1], "limit": limit})
    return [_event(row) for row in found.mappings()]


async def list_events(tx: Tx, user_id: UUID, *, before: int, limit: int) -> list[BirthdayEvent]:
    """A user's, the newest year first."""
    values = {"user_id": user_id, "before": before, "limit": limit}
    return [_event(row) for row in (await tx.execute(LIST_EVENTS, values)).mappings()]


async def forget_events(tx: Tx, *, years: int, limit: int) -> int:
    """Delete the oldest that have been over for so long; how many."""
    gone: int = (await tx.execute(FORGET_EVENTS, {"years": years, "limit": limit})).scalar_one()
    return gone


def _event(row: Mapping[Any, Any]) -> BirthdayEvent:
    return BirthdayEvent(**{**row, "status": EventStatus(row["status"])})
