"""Ordered consumers: a later event of an aggregate waits for the earlier one, whatever becomes of it (E2.3).

Workers run alone here: the relay sweeps up jobs that were forgotten, and would hide that they were.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import psycopg
import pytest

from duly import Database, Duly, Event, Relay, Tx, Worker
from duly.jobs.handlers import Handler
from duly.testing import BusinessClock
from tests.engine.inbox.effects import (
    dead_letters_back_to_the_queue,
    effects,
    emit_numbers,
    prepare,
    publish_numbers,
    record,
)
from tests.engine.inbox.test_failures import Flaky
from tests.forking import Forked
from tests.support import finish, python, rows, value

ROOT = Path(__file__).parents[3]
QUEUE = "SELECT waits, run_at = 'infinity' FROM duly.jobs WHERE order_key = 'a1' ORDER BY id"
STRANDED = """
SELECT j.id FROM duly.jobs j
WHERE j.waits = 'behind'
  AND NOT EXISTS (SELECT 1 FROM duly.jobs e WHERE e.name = j.name AND e.order_key = j.order_key AND e.id < j.id)
  AND NOT EXISTS (SELECT 1 FROM duly.dead_letters d WHERE d.name = j.name AND d.order_key = j.order_key)
"""


async def work_off(db: Database, handlers: Mapping[str, Handler]) -> None:
    """Workers until there is nothing to do at this moment."""
    for _ in range(100):
        if not (await Worker(db, handlers).run_once()).done:
            return
    raise AssertionError("the workers find no end")


async def flaky_ledger(db: Database, dsn: str, **options: object) -> Flaky:
    flaky = Flaky(ordered=True, **options)
    await prepare(flaky.app, db, dsn)
    return flaky


async def test_events_of_one_aggregate_are_handled_one_after_the_other(db: Database, dsn: str) -> None:
    """E2.3: with ten slots free, never two of an aggregate at a time, and in order."""
    app = Duly()
    at_work: dict[str, int] = {}

    @app.consumer("ledger", on="*", ordered=True)
    async def ledger(event: Event, tx: Tx) -> None:
        at_work[event.aggregate_id] = at_work.get(event.aggregate_id, 0) + 1
        assert at_work[event.aggregate_id] == 1
        await record(tx, "ledger", event)
        await asyncio.sleep(0)
        at_work[event.aggregate_id] -= 1

    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1", "a2", "a3"], range(10))
    await work_off(db, app.handlers)
    assert effects(dsn, "ledger") == {aggregate: list(range(10)) for aggregate in ("a1", "a2", "a3")}


async def test_a_later_event_waits_behind_an_earlier_one_through_its_retries(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E2.3: also one that is emitted while the earlier one backs off."""
    flaky = await flaky_ledger(db, dsn)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1, 2])
    for _ in range(3):
        await work_off(db, flaky.app.handlers)
        clock.advance(seconds=20)
    await publish_numbers(db, ["a1"], [3])
    await work_off(db, flaky.app.handlers)
    assert rows(dsn, QUEUE) == [("retry", False), ("behind", True), ("behind", True)]
    assert effects(dsn, "ledger") == {}
    flaky.broken.clear()
    clock.advance(seconds=60)
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"a1": [1, 2, 3]}


async def test_a_dead_letter_holds_its_aggregate(db: Database, dsn: str) -> None:
    """E2.3: those before it in the queue when it died, and those that come later."""
    flaky = await flaky_ledger(db, dsn, max_retries=0)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1, 2])
    await work_off(db, flaky.app.handlers)
    flaky.broken.clear()
    await publish_numbers(db, ["a1"], [3])
    await work_off(db, flaky.app.handlers)
    assert rows(dsn, QUEUE) == [("behind", True), ("behind", True)]
    assert rows(dsn, "SELECT order_key FROM duly.dead_letters") == [("a1",)]
    assert effects(dsn, "ledger") == {}


async def test_the_first_event_behind_a_lone_dead_letter_waits_too(db: Database, dsn: str) -> None:
    """E2.3: nothing of the aggregate is in the queue; the dead letter alone keeps the place."""
    flaky = await flaky_ledger(db, dsn, max_retries=0)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1])
    await work_off(db, flaky.app.handlers)
    assert rows(dsn, QUEUE) == []
    flaky.broken.clear()
    await publish_numbers(db, ["a1"], [2])
    await work_off(db, flaky.app.handlers)
    assert rows(dsn, QUEUE) == [("behind", True)]


