"""Screening with Kafka between ledger and compliance, as its document has it: what is posted is screened once (F9)."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from apps.finance.ledger.events import TOPIC
from apps.wiring import app
from duly.app import Duly
from duly.brokers import connect
from duly.errors import Unavailable
from duly.inbox.receiver import Receiver
from duly.messages import declared_events
from duly.operate.consumers import move_consumer
from duly.outbox.relay import Relay
from tests.apps.conftest import api as api
from tests.apps.finance.compliance.acting import Office, open_customer
from tests.apps.finance.compliance.conftest import bank as bank
from tests.apps.finance.compliance.conftest import office as office
from tests.apps.finance.compliance.conftest import payers as payers
from tests.apps.finance.payments.acting import do
from tests.brokers.kafka_tools import committed, ends_of, eventually, set_offsets
from tests.brokers.process import Part
from tests.brokers.server_kafka import KafkaServer
from tests.support import rows, value

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(900)]
CONSUMER, GROUP = "aml-screening", "compliance"
SECONDS = 120.0
LEASE_SECONDS = "4"  # so long somebody who was killed holds up the others
RECEIVED = "SELECT count(*) FROM duly.received WHERE type = 'transaction.posted'"
SCREENED = "SELECT count(*) FROM decisions.log WHERE rule_set_id = 'aml-screening' AND subject = ANY(%(ids)s)"


@pytest.fixture(scope="session")
def duly_app() -> Duly:
    """Every database of these tests has the applications' schemas."""
    return app


@pytest.fixture(scope="module")
def kafka(kafka_server: KafkaServer) -> KafkaServer:
    """One server for all of them."""
    return kafka_server


@dataclass(frozen=True)
class Way:
    """From the ledger to compliance, by Kafka; where the topic ended before anything was posted."""

    office: Office
    kafka: KafkaServer
    began: Mapping[int, int]

    async def publish(self) -> int:
        """Relay to Kafka until nothing is pending."""
        relay = Relay(self.office.db, transport=connect.transport(self.kafka.url))
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

    async def receive(self, count: int, what: str = "received") -> None:
        """Until so many messages came that were new, or (``known``) were not."""
        source = connect.source(self.kafka.url, topics=[TOPIC], group=GROUP)
        receiver = Receiver(self.office.db, source)
        found = 0
        try:
            async with asyncio.timeout(SECONDS):
                while found < count:
                    found += int((await receiver.cycle()).facts.get(what, 0))
        finally:
            await source.close()
            await receiver.close()
        assert found == count

    def screened(self, posted: list[str]) -> int:
        """How many of these a decision was written for, repetitions too."""
        return int(value(self.office.dsn, SCREENED, {"ids": posted}))


@pytest_asyncio.fixture
async def way(kafka: KafkaServer, office: Office) -> Way:
    """The topics are there, and the screening hears of what is posted from Kafka alone."""
    topics = {body.event_topic for body in declared_events().values() if body.__module__.startswith("apps.")}
    await connect.setup(kafka.url, topics=sorted(topics), group=GROUP)
    await Way(office, kafka, {}).publish()  # that the office's accounts were opened
    began = await ends_of(kafka, TOPIC)
    await set_offsets(kafka, GROUP, TOPIC, began)  # what other tests left there is nobody's
    async with office.db.transaction() as tx:
        await move_consumer(tx, CONSUMER, via="kafka", actor="test", reason="as the document says")
    return Way(office, kafka, began)


async def test_what_is_posted_is_screened_by_way_of_kafka_and_by_no_other(way: Way, office: Office) -> None:
    """F9, E2.4: the consumer is the one that runs on PostgreSQL alone, not a line of it is different."""
    small, large = await office.post("10.00"), await office.post("60.00")
    assert await way.publish() == 2
    await office.screen()
    assert (way.screened([small, large]), office.count("compliance.cases")) == (0, 0)  # they are in Kafka
    await way.receive(2)
    await office.screen()
    assert way.screened([small, large]) == 2
    (case,) = await office.queue()
    assert (case["kind"], case["transactionId"]) == ("AML", large)
    assert (office.facts(small), office.facts(large)) == ([], ["aml.flagged"])
    office.check()


