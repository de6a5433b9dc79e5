"""Order per aggregate and nothing lost: several relays, failures, a relay that dies and one that sleeps (E1.5, E1.6).

The witness is the broker's own journal: for each aggregate the events must have reached it in order, each at least
once. It may see an event again; a later one never before an earlier one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import duly.outbox.relay as relay_module
from duly import Database, Relay, emit
from duly.messages import NewEvent
from duly.testing import BusinessClock
from tests.engine.outbox.broker import Broker, BrokerTransport
from tests.forking import Forked
from tests.support import finish, python, rows, value

ROOT = Path(__file__).parents[3]
# As if the time of the lease had passed; it is real time, which a test cannot move.
EXPIRE_LEASES = "UPDATE duly.lanes SET lease_expires_at = clock_timestamp() - interval '1 ms' WHERE leased_by LIKE {}"
OF_TWO_LANES = """
SELECT min('a' || n) FROM generate_series(1, 100) AS n GROUP BY hashtextextended('a' || n, 0) & 63 ORDER BY 1 LIMIT 2
"""
RELAY = """
    import asyncio, os
    import duly.outbox.relay
    from duly import Database, Relay
    from tests.engine.outbox.broker import BrokerTransport

    async def main():
        duly.outbox.relay.LANE_LEASE_SECONDS = float(os.environ["LEASE_SECONDS"])
        db = Database(os.environ["DATABASE_URL"])
        transport = BrokerTransport(int(os.environ["BROKER"]), os.environ["RELAY"])
        await Relay(db, transport=transport, batch=20).run(asyncio.Event())

    asyncio.run(main())
    """


async def emit_numbers(db: Database, aggregates: Sequence[str], numbers: Sequence[int]) -> None:
    for n in numbers:
        async with db.transaction() as tx:
            await emit(tx, *(NewEvent("order.changed", "shop", aggregate, {"n": n}) for aggregate in aggregates))


def new_relay(db: Database, broker: Broker, name: str) -> Relay:
    return Relay(db, transport=BrokerTransport(broker.port, name))


async def wait_until_held(broker: Broker, name: str) -> None:
    assert await asyncio.to_thread(broker.wait_until, lambda: name in broker.held)


# -- two relays, step by step ----------------------------------------------------------------------------------------


async def test_a_lane_is_left_alone_while_its_relay_waits_for_the_broker(
    db: Database, dsn: str, broker: Broker
) -> None:
    """E1.5: the lease is what keeps a second relay from sending the same events at the same time."""
    await emit_numbers(db, ["a1"], [1, 2])
    broker.rules.hold_before.add("slow")
    slow = asyncio.create_task(new_relay(db, broker, "slow").run_once())
    await wait_until_held(broker, "slow")
    await emit_numbers(db, ["a1"], [3])
    assert (await new_relay(db, broker, "quick").run_once()).done == 0
    broker.release()
    assert (await slow).facts["published"] == 2
    assert (await new_relay(db, broker, "quick").run_once()).facts["published"] == 1
    assert [(one.relay, one.n) for one in broker.received()] == [("slow", 1), ("slow", 2), ("quick", 3)]


@pytest.mark.parametrize("taken_down", [False, True], ids=["before_the_broker_has_it", "before_the_ack"])
async def test_a_relay_that_was_away_longer_than_its_lease_settles_nothing(
    db: Database, dsn: str, broker: Broker, taken_down: bool
) -> None:
    """E1.5, FAULTS: a zombie's events were published by another; its late word changes nothing."""
    rows(
        dsn,
        "INSERT INTO duly.consumers (name, patterns, ordered, registered_at)"
        " VALUES ('ledger', '{*}', true, duly.now())",
    )
    await emit_numbers(db, ["a1", "a2"], [1, 2, 3])
    (broker.rules.hold_after if taken_down else broker.rules.hold_before).add("zombie")
    zombie = asyncio.create_task(new_relay(db, broker, "zombie").run_once())
    await wait_until_held(broker, "zombie")
    rows(dsn, EXPIRE_LEASES.format("'%'"))
    assert (await new_relay(db, broker, "heir").run_once()).facts["published"] == 6
    await emit_numbers(db, ["a1", "a2"], [4, 5])
    assert (await new_relay(db, broker, "heir").run_once()).facts["published"] == 4
    broker.release()
    assert (await zombie).facts == {"published": 0, "failed": 0, "held": 0}
    assert broker.first_deliveries() == {"a1": [1, 2, 3, 4, 5], "a2": [1, 2, 3, 4, 5]}
    assert rows(dsn, "SELECT count(*), count(DISTINCT id) FROM duly.events") == [(10, 10)]
    assert rows(dsn, "SELECT count(*), count(DISTINCT event_id) FROM duly.jobs") == [(10, 10)]
    assert rows(dsn, "SELECT count(*) FROM duly.lanes WHERE lease_token IS NOT NULL") == [(0,)]


