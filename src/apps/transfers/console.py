"""Transfers in the console: find one, see where it stands and what ends it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from apps.transfers import store
from apps.transfers.model import TransferStatus
from duly import Duly, Tx
from duly.console import Pages, Query, Section, read, show
from duly.errors import NotFound
from duly.operate.counts import CAP, Count
from duly.operate.jobs import list_jobs
from duly.schedules.edit import ScheduleRow, get_schedule

PAGE = 50
SWEEP = "transfers.expire-pending"
STATUSES = tuple(status.value for status in TransferStatus)
END = (datetime(9999, 1, 1, tzinfo=UTC), UUID(int=2**128 - 1))
pages = Pages()


def register(app: Duly) -> None:
    """Add the section."""
    app.include_console(Section("transfers", "Transfers", pages, templates=Path(__file__).parent / "templates"))


@pages.get("")
async def transfers(request: Request) -> Response:
    """The newest first, by status or product; an id of a transfer leads to it."""
    query = Query(request)
    status, id, before = query.choice("status", STATUSES), query.id("id"), query.place()
    async with read(request) as look:
        if id is not None and await store.find_transfer(look.tx, id) is not None:
            return RedirectResponse(f"/console/transfers/{id}", 303, headers={"Cache-Control": "no-store"})
        chosen = [TransferStatus(status)] if status else list(TransferStatus)
        found = await store.list_transfers(
            look.tx, statuses=chosen, product_id=id, before=before or END, limit=PAGE + 1
        )  # fmt: skip
        counted = await store.count_transfers(look.tx, cap=CAP + 1)
    last = found[PAGE - 1][0] if len(found) > PAGE else None
    return show(
        request, "transfers_list.html", now=look.now, transfers=found[:PAGE], chosen=status, id=id, statuses=STATUSES,
        counts={name: Count.of(number) for name, number in counted.items()},
        after=f"{last.created_at.isoformat()}_{last.id}" if last else None, is_first=before is None,
    )  # fmt: skip


@pages.get("/{id}")
async def transfer(request: Request, id: UUID) -> Response:
    """One, with its product, and what will end it."""
    async with read(request) as look:
        found = await store.find_transfer(look.tx, id)
        if found is None:
            raise NotFound("there is no such transfer")
        product = await store.find_product_details(look.tx, found.product_id, limit=20)
        others = await store.list_transfers(
            look.tx, statuses=list(TransferStatus), product_id=found.product_id, before=END, limit=20
        )
        jobs = await list_jobs(look.tx, entity_id=str(found.product_id), limit=20)
        sweep = await _sweep(look.tx)
    return show(
        request, "transfers_one.html", now=look.now, transfer=found, product=product, others=others, jobs=jobs,
        sweep=sweep,
    )  # fmt: skip


async def _sweep(tx: Tx) -> ScheduleRow | None:
    """The schedule that expires what nobody accepted, unless somebody removed it."""
    try:
        return await get_schedule(tx, SWEEP)
    except NotFound:
        return None
