"""What a non-conformity is, and what may happen to it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from duly.errors import Conflict, NotFound

ENTITY_TYPE = "nonconformity"


class Severity(StrEnum):
    """How bad it is."""

    LOW = "LOW"
    MEDIUM = "MEDIUM"
    HIGH = "HIGH"
    CRITICAL = "CRITICAL"


class Status(StrEnum):
    """Where it stands."""

    OPEN = "OPEN"
    CLOSED = "CLOSED"


class NonConformityNotFound(NotFound):
    """There is no such non-conformity."""


class AlreadyClosed(Conflict):
    """The non-conformity is closed already."""


@dataclass(frozen=True)
class NonConformity:
    """One finding about one supplier."""

    id: UUID
    supplier_id: str
    severity: Severity
    description: str
    status: Status
    created_by: str
    created_at: datetime
    closed_by: str | None
    closed_at: datetime | None


@dataclass(frozen=True)
class AuditEntry:
    """Who did what to it, and when."""

    id: int
    event_id: UUID
    actor: str
    action: str
    entity_type: str
    entity_id: str
    meta_json: dict[str, Any]
    at: datetime
