"""The routes of users."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import date, datetime
from typing import Annotated, Any, Self
from uuid import UUID

from fastapi import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from apps.shared.text import Name
from apps.shared.zones import LocalTime, ZoneName
from apps.users import service
from apps.users.events import UserDeleted, UserRegistered
from apps.users.model import EARLIEST_BIRTH, Changes
from duly import Tx
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.http import RequestTx, Router

SCOPE = "users"
Caller = Annotated[Principal, require(SCOPE)]
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def _plain(given: object) -> object:
    """Pydantic would read a number as seconds since 1970, too."""
    if not isinstance(given, str) or not _DATE.fullmatch(given):
        raise ValueError("a date is written as YYYY-MM-DD")
    return given


DateOfBirth = Annotated[date, BeforeValidator(_plain), Field(ge=EARLIEST_BIRTH)]


def _without_default(schema: dict[str, Any]) -> None:
    """Absent is absent: there is no value that means it."""
    schema.pop("default")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class _View(BaseModel):
    model_config = ConfigDict(from_attributes=True, alias_generator=to_camel, populate_by_name=True)


class NewUser(_Body):
    """A person, by whose clocks to count."""

    first_name: Name
    last_name: Name
    date_of_birth: DateOfBirth
    timezone: ZoneName


class UserChanges(_Body):
    """What is to be different: at least one of these."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    first_name: Name = Field(default="", json_schema_extra=_without_default)
    last_name: Name = Field(default="", json_schema_extra=_without_default)
    date_of_birth: DateOfBirth = Field(default=EARLIEST_BIRTH, json_schema_extra=_without_default)
    timezone: ZoneName = Field(default="", json_schema_extra=_without_default)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("say what is to change: firstName, lastName, dateOfBirth or timezone")
        return self


class UserView(_View):
    """A user."""

    id: UUID
    first_name: str
    last_name: str
    date_of_birth: date
    timezone: str
    version: int
    created_at: datetime
    updated_at: datetime


class NextBirthday(_View):
    """When the next message is due: by the user's clocks, and in UTC."""

    id: UUID
    status: str
    target_local: LocalTime
    timezone: str
    target_utc: datetime


class Registered(_View):
    """A new user, and the first message to come."""

    user: UserView
    next_birthday_event: NextBirthday


def create_router(
    *,
    on_registered: Callable[[Tx, UserRegistered], Awaitable[Any]],
    on_deleted: Callable[[Tx, UserDeleted], Awaitable[None]],
) -> Router:
    """The routes, and who hears in the same transaction of who came (and says when the birthday is) and who left."""
    router = Router(prefix="/user", tags=["users"], invalid_status=400)

    @router.post("", status_code=201)
    async def register_user(new: NewUser, _caller: Caller, tx: RequestTx, response: Response) -> Registered:
        """Register somebody; the first birthday message is planned with it."""
        user, planned = await service.register_user(tx, **new.model_dump(), tell=on_registered)
        response.headers["Location"] = f"/user/{user.id}"
        return Registered(user=UserView.model_validate(user), next_birthday_event=NextBirthday.model_validate(planned))

    @router.get("/{user_id}")
    async def read_user(user_id: UUID, _caller: Caller, tx: RequestTx) -> UserView:
        """One of them."""
        return UserView.model_validate(await service.read_user(tx, user_id))

    @router.put("/{user_id}")
    async def change_user(user_id: UUID, changes: UserChanges, _caller: Caller, tx: RequestTx) -> UserView:
        """Correct a name, the date of birth or the time zone; what is not given stays."""
        given = Changes(**changes.model_dump(exclude_unset=True))
        return UserView.model_validate(await service.change_user(tx, user_id, given))

    @router.delete("/{user_id}", status_code=204)
    async def delete_user(user_id: UUID, _caller: Caller, tx: RequestTx) -> None:
        """Forget somebody, and the messages to come."""
        await service.delete_user(tx, user_id, tell=on_deleted)

    return router
