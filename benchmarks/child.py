"""The processes that are measured, by role: ``python -m benchmarks.child ROLE ARGUMENTS``, told to go by a line."""

from __future__ import annotations

import asyncio
import cProfile
import dataclasses
import io
import json
import pstats
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import event

from benchmarks import raw
from benchmarks.application import ORDERED_AGGREGATES, application
from benchmarks.link import Link
from duly import Database, NewEvent, NewJob, Relay, Worker, emit, schedule, schedule_many
from duly.app import Duly
from duly.cli.process import run_async
from duly.clock import monotonic
from duly.duty import Cycle, Duty
from duly.jobs.handlers import Handler, JobContext
from duly.runtime.supervisor import Supervisor
from duly.schedules.tick import Scheduler
from duly.telemetry import configure_logging
from duly.wakeup import Wakeup

PROGRESS_SECONDS = 0.01
BULK = raw.BULK
PROFILE_LINES = 40
MAX_REPLANS = 100_000


class Observed(Worker):
    """A worker that knows when it first asked for work, connected."""

    first_claim_at: float | None = None

    async def cycle(self, *most: int) -> Cycle:
        """One cycle."""
        if self.first_claim_at is None:
            await self.connection()
            self.first_claim_at = monotonic()
        return await super().cycle(*most)


@asynccontextmanager
async def database(dsn: str) -> AsyncIterator[Database]:
    """A Database for the block."""
    db = Database(dsn)
    try:
        yield db
    finally:
        await db.close()


async def supervise(link: Link, db: Database, duties: Sequence[Duty], wakeup: Wakeup, names: Sequence[str]) -> None:
    """What ``duly worker`` runs, too: the duties, the listener, the attendance; until the parent hangs up."""
    await Supervisor(db, duties, wakeup=wakeup, names=names).run(link.ended)


async def worker(
    link: Link, dsn: str, names: list[str], *, concurrency: int | None = None, profile: str | None = None
) -> None:
    """Drain the queue; say every hundredth of a second how far, if it moved."""
    async with database(dsn) as db:
        app = application()
        await app.prepare(db)
        handlers: Mapping[str, Handler] = {name: app.handlers[name] for name in names}
        wakeup = Wakeup(db)
        duty = Observed(db, handlers, wakeup=wakeup, concurrency=concurrency)
        if not await link.ready():
            return
        profiler = cProfile.Profile() if profile else None
        if profiler:
            profiler.enable()
        reporting = asyncio.create_task(report_progress(link, duty))
        await supervise(link, db, [duty], wakeup, names)
        reporting.cancel()
        if profiler and profile:
            profiler.disable()
            await asyncio.to_thread(_write_profile, profiler, Path(profile))


def _write_profile(profiler: cProfile.Profile, path: Path) -> None:
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
    path.write_text(text.getvalue())


async def report_progress(link: Link, duty: Observed) -> None:
    """How many are done by now, with the time of it."""
    said = 0
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        done = sum(count for outcome, count in duty.counts.items() if outcome != "backlog")
        if done != said:
            said = done
            link.tell(done=done, at=monotonic(), first_claim_at=duty.first_claim_at)


async def answer(link: Link, dsn: str) -> None:
    """A worker for the latency: its handler notes when it starts."""
    async with database(dsn) as db:
        app = Duly()

        @app.job("tick")
        async def tick(ctx: JobContext) -> None:
            link.tell(starts={str(ctx.entity_id): monotonic()})

        wakeup = Wakeup(db)
        duty = Worker(db, {"tick": app.handlers["tick"]}, wakeup=wakeup)
        if await link.ready():
            await supervise(link, db, [duty], wakeup, ["tick"])


async def ask(link: Link, dsn: str, count: int) -> None:
    """A client that commits 50 jobs a second, and notes when each COMMIT had its answer."""
    commits: dict[str, float] = {}
    async with database(dsn) as db:
        if not await link.ready():
            return
        began = monotonic() + raw.WARM_UP_JOBS * raw.PERIOD_SECONDS
        for number in range(-raw.WARM_UP_JOBS, count):
            await asyncio.sleep(max(0.0, began + number * raw.PERIOD_SECONDS - monotonic()))
            async with db.transaction() as tx:
                await schedule(tx, "tick", str(number))

                @event.listens_for(tx.sync_session, "after_commit")
                def note(_session: Any, key: str = str(number)) -> None:
                    commits[key] = monotonic()

        link.tell(commits={key: at for key, at in commits.items() if int(key) >= 0})


async def enqueue_each(link: Link, dsn: str, count: int, *, bare: bool = False) -> None:
    """One job a transaction, one after the other."""
    async with database(dsn) as db:
        begin: Callable[[], Any] = db.raw_transaction if bare else db.transaction
        for _ in range(raw.WARM_UP_JOBS):
            async with begin() as tx:
                await schedule(tx, "warm-up")
        if not await link.ready():
            return
        began = monotonic()
        for _ in range(count):
            async with begin() as tx:
                await schedule(tx, "noop")
        link.tell(rate=count / (monotonic() - began), done=count)


