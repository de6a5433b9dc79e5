"""All pages of the console, in the order in which an address is looked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response

from duly.console import (
    page_actions,
    page_entity,
    page_events,
    page_history,
    page_jobs,
    page_overview,
    page_schedules,
    page_session,
    page_watch,
    page_webhooks,
)
from duly.console.routes import MOUNT, Pages
from duly.errors import NotFound

if TYPE_CHECKING:
    from duly.console.app import Console


def create_pages(console: Console) -> Pages:
    """One router: the engine's pages, the applications' sections, and a page for every address that is none."""
    pages = Pages(prefix=MOUNT)
    for family in (
        page_session, page_overview, page_jobs, page_schedules, page_history, page_events, page_entity, page_watch,
        page_webhooks, page_actions,
    ):  # fmt: skip
        family.register(pages)
    console.rights.add_forms(pages.forms)
    for section in console.sections:
        pages.include_router(section.router, prefix=f"/{section.name}")

    @pages.get("/{rest:path}")
    async def nothing(request: Request, rest: str) -> Response:
        raise NotFound("there is no page at this address")

    return pages
