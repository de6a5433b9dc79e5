"""A broker that was away when a process started: its check is made up for before anything is sent to it or read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from duly import Database, Relay
from duly.brokers.checking import BrokerCheck
from duly.duty import Duty
from duly.errors import Refused
from duly.inbox.receiver import Receiver
from duly.runtime.preflight import check_broker
from tests.engine.inbox.source import BrokerSource
from tests.engine.inbox.test_receiver import foreign
from tests.engine.outbox.broker import Broker, BrokerTransport
from tests.engine.outbox.test_publishing import emit_numbers
from tests.support import rows

LOSES = "the log forgets what it acknowledged: give it a larger disk"


class Doubted:
    """What it says of itself when it is asked, and how often it was."""

    loses = True
    asked = 0

    def look(self) -> None:
        self.asked += 1
        if self.loses:
            raise Refused(LOSES)


class DoubtedTransport(Doubted, BrokerTransport):
    async def check(self) -> None:
        await super().check()
        self.look()


class DoubtedSource(Doubted, BrokerSource):
    async def check(self) -> None:
        await super().check()
        self.look()


async def until(fact: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not fact():
            await asyncio.sleep(0.01)


async def use(duty: Duty, doubted: Doubted, broker: Broker, is_used: Callable[[], object]) -> None:
    """Through an outage at the start, a refusal after it, and an operator who puts it right."""
    check: BrokerCheck = duty.broker_check  # type: ignore[attr-defined]  # both have one
    broker.stop()
    await check_broker(check)  # as a process does when it starts
    stop = asyncio.Event()
    running = asyncio.create_task(duty.run(stop))
    await until(lambda: "is away" in duty.health.detail)
    broker.start()
    await until(lambda: LOSES in duty.health.detail)
    assert not duty.health.up
    assert not is_used()
    doubted.loses = False
    await until(is_used)
    await until(lambda: duty.health.up)
    asked = doubted.asked
    doubted.loses = True  # once it has passed, nobody asks again
    await until(lambda: duty.health.detail == "working")
    stop.set()
    await running
    assert doubted.asked == asked


async def test_a_relay_sends_nothing_before_the_check_has_passed(db: Database, broker: Broker) -> None:
    await emit_numbers(db, "a1", [1])
    transport = DoubtedTransport(broker.port)
    await use(Relay(db, transport=transport), transport, broker, broker.received)


async def test_a_receiver_reads_nothing_before_the_check_has_passed(db: Database, dsn: str, broker: Broker) -> None:
    """On RabbitMQ the check is what binds the topics: without it the queue stays empty for ever."""
    broker.put(foreign(1))
    source = DoubtedSource(broker.port)
    receiver = Receiver(db, source, wait_seconds=0.05)
    await use(receiver, source, broker, lambda: rows(dsn, "SELECT 1 FROM duly.received"))


async def test_a_broker_that_is_there_at_the_start_and_would_lose_events_ends_the_process(broker: Broker) -> None:
    with pytest.raises(Refused, match=LOSES):
        await check_broker(BrokerCheck(DoubtedTransport(broker.port)))
