"""When a birthday message is due, and what it says (B2); docs/howto/time-rules.md says the same for people."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from uuid import UUID

from duly.errors import NotFound
from duly.zones import find_zone, first_instant

HOUR = time(9)
MISSED_AFTER = timedelta(seconds=90)
LATE_AFTER = timedelta(minutes=5)
"""Later than this, the message says so."""


class EventStatus(StrEnum):
    """Where a birthday's message stands."""

    PENDING = "PENDING"
    PROCESSING = "PROCESSING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


DELIVERABLE = (EventStatus.PROCESSING, EventStatus.FAILED)
"""A failed one is delivered after all when an operator retries its dead letter."""


class PersonNotFound(NotFound):
    """There is no such user."""


@dataclass(frozen=True)
class Person:
    """What birthdays knows of a user: a copy of its own, as new as the last event."""

    user_id: UUID
    first_name: str
    last_name: str
    date_of_birth: date
    timezone: str


@dataclass(frozen=True)
class Target:
    """One birthday's nine o'clock: by the clocks of a zone, and as an instant."""

    local: datetime
    timezone: str
    utc: datetime

    @property
    def year(self) -> int:
        """The calendar year whose message it is."""
        return self.local.year

    def in_zone(self, timezone: str) -> Target:
        """The same local date and time by the clocks of another zone, past or not."""
        return _target(self.local, timezone)


@dataclass(frozen=True)
class BirthdayEvent:
    """The message of one user and one year."""

    id: UUID
    user_id: UUID
    year: int
    target_local: datetime
    timezone: str
    target_utc: datetime
    status: EventStatus
    version: int
    processing_at: datetime | None
    executed_at: datetime | None
    failure_reason: str | None
    created_at: datetime
    updated_at: datetime

    @property
    def target(self) -> Target:
        """When it is due."""
        return Target(self.target_local, self.timezone, self.target_utc)

    @property
    def late_seconds(self) -> int | None:
        """How late it was delivered; None while it was not."""
        return None if self.executed_at is None else whole_seconds(self.executed_at - self.target_utc)


@dataclass(frozen=True)
class Delivery:
    """A message that is about to be sent: the event, the newest of whom it is for, and what time it is."""

    event: BirthdayEvent
    person: Person
    now: datetime

    @property
    def late_by(self) -> timedelta:
        """How late it is by now."""
        return max(self.now - self.event.target_utc, timedelta(0))

    @property
    def tried_for(self) -> timedelta:
        """How long ago it was claimed."""
        return self.now - (self.event.processing_at or self.now)

    @property
    def message(self) -> str:
        """A wish, and by how much it is late if it is."""
        wish = f"Happy birthday, {self.person.first_name} {self.person.last_name}!"
        return f"{wish} Sorry to be {describe_wait(self.late_by)} late." if self.late_by > LATE_AFTER else wish


def birthday_in(born: date, year: int) -> date:
    """The birthday of a year: 29 February is 28 February in common years."""
    try:
        return born.replace(year=year)
    except ValueError:
        return date(year, 2, 28)


def target_in(born: date, year: int, timezone: str) -> Target:
    """When the message of a year is due."""
    return _target(datetime.combine(birthday_in(born, year), HOUR), timezone)


def next_target(born: date, timezone: str, *, now: datetime, after_year: int = 0) -> Target:
    """The first birthday whose nine o'clock is not before now, of a year after ``after_year``.

    The day of birth itself is none. The year before is looked at, too: where the clocks skip New Year's Eve, its nine
    o'clock is in January.
    """
    first = max(now.astimezone(find_zone(timezone)).year - 1, after_year + 1, born.year + 1)
    candidates = (target_in(born, year, timezone) for year in range(first, first + 3))
    return next(target for target in candidates if target.utc >= now)


def describe_wait(wait: timedelta) -> str:
    """In one unit, rounded down: ``7 minutes``, ``1 hour``, ``3 days``."""
    seconds = whole_seconds(wait)
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            count = seconds // size
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "a moment"


def whole_seconds(wait: timedelta) -> int:
    """Rounded down, and never negative."""
    return max(0, wait // timedelta(seconds=1))


def _target(local: datetime, timezone: str) -> Target:
    return Target(local, timezone, first_instant(local, find_zone(timezone)).astimezone(UTC))
