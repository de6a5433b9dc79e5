"""Reading and writing alerts, cases and their timelines. Never commits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import TextClause

from apps.finance.compliance import sql
from apps.finance.compliance.model import (
    Alert,
    Case,
    Effect,
    Kind,
    Line,
    LineKind,
    Proposal,
    ReasonCode,
    Resolution,
    Severity,
    Status,
    Verdict,
)
from apps.finance.compliance.tables import metadata as metadata
from apps.shared.money import MINOR_UNITS
from duly import Tx
from duly.ids import uuid7

MOST_LINES_READ = 200
MOST_LINES_OF_A_FILE = 10_000
LAST_LINE = 2_147_483_647


@dataclass(frozen=True)
class Locked:
    """A case that nobody else changes until the commit, and what time it is."""

    case: Case
    now: datetime


@dataclass(frozen=True)
class NewCase:
    """A case that is not open yet, with why."""

    payment_id: UUID | None
    transaction_id: UUID | None
    decision_id: UUID | None
    rule_set_version: int | None
    outcome: str
    severity: Severity
    facts: Mapping[str, Any]
    matched: Sequence[Mapping[str, Any]]
    incomplete: Sequence[Mapping[str, Any]]
    trace: Sequence[Mapping[str, Any]]
    amount: Decimal
    currency: str
    initiated_by: str | None
    needs_two: bool
    hours: int
    latest: datetime | None = None
    """When it is due at the latest, however many hours there are."""


@dataclass(frozen=True)
class Filters:
    """Which cases of the queue."""

    status: Status | None = None
    kind: Kind | None = None
    severity: Severity | None = None
    assignee: str | None = None
    is_overdue: bool = False
    hidden_from: str | None = None


async def open_cases(tx: Tx, kind: Kind, rule_set_id: str, new: Sequence[NewCase]) -> list[Case]:
    """Write those that have no alert yet, in one statement; they are the answer."""
    values: dict[str, Any] = {"kind": kind.value, "rule_set_id": rule_set_id}
    values |= {"alert_ids": [uuid7() for _ in new], "case_ids": [uuid7() for _ in new]}
    for name in ("payment_id", "transaction_id", "decision_id", "rule_set_version", "outcome", "currency", "needs_two"):
        values[f"{name}s"] = [getattr(one, name) for one in new]
    for name in ("facts", "matched", "incomplete", "trace"):
        values[f"{name}s"] = [json.dumps(getattr(one, name)) for one in new]
    values |= {
        "severitys": [one.severity.value for one in new], "initiators": [one.initiated_by for one in new],
        "hourss": [one.hours for one in new], "latests": [one.latest for one in new],
        "amounts": [int(one.amount.scaleb(MINOR_UNITS[one.currency])) for one in new],
    }  # fmt: skip
    return [_case(row) for row in (await tx.execute(sql.OPEN_CASES, values)).mappings()]


async def reopen_case(tx: Tx, case: Case, *, actor: str, needs_two: bool, hours: int, detail: Any) -> Case | None:
    """A new one that follows it; None when another does already."""
    values = {"id": uuid7(), "reopens_id": case.id, "actor": actor, "needs_two": needs_two, "hours": hours}
    row = (await tx.execute(sql.REOPEN_CASE, values | {"detail": json.dumps(detail)})).mappings().one_or_none()
    return _case(row) if row else None


async def save_case(tx: Tx, was: Case, after: Case, *, actor: str, kind: LineKind, detail: Mapping[str, Any]) -> Case:
    """Write a change of one that is locked, with its line; the version says that it is the one that was read."""
    proposal, resolution = after.proposal, after.resolution
    values: dict[str, Any] = {
        "id": was.id, "version": was.version, "status": after.status.value, "needs_two": after.needs_two,
        "assignee": after.assignee, "overdue_at": after.overdue_at, "ended_at": after.ended_at,
        "proposed_decision": proposal and proposal.decision.value,
        "proposed_code": proposal and proposal.reason_code.value, "proposed_reason": proposal and proposal.reason,
        "proposed_by": proposal and proposal.by, "proposed_at": proposal and proposal.at,
        "decision": resolution and resolution.decision.value,
        "reason_code": resolution and resolution.reason_code.value, "reason": resolution and resolution.reason,
        "effect": resolution and resolution.effect.value, "resolved_by": resolution and resolution.by,
        "confirmed_by": resolution and resolution.confirmed_by,
        "actor": actor, "kind": kind.value, "detail": json.dumps(detail),
    }  # fmt: skip
    return _case((await tx.execute(sql.SAVE_CASE, values)).mappings().one())


async def lock_case(tx: Tx, case_id: UUID) -> Locked | None:
    """One by its id."""
    row = (await tx.execute(sql.LOCK_CASE, {"id": case_id})).mappings().one_or_none()
    return Locked(_case(row), row["moment"]) if row else None


async def lock_open_of_payment(tx: Tx, payment_id: UUID) -> list[Locked]:
    """Those about the review of a payment that have not ended: one, if any."""
    found = (await tx.execute(sql.LOCK_OPEN_OF_PAYMENT, {"id": payment_id})).mappings()
    return [Locked(_case(row), row["moment"]) for row in found]


async def find_case(tx: Tx, case_id: UUID) -> Case | None:
    """One by its id."""
    row = (await tx.execute(sql.FIND_CASE, {"id": case_id})).mappings().one_or_none()
    return _case(row) if row else None


async def find_successors(tx: Tx, case_ids: Sequence[UUID]) -> dict[UUID, UUID]:
    """Which case reopened which."""
    return {row[0]: row[1] for row in await tx.execute(sql.FIND_SUCCESSORS, {"ids": list(case_ids)})}


async def find_alerts(tx: Tx, alert_ids: Sequence[UUID]) -> dict[UUID, Alert]:
    """By their ids."""
    found = (await tx.execute(sql.FIND_ALERTS, {"ids": list(alert_ids)})).mappings()
    return {
        row["id"]: Alert(**{**row, "source": Kind(row["source"]), "severity": Severity(row["severity"])})
        for row in found
    }


async def find_cased(tx: Tx, payment_ids: Sequence[UUID]) -> set[UUID]:
    """Those of these payments that have a case of their review."""
    return set((await tx.execute(sql.FIND_CASED, {"payment_ids": list(payment_ids)})).scalars())


async def read_timeline(
    tx: Tx, case_id: UUID, *, before: int = LAST_LINE, limit: int = MOST_LINES_READ
) -> list[Line]:  # fmt: skip
    """What happened last before that line, in order."""
    found = await tx.execute(sql.READ_TIMELINE, {"id": case_id, "before": before, "limit": limit})
    return [_line(row) for row in found.mappings()][::-1]


async def read_timelines(tx: Tx, case_ids: Sequence[UUID]) -> dict[UUID, list[Line]]:
    """All of each, up to a limit that no case reaches."""
    lines: dict[UUID, list[Line]] = {}
    found = await tx.execute(sql.READ_TIMELINES, {"ids": list(case_ids), "limit": MOST_LINES_OF_A_FILE})
    for row in found.mappings():
        lines.setdefault(row["case_id"], []).append(_line(row))
    return lines


async def find_cases_about(
    tx: Tx, *, payment_id: UUID | None, transaction_ids: Sequence[UUID], limit: int
) -> list[Case]:
    """In the order in which they were opened."""
    values = {"payment_id": payment_id, "transaction_ids": list(transaction_ids), "limit": limit}
    return [_case(row) for row in (await tx.execute(sql.FIND_CASES_ABOUT, values)).mappings()]


async def list_cases(tx: Tx, filters: Filters, *, before: UUID | None, limit: int) -> list[Case]:
    """A page, the newest first."""
    statement, values = choose_list(filters)
    found = await tx.execute(statement, {**values, "before": before, "limit": limit})
    return [_case(row) for row in found.mappings()]


def choose_list(filters: Filters) -> tuple[TextClause, dict[str, Any]]:
    """The statement that goes along the index which fits the filters, and what it asks for."""
    given: dict[str, Any] = {
        "status": filters.status, "kind": filters.kind, "severity": filters.severity, "assignee": filters.assignee,
    }  # fmt: skip
    named = [name for name, value in given.items() if value is not None]
    shown = {"hidden_from": filters.hidden_from}
    if filters.is_overdue:
        return sql.LIST_OVERDUE, given | shown
    if not named:
        return sql.LIST_CASES, shown
    if len(named) == 1:
        return sql.LIST_BY_ONE[named[0]], shown | {named[0]: given[named[0]]}
    statement = sql.LIST_BY_LABEL if filters.assignee is None else sql.LIST_OF_ASSIGNEE_BY_LABEL
    return statement, shown | {"labels": _labels(filters)}


def _labels(filters: Filters) -> list[str]:
    """Every label of cases that these filters let through: 16 at most, for there are two of them or more."""
    parts: list[list[str]] = [[filters.assignee]] if filters.assignee is not None else []
    parts += [
        [filters.kind] if filters.kind else list(Kind),
        [filters.severity] if filters.severity else list(Severity),
        [filters.status] if filters.status else list(Status),
    ]
    return [" ".join(one) for one in itertools.product(*parts)]


async def read_waiting(tx: Tx, *, after: UUID, limit: int) -> list[tuple[UUID, datetime, datetime | None]]:
    """A page of those that have not ended: when each is due, and since when it is overdue."""
    found = await tx.execute(sql.READ_WAITING, {"after": after, "limit": limit})
    return [(row[0], row[1], row[2]) for row in found]


async def count_by_status(
    tx: Tx, statuses: Sequence[Status], *, hidden_from: str | None, cap: int
) -> dict[Status, int]:  # fmt: skip
    """How many are in each that this person may know of, counted up to a cap."""
    values = {"statuses": [one.value for one in statuses], "hidden_from": hidden_from, "cap": cap}
    rows = await tx.execute(sql.COUNT_BY_STATUS, values)
    return {Status(status): number for status, number in rows}


async def count_overdue(tx: Tx, *, hidden_from: str | None, cap: int) -> int:
    """How many are late that this person may know of, counted up to a cap."""
    found: int = (await tx.execute(sql.COUNT_OVERDUE, {"hidden_from": hidden_from, "cap": cap})).scalar_one()
    return found


async def lock_alerts(tx: Tx, subject: str) -> list[int]:
    """The engine's open alerts of this subject: nobody else closes them until the commit."""
    return [row[0] for row in await tx.execute(sql.LOCK_ALERTS, {"subject": subject})]


