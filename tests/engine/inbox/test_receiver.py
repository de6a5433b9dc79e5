"""The receiver: one commit stores messages and makes jobs, then they are acknowledged; a redelivery is known."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from duly import Database, Duly, Event, Relay, Tx, Worker, emit
from duly.brokers.connect import register_broker
from duly.duty import Cycle
from duly.errors import Unavailable
from duly.failpoints import FailpointHit, arm
from duly.inbox.receiver import Receiver
from duly.inbox.store import KEPT_BODY_BYTES
from duly.messages import NewEvent
from duly.operate import list_dead_letters, retry_dead_letter, why
from duly.operate.maintenance import forget_received
from duly.settings import Settings
from duly.telemetry import SOURCE_LAG
from duly.testing import BusinessClock, drain
from tests.engine.inbox.effects import (
    dead_letters_back_to_the_queue,
    effects,
    emit_numbers,
    outcomes,
    prepare,
    record,
    register_shop,
)
from tests.engine.inbox.source import SHARD, VIA, BrokerSource
from tests.engine.inbox.test_failures import Flaky
from tests.engine.inbox.test_ordered import wait_for_lock
from tests.engine.outbox.broker import Broker, BrokerTransport
from tests.support import rows, value

register_broker("socket", name=VIA, module="tests.engine.inbox.source")
MOVE = """
UPDATE duly.consumers SET via = 'socket', via_since = duly.now() - interval '1 hour' WHERE name <> 'duly.webhooks'
"""
ONCE = {"a1": [0, 1, 2], "a2": [0, 1, 2]}


async def open_shop(db: Database, dsn: str) -> Duly:
    """Two consumers, one of them ordered, whose events come from the broker."""
    app = Duly()
    register_shop(app)
    await prepare(app, db, dsn)
    rows(dsn, MOVE)
    return app


async def publish(db: Database, broker: Broker, *aggregates: str, count: int = 3) -> list[UUID]:
    """Emitted, and sent to the broker."""
    ids = await emit_numbers(db, aggregates, range(count))
    relay = Relay(db, transport=BrokerTransport(broker.port))
    while (await relay.cycle()).done:
        pass
    await relay.close()
    return ids


def unordered(dsn: str) -> dict[str, list[int]]:
    """What the consumer did that keeps no order."""
    return {aggregate: sorted(numbers) for aggregate, numbers in effects(dsn, "mail").items()}


def new_receiver(db: Database, broker: Broker, *, keeps_position: bool = False, **options: Any) -> Receiver:
    return Receiver(db, BrokerSource(broker.port, keeps_position=keeps_position), wait_seconds=0.05, **options)


async def receive_all(db: Database, broker: Broker, **options: Any) -> list[Cycle]:
    """Until the broker has nothing more."""
    receiver = new_receiver(db, broker, **options)
    cycles: list[Cycle] = []
    try:
        for _ in range(1_000):
            cycles.append(await receiver.cycle())
            if not cycles[-1].done:
                return cycles
    finally:
        await receiver.close()
        await receiver.source.close()
    raise AssertionError("the receiver finds no end")


def foreign(n: int, *, aggregate: str = "f1", **changes: Any) -> dict[str, Any]:
    """An event of somebody else's."""
    return {"specversion": "1.0", "id": str(uuid4()), "source": "/theirs", "type": "order.changed",
            "subject": aggregate, "data": {"n": n}} | changes  # fmt: skip


# -- from an emit here to an effect there ----------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_position", [False, True])
async def test_what_is_emitted_takes_effect_once_and_in_order(
    db: Database, dsn: str, broker: Broker, keeps_position: bool
) -> None:
    app = await open_shop(db, dsn)
    ids = await publish(db, broker, "a1", "a2")
    assert rows(dsn, "SELECT 1 FROM duly.jobs") == []  # the relay leaves them to the broker
    cycles = await receive_all(db, broker, keeps_position=keeps_position, batch=4)
    assert sum(cycle.facts.get("received", 0) for cycle in cycles) == 6
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == unordered(dsn) == ONCE
    assert {row[0] for row in rows(dsn, "SELECT id FROM duly.received WHERE via = 'socket'")} == set(ids)
    assert rows(dsn, "SELECT shard, position FROM duly.cursors") == ([] if keeps_position else [(SHARD, 6)])
    assert broker.committed == ({"duly": 6} if keeps_position else {})


