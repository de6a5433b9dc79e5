"""Moving a consumer from the relay to a broker and back: nothing falls between, and the order holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from duly import Database, Duly, Relay
from duly.brokers.connect import register_broker
from duly.errors import Busy, Conflict, Invalid, NotFound
from duly.operate import list_audit, list_consumers, move_consumer, perform
from duly.testing import drain
from tests.engine.inbox.effects import effects, emit_numbers, outcomes, prepare, register_shop
from tests.engine.inbox.source import VIA
from tests.engine.inbox.test_receiver import receive_all
from tests.engine.outbox.broker import Broker, BrokerTransport
from tests.support import rows, value

register_broker("socket", name=VIA, module="tests.engine.inbox.source")
JOBS = "SELECT count(*) FROM duly.jobs WHERE name = 'consumer:ledger'"
ALIVE = """
INSERT INTO duly.processes (id, kind, names, version, started_at, seen_at)
VALUES ('here', 'receiver', '{socket}', '1', clock_timestamp(), clock_timestamp())
"""


async def open_shop(db: Database, dsn: str) -> Duly:
    app = Duly()
    register_shop(app)
    await prepare(app, db, dsn)
    return app


async def move(db: Database, via: str, name: str = "ledger", **options: Any) -> Any:
    given = {"name": name, "via": via, **options}
    return await db.run(lambda tx: perform(tx, "consumers.via", given, actor="ada", reason="test"))


async def relay_all(db: Database, broker: Broker, **options: Any) -> None:
    relay = Relay(db, transport=BrokerTransport(broker.port), **options)
    while (await relay.cycle()).done:
        pass
    await relay.close()


async def test_after_the_move_the_broker_brings_the_events_and_the_relay_none(
    db: Database, dsn: str, broker: Broker
) -> None:
    app = await open_shop(db, dsn)
    await emit_numbers(db, ["a1"], [0])
    await relay_all(db, broker)
    assert value(dsn, JOBS) == 1
    rows(dsn, ALIVE)
    assert (await move(db, VIA)).message == "ledger gets its events from socket now, no longer from the relay"
    await emit_numbers(db, ["a1"], [1])
    await relay_all(db, broker)
    assert value(dsn, JOBS) == 1
    await receive_all(db, broker)
    assert value(dsn, JOBS) == 2  # what the relay brought before the move is not brought again
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"a1": [0, 1]}
    assert sorted(effects(dsn, "mail")["a1"]) == [0, 1]  # not ordered, and not moved
    assert "duplicate" not in outcomes(dsn)


async def test_what_is_still_at_the_broker_is_delivered_here_when_a_consumer_leaves_it(
    db: Database, dsn: str, broker: Broker
) -> None:
    app = await open_shop(db, dsn)
    await move(db, VIA)
    await emit_numbers(db, ["a1", "a2"], [0])
    await relay_all(db, broker)
    await receive_all(db, broker)
    await emit_numbers(db, ["a1", "a2"], [1, 2])
    await relay_all(db, broker)  # and nobody reads them
    said = (await move(db, "-")).message
    assert said.endswith("from the relay now, no longer from socket; 4 events on their way were delivered here")
    await emit_numbers(db, ["a1", "a2"], [3])
    await relay_all(db, broker)
    await receive_all(db, broker)
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"a1": [0, 1, 2, 3], "a2": [0, 1, 2, 3]}
    assert "duplicate" not in outcomes(dsn)


@pytest.mark.parametrize("way", [("-", VIA), (VIA, "-")])
async def test_an_event_that_is_being_sent_during_the_move_is_not_missed(
    db: Database, dsn: str, broker: Broker, way: tuple[str, str]
) -> None:
    """The broker has it, and the relay has not settled it: whichever side it belongs to, it takes effect once."""
    app = await open_shop(db, dsn)
    if way[0] != "-":
        await move(db, way[0])
    await emit_numbers(db, ["a1"], [0])
    broker.rules.hold_after.add("relay")
    sending = asyncio.create_task(relay_all(db, broker))
    assert await asyncio.to_thread(broker.wait_until, lambda: "relay" in broker.held)
    if way[0] == "-":
        await receive_all(db, broker)  # before the move: it is none of the receiver's business yet
    await move(db, way[1])
    if way[0] != "-":
        await receive_all(db, broker)  # after it: it is none of the receiver's business any more
    broker.release()
    await sending
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == effects(dsn, "mail") == {"a1": [0]}


async def test_registering_again_moves_nothing(db: Database, dsn: str) -> None:
    app = await open_shop(db, dsn)
    await move(db, VIA)
    await app.prepare(db)
    async with db.transaction() as tx:
        assert {one.name: one.via for one in await list_consumers(tx)} == {"ledger": VIA, "mail": None}


async def test_a_move_is_audited_and_what_makes_no_sense_is_refused(db: Database, dsn: str) -> None:
    await open_shop(db, dsn)
    await move(db, VIA)
    async with db.transaction() as tx:
        (entry,) = await list_audit(tx, subject="consumer:ledger")
    assert (entry.actor, entry.action, entry.reason) == ("ada", "consumer.moved", "test")
    for via, name, error, words in (
        (VIA, "ledger", Conflict, "already"),
        ("kafak", "mail", Invalid, "no broker"),
        (VIA, "nobody", NotFound, "no consumer"),
        (VIA, "duly.webhooks", Invalid, "part of the engine"),
    ):
        with pytest.raises(error, match=words):
            await move(db, via, name)


async def test_too_many_events_on_their_way_are_waited_for(
    db: Database, dsn: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_shop(db, dsn)
    await move(db, VIA)
    monkeypatch.setattr("duly.operate.consumers.MOST_UNDERWAY", 2)
    await emit_numbers(db, ["a1"], [0, 1, 2])
    await relay_all(db, broker)
    with pytest.raises(Conflict, match=r"still on their way through socket.* `duly consumers via --deliver`"):
        await move(db, "-")
    await receive_all(db, broker)
    assert (await move(db, "-")).facts == {"underway": 0}


async def test_events_that_can_never_arrive_are_delivered_here_a_part_at_a_time(
    db: Database, dsn: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is gone, say: whoever asks for it gets all of them, each once and in order, and is free to leave."""
    app = await open_shop(db, dsn)
    await move(db, VIA)
    monkeypatch.setattr("duly.operate.consumers.MOST_UNDERWAY", 2)
    await emit_numbers(db, ["a1", "a2"], [0, 1, 2])
    await relay_all(db, broker, batch=1)
    first = await move(db, "-", deliver=True)
    assert first.message.startswith("2 events on their way were delivered here, and more are left; ledger still gets")
    assert first.rest == {"name": "ledger", "via": "-", "deliver": "true"}
    await receive_all(db, broker, batch=3)  # the queue is there after all: what was delivered makes no second job
    assert value(dsn, JOBS) == 6
    await emit_numbers(db, ["a1", "a2"], [3, 4])
    await relay_all(db, broker, batch=1)
    given, parts = first.rest, 0
    while given is not None:
        result = await move(db, **given)
        given, parts = result.rest, parts + 1
    assert parts == 2
    await emit_numbers(db, ["a1", "a2"], [5])
    await relay_all(db, broker)
    await receive_all(db, broker)
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"a1": [0, 1, 2, 3, 4, 5], "a2": [0, 1, 2, 3, 4, 5]}
    assert "duplicate" not in outcomes(dsn)
    async with db.transaction() as tx:
        actions = [entry.action for entry in await list_audit(tx, subject="consumer:ledger")]
    assert sorted(actions) == ["consumer.delivered"] * 2 + ["consumer.moved"] * 2


