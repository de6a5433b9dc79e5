"""What ran, and what failed for good."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fastapi import Request
from fastapi.responses import Response

from duly.console import sql
from duly.console.routes import BadQuery, Pages, Query, read, read_moment, show
from duly.ids import parse_uuid
from duly.operate.arguments import LARGEST_ID
from duly.operate.dead_letters import DeadLetter, count_dead_letters, group_dead_letters
from duly.operate.jobs import Execution, list_executions

if TYPE_CHECKING:
    from duly.console.app import Look

PAGE = 50
NAMES_LIMIT = 200
SCAN_BUDGET = 50_000
DEAD_SCAN = 5_000
JOB_SCAN = 1_000
OUTCOMES = ("done", "duplicate", "retried", "snoozed", "cancelled", "buried", "lost", "released")


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/history")(history)
    pages.get("/dead-letters")(dead_letters)


async def history(request: Request) -> Response:
    """Every run, the newest first."""
    query = Query(request)
    filters: dict[str, Any] = {
        "name": query.text("name"),
        "entity": query.text("entity"),
        "job": query.number("job"),
        "outcome": query.choice("outcome", OUTCOMES),
    }
    since, until = query.moment("since"), query.moment("until")
    async with read(request) as look:
        found = await _runs(look, query, since=since, until=until, **filters)
        known, zones = await look.names(), await look.zones()
    after = None
    if len(found) > PAGE:
        found = found[:PAGE]
        after = f"{found[-1].completed_at.isoformat()}_{found[-1].execution_id}"
    return show(
        request, "history.html", now=look.now, runs=found, filters=filters, since=query.text("since"),
        until=query.text("until"), after=after, outcomes=OUTCOMES, is_first=query.after() is None, zones=zones,
        known=known,
    )  # fmt: skip


async def _runs(
    look: Look,
    query: Query,
    *,
    name: str | None,
    entity: str | None,
    job: int | None,
    outcome: str | None,
    since: datetime | None,
    until: datetime | None,
) -> list[Execution]:
    before = _before_run(query)
    if job is not None:
        is_filtered = (outcome, since, until) != (None, None, None)
        scan = JOB_SCAN if is_filtered else PAGE + 1
        found = await list_executions(look.tx, job_id=job or LARGEST_ID, before=before, limit=scan)
        return [
            one for one in found
            if outcome in (None, one.outcome) and (since is None or one.completed_at >= since)
            and (until is None or one.completed_at <= until)
        ][: PAGE + 1]  # fmt: skip
    values: dict[str, Any] = {"since": since, "until": until, "outcome": outcome, "limit": PAGE + 1}
    values["before_at"], values["before_id"] = before or (None, None)
    if entity is not None:
        rows = await look.rows(
            sql.LIST_HISTORY_OF_ENTITY, entity_id=entity, name=name, scan=SCAN_BUDGET if outcome else PAGE + 1, **values
        )
        return [Execution(*row) for row in rows]
    names = [name] if name else [row[0] for row in await look.rows(sql.FIND_RUN_NAMES, names_limit=NAMES_LIMIT)]
    scan = PAGE + 1 if outcome is None else max(PAGE + 1, SCAN_BUDGET // max(1, len(names)))
    return [Execution(*row) for row in await look.rows(sql.LIST_HISTORY, names=names, scan=scan, **values)]


def _before_run(query: Query) -> tuple[datetime, UUID] | None:
    given = query.after()
    if given is None:
        return None
    at, id = read_moment(given[0], naive=False), parse_uuid(given[1])
    if at is None or id is None:
        raise BadQuery("after is what the link to the next page says")
    return at, id


async def dead_letters(request: Request) -> Response:
    """By name and kind of error; with a filter, one by one."""
    query = Query(request)
    filters = {"name": query.text("name"), "kind": query.text("kind"), "entity": query.text("entity")}
    is_filtered = any(filters.values())
    async with read(request) as look:
        groups = [] if is_filtered else await group_dead_letters(look.tx)
        found = await _letters(look, query, **filters)
        known, zones = await look.names(), await look.zones()
        count = None
        if filters["name"] and not filters["entity"]:
            count = await count_dead_letters(look.tx, name=filters["name"], error_kind=filters["kind"])
    after = None
    if len(found) > PAGE:
        found = found[:PAGE]
        after = f"{found[-1].buried_at.isoformat()}_{found[-1].id}"
    return show(
        request, "dead_letters.html", now=look.now, kinds=groups, letters=found, filters=filters, after=after,
        is_filtered=is_filtered, count=count, is_first=query.after() is None, zones=zones,
        known=known,
    )  # fmt: skip


async def _letters(
    look: Look, query: Query, *, name: str | None, kind: str | None, entity: str | None
) -> list[DeadLetter]:
    before_at, before_id = query.row_place() or (None, None)
    values: dict[str, Any] = {"before_at": before_at, "before_id": before_id, "error_kind": kind, "limit": PAGE + 1}
    values["scan"] = PAGE + 1 if kind is None else DEAD_SCAN
    if entity is not None:
        rows = await look.rows(sql.LIST_DEAD_LETTERS_OF_ENTITY, entity_id=entity, name=name, **values)
    elif name is not None:
        rows = await look.rows(sql.LIST_DEAD_LETTERS_OF_NAME, name=name, **values)
    else:
        rows = await look.rows(sql.LIST_DEAD_LETTERS, **values)
    return [DeadLetter(*row) for row in rows]
