"""Kafka itself: what its transport and its source do that no other broker's does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import murmur2
from structlog.testing import capture_logs

from duly.brokers import Later, kafka
from duly.brokers.kafka import KafkaSource, KafkaTransport
from duly.brokers.kafka.checking import TopicState, judge
from duly.brokers.kafka.reading import MAX_BATCH_BYTES
from duly.errors import Refused
from tests.brokers.kafka_tools import (
    answers_to,
    committed,
    deliver,
    drop_topic,
    event,
    eventually,
    first_batch,
    fresh,
    make_topic,
    reading,
    receive,
    topics_of,
)
from tests.brokers.server_kafka import KafkaForeign, KafkaServer
from tests.brokers.servers import Raw

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(kafka_server: KafkaServer) -> KafkaServer:
    return kafka_server


@pytest_asyncio.fixture
async def transport(server: KafkaServer) -> AsyncIterator[KafkaTransport]:
    made = kafka.transport(server.url)
    yield made
    await made.close()


def numbers(messages: Sequence[Any]) -> list[int]:
    return [json.loads(message.body)["n"] for message in messages]


async def until_away(source: KafkaSource) -> bool:
    try:
        await source.release(await source.receive(10, wait_seconds=0.5))
    except OSError:
        return True
    return False


# -- publishing ------------------------------------------------------------------------------------------------------


async def test_an_event_is_keyed_by_its_aggregate_and_lies_where_a_java_client_would_put_it(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    topic = await make_topic(server, fresh(), partitions=7)
    stranger = KafkaForeign(server)
    await stranger.watch(topic)
    sent = [event(n, topic, aggregate=f"o-{n % 5}") for n in range(20)]
    for one in sent:
        await deliver(transport, one)
    seen = await stranger.read(20)
    await stranger.close()
    by_id = {raw.headers["ce_id"]: raw for raw in seen}
    for one in sent:
        raw = by_id[str(one.id)]
        assert raw.key == one.aggregate_id == raw.headers["ce_subject"] == raw.headers["ce_partitionkey"]
        assert raw.headers["ce_specversion"] == "1.0"
        assert raw.headers["content-type"] == "application/json"
        assert raw.headers["ce_correlationid"] == "c-1"
        assert json.loads(raw.body) == one.payload
    async with reading(server, [topic], group="placement") as source:
        for message in await receive(source, 20):
            expected = murmur2(message.headers["ce_subject"].encode(), 7)
            assert message.position.startswith(f"partition {expected},")


async def test_the_producer_is_idempotent(server: KafkaServer, transport: KafkaTransport) -> None:
    topic = await make_topic(server, fresh())
    await deliver(transport, event(1, topic))
    batch = first_batch(server, topic)
    assert batch["magic"] == 2
    assert batch["producer"] >= 0  # one that is not idempotent has none: -1


@pytest.mark.parametrize(
    "option", ["acks=1", "enable.idempotence=false", "enable.auto.commit=true", "plugin.library.paths=x", "group.id=a"]
)
def test_what_order_and_durability_rest_on_cannot_be_set(option: str) -> None:
    with pytest.raises(Refused, match=option.partition("=")[0]):
        kafka.transport(f"kafka://127.0.0.1:9092?{option}")


@pytest.mark.parametrize("url", ["kafka://", "kafka://u:s3cret@", "kafka://a b", "kafka://u:s3cret@h:1?partitions=0"])
def test_an_address_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(Refused) as refused:
        kafka.transport(url)
    assert "s3cret" not in str(refused.value)


async def test_a_missing_topic_makes_its_events_wait_and_is_not_created_by_asking(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    here, missing = await make_topic(server, fresh()), fresh("missing")
    for _ in range(2):
        waits, came = await transport.publish([event(1, missing), event(1, here)])
        assert isinstance(waits, Later)
        assert missing in waits.reason
        assert came is None
    assert missing not in await topics_of(server)
    assert await kafka.setup(server.url, topics=[missing], group="duly") == [
        f"created the topic {missing}: 3 partitions, 1 replicas"
    ]
    assert await kafka.setup(server.url, topics=[missing], group="duly") == []
    await deliver(transport, event(1, missing))


async def test_a_topic_that_is_deleted_makes_its_events_wait_and_the_others_go_on(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    here, gone = await make_topic(server, fresh()), await make_topic(server, fresh("gone"))
    await deliver(transport, event(1, gone), event(1, here))
    await drop_topic(server, gone)
    waits, came = await transport.publish([event(2, gone), event(2, here)])
    assert isinstance(waits, Later)
    assert came is None
    assert gone not in await topics_of(server)
    await make_topic(server, gone)

    async def publish_again() -> Any:
        return await transport.publish([event(2, gone), event(3, here)])

    await eventually(publish_again, [None, None])


async def test_a_topic_that_kafka_cannot_have_is_its_events_error(transport: KafkaTransport) -> None:
    [answer] = await transport.publish([event(1, "shop:orders")])
    assert isinstance(answer, str)
    assert "shop:orders" in answer


async def test_a_message_that_is_too_large_is_that_events_error(server: KafkaServer, transport: KafkaTransport) -> None:
    topic = await make_topic(server, fresh(), config={"max.message.bytes": "20000"})
    wave = [event(n, topic, aggregate=f"o-{n}", text="x" * (5_000 if n != 3 else 60_000)) for n in range(6)]
    answers = await answers_to(transport, wave)  # together the small ones are too large as well: as one batch
    assert [type(answer) for answer in answers] == [str if n == 3 else type(None) for n in range(6)]
    [answer] = await answers_to(transport, [event(11, topic, text="x" * 1_100_000)])  # the client itself refuses this
    assert isinstance(answer, str)
    assert "SIZE" in answer


async def test_the_producers_queue_is_bounded_and_a_larger_wave_gets_through(server: KafkaServer) -> None:
    topic = await make_topic(server, fresh())
    made = kafka.transport(f"{server.url}&queue.buffering.max.messages=50")
    await deliver(made, event(0, topic))
    assert await answers_to(made, [event(n, topic, aggregate=f"o-{n}") for n in range(200)]) == [None] * 200
    await made.close()


async def test_who_no_longer_waits_for_a_wave_leaves_nothing_behind(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    topic = await make_topic(server, fresh())
    await deliver(transport, event(0, topic))
    server.pause()
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await transport.publish([event(n, topic, aggregate=f"o-{n}") for n in range(100)])
    finally:
        server.resume()
    await deliver(transport, event(1, topic))
    assert len(transport._sender._producer or []) == 0


async def test_what_nobody_waits_for_any_more_is_not_sent_after_all(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    """The relay gave up while the topic was asked for; by now another relay may have sent it, and what follows it."""
    topic = await make_topic(server, fresh())
    stranger = KafkaForeign(server)
    await stranger.watch(topic)
    await deliver(transport, event(0, await make_topic(server, fresh())))
    server.pause()
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await transport.publish([event(1, topic)])
    finally:
        server.resume()
    await deliver(transport, event(2, topic))  # behind it, in the same thread
    assert numbers(await stranger.read(2, seconds=2)) == [2]
    await stranger.close()


async def test_a_client_that_cannot_be_started_is_an_outage_and_no_events_error() -> None:
    """A file of certificates that is being replaced, say: at the start it is refused, later it is waited for."""
    url = "kafka+ssl://127.0.0.1:1?ssl.ca.location=nowhere.pem"
    made, source = kafka.transport(url), kafka.source(url, topics=["a"], group="a")
    with pytest.raises(Refused, match="cannot be started"):
        await made.check()
    with pytest.raises(ConnectionError, match="cannot be started"):
        await made.publish([event(1, "a")])
    with pytest.raises(ConnectionError, match="cannot be started"):
        await source.receive(1, wait_seconds=0)
    await made.close()
    await source.close()


# -- reading ---------------------------------------------------------------------------------------------------------


async def test_offsets_are_committed_only_by_an_acknowledgement(server: KafkaServer, transport: KafkaTransport) -> None:
    topic = await make_topic(server, fresh())
    for n in range(10):
        await deliver(transport, event(n, topic))
    async with reading(server, [topic], group="commits") as source:
        assert numbers(await receive(source, 10)) == list(range(10))
    assert await committed(server, "commits", topic) < 0
    async with reading(server, [topic], group="commits") as source:
        found = await receive(source, 10)
        await source.acknowledge(found[:4])
        await eventually(lambda: committed(server, "commits", topic), 4)
    async with reading(server, [topic], group="commits") as source:
        assert numbers(await receive(source, 6)) == list(range(4, 10))
        assert await committed(server, "commits", topic) == 4


async def test_what_was_not_acknowledged_comes_again_in_the_same_order(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    topic = await make_topic(server, fresh(), partitions=3)
    await deliver(transport, *[event(n, topic, aggregate=f"o-{n}") for n in range(30)])
    async with reading(server, [topic], group="again") as source:
        first = await receive(source, 30)
        await source.release(first)
        second = await receive(source, 30)  # given back
        third = await receive(source, 30)  # and neither given back nor acknowledged
        await source.resume({})
        fourth = await receive(source, 30)
        for found in (second, third, fourth):
            for partition in range(3):
                place = f"partition {partition},"
                assert [m.position for m in found if m.position.startswith(place)] == [
                    m.position for m in first if m.position.startswith(place)
                ]


async def test_a_batch_that_nobody_waits_for_any_more_is_not_lost(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    topic = await make_topic(server, fresh())
    async with reading(server, [topic], group="cancelled") as source:
        assert await source.receive(10, wait_seconds=0.1) == []
        for n in range(20):
            waiting = asyncio.create_task(source.receive(10, wait_seconds=30))
            await deliver(transport, event(n, topic))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert numbers(await receive(source, 20)) == list(range(20))


async def test_a_first_message_is_not_kept_waiting_for_a_second(server: KafkaServer, transport: KafkaTransport) -> None:
    topic = await make_topic(server, fresh())
    async with reading(server, [topic], group="prompt") as source:
        await deliver(transport, event(1, topic))
        await receive(source, 1, acknowledge=True)
        await deliver(transport, event(2, topic))
        began = time.monotonic()
        assert numbers(await source.receive(1_000, wait_seconds=60)) == [2]
        assert time.monotonic() - began < 30


async def test_a_batch_is_bounded_in_bytes_and_so_is_what_is_fetched_ahead(server: KafkaServer) -> None:
    topic = await make_topic(server, fresh())
    stranger = KafkaForeign(server)
    await stranger.write(topic, "x", [Raw({"ce_id": str(n)}, b"x" * 900_000) for n in range(40)])
    async with reading(server, [topic], group="large") as source:
        seen = 0
        while seen < 40:
            batch = await source.receive(1_000, wait_seconds=5)
            assert sum(len(message.body) for message in batch) <= MAX_BATCH_BYTES + 900_000
            await source.acknowledge(batch)
            seen += len(batch)
    assert seen == 40


async def test_a_message_comes_as_it_is_whatever_it_is(server: KafkaServer) -> None:
    topic = await make_topic(server, fresh())
    stranger = KafkaForeign(server)
    await stranger.write(topic, "x", [Raw({}, b""), Raw({"Ce_Type": "\x00"}, b"\xff\x00", key="k")])
    async with reading(server, [topic], group="poison") as source:
        empty, odd = await receive(source, 2)
    assert (empty.topic, empty.body, dict(empty.headers)) == (topic, b"", {})
    assert (odd.body, dict(odd.headers), odd.key) == (b"\xff\x00", {"ce_type": "\x00"}, "k")
    assert odd.position == "partition 0, offset 1"


async def test_a_missing_topic_does_not_stop_the_others_and_is_read_when_it_comes(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    here, later = await make_topic(server, fresh()), fresh("later")
    await deliver(transport, event(1, here))
    async with reading(server, [here, later], group="later", options="&topic.metadata.refresh.interval.ms=1000") as it:
        assert numbers(await receive(it, 1, acknowledge=True)) == [1]
        assert later not in await topics_of(server)
        await make_topic(server, later)
        await deliver(transport, event(2, later))
        assert numbers(await receive(it, 1, acknowledge=True)) == [2]
        with pytest.raises(Refused, match=r"no topic shop\.never: duly brokers setup"):
            await kafka.source(server.url, topics=[here, "shop.never"], group="later").check()


async def test_a_topic_made_anew_is_read_from_its_beginning(server: KafkaServer, transport: KafkaTransport) -> None:
    topic = await make_topic(server, fresh())
    for n in range(3):
        await deliver(transport, event(n, topic))
    async with reading(server, [topic], group="anew") as source:
        assert numbers(await receive(source, 3, acknowledge=True)) == [0, 1, 2]
        await eventually(source.lag, 0)
        await drop_topic(server, topic)
        await make_topic(server, topic)
        for n in range(10, 16):  # more than there were: the old position exists here too
            await deliver(transport, event(n, topic))
        await source.lag()
        assert numbers(await receive(source, 6, acknowledge=True)) == list(range(10, 16))


async def test_lag_counts_what_the_group_has_not_committed_and_tells_of_what_was_thrown_away(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    topic = await make_topic(server, fresh(), partitions=2)
    async with reading(server, [topic], group="lag") as source:
        assert await source.lag() == 0
        await deliver(transport, *[event(n, topic, aggregate=f"o-{n}") for n in range(20)])
        assert await source.lag() == 20
        found = await receive(source, 20)
        assert await source.lag() == 20
        await source.acknowledge([m for m in found if m.position.startswith("partition 0,")][:2])
        await eventually(source.lag, 18)
        cut = TopicPartition(topic, 0, 5)
        admin = AdminClient(server.client)
        await asyncio.wrap_future(admin.delete_records([cut])[cut])
        with capture_logs() as logs:
            assert await source.lag() == 15
            assert await source.lag() == 15
        assert [(one["event"], one["messages"]) for one in logs] == [("kafka_messages_missing", 3)]  # told once


# -- the group -------------------------------------------------------------------------------------------------------


async def test_who_closes_leaves_the_group_at_once(server: KafkaServer, transport: KafkaTransport) -> None:
    topic = await make_topic(server, fresh(), partitions=2)
    await deliver(transport, *[event(n, topic, aggregate=f"o-{n}") for n in range(10)])
    slow = "&session.timeout.ms=300000&max.poll.interval.ms=300000"
    async with reading(server, [topic], group="leave", options=slow) as second:
        first = kafka.source(f"{server.url}{slow}", topics=[topic], group="leave")
        assert len(await receive(first, 10)) == 10
        await first.close()
        assert len(await receive(second, 10, seconds=100)) == 10


async def test_a_zombie_cannot_move_the_groups_offset_and_goes_on_when_it_wakes(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    topic = await make_topic(server, fresh())
    for n in range(6):
        await deliver(transport, event(n, topic))
    short = "&session.timeout.ms=2000&max.poll.interval.ms=2000&heartbeat.interval.ms=200"
    async with (
        reading(server, [topic], group="zombie", options=short) as zombie,
        reading(server, [topic], group="zombie", options=short) as other,
    ):
        taken = await receive(zombie, 6)
        found = await receive(other, 6, acknowledge=True)  # the zombie does not read: it is out
        assert numbers(found) == numbers(taken)
        await eventually(lambda: committed(server, "zombie", topic), 6)
        await zombie.acknowledge(taken[:2])
        await deliver(transport, event(6, topic))
        assert numbers(await receive(other, 1, acknowledge=True)) == [6]
        await eventually(lambda: committed(server, "zombie", topic), 7)
        await other.close()
        await deliver(transport, event(7, topic))
        assert numbers(await receive(zombie, 1, acknowledge=True)) == [7]


# -- start-up checks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cleanup.policy": "compact"}, "compact keeps only the last event"),
        ({"cleanup.policy": "compact,delete"}, "compact keeps only the last event"),
        ({"retention.ms": "3600000"}, "less than a day"),
        ({"unclean.leader.election.enable": "true"}, "loses acknowledged messages"),
    ],
)
async def test_a_topic_that_loses_events_is_refused(
    server: KafkaServer, settings: dict[str, str], sentence: str
) -> None:
    topic = await make_topic(server, fresh(), config=settings)
    with pytest.raises(Refused, match=sentence):
        await kafka.source(server.url, topics=[topic], group="duly").check()


async def test_what_setup_makes_passes_the_check_and_one_broker_is_told(server: KafkaServer) -> None:
    topic = fresh()
    await kafka.setup(server.url, topics=[topic], group="duly")
    with capture_logs() as logs:
        await kafka.source(server.url, topics=[topic], group="duly").check()
    assert [one["reason"] for one in logs] == ["one broker, one replica: what it acknowledged is lost with its disk"]


@pytest.mark.parametrize(
    ("replicas", "in_sync", "brokers", "refused", "told"),
    [(1, 1, 3, 1, 0), (3, 1, 3, 1, 0), (2, 1, 2, 1, 0), (3, 2, 3, 0, 0), (3, 3, 3, 0, 1), (1, 1, 1, 0, 1)],
)
def test_replicas_are_judged(replicas: int, in_sync: int, brokers: int, refused: int, told: int) -> None:
    faults, warnings = judge(TopicState("t", replicas, {"min.insync.replicas": str(in_sync)}), brokers=brokers)
    assert (len(faults), len(warnings)) == (refused, told)


# -- a broker that comes and goes (last: it is the same server) ------------------------------------------------------


async def test_a_broker_that_is_paused_is_an_outage_and_no_events_error(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    topic = await make_topic(server, fresh())
    await deliver(transport, event(1, topic))
    async with reading(server, [topic], group="paused") as source:
        assert numbers(await receive(source, 1, acknowledge=True)) == [1]
        server.pause()
        try:
            async with asyncio.timeout(29):  # what the relay gives
                with pytest.raises((OSError, TimeoutError)):
                    await transport.publish([event(2, topic), event(2, topic, aggregate="o-2")])
        finally:
            server.resume()
        await deliver(transport, event(3, topic))
        found: list[int] = []
        while 3 not in found:
            found += numbers(await receive(source, 1, acknowledge=True))


async def test_a_broker_that_is_killed_comes_back_with_all_it_acknowledged(
    server: KafkaServer, transport: KafkaTransport
) -> None:
    topic = await make_topic(server, fresh())
    async with reading(server, [topic], group="killed") as source:
        await deliver(transport, event(1, topic))
        assert numbers(await receive(source, 1, acknowledge=True)) == [1]
        await eventually(lambda: committed(server, "killed", topic), 1)
        await deliver(transport, event(2, topic))
        await asyncio.to_thread(server.kill)
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            await transport.publish([event(3, topic)])
        assert time.monotonic() - began < 29
        await eventually(lambda: until_away(source), True)
        await asyncio.to_thread(server.start)

        await deliver(transport, event(3, topic))
        found: list[int] = []
        async with asyncio.timeout(120):
            while found[-1:] != [3]:
                try:
                    batch = await source.receive(10, wait_seconds=0.5)
                except OSError:
                    continue
                await source.acknowledge(batch)
                found += numbers(batch)
        assert found == [2, 3]


async def test_closing_takes_seconds_while_the_broker_is_away(server: KafkaServer) -> None:
    topic = await make_topic(server, fresh())
    transport = kafka.transport(server.url)
    source = kafka.source(server.url, topics=[topic], group="closing")
    await deliver(transport, event(1, topic))
    await receive(source, 1, acknowledge=True)
    server.pause()
    try:
        async with asyncio.timeout(30):
            await source.close()
            await transport.close()
    finally:
        server.resume()
    await asyncio.to_thread(server.wait_until_serving)  # who was silent for so long is let in anew
