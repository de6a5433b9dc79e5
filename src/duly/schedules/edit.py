"""The operators' door to schedules: a change is checked, audited, and heard by the scheduler at its commit.

A migration that seeds a schedule may as well write ``INSERT INTO duly.schedules (name, cron) VALUES ...
ON CONFLICT DO NOTHING``: the next tick computes its first run. ``seed_schedule`` also checks the expression.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from duly.db import Row, Statement, Tx, fetch, load_json, request_poke
from duly.errors import Conflict, Invalid, NotFound
from duly.messages import NAME, check_name, encode_payload
from duly.schedules.cron import Cron
from duly.schedules.misfire import MISFIRES, missed_words
from duly.schedules.sql import (
    ADD_SCHEDULE,
    CHANGE_SCHEDULE,
    LIST_SCHEDULES,
    LOCK_SCHEDULE,
    READ_NOW,
    READ_SCHEDULE,
    REMOVE_SCHEDULE,
    RESOLVE_BROKEN,
    TRIGGER_SCHEDULE,
    WRITE_AUDIT,
)
from duly.telemetry import current_origin

MAX_NAME_CHARACTERS = 100
MAX_ACTOR_CHARACTERS = 200
MAX_REASON_CHARACTERS = 1000
MAX_RETRIES = 1000
LIST_LIMIT = 1000


@dataclass(frozen=True)
class ScheduleRow:
    """One recurring definition as it stands in the database."""

    name: str
    cron: str
    timezone: str
    enabled: bool
    max_retries: int
    misfire: str
    dst_gap: str
    dst_overlap: str
    payload: dict[str, Any]
    last_run_at: datetime | None
    next_run_at: datetime | None
    missed_count: int
    missed_oldest: datetime | None
    missed_newest: datetime | None
    last_error: str | None
    version: int
    updated_at: datetime

    @property
    def missed(self) -> str:
        """How many occurrences the last downtime cost: ``0``, ``12``, or ``1000+``."""
        return missed_words(self.missed_count)

    def parsed(self) -> Cron:
        """Its expression and zone, checked; raises BadCron or BadZone when somebody broke them by hand."""
        return Cron(self.cron, self.timezone, self.dst_gap, self.dst_overlap)


async def add_schedule(
    tx: Tx,
    *,
    name: str,
    cron: str,
    timezone: str = "UTC",
    max_retries: int = 3,
    misfire: str = "run_once",
    dst_gap: str = "after",
    dst_overlap: str = "first",
    payload: Mapping[str, Any] | None = None,
    enabled: bool = True,
    actor: str,
    reason: str | None = None,
) -> ScheduleRow:
    """Add a schedule; Conflict when the name is taken."""
    wanted = Cron(cron, timezone, dst_gap, dst_overlap)
    added = await _add(tx, name, wanted, max_retries, misfire, payload, enabled, actor=actor, reason=reason)
    if added is None:
        raise Conflict(f"a schedule called {name!r} exists already: edit it, or choose another name")
    return added


async def seed_schedule(
    tx: Tx,
    *,
    name: str,
    cron: str,
    timezone: str = "UTC",
    max_retries: int = 3,
    misfire: str = "run_once",
    dst_gap: str = "after",
    dst_overlap: str = "first",
    payload: Mapping[str, Any] | None = None,
    enabled: bool = True,
    actor: str = "seed",
    reason: str | None = None,
) -> bool:
    """Add a schedule unless there is one of that name, which stays as it is; whether it was added."""
    wanted = Cron(cron, timezone, dst_gap, dst_overlap)
    added = await _add(tx, name, wanted, max_retries, misfire, payload, enabled, actor=actor, reason=reason)
    return added is not None


async def edit_schedule(
    tx: Tx,
    name: str,
    *,
    cron: str | None = None,
    timezone: str | None = None,
    max_retries: int | None = None,
    misfire: str | None = None,
    dst_gap: str | None = None,
    dst_overlap: str | None = None,
    payload: Mapping[str, Any] | None = None,
    expected_version: int | None = None,
    actor: str,
    reason: str | None = None,
) -> ScheduleRow:
    """Change what is given and leave the rest; in force from the next tick.

    A new timing counts from now; any other edit leaves the next run where it is, so that none is lost. With
    ``expected_version`` an edit made from an old page is a Conflict.
    """
    given: dict[str, Any] = {"cron": cron, "timezone": timezone, "dst_gap": dst_gap}
    given |= {"dst_overlap": dst_overlap, "max_retries": max_retries, "misfire": misfire}
    changes = {field: value for field, value in given.items() if value is not None}
    _check_people(actor, reason)
    if not changes and payload is None:
        raise Invalid("nothing to change: give a cron, timezone, max_retries, misfire, DST rule or payload")
    before, snapshot = await _lock(tx, name)
    if expected_version is not None and expected_version != before.version:
        raise Conflict(
            f"schedule {name!r} was changed meanwhile: it has version {before.version}, you saw "
            f"{expected_version}; look at it again, then repeat your edit"
        )
    after = replace(before, **changes)
    parsed = after.parsed()
    after = replace(after, cron=parsed.expression)
    if parsed != _parsed_or_none(before):
        after = await _from_now(tx, after)
    return await _change(tx, after, snapshot, "schedule.edited", payload=payload, actor=actor, reason=reason)


async def enable_schedule(tx: Tx, name: str, *, actor: str, reason: str | None = None) -> ScheduleRow:
    """Let it run again from now on: what fell due meanwhile is not missed. If enabled, nothing changes."""
    _check_people(actor, reason)
    before, snapshot = await _lock(tx, name)
    if before.enabled:
        return before
    after = await _from_now(tx, replace(before, enabled=True))
    return await _change(tx, after, snapshot, "schedule.enabled", actor=actor, reason=reason)


async def disable_schedule(tx: Tx, name: str, *, actor: str, reason: str | None = None) -> ScheduleRow:
    """Stop it from firing; jobs that are queued already still run. If disabled, nothing changes."""
    _check_people(actor, reason)
    before, snapshot = await _lock(tx, name)
    if not before.enabled:
        return before
    after = replace(before, enabled=False, next_run_at=None)
    return await _change(tx, after, snapshot, "schedule.disabled", actor=actor, reason=reason)


async def remove_schedule(tx: Tx, name: str, *, actor: str, reason: str | None = None) -> None:
    """Delete the definition; jobs that are queued already still run."""
    _check_people(actor, reason)
    _, snapshot = await _lock(tx, name)
    await fetch(tx, REMOVE_SCHEDULE, name=name)
    await fetch(tx, RESOLVE_BROKEN, names=[name])
    await _audit(tx, "schedule.removed", name, before=snapshot, actor=actor, reason=reason)
    request_poke(tx, "schedules")


async def trigger_schedule(tx: Tx, name: str, *, actor: str, reason: str | None = None) -> int:
    """Queue one run now, beside the schedule and whether or not it is enabled; the job's id."""
    _check_people(actor, reason)
    row = await get_schedule(tx, name)  # without a lock, so that the tick need not skip it
    origin = current_origin()
    queued = await fetch(
        tx,
        TRIGGER_SCHEDULE,
        name=name,
        original_delay=await _interval(tx, row),
        correlation_id=origin.correlation_id,
        causation_id=origin.causation_id,
        traceparent=origin.traceparent,
    )
    if not queued:
        raise _not_found(name)
    job_id = int(queued[0][0])
    after = json.dumps({"job_id": job_id})
    await _audit(tx, "schedule.triggered", name, after=after, actor=actor, reason=reason)
    request_poke(tx, "jobs")
    return job_id


