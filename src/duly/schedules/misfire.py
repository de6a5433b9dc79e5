"""What to do about occurrences that fell due: which run, which are missed, when the next one is (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from duly.schedules.cron import Cron

MISFIRES = ("run_once", "run_all", "skip")
LATE_AFTER = timedelta(seconds=60)
COUNT_LIMIT = 1000
RUNS_PER_SCHEDULE = 1000
_INSTANT = timedelta(microseconds=1)


@dataclass(frozen=True)
class Run:
    """One occurrence that becomes a job, and the time from it to the next one."""

    at: datetime
    interval: timedelta


@dataclass(frozen=True)
class Missed:
    """Occurrences found more than a minute late; a count of ``COUNT_LIMIT`` means that many or more."""

    count: int
    oldest: datetime
    newest: datetime

    @property
    def words(self) -> str:
        """The count for people: ``12``, or ``1000+``."""
        return missed_words(self.count)


@dataclass(frozen=True)
class Plan:
    """What a tick does with one due schedule."""

    runs: tuple[Run, ...]
    next_run_at: datetime
    missed: Missed | None = None


def missed_words(count: int) -> str:
    """A count of missed occurrences for people; beyond ``COUNT_LIMIT`` nobody counted."""
    return f"{COUNT_LIMIT}+" if count >= COUNT_LIMIT else str(count)


def plan_due(
    cron: Cron,
    *,
    due_at: datetime,
    now: datetime,
    misfire: str,
    limit: int = RUNS_PER_SCHEDULE,
    reported_until: datetime | None = None,
) -> Plan:
    """Decide about a schedule whose next run, ``due_at``, has come.

    As long as nothing is missed every due occurrence runs, whatever the policy. Once something is,
    ``run_once`` folds all that is due into its newest occurrence, ``run_all`` runs up to ``limit`` of them,
    oldest first, and leaves the rest for the next tick, and ``skip`` runs only what is not late. Missed
    occurrences up to ``reported_until`` were counted by an earlier tick.
    """
    newest_late = now - LATE_AFTER - _INSTANT
    if due_at > newest_late:
        return _run_all(cron, due_at, now, limit)
    missed = _missed(cron, due_at, newest_late, reported_until=reported_until)
    if misfire == "run_all":
        plan = _run_all(cron, due_at, now, limit)
    elif misfire == "run_once":
        newest = cron.latest(due_at, now) or due_at
        plan = _planned([newest, cron.next_after(newest)])
    else:
        on_time = cron.between(newest_late, now, limit)
        plan = _planned([*on_time, cron.next_after(on_time[-1] if on_time else now)])
    return Plan(plan.runs, plan.next_run_at, missed)


def _run_all(cron: Cron, due_at: datetime, now: datetime, limit: int) -> Plan:
    due = [due_at, *cron.between(due_at, now, limit - 1)]
    return _planned([*due, cron.next_after(due[-1])])


def _planned(occurrences: list[datetime]) -> Plan:
    """A plan that runs all of these but the last, which is the next one."""
    return Plan(tuple(Run(at, following - at) for at, following in pairwise(occurrences)), occurrences[-1])


def _missed(cron: Cron, due_at: datetime, newest_late: datetime, *, reported_until: datetime | None) -> Missed | None:
    if reported_until is not None and reported_until >= due_at:
        found = cron.between(reported_until, newest_late, COUNT_LIMIT)
    else:
        found = [due_at, *cron.between(due_at, newest_late, COUNT_LIMIT - 1)]
    if not found:
        return None
    newest = found[-1]
    if len(found) == COUNT_LIMIT:
        newest = cron.latest(newest, newest_late) or newest
    return Missed(len(found), found[0], newest)
