"""The facts of users; the only door for other contexts."""

from __future__ import annotations

from datetime import date
from uuid import UUID

from duly import EventBody

TOPIC = "user-events"


class UserRegistered(EventBody, type="UserRegistered", topic=TOPIC, aggregate="user_id"):
    """There is a new user."""

    user_id: UUID
    first_name: str
    last_name: str
    date_of_birth: date
    timezone: str


class UserRenamed(EventBody, type="UserRenamed", topic=TOPIC, aggregate="user_id"):
    """The user has another name now."""

    user_id: UUID
    first_name: str
    last_name: str


class UserBirthdayChanged(EventBody, type="UserBirthdayChanged", topic=TOPIC, aggregate="user_id"):
    """The date of birth was another one; ``timezone`` is the one that holds now, also when it changed with it."""

    user_id: UUID
    old: date
    new: date
    timezone: str


class UserTimezoneChanged(EventBody, type="UserTimezoneChanged", topic=TOPIC, aggregate="user_id"):
    """The user lives by other clocks now."""

    user_id: UUID
    old: str
    new: str


class UserDeleted(EventBody, type="UserDeleted", topic=TOPIC, aggregate="user_id"):
    """The user is gone."""

    user_id: UUID
