"""Every statement on the tables of decisions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import select

from apps.finance.decisions import sql
from apps.finance.decisions.model import (
    Outcome,
    RuleRecord,
    RuleSetRecord,
    RuleVersion,
    Snapshot,
    Status,
    ValueList,
)
from apps.finance.decisions.tables import list_versions, rule_versions, rules
from apps.finance.decisions.tables import metadata as metadata
from duly import Tx
from duly.db import note_mark

_RULE = select(
    rules,
    *(
        rule_versions.c[name].label(f"newest_{name}")
        for name in ("name", "priority", "terminate", "conditions", "action", "created_by", "created_at")
    ),
).join(rule_versions, (rule_versions.c.rule_id == rules.c.id) & (rule_versions.c.version == rules.c.version))


async def lock_changes(tx: Tx) -> None:
    """Be alone with what is in force until the transaction ends."""
    await tx.execute(sql.LOCK_CHANGES, {"key": sql.ADVISORY_KEY})


async def find_rule_set(tx: Tx, rule_set_id: str) -> RuleSetRecord | None:
    """One by its id."""
    row = (await tx.execute(sql.FIND_RULE_SET, {"id": rule_set_id})).mappings().one_or_none()
    return RuleSetRecord(**row) if row else None


async def list_rule_sets(tx: Tx, *, after: str | None, limit: int) -> list[RuleSetRecord]:
    """By name."""
    return [
        RuleSetRecord(**row)
        for row in (await tx.execute(sql.LIST_RULE_SETS, {"after": after, "limit": limit})).mappings()
    ]  # fmt: skip


async def insert_rule_set(tx: Tx, rule_set_id: str, *, description: str) -> bool:
    """Write one that has no version yet; whether the id was free."""
    made = await tx.execute(sql.INSERT_RULE_SET, {"id": rule_set_id, "description": description})
    return made.scalar_one_or_none() is not None


async def count_rule_sets(tx: Tx) -> int:
    """How many there are."""
    found: int = (await tx.execute(sql.COUNT_RULE_SETS)).scalar_one()
    return found


async def describe_rule_set(tx: Tx, rule_set_id: str, *, description: str) -> None:
    """Change what is said about it."""
    await tx.execute(sql.DESCRIBE_RULE_SET, {"id": rule_set_id, "description": description})


async def publish(
    tx: Tx, rule_set_id: str, *, settings: Mapping[str, Any] | None = None, reason: str, actor: str
) -> RuleSetRecord:
    """Write the next version of a rule set, of what is active now, and put it in force."""
    values = {"id": rule_set_id, "settings": json.dumps(settings) if settings is not None else None}
    row = (await tx.execute(sql.PUBLISH, {**values, "reason": reason, "created_by": actor})).mappings().one()
    return RuleSetRecord(**row)


async def find_snapshot(tx: Tx, snapshot_id: UUID) -> Snapshot | None:
    """A version of a rule set with all its rules and lists."""
    row = (await tx.execute(sql.FIND_SNAPSHOT, {"id": snapshot_id})).mappings().one_or_none()
    if row is None:
        return None
    found = (await tx.execute(sql.FIND_RULES_OF_SNAPSHOT, {"id": snapshot_id})).mappings()
    written = tuple(RuleVersion(**one) for one in found)
    lists: dict[str, frozenset[str]] = {}
    if row["list_ids"]:
        listed = (await tx.execute(sql.FIND_LISTS_OF_SNAPSHOT, {"id": snapshot_id})).all()
        lists = {name: frozenset(members) for name, members in listed}
    return Snapshot(row["id"], row["rule_set_id"], row["version"], row["settings"], written, lists)


async def insert_rule(tx: Tx, *, rule_set_id: str, created_by: str, version: Mapping[str, Any]) -> UUID:
    """Write a draft with its first version."""
    values = {"rule_set_id": rule_set_id, "created_by": created_by}
    rule_id: UUID = (await tx.execute(sql.INSERT_RULE, values)).scalar_one()
    await _insert_version(tx, rule_id, 1, created_by, version)
    return rule_id


async def insert_rule_version(
    tx: Tx, rule_id: UUID, *, number: int, created_by: str, version: Mapping[str, Any]
) -> None:  # fmt: skip
    """Write the next version of a rule; the rule's row is locked."""
    await tx.execute(sql.RAISE_RULE_VERSION, {"id": rule_id, "version": number})
    await _insert_version(tx, rule_id, number, created_by, version)


async def lock_rule(tx: Tx, rule_id: UUID) -> bool:
    """Be alone with a rule; whether there is one."""
    return (await tx.execute(sql.LOCK_RULE, {"id": rule_id})).scalar_one_or_none() is not None


async def find_rule(tx: Tx, rule_id: UUID) -> RuleRecord | None:
    """One by its id, with its newest version."""
    row = (await tx.execute(_RULE.where(rules.c.id == rule_id))).mappings().one_or_none()
    return _rule(row) if row else None


