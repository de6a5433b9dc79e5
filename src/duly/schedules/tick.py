"""The scheduler: every half minute of the database's clock it turns due occurrences into jobs, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import structlog

from duly.db import Database, atomic, fetch
from duly.duty import Cycle, Duty
from duly.errors import Invalid
from duly.failpoints import failpoint
from duly.schedules.cron import Cron
from duly.schedules.misfire import RUNS_PER_SCHEDULE, Missed, Run, plan_due
from duly.schedules.sql import (
    ADVANCE_SCHEDULES,
    CHOOSE_DUE_SCHEDULES,
    INSERT_JOBS,
    RAISE_ALERTS,
    READ_PLANNED_SCHEDULES,
    READ_SECONDS_TO_BOUNDARY,
    REPLAN_SCHEDULES,
    RESOLVE_BROKEN,
)
from duly.telemetry import OCCURRENCES_FIRED, OCCURRENCES_MISSED
from duly.wakeup import Wakeup

log = structlog.get_logger("duly.scheduler")
BATCH = 100
RUNS_PER_TICK = 10_000
BROKEN_RETRY = timedelta(minutes=5)
MAX_ERROR_CHARACTERS = 500
_EFFECTS = {
    "run_once": "one job was queued, for the newest of what was due",
    "run_all": "all of them are queued, oldest first",
    "skip": "none of them runs",
}


class Scheduler(Duty):
    """One tick is one transaction: it locks the due rows, inserts their jobs and advances them.

    Schedulers skip each other's rows, so each occurrence becomes one job, whoever dies at whatever step.
    """

    name = "scheduler"
    channel = "schedules"
    poll_seconds = 30.0
    deaf_poll_seconds = 30.0  # occurrences need no wake-up; only an edit then waits for the next tick

    def __init__(self, db: Database, *, wakeup: Wakeup | None = None) -> None:
        super().__init__(db, wakeup=wakeup)
        self._replan_after: str | None = ""

    async def cycle(self) -> Cycle:
        """One bounded tick; then wait for the next boundary, or not at all while more is due."""
        connection = await self.connection()
        await self._replan(connection)
        async with atomic(connection):
            verdicts = await self._tick(connection)
        failpoint("tick.committed")
        fired = sum(len(verdict.runs) for verdict in verdicts)
        if fired:
            self.db.poke("jobs")
        for verdict in verdicts:
            _tell(verdict)
        more = len(verdicts) == BATCH or self._replan_after is not None
        # Asked after the work, so that a long tick does not push the next one off its boundary.
        [[seconds]] = await fetch(connection, READ_SECONDS_TO_BOUNDARY)
        facts = {"schedules": len(verdicts), "broken": sum(verdict.error is not None for verdict in verdicts)}
        return Cycle(done=fired, wait_seconds=0.0 if more else float(seconds), facts=facts)

    async def _tick(self, connection: Any) -> list[Verdict]:
        rows = [Due(*row) for row in await fetch(connection, CHOOSE_DUE_SCHEDULES, batch=BATCH)]
        failpoint("tick.chosen")
        verdicts: list[Verdict] = []
        for row in rows:
            verdicts.append(decide(row, limit=min(RUNS_PER_SCHEDULE, RUNS_PER_TICK // len(rows))))
            await asyncio.sleep(0)  # a backlog is long arithmetic: let the process's other duties breathe
        if verdicts:
            await _insert_jobs(connection, verdicts)
            failpoint("tick.inserted")
            await _advance(connection, verdicts)
            await _update_alerts(connection, verdicts)
            failpoint("tick.advanced")
        return verdicts

    async def _replan(self, connection: Any) -> None:
        """Once in a process's life, a batch each cycle: it may have come with newer zone rules."""
        if self._replan_after is None:
            return
        found = await fetch(connection, READ_PLANNED_SCHEDULES, after_name=self._replan_after, batch=BATCH)
        rows = [Planned(*row) for row in found]
        changed = [(row.name, row.next_run_at, at) for row in rows if (at := replan(row)) != row.next_run_at]
        if changed:
            names, planned_ats, next_run_ats = (list(column) for column in zip(*changed, strict=True))
            await fetch(connection, REPLAN_SCHEDULES, names=names, planned_ats=planned_ats, next_run_ats=next_run_ats)
            log.info("schedules_replanned", names=names)
        self._replan_after = rows[-1].name if len(rows) == BATCH else None


class Due(NamedTuple):
    """A row of CHOOSE_DUE_SCHEDULES."""

    name: str
    cron: str
    timezone: str
    dst_gap: str
    dst_overlap: str
    misfire: str
    next_run_at: datetime | None
    last_error: str | None
    missed_count: int
    missed_oldest: datetime | None
    missed_newest: datetime | None
    now: datetime


class Planned(NamedTuple):
    """A row of READ_PLANNED_SCHEDULES."""

    name: str
    cron: str
    timezone: str
    dst_gap: str
    dst_overlap: str
    next_run_at: datetime
    now: datetime


