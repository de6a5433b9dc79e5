"""What is RabbitMQ's own: confirms, returns, alarms, one reader at a time, and what its start-up checks refuse."""

from __future__ import annotations

import asyncio
import json
import struct
import tracemalloc

import aio_pika
import pytest
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
from duly.errors import Invalid
from duly.ids import uuid7
from tests.brokers.rabbit_tools import (
    GROUP,
    TOPIC,
    Wire,
    event,
    events,
    ids,
    peek,
    queue_of,
    read_all,
    take_all,
    waiting,
)
from tests.brokers.server_rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(900)]


# -- publishing ------------------------------------------------------------------------------------------------------


async def test_an_event_is_persistent_and_goes_by_its_type_with_its_attributes_as_headers(
    rabbit_url: str, sends: RabbitTransport
) -> None:
    """Whoever binds the type to the exchange gets it, as CloudEvents says it looks on AMQP."""
    placed, paid = event("order-1", total=5), event("order-2", type_="order.paid")
    async with peek(rabbit_url) as channel:
        queue = await channel.declare_queue(f"audit.{uuid7().hex}", durable=True)
        await queue.bind(read_address(rabbit_url).exchange, routing_key="*.placed")
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


async def test_publishing_waits_for_the_confirm(rabbit_url: str, sends: RabbitTransport) -> None:
    """Sent is not enough."""
    async with Wire(rabbit_url) as wire:
        behind = transport(wire.url)
        assert await behind.publish([event("order-0")]) == [None]
        wire.answering.clear()
        task = asyncio.create_task(behind.publish(events(3)))
        async with asyncio.timeout(60):
            while await waiting(rabbit_url, queue_of(rabbit_url)) < 4:
                assert not task.done()
        assert not task.done()
        wire.answering.set()
        assert await task == [None, None, None]
        await behind.close()


async def test_what_nobody_takes_waits_until_somebody_does(rabbit_url: str, sends: RabbitTransport) -> None:
    """RabbitMQ returns it; the others are through. Who wants it otherwise says so in the address."""
    lonely = event("order-2", topic="nobody.listens")
    answers = await sends.publish([event("order-1"), lonely, event("order-3")])
    assert (answers[0], answers[2]) == (None, None)
    assert isinstance(answers[1], Later)
    assert "nobody.listens" in answers[1].reason
    assert "duly brokers setup" in answers[1].reason
    drops = transport(f"{rabbit_url}&unroutable=drop")
    assert await drops.publish([lonely]) == [None]
    await drops.close()


@pytest.mark.parametrize("others", [3, 100])
async def test_a_message_that_is_too_large_is_its_own_error_and_the_others_are_through(
    rabbit: RabbitMQServer, rabbit_url: str, sends: RabbitTransport, others: int
) -> None:
    """RabbitMQ closes the channel for it, under all of them; and hangs up if one is written to it after that."""
    await asyncio.to_thread(rabbit.evaluate, "application:set_env(rabbit, max_message_size, 20000).")
    try:
        large = event("b", text="x" * 30_000)
        first, refused, *rest = await sends.publish([event("a"), large, *(event(f"o{n}") for n in range(1, others))])
        assert [first, *rest] == [None] * others
        assert isinstance(refused, str)
        assert "larger than" in refused
    finally:
        await asyncio.to_thread(rabbit.evaluate, "application:set_env(rabbit, max_message_size, 134217728).")


async def test_a_full_queue_makes_events_wait_and_is_no_attempt(rabbit_url: str, sends: RabbitTransport) -> None:
    """A nack says that somebody could not take it now."""
    async with peek(rabbit_url) as channel:
        arguments: FieldTable = {"x-max-length": 1, "x-overflow": "reject-publish"}
        queue = await channel.declare_queue(f"small.{uuid7().hex}", durable=True, arguments=arguments)
        await queue.bind(read_address(rabbit_url).exchange, routing_key="small.*")
        first, second = event("a", type_="small.one"), event("b", type_="small.two")
        assert await sends.publish([first]) == [None]
        [answer, other] = await sends.publish([second, event("c")])
        assert isinstance(answer, Later)
        assert "full" in answer.reason
        assert other is None
        await queue.delete(if_empty=False)


