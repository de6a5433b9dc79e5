"""A relay that is told to stop: it finishes what is on its way, and nobody waits for its lanes (FAULTS, SIGTERM)."""

from __future__ import annotations

import asyncio

import pytest

from duly import Database, Relay
from duly.runtime import supervisor
from duly.runtime.supervisor import Supervisor
from duly.settings import Settings
from tests.engine.outbox.broker import Broker, BrokerTransport
from tests.engine.outbox.test_publishing import emit_numbers, relay_once
from tests.support import rows, value

LEASED = "SELECT count(*) FROM duly.lanes WHERE lease_token IS NOT NULL"


async def wait_until_held(broker: Broker) -> None:
    assert await asyncio.to_thread(broker.wait_until, lambda: "relay" in broker.held)


async def test_a_relay_that_is_cut_off_while_the_broker_hangs_leaves_no_lane_leased(
    db: Database, dsn: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No waiting for a lease on a clean stop: the next relay sends at once."""
    monkeypatch.setattr(supervisor, "RELEASE_SECONDS", 0.1)
    await emit_numbers(db, "a1", [1, 2])
    impatient = Database(dsn, settings=Settings(shutdown_grace_seconds=0))
    broker.rules.hold_before.add("relay")
    relay = Relay(impatient, transport=BrokerTransport(broker.port))
    stop = asyncio.Event()
    running = asyncio.create_task(Supervisor(impatient, [relay]).run(stop))
    await wait_until_held(broker)
    assert value(dsn, LEASED) == 1
    stop.set()
    await running
    await impatient.close()
    assert value(dsn, LEASED) == 0
    broker.release()
    assert (await relay_once(db, broker)).facts["published"] == 2
    assert broker.first_deliveries() == {"a1": [1, 2]}


async def test_one_cycle_that_is_cancelled_leaves_no_lane_leased(db: Database, dsn: str, broker: Broker) -> None:
    """As `duly run-once relay` is, by SIGTERM."""
    await emit_numbers(db, "a1", [1])
    broker.rules.hold_after.add("relay")
    running = asyncio.create_task(relay_once(db, broker))
    await wait_until_held(broker)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert value(dsn, LEASED) == 0


async def test_a_relay_that_is_to_stop_sends_no_further_wave_and_settles_what_was_acknowledged(
    db: Database, dsn: str, broker: Broker
) -> None:
    await emit_numbers(db, "a1", [1, 2, 3])
    broker.rules.hold_after.add("relay")
    stop = asyncio.Event()
    running = asyncio.create_task(Relay(db, transport=BrokerTransport(broker.port)).run(stop))
    await wait_until_held(broker)
    stop.set()
    broker.release()
    await running
    assert [one.n for one in broker.received()] == [1]
    published = rows(dsn, "SELECT payload->>'n' FROM duly.events")
    assert (published, value(dsn, "SELECT count(*) FROM duly.outbox")) == ([("1",)], 2)
    assert value(dsn, LEASED) == 0
