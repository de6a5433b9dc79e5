"""The tables of compliance, as the migration makes them."""

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
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(schema="compliance")
_Moment = DateTime(timezone=True)
_IS_OPEN = "status IN ('OPEN', 'PROPOSED')"
LABEL = "kind || ' ' || severity || ' ' || status"
"""What several filters of the queue ask for: one expression, and so one index."""
LABEL_OF_ASSIGNEE = f"assignee || ' ' || {LABEL}"
_IS_ASSIGNED = "assignee IS NOT NULL"
_HAS_ENDED = "status IN ('RESOLVED', 'EXPIRED')"

alerts = Table(
    "alerts",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("source", Text, nullable=False),
    Column("payment_id", Uuid),
    Column("transaction_id", Uuid),
    Column("decision_id", Uuid),
    Column("rule_set_id", Text, nullable=False),
    Column("rule_set_version", Integer),
    Column("outcome", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("facts", JSONB, nullable=False),
    Column("matched", JSONB, nullable=False),
    Column("incomplete", JSONB, nullable=False),
    Column("trace", JSONB, nullable=False),
    Column("raised_at", _Moment, nullable=False),
    CheckConstraint("source IN ('PAYMENT_REVIEW', 'AML')", name="alerts_source_is_known"),
    CheckConstraint("outcome IN ('REVIEW', 'REJECT')", name="alerts_outcome_is_known"),
    CheckConstraint("severity IN ('LOW', 'MEDIUM', 'HIGH', 'CRITICAL')", name="alerts_severity_is_known"),
    CheckConstraint(
        "CASE source WHEN 'AML' THEN transaction_id IS NOT NULL ELSE payment_id IS NOT NULL END",
        name="alerts_are_about_something",
    ),
)
Index("alerts_of_a_transaction", alerts.c.transaction_id, unique=True, postgresql_where=text("source = 'AML'"))
Index("alerts_of_a_payment", alerts.c.payment_id, unique=True, postgresql_where=text("source = 'PAYMENT_REVIEW'"))

cases = Table(
    "cases",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("alert_id", Uuid, nullable=False),
    Column("payment_id", Uuid),
    Column("transaction_id", Uuid),
    Column("amount", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    Column("initiated_by", Text),
    Column("needs_two", Boolean, nullable=False),
    Column("assignee", Text),
    Column("due_at", _Moment, nullable=False),
    Column("overdue_at", _Moment),
    Column("proposed_decision", Text),
    Column("proposed_code", Text),
    Column("proposed_reason", Text),
    Column("proposed_by", Text),
    Column("proposed_at", _Moment),
    Column("decision", Text),
    Column("reason_code", Text),
    Column("reason", Text),
    Column("effect", Text),
    Column("resolved_by", Text),
    Column("confirmed_by", Text),
    Column("ended_at", _Moment),
    Column("reopens_id", Uuid),
    Column("reopened_by", Text),
    Column("version", Integer, nullable=False, server_default=text("1")),
    Column("created_at", _Moment, nullable=False),
    Column("updated_at", _Moment, nullable=False),
    ForeignKeyConstraint(["alert_id"], ["compliance.alerts.id"], name="cases_alert_exists"),
    ForeignKeyConstraint(["reopens_id"], ["compliance.cases.id"], name="cases_reopened_exists"),
    UniqueConstraint("reopens_id", name="cases_are_reopened_once"),
    CheckConstraint("kind IN ('PAYMENT_REVIEW', 'AML')", name="cases_kind_is_known"),
    CheckConstraint("status IN ('OPEN', 'PROPOSED', 'RESOLVED', 'EXPIRED')", name="cases_status_is_known"),
    CheckConstraint("severity IN ('LOW', 'MEDIUM', 'HIGH', 'CRITICAL')", name="cases_severity_is_known"),
    CheckConstraint(
        "CASE kind WHEN 'AML' THEN transaction_id IS NOT NULL ELSE payment_id IS NOT NULL END",
        name="cases_are_about_something",
    ),
    CheckConstraint("amount > 0", name="cases_amount_is_positive"),
    CheckConstraint("currency ~ '^[A-Z]{3}$'", name="cases_currency_is_a_code"),
    CheckConstraint("length(assignee) BETWEEN 1 AND 255", name="cases_assignee_is_named"),
    CheckConstraint(
        "num_nonnulls(proposed_decision, proposed_code, proposed_reason, proposed_by, proposed_at) "
        "= CASE status WHEN 'PROPOSED' THEN 5 ELSE 0 END",
        name="cases_proposal_is_whole",
    ),
    CheckConstraint(
        "num_nonnulls(decision, reason_code, reason, effect, resolved_by) "
        "= CASE status WHEN 'RESOLVED' THEN 5 ELSE 0 END",
        name="cases_resolution_is_whole",
    ),
    CheckConstraint(f"({_HAS_ENDED}) = (ended_at IS NOT NULL)", name="cases_end_has_its_time"),
    CheckConstraint(
        "decision IN ('APPROVE', 'REJECT') AND proposed_decision IN ('APPROVE', 'REJECT')",
        name="cases_decision_is_known",
    ),
    CheckConstraint("length(reason) <= 4000 AND length(proposed_reason) <= 4000", name="cases_reason_is_short"),
    CheckConstraint(
        "effect IN ('RELEASED', 'RELEASE_FAILED', 'HOLD_VOIDED', 'REVERSED', 'ALREADY_REVERSED', 'RETURNING', "
        "'MONEY_STAYS', 'NOTHING_HELD')",
        name="cases_effect_is_known",
    ),
    CheckConstraint("status <> 'RESOLVED' OR needs_two = (confirmed_by IS NOT NULL)", name="cases_large_are_confirmed"),
    CheckConstraint("status = 'RESOLVED' OR confirmed_by IS NULL", name="cases_confirmed_are_resolved"),
    CheckConstraint("status <> 'PROPOSED' OR needs_two", name="cases_proposed_need_two"),
    CheckConstraint(
        "confirmed_by <> resolved_by AND (reopened_by IS NULL OR confirmed_by <> reopened_by)",
        name="cases_confirmed_by_another",
    ),
    CheckConstraint(
        "initiated_by NOT IN (coalesce(resolved_by, ''), coalesce(confirmed_by, ''), coalesce(proposed_by, ''))",
        name="cases_are_not_ones_own",
    ),
    CheckConstraint("(reopens_id IS NULL) = (reopened_by IS NULL)", name="cases_reopening_is_signed"),
    CheckConstraint("status <> 'EXPIRED' OR kind = 'PAYMENT_REVIEW'", name="cases_expire_with_payments"),
    CheckConstraint("version >= 1", name="cases_version_counts_up"),
    CheckConstraint("updated_at >= created_at AND ended_at >= created_at", name="cases_time_goes_on"),
    postgresql_with={"fillfactor": "80"},
)
Index("cases_by_status", cases.c.status, cases.c.id)
Index("cases_by_kind", cases.c.kind, cases.c.id)
Index("cases_by_severity", cases.c.severity, cases.c.id)
Index("cases_by_label", text(f"({LABEL})"), cases.c.id)
Index("cases_by_assignee", cases.c.assignee, cases.c.id, postgresql_where=text(_IS_ASSIGNED))
Index("cases_by_assignee_and_label", text(f"({LABEL_OF_ASSIGNEE})"), cases.c.id, postgresql_where=text(_IS_ASSIGNED))
Index("cases_overdue", cases.c.id, postgresql_where=text(f"overdue_at IS NOT NULL AND {_IS_OPEN}"))
Index("cases_open", cases.c.id, postgresql_where=text(_IS_OPEN))
Index("cases_open_once", cases.c.alert_id, unique=True, postgresql_where=text(_IS_OPEN))
Index("cases_of_an_alert", cases.c.alert_id)
Index("cases_of_a_payment", cases.c.payment_id, postgresql_where=text("payment_id IS NOT NULL"))
Index("cases_of_a_transaction", cases.c.transaction_id, postgresql_where=text("transaction_id IS NOT NULL"))
Index("cases_ended", cases.c.ended_at, cases.c.id, postgresql_where=text(_HAS_ENDED))

case_events = Table(
    "case_events",
    metadata,
    Column("case_id", Uuid, nullable=False),
    Column("number", Integer, nullable=False),
    Column("at", _Moment, nullable=False),
    Column("actor", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("detail", JSONB, nullable=False),
    PrimaryKeyConstraint("case_id", "number", name="case_events_pkey"),
    ForeignKeyConstraint(["case_id"], ["compliance.cases.id"], name="case_events_case_exists"),
    CheckConstraint("(number = 1) = (kind = 'OPENED') AND number >= 1", name="case_events_begin_once"),
    CheckConstraint("length(actor) BETWEEN 1 AND 255", name="case_events_actor_is_named"),
    CheckConstraint(
        "kind IN ('OPENED', 'ASSIGNED', 'CLAIMED', 'UNCLAIMED', 'COMMENTED', 'EVIDENCE_ADDED', 'OVERDUE', 'PROPOSED', "
        "'PROPOSAL_REFUSED', 'PROPOSAL_WITHDRAWN', 'RESOLUTION_REFUSED', 'RESOLVED', 'EXPIRED')",
        name="case_events_kind_is_known",
    ),
    CheckConstraint("pg_column_size(detail) <= 30000", name="case_events_detail_is_short"),
)
Index(
    "case_events_end_once", case_events.c.case_id, unique=True, postgresql_where=text("kind IN ('RESOLVED', 'EXPIRED')")
)
