"""Dead letters: E2.3 (an operator can requeue), E3.7 (failure without retries waits for an administrator), E7.1."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from duly.db import Database, Tx
from duly.errors import Invalid, NotFound
from duly.jobs.handlers import JobContext
from duly.jobs.worker import Worker
from duly.operate import (
    Count,
    count_dead_letters,
    discard_dead_letter,
    discard_dead_letters,
    group_dead_letters,
    list_dead_letters,
    retry_dead_letter,
    retry_dead_letters,
)
from tests.engine.operate.conftest import NOON, WHO, Make, until_blocked
from tests.support import handlers

BURY_ANOTHER = """
INSERT INTO duly.dead_letters (id, name, payload, priority, due_at, created_at, original_delay, retry_count, source,
                               reason, error, error_kind, buried_at)
SELECT 2, name, payload, priority, due_at, created_at, original_delay, retry_count, source, reason, error, error_kind,
       buried_at
FROM duly.dead_letters WHERE id = 1
"""


async def test_a_retried_dead_letter_is_the_same_job_due_now_with_all_its_retries(db: Database, make: Make) -> None:
    """E3.7: it goes back into the queue under its own id."""
    make.dead(41, "charge", entity_id="order-1", payload='{"amount": "1.10"}', max_retries=3, retry_count=3)
    async with db.transaction() as tx:
        await retry_dead_letter(tx, 41, **WHO)
    assert make.run("SELECT id FROM duly.dead_letters") == []
    row = make.run(
        "SELECT id, name, entity_id, payload->>'amount', retry_count, max_retries, waits, run_at, unique_key,"
        " last_error FROM duly.jobs"
    )
    assert row == [(41, "charge", "order-1", "1.10", 0, 3, "requeued", NOON, None, "boom")]


async def test_retrying_writes_one_audit_row_in_the_same_transaction(db: Database, make: Make) -> None:
    """E7.1: who, what, before, after, why; rolled back with the action."""
    make.dead(41)

    async def retry_and_fail(tx: Tx) -> None:
        await retry_dead_letter(tx, 41, **WHO)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await db.run(retry_and_fail)
    assert make.audit() == []
    assert make.value("SELECT count(*) FROM duly.dead_letters") == 1
    async with db.transaction() as tx:
        await retry_dead_letter(tx, 41, **WHO)
    [entry] = make.audit()
    assert (entry["actor"], entry["action"], entry["subject"], entry["reason"]) == (
        "alice",
        "dead_letter.retried",
        "job:41",
        "the bank is back",
    )
    assert (entry["before"]["error"], entry["after"]["waits"]) == ("boom", "requeued")
    assert "payload" not in entry["before"]


async def test_a_retry_wakes_the_workers_after_its_commit(db: Database, make: Make) -> None:
    make.dead(41)
    listener = await db.connect()
    heard: asyncio.Queue[str] = asyncio.Queue()
    await listener.add_listener("duly", lambda *told: heard.put_nowait(told[3]))
    async with db.transaction() as tx:
        await retry_dead_letter(tx, 41, **WHO)
    assert await asyncio.wait_for(heard.get(), 10) == "jobs"
    await listener.close()


async def test_an_absent_dead_letter_cannot_be_retried_or_discarded(db: Database, make: Make) -> None:
    async with db.transaction() as tx:
        for id in (41, 0, -1, 2**63):
            with pytest.raises(NotFound):
                await retry_dead_letter(tx, id, **WHO)
            with pytest.raises(NotFound):
                await discard_dead_letter(tx, id, **WHO)
    assert make.audit() == []


async def test_an_action_without_an_actor_is_refused(db: Database, make: Make) -> None:
    make.dead(41)
    async with db.transaction() as tx:
        for actor in ("", "  ", "x" * 201, "a\x00b"):
            with pytest.raises(Invalid):
                await retry_dead_letter(tx, 41, actor=actor)
    assert make.value("SELECT count(*) FROM duly.dead_letters") == 1


async def test_of_two_operators_who_retry_one_dead_letter_one_wins(db: Database, make: Make) -> None:
    """E2.3: never two jobs; the other one is told that there is nothing to retry."""
    make.dead(41)
    first_holds, second_waits = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with db.transaction() as tx:
            await retry_dead_letter(tx, 41, **WHO)
            first_holds.set()
            await second_waits.wait()

    async def second() -> None:
        await first_holds.wait()
        async with db.transaction() as tx:
            await retry_dead_letter(tx, 41, **WHO)

    async def release_when_blocked() -> None:
        await first_holds.wait()
        await until_blocked(make)
        second_waits.set()

    results = await asyncio.gather(first(), second(), release_when_blocked(), return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], NotFound)
    assert make.run("SELECT id FROM duly.jobs") == [(41,)]
    assert len(make.audit()) == 1


async def test_twenty_bulk_retries_at_once_move_each_dead_letter_once(db: Database, make: Make) -> None:
    for id in range(1, 101):
        make.dead(id)

    async def one() -> int:
        async def work(tx: Tx) -> int:
            return await retry_dead_letters(tx, limit=10, **WHO)

        return await db.run(work)

    counts = await asyncio.gather(*(one() for _ in range(20)))
    assert make.value("SELECT count(*) FROM duly.jobs") == sum(counts)
    assert make.value("SELECT count(*) FROM duly.dead_letters") == 100 - sum(counts)
    assert len(make.audit()) == sum(counts)


async def test_a_bulk_retry_keeps_to_its_filters_and_limit_oldest_first(db: Database, make: Make) -> None:
    for id in range(1, 6):
        make.dead(id, "charge", buried_at=NOON - timedelta(minutes=id))
    make.dead(6, "charge", error_kind="OSError")
    make.dead(7, "refund")
    async with db.transaction() as tx:
        assert await count_dead_letters(tx, name="charge", error_kind="ValueError") == Count(5)
        assert await retry_dead_letters(tx, name="charge", error_kind="ValueError", limit=3, **WHO) == 3
        assert await retry_dead_letters(tx, name="unknown", **WHO) == 0
    assert make.run("SELECT id FROM duly.jobs ORDER BY id") == [(3,), (4,), (5,)]
    assert [entry["subject"] for entry in make.audit()] == ["job:3", "job:4", "job:5"]


async def test_a_limit_beyond_the_bound_is_refused(db: Database) -> None:
    async with db.transaction() as tx:
        for limit in (0, -1, 1_001):
            with pytest.raises(Invalid):
                await retry_dead_letters(tx, limit=limit, **WHO)
        with pytest.raises(Invalid):
            await list_dead_letters(tx, limit=1_001)


async def test_discarding_keeps_all_of_it_in_the_audit(db: Database, make: Make) -> None:
    """E7.1: deleted by an administrator, and recorded."""
    make.dead(41, payload='{"amount": "1.10"}')
    async with db.transaction() as tx:
        await discard_dead_letter(tx, 41, **WHO)
    assert make.run("SELECT 1 FROM duly.dead_letters UNION ALL SELECT 1 FROM duly.jobs") == []
    [entry] = make.audit()
    assert (entry["action"], entry["before"]["payload"], entry["after"]) == (
        "dead_letter.discarded",
        {"amount": "1.10"},
        None,
    )


async def test_discarding_in_bulk_deletes_what_it_counts(db: Database, make: Make) -> None:
    for id in range(1, 4):
        make.dead(id)
    async with db.transaction() as tx:
        assert await discard_dead_letters(tx, name="charge", limit=2, **WHO) == 2
        assert await discard_dead_letters(tx, **WHO) == 1
        assert await discard_dead_letters(tx, **WHO) == 0
    assert len(make.audit()) == 3


# ------------------------------------------------------------------------------------------------------------- order


async def test_a_retried_dead_letter_runs_before_the_jobs_that_waited_behind_it(db: Database, make: Make) -> None:
    """E2.3: its aggregate stays in order."""
    make.dead(1, "consumer:audit", order_key="order-1")
    later = make.behind("consumer:audit", "order-1", id=5)
    async with db.transaction() as tx:
        await retry_dead_letter(tx, 1, **WHO)
    assert make.run("SELECT id, waits FROM duly.jobs ORDER BY id") == [(1, "requeued"), (later, "behind")]
    make.run("DELETE FROM duly.jobs WHERE id = 1")
    assert make.run("SELECT id, waits, run_at FROM duly.jobs") == [(later, "due", NOON)]


async def test_discarding_a_dead_letter_lets_the_next_of_its_aggregate_go(db: Database, make: Make) -> None:
    make.dead(1, "consumer:audit", order_key="order-1")
    make.behind("consumer:audit", "order-1", id=5)
    async with db.transaction() as tx:
        await discard_dead_letter(tx, 1, **WHO)
    assert make.run("SELECT id, waits, run_at FROM duly.jobs") == [(5, "due", NOON)]


async def test_the_later_of_two_dead_letters_of_an_aggregate_waits_for_the_earlier(db: Database, make: Make) -> None:
    make.dead(1, "consumer:audit", order_key="order-1")
    make.dead(2, "consumer:audit", order_key="order-1")
    async with db.transaction() as tx:
        await retry_dead_letter(tx, 2, **WHO)
    assert make.run("SELECT id, waits, run_at = 'infinity' FROM duly.jobs") == [(2, "behind", True)]
    async with db.transaction() as tx:
        await discard_dead_letter(tx, 1, **WHO)
    assert make.run("SELECT id, waits, run_at FROM duly.jobs") == [(2, "due", NOON)]


async def test_retrying_a_whole_aggregate_at_once_keeps_its_order(db: Database, make: Make) -> None:
    for id in (1, 2, 3):
        make.dead(id, "consumer:audit", order_key="order-1")
    async with db.transaction() as tx:
        assert await retry_dead_letters(tx, **WHO) == 3
    assert make.run("SELECT id, waits FROM duly.jobs ORDER BY id") == [(1, "requeued"), (2, "behind"), (3, "behind")]


async def test_a_retry_waits_for_an_earlier_dead_letter_that_is_just_being_discarded(db: Database, make: Make) -> None:
    """Looked at without a lock, both would leave the later one behind nothing, forever."""
    make.dead(1, "consumer:audit", order_key="order-1")
    make.dead(2, "consumer:audit", order_key="order-1")
    discarded, go_on = asyncio.Event(), asyncio.Event()

    async def discard() -> None:
        async with db.transaction() as tx:
            await discard_dead_letter(tx, 1, **WHO)
            discarded.set()
            await go_on.wait()

    async def retry() -> None:
        await discarded.wait()
        async with db.transaction() as tx:
            await retry_dead_letter(tx, 2, **WHO)

    async def release_when_blocked() -> None:
        await discarded.wait()
        await until_blocked(make)
        go_on.set()

    await asyncio.gather(discard(), retry(), release_when_blocked())
    assert make.run("SELECT id, waits, run_at FROM duly.jobs") == [(2, "requeued", NOON)]


async def test_a_retry_waits_for_an_earlier_job_that_is_just_being_completed(db: Database, make: Make) -> None:
    """The job's own trigger cannot see what is not committed: nobody would let the retried one go."""
    earlier = make.job("consumer:audit", id=1, order_key="order-1")
    make.dead(2, "consumer:audit", order_key="order-1")
    worker = await db.connect()
    async with worker.transaction():
        await worker.execute("DELETE FROM duly.jobs WHERE id = $1", earlier)

        async def retry() -> None:
            async with db.transaction() as tx:
                await retry_dead_letter(tx, 2, **WHO)

        retrying = asyncio.create_task(retry())
        await until_blocked(make)
    await retrying
    await worker.close()
    assert make.run("SELECT id, waits, run_at FROM duly.jobs") == [(2, "requeued", NOON)]


