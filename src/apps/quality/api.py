"""The routes of quality."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict

from apps.quality import service
from apps.quality.model import Severity, Status
from apps.shared.text import Name, PageSize, Prose
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.http import RequestTx, Router

SCOPE = "quality"
Engineer = Annotated[Principal, require(SCOPE, "QUALITY_ENGINEER", "QUALITY_MANAGER")]
Manager = Annotated[Principal, require(SCOPE, "QUALITY_MANAGER")]

router = Router(prefix="/ncs", tags=["quality"])


class NewNonConformity(BaseModel):
    """What a supplier did wrong."""

    model_config = ConfigDict(extra="forbid")

    supplier_id: Name
    severity: Severity
    description: Prose


class NonConformityView(BaseModel):
    """A non-conformity."""

    model_config = ConfigDict(from_attributes=True)

    id: UUID
    supplier_id: str
    severity: Severity
    description: str
    status: Status
    created_by: str
    created_at: datetime
    closed_by: str | None
    closed_at: datetime | None


class AuditView(BaseModel):
    """One step of its history."""

    model_config = ConfigDict(from_attributes=True)

    event_id: UUID
    actor: str
    action: str
    entity_type: str
    entity_id: str
    meta_json: dict[str, Any]
    at: datetime


class NonConformityWithTrail(NonConformityView):
    """A non-conformity and its history, oldest first."""

    audit: list[AuditView]


class Page(BaseModel):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[NonConformityView]
    next: UUID | None


@router.post("", status_code=201)
async def create_nc(new: NewNonConformity, caller: Engineer, tx: RequestTx, response: Response) -> NonConformityView:
    """Open a non-conformity."""
    nc = await service.create_nc(
        tx, supplier_id=new.supplier_id, severity=new.severity, description=new.description, actor=caller.subject
    )
    response.headers["Location"] = f"/ncs/{nc.id}"
    return NonConformityView.model_validate(nc)


@router.patch("/{nc_id}/close")
async def close_nc(nc_id: UUID, caller: Manager, tx: RequestTx) -> NonConformityView:
    """Close an open one."""
    return NonConformityView.model_validate(await service.close_nc(tx, nc_id, actor=caller.subject))


@router.get("")
async def list_ncs(
    _caller: Engineer,
    tx: RequestTx,
    status: Status | None = None,
    severity: Severity | None = None,
    supplier_id: Annotated[Name | None, Query()] = None,
    before: UUID | None = None,
    limit: PageSize = 50,
) -> Page:
    """A page of them."""
    items, following = await service.list_ncs(
        tx, status=status, severity=severity, supplier_id=supplier_id, before=before, limit=limit
    )
    return Page(items=[NonConformityView.model_validate(item) for item in items], next=following)


@router.get("/{nc_id}")
async def read_nc(nc_id: UUID, _caller: Engineer, tx: RequestTx) -> NonConformityWithTrail:
    """One of them, with its history."""
    nc, trail = await service.read_nc(tx, nc_id)
    shown = NonConformityView.model_validate(nc)
    return NonConformityWithTrail(**shown.model_dump(), audit=[AuditView.model_validate(entry) for entry in trail])
