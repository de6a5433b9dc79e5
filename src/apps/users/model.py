"""What a user is, and what may be said of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date, datetime
from uuid import UUID

from duly.errors import Invalid, NotFound
from duly.zones import find_zone

EARLIEST_BIRTH = date(1900, 1, 1)


class UserNotFound(NotFound):
    """There is no such user."""


class NotBornYet(Invalid):
    """The date of birth is in the future."""


@dataclass(frozen=True)
class Changes:
    """What is to become of a user; what is None stays."""

    first_name: str | None = None
    last_name: str | None = None
    date_of_birth: date | None = None
    timezone: str | None = None


@dataclass(frozen=True)
class User:
    """A person."""

    id: UUID
    first_name: str
    last_name: str
    date_of_birth: date
    timezone: str
    version: int
    created_at: datetime
    updated_at: datetime

    def apply(self, changes: Changes, *, now: datetime) -> User:
        """The user afterwards; the same one when nothing is different."""
        changed = replace(
            self,
            first_name=self.first_name if changes.first_name is None else changes.first_name,
            last_name=self.last_name if changes.last_name is None else changes.last_name,
            date_of_birth=changes.date_of_birth or self.date_of_birth,
            timezone=changes.timezone or self.timezone,
        )
        if changed.date_of_birth != self.date_of_birth:
            changed.check_born(now)
        return changed

    def check_born(self, now: datetime) -> None:
        """Refuse who is not born yet, by the calendar of where they live."""
        if self.date_of_birth > now.astimezone(find_zone(self.timezone)).date():
            raise NotBornYet("dateOfBirth is in the future")
