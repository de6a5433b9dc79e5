"""The facts of quality; the only door for other contexts."""

from __future__ import annotations

from uuid import UUID

from duly import EventBody

TOPIC = "quality.events"


class NonConformityCreated(EventBody, type="quality.nc.created", topic=TOPIC, aggregate="nc_id"):
    """Somebody found that a supplier's delivery is not as agreed."""

    nc_id: UUID
    supplier_id: str
    severity: str
    actor: str


class NonConformityClosed(EventBody, type="quality.nc.closed", topic=TOPIC, aggregate="nc_id"):
    """The non-conformity is settled."""

    nc_id: UUID
    actor: str