async def test_what_comes_twice_from_a_kafka_that_died_in_between_is_screened_once(way: Way, office: Office) -> None:
    """E2.2: an operator who sets the group back to where it began makes everything come again."""
    posted = [await office.post(amount) for amount in ("10.00", "60.00", "5.00")]
    assert await way.publish() == 3
    await asyncio.to_thread(way.kafka.kill)
    await asyncio.to_thread(way.kafka.start)
    await way.receive(3)
    ends = await ends_of(way.kafka, TOPIC)
    for partition, end in ends.items():
        if end > way.began[partition]:
            await eventually(lambda at=partition: committed(way.kafka, GROUP, TOPIC, at), end)
    await office.screen()
    await set_offsets(way.kafka, GROUP, TOPIC, way.began)
    await way.receive(3, "known")
    await office.screen()
    assert (value(office.dsn, RECEIVED), way.screened(posted)) == (3, 3)
    assert (office.count("compliance.alerts"), office.facts(posted[1])) == (1, ["aml.flagged"])
    office.check()


async def test_while_kafka_is_away_money_moves_and_is_screened_later(way: Way, office: Office) -> None:
    """The ledger knows nothing of Kafka, and no event has lost an attempt."""
    await asyncio.to_thread(way.kafka.kill)
    posted = [await office.post(amount) for amount in ("10.00", "60.00")]
    with pytest.raises(Unavailable, match="kafka is away"):
        await way.publish()
    await asyncio.to_thread(way.kafka.start)
    assert await way.publish() == 2
    assert value(office.dsn, "SELECT max(attempts) FROM duly.event_log") in (0, None)
    await way.receive(2)
    await office.screen()
    assert (way.screened(posted), office.count("compliance.cases")) == (2, 1)
    office.check()


async def test_whoever_is_killed_on_the_way_each_transaction_is_screened_once(
    way: Way, office: Office, tmp_path: Path
) -> None:
    """FAULTS: kill -9 of relay, receiver and worker, in the midst of what each does; others take over."""
    third = await do(office.db, open_customer)
    posted = [await office.post(amount, debit=third) for amount in ("60.00", "10.00") * 15]
    points = {"relay": "relay.sent=kill9", "receiver": "receiver.committed=kill9", "worker": "handler.mid=kill9@2"}
    parts: list[Part] = []
    try:
        for kind, point in points.items():
            broken = _run(way, kind, tmp_path, point)
            parts.append(broken)
            assert await asyncio.to_thread(broken.wait) == -signal.SIGKILL, broken.said
            parts.append(_run(way, kind, tmp_path))
        ends_at = time.monotonic() + SECONDS
        while way.screened(posted) < len(posted) or value(office.dsn, "SELECT count(*) FROM duly.outbox"):
            assert time.monotonic() < ends_at, "\n".join(part.said[-2000:] for part in parts)
            await asyncio.sleep(0.1)
    finally:
        for part in parts:
            part.kill()
    assert way.screened(posted) == len(posted)
    assert (office.count("compliance.alerts"), office.count("compliance.cases")) == (15, 15)
    assert rows(office.dsn, "SELECT name FROM duly.dead_letters") == []
    office.check()


def _run(way: Way, kind: str, directory: Path, failpoints: str = "") -> Part:
    """A process with this duty, as ``duly relay``, ``duly receive`` and ``duly worker`` are."""
    environment = {
        "DATABASE_URL": way.office.dsn, "DULY_APP": "apps.wiring:app", "DULY_ALLOW_UNSAFE_DATABASE": "1",
        "DULY_DATA": str(directory), "DULY_LOG_FORMAT": "json", "DULY_BROKER": way.kafka.url,
        "DULY_RECEIVE": way.kafka.url, "DULY_RECEIVE_TOPICS": TOPIC, "DULY_RECEIVE_GROUP": GROUP,
        "DULY_LEASE_SECONDS": LEASE_SECONDS, "LANE_LEASE_SECONDS": LEASE_SECONDS, "DULY_FAILPOINTS": failpoints,
    }  # fmt: skip
    return Part([kind], environment, directory / f"{kind}-{'broken' if failpoints else 'well'}.log")
