"""Names that share a worker get alike of it, whatever else it knows (E3.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from duly.db import Database
from duly.jobs import turns
from duly.jobs.claim import Claims
from duly.jobs.handlers import Handler
from tests.engine.jobs.witness import schedule_numbers
from tests.support import handlers, rows

IDLE = 12


async def work() -> None:
    """A handler for claims by hand."""


def named(limits: Mapping[str, int | None]) -> dict[str, Handler]:
    """The same work under several names."""
    [handler] = handlers(work).values()
    return {name: replace(handler, name=name, limit=limit) for name, limit in limits.items()}


def schedule_one(dsn: str, name: str, entity: int) -> None:
    """One more, due now."""
    rows(dsn, "SELECT duly.schedule(%(name)s, %(entity)s, duly.now())", {"name": name, "entity": str(entity)})


async def claimed(db: Database, claims: Claims, rooms: list[int]) -> Counter[str]:
    """How much of each name these claims bring."""
    connection = await db.connect()
    try:
        return Counter([job.name for room in rooms for job in await claims.take(connection, room)])
    finally:
        await connection.close()


@pytest.mark.parametrize("worker", ["w1", "w2", "w3"])
async def test_busy_neighbours_among_idle_names_get_the_same(db: Database, dsn: str, worker: str) -> None:
    """With one name first after the other, the second of two neighbours would get one claim of fourteen."""
    for busy in ("busy-one", "busy-two"):
        schedule_numbers(dsn, busy, 200)
    idle = [f"idle-{n}" for n in range(IDLE)]
    names: dict[str, int | None] = dict.fromkeys([*idle[:6], "busy-one", "busy-two", *idle[6:]])
    got = await claimed(db, Claims(named(names), worker=worker, lease_seconds=60), [5] * 28)
    assert got == {"busy-one": 70, "busy-two": 70}


async def test_a_name_with_little_to_do_does_not_wait_behind_one_with_much(db: Database, dsn: str) -> None:
    schedule_numbers(dsn, "much", 100)
    claims = Claims(named({"much": None, "little": None}), worker="w", lease_seconds=60)
    await claimed(db, claims, [5, 5])
    for n in range(5):
        schedule_one(dsn, "little", n)
        assert await claimed(db, claims, [5]) == {"little": 1, "much": 4}


async def test_who_was_cut_short_is_first_the_next_time(db: Database, dsn: str) -> None:
    claims = Claims(named({"short": None, "long": None}), worker="w", lease_seconds=60)
    schedule_numbers(dsn, "long", 100)
    await claimed(db, claims, [5])  # so that "short" is first
    for n in range(4):
        schedule_one(dsn, "short", n)
    assert await claimed(db, claims, [5]) == {"short": 4, "long": 1}
    for n in range(4, 8):
        schedule_one(dsn, "short", n)
    assert await claimed(db, claims, [5]) == {"long": 5}


async def test_names_with_a_limit_take_turns_with_each_other_and_with_the_rest(db: Database, dsn: str) -> None:
    for busy in ("limited-one", "limited-two", "free-one", "free-two"):
        schedule_numbers(dsn, busy, 100)
    names = {"limited-one": 50, "limited-two": 50, "free-one": None, "free-two": None}
    got = await claimed(db, Claims(named(names), worker="w", lease_seconds=60), [2] * 12)
    assert got == {"limited-one": 8, "limited-two": 8, "free-one": 4, "free-two": 4}


def test_workers_do_not_all_begin_with_the_same_name() -> None:
    """Those that die soon would never come to the later ones."""
    names = [f"name-{n}" for n in range(5)]
    first = Counter(turns.begin(names, f"host-{n}")[0] for n in range(500))
    assert set(first) == set(names)
    assert min(first.values()) > 50
    assert sorted(turns.begin(names, "host-1")) == names
