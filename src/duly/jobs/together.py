"""What follows from many calls to the outside: written for all whose calls have ended, with their jobs' ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from duly.clock import monotonic
from duly.db import Database, is_conflict, is_disconnect
from duly.errors import Invalid, OutcomeUnknown
from duly.failpoints import failpoint
from duly.gather import Gather
from duly.jobs import settle
from duly.jobs.handlers import Handler, Job
from duly.jobs.outcomes import Fail, Outcome, Snooze, ThenTogether, check_outcome
from duly.jobs.settle import Settlement

log = structlog.get_logger("duly.run")
MOST_TOGETHER = 200


@dataclass(frozen=True)
class _Ended:
    """A job whose call has been made."""

    job: Job
    then: ThenTogether
    began: float


class Together:
    """Commits for one worker: one transaction at a time for each handler, with everybody who came meanwhile."""

    def __init__(self, db: Database, *, worker: str, time_limit_seconds: float) -> None:
        self._db = db
        self._worker = worker
        self._time_limit_seconds = time_limit_seconds
        self._writers: dict[str, Gather[_Ended, Settlement]] = {}

    async def finish(self, handler: Handler, job: Job, then: ThenTogether, began: float) -> Settlement:
        """Write what follows from this call, with others' or alone; raises what kept it from being written."""
        writer = self._writers.get(handler.name)
        if writer is None:

            async def write(ended: list[_Ended]) -> list[Settlement | Exception]:
                return await self._write(handler, ended)

            writer = self._writers[handler.name] = Gather(write, most=MOST_TOGETHER)
        return await writer.ask(_Ended(job, then, began))

    async def _write(self, handler: Handler, ended: Sequence[_Ended]) -> list[Settlement | Exception]:
        """All in one commit; when one of them spoils it, each in its own."""
        try:
            async with asyncio.timeout(handler.timeout_seconds or self._time_limit_seconds):
                return [*await self._commit(handler, ended)]
        except Exception as error:  # noqa: BLE001 - the work may raise anything; each run decides what follows
            if len(ended) == 1 or is_disconnect(error) or is_conflict(error) or isinstance(error, OutcomeUnknown):
                return [error] * len(ended)
            log.info("together_split", name=handler.name, size=len(ended), error=type(error).__name__)
        failpoint("worker.together_split")
        return [one for each in ended for one in await self._write(handler, [each])]

    async def _commit(self, handler: Handler, ended: Sequence[_Ended]) -> list[Settlement]:
        """Inbox rows, what follows from the calls, and the jobs' ends."""
        async with self._db.transaction() as tx:
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


async def _work(tx: Any, ended: Sequence[_Ended]) -> list[tuple[_Ended, Outcome]]:
    found: list[tuple[_Ended, Outcome]] = []
    for work, some in itertools.groupby(ended, key=lambda one: one.then.work):
        these = list(some)
        outcomes = await work(tx, [one.then.item for one in these])
        if len(outcomes) != len(these):
            raise Invalid(f"ThenTogether: {len(these)} items and {len(outcomes)} outcomes; return one for each")
        found += zip(these, map(check_outcome, outcomes), strict=True)
    return found
