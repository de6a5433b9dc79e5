"""Kafka that asks for a password: who has a wrong one is told so at the start, and not that Kafka is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duly.brokers import kafka
from duly.errors import Refused
from tests.brokers.kafka_tools import event
from tests.brokers.server_kafka import KafkaServer

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(600)]
USER, PASSWORD = "duly", "a-password-of-tests"
LOGIN = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    f'username="{USER}" password="{PASSWORD}" user_{USER}="{PASSWORD}";'
)
SETTINGS = f"""
listener.security.protocol.map=BROKER:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.broker.plain.sasl.jaas.config={LOGIN}
"""


class Guarded(KafkaServer):
    """A server that knows one user."""

    @property
    def client(self) -> dict[str, str | int | float | bool]:
        """What a plain client needs to know."""
        login = {"sasl.mechanism": "PLAIN", "sasl.username": USER, "sasl.password": PASSWORD}
        return {**super().client, "security.protocol": "sasl_plaintext", **login}

    def url_of(self, password: str) -> str:
        """Its address for somebody who knows this password."""
        return f"kafka://{USER}:{password}@127.0.0.1:{self.port}/?partitions=1&sasl.mechanism=PLAIN"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("kafka"), SETTINGS)
    made.start()
    yield made
    made.close()


async def test_who_has_the_password_is_let_in(guarded: Guarded) -> None:
    await kafka.setup(guarded.url_of(PASSWORD), topics=["shop"], group="duly")
    made = kafka.transport(guarded.url_of(PASSWORD))
    await made.check()
    assert await made.publish([event(1, "shop")]) == [None]
    await made.close()


async def test_a_wrong_password_is_refused_at_the_start_and_an_outage_later(guarded: Guarded) -> None:
    url = guarded.url_of("not-" + PASSWORD)
    sends, reads = kafka.transport(url), kafka.source(url, topics=["shop"], group="duly")
    for part in (sends, reads):
        with pytest.raises(Refused, match="does not let us in") as refused:
            await part.check()
        assert PASSWORD not in str(refused.value)
    with pytest.raises(Refused, match="does not let us in"):
        await kafka.setup(url, topics=["shop"], group="duly")
    with pytest.raises(OSError, match=r"(?i)authentication"):
        await sends.publish([event(1, "shop")])
    await sends.close()
    await reads.close()
