"""What the migrations make of the webhooks, as SQLAlchemy tables."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from duly.tables import metadata

_Moment = DateTime(timezone=True)

subscriptions = Table(
    "webhook_subscriptions",
    metadata,
    Column("id", Uuid, nullable=False),
    Column("owner", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("description", Text, nullable=False, server_default=text("''")),
    Column("patterns", ARRAY(Text), nullable=False),
    Column("status", Text, nullable=False, server_default=text("'ACTIVE'")),
    Column("max_in_flight", SmallInteger, nullable=False, server_default=text("5")),
    Column("timeout_seconds", SmallInteger, nullable=False, server_default=text("15")),
    Column("failures", Integer, nullable=False, server_default=text("0")),
    Column("failing_since", _Moment),
    Column("open_until", _Moment),
    Column("disabled_reason", Text),
    Column("version", Integer, nullable=False, server_default=text("1")),
    Column("created_at", _Moment, nullable=False),
    Column("updated_at", _Moment, nullable=False),
    PrimaryKeyConstraint("id", name="webhook_subscriptions_pkey"),
    CheckConstraint("length(owner) BETWEEN 1 AND 1000", name="webhook_subscriptions_owner_is_short"),
    CheckConstraint("url ~ '^https?://[!-~]+$' AND length(url) <= 2000", name="webhook_subscriptions_url_is_http"),
    CheckConstraint("length(description) <= 500", name="webhook_subscriptions_description_is_short"),
    CheckConstraint("cardinality(patterns) BETWEEN 1 AND 100", name="webhook_subscriptions_has_patterns"),
    CheckConstraint(
        "status IN ('ACTIVE', 'PAUSED', 'DISABLED', 'DELETED')", name="webhook_subscriptions_status_is_known"
    ),
    CheckConstraint("max_in_flight BETWEEN 1 AND 100", name="webhook_subscriptions_in_flight_is_sane"),
    CheckConstraint("timeout_seconds BETWEEN 1 AND 30", name="webhook_subscriptions_timeout_is_sane"),
    CheckConstraint("failures >= 0", name="webhook_subscriptions_failures_count_up"),
    CheckConstraint("(failures = 0) = (failing_since IS NULL)", name="webhook_subscriptions_failing_is_whole"),
    CheckConstraint(
        "(status = 'DISABLED') = (disabled_reason IS NOT NULL)",
        name="webhook_subscriptions_disabling_is_explained",
    ),
    postgresql_with={"fillfactor": 70},
)
Index(
    "webhook_subscriptions_owner",
    subscriptions.c.owner,
    subscriptions.c.id,
    postgresql_where=text("status <> 'DELETED'"),
)

secrets = Table(
    "webhook_secrets",
    metadata,
    Column("subscription_id", Uuid, nullable=False),
    Column("number", Integer, nullable=False, autoincrement=False),
    Column("key_id", Text, nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("expires_at", _Moment),
    PrimaryKeyConstraint("subscription_id", "number", name="webhook_secrets_pkey"),
    ForeignKeyConstraint(
        ["subscription_id"], [subscriptions.c.id], name="webhook_secrets_subscription", ondelete="CASCADE"
    ),
    CheckConstraint("length(sealed) BETWEEN 29 AND 1000", name="webhook_secrets_is_sealed"),
)
Index(
    "webhook_secrets_current",
    secrets.c.subscription_id,
    unique=True,
    postgresql_where=text("expires_at IS NULL"),
)

deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", Uuid, nullable=False),
    Column("number", BigInteger, Identity(always=True), nullable=False),
    Column("subscription_id", Uuid, nullable=False),
    Column("event_id", Uuid, nullable=False),
    Column("event_type", Text, nullable=False),
    Column("aggregate_id", Text, nullable=False),
    Column("event_created_at", _Moment, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'WAITING'")),
    Column("turn", Integer, nullable=False, server_default=text("0")),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("tries", SmallInteger, nullable=False, server_default=text("0")),
    Column("redeliveries", Integer, nullable=False, server_default=text("0")),
    Column("next_attempt_at", _Moment),
    Column("last_http_status", SmallInteger),
    Column("last_error", Text),
    Column("created_at", _Moment, nullable=False),
    Column("finished_at", _Moment),
    PrimaryKeyConstraint("id", name="webhook_deliveries_pkey"),
    UniqueConstraint("subscription_id", "event_id", name="webhook_deliveries_once"),
    ForeignKeyConstraint(["subscription_id"], [subscriptions.c.id], name="webhook_deliveries_subscription"),
    CheckConstraint(
        "status IN ('WAITING', 'QUEUED', 'RETRYING', 'DELIVERED', 'PERMANENTLY_FAILED', 'CANCELLED')",
        name="webhook_deliveries_status_is_known",
    ),
    CheckConstraint(
        "turn >= 0 AND redeliveries >= 0 AND tries BETWEEN 0 AND attempts", name="webhook_deliveries_counts_up"
    ),
    CheckConstraint(
        "(status = 'RETRYING') = (next_attempt_at IS NOT NULL)", name="webhook_deliveries_retry_has_a_time"
    ),
    CheckConstraint(
        "(status IN ('DELIVERED', 'PERMANENTLY_FAILED', 'CANCELLED')) = (finished_at IS NOT NULL)",
        name="webhook_deliveries_end_has_a_time",
    ),
    postgresql_with={"fillfactor": 80},
)
Index("webhook_deliveries_number", deliveries.c.number, unique=True)
Index("webhook_deliveries_subscription_number", deliveries.c.subscription_id, deliveries.c.number)
Index("webhook_deliveries_status", deliveries.c.subscription_id, deliveries.c.status, deliveries.c.number)

attempts = Table(
    "webhook_attempts",
    metadata,
    Column("delivery_id", Uuid, nullable=False),
    Column("number", Integer, nullable=False, autoincrement=False),
    Column("subscription_id", Uuid, nullable=False),
    Column("started_at", _Moment, nullable=False),
    Column("latency_ms", Integer, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("http_status", SmallInteger),
    Column("error", Text),
    Column("address", Text),
    Column("request_headers", JSONB, nullable=False),
    Column("request_bytes", Integer, nullable=False),
    Column("response_headers", JSONB, nullable=False),
    Column("response_excerpt", Text, nullable=False),
    Column("worker", Text, nullable=False),
    PrimaryKeyConstraint("delivery_id", "number", name="webhook_attempts_pkey"),
    CheckConstraint("outcome IN ('DELIVERED', 'FAILED')", name="webhook_attempts_outcome_is_known"),
    CheckConstraint("(outcome = 'FAILED') = (error IS NOT NULL)", name="webhook_attempts_failure_is_explained"),
    CheckConstraint("length(response_excerpt) <= 2048", name="webhook_attempts_excerpt_is_short"),
)

provider_secrets = Table(
    "webhook_provider_secrets",
    metadata,
    Column("provider", Text, nullable=False),
    Column("number", Integer, nullable=False, autoincrement=False),
    Column("key_id", Text, nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("expires_at", _Moment),
    PrimaryKeyConstraint("provider", "number", name="webhook_provider_secrets_pkey"),
    CheckConstraint("provider ~ '^[A-Za-z][A-Za-z0-9_.-]{0,89}$'", name="webhook_provider_secrets_is_named"),
    CheckConstraint("length(sealed) BETWEEN 29 AND 1000", name="webhook_provider_secrets_is_sealed"),
)
Index(
    "webhook_provider_secrets_current",
    provider_secrets.c.provider,
    unique=True,
    postgresql_where=text("expires_at IS NULL"),
)

received = Table(
    "received_webhooks",
    metadata,
    Column("provider", Text, nullable=False),
    Column("provider_event_id", Text, nullable=False),
    Column("received_at", _Moment, nullable=False),
    PrimaryKeyConstraint("provider", "provider_event_id", name="received_webhooks_pkey"),
    CheckConstraint("length(provider_event_id) BETWEEN 1 AND 255", name="received_webhooks_id_is_short"),
)
Index("received_webhooks_age", received.c.received_at, postgresql_using="brin")
