"""Schedules: when they run, in words and in their own zone; and an editor that shows the next runs before saving."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response

from duly.console import sql
from duly.console.forms import Wrong
from duly.console.record import read_audit
from duly.console.routes import Pages, Query, read, show, signed_in
from duly.errors import Invalid, NotFound
from duly.operate.jobs import list_executions
from duly.operate.why import why
from duly.schedules.cron import Cron, Occurrence
from duly.schedules.edit import ScheduleRow, get_schedule, list_schedules
from duly.schedules.misfire import MISFIRES

if TYPE_CHECKING:
    from datetime import datetime

PREVIEW = 10
FIELDS = ("name", "cron", "timezone", "max_retries", "misfire", "dst_gap", "dst_overlap", "payload")
DEFAULTS = {
    "name": "", "cron": "0 9 * * *", "timezone": "UTC", "max_retries": "3", "misfire": "run_once", "dst_gap": "after",
    "dst_overlap": "first", "payload": "{}",
}  # fmt: skip
MEANINGS = {
    "misfire": {
        "run_once": "run once for all that were missed", "run_all": "run each that was missed",
        "skip": "skip what was missed",
    },
    "dst_gap": {"after": "run right after the gap", "skip": "do not run that day"},
    "dst_overlap": {"first": "run the first time only", "both": "run both times"},
}  # fmt: skip


@dataclass(frozen=True)
class Preview:
    """What an expression would do: in words, and its next runs; or what is wrong with it."""

    words: str = ""
    runs: list[Occurrence] = field(default_factory=list)
    error: str = ""


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/schedules")(schedules)
    pages.get("/schedules/new")(new_schedule)
    pages.get("/schedules/{name}")(schedule)
    pages.get("/schedules/{name}/edit")(edit_schedule)
    pages.form("schedules.add")(refused_schedule)
    pages.form("schedules.edit")(refused_edit)


async def schedules(request: Request) -> Response:
    """All of them, those that never ran too."""
    after = Query(request).text("after") or ""
    async with read(request) as look:
        found = await list_schedules(look.tx, after_name=after, limit=201)
        rows = await look.rows(sql.LIST_LAST_RUNS, names=[row.name for row in found])
    more = found[199].name if len(found) > 200 else None
    last = {row.name: row for row in rows}
    return show(request, "schedules.html", now=look.now, schedules=found[:200], last=last, after=more)


async def schedule(request: Request, name: str) -> Response:
    """One, with its next runs, its last runs and its edits."""
    async with read(request) as look:
        row = await get_schedule(look.tx, name)
        runs = await list_executions(look.tx, name=name, limit=20)
        audit = await read_audit(request, look, subject=f"schedule:{name}", limit=50)
        sentences = await why(look.tx, f"schedule:{name}", roles=signed_in(request).roles)
    return show(
        request, "schedule.html", now=look.now, schedule=row, runs=runs, audit=audit, sentences=sentences,
        preview=preview(_values(row), look.now),
    )  # fmt: skip


async def new_schedule(request: Request) -> Response:
    """The editor, empty."""
    query = Query(request)
    values = {name: query.text(name, longest=20_000) or DEFAULTS[name] for name in FIELDS}
    async with read(request) as look:
        known = await look.names()
    return _editor(request, values, look.now, row=None, known=known)


async def edit_schedule(request: Request, name: str) -> Response:
    """The editor; what is in the address is tried out, and nothing is saved by looking."""
    query = Query(request)
    async with read(request) as look:
        row = await get_schedule(look.tx, name)
    values = _values(row)
    values |= {field: given for field in FIELDS[1:] if (given := query.text(field, longest=20_000)) is not None}
    return _editor(request, values, look.now, row=row, known=[])


async def refused_schedule(request: Request, wrong: Wrong) -> Response:
    """The editor with what was typed, and what is wrong with it."""
    async with read(request) as look:
        known = await look.names()
    values = {name: wrong.given.get(name, DEFAULTS[name]) for name in FIELDS}
    return _editor(request, values, look.now, row=None, known=known, wrong=wrong)


async def refused_edit(request: Request, wrong: Wrong) -> Response:
    """The same for one that is there, as the version that was edited: what somebody else changed is not undone."""
    async with read(request) as look:
        row = await get_schedule(look.tx, wrong.given.get("name", ""))
    values = _values(row) | {name: wrong.given[name] for name in FIELDS[1:] if name in wrong.given}
    return _editor(request, values, look.now, row=row, known=[], wrong=wrong)


def _editor(
    request: Request,
    values: dict[str, str],
    now: datetime,
    *,
    row: ScheduleRow | None,
    known: list[str],
    wrong: Wrong | None = None,
) -> Response:
    return show(
        request, "schedule_edit.html", now=now, values=values, schedule=row, preview=preview(values, now),
        misfires=MISFIRES, meanings=MEANINGS, known=known, before=_values(row) if row else None, wrong=wrong,
        status=wrong.status if wrong else 200,
    )  # fmt: skip


def preview(values: dict[str, str], now: datetime) -> Preview:
    """The next ten runs, with a note where the clocks change."""
    try:
        cron = Cron(values["cron"], values["timezone"], values["dst_gap"], values["dst_overlap"])
        return Preview(cron.describe(), cron.preview(now, PREVIEW))
    except (Invalid, NotFound) as error:
        return Preview(error=str(error))


def _values(row: ScheduleRow) -> dict[str, str]:
    given = {name: str(getattr(row, name)) for name in FIELDS}
    return given | {"payload": json.dumps(row.payload, default=float)}
