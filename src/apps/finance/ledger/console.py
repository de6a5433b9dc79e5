"""Accounts and the journal in the console: how an account stands, its statement, and a transaction with its lines."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from apps.finance.ledger import service
from apps.shared import money
from duly import Duly
from duly.console import Pages, Query, Section, read, show

PAGE = 50
pages = Pages()


def register(app: Duly) -> None:
    """Add the section."""
    app.include_console(Section("accounts", "Accounts", pages, templates=Path(__file__).parent / "templates"))


@pages.get("")
async def accounts(request: Request) -> Response:
    """The newest first, each with how it stands."""
    query = Query(request)
    id, before = query.id("id"), query.id("after")
    if id is not None:
        return RedirectResponse(f"/console/accounts/{id}", 303, headers={"Cache-Control": "no-store"})
    async with read(request) as look:
        found, following = await service.list_standings(look.tx, before=before, limit=PAGE)
    return show(
        request, "accounts_list.html", now=look.now, found=found, after=following, is_first=before is None,
        money=money.show,
    )  # fmt: skip


@pages.get("/{id}")
async def account(request: Request, id: UUID) -> Response:
    """One, with what is on hold and a page of its statement."""
    before = Query(request).number("after")
    async with read(request) as look:
        found = await service.read_account(look.tx, id)
        balance = await service.get_balance(look.tx, id)
        holds = await service.list_active_holds(look.tx, id, limit=PAGE)
        lines, following = await service.list_entries(look.tx, id, before=before, limit=PAGE)
    return show(
        request, "accounts_one.html", now=look.now, account=found, balance=balance, holds=holds, lines=lines,
        after=following, is_first=before is None, money=money.show,
    )  # fmt: skip


@pages.get("/transactions/{id}")
async def transaction(request: Request, id: UUID) -> Response:
    """One of the journal, with its lines."""
    async with read(request) as look:
        found = await service.read_transaction(look.tx, id)
    return show(request, "accounts_transaction.html", now=look.now, one=found, money=money.show)
