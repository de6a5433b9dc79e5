"""From emit to a consumer's effect over each broker: once, in order, with its headers; and strangers on both ends."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from duly import emit
from duly.operate.consumers import move_consumer
from tests.brokers.servers import Kind, Raw
from tests.brokers.world import World

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(300)]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def envelope(n: int, *, subject: str | None = "o-1", **more: Any) -> dict[str, str]:
    """What a stranger's event says of itself."""
    given = {
        "specversion": "1.0", "id": f"stranger-{n}", "source": "/stranger", "type": "order.changed",
        "subject": subject, "time": datetime.now(UTC).isoformat(), **more,
    }  # fmt: skip
    return {name: text for name, text in given.items() if text is not None}


def as_message(kind: Kind, attributes: dict[str, str], data: Any) -> Raw:
    """As CloudEvents says for this broker."""
    key = attributes.get("subject", "")
    if not kind.binding:
        body = json.dumps({**attributes, "datacontenttype": "application/json", "data": data}).encode()
        return Raw({"content-type": "application/cloudevents+json"}, body, key)
    headers = {kind.binding + name: text for name, text in attributes.items()}
    return Raw({"content-type": "application/json", **headers}, json.dumps(data).encode(), key)


def as_attributes(kind: Kind, message: Raw) -> tuple[dict[str, Any], Any]:
    """What a stranger reads in a message of ours: its attributes and its data."""
    if not kind.binding:
        found = json.loads(message.body)
        return found, found["data"]
    prefix = kind.binding.lower()
    found = {name[len(prefix) :]: text for name, text in message.headers.items() if name.startswith(prefix)}
    return found, json.loads(message.body)


async def test_each_event_has_its_effect_once_and_in_order(world: World) -> None:
    aggregates = [f"o-{index}" for index in range(20)]
    await world.emit(aggregates, range(1, 6))
    world.run("relay", "receiver", "worker")
    await world.emit(aggregates, range(6, 11))
    await world.until_done(aggregates, range(1, 11))


async def test_order_is_kept_with_several_relays_and_two_receivers(world: World) -> None:
    aggregates = [f"o-{index}" for index in range(12)]
    for _ in range(3):
        world.run("relay", relay_batch=20)
    for _ in range(2):
        world.run("receiver", receive_batch=15)
    world.run("worker")
    await world.emit(aggregates, range(1, 21))
    await world.until_done(aggregates, range(1, 21))


async def test_the_same_consumer_runs_on_postgresql_and_on_the_broker(world: World) -> None:
    async with world.db.transaction() as tx:
        await move_consumer(tx, "ledger", via=None, actor="test")
    world.run("relay", "receiver", "worker")
    await world.emit(["a", "b"], range(1, 4))
    await world.until_done(["a", "b"], range(1, 4))
    async with world.db.transaction() as tx:
        await move_consumer(tx, "ledger", via=world.kind.name, actor="test")
    await world.emit(["a", "b"], range(4, 7))
    await world.until_done(["a", "b"], range(1, 7))


async def test_headers_arrive_and_the_trace_goes_on(world: World) -> None:
    correlation = str(uuid4())
    headers = {
        "traceparent": TRACEPARENT,
        "correlation_id": correlation,
        "tenant": "größte & co",
        "X-Strange name": "1",
    }
    async with world.db.transaction() as tx:
        (event_id,) = await emit(tx, world.event("ö 1/2", 1, headers=headers, text="\N{SNOWMAN} \t x"))
    world.run("relay", "receiver")
    await world.until(lambda: world.value("SELECT count(*) FROM duly.received"), "it was received")
    stored = world.value(
        "SELECT jsonb_build_object('id', id, 'type', type, 'topic', topic, 'aggregate', aggregate_id, "
        "'payload', payload, 'headers', headers, 'at', created_at) FROM duly.received"
    )
    assert stored["id"] == str(event_id)
    assert (stored["type"], stored["topic"], stored["aggregate"]) == ("order.changed", world.topic, "ö 1/2")
    assert stored["payload"] == {"n": 1, "text": "\N{SNOWMAN} \t x"}
    assert headers.items() <= stored["headers"].items()
    await world.until(
        lambda: world.value("SELECT count(*) FROM duly.outbox") == 0, "the relay has written it down, too"
    )
    written = world.value("SELECT created_at FROM duly.events WHERE id = %(id)s", id=event_id)
    assert datetime.fromisoformat(stored["at"]) == written
    jobs = world.value("SELECT jsonb_agg(jsonb_build_array(traceparent, correlation_id, causation_id)) FROM duly.jobs")
    assert jobs == [[TRACEPARENT, correlation, str(event_id)]] * 2


async def test_a_stranger_reads_our_events_as_cloudevents(world: World) -> None:
    stranger = world.stranger()
    await stranger.watch(world.topic)
    world.run("relay")
    ids = await world.emit(["o-1"], range(1, 6), headers={"traceparent": TRACEPARENT})
    seen = [as_attributes(world.kind, message) for message in await stranger.read(5)]
    assert [attributes["id"] for attributes, _ in seen] == [str(one) for one in ids]
    assert [data for _, data in seen] == [{"n": n} for n in range(1, 6)]
    first = seen[0][0]
    assert first["specversion"] == "1.0"
    assert first["type"] == "order.changed"
    assert first["source"].endswith(world.topic)
    assert first["subject"] == "o-1"
    assert first["traceparent"] == TRACEPARENT


async def test_a_strangers_events_are_received_and_a_repetition_is_known(world: World) -> None:
    world.run("receiver", "worker")
    stranger, kind = world.stranger(), world.kind
    messages = [as_message(kind, envelope(n), {"n": n}) for n in range(1, 6)]
    await stranger.write(world.topic, "order.changed", messages)
    await world.until_done(["o-1"], range(1, 6))
    ours = str(uuid4())  # of another service that uses duly
    bare = envelope(
        6, id=ours, source="/duly/theirs", subject=None, time=None, partitionkey="o-2", traceparent=TRACEPARENT
    )
    again = [messages[0], as_message(kind, bare, {"n": 6})]
    await stranger.write(world.topic, "order.changed", again)
    await world.until(lambda: world.effects().get("o-2") == [6], "the last one has its effect")
    assert world.effects()["o-1"] == [1, 2, 3, 4, 5]
    assert world.value("SELECT count(*) FROM duly.received") == 6
    assert world.value("SELECT aggregate_id FROM duly.received WHERE id = %(id)s", id=UUID(ours)) == "o-2"


async def test_each_part_ends_in_an_orderly_way_and_the_next_goes_on(world: World) -> None:
    aggregates = ["a", "b", "c"]
    for turn in range(3):
        parts = [world.run("relay"), world.run("receiver"), world.run("worker")]
        numbers = range(turn * 5 + 1, turn * 5 + 6)
        await world.emit(aggregates, numbers)
        await world.until(lambda last=numbers[-1]: last in world.effects().get("a", []), "work is under way")  # type: ignore[misc]  # mypy knows no lambda defaults
        for part in parts:
            assert part.stop() == 0, part.said[-3000:]
    world.run("relay", "receiver", "worker")
    await world.until_done(aggregates, range(1, 16))