async def forget(tx: Tx, *, days: int, limit: int) -> tuple[int, int]:
    """Delete the oldest that have ended, with timelines and alerts; how many were looked at, and how many went."""
    ids = list((await tx.execute(sql.LOCK_OLD, {"days": days, "limit": limit})).scalars())
    if not ids:
        return 0, 0
    await tx.execute(sql.ALLOW_FORGETTING)
    await tx.execute(sql.FORGET_LINES, {"ids": ids})
    alert_ids = list((await tx.execute(sql.FORGET_CASES, {"ids": ids})).scalars())
    await tx.execute(sql.FORGET_ALERTS, {"ids": alert_ids})
    return len(ids), len(alert_ids)


def _case(row: Mapping[Any, Any]) -> Case:
    proposal = resolution = None
    if row["proposed_by"] is not None:
        proposal = Proposal(
            Verdict(row["proposed_decision"]), ReasonCode(row["proposed_code"]), row["proposed_reason"],
            row["proposed_by"], row["proposed_at"],
        )  # fmt: skip
    if row["decision"] is not None:
        resolution = Resolution(
            Verdict(row["decision"]), ReasonCode(row["reason_code"]), row["reason"], row["resolved_by"],
            row["confirmed_by"], Effect(row["effect"]),
        )  # fmt: skip
    digits = MINOR_UNITS[row["currency"]]
    names = (
        "id", "alert_id", "payment_id", "transaction_id", "currency", "initiated_by", "needs_two", "due_at", "version",
        "created_at", "updated_at", "assignee", "overdue_at", "ended_at", "reopens_id", "reopened_by",
    )  # fmt: skip
    return Case(
        **{name: row[name] for name in names}, kind=Kind(row["kind"]), status=Status(row["status"]),
        severity=Severity(row["severity"]), amount=Decimal(row["amount"]).scaleb(-digits), proposal=proposal,
        resolution=resolution,
    )  # fmt: skip


def _line(row: Mapping[Any, Any]) -> Line:
    return Line(row["number"], row["at"], row["actor"], LineKind(row["kind"]), row["detail"])
