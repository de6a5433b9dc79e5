"""A relay that dies or fails at each of its steps: nothing lost, nothing twice for our own consumers (E1.6, E2.2).

A step that was never reached is a failure of the test, not a success of the relay.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from duly import Database, Duly, Relay, failpoints
from duly.testing import drain
from tests.engine.inbox import effects as shop
from tests.engine.outbox.broker import Broker, BrokerTransport, running_broker
from tests.support import finish, python, rows, value

ROOT = Path(__file__).parents[2]
AGGREGATES = ["a1", "a2", "a3"]
NUMBERS = [0, 1, 2]
BATCH = 3  # three cycles, so that each step is passed at least twice
POINTS = {
    "postgres": ["relay.fetched", "relay.before_commit", "relay.committed"],
    "broker": ["relay.fetched", "relay.sent", "relay.before_commit", "relay.committed"],
}
CASES = [(transport, point, hit) for transport, points in POINTS.items() for point in points for hit in (1, 2)]
each_step = pytest.mark.parametrize(("transport", "point", "hit"), CASES)
EXPIRE_LEASES = "UPDATE duly.lanes SET lease_expires_at = clock_timestamp() - interval '1 ms' WHERE lease_token > 0"
VICTIM = """
    import asyncio, os
    from duly import Database, Relay
    from tests.engine.outbox.broker import BrokerTransport

    async def main():
        port = int(os.environ["BROKER"])
        transport = BrokerTransport(port, "victim") if port else None
        relay = Relay(Database(os.environ["DATABASE_URL"]), batch=3, transport=transport)
        while (await relay.cycle()).done:
            pass

    asyncio.run(main())
    """


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with running_broker(tmp_path) as made:
        yield made


async def set_up(db: Database, dsn: str) -> Duly:
    app = Duly()
    shop.register_shop(app)
    await shop.prepare(app, db, dsn)
    await shop.emit_numbers(db, AGGREGATES, NUMBERS)
    return app


def relay_for(db: Database, broker: Broker, transport: str, name: str) -> Relay:
    used = BrokerTransport(broker.port, name) if transport == "broker" else None
    return Relay(db, batch=BATCH, transport=used)


async def check_everything_happened_once(db: Database, dsn: str, app: Duly) -> None:
    """Nine events, each once in the history, each with one job for each consumer, and each with its effect."""
    assert rows(dsn, "SELECT count(*) FROM duly.outbox") == [(0,)]
    assert rows(dsn, "SELECT count(*), count(DISTINCT id) FROM duly.events") == [(9, 9)]
    assert rows(dsn, "SELECT name, count(*), count(DISTINCT event_id) FROM duly.jobs GROUP BY name ORDER BY name") == [
        ("consumer:ledger", 9, 9),
        ("consumer:mail", 9, 9),
    ]
    await drain(db, app.handlers)
    assert shop.effects(dsn, "ledger") == dict.fromkeys(AGGREGATES, NUMBERS)
    assert {aggregate: sorted(done) for aggregate, done in shop.effects(dsn, "mail").items()} == dict.fromkeys(
        AGGREGATES, NUMBERS
    )
    assert rows(dsn, "SELECT count(*) FROM duly.jobs") == [(0,)]


def check_the_broker(broker: Broker, transport: str, point: str) -> None:
    """Everything in order; and again only what was sent and not yet settled."""
    if transport != "broker":
        return
    assert broker.first_deliveries() == dict.fromkeys(AGGREGATES, NUMBERS)
    repeated = sum(times - 1 for times in Counter(one.id for one in broker.received()).values())
    assert repeated == (BATCH if point in ("relay.sent", "relay.before_commit") else 0)


@each_step
async def test_a_relay_that_is_killed_loses_and_doubles_nothing(
    db: Database, dsn: str, broker: Broker, transport: str, point: str, hit: int
) -> None:
    """E1.6, FAULTS: kill -9; the next relay finds everything."""
    app = await set_up(db, dsn)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    port = str(broker.port if transport == "broker" else 0)
    process = python(dsn, VICTIM, failpoints=f"{point}=kill9@{hit}", env={"BROKER": port, "PYTHONPATH": path})
    code, written = await asyncio.to_thread(finish, process)
    assert code == -signal.SIGKILL, f"{point} was never reached: {written}"
    rows(dsn, EXPIRE_LEASES)
    heir = relay_for(db, broker, transport, "heir")
    while (await heir.cycle()).done:
        pass
    await heir.close()
    check_the_broker(broker, transport, point)
    await check_everything_happened_once(db, dsn, app)


@each_step
async def test_a_relay_that_fails_goes_on_by_itself_and_loses_and_doubles_nothing(
    db: Database, dsn: str, broker: Broker, transport: str, point: str, hit: int
) -> None:
    """E3.15, FAULTS: an error in the middle; the same relay comes back to it, without waiting for its own lease."""
    app = await set_up(db, dsn)
    stop = asyncio.Event()
    failpoints.arm(f"{point}=raise@{hit}")
    try:
        with capture_logs() as logs:
            running = asyncio.create_task(relay_for(db, broker, transport, "one").run(stop))
            async with asyncio.timeout(30):
                while await asyncio.to_thread(value, dsn, "SELECT EXISTS (SELECT 1 FROM duly.outbox)"):
                    pass
            stop.set()
            await running
    finally:
        failpoints.arm("")
    assert any(entry["event"] == "duty_down" and entry["error"] == "FailpointHit" for entry in logs), (
        f"{point} was never reached"
    )
    if transport == "broker":
        assert broker.first_deliveries() == dict.fromkeys(AGGREGATES, NUMBERS)
    await check_everything_happened_once(db, dsn, app)