async def test_the_origin_of_an_event_comes_with_it(db: Database, dsn: str, broker: Broker) -> None:
    await open_shop(db, dsn)
    correlation, trace = str(uuid4()), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    broker.put(foreign(1, correlationid=correlation, traceparent=trace, shade="dark"))
    await receive_all(db, broker)
    assert rows(dsn, "SELECT DISTINCT correlation_id::text, traceparent, entity_id FROM duly.jobs") == [
        (correlation, trace, "f1")
    ]
    assert value(dsn, "SELECT headers->>'shade' FROM duly.received") == "dark"


async def test_headers_come_back_as_they_were_emitted(db: Database, dsn: str, broker: Broker) -> None:
    """E2.4: as large as emit takes them, empty, or with names that CloudEvents knows for something else."""
    await open_shop(db, dsn)
    headers = {"long": "x" * 200_000, "empty": "", "dulyheaders": "no JSON", "dataschema": "s", "correlationid": "c"}
    async with db.transaction() as tx:
        await emit(tx, NewEvent("order.changed", "shop", "a1", {"n": 1}, headers))
    await publish(db, broker)
    (cycle, _) = await receive_all(db, broker)
    assert cycle.facts == {"received": 1, "known": 0, "unreadable": 0, "jobs": 2}
    assert value(dsn, "SELECT r.headers = e.headers FROM duly.received r JOIN duly.events e USING (id)")


async def test_an_event_that_is_in_no_history_of_ours_is_loaded_from_what_was_received(
    db: Database, dsn: str, broker: Broker
) -> None:
    app = await open_shop(db, dsn)
    broker.put(foreign(5, id="no-uuid"))
    await receive_all(db, broker)
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"f1": [5]}


# -- what comes again ------------------------------------------------------------------------------------------------


async def test_a_message_whose_acknowledgement_was_lost_comes_again_and_makes_no_second_job(
    db: Database, dsn: str, broker: Broker
) -> None:
    app = await open_shop(db, dsn)
    broker.put(foreign(1))
    broker.put(b"not json")
    broker.rules.drop_commits = 1
    receiver = new_receiver(db, broker, keeps_position=True)
    with pytest.raises(Unavailable):
        await receiver.cycle()
    again = await receiver.cycle()
    await receiver.run_once()
    assert again.facts == {"received": 0, "known": 2, "unreadable": 0, "jobs": 0}
    assert broker.committed == {"duly": 2}
    await drain(db, app.handlers)
    assert effects(dsn, "mail") == {"f1": [1]}
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 1


async def test_the_same_event_twice_in_one_batch_is_one(db: Database, dsn: str, broker: Broker) -> None:
    app = await open_shop(db, dsn)
    event = foreign(1)
    for one in (event, foreign(2), event):
        broker.put(one)
    (cycle, _) = await receive_all(db, broker)
    assert cycle.facts == {"received": 2, "known": 1, "unreadable": 0, "jobs": 4}
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"f1": [1, 2]}


@pytest.mark.parametrize("point", ["received", "before_commit", "committed", "acknowledged"])
@pytest.mark.parametrize("keeps_position", [False, True])
async def test_an_error_at_any_step_loses_nothing_and_repeats_nothing(
    db: Database, dsn: str, broker: Broker, point: str, keeps_position: bool
) -> None:
    app = await open_shop(db, dsn)
    await publish(db, broker, "a1", "a2")
    receiver = new_receiver(db, broker, keeps_position=keeps_position, batch=4)
    arm(f"receiver.{point}=raise")
    try:
        with pytest.raises(FailpointHit):
            await receiver.cycle()
        while (await receiver.cycle()).done:
            pass
    finally:
        arm("")
        await receiver.close()
        await receiver.source.close()
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == unordered(dsn) == ONCE
    assert "duplicate" not in outcomes(dsn)


