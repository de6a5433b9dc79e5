"""The route of birthdays."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import Query
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from apps.birthdays import service
from apps.birthdays.model import EventStatus
from apps.shared.text import PageSize
from apps.shared.zones import LocalTime
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.http import RequestTx, Router

SCOPE = "users"
Caller = Annotated[Principal, require(SCOPE)]
LAST_YEAR = 9999

router = Router(prefix="/user", tags=["birthdays"], invalid_status=400)


class _View(BaseModel):
    model_config = ConfigDict(from_attributes=True, alias_generator=to_camel, populate_by_name=True)


class BirthdayView(_View):
    """The message of one year: when it is due by the user's clocks and in UTC, and what became of it."""

    id: UUID
    year: int
    status: EventStatus
    target_local: LocalTime
    timezone: str
    target_utc: datetime
    executed_at: datetime | None
    failure_reason: str | None
    late_seconds: int | None


class BirthdayPage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[BirthdayView]
    next: int | None


@router.get("/{user_id}/birthdays")
async def list_birthdays(
    user_id: UUID,
    _caller: Caller,
    tx: RequestTx,
    before: Annotated[int, Query(ge=1, le=LAST_YEAR, description="Only years before this one.")] = LAST_YEAR,
    limit: PageSize = 50,
) -> BirthdayPage:
    """A page of a user's messages, past and to come."""
    items, following = await service.list_events(tx, user_id, before=before, limit=limit)
    return BirthdayPage(items=[BirthdayView.model_validate(item) for item in items], next=following)
