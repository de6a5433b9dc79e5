"""Orders in the console: by status or customer, and one with its payment, timers and events."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from apps.commerce import store
from apps.commerce.model import Order, OrderNotFound, OrderStatus
from apps.shared import money
from duly import Duly
from duly.console import BadQuery, Pages, Query, Section, read, show
from duly.ids import parse_uuid
from duly.operate.counts import CAP, Count
from duly.operate.events import list_events
from duly.operate.jobs import list_executions, list_jobs

if TYPE_CHECKING:
    from duly.console.app import Look

PAGE = 50
SCAN = 2_000  # of the newest, that are looked through for a status
STATUSES = tuple(status.value for status in OrderStatus)
FIRST = (datetime(1, 1, 2, tzinfo=UTC), UUID(int=0))
LAST_ID = UUID(int=2**128 - 1)
pages = Pages()


def register(app: Duly) -> None:
    """Add the section."""
    app.include_console(Section("orders", "Orders", pages, templates=Path(__file__).parent / "templates"))


@pages.get("")
async def orders(request: Request) -> Response:
    """The newest first; what waits for its payment, the soonest due first."""
    query = Query(request)
    status, customer, id = query.choice("status", STATUSES), query.text("customer"), query.id("id")
    if id is not None:
        return RedirectResponse(f"/console/orders/{id}", 303, headers={"Cache-Control": "no-store"})
    async with read(request) as look:
        if status == OrderStatus.AWAITING_PAYMENT and customer is None:
            found, after = await _unpaid(look, query)
        else:
            found, after = await _newest(look, query, status, customer)
        unpaid, overdue = await store.count_unpaid(look.tx, cap=CAP + 1)
    return show(
        request, "orders_list.html", now=look.now, orders=found, chosen=status, customer=customer, statuses=STATUSES,
        unpaid=Count.of(unpaid), overdue=Count.of(overdue), after=after, is_first=query.text("after") is None,
        money=money.show,
    )  # fmt: skip


async def _unpaid(look: Look, query: Query) -> tuple[list[Order], str | None]:
    found = await store.list_unpaid(look.tx, after=query.place() or FIRST, limit=PAGE + 1)
    if len(found) <= PAGE:
        return found, None
    return found[:PAGE], f"{found[PAGE - 1].due_at.isoformat()}_{found[PAGE - 1].id}"


async def _newest(look: Look, query: Query, status: str | None, customer: str | None) -> tuple[list[Order], str | None]:
    given = query.text("after")
    before = parse_uuid(given) if given is not None else LAST_ID
    if before is None:
        raise BadQuery("after is what the link to the next page says")
    limit = SCAN if status else PAGE + 1
    looked = await store.list_newest(look.tx, customer_id=customer, before=before, limit=limit)
    found = [order for order in looked if status in (None, order.status.value)]
    if len(found) > PAGE:
        return found[:PAGE], str(found[PAGE - 1].id)
    return found, str(looked[-1].id) if status and len(looked) == limit else None


@pages.get("/{id}")
async def order(request: Request, id: UUID) -> Response:
    """One, with everything that a person at the phone is asked about."""
    async with read(request) as look:
        found = await store.find_order(look.tx, id)
        if found is None:
            raise OrderNotFound("there is no such order")
        timers = await list_jobs(look.tx, entity_id=str(id), limit=20)
        runs = await list_executions(look.tx, entity_id=str(id), limit=20)
        events = await list_events(look.tx, aggregate_id=str(id), limit=20)
    return show(
        request, "orders_one.html", now=look.now, order=found[0], timers=timers, runs=runs, events=events,
        money=money.show,
    )  # fmt: skip