async def test_what_one_consumer_has_processed_is_not_hidden_from_one_without_a_transaction(
    db: Database, dsn: str, broker: Broker
) -> None:
    """E2.2: that one asks the inbox before it is called."""
    app = Duly()
    called: list[str] = []
    for name in ("ledger", "mail"):

        @app.consumer(name, on="order.*")
        async def consume(event: Event, name: str = name) -> None:
            called.append(name)

    await app.prepare(db)
    rows(dsn, MOVE)
    broker.put(foreign(1))
    await receive_all(db, broker)
    for name in ("ledger", "mail"):
        await Worker(db, {f"consumer:{name}": app.handlers[f"consumer:{name}"]}).run_once()
    assert called == ["ledger", "mail"]


# -- order -----------------------------------------------------------------------------------------------------------


async def test_order_is_that_of_delivery_and_a_dead_letter_holds_its_aggregate_only(
    db: Database, dsn: str, broker: Broker
) -> None:
    rows(dsn, "CREATE TABLE broken (aggregate text)")
    app = Duly()

    @app.consumer("ledger", on="order.*", ordered=True, max_retries=0)
    async def ledger(event: Event, tx: Tx) -> None:
        if event.payload["n"] == 9:
            raise ValueError("as planned")
        await record(tx, "ledger", event)

    await prepare(app, db, dsn)
    rows(dsn, MOVE)
    for n, aggregate in ((3, "a1"), (1, "a2"), (9, "a1"), (1, "a1"), (2, "a2")):
        broker.put(foreign(n, aggregate=aggregate))
    await receive_all(db, broker, batch=2)
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"a1": [3], "a2": [1, 2]}
    broker.put(foreign(4, aggregate="a1"))
    await receive_all(db, broker)
    assert rows(dsn, "SELECT waits FROM duly.jobs ORDER BY id") == [("behind",), ("behind",)]
    rows(dsn, "DELETE FROM duly.dead_letters")
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"a1": [3, 1, 4], "a2": [1, 2]}


async def test_a_message_waits_behind_a_lone_dead_letter_of_its_aggregate(
    db: Database, dsn: str, broker: Broker
) -> None:
    """E2.3: nothing of the aggregate is in the queue; the dead letter alone keeps the place."""
    flaky = Flaky(ordered=True, max_retries=0)
    await prepare(flaky.app, db, dsn)
    rows(dsn, MOVE)
    flaky.broken.add("f1")
    broker.put(foreign(1))
    await receive_all(db, broker)
    await drain(db, flaky.app.handlers)
    assert rows(dsn, "SELECT 1 FROM duly.jobs") == []
    flaky.broken.clear()
    for aggregate in ("f1", "f2"):
        broker.put(foreign(2, aggregate=aggregate))
    await receive_all(db, broker)
    await drain(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"f2": [2]}
    rows(dsn, "DELETE FROM duly.dead_letters")
    await drain(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"f2": [2], "f1": [2]}


async def test_a_receiver_and_a_worker_at_the_same_moment_strand_nothing(
    db: Database, dsn: str, broker: Broker
) -> None:
    """E2.3: the worker finishes the last job of a key while the receiver decides whether the new one waits behind."""
    await open_shop(db, dsn)
    broker.put(foreign(1))
    await receive_all(db, broker)
    broker.put(foreign(2))
    with psycopg.connect(dsn) as worker:
        worker.execute("DELETE FROM duly.jobs")  # the completion of the last job, not yet committed
        receiving = asyncio.create_task(receive_all(db, broker))
        await wait_for_lock(dsn)
        worker.commit()
        await asyncio.wait_for(receiving, 10)
    assert rows(dsn, "SELECT DISTINCT waits FROM duly.jobs") == [("due",)]


