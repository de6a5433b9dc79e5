"""Why a schedule or a job name does or does not run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from duly.operate import sql_why as sql
from duly.operate.jobs import find_job, list_executions
from duly.operate.why_job import say_queued
from duly.operate.why_look import CAP, Look
from duly.operate.words import listing, moment, plural, short, when


@dataclass(frozen=True)
class ScheduleFacts:
    """One recurring definition, without its payload."""

    name: str
    cron: str
    timezone: str
    enabled: bool
    misfire: str
    last_run_at: datetime | None
    next_run_at: datetime | None
    missed_count: int
    missed_oldest: datetime | None
    missed_newest: datetime | None
    last_error: str | None


async def why_name(look: Look, name: str) -> list[str]:
    """Everything known about a schedule or job name; nothing when neither exists."""
    schedules = await look.fetch(sql.FIND_SCHEDULE, name=name)
    said = await _say_schedule(look, ScheduleFacts(*schedules[0])) if schedules else []
    queued, dead = (await look.fetch(sql.COUNT_JOBS_OF_NAME, name=name, cap=CAP))[0]
    runs = await list_executions(look.tx, name=name, limit=1)
    knowing = [worker.id for worker in await look.workers() if name in worker.names]
    if not (said or queued or dead or runs or knowing):
        return []
    said = said or [f"{name} is a job name without a schedule."]
    said.append(_say_counts(queued, dead))
    if queued and (next_id := await look.one(sql.FIND_NEXT_JOB, name=name)) is not None:
        job = await find_job(look.tx, next_id)
        said += [f"Job {next_id}: {sentence}" for sentence in await say_queued(look, job)] if job else []
    if runs:
        last = runs[0]
        message = f": {short(last.message)}" if last.message else ""
        said.append(
            f"Its last run, of job {last.job_id}, ended {last.outcome} at {when(last.completed_at, look.now)}{message}."
        )
    else:
        said.append("The history has no run of it.")
    said.append(f"Live workers that know it: {listing(knowing) or 'none'}.")
    return said


def _say_counts(queued: int, dead: int) -> str:
    at_least = "at least " if max(queued, dead) >= CAP else ""
    return f"It has {at_least}{plural(queued, 'job')} in the queue and {plural(dead, 'dead letter')}."


async def _say_schedule(look: Look, schedule: ScheduleFacts) -> list[str]:
    said = [f"{schedule.name} is a schedule: {schedule.cron} in {schedule.timezone}."]
    if not schedule.enabled:
        said.append(await _say_disabled(look, schedule.name))
    elif schedule.next_run_at is None:
        said.append("It is enabled; the next tick of a scheduler computes its first run.")
    elif schedule.next_run_at > look.now:
        said.append(f"It is enabled, and runs next at {when(schedule.next_run_at, look.now)}.")
    else:
        said.append(f"It is enabled and due since {when(schedule.next_run_at, look.now)}: is a scheduler alive?")
    last = schedule.last_run_at
    said.append(f"It last fired for {when(last, look.now)}." if last else "It has never fired.")
    if schedule.missed_count and schedule.missed_oldest and schedule.missed_newest:
        said.append(
            f"It last missed {plural(schedule.missed_count, 'occurrence')}, from {moment(schedule.missed_oldest)} to "
            f"{moment(schedule.missed_newest)}; its rule for those is {schedule.misfire}."
        )
    if schedule.last_error:
        said.append(f"It is broken: {short(schedule.last_error)}")
    return said


async def _say_disabled(look: Look, name: str) -> str:
    rows = await look.fetch(sql.FIND_DISABLING, name=name)
    if not rows:
        return "It is disabled; the audit does not say by whom."
    at, actor, reason = rows[0]
    because = f": {short(reason)}" if reason else ", without a reason"
    return f"It is disabled by {actor} since {when(at, look.now)}{because}."
