"""The routes of currencies."""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, BeforeValidator, WithJsonSchema

from apps.currencies import service
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.http import RequestTx, Router

Customer = Annotated[Principal, require("commerce")]
router = Router(prefix="/v1/currencies", tags=["currencies"])


def _read_day(given: Any) -> date:
    """A day as it is written everywhere else here; pydantic would take a number of seconds, too."""
    if not isinstance(given, str) or not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", given):
        raise ValueError("write a day such as 2026-11-13")
    return date.fromisoformat(given)


Day = Annotated[date, BeforeValidator(_read_day), WithJsonSchema({"type": "string", "format": "date"})]


class RateView(BaseModel):
    """Zlotys for one unit, exactly as the bank wrote it."""

    code: str
    currency: str
    mid: str


class RateTableView(BaseModel):
    """The rates of one day; ``table`` is the bank's number."""

    date: date
    table: str
    rates: list[RateView]


@router.get("/rates")
async def read_rates(
    _caller: Customer, tx: RequestTx, day: Annotated[Day | None, Query(alias="date")] = None
) -> RateTableView:
    """The rates of a day, or the newest; 404 for a day without any names the last one before it."""
    table = await service.read_rates(tx, day=day)
    return RateTableView(
        date=table.day,
        table=table.number,
        rates=[RateView(code=rate.code, currency=rate.currency, mid=f"{rate.mid:f}") for rate in table.rates],
    )
