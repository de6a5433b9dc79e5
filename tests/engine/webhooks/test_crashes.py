"""A process that dies between sending and recording sends again, and says so; one that stalls is fenced (FAULTS)."""

from __future__ import annotations

import os
import signal

import pytest

from tests.engine.cli.commands import wait_until
from tests.engine.webhooks.hooks import KEY, Hooks
from tests.engine.webhooks.subscriber import subscriber
from tests.forking import Forked
from tests.support import python, rows, value

WORK = """
import asyncio, os
from duly import Database, Duly, Relay, Worker

async def main():
    db = Database(os.environ["DATABASE_URL"])
    await Relay(db).run_once()
    stop = asyncio.Event()
    worker = Worker(db, Duly().handlers, lease_seconds=1)
    running = asyncio.create_task(worker.run(stop))
    connection = await db.connect()
    for _ in range(400):
        if not await connection.fetchval("SELECT count(*) FROM duly.jobs"):
            break
        await asyncio.sleep(0.05)
    stop.set()
    await running

asyncio.run(main())
"""
LEFT = "SELECT count(*) FROM duly.webhook_deliveries WHERE status <> 'DELIVERED'"


def work(dsn: str, failpoints: str = "") -> Forked:
    return python(dsn, WORK, failpoints=failpoints, env={"DULY_ENCRYPTION_KEYS": KEY, "DULY_POLL_SECONDS": "0.1"})


async def in_thread(process: Forked, seconds: float = 40) -> int:
    import asyncio

    return await asyncio.to_thread(process.wait, seconds)


@pytest.mark.parametrize(
    ("point", "requests"), [("webhook.before_send", 1), ("webhook.sent", 2), ("webhook.recorded", 2)]
)
async def test_killed_at_each_step_it_is_delivered_at_least_once_and_recorded_once(
    hooks: Hooks, point: str, requests: int
) -> None:
    """E6.1: the second request has the same ids and the same bytes, so that the receiver can tell."""
    async with subscriber() as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        victim = work(hooks.dsn, f"{point}=kill9")
        assert await in_thread(victim) == -signal.SIGKILL
        heir = work(hooks.dsn)
        assert await in_thread(heir) == 0
    assert len(one.requests) == requests
    assert len(set(one.bodies)) == 1
    for header in ("webhook-id", "x-delivery-id", "x-signature"):
        assert len({request.headers[header] for request in one.requests}) == 1
    assert value(hooks.dsn, LEFT) == 0
    assert rows(hooks.dsn, "SELECT number, outcome FROM duly.webhook_attempts") == [(1, "DELIVERED")]


async def test_a_zombie_that_comes_back_records_nothing(hooks: Hooks) -> None:
    """SIGSTOP between sending and recording, past the lease; the heir has delivered it when it wakes."""
    import asyncio

    async with subscriber() as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        zombie = work(hooks.dsn, "webhook.sent=stop")
        await asyncio.to_thread(wait_until, lambda: len(one.requests) == 1, what="it has sent")
        await asyncio.sleep(1.5)  # the lease is physical time
        heir = work(hooks.dsn)
        assert await in_thread(heir) == 0
        assert value(hooks.dsn, LEFT) == 0
        os.kill(zombie.pid, signal.SIGCONT)
        assert await in_thread(zombie) == 0
    assert len(one.requests) == 2
    assert rows(hooks.dsn, "SELECT number, outcome FROM duly.webhook_attempts") == [(1, "DELIVERED")]
    assert (await hooks.delivery()).attempts == 1
    assert "lease_lost" in (zombie.stdout.read() if zombie.stdout else "")
