"""Why a zombie cannot write: however its run ends, the job is its successor's (E3.5)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from duly.db import Database, Tx
from duly.jobs import worker as worker_module
from duly.jobs.handlers import JobContext
from duly.jobs.outcomes import Cancel, Done, Fail, Snooze
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker
from tests.engine.jobs.witness import (
    EFFECT,
    be_deaf,
    effects,
    expire_leases,
    is_empty,
    make_effects,
    outcomes,
    queue,
    until,
    working,
)  # fmt: skip
from tests.support import handlers, rows, value


async def schedule_work(db: Database, **options: Any) -> int:
    async with db.transaction() as tx:
        return await schedule(tx, "work", "e", **options)


@pytest.fixture
def one_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """``run_once`` takes one job and asks no more: a zombie must not take its own job over before another does."""
    monkeypatch.setattr(worker_module, "RUN_ONCE_JOBS", 1)


class Scene:
    """Two runs of one job: the first stalls after its write until it is let go, the second goes straight through."""

    def __init__(self) -> None:
        self.stalled = threading.Event()
        self.let_go = threading.Event()
        self.runs = 0

    def is_first(self) -> bool:
        self.runs += 1
        return self.runs == 1

    async def stall(self) -> None:
        self.stalled.set()
        await until(self.let_go.is_set, what="the zombie is let go")

    def stall_thread(self) -> None:
        self.stalled.set()
        assert self.let_go.wait(15)


def write_through_session(scene: Scene) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: Tx) -> None:
        first = scene.is_first()
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": "first" if first else "second"})
        if first:
            await scene.stall()

    return work


def write_through_connection(scene: Scene) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: AsyncConnection) -> None:
        first = scene.is_first()
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": "first" if first else "second"})
        if first:
            await scene.stall()

    return work


def write_through_asyncpg(scene: Scene) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: asyncpg.Connection) -> None:
        first = scene.is_first()
        await tx.execute("INSERT INTO effects VALUES ($1, $2)", ctx.entity_id, "first" if first else "second")
        if first:
            await scene.stall()

    return work


def write_through_sync_session(scene: Scene) -> Callable[..., Any]:
    def work(ctx: JobContext, tx: Session) -> None:
        first = scene.is_first()
        tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": "first" if first else "second"})
        if first:
            scene.stall_thread()

    return work


TRANSACTIONAL = [
    write_through_session, write_through_connection, write_through_asyncpg, write_through_sync_session
]  # fmt: skip


@pytest.mark.usefixtures("one_claim")
@pytest.mark.parametrize("written", TRANSACTIONAL, ids=lambda made: made.__name__)
async def test_a_zombies_writes_roll_back_when_it_wakes_up(
    db: Database, dsn: str, written: Callable[[Scene], Callable[..., Any]]
) -> None:
    """E3.5: it cannot write for a job it no longer holds, in whichever kind of transaction."""
    make_effects(dsn)
    scene = Scene()
    known = handlers(written(scene))
    await schedule_work(db)
    zombie = Worker(db, known)
    asleep = asyncio.create_task(zombie.run_once())
    await until(scene.stalled.is_set, what="the first run has written")
    expire_leases(dsn)
    successor = Worker(db, known)
    await successor.run_once()
    assert rows(dsn, "SELECT run FROM effects") == [("second",)]
    scene.let_go.set()
    await asleep
    assert rows(dsn, "SELECT run FROM effects") == [("second",)]
    assert outcomes(dsn) == [("e", "lost", 0), ("e", "done", 1)]
    assert zombie.counts == {"lost": 1}
    assert successor.counts == {"done": 1}
    assert is_empty(dsn)


@pytest.mark.usefixtures("one_claim")
async def test_a_zombie_that_wakes_up_first_does_not_push_its_successor_aside(db: Database, dsn: str) -> None:
    """E3.5: the successor still works on it; the zombie's writes roll back, the successor's stay."""
    make_effects(dsn)
    stalled = {"first": asyncio.Event(), "second": asyncio.Event()}
    let_go = {"first": asyncio.Event(), "second": asyncio.Event()}

    async def work(ctx: JobContext, tx: Tx) -> None:
        run = "second" if stalled["first"].is_set() else "first"
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": run})
        stalled[run].set()
        await let_go[run].wait()

    await schedule_work(db)
    zombie, successor = Worker(db, handlers(work)), Worker(db, handlers(work))
    asleep = asyncio.create_task(zombie.run_once())
    await asyncio.wait_for(stalled["first"].wait(), 10)
    expire_leases(dsn)
    awake = asyncio.create_task(successor.run_once())
    await asyncio.wait_for(stalled["second"].wait(), 10)
    let_go["first"].set()
    await asleep
    assert queue(dsn) == [("e", "Running", 1)]
    assert effects(dsn) == {}
    let_go["second"].set()
    await awake
    assert rows(dsn, "SELECT run FROM effects") == [("second",)]
    assert (zombie.counts, successor.counts) == ({"lost": 1}, {"done": 1})


def ends_by(outcome: Any) -> Callable[[], Any]:
    def end() -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return end


@pytest.mark.usefixtures("one_claim")
@pytest.mark.parametrize(
    "outcome",
    [Done("zombie"), Snooze(timedelta(0)), Cancel("zombie"), Fail("zombie"), RuntimeError("zombie")],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_a_zombie_can_neither_complete_nor_postpone_nor_bury(db: Database, dsn: str, outcome: Any) -> None:
    """E3.5: however a handler without a transaction ends, the job stays with its new holder, untouched."""
    scene, successor_may_end = Scene(), asyncio.Event()
    end = ends_by(outcome)

    async def work() -> Any:
        if scene.is_first():
            await scene.stall()
            return end()
        await successor_may_end.wait()
        return Done("successor")

    await schedule_work(db)
    zombie, successor = Worker(db, handlers(work)), Worker(db, handlers(work))
    asleep = asyncio.create_task(zombie.run_once())
    await until(scene.stalled.is_set, what="the first run has begun")
    expire_leases(dsn)
    awake = asyncio.create_task(successor.run_once())
    await until(lambda: scene.runs == 2, what="the second run has begun")
    held = rows(dsn, "SELECT * FROM duly.jobs")
    scene.let_go.set()
    await asleep
    assert zombie.counts == {"lost": 1}
    assert rows(dsn, "SELECT * FROM duly.jobs") == held
    assert queue(dsn) == [("e", "Running", 1)]
    successor_may_end.set()
    await awake
    assert rows(dsn, "SELECT outcome, message FROM duly.executions WHERE outcome <> 'lost'") == [("done", "successor")]
    assert is_empty(dsn)
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 0


async def test_a_handler_is_told_to_stop_when_its_lease_is_gone(db: Database, dsn: str) -> None:
    """E3.5: the heartbeat finds that somebody else holds the job, and the handler is cancelled."""
    began, told = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.set()
            raise

    await schedule_work(db)
    worker = Worker(db, handlers(work), lease_seconds=1)
    running = asyncio.create_task(worker.run_once())
    await asyncio.wait_for(began.wait(), 10)
    rows(dsn, "UPDATE duly.jobs SET lease_token = nextval('duly.lease_tokens'), leased_by = 'somebody else'")
    await asyncio.wait_for(told.wait(), 10)
    await running
    assert worker.counts == {"lost": 1}
    assert rows(dsn, "SELECT leased_by FROM duly.jobs") == [("somebody else",)]
    assert outcomes(dsn) == []


async def test_a_deaf_handler_past_its_time_limit_loses_its_lease(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3.5: whatever hangs is not renewed for ever; another worker takes over, and what hangs is fenced."""
    monkeypatch.setattr(worker_module, "ABANDON_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(worker_module, "WATCH_SECONDS", 0.05)
    make_effects(dsn)
    scene = Scene()

    async def work(ctx: JobContext, tx: Tx) -> None:
        first = scene.is_first()
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": "first" if first else "second"})
        if first:
            await be_deaf(scene.let_go.is_set)

    await schedule_work(db)
    hanging = Worker(db, handlers(work, timeout_seconds=2), lease_seconds=1)
    hanging.deaf_poll_seconds = 60  # it leaves the taking over to another one
    async with working(hanging) as stop:
        await until(lambda: queue(dsn) == [("e", "Failed", 0)], what="its lease ran out")
        stop.set()
        successor = Worker(db, handlers(work))
        await successor.run_once()
        assert successor.counts == {"done": 1}
        scene.let_go.set()
    assert rows(dsn, "SELECT run FROM effects") == [("second",)]
    assert outcomes(dsn) == [("e", "lost", 0), ("e", "done", 1)]
