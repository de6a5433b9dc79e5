"""The worker: claims what is due, runs it in a fixed number of slots, settles in batches; all three overlap."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from duly.clock import monotonic
from duly.db import CONFLICT_RETRIES, Database, atomic, fetch, is_conflict, is_disconnect
from duly.duty import OUTAGE_BACKOFF_SECONDS, Cycle, Duty
from duly.errors import LeaseLost
from duly.failpoints import failpoint
from duly.jobs import settle, sql
from duly.jobs.apart import Apart
from duly.jobs.claim import Claims
from duly.jobs.handlers import Handler, Job
from duly.jobs.heartbeat import Heartbeat, Leases
from duly.jobs.run import Runner
from duly.jobs.settle import Settlement
from duly.telemetry import JobMetrics, tracing
from duly.wakeup import Wakeup, wait_for_any

log = structlog.get_logger("duly.worker")
CLAIM_BATCH = 2_000
SETTLE_BATCH = 2_000
RUN_ONCE_JOBS = 1_000
PREFETCH_SECONDS = 0.05  # never hoard more than this much work
ABANDON_AFTER_SECONDS = 5.0
WATCH_SECONDS = 0.5
STOP_SECONDS = 2.0
HOARD_SECONDS = 2.0
MAX_AHEAD = 2 * CLAIM_BATCH  # claimed and not yet started, when handlers take no time
MAX_UNSETTLED = 4 * CLAIM_BATCH  # held by a worker in all
TURN_SECONDS = 0.001
LINGER_SECONDS = 0.003


@dataclass(eq=False, slots=True)
class Unit:
    """What one slot runs at a time: one job, a group of them, or many events of a batch consumer."""

    handler: Handler
    jobs: list[Job]
    time_limit_seconds: float
    task: asyncio.Task[None] | None = None
    give_up_at: float = float("inf")
    cancelled_because: str = ""
    abandoned: bool = False


class Worker(Duty):
    """One process's share of the queue."""

    name = "worker"
    channel = "jobs"

    def __init__(
        self,
        db: Database,
        handlers: Mapping[str, Handler],
        *,
        wakeup: Wakeup | None = None,
        concurrency: int | None = None,
        lease_seconds: float | None = None,
        pool_size: int | None = None,
        name: str = "worker",
        elsewhere: Collection[str] = (),
    ) -> None:
        self.name = name
        super().__init__(db, wakeup=wakeup)
        settings = db.settings
        self.handlers = dict(handlers)
        self.concurrency = concurrency or settings.concurrency
        self.lease_seconds = lease_seconds or settings.lease_seconds
        self.time_limit_seconds = settings.job_timeout_seconds
        self.poll_seconds = settings.poll_seconds
        self.counts: dict[str, int] = {}
        self.pool_size = pool_size or self.concurrency
        self._claims = Claims(
            self.handlers, worker=self.identity, lease_seconds=self.lease_seconds, elsewhere=elsewhere
        )
        self._apart = Apart(self.handlers)
        self._metrics = {name: JobMetrics.of(name) for name in self.handlers}
        self._buffer: deque[Unit] = deque()
        self._buffered = asyncio.Event()
        self._running: set[Unit] = set()
        self._results: list[Settlement] = []
        self._results_ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._leases = Leases()
        self._mean_seconds = PREFETCH_SECONDS
        self._tasks: list[asyncio.Task[Any]] = []
        self._started = False
        self._stopping = False
        self._claim_unanswered = False
        self._asked_at = float("-inf")
        self._low_water = self.concurrency
        self._traced = False

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Work until told to stop; then finish or release what is held."""
        self._start()
        try:
            await super().run(stop)
        finally:
            await self._shut_down(self.db.settings.shutdown_grace_seconds)

    async def run_once(self) -> Cycle:
        """Claim what is due now, at most a thousand jobs, run it, settle it, and hang up."""
        self._start()
        claimed = 0
        self.counts = {}
        try:
            while claimed < RUN_ONCE_JOBS:
                cycle = await self.cycle(RUN_ONCE_JOBS - claimed)
                claimed += cycle.done
                if not cycle.done and not self._leases:
                    break
                if not cycle.done:
                    self._woken.clear()
                    await wait_for_any(self.poll_seconds, self._woken)
            await self._until_idle(self.time_limit_seconds)
        finally:
            await self._shut_down(0)
        return Cycle(claimed, facts={"claimed": claimed, **self.counts})

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        self._stopping = False
        self._handler_db = self.db.with_pool(self.pool_size)
        self._runner = Runner(
            self._handler_db, worker=self.identity, progress=self._leases.progress,
            time_limit_seconds=self.time_limit_seconds,
        )  # fmt: skip
        self._heartbeat = Heartbeat(self.db, self._leases, lease_seconds=self.lease_seconds, lost=self._lease_lost)
        self._heartbeat.start()
        spawn = asyncio.get_running_loop().create_task
        self._tasks = [spawn(self._slot()) for _ in range(self.concurrency)]
        self._tasks += [spawn(self._settle_forever()), spawn(self._watch())]

    async def _shut_down(self, grace_seconds: float) -> None:
        """Nothing new; what has not started goes back at once; what runs gets the grace, then goes back too."""
        unstarted = [job for unit in self._buffer for job in unit.jobs]
        self._buffer.clear()
        await self._release(unstarted)
        await self._until_idle(grace_seconds)
        for unit in list(self._running):
            self._cancel(unit, "released")
        await self._until_idle(STOP_SECONDS)
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=STOP_SECONDS)  # whoever will not end is fenced by its lease
        await self._heartbeat.stop()
        self._started = False
        await self._runner.close()
        await self._handler_db.close()
        await self.close()

    async def _until_idle(self, seconds: float) -> None:
        deadline = monotonic() + seconds
        while self._leases and (left := deadline - monotonic()) > 0:
            self._idle.clear()
            await wait_for_any(min(left, 0.5), self._idle)

    # -- claiming -----------------------------------------------------------------------------------------------

    async def cycle(self, most: int = CLAIM_BATCH) -> Cycle:
        """Claim as much as there is room for, and hand it to the slots."""
        await self._give_back(before=monotonic() - HOARD_SECONDS)
        room = self._apart.room(min(self._room(), most, CLAIM_BATCH), is_busy=bool(self._leases))
        if room <= 0:
            await self._look_alive()
            return Cycle(0, wait_seconds=None)
        failpoint("worker.before_claim")
        connection = await self.connection()
        self._asked_at = monotonic()
        if self._claim_unanswered:
            await self._claims.give_back_unknown(connection, self._leases.ids())
        if backlog := await self._claims.look_around(connection):
            self.counts["backlog"] = backlog
        self._claim_unanswered = True
        jobs = await self._claims.take(connection, room)
        failpoint("worker.claimed")
        taken, jobs = len(jobs), await self._apart.sift(connection, jobs, is_busy=bool(self._leases))
        self._claim_unanswered = False
        if not jobs:
            return Cycle(0, wait_seconds=None if taken else await self._claims.seconds_to_next(connection))
        try:
            await self._accept(connection, jobs)
        except BaseException:
            self._claim_unanswered = True  # they are leased and will not run: given back at the next cycle
            for job in jobs:
                self._leases.drop(job)
            raise
        return Cycle(len(jobs))

    def _room(self) -> int:
        """How many to claim now; none until half of what may be ahead is used up, so that claims stay large.

        What has run and is being settled takes no room: the next claim overlaps with it, within a bound.
        """
        ahead = min(MAX_AHEAD, int(self.concurrency * PREFETCH_SECONDS / max(self._mean_seconds, 1e-5)))
        waiting = sum(len(unit.jobs) for unit in self._buffer) + sum(len(unit.jobs) for unit in self._running)
        self._low_water = max(self.concurrency, ahead // 2)
        if self._buffer and waiting > self.concurrency + ahead // 2:
            return 0
        return min(self.concurrency + ahead - waiting, self.concurrency + MAX_UNSETTLED - len(self._leases))

    async def _accept(self, connection: Any, jobs: list[Job]) -> None:
        self._traced = tracing()
        by_name: dict[str, list[Job]] = {}
        for job in jobs:
            self._leases.add(job)
            by_name.setdefault(job.name, []).append(job)
        for name, some in by_name.items():
            await self.handlers[name].load(connection, some)
        # Only now: what a failed load gives back must not run as well.
        units = [unit for name, some in by_name.items() for unit in self._units(self.handlers[name], some)]
        if len(by_name) > 1:
            units.sort(key=lambda unit: unit.jobs[0].turn)
        self._buffer.extend(units)
        self._buffered.set()

    def _units(self, handler: Handler, jobs: list[Job]) -> list[Unit]:
        """The claimed jobs of a name in the sizes it runs them in, without those that end here."""
        metrics = self._metrics[jobs[0].name]
        ready: list[Job] = []
        for job in jobs:
            metrics.lateness.observe(job.late_seconds)
            if job.lost_by is not None:
                metrics.rescued += 1
                log.warning("job_taken_over", job_id=job.id, name=job.name, worker_lost=job.lost_by)
                if ended := settle.decide_takeover(job, handler):
                    self._finish([ended])
                    continue
            if job.unreadable is not None:
                self._finish([settle.decide_unreadable(job, job.unreadable)])
            else:
                ready.append(job)
        limit = handler.timeout_seconds or self.time_limit_seconds
        if handler.unit_size == 1:
            return [Unit(handler, [job], limit) for job in ready]
        parts = [ready[start : start + handler.unit_size] for start in range(0, len(ready), handler.unit_size)]
        return [Unit(handler, part, limit * len(part) if handler.group > 1 else limit) for part in parts]

    async def _look_alive(self) -> None:
        """All slots are busy: ask the database now and then, so that our health is true."""
        if monotonic() - self._asked_at >= self.poll_seconds:
            self._asked_at = monotonic()
            await (await self.connection()).execute("SELECT 1")

    # -- running ------------------------------------------------------------------------------------------------

    async def _slot(self) -> None:
        task = asyncio.current_task()
        turn_ends = monotonic() + TURN_SECONDS
        while True:
            while not self._buffer:
                self._buffered.clear()
                await self._buffered.wait()
            unit = self._buffer.popleft()
            now = monotonic()
            fresh = [job for job in unit.jobs if self._leases.is_fresh(job, self.lease_seconds, now)]
            if len(fresh) < len(unit.jobs):
                self._forget([job for job in unit.jobs if job not in fresh])
                unit.jobs = fresh
                if not fresh:
                    continue
            unit.task = task
            await self._run_unit(unit, now)
            if unit.abandoned or self._stopping:
                return  # another slot took this one's place, or none is needed any more
            if len(self._buffer) < self._low_water:
                self._woken.set()
            if now >= turn_ends:  # handlers that never wait must not keep claims and settlements waiting
                await asyncio.sleep(0)
                turn_ends = monotonic() + TURN_SECONDS

    async def _run_unit(self, unit: Unit, began: float) -> None:
        unit.give_up_at = began + unit.time_limit_seconds
        for job in unit.jobs:
            job.give_up_at = unit.give_up_at + ABANDON_AFTER_SECONDS
        self._running.add(unit)
        try:
            if unit.handler.is_plain and not self._traced:
                ended = await self._runner.run_plain(unit.handler, unit.jobs[0], began)
                if isinstance(ended, Settlement):
                    self._results.append(ended)
                    self._results_ready.set()
                    return
                result = ended
            else:
                result = await self._runner.run(unit.handler, unit.jobs)
            self._finish(result.to_write)
            self._forget(result.lost)
            self._settled(result.committed)
        except LeaseLost:
            self._forget(unit.jobs)
        except asyncio.CancelledError:
            if unit.task is not None and unit.task.cancelling() and not unit.cancelled_because:
                raise  # the slot itself is to end
            self._interrupted(unit, monotonic() - began)
        except Exception as error:
            log.exception("unit_failed", name=unit.handler.name)
            self._finish([settle.decide_failure(job, unit.handler, error, monotonic() - began) for job in unit.jobs])
        finally:
            self._running.discard(unit)
            while unit.cancelled_because and unit.task is not None and unit.task.cancelling():
                unit.task.uncancel()  # it was told to end and did: the slot goes on
            self._mean_seconds += 0.05 * ((monotonic() - began) / len(unit.jobs) - self._mean_seconds)

    def _interrupted(self, unit: Unit, seconds: float) -> None:
        if unit.cancelled_because == "lost":
            self._forget(unit.jobs)
        elif unit.cancelled_because == "released":
            self._finish([Settlement(job, "released", seconds, "the worker stopped") for job in unit.jobs])
        else:
            error: BaseException = asyncio.CancelledError("the handler was cancelled, but not by its worker")
            if unit.cancelled_because == "timeout":
                error = TimeoutError(f"still running after {unit.time_limit_seconds:g} s")
            self._finish([settle.decide_failure(job, unit.handler, error, seconds) for job in unit.jobs])

    def _cancel(self, unit: Unit, because: str) -> None:
        if unit.task is not None and not unit.cancelled_because:
            unit.cancelled_because = because
            unit.task.cancel()

    async def _watch(self) -> None:
        """Ends what runs too long; a handler that will not end keeps its slot no longer than a few seconds more."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = monotonic()
            for unit in list(self._running):
                if now >= unit.give_up_at + ABANDON_AFTER_SECONDS:
                    self._abandon(unit)
                elif now >= unit.give_up_at:
                    self._cancel(unit, "timeout")

    async def _give_back(self, *, before: float) -> None:
        """What was claimed ahead and did not get its turn soon: handlers became slow, and others may have room."""
        stale = [unit for unit in self._buffer if unit.jobs[0].claimed_mono < before]
        if stale:
            self._mean_seconds = max(self._mean_seconds, 1.0)
            for unit in stale:
                self._buffer.remove(unit)
            await self._release([job for unit in stale for job in unit.jobs])

    def _abandon(self, unit: Unit) -> None:
        log.error("handler_abandoned", name=unit.handler.name, seconds=unit.time_limit_seconds)
        unit.abandoned = True
        self._running.discard(unit)
        self._forget(unit.jobs)  # its lease runs out, another worker takes over, and what it still does is fenced
        self._tasks.append(asyncio.get_running_loop().create_task(self._slot()))

    def _lease_lost(self, job: Job) -> None:
        """The heartbeat found another holder, or none: the handler is told to stop."""
        if job.id not in self._leases:
            return
        for unit in list(self._running):
            if len(unit.jobs) == 1 and unit.jobs[0] is job:
                self._cancel(unit, "lost")
        for unit in [unit for unit in self._buffer if job in unit.jobs]:
            unit.jobs.remove(job)
            if not unit.jobs:
                self._buffer.remove(unit)
            self._forget([job])

    # -- settling -----------------------------------------------------------------------------------------------

    def _finish(self, settlements: Sequence[Settlement]) -> None:
        if settlements:
            self._results.extend(settlements)
            self._results_ready.set()

    async def _settle_forever(self) -> None:
        connection: Any = None
        delay = OUTAGE_BACKOFF_SECONDS[0]
        try:
            while True:
                await self._results_ready.wait()
                if self._buffer and len(self._results) < SETTLE_BATCH // 2:
                    await asyncio.sleep(LINGER_SECONDS)  # more is about to come: one commit for all of it
                batch = self._results[:SETTLE_BATCH]
                try:
                    if connection is None or connection.is_closed():
                        connection = await self.db.connect(application="duly-settle")
                    failpoint("worker.before_settle")
                    await self._settle_batch(connection, batch)
                    failpoint("worker.settled")
                except Exception as error:
                    if not is_disconnect(error):
                        log.exception("settler_failed")
                    await asyncio.sleep(delay)  # the results are kept; the leases say for how long they are worth it
                    delay = min(delay * 2, OUTAGE_BACKOFF_SECONDS[1])
                    continue
                delay = OUTAGE_BACKOFF_SECONDS[0]
                del self._results[: len(batch)]
                if not self._results:
                    self._results_ready.clear()
                self._woken.set()
        finally:
            if connection is not None and not connection.is_closed():
                connection.terminate()

    async def _settle_batch(self, connection: Any, batch: Sequence[Settlement]) -> None:
        """All at once; if that fails other than by an outage, one by one, so that one cannot spoil the rest."""
        for _ in range(CONFLICT_RETRIES):
            try:
                return await self._settle(connection, batch)
            except Exception as error:
                if is_disconnect(error):
                    raise
                if not is_conflict(error):
                    log.exception("settle_failed", jobs=len(batch))
                    break
        if len(batch) == 1:
            return self._forget([batch[0].job])  # its lease runs out, and another worker runs it again
        for settlement in batch:
            await self._settle_batch(connection, [settlement])
        return None

    async def _settle(self, connection: Any, batch: Sequence[Settlement]) -> None:
        if all(s.outcome in ("done", "cancelled") and s.job.order_key is None for s in batch):
            settled = await settle.write(connection, batch, worker=self.identity)
        else:
            async with atomic(connection):
                settled = await settle.write(connection, batch, worker=self.identity)
        if len(settled) == len(batch):
            return self._settled(batch)
        self._settled([one for one in batch if one.job.lease in settled])
        return self._forget([one.job for one in batch if one.job.lease not in settled])

    def _settled(self, settlements: Sequence[Settlement]) -> None:
        for one in settlements:
            job, outcome = one.job, one.outcome
            self._leases.drop(job)
            self.counts[outcome] = self.counts.get(outcome, 0) + 1
            self._metrics[job.name].ended(outcome, one.seconds)
            if outcome in ("retried", "buried"):
                log.warning(
                    f"job_{outcome}", job_id=job.id, name=job.name, retry_count=job.retry_count,
                    error=one.error_kind or (one.message or "").partition(":")[0],
                )  # fmt: skip
        if not self._leases:
            self._idle.set()

    def _forget(self, jobs: Sequence[Job]) -> None:
        """Somebody else holds these now, or will; nothing of ours was written for them."""
        for job in jobs:
            self._leases.drop(job)
            self._metrics[job.name].lost += 1
            self.counts["lost"] = self.counts.get("lost", 0) + 1
            log.warning("lease_lost", job_id=job.id, name=job.name)
        if not self._leases:
            self._idle.set()

    async def _release(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        try:
            ids, tokens = [job.id for job in jobs], [job.lease_token for job in jobs]
            await fetch(await self.connection(), sql.RELEASE_JOBS, ids=ids, tokens=tokens)
            failpoint("worker.released")
            self.db.poke("jobs")
        except Exception as error:  # noqa: BLE001 - the database may be why we stop; then their leases run out
            log.warning("release_failed", jobs=len(jobs), error=type(error).__name__)
            self._claim_unanswered = True  # if we go on, the next cycle gives them back
            await self.close()
        for job in jobs:
            self._leases.drop(job)
