"""What quality does because of an event."""

from __future__ import annotations

from apps.quality import service
from duly import Duly, Event, Tx


def register(app: Duly) -> None:
    """Add the consumers to an application."""

    @app.consumer("quality.audit", on="quality.nc.*")
    async def write_audit(event: Event, tx: Tx) -> None:
        await service.write_audit(tx, event)
