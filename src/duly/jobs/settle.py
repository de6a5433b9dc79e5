"""How a run ends: decided here, written with the lease token, one statement for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from duly.db import Statement, describe_error, fetch, fetch_sync
from duly.jobs import sql
from duly.jobs.handlers import MAX_MESSAGE, Handler, Job, ReportedFailure
from duly.jobs.outcomes import Cancel, Done, Fail, Outcome, Snooze
from duly.jobs.retry import backoff
from duly.messages import storable


@dataclass(slots=True)
class Settlement:
    """What one run came to."""

    job: Job
    outcome: str
    seconds: float
    message: str | None = None
    wait: timedelta = timedelta(0)
    reason: str | None = None
    error_kind: str | None = None


def decide(job: Job, outcome: Outcome, seconds: float) -> Settlement:
    """The settlement of a run that returned."""
    if isinstance(outcome, Snooze):
        return Settlement(job, "snoozed", seconds, _clip(outcome.reason), wait=outcome.wait)
    if isinstance(outcome, Cancel):
        return Settlement(job, "cancelled", seconds, _clip(outcome.reason))
    if isinstance(outcome, Fail):
        return Settlement(job, "buried", seconds, _clip(outcome.reason), reason="failed_for_good", error_kind="Fail")
    return Settlement(job, "done", seconds, _clip(outcome.message) if isinstance(outcome, Done) else None)


def decide_failure(job: Job, handler: Handler, error: BaseException, seconds: float) -> Settlement:
    """The settlement of a run that failed: again later, or to the dead letters."""
    kind = type(error).__name__
    message = _clip(str(error) if isinstance(error, ReportedFailure) else describe_error(error))
    allowed = handler.max_retries if job.max_retries is None else job.max_retries
    if job.retry_count >= allowed:
        return Settlement(job, "buried", seconds, message, reason="retries_used_up", error_kind=kind)
    wait = backoff(
        job.retry_count + 1,
        original_delay=job.original_delay,
        fixed_seconds=job.backoff_seconds or handler.backoff_seconds,
    )
    return Settlement(job, "retried", seconds, message, wait=wait)


def decide_takeover(job: Job, handler: Handler) -> Settlement | None:
    """A job taken over from a dead worker too often is not run again: whatever kills workers must end somewhere."""
    allowed = handler.max_retries if job.max_retries is None else job.max_retries
    if job.lost_by is None or job.retry_count <= allowed:
        return None
    message = f"its worker died or stalled {job.retry_count} times, the last one was {job.lost_by}"
    return Settlement(job, "buried", 0.0, message, reason="worker_died", error_kind="WorkerDied")


async def write(tx: Any, settlements: Sequence[Settlement], *, worker: str) -> set[int]:
    """Settle on any asynchronous connection; the ids of the jobs that were still ours."""
    settled: set[int] = set()
    if keys := ordered_keys(settlements):
        await fetch(tx, sql.LOCK_ORDER, **keys)
    for statement, some in _by_statement(settlements):
        rows = await fetch(tx, statement, **_values(some, worker))
        settled.update(row[0] for row in rows)
    return settled


def write_sync(tx: Any, settlements: Sequence[Settlement], *, worker: str) -> set[int]:
    """Settle on a synchronous session."""
    settled: set[int] = set()
    if keys := ordered_keys(settlements):
        fetch_sync(tx, sql.LOCK_ORDER, **keys)
    for statement, some in _by_statement(settlements):
        settled.update(row[0] for row in fetch_sync(tx, statement, **_values(some, worker)))
    return settled


def ordered_keys(settlements: Sequence[Settlement]) -> dict[str, list[str]] | None:
    """The order keys that these settlements touch: locked before the rows are, always in the same order."""
    keys = [(s.job.name, s.job.order_key) for s in settlements if s.job.order_key is not None]
    return {"names": [name for name, _ in keys], "keys": [key for _, key in keys]} if keys else None


_STATEMENTS: dict[str, Statement] = {
    "done": sql.COMPLETE_JOBS,
    "duplicate": sql.COMPLETE_JOBS,
    "cancelled": sql.COMPLETE_JOBS,
    "retried": sql.POSTPONE_JOBS,
    "snoozed": sql.POSTPONE_JOBS,
    "released": sql.POSTPONE_JOBS,
    "buried": sql.BURY_JOBS,
}


def _by_statement(settlements: Sequence[Settlement]) -> list[tuple[Statement, list[Settlement]]]:
    groups: dict[Statement, list[Settlement]] = {}
    for settlement in settlements:
        groups.setdefault(_STATEMENTS[settlement.outcome], []).append(settlement)
    return list(groups.items())


def _values(settlements: Sequence[Settlement], worker: str) -> dict[str, Any]:
    return {
        "ids": [s.job.id for s in settlements],
        "tokens": [s.job.lease_token for s in settlements],
        "execution_ids": [s.job.execution_id for s in settlements],
        "seconds": [s.seconds for s in settlements],
        "outcomes": [s.outcome for s in settlements],
        "messages": [s.message for s in settlements],
        "waits_seconds": [s.wait.total_seconds() for s in settlements],
        "reasons": [s.reason for s in settlements],
        "error_kinds": [s.error_kind for s in settlements],
        "worker": worker,
    }


def _clip(message: str | None) -> str | None:
    if message is None:
        return None
    return storable(message[:MAX_MESSAGE])
