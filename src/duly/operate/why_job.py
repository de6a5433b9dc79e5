"""Why a job is where it is: waiting, running, dead or done, its attempts, where it came from and what it caused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from duly.operate import sql_why as sql
from duly.operate.dead_letters import DeadLetter, find_dead_letter
from duly.operate.jobs import QueuedJob, find_job
from duly.operate.why_look import CAP, SHOWN, Look, say_audit, say_caused, say_origin
from duly.operate.words import listing, moment, plural, short, span, when

CONSUMER_PREFIX = "consumer:"
_OUTCOMES = {
    "done": "succeeded",
    "duplicate": "skipped it: the event had been processed before",
    "retried": "failed",
    "snoozed": "put it off",
    "cancelled": "cancelled it",
    "buried": "failed for good",
    "lost": "was lost: its worker died or stalled",
    "released": "gave it back: its worker stopped",
}
_REASONS = {
    "retries_used_up": "its retries were used up",
    "failed_for_good": "its handler said that retrying is no use",
    "worker_died": "its worker died each time",
    "event_missing": "its event is no longer in the history",
}


@dataclass(frozen=True)
class Attempt:
    """One run from the log."""

    execution_id: UUID
    name: str
    entity_id: str | None
    source: str
    started_at: datetime
    completed_at: datetime
    outcome: str
    message: str | None
    retry_count: int
    next_run_at: datetime | None
    worker: str
    event_id: UUID | None
    correlation_id: UUID | None
    causation_id: UUID | None


async def why_job(look: Look, id: int) -> list[str]:
    """Everything known about one job; nothing when no table has ever held it."""
    attempts = await _attempts(look, id)
    queued, dead = await find_job(look.tx, id), await find_dead_letter(look.tx, id)
    audit = await say_audit(look, f"job:{id}")
    found = queued or dead or (attempts[-1] if attempts else None)
    if found is None:
        return [f"Job {id} is gone; only the record of it is left.", *audit] if audit else []
    said = [f"Job {id} is {_title(found.name, found.entity_id)}."]
    if queued is not None:
        said += await say_queued(look, queued)
    elif dead is not None:
        said += await _say_dead(look, dead)
    else:
        said += _say_gone(attempts[-1], look.now)
    said += _say_attempts(attempts)
    said += _say_source(found, look.now)
    said += await _say_consequences(look, found, attempts)
    return said + audit


async def say_queued(look: Look, job: QueuedJob) -> list[str]:
    """Where a job of the queue is and, if it waits, for what."""
    if job.status == "Running":
        return [_say_running(look, job)]
    if job.status == "Failed":
        return [_say_expired(look, job), *await _say_takers(look, job)]
    if job.run_at is None:
        return await _say_behind(look, job)
    said = [_say_waiting(job, look.now)]
    return said if job.run_at > look.now else [*said, *await _say_takers(look, job)]


def say_briefly(job: QueuedJob, now: datetime) -> str:
    """One sentence, for a list."""
    if job.status == "Running":
        state = f"is running, taken by {job.leased_by}"
    elif job.status == "Failed":
        state = "lost its worker and is to be taken over"
    elif job.run_at is None:
        state = "waits behind an earlier job of its order"
    elif job.run_at > now:
        state = f"waits ({job.waits}) until {when(job.run_at, now)}"
    else:
        state = f"is due since {when(job.run_at, now)} ({job.waits})"
    return f"Job {job.id} ({job.name}) {state}."


async def _attempts(look: Look, id: int) -> list[Attempt]:
    rows = await look.fetch(sql.FIND_ATTEMPTS, job_id=id, limit=SHOWN)
    return [Attempt(*row) for row in reversed(rows)]


# ------------------------------------------------------------------------------------------------------- in the queue


def _say_running(look: Look, job: QueuedJob) -> str:
    taken = f"since {when(job.claimed_at, look.now)}" if job.claimed_at else "now"
    assert job.lock_expires_at is not None, "a running job has a lease: jobs_lease_is_whole"
    lease = f"its lease lasts until {when(job.lock_expires_at, look.physical_now)} and is renewed while it lives"
    progress = f" It says: {short(job.progress)}." if job.progress else ""
    return f"It is running {taken} in {job.leased_by}; {lease}.{progress}"


def _say_expired(look: Look, job: QueuedJob) -> str:
    assert job.lock_expires_at is not None, "an expired job has a lease: jobs_lease_is_whole"
    ago = span((look.physical_now - job.lock_expires_at).total_seconds())
    return (
        f"Its lease expired {ago} ago: {job.leased_by} died or stalled, and nobody has taken it over yet. "
        "The next claim does."
    )


def _say_waiting(job: QueuedJob, now: datetime) -> str:
    assert job.run_at is not None, "only a job behind another has no time"
    at = when(job.run_at, now)
    due = job.run_at <= now
    if job.waits == "retry":
        error = f" The last error: {short(job.last_error)}" if job.last_error else ""
        verb = f"It is due to be retried since {at}" if due else f"It waits to be retried at {at}"
        return f"{verb}: attempt {_attempt(job)}.{error}"
    if job.waits == "snoozed":
        times = plural(job.snoozes, "time")
        return f"Its handler put it off {times}; " + (
            f"it is due again since {at}." if due else f"it waits until {at}."
        )
    causes = {
        "released": "A worker that stopped gave it back.",
        "requeued": "An operator put it back into the queue.",
        "unknown_commit": "The connection was lost while its last run committed, and it is looked at again.",
    }
    prefix = f"{causes[job.waits]} " if job.waits in causes else ""
    return prefix + (f"It is due since {at}." if due else f"It is not due until {at}.")


def _attempt(job: QueuedJob) -> str:
    next_one = job.retry_count + 1
    return str(next_one) if job.max_retries is None else f"{next_one} of {job.max_retries + 1}"


async def _say_behind(look: Look, job: QueuedJob) -> list[str]:
    """The typed reason of a job that must keep its place in an order."""
    order = {"name": job.name, "order_key": job.order_key}
    head = await look.one(sql.FIND_ORDER_HEAD, id=job.id, **order)
    dead = await look.one(sql.FIND_ORDER_DEAD_LETTER, **order)
    if dead is not None and (head is None or dead < head):
        return [
            f"It waits behind dead letter {dead} of the same aggregate ({job.order_key}): retry it "
            f"(`duly dead retry {dead}`) or give it up (`duly dead discard {dead}`)."
        ]
    if head is None:
        return [
            "It waits behind an earlier job of its order, but none is left: a relay lets it go when it next looks, "
            f"or you do (`duly jobs run-now {job.id}`)."
        ]
    before = await look.one(sql.COUNT_ORDER_BEFORE, id=job.id, cap=CAP, **order)
    others = f"; {before} are before it" if before > 1 else ""
    said = [f"It waits behind job {head} of the same aggregate ({job.order_key}), which must finish first{others}."]
    first = await find_job(look.tx, head)
    if first is not None and first.run_at is not None:
        said += [f"Job {head}: {sentence}" for sentence in await say_queued(look, first)]
    return said


async def _say_takers(look: Look, job: QueuedJob) -> list[str]:
    """Why a job that could run has not been taken."""
    workers = await look.workers()
    if not workers:
        return ["No worker is alive: start one (`duly worker`)."]
    if not any(job.name in worker.names for worker in workers):
        known = sorted({name for worker in workers for name in worker.names})
        return [
            f"No live worker knows the name {job.name}; {plural(len(workers), 'worker')} alive, "
            f"knowing {listing(known) or 'nothing'}."
        ]
    said = []
    if slots := await look.fetch(sql.FIND_SLOTS, name=job.name, limit=CAP):
        held = listing([row[0] for row in slots])
        said.append(f"The name may run only so often at once; its slots are taken by {_jobs(len(slots))} {held}.")
    if job.run_at is not None:
        ahead = await look.one(
            sql.COUNT_JOBS_AHEAD, name=job.name, priority=job.priority, run_at=job.run_at, id=job.id, cap=CAP
        )
        if ahead:
            said.append(f"{'At least ' if ahead >= CAP else ''}{plural(ahead, 'due job')} of its name come before it.")
    return said or ["A worker that knows its name is alive and should take it any moment."]


def _jobs(number: int) -> str:
    return "job" if number == 1 else "jobs"


# -------------------------------------------------------------------------------------------------- dead, done, gone


async def _say_dead(look: Look, dead: DeadLetter) -> list[str]:
    said = [
        f"It is a dead letter since {when(dead.buried_at, look.now)}: {_REASONS.get(dead.reason, dead.reason)}, after "
        f"{plural(dead.retry_count + 1, 'attempt')}.",
        f"The error ({dead.error_kind}): {short(dead.error)}",
        f"Retry it (`duly dead retry {dead.id}`) or give it up (`duly dead discard {dead.id}`).",
    ]
    if dead.order_key is not None:
        order = {"name": dead.name, "order_key": dead.order_key}
        waiting = await look.one(sql.COUNT_ORDER_WAITING, cap=CAP, **order)
        said.append(f"{plural(waiting, 'later job')} of its aggregate ({dead.order_key}) wait behind it.")
    return said


def _say_gone(last: Attempt, now: datetime) -> list[str]:
    if last.outcome in ("done", "duplicate", "cancelled"):
        return [f"It is done: its last run ended at {when(last.completed_at, now)}."]
    return [
        f"It is no longer in the queue: after its last run, which ended at {when(last.completed_at, now)}, "
        "it was cancelled, discarded or forgotten."
    ]


def _say_attempts(attempts: Sequence[Attempt]) -> list[str]:
    said = []
    for attempt in attempts:
        seconds = (attempt.completed_at - attempt.started_at).total_seconds()
        message = f": {short(attempt.message)}" if attempt.message else ""
        following = f"; the next run was set for {moment(attempt.next_run_at)}" if attempt.next_run_at else ""
        said.append(
            f"Attempt {attempt.retry_count + 1} began {moment(attempt.started_at)} in {attempt.worker}, took "
            f"{span(seconds)} and {_OUTCOMES.get(attempt.outcome, attempt.outcome)}{message}{following}."
        )
    return said


# ------------------------------------------------------------------------------------------------ causes and effects


def _title(name: str, entity_id: str | None) -> str:
    return name if entity_id is None else f"{name} for {entity_id}"


def _say_source(found: QueuedJob | DeadLetter | Attempt, now: datetime) -> list[str]:
    said = []
    if found.event_id is not None and found.name.startswith(CONSUMER_PREFIX):
        consumer = found.name.removeprefix(CONSUMER_PREFIX)
        said.append(f"It is the work of consumer {consumer} on event {found.event_id}.")
    elif found.source == "Scheduled":
        said.append(f"It comes from the schedule {found.name}.")
    elif found.source == "Manual":
        said.append(f"Somebody triggered the schedule {found.name} by hand.")
    if not isinstance(found, Attempt):
        said.append(f"It was made at {when(found.created_at, now)} and first due at {moment(found.due_at)}.")
    cause = found.causation_id if found.causation_id != found.event_id else None
    return said + say_origin(correlation_id=found.correlation_id, causation_id=cause)


async def _say_consequences(
    look: Look, found: QueuedJob | DeadLetter | Attempt, attempts: Sequence[Attempt]
) -> list[str]:
    """A handler's events and jobs name its event as their cause, or its run where there is no event."""
    if not attempts:
        return []
    causes = [found.event_id] if found.event_id is not None else [attempt.execution_id for attempt in attempts]
    since, until = min(a.started_at for a in attempts), max(a.completed_at for a in attempts)
    return await say_caused(look, causes, entity_id=found.entity_id, since=since, until=until)
