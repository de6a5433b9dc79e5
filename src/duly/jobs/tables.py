"""What the migrations make of the queue, the dead letters and the log of runs, as SQLAlchemy tables."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    DateTime,
    Identity,
    Index,
    Integer,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    Uuid,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, DOMAIN, INTERVAL, JSONB

from duly.tables import metadata

_Moment = DateTime(timezone=True)

# Checked when a value is made; a CHECK of the table would be checked again by every claim.
_JobName = DOMAIN("job_name", Text, schema="duly", metadata=metadata)
_JobPayload = DOMAIN("job_payload", JSONB, schema="duly", metadata=metadata)

jobs = Table(
    "jobs",
    metadata,
    Column("id", BigInteger, Identity(always=False), nullable=False),
    Column("name", _JobName, nullable=False),
    Column("entity_id", Text),
    Column("payload", _JobPayload, nullable=False, server_default=text("'{}'")),
    Column("priority", SmallInteger, nullable=False, server_default=text("3")),
    Column("run_at", _Moment, nullable=False),
    Column("due_at", _Moment, nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("original_delay", INTERVAL, nullable=False, server_default=text("'0'")),
    Column("retry_count", SmallInteger, nullable=False, server_default=text("0")),
    Column("max_retries", SmallInteger),
    Column("backoff_seconds", ARRAY(Integer)),
    Column("source", Text, nullable=False, server_default=text("'Deferred'")),
    Column("waits", Text, nullable=False, server_default=text("'due'")),
    Column("last_error", Text),
    Column("snoozes", Integer, nullable=False, server_default=text("0")),
    Column("event_id", Uuid),
    Column("order_key", Text),
    Column("is_unique", Boolean, nullable=False, server_default=text("false")),
    Column("unique_key", Text),
    Column("slot", SmallInteger),
    Column("correlation_id", Uuid),
    Column("causation_id", Uuid),
    Column("traceparent", Text),
    Column("lease_token", BigInteger),
    Column("lease_expires_at", _Moment),
    Column("leased_by", Text),
    Column("claimed_at", _Moment),
    Column("progress", Text),
    Column("lost_by", Text),
    Column("lost_token", BigInteger),
    Column("lost_claimed_at", _Moment),
    PrimaryKeyConstraint("id", name="jobs_pkey"),
    CheckConstraint("length(entity_id) BETWEEN 1 AND 200", name="jobs_entity_is_short"),
    CheckConstraint("priority BETWEEN 1 AND 4", name="jobs_priority_is_1_to_4"),
    CheckConstraint("retry_count >= 0 AND snoozes >= 0", name="jobs_retries_count_up"),
    CheckConstraint("max_retries BETWEEN 0 AND 1000", name="jobs_max_retries_is_sane"),
    CheckConstraint("source IN ('Scheduled', 'Manual', 'Deferred')", name="jobs_source_is_known"),
    CheckConstraint(
        "waits IN ('due', 'retry', 'snoozed', 'released', 'requeued', 'behind', 'unknown_commit')",
        name="jobs_waits_is_known",
    ),
    CheckConstraint("unique_key IS NULL OR is_unique", name="jobs_key_is_of_a_unique_job"),
    CheckConstraint(
        "(lease_token IS NULL) = (lease_expires_at IS NULL) AND (lease_token IS NULL) = (leased_by IS NULL)",
        name="jobs_lease_is_whole",
    ),
    postgresql_with={
        "fillfactor": 50,
        "autovacuum_vacuum_scale_factor": 0.02,
        "autovacuum_vacuum_cost_delay": 0,
        "vacuum_truncate": "false",  # plans made on an empty queue must fit a full one
    },
)
Index("jobs_ready", jobs.c.name, jobs.c.priority, jobs.c.run_at, jobs.c.id)
Index("jobs_entity", jobs.c.entity_id, jobs.c.name, postgresql_where=text("entity_id IS NOT NULL"))
Index("jobs_order", jobs.c.name, jobs.c.order_key, jobs.c.id, postgresql_where=text("order_key IS NOT NULL"))
Index("jobs_unique", jobs.c.unique_key, unique=True, postgresql_where=text("unique_key IS NOT NULL"))
Index("jobs_slot", jobs.c.name, jobs.c.slot, unique=True, postgresql_where=text("slot IS NOT NULL"))

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("id", BigInteger, nullable=False, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("entity_id", Text),
    Column("payload", JSONB, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("due_at", _Moment, nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("original_delay", INTERVAL, nullable=False),
    Column("retry_count", SmallInteger, nullable=False),
    Column("max_retries", SmallInteger),
    Column("backoff_seconds", ARRAY(Integer)),
    Column("source", Text, nullable=False),
    Column("event_id", Uuid),
    Column("order_key", Text),
    Column("correlation_id", Uuid),
    Column("causation_id", Uuid),
    Column("traceparent", Text),
    Column("reason", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("error_kind", Text, nullable=False),
    Column("buried_at", _Moment, nullable=False),
    PrimaryKeyConstraint("id", name="dead_letters_pkey"),
    CheckConstraint(
        "reason IN ('retries_used_up', 'failed_for_good', 'worker_died', 'event_missing')",
        name="dead_letters_reason_is_known",
    ),
    postgresql_with={"vacuum_truncate": "false"},
)
Index("dead_letters_age", dead_letters.c.buried_at, dead_letters.c.id)
Index("dead_letters_name", dead_letters.c.name, dead_letters.c.buried_at)
Index("dead_letters_entity", dead_letters.c.entity_id, postgresql_where=text("entity_id IS NOT NULL"))
Index(
    "dead_letters_order",
    dead_letters.c.name,
    dead_letters.c.order_key,
    postgresql_where=text("order_key IS NOT NULL"),
)

executions = Table(
    "executions",
    metadata,
    Column("execution_id", Uuid, nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("name", Text, nullable=False),
    Column("entity_id", Text),
    Column("source", Text, nullable=False),
    Column("started_at", _Moment, nullable=False),
    Column("completed_at", _Moment, nullable=False),
    Column("succeeded", Boolean, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("message", Text),
    Column("retry_count", SmallInteger, nullable=False),
    Column("next_run_at", _Moment),
    Column("worker", Text, nullable=False),
    Column("lease_token", BigInteger, nullable=False),
    Column("event_id", Uuid),
    Column("correlation_id", Uuid),
    Column("causation_id", Uuid),
    CheckConstraint(
        "outcome IN ('done', 'duplicate', 'retried', 'snoozed', 'cancelled', 'buried', 'lost', 'released')",
        name="executions_outcome_is_known",
    ),
    postgresql_partition_by="RANGE (completed_at)",
)
Index("executions_job", executions.c.job_id)
Index("executions_name", executions.c.name, executions.c.completed_at)
Index(
    "executions_entity",
    executions.c.entity_id,
    executions.c.completed_at,
    postgresql_where=text("entity_id IS NOT NULL"),
)


@event.listens_for(executions, "after_create")
def _create_default_partition(_table: Table, connection: Connection, **_options: Any) -> None:
    """The partition of a day is made by duly.create_partitions; rows of no such day are in the default one."""
    connection.exec_driver_sql("CREATE TABLE duly.executions_default PARTITION OF duly.executions DEFAULT")
