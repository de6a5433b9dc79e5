"""SQS's own ways: groups and deduplication, tens with partial failures, sizes, time-outs, throttling, credentials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from duly.brokers import Later, Message
from duly.brokers.sqs import SqsTransport, group_id, setup, source, transport
from duly.brokers.sqs_client import Address, Client, parse_address
from duly.brokers.sqs_source import POLL_SECONDS, SqsSource
from duly.brokers.wire import decode
from duly.clock import monotonic
from duly.errors import Refused
from duly.ids import uuid7
from duly.messages import Event
from tests.brokers.server_sqs import SECRET, SqsServer

pytestmark = pytest.mark.brokers
pytest_plugins = ["tests.brokers.sqs_tools"]
TOPIC, OTHER = "shop.orders", "shop.returns"
WAIT = 60  # seconds for something that comes at once


def event(aggregate: str, *, number: int = 0, topic: str = TOPIC, text: str = "", id_: UUID | None = None) -> Event:
    payload = {"number": number, "text": text}
    return Event(id_ or uuid7(), "order.placed", topic, aggregate, payload, {"correlation_id": "c1"}, moment())


def moment() -> datetime:
    return datetime(2026, 11, 16, 9, 30, tzinfo=UTC)


@pytest.fixture
async def url(sqs: SqsServer, prefix: str) -> AsyncIterator[str]:
    """Two topics with their queues."""
    url = sqs.url(prefix=prefix, visibility=300)  # no test waits for it: sqs.order("expire")
    assert len(await setup(url, topics=[TOPIC, OTHER], group="duly")) == 2
    yield url
    for client in _PLAIN.values():
        await client.close()
    for sender in _SENDERS.values():
        await sender.close()
    _PLAIN.clear()
    _SENDERS.clear()


@asynccontextmanager
async def publishing(url: str) -> AsyncIterator[SqsTransport]:
    opened = transport(url)
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def reading(url: str, *topics: str) -> AsyncIterator[SqsSource]:
    opened = source(url, topics=topics or [TOPIC], group="duly")
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def plain(url: str) -> AsyncIterator[tuple[Any, str]]:
    """AWS's own client, and the queue of TOPIC; opening one takes long, so a test has one."""
    client = _PLAIN.get(url)
    if client is None:
        client = _PLAIN[url] = Client(parse_address(url))
    yield await client._connected(), await client._url(client.address.queue(TOPIC))


_PLAIN: dict[str, Client] = {}


_SENDERS: dict[str, SqsTransport] = {}


async def publish(url: str, *events: Event) -> list[str | Later | None]:
    if url not in _SENDERS:
        _SENDERS[url] = transport(url)
    return await _SENDERS[url].publish(events)


async def put(url: str, *events: Event) -> None:
    """Publish, and see that it was."""
    assert await publish(url, *events) == [None] * len(events)


def numbers(messages: Sequence[Message]) -> list[Any]:
    return [decode(message).payload["number"] for message in messages]


async def attribute(url: str, name: str) -> int:
    async with plain(url) as (client, queue):
        found = await client.get_queue_attributes(QueueUrl=queue, AttributeNames=[name])
        return int(found["Attributes"][name])


