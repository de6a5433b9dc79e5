"""What is RabbitMQ's own: confirms, returns, alarms, one reader at a time, and what its start-up checks refuse."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Iterator

import aio_pika
import pytest
import pytest_asyncio
from aiormq.abc import ChannelFrame, FrameType
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.common import FieldTable
from pamqp.header import ContentHeader
from structlog.testing import capture_logs

from duly.brokers import Later, Message
from duly.brokers.rabbitmq import RabbitSource, RabbitTransport, setup, source, transport
from duly.brokers.rabbitmq.line import read_address
from duly.brokers.wire import decode
from duly.clock import monotonic
from duly.errors import Invalid, Refused
from duly.ids import uuid7
from tests.brokers.rabbit_tools import TOPIC, Wire, event, events, ids, peek, read_all, take_all, waiting
from tests.brokers.server_rabbitmq import PASSWORD, USER, RabbitMQServer

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(900)]
GROUP = "shop"


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQServer]:
    """One node for all of these tests."""
    node = RabbitMQServer(tmp_path_factory.mktemp("rabbitmq"))
    try:
        node.start()
        yield node
    finally:
        node.close()


@pytest.fixture
def url(rabbit: RabbitMQServer) -> str:
    """An exchange, and so queues, of the test's own."""
    return f"{rabbit.url}?exchange=t{uuid7().hex}"


@pytest_asyncio.fixture
async def sends(url: str) -> AsyncIterator[RabbitTransport]:
    """What publishes; everything it needs is there."""
    await setup(url, topics=[TOPIC], group=GROUP)
    made = transport(url)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def reads(url: str, sends: RabbitTransport) -> AsyncIterator[RabbitSource]:
    """What reads."""
    made = source(url, topics=[TOPIC], group=GROUP)
    yield made
    await made.close()


def queue_of(url: str) -> str:
    """The name of the queue there."""
    return f"{read_address(url).exchange}.{GROUP}"


# -- publishing ------------------------------------------------------------------------------------------------------


async def test_an_event_is_persistent_and_goes_by_its_type_with_its_attributes_as_headers(
    url: str, sends: RabbitTransport
) -> None:
    """Whoever binds the type to the exchange gets it, as CloudEvents says it looks on AMQP."""
    placed, paid = event("order-1", total=5), event("order-2", type_="order.paid")
    async with peek(url) as channel:
        queue = await channel.declare_queue(f"audit.{uuid7().hex}", durable=True)
        await queue.bind(read_address(url).exchange, routing_key="*.placed")
        assert await sends.publish([placed, paid]) == [None, None]
        [found] = await take_all(channel, queue.name, 1)
        assert await queue.get(fail=False) is None
    assert found.routing_key == "order.placed"
    assert found.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert found.message_id == str(placed.id)
    assert found.content_type == "application/json"
    assert found.headers["cloudEvents:id"] == str(placed.id)
    assert found.headers["cloudEvents:specversion"] == "1.0"
    assert found.headers["cloudEvents:subject"] == "order-1"
    assert found.headers["cloudEvents:correlationid"] == "c-1"
    assert found.headers["duly-topic"] == TOPIC
    assert json.loads(found.body) == {"total": 5}


async def test_what_was_published_is_read_as_it_was(reads: RabbitSource, sends: RabbitTransport) -> None:
    """Out and in again."""
    sent = event("order-1", total=5, note="Grüße")
    assert await sends.publish([sent]) == [None]
    [message] = await read_all(reads, 1)
    assert message.topic == TOPIC
    assert decode(message) == sent


async def test_publishing_waits_for_the_confirm(url: str, sends: RabbitTransport) -> None:
    """Sent is not enough."""
    async with Wire(url) as wire:
        behind = transport(wire.url)
        assert await behind.publish([event("order-0")]) == [None]
        wire.answering.clear()
        task = asyncio.create_task(behind.publish(events(3)))
        async with asyncio.timeout(60):
            while await waiting(url, queue_of(url)) < 4:
                assert not task.done()
        assert not task.done()
        wire.answering.set()
        assert await task == [None, None, None]
        await behind.close()


