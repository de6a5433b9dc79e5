"""What the migrations make of the idempotency keys, as a SQLAlchemy table."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    LargeBinary,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
)

from duly.tables import metadata

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("caller", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("fingerprint", LargeBinary, nullable=False),
    Column("status", SmallInteger),
    Column("headers", JSON),
    Column("body", LargeBinary),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("caller", "key", name="idempotency_keys_pkey"),
    CheckConstraint("length(caller) <= 1000", name="idempotency_keys_caller_is_short"),
    CheckConstraint("length(key) BETWEEN 1 AND 255", name="idempotency_keys_key_is_short"),
    CheckConstraint("length(fingerprint) = 32", name="idempotency_keys_fingerprint_is_sha256"),
    CheckConstraint("status BETWEEN 200 AND 499", name="idempotency_keys_status_is_http"),
    CheckConstraint("(status IS NULL) = (body IS NULL)", name="idempotency_keys_answer_is_whole"),
    postgresql_with={"fillfactor": "70"},
)
Index("idempotency_keys_age", idempotency_keys.c.expires_at)
