"""A consumer that keeps failing is retried, then dead-lettered; nobody else waits for it (E2.3)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from duly import Database, Duly, Event, Tx, Worker
from duly.testing import BusinessClock
from tests.engine.inbox.effects import (
    dead_letters_back_to_the_queue,
    effects,
    outcomes,
    prepare,
    publish_numbers,
    record,
)
from tests.support import rows

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


class Flaky:
    """A ledger that fails for the aggregates it is told."""

    def __init__(self, **options: object) -> None:
        self.app = Duly()
        self.broken: set[str] = set()

        @self.app.consumer("ledger", on="order.*", **options)  # type: ignore[arg-type] # whatever the test gives
        async def ledger(event: Event, tx: Tx) -> None:
            await record(tx, "ledger", event)
            if event.aggregate_id in self.broken:
                raise ConnectionError(f"{event.aggregate_id} is closed")


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_failing_consumer_is_retried_with_backoff_and_then_dead_lettered_with_its_error(
    db: Database, dsn: str, clock: BusinessClock, ordered: bool
) -> None:
    """E2.3: five retries by default, each wait twice the last, never before its time."""
    flaky = Flaky(ordered=ordered)
    await prepare(flaky.app, db, dsn)
    flaky.broken.add("a1")
    clock.freeze(NOON)
    await publish_numbers(db, ["a1"], [1])
    waits = []
    for _ in range(5):
        await Worker(db, flaky.app.handlers).run_once()
        ((run_at, error),) = rows(dsn, "SELECT run_at, last_error FROM duly.jobs")
        assert error == "ConnectionError: a1 is closed"
        wait = run_at - clock.now()
        waits.append(wait)
        clock.advance(seconds=wait.total_seconds() - 0.001)
        assert (await Worker(db, flaky.app.handlers).run_once()).done == 0
        clock.advance(seconds=0.001)
    assert waits == [timedelta(seconds=seconds) for seconds in (1, 2, 4, 8, 16)]
    await Worker(db, flaky.app.handlers).run_once()
    assert rows(dsn, "SELECT count(*) FROM duly.jobs") == [(0,)]
    assert rows(dsn, "SELECT name, entity_id, reason, error_kind, error, retry_count FROM duly.dead_letters") == [
        ("consumer:ledger", "a1", "retries_used_up", "ConnectionError", "ConnectionError: a1 is closed", 5)
    ]
    assert rows(dsn, "SELECT kind, subject FROM duly.alerts") == [("dead_letter", "consumer:ledger")]
    assert outcomes(dsn) == ["retried"] * 5 + ["buried"]
    assert effects(dsn, "ledger") == {}


async def test_a_consumer_may_name_its_own_waits(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.6: a fixed list; the last one repeats."""
    flaky = Flaky(backoff=[60, timedelta(minutes=5)], max_retries=3)
    await prepare(flaky.app, db, dsn)
    flaky.broken.add("a1")
    clock.freeze(NOON)
    await publish_numbers(db, ["a1"], [1])
    waits = []
    for _ in range(3):
        await Worker(db, flaky.app.handlers).run_once()
        ((run_at,),) = rows(dsn, "SELECT run_at FROM duly.jobs")
        waits.append((run_at - clock.now()).total_seconds())
        clock.freeze(run_at)
    assert waits == [60, 300, 300]


@pytest.mark.parametrize("ordered", [False, True])
async def test_other_aggregates_go_on_while_one_fails(
    db: Database, dsn: str, clock: BusinessClock, ordered: bool
) -> None:
    """E2.3: through its retries and after its death."""
    flaky = Flaky(ordered=ordered, max_retries=1)
    await prepare(flaky.app, db, dsn)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1", "a2"], [1, 2])
    for n in (3, 4):
        await Worker(db, flaky.app.handlers).run_once()
        clock.advance(seconds=5)
        await publish_numbers(db, ["a1", "a2"], [n])
    await Worker(db, flaky.app.handlers).run_once()
    assert {aggregate: sorted(done) for aggregate, done in effects(dsn, "ledger").items()} == {"a2": [1, 2, 3, 4]}
    assert rows(dsn, "SELECT DISTINCT entity_id FROM duly.dead_letters") == [("a1",)]


async def test_one_consumer_that_fails_does_not_hold_up_another(db: Database, dsn: str) -> None:
    """E2.3: each has its own job for the event."""
    flaky = Flaky()

    @flaky.app.consumer("mail", on="order.*")
    async def mail(event: Event, tx: Tx) -> None:
        await record(tx, "mail", event)

    await prepare(flaky.app, db, dsn)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1, 2])
    await Worker(db, flaky.app.handlers).run_once()
    assert sorted(effects(dsn, "mail")["a1"]) == [1, 2]
    assert rows(dsn, "SELECT DISTINCT name FROM duly.jobs") == [("consumer:ledger",)]


async def test_a_dead_letter_that_is_requeued_has_its_effect_once(db: Database, dsn: str) -> None:
    """E2.3: an operator can requeue; nothing of the failed runs is left."""
    flaky = Flaky(max_retries=0)
    await prepare(flaky.app, db, dsn)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, flaky.app.handlers).run_once()
    flaky.broken.clear()
    dead_letters_back_to_the_queue(dsn)
    await Worker(db, flaky.app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1]}
    assert outcomes(dsn) == ["buried", "done"]
    assert rows(dsn, "SELECT count(*) FROM duly.dead_letters") == [(0,)]


async def test_a_retry_after_success_elsewhere_is_a_duplicate(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E2.2: a redelivery succeeded while the first job waited for its retry."""
    flaky = Flaky()
    await prepare(flaky.app, db, dsn)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, flaky.app.handlers).run_once()
    flaky.broken.clear()
    rows(
        dsn,
        "INSERT INTO duly.jobs (name, entity_id, event_id, run_at, due_at, created_at)"
        " SELECT name, entity_id, event_id, duly.now(), due_at, created_at FROM duly.jobs",
    )
    await Worker(db, flaky.app.handlers).run_once()
    clock.advance(minutes=1)
    await Worker(db, flaky.app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1]}
    assert outcomes(dsn) == ["retried", "done", "duplicate"]