@pytest.mark.parametrize("decision", ["retried", "discarded"])
async def test_a_dead_letter_that_is_decided_lets_the_next_run(db: Database, dsn: str, decision: str) -> None:
    """E2.3: retried, it goes first; discarded, the next one goes."""
    flaky = await flaky_ledger(db, dsn, max_retries=0)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1, 2])
    await work_off(db, flaky.app.handlers)
    await publish_numbers(db, ["a1"], [3])
    flaky.broken.clear()
    if decision == "retried":
        dead_letters_back_to_the_queue(dsn)
    else:
        rows(dsn, "DELETE FROM duly.dead_letters")
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"a1": [1, 2, 3] if decision == "retried" else [2, 3]}
    assert rows(dsn, "SELECT count(*) FROM duly.jobs") == [(0,)]


async def test_several_dead_letters_of_one_aggregate_all_hold_it(db: Database, dsn: str) -> None:
    """E2.3: the next one runs when the last of them is decided."""
    flaky = await flaky_ledger(db, dsn, max_retries=0)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1, 2, 3])
    await work_off(db, flaky.app.handlers)
    rows(
        dsn,
        "WITH gone AS (DELETE FROM duly.jobs WHERE id = (SELECT min(id) FROM duly.jobs) RETURNING *)"
        " INSERT INTO duly.dead_letters SELECT id, name, entity_id, payload, priority, due_at, created_at,"
        " original_delay, retry_count, max_retries, backoff_seconds, source, event_id, order_key, correlation_id,"
        " causation_id, traceparent, 'worker_died', 'died', 'WorkerDied', duly.now() FROM gone",
    )
    flaky.broken.clear()
    rows(dsn, "DELETE FROM duly.dead_letters WHERE id = (SELECT min(id) FROM duly.dead_letters)")
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {}
    rows(dsn, "DELETE FROM duly.dead_letters")
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"a1": [3]}


@pytest.mark.parametrize("cancelled", ["first", "middle", "last"])
async def test_a_job_that_is_cancelled_breaks_no_chain(db: Database, dsn: str, cancelled: str) -> None:
    """E3.2: wherever in the line it stood."""
    flaky = await flaky_ledger(db, dsn)
    await publish_numbers(db, ["a1"], [0, 1, 2, 3])
    place = {"first": 0, "middle": 1, "last": 3}[cancelled]
    rows(dsn, f"DELETE FROM duly.jobs WHERE id = (SELECT id FROM duly.jobs ORDER BY id OFFSET {place} LIMIT 1)")
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"a1": [n for n in range(4) if n != place]}


async def test_two_ordered_consumers_do_not_wait_for_each_other(db: Database, dsn: str) -> None:
    """E2.3: order is kept within a consumer."""
    flaky = await flaky_ledger(db, dsn)

    @flaky.app.consumer("mail", on="order.*", ordered=True)
    async def mail(event: Event, tx: Tx) -> None:
        await record(tx, "mail", event)

    await flaky.app.prepare(db)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1, 2, 3])
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "mail") == {"a1": [1, 2, 3]}


# -- races between the relay that adds, the worker that finishes, and the operator who decides -----------------------


async def test_a_relay_and_a_worker_at_the_same_moment_strand_nothing(db: Database, dsn: str) -> None:
    """E2.3: the worker finishes the last job of a key while the relay decides whether the new one waits behind it."""
    flaky = await flaky_ledger(db, dsn)
    await publish_numbers(db, ["a1"], [1])
    await emit_numbers(db, ["a1"], [2])
    with psycopg.connect(dsn) as worker:
        worker.execute("DELETE FROM duly.jobs")  # the completion of the last job, not yet committed
        relaying = asyncio.create_task(Relay(db).run_once())
        await wait_for_lock(dsn)
        worker.commit()
        await asyncio.wait_for(relaying, 10)
    assert rows(dsn, QUEUE) == [("due", False)]
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"a1": [2]}


async def test_a_worker_that_finishes_after_the_relay_decided_frees_the_new_job(db: Database, dsn: str) -> None:
    """E2.3: the other way round; the relay's transaction is still open."""
    flaky = await flaky_ledger(db, dsn)
    await publish_numbers(db, ["a1"], [1])
    await emit_numbers(db, ["a1"], [2])
    process = paused_relay(dsn)
    try:
        finishing = asyncio.create_task(asyncio.to_thread(rows, dsn, "DELETE FROM duly.jobs WHERE waits = 'due'"))
        await wait_for_lock(dsn)
        process.send_signal(signal.SIGCONT)
        await asyncio.wait_for(finishing, 10)
    finally:
        process.kill()
        finish(process)
    assert rows(dsn, QUEUE) == [("due", False)]
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"a1": [2]}