async def test_a_queue_that_is_stuck_holds_up_its_own_events_and_no_others(
    rabbit: RabbitMQServer, rabbit_url: str, sends: RabbitTransport
) -> None:
    """No confirm comes for what goes there, also when that is the first thing on a new line, or the only one."""
    stuck = f"stuck.{uuid7().hex}"
    found = f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{stuck}">>))'
    async with peek(rabbit_url) as channel:
        queue = await channel.declare_queue(stuck, durable=True)
        await queue.bind(read_address(rabbit_url).exchange, routing_key="stuck.*")
        await asyncio.to_thread(rabbit.evaluate, f"{found}, sys:suspend(amqqueue:get_pid(Q)).")
        try:
            for count in (2, 1):  # on a new line, and again on the same
                answer, *others = await sends.publish([event("a", type_="stuck.one"), *events(count - 1)])
                assert isinstance(answer, Later)
                assert "stuck" in answer.reason
                assert others == [None] * (count - 1)
        finally:
            await asyncio.to_thread(rabbit.evaluate, f"{found}, sys:resume(amqqueue:get_pid(Q)).")
        assert await sends.publish([event("a", type_="stuck.one")]) == [None]
        await queue.delete(if_empty=False)


async def test_an_exchange_that_goes_away_is_an_outage_that_says_what_to_do(
    rabbit_url: str, sends: RabbitTransport
) -> None:
    """No event is to blame; and once it is back, so are we."""
    assert await sends.publish([event("a")]) == [None]
    async with peek(rabbit_url) as channel:
        await channel.exchange_delete(read_address(rabbit_url).exchange)
    with pytest.raises(ConnectionError, match="duly brokers setup"):
        await sends.publish(events(2))
    await setup(rabbit_url, topics=[TOPIC], group=GROUP)
    assert await sends.publish(events(2)) == [None, None]


