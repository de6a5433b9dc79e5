"""The tables of identity checks, as the migration makes them."""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

from apps.finance.kyc.model import OPAQUE, USER_ID

metadata = MetaData(schema="kyc")
_Moment = DateTime(timezone=True)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("user_id", Text, nullable=False),
    Column("provider", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("token", Text, nullable=False),
    Column("requested_by", Text, nullable=False),
    Column("provider_ref", Text),
    Column("evidence_ref", Text),
    Column("version", Integer, nullable=False, server_default=text("1")),
    Column("created_at", _Moment, nullable=False),
    Column("expires_at", _Moment, nullable=False),
    Column("updated_at", _Moment, nullable=False),
    UniqueConstraint("provider", "provider_ref", name="sessions_provider_ref_is_unique"),
    CheckConstraint(
        "status IN ('PENDING', 'IN_PROGRESS', 'APPROVED', 'REJECTED', 'EXPIRED')", name="sessions_status_is_known"
    ),
    CheckConstraint(f"user_id ~ '{USER_ID}'", name="sessions_user_is_opaque"),
    CheckConstraint(f"provider_ref ~ '{OPAQUE}'", name="sessions_provider_ref_is_opaque"),
    CheckConstraint(f"evidence_ref ~ '{OPAQUE}'", name="sessions_evidence_is_opaque"),
    CheckConstraint(
        "(evidence_ref IS NOT NULL) = (status IN ('APPROVED', 'REJECTED'))", name="sessions_decided_have_evidence"
    ),
    CheckConstraint("length(token) BETWEEN 32 AND 64", name="sessions_token_is_long"),
    CheckConstraint("length(provider) BETWEEN 1 AND 80", name="sessions_provider_is_named"),
    CheckConstraint("length(requested_by) BETWEEN 1 AND 255", name="sessions_requester_is_named"),
    CheckConstraint("version >= 1", name="sessions_version_counts_up"),
    CheckConstraint("expires_at > created_at AND updated_at >= created_at", name="sessions_time_goes_on"),
)
_OPEN = text("status IN ('PENDING', 'IN_PROGRESS')")
Index("sessions_status", sessions.c.status, sessions.c.id)
Index("sessions_user", sessions.c.user_id, sessions.c.id)
Index("sessions_due", sessions.c.expires_at, sessions.c.id, postgresql_where=_OPEN)
Index("sessions_age", sessions.c.updated_at, sessions.c.id)

history = Table(
    "history",
    metadata,
    Column("session_id", Uuid, nullable=False),
    Column("number", Integer, nullable=False),
    Column("at", _Moment, nullable=False),
    Column("from_status", Text),
    Column("to_status", Text, nullable=False),
    Column("cause", Text, nullable=False),
    PrimaryKeyConstraint("session_id", "number", name="history_pkey"),
    ForeignKeyConstraint(["session_id"], ["kyc.sessions.id"], name="history_session_exists", ondelete="CASCADE"),
    CheckConstraint("(number = 1) = (from_status IS NULL) AND number >= 1", name="history_begins_once"),
    CheckConstraint("cause IN ('create', 'open', 'callback', 'expire')", name="history_cause_is_known"),
    CheckConstraint(
        "coalesce(from_status, '') = to_status OR (coalesce(from_status, '') || '>' || to_status) IN ("
        "'>PENDING', 'PENDING>IN_PROGRESS', 'PENDING>APPROVED', 'PENDING>REJECTED', 'PENDING>EXPIRED', "
        "'IN_PROGRESS>APPROVED', 'IN_PROGRESS>REJECTED', 'IN_PROGRESS>EXPIRED')",
        name="history_change_is_possible",
    ),
)

unmatched_callbacks = Table(
    "unmatched_callbacks",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("provider", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("client_ref", Uuid),
    Column("session_ref", Text),
    Column("status", Text),
    Column("problem", Text, nullable=False),
    Column("session_id", Uuid),
    Column("received_at", _Moment, nullable=False),
    Column("dismissed_at", _Moment),
    Column("dismissed_by", Text),
    Column("handled", Text),
    Column("evidence_ref", Text),
    UniqueConstraint("provider", "event_id", name="unmatched_event_is_kept_once"),
    CheckConstraint(
        "problem IN ('unknown_session', 'unknown_status', 'names_differ', 'bad_evidence', 'contradicts')",
        name="unmatched_problem_is_known",
    ),
    CheckConstraint("event_id ~ '^[0-9a-f]{64}$'", name="unmatched_event_is_a_digest"),
    CheckConstraint(f"session_ref ~ '{OPAQUE}'", name="unmatched_ref_is_opaque"),
    CheckConstraint("status IN ('IN_PROGRESS', 'APPROVED', 'REJECTED', 'EXPIRED')", name="unmatched_status_is_known"),
    CheckConstraint("handled IN ('CORRECTED', 'NOT_OURS', 'NO_ACTION')", name="unmatched_handling_is_known"),
    CheckConstraint("dismissed_at >= received_at", name="unmatched_is_dismissed_later"),
    CheckConstraint(
        "num_nonnulls(dismissed_at, dismissed_by, handled) IN (0, 3)", name="unmatched_dismissal_is_signed"
    ),
    CheckConstraint("length(dismissed_by) BETWEEN 1 AND 255", name="unmatched_dismissal_is_short"),
    CheckConstraint(f"evidence_ref ~ '{OPAQUE}'", name="unmatched_evidence_is_opaque"),
)
Index("unmatched_open", unmatched_callbacks.c.id, postgresql_where=text("dismissed_at IS NULL"))
NO_SESSION = "'00000000-0000-0000-0000-000000000000'::uuid"
Index(
    "unmatched_open_of_session",
    unmatched_callbacks.c.provider,
    text(f"coalesce(session_id, {NO_SESSION})"),
    postgresql_where=text("dismissed_at IS NULL"),
)
Index("unmatched_age", unmatched_callbacks.c.received_at, unmatched_callbacks.c.id)