async def enqueue_bulk(link: Link, dsn: str, count: int, *, bare: bool = False) -> None:
    """Five thousand jobs a call, one call a transaction."""
    async with database(dsn) as db:
        begin: Callable[[], Any] = db.raw_transaction if bare else db.transaction
        async with begin() as tx:
            await schedule_many(tx, [NewJob("warm-up")] * BULK)
        if not await link.ready():
            return
        began = monotonic()
        for start in range(0, count, BULK):
            async with begin() as tx:
                await schedule_many(tx, [NewJob("noop")] * min(BULK, count - start))
        link.tell(rate=count / (monotonic() - began), done=count)


async def relay(link: Link, dsn: str, count: int, *, batch: int | None = None) -> None:
    """Publish what is in the outbox, cycle by cycle, as the duty's own loop does."""
    async with database(dsn) as db:
        await application().prepare(db)
        duty = Relay(db, batch=batch)
        await duty.connection()
        if not await link.ready():
            return
        done, began = 0, monotonic()
        while done < count:
            cycle = await duty.cycle()
            if not cycle.done:
                break
            done += cycle.facts["published"]
        link.tell(rate=done / (monotonic() - began), done=done)
        await duty.close()


async def tick(link: Link, dsn: str, cycles: int) -> None:
    """Milliseconds a scheduler's tick takes: with nothing due, then with a full batch due."""
    async with database(dsn) as db:
        duty = Scheduler(db)
        if not await link.ready():
            return
        began = monotonic()
        for _ in range(MAX_REPLANS):  # once in its life it looks at every plan
            if (await duty.cycle()).wait_seconds != 0.0:
                break
        link.tell(replanned_seconds=monotonic() - began)
        idle = [await _timed(duty.cycle) for _ in range(cycles)]
        link.tell(idle_ms=idle)
        await link.order()  # the parent makes schedules due
        busy, fired = [], 0
        for _ in range(cycles):
            began = monotonic()
            fired += (await duty.cycle()).done
            busy.append((monotonic() - began) * 1000)
        link.tell(busy_ms=busy, fired=fired)
        await duty.close()


async def _timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = monotonic()
    await work()
    return (monotonic() - began) * 1000


async def feed(link: Link, dsn: str) -> None:
    """Enqueue as many as each line asks for: jobs by name, and events by topic."""
    async with database(dsn) as db:
        emitted = 0
        link.tell(ready=True)
        while order := await link.order():
            for name, count in order.get("jobs", {}).items():
                for start in range(0, count, BULK):
                    async with db.transaction() as tx:
                        await schedule_many(tx, [NewJob(name)] * min(BULK, count - start))
            for topic, count in order.get("events", {}).items():
                some = range(emitted, emitted + count)
                async with db.transaction() as tx:
                    await emit(tx, *(NewEvent("bench.event", topic, str(n % ORDERED_AGGREGATES)) for n in some))
                emitted += count
            link.tell(fed=True)


async def duty(link: Link, dsn: str, kind: str, ticks: int = 0) -> None:
    """A long-running worker, relay or scheduler."""
    async with database(dsn) as db:
        app = application(ticks)
        await app.prepare(db)
        wakeup = Wakeup(db)
        made: dict[str, Callable[[], Duty]] = {
            "worker": lambda: Worker(db, app.handlers, wakeup=wakeup),
            "relay": lambda: Relay(db, wakeup=wakeup),
            "scheduler": lambda: Scheduler(db, wakeup=wakeup),
        }
        chosen = made[kind]()
        if await link.ready():
            await supervise(link, db, [chosen], wakeup, list(app.handlers))


async def peer(link: Link, name: str, cache: str, **arguments: Any) -> None:
    """Somebody else's queue: prepared, or measured if a figure is named. Theirs may block, so it has a thread."""
    from benchmarks import peers

    link.tell(ready=True)
    try:
        if "figure" not in arguments:
            made = await asyncio.to_thread(peers.prepare, name, Path(cache))
            link.tell(peer=dataclasses.asdict(made))
        else:
            values = await asyncio.to_thread(lambda: peers.measure(name, cache=Path(cache), **arguments))
            link.tell(values=list(values))
    except (peers.Unavailable, peers.Failed) as error:
        link.tell(unavailable=str(error))


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    "worker": worker, "answer": answer, "ask": ask, "enqueue_each": enqueue_each, "enqueue_bulk": enqueue_bulk,
    "relay": relay, "tick": tick, "feed": feed, "duty": duty, "peer": peer,
    "raw_drain_in_turn": raw.drain_in_turn, "raw_drain_overlapped": raw.drain_overlapped,
    "raw_commit_each": raw.commit_each, "raw_insert_each": raw.insert_each, "raw_copy_bulk": raw.copy_bulk,
    "raw_answer": raw.answer, "raw_ask": raw.ask,
}  # fmt: skip


async def run(role: str, arguments: dict[str, Any]) -> None:
    """Play the role."""
    await ROLES[role](Link(), **arguments)


if __name__ == "__main__":
    configure_logging(level="error", style="json")
    run_async(run(sys.argv[1], json.loads(sys.argv[2])))
