"""Who wakes whom, and how: inside the transaction when there is little to say, after it when there is much."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from duly import Database, NewEvent, emit, schedule
from duly import poker as poker_module
from duly.wakeup import CHANNEL
from tests.support import value

SENDERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'duly-notify'"
)


@contextlib.asynccontextmanager
async def hearing(db: Database) -> AsyncIterator[list[str]]:
    """What is notified while the block runs."""
    heard: list[str] = []
    connection = await db.connect(application="ear")
    await connection.add_listener(CHANNEL, lambda _connection, _pid, _channel, payload: heard.append(payload))
    try:
        yield heard
    finally:
        await connection.close()


async def until_heard(heard: list[str], count: int) -> None:
    async with asyncio.timeout(10):
        while len(heard) < count:
            await asyncio.sleep(0.005)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poker_module, "QUIET_SECONDS", 0.0)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poker_module, "QUIET_SECONDS", float("inf"))
    monkeypatch.setattr(poker_module, "GATHER_SECONDS", 0.2)


@pytest.mark.usefixtures("quiet")
async def test_whoever_says_little_notifies_with_the_commit(db: Database, dsn: str) -> None:
    async with hearing(db) as heard:
        async with db.transaction() as tx:
            await schedule(tx, "work", 1)
            await schedule(tx, "work", 2)
            await emit(tx, NewEvent(type="a.b", topic="a", aggregate_id="1", payload={}))
        await until_heard(heard, 2)
        async with db.raw_transaction() as tx:
            await schedule(tx, "work", 3)
        await until_heard(heard, 3)
    assert sorted(heard) == ["jobs", "jobs", "outbox"]
    assert value(dsn, SENDERS) == 0


@pytest.mark.usefixtures("quiet")
async def test_what_is_rolled_back_wakes_nobody(db: Database, dsn: str) -> None:
    async with hearing(db) as heard:
        with contextlib.suppress(ValueError):
            async with db.transaction() as tx:
                await schedule(tx, "work", 1)
                raise ValueError
        async with db.transaction() as tx:
            await emit(tx, NewEvent(type="a.b", topic="a", aggregate_id="1", payload={}))
        await until_heard(heard, 1)
    assert heard == ["outbox"]
    assert value(dsn, SENDERS) == 0


@pytest.mark.usefixtures("busy")
async def test_whoever_says_much_wakes_after_the_commits_and_for_many_at_once(db: Database, dsn: str) -> None:
    db._poker._asked_at["jobs"] = 0.0
    async with hearing(db) as heard:
        for number in range(100):
            async with db.transaction() as tx:
                await schedule(tx, "work", number)
        sent_before = len(heard)
        async with db.transaction() as tx:
            await schedule(tx, "work", "last")
        await until_heard(heard, sent_before + 1)  # the last commit is followed by a wake-up, too
        assert value(dsn, SENDERS) == 1
    assert set(heard) == {"jobs"}
    assert len(heard) < 50


async def test_the_first_in_a_while_is_quiet_and_the_next_are_not(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(poker_module, "monotonic", lambda: now)
    poker = db._poker
    answers = []
    for passed in (0.0, 0.001, 0.009, 0.011, 0.0):
        now += passed
        answers.append((poker.is_quiet("jobs"), poker.is_quiet(f"other {now}")))
    assert answers == [(True, True), (False, True), (False, True), (True, True), (False, False)]