async def list_schedules(tx: Tx, *, after_name: str = "", limit: int = LIST_LIMIT) -> list[ScheduleRow]:
    """The schedules by name, a page at a time: pass the last name of one page to get the next."""
    if "\x00" in after_name:
        raise Invalid("after_name is the last name of the page before")
    rows = await fetch(tx, LIST_SCHEDULES, after_name=after_name, limit=max(0, min(limit, LIST_LIMIT)))
    return [_row(row) for row in rows]


async def get_schedule(tx: Tx, name: str) -> ScheduleRow:
    """One schedule; NotFound when there is none of that name."""
    return (await _read(tx, READ_SCHEDULE, name))[0]


async def _add(
    tx: Tx,
    name: str,
    cron: Cron,
    max_retries: int,
    misfire: str,
    payload: Mapping[str, Any] | None,
    enabled: bool,
    *,
    actor: str,
    reason: str | None,
) -> ScheduleRow | None:
    if len(check_name("schedule name", name)) > MAX_NAME_CHARACTERS:
        raise Invalid(f"{name[:40]!r}...: a schedule name has at most {MAX_NAME_CHARACTERS} characters")
    _check_rules(max_retries, misfire)
    _check_people(actor, reason)
    added = await fetch(
        tx,
        ADD_SCHEDULE,
        name=name,
        cron=cron.expression,
        timezone=cron.timezone,
        enabled=enabled,
        max_retries=max_retries,
        misfire=misfire,
        dst_gap=cron.dst_gap,
        dst_overlap=cron.dst_overlap,
        payload=encode_payload(payload or {}),
        next_run_at=cron.next_after(await _now(tx)) if enabled else None,
    )
    if not added:
        return None
    row, snapshot = await _read(tx, READ_SCHEDULE, name)
    await _audit(tx, "schedule.added", name, after=snapshot, actor=actor, reason=reason)
    request_poke(tx, "schedules")
    return row