async def test_of_two_receivers_that_read_the_same_one_stores_it(db: Database, dsn: str, broker: Broker) -> None:
    app = await open_shop(db, dsn)
    await publish(db, broker, "a1", "a2")
    slow, quick = (new_receiver(db, broker, batch=4) for _ in range(2))
    for one in (slow, quick):
        await one._resume(await one.connection())
    assert (await quick.cycle()).facts["received"] == 4
    assert (await slow.cycle()).facts == {"lost": True}
    assert (await slow.cycle()).facts["received"] == 2  # from where the other left off
    assert (await quick.cycle()).facts == {"lost": True}
    assert (await quick.cycle()).done == 0
    for one in (slow, quick):
        await one.close()
        await one.source.close()
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == unordered(dsn) == ONCE
    assert "duplicate" not in outcomes(dsn)


# -- what cannot be read, or stored ----------------------------------------------------------------------------------

POISON = {
    "not JSON": b"\x00\xff\xfe",
    "no event": b'{"hello": "world"}',
    "a list": json.dumps(foreign(1, data=[1])).encode(),
    "NUL": json.dumps(foreign(1, data={"a": "\x00"})).encode(),
    "a lone surrogate": json.dumps(foreign(1, data={"a": "\ud800"})).encode(),
    "deep": b'{"a":' * 100_000,
    "too deep": json.dumps(foreign(1)).replace("1}", "[" * 40 + "]" * 40 + "}").encode(),
    "a number without end": json.dumps(foreign(1)).replace("1}", "9" * 5_000 + "}").encode(),
    "not a number": json.dumps(foreign(1, data={"a": float("nan")})).encode(),
    "huge": b'"' + b"x" * 2_000_000 + b'"',
    "no type": json.dumps(foreign(1, type=None)).encode(),
    "another time": json.dumps(foreign(1, time="soon")).encode(),
    "a long subject": json.dumps(foreign(1, subject="x" * 201)).encode(),
    "headers": b"{}",
}


@pytest.mark.parametrize("kind", POISON)
async def test_a_message_that_is_no_event_is_buried_and_the_next_one_is_read(
    db: Database, dsn: str, broker: Broker, kind: str
) -> None:
    app = await open_shop(db, dsn)
    headers = {"ce_id": "1", "ce_type": "a\x00b\ud800"} if kind == "headers" else {}
    broker.put(foreign(1))
    broker.put(POISON[kind], **headers)
    broker.put(foreign(2))
    await receive_all(db, broker)
    async with db.transaction() as tx:
        (letter,) = await list_dead_letters(tx)
    assert (letter.name, letter.reason) == ("receive:socket", "failed_for_good")
    assert letter.error
    kept = value(dsn, "SELECT payload FROM duly.dead_letters")
    assert kept["is_whole"] == (kind != "huge")
    assert base64.b64decode(kept["body"]) == POISON[kind][: 16 * 1024 if kind == "huge" else None]
    assert value(dsn, "SELECT count(*) FROM duly.alerts WHERE kind = 'dead_letter'") == 1
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"f1": [1, 2]}


async def test_a_buried_message_can_be_sent_again_once_it_can_be_read(db: Database, dsn: str, broker: Broker) -> None:
    app = await open_shop(db, dsn)
    broker.put(json.dumps(foreign(7, specversion="0.3")).encode())
    await receive_all(db, broker)

    async def retry() -> None:
        async with db.transaction() as tx:
            (letter,) = await list_dead_letters(tx)
            await retry_dead_letter(tx, letter.id, actor="operator")
        await drain(db, app.handlers)

    await retry()
    assert value(dsn, "SELECT error FROM duly.dead_letters") == "specversion is '0.3'; CloudEvents 1.0 is read"
    mended = base64.b64encode(json.dumps(foreign(7)).encode()).decode()
    rows(
        dsn,
        "UPDATE duly.dead_letters SET payload = payload || jsonb_build_object('body', %(body)s::text)",
        {"body": mended},
    )
    await retry()
    assert effects(dsn, "ledger") == effects(dsn, "mail") == {"f1": [7]}
    assert rows(dsn, "SELECT 1 FROM duly.dead_letters") == []


