"""A transaction that lost a deadlock is run again, after a pause, and costs no attempt (E3.11)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from duly.db import CONFLICT_RETRIES, Database, Tx
from duly.jobs import run as run_module
from duly.jobs.handlers import JobContext
from duly.jobs.worker import Worker
from tests.engine.jobs.witness import is_empty, outcomes, queue
from tests.support import handlers, rows

FIND_OUT_SOON = "SET LOCAL deadlock_timeout = '50ms'"
FAIL_WITH = """
CREATE FUNCTION fail_with(state text) RETURNS void LANGUAGE plpgsql
AS $$ BEGIN RAISE EXCEPTION 'as told' USING ERRCODE = state; END $$
"""
JITTER = 0.00123  # what the patched generator says: no other pause of the worker is a multiple of it


class HotRows:
    """Two rows that the runs lock in opposite order; the first try of each waits until the other has its first row."""

    def __init__(self, dsn: str) -> None:
        self.tries: list[str] = []
        self._both = threading.Barrier(2)
        rows(dsn, "CREATE TABLE hot (id int PRIMARY KEY, touched text NOT NULL DEFAULT '')")
        rows(dsn, "INSERT INTO hot VALUES (1), (2)")

    def begin(self, entity: str | None) -> tuple[str, str]:
        """A try of this entity: how it locks its first row, and its second."""
        self.tries.append(str(entity))
        first, second = (1, 2) if entity == "a" else (2, 1)
        touch = "UPDATE hot SET touched = touched || '{}' WHERE id = {}"
        return touch.format(entity, first), touch.format(entity, second)

    def meet(self, entity: str | None) -> None:
        """On the first try: wait for the other."""
        if self.tries.count(str(entity)) == 1:
            self._both.wait(10)


def in_session(hot: HotRows) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: Tx) -> None:
        first, second = hot.begin(ctx.entity_id)
        await tx.execute(text(FIND_OUT_SOON))
        await tx.execute(text(first))
        await asyncio.to_thread(hot.meet, ctx.entity_id)
        await tx.execute(text(second))

    return work


def in_connection(hot: HotRows) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: AsyncConnection) -> None:
        first, second = hot.begin(ctx.entity_id)
        await tx.execute(text(FIND_OUT_SOON))
        await tx.execute(text(first))
        await asyncio.to_thread(hot.meet, ctx.entity_id)
        await tx.execute(text(second))

    return work


def in_asyncpg(hot: HotRows) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: asyncpg.Connection) -> None:
        first, second = hot.begin(ctx.entity_id)
        await tx.execute(FIND_OUT_SOON)
        await tx.execute(first)
        await asyncio.to_thread(hot.meet, ctx.entity_id)
        await tx.execute(second)

    return work


def in_sync_session(hot: HotRows) -> Callable[..., Any]:
    def work(ctx: JobContext, tx: Session) -> None:
        first, second = hot.begin(ctx.entity_id)
        tx.execute(text(FIND_OUT_SOON))
        tx.execute(text(first))
        hot.meet(ctx.entity_id)
        tx.execute(text(second))

    return work


@pytest.mark.parametrize(
    "kind", [in_session, in_connection, in_asyncpg, in_sync_session], ids=lambda kind: kind.__name__
)
async def test_two_runs_that_lock_two_rows_in_opposite_order_are_both_done(
    db: Database, dsn: str, kind: Callable[[HotRows], Callable[..., Any]]
) -> None:
    """E3.11: PostgreSQL ends one of the two; its second try waits for the other, and nothing of its first is left."""
    hot = HotRows(dsn)
    rows(dsn, "SELECT duly.schedule('work', entity, max_retries => 0) FROM unnest(ARRAY['a', 'b']) AS entity")
    worker = Worker(db, handlers(kind(hot)), concurrency=2)
    await worker.run_once()
    assert len(hot.tries) >= 3, "they did not meet"
    assert worker.counts == {"done": 2}
    assert sorted(outcomes(dsn)) == [("a", "done", 0), ("b", "done", 0)]
    assert is_empty(dsn)
    [(one,), (other,)] = rows(dsn, "SELECT touched FROM hot ORDER BY id")
    assert one == other
    assert sorted(one) == ["a", "b"]


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens in order: the tries, and the pauses of the runner between them, each really waited for."""
    happened: list[Any] = []
    sleep = asyncio.sleep

    async def noted_sleep(seconds: float, *given: Any) -> Any:
        if round(seconds / JITTER, 6).is_integer() and seconds:
            happened.append(round(seconds / JITTER))
        return await sleep(seconds, *given)

    def uniform(low: float, high: float) -> float:
        assert 0 < low < high <= 0.1, "a pause, and not the same for both"
        return JITTER

    monkeypatch.setattr(run_module, "random", SimpleNamespace(uniform=uniform))
    monkeypatch.setattr(asyncio, "sleep", noted_sleep)
    return happened


@pytest.mark.parametrize("synchronous", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("state", ["40P01", "40001"])
async def test_between_tries_there_is_a_pause_that_grows(
    db: Database, dsn: str, course: list[Any], state: str, synchronous: bool
) -> None:
    """E3.11: two that lost to each other do not meet again at once; the last try that is left may be the one."""
    rows(dsn, FAIL_WITH)
    failing = f"SELECT fail_with('{state}')"

    async def work(tx: Tx) -> None:
        course.append("try")
        if course.count("try") <= CONFLICT_RETRIES:
            await tx.execute(text(failing))

    def work_in_thread(tx: Session) -> None:
        course.append("try")
        if course.count("try") <= CONFLICT_RETRIES:
            tx.execute(text(failing))

    function = work_in_thread if synchronous else work
    rows(dsn, "SELECT duly.schedule(%(name)s, 'e', max_retries => 0)", {"name": function.__name__})
    await Worker(db, handlers(function)).run_once()
    assert course == ["try", 1, "try", 2, "try", 4, "try"]
    assert outcomes(dsn) == [("e", "done", 0)]


async def test_a_transaction_that_loses_every_time_is_a_failed_attempt(
    db: Database, dsn: str, course: list[Any]
) -> None:
    """E3.6, E3.11: a bounded number of tries in one run, then one retry is counted; no pause after the last."""
    rows(dsn, FAIL_WITH)

    async def work(tx: Tx) -> None:
        course.append("try")
        await tx.execute(text("SELECT fail_with('40P01')"))

    rows(dsn, "SELECT duly.schedule('work', 'e')")
    await Worker(db, handlers(work, backoff_seconds=[3600])).run_once()
    assert course == ["try", 1, "try", 2, "try", 4, "try"]
    assert queue(dsn) == [("e", "Pending", 1)]
    assert outcomes(dsn) == [("e", "retried", 0)]


async def test_an_error_that_is_no_lost_race_is_not_tried_again_at_once(
    db: Database, dsn: str, course: list[Any]
) -> None:
    """E3.6: a unique violation of the handler's own table will happen again; it is left to the retry."""
    rows(dsn, "CREATE TABLE taken (id int PRIMARY KEY)")

    async def work(tx: Tx) -> None:
        course.append("try")
        await tx.execute(text("INSERT INTO taken VALUES (1), (1)"))

    rows(dsn, "SELECT duly.schedule('work', 'e')")
    await Worker(db, handlers(work, backoff_seconds=[3600])).run_once()
    assert course == ["try"]
    assert outcomes(dsn) == [("e", "retried", 0)]