@dataclass(frozen=True)
class Verdict:
    """What a tick decided about one schedule; ``found`` is newly missed, ``shown`` what its row says."""

    name: str
    misfire: str
    next_run_at: datetime
    shown: Missed | None
    found: Missed | None = None
    runs: tuple[Run, ...] = ()
    error: str | None = None
    recovered: bool = False


def decide(row: Due, *, limit: int) -> Verdict:
    """Judge one row; a broken one is put off, so that it neither stops the others nor spins.

    A row without a next run is new, one with an error was broken: both begin from now and fire nothing.
    """
    shown = _shown(row)
    try:
        cron = Cron(row.cron, row.timezone, row.dst_gap, row.dst_overlap)
        if row.next_run_at is None or row.last_error is not None:
            recovered = row.last_error is not None
            return Verdict(row.name, row.misfire, cron.next_after(row.now), shown, recovered=recovered)
        plan = plan_due(
            cron,
            due_at=row.next_run_at,
            now=row.now,
            misfire=row.misfire,
            limit=limit,
            reported_until=shown.newest if shown else None,
        )
    except Invalid as error:
        sentence = str(error)[:MAX_ERROR_CHARACTERS]
        return Verdict(row.name, row.misfire, row.now + BROKEN_RETRY, shown, error=sentence)
    found = plan.missed
    if found and shown and row.next_run_at <= shown.newest:  # still working off the same downtime
        shown = Missed(shown.count + found.count, shown.oldest, found.newest)
    else:
        shown = found or shown
    return Verdict(row.name, row.misfire, plan.next_run_at, shown, found, plan.runs)


def _shown(row: Due) -> Missed | None:
    if row.missed_oldest is None or row.missed_newest is None:
        return None
    return Missed(row.missed_count, row.missed_oldest, row.missed_newest)


def replan(row: Planned) -> datetime:
    """The next run by today's rules; a broken row keeps its time, when the tick will say what is wrong."""
    try:
        return Cron(row.cron, row.timezone, row.dst_gap, row.dst_overlap).next_after(row.now)
    except Invalid:
        return row.next_run_at


async def _insert_jobs(connection: Any, verdicts: Sequence[Verdict]) -> None:
    runs = [(verdict.name, run.at, run.interval) for verdict in verdicts for run in verdict.runs]
    if runs:
        names, ats, delays = (list(column) for column in zip(*runs, strict=True))
        await fetch(connection, INSERT_JOBS, names=names, ats=ats, delays=delays)


async def _advance(connection: Any, verdicts: Sequence[Verdict]) -> None:
    shown = [verdict.shown for verdict in verdicts]
    await fetch(
        connection,
        ADVANCE_SCHEDULES,
        names=[verdict.name for verdict in verdicts],
        next_run_ats=[verdict.next_run_at for verdict in verdicts],
        last_run_ats=[verdict.runs[-1].at if verdict.runs else None for verdict in verdicts],
        last_errors=[verdict.error for verdict in verdicts],
        missed_counts=[missed.count if missed else 0 for missed in shown],
        missed_oldests=[missed.oldest if missed else None for missed in shown],
        missed_newests=[missed.newest if missed else None for missed in shown],
    )


async def _update_alerts(connection: Any, verdicts: Sequence[Verdict]) -> None:
    alerts = [("schedule_broken", verdict.name, verdict.error) for verdict in verdicts if verdict.error]
    alerts += [
        ("occurrences_missed", verdict.name, _sentence(verdict.shown, verdict.misfire))
        for verdict in verdicts
        if verdict.found and verdict.shown
    ]
    if alerts:
        # In one order everywhere, so that two ticks never wait for each other's alerts.
        kinds, subjects, messages = (list(column) for column in zip(*sorted(alerts), strict=True))
        await fetch(connection, RAISE_ALERTS, kinds=kinds, subjects=subjects, messages=messages)
    recovered = sorted(verdict.name for verdict in verdicts if verdict.recovered)
    if recovered:
        await fetch(connection, RESOLVE_BROKEN, names=recovered)


def _sentence(missed: Missed, misfire: str) -> str:
    return (
        f"runs missed: {missed.words}, the oldest of {missed.oldest:%Y-%m-%d %H:%M} UTC, the newest of "
        f"{missed.newest:%Y-%m-%d %H:%M} UTC; by its rule ({misfire}) {_EFFECTS[misfire]}"
    )


def _tell(verdict: Verdict) -> None:
    """Logs and counters, after the commit that made them true."""
    if verdict.runs:
        OCCURRENCES_FIRED.labels(verdict.name).inc(len(verdict.runs))
    if verdict.found:
        OCCURRENCES_MISSED.labels(verdict.name).inc(verdict.found.count)
        log.warning(
            "occurrences_missed",
            name=verdict.name,
            missed=verdict.found.words,
            oldest=verdict.found.oldest.isoformat(),
            newest=verdict.found.newest.isoformat(),
            misfire=verdict.misfire,
        )
    if verdict.error:
        log.warning("schedule_broken", name=verdict.name, error=verdict.error)
    if verdict.recovered:
        log.info("schedule_recovered", name=verdict.name, next_run_at=verdict.next_run_at.isoformat())