async def test_what_nobody_takes_is_that_events_own_error(url: str, sends: RabbitTransport) -> None:
    """RabbitMQ returns it; the others are through. Who wants it otherwise says so in the address."""
    lonely = event("order-2", topic="nobody.listens")
    answers = await sends.publish([event("order-1"), lonely, event("order-3")])
    assert (answers[0], answers[2]) == (None, None)
    assert isinstance(answers[1], str)
    assert "nobody.listens" in answers[1]
    assert "duly brokers setup" in answers[1]
    drops = transport(f"{url}&unroutable=drop")
    assert await drops.publish([lonely]) == [None]
    await drops.close()


async def test_a_message_that_is_too_large_is_its_own_error_and_the_others_are_through(
    rabbit: RabbitMQServer, url: str, sends: RabbitTransport
) -> None:
    """RabbitMQ closes the channel for it, under all of them."""
    await asyncio.to_thread(rabbit.evaluate, "application:set_env(rabbit, max_message_size, 20000).")
    try:
        answers = await sends.publish([event("a"), event("b", text="x" * 30_000), event("c"), event("d")])
        assert [answers[0], answers[2], answers[3]] == [None, None, None]
        assert isinstance(answers[1], str)
        assert "larger than" in answers[1]
    finally:
        await asyncio.to_thread(rabbit.evaluate, "application:set_env(rabbit, max_message_size, 134217728).")


async def test_a_full_queue_makes_events_wait_and_is_no_attempt(url: str, sends: RabbitTransport) -> None:
    """A nack says that somebody could not take it now."""
    async with peek(url) as channel:
        arguments: FieldTable = {"x-max-length": 1, "x-overflow": "reject-publish"}
        queue = await channel.declare_queue(f"small.{uuid7().hex}", durable=True, arguments=arguments)
        await queue.bind(read_address(url).exchange, routing_key="small.*")
        first, second = event("a", type_="small.one"), event("b", type_="small.two")
        assert await sends.publish([first]) == [None]
        [answer, other] = await sends.publish([second, event("c")])
        assert isinstance(answer, Later)
        assert "full" in answer.reason
        assert other is None
        await queue.delete(if_empty=False)


async def test_an_exchange_that_goes_away_is_an_outage_that_says_what_to_do(url: str, sends: RabbitTransport) -> None:
    """No event is to blame; and once it is back, so are we."""
    assert await sends.publish([event("a")]) == [None]
    async with peek(url) as channel:
        await channel.exchange_delete(read_address(url).exchange)
    with pytest.raises(ConnectionError, match="duly brokers setup"):
        await sends.publish(events(2))
    await setup(url, topics=[TOPIC], group=GROUP)
    assert await sends.publish(events(2)) == [None, None]


