"""Kafka's consumer group with real receivers on a real database: whoever comes, goes or sleeps, each effect is once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from duly import Database, Duly
from duly.brokers import kafka
from duly.brokers.kafka import KafkaTransport
from duly.errors import DulyError
from duly.inbox.receiver import Receiver
from duly.jobs.worker import Worker
from tests.brokers.kafka_tools import committed, deliver, event, eventually, fresh, make_topic
from tests.brokers.server_kafka import KafkaServer
from tests.engine.inbox.effects import effects, prepare, register_shop
from tests.support import python, rows, value

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(900)]
MOVE = """
UPDATE duly.consumers SET via = 'kafka', via_since = duly.now() - interval '1 hour' WHERE name <> 'duly.webhooks'
"""
STORED = "SELECT count(*) FROM duly.received"
SHORT = "&session.timeout.ms=3000&heartbeat.interval.ms=300&topic.metadata.refresh.interval.ms=1000"
RECEIVER = """
    import asyncio
    from duly import Database
    from duly.brokers import kafka
    from duly.inbox.receiver import Receiver
    from duly.settings import Settings

    async def main():
        settings = Settings()
        db = Database(settings.database_url, settings=settings)
        receiver = Receiver(db, kafka.source({url!r}, topics=[{topic!r}], group={group!r}), batch=5)
        await receiver.run(asyncio.Event())

    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def server(kafka_server: KafkaServer) -> KafkaServer:
    return kafka_server


@pytest.fixture
async def transport(server: KafkaServer) -> AsyncIterator[KafkaTransport]:
    made = kafka.transport(server.url)
    yield made
    await made.close()


async def open_shop(db: Database, dsn: str) -> Duly:
    app = Duly()
    register_shop(app)
    await prepare(app, db, dsn)
    rows(dsn, MOVE)
    return app


async def publish(transport: KafkaTransport, topic: str, aggregates: int, numbers: range) -> None:
    """Waves of one event of each aggregate, as the relay sends them."""
    for n in numbers:
        await deliver(transport, *[event(n, topic, aggregate=f"o-{one}") for one in range(aggregates)])


async def work_off(db: Database, app: Duly) -> None:
    for _ in range(1_000):
        if not (await Worker(db, app.handlers).run_once()).done:
            return
    raise AssertionError("the workers find no end")


class Crew:
    """Receivers of one group that come and go."""

    def __init__(self, db: Database, url: str, topic: str, group: str) -> None:
        self._db, self._url, self._topic, self._group = db, url, topic, group
        self._members: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}

    def join(self, name: str) -> None:
        """One more."""
        source = kafka.source(self._url, topics=[self._topic], group=self._group)
        stop = asyncio.Event()
        run = Receiver(self._db, source, batch=7, wait_seconds=0.2).run(stop)
        self._members[name] = stop, asyncio.create_task(run)

    async def leave(self, name: str) -> None:
        """One less, in good order."""
        stop, task = self._members.pop(name)
        stop.set()
        with contextlib.suppress(DulyError):
            await task

    async def leave_all(self) -> None:
        """The end."""
        for name in list(self._members):
            await self.leave(name)


async def stored(dsn: str, at_least: int, *, seconds: float = 300.0) -> None:
    async with asyncio.timeout(seconds):
        while await asyncio.to_thread(value, dsn, STORED) < at_least:
            await asyncio.sleep(0.1)


async def test_receivers_come_and_go_while_messages_flow(
    server: KafkaServer, transport: KafkaTransport, db: Database, dsn: str
) -> None:
    app = await open_shop(db, dsn)
    topic = await make_topic(server, fresh(), partitions=6)
    crew = Crew(db, server.url + SHORT, topic, "crew")
    flow = asyncio.create_task(publish(transport, topic, 12, range(25)))
    try:
        crew.join("first")
        await stored(dsn, 20)
        crew.join("second")
        await stored(dsn, 80)
        crew.join("third")
        await crew.leave("first")
        await stored(dsn, 160)
        await crew.leave("second")
        crew.join("first")
        await flow
        await stored(dsn, 300)
    finally:
        flow.cancel()
        await crew.leave_all()
    await work_off(db, app)
    for consumer in ("ledger", "mail"):
        done = effects(dsn, consumer)
        assert {one: sorted(numbers) for one, numbers in done.items()} == {f"o-{n}": [*range(25)] for n in range(12)}
    assert effects(dsn, "ledger") == {f"o-{n}": [*range(25)] for n in range(12)}
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 0


@pytest.mark.parametrize("point", ["receiver.received", "receiver.committed"])
async def test_a_receiver_that_slept_over_a_rebalance_harms_nothing(
    server: KafkaServer, transport: KafkaTransport, db: Database, dsn: str, point: str
) -> None:
    app = await open_shop(db, dsn)
    topic = await make_topic(server, fresh())
    group = f"sleep-{topic}"
    await publish(transport, topic, 2, range(10))
    code = RECEIVER.format(url=server.url + SHORT, topic=topic, group=group)
    zombie = python(dsn, code, failpoints=f"{point}=stop")
    crew = Crew(db, server.url + SHORT, topic, group)
    try:
        await asyncio.to_thread(zombie.wait_until_stopped, 300)
        crew.join("other")
        await stored(dsn, 20)
        await publish(transport, topic, 2, range(10, 20))
        await stored(dsn, 40)
        await eventually(lambda: committed(server, group, topic), 40)
        os.kill(zombie.pid, signal.SIGCONT)
        await crew.leave_all()
        await publish(transport, topic, 2, range(20, 25))  # and it is the one that reads now
        await stored(dsn, 50)
        await eventually(lambda: committed(server, group, topic), 50)
    finally:
        zombie.kill()
        zombie.wait()
        await crew.leave_all()
    await work_off(db, app)
    assert effects(dsn, "ledger") == {"o-0": [*range(25)], "o-1": [*range(25)]}
    assert sorted(effects(dsn, "mail")["o-1"]) == [*range(25)]


async def test_offsets_are_committed_only_after_our_commit(
    server: KafkaServer, transport: KafkaTransport, db: Database, dsn: str
) -> None:
    await open_shop(db, dsn)
    topic = await make_topic(server, fresh())
    group = f"order-{topic}"
    await publish(transport, topic, 1, range(5))
    code = RECEIVER.format(url=server.url + SHORT, topic=topic, group=group)
    for point, rows_there in (("receiver.before_commit", 0), ("receiver.committed", 5)):
        process = python(dsn, code, failpoints=f"{point}=kill9")
        assert await asyncio.to_thread(process.wait) == -signal.SIGKILL
        assert value(dsn, STORED) == rows_there
        assert await committed(server, group, topic) < 0
