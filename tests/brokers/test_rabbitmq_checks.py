"""RabbitMQ at the start: what makes it ready, and what is refused, in words that help and hold no password."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from duly.brokers import Later
from duly.brokers.rabbitmq import RabbitTransport, setup, source, transport
from duly.brokers.rabbitmq.line import read_address
from duly.errors import Refused
from duly.ids import uuid7
from tests.brokers.rabbit_tools import GROUP, TOPIC, event, peek, queue_of, read_all
from tests.brokers.server_rabbitmq import PASSWORD, USER, RabbitMQServer

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(900)]


async def add_user(rabbit: RabbitMQServer, *, configure: str, write: str, read: str) -> str:
    """The name of somebody whose password is ``secret``, and who may do this much."""
    name = f"clerk-{uuid7().hex}"
    await asyncio.to_thread(
        rabbit.evaluate,
        f'rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"secret">>, <<"test">>), '
        "rabbit_auth_backend_internal:set_permissions("
        f'<<"{name}">>, <<"/">>, <<"{configure}">>, <<"{write}">>, <<"{read}">>, <<"test">>).',
    )
    return name


async def test_setup_makes_what_is_missing_once(rabbit_url: str) -> None:
    """It says what it made, and to run it again makes nothing; before it, both sides refuse to start."""
    sends, reads = transport(rabbit_url), source(rabbit_url, topics=[TOPIC], group=GROUP)
    with pytest.raises(Refused, match=r"has not the exchange .*duly brokers setup"):
        await sends.check()
    with pytest.raises(Refused, match="duly brokers setup"):
        await reads.check()
    assert len(await setup(rabbit_url, topics=[TOPIC], group=GROUP)) == 3
    assert await setup(rabbit_url, topics=[TOPIC], group=GROUP) == []
    await sends.check()
    await reads.check()
    await sends.close()
    await reads.close()


async def test_who_only_publishes_gets_no_queue(rabbit_url: str) -> None:
    """It would fill until the disk is full, for nobody reads it; what others bind gets every event."""
    made = await setup(rabbit_url, topics=[TOPIC], group=None)
    assert len(made) == 2
    assert not [sentence for sentence in made if "queue" in sentence]
    sends = transport(rabbit_url)
    [waits] = await sends.publish([event("a")])
    assert isinstance(waits, Later)
    await setup(rabbit_url, topics=["shop.news"], group=GROUP)  # who reads another topic does not get this one
    [waits] = await sends.publish([event("a")])
    assert isinstance(waits, Later)
    await setup(rabbit_url, topics=[TOPIC], group=GROUP)
    assert await sends.publish([event("a")]) == [None]
    await sends.close()


async def test_a_topic_that_is_new_is_bound_by_the_check(rabbit_url: str, sends: RabbitTransport) -> None:
    """A binding cannot be asked for; to make it again changes nothing."""
    news = event("order-1", topic="shop.news")
    [returned] = await sends.publish([news])
    assert isinstance(returned, Later)
    reads = source(rabbit_url, topics=[TOPIC, "shop.news"], group=GROUP)
    await reads.check()
    assert await sends.publish([news]) == [None]
    assert [message.topic for message in await read_all(reads, 1)] == ["shop.news"]
    await reads.close()


@pytest.mark.parametrize(("kind", "durable"), [("topic", False), ("fanout", True)])
async def test_an_exchange_of_another_kind_is_refused(rabbit_url: str, kind: str, durable: bool) -> None:
    """One that does not survive a restart, or does not know patterns."""
    async with peek(rabbit_url) as channel:
        await channel.declare_exchange(read_address(rabbit_url).exchange, kind, durable=durable)
    sends = transport(rabbit_url)
    with pytest.raises(Refused, match=r"inequivalent arg '(type|durable)'"):
        await sends.check()
    with pytest.raises(Refused, match=r"inequivalent arg '(type|durable)'"):
        await setup(rabbit_url, topics=[TOPIC], group=GROUP)
    await sends.close()


@pytest.mark.parametrize(
    ("durable", "arguments", "missing"),
    [
        (False, {"x-single-active-consumer": True, "x-overflow": "reject-publish"}, "durable"),
        (True, {"x-overflow": "reject-publish"}, "x-single-active-consumer"),
        (True, {"x-single-active-consumer": True}, "x-overflow"),
        (True, {"x-single-active-consumer": True, "x-overflow": "reject-publish", "x-message-ttl": 60_000}, "ttl"),
    ],
)
async def test_a_queue_that_would_lose_messages_or_their_order_is_refused(
    rabbit_url: str, durable: bool, arguments: dict[str, bool | str | int], missing: str
) -> None:
    """RabbitMQ says what differs, and so do we."""
    await setup(rabbit_url, topics=[], group=GROUP)
    async with peek(rabbit_url) as channel:
        await channel.declare_queue(queue_of(rabbit_url), durable=durable, arguments=dict(arguments))
    reads = source(rabbit_url, topics=[TOPIC], group=GROUP)
    with pytest.raises(Refused, match=missing):
        await reads.check()
    await reads.close()


async def test_who_is_not_let_in_is_refused_without_the_password(rabbit: RabbitMQServer) -> None:
    """At the start; and while it runs it is an outage, in the same words."""
    wrong = f"amqp://{USER}:not-{PASSWORD}@127.0.0.1:{rabbit.port}/"
    for sends in (transport(wrong), source(wrong, topics=[TOPIC], group=GROUP)):
        with pytest.raises(Refused, match=r"does not let the user 'duly' in: the name or the password") as refused:
            await sends.check()
        assert PASSWORD not in str(refused.value)
    with pytest.raises(ConnectionError, match="does not let the user") as away:
        await transport(wrong).publish([event("a")])
    assert PASSWORD not in str(away.value)
    assert PASSWORD not in repr(read_address(wrong))
    with pytest.raises(Refused, match="does not let"):
        await setup(wrong, topics=[TOPIC], group=GROUP)


async def test_a_vhost_that_is_not_there_is_refused(rabbit: RabbitMQServer) -> None:
    """It is part of the address."""
    with pytest.raises(Refused, match="nowhere"):
        await transport(f"{rabbit.url}nowhere").check()


async def test_a_server_that_is_away_is_an_outage_and_no_refusal() -> None:
    """It may come: a relay starts without it."""
    with pytest.raises(OSError, match="cannot be reached"):
        await transport("amqp://guest:guest@127.0.0.1:1/").check()


async def test_a_user_with_few_rights_can_work_and_what_it_may_not_makes_events_wait(
    rabbit: RabbitMQServer, rabbit_url: str, sends: RabbitTransport
) -> None:
    """Without the right to configure, properties cannot be compared: that is said, and no reason to stop."""
    name = await add_user(rabbit, configure="^$", write="^nothing$", read=".*")
    clerk = transport(rabbit_url.replace(f"{USER}:{PASSWORD}", f"{name}:secret"))
    with capture_logs() as logs:
        await clerk.check()
    assert "rabbitmq_unchecked" in [entry["event"] for entry in logs]
    [answer] = await clerk.publish([event("a")])
    assert isinstance(answer, Later)
    assert name in answer.reason
    await clerk.close()


async def test_setup_says_so_when_it_may_not_bind(rabbit: RabbitMQServer, rabbit_url: str) -> None:
    """Everything is there but the bindings: to call that done would leave events with nowhere to go."""
    await setup(rabbit_url, topics=[TOPIC], group=GROUP)
    name = await add_user(rabbit, configure=".*", write="^nothing$", read=".*")
    with pytest.raises(Refused, match=rf"does not let '{name}' bind the queue"):
        await setup(rabbit_url.replace(f"{USER}:{PASSWORD}", f"{name}:secret"), topics=["shop.news"], group=GROUP)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("amqp://user:hush@host/?exchnge=x", "no option 'exchnge'"),
        ("amqp://user:hush@host/?queue=stream", "classic or quorum"),
        ("amqp://user:hush@host/?unroutable=ignore", "wait or drop"),
        ("amqp://user:hush@host:port/", "looks like"),
        ("amqp://", "looks like"),
        ("http://user:hush@host/", "looks like"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_without_repeating_it(address: str, said: str) -> None:
    """It holds a password."""
    with pytest.raises(Refused, match=said) as refused:
        read_address(address)
    assert "hush" not in str(refused.value)
