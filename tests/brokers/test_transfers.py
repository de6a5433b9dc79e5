"""Transfers with RabbitMQ between the facts and who hears of them: over HTTP in, over AMQP on, over HTTP out again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from apps.transfers.events import TOPIC
from apps.wiring import app
from duly.app import Duly
from duly.brokers.rabbitmq import setup, source, transport
from duly.brokers.rabbitmq.line import read_address
from duly.db import Database
from duly.ids import uuid7
from duly.inbox.receiver import Receiver
from duly.operate.consumers import move_consumer
from duly.outbox.relay import Relay
from duly.testing import BusinessClock, drain
from tests.apps.conftest import serving
from tests.apps.transfers.acting import Users, check_consistent, events_of
from tests.brokers.rabbit_tools import peek, queue_of, take_all, waiting
from tests.brokers.server_rabbitmq import RabbitMQServer
from tests.support import rows, value

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(900)]
CONSUMER = "transfers.notify-owner"
GROUP = "notices"


@pytest.fixture
def url(rabbit_url: str) -> str:
    """An exchange of the test's own."""
    return rabbit_url


@pytest.fixture(scope="session")
def duly_app() -> Duly:
    """Every database of these tests has the applications' schemas."""
    return app


@pytest_asyncio.fixture
async def users(db: Database, tmp_path: Path, url: str) -> AsyncIterator[Users]:
    """The API is served, the broker is set up, and notices are made of what comes from there."""
    async with serving(db, tmp_path) as api:
        await setup(url, topics=[TOPIC], group=GROUP)
        async with db.transaction() as tx:
            await move_consumer(tx, CONSUMER, via="rabbitmq", actor="test", reason="events come over AMQP")
        yield Users(api)


async def publish_all(db: Database, url: str) -> int:
    """Relay to RabbitMQ until nothing is pending."""
    relay = Relay(db, transport=transport(url))
    published = 0
    try:
        for _ in range(50):
            cycle = await relay.cycle()
            published += int(cycle.facts["published"])
            if not cycle.done:
                return published
    finally:
        await relay.close()
    raise AssertionError("still not published after 50 rounds")


async def receive_all(db: Database, url: str) -> int:
    """Receive from RabbitMQ until its queue is empty; how many messages were new."""
    receiver = Receiver(db, source(url, topics=[TOPIC], group=GROUP))
    new = 0
    try:
        for _ in range(50):
            cycle = await receiver.cycle()
            new += int(cycle.facts.get("received", 0))
            if not cycle.done and await waiting(url, queue_of(url, GROUP)) == 0:
                return new
    finally:
        await receiver.close()
        await receiver.source.close()
    raise AssertionError("still not received after 50 rounds")


async def expire_one(users: Users, clock: BusinessClock) -> tuple[str, str]:
    """A product, and its transfer that nobody accepted in time."""
    product = await users.register()
    transfer = await users.offer(product)
    clock.advance(hours=73)
    assert await users.expire() == 1
    return product, transfer


async def test_an_expiry_reaches_the_owner_over_rabbitmq_and_by_no_other_way(
    users: Users, db: Database, dsn: str, url: str, clock: BusinessClock
) -> None:
    """T7, E2.4: the consumer is the one that runs on PostgreSQL alone, not a line of it is different."""
    product, transfer = await expire_one(users, clock)
    assert await publish_all(db, url) == 3
    await drain(db, app.handlers)
    assert (await users.get("alice", "/v1/notices")).json()["items"] == []  # it is in RabbitMQ
    assert await receive_all(db, url) == 3
    await drain(db, app.handlers)
    (notice,) = (await users.get("alice", "/v1/notices")).json()["items"]
    assert (notice["kind"], notice["transferId"], notice["productId"]) == ("TransferExpired", transfer, product)
    assert (await users.get("bob", "/v1/notices")).json()["items"] == []
    check_consistent(dsn)


async def test_a_stranger_on_amqp_hears_of_a_products_events_in_their_order(
    users: Users, db: Database, dsn: str, url: str, clock: BusinessClock
) -> None:
    """T3: whoever binds a queue to the exchange gets every fact, by its type and with its ids."""
    async with peek(url) as channel:
        queue = await channel.declare_queue(f"stranger.{uuid7().hex}", durable=True)
        await queue.bind(read_address(url).exchange, routing_key="#")
        product, transfer = await expire_one(users, clock)
        await publish_all(db, url)
        found = await take_all(channel, queue.name, 3)
        await queue.delete(if_empty=False)
    assert [message.routing_key for message in found] == events_of(dsn, product)
    last = found[-1]
    assert last.routing_key == "OwnershipTransferExpired"
    assert last.headers["duly-topic"] == "product-events"
    [(event_id,)] = rows(dsn, "SELECT id FROM duly.event_log WHERE type = 'OwnershipTransferExpired'")
    assert last.headers["cloudEvents:id"] == str(event_id)
    body = json.loads(last.body)
    assert (body["product_id"], body["transfer_id"], body["from_user_id"]) == (product, transfer, "alice")


async def test_what_comes_twice_and_a_broker_that_dies_in_between_tell_the_owner_once(
    users: Users, db: Database, dsn: str, url: str, clock: BusinessClock, rabbit: RabbitMQServer
) -> None:
    """T7: everything is published twice, RabbitMQ is killed before anybody reads, and one notice is made."""
    await expire_one(users, clock)
    assert await publish_all(db, url) == 3
    async with peek(url) as channel:  # what a relay does that dies after the confirm and before its commit
        reads = await channel.get_queue(queue_of(url, GROUP))
        assert reads.declaration_result.message_count == 3
        for message in await take_all(channel, reads.name, 3):
            for _ in range(2):
                await channel.default_exchange.publish(message, reads.name)
    await asyncio.to_thread(rabbit.kill)
    await asyncio.to_thread(rabbit.start)
    assert await receive_all(db, url) == 3
    await drain(db, app.handlers)
    assert len((await users.get("alice", "/v1/notices")).json()["items"]) == 1
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 0
