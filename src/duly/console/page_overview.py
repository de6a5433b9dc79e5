"""The first page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from duly.console.overview import read_pulse
from duly.console.record import read_audit
from duly.console.rollup import series
from duly.console.routes import Pages, for_anyone, read, show, signed_in
from duly.console.sessions import SESSION, SIGN_IN

if TYPE_CHECKING:
    from duly.console.app import Console

DONE, LOOKED_THROUGH = 5, 50  # of what people did last; that they came and went is in the audit
PATIENCE_SECONDS = 0.1  # for the charts; what is not counted by then comes live


def register(pages: Pages) -> None:
    """Add this route."""
    pages.get("")(overview)


@for_anyone
async def overview(request: Request) -> Response:
    """What needs attention, the charts, the queue by name, and what people did last.

    Who sees one section only begins there.
    """
    console: Console = request.app.state.console
    if not signed_in(request).may_look:
        return RedirectResponse(console.rights.home(signed_in(request)), 303, headers={"Cache-Control": "no-store"})
    await console.rollup.refresh(patience_seconds=PATIENCE_SECONDS)
    async with read(request) as look:
        pulse = await read_pulse(look)
        found = await read_audit(request, look, limit=LOOKED_THROUGH)
    audit = [one for one in found if one.subject not in (SESSION, SIGN_IN)][:DONE]
    points = console.rollup.points(look.now)
    return show(request, "overview.html", pulse=pulse, now=look.now, points=points, series=series(points), audit=audit)