async def test_a_dead_letter_that_is_retried_while_the_relay_adds_the_next_strands_nothing(
    db: Database, dsn: str
) -> None:
    """E2.3: retried, run and finished before the relay commits the job that it put behind it."""
    flaky = await flaky_ledger(db, dsn, max_retries=0)
    flaky.broken.add("a1")
    await publish_numbers(db, ["a1"], [1])
    await work_off(db, flaky.app.handlers)
    flaky.broken.clear()
    await emit_numbers(db, ["a1"], [2])
    with psycopg.connect(dsn) as operator:
        operator.execute(
            "WITH gone AS (DELETE FROM duly.dead_letters RETURNING *)"
            " INSERT INTO duly.jobs (id, name, entity_id, run_at, due_at, created_at, waits, event_id, order_key)"
            " SELECT id, name, entity_id, duly.now(), due_at, created_at, 'requeued', event_id, order_key FROM gone"
        )
        process = start_relay(dsn)
        await wait_for_lock(dsn)
        operator.commit()
    try:
        await asyncio.to_thread(process.wait_until_stopped)
        working = asyncio.create_task(Worker(db, flaky.app.handlers).run_once())
        await wait_for_lock_or(dsn, working)
        process.send_signal(signal.SIGCONT)
        await asyncio.wait_for(working, 20)
        assert finish(process)[0] == 0
    finally:
        process.kill()
    assert rows(dsn, STRANDED) == []
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"a1": [1, 2]}


async def test_two_jobs_of_a_key_that_leave_at_the_same_moment_strand_nothing(db: Database, dsn: str) -> None:
    """E3.2: the head is finished while the one behind it is cancelled; the third must not be forgotten."""
    flaky = await flaky_ledger(db, dsn)
    await publish_numbers(db, ["a1"], [1, 2, 3])
    head, second, _ = (row[0] for row in rows(dsn, "SELECT id FROM duly.jobs ORDER BY id"))
    with psycopg.connect(dsn) as operator:
        operator.execute("DELETE FROM duly.jobs WHERE id = %s", [second])
        finishing = asyncio.create_task(
            asyncio.to_thread(rows, dsn, f"DELETE FROM duly.jobs WHERE id = {head} RETURNING id")
        )
        await wait_for_lock_or(dsn, finishing)
        operator.commit()
        await asyncio.wait_for(finishing, 10)
    assert rows(dsn, STRANDED) == []
    await work_off(db, flaky.app.handlers)
    assert effects(dsn, "ledger") == {"a1": [3]}


async def test_a_job_that_waits_behind_nothing_is_found_by_the_relay(db: Database, dsn: str) -> None:
    """E2.3: whatever stranded it; one behind an earlier job, or behind a dead letter, is left where it is."""
    flaky = await flaky_ledger(db, dsn, max_retries=0)
    flaky.broken.add("a3")
    await publish_numbers(db, ["a3"], [1])
    await work_off(db, flaky.app.handlers)
    await publish_numbers(db, ["a1", "a2", "a3"], [1, 2])
    rows(dsn, "UPDATE duly.jobs SET waits = 'behind', run_at = 'infinity' WHERE order_key = 'a1'")
    await Relay(db).run_once()
    assert rows(dsn, "SELECT order_key, array_agg(waits ORDER BY id) FROM duly.jobs GROUP BY 1 ORDER BY 1") == [
        ("a1", ["due", "behind"]),
        ("a2", ["due", "behind"]),
        ("a3", ["behind", "behind"]),
    ]


BLOCKED = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
PAUSED_RELAY = """
    import asyncio, os
    from duly import Database, Relay

    async def main():
        print((await Relay(Database(os.environ["DATABASE_URL"])).run_once()).facts)

    asyncio.run(main())
    """


async def wait_for_lock(dsn: str) -> None:
    """Until somebody waits for somebody."""
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(value, dsn, BLOCKED):
            pass


async def wait_for_lock_or(dsn: str, task: asyncio.Task[object]) -> None:
    """Until the task waits for a lock, or is done because it needs none."""
    async with asyncio.timeout(20):
        while not task.done() and not await asyncio.to_thread(value, dsn, BLOCKED):
            pass


def start_relay(dsn: str) -> Forked:
    """A relay that stops itself when its transaction is complete but for the COMMIT."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return python(dsn, PAUSED_RELAY, failpoints="relay.before_commit=stop", env={"PYTHONPATH": path})


def paused_relay(dsn: str) -> Forked:
    """The same, and it stands there."""
    process = start_relay(dsn)
    process.wait_until_stopped()
    return process
