"""kill -9 at every step between claim and commit: delivered again with the same key, and nothing is lost (B3 to B6)."""

from __future__ import annotations

import asyncio
import signal

import pytest

from apps.birthdays.gateways import URL_VARIABLE
from apps.wiring import app
from duly import Database
from duly.testing import BusinessClock, drain
from tests.apps.birthdays.acting import (
    CLAIM,
    NINE_IN_WARSAW,
    Receiver,
    change,
    check_consistent,
    expire_leases,
    fill,
    register,
    statuses,
)
from tests.support import finish, python, rows

WORK = """
    import asyncio, os
    from apps.wiring import app
    from duly.db import Database
    from duly.testing import drain

    async def main():
        db = Database(os.environ["DATABASE_URL"])
        await app.prepare(db)
        ours = {name: one for name, one in app.handlers.items() if name.split(":")[-1].startswith("birthdays.")}
        await drain(db, ours)
        await db.close()

    asyncio.run(main())
"""
POINTS = {
    "worker.claimed": False,  # before the handler: nothing has been called
    "worker.before_handler": False,
    "worker.handler_done": True,  # between the POST and the commit
    "settle.written": True,
    "inbox.noted": True,
    "inbox.committed": False,
}


async def kill_at(dsn: str, point: str, hook: Receiver) -> None:
    """A worker of its own that dies there; meanwhile our loop serves the webhook."""
    process = python(dsn, WORK, failpoints=f"{point}=kill9", env={URL_VARIABLE: hook.url})
    code, output = await asyncio.to_thread(finish, process, 60)
    assert code == -signal.SIGKILL, output


async def work_on(db: Database, dsn: str) -> None:
    """Others take over."""
    for _ in range(3):
        expire_leases(dsn)
        rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE waits = 'retry'")
        await drain(db, app.handlers)


@pytest.mark.parametrize("point", POINTS)
async def test_wherever_a_delivery_is_killed_it_is_made_again_with_the_same_key(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, point: str
) -> None:
    """B6: at least once over the wire, once in effect."""
    (event_id,) = fill(dsn, 1)
    clock.freeze(NINE_IN_WARSAW)
    rows(dsn, CLAIM)
    await drain(db, {"birthdays.claim": app.handlers["birthdays.claim"]})
    await kill_at(dsn, point, hook)
    assert len(hook.keys) == (POINTS[point] or point == "inbox.committed")
    assert statuses(dsn) == ({"COMPLETED": 1, "PENDING": 1} if point == "inbox.committed" else {"PROCESSING": 1})
    await work_on(db, dsn)
    assert hook.keys == [str(event_id)] * (2 if POINTS[point] else 1)
    assert len({str(seen.body) for seen in hook.seen}) == 1
    assert statuses(dsn) == {"COMPLETED": 1, "PENDING": 1}
    check_consistent(dsn)


@pytest.mark.parametrize("point", ["worker.before_commit", "worker.committed"])
async def test_a_claim_that_is_killed_is_whole_or_not_at_all(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, point: str
) -> None:
    """B3: PROCESSING and its job are one commit."""
    fill(dsn, 5)
    clock.freeze(NINE_IN_WARSAW)
    rows(dsn, CLAIM)
    await kill_at(dsn, point, hook)
    check_consistent(dsn)
    assert statuses(dsn) == ({"PENDING": 5} if point == "worker.before_commit" else {"PROCESSING": 5})
    await work_on(db, dsn)
    assert (len(hook.keys), len(set(hook.keys)), statuses(dsn)) == (5, 5, {"COMPLETED": 5, "PENDING": 5})


@pytest.mark.parametrize("point", ["relay.before_commit", "inbox.marked", "worker.before_commit", "worker.committed"])
async def test_a_change_is_followed_once_wherever_the_worker_is_killed(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, point: str
) -> None:
    """B5: copy, plan and inbox are one commit."""
    user_id, _ = await register(db)
    await change(db, user_id, timezone="Asia/Tokyo")
    await kill_at(dsn, point, hook)
    await work_on(db, dsn)
    assert rows(dsn, "SELECT timezone, version FROM birthdays.events") == [("Asia/Tokyo", 2)]
    check_consistent(dsn)


async def test_a_delivery_that_kills_its_workers_ends_somewhere(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B6: buried as any job that does; the recovery ends the event and plans next year."""
    events = fill(dsn, 1)
    clock.freeze(NINE_IN_WARSAW)
    rows(dsn, CLAIM)
    await drain(db, {"birthdays.claim": app.handlers["birthdays.claim"]})
    for _ in range(2):
        await kill_at(dsn, "worker.before_handler", hook)
        expire_leases(dsn)
    rows(dsn, "UPDATE duly.jobs SET retry_count = 8 WHERE name = 'birthdays.deliver'")  # and six more like them
    await drain(db, app.handlers)
    assert rows(dsn, "SELECT entity_id, reason FROM duly.dead_letters") == [(str(events[0]), "worker_died")]
    assert statuses(dsn) == {"PROCESSING": 1}
    clock.advance(minutes=16)
    rows(dsn, "SELECT duly.schedule('birthdays.recover')")
    await drain(db, app.handlers)
    assert (hook.seen, statuses(dsn)) == ([], {"FAILED": 1, "PENDING": 1})