async def test_a_worker_runs_what_was_retried(db: Database, make: Make) -> None:
    """E2.3, from the operator's command to the row in the log."""
    ran: list[tuple[int, int]] = []

    async def charge(context: JobContext) -> None:
        ran.append((context.job_id, context.retry_count))

    make.dead(41)
    async with db.transaction() as tx:
        await retry_dead_letter(tx, 41, **WHO)
    await Worker(db, handlers(charge)).run_once()
    assert ran == [(41, 0)]
    assert make.run("SELECT job_id, outcome FROM duly.executions") == [(41, "done")]


# ------------------------------------------------------------------------------------------------------------ alerts


async def test_an_alert_stays_open_when_another_job_dies_at_the_same_moment(db: Database, make: Make) -> None:
    make.dead(1)
    make.run("SELECT duly.alert('dead_letter', 'charge', 'boom')")
    worker = await db.connect()
    async with worker.transaction():
        await worker.execute(BURY_ANOTHER)
        await worker.execute("SELECT duly.alert('dead_letter', 'charge', 'boom again')")

        async def discard() -> None:
            async with db.transaction() as tx:
                await discard_dead_letter(tx, 1, **WHO)

        discarding = asyncio.create_task(discard())
        await until_blocked(make)
    await discarding
    await worker.close()
    assert make.run("SELECT count, resolved_at FROM duly.alerts") == [(2, None)]