async def test_a_line_that_is_cut_before_the_confirm_is_an_outage_and_the_event_is_sent_again(
    rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """Whether it came is not known: the same id comes twice, and the inbox knows it."""
    one = event("order-1")
    async with Wire(rabbit_url) as wire:
        behind = transport(wire.url)
        assert await behind.publish([event("order-0")]) == [None]
        wire.answering.clear()
        task = asyncio.create_task(behind.publish([one]))
        async with asyncio.timeout(60):
            while await waiting(rabbit_url, queue_of(rabbit_url)) < 2:
                await asyncio.sleep(0.05)
        wire.cut()
        with pytest.raises(ConnectionError, match="before it confirmed"):
            await task
        wire.answering.set()
        assert await behind.publish([one]) == [None]
        await behind.close()
    assert ids(await read_all(reads, 3))[1:] == [str(one.id), str(one.id)]


async def test_an_alarm_is_an_outage_with_bounds_and_ends_with_it(
    rabbit: RabbitMQServer, rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """RabbitMQ stops reading from whoever publishes: we wait, send no event to find out, and open no second line."""
    count_lines = "length(rabbit_networking:connections())."
    before = int(await asyncio.to_thread(rabbit.evaluate, count_lines))
    await asyncio.to_thread(rabbit.evaluate, "vm_memory_monitor:set_vm_memory_high_watermark(0).")
    try:
        assert "memory" in await asyncio.to_thread(rabbit.evaluate, "rabbit_alarm:get_alarms().")  # it is in force
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
    assert sorted(ids(await read_all(reads, 20))) == sorted(str(one.id) for one in batch)
    assert await waiting(rabbit_url, queue_of(rabbit_url)) == 0


async def test_a_server_that_is_frozen_is_an_outage_and_nobody_is_cancelled(
    rabbit: RabbitMQServer, rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """The client ends what waits for a lost connection by CancelledError; ours see a lost connection."""
    impatient = source(f"{rabbit_url}&heartbeat=1", topics=[TOPIC], group=GROUP)
    assert await impatient.receive(10, wait_seconds=0.1) == []
    assert await sends.publish([event("order-0")]) == [None]
    rabbit.pause()
    try:
        waits = asyncio.create_task(_receive_until_it_raises(impatient))
        with pytest.raises(TimeoutError, match=r"confirm|answer"):
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


async def test_large_messages_do_not_fill_the_memory_and_come_in_order(
    rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """RabbitMQ holds back by the number alone: forty of a megabyte are forty, and no more than eight are ours."""
    large, small = "x" * 1_000_000, 300
    sent = []
    for number in range(40 + small):
        one = event("order-1", number=number, text=large if number < 40 else "")
        assert await sends.publish([one]) == [None]
        sent.append(str(one.id))
    found: list[str] = []
    most = 0
    tracemalloc.start()
    try:
        async with asyncio.timeout(120):
            while len(found) < len(sent):
                batch = await reads.receive(1_000, wait_seconds=1)
                most = max(most, len(batch))
                found += ids(batch)
                await reads.acknowledge(batch)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == sent
    assert peak < 30_000_000, "what is being stored, and as much again that came meanwhile"
    assert most >= 50, "where they are small again, many come at once"
    assert await waiting(rabbit_url, queue_of(rabbit_url)) == 0


async def test_of_two_readers_one_reads_and_the_other_takes_over_in_order(
    rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """A single active consumer: order survives, and a reader that leaves gives its turn away at once."""
    other = source(rabbit_url, topics=[TOPIC], group=GROUP)
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
async def test_what_is_given_back_comes_again_in_its_place(rabbit_url: str, kind: str) -> None:
    """The batch, and whatever was already on its way behind it."""
    url = f"{rabbit_url}&queue={kind}"
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
    rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """The second of three is acknowledged, then the reader goes: the others come again."""
    sent = [str(one.id) for one in events(3) if await sends.publish([one]) == [None]]
    messages = await read_all(reads, 3)
    await reads.acknowledge([messages[1]])
    await reads.resume({})
    assert ids(await read_all(reads, 2)) == [sent[0], sent[2]]


async def test_no_more_than_a_batch_is_taken_from_the_queue(
    rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """The rest waits in RabbitMQ, and the lag says how much."""
    assert await sends.publish(events(50)) == [None] * 50
    first = await read_all(reads, 10, limit=10)
    assert len(first) == 10
    assert await waiting(rabbit_url, queue_of(rabbit_url)) == 40
    assert await reads.lag() == 40
    await reads.acknowledge(first)
    assert len(await read_all(reads, 10, limit=10)) == 10


async def test_a_queue_that_is_deleted_while_it_is_read_is_noticed_and_said(
    rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """RabbitMQ cancels its consumer: to wait for messages would be to wait for ever."""
    assert await reads.receive(10, wait_seconds=0.1) == []
    with capture_logs() as logs:
        async with peek(rabbit_url) as channel:
            await channel.queue_delete(queue_of(rabbit_url))
        with pytest.raises(ConnectionError, match="it was deleted"):
            await reads.receive(10, wait_seconds=30)
    assert [entry["queue"] for entry in logs if entry["event"] == "rabbitmq_queue_gone"] == [queue_of(rabbit_url)]
    with pytest.raises(ConnectionError, match="duly brokers setup"):
        await reads.receive(10, wait_seconds=1)
    await setup(rabbit_url, topics=[TOPIC], group=GROUP)
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
    rabbit_url: str, sends: RabbitTransport, reads: RabbitSource, properties: type[commands.Basic.Properties]
) -> None:
    """They would end its connection, and come again on the next, for ever. So the message comes without them."""
    async with peek(rabbit_url) as channel:
        below = await channel.get_underlay_channel()
        await below.basic_publish(b"{}", routing_key=queue_of(rabbit_url), properties=properties())
    assert await sends.publish([event("order-1")]) == [None]
    poison, good = await read_all(reads, 2, seconds=120)
    assert (poison.body, poison.topic) == (b"{}", "")
    with pytest.raises(Invalid):
        decode(poison)
    assert good.headers["cloudevents:subject"] == "order-1"


async def test_a_routing_key_that_is_no_text_does_not_stop_the_queue(
    rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
) -> None:
    """It comes with every delivery, and nobody needs it there."""

    class Publish(commands.Basic.Publish):
        def marshal(self) -> bytes:
            name = read_address(rabbit_url).exchange.encode()
            return struct.pack(">HB", 0, len(name)) + name + b"\x02\xff\xfe\x00"

    async with peek(rabbit_url) as channel:
        below = await channel.get_underlay_channel()
        properties = commands.Basic.Properties(headers={"duly-topic": TOPIC})
        frames: list[FrameType] = [Publish(), ContentHeader(body_size=2, properties=properties), ContentBody(b"{}")]
        await below.connection.write_queue.put(ChannelFrame.marshall(channel_number=below.number, frames=frames))
        async with asyncio.timeout(30):
            while await waiting(rabbit_url, queue_of(rabbit_url)) < 1:
                await asyncio.sleep(0.05)
    assert await sends.publish([event("order-1")]) == [None]
    odd, good = await read_all(reads, 2, seconds=120)
    assert odd.topic == TOPIC
    assert good.headers["cloudevents:subject"] == "order-1"


# -- a server that goes and comes ------------------------------------------------------------------------------------


async def test_what_was_confirmed_survives_a_kill_and_both_sides_come_back(
    rabbit: RabbitMQServer, rabbit_url: str, sends: RabbitTransport, reads: RabbitSource
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
