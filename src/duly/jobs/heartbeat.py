"""Renews leases from a thread of its own, so that a blocked event loop does not lose the work it holds.

A job past its time limit is not renewed: whatever hangs is taken over by another worker, and fenced.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import structlog

from duly.clock import monotonic
from duly.db import Database, fetch, is_disconnect
from duly.failpoints import failpoint
from duly.jobs import sql
from duly.jobs.handlers import Job

log = structlog.get_logger("duly.heartbeat")
MAX_RENEWED_AT_ONCE = 5_000


class Leases:
    """What this process holds; written by the event loop, read by the heartbeat."""

    def __init__(self) -> None:
        self._held: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._held

    def ids(self) -> list[int]:
        """The jobs held."""
        return list(self._held)

    def add(self, job: Job) -> None:
        """Note a lease that was just taken; while the job waits for its turn it is renewed without end."""
        self._held[job.id] = job

    def is_fresh(self, job: Job, lease_seconds: float, now: float) -> bool:
        """Whether the lease can still be ours; if not, its handler must not even start."""
        return self._held.get(job.id) is job and now - job.renewed_at < lease_seconds

    def drop_news(self) -> None:
        """Forget what handlers reported and nobody has read."""
        for job in list(self._held.values()):
            job.news = None

    def drop(self, job: Job) -> None:
        """Note that it is settled, or somebody else's."""
        if self._held.get(job.id) is job:
            del self._held[job.id]

    def progress(self, job_id: int, message: str) -> None:
        """Keep a message for the next heartbeat."""
        job = self._held.get(job_id)
        if job is not None:
            job.news = message

    def to_renew(self, *, older_than_seconds: float) -> list[Job]:
        """Leases that have aged or have news, and whose handlers are within their time."""
        now = monotonic()
        due = [
            job
            for job in list(self._held.values())
            if now < job.give_up_at and (job.news is not None or now - job.renewed_at >= older_than_seconds)
        ]
        return due[:MAX_RENEWED_AT_ONCE]


class Heartbeat:
    """The thread. ``lost`` is called on the event loop for each job that another worker holds now."""

    def __init__(self, db: Database, leases: Leases, *, lease_seconds: float, lost: Callable[[Job], None]) -> None:
        self._db = db
        self._leases = leases
        self._lease_seconds = lease_seconds
        self._lost = lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="duly-heartbeat", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._connection: Any = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    async def stop(self) -> None:
        """End, and wait for the thread."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 5)

    def _main(self) -> None:
        asyncio.run(self._repeat())

    async def _repeat(self) -> None:
        interval = min(1.0, self._lease_seconds / 10)
        try:
            while not self._stop.wait(interval):
                try:
                    await self.beat()
                except Exception as error:
                    if not is_disconnect(error):
                        log.exception("heartbeat_failed")
                        self._leases.drop_news()  # whatever it was, it must not cost the others their leases
                    self._hang_up()
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            connection.terminate()

    async def beat(self) -> None:
        """Renew what has aged by a third of the lease, and find out what was lost."""
        held = self._leases.to_renew(older_than_seconds=self._lease_seconds / 3)
        if not held:
            return
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._db.connect(application="duly-heartbeat", statement_timeout_seconds=5)
        failpoint("heartbeat.before")
        began = monotonic()
        ids = [job.id for job in held]
        news = [job.news for job in held]
        await fetch(
            self._connection, sql.RENEW_LEASES, ids=ids, tokens=[job.lease_token for job in held],
            progress=news, lease_seconds=self._lease_seconds,
        )  # fmt: skip
        failpoint("heartbeat.renewed")
        holders = {row[0]: row[1] for row in await fetch(self._connection, sql.READ_HOLDERS, ids=ids)}
        failpoint("heartbeat.after")
        for job, told in zip(held, news, strict=True):
            job.renewed_at = began
            if job.news is told:
                job.news = None
            if holders.get(job.id) != job.lease_token:
                self._loop.call_soon_threadsafe(self._lost, job)