async def test_the_alert_of_a_name_is_resolved_with_its_last_dead_letter(db: Database, make: Make) -> None:
    make.dead(1)
    make.dead(2)
    make.run("SELECT duly.alert('dead_letter', 'charge', 'boom'), duly.alert('dead_letter', 'refund', 'boom')")
    async with db.transaction() as tx:
        await retry_dead_letter(tx, 1, **WHO)
    assert make.value("SELECT count(*) FROM duly.alerts WHERE resolved_at IS NULL") == 2
    async with db.transaction() as tx:
        await discard_dead_letter(tx, 2, **WHO)
    assert make.run("SELECT subject FROM duly.alerts WHERE resolved_at IS NULL") == [("refund",)]


# ------------------------------------------------------------------------------------------------------------- lists


async def test_dead_letters_are_paged_newest_first_without_a_gap(db: Database, make: Make) -> None:
    """E7.1: paged by (buried_at, id), also where many were buried in one moment."""
    for id in range(1, 26):
        make.dead(id, entity_id=f"order-{id % 2}", buried_at=NOON + timedelta(seconds=id // 10))
    seen: list[int] = []
    before = None
    async with db.transaction() as tx:
        while page := await list_dead_letters(tx, before=before, limit=4):
            seen += [one.id for one in page]
            before = (page[-1].buried_at, page[-1].id)
        of_entity = await list_dead_letters(tx, entity_id="order-1", name="charge")
        of_name = await list_dead_letters(tx, name="refund")
    assert seen == list(range(25, 0, -1))
    assert [one.id for one in of_entity] == list(range(25, 0, -2))
    assert of_name == []


async def test_dead_letters_are_grouped_by_name_and_kind_of_error(db: Database, make: Make) -> None:
    make.dead(1, "charge", buried_at=NOON - timedelta(minutes=3), error="first")
    make.dead(2, "charge", buried_at=NOON - timedelta(minutes=2), error="second")
    make.dead(3, "charge", error_kind="OSError", buried_at=NOON - timedelta(minutes=4))
    make.dead(4, "refund", buried_at=NOON - timedelta(minutes=1))
    async with db.transaction() as tx:
        groups = await group_dead_letters(tx)
    assert [(g.name, g.error_kind, str(g.count), g.newest_error) for g in groups] == [
        ("refund", "ValueError", "1", "boom"),
        ("charge", "ValueError", "2", "second"),
        ("charge", "OSError", "1", "boom"),
    ]
    assert groups[1].newest_at == NOON - timedelta(minutes=2)
