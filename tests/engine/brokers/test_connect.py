"""From an address to a broker: what is refused, and what an error may repeat of an address."""

from __future__ import annotations

import pytest

from duly.brokers.connect import broker_name, broker_names, register_broker, shown, transport
from duly.errors import Invalid, Refused


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("kafka://one:9092,two:9092", "kafka"),
        ("kafka+ssl://one:9093", "kafka"),
        ("nats://here", "nats"),
        ("amqp://here/vhost", "rabbitmq"),
        ("amqps://here", "rabbitmq"),
        ("sqs+http://localhost:5000", "sqs"),
    ],
)
def test_the_scheme_says_which_broker_it_is(url: str, name: str) -> None:
    assert broker_name(url) == name
    assert name in broker_names()


@pytest.mark.parametrize("url", ["", "here:9092", "http://user:secret@here", "KAFKA://here", "postgresql://here"])
def test_another_address_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(Refused, match="it begins with one of kafka://") as refused:
        transport(url)
    assert "secret" not in str(refused.value)


def test_people_and_logs_see_no_password() -> None:
    assert shown("amqps://user:p%40ss@rabbit:5671/vhost?key=secret") == "amqps://rabbit:5671"
    assert shown("kafka://one:9092,two:9092") == "kafka://one:9092,two:9092"


def test_a_client_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is there, and what it imports is not."""
    import sys

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "duly.brokers.kafka":
                raise ModuleNotFoundError("No module named 'confluent_kafka'", name="confluent_kafka")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "duly.brokers.kafka", raising=False)
    with pytest.raises(Refused, match=r"pip install 'duly\[kafka\]'"):
        transport("kafka://here")


def test_a_broker_of_ones_own_is_registered_once() -> None:
    register_broker("mine", name="mine", module="tests.engine.inbox.source")
    register_broker("mine", name="mine", module="tests.engine.inbox.source")
    assert broker_name("mine://here") == "mine"
    with pytest.raises(Invalid, match="taken by kafka"):
        register_broker("kafka", name="mine", module="tests.engine.inbox.source")
    with pytest.raises(Invalid, match="lower-case"):
        register_broker("Mine", name="mine", module="tests.engine.inbox.source")
