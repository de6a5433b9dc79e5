"""How a run ends: decided here, written with the lease token, one statement for a whole batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from duly.db import Statement, describe_error, fetch, fetch_sync
from duly.errors import LeaseLost
from duly.failpoints import failpoint
from duly.jobs import sql
from duly.jobs.handlers import MAX_MESSAGE, Handler, Job, Lease, ReportedFailure, number_runs
from duly.jobs.outcomes import Cancel, Done, Fail, Outcome, Snooze
from duly.jobs.retry import backoff
from duly.messages import storable

_NO_WAIT = timedelta(0)


@dataclass(slots=True)
class Settlement:
    """What one run came to."""

    job: Job
    outcome: str
    seconds: float
    message: str | None = None
    wait: timedelta = _NO_WAIT
    reason: str | None = None
    error_kind: str | None = None


def decide(job: Job, outcome: Outcome, seconds: float) -> Settlement:
    """The settlement of a run that returned."""
    if type(outcome) is Done:
        return Settlement(job, "done", seconds, _clip(outcome.message))
    if isinstance(outcome, Snooze):
        return Settlement(job, "snoozed", seconds, _clip(outcome.reason), wait=outcome.wait)
    if isinstance(outcome, Cancel):
        return Settlement(job, "cancelled", seconds, _clip(outcome.reason))
    if isinstance(outcome, Fail):
        return Settlement(job, "buried", seconds, _clip(outcome.reason), reason="failed_for_good", error_kind="Fail")
    return Settlement(job, "done", seconds)


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
    if job.lost_by is None or job.retry_count <= _allowed(job, handler):
        return None
    message = f"its worker died or stalled {job.retry_count} times, the last one was {job.lost_by}"
    return Settlement(job, "buried", 0.0, message, reason="worker_died", error_kind="WorkerDied")


def is_last_chance(job: Job, handler: Handler) -> bool:
    """Whether one more dead worker would be one too many."""
    return job.lost_by is not None and job.retry_count == _allowed(job, handler)


def _allowed(job: Job, handler: Handler) -> int:
    return handler.max_retries if job.max_retries is None else job.max_retries


def decide_unreadable(job: Job, why: str) -> Settlement:
    """The settlement of a job whose event cannot be given to anybody."""
    return Settlement(job, "buried", 0.0, why, reason="event_missing", error_kind="EventMissing")


async def write(tx: Any, settlements: Sequence[Settlement], *, worker: str) -> set[Lease]:
    """Settle on any asynchronous connection; the leases that were still ours."""
    settled: set[Lease] = set()
    if keys := ordered_keys(settlements):
        await fetch(tx, sql.LOCK_ORDER, **keys)
    for statement, some in _by_statement(settlements):
        settled.update(map(tuple, await fetch(tx, statement, **_values(statement, some, worker))))
        failpoint("settle.written")
    return settled


def write_sync(tx: Any, settlements: Sequence[Settlement], *, worker: str) -> set[Lease]:
    """Settle on a synchronous session."""
    settled: set[Lease] = set()
    if keys := ordered_keys(settlements):
        fetch_sync(tx, sql.LOCK_ORDER, **keys)
    for statement, some in _by_statement(settlements):
        settled.update(map(tuple, fetch_sync(tx, statement, **_values(statement, some, worker))))
        failpoint("settle.written")
    return settled


def check_all_ours(settlements: Sequence[Settlement], settled: set[Lease]) -> None:
    """Raise LeaseLost with the ids of those that somebody else holds."""
    lost = {settlement.job.id for settlement in settlements if settlement.job.lease not in settled}
    if lost:
        raise LeaseLost(f"{len(lost)} of {len(settlements)} jobs are another worker's now", lost)


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
    """Of two runs of one job only the later can still hold it: the worker lost it, and took it again."""
    latest = {s.job.id: s for s in sorted(settlements, key=_token)}
    groups: dict[Statement, list[Settlement]] = {}
    for settlement in latest.values():
        outcome = settlement.outcome
        plain = outcome == "done" and settlement.message is None
        groups.setdefault(sql.COMPLETE_DONE if plain else _STATEMENTS[outcome], []).append(settlement)
    return list(groups.items())


_token = operator.attrgetter("job.lease_token")
_COLUMNS: dict[str, Callable[[Settlement], Any]] = {
    "ids": lambda s: s.job.id,
    "tokens": lambda s: s.job.lease_token,
    "execution_ids": lambda s: s.job.execution_id,
    "seconds": lambda s: s.seconds,
    "outcomes": lambda s: s.outcome,
    "messages": lambda s: s.message,
    "waits_seconds": lambda s: s.wait.total_seconds(),
    "reasons": lambda s: s.reason,
    "error_kinds": lambda s: s.error_kind,
}


def _values(statement: Statement, settlements: Sequence[Settlement], worker: str) -> dict[str, Any]:
    """One array for each column that the statement asks for."""
    number_runs([s.job for s in settlements])
    return {"worker": worker} | {
        name: [column(s) for s in settlements] for name, column in _COLUMNS.items() if name in statement.names
    }


def _clip(message: str | None) -> str | None:
    if message is None:
        return None
    return storable(message[:MAX_MESSAGE])