async def test_a_buried_message_is_sent_again_with_the_key_that_it_came_with(
    db: Database, dsn: str, broker: Broker
) -> None:
    app = await open_shop(db, dsn)
    broker.put(json.dumps(foreign(7, subject=None)).replace("1.0", "0.3").encode(), key="k1")
    await receive_all(db, broker)
    mended = base64.b64encode(json.dumps(foreign(7, subject=None)).encode()).decode()
    rows(
        dsn, "UPDATE duly.dead_letters SET payload = payload || jsonb_build_object('body', %(b)s::text)", {"b": mended}
    )
    async with db.transaction() as tx:
        (letter,) = await list_dead_letters(tx)
        await retry_dead_letter(tx, letter.id, actor="operator")
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"k1": [7]}


@pytest.mark.parametrize("character", ["x", "\x01", "\u00e9", "\U0001f600"])
async def test_the_largest_message_that_is_buried_can_be_retried(
    db: Database, dsn: str, broker: Broker, character: str
) -> None:
    """Its body and its headers together fit a job, whatever they hold; what was cut says so."""
    app = await open_shop(db, dsn)
    headers = {f"h{n}": character * 1_000 for n in range(150)}
    broker.put(b"x" * KEPT_BODY_BYTES, key="k" * 5_000, **headers)
    broker.put(b"y" * KEPT_BODY_BYTES, **{f"h{n}": "x" for n in range(100)})
    await receive_all(db, broker)
    assert rows(dsn, "SELECT payload->'is_whole' FROM duly.dead_letters ORDER BY id") == [(False,), (True,)]
    async with db.transaction() as tx:
        for letter in await list_dead_letters(tx):
            await retry_dead_letter(tx, letter.id, actor="operator")
    await drain(db, app.handlers)
    assert [row[0] for row in rows(dsn, "SELECT error FROM duly.dead_letters ORDER BY id")] == [
        "only the beginning of this message was kept: it was too large",
        "it is no JSON: Expecting value at character 0",
    ]


async def test_a_message_that_the_database_cannot_store_is_found_and_the_others_are_stored(
    db: Database, dsn: str, broker: Broker
) -> None:
    app = await open_shop(db, dsn)
    rows(dsn, "ALTER TABLE duly.received ADD CONSTRAINT odd CHECK (payload->>'n' NOT IN ('3', '8'))")
    for n in range(11):
        broker.put(foreign(n))
    (cycle, _) = await receive_all(db, broker)
    assert cycle.facts == {"received": 9, "known": 0, "unreadable": 2, "jobs": 18}
    assert value(dsn, "SELECT position FROM duly.cursors") == 11
    errors = {row[0] for row in rows(dsn, "SELECT error FROM duly.dead_letters")}
    assert errors == {"the database cannot store it: CheckViolationError"}
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"f1": [0, 1, 2, 4, 5, 6, 7, 9, 10]}


# -- when something is away ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_position", [False, True])
async def test_trouble_of_the_database_buries_nothing(
    db: Database, dsn: str, broker: Broker, keeps_position: bool
) -> None:
    app = await open_shop(db, dsn)
    await publish(db, broker, "a1", "a2")
    receiver = new_receiver(db, broker, keeps_position=keeps_position)
    rows(dsn, "ALTER TABLE duly.received RENAME TO lost")
    with pytest.raises(Exception, match="received"):
        await receiver.cycle()
    rows(dsn, "ALTER TABLE duly.lost RENAME TO received")
    await receiver.close()  # as the loop does after an error
    assert (await receiver.cycle()).facts["received"] == 6
    await receiver.run_once()
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == ONCE
    assert rows(dsn, "SELECT 1 FROM duly.dead_letters") == []


async def test_a_broker_that_is_away_is_waited_for(db: Database, dsn: str, broker: Broker) -> None:
    app = await open_shop(db, dsn)
    await publish(db, broker, "a1", "a2")
    receiver = new_receiver(db, broker, batch=2)
    assert (await receiver.cycle()).done == 2
    broker.stop()
    with pytest.raises(Unavailable, match="socket is away"):
        await receiver.cycle()
    broker.start()
    while (await receiver.cycle()).done:
        pass
    await receiver.run_once()
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == ONCE


