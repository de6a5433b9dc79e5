"""Who did what and why: the record that every action leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from duly.db import Tx, fetch
from duly.operate.arguments import TEXT_LIMIT, filter_text, page_size, signed
from duly.operate.sql import INSERT_AUDIT, LIST_AUDIT, LIST_AUDIT_OF_SUBJECT


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


async def write_audit(
    tx: Tx,
    *,
    actor: str,
    action: str,
    subject: str,
    reason: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """The record of an application's own action, in the transaction that does it; ``before`` and ``after`` are JSON.

    An action is past tense, such as ``order.closed``, and a subject is ``order:7``. A long actor is cut.
    """
    await fetch(
        tx, INSERT_AUDIT, **signed(actor=actor[:TEXT_LIMIT], reason=reason), action=action, subject=subject,
        before=json.dumps(before, default=str) if before is not None else None,
        after=json.dumps(after, default=str) if after is not None else None,
    )  # fmt: skip
