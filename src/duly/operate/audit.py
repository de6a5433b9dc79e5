"""Who did what and why: the record that every action leaves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from duly.db import Tx, fetch
from duly.operate.arguments import filter_text, page_size
from duly.operate.sql import LIST_AUDIT, LIST_AUDIT_OF_SUBJECT


@dataclass(frozen=True)
class AuditEntry:
    """One action. ``before`` and ``after`` are JSON texts, exactly as they were stored."""

    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    reason: str | None
    before: str | None
    after: str | None


async def list_audit(
    tx: Tx, *, subject: str | None = None, before: int | None = None, limit: int = 50
) -> list[AuditEntry]:
    """What was done, newest first; a subject is ``job:7``, ``event:UUID``, ``schedule:NAME`` or ``alert:3``."""
    subject = filter_text("the subject", subject)
    values = {"before": before, "limit": page_size(limit)}
    if subject is None:
        return [AuditEntry(*row) for row in await fetch(tx, LIST_AUDIT, **values)]
    return [AuditEntry(*row) for row in await fetch(tx, LIST_AUDIT_OF_SUBJECT, subject=subject, **values)]
