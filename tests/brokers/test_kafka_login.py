"""Kafka that asks for a password: who has a wrong one is told so at the start, and not that Kafka is away."""

from __future__ import annotations

import pytest

from duly.brokers import kafka
from duly.errors import Refused
from tests.brokers.kafka_tools import event
from tests.brokers.server_kafka import PASSWORD, KafkaServer

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(300)]
TOPIC = "shop-guarded"


async def test_who_has_the_password_is_let_in(kafka_server: KafkaServer) -> None:
    await kafka.setup(kafka_server.guarded_url(PASSWORD), topics=[TOPIC], group="duly")
    made = kafka.transport(kafka_server.guarded_url(PASSWORD))
    await made.check()
    assert await made.publish([event(1, TOPIC)]) == [None]
    await made.close()


async def test_a_wrong_password_is_refused_at_the_start_and_an_outage_later(kafka_server: KafkaServer) -> None:
    url = kafka_server.guarded_url("not-" + PASSWORD)
    sends, reads = kafka.transport(url), kafka.source(url, topics=[TOPIC], group="duly")
    for part in (sends, reads):
        with pytest.raises(Refused, match="does not let us in") as refused:
            await part.check()
        assert PASSWORD not in str(refused.value)
    with pytest.raises(Refused, match="does not let us in"):
        await kafka.setup(url, topics=[TOPIC], group="duly")
    with pytest.raises(OSError, match=r"(?i)authentication"):
        await sends.publish([event(1, TOPIC)])
    await sends.close()
    await reads.close()
