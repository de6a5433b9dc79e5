"""Payments in the console: by state, and one with its history, its jobs and its events."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from apps.finance.payments import service, store
from apps.finance.payments.model import State
from apps.shared import money
from duly import Duly
from duly.console import Pages, Query, Section, read, show
from duly.operate.counts import CAP, Count
from duly.operate.events import list_events
from duly.operate.jobs import list_jobs

PAGE = 50
STATES = tuple(state.value for state in State)
COUNTED = (State.PENDING_REVIEW, State.PROCESSING, State.UNKNOWN, State.RETURNING)
pages = Pages()


def register(app: Duly) -> None:
    """Add the section."""
    app.include_console(Section("payments", "Payments", pages, templates=Path(__file__).parent / "templates"))


@pages.get("")
async def payments(request: Request) -> Response:
    """The newest first, by state; and how many are not over."""
    query = Query(request)
    state, id, before = query.choice("state", STATES), query.id("id"), query.id("after")
    if id is not None:
        return RedirectResponse(f"/console/payments/{id}", 303, headers={"Cache-Control": "no-store"})
    async with read(request) as look:
        found, following = await service.list_payments(
            look.tx, state=State(state) if state else None, before=before, limit=PAGE
        )
        counted = await store.count_by_state(look.tx, COUNTED, cap=CAP + 1)
        unmatched, _ = await service.list_unmatched(look.tx, limit=PAGE)
    return show(
        request, "payments_list.html", now=look.now, found=found, chosen=state, states=STATES,
        counts={state.value: Count.of(counted[state]) for state in COUNTED}, unmatched=unmatched,
        after=following, is_first=before is None, money=money.show,
    )  # fmt: skip


@pages.get("/{id}")
async def payment(request: Request, id: UUID) -> Response:
    """One, with everything that is known of it."""
    async with read(request) as look:
        found, history = await service.read_payment(look.tx, id)
        jobs = await list_jobs(look.tx, entity_id=str(id), limit=20)
        events = await list_events(look.tx, aggregate_id=str(id), limit=20)
    return show(
        request, "payments_one.html", now=look.now, one=found, history=history, jobs=jobs, events=events,
        money=money.show,
    )  # fmt: skip