async def list_rules(
    tx: Tx, *, rule_set_id: str | None, status: Status | None, before: UUID | None, limit: int
) -> list[RuleRecord]:
    """The newest first."""
    query = _RULE.order_by(rules.c.id.desc()).limit(limit)
    if rule_set_id is not None:
        query = query.where(rules.c.rule_set_id == rule_set_id)
    if status is not None:
        query = query.where(rules.c.status == status.value)
    if before is not None:
        query = query.where(rules.c.id < before)
    return [_rule(row) for row in (await tx.execute(query)).mappings()]


async def list_rule_versions(tx: Tx, rule_id: UUID, *, before: int | None, limit: int) -> list[RuleVersion]:
    """The newest first."""
    table = rule_versions.c
    columns = [table[name] for name in RuleVersion.__dataclass_fields__]
    query = select(*columns).where(table.rule_id == rule_id).order_by(table.version.desc()).limit(limit)
    if before is not None:
        query = query.where(table.version < before)
    return [RuleVersion(**row) for row in (await tx.execute(query)).mappings()]


async def activate_rule(tx: Tx, rule_id: UUID, *, version: int) -> None:
    """This version decides; it does so when the rule set is published."""
    await tx.execute(sql.ACTIVATE_RULE, {"id": rule_id, "version": version})


async def deprecate_rule(tx: Tx, rule_id: UUID) -> str | None:
    """It decides no more; its rule set, or None when nothing was to do."""
    return (await tx.execute(sql.DEPRECATE_RULE, {"id": rule_id})).scalar_one_or_none()


async def count_active(tx: Tx, rule_set_id: str) -> int:
    """How many rules are active."""
    found: int = (await tx.execute(sql.COUNT_ACTIVE, {"id": rule_set_id})).scalar_one()
    return found


async def put_list(tx: Tx, list_id: str, *, members: Sequence[str], actor: str) -> ValueList:
    """Write the next version of a list."""
    version = (await tx.execute(sql.UPSERT_LIST, {"id": list_id})).scalar_one()
    values = {"id": list_id, "version": version, "members": list(members), "created_by": actor}
    return _list((await tx.execute(sql.INSERT_LIST_VERSION, values)).mappings().one())


async def find_list(tx: Tx, list_id: str, *, version: int | None = None) -> ValueList | None:
    """One by its name, now or at a version."""
    row = (await tx.execute(sql.FIND_LIST, {"id": list_id, "version": version})).mappings().one_or_none()
    return _list(row) if row else None


async def list_lists(tx: Tx, *, after: str | None, limit: int) -> list[Mapping[str, Any]]:
    """By name, with their sizes."""
    return [dict(row) for row in (await tx.execute(sql.LIST_LISTS, {"after": after, "limit": limit})).mappings()]


async def find_list_versions(tx: Tx, list_id: str, *, limit: int) -> list[int]:
    """The numbers of the versions that are kept, newest first."""
    table = list_versions.c
    query = select(table.version).where(table.list_id == list_id).order_by(table.version.desc()).limit(limit)
    return list((await tx.execute(query)).scalars())


async def find_list_names(tx: Tx, names: Sequence[str]) -> frozenset[str]:
    """Those that exist."""
    return frozenset((await tx.execute(sql.FIND_LIST_NAMES, {"ids": list(names)})).scalars())