async def test_a_line_that_is_cut_before_the_confirm_is_an_outage_and_the_event_is_sent_again(
    url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """Whether it came is not known: the same id comes twice, and the inbox knows it."""
    one = event("order-1")
    async with Wire(url) as wire:
        behind = transport(wire.url)
        assert await behind.publish([event("order-0")]) == [None]
        wire.answering.clear()
        task = asyncio.create_task(behind.publish([one]))
        async with asyncio.timeout(60):
            while await waiting(url, queue_of(url)) < 2:
                await asyncio.sleep(0.05)
        wire.cut()
        with pytest.raises(ConnectionError, match="before it confirmed"):
            await task
        wire.answering.set()
        assert await behind.publish([one]) == [None]
        await behind.close()
    assert ids(await read_all(reads, 3))[1:] == [str(one.id), str(one.id)]


async def test_an_alarm_is_an_outage_with_bounds_and_ends_with_it(
    rabbit: RabbitMQServer, url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """RabbitMQ stops reading from whoever publishes: we wait, send one event to find out, and open no second line."""
    count_lines = "length(rabbit_networking:connections())."
    before = int(await asyncio.to_thread(rabbit.evaluate, count_lines))
    await asyncio.to_thread(rabbit.evaluate, "vm_memory_monitor:set_vm_memory_high_watermark(0).")
    try:
        batch = events(20)
        for _ in range(2):
            begun = monotonic()
            with pytest.raises(TimeoutError, match="alarm"):
                await sends.publish(batch)
            assert monotonic() - begun < 40
        assert int(await asyncio.to_thread(rabbit.evaluate, count_lines)) == before + 1
    finally:
        await asyncio.to_thread(rabbit.evaluate, "vm_memory_monitor:set_vm_memory_high_watermark(0.4).")
    async with asyncio.timeout(60):
        assert await sends.publish(batch) == [None] * 20
    found = ids(await read_all(reads, 21))
    assert found[0] == str(batch[0].id)
    assert sorted(found[1:]) == sorted(str(one.id) for one in batch)


async def test_a_server_that_is_frozen_is_an_outage_and_nobody_is_cancelled(
    rabbit: RabbitMQServer, url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """The client ends what waits for a lost connection by CancelledError; ours see a lost connection."""
    impatient = source(f"{url}&heartbeat=1", topics=[TOPIC], group=GROUP)
    assert await impatient.receive(10, wait_seconds=0.1) == []
    assert await sends.publish([event("order-0")]) == [None]
    rabbit.pause()
    try:
        waits = asyncio.create_task(_receive_until_it_raises(impatient))
        with pytest.raises(TimeoutError, match="confirm"):
            await sends.publish(events(3))
        with pytest.raises(OSError, match="RabbitMQ"):
            await waits
    finally:
        rabbit.resume()
    await impatient.close()
    async with asyncio.timeout(120):
        assert await sends.publish([event("order-9")]) == [None]
    assert len(await read_all(reads, 2)) >= 2


async def _receive_until_it_raises(reads: RabbitSource) -> None:
    async with asyncio.timeout(90):
        while True:
            await reads.receive(10, wait_seconds=1)


# -- reading ---------------------------------------------------------------------------------------------------------


async def test_of_two_readers_one_reads_and_the_other_takes_over_in_order(
    url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """A single active consumer: order survives, and a reader that leaves gives its turn away at once."""
    other = source(url, topics=[TOPIC], group=GROUP)
    assert await reads.receive(5, wait_seconds=0.1) == []
    assert await other.receive(5, wait_seconds=0.1) == []
    sent = [str(one.id) for one in events(20) if await sends.publish([one]) == [None]]
    first = await read_all(reads, 5, limit=5)
    assert await other.receive(5, wait_seconds=0.5) == []
    await reads.acknowledge(first[:3])
    await reads.close()
    rest: list[Message] = []
    async with asyncio.timeout(60):
        while len(rest) < 17:
            came = await other.receive(5, wait_seconds=1)
            await other.acknowledge(came)
            rest += came
    assert ids(first) == sent[:5]
    assert ids(rest) == sent[3:]
    await other.close()


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_what_is_given_back_comes_again_in_its_place(url: str, kind: str) -> None:
    """The batch, and whatever was already on its way behind it."""
    url = f"{url}&queue={kind}"
    await setup(url, topics=[TOPIC], group=GROUP)
    sends, reads = transport(url), source(url, topics=[TOPIC], group=GROUP)
    await reads.check()
    sent = [str(one.id) for one in events(12) if await sends.publish([one]) == [None]]
    first = await read_all(reads, 4, limit=4)
    await reads.acknowledge(first[:1])
    await reads.release(first[1:])
    second = await read_all(reads, 4, limit=4)
    assert ids(second) == sent[1:5]
    await reads.acknowledge(first)  # of a channel that is gone: nothing happens, least of all to other messages
    await reads.resume({})
    third: list[Message] = []
    while len(third) < 11:
        came = await read_all(reads, 1, limit=4)
        await reads.acknowledge(came)
        third += came
    assert ids(third) == sent[1:]
    await reads.close()
    assert await waiting(url, queue_of(url)) == 0
    await sends.close()


async def test_what_is_not_acknowledged_is_not_lost_when_others_are(
    url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """The second of three is acknowledged, then the reader goes: the others come again."""
    sent = [str(one.id) for one in events(3) if await sends.publish([one]) == [None]]
    messages = await read_all(reads, 3)
    await reads.acknowledge([messages[1]])
    await reads.resume({})
    assert ids(await read_all(reads, 2)) == [sent[0], sent[2]]


async def test_no_more_than_a_batch_is_taken_from_the_queue(
    url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """The rest waits in RabbitMQ, and the lag says how much."""
    assert await sends.publish(events(50)) == [None] * 50
    first = await read_all(reads, 10, limit=10)
    assert len(first) == 10
    assert await waiting(url, queue_of(url)) == 40
    assert await reads.lag() == 40
    await reads.acknowledge(first)
    assert len(await read_all(reads, 10, limit=10)) == 10


async def test_a_queue_that_is_deleted_while_it_is_read_is_noticed_and_said(
    url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """RabbitMQ cancels its consumer: to wait for messages would be to wait for ever."""
    assert await reads.receive(10, wait_seconds=0.1) == []
    with capture_logs() as logs:
        async with peek(url) as channel:
            await channel.queue_delete(queue_of(url))
        with pytest.raises(ConnectionError, match="it was deleted"):
            await reads.receive(10, wait_seconds=30)
    assert [entry["queue"] for entry in logs if entry["event"] == "rabbitmq_queue_gone"] == [queue_of(url)]
    with pytest.raises(ConnectionError, match="duly brokers setup"):
        await reads.receive(10, wait_seconds=1)
    await setup(url, topics=[TOPIC], group=GROUP)
    assert await sends.publish([event("order-1")]) == [None]
    assert len(await read_all(reads, 1)) == 1


class _InMicroseconds(commands.Basic.Properties):
    """Properties with a timestamp in the year fifty thousand, as somebody sends who counts microseconds."""

    def marshal(self) -> bytes:
        """As they are on the wire."""
        return struct.pack(">HQ", self.flags["timestamp"], 1_700_000_000_000_000)


class _NoText(commands.Basic.Properties):
    """Headers with a name that is no UTF-8."""

    def marshal(self) -> bytes:
        """As they are on the wire."""
        table = b"\x02\xff\xfeS" + struct.pack(">I", 1) + b"x"
        return struct.pack(">HI", self.flags["headers"], len(table)) + table


@pytest.mark.parametrize("properties", [_InMicroseconds, _NoText])
async def test_properties_that_the_client_cannot_read_do_not_stop_the_queue(
    url: str, sends: RabbitTransport, reads: RabbitSource, properties: type[commands.Basic.Properties]
) -> None:
    """They would end its connection, and come again on the next, for ever. So the message comes without them."""
    async with peek(url) as channel:
        below = await channel.get_underlay_channel()
        await below.basic_publish(b"{}", routing_key=queue_of(url), properties=properties())
    assert await sends.publish([event("order-1")]) == [None]
    poison, good = await read_all(reads, 2, seconds=120)
    assert (poison.body, poison.topic) == (b"{}", "")
    with pytest.raises(Invalid):
        decode(poison)
    assert good.headers["cloudevents:subject"] == "order-1"


async def test_a_routing_key_that_is_no_text_does_not_stop_the_queue(
    url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """It comes with every delivery, and nobody needs it there."""

    class Publish(commands.Basic.Publish):
        def marshal(self) -> bytes:
            name = read_address(url).exchange.encode()
            return struct.pack(">HB", 0, len(name)) + name + b"\x02\xff\xfe\x00"

    async with peek(url) as channel:
        below = await channel.get_underlay_channel()
        properties = commands.Basic.Properties(headers={"duly-topic": TOPIC})
        frames: list[FrameType] = [Publish(), ContentHeader(body_size=2, properties=properties), ContentBody(b"{}")]
        await below.connection.write_queue.put(ChannelFrame.marshall(channel_number=below.number, frames=frames))
        async with asyncio.timeout(30):
            while await waiting(url, queue_of(url)) < 1:
                await asyncio.sleep(0.05)
    assert await sends.publish([event("order-1")]) == [None]
    odd, good = await read_all(reads, 2, seconds=120)
    assert odd.topic == TOPIC
    assert good.headers["cloudevents:subject"] == "order-1"


# -- a server that goes and comes ------------------------------------------------------------------------------------


async def test_what_was_confirmed_survives_a_kill_and_both_sides_come_back(
    rabbit: RabbitMQServer, url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """kill -9, and the same port again."""
    sent = [str(one.id) for one in events(10) if await sends.publish([one]) == [None]]
    first = await read_all(reads, 4, limit=4)
    await asyncio.to_thread(rabbit.kill)
    with pytest.raises(OSError, match="RabbitMQ"):
        await sends.publish(events(1))
    with pytest.raises(OSError, match="RabbitMQ"):
        await _receive_until_it_raises(reads)
    await asyncio.to_thread(rabbit.start)
    await reads.acknowledge(first)  # of a connection that is gone: they come again
    assert await sends.publish([event("order-99")]) == [None]
    found = await read_all(reads, 11)
    assert ids(found)[:10] == sent


# -- what start-up refuses -------------------------------------------------------------------------------------------


async def test_setup_makes_what_is_missing_once(url: str) -> None:
    """It says what it made, and to run it again makes nothing; before it, both sides refuse to start."""
    sends, reads = transport(url), source(url, topics=[TOPIC], group=GROUP)
    with pytest.raises(Refused, match=r"has not the exchange .*duly brokers setup"):
        await sends.check()
    with pytest.raises(Refused, match="duly brokers setup"):
        await reads.check()
    assert len(await setup(url, topics=[TOPIC], group=GROUP)) == 3
    assert await setup(url, topics=[TOPIC], group=GROUP) == []
    await sends.check()
    await reads.check()
    await sends.close()
    await reads.close()


async def test_a_topic_that_is_new_is_bound_by_the_check(url: str, sends: RabbitTransport) -> None:
    """A binding cannot be asked for; to make it again changes nothing."""
    news = event("order-1", topic="shop.news")
    [returned] = await sends.publish([news])
    assert isinstance(returned, str)
    reads = source(url, topics=[TOPIC, "shop.news"], group=GROUP)
    await reads.check()
    assert await sends.publish([news]) == [None]
    assert [message.topic for message in await read_all(reads, 1)] == ["shop.news"]
    await reads.close()


@pytest.mark.parametrize(("kind", "durable"), [("topic", False), ("fanout", True)])
async def test_an_exchange_of_another_kind_is_refused(url: str, kind: str, durable: bool) -> None:
    """One that does not survive a restart, or does not know patterns."""
    async with peek(url) as channel:
        await channel.declare_exchange(read_address(url).exchange, kind, durable=durable)
    sends = transport(url)
    with pytest.raises(Refused, match=r"inequivalent arg '(type|durable)'"):
        await sends.check()
    with pytest.raises(Refused, match=r"inequivalent arg '(type|durable)'"):
        await setup(url, topics=[TOPIC], group=GROUP)
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
    url: str, durable: bool, arguments: dict[str, bool | str | int], missing: str
) -> None:
    """RabbitMQ says what differs, and so do we."""
    await setup(url, topics=[], group=GROUP)
    async with peek(url) as channel:
        await channel.declare_queue(queue_of(url), durable=durable, arguments=dict(arguments))
    reads = source(url, topics=[TOPIC], group=GROUP)
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
    rabbit: RabbitMQServer, url: str, sends: RabbitTransport
) -> None:
    """Without the right to configure, properties cannot be compared: that is said, and no reason to stop."""
    name = f"clerk-{uuid7().hex}"
    await asyncio.to_thread(
        rabbit.evaluate,
        f'rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"secret">>, <<"test">>), '
        "rabbit_auth_backend_internal:set_permissions("
        f'<<"{name}">>, <<"/">>, <<"^$">>, <<"^nothing$">>, <<".*">>, <<"test">>).',
    )
    clerk = transport(url.replace(f"{USER}:{PASSWORD}", f"{name}:secret"))
    with capture_logs() as logs:
        await clerk.check()
    assert "rabbitmq_unchecked" in [entry["event"] for entry in logs]
    [answer] = await clerk.publish([event("a")])
    assert isinstance(answer, Later)
    assert name in answer.reason
    await clerk.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("amqp://user:hush@host/?exchnge=x", "no option 'exchnge'"),
        ("amqp://user:hush@host/?queue=stream", "classic or quorum"),
        ("amqp://user:hush@host/?unroutable=ignore", "error or drop"),
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