# -- addresses and names: no server ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("sqs://", "names a region"),
        ("sqs://EU central", "names a region"),
        ("sqs://eu-central-1/queue", "names a region"),
        (f"sqs://AKIA:{SECRET}@eu-central-1", "holds credentials"),
        (f"sqs://eu-central-1?secret={SECRET}", "not \\['secret'\\]"),
        ("sqs://eu-central-1?prefix=a.b", "prefix"),
        ("sqs://eu-central-1?prefix", "cannot be read"),
        ("sqs://eu-central-1?visibility=4", "from 5 to 600"),
        ("sqs://eu-central-1?visibility=%C2%B2", "from 5 to 600"),
        ("sqs://eu-central-1?visibility=99999999999999999999", "from 5 to 600"),
        (f"sqs://eu-central-1?endpoint=http://u:{SECRET}@host", "without credentials"),
        ("sqs://eu-central-1?endpoint=ftp://host", "http or https"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_and_not_repeated(url: str, complaint: str) -> None:
    with pytest.raises(Refused, match=complaint) as refused:
        parse_address(url)
    assert SECRET not in str(refused.value)


def test_an_address_has_a_region_and_some_options() -> None:
    assert parse_address("sqs://eu-central-1") == Address("eu-central-1", None, "duly-", 30)
    assert parse_address("sqs://eu-west-1?endpoint=http%3A%2F%2F127.0.0.1%3A9&prefix=a-&visibility=60") == Address(
        "eu-west-1", "http://127.0.0.1:9", "a-", 60
    )


def test_every_topic_has_a_name_that_sqs_takes() -> None:
    address = Address("eu-central-1")
    long, longer = "a" * 150 + ".b", "a" * 150 + ".c"
    assert address.queue("shop.orders") == "duly-shop-orders.fifo"
    assert len(address.queue(long)) == 80
    assert address.queue(long) != address.queue(longer)


def test_topics_that_would_share_a_queue_are_refused() -> None:
    with pytest.raises(Refused, match=r"shop\.orders and shop:orders would share the queue duly-shop-orders\.fifo"):
        source("sqs://eu-central-1", topics=["shop.orders", "shop:orders"], group="duly")
    with pytest.raises(Refused, match="no topic to read"):
        source("sqs://eu-central-1", topics=[], group="duly")


def test_every_aggregate_has_a_group_that_sqs_takes() -> None:
    assert group_id("order-17") == "order-17"
    assert group_id("zażółć gęślą").startswith("sha256-")
    assert len(group_id("x" * 129)) <= 128
    assert group_id("a b") != group_id("a  b")


# -- publishing ------------------------------------------------------------------------------------------------------


async def test_a_message_has_the_group_of_its_aggregate_and_the_event_id_against_repetition(url: str) -> None:
    first = event("order-1", number=1)
    assert await publish(url, first) == [None]
    assert await publish(url, first) == [None]
    async with plain(url) as (client, queue):
        answer = await client.receive_message(
            QueueUrl=queue, MaxNumberOfMessages=10, MessageSystemAttributeNames=["All"], MessageAttributeNames=["All"]
        )
    (message,) = answer["Messages"]
    assert message["Attributes"]["MessageGroupId"] == "order-1"
    assert message["Attributes"]["MessageDeduplicationId"] == str(first.id)
    assert message["MessageAttributes"]["content-type"]["StringValue"] == "application/cloudevents+json"


async def test_what_is_read_is_what_was_published(url: str) -> None:
    odd = event("zażółć gęślą", text="\ufffe \uffff \x7f \u0001 \U0001f382 \"'<&>")
    assert await publish(url, odd) == [None]
    async with reading(url) as opened:
        (message,) = await opened.receive(10, wait_seconds=WAIT)
        assert decode(message) == odd
        assert not {"\ufffe", "\uffff"} & set(message.body.decode())  # SQS would refuse them
        await opened.acknowledge([message])


async def test_events_go_in_tens(sqs: SqsServer, url: str) -> None:
    sqs.order("calls")
    assert await publish(url, *[event(f"o{number}", number=number) for number in range(25)]) == [None] * 25
    assert sqs.order("calls").count("SendMessageBatch") == 3
    assert await attribute(url, "ApproximateNumberOfMessages") == 25


async def test_a_request_has_no_more_bytes_than_sqs_takes(sqs: SqsServer, url: str) -> None:
    sqs.order("calls")
    assert await publish(url, *[event(f"o{number}", text="x" * 300_000) for number in range(4)]) == [None] * 4
    assert sqs.order("calls").count("SendMessageBatch") == 2  # three of them are less than a MiB


async def test_each_entry_of_a_request_has_its_own_answer(sqs: SqsServer, url: str) -> None:
    sqs.order(
        "entries",
        {
            "bad": {"SenderFault": True, "Code": "InvalidMessageContents", "Message": "no"},
            "later": {"SenderFault": False, "Code": "InternalError", "Message": "again"},
            "locked": {"SenderFault": True, "Code": "KmsDisabled", "Message": "the key is disabled"},
        },
    )
    sqs.order("calls")
    answers = await publish(url, *[event(name) for name in ("a", "bad", "b", "later", "c", "locked")])
    assert sqs.order("calls").count("SendMessageBatch") == 1
    assert [answers[place] for place in (0, 2, 4)] == [None] * 3
    assert isinstance(answers[1], str)
    assert "InvalidMessageContents" in answers[1]
    assert isinstance(answers[3], Later)
    assert "InternalError" in answers[3].reason
    assert isinstance(answers[5], Later)
    assert await attribute(url, "ApproximateNumberOfMessages") == 3


async def test_an_event_that_is_too_large_for_its_queue_is_its_own_error(url: str) -> None:
    async with plain(url) as (client, queue):
        await client.set_queue_attributes(QueueUrl=queue, Attributes={"MaximumMessageSize": "2048"})
    answers = await publish(url, event("a"), event("b", text="x" * 2000), event("c"))
    assert answers[0] is None
    assert answers[2] is None
    assert isinstance(answers[1], str)
    assert "takes 2048" in answers[1]


async def test_where_sqs_refuses_a_whole_request_only_the_event_that_is_wrong_fails(url: str) -> None:
    async with publishing(url) as opened:
        assert await opened.publish([event("a")]) == [None]  # from here on it believes in a MiB
        async with plain(url) as (client, queue):
            await client.set_queue_attributes(QueueUrl=queue, Attributes={"MaximumMessageSize": "2048"})
        answers = await opened.publish([event("a"), event("b", text="x" * 2000), event("c")])
    assert answers[0] is None
    assert answers[2] is None
    assert isinstance(answers[1], str)
    assert "larger than the queue takes" in answers[1]


async def test_a_queue_that_is_missing_holds_up_its_own_events_only(url: str) -> None:
    async with publishing(url) as opened:
        lost = event("a", topic="shop.nowhere")
        answers = await opened.publish([event("a"), lost, event("b", topic=OTHER)])
        assert answers[0] is None
        assert answers[2] is None
        assert isinstance(answers[1], Later)
        assert "duly brokers setup" in answers[1].reason
        await setup(url, topics=["shop.nowhere"], group="duly")
        assert await opened.publish([lost]) == [None]


async def test_a_queue_that_is_deleted_and_made_anew_is_found_again(url: str) -> None:
    async with publishing(url) as opened:
        assert await opened.publish([event("a")]) == [None]
        async with plain(url) as (client, queue):
            await client.delete_queue(QueueUrl=queue)
        (answer,) = await opened.publish([event("a")])
        assert isinstance(answer, Later)
        await setup(url, topics=[TOPIC], group="duly")
        assert await opened.publish([event("a")]) == [None]


@pytest.mark.parametrize(
    ("status", "code"), [(503, "ServiceUnavailable"), (400, "ThrottlingException"), (400, "RequestThrottled")]
)
async def test_throttling_is_nobodys_error(sqs: SqsServer, url: str, status: int, code: str) -> None:
    async with publishing(url) as opened:
        sqs.answer("SendMessageBatch", status, code)
        (answer,) = await opened.publish([event("a")])
        assert isinstance(answer, Later)
        assert code in answer.reason
        assert await opened.publish([event("a")]) == [None]


async def test_a_slow_sqs_makes_publishing_slow_and_not_vain(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duly.brokers.sqs.BEGIN_SECONDS", -1.0)  # so slow that each publish has time for one request
    monkeypatch.setattr("duly.brokers.sqs.REQUESTS_AT_ONCE", 1)
    left = [event(f"o{number}") for number in range(25)]
    for expected in (10, 10, 5):
        answers = await publish(url, *left)
        assert [answer for answer in answers if not isinstance(answer, Later)] == [None] * expected
        left = [one for one, answer in zip(left, answers, strict=True) if answer is not None]
    assert left == []
    assert await attribute(url, "ApproximateNumberOfMessages") == 25


async def test_an_answer_that_is_lost_makes_no_second_message(sqs: SqsServer, url: str) -> None:
    async with publishing(url) as opened:
        one = event("a")
        sqs.answer("SendMessageBatch", 500, "InternalFailure", done=True)
        assert isinstance((await opened.publish([one]))[0], Later)
        assert await attribute(url, "ApproximateNumberOfMessages") == 1
        assert await opened.publish([one]) == [None]
    assert await attribute(url, "ApproximateNumberOfMessages") == 1


async def test_an_outage_is_an_os_error_and_passes(sqs: SqsServer, url: str) -> None:
    async with publishing(url) as opened, reading(url) as reader:
        assert await opened.publish([event("a", number=1)]) == [None]
        sqs.kill()
        with pytest.raises(OSError, match=r"cannot be reached|did not answer"):
            await opened.publish([event(f"o{number}") for number in range(30)])
        with pytest.raises(OSError, match=r"cannot be reached|did not answer"):
            await reader.receive(10, wait_seconds=WAIT)
        sqs.start()
        assert await opened.publish([event("b", number=2)]) == [None]
        assert numbers(await _receive(reader, 2)) == [1, 2]


async def _receive(opened: SqsSource, count: int, *, limit: int = 100) -> list[Message]:
    found: list[Message] = []
    until = monotonic() + 2 * WAIT
    while len(found) < count and monotonic() < until:
        found += await opened.receive(limit, wait_seconds=1)
    return found


# -- reading ---------------------------------------------------------------------------------------------------------


async def test_what_is_acknowledged_is_gone_and_what_is_not_comes_again_in_order(url: str) -> None:
    for number in range(1, 4):
        await put(url, event("a", number=number))
    await put(url, event("b", number=9))
    async with reading(url) as opened:
        first = await opened.receive(100, wait_seconds=WAIT)
        assert numbers(first) == [1, 2, 3, 9]
        await opened.release(first)
        again = await opened.receive(100, wait_seconds=WAIT)
        assert numbers(again) == [1, 2, 3, 9]
        await opened.acknowledge(again[:1] + again[3:])
        await opened.resume({})  # begin again: what is not acknowledged comes again
        assert numbers(await opened.receive(100, wait_seconds=WAIT)) == [2, 3]
    async with reading(url) as opened:  # closing left them to others at once
        rest = await opened.receive(100, wait_seconds=WAIT)
        assert numbers(rest) == [2, 3]
        await opened.acknowledge(rest)
    assert await attribute(url, "ApproximateNumberOfMessages") == 0
    assert await attribute(url, "ApproximateNumberOfMessagesNotVisible") == 0


async def test_a_visibility_time_out_that_runs_out_while_storing_brings_the_same_again(
    sqs: SqsServer, url: str
) -> None:
    for number in range(1, 4):
        await put(url, event("a", number=number))
    async with reading(url) as slow, reading(url) as quick:
        late = await slow.receive(100, wait_seconds=WAIT)
        sqs.order("expire")
        again = await quick.receive(100, wait_seconds=WAIT)
        assert [decode(message) for message in again] == [decode(message) for message in late]
        await slow.acknowledge(late)  # refused by SQS, for it is no longer ours; nothing is lost and nothing raised
        assert await attribute(url, "ApproximateNumberOfMessagesNotVisible") == 3
        await quick.acknowledge(again)
    assert await attribute(url, "ApproximateNumberOfMessages") == 0


async def test_what_came_while_nobody_asked_is_given_back_before_its_time_is_over(url: str) -> None:
    await put(url, event("a", number=1))
    async with reading(url) as opened:
        opened._ask(list(opened._topics), 10, 1.0)
        (poll,) = opened._polls.values()
        await asyncio.wait([poll], timeout=WAIT)
        old = replace(poll.result(), at=monotonic() - 151)  # more than half of its time has gone
        opened._polls = dict.fromkeys(opened._polls, asyncio.create_task(_value(old)))
        found = await opened.receive(10, wait_seconds=WAIT)
        assert numbers(found) == [1]
        assert found[0].token != old.messages[0].token
        await opened.acknowledge(found)
    assert await attribute(url, "ApproximateNumberOfMessages") == 0


async def test_whoever_wants_fewer_than_came_gets_what_it_wants(url: str) -> None:
    await put(url, *[event(f"o{number}") for number in range(6)])
    async with reading(url) as opened:
        opened._ask(list(opened._topics), 10, 1.0)
        await asyncio.wait(opened._polls.values(), timeout=WAIT)
        found = await opened.receive(3, wait_seconds=WAIT)
        assert 1 <= len(found) <= 3
        await opened.acknowledge(found)
        rest = await _receive(opened, 6 - len(found), limit=3)
        await opened.acknowledge(rest)
    assert await attribute(url, "ApproximateNumberOfMessages") == 0


async def _value(value: Any) -> Any:
    return value


async def test_waiting_is_long_and_has_a_bound(sqs: SqsServer, url: str) -> None:
    async with reading(url, TOPIC, OTHER) as opened:
        await opened.check()
        sqs.order("calls")
        began = monotonic()
        assert await opened.receive(10, wait_seconds=2) == []
        assert 1.9 < monotonic() - began < 2 + WAIT
        assert sqs.order("calls").count("ReceiveMessage") <= 4
        waiting = asyncio.create_task(opened.receive(10, wait_seconds=WAIT))
        await put(url, event("a", number=7, topic=OTHER))
        assert numbers(await waiting) == [7]
        (poll,) = opened._polls.values()
        assert not poll.done() or monotonic() - began > 2 + POLL_SECONDS  # the other queue was not waited for


async def test_no_more_is_in_flight_than_was_asked_for_and_ten_of_each_queue(url: str) -> None:
    await put(url, *[event(f"o{number}", number=number) for number in range(60)])
    async with reading(url) as opened:
        first = await opened.receive(25, wait_seconds=WAIT)
        assert len(first) == 25
        assert await attribute(url, "ApproximateNumberOfMessagesNotVisible") <= 35
        assert await opened.lag() == 60 - await attribute(url, "ApproximateNumberOfMessagesNotVisible")
        rest = await _receive(opened, 35)
        assert sorted(numbers(first) + numbers(rest)) == list(range(60))
        await opened.acknowledge([*first, *rest])
    assert await attribute(url, "ApproximateNumberOfMessages") == 0


async def test_a_slow_queue_makes_smaller_batches(sqs: SqsServer, url: str, prefix: str) -> None:
    """What came first is to be stored before its visibility time-out runs out, and others get it."""
    await publish(url, *(event(f"o-{number}", number=number) for number in range(100)))
    sqs.order("pauses", {"ReceiveMessage": 0.5})
    async with reading(sqs.url(prefix=prefix, visibility=6)) as reads:
        began = monotonic()
        taken = await reads.receive(1_000, wait_seconds=WAIT)
        assert monotonic() - began < 5
        assert 10 <= len(taken) < 100
        await reads.acknowledge(taken)


async def test_two_readers_share_the_groups_and_never_one_group(url: str) -> None:
    for number in range(3):
        await put(url, *[event(f"g{group}", number=number) for group in range(12)])
    async with reading(url) as one, reading(url) as other:
        ours, theirs = await one.receive(10, wait_seconds=WAIT), await other.receive(100, wait_seconds=WAIT)
        groups = [{decode(message).aggregate_id for message in batch} for batch in (ours, theirs)]
        assert groups[0]
        assert groups[1]
        assert not groups[0] & groups[1]


async def test_a_queue_that_is_gone_stops_no_other(url: str) -> None:
    async with reading(url, TOPIC, OTHER) as opened:
        async with plain(url) as (client, queue):
            await client.delete_queue(QueueUrl=queue)
        await put(url, event("a", number=1, topic=OTHER))
        found = await _receive(opened, 1)
        assert numbers(found) == [1]
        await opened.acknowledge(found)
        assert await opened.receive(10, wait_seconds=1) == []
        await setup(url, topics=[TOPIC], group="duly")
        await put(url, event("a", number=2))
        assert numbers(await _receive(opened, 1)) == [2]


async def test_a_reader_that_is_throttled_says_so_and_goes_on(sqs: SqsServer, url: str) -> None:
    async with reading(url) as opened:
        await put(url, event("a", number=1))
        sqs.answer("ReceiveMessage", 503, "ServiceUnavailable")
        with pytest.raises(OSError, match="asks us to wait: ServiceUnavailable"):
            await opened.receive(10, wait_seconds=WAIT)
        opened._rests.clear()  # five seconds later
        assert numbers(await opened.receive(10, wait_seconds=WAIT)) == [1]


async def test_what_sqs_would_not_delete_comes_again_soon(sqs: SqsServer, url: str) -> None:
    async with reading(url) as opened:
        await put(url, event("a", number=1))
        found = await opened.receive(10, wait_seconds=WAIT)
        sqs.answer("DeleteMessageBatch", 503, "ServiceUnavailable")
        with pytest.raises(OSError, match="ServiceUnavailable"):
            await opened.acknowledge(found)
        await opened.resume({})  # as a receiver does after an error: at once, and not when the time-out has run out
        again = await opened.receive(10, wait_seconds=WAIT)
        assert numbers(again) == [1]
        await opened.acknowledge(again)
    assert await attribute(url, "ApproximateNumberOfMessages") == 0


async def test_a_strangers_text_comes_as_it_is_even_when_it_is_no_text(url: str) -> None:
    async with plain(url) as (client, queue):
        for number, body in enumerate(["no JSON", '{"a": "\\ud800"}']):
            await client.send_message(
                QueueUrl=queue, MessageBody=body, MessageGroupId="s", MessageDeduplicationId=str(number),
                MessageAttributes={"Ce_Id": {"DataType": "String", "StringValue": "17"},
                                   "raw": {"DataType": "Binary", "BinaryValue": b"\x00"}},
            )  # fmt: skip
    async with reading(url) as opened:
        found = await opened.receive(10, wait_seconds=WAIT)
        assert [message.body for message in found] == [b"no JSON", b'{"a": "\\ud800"}']
        assert found[0].headers == {"ce_id": "17"}
        assert (found[0].topic, found[0].key) == (TOPIC, "s")
        await opened.acknowledge(found)


# -- credentials and start-up checks ---------------------------------------------------------------------------------


async def test_credentials_that_have_expired_are_told_without_the_secret(sqs: SqsServer, url: str) -> None:
    words = f"The security token {SECRET} included in the request is expired"
    sqs.answer("*", 403, "ExpiredTokenException", times=100, message=words)
    async with publishing(url) as opened, reading(url) as reader:
        for attempt in (opened.check(), reader.check()):
            with pytest.raises(Refused, match=r"does not accept our credentials \(ExpiredToken") as refused:
                await attempt
            assert SECRET not in repr(refused.value)
        for act in (opened.publish([event("a")]), reader.receive(10, wait_seconds=WAIT)):
            with pytest.raises(PermissionError, match="renew them") as denied:
                await act
            assert SECRET not in repr(denied.value)


async def test_credentials_that_were_renewed_are_found(
    sqs: SqsServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with publishing(url) as opened:
        assert await opened.publish([event("a")]) == [None]
        sqs.answer("SendMessageBatch", 403, "ExpiredTokenException")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIARENEWED")
        with pytest.raises(PermissionError):
            await opened.publish([event("a")])
        assert await opened.publish([event("a")]) == [None]
    assert sqs.order("key") == "AKIARENEWED"


async def test_without_credentials_nothing_begins(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    async with reading(url) as opened:
        with pytest.raises(Refused, match="no credentials for AWS that work: NoCredentialsError"):
            await opened.check()


async def test_a_queue_we_may_not_use_holds_up_its_own_events(sqs: SqsServer, url: str) -> None:
    sqs.answer("SendMessageBatch", 403, "AccessDenied")
    (answer,) = await publish(url, event("a"))
    assert isinstance(answer, Later)
    assert "policy of our role" in answer.reason


@pytest.mark.parametrize(
    ("attributes", "complaint"),
    [
        ({"MessageRetentionPeriod": "3600"}, "keeps messages for 3600 s"),
        ({"RedrivePolicy": '{"deadLetterTargetArn": "{dead}", "maxReceiveCount": 5}'}, "has a redrive policy"),
    ],
)
async def test_a_queue_that_would_lose_messages_is_refused(
    url: str, attributes: dict[str, str], complaint: str
) -> None:
    async with plain(url) as (client, queue):
        other = queue.replace("orders", "returns")
        found = await client.get_queue_attributes(QueueUrl=other, AttributeNames=["QueueArn"])
        given = {name: value.replace("{dead}", found["Attributes"]["QueueArn"]) for name, value in attributes.items()}
        await client.set_queue_attributes(QueueUrl=queue, Attributes=given)
    async with reading(url) as opened:
        with pytest.raises(Refused, match=complaint):
            await opened.check()


async def test_a_queue_that_is_not_there_is_refused_with_what_to_do(url: str) -> None:
    async with reading(url, TOPIC, "shop.nowhere") as opened:
        with pytest.raises(Refused, match=r"no queue .*shop-nowhere\.fifo: run `duly brokers setup`"):
            await opened.check()


async def test_setting_up_again_makes_nothing(url: str) -> None:
    assert await setup(url, topics=[TOPIC, OTHER], group="duly") == []
    async with reading(url, TOPIC, OTHER) as opened:
        await opened.check()
