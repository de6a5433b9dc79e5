"""What the migrations make of the consumers, their inbox and what brokers bring, as SQLAlchemy tables."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
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
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

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
    Column("via", Text),
    Column("via_since", _Moment),
    PrimaryKeyConstraint("name", name="consumers_pkey"),
    CheckConstraint("name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,89}$'", name="consumers_is_named"),
    CheckConstraint("cardinality(patterns) BETWEEN 1 AND 100", name="consumers_has_patterns"),
    CheckConstraint("via ~ '^[a-z][a-z0-9_-]{0,39}$'", name="consumers_via_is_named"),
    CheckConstraint("(via IS NULL) = (via_since IS NULL)", name="consumers_via_has_a_start"),
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

received = Table(
    "received",
    metadata,
    Column("id", Uuid, nullable=False),
    Column("via", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("aggregate_id", Text, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("headers", JSONB, nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("received_at", _Moment, nullable=False),
    Column("position", Text, nullable=False),
    PrimaryKeyConstraint("id", "via", name="received_pkey"),
    CheckConstraint("via ~ '^[a-z][a-z0-9_-]{0,39}$'", name="received_via_is_named"),
    CheckConstraint("length(type) BETWEEN 1 AND 200", name="received_type_is_short"),
    CheckConstraint("length(topic) BETWEEN 1 AND 300", name="received_topic_is_short"),
    CheckConstraint("length(aggregate_id) BETWEEN 1 AND 200", name="received_aggregate_is_short"),
    CheckConstraint(
        "jsonb_typeof(payload) = 'object' AND jsonb_typeof(headers) = 'object'", name="received_payload_is_object"
    ),
    CheckConstraint("pg_column_size(payload) + pg_column_size(headers) <= 8388608", name="received_payload_is_bounded"),
    CheckConstraint("length(position) <= 300", name="received_position_is_short"),
)
Index("received_age", received.c.received_at, postgresql_using="brin")

cursors = Table(
    "cursors",
    metadata,
    Column("via", Text, nullable=False),
    Column("shard", Text, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("moved_at", _Moment, nullable=False),
    PrimaryKeyConstraint("via", "shard", name="cursors_pkey"),
    CheckConstraint("via ~ '^[a-z][a-z0-9_-]{0,39}$'", name="cursors_via_is_named"),
    CheckConstraint("length(shard) BETWEEN 1 AND 300", name="cursors_shard_is_short"),
    CheckConstraint("position >= 0", name="cursors_count_up"),
)
