"""The use cases of quality: each gets a transaction and never ends it."""

from __future__ import annotations

from uuid import UUID

from apps.quality import store
from apps.quality.events import NonConformityClosed, NonConformityCreated
from apps.quality.model import (
    ENTITY_TYPE,
    AlreadyClosed,
    AuditEntry,
    NonConformity,
    NonConformityNotFound,
    Severity,
    Status,
)
from duly import Event, Tx, emit
from duly.ids import uuid7

TRAIL_LIMIT = 200


async def create_nc(tx: Tx, *, supplier_id: str, severity: Severity, description: str, actor: str) -> NonConformity:
    """Open a non-conformity (Q1)."""
    nc = await store.insert_nc(
        tx, nc_id=uuid7(), supplier_id=supplier_id, severity=severity, description=description, created_by=actor
    )
    await emit(
        tx, NonConformityCreated(nc_id=nc.id, supplier_id=nc.supplier_id, severity=nc.severity.value, actor=actor)
    )
    return nc


async def close_nc(tx: Tx, nc_id: UUID, *, actor: str) -> NonConformity:
    """Close it, once (Q2)."""
    closed = await store.close_nc(tx, nc_id, closed_by=actor)
    if closed is None:
        if await store.find_nc(tx, nc_id) is None:
            raise NonConformityNotFound(f"no non-conformity has the id {nc_id}")
        raise AlreadyClosed(f"{nc_id} was closed before")
    await emit(tx, NonConformityClosed(nc_id=nc_id, actor=actor))
    return closed


async def read_nc(tx: Tx, nc_id: UUID) -> tuple[NonConformity, list[AuditEntry]]:
    """One with its trail (Q4)."""
    nc = await store.find_nc(tx, nc_id)
    if nc is None:
        raise NonConformityNotFound(f"no non-conformity has the id {nc_id}")
    return nc, await store.find_audit(tx, entity_type=ENTITY_TYPE, entity_id=str(nc_id), limit=TRAIL_LIMIT)


async def list_ncs(
    tx: Tx,
    *,
    status: Status | None = None,
    severity: Severity | None = None,
    supplier_id: str | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> tuple[list[NonConformity], UUID | None]:
    """A page, and where the next one begins (Q4)."""
    found = await store.list_ncs(
        tx, status=status, severity=severity, supplier_id=supplier_id, before=before, limit=limit + 1
    )
    page = found[:limit]
    return page, page[-1].id if len(found) > limit else None


async def write_audit(tx: Tx, event: Event) -> None:
    """Turn an event into one row of the trail (Q3); the inbox sees to it that it is one."""
    details = {name: value for name, value in event.payload.items() if name not in {"actor", "nc_id"}}
    await store.insert_audit(
        tx,
        event_id=event.id,
        actor=event.payload["actor"],
        action=event.type,
        entity_type=ENTITY_TYPE,
        entity_id=event.aggregate_id,
        meta=details,
        at=event.created_at,
    )
