"""A broker that is down, killed, paused, or whose word is lost: nothing is lost, order holds, effects come once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Iterator
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from tests.brokers.process import Part
from tests.brokers.test_delivery import as_attributes
from tests.brokers.world import World
from tests.support import rows, value

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(600)]
AGGREGATES = [f"o-{index}" for index in range(5)]
CUT = "failpoint transport.sent: cut"


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_broker_that_was_down_gets_everything_in_order(world: World, how: str) -> None:
    world.run("relay")
    world.run("receiver", "worker")
    await world.emit(AGGREGATES, range(1, 4))
    await world.until(lambda: len(world.effects().get("o-0", [])) >= 1, "it works")
    getattr(world.server, how)()
    try:
        await world.emit(AGGREGATES, range(4, 11))
        await world.until(
            lambda: world.value("SELECT count(*) FROM duly.outbox") >= 7 * len(AGGREGATES), "the outbox grows"
        )
        # an outage is no attempt of any event: the relay has tried more than once by now, and counts nothing
        await _until_seen(world, "duty_down")
        assert world.value("SELECT count(*) FROM duly.outbox WHERE attempts > 0 OR failed_at IS NOT NULL") == 0
    finally:
        world.server.start()
    await world.emit(AGGREGATES, range(11, 13))
    await world.until_done(AGGREGATES, range(1, 13), seconds=120 + world.kind.restart_seconds)


async def _until_seen(world: World, event: str) -> None:
    await world.until(lambda: event in world.said(), f"somebody says {event}", seconds=120)


async def test_a_broker_killed_in_the_midst_of_traffic_loses_nothing(world: World) -> None:
    world.run("relay", relay_batch=10)
    world.run("receiver", "worker", receive_batch=10)
    emitting = asyncio.create_task(world.emit(AGGREGATES, range(1, 41)))
    for seen in (5, 60):
        await world.until(lambda seen=seen: sum(map(len, world.effects().values())) >= seen, "traffic")  # type: ignore[misc]  # mypy knows no lambda defaults
        world.server.kill()
        world.server.start()
    await emitting
    await world.until_done(AGGREGATES, range(1, 41), seconds=150 + world.kind.restart_seconds)


async def test_a_paused_broker_holds_up_everything_and_loses_nothing(world: World) -> None:
    world.run("relay")
    world.run("receiver", "worker")
    await world.emit(AGGREGATES, range(1, 3))
    await world.until(lambda: len(world.effects().get("o-0", [])) >= 1, "it works")
    world.server.pause()
    try:
        await world.emit(AGGREGATES, range(3, 6))
        await _until_seen(world, "duty_down")
    finally:
        world.server.resume()
    await world.until_done(AGGREGATES, range(1, 6), seconds=240)
    assert world.value("SELECT count(*) FROM duly.events WHERE topic = %(topic)s", topic=world.topic) == 25


async def test_a_slow_broker_slows_things_down_and_loses_nothing(world: World) -> None:
    world.run("relay", relay_batch=10)
    world.run("receiver", "worker", receive_batch=10)
    slow = asyncio.create_task(_slow_down(world))
    try:
        await world.emit(AGGREGATES, range(1, 21))
        await world.until(lambda: world.effects("mail"), "some of it has arrived")
    finally:
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        world.server.resume()
    await world.until_done(AGGREGATES, range(1, 21), seconds=240)
    assert value(world.dsn, "SELECT max(attempts) FROM duly.event_log") in (0, None)


async def _slow_down(world: World) -> None:
    """It stands still for most of the time, and moves on a little in between."""
    while True:
        await asyncio.to_thread(world.server.pause)
        await asyncio.sleep(0.8)
        world.server.resume()
        await asyncio.sleep(0.2)


async def test_a_lost_acknowledgement_repeats_on_the_wire_and_not_in_effect(world: World) -> None:
    stranger, kind = world.stranger(), world.kind
    await stranger.watch(world.topic)
    cuts = kind.lose_acknowledgement is None
    armed = f"transport.sent=cut:{world.server.port}@2" if cuts else ""
    relay = world.run("relay", failpoints=armed, lane_seconds="60")  # so long that a client may mend it by itself
    world.run("receiver", "worker")
    ids = await world.emit(AGGREGATES, [1])
    await world.until_done(AGGREGATES, [1])
    ids += await _emit_unheard(world, relay)
    await world.until_done(AGGREGATES, range(1, 6))
    assert (CUT in relay.said) == cuts
    seen = Counter(as_attributes(kind, one)[0]["id"] for one in await stranger.read(2 * len(ids), seconds=5))
    assert seen.keys() == {str(one) for one in ids}
    assert (max(seen.values()) > 1) == kind.shows_repetitions, (seen, relay.said)


async def _emit_unheard(world: World, relay: Part) -> list[UUID]:
    """The broker stands still until the line is cut: it was sent the events, and nobody hears its word."""
    if world.kind.lose_acknowledgement is not None:
        world.kind.lose_acknowledgement(world.server)
        return await world.emit(AGGREGATES, range(2, 6))
    assert CUT not in relay.said
    world.server.pause()
    try:
        ids = await world.emit(AGGREGATES, range(2, 6))
        await world.until(lambda: CUT in relay.said, "the line is cut")
    finally:
        world.server.resume()
    return ids


async def test_a_receiver_whose_line_is_cut_before_it_acknowledges_hears_again_and_does_nothing_twice(
    world: World,
) -> None:
    receiver = world.run("receiver", failpoints=f"receiver.committed=cut:{world.server.port}")
    world.run("relay", "worker")
    await world.emit(AGGREGATES, range(1, 6))
    await world.until_done(AGGREGATES, range(1, 6))
    assert "failpoint receiver.committed: cut" in receiver.said


# -- the database is away --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def closed_database(dsn: str) -> Iterator[None]:
    """Nobody may connect, and whoever was connected is cut off."""
    admin = psycopg.conninfo.make_conninfo(dsn, dbname="postgres")
    name = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
    close = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(close.format(sql.Identifier(name), sql.Literal(False)))
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        try:
            yield
        finally:
            connection.execute(close.format(sql.Identifier(name), sql.Literal(True)))


async def test_a_database_that_is_away_while_receiving_buries_nothing(world: World) -> None:
    receiver = world.run("receiver", failpoints="receiver.received=stop@2", receive_batch=5)
    world.run("relay")
    await world.emit(AGGREGATES, range(1, 3))
    receiver.wait_until_stopped()
    with closed_database(world.dsn):
        receiver.send(signal.SIGCONT)
        await world.until(lambda: "duty_down" in receiver.said, "the receiver says so")
    world.run("worker")
    await world.until_done(AGGREGATES, range(1, 3))
    assert receiver.is_running


async def test_what_workers_cannot_keep_up_with_stays_at_the_broker(world: World) -> None:
    world.run("relay")
    receiver = world.run("receiver", receive_ahead=20, receive_batch=5)
    await world.emit([f"o-{index}" for index in range(60)], [1])
    await world.until(lambda: world.value("SELECT count(*) FROM duly.outbox") == 0, "all is at the broker")
    await world.until(lambda: world.value("SELECT count(*) FROM duly.jobs") >= 20, "it has received what it may")
    rows(world.dsn, "SELECT pg_sleep(2)")  # real time, in which it could receive more
    assert world.value("SELECT count(*) FROM duly.jobs") <= 20 + 2 * 5  # each message makes two jobs
    assert world.value("SELECT count(*) FROM duly.received") < 60
    world.run("worker")
    await world.until_done([f"o-{index}" for index in range(60)], [1])
    assert receiver.is_running
