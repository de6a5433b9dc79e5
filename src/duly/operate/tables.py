"""What the migrations make of alerts, audit and processes, as SQLAlchemy tables."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from duly.tables import metadata

_Moment = DateTime(timezone=True)

alerts = Table(
    "alerts",
    metadata,
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("kind", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("count", Integer, nullable=False, server_default=text("1")),
    Column("raised_at", _Moment, nullable=False),
    Column("last_at", _Moment, nullable=False),
    Column("resolved_at", _Moment),
    PrimaryKeyConstraint("id", name="alerts_pkey"),
    CheckConstraint(
        "kind IN ('event_failed', 'dead_letter', 'schedule_broken', 'occurrences_missed', 'webhook_failed', "
        "'webhook_disabled', 'application')",
        name="alerts_kind_is_known",
    ),
)
Index("alerts_open", alerts.c.kind, alerts.c.subject, unique=True, postgresql_where=text("resolved_at IS NULL"))
Index("alerts_age", alerts.c.raised_at)

audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("at", _Moment, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("reason", Text),
    Column("before", JSONB),
    Column("after", JSONB),
    PrimaryKeyConstraint("id", name="audit_pkey"),
)
Index("audit_subject", audit.c.subject, audit.c.id)
Index("audit_age", audit.c.at)
Index(
    "audit_discarded",
    text("(before ->> 'aggregate_id')"),
    audit.c.id,
    postgresql_where=text("action = 'event.discarded'"),
)

processes = Table(
    "processes",
    metadata,
    Column("id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("names", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("version", Text, nullable=False),
    Column("started_at", _Moment, nullable=False),
    Column("seen_at", _Moment, nullable=False),
    PrimaryKeyConstraint("id", name="processes_pkey"),
    CheckConstraint("kind IN ('worker', 'relay', 'scheduler', 'receiver')", name="processes_kind_is_known"),
)
