"""A handler that kills its process is given up alone: whoever stood beside it is not (E3.5, E3.7)."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from duly.db import Database
from duly.jobs import apart
from duly.jobs.handlers import JobContext
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker
from tests.engine.jobs.process import Order, run
from tests.engine.jobs.witness import effects, expire_leases, is_empty, make_effects, until, working
from tests.support import handlers, rows, value

INNOCENT = [f"i{number}" for number in range(20)]
TOOK_OVER = """
UPDATE duly.jobs SET lease_token = nextval('duly.lease_tokens'), leased_by = 'dead', claimed_at = duly.now(),
    lease_expires_at = clock_timestamp() - interval '1 s'
WHERE entity_id = ANY(%(entities)s)
"""


async def schedule_all(db: Database, name: str, entities: list[str], **options: Any) -> None:
    async with db.transaction() as tx:
        for entity in entities:
            await schedule(tx, name, entity, **options)


def lose(dsn: str, *entities: str) -> None:
    """Their worker has died with them."""
    rows(dsn, TOOK_OVER, {"entities": list(entities)})


def patient(db: Database, work: Any) -> Worker:
    worker = Worker(db, handlers(work))
    worker.poll_seconds = 0.05
    return worker


@pytest.mark.parametrize("retries", [1, 2])
async def test_neighbours_of_a_killer_are_not_given_up_with_it(db: Database, dsn: str, retries: int) -> None:
    """Killer and neighbours are held by the same process whenever it dies, and have as many attempts."""
    make_effects(dsn)
    await schedule_all(db, "poison", ["killer"], max_retries=retries, priority=1)
    await schedule_all(db, "work", INNOCENT, max_retries=retries, priority=4)
    order = Order(dsn, concurrency=10, forever=False)
    ends = []
    for _ in range(2 * len(INNOCENT)):
        ends.append(run(order))
        if is_empty(dsn):
            break
        expire_leases(dsn)
    assert ends.count(-signal.SIGKILL) == retries + 1
    assert rows(dsn, "SELECT entity_id, reason FROM duly.dead_letters") == [("killer", "worker_died")]
    assert effects(dsn) == dict.fromkeys(INNOCENT, 1)
    lost = rows(dsn, "SELECT entity_id, count(*), count(DISTINCT lease_token) FROM duly.executions "
                     "WHERE outcome = 'lost' GROUP BY 1")  # fmt: skip
    assert all(runs == tokens <= retries + (entity == "killer") for entity, runs, tokens in lost), lost


async def test_two_killers_are_found_one_after_the_other(db: Database, dsn: str) -> None:
    make_effects(dsn)
    await schedule_all(db, "poison", ["k1", "k2"], max_retries=1, priority=1)
    await schedule_all(db, "work", INNOCENT[:5], max_retries=1, priority=4)
    order = Order(dsn, concurrency=10, forever=False)
    for _ in range(20):
        run(order)
        if is_empty(dsn):
            break
        expire_leases(dsn)
    assert sorted(rows(dsn, "SELECT entity_id FROM duly.dead_letters")) == [("k1",), ("k2",)]
    assert effects(dsn) == dict.fromkeys(INNOCENT[:5], 1)


async def test_a_last_chance_waits_until_nothing_else_runs_here(db: Database, dsn: str) -> None:
    running: set[str] = set()
    beside: list[set[str]] = []
    go_on = asyncio.Event()

    async def work(ctx: JobContext) -> None:
        assert ctx.entity_id is not None
        running.add(ctx.entity_id)
        beside.append(set(running) if ctx.entity_id.startswith("suspect") else set())
        if ctx.entity_id == "long":
            await go_on.wait()
        running.discard(ctx.entity_id)

    await schedule_all(db, "work", ["long"])
    async with working(patient(db, work)):
        await until(lambda: running == {"long"})
        await schedule_all(db, "work", ["suspect1", "suspect2", "other"], max_retries=1)
        lose(dsn, "suspect1", "suspect2")
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.jobs WHERE leased_by = 'dead' "
                                       "AND retry_count = 0 AND claimed_at IS NULL") == 2)  # fmt: skip
        assert running == {"long"}
        go_on.set()
        await until(lambda: is_empty(dsn))
    assert [one for one in beside if one] == [{"suspect1"}, {"suspect2"}]
    assert value(dsn, "SELECT count(*) FROM duly.executions WHERE outcome = 'lost'") == 2
    assert not value(dsn, "SELECT count(*) FROM duly.dead_letters")


async def test_it_does_not_wait_for_ever(db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "DRAIN_SECONDS", 0.1)
    done: list[str] = []
    go_on = asyncio.Event()

    async def work(ctx: JobContext) -> None:
        if ctx.entity_id == "long":
            await go_on.wait()
        done.append(str(ctx.entity_id))

    await schedule_all(db, "work", ["long", "suspect"], max_retries=1)
    lose(dsn, "suspect")
    rows(dsn, "UPDATE duly.jobs SET run_at = run_at + interval '1 hour' WHERE entity_id = 'suspect'")
    async with working(patient(db, work)):
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.jobs WHERE entity_id = 'long' "
                                       "AND leased_by <> 'dead'") == 1)  # fmt: skip
        rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE entity_id = 'suspect'")
        await until(lambda: done == ["suspect"])
        go_on.set()
        await until(lambda: is_empty(dsn))


async def test_what_is_to_be_buried_is_buried_and_does_not_run_again(db: Database, dsn: str) -> None:
    """Claimed beside one that has a chance left: it goes back as what it is."""
    ran: list[str] = []

    async def work(ctx: JobContext) -> None:
        ran.append(str(ctx.entity_id))

    await schedule_all(db, "work", ["suspect", "dead"], max_retries=1)
    lose(dsn, "suspect", "dead")
    rows(dsn, "UPDATE duly.jobs SET retry_count = 1 WHERE entity_id = 'dead'")
    await Worker(db, handlers(work)).run_once()
    await Worker(db, handlers(work)).run_once()
    assert ran == ["suspect"]
    assert rows(dsn, "SELECT entity_id, retry_count FROM duly.dead_letters") == [("dead", 2)]
    assert is_empty(dsn)
