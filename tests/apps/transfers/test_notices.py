"""The original owner hears of an expiry, once (T7)."""

from __future__ import annotations

import signal
from uuid import UUID

import pytest

from apps.wiring import app
from duly.db import Database
from duly.testing import BusinessClock, drain
from tests.apps.transfers.acting import Users, fill
from tests.support import finish, python, rows, value

WORK = """
    import asyncio, os
    from apps.wiring import app
    from duly.db import Database
    from duly.testing import drain

    async def main():
        db = Database(os.environ["DATABASE_URL"])
        await app.prepare(db)
        await drain(db, app.handlers)
        await db.close()

    asyncio.run(main())
"""


async def test_the_owner_is_told_and_nobody_else(users: Users, db: Database, dsn: str, clock: BusinessClock) -> None:
    """T7."""
    product = await users.register()
    transfer = await users.offer(product)
    clock.advance(hours=73)
    await users.expire()
    await drain(db, app.handlers)
    page = (await users.get("alice", "/v1/notices")).json()
    (notice,) = page["items"]
    assert notice == {
        "id": notice["id"], "kind": "TransferExpired", "transferId": transfer, "productId": product,
        "createdAt": notice["createdAt"],
    }  # fmt: skip
    assert page["next"] is None
    assert (await users.get("bob", "/v1/notices")).json() == {"items": [], "next": None}


async def test_it_is_the_original_owner_also_when_the_product_has_changed_hands_since(
    users: Users, db: Database, clock: BusinessClock
) -> None:
    """T7: the event says who it was."""
    product = await users.register()
    await users.offer(product)
    clock.advance(hours=73)
    await users.expire()
    await users.end("carol", await users.offer(product, to="carol"), "accept")
    await drain(db, app.handlers)
    assert len((await users.get("alice", "/v1/notices")).json()["items"]) == 1
    assert (await users.get("carol", "/v1/notices")).json()["items"] == []


async def test_only_expiries_are_told(users: Users, db: Database, dsn: str) -> None:
    """T7."""
    product = await users.register()
    await users.end("bob", await users.offer(product), "reject")
    await users.end("alice", await users.offer(product), "cancel")
    await users.end("bob", await users.offer(product), "accept")
    await drain(db, app.handlers)
    assert value(dsn, "SELECT count(*) FROM transfers.notices") == 0
    assert value(dsn, "SELECT count(*) FROM duly.outbox") == 0  # they were all published


async def test_an_event_that_comes_twice_is_told_once(users: Users, db: Database, dsn: str) -> None:
    """T7, E2.2: redelivery is skipped, also long after the inbox has forgotten the event."""
    fill(dsn, 1)
    await users.expire()
    await drain(db, app.handlers)
    event: UUID = value(dsn, "SELECT event_id FROM transfers.notices")
    again = """
        INSERT INTO duly.jobs (name, entity_id, event_id, run_at, due_at, created_at)
        VALUES ('consumer:transfers.notify-owner', 'x', %(event)s, duly.now(), duly.now(), duly.now())"""
    rows(dsn, again, {"event": event})
    assert await drain(db, app.handlers) == 1
    rows(dsn, "DELETE FROM duly.processed_events")
    rows(dsn, again, {"event": event})
    assert await drain(db, app.handlers) == 1
    assert rows(dsn, "SELECT event_id FROM transfers.notices") == [(event,)]
    assert rows(dsn, "SELECT last_error FROM duly.jobs UNION ALL SELECT error FROM duly.dead_letters") == []


@pytest.mark.parametrize(
    "point", ["relay.before_commit", "worker.claimed", "inbox.marked", "worker.handler_done", "worker.before_commit"]
)
async def test_wherever_the_worker_is_killed_the_owner_is_told_once(
    users: Users, db: Database, dsn: str, point: str
) -> None:
    """T7: kill -9, and another one takes over."""
    fill(dsn, 3)
    await users.expire()
    code, output = finish(python(dsn, WORK, failpoints=f"{point}=kill9"), 60)
    assert code == -signal.SIGKILL, output
    rows(dsn, "UPDATE duly.jobs SET lease_expires_at = clock_timestamp() WHERE lease_token IS NOT NULL")
    await drain(db, app.handlers)
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now()")  # what was taken over waits a second before it is retried
    await drain(db, app.handlers)
    assert value(dsn, "SELECT count(*) FROM transfers.notices") == 3
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 0


async def test_notices_are_paged_the_newest_first(users: Users, db: Database, dsn: str) -> None:
    """T7."""
    fill(dsn, 7)
    await users.expire()
    await drain(db, app.handlers)
    seen: list[str] = []
    following = ""
    for size in (3, 3, 1):
        page = (await users.get("alice", f"/v1/notices?limit=3{following}")).json()
        assert len(page["items"]) == size
        seen += [item["id"] for item in page["items"]]
        following = f"&before={page['next']}"
    assert page["next"] is None
    assert seen == [str(notice) for (notice,) in rows(dsn, "SELECT id FROM transfers.notices ORDER BY id DESC")]
    for query in ("limit=0", "limit=201", "before=yesterday"):
        assert (await users.get("alice", f"/v1/notices?{query}")).status_code == 422
