"""The queue under concurrency: each job claimed once, one timer for each entity, one winner (E3.2, E3.4)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from duly.db import Database
from duly.jobs import sql
from duly.jobs.handlers import JobContext
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker
from tests.engine.jobs.process import Order, start
from tests.engine.jobs.witness import (
    each_once,
    effects,
    is_empty,
    make_effects,
    outcomes,
    queue,
    schedule_numbers,
    until,
)  # fmt: skip
from tests.support import handlers, rows, value

CLAIM = {"limit": 1_000, "worker": "w", "lease_seconds": 60}


def at_once(dsn: str, count: int, act: Callable[[psycopg.Connection[Any], int], Any]) -> list[Any]:
    """Let as many connections act at the same moment; what each of them got."""
    barrier = threading.Barrier(count)

    def one(number: int) -> Any:
        with psycopg.connect(dsn) as connection:
            barrier.wait(20)
            result = act(connection, number)
            connection.commit()
            return result

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def schedule_by(rule: str) -> Callable[[psycopg.Connection[Any], int], Any]:
    def act(connection: psycopg.Connection[Any], number: int) -> Any:
        try:
            found = connection.execute(
                "SELECT duly.schedule('expire', 'e', duly.now() + make_interval(hours => %s), on_conflict => %s)",
                (number + 1, rule),
            ).fetchone()
        except psycopg.errors.UniqueViolation:
            connection.rollback()
            return None
        assert found is not None
        return found[0]

    return act


@pytest.mark.parametrize("rule", ["replace", "keep", "reject"])
def test_ten_schedules_of_one_timer_at_once_end_with_one_row(dsn: str, rule: str) -> None:
    """E3.2: with each rule every caller gets the one job's id, or is refused; nobody gets a strange error."""
    for _ in range(5):
        rows(dsn, "DELETE FROM duly.jobs")
        ids = at_once(dsn, 10, schedule_by(rule))
        [(job_id,)] = rows(dsn, "SELECT id FROM duly.jobs")
        accepted = [given for given in ids if given is not None]
        assert set(accepted) == {job_id}
        assert len(accepted) == (1 if rule == "reject" else 10)


def test_ten_schedules_that_allow_each_other_end_with_ten_rows(dsn: str) -> None:
    """E3.2: the fourth rule."""
    ids = at_once(dsn, 10, schedule_by("allow"))
    assert len(set(ids)) == 10
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 10


def test_each_job_is_claimed_by_one_of_many_claimers(dsn: str) -> None:
    """E3.4: eight connections claim at the same moment; together they get every job, none of them twice."""
    schedule_numbers(dsn, "work", 200)

    def claim(connection: psycopg.Connection[Any], number: int) -> list[int]:
        values = {**CLAIM, "names": ["work"], "limit": 40, "worker": f"w{number}"}
        return [row[0] for row in connection.execute(sql.CLAIM_JOBS.percent.encode(), values).fetchall()]

    taken = [job_id for some in at_once(dsn, 8, claim) for job_id in some]
    assert len(taken) == len(set(taken)) == 200
    assert value(dsn, "SELECT count(DISTINCT leased_by) FROM duly.jobs") >= 5
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE retry_count <> 0") == 0


def test_an_expired_lease_is_taken_over_by_one_of_many(dsn: str) -> None:
    """E3.5: one successor, one more retry, one lost run in the history."""
    schedule_numbers(dsn, "work", 20)
    rows(
        dsn,
        "UPDATE duly.jobs SET lease_token = 1, leased_by = 'dead', claimed_at = now(), lease_expires_at = '2000-01-01'",
    )

    def claim(connection: psycopg.Connection[Any], number: int) -> list[int]:
        values = {**CLAIM, "names": ["work"], "worker": f"w{number}"}
        return [row[0] for row in connection.execute(sql.CLAIM_JOBS.percent.encode(), values).fetchall()]

    taken = [job_id for some in at_once(dsn, 8, claim) for job_id in some]
    assert len(taken) == len(set(taken)) == 20
    assert rows(dsn, "SELECT DISTINCT retry_count FROM duly.jobs") == [(1,)]
    assert rows(dsn, "SELECT count(*), count(DISTINCT job_id) FROM duly.executions WHERE outcome = 'lost'") == [
        (20, 20)
    ]


def test_cancelling_and_claiming_have_one_winner(dsn: str) -> None:
    """E3.2: each of the timers either runs or was taken back, and both sides know which."""
    schedule_numbers(dsn, "work", 60)

    def act(connection: psycopg.Connection[Any], number: int) -> tuple[str, list[str]]:
        connection.autocommit = True
        won: list[str] = []
        for entity in range(1, 61):
            if number % 2:
                cancelled = connection.execute("SELECT duly.cancel('work', %s::text)", (entity,)).fetchone()
                assert cancelled is not None
                won += [str(entity)] * cancelled[0]
            else:
                values = {**CLAIM, "names": ["work"], "limit": 1}
                won += [row[2] for row in connection.execute(sql.CLAIM_JOBS.percent.encode(), values).fetchall()]
        return ("cancelled" if number % 2 else "claimed"), won

    results = at_once(dsn, 6, act)
    cancelled = [entity for side, won in results if side == "cancelled" for entity in won]
    claimed = [entity for side, won in results if side == "claimed" for entity in won]
    assert sorted([*cancelled, *claimed], key=int) == [str(number) for number in range(1, 61)]
    assert sorted(entity for (entity,) in rows(dsn, "SELECT entity_id FROM duly.jobs")) == sorted(claimed)


