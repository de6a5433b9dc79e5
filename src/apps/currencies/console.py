"""Exchange rates in the console: which table holds on a day, and how the last syncs went."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from apps.currencies import store
from apps.currencies.service import SYNC
from duly import Duly
from duly.console import BadQuery, Pages, Query, Section, read, show
from duly.errors import NotFound
from duly.operate.jobs import list_executions
from duly.schedules.edit import get_schedule

PAGE = 50
RUNS = 5
LAST = (date(9999, 1, 1), "")
pages = Pages()


def register(app: Duly) -> None:
    """Add the section."""
    app.include_console(Section("rates", "Rates", pages, templates=Path(__file__).parent / "templates"))


@pages.get("")
async def rates(request: Request) -> Response:
    """The rates of a day, or the newest; every table by day; and the last syncs."""
    query = Query(request)
    day, before = _day(query.text("date"), "date"), _before(query)
    async with read(request) as look:
        table = await store.find_newest(look.tx, until=day)
        tables = await store.list_tables(look.tx, before=before or LAST, limit=PAGE + 1)
        runs = await list_executions(look.tx, name=SYNC, limit=RUNS)
        try:
            schedule: Any = await get_schedule(look.tx, SYNC)
        except NotFound:
            schedule = None
    last = tables[PAGE - 1] if len(tables) > PAGE else None
    return show(
        request, "rates.html", now=look.now, day=day, table_=table, tables=tables[:PAGE], runs=runs, schedule=schedule,
        after=f"{last['day']}_{last['number']}" if last else None, is_first=before is None,
    )  # fmt: skip


def _day(given: str | None, name: str) -> date | None:
    if given is None:
        return None
    try:
        return date.fromisoformat(given)
    except ValueError:
        raise BadQuery(f"{name} is a day such as 2026-03-02") from None


def _before(query: Query) -> tuple[date, str] | None:
    given = query.after()
    if given is None:
        return None
    day = _day(given[0], "after")
    assert day is not None, "it was given"
    return day, given[1]
