"""When a failed job runs again: exact figures, as arithmetic and as they arrive in run_at (E3.6)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.db import Database
from duly.jobs.handlers import Handler
from duly.jobs.retry import backoff
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker
from duly.testing import BusinessClock
from tests.support import handlers, rows, value

START = datetime(2030, 6, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
delays = st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=3650))


@pytest.mark.parametrize(
    ("original_delay", "waits"),
    [
        (15 * MINUTE, [1.5 * MINUTE, 3 * MINUTE, 4.5 * MINUTE]),
        (timedelta(hours=48), [60 * MINUTE, 60 * MINUTE]),
        (timedelta(hours=5), [30 * MINUTE, 60 * MINUTE, 60 * MINUTE]),
        (10 * MINUTE, [MINUTE, 2 * MINUTE]),
        (timedelta(0), [timedelta(seconds=1), timedelta(seconds=2), timedelta(seconds=4)]),
    ],
)
def test_backoff_is_a_tenth_of_the_delay_for_each_retry_and_sixty_minutes_at_most(
    original_delay: timedelta, waits: list[timedelta]
) -> None:
    """E3.6: min(original_delay x 0.1 x retry_count, 60 min)."""
    assert [backoff(number, original_delay=original_delay) for number in range(1, len(waits) + 1)] == waits


@given(retry_count=st.integers(1, 2_000), original_delay=delays)
def test_backoff_never_shrinks_and_never_passes_an_hour(retry_count: int, original_delay: timedelta) -> None:
    """E3.6: whatever the delay and however often it failed."""
    wait = backoff(retry_count, original_delay=original_delay)
    assert timedelta(0) <= wait <= timedelta(minutes=60)
    assert backoff(retry_count + 1, original_delay=original_delay) >= wait
    proportional = original_delay * 0.1 * retry_count
    if original_delay:
        assert abs(wait - min(proportional, timedelta(minutes=60))) <= timedelta(microseconds=retry_count)


@given(retry_count=st.integers(1, 2_000), fixed=st.lists(st.integers(0, 10**6), min_size=1, max_size=100))
def test_a_fixed_list_is_followed_and_its_last_entry_repeats(retry_count: int, fixed: list[int]) -> None:
    """E3.6: a job may name a fixed list instead, whatever its own delay was."""
    wait = backoff(retry_count, original_delay=15 * MINUTE, fixed_seconds=fixed)
    assert wait == timedelta(seconds=fixed[min(retry_count, len(fixed)) - 1])


def test_the_first_retry_is_number_one() -> None:
    """E3.6: zero is a programming error, not a wait of nothing."""
    with pytest.raises(ValueError, match="number 1"):
        backoff(0, original_delay=MINUTE)


# -- as it arrives in the queue ------------------------------------------------------------------------------------


async def always_fails() -> None:
    raise RuntimeError("still broken")


async def fail_again(db: Database, dsn: str, clock: BusinessClock, known: dict[str, Handler]) -> timedelta:
    """Go to where the job is due, let it fail, and say how far run_at moved."""
    clock.freeze(value(dsn, "SELECT run_at FROM duly.jobs"))
    worked = await Worker(db, known).run_once()
    assert worked.facts["retried"] == 1
    moved = value(dsn, "SELECT run_at FROM duly.jobs") - clock.now()
    assert isinstance(moved, timedelta)
    return moved


@pytest.mark.parametrize(
    ("original_delay", "waits"),
    [
        (15 * MINUTE, [1.5 * MINUTE, 3 * MINUTE]),
        (timedelta(hours=48), [60 * MINUTE, 60 * MINUTE]),
        (timedelta(0), [timedelta(seconds=1), timedelta(seconds=2)]),
    ],
)
async def test_a_failed_timer_waits_in_proportion_to_its_delay(
    db: Database, dsn: str, clock: BusinessClock, original_delay: timedelta, waits: list[timedelta]
) -> None:
    """E3.6: a 15 minute timer comes back after 1.5 and then 3 minutes, a 48 hour one after 60; delays do not add up."""
    clock.freeze(START)
    async with db.transaction() as tx:
        await schedule(tx, "always_fails", "e", START + original_delay, max_retries=9)
    assert [await fail_again(db, dsn, clock, handlers(always_fails)) for _ in waits] == waits
    assert rows(dsn, "SELECT retry_count, waits, due_at FROM duly.jobs") == [(2, "retry", START + original_delay)]
    logged = rows(dsn, "SELECT retry_count, next_run_at - completed_at FROM duly.executions ORDER BY retry_count")
    assert logged == list(enumerate(waits))


async def test_a_retry_is_not_early(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.6: one second before its time it still waits; at its time it runs."""
    clock.freeze(START)
    async with db.transaction() as tx:
        await schedule(tx, "always_fails", "e", START + 15 * MINUTE)
    await fail_again(db, dsn, clock, handlers(always_fails))
    clock.advance(seconds=89)
    assert (await Worker(db, handlers(always_fails)).run_once()).done == 0
    clock.advance(seconds=1)
    assert (await Worker(db, handlers(always_fails)).run_once()).done == 1


async def test_a_fixed_list_of_the_job_wins_over_its_handlers(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.6: the list may be named where the job is registered, or where it is scheduled."""
    clock.freeze(START)
    known = handlers(always_fails, backoff_seconds=[7], max_retries=9)
    async with db.transaction() as tx:
        await schedule(tx, "always_fails", "e", START + 15 * MINUTE)
    assert await fail_again(db, dsn, clock, known) == timedelta(seconds=7)
    async with db.transaction() as tx:
        assert await schedule(tx, "always_fails", "f", START, backoff=[60, timedelta(minutes=5)])
    rows(dsn, "DELETE FROM duly.jobs WHERE entity_id = 'e'")
    assert [await fail_again(db, dsn, clock, known) for _ in range(3)] == [MINUTE, 5 * MINUTE, 5 * MINUTE]


@pytest.mark.parametrize(("of_job", "of_handler", "runs"), [(0, 3, 1), (2, 0, 3), (None, 1, 2), (None, 0, 1)])
async def test_a_job_runs_once_and_then_as_often_as_it_may_be_retried(
    db: Database, dsn: str, clock: BusinessClock, of_job: int | None, of_handler: int, runs: int
) -> None:
    """E3.6, E3.7: the job's own number wins over its handler's; then it is a dead letter."""
    clock.freeze(START)
    async with db.transaction() as tx:
        await schedule(tx, "always_fails", "e", max_retries=of_job)
    for _ in range(runs):
        assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 0
        clock.advance(hours=1)
        await Worker(db, handlers(always_fails, max_retries=of_handler)).run_once()
    assert rows(dsn, "SELECT retry_count, reason, error, error_kind FROM duly.dead_letters") == [
        (runs - 1, "retries_used_up", "RuntimeError: still broken", "RuntimeError")
    ]
    assert value(dsn, "SELECT count(*) FROM duly.executions") == runs