async def test_when_workers_fall_behind_the_rest_stays_at_the_broker(db: Database, dsn: str, broker: Broker) -> None:
    app = await open_shop(db, dsn)
    for n in range(8):
        broker.put(foreign(n, aggregate=f"f{n}"))
    small = Database(dsn, settings=Settings(receive_ahead=5, receive_batch=2))
    receiver = new_receiver(small, broker)
    while (await receiver.cycle()).done:
        pass
    assert (await receiver.cycle()).facts == {"paused": True}
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 8  # two batches of two, for two consumers
    rows(dsn, "UPDATE duly.jobs SET run_at = 'infinity', waits = 'behind' WHERE name = 'consumer:ledger'")
    assert (await receiver.cycle()).done == 2  # who waits for another of its aggregate does not count
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now(), waits = 'due'")
    await drain(db, app.handlers)
    while (await receiver.cycle()).done:
        pass
    await drain(db, app.handlers)
    await receiver.run_once()
    await small.close()
    assert effects(dsn, "mail") == {f"f{n}": [n] for n in range(8)}


# -- what an operator sees -------------------------------------------------------------------------------------------


async def test_the_lag_is_what_waits_at_the_broker(db: Database, dsn: str, broker: Broker) -> None:
    await open_shop(db, dsn)
    for n in range(3):
        broker.put(foreign(n))
    receiver = new_receiver(db, broker)
    await receiver.run_once()
    assert SOURCE_LAG.labels(VIA)._value.get() == 3


async def test_why_knows_an_event_that_a_broker_brought(db: Database, dsn: str, broker: Broker) -> None:
    app = await open_shop(db, dsn)
    id_ = str(uuid4())
    broker.put(foreign(1, id=id_, source="/duly/shop"))
    await receive_all(db, broker)
    await drain(db, app.handlers)
    async with db.transaction() as tx:
        said = await why(tx, id_)
    assert f"Event {id_} is order.changed on topic shop, of aggregate f1" in said[0]
    assert "came from socket (log 1)" in said[1]
    assert any(sentence.startswith("Consumer ledger handled it") for sentence in said)


async def test_what_was_received_is_forgotten_after_its_time_unless_something_needs_it(
    db: Database, dsn: str, broker: Broker, clock: BusinessClock
) -> None:
    app = await open_shop(db, dsn)
    for n in range(3):
        broker.put(foreign(n, aggregate=f"f{n}"))
    await receive_all(db, broker)
    rows(dsn, "DELETE FROM duly.jobs WHERE entity_id <> 'f1'")
    clock.advance(days=31)
    broker.put(foreign(3))
    await receive_all(db, broker)
    async with db.transaction() as tx:
        assert await forget_received(tx, days=30, batch=1) == "forgot 2 received events and 0 cursors"
    kept = rows(dsn, "SELECT aggregate_id, payload->>'n' FROM duly.received ORDER BY 1, 2")
    assert kept == [("f1", "1"), ("f1", "3")]
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"f1": [1, 3]}


async def test_what_was_received_is_kept_while_a_dead_letter_needs_it(
    db: Database, dsn: str, broker: Broker, clock: BusinessClock
) -> None:
    """E1.8, E2.3: an operator may still retry it."""
    flaky = Flaky(max_retries=0)
    await prepare(flaky.app, db, dsn)
    rows(dsn, MOVE)
    flaky.broken.add("f1")
    broker.put(foreign(1))
    await receive_all(db, broker)
    await drain(db, flaky.app.handlers)
    clock.advance(days=31)
    async with db.transaction() as tx:
        assert await forget_received(tx, days=30) == "forgot 0 received events and 0 cursors"
    flaky.broken.clear()
    dead_letters_back_to_the_queue(dsn)
    await drain(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"f1": [1]}
