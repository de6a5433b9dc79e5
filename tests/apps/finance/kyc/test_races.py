"""Many at once, on real connections (F8, FAULTS): a rival that holds a session's lock is the barrier."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apps.finance.kyc import service
from duly import Tx
from duly.db import Database
from duly.settings import Settings
from tests.apps.finance.kyc.acting import Desk, facts_of, kept_of
from tests.apps.transfers.acting import until_waiting
from tests.support import value


@contextlib.contextmanager
def holding(dsn: str, session: str) -> Iterator[None]:
    """A session that somebody else has locked, until the block ends."""
    with psycopg.connect(dsn) as rival:
        rival.execute("SELECT 1 FROM kyc.sessions WHERE id = %s FOR NO KEY UPDATE", [session])
        yield
        rival.rollback()


@pytest.fixture
async def wide(dsn: str) -> Any:
    """A database with a connection for everybody."""
    db = Database(dsn, settings=Settings(pool_size=16))
    yield db
    await db.close()


async def test_one_event_many_times_at_once_is_applied_once(desk: Desk, dsn: str) -> None:
    """E6.3."""
    made = await desk.create()
    event_id = str(uuid4())
    with holding(dsn, made["sessionId"]):
        trying = [asyncio.create_task(desk.call(made["sessionId"], "APPROVED", event_id=event_id)) for _ in range(6)]
        await until_waiting(dsn, 6)
    assert Counter([(await one).json()["status"] for one in trying]) == {"applied": 1, "duplicate": 5}
    desk.check()


async def test_two_calls_that_disagree_end_in_one_of_them(desk: Desk, dsn: str) -> None:
    """The other one is kept for a person; one fact, one evidence."""
    made = await desk.create()
    with holding(dsn, made["sessionId"]):
        trying = [asyncio.create_task(desk.call(made["sessionId"], one)) for one in ("APPROVED", "REJECTED")]
        await until_waiting(dsn, 2)
    assert Counter([(await one).json()["status"] for one in trying]) == {"applied": 1, "kept": 1}
    assert len(facts_of(dsn, made["sessionId"])) == 2
    assert kept_of(dsn) == [("contradicts", made["sessionId"])]
    desk.check()


async def test_many_calls_of_the_same_outcome_are_one(desk: Desk, dsn: str) -> None:
    made = await desk.create()
    with holding(dsn, made["sessionId"]):
        trying = [asyncio.create_task(desk.call(made["sessionId"], "APPROVED")) for _ in range(6)]
        await until_waiting(dsn, 6)
    assert Counter([(await one).json()["status"] for one in trying]) == {"applied": 1, "ignored": 5}
    desk.check()


@pytest.mark.parametrize("first", ["expire", "sweep", "call"])
async def test_a_call_and_the_end_at_the_same_moment(desk: Desk, wide: Database, dsn: str, first: str) -> None:
    """In each order. Its time is over, so it has expired, whoever comes first; the call is for a person."""
    made = await desk.create()
    session = UUID(made["sessionId"])
    desk.clock.advance(hours=24.01)

    async def end(tx: Tx) -> object:
        return await service.expire(tx, session)

    async def run(work: Any) -> object:
        async with wide.transaction() as tx:
            return await work(tx)

    async def call() -> object:
        return await desk.call(made["sessionId"], "APPROVED")

    works: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {"expire": lambda: run(end), "call": call}
    tasks: list[asyncio.Task[Any]] = []
    with holding(dsn, made["sessionId"]):
        async with asyncio.timeout(10):
            assert await run(service.sweep) == (0, False), "it waits for nobody"
        names = [first] if first in works else []
        for waiting, name in enumerate([*names, *(one for one in works if one not in names)], 1):
            tasks.append(asyncio.create_task(works[name]()))
            await until_waiting(dsn, waiting)
    await asyncio.gather(*tasks, *([asyncio.create_task(run(service.sweep))] if first == "sweep" else []))
    assert desk.status(made["sessionId"]) == "EXPIRED"
    assert kept_of(dsn) == [("contradicts", made["sessionId"])]
    await desk.run()
    desk.check()


async def test_a_call_before_the_end_wins_over_a_timer_that_is_early(desk: Desk, wide: Database, dsn: str) -> None:
    """A timer that fires early, or a worker whose clock is wrong, expires nothing."""
    made = await desk.create()
    async with wide.transaction() as tx:
        wait = await service.expire(tx, UUID(made["sessionId"]))
    assert wait is not None
    assert wait.total_seconds() > 86_000
    assert (await desk.call(made["sessionId"], "APPROVED")).json() == {"status": "applied"}
    desk.check()


async def test_two_browsers_open_one_page(desk: Desk, dsn: str) -> None:
    """One session at the provider, one change here."""
    made = await desk.create()
    with holding(dsn, made["sessionId"]):
        trying = [asyncio.create_task(desk.visit(made["hostedUrl"])) for _ in range(4)]
        await until_waiting(dsn, 4)
    answers = [await one for one in trying]
    assert {(answer.status_code, answer.headers["location"]) for answer in answers} == {
        (303, answers[0].headers["location"])
    }
    assert len(desk.provider.checks) == 1
    assert value(dsn, "SELECT version FROM kyc.sessions") == 2
    desk.check()
