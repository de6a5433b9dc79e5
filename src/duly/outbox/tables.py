"""What the migrations make of the outbox, its lanes and the history of events, as SQLAlchemy tables."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    Connection,
    DateTime,
    Identity,
    Index,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    Uuid,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from duly.tables import metadata

_Moment = DateTime(timezone=True)

outbox = Table(
    "outbox",
    metadata,
    Column("seq", BigInteger, Identity(always=True), nullable=False),
    Column("id", Uuid, nullable=False),
    Column("type", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("aggregate_id", Text, nullable=False),
    Column(
        "lane",
        SmallInteger,
        Computed("(hashtextextended(aggregate_id, 0) & 63)::smallint", persisted=True),
    ),
    Column("payload", JSONB, nullable=False),
    Column("headers", JSONB, nullable=False, server_default=text("'{}'")),
    Column("created_at", _Moment, nullable=False),
    Column("attempts", SmallInteger, nullable=False, server_default=text("0")),
    Column("retry_at", _Moment),
    Column("failed_at", _Moment),
    Column("last_error", Text),
    Column("parked", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("seq", name="outbox_pkey"),
    CheckConstraint("type ~ '^[A-Za-z][A-Za-z0-9_.:-]{0,199}$'", name="outbox_type_is_named"),
    CheckConstraint("topic ~ '^[A-Za-z][A-Za-z0-9_.:-]{0,199}$'", name="outbox_topic_is_named"),
    CheckConstraint("length(aggregate_id) BETWEEN 1 AND 200", name="outbox_aggregate_is_short"),
    CheckConstraint("jsonb_typeof(payload) = 'object'", name="outbox_payload_is_object"),
    CheckConstraint("pg_column_size(payload) + pg_column_size(headers) <= 1048576", name="outbox_payload_is_bounded"),
    CheckConstraint("jsonb_typeof(headers) = 'object'", name="outbox_headers_is_object"),
    CheckConstraint(
        "failed_at IS NULL OR (last_error IS NOT NULL AND attempts > 0)", name="outbox_failure_is_explained"
    ),
    postgresql_with={
        "fillfactor": 80,
        "autovacuum_vacuum_scale_factor": 0.02,
        "autovacuum_vacuum_cost_delay": 0,
        "vacuum_truncate": "false",  # plans made on an empty queue must fit a full one
    },
)
Index("outbox_ready", outbox.c.lane, outbox.c.seq, postgresql_where=text("NOT parked AND failed_at IS NULL"))
Index(
    "outbox_blockers",
    outbox.c.aggregate_id,
    outbox.c.seq,
    postgresql_where=text("parked OR attempts > 0 OR retry_at IS NOT NULL"),
)
Index("outbox_retries", outbox.c.retry_at, postgresql_where=text("attempts > 0 AND failed_at IS NULL"))

lanes = Table(
    "lanes",
    metadata,
    Column("lane", SmallInteger, nullable=False, autoincrement=False),
    Column("lease_token", BigInteger),
    Column("leased_by", Text),
    Column("lease_expires_at", _Moment),
    PrimaryKeyConstraint("lane", name="lanes_pkey"),
    CheckConstraint("(lease_token IS NULL) = (lease_expires_at IS NULL)", name="lanes_lease_is_whole"),
    CheckConstraint("lane BETWEEN 0 AND 63", name="lanes_are_64"),
)

events = Table(
    "events",
    metadata,
    Column("id", Uuid, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("type", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("aggregate_id", Text, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("headers", JSONB, nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("published_at", _Moment, nullable=False),
    Column("attempts", SmallInteger, nullable=False),
    PrimaryKeyConstraint("id", name="events_pkey"),
    postgresql_partition_by="RANGE (id)",
)
Index("events_aggregate", events.c.aggregate_id, events.c.seq)


@event.listens_for(events, "after_create")
def _create_default_partition(_table: Table, connection: Connection, **_options: Any) -> None:
    """The partition of a day is made by duly.create_partitions; rows of no such day are in the default one."""
    connection.exec_driver_sql("CREATE TABLE duly.events_default PARTITION OF duly.events DEFAULT")
