"""A relay or a receiver that is killed, stopped or told to end at each of its steps: another one takes over."""

from __future__ import annotations

import signal

import pytest

from tests.brokers.world import World

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(300)]
AGGREGATES = ["a", "b", "c", "d"]
RELAY = ["relay.fetched", "transport.sent", "relay.sent", "relay.before_commit", "relay.committed"]
RECEIVER = ["receiver.received", "receiver.before_commit", "receiver.committed", "receiver.acknowledged"]
WORKER = ["handler.mid", "worker.before_commit", "worker.committed"]


@pytest.mark.parametrize("point", RELAY)
async def test_a_relay_killed_anywhere_is_replaced(world: World, point: str) -> None:
    world.run("receiver", "worker")
    await world.emit(AGGREGATES, range(1, 4))
    broken = world.run("relay", failpoints=f"{point}=kill9", relay_batch=6)
    assert broken.wait() == -signal.SIGKILL, broken.said
    assert f"failpoint {point}: kill9" in broken.said
    world.run("relay")
    await world.emit(AGGREGATES, range(4, 6))
    await world.until_done(AGGREGATES, range(1, 6))


@pytest.mark.parametrize("point", ["relay.fetched", "transport.sent", "relay.sent", "relay.before_commit"])
async def test_a_relay_that_stood_still_and_comes_back_does_no_harm(world: World, point: str) -> None:
    """Its lanes are another's by then: it sends nothing more, and writes nothing."""
    world.run("receiver", "worker")
    await world.emit(AGGREGATES, range(1, 4))
    zombie = world.run("relay", failpoints=f"{point}=stop", relay_batch=6)
    zombie.wait_until_stopped()
    if point == "relay.before_commit":  # it holds locks: the database ends its transaction when somebody asks
        world.value("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE state LIKE 'idle in trans%%'")
    world.run("relay")
    await world.emit(AGGREGATES, range(4, 6))
    await world.until(lambda: world.effects().get("a") == [1, 2, 3, 4, 5], "the other relay has gone on")
    zombie.send(signal.SIGCONT)
    await world.emit(AGGREGATES, range(6, 8))
    await world.until_done(AGGREGATES, range(1, 8))


@pytest.mark.parametrize("point", RELAY)
async def test_a_relay_told_to_end_anywhere_ends_and_the_next_goes_on(world: World, point: str) -> None:
    world.run("receiver", "worker")
    await world.emit(AGGREGATES, range(1, 4))
    ending = world.run("relay", failpoints=f"{point}=term", relay_batch=6)
    assert ending.wait() == 0, ending.said
    world.run("relay")
    await world.emit(AGGREGATES, range(4, 6))
    await world.until_done(AGGREGATES, range(1, 6))


@pytest.mark.parametrize("point", ["relay.parked", "relay.unparked"])
async def test_a_relay_killed_while_a_topic_is_away_or_comes_is_replaced(world: World, point: str) -> None:
    """What follows an event that waits is parked behind it, and let go after it, whoever does that."""
    if world.kind.name == "nats":
        pytest.skip("one stream takes every topic, so none is ever away")
    world.topic = f"{world.topic}-late"
    await world.emit(AGGREGATES, range(1, 4))
    broken = world.run("relay", failpoints=f"{point}=kill9")
    if point == "relay.unparked":
        parked = "SELECT count(*) FROM duly.outbox WHERE parked"
        await world.until(lambda: world.value(parked) == 2 * len(AGGREGATES), "what follows is parked")
        await world.set_up()
    assert broken.wait() == -signal.SIGKILL, broken.said
    await world.set_up()
    world.run("relay", "receiver", "worker")
    await world.until_done(AGGREGATES, range(1, 4))


@pytest.mark.parametrize("point", RECEIVER)
async def test_a_receiver_killed_anywhere_is_replaced(world: World, point: str) -> None:
    world.run("relay", "worker")
    await world.emit(AGGREGATES, range(1, 4))
    broken = world.run("receiver", failpoints=f"{point}=kill9@2", receive_batch=2)
    assert broken.wait() == -signal.SIGKILL, broken.said
    assert f"failpoint {point}: kill9" in broken.said
    world.run("receiver")
    await world.emit(AGGREGATES, range(4, 6))
    await world.until_done(AGGREGATES, range(1, 6))


@pytest.mark.parametrize("point", WORKER)
async def test_a_worker_killed_anywhere_is_replaced(world: World, point: str) -> None:
    world.run("relay", "receiver")
    await world.emit(AGGREGATES, range(1, 4))
    broken = world.run("worker", failpoints=f"{point}=kill9")
    assert broken.wait() == -signal.SIGKILL, broken.said
    world.run("worker")
    await world.until_done(AGGREGATES, range(1, 4))


@pytest.mark.parametrize("point", ["receiver.received", "receiver.before_commit", "receiver.committed"])
async def test_a_receiver_that_stood_still_and_comes_back_does_no_harm(world: World, point: str) -> None:
    world.run("relay", "worker")
    zombie = world.run("receiver", failpoints=f"{point}=stop", receive_batch=4)
    await world.emit(AGGREGATES, range(1, 4))
    zombie.wait_until_stopped()
    if point == "receiver.before_commit":  # it holds locks: the database ends its transaction when somebody asks
        world.value("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE state LIKE 'idle in trans%%'")
    world.run("receiver")
    await world.emit(AGGREGATES, range(4, 6))
    await world.until(lambda: world.effects().get("a") == [1, 2, 3, 4, 5], "the other reads on")
    zombie.send(signal.SIGCONT)
    await world.until_done(AGGREGATES, range(1, 6))


@pytest.mark.parametrize("point", RECEIVER)
async def test_a_receiver_told_to_end_anywhere_ends_and_the_next_goes_on(world: World, point: str) -> None:
    world.run("relay", "worker")
    await world.emit(AGGREGATES, range(1, 4))
    ending = world.run("receiver", failpoints=f"{point}=term", receive_batch=3)
    assert ending.wait() == 0, ending.said
    world.run("receiver")
    await world.emit(AGGREGATES, range(4, 6))
    await world.until_done(AGGREGATES, range(1, 6))