async def test_a_zombie_whose_events_failed_elsewhere_does_not_count_them_again(
    db: Database, dsn: str, broker: Broker, clock: BusinessClock
) -> None:
    """E1.4: an attempt is counted by the relay that holds the lane."""
    await emit_numbers(db, ["a1"], [1])
    broker.rules.refuse["a1"] = "busy"
    broker.rules.hold_before.add("zombie")
    zombie = asyncio.create_task(new_relay(db, broker, "zombie").run_once())
    await wait_until_held(broker, "zombie")
    rows(dsn, EXPIRE_LEASES.format("'%'"))
    await new_relay(db, broker, "heir").run_once()
    broker.release()
    await zombie
    assert rows(dsn, "SELECT attempts FROM duly.outbox") == [(1,)]


async def test_a_zombie_that_lost_one_of_its_two_lanes_settles_nothing(db: Database, dsn: str, broker: Broker) -> None:
    """E1.5: of the other lane neither; that one is free at once, and its event is sent again."""
    lost, kept = (row[0] for row in rows(dsn, OF_TWO_LANES))
    await emit_numbers(db, [lost, kept], [1])
    broker.rules.refuse[lost] = "busy"
    broker.rules.hold_before.add("zombie")
    zombie = asyncio.create_task(new_relay(db, broker, "zombie").run_once())
    await wait_until_held(broker, "zombie")
    rows(dsn, EXPIRE_LEASES.format(f"'%' AND lane = (SELECT lane FROM duly.outbox WHERE aggregate_id = '{lost}')"))
    assert (await new_relay(db, broker, "heir").run_once()).facts == {"published": 0, "failed": 1, "held": 0}
    broker.release()
    assert (await zombie).facts == {"published": 0, "failed": 0, "held": 0}
    assert dict(rows(dsn, "SELECT aggregate_id, attempts FROM duly.outbox")) == {lost: 1, kept: 0}
    assert (await new_relay(db, broker, "heir").run_once()).facts["published"] == 1
    assert [(one.relay, one.aggregate) for one in broker.received()] == [("zombie", kept), ("heir", kept)]


async def test_relays_that_race_send_each_event_once_while_nothing_fails(
    db: Database, dsn: str, broker: Broker
) -> None:
    """E1.5: lanes are taken by one relay at a time, so a second one costs nothing and repeats nothing."""
    aggregates = [f"a{n}" for n in range(20)]
    await emit_numbers(db, aggregates, range(5))

    async def work(relay: Relay) -> None:
        while value(dsn, "SELECT EXISTS (SELECT 1 FROM duly.outbox)"):
            await relay.cycle()
        await relay.close()

    relays = [Relay(db, transport=BrokerTransport(broker.port, f"relay-{n}"), batch=10) for n in range(3)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(work(relay) for relay in relays))
    assert broker.first_deliveries() == {aggregate: list(range(5)) for aggregate in aggregates}
    assert len(broker.received()) == 100


