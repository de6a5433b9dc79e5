"""The tables of payments, as the migration makes them."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

metadata = MetaData(schema="payments")
_Moment = DateTime(timezone=True)

payments = Table(
    "payments",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("from_account_id", Uuid, nullable=False),
    Column("to_account_id", Uuid, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("retryable", Boolean, nullable=False, server_default=text("false")),
    Column("next_retry_at", _Moment),
    Column("attempts", SmallInteger, nullable=False, server_default=text("0")),
    Column("delivery", Text),
    Column("sent_at", _Moment),
    Column("initiated_by", Text, nullable=False),
    Column("provider", Text, nullable=False),
    Column("provider_ref", Text),
    Column("bank_key", Uuid, nullable=False),
    Column("decision_id", Uuid),
    Column("review_hold_id", Uuid),
    Column("incoming_hold_id", Uuid),
    Column("transaction_id", Uuid),
    Column("reversal_id", Uuid),
    Column("contradicted_at", _Moment),
    Column("version", Integer, nullable=False, server_default=text("1")),
    Column("since", _Moment, nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("updated_at", _Moment, nullable=False),
    UniqueConstraint("bank_key", name="payments_bank_key_is_unique"),
    UniqueConstraint("provider", "provider_ref", name="payments_provider_ref_is_unique"),
    UniqueConstraint("transaction_id", name="payments_transaction_is_its_own"),
    UniqueConstraint("reversal_id", name="payments_reversal_is_its_own"),
    CheckConstraint(
        "state IN ('REJECTED', 'PENDING_REVIEW', 'PROCESSING', 'UNKNOWN', 'FAILED', 'RETURNING', 'COMPLETED', "
        "'PERMANENTLY_FAILED')",
        name="payments_state_is_known",
    ),
    CheckConstraint("from_account_id <> to_account_id", name="payments_go_elsewhere"),
    CheckConstraint("amount > 0", name="payments_amount_is_positive"),
    CheckConstraint("currency ~ '^[A-Z]{3}$'", name="payments_currency_is_a_code"),
    CheckConstraint("length(reason) BETWEEN 1 AND 100", name="payments_reason_is_short"),
    CheckConstraint(
        "(reason IS NOT NULL) = (state IN ('REJECTED', 'UNKNOWN', 'FAILED', 'RETURNING', 'PERMANENTLY_FAILED'))",
        name="payments_state_is_explained",
    ),
    CheckConstraint("NOT retryable OR state = 'FAILED'", name="payments_only_failed_are_retried"),
    CheckConstraint("retryable = (next_retry_at IS NOT NULL)", name="payments_retry_has_its_time"),
    CheckConstraint("attempts BETWEEN 0 AND 7", name="payments_attempts_are_few"),
    CheckConstraint("(attempts > 0) = (sent_at IS NOT NULL)", name="payments_attempt_has_its_time"),
    CheckConstraint("delivery IN ('DUE', 'UNDER_WAY')", name="payments_delivery_is_known"),
    CheckConstraint(
        "delivery IS NULL OR (state = 'PROCESSING' AND (delivery = 'DUE' OR attempts > 0))",
        name="payments_delivery_is_processing",
    ),
    CheckConstraint(
        "(transaction_id IS NOT NULL) = (retryable OR state IN ('PROCESSING', 'UNKNOWN', 'RETURNING', 'COMPLETED', "
        "'PERMANENTLY_FAILED'))",
        name="payments_under_way_are_posted",
    ),
    CheckConstraint("(reversal_id IS NOT NULL) = (state = 'PERMANENTLY_FAILED')", name="payments_over_are_given_back"),
    CheckConstraint("state <> 'PENDING_REVIEW' OR review_hold_id IS NOT NULL", name="payments_review_holds"),
    CheckConstraint("incoming_hold_id IS NULL OR transaction_id IS NOT NULL", name="payments_incoming_is_posted"),
    CheckConstraint("length(initiated_by) BETWEEN 1 AND 255", name="payments_initiator_is_named"),
    CheckConstraint("length(provider) BETWEEN 1 AND 90", name="payments_provider_is_named"),
    CheckConstraint("length(provider_ref) BETWEEN 1 AND 200", name="payments_provider_ref_is_short"),
    CheckConstraint("version >= 1", name="payments_version_counts_up"),
    CheckConstraint("since >= created_at AND updated_at >= since", name="payments_time_goes_on"),
    postgresql_with={"fillfactor": "70"},
)
Index("payments_state", payments.c.state, payments.c.id)
Index(
    "payments_due",
    payments.c.next_retry_at,
    payments.c.id,
    postgresql_where=text("retryable AND contradicted_at IS NULL"),
)
Index(
    "payments_open",
    payments.c.id,
    postgresql_where=text(
        "state IN ('PENDING_REVIEW', 'PROCESSING', 'UNKNOWN', 'RETURNING') AND contradicted_at IS NULL"
    ),
)

_CHANGES = (
    "'>REJECTED', '>PENDING_REVIEW', '>PROCESSING', '>FAILED', 'PENDING_REVIEW>PROCESSING', 'PENDING_REVIEW>REJECTED', "
    "'PENDING_REVIEW>FAILED', 'PROCESSING>UNKNOWN', 'PROCESSING>FAILED', 'PROCESSING>COMPLETED', "
    "'PROCESSING>PERMANENTLY_FAILED', 'PROCESSING>RETURNING', 'UNKNOWN>PROCESSING', 'UNKNOWN>FAILED', "
    "'UNKNOWN>COMPLETED', 'UNKNOWN>PERMANENTLY_FAILED', 'UNKNOWN>RETURNING', 'FAILED>PROCESSING', 'FAILED>COMPLETED', "
    "'FAILED>UNKNOWN', 'FAILED>PERMANENTLY_FAILED', 'FAILED>RETURNING', 'RETURNING>COMPLETED', "
    "'RETURNING>PERMANENTLY_FAILED'"
)
history = Table(
    "history",
    metadata,
    Column("payment_id", Uuid, nullable=False),
    Column("number", Integer, nullable=False),
    Column("at", _Moment, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("cause", Text, nullable=False),
    Column("detail", Text),
    PrimaryKeyConstraint("payment_id", "number", name="history_pkey"),
    ForeignKeyConstraint(["payment_id"], ["payments.payments.id"], name="history_payment_exists"),
    CheckConstraint("(number = 1) = (from_state IS NULL) AND number >= 1", name="history_begins_once"),
    CheckConstraint("length(cause) BETWEEN 1 AND 50", name="history_cause_is_short"),
    CheckConstraint("length(detail) BETWEEN 1 AND 500", name="history_detail_is_short"),
    CheckConstraint(
        f"coalesce(from_state, '') = to_state OR (coalesce(from_state, '') || '>' || to_state) IN ({_CHANGES})",
        name="history_change_is_possible",
    ),
)

unmatched_callbacks = Table(
    "unmatched_callbacks",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("provider", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("payment_ref", Text, nullable=False),
    Column("client_ref", Text),
    Column("status", Text, nullable=False),
    Column("amount", Numeric),
    Column("currency", Text),
    Column("problem", Text, nullable=False),
    Column("payment_id", Uuid),
    Column("received_at", _Moment, nullable=False),
    Column("matched_at", _Moment),
    Column("dismissed_at", _Moment),
    Column("dismissed_by", Text),
    Column("dismiss_reason", Text),
    UniqueConstraint("provider", "event_id", name="unmatched_event_is_kept_once"),
    CheckConstraint(
        "problem IN ('unknown_reference', 'unknown_status', 'amount_differs', 'names_differ', 'reference_differs')",
        name="unmatched_problem_is_known",
    ),
    CheckConstraint("length(payment_ref) BETWEEN 1 AND 200", name="unmatched_ref_is_short"),
    CheckConstraint("length(client_ref) BETWEEN 1 AND 200", name="unmatched_client_ref_is_short"),
    CheckConstraint("length(status) BETWEEN 1 AND 50", name="unmatched_status_is_short"),
    CheckConstraint("matched_at >= received_at", name="unmatched_is_matched_later"),
    CheckConstraint("dismissed_at >= received_at", name="unmatched_is_dismissed_later"),
    CheckConstraint(
        "num_nonnulls(dismissed_at, dismissed_by, dismiss_reason) IN (0, 3)", name="unmatched_dismissal_is_signed"
    ),
    CheckConstraint(
        "length(dismissed_by) BETWEEN 1 AND 255 AND length(dismiss_reason) BETWEEN 1 AND 200",
        name="unmatched_dismissal_is_short",
    ),
)
_OPEN = text("matched_at IS NULL AND dismissed_at IS NULL")
Index("unmatched_ref", unmatched_callbacks.c.provider, unmatched_callbacks.c.payment_ref, postgresql_where=_OPEN)
Index("unmatched_open", unmatched_callbacks.c.id, postgresql_where=_OPEN)
Index("unmatched_payment", unmatched_callbacks.c.payment_id, postgresql_where=_OPEN)
Index(
    "unmatched_of_payment", unmatched_callbacks.c.payment_id, unmatched_callbacks.c.id,
    postgresql_where=text("payment_id IS NOT NULL"),
)  # fmt: skip
Index("unmatched_age", unmatched_callbacks.c.received_at, unmatched_callbacks.c.id)
