"""Jobs and their log in an operator's hands: E3.7 (row lifecycle), E3.8 (the log), E7.1 (history, paged), E7.3."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from duly.db import Database, Tx
from duly.errors import Conflict, Invalid, NotFound
from duly.operate import cancel_job, list_executions, list_jobs, run_job_now
from tests.engine.operate.conftest import NOON, WHO, Make, until_blocked


async def test_a_cancelled_job_is_gone_and_kept_in_the_audit(db: Database, make: Make) -> None:
    """E3.7: cancel deletes the row."""
    id = make.job(entity_id="order-1", payload='{"amount": "1.10"}')
    async with db.transaction() as tx:
        await cancel_job(tx, id, **WHO)
    assert make.run("SELECT 1 FROM duly.jobs") == []
    [entry] = make.audit()
    assert (entry["action"], entry["subject"], entry["before"]["payload"]) == (
        "job.cancelled",
        f"job:{id}",
        {"amount": "1.10"},
    )


async def test_a_running_job_can_be_cancelled_and_its_worker_cannot_complete_it(db: Database, make: Make) -> None:
    """E3.5, E3.7: the token finds no row any more."""
    id = make.job()
    make.lease(id)
    token = make.value("SELECT lease_token FROM duly.jobs")
    async with db.transaction() as tx:
        await cancel_job(tx, id, **WHO)
    settled = make.run(
        "DELETE FROM duly.jobs WHERE id = %(id)s AND lease_token = %(token)s RETURNING id", id=id, token=token
    )
    assert settled == []


async def test_cancelling_lets_the_next_job_of_the_order_go(db: Database, make: Make) -> None:
    first = make.job("consumer:audit", order_key="order-1")
    make.behind("consumer:audit", "order-1")
    async with db.transaction() as tx:
        await cancel_job(tx, first, **WHO)
    assert make.run("SELECT waits, run_at FROM duly.jobs") == [("due", NOON)]


async def test_cancelling_what_is_not_queued_says_where_it_is(db: Database, make: Make) -> None:
    make.dead(7)
    async with db.transaction() as tx:
        with pytest.raises(NotFound, match="dead letter"):
            await cancel_job(tx, 7, **WHO)
        with pytest.raises(NotFound, match="no job"):
            await cancel_job(tx, 8, **WHO)
        with pytest.raises(NotFound):
            await run_job_now(tx, 7, **WHO)
        with pytest.raises(NotFound):
            await cancel_job(tx, 2**70, **WHO)


async def test_of_two_operators_who_cancel_one_job_one_wins(db: Database, make: Make) -> None:
    id = make.job()

    async def one() -> None:
        async def work(tx: Tx) -> None:
            await cancel_job(tx, id, **WHO)

        await db.run(work)

    results = await asyncio.gather(*(one() for _ in range(8)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["NoneType"] + ["NotFound"] * 7
    assert len(make.audit()) == 1


async def test_a_waiting_job_can_be_made_due_now(db: Database, make: Make) -> None:
    id = make.job(run_at=NOON + timedelta(hours=1), waits="retry", retry_count=1)
    async with db.transaction() as tx:
        await run_job_now(tx, id, **WHO)
    assert make.run("SELECT run_at, waits, retry_count, due_at FROM duly.jobs") == [(NOON, "requeued", 1, NOON)]
    [entry] = make.audit()
    assert (entry["action"], entry["before"]["waits"], entry["after"]["waits"]) == ("job.run_now", "retry", "requeued")


async def test_making_an_overdue_job_due_now_does_not_move_it_back(db: Database, make: Make) -> None:
    id = make.job(run_at=NOON - timedelta(hours=1))
    async with db.transaction() as tx:
        await run_job_now(tx, id, **WHO)
    assert make.value("SELECT run_at FROM duly.jobs") == NOON - timedelta(hours=1)


async def test_a_job_that_runs_or_must_keep_its_order_cannot_be_made_due_now(db: Database, make: Make) -> None:
    running = make.job()
    make.lease(running)
    make.job("consumer:audit", order_key="order-1")
    behind = make.behind("consumer:audit", "order-1")
    make.dead(1_000, "consumer:audit", order_key="order-2")
    behind_dead = make.behind("consumer:audit", "order-2")
    async with db.transaction() as tx:
        for id in (running, behind, behind_dead):
            with pytest.raises(Conflict):
                await run_job_now(tx, id, **WHO)
    assert make.audit() == []


async def test_asking_for_a_job_behind_another_does_not_keep_it_from_being_let_go(db: Database, make: Make) -> None:
    """Whoever lets the next one go passes over a row that is locked: the order is locked first."""
    head = make.job("consumer:audit", order_key="order-1")
    behind = make.behind("consumer:audit", "order-1")
    worker = await db.connect()

    async def complete() -> None:
        await worker.execute("DELETE FROM duly.jobs WHERE id = $1", head)

    async with db.transaction() as tx:
        with pytest.raises(Conflict):
            await run_job_now(tx, behind, **WHO)
        completing = asyncio.create_task(complete())
        await until_blocked(make)
    await completing
    await worker.close()
    assert make.run("SELECT id, waits, run_at FROM duly.jobs") == [(behind, "due", NOON)]


async def test_a_job_behind_nothing_can_be_made_due_now(db: Database, make: Make) -> None:
    """Hand-written SQL may have removed what was before it."""
    id = make.behind("consumer:audit", "order-1")
    async with db.transaction() as tx:
        await run_job_now(tx, id, **WHO)
    assert make.run("SELECT run_at, waits FROM duly.jobs") == [(NOON, "requeued")]


async def test_jobs_are_listed_in_the_words_of_the_specification(db: Database, make: Make) -> None:
    """E3.7: Pending, Running, Failed."""
    pending, running, failed = make.job(entity_id="order-1"), make.job(), make.job("refund", entity_id="order-1")
    make.lease(running)
    make.lease(failed, seconds=-1)
    behind = make.behind("consumer:audit", "order-1")
    async with db.transaction() as tx:
        everything = await list_jobs(tx)
        assert [(job.id, job.status) for job in everything] == [
            (pending, "Pending"),
            (running, "Running"),
            (failed, "Failed"),
            (behind, "Pending"),
        ]
        assert [job.run_at for job in everything] == [NOON, NOON, NOON, None]
        assert everything[1].leased_by == "w1"
        for status, expected in (("Pending", [pending, behind]), ("Running", [running]), ("Failed", [failed])):
            assert [job.id for job in await list_jobs(tx, status=status)] == expected
        assert [job.id for job in await list_jobs(tx, name="refund")] == [failed]
        assert [job.id for job in await list_jobs(tx, entity_id="order-1")] == [pending, failed]
        assert [job.id for job in await list_jobs(tx, entity_id="order-1", name="charge")] == [pending]
        assert [job.id for job in await list_jobs(tx, after=running, limit=1)] == [failed]
        for wrong in ("pending", "DeadLetter"):
            with pytest.raises(Invalid):
                await list_jobs(tx, status=wrong)
        with pytest.raises(Invalid):
            await list_jobs(tx, name="a\x00b")


async def test_what_plain_sql_schedules_is_what_the_list_shows(db: Database, make: Make) -> None:
    """E7.3: the SQL face and the operator's list are about the same rows."""
    id = make.value("SELECT duly.schedule('charge', 'order-1', duly.now() + interval '15 minutes')")
    async with db.transaction() as tx:
        [job] = await list_jobs(tx)
    assert (job.id, job.entity_id, job.status, job.run_at) == (id, "order-1", "Pending", NOON + timedelta(minutes=15))


async def test_the_log_is_paged_newest_first_without_a_gap(db: Database, make: Make) -> None:
    """E3.8, E7.1: also where many runs ended in one moment, over partitions, and for all names together."""
    expected = []
    for number in range(30):
        name, ended = ("charge", "refund")[number % 2], NOON - timedelta(days=number // 8)
        id = make.execution(number, name, completed_at=ended, entity_id=f"order-{number % 3}")
        expected.append((ended, id, name, number))
    expected.sort(reverse=True)
    seen = []
    before = None
    async with db.transaction() as tx:
        while page := await list_executions(tx, before=before, limit=7):
            seen += [(run.completed_at, run.execution_id) for run in page]
            before = seen[-1]
        of_name = [run.execution_id for run in await list_executions(tx, name="refund")]
        of_entity = [run.execution_id for run in await list_executions(tx, entity_id="order-2", name="refund")]
        of_job = [run.execution_id for run in await list_executions(tx, job_id=4)]
    assert seen == [(ended, id) for ended, id, _, _ in expected]
    assert of_name == [id for _, id, name, _ in expected if name == "refund"]
    assert of_entity == [id for _, id, name, number in expected if name == "refund" and number % 3 == 2]
    assert of_job == [id for _, id, _, number in expected if number == 4]
