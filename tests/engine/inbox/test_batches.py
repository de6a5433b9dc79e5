"""Batch consumers: many events in one transaction; a poison one is found and stands alone (E2.1, E2.3)."""

from __future__ import annotations

import asyncio

import pytest

from duly import Database, Duly, Event, Tx, Worker
from duly.errors import Invalid
from duly.testing import BusinessClock, drain
from tests.engine.inbox.effects import effects, outcomes, prepare, publish_numbers, record
from tests.support import rows


class Batch:
    """A ledger that takes ten at a time, and fails for the numbers it is told."""

    def __init__(self, *, ordered: bool = False) -> None:
        self.app = Duly()
        self.poison: set[int] = set()
        self.sizes: list[int] = []

        @self.app.consumer("ledger", on="order.*", batch=10, ordered=ordered, max_retries=1)
        async def ledger(events: list[Event], tx: Tx) -> None:
            self.sizes.append(len(events))
            for event in events:
                await record(tx, "ledger", event)
                if event.payload["n"] in self.poison:
                    raise ValueError("poison")


async def batch_ledger(db: Database, dsn: str, *, ordered: bool = False) -> Batch:
    batch = Batch(ordered=ordered)
    await prepare(batch.app, db, dsn)
    return batch


def done(dsn: str) -> list[int]:
    return sorted(n for numbers in effects(dsn, "ledger").values() for n in numbers)


async def test_many_events_are_one_transaction(db: Database, dsn: str) -> None:
    """E2.1: the effects, the inbox rows and the jobs' ends of ten events have one author."""
    batch = await batch_ledger(db, dsn)
    await publish_numbers(db, ["a1"], range(10))
    await Worker(db, batch.app.handlers).run_once()
    assert batch.sizes == [10]
    assert done(dsn) == list(range(10))
    assert outcomes(dsn) == ["done"] * 10
    written_by = rows(
        dsn,
        "SELECT xmin::text FROM effects UNION SELECT xmin::text FROM duly.processed_events"
        " UNION SELECT xmin::text FROM duly.executions",
    )
    assert len(written_by) == 1


async def test_a_poison_event_is_isolated_and_the_rest_is_committed(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E2.3: halves, and halves of halves; only the poison one is retried, and in the end dead-lettered."""
    batch = await batch_ledger(db, dsn)
    batch.poison.add(6)
    await publish_numbers(db, ["a1"], range(10))
    await Worker(db, batch.app.handlers).run_once()
    assert done(dsn) == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert sorted(outcomes(dsn)) == ["done"] * 9 + ["retried"]
    assert len(batch.sizes) <= 9  # 10, 5, 5, 2, 3, and so on: not one by one
    clock.advance(seconds=5)
    await Worker(db, batch.app.handlers).run_once()
    assert rows(dsn, "SELECT (e.payload->>'n')::int, d.error FROM duly.dead_letters d"
                     " JOIN duly.events e ON e.id = d.event_id") == [(6, "ValueError: poison")]  # fmt: skip
    assert rows(dsn, "SELECT count(*) FROM duly.processed_events") == [(9,)]
    assert rows(dsn, "SELECT count(*) FROM duly.jobs") == [(0,)]


async def test_a_batch_of_poison_is_all_retried(db: Database, dsn: str) -> None:
    """E2.3."""
    batch = await batch_ledger(db, dsn)
    batch.poison.update(range(10))
    await publish_numbers(db, ["a1"], range(10))
    await Worker(db, batch.app.handlers).run_once()
    assert done(dsn) == []
    assert rows(dsn, "SELECT count(*) FROM duly.jobs WHERE waits = 'retry'") == [(10,)]


async def test_a_batch_skips_what_was_handled_before(db: Database, dsn: str) -> None:
    """E2.2: redeliveries among fresh events."""
    batch = await batch_ledger(db, dsn)
    await publish_numbers(db, ["a1"], range(3))
    await Worker(db, batch.app.handlers).run_once()
    rows(
        dsn,
        "INSERT INTO duly.jobs (name, entity_id, event_id, run_at, due_at, created_at)"
        " SELECT 'consumer:ledger', aggregate_id, id, duly.now(), duly.now(), duly.now() FROM duly.events",
    )
    await publish_numbers(db, ["a1"], [3, 4])
    await Worker(db, batch.app.handlers).run_once()
    assert done(dsn) == [0, 1, 2, 3, 4]
    assert batch.sizes == [3, 2]
    assert sorted(outcomes(dsn)) == ["done"] * 5 + ["duplicate"] * 3


async def test_an_ordered_batch_holds_one_event_of_each_aggregate(db: Database, dsn: str) -> None:
    """E2.3: order within the aggregate, many aggregates in a transaction; poison holds its own aggregate only."""
    batch = await batch_ledger(db, dsn, ordered=True)
    await publish_numbers(db, [f"a{n}" for n in range(5)], range(4))
    await publish_numbers(db, ["poisoned"], [99, 100])
    batch.poison.add(99)
    await drain(db, batch.app.handlers)
    assert effects(dsn, "ledger") == {f"a{n}": [0, 1, 2, 3] for n in range(5)}
    assert rows(dsn, "SELECT order_key, waits FROM duly.jobs ORDER BY id") == [
        ("poisoned", "retry"),
        ("poisoned", "behind"),
    ]


async def test_a_batch_that_lost_one_lease_commits_the_others_and_lets_go_of_it(db: Database, dsn: str) -> None:
    """E3.5: the batch runs again without it; the worker neither writes for it nor waits for it."""
    batch = Batch()
    inside, go_on = asyncio.Event(), asyncio.Event()
    app = Duly()

    @app.consumer("ledger", on="order.*", batch=10)
    async def ledger(events: list[Event], tx: Tx) -> None:
        batch.sizes.append(len(events))
        inside.set()
        await go_on.wait()
        for event in events:
            await record(tx, "ledger", event)

    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], range(5))
    worker = Worker(db, app.handlers, lease_seconds=3600)
    running = asyncio.create_task(worker.run_once())
    await asyncio.wait_for(inside.wait(), 10)
    rows(
        dsn,
        "UPDATE duly.jobs SET lease_token = nextval('duly.lease_tokens'), leased_by = 'another',"
        " lease_expires_at = clock_timestamp() + interval '1 hour' WHERE id = (SELECT min(id) FROM duly.jobs)",
    )
    go_on.set()
    await asyncio.wait_for(running, 8)
    assert batch.sizes == [5, 4]
    assert done(dsn) == [1, 2, 3, 4]
    assert worker.counts == {"done": 4, "lost": 1}


async def test_a_batch_consumer_without_a_transaction_is_refused() -> None:
    """E2.1: a batch is one transaction, so it must take one."""
    app = Duly()

    async def ledger(events: list[Event]) -> None:
        return None

    with pytest.raises(Invalid, match="a batch is one transaction"):
        app.consumer("ledger", on="*", batch=10)(ledger)
