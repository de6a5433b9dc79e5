"""The last chance of a job whose workers keep dying: alone, so that nobody is given up for a killer beside it.

When a process dies, nobody knows which of the jobs it held is to blame, and each of them has lost an attempt. Those
that died together would be claimed together again, and the innocent would be buried with the killer. So a job that
would be given up after one more death is run by a worker that holds nothing else. If it dies then, it was the one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from duly.clock import monotonic
from duly.db import fetch
from duly.jobs import settle, sql
from duly.jobs.handlers import Handler, Job

log = structlog.get_logger("duly.worker")
DRAIN_SECONDS = 10.0  # so long nothing is claimed, for what runs to end; then it runs beside the others after all
ALONE_SECONDS = 30.0  # so long it has the process to itself: who kills, mostly kills at once
AT_ONCE = 10  # claimed at a time while there are such jobs: all but one of them go back


class Apart:
    """What one worker does about them."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._closed_until = float("-inf")
        self._has_waited = False
        self._found_some = False

    def room(self, room: int, *, is_busy: bool) -> int:
        """How many to claim: none while somebody runs alone here, or is about to."""
        if is_busy and monotonic() < self._closed_until:
            return 0
        return min(room, AT_ONCE) if self._found_some else room

    async def sift(self, connection: Any, jobs: list[Job], *, is_busy: bool) -> list[Job]:
        """Of the jobs just claimed, those that run now; the others go back as they were."""
        lost = [job for job in jobs if job.lost_by is not None]
        last = [job for job in lost if settle.is_last_chance(job, self._handlers[job.name])]
        self._found_some = bool(last)
        if not last:
            return jobs
        if is_busy and self._has_waited:
            self._has_waited = False
            return jobs
        chosen = last[0]
        kept = [] if is_busy else [chosen]
        self._has_waited = is_busy
        self._closed_until = monotonic() + (DRAIN_SECONDS if is_busy else ALONE_SECONDS)
        if kept:
            log.warning("job_runs_alone", job_id=chosen.id, name=chosen.name, worker_lost=chosen.lost_by)
        await _put_back(connection, sql.LAPSE_LEASES, [job for job in lost if job not in kept])
        await _put_back(connection, sql.RELEASE_JOBS, [job for job in jobs if job.lost_by is None])
        return kept


async def _put_back(connection: Any, statement: Any, jobs: Sequence[Job]) -> None:
    if jobs:
        await fetch(connection, statement, ids=[job.id for job in jobs], tokens=[job.lease_token for job in jobs])
