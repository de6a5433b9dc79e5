"""How the engine stands: what waits, runs and failed, and who is alive; the cost does not grow with the queue."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from duly.db import Tx, fetch
from duly.operate import sql
from duly.operate.counts import CAP, NAMES_LIMIT, Count, cap_for

ALIVE_SECONDS = 30.0  # a process that was not seen for longer is taken for dead
LATE_SECONDS = 60.0  # two ticks: a schedule that is still due after that is late
PROCESSES_LIMIT = 1_000
FRONT = 1_000  # of each name and priority, the jobs that are looked at to see whether they run


@dataclass(frozen=True)
class NameStatus:
    """The queue of one job name. ``expired``: runs whose worker died or stalled, not taken over yet."""

    name: str
    due: Count
    future: Count
    behind: Count
    running: Count
    expired: Count
    oldest_due_seconds: float | None


@dataclass(frozen=True)
class OutboxStatus:
    """Events still to be published. ``held`` ones wait behind a failed one, and do not count for ``oldest_seconds``."""

    pending: Count
    held: Count
    failed: Count
    oldest_seconds: float | None


@dataclass(frozen=True)
class LateSchedule:
    """A schedule whose time has passed without a tick."""

    name: str
    late_seconds: float


@dataclass(frozen=True)
class Process:
    """A process that gave a sign of life a moment ago."""

    id: str
    kind: str
    names: list[str]
    version: str
    started_at: datetime
    silent_seconds: float


@dataclass(frozen=True)
class Status:
    """All of it, at one moment."""

    now: datetime
    jobs: list[NameStatus]
    dead_letters: dict[str, Count]
    outbox: OutboxStatus
    schedules_late: list[LateSchedule]
    alerts_open: Count
    processes: list[Process]


async def status(tx: Tx) -> Status:
    """Count everything an operator asks for first; no number is counted beyond 10,000, with many names not so far."""
    alerts = await fetch(tx, sql.COUNT_OPEN_ALERTS, cap=CAP + 1)
    late = await fetch(tx, sql.LIST_LATE_SCHEDULES, grace_seconds=LATE_SECONDS, limit=NAMES_LIMIT)
    return Status(
        now=await read_now(tx),
        jobs=await _jobs(tx),
        dead_letters=await _dead_letters(tx),
        outbox=await _outbox(tx),
        schedules_late=[LateSchedule(*row) for row in late],
        alerts_open=Count.of(alerts[0][0]),
        processes=await list_processes(tx),
    )


async def read_now(tx: Tx) -> datetime:
    """What time it is for the engine."""
    now: datetime = (await fetch(tx, sql.READ_NOW))[0][0]
    return now


async def list_processes(tx: Tx) -> list[Process]:
    """Who is alive, by kind."""
    rows = await fetch(tx, sql.LIST_PROCESSES, alive_seconds=ALIVE_SECONDS, limit=PROCESSES_LIMIT)
    return [Process(*row) for row in rows]


async def _jobs(tx: Tx) -> list[NameStatus]:
    names = [row[0] for row in await fetch(tx, sql.FIND_JOB_NAMES, names_limit=NAMES_LIMIT)]
    cap = cap_for(len(names))
    rows = await fetch(tx, sql.COUNT_JOBS, names=names, cap=cap + 1, front=min(FRONT, cap))
    return [
        NameStatus(
            name=name,
            due=Count.of(due, cap=cap, more=due_more),
            future=Count.of(future, cap=cap),
            behind=Count.of(behind, cap=cap),
            running=Count.of(running, cap=cap, more=running_more),
            expired=Count.of(expired, cap=cap, more=running_more),
            oldest_due_seconds=oldest,
        )
        for name, due, running, expired, future, behind, oldest, due_more, running_more in rows
    ]


async def _dead_letters(tx: Tx) -> dict[str, Count]:
    names = [row[0] for row in await fetch(tx, sql.FIND_DEAD_LETTER_NAMES, names_limit=NAMES_LIMIT)]
    cap = cap_for(len(names))
    rows = await fetch(tx, sql.COUNT_DEAD_LETTERS_BY_NAME, names=names, cap=cap + 1)
    return {name: Count.of(counted, cap=cap) for name, counted in rows}


async def _outbox(tx: Tx) -> OutboxStatus:
    ready, held, failed, oldest = (await fetch(tx, sql.COUNT_OUTBOX, cap=CAP + 1))[0]
    return OutboxStatus(
        pending=Count.of(ready + held, more=ready > CAP or held > CAP),
        held=Count.of(held),
        failed=Count.of(failed),
        oldest_seconds=oldest,
    )