async def test_a_batch_that_takes_longer_than_the_lease_still_gets_through(
    db: Database, dsn: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E1.3, FAULTS: a slow broker slows the relays down; it must not make them take each other's lanes for ever."""
    monkeypatch.setattr(relay_module, "LANE_LEASE_SECONDS", 1.2)  # the batch takes 1.5
    broker.rules.delay_seconds = 0.05
    await emit_numbers(db, ["a1"], range(30))

    async def work(relay: Relay) -> None:
        while value(dsn, "SELECT EXISTS (SELECT 1 FROM duly.outbox)"):
            if not (await relay.cycle()).done:
                await asyncio.sleep(0.01)  # the pause that the loop makes; nothing else would let time pass

    relays = [new_relay(db, broker, name) for name in ("one", "two")]
    try:
        async with asyncio.timeout(15):
            await asyncio.gather(*(work(relay) for relay in relays))
    except TimeoutError:
        times = Counter(one.n for one in broker.received())
        pytest.fail(f"still not drained; the broker got the first event {times[0]} times")
    finally:
        for relay in relays:
            await relay.close()
    assert broker.first_deliveries() == {"a1": list(range(30))}
    assert max(Counter(one.n for one in broker.received()).values()) <= 2


async def test_a_relay_that_must_wait_for_a_lane_does_not_spin(
    db: Database, dsn: str, broker: Broker, clock: BusinessClock
) -> None:
    """FAULTS: no tight loop while a retry is due in a lane that another relay holds."""
    await emit_numbers(db, ["a1"], [1])
    broker.rules.refuse["a1"] = "busy"
    await new_relay(db, broker, "one").run_once()
    clock.advance(seconds=5)
    broker.rules.hold_before.add("one")
    busy = asyncio.create_task(new_relay(db, broker, "one").run_once())
    await wait_until_held(broker, "one")
    cycle = await new_relay(db, broker, "two").run_once()
    broker.release()
    await busy
    assert cycle.done == 0
    assert cycle.wait_seconds is None or cycle.wait_seconds > 0


async def test_a_relay_whose_second_transaction_failed_does_not_keep_its_lanes(
    db: Database, dsn: str, broker: Broker
) -> None:
    """FAULTS: after a deadlock or a lost connection these aggregates must not wait for the rest of the lease."""
    await emit_numbers(db, ["a1"], [1, 2])
    broker.rules.hold_after.add("one")
    stop = asyncio.Event()
    running = asyncio.create_task(new_relay(db, broker, "one").run(stop))
    await wait_until_held(broker, "one")
    rows(
        dsn,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'duly-relay' AND datname = current_database()",
    )
    broker.release()
    try:
        drained = await asyncio.to_thread(broker.wait_until, lambda: len(broker.received()) >= 3, 5)
    finally:
        stop.set()
        await running
    assert drained, "the relay waits for its own lease to run out"


# -- many relays, many faults ----------------------------------------------------------------------------------------


class Fleet:
    """Relays as real processes."""

    def __init__(self, dsn: str, broker: Broker) -> None:
        self._dsn = dsn
        self._broker = broker
        self._made = 0
        self.alive: dict[str, Forked] = {}

    def add(self, *, lease_seconds: float = 60.0, failpoints: str = "") -> str:
        name = f"relay-{self._made}"
        self._made += 1
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        env = {
            "BROKER": str(self._broker.port),
            "RELAY": name,
            "DULY_PUBLISH_ATTEMPTS": "100",
            "LEASE_SECONDS": str(lease_seconds),
            "PYTHONPATH": path,
        }
        self.alive[name] = python(self._dsn, RELAY, failpoints=failpoints, env=env)
        return name

    def send(self, name: str, signal_: signal.Signals) -> None:
        self.alive[name].send_signal(signal_)

    def bury(self, name: str) -> int:
        process = self.alive.pop(name)
        process.kill()
        return finish(process)[0]

    def expire_leases(self, name: str) -> None:
        rows(self._dsn, EXPIRE_LEASES.format(f"'%:{self.alive[name].pid}:relay:%'"))


@pytest.fixture
def fleet(dsn: str, broker: Broker) -> Iterator[Fleet]:
    made = Fleet(dsn, broker)
    yield made
    for name in list(made.alive):
        made.bury(name)


async def test_a_relay_that_was_stopped_between_its_lease_and_its_first_word_sends_nothing_of_it(
    db: Database, dsn: str, broker: Broker, fleet: Fleet
) -> None:
    """E1.5, FAULTS: SIGSTOP past the lease, which its time to send began with: another has sent all since."""
    await emit_numbers(db, ["a1", "a2"], [1, 2, 3])
    zombie = fleet.add(lease_seconds=1.0, failpoints="relay.fetched=stop")
    await asyncio.to_thread(fleet.alive[zombie].wait_until_stopped)
    heir = new_relay(db, broker, "heir")
    async with asyncio.timeout(20):  # the lease is real time
        while not (await heir.cycle()).done:
            await asyncio.sleep(0.05)
    await heir.close()
    fleet.send(zombie, signal.SIGCONT)
    await emit_numbers(db, ["a1"], [4])
    assert await asyncio.to_thread(broker.wait_until, lambda: broker.received()[-1].n == 4)
    assert {(one.aggregate, one.n) for one in broker.received() if one.relay == zombie} == {("a1", 4)}
    assert broker.first_deliveries() == {"a1": [1, 2, 3, 4], "a2": [1, 2, 3]}


async def test_order_holds_with_many_relays_through_failures_a_kill_and_a_stall(
    db: Database, dsn: str, broker: Broker, clock: BusinessClock, fleet: Fleet
) -> None:
    """E1.5, E1.6: the whole of it at once."""
    aggregates, rounds, per_round = [f"a{n}" for n in range(12)], 6, 6
    total = len(aggregates) * rounds * per_round
    broker.rules.refuse_share = 0.1
    for _ in range(4):
        fleet.add()
    extras = iter(range(10_000))
    stalled = ""

    async def catch_one() -> str:
        """Wait until the broker has some relay's events and keeps it waiting for the ack; its name."""
        before = set(broker.held)
        broker.rules.hold_next = True
        for _ in range(100):
            if await asyncio.to_thread(broker.wait_until, lambda: bool(broker.held - before), 0.2):
                return (broker.held - before).pop()
            clock.advance(seconds=1)
            await emit_numbers(db, ["extra"], [next(extras)])
        raise AssertionError("no relay sent anything")

    for n in range(rounds):
        await emit_numbers(db, aggregates, range(n * per_round, (n + 1) * per_round))
        if n == 1:
            killed = await catch_one()
            fleet.expire_leases(killed)
            assert fleet.bury(killed) == -signal.SIGKILL  # the broker has its events, and it will never know
            fleet.add()
        if n == 2:
            stalled = await catch_one()
            fleet.send(stalled, signal.SIGSTOP)
            fleet.expire_leases(stalled)
        if n == 4:
            fleet.send(stalled, signal.SIGCONT)
            broker.release()
        clock.advance(seconds=4)
    broker.rules.refuse_share = 0.0
    emitted_extras = next(extras)
    for _ in range(200):
        clock.advance(seconds=30)
        if not value(dsn, "SELECT EXISTS (SELECT 1 FROM duly.outbox)"):
            break
        await asyncio.to_thread(broker.wait_until, lambda: False, 0.1)
    assert len(broker.received()) > total + emitted_extras  # the dead relay's events were sent again
    found = broker.first_deliveries()
    assert sorted(found.pop("extra", [])) == list(range(emitted_extras))
    assert found == {aggregate: list(range(rounds * per_round)) for aggregate in aggregates}
    assert value(dsn, "SELECT count(DISTINCT id) FROM duly.events WHERE aggregate_id <> 'extra'") == total
    assert value(dsn, "SELECT count(*) FROM duly.events WHERE aggregate_id <> 'extra'") == total