async def test_a_cancel_that_meets_a_claim_waits_for_it_and_then_keeps_away(dsn: str) -> None:
    """E3.2: the claim is not committed yet; the cancel waits, sees that the job runs, and deletes nothing."""
    rows(dsn, "SELECT duly.schedule('work', 'e')")
    with psycopg.connect(dsn) as claimer, ThreadPoolExecutor(1) as pool:
        assert len(claimer.execute(sql.CLAIM_JOBS.percent.encode(), {**CLAIM, "names": ["work"]}).fetchall()) == 1
        cancelled = pool.submit(value, dsn, "SELECT duly.cancel('work', 'e')")
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT duly.cancel%' AND wait_event_type = 'Lock'"
        )
        await until(lambda: value(dsn, waiting) == 1)
        claimer.commit()
        assert cancelled.result(10) == 0
    assert queue(dsn) == [("e", "Running", 0)]


def test_a_claim_that_meets_a_cancel_passes_by(dsn: str) -> None:
    """E3.2, E3.4: it waits for nobody; a cancel that is rolled back leaves the job to the next claim."""
    rows(dsn, "SELECT duly.schedule('work', 'e')")
    with psycopg.connect(dsn) as canceller, psycopg.connect(dsn, autocommit=True) as claimer:
        canceller.execute("SELECT duly.cancel('work', 'e')")
        claim = {**CLAIM, "names": ["work"]}
        assert claimer.execute(sql.CLAIM_JOBS.percent.encode(), claim).fetchall() == []
        canceller.rollback()
        assert len(claimer.execute(sql.CLAIM_JOBS.percent.encode(), claim).fetchall()) == 1


async def test_moving_a_timer_that_is_just_being_claimed_makes_a_new_one(dsn: str) -> None:
    """E3.2: replace waits for the claim; the old run goes on, and the new time is not lost."""
    rows(dsn, "SELECT duly.schedule('work', 'e')")
    with psycopg.connect(dsn) as claimer, ThreadPoolExecutor(1) as pool:
        claimer.execute(sql.CLAIM_JOBS.percent.encode(), {**CLAIM, "names": ["work"]})
        moved = pool.submit(value, dsn, "SELECT duly.schedule('work', 'e', duly.now() + interval '1 hour')")
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT duly.sch%' AND wait_event_type = 'Lock'"
        )
        await until(lambda: value(dsn, waiting) == 1)
        claimer.commit()
        moved.result(10)
    assert queue(dsn) == [("e", "Running", 0), ("e", "Pending", 0)]


async def test_many_workers_in_many_processes_run_each_job_once(dsn: str) -> None:
    """E3.4: three processes start at the same moment on 600 jobs: every effect once, by more than one of them."""
    make_effects(dsn)
    schedule_numbers(dsn, "work", 600)
    processes = [start(Order(dsn, concurrency=10, forever=False)) for _ in range(3)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert effects(dsn) == each_once(600)
    assert is_empty(dsn)
    assert [outcome for _, outcome, _ in outcomes(dsn)] == ["done"] * 600
    assert value(dsn, "SELECT count(DISTINCT run) FROM effects") >= 2


async def test_a_timer_that_fires_while_it_is_withdrawn_either_runs_or_does_not(db: Database, dsn: str) -> None:
    """E3.2: paying and timing out at the same moment: the payment that withdrew the timer never sees it fire."""
    fired: set[str | None] = set()

    async def expire(ctx: JobContext) -> None:
        fired.add(ctx.entity_id)

    async with db.transaction() as tx:
        for number in range(100):
            await schedule(tx, "expire", number)

    def pay(connection: psycopg.Connection[Any], number: int) -> list[str]:
        connection.autocommit = True
        mine = [str(entity) for entity in range(number * 25, number * 25 + 25)]
        cancel = "SELECT duly.cancel('expire', %s)"
        return [entity for entity in mine if connection.execute(cancel, (entity,)).fetchall() == [(1,)]]

    with ThreadPoolExecutor(1) as pool:
        paying = pool.submit(at_once, dsn, 4, pay)
        worker = Worker(db, handlers(expire))
        while not paying.done() or not is_empty(dsn):
            await worker.run_once()
    withdrawn = {entity for some in paying.result() for entity in some}
    assert withdrawn.isdisjoint(fired)
    assert len(withdrawn) + len(fired) == 100