async def test_what_was_published_at_one_moment_is_delivered_in_one_part(
    db: Database, dsn: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch of a relay may be larger than a part."""
    app = await open_shop(db, dsn)
    await move(db, VIA)
    monkeypatch.setattr("duly.operate.consumers.MOST_UNDERWAY", 2)
    monkeypatch.setattr("duly.operate.consumers.MOST_AT_A_MOMENT", 4)
    await emit_numbers(db, ["a1"], [0, 1, 2, 3])
    await relay_all(db, broker)
    await emit_numbers(db, ["a1"], [4])
    await relay_all(db, broker)
    assert [(await move(db, "-", deliver=True)).facts["underway"] for _ in range(2)] == [4, 1]
    await drain(db, app.handlers)
    assert effects(dsn, "ledger") == {"a1": [0, 1, 2, 3, 4]}


async def test_a_move_to_a_broker_that_nobody_reads_says_so(db: Database, dsn: str) -> None:
    await open_shop(db, dsn)
    assert "no receiver of socket is alive: its events wait there until" in (await move(db, VIA)).message
    rows(dsn, ALIVE)
    assert "no receiver" not in (await move(db, VIA, "mail")).message


async def test_a_relay_that_does_not_pause_is_not_waited_for_without_end(db: Database, dsn: str) -> None:
    await open_shop(db, dsn)
    async with db.transaction() as busy:
        await (await busy.connection()).exec_driver_sql("SELECT lane FROM duly.lanes LIMIT 1 FOR UPDATE")
        with pytest.raises(Busy, match="did not pause"):
            async with db.transaction() as tx:
                await move_consumer(tx, "ledger", via=VIA, actor="ada")
