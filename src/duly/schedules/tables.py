"""The table of schedules as SQLAlchemy sees it; the migration makes it, and a test compares the two."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from duly.tables import metadata

schedules = Table(
    "schedules",
    metadata,
    Column("name", Text, primary_key=True),
    Column("cron", Text, nullable=False),
    Column("timezone", Text, nullable=False, server_default="UTC"),
    Column("enabled", Boolean, nullable=False, server_default=text("true")),
    Column("max_retries", SmallInteger, nullable=False, server_default=text("3")),
    Column("misfire", Text, nullable=False, server_default="run_once"),
    Column("dst_gap", Text, nullable=False, server_default="after"),
    Column("dst_overlap", Text, nullable=False, server_default="first"),
    Column("payload", JSONB, nullable=False, server_default="{}"),
    Column("last_run_at", DateTime(timezone=True)),
    Column("next_run_at", DateTime(timezone=True)),
    Column("missed_count", Integer, nullable=False, server_default=text("0")),
    Column("missed_oldest", DateTime(timezone=True)),
    Column("missed_newest", DateTime(timezone=True)),
    Column("last_error", Text),
    Column("version", Integer, nullable=False, server_default=text("1")),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=text("duly.now()")),
    CheckConstraint(r"name ~ '^[A-Za-z][A-Za-z0-9_.\:-]{0,99}$'", name="schedules_is_named"),
    CheckConstraint("length(cron) BETWEEN 9 AND 100", name="schedules_cron_is_short"),
    CheckConstraint("max_retries BETWEEN 0 AND 1000", name="schedules_max_retries_is_sane"),
    CheckConstraint("misfire IN ('run_once', 'run_all', 'skip')", name="schedules_misfire_is_known"),
    CheckConstraint("dst_gap IN ('after', 'skip')", name="schedules_dst_gap_is_known"),
    CheckConstraint("dst_overlap IN ('first', 'both')", name="schedules_dst_overlap_is_known"),
    CheckConstraint("jsonb_typeof(payload) = 'object'", name="schedules_payload_is_object"),
)
Index("schedules_due", schedules.c.next_run_at, postgresql_where=schedules.c.enabled)
