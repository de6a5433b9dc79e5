"""Work that failed for good: look at it, put it back into the queue, or throw it away."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from duly.db import Tx, fetch, request_poke
from duly.errors import NotFound
from duly.failpoints import failpoint
from duly.operate import sql
from duly.operate.alerts import resolve_idle_dead_letter_alerts
from duly.operate.arguments import bulk_size, filter_text, page_size, row_id, signed
from duly.operate.counts import CAP, NAMES_LIMIT, Count

GROUP_CAP = 1_000


@dataclass(frozen=True)
class DeadLetter:
    """A job that no worker will touch until an operator decides."""

    id: int
    name: str
    entity_id: str | None
    priority: int
    due_at: datetime
    created_at: datetime
    retry_count: int
    max_retries: int | None
    source: str
    event_id: UUID | None
    order_key: str | None
    correlation_id: UUID | None
    causation_id: UUID | None
    reason: str
    error: str
    error_kind: str
    buried_at: datetime


@dataclass(frozen=True)
class DeadLetterGroup:
    """The dead letters of one name that failed in the same way."""

    name: str
    error_kind: str
    count: Count
    newest_at: datetime
    newest_error: str


@dataclass(frozen=True)
class Chosen:
    """A dead letter that this transaction holds."""

    id: int
    name: str


async def retry_dead_letter(tx: Tx, id: int, *, actor: str, reason: str | None = None) -> None:
    """Put one back into the queue under its own id, due now, with all its retries."""
    signature = signed(actor=actor, reason=reason)
    await _retry(tx, await _lock_one(tx, id), signature)


async def retry_dead_letters(
    tx: Tx,
    *,
    name: str | None = None,
    error_kind: str | None = None,
    limit: int = 1_000,
    actor: str,
    reason: str | None = None,
) -> int:
    """Put back up to ``limit`` of them, oldest first; how many. One audit row for each."""
    signature = signed(actor=actor, reason=reason)
    chosen = await _choose(tx, name=name, error_kind=error_kind, limit=limit)
    if chosen:
        await _retry(tx, chosen, signature)
    return len(chosen)


async def discard_dead_letter(tx: Tx, id: int, *, actor: str, reason: str | None = None) -> None:
    """Throw one away; the audit row keeps all of it, and the next job of its order may run."""
    signature = signed(actor=actor, reason=reason)
    await _discard(tx, await _lock_one(tx, id), signature)


async def discard_dead_letters(
    tx: Tx,
    *,
    name: str | None = None,
    error_kind: str | None = None,
    limit: int = 1_000,
    actor: str,
    reason: str | None = None,
) -> int:
    """Throw away up to ``limit`` of them, oldest first; how many. One audit row for each."""
    signature = signed(actor=actor, reason=reason)
    chosen = await _choose(tx, name=name, error_kind=error_kind, limit=limit)
    if chosen:
        await _discard(tx, chosen, signature)
    return len(chosen)


async def list_dead_letters(
    tx: Tx,
    *,
    name: str | None = None,
    entity_id: str | None = None,
    before: tuple[datetime, int] | None = None,
    limit: int = 50,
) -> list[DeadLetter]:
    """One page, newest first; the next page is ``before=(last.buried_at, last.id)``."""
    name, entity_id = filter_text("the name", name), filter_text("the entity id", entity_id)
    values: dict[str, Any] = {"limit": page_size(limit)}
    values["before_at"], values["before_id"] = before or (None, None)
    if entity_id is not None:
        rows = await fetch(tx, sql.LIST_DEAD_LETTERS_OF_ENTITY, entity_id=entity_id, name=name, **values)
    elif name is not None:
        rows = await fetch(tx, sql.LIST_DEAD_LETTERS_OF_NAME, name=name, **values)
    else:
        rows = await fetch(tx, sql.LIST_DEAD_LETTERS, **values)
    return [DeadLetter(*row) for row in rows]


async def find_dead_letter(tx: Tx, id: int) -> DeadLetter | None:
    """The dead letter with this id, if there is one."""
    rows = await fetch(tx, sql.FIND_DEAD_LETTER, id=id, before_at=None, before_id=None)
    return DeadLetter(*rows[0]) if rows else None


async def group_dead_letters(tx: Tx) -> list[DeadLetterGroup]:
    """By name and kind of error, the newest group first; of each name the newest 1,001 are looked at."""
    rows = await fetch(tx, sql.GROUP_DEAD_LETTERS, cap=GROUP_CAP + 1, names_limit=NAMES_LIMIT)
    return [
        DeadLetterGroup(name, kind, Count.of(counted, cap=GROUP_CAP, more=looked_at > GROUP_CAP), newest_at, error)
        for name, kind, counted, newest_at, error, looked_at in rows
    ]


async def count_dead_letters(tx: Tx, *, name: str | None = None, error_kind: str | None = None) -> Count:
    """How many a bulk action with these filters would find."""
    name, error_kind = filter_text("the name", name), filter_text("the kind of error", error_kind)
    rows = await fetch(tx, sql.COUNT_DEAD_LETTERS, name=name, error_kind=error_kind, cap=CAP + 1)
    return Count.of(rows[0][0])


async def _lock_one(tx: Tx, id: int) -> list[Chosen]:
    rows = await fetch(tx, sql.LOCK_DEAD_LETTER, id=row_id("dead letter", id))
    if not rows:
        raise NotFound(f"no dead letter has the id {id}: it was retried, discarded, or never was one")
    return [Chosen(*row) for row in rows]


async def _choose(tx: Tx, *, name: str | None, error_kind: str | None, limit: int) -> list[Chosen]:
    name, error_kind = filter_text("the name", name), filter_text("the kind of error", error_kind)
    values = {"error_kind": error_kind, "limit": bulk_size(limit)}
    if name is None:
        rows = await fetch(tx, sql.CHOOSE_DEAD_LETTERS, **values)
    else:
        rows = await fetch(tx, sql.CHOOSE_DEAD_LETTERS_OF_NAME, name=name, **values)
    return [Chosen(*row) for row in rows]


async def _retry(tx: Tx, chosen: list[Chosen], signature: dict[str, str | None]) -> None:
    """Insert before deleting: the trigger that lets the next of an order go must see the one that came back."""
    ids = [one.id for one in chosen]
    await fetch(tx, sql.LOCK_ORDER_OF_DEAD_LETTERS, ids=ids)
    await fetch(tx, sql.REQUEUE_DEAD_LETTERS, ids=ids)
    failpoint("requeue.inserted")
    await fetch(tx, sql.REMOVE_RETRIED_DEAD_LETTERS, ids=ids, **signature)
    await _settle(tx, chosen)


async def _discard(tx: Tx, chosen: list[Chosen], signature: dict[str, str | None]) -> None:
    ids = [one.id for one in chosen]
    await fetch(tx, sql.LOCK_ORDER_OF_DEAD_LETTERS, ids=ids)
    await fetch(tx, sql.DISCARD_DEAD_LETTERS, ids=ids, **signature)
    await _settle(tx, chosen)


async def _settle(tx: Tx, chosen: list[Chosen]) -> None:
    """The next job of an order may run now, and a name without dead letters needs no alert."""
    await resolve_idle_dead_letter_alerts(tx, names=sorted({one.name for one in chosen}))
    request_poke(tx, "jobs")
