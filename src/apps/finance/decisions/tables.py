"""The tables of decisions, as the migration makes them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    DateTime,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

metadata = MetaData(schema="decisions")
_Moment = DateTime(timezone=True)

rule_sets = Table(
    "rule_sets",
    metadata,
    Column("id", Text, primary_key=True),
    Column("description", Text, nullable=False),
    Column("version", Integer, nullable=False, server_default=text("0")),
    Column("snapshot_id", Uuid),
    Column("created_at", _Moment, nullable=False),
    Column("updated_at", _Moment, nullable=False),
    CheckConstraint("id ~ '^[a-z0-9][a-z0-9-]{0,63}$'", name="rule_sets_id_is_a_name"),
    CheckConstraint(
        "(version = 0) = (snapshot_id IS NULL) AND version >= 0", name="rule_sets_version_has_a_snapshot"
    ),
)  # fmt: skip

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("rule_set_id", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("settings", JSONB, nullable=False),
    Column("rule_ids", ARRAY(Uuid), nullable=False),
    Column("rule_versions", ARRAY(Integer), nullable=False),
    Column("list_ids", ARRAY(Text), nullable=False),
    Column("list_versions", ARRAY(Integer), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("created_at", _Moment, nullable=False),
    ForeignKeyConstraint(["rule_set_id"], ["decisions.rule_sets.id"], name="snapshots_rule_set_exists"),
    CheckConstraint("version > 0", name="snapshots_version_is_positive"),
    CheckConstraint(
        "cardinality(rule_ids) = cardinality(rule_versions) AND cardinality(list_ids) = cardinality(list_versions)",
        name="snapshots_are_whole",
    ),
)
Index("snapshots_version", snapshots.c.rule_set_id, snapshots.c.version, unique=True)

rules = Table(
    "rules",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("rule_set_id", Text, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'DRAFT'")),
    Column("version", Integer, nullable=False),
    Column("active_version", Integer),
    Column("created_by", Text, nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("updated_at", _Moment, nullable=False),
    ForeignKeyConstraint(["rule_set_id"], ["decisions.rule_sets.id"], name="rules_rule_set_exists"),
    CheckConstraint("status IN ('DRAFT', 'ACTIVE', 'DEPRECATED')", name="rules_status_is_known"),
    CheckConstraint("version > 0", name="rules_version_is_positive"),
    CheckConstraint(
        "(status = 'ACTIVE') = (active_version IS NOT NULL) AND active_version BETWEEN 1 AND version",
        name="rules_active_has_a_version",
    ),
)
Index("rules_of_a_set", rules.c.rule_set_id, rules.c.id)
Index("rules_active", rules.c.rule_set_id, postgresql_where=text("status = 'ACTIVE'"))

rule_versions = Table(
    "rule_versions",
    metadata,
    Column("rule_id", Uuid, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("terminate", Boolean, nullable=False),
    Column("conditions", JSONB, nullable=False),
    Column("action", JSONB, nullable=False),
    Column("list_ids", ARRAY(Text), nullable=False),
    Column("created_by", Text, nullable=False),
    Column("created_at", _Moment, nullable=False),
    ForeignKeyConstraint(["rule_id"], ["decisions.rules.id"], name="rule_versions_rule_exists"),
    CheckConstraint("version > 0", name="rule_versions_version_is_positive"),
)

lists = Table(
    "lists",
    metadata,
    Column("id", Text, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("created_at", _Moment, nullable=False),
    Column("updated_at", _Moment, nullable=False),
    CheckConstraint("id ~ '^[a-z0-9][a-z0-9-]{0,63}$'", name="lists_id_is_a_name"),
    CheckConstraint("version > 0", name="lists_version_is_positive"),
)

list_versions = Table(
    "list_versions",
    metadata,
    Column("list_id", Text, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("members", ARRAY(Text), nullable=False),
    Column("created_by", Text, nullable=False),
    Column("created_at", _Moment, nullable=False),
    ForeignKeyConstraint(["list_id"], ["decisions.lists.id"], name="list_versions_list_exists"),
    CheckConstraint("cardinality(members) <= 10000", name="list_versions_are_bounded"),
)

log = Table(
    "log",
    metadata,
    Column("id", Uuid, nullable=False),
    Column("rule_set_id", Text, nullable=False),
    Column("rule_set_version", Integer, nullable=False),
    Column("snapshot_id", Uuid, nullable=False),
    Column("engine", Text, nullable=False),
    Column("subject", Text),
    Column("at", _Moment, nullable=False),
    Column("decision", Text, nullable=False),
    Column("score", Integer),
    Column("facts", JSONB, nullable=False),
    Column("matched", JSONB, nullable=False),
    Column("incomplete", JSONB, nullable=False),
    Column("evaluated", Integer, nullable=False),
    Column("latency_us", Integer, nullable=False),
    PrimaryKeyConstraint("id", name="log_pkey"),
    CheckConstraint("decision IN ('APPROVE', 'REVIEW', 'REJECT')", name="log_decision_is_known"),
    postgresql_partition_by="RANGE (id)",
)
Index("log_rule_set", log.c.rule_set_id, log.c.id)
Index(
    "log_flagged", log.c.rule_set_id, log.c.decision, log.c.id, postgresql_where=text("decision <> 'APPROVE'")
)  # fmt: skip


@event.listens_for(log, "after_create")
def _create_default_partition(_table: Table, connection: Connection, **_options: Any) -> None:
    """The partition of a day is made by decisions.create_partitions; rows of no such day are in the default one."""
    connection.exec_driver_sql("CREATE TABLE decisions.log_default PARTITION OF decisions.log DEFAULT")


buckets = Table(
    "buckets",
    metadata,
    Column("stream", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("width", Text, primary_key=True),
    Column("start", _Moment, primary_key=True),
    Column("count", BigInteger, nullable=False),
    Column("total", Numeric, nullable=False),
    Column("largest", Numeric, nullable=False),
    CheckConstraint("width IN ('minute', 'hour')", name="buckets_width_is_known"),
    CheckConstraint("count > 0", name="buckets_hold_something"),
    postgresql_with={"fillfactor": 70},
)
Index("buckets_start", buckets.c.start)

sightings = Table(
    "sightings",
    metadata,
    Column("stream", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", Text, primary_key=True),
    Column("seen_at", _Moment, nullable=False),
)
Index("sightings_of_a_key", sightings.c.stream, sightings.c.key, sightings.c.seen_at)
Index("sightings_seen", sightings.c.seen_at)