async def _change(
    tx: Tx,
    after: ScheduleRow,
    snapshot: str,
    action: str,
    *,
    payload: Mapping[str, Any] | None = None,
    actor: str,
    reason: str | None,
) -> ScheduleRow:
    """Write the row; a payload that is not given stays as the database has it, number for number."""
    _check_rules(after.max_retries, after.misfire)
    await fetch(
        tx,
        CHANGE_SCHEDULE,
        name=after.name,
        cron=after.cron,
        timezone=after.timezone,
        enabled=after.enabled,
        max_retries=after.max_retries,
        misfire=after.misfire,
        dst_gap=after.dst_gap,
        dst_overlap=after.dst_overlap,
        payload=None if payload is None else encode_payload(payload),
        next_run_at=after.next_run_at,
        last_error=after.last_error,
    )
    if after.last_error is None:
        await fetch(tx, RESOLVE_BROKEN, names=[after.name])
    row, changed = await _read(tx, READ_SCHEDULE, after.name)
    await _audit(tx, action, after.name, before=snapshot, after=changed, actor=actor, reason=reason)
    request_poke(tx, "schedules")
    return row


async def _from_now(tx: Tx, row: ScheduleRow) -> ScheduleRow:
    """The row with its next run counted from now, if it is to run at all."""
    following = row.parsed().next_after(await _now(tx)) if row.enabled else None
    return replace(row, next_run_at=following, last_error=None)


async def _interval(tx: Tx, row: ScheduleRow) -> timedelta:
    """The time between its runs; zero for a broken one, which an operator may need to run all the same."""
    cron = _parsed_or_none(row)
    return cron.interval_at(cron.next_after(await _now(tx))) if cron else timedelta()


def _parsed_or_none(row: ScheduleRow) -> Cron | None:
    try:
        return row.parsed()
    except Invalid:
        return None


async def _now(tx: Tx) -> datetime:
    [[now]] = await fetch(tx, READ_NOW)
    assert isinstance(now, datetime)
    return now


async def _lock(tx: Tx, name: str) -> tuple[ScheduleRow, str]:
    return await _read(tx, LOCK_SCHEDULE, name)


async def _read(tx: Tx, statement: Statement, name: str) -> tuple[ScheduleRow, str]:
    found = await fetch(tx, statement, name=name) if NAME.fullmatch(name) else []
    if not found:
        raise _not_found(name)
    *columns, snapshot = found[0]
    return _row(columns), snapshot


def _not_found(name: str) -> NotFound:
    return NotFound(f"there is no schedule called {name[:100]!r}: list the schedules to see their names")


def _row(columns: Row) -> ScheduleRow:
    row = ScheduleRow(*columns)
    return replace(row, payload=load_json(str(row.payload)))


async def _audit(
    tx: Tx,
    action: str,
    name: str,
    *,
    before: str | None = None,
    after: str | None = None,
    actor: str,
    reason: str | None,
) -> None:
    about = {"action": action, "subject": f"schedule:{name}", "before": before, "after": after}
    await fetch(tx, WRITE_AUDIT, actor=actor, reason=reason, **about)


def _check_rules(max_retries: int, misfire: str) -> None:
    if not 0 <= max_retries <= MAX_RETRIES:
        raise Invalid(f"max_retries={max_retries}: give 0 to {MAX_RETRIES}")
    if misfire not in MISFIRES:
        raise Invalid(f"misfire={misfire!r}: choose {', '.join(MISFIRES)}")


def _check_people(actor: str, reason: str | None) -> None:
    if not actor.strip() or len(actor) > MAX_ACTOR_CHARACTERS or "\x00" in actor:
        raise Invalid(f"say who does this: an actor has 1 to {MAX_ACTOR_CHARACTERS} characters")
    if reason is not None and (len(reason) > MAX_REASON_CHARACTERS or "\x00" in reason):
        raise Invalid(f"a reason has at most {MAX_REASON_CHARACTERS} characters, and no NUL")
