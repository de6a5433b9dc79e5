"""The queue of birthdays on SQS, as its document has it: a change over HTTP reaches birthdays by way of SQS (B5)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from apps.users.events import TOPIC
from apps.wiring import app
from duly import Database, Relay
from duly.app import Duly
from duly.brokers import connect
from duly.duty import Cycle
from duly.errors import Unavailable
from duly.inbox.receiver import Receiver
from duly.jobs.worker import Worker
from duly.operate import perform
from duly.testing import BusinessClock
from tests.apps.birthdays.acting import check_consistent, events_of, pending_of
from tests.apps.conftest import Api, serving
from tests.brokers.server_sqs import SqsServer
from tests.support import rows, value

pytestmark = pytest.mark.brokers
pytest_plugins = ["tests.brokers.sqs_tools"]
ADA = {"firstName": "Ada", "lastName": "Lovelace", "dateOfBirth": "1990-06-15", "timezone": "Europe/Warsaw"}
SPRING = datetime(2026, 5, 1, 12, tzinfo=UTC)
FOLLOW = {name: handler for name, handler in app.handlers.items() if name == "consumer:birthdays.follow-user"}
JOBS = "SELECT count(*)::int FROM duly.jobs WHERE name = 'consumer:birthdays.follow-user'"


@pytest.fixture(scope="session")
def duly_app() -> Duly:
    """The database has the applications' schemas."""
    return app


@pytest_asyncio.fixture
async def api(db: Database, tmp_path: Path, clock: BusinessClock) -> AsyncIterator[Api]:
    """Users over HTTP, on a clock that stands still."""
    clock.freeze(SPRING)
    async with serving(db, tmp_path) as served:
        yield served


@pytest_asyncio.fixture
async def url(sqs: SqsServer, prefix: str, api: Api, db: Database) -> str:
    """The queue is there, and birthdays hears of users by way of it."""
    url = sqs.url(prefix=prefix, visibility=300)
    await connect.setup(url, topics=[TOPIC], group="duly")
    given = {"name": "birthdays.follow-user", "via": "sqs"}
    await db.run(lambda tx: perform(tx, "consumers.via", given, actor="ada", reason="as the document says"))
    return url


async def call(api: Api, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    for _ in range(20):  # on a busy machine, until the server has the issuer's keys
        answer = await api.client.request(method, path, headers=api.headers("clerk", "users"), json=body)
        if answer.status_code != 503:
            break
    assert answer.status_code in (200, 201, 204), answer.text
    return dict(answer.json()) if answer.content else {}


async def register(api: Api) -> UUID:
    return UUID((await call(api, "POST", "/user", ADA))["user"]["id"])


async def relay(db: Database, url: str) -> None:
    """Publish everything that is pending to SQS."""
    sending = Relay(db, transport=connect.transport(url))
    try:
        while (await sending.cycle()).done:
            pass
    finally:
        await sending.close()


async def receive(db: Database, url: str, count: int) -> None:
    """Take that many messages from SQS, and let the consumer do its jobs."""
    receiver = Receiver(db, connect.source(url, topics=[TOPIC], group="duly"), wait_seconds=30)
    taken = 0
    try:
        while taken < count:
            cycle = await receiver.cycle()
            assert cycle.done, f"{taken} of {count} messages came"
            taken += cycle.done
    finally:
        await receiver.source.close()
        await receiver.close()
    await work(db)


async def work(db: Database) -> Cycle:
    while (cycle := await Worker(db, FOLLOW).run_once()).done:
        pass
    return cycle


async def test_a_change_over_http_reaches_birthdays_by_way_of_sqs(db: Database, dsn: str, api: Api, url: str) -> None:
    user_id = await register(api)
    before = pending_of(dsn, user_id)
    await call(api, "PUT", f"/user/{user_id}", {"timezone": "America/Los_Angeles"})
    await relay(db, url)
    await work(db)
    assert value(dsn, JOBS) == 0  # the relay made no job of it: it is at SQS
    assert pending_of(dsn, user_id) == before
    await receive(db, url, 2)  # registered, and moved
    local, zone, at = pending_of(dsn, user_id)
    assert (local, zone) == (before[0], "America/Los_Angeles")
    assert at == datetime(2026, 6, 15, 16, tzinfo=UTC)
    check_consistent(dsn)


async def test_changes_of_one_user_come_in_their_order_and_have_their_effect_once(
    db: Database, dsn: str, api: Api, url: str, sqs: SqsServer
) -> None:
    user_id = await register(api)
    for month in range(6, 12):
        await call(api, "PUT", f"/user/{user_id}", {"dateOfBirth": f"1990-{month:02}-20"})
    await call(api, "PUT", f"/user/{user_id}", {"firstName": "Augusta"})
    await relay(db, url)
    lost = connect.source(url, topics=[TOPIC], group="duly")  # a receiver that reads, and is never heard of again
    assert await lost.receive(3, wait_seconds=30)
    sqs.order("expire")
    await receive(db, url, 8)
    await lost.close()
    query = "SELECT type FROM duly.received WHERE aggregate_id = %(id)s ORDER BY received_at, position"
    assert len(rows(dsn, query, {"id": str(user_id)})) == 8
    assert pending_of(dsn, user_id)[0] == datetime.fromisoformat("2026-11-20T09:00")
    assert events_of(dsn, user_id) == [(2026, "PENDING")]
    check_consistent(dsn)


async def test_while_sqs_is_away_users_can_change_and_birthdays_hears_of_it_later(
    db: Database, dsn: str, api: Api, url: str, sqs: SqsServer
) -> None:
    user_id = await register(api)
    sqs.kill()
    await call(api, "PUT", f"/user/{user_id}", {"dateOfBirth": "1990-07-20"})
    with pytest.raises(Unavailable, match="sqs is away"):
        await relay(db, url)
    sqs.start()
    await relay(db, url)
    await receive(db, url, 2)
    assert pending_of(dsn, user_id)[0] == datetime.fromisoformat("2026-07-20T09:00")
    assert value(dsn, "SELECT max(attempts) FROM duly.event_log") in (0, None)
    check_consistent(dsn)


async def test_a_user_who_is_deleted_is_forgotten_by_way_of_sqs_too(db: Database, dsn: str, api: Api, url: str) -> None:
    user_id = await register(api)
    await call(api, "PUT", f"/user/{user_id}", {"firstName": "Augusta"})
    await call(api, "DELETE", f"/user/{user_id}")
    await relay(db, url)
    await receive(db, url, 3)
    assert events_of(dsn, user_id) == []
    check_consistent(dsn)
