"""Schedules and cancels deferred jobs in the caller's own transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from duly.db import Statement, fetch, fetch_sync, must_notify, origin_of
from duly.errors import AlreadyScheduled, Invalid
from duly.messages import check_name, check_text, encode_payload

OnConflict = Literal["replace", "keep", "reject", "allow"]
MAX_JOBS_AT_ONCE = 10_000
NORMAL_PRIORITY = 3

_SCHEDULED = """duly.schedule_many(
    CAST(:names AS text[]), CAST(:entity_ids AS text[]), CAST(:run_ats AS timestamptz[]),
    CAST(CAST(:payloads AS text[]) AS jsonb[]), CAST(:on_conflict AS text), CAST(:priority AS smallint),
    CAST(:max_retries AS smallint), CAST(:backoff_seconds AS integer[]), 'Deferred', CAST(:correlation_id AS uuid),
    CAST(:causation_id AS uuid), CAST(:traceparent AS text), CAST(:notify AS boolean))"""
SCHEDULE = Statement("SELECT " + _SCHEDULED)
SCHEDULE_MANY = Statement("SELECT count(*)::int FROM " + _SCHEDULED)  # noqa: S608 - joined from constants
CANCEL = Statement("SELECT duly.cancel(CAST(:name AS text), CAST(:entity_id AS text))")
FIND_QUEUED = Statement("""
SELECT DISTINCT entity_id FROM duly.jobs
WHERE entity_id = ANY(CAST(:entity_ids AS text[])) AND name = CAST(:name AS text)
""")


@dataclass(frozen=True)
class NewJob:
    """One job of many, for ``schedule_many``."""

    name: str
    entity_id: str | UUID | int | None = None
    run_at: datetime | None = None
    payload: Mapping[str, Any] = field(default_factory=dict)


async def schedule(
    tx: Any,
    name: str,
    entity_id: str | UUID | int | None = None,
    run_at: datetime | None = None,
    *,
    payload: Mapping[str, Any] | None = None,
    on_conflict: OnConflict = "replace",
    priority: int = NORMAL_PRIORITY,
    max_retries: int | None = None,
    backoff: Sequence[float | timedelta] | None = None,
) -> int:
    """Run the job ``name`` at ``run_at`` (now, if not given); one INSERT in the caller's transaction.

    While it is pending there is one job for each (name, entity). A second call moves its time (``replace``), leaves
    it (``keep``), raises AlreadyScheduled (``reject``), or makes another (``allow``).
    """
    job = NewJob(name, entity_id, run_at, payload or {})
    values = _values(tx, [job], on_conflict, priority, max_retries, backoff)
    rows = await fetch(tx, SCHEDULE, notify=must_notify(tx, "jobs"), **values)
    return _only(rows, job)


async def schedule_many(
    tx: Any,
    jobs: Sequence[NewJob],
    *,
    on_conflict: OnConflict = "replace",
    priority: int = NORMAL_PRIORITY,
    max_retries: int | None = None,
    backoff: Sequence[float | timedelta] | None = None,
) -> int:
    """Schedule many jobs in one statement; how many are now pending because of it."""
    if not jobs:
        return 0
    values = _values(tx, jobs, on_conflict, priority, max_retries, backoff)
    rows = await fetch(tx, SCHEDULE_MANY, notify=must_notify(tx, "jobs"), **values)
    count: int = rows[0][0]
    if on_conflict == "reject" and count < len(jobs):
        raise AlreadyScheduled(f"{len(jobs) - count} of these jobs are pending already")
    return count


async def cancel(tx: Any, name: str, entity_id: str | UUID | int) -> int:
    """Delete what is still pending for (name, entity); how many. A job that runs already is not touched."""
    rows = await fetch(tx, CANCEL, name=name, entity_id=_entity(entity_id))
    return int(rows[0][0])


async def find_queued(tx: Any, name: str, entity_ids: Sequence[str | UUID | int]) -> set[str]:
    """Those of these entities that have a job of this name in the queue, pending or running; dead letters are not."""
    if len(entity_ids) > MAX_JOBS_AT_ONCE:
        raise Invalid(f"{len(entity_ids)} entities at once: ask for at most {MAX_JOBS_AT_ONCE} in one call")
    if not entity_ids:
        return set()
    rows = await fetch(tx, FIND_QUEUED, name=_job_name(name), entity_ids=[_entity(one) for one in entity_ids])
    return {row[0] for row in rows}


def schedule_sync(
    tx: Any,
    name: str,
    entity_id: str | UUID | int | None = None,
    run_at: datetime | None = None,
    *,
    payload: Mapping[str, Any] | None = None,
    on_conflict: OnConflict = "replace",
    priority: int = NORMAL_PRIORITY,
    max_retries: int | None = None,
    backoff: Sequence[float | timedelta] | None = None,
) -> int:
    """``schedule`` on a synchronous session or connection."""
    job = NewJob(name, entity_id, run_at, payload or {})
    values = _values(tx, [job], on_conflict, priority, max_retries, backoff)
    rows = fetch_sync(tx, SCHEDULE, notify=True, **values)
    return _only(rows, job)


def cancel_sync(tx: Any, name: str, entity_id: str | UUID | int) -> int:
    """``cancel`` on a synchronous session or connection."""
    return int(fetch_sync(tx, CANCEL, name=name, entity_id=_entity(entity_id))[0][0])


def _only(rows: Sequence[Any], job: NewJob) -> int:
    if not rows:
        raise AlreadyScheduled(f"{job.name} for {job.entity_id} is pending already")
    return int(rows[0][0])


def _values(
    tx: Any,
    jobs: Sequence[NewJob],
    on_conflict: str,
    priority: int,
    max_retries: int | None,
    backoff: Sequence[float | timedelta] | None,
) -> dict[str, Any]:
    if len(jobs) > MAX_JOBS_AT_ONCE:
        raise Invalid(f"{len(jobs)} jobs at once: schedule at most {MAX_JOBS_AT_ONCE} in one call")
    if on_conflict not in ("replace", "keep", "reject", "allow"):
        raise Invalid(f"on_conflict={on_conflict!r}: choose replace, keep, reject or allow")
    if priority not in (1, 2, 3, 4):
        raise Invalid(f"priority={priority}: 1 is urgent, 2 high, 3 normal, 4 low")
    if max_retries is not None and not 0 <= max_retries <= 1000:
        raise Invalid(f"max_retries={max_retries}: give 0 to 1000")
    if on_conflict != "allow" and len(jobs) > 1:
        jobs = _one_of_each(jobs, on_conflict)
    origin = origin_of(tx)
    return {
        "names": [_job_name(job.name) for job in jobs],
        "entity_ids": [None if job.entity_id is None else _entity(job.entity_id) for job in jobs],
        "run_ats": [_aware(job.run_at) for job in jobs],
        "payloads": [encode_payload(job.payload) for job in jobs],
        "on_conflict": "nothing" if on_conflict == "reject" else on_conflict,
        "priority": priority,
        "max_retries": max_retries,
        "backoff_seconds": backoff_seconds(backoff),
        "correlation_id": origin.correlation_id,
        "causation_id": origin.causation_id,
        "traceparent": origin.traceparent,
    }


def _one_of_each(jobs: Sequence[NewJob], on_conflict: str) -> list[NewJob]:
    """One statement cannot write one timer twice; the outcome is as if they were given one by one."""
    kept: dict[Any, NewJob] = {}
    for index, job in enumerate(jobs):
        key = index if job.entity_id is None else (job.name, str(job.entity_id))
        if key in kept and on_conflict == "reject":
            raise AlreadyScheduled(f"{job.name} for {job.entity_id} is given twice")
        if key not in kept or on_conflict == "replace":
            kept[key] = job
    return list(kept.values())


def backoff_seconds(backoff: Sequence[float | timedelta] | None) -> list[int] | None:
    """A fixed list of waits, in whole seconds."""
    if backoff is None:
        return None
    waits = [int(wait.total_seconds() if isinstance(wait, timedelta) else wait) for wait in backoff]
    if not waits or len(waits) > 100 or min(waits) < 0:
        raise Invalid("backoff: give 1 to 100 waits, none of them negative")
    return waits


def _job_name(name: str) -> str:
    if len(check_name("job name", name)) > 100:
        raise Invalid(f"{name[:40]!r}...: a job name has at most 100 characters")
    return name


def _entity(entity_id: str | UUID | int) -> str:
    text = str(entity_id)
    if not 1 <= len(text) <= 200:
        raise Invalid("an entity id is text of 1 to 200 characters")
    return check_text(text, "entity id")


def _aware(moment: datetime | None) -> datetime | None:
    if moment is not None and moment.tzinfo is None:
        raise Invalid(f"run_at={moment.isoformat()} has no time zone: use an aware datetime")
    return moment
