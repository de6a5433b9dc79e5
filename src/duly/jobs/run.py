"""Runs one unit of work: the handler, its transaction, the inbox mark and the settlement in one commit."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import structlog
from opentelemetry.trace import SpanKind

from duly.clock import monotonic
from duly.db import (
    CONFLICT_RETRIES,
    Database,
    fetch,
    is_conflict,
    is_database_gone,
    is_disconnect,
    is_lock_timeout,
    is_passing,
    lend_scope,
)
from duly.duty import OUTAGE_BACKOFF_SECONDS
from duly.errors import LeaseLost, OutcomeUnknown
from duly.failpoints import failpoint
from duly.jobs import settle, sql
from duly.jobs.handlers import Handler, Job, JobContext, TxKind
from duly.jobs.outcomes import Done, Fail, Outcome, Snooze, Then, ThenTogether, check_outcome
from duly.jobs.settle import Settlement
from duly.jobs.together import Ended, Together, WorkFailed, blaming_work
from duly.telemetry import originating, span, tracing

log = structlog.get_logger("duly.run")
_AFTER_OUTAGE = timedelta(seconds=1)
MAX_LOOK_UP_SECONDS = 120.0
MAX_OUTAGE_RUN_SECONDS = 55.0  # less than the limit on idle transactions
MAX_RELEASES = 10
MAX_GROUP_FAILURES = 5  # then each job runs by itself
MAX_REMEMBERED = 10_000
ASKED_AT_ONCE = 4  # a lost COMMIT of many jobs must not take all the server's connections


@dataclass
class Result:
    """What a unit came to: settlements still to write, those committed with the handler's writes, and jobs not ours."""

    to_write: list[Settlement] = field(default_factory=list)
    committed: list[Settlement] = field(default_factory=list)
    lost: list[Job] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Take in a part's result."""
        self.to_write += other.to_write
        self.committed += other.committed
        self.lost += other.lost


def _tell(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Any],
    *,
    result: Any = None,
    error: BaseException | None = None,
) -> None:
    """Hand a thread's end to the event loop, unless nobody waits any more."""

    def settle_future() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
        loop.call_soon_threadsafe(settle_future)


