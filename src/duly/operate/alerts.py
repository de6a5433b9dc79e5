"""What the engine, or an application, wants a person to look at."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from duly.db import Tx, fetch
from duly.errors import Conflict, NotFound
from duly.operate import sql
from duly.operate.arguments import page_size, row_id, signed


@dataclass(frozen=True)
class Alert:
    """Something that needs attention; ``count`` says how often it was raised while open."""

    id: int
    kind: str
    subject: str
    message: str
    count: int
    raised_at: datetime
    last_at: datetime
    resolved_at: datetime | None


async def list_alerts(
    tx: Tx, *, open_only: bool = True, before: tuple[datetime, int] | None = None, limit: int = 100
) -> list[Alert]:
    """One page, newest first; the next page is ``before=(last.raised_at, last.id)``."""
    statement = sql.LIST_OPEN_ALERTS if open_only else sql.LIST_ALERTS
    before_at, before_id = before or (None, None)
    rows = await fetch(tx, statement, before_at=before_at, before_id=before_id, limit=page_size(limit))
    return [Alert(*row) for row in rows]


async def raise_alert(tx: Tx, *, subject: str, message: str) -> None:
    """An application wants a person to look at something; while it is open, the same subject only counts up."""
    await fetch(tx, sql.RAISE_ALERT, subject=subject, message=message)


async def resolve_alert(tx: Tx, id: int, *, actor: str, reason: str | None = None) -> None:
    """Close an alert; the same trouble opens a new one."""
    if await fetch(tx, sql.RESOLVE_ALERT, id=row_id("alert", id), **signed(actor=actor, reason=reason)):
        return
    if await fetch(tx, sql.FIND_ALERT, id=id):
        raise Conflict(f"alert {id} is resolved already")
    raise NotFound(f"no alert has the id {id}")


async def resolve_idle_dead_letter_alerts(tx: Tx, *, names: list[str] | None = None) -> None:
    """Resolve the alerts of job names (None: all) that have no dead letter left; part of another, audited action."""
    await fetch(tx, sql.LOCK_DEAD_LETTER_ALERTS, names=names)
    await fetch(tx, sql.RESOLVE_DEAD_LETTER_ALERTS, names=names)
