"""What the migrations make of the consumers and their inbox, as SQLAlchemy tables."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from duly.tables import metadata

_Moment = DateTime(timezone=True)

consumers = Table(
    "consumers",
    metadata,
    Column("name", Text, nullable=False),
    Column("patterns", ARRAY(Text), nullable=False),
    Column("ordered", Boolean, nullable=False, server_default=text("false")),
    Column("enabled", Boolean, nullable=False, server_default=text("true")),
    Column("registered_at", _Moment, nullable=False),
    PrimaryKeyConstraint("name", name="consumers_pkey"),
    CheckConstraint("name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,89}$'", name="consumers_is_named"),
    CheckConstraint("cardinality(patterns) BETWEEN 1 AND 100", name="consumers_has_patterns"),
)

processed_events = Table(
    "processed_events",
    metadata,
    Column("consumer", Text, nullable=False),
    Column("event_id", Uuid, nullable=False),
    Column("processed_at", _Moment, nullable=False),
    PrimaryKeyConstraint("consumer", "event_id", name="processed_events_pkey"),
)
Index("processed_events_age", processed_events.c.processed_at, postgresql_using="brin")