class Runner:
    """Turns claimed jobs into settlements. What it returns is still to be written; what it wrote itself is not."""

    def __init__(
        self, db: Database, *, worker: str, progress: Callable[[int, str], None], time_limit_seconds: float = 3600.0
    ) -> None:
        self._db = db
        self._worker = worker
        self._progress = progress
        self._time_limit_seconds = time_limit_seconds
        self._together = Together(db, worker=worker, time_limit_seconds=time_limit_seconds)
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._releases: dict[int, int] = {}  # by job: how often the database went away under it, one after the other

    async def run(self, handler: Handler, jobs: Sequence[Job]) -> Result:
        """Run a unit."""
        first = jobs[0]
        with originating(first):
            if not tracing():
                return self._ended(await self._dispatch(handler, jobs))
            attributes: dict[str, str | int] = {
                "duly.job.name": handler.name,
                "duly.job.id": first.id,
                "duly.jobs": len(jobs),
            }
            with span(f"run {handler.name}", kind=SpanKind.CONSUMER, parent=first.traceparent, attributes=attributes):
                return self._ended(await self._dispatch(handler, jobs))

    async def run_plain(self, handler: Handler, job: Job, began: float) -> Settlement | Result:
        """Run an ``async def`` without a transaction: the same as ``run``, without what it does not need."""
        context = JobContext(job, began, self._progress)
        try:
            with originating(job):
                failpoint("worker.before_handler")
                returned = await (handler.function(context) if handler.takes_argument else handler.function())
                failpoint("worker.handler_done")
                outcome = context.outcome(returned)
                if isinstance(outcome, Then | ThenTogether):
                    return self._ended(await self._finish(handler, job, outcome, began))
            return settle.decide(job, outcome, monotonic() - began)
        except LeaseLost:
            return Result(lost=[job])
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; retry.py decides what follows
            return self._failed(job, handler, error, monotonic() - began)

    async def close(self) -> None:
        """Nobody waits for anything of ours any more."""
        await self._together.close()

    async def _dispatch(self, handler: Handler, jobs: Sequence[Job]) -> Result:
        if handler.batch > 1:
            return await self._run_batch(handler, jobs)
        if len(jobs) > 1:
            return await self._run_group(handler, jobs)
        return await self._run_single(handler, jobs[0])

    # -- one job ------------------------------------------------------------------------------------------------

    async def _run_single(self, handler: Handler, job: Job) -> Result:
        began = monotonic()
        try:
            if not handler.is_in_tx:
                return await self._run_without_tx(handler, job, began)
            return Result(committed=await self._in_one_commit(handler, [job], began))
        except LeaseLost:
            return Result(lost=[job])
        except OutcomeUnknown:
            return await self._look_up(handler, job, began)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; retry.py decides what follows
            return Result([self._failed(job, handler, error, monotonic() - began)])

    async def _run_without_tx(self, handler: Handler, job: Job, began: float) -> Result:
        if job.duplicate:
            return Result([Settlement(job, "duplicate", 0.0, "processed before")])
        argument = self._argument(job)
        failpoint("worker.before_handler")
        returned = await self._call(handler, handler.arguments(argument, self._db))
        failpoint("worker.handler_done")
        outcome = _outcome(argument, returned)
        is_noted = job.event_id is not None and isinstance(outcome, Done)
        if isinstance(outcome, Then | ThenTogether) or is_noted:
            return await self._finish(handler, job, outcome, began)
        return Result([settle.decide(job, outcome, monotonic() - began)])

    async def _finish(self, handler: Handler, job: Job, outcome: Outcome | Then | ThenTogether, began: float) -> Result:
        """The handler did its work: write what follows until it is written; never call it again."""
        ended = Ended(job, outcome, began) if isinstance(outcome, ThenTogether) else None
        failure: Exception | None = None
        delay = OUTAGE_BACKOFF_SECONDS[0]
        deadline = monotonic() + MAX_LOOK_UP_SECONDS  # from here: the handler may have taken its time
        while monotonic() < deadline:
            try:
                if ended is not None:
                    return Result(committed=[await self._together.finish(handler, ended)])
                assert not isinstance(outcome, ThenTogether)
                if isinstance(outcome, Then) and not handler.is_async:
                    return Result(committed=[await self._in_thread(self._finish_sync, handler, job, outcome, began)])
                return Result(committed=[await self._finish_async(handler, job, outcome, began)])
            except OutcomeUnknown:
                found = await self._look_up(handler, job, began)
                if not found.to_write:
                    return found
            except WorkFailed as failed:
                raise failed.error from failed
            except Exception as error:
                if isinstance(error, LeaseLost) or not is_passing(error):
                    raise
                failure = error
            await asyncio.sleep(delay)
            delay = min(delay * 2, OUTAGE_BACKOFF_SECONDS[1])
        if failure is not None and not is_disconnect(failure):
            raise failure
        return Result(lost=[job])

    async def _finish_async(self, handler: Handler, job: Job, outcome: Outcome | Then, began: float) -> Settlement:
        """Inbox row, what follows from the handler's call, and the job's end in one commit."""
        async with self._db.transaction() as tx:
            if await handler.mark(tx, [job]) and isinstance(outcome, Then):
                settlement = Settlement(job, "duplicate", 0.0, "processed before")
            else:
                with blaming_work():
                    ended = await _work(outcome, tx) if isinstance(outcome, Then) else outcome
                if isinstance(ended, Snooze | Fail):
                    await handler.unmark(tx, [job])
                settlement = settle.decide(job, ended, monotonic() - began)
            await tx.flush()
            await self._settle(tx, [settlement])
            failpoint("inbox.noted")
        failpoint("inbox.committed")
        return settlement

    def _finish_sync(self, handler: Handler, job: Job, then: Then, began: float) -> Settlement:
        with self._db.transaction_sync() as tx:
            if handler.mark_sync(tx, [job]):
                settlement = Settlement(job, "duplicate", 0.0, "processed before")
            else:
                with blaming_work():
                    ended = check_outcome(then.work(tx))
                if isinstance(ended, Snooze | Fail):
                    handler.unmark_sync(tx, [job])
                settlement = settle.decide(job, ended, monotonic() - began)
            tx.flush()
            settle.check_all_ours([settlement], settle.write_sync(tx, [settlement], worker=self._worker))
            failpoint("inbox.noted")
        failpoint("inbox.committed")
        return settlement

    # -- in a transaction ---------------------------------------------------------------------------------------

    async def _in_one_commit(self, handler: Handler, jobs: Sequence[Job], began: float) -> list[Settlement]:
        """Inbox mark, handler and settlement in one transaction, again when it lost a deadlock."""
        for attempt in range(CONFLICT_RETRIES + 1):
            try:
                if handler.tx_kind is TxKind.SYNC:
                    settled: list[Settlement] = await self._in_thread(self._commit_sync, handler, jobs, began)
                    return settled
                return await self._commit_async(handler, jobs, began)
            except Exception as error:
                if not is_conflict(error) or attempt == CONFLICT_RETRIES:
                    raise
                await asyncio.sleep(random.uniform(0.005, 0.02) * 2**attempt)  # noqa: S311 - jitter, not a secret
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _commit_async(self, handler: Handler, jobs: Sequence[Job], began: float) -> list[Settlement]:
        is_raw = handler.tx_kind is TxKind.RAW
        async with self._db.raw_transaction() if is_raw else self._db.transaction() as tx:
            seen = await handler.mark(tx, jobs)
            failpoint("inbox.marked")
            fresh = [job for job in jobs if job.id not in seen]
            settlements = [Settlement(job, "duplicate", 0.0, "processed before") for job in jobs if job.id in seen]
            if len(fresh) > 1 and handler.batch == 1:
                settlements += [await self._handle_one_of_many(handler, job, tx) for job in fresh]
            elif fresh:
                outcome = await self._handle(handler, fresh, tx)
                if isinstance(outcome, Snooze | Fail):
                    await handler.unmark(tx, fresh)
                settlements += [settle.decide(job, outcome, monotonic() - began) for job in fresh]
            if not is_raw:
                await tx.flush()
            await self._settle(tx, settlements)
            failpoint("worker.before_commit")
        failpoint("worker.committed")
        return settlements

    async def _handle_one_of_many(self, handler: Handler, job: Job, tx: Any) -> Settlement:
        """One job of a group: with its own origin and time limit, and its failure is told from the others'."""
        began = monotonic()
        try:
            with originating(job):
                async with asyncio.timeout(handler.timeout_seconds or self._time_limit_seconds):
                    outcome = await self._handle(handler, [job], tx)
            if isinstance(outcome, Snooze | Fail):
                await handler.unmark(tx, [job])
        except Exception as error:
            raise _OneOfMany(job, error, monotonic() - began) from error
        return settle.decide(job, outcome, monotonic() - began)

    async def _handle(self, handler: Handler, jobs: Sequence[Job], tx: Any) -> Outcome:
        """Call the handler with its transaction in the shape that its annotation asks for."""
        argument = self._arguments(handler, jobs)
        failpoint("worker.before_handler")
        if handler.tx_kind is TxKind.CONNECTION:
            connection = await tx.connection()
            with lend_scope(tx, connection):
                returned = await self._call(handler, handler.arguments(argument, connection))
        else:
            returned = await self._call(handler, handler.arguments(argument, tx))
        failpoint("worker.handler_done")
        return check_outcome(_outcome(argument, returned))

    def _commit_sync(self, handler: Handler, jobs: Sequence[Job], began: float) -> list[Settlement]:
        with self._db.transaction_sync() as tx:
            seen = handler.mark_sync(tx, jobs)
            failpoint("inbox.marked")
            fresh = [job for job in jobs if job.id not in seen]
            settlements = [Settlement(job, "duplicate", 0.0, "processed before") for job in jobs if job.id in seen]
            if fresh:
                argument = self._arguments(handler, fresh)
                failpoint("worker.before_handler")
                returned = handler.function(*handler.arguments(argument, tx))
                failpoint("worker.handler_done")
                outcome = check_outcome(_outcome(argument, returned))
                if isinstance(outcome, Snooze | Fail):
                    handler.unmark_sync(tx, fresh)
                settlements += [settle.decide(job, outcome, monotonic() - began) for job in fresh]
            tx.flush()
            settled = settle.write_sync(tx, settlements, worker=self._worker)
            settle.check_all_ours(settlements, settled)
            failpoint("worker.before_commit")
        failpoint("worker.committed")
        return settlements

    async def _settle(self, tx: Any, settlements: Sequence[Settlement]) -> None:
        failpoint("worker.before_settle")
        settled = await settle.write(tx, settlements, worker=self._worker)
        settle.check_all_ours(settlements, settled)

    # -- many jobs in one transaction ---------------------------------------------------------------------------

    async def _run_group(self, handler: Handler, jobs: Sequence[Job]) -> Result:
        """One commit for all. Whoever fails is settled by itself, and the others run again without it."""
        result = Result()
        together = list(jobs)
        for _ in range(MAX_GROUP_FAILURES):
            began = monotonic()
            try:
                result.committed += await self._in_one_commit(handler, together, began)
                return result
            except _OneOfMany as failed:
                result.to_write.append(self._failed(failed.job, handler, failed.error, failed.seconds))
                together.remove(failed.job)
            except LeaseLost as lost:
                result.lost += [job for job in together if job.id in lost.args[1]]
                together = [job for job in together if job.id not in lost.args[1]]
            except OutcomeUnknown:
                for job in together:
                    result.add(await self._look_up(handler, job, began))
                return result
            except Exception as error:  # noqa: BLE001 - of nobody in particular: each by itself
                log.info("group_split", name=handler.name, size=len(together), error=type(error).__name__)
                failpoint("worker.group_split")
                break
            if not together:
                return result
        for job in together:
            result.add(await self._run_single(handler, job))
        return result

    # -- many events in one transaction -------------------------------------------------------------------------

    async def _run_batch(self, handler: Handler, jobs: Sequence[Job]) -> Result:
        """One commit for all; when it fails, halves of it, until the poison one stands alone and fails by itself."""
        result = Result()
        parts: list[list[Job]] = [list(jobs)]
        while parts:
            part = parts.pop()
            began = monotonic()
            try:
                result.committed += await self._in_one_commit(handler, part, began)
            except LeaseLost as lost:
                result.lost += [job for job in part if job.id in lost.args[1]]
                if remaining := [job for job in part if job.id not in lost.args[1]]:
                    parts.append(remaining)
            except OutcomeUnknown:
                for job in part:
                    result.add(await self._look_up(handler, job, began))
            except Exception as error:  # noqa: BLE001 - a handler may raise anything
                if len(part) == 1:
                    result.to_write.append(self._failed(part[0], handler, error, monotonic() - began))
                else:
                    log.info("batch_split", name=handler.name, size=len(part), error=type(error).__name__)
                    failpoint("worker.batch_split")
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
        return result

    # -- helpers ------------------------------------------------------------------------------------------------

    async def _call(self, handler: Handler, arguments: list[Any]) -> Any:
        if handler.is_async:
            return await handler.function(*arguments)
        return await self._in_thread(handler.function, *arguments)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """In a thread of its own, with the origin and trace of this task; one that hangs takes no other's place."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        call = contextvars.copy_context().run

        def work() -> None:
            try:
                outcome = call(function, *arguments)
            except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
                _tell(loop, done, error=error)
            else:
                _tell(loop, done, result=outcome)

        threading.Thread(target=work, name="duly-job", daemon=True).start()
        return await done

    def _arguments(self, handler: Handler, jobs: Sequence[Job]) -> Any:
        if handler.batch > 1:
            return [job.argument for job in jobs]
        return self._argument(jobs[0])

    def _argument(self, job: Job) -> Any:
        if job.event_id is not None:
            return job.argument
        return JobContext(job, monotonic(), self._progress)

    def _failed(self, job: Job, handler: Handler, error: Exception, seconds: float) -> Settlement:
        """A failure, unless our own database went away under the handler's transaction: that is nobody's attempt.

        Within bounds: a transaction that stood idle for too long was ended for it, and one that ends its connection
        time and again is a failure too.
        """
        is_outage = handler.is_in_tx and is_database_gone(error)
        if not is_outage or seconds > MAX_OUTAGE_RUN_SECONDS or self._count_release(job) > MAX_RELEASES:
            self._releases.pop(job.id, None)
            return settle.decide_failure(job, handler, error, seconds)
        log.warning("database_gone_under_handler", job_id=job.id, name=job.name)
        return Settlement(job, "released", seconds, "the database went away; nothing was written", wait=_AFTER_OUTAGE)

    def _count_release(self, job: Job) -> int:
        """How often the database has gone away under this job without a run that ended between."""
        times = self._releases.pop(job.id, 0) + 1
        while len(self._releases) >= MAX_REMEMBERED:  # the one that was released longest ago is forgotten
            del self._releases[next(iter(self._releases))]
        self._releases[job.id] = times
        return times

    def _ended(self, result: Result) -> Result:
        for settlement in result.committed:
            self._releases.pop(settlement.job.id, None)
        return result

    async def _look_up(self, handler: Handler, job: Job, began: float) -> Result:
        """COMMIT got no answer. The row itself knows, as soon as the database can be asked again."""
        delay = OUTAGE_BACKOFF_SECONDS[0]
        deadline = monotonic() + MAX_LOOK_UP_SECONDS
        while monotonic() < deadline:
            try:
                async with self._asking:
                    return await self._ask(handler, job, began)
            except Exception as error:
                if not is_disconnect(error) and not is_lock_timeout(error):
                    raise
                await asyncio.sleep(delay)
                delay = min(delay * 2, OUTAGE_BACKOFF_SECONDS[1])
        log.error("commit_unknown", job_id=job.id, name=job.name)
        return Result(lost=[job])  # if it did not happen, its lease runs out and another worker runs it

    async def _ask(self, handler: Handler, job: Job, began: float) -> Result:
        """Still ours: it did not happen (the row lock waits while it might). Gone with our execution: it did."""
        failpoint("worker.resolving")
        connection = await self._db.connect(application="duly-resolve")
        try:
            still_held = await fetch(connection, sql.LOCK_HELD_JOB, id=job.id, token=job.lease_token)
            rows = await fetch(connection, sql.LOOK_UP_COMMIT, id=job.id, execution_id=job.execution_id)
        finally:
            await connection.close(timeout=2)
        if still_held:
            log.warning("commit_lost", job_id=job.id, name=job.name)
            seconds, message = monotonic() - began, "the connection was lost before COMMIT"
            times = self._count_release(job)
            if times > MAX_RELEASES:
                del self._releases[job.id]
                return Result([settle.decide_failure(job, handler, OutcomeUnknown(message), seconds)])
            wait = timedelta(0) if times == 1 else _AFTER_OUTAGE  # at once, but not in a tight loop
            return Result([Settlement(job, "released", seconds, message, wait=wait)])
        if not rows[0][0]:
            return Result(lost=[job])
        log.info("commit_confirmed", job_id=job.id, name=job.name)
        return Result(committed=[Settlement(job, "done", monotonic() - began)])


class _OneOfMany(Exception):
    """A job of a group failed, and which."""

    def __init__(self, job: Job, error: Exception, seconds: float) -> None:
        super().__init__(str(error))
        self.job, self.error, self.seconds = job, error, seconds


def _outcome(argument: Any, returned: Any) -> Outcome | Then | ThenTogether:
    if isinstance(argument, JobContext):
        return argument.outcome(returned)
    return returned if isinstance(returned, Outcome | Then | ThenTogether) else Done()


async def _work(then: Then, tx: Any) -> Outcome:
    made = then.work(tx)
    return check_outcome(await made if inspect.isawaitable(made) else made)
