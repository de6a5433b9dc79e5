"""Jobs that wait or run, and the log of every run: look, cancel, run now."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from duly.db import Tx, fetch, request_poke
from duly.errors import Conflict, Invalid, NotFound
from duly.operate import sql
from duly.operate.arguments import filter_text, page_size, row_id, signed
from duly.operate.counts import NAMES_LIMIT

JobStatus = Literal["Pending", "Running", "Failed"]
STATUSES: tuple[JobStatus, ...] = ("Pending", "Running", "Failed")


@dataclass(frozen=True)
class QueuedJob:
    """A job that is still to do. ``Failed`` is one whose worker let its lease expire; nobody has taken it over yet."""

    id: int
    name: str
    entity_id: str | None
    status: JobStatus
    waits: str
    run_at: datetime | None  # None: behind another job of its order
    due_at: datetime
    created_at: datetime
    priority: int
    retry_count: int
    max_retries: int | None
    snoozes: int
    source: str
    last_error: str | None
    event_id: UUID | None
    order_key: str | None
    correlation_id: UUID | None
    causation_id: UUID | None
    lock_expires_at: datetime | None
    leased_by: str | None
    claimed_at: datetime | None
    progress: str | None


@dataclass(frozen=True)
class Execution:
    """One run of a job, as the log keeps it."""

    execution_id: UUID
    job_id: int
    name: str
    entity_id: str | None
    source: str
    started_at: datetime
    completed_at: datetime
    succeeded: bool
    outcome: str
    message: str | None
    retry_count: int
    next_run_at: datetime | None
    worker: str
    event_id: UUID | None
    correlation_id: UUID | None
    causation_id: UUID | None


async def cancel_job(tx: Tx, id: int, *, actor: str, reason: str | None = None) -> None:
    """Delete a job that waits or runs. A handler that runs it is fenced: its writes roll back, and it is told."""
    rows = await fetch(tx, sql.CANCEL_JOB, id=row_id("job", id), **signed(actor=actor, reason=reason))
    if not rows:
        raise await _absent(tx, id)
    request_poke(tx, "jobs")  # the next job of its order may run now


async def run_job_now(tx: Tx, id: int, *, actor: str, reason: str | None = None) -> None:
    """Make a waiting job due now; one that runs, or that must wait for an earlier one of its order, is refused."""
    signature = signed(actor=actor, reason=reason)
    await fetch(tx, sql.LOCK_ORDER_OF_JOB, id=row_id("job", id))
    rows = await fetch(tx, sql.LOCK_JOB, id=id)
    if not rows:
        raise await _absent(tx, id)
    leased, behind = rows[0]
    if leased:
        raise Conflict(f"job {id} is taken by a worker already")
    if behind:
        raise Conflict(f"job {id} waits behind an earlier job of its order: `duly why {id}` says which")
    await fetch(tx, sql.RUN_JOB_NOW, id=id, **signature)
    request_poke(tx, "jobs")


async def list_jobs(
    tx: Tx,
    *,
    name: str | None = None,
    entity_id: str | None = None,
    status: str | None = None,
    limit: int = 50,
    after: int | None = None,
) -> list[QueuedJob]:
    """One page by id; the next page is ``after=last.id``. Dead letters have a list of their own."""
    if status is not None and status not in STATUSES:
        raise Invalid(f"status={status!r}: choose {', '.join(STATUSES)}; dead letters have a list of their own")
    name, entity_id = filter_text("the name", name), filter_text("the entity id", entity_id)
    values = {"status": status, "after": after, "limit": page_size(limit)}
    if entity_id is not None:
        rows = await fetch(tx, sql.LIST_JOBS_OF_ENTITY, entity_id=entity_id, name=name, **values)
    elif name is not None:
        rows = await fetch(tx, sql.LIST_JOBS_OF_NAME, name=name, **values)
    else:
        rows = await fetch(tx, sql.LIST_JOBS, **values)
    return [QueuedJob(*row) for row in rows]


async def list_executions(
    tx: Tx,
    *,
    name: str | None = None,
    job_id: int | None = None,
    entity_id: str | None = None,
    before: tuple[datetime, UUID] | None = None,
    limit: int = 50,
) -> list[Execution]:
    """One page of the log, newest first; the next page is ``before=(last.completed_at, last.execution_id)``."""
    name, entity_id = filter_text("the name", name), filter_text("the entity id", entity_id)
    values: dict[str, Any] = {"limit": page_size(limit)}
    values["before_at"], values["before_id"] = before or (None, None)
    if job_id is not None:
        rows = await fetch(tx, sql.LIST_EXECUTIONS_OF_JOB, job_id=row_id("job", job_id), **values)
    elif entity_id is not None:
        rows = await fetch(tx, sql.LIST_EXECUTIONS_OF_ENTITY, entity_id=entity_id, name=name, **values)
    elif name is not None:
        rows = await fetch(tx, sql.LIST_EXECUTIONS_OF_NAME, name=name, **values)
    else:
        rows = await fetch(tx, sql.LIST_EXECUTIONS, names_limit=NAMES_LIMIT, **values)
    return [Execution(*row) for row in rows]


async def find_job(tx: Tx, id: int) -> QueuedJob | None:
    """The job with this id, if it waits or runs."""
    rows = await fetch(tx, sql.FIND_JOB, id=id, after=None, status=None)
    return QueuedJob(*rows[0]) if rows else None


async def _absent(tx: Tx, id: int) -> NotFound:
    if await fetch(tx, sql.IS_DEAD_LETTER, id=id):
        return NotFound(f"job {id} is a dead letter: retry or discard it instead")
    return NotFound(f"no job with the id {id} waits or runs")
