"""Takes jobs from the queue for one worker: each name in its turn, and no more of a limited name than it may run."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import structlog

from duly.clock import monotonic
from duly.db import atomic, fetch
from duly.failpoints import failpoint
from duly.jobs import sql, turns
from duly.jobs.handlers import Handler, Job
from duly.jobs.walk import Walk

log = structlog.get_logger("duly.worker")
LOOK_AROUND_SECONDS = 60.0
_turn = operator.attrgetter("turn")


class Claims:
    """What a worker asks of the queue."""

    def __init__(
        self, handlers: Mapping[str, Handler], *, worker: str, lease_seconds: float, elsewhere: Collection[str] = ()
    ) -> None:
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._names = list(handlers)
        limited = {handler.name: handler for handler in handlers.values() if handler.limit is not None}
        self._free = Walk(turns.begin((name for name in handlers if name not in limited), worker))
        self._limited = {name: (handler, Walk([name])) for name, handler in limited.items()}
        self._kinds: list[str | None] = [*turns.begin(limited, worker)]  # each limited name, and None: all the others
        if self._free.names:
            self._kinds.append(None)
        self._elsewhere = list(elsewhere)  # another worker of this process runs these
        self._looked_around_at = float("-inf")

    async def take(self, connection: Any, room: int) -> list[Job]:
        """Claim up to ``room`` jobs that are due, the most urgent first."""
        jobs: list[Job] = []
        got: dict[str | None, int] = {}
        for kind in self._kinds:
            if len(jobs) >= room:
                break
            if kind is None:
                found = await self._take_names(connection, self._free, room - len(jobs))
                turns.give_way(self._free.names, Counter(job.name for job in found))
            else:
                found = await self._take_limited(connection, *self._limited[kind], room - len(jobs))
            got[kind] = len(found)
            jobs += found
        turns.give_way(self._kinds, got)
        if len(self._kinds) > 1:
            jobs.sort(key=_turn)
        return jobs

    async def _take_names(self, connection: Any, walk: Walk, limit: int) -> list[Job]:
        values: dict[str, Any] = {"limit": limit, "worker": self._worker, "lease_seconds": self._lease_seconds}
        began = monotonic()
        is_whole = walk.is_whole(began)
        if is_whole:
            rows = await fetch(connection, sql.CLAIM_JOBS, names=walk.names, **values)
        else:
            rows = await fetch(connection, sql.CLAIM_JOBS_FROM, **walk.onward(), **values)
        now = monotonic()
        jobs = [Job(row, now) for row in rows]
        jobs.sort(key=_turn)
        if is_whole:
            walk.note_whole(now - began, at=now)
        else:
            walk.note_onward(now - began)
        if not walk.is_whole(now):
            walk.note_found((job.name, job.priority, job.turn[1]) for job in jobs)
            if len(jobs) < limit and walk.lacks_starts:
                read_at = (await fetch(connection, sql.READ_NOW))[0][0]
                walk.note_nothing_due(read_at - (monotonic() - began))
        return jobs

    async def _take_limited(self, connection: Any, handler: Handler, walk: Walk, room: int) -> list[Job]:
        """A name that may run only so often at once, everywhere: its claims take turns, each job takes a slot."""
        async with atomic(connection):
            if not (await fetch(connection, sql.LOCK_LIMITED_NAME, name=handler.name))[0][0]:
                return []
            await fetch(connection, sql.FREE_LOST_SLOTS, name=handler.name)
            rows = await fetch(connection, sql.COUNT_FREE_SLOTS, name=handler.name, slots=handler.limit)
            jobs = await self._take_names(connection, walk, min(room, rows[0][0])) if rows[0][0] else []
            if jobs:
                ids = [job.id for job in jobs]
                await fetch(connection, sql.TAKE_SLOTS, name=handler.name, slots=handler.limit, ids=ids)
                failpoint("worker.before_claim_commit")
            return jobs

    async def give_back_unknown(self, connection: Any, known: Sequence[int]) -> None:
        """What we hold without knowing, because a claim got no answer."""
        await fetch(connection, sql.RELEASE_UNKNOWN, worker=self._worker, known=list(known))

    async def seconds_to_next(self, connection: Any) -> float | None:
        """How long until the next job of ours is due; None if there is none."""
        rows = await fetch(connection, sql.SECONDS_TO_NEXT_JOB, names=self._names)
        seconds: float | None = rows[0][0]
        return seconds

    async def look_around(self, connection: Any) -> int:
        """Now and then: jobs nobody here can run. At the start: how much waited, before it is worked off."""
        if monotonic() - self._looked_around_at < LOOK_AROUND_SECONDS:
            return 0
        is_first = self._looked_around_at == float("-inf")
        backlog = await self._report_backlog(connection) if is_first else 0
        self._looked_around_at = monotonic()
        for name, count in await fetch(connection, sql.FIND_UNKNOWN_NAMES, names=self._names + self._elsewhere):
            log.warning("no_handler", name=name, waiting=count, left_for="a worker that has one")
        return backlog

    async def _report_backlog(self, connection: Any) -> int:
        rows = await fetch(connection, sql.COUNT_BACKLOG, names=self._names)
        count, oldest, newest = rows[0]
        if count:
            log.warning("backlog_found", count=count, oldest=str(oldest), newest=str(newest))
        return int(count)