async def find_current_lists(tx: Tx, names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Their members now."""
    found = (await tx.execute(sql.FIND_CURRENT_LISTS, {"ids": list(names)})).all()
    return {name: frozenset(members) for name, members in found}


async def find_users_of_list(tx: Tx, list_id: str) -> list[str]:
    """The rule sets in force that look into it."""
    return list((await tx.execute(sql.FIND_USERS_OF_LIST, {"id": list_id})).scalars())


async def find_current(
    tx: Tx, rule_set_id: str, *, asked: Sequence[Mapping[str, Any]]
) -> tuple[UUID, datetime, list[Decimal | None]] | None:
    """Which snapshot is in force, what time it is, and these velocity facts: one statement."""
    if not asked:
        row = (await tx.execute(sql.FIND_CURRENT, {"id": rule_set_id})).one_or_none()
        return (row[0], row[1], []) if row and row[0] else None
    columns = {f"{name}s": [one[name] for one in asked] for name in ("function", "stream", "key", "window")}
    values = {**columns, "excluded": [one["excluded"] for one in asked], "most_distinct": sql.MOST_DISTINCT}
    row = (await tx.execute(sql.FIND_CURRENT_WITH_VELOCITY, {"id": rule_set_id, **values})).one_or_none()
    return (row[0], row[1], row[2]) if row and row[0] else None


async def observe(tx: Tx, observed: Sequence[Mapping[str, Any]]) -> None:
    """Count these."""
    columns = {f"{name}s": [one[name] for one in observed] for name in ("stream", "key", "amount", "value", "at")}
    await tx.execute(sql.OBSERVE, columns)


async def insert_decision(tx: Tx, values: Mapping[str, Any]) -> UUID:
    """Log a decision."""
    decision_id, mark = (await tx.execute(sql.INSERT_DECISION, values)).one()
    note_mark(tx, mark)
    return UUID(bytes=decision_id.bytes)


async def insert_decision_in_force(tx: Tx, values: Mapping[str, Any]) -> tuple[UUID, datetime] | None:
    """Log a decision if its snapshot is in force, and say when; None when it is not, or there is no such rule set."""
    row = (await tx.execute(sql.INSERT_DECISION_IN_FORCE, values)).one_or_none()
    if row is None:
        return None
    decision_id, at, mark = row
    note_mark(tx, mark)
    return UUID(bytes=decision_id.bytes), at


async def insert_decisions(
    tx: Tx, shared: Mapping[str, Any], made: Sequence[Mapping[str, Any]]
) -> list[UUID]:  # fmt: skip
    """Log many decisions of one rule set at one moment; their ids, in the same order."""
    names = ("subject", "decision", "score", "facts", "matched", "incomplete", "evaluated", "latency_us")
    columns = {f"{name}s": [one[name] for one in made] for name in names}
    return [row[0] for row in await tx.execute(sql.INSERT_DECISIONS, {**shared, **columns})]


async def find_decision(tx: Tx, decision_id: UUID) -> Mapping[str, Any] | None:
    """One of the log."""
    row = (await tx.execute(sql.FIND_DECISION, {"id": decision_id})).mappings().one_or_none()
    return dict(row) if row else None


async def list_decisions(
    tx: Tx, *, rule_set_id: str, decision: str | None, before: UUID | None, limit: int
) -> list[Mapping[str, Any]]:
    """The newest first, of one rule set."""
    values = {"rule_set_id": rule_set_id, "before": before, "limit": limit}
    if decision is not None and decision != Outcome.APPROVE.value:
        found = await tx.execute(sql.LIST_FLAGGED, {**values, "decision": decision})
    else:
        found = await tx.execute(sql.LIST_DECISIONS, {**values, "decision": decision})
    return [dict(row) for row in found.mappings()]


async def find_ids_of_window(tx: Tx, since: datetime | None, until: datetime | None) -> tuple[UUID, UUID]:
    """The range of ids that a range of time is; the last seven days unless it says otherwise."""
    row = (await tx.execute(sql.FIND_IDS_OF_WINDOW, {"since": since, "until": until})).one()
    return row[0], row[1]


async def find_facts(
    tx: Tx, *, rule_set_id: str, since: UUID, before: UUID, limit: int
) -> list[tuple[UUID, dict[str, Any], str]]:
    """What was decided about, newest first."""
    values = {"rule_set_id": rule_set_id, "since": since, "before": before, "limit": limit}
    return [(row[0], row[1], row[2]) for row in (await tx.execute(sql.FIND_FACTS, values)).all()]


async def create_partitions(tx: Tx, *, days: int) -> int:
    """Make the log's partitions of the days ahead."""
    await tx.execute(sql.BOUND_LOCK_WAIT)
    made: int = (await tx.execute(sql.CREATE_PARTITIONS, {"days": days})).scalar_one()
    return made


async def drop_partitions(tx: Tx, *, days: int) -> int:
    """Drop the days of the log that are older than this."""
    await tx.execute(sql.BOUND_LOCK_WAIT)
    gone: int = (await tx.execute(sql.DROP_PARTITIONS, {"days": days})).scalar_one()
    return gone


async def forget(tx: Tx, *, log_days: int, observation_days: int, batch: int) -> dict[str, int]:
    """Delete a batch of each kind that is too old to matter; how many of each."""
    await tx.execute(sql.ALLOW_FORGETTING)
    gone = {}
    for name, statement, days in (
        ("strays", sql.FORGET_STRAYS, log_days), ("snapshots", sql.FORGET_SNAPSHOTS, log_days + 2),
        ("buckets", sql.FORGET_BUCKETS, observation_days), ("sightings", sql.FORGET_SIGHTINGS, observation_days),
    ):  # fmt: skip
        gone[name] = (await tx.execute(statement, {"days": days, "batch": batch})).scalar_one()
    gone["list versions"] = (await tx.execute(sql.FORGET_LIST_VERSIONS, {"days": log_days + 2})).scalar_one()
    return gone


async def _insert_version(tx: Tx, rule_id: UUID, number: int, created_by: str, version: Mapping[str, Any]) -> None:
    await tx.execute(
        sql.INSERT_RULE_VERSION,
        {
            **version, "rule_id": rule_id, "version": number, "created_by": created_by,
            "conditions": json.dumps(version["conditions"]), "action": json.dumps(version["action"]),
        },
    )  # fmt: skip


def _rule(row: Mapping[Any, Any]) -> RuleRecord:
    newest = {name.removeprefix("newest_"): one for name, one in row.items() if name.startswith("newest_")}
    own = {name: one for name, one in row.items() if not name.startswith("newest_")}
    written = RuleVersion(rule_id=row["id"], version=row["version"], **newest)
    return RuleRecord(**{**own, "status": Status(row["status"])}, newest=written)


def _list(row: Mapping[Any, Any]) -> ValueList:
    return ValueList(**{**row, "members": tuple(row["members"])})
