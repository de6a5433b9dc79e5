"""Messages that are no events, events that no handler survives, and configurations that are refused."""

from __future__ import annotations

import json
import signal

import pytest

from duly.operate.dead_letters import list_dead_letters, retry_dead_letter
from tests.brokers.process import Part
from tests.brokers.servers import Raw
from tests.brokers.test_delivery import as_message, envelope
from tests.brokers.world import World
from tests.support import rows

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(300)]
DEEP = b"[" * 20_000 + b"]" * 20_000
TEXTS = [
    b"no json",
    b"{}",
    b'"text"',
    DEEP,
    b'{"id": "1", "specversion": "0.3", "source": "/x", "type": "order.changed", "data": {}}',
    b'{"id": "1", "specversion": "1.0", "source": "/x", "type": "order.changed", "data": {"n": NaN}}',
    b'{"id": "1\\u0000", "specversion": "1.0", "source": "/x", "type": "order.changed", "data": {}}',
    b'{"id": "2", "specversion": "1.0", "source": "/x", "type": "order.changed", "data": {"x": "\\ud800"}}',
    b'{"id": "3", "specversion": "1.0", "source": "/x", "type": "order.changed", "data": {"x": "\\u0000"}}',
    b"x" * 200_000,
]
BYTES = [b"\xff\xfe\x00", b"\x00" * 10]
LOST = """
SELECT e.aggregate_id, count(*) FROM duly.executions x JOIN duly.received e ON e.id = x.event_id
WHERE x.outcome = 'lost' AND x.name = %(name)s GROUP BY 1
"""


async def test_what_is_no_event_is_buried_and_the_rest_goes_on(world: World) -> None:
    world.run("receiver", "worker")
    stranger, kind = world.stranger(), world.kind
    poison = [*TEXTS, *(BYTES if kind.carries_bytes else [])]
    messages = [as_message(kind, envelope(1), {"n": 1})]
    messages += [Raw({"content-type": "application/cloudevents+json"}, body, "o-1") for body in poison]
    messages += [as_message(kind, envelope(2), {"n": 2})]
    await stranger.write(world.topic, "order.changed", messages)
    await world.until(lambda: world.effects().get("o-1") == [1, 2], "the good ones have their effect")
    await world.until(
        lambda: world.value("SELECT count(*) FROM duly.dead_letters") == len(poison), "each poison is buried"
    )
    names = world.value("SELECT jsonb_agg(DISTINCT name) FROM duly.dead_letters")
    assert names == [f"receive:{kind.name}"]
    assert world.value("SELECT count(*) FROM duly.received") == 2


async def test_a_buried_message_is_read_again_when_an_operator_says_so(world: World) -> None:
    world.run("receiver", "worker")
    stranger, kind = world.stranger(), world.kind
    bad = as_message(kind, envelope(1, specversion="0.3"), {"n": 1})
    await stranger.write(world.topic, "order.changed", [bad])
    await world.until(lambda: world.value("SELECT count(*) FROM duly.dead_letters") == 1, "it is buried")
    (letter,) = await _letters(world)
    async with world.db.transaction() as tx:
        await retry_dead_letter(tx, letter, actor="operator")
    await world.until(
        lambda: world.value("SELECT count(*) FROM duly.executions WHERE name LIKE 'receive:%%'") >= 1, "it ran again"
    )
    await world.until(lambda: world.value("SELECT count(*) FROM duly.dead_letters") == 1, "it is no better")
    _mend(world)
    async with world.db.transaction() as tx:
        await retry_dead_letter(tx, (await _letters(world))[0], actor="operator")
    await world.until(lambda: world.effects().get("o-1") == [1], "it has its effect")


def _mend(world: World) -> None:
    """What was wrong is put right where it was kept: here, that was the version."""
    payload = world.value("SELECT payload FROM duly.dead_letters")
    text = json.dumps(payload["headers"]).replace('"0.3"', '"1.0"')
    rows(
        world.dsn,
        "UPDATE duly.dead_letters SET payload = payload || jsonb_build_object('headers', %(headers)s::jsonb, 'body', "
        "translate(encode(replace(convert_from(decode(payload->>'body', 'base64'), 'UTF8'), '0.3', '1.0')::bytea, "
        "'base64'), E'\\n', ''))",
        {"headers": text},
    )


async def _letters(world: World) -> list[int]:
    async with world.db.transaction() as tx:
        return [letter.id for letter in await list_dead_letters(tx)]


async def test_a_handler_that_kills_its_process_is_given_up_and_neighbours_go_on(world: World) -> None:
    """Whoever is beside it dies as often, and is spared: the last attempt of each is made alone (decision 31)."""
    neighbours = [f"good-{number}" for number in range(2)]
    world.run("relay", "receiver")
    await world.emit(["killer"], [1], do="kill")
    await world.emit(neighbours, [1], do="linger")
    await world.emit(["killer"], [2])
    await world.until(lambda: world.value("SELECT count(*) FROM duly.jobs") == 8, "all are claimed at once")
    dead = await _work_until_given_up(world)
    assert rows(world.dsn, "SELECT name, order_key, reason FROM duly.dead_letters") == [
        ("consumer:ledger", "killer", "worker_died")
    ]
    assert len(dead) == 3, "two retries"
    assert ["job_runs_alone" in worker.said for worker in dead] == [False, False, True]
    good = {key: [1] for key in neighbours}
    await world.until(lambda: world.effects() == good, "the neighbours have their effect")
    lost = rows(world.dsn, LOST, {"name": "consumer:ledger"})
    assert {key: count for key, count in lost if key != "killer"} == dict.fromkeys(neighbours, 2), "they were beside it"
    rows(world.dsn, "INSERT INTO mended VALUES ('kill')")
    async with world.db.transaction() as tx:
        await retry_dead_letter(tx, (await _letters(world))[0], actor="operator")
    await world.until(lambda: world.effects() == {**good, "killer": [1, 2]}, "mended, it goes on in order")


async def _work_until_given_up(world: World) -> list[Part]:
    """One worker after the other, until one buries the event; those that were killed."""
    dead: list[Part] = []
    for _ in range(8):
        worker = world.run("worker")
        await world.until(
            lambda worker=worker: (
                not worker.is_running or world.value("SELECT count(*) FROM duly.dead_letters")  # type: ignore[misc]  # mypy knows no lambda defaults
            ),
            "it is killed, or the event given up",
        )
        if worker.is_running:
            break
        assert worker.wait() == -signal.SIGKILL, worker.said
        dead.append(worker)
    return dead


async def test_a_handler_that_fails_holds_up_its_aggregate_alone(world: World) -> None:
    world.run("relay", "receiver", "worker")
    await world.emit(["sick"], [1], do="fail")
    await world.emit(["sick", "good"], [2, 3])
    await world.until(lambda: world.effects() == {"good": [2, 3]}, "the others go on")
    await world.until(lambda: world.value("SELECT count(*) FROM duly.dead_letters") == 1, "it is given up")
    rows(world.dsn, "INSERT INTO mended VALUES ('fail')")
    async with world.db.transaction() as tx:
        await retry_dead_letter(tx, (await _letters(world))[0], actor="operator")
    await world.until(lambda: world.effects() == {"good": [2, 3], "sick": [1, 2, 3]}, "in order")


async def test_a_receiver_of_what_was_never_set_up_is_refused_with_what_to_do(world: World) -> None:
    if not world.kind.refuses_absent_topics:
        pytest.skip("here a topic needs nothing to be there before it")
    receiver = world.run("receiver", receive_topics="never.set.up")
    assert receiver.wait() == 2, receiver.said
    assert "duly brokers setup" in receiver.said
