"""The use cases of users: each gets a transaction and never ends it.

Others hear of a fact in two ways: as an event, later and in order; or, where the answer depends on it, in the same
transaction. Who hears it so is the caller's to say: ``tell`` gets the fact that is emitted, and users knows no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import date
from typing import TypeVar
from uuid import UUID

from apps.users import store
from apps.users.events import UserBirthdayChanged, UserDeleted, UserRegistered, UserRenamed, UserTimezoneChanged
from apps.users.model import Changes, User, UserNotFound
from duly import EventBody, Tx, emit
from duly.ids import uuid7

T = TypeVar("T")


async def register_user(
    tx: Tx,
    *,
    first_name: str,
    last_name: str,
    date_of_birth: date,
    timezone: str,
    tell: Callable[[Tx, UserRegistered], Awaitable[T]],
) -> tuple[User, T]:
    """A new user, and what became of it in the same transaction (B1)."""
    user = await store.insert_user(
        tx, user_id=uuid7(), first_name=first_name, last_name=last_name, date_of_birth=date_of_birth, timezone=timezone
    )
    user.check_born(user.created_at)
    fact = UserRegistered(
        user_id=user.id, first_name=first_name, last_name=last_name, date_of_birth=date_of_birth, timezone=timezone
    )
    await emit(tx, fact)
    return user, await tell(tx, fact)


async def change_user(tx: Tx, user_id: UUID, changes: Changes) -> User:
    """Correct what is given; what is the same already is no news (B5)."""
    found = await store.lock_user(tx, user_id)
    if found is None:
        raise _not_found(user_id)
    user, now = found
    changed = user.apply(changes, now=now)
    if changed == user:
        return user
    written = await store.update_user(tx, changed)
    await emit(tx, *_news(user, written))
    return written


async def read_user(tx: Tx, user_id: UUID) -> User:
    """One by its id (B1)."""
    user = await store.find_user(tx, user_id)
    if user is None:
        raise _not_found(user_id)
    return user


async def delete_user(tx: Tx, user_id: UUID, *, tell: Callable[[Tx, UserDeleted], Awaitable[None]]) -> None:
    """The user goes, and what others keep of it goes in the same transaction (B1)."""
    if not await store.delete_user(tx, user_id):
        raise _not_found(user_id)
    fact = UserDeleted(user_id=user_id)
    await emit(tx, fact)
    await tell(tx, fact)


def _news(old: User, new: User) -> list[EventBody]:
    """What is different. The date comes before the zone: it carries both, so nobody plans with only one of them."""
    news: list[EventBody] = []
    if (old.first_name, old.last_name) != (new.first_name, new.last_name):
        news.append(UserRenamed(user_id=new.id, first_name=new.first_name, last_name=new.last_name))
    if old.date_of_birth != new.date_of_birth:
        news.append(
            UserBirthdayChanged(user_id=new.id, old=old.date_of_birth, new=new.date_of_birth, timezone=new.timezone)
        )
    if old.timezone != new.timezone:
        news.append(UserTimezoneChanged(user_id=new.id, old=old.timezone, new=new.timezone))
    return news


def _not_found(user_id: UUID) -> UserNotFound:
    return UserNotFound(f"no user has the id {user_id}")
