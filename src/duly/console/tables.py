"""The table of sessions as SQLAlchemy sees it; the migration makes it, and a test compares the two."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, DateTime, Index, LargeBinary, PrimaryKeyConstraint, Table, Text
from sqlalchemy.dialects.postgresql import ARRAY

from duly.tables import metadata

_Moment = DateTime(timezone=True)

console_sessions = Table(
    "console_sessions",
    metadata,
    Column("id_hash", LargeBinary, nullable=False),
    Column("subject", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("roles", ARRAY(Text), nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("seen_at", _Moment, nullable=False),
    Column("expires_at", _Moment, nullable=False),
    Column("revoked_at", _Moment),
    PrimaryKeyConstraint("id_hash", name="console_sessions_pkey"),
    CheckConstraint("octet_length(id_hash) = 32", name="console_sessions_id_is_sha256"),
    CheckConstraint("length(subject) BETWEEN 1 AND 255", name="console_sessions_subject_is_short"),
    CheckConstraint("length(name) BETWEEN 1 AND 255", name="console_sessions_name_is_short"),
    CheckConstraint(
        "cardinality(roles) BETWEEN 1 AND 50 AND array_position(roles, NULL) IS NULL",
        name="console_sessions_has_a_role",
    ),
    CheckConstraint(
        "expires_at > created_at AND expires_at <= created_at + interval '8 hours'",
        name="console_sessions_end_in_time",
    ),
)
Index("console_sessions_age", console_sessions.c.expires_at)
