"""NATS itself: what its transport and its source do that no other broker's does."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from duly import failpoints
from duly.brokers import Later, nats, wire
from duly.brokers.nats import NatsSource, NatsTransport
from duly.brokers.nats_streams import cover, covers
from duly.errors import Refused
from tests.brokers.nats_tools import add_stream, event, jetstream, receive, remove_streams, send_raw, write_certificate
from tests.brokers.server_nats import NatsServer

pytestmark = pytest.mark.brokers
TOPICS = ["shop.orders"]


@pytest.fixture(scope="module")
def only_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"), more="max_payload: 8MB")
    server.start()
    yield server
    server.close()


@pytest_asyncio.fixture
async def server(only_server: NatsServer) -> NatsServer:
    await remove_streams(only_server.url)
    return only_server


@pytest_asyncio.fixture
async def transport(server: NatsServer) -> AsyncIterator[NatsTransport]:
    made = nats.transport(server.url)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def source(server: NatsServer) -> AsyncIterator[NatsSource]:
    made = nats.source(server.url, TOPICS, "duly")
    yield made
    await made.close()


def numbers(messages: Any) -> list[int]:
    return [json.loads(message.body)["n"] for message in messages]


def missing() -> float:
    return REGISTRY.get_sample_value("duly_messages_missing_total", {"via": "nats"}) or 0.0


# -- publishing ------------------------------------------------------------------------------------------------------


async def test_setup_makes_one_stream_on_disk_and_then_nothing(server: NatsServer, transport: NatsTransport) -> None:
    assert await nats.setup(server.url, TOPICS, "duly") == ["stream duly created, for duly.>"]
    assert await nats.setup(server.url, TOPICS, "duly") == []
    await transport.check()


async def test_setup_adds_what_no_stream_takes(server: NatsServer) -> None:
    await add_stream(server.url, "duly", ["duly.shop.>"])
    await add_stream(server.url, "other", ["duly.bank.ledger.>"])
    made = await nats.setup(server.url, ["shop.orders", "bank.ledger", "news"], "duly")
    assert made == ["stream duly takes duly.news.>, too"]
    with pytest.raises(Refused, match="made no stream"):
        await nats.setup(server.url, ["bank"], "duly")  # a part of it is the other stream's


async def test_an_event_arrives_as_a_cloudevent_and_a_repetition_is_dropped(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    await add_stream(server.url)
    sent = [event(n) for n in range(3)]
    assert await transport.publish(sent) == [None, None, None]
    assert await transport.publish(sent[1:]) == [None, None]
    found = await receive(source, 3)
    assert numbers(found) == [0, 1, 2]
    assert [wire.decode(message) for message in found] == sent
    assert found[0].headers["nats-msg-id"] == str(sent[0].id)
    assert await source.receive(10, wait_seconds=0) == []


async def test_a_topic_without_a_stream_waits_and_the_others_go(server: NatsServer, transport: NatsTransport) -> None:
    await add_stream(server.url, subjects=["duly.shop.orders.>"])
    answers = await transport.publish([event(1, topic="news"), event(1), event(1, topic="a..b")])
    assert isinstance(answers[0], Later)
    assert "duly brokers setup" in answers[0].reason
    assert answers[1] is None
    assert isinstance(answers[2], str)
    assert "empty" in answers[2]


async def test_a_full_stream_makes_events_wait(server: NatsServer, transport: NatsTransport) -> None:
    await add_stream(server.url, max_msgs=2, discard=DiscardPolicy.NEW)
    await transport.check()
    answers = await transport.publish([event(n, aggregate=str(n)) for n in range(3)])
    assert answers[:2] == [None, None]
    assert isinstance(answers[2], Later)
    assert "maximum" in answers[2].reason


async def test_an_event_too_large_fails_alone(server: NatsServer, transport: NatsTransport) -> None:
    await add_stream(server.url, max_msg_size=5_000)
    answers = await transport.publish([event(1), event(2, text="x" * 6_000), event(3, text="x" * 9_000_000), event(4)])
    assert answers[0] is None
    assert answers[3] is None
    assert isinstance(answers[1], str)
    assert isinstance(answers[2], str)
    assert "max_payload" in answers[2]


async def test_a_server_that_is_away_is_an_outage_and_comes_back(server: NatsServer, transport: NatsTransport) -> None:
    await add_stream(server.url)
    assert await transport.publish([event(1)]) == [None]
    for end in (server.stop, server.kill):
        end()
        with pytest.raises(OSError, match="NATS"):
            await transport.publish([event(2)])
        server.start()
        assert await transport.publish([event(3)]) == [None]


async def test_a_paused_server_is_an_outage_within_its_bound(
    server: NatsServer, transport: NatsTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "ACK_SECONDS", 0.5)
    await add_stream(server.url)
    assert await transport.publish([event(1)]) == [None]
    server.pause()
    try:
        async with asyncio.timeout(30):
            with pytest.raises(TimeoutError, match="acknowledged nothing"):
                await transport.publish([event(n, text="x" * 200_000) for n in range(100)])  # more than a socket takes
    finally:
        server.resume()
    assert await transport.publish([event(3)]) == [None]


async def test_a_lost_acknowledgement_is_an_outage_and_what_was_sent_is_there_once(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    await add_stream(server.url)
    assert await transport.publish([event(0)]) == [None]
    sent = [event(n) for n in range(1, 20)]
    failpoints.arm(f"transport.sent=cut:{server.port}")
    server.pause()  # it is sent them, and says nothing before nobody hears it
    try:
        with pytest.raises(ConnectionError):
            await transport.publish(sent)
    finally:
        server.resume()
        failpoints.arm("")
    assert numbers(await receive(source, 20)) == list(range(20))
    assert await transport.publish(sent) == [None] * 19
    assert await source.receive(100, wait_seconds=0) == []


# -- receiving -------------------------------------------------------------------------------------------------------


async def test_it_begins_where_it_is_told_and_gives_again_what_was_released(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    await add_stream(server.url)
    await transport.publish([event(n) for n in range(1, 11)])
    first = await receive(source, 4, limit=4)
    assert numbers(first) == [1, 2, 3, 4]
    assert await source.lag() == 6
    await source.release(first[2:])
    again = await receive(source, 8)
    assert numbers(again) == [3, 4, 5, 6, 7, 8, 9, 10]
    await source.resume({first[0].shard: 9})
    assert numbers(await receive(source, 1)) == [10]


async def test_it_waits_for_the_first_and_returns_at_once(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    await add_stream(server.url)
    assert await source.receive(10, wait_seconds=0.1) == []
    waiting = asyncio.create_task(source.receive(10, wait_seconds=20))
    await asyncio.sleep(0)
    await transport.publish([event(1)])
    async with asyncio.timeout(15):
        assert numbers(await waiting) == [1]


async def test_topics_that_begin_alike_are_kept_apart(server: NatsServer, transport: NatsTransport) -> None:
    await add_stream(server.url)
    await transport.publish(
        [
            event(1, topic="shop", type_="orders.placed"),
            event(2, topic="shop.orders", type_="placed"),
            event(3, topic="shop", type_="opened"),
        ]
    )
    async with jetstream(server.url) as stream:
        await stream.publish("duly.shop.orders.placed", b'{"n": 4}')  # a stranger's
    for topics, expected in {
        ("shop",): [(1, "shop"), (3, "shop"), (4, "shop")],
        ("shop.orders",): [(2, "shop.orders"), (4, "shop.orders")],
        ("shop", "shop.orders"): [(1, "shop"), (2, "shop.orders"), (3, "shop"), (4, "shop.orders")],
    }.items():
        source = nats.source(server.url, topics, "duly")
        found = await receive(source, len(expected))
        assert [(json.loads(one.body)["n"], one.topic) for one in found] == expected
        await source.close()


async def test_several_streams_are_read_each_in_its_order(server: NatsServer, transport: NatsTransport) -> None:
    await add_stream(server.url, "one", ["duly.one.>"])
    await add_stream(server.url, "two", ["duly.two.>"])
    await transport.publish([event(n, topic=("one", "two")[n % 2]) for n in range(60)])
    source = nats.source(server.url, ["one", "two"], "duly")
    found = await receive(source, 60, limit=7)
    for index, topic in enumerate(("one", "two")):
        assert numbers(one for one in found if one.topic == topic) == list(range(index, 60, 2))
    assert len({one.shard for one in found}) == 2
    await transport.publish([event(100, topic="two")])
    assert numbers(await source.receive(7, wait_seconds=10)) == [100]
    await source.close()


async def test_a_topic_whose_stream_comes_later_is_found_then(
    server: NatsServer, transport: NatsTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "LOOK_SECONDS", 0.0)
    await add_stream(server.url, "one", ["duly.one.>"])
    source = nats.source(server.url, ["one", "two"], "duly")
    with capture_logs() as logs:
        assert await source.receive(10, wait_seconds=0) == []
    assert [line["topics"] for line in logs if line["event"] == "topics_without_stream"] == [["two"]]
    await add_stream(server.url, "two", ["duly.two.>"])
    await transport.publish([event(1, topic="two"), event(2, topic="one")])
    assert sorted(numbers(await receive(source, 2))) == [1, 2]
    await source.close()


async def test_what_was_purged_before_it_was_read_is_said(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    await add_stream(server.url)
    await transport.publish([event(n) for n in range(1, 11)])
    first = await receive(source, 2, limit=2)
    await source.resume({first[0].shard: 2})
    before = missing()
    async with jetstream(server.url) as stream:
        await stream.purge_stream("duly", seq=6)  # all below
        with capture_logs() as logs:
            assert numbers(await receive(source, 1, limit=1)) == [6]
            await source.resume({first[0].shard: 2})  # as after an outage
            assert numbers(await receive(source, 3, limit=3)) == [6, 7, 8]
        await stream.purge_stream("duly", seq=10)
        with capture_logs() as later:
            assert numbers(await receive(source, 1)) == [10]
    assert [(line["first"], line["last"]) for line in logs if line["event"] == "messages_missing"] == [(3, 5)]
    assert [(line["first"], line["last"]) for line in later if line["event"] == "messages_missing"] == [(9, 9)]
    assert missing() - before == 4


async def test_what_went_of_other_topics_is_not_missed(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    """One stream for all topics: that its beginning is dropped, and that numbers are not ours, is its daily life."""
    await add_stream(server.url)
    for n in range(1, 21):
        await transport.publish([event(n, topic="news"), event(n)])
    before = missing()
    async with jetstream(server.url) as stream:
        with capture_logs() as logs:
            first = await receive(source, 5, limit=5)
            await stream.purge_stream("duly", seq=first[-1].offset + 2)  # all below: one of the others'
            asked = (await stream.account_info()).api.total
            assert numbers(await receive(source, 5, limit=5)) == [6, 7, 8, 9, 10]
            assert (await stream.account_info()).api.total - asked < 5
            await source.resume({first[0].shard: first[-1].offset})
            assert numbers(await receive(source, 1, limit=1)) == [6]
        assert [line["event"] for line in logs if "missing" in line["event"]] == ["messages_perhaps_missing"]
        assert missing() == before
        with capture_logs() as logs:
            await stream.purge_stream("duly", seq=first[-1].offset + 7)  # two of ours, which wait to be read
            assert numbers(await receive(source, 12)) == [*range(9, 21)]
        assert [line["count"] for line in logs if line["event"] == "messages_missing"] == [2]
        assert missing() == before + 2


async def test_a_stream_made_anew_is_read_from_its_beginning(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    await add_stream(server.url)
    await transport.publish([event(n) for n in range(1, 6)])
    old = await receive(source, 5)
    async with jetstream(server.url) as stream:
        await stream.delete_stream("duly")
    await add_stream(server.url)
    await transport.publish([event(n) for n in range(6, 9)])
    new = await receive(source, 3)
    assert numbers(new) == [6, 7, 8]
    assert new[0].shard != old[0].shard
    await source.resume({old[0].shard: 5, new[0].shard: 2})
    assert numbers(await receive(source, 1)) == [8]


async def test_a_stream_that_lost_its_end_is_read_again_and_not_skipped(
    server: NatsServer, transport: NatsTransport, source: NatsSource, tmp_path: Path
) -> None:
    await add_stream(server.url)
    await transport.publish([event(n) for n in range(1, 4)])
    server.stop()
    shutil.copytree(server.directory / "store", tmp_path / "store")
    server.start()
    await transport.close()
    await transport.publish([event(n) for n in range(4, 9)])
    read = await receive(source, 8)
    server.stop()
    shutil.rmtree(server.directory / "store")
    shutil.copytree(tmp_path / "store", server.directory / "store")
    server.start()
    await transport.close()
    await transport.publish([event(n) for n in range(20, 22)])
    await source.resume({read[0].shard: 8})
    with capture_logs() as logs:
        found = await receive(source, 5)
    assert numbers(found) == [1, 2, 3, 20, 21]
    assert found[0].shard == f"{read[0].shard}+1"
    assert "stream_lost_its_end" in [line["event"] for line in logs]
    await source.resume({read[0].shard: 8, found[0].shard: 4})
    assert numbers(await receive(source, 1)) == [21]


async def test_what_the_client_cannot_read_comes_alone_and_the_rest_follows(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    await add_stream(server.url)
    await transport.publish([event(1)])
    send_raw(server.port, b"duly.shop.orders.\xff\xfe", b"NATS/1.0\r\nce-id: 1\r\n\r\n", b'{"n": 2}')
    send_raw(server.port, b"duly.shop.orders.x", b"NATS/1.0 \xff\xff\xff\r\nce-id: 1\r\n\r\n", b'{"n": 3}')
    send_raw(server.port, b"duly.shop.orders.x", b"NATS/1.0 503\r\nStatus: 503\r\n\r\n", b'{"n": 4}')
    await transport.publish([event(5)])
    found = await receive(source, 5, seconds=100)
    assert numbers(found) == [1, 2, 3, 4, 5]
    assert {one.topic for one in found} == {"shop.orders"}


async def test_messages_larger_than_a_pull_come_one_by_one(
    server: NatsServer, transport: NatsTransport, source: NatsSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "PULL_BYTES", 2_000)
    await add_stream(server.url)
    sizes = [10, 5_000, 10, 900, 900, 900, 50_000]
    await transport.publish([event(n, text="x" * size) for n, size in enumerate(sizes)])
    with capture_logs() as logs:
        assert numbers(await receive(source, len(sizes))) == list(range(len(sizes)))
    assert not logs


async def test_a_consumer_that_somebody_deletes_is_made_again(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    await add_stream(server.url)
    await transport.publish([event(1)])
    assert numbers(await receive(source, 1)) == [1]
    async with jetstream(server.url) as stream:
        (consumer,) = await stream.consumers_info("duly")
        await stream.delete_consumer("duly", consumer.name)
        await transport.publish([event(2)])
        assert numbers(await receive(source, 1)) == [2]
        await source.close()
        assert await stream.consumers_info("duly") == []


async def test_reading_goes_on_after_the_server_was_killed_and_paused(
    server: NatsServer, transport: NatsTransport, source: NatsSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "ANSWER_SECONDS", 1.0)
    await add_stream(server.url)
    counter = itertools.count(1)
    for trouble in ("none", "kill", "pause", "stop"):
        await transport.publish([event(next(counter)) for _ in range(5)])
        if trouble in ("kill", "stop"):
            getattr(server, trouble)()
            with pytest.raises(OSError, match="NATS"):
                await source.receive(10, wait_seconds=0.1)
            server.start()
        elif trouble == "pause":
            server.pause()
            try:
                async with asyncio.timeout(30):
                    with pytest.raises(TimeoutError):
                        await source.receive(10, wait_seconds=0.1)
            finally:
                server.resume()
        last = await receive(source, 5)
        assert len(last) == 5
    assert numbers(last) == [16, 17, 18, 19, 20]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"storage": StorageType.MEMORY}, "in memory"),
        ({"retention": RetentionPolicy.WORK_QUEUE}, "retention=limits"),
        ({"retention": RetentionPolicy.INTEREST}, "retention=limits"),
        ({"max_msgs": 1_000}, "discard=new"),
        ({"max_bytes": 1_000_000}, "discard=new"),
        ({"max_msgs_per_subject": 1}, "max_msgs_per_subject"),
        ({"max_age": 3_600.0}, "less than a day"),
        ({"duplicate_window": 10.0}, "duplicate_window"),
        ({"no_ack": True}, "does not acknowledge"),
    ],
)
async def test_a_stream_that_would_lose_events_is_refused(
    server: NatsServer, transport: NatsTransport, source: NatsSource, config: dict[str, Any], sentence: str
) -> None:
    await add_stream(server.url, **config)
    for check in (transport.check, source.check):
        with pytest.raises(Refused, match=sentence):
            await check()


async def test_no_stream_at_all_is_refused_with_what_to_do(
    server: NatsServer, transport: NatsTransport, source: NatsSource
) -> None:
    for check in (transport.check, source.check):
        with pytest.raises(Refused, match="duly brokers setup"):
            await check()
    with pytest.raises(OSError, match="no stream"):
        await source.receive(1, wait_seconds=0)


async def test_a_wrong_password_is_refused_and_never_shown(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, more='authorization { user: "ann", password: "right p@ss/w:rd" }')
    server.start()
    try:
        right = f"nats://ann:right%20p%40ss%2Fw%3Ard@127.0.0.1:{server.port}"
        assert await nats.setup(right, TOPICS, "duly") == ["stream duly created, for duly.>"]
        wrong = nats.transport(right.replace("right", "wrong"))
        with pytest.raises(Refused) as refused:
            await wrong.check()
        with pytest.raises(PermissionError) as away:
            await wrong.publish([event(1)])
        assert "p@ss" not in str(refused.value) + str(away.value)
        assert str(server.port) in str(refused.value)
    finally:
        server.close()


async def test_tls_is_spoken_where_it_is_asked_for(tmp_path: Path) -> None:
    authority = write_certificate(tmp_path)
    files = f'cert_file: "{tmp_path}/cert.pem", key_file: "{tmp_path}/key.pem"'
    server = NatsServer(tmp_path, more=f'tls {{ {files} }}\nauthorization {{ token: "s3cret" }}')
    server.start()
    try:
        place = f"s3cret@127.0.0.1:{server.port}"
        assert await nats.setup(f"nats+tls://{place}?ca={authority}", TOPICS, "duly")
        with pytest.raises(OSError, match="certificate"):
            await nats.setup(f"nats+tls://{place}", TOPICS, "duly")
    finally:
        server.close()


async def test_a_server_without_jetstream_is_refused(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    server.config.write_text(f'listen: "127.0.0.1:{server.port}"\n')
    server.answers = lambda: True  # type: ignore[method-assign]  # it greets without JetStream
    server.start()
    try:
        transport = nats.transport(f"nats://127.0.0.1:1,127.0.0.1:{server.port}")  # nobody is at the first
        with pytest.raises(Refused, match="JetStream"):
            await _until_it_answers(transport)
    finally:
        server.close()


async def _until_it_answers(transport: NatsTransport) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await transport.check()
            except OSError:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "url",
    [
        "nats://",
        "nats://u:secret@",
        "nats://u:secret@host:port",
        "nats://u:secret@host/x?y",
        "nats://u:secret@host?max=1",
        "nats://u:secret@host?replicas=0",
        "nats://u:secret@host?stream=a.b",
        "nats://u:secret@host?creds=/no/such/file",
        "nats://u:secret@host?creds=/etc/hostname",
        "nats://u:secret@host?ca=/no/such/file",
    ],
)
def test_an_address_that_is_none_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(Refused) as refused:
        nats.transport(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("duly.>", "duly.a.b", True),
        ("duly.>", "duly", False),
        ("duly.a.>", "duly.a.>", True),
        ("duly.a.>", "duly.>", False),
        ("duly.*.b", "duly.a.b", True),
        ("duly.*.b", "duly.a.>", False),
        ("duly.a", "duly.a.b", False),
        (">", "duly.a", True),
    ],
)
def test_patterns_cover_what_they_should(pattern: str, subject: str, expected: bool) -> None:
    assert covers(pattern, subject) is expected


def test_patterns_that_overlap_are_folded() -> None:
    assert cover(["duly.shop.>", "duly.shop.orders.>", "duly.news.>"]) == ["duly.news.>", "duly.shop.>"]
