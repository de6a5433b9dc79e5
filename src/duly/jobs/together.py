"""What follows from many calls to the outside: written for all whose calls have ended, with their jobs' ends.

A commit that fails because of one of them, or waits for a lock that one of them needs, is given up soon; then each is
written by its own run. So one alone can hold up the others for a moment, and never spoil them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from duly.clock import monotonic
from duly.db import Database, Statement, fetch, is_database_gone, is_lock_timeout, is_passing, sqlstate
from duly.errors import Invalid, OutcomeUnknown
from duly.failpoints import failpoint
from duly.gather import Gather
from duly.jobs import settle
from duly.jobs.handlers import Handler, Job
from duly.jobs.outcomes import Fail, Outcome, Snooze, ThenTogether, check_outcome
from duly.jobs.settle import Settlement

log = structlog.get_logger("duly.run")
MOST_TOGETHER = 200
TOGETHER_SECONDS = 10.0
TOGETHER_LOCK_SECONDS = 0.5
ALONE_LOCK_SECONDS = 2.0
ALONE_AT_ONCE = 3  # of one worker: those who wait for a lock leave sessions to the others
MOST_FAILURES = 3  # of a commit with others, for reasons that pass: then alone
_WAIT_FOR_LOCKS = Statement("SELECT set_config('lock_timeout', CAST(:milliseconds AS text), true)")


@dataclass
class Ended:
    """A job whose call has been made, and what its commits have come to so far."""

    job: Job
    then: ThenTogether
    began: float
    failures: int = 0
    alone: bool = False


class WorkFailed(Exception):
    """What follows could not be written because of the work itself: the same again would fail again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def blaming_work() -> Iterator[None]:
    """Tell what the work itself raised from what the database did: a file that is missing is no outage."""
    try:
        yield
    except Exception as error:
        if sqlstate(error) is None and not is_database_gone(error):
            raise WorkFailed(error) from error
        raise


class _Alone(Exception):
    """A commit with others failed: this one is to be written by itself."""


class Together:
    """Commits for one worker: one transaction at a time for each handler, with everybody who came meanwhile."""

    def __init__(self, db: Database, *, worker: str, time_limit_seconds: float) -> None:
        self._db = db
        self._worker = worker
        self._time_limit_seconds = time_limit_seconds
        self._writers: dict[str, Gather[Ended, Settlement]] = {}
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)

    async def finish(self, handler: Handler, ended: Ended) -> Settlement:
        """Write what follows from this call, with others' or alone; raises what kept it from being written."""
        if not ended.alone:
            try:
                return await self._writer(handler).ask(ended)
            except _Alone:
                failpoint("worker.together_split")
        async with self._alone:
            (settlement,) = await self._commit(handler, [ended], lock_seconds=ALONE_LOCK_SECONDS)
        return settlement

    async def close(self) -> None:
        """Nobody waits any more: end what is under way."""
        for writer in self._writers.values():
            await writer.close()

    def _writer(self, handler: Handler) -> Gather[Ended, Settlement]:
        writer = self._writers.get(handler.name)
        if writer is None:

            async def write(ended: list[Ended]) -> list[Settlement | Exception]:
                return await self._write(handler, ended)

            writer = self._writers[handler.name] = Gather(write, most=MOST_TOGETHER)
        return writer

    async def _write(self, handler: Handler, ended: Sequence[Ended]) -> list[Settlement | Exception]:
        """All in one commit; or why not: for all of them, or each is to try by itself."""
        seconds = min((handler.timeout_seconds or self._time_limit_seconds) / 4, TOGETHER_SECONDS)
        error: BaseException
        try:
            async with asyncio.timeout(seconds) as limit:
                return [*await self._commit(handler, ended, lock_seconds=TOGETHER_LOCK_SECONDS)]
        except asyncio.CancelledError as cancelled:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            error = cancelled  # of something that the work waited for, not of us
        except Exception as failed:  # noqa: BLE001 - the work may raise anything; each run decides what follows
            error = failed
            if not limit.expired() and not is_lock_timeout(failed):
                if len(ended) == 1:
                    return [failed]
                if not isinstance(failed, WorkFailed) and (isinstance(failed, OutcomeUnknown) or is_passing(failed)):
                    for one in ended:
                        one.failures += 1
                        one.alone = one.failures >= MOST_FAILURES
                    return [failed] * len(ended)
        log.info("together_split", name=handler.name, size=len(ended), error=type(error).__name__)
        for one in ended:
            one.alone = True
        return [_Alone() for _ in ended]

    async def _commit(self, handler: Handler, ended: Sequence[Ended], *, lock_seconds: float) -> list[Settlement]:
        """Inbox rows, what follows from the calls, and the jobs' ends."""
        async with self._db.transaction() as tx:
            await wait_for_locks(tx, seconds=lock_seconds)
            seen = await handler.mark(tx, [one.job for one in ended])
            fresh = [one for one in ended if one.job.id not in seen]
            settled = {
                one.job.lease: Settlement(one.job, "duplicate", 0.0, "processed before")
                for one in ended
                if one.job.id in seen
            }
            for one, outcome in await _work(tx, fresh):
                if isinstance(outcome, Snooze | Fail):
                    await handler.unmark(tx, [one.job])
                settled[one.job.lease] = settle.decide(one.job, outcome, monotonic() - one.began)
            settlements = [settled[one.job.lease] for one in ended]
            await tx.flush()
            failpoint("worker.before_settle")
            settle.check_all_ours(settlements, await settle.write(tx, settlements, worker=self._worker))
            failpoint("inbox.noted")
        failpoint("inbox.committed")
        return settlements


async def wait_for_locks(tx: Any, *, seconds: float) -> None:
    """From here on this transaction waits at most so long for each lock."""
    await fetch(tx, _WAIT_FOR_LOCKS, milliseconds=str(round(seconds * 1000)))


async def _work(tx: Any, ended: Sequence[Ended]) -> list[tuple[Ended, Outcome]]:
    found: list[tuple[Ended, Outcome]] = []
    for work, some in itertools.groupby(ended, key=lambda one: one.then.work):
        these = list(some)
        with blaming_work():
            outcomes = await work(tx, [one.then.item for one in these])
            if len(outcomes) != len(these):
                raise Invalid(f"ThenTogether: {len(these)} items and {len(outcomes)} outcomes; return one for each")
            found += zip(these, map(check_outcome, outcomes), strict=True)
    return found
