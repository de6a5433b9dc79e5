"""The tables of quality, and every statement on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    MetaData,
    Table,
    Text,
    Uuid,
    insert,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from apps.quality.model import AuditEntry, NonConformity, Severity, Status
from duly import Tx

metadata = MetaData(schema="quality")

nonconformities = Table(
    "nonconformities",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("supplier_id", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'OPEN'")),
    Column("created_by", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("closed_by", Text),
    Column("closed_at", DateTime(timezone=True)),
    CheckConstraint("severity IN ('LOW', 'MEDIUM', 'HIGH', 'CRITICAL')", name="nonconformities_severity_is_known"),
    CheckConstraint("status IN ('OPEN', 'CLOSED')", name="nonconformities_status_is_known"),
    CheckConstraint(
        "(status = 'CLOSED') = (closed_at IS NOT NULL) AND (closed_at IS NULL) = (closed_by IS NULL)",
        name="nonconformities_closing_is_whole",
    ),
)
Index("nonconformities_supplier", nonconformities.c.supplier_id, nonconformities.c.id)
Index("nonconformities_status", nonconformities.c.status, nonconformities.c.severity, nonconformities.c.id)

audit_log = Table(
    "audit_log",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("event_id", Uuid, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("entity_type", Text, nullable=False),
    Column("entity_id", Text, nullable=False),
    Column("meta_json", JSONB, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False),
)
Index("audit_log_event", audit_log.c.event_id, unique=True)
Index("audit_log_entity", *(audit_log.c[name] for name in ("entity_type", "entity_id", "at", "event_id")))

INSERT_NC = text("""
INSERT INTO quality.nonconformities (id, supplier_id, severity, description, created_by, created_at)
VALUES (:id, :supplier_id, :severity, :description, :created_by, duly.now())
RETURNING *
""")
CLOSE_NC = text("""
UPDATE quality.nonconformities SET status = 'CLOSED', closed_by = :closed_by, closed_at = duly.now()
WHERE id = :id AND status = 'OPEN'
RETURNING *
""")
# Along nonconformities_status for each status and severity: each scan ends with its page.
LIST_BY_STATUS = text("""
SELECT n.* FROM unnest(CAST(:statuses AS text[])) AS s(status)
CROSS JOIN unnest(CAST(:severities AS text[])) AS v(severity)
CROSS JOIN LATERAL (SELECT o.* FROM quality.nonconformities o
                    WHERE o.status = s.status AND o.severity = v.severity AND o.id < CAST(:before AS uuid)
                    ORDER BY o.id DESC LIMIT :limit) AS n
ORDER BY n.id DESC LIMIT :limit
""")
COUNT_BY_STATUS = text("""
SELECT s.status, (SELECT count(*) FROM (
    SELECT 1 FROM quality.nonconformities n WHERE n.status = s.status LIMIT :cap) AS counted) AS number
FROM unnest(CAST(:statuses AS text[])) AS s(status)
""")
FIND_AUDIT = text("""
SELECT * FROM quality.audit_log WHERE entity_type = :entity_type AND entity_id = :entity_id
ORDER BY at, event_id LIMIT :limit
""")


async def insert_nc(
    tx: Tx, *, nc_id: UUID, supplier_id: str, severity: Severity, description: str, created_by: str
) -> NonConformity:
    """Write a new, open one."""
    values = {"id": nc_id, "supplier_id": supplier_id, "severity": severity.value, "description": description}
    row = (await tx.execute(INSERT_NC, {**values, "created_by": created_by})).mappings().one()
    return _nc(row)


async def close_nc(tx: Tx, nc_id: UUID, *, closed_by: str) -> NonConformity | None:
    """Close it if it is open; None when nothing was to close."""
    row = (await tx.execute(CLOSE_NC, {"id": nc_id, "closed_by": closed_by})).mappings().one_or_none()
    return _nc(row) if row else None


async def find_nc(tx: Tx, nc_id: UUID) -> NonConformity | None:
    """One by its id."""
    row = (await tx.execute(select(nonconformities).where(nonconformities.c.id == nc_id))).mappings().one_or_none()
    return _nc(row) if row else None


async def list_ncs(
    tx: Tx,
    *,
    status: Status | None,
    severity: Severity | None,
    supplier_id: str | None,
    before: UUID | None,
    limit: int,
) -> list[NonConformity]:
    """The newest first; ids are ordered by time."""
    table = nonconformities.c
    query = select(nonconformities).order_by(table.id.desc()).limit(limit)
    if status is not None:
        query = query.where(table.status == status.value)
    if severity is not None:
        query = query.where(table.severity == severity.value)
    if supplier_id is not None:
        query = query.where(table.supplier_id == supplier_id)
    if before is not None:
        query = query.where(table.id < before)
    return [_nc(row) for row in (await tx.execute(query)).mappings()]


async def list_by_status(
    tx: Tx, *, statuses: Sequence[Status], severities: Sequence[Severity], before: UUID, limit: int
) -> list[NonConformity]:
    """The newest first, of any number of them."""
    values = {"statuses": [one.value for one in statuses], "severities": [one.value for one in severities]}
    found = await tx.execute(LIST_BY_STATUS, {**values, "before": before, "limit": limit})
    return [_nc(row) for row in found.mappings()]


async def count_by_status(tx: Tx, *, cap: int) -> dict[str, int]:
    """How many there are of each status, counted no further than this."""
    found = await tx.execute(COUNT_BY_STATUS, {"statuses": [one.value for one in Status], "cap": cap})
    return {row["status"]: row["number"] for row in found.mappings()}


async def insert_audit(
    tx: Tx,
    *,
    event_id: UUID,
    actor: str,
    action: str,
    entity_type: str,
    entity_id: str,
    meta: Mapping[str, Any],
    at: datetime,
) -> None:
    """Write down one event of the trail."""
    await tx.execute(
        insert(audit_log).values(
            event_id=event_id, actor=actor, action=action, entity_type=entity_type, entity_id=entity_id,
            meta_json=meta, at=at,
        )
    )  # fmt: skip


async def find_audit(tx: Tx, *, entity_type: str, entity_id: str, limit: int) -> list[AuditEntry]:
    """The trail of one entity, in the order in which things happened."""
    found = await tx.execute(FIND_AUDIT, {"entity_type": entity_type, "entity_id": entity_id, "limit": limit})
    return [AuditEntry(**row) for row in found.mappings()]


def _nc(row: Mapping[Any, Any]) -> NonConformity:
    return NonConformity(**{**row, "severity": Severity(row["severity"]), "status": Status(row["status"])})
