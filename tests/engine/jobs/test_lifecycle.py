"""A job's life: its statuses, its rows, its history, and what its handler sees and says (E3.7, E3.8, E3.9)."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from duly.db import Database, Tx
from duly.errors import Invalid
from duly.jobs.handlers import Handler, JobContext
from duly.jobs.outcomes import Cancel, Done, Fail, Outcome, Snooze
from duly.jobs.schedule import cancel, schedule
from duly.jobs.worker import Worker
from duly.telemetry import Origin, originating
from duly.testing import BusinessClock
from tests.engine.jobs.witness import EFFECT, effects, is_empty, make_effects, outcomes, queue, until
from tests.support import handlers, rows, value

START = datetime(2030, 6, 1, 12, tzinfo=UTC)


async def run_now(db: Database, function: Any, entity: str | None = "e", **options: Any) -> Worker:
    """Schedule one job for the function, and let a worker run it."""
    worker = Worker(db, handlers(function, **options))
    async with db.transaction() as tx:
        await schedule(tx, function.__name__, entity)
    await worker.run_once()
    return worker


# -- statuses ------------------------------------------------------------------------------------------------------


async def test_the_four_statuses_are_seen_in_the_queue_view(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.7: Pending, Running, Failed (its lease ran out), Pending again, DeadLetter; and the error of the last run."""
    clock.freeze(START)
    seen: list[str] = []

    async def work() -> None:
        seen.append(value(dsn, "SELECT status FROM duly.queue"))
        rows(dsn, "UPDATE duly.jobs SET lease_expires_at = clock_timestamp() - interval '1 second'")
        seen.append(value(dsn, "SELECT status FROM duly.queue"))
        rows(dsn, "UPDATE duly.jobs SET lease_expires_at = clock_timestamp() + interval '1 minute'")  # nobody takes it
        raise RuntimeError("broken")

    async with db.transaction() as tx:
        await schedule(tx, "work", "e")
    assert queue(dsn) == [("e", "Pending", 0)]
    await Worker(db, handlers(work, max_retries=1)).run_once()
    assert seen == ["Running", "Failed"]
    assert queue(dsn) == [("e", "Pending", 1)]
    assert value(dsn, "SELECT error FROM duly.queue") == "RuntimeError: broken"
    clock.advance(minutes=1)
    await Worker(db, handlers(work, max_retries=1)).run_once()
    assert queue(dsn) == [("e", "DeadLetter", 1)]
    assert value(dsn, "SELECT error FROM duly.queue") == "RuntimeError: broken"


async def test_success_deletes_the_row(db: Database, dsn: str) -> None:
    """E3.7: nothing of it stays in the queue; its history does."""

    async def work() -> None:
        return None

    worker = await run_now(db, work)
    assert worker.counts == {"done": 1}
    assert is_empty(dsn)
    assert outcomes(dsn) == [("e", "done", 0)]


async def test_cancel_deletes_a_pending_row_and_leaves_no_history(db: Database, dsn: str) -> None:
    """E3.7: what never ran has no execution."""
    async with db.transaction() as tx:
        await schedule(tx, "work", "e")
        assert await cancel(tx, "work", "e") == 1
    assert is_empty(dsn)
    assert outcomes(dsn) == []


async def test_cancel_takes_back_a_job_that_waits_for_its_retry(db: Database, dsn: str) -> None:
    """E3.2, E3.7: after a failure it is pending again, so it can be cancelled."""

    async def work() -> None:
        raise RuntimeError("broken")

    await run_now(db, work)
    async with db.transaction() as tx:
        assert await cancel(tx, "work", "e") == 1
    assert is_empty(dsn)


async def test_cancel_never_touches_a_running_job(db: Database, dsn: str) -> None:
    """E3.2: it says 0, and the run goes on to its end."""
    make_effects(dsn)
    cancelled: list[int] = []

    async def work(ctx: JobContext, tx: Tx) -> None:
        async with db.transaction() as other:
            cancelled.append(await cancel(other, "work", "e"))
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})

    await run_now(db, work)
    assert cancelled == [0]
    assert outcomes(dsn) == [("e", "done", 0)]
    assert effects(dsn) == {"e": 1}


async def test_a_dead_letter_keeps_everything_an_administrator_needs(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.7: what was asked for, what went wrong, when, and an alert that says so once."""
    clock.freeze(START)
    origin = Origin(correlation_id=uuid4(), causation_id=uuid4())

    async def work() -> Fail:
        return Fail("the account is closed")

    with originating(origin):
        async with db.transaction() as tx:
            job_id = await schedule(tx, "work", "e", START, payload={"k": 1}, priority=2, max_retries=5, backoff=[9])
            await schedule(tx, "work", "f", START)
    await Worker(db, handlers(work)).run_once()
    assert rows(
        dsn,
        """
        SELECT id, name, payload, priority, due_at, created_at, retry_count, max_retries, backoff_seconds, source,
               correlation_id, causation_id, reason, error, error_kind, buried_at
        FROM duly.dead_letters WHERE entity_id = 'e'
        """,
    ) == [
        (job_id, "work", {"k": 1}, 2, START, START, 0, 5, [9], "Deferred", origin.correlation_id,
         origin.causation_id, "failed_for_good", "the account is closed", "Fail", START)
    ]  # fmt: skip
    assert rows(dsn, "SELECT kind, subject, message FROM duly.alerts") == [
        ("dead_letter", "work", "the account is closed")
    ]


# -- the history ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["Deferred", "Manual", "Scheduled"])
async def test_every_run_is_one_complete_row_of_history(
    db: Database, dsn: str, clock: BusinessClock, source: str
) -> None:
    """E3.8: name, queue id, source, execution id, started_at, completed_at, succeeded, message, and who ran it."""
    clock.freeze(START)
    seen: list[UUID] = []

    async def work(ctx: JobContext) -> None:
        seen.append(ctx.execution_id)
        ctx.report_success("12 rows")

    job_id = value(
        dsn,
        "SELECT duly.schedule_many(ARRAY['work'], ARRAY[NULL], ARRAY[NULL]::timestamptz[], ARRAY['{}']::jsonb[],"
        f" source => '{source}')",
    )
    worker = Worker(db, handlers(work))
    await worker.run_once()
    [found] = rows(
        dsn,
        """
        SELECT name, job_id, entity_id, source, execution_id, completed_at, succeeded, outcome, message, retry_count,
               next_run_at, worker, started_at, lease_token
        FROM duly.executions
        """,
    )
    assert found[:12] == (
        "work", job_id, None, source, seen[0], START, True, "done", "12 rows", 0, None, worker.identity
    )  # fmt: skip
    started_at, lease_token = found[12:]
    assert START - timedelta(seconds=5) < started_at <= START
    assert lease_token > 0


async def test_the_history_says_how_long_a_run_took(db: Database, dsn: str) -> None:
    """E3.8: from started_at to completed_at is no less than what the handler itself took."""
    took: list[float] = []

    async def work() -> None:
        began = time.monotonic()
        await asyncio.to_thread(value, dsn, "SELECT count(*) FROM duly.jobs")
        took.append(time.monotonic() - began)

    await run_now(db, work)
    [(lasted,)] = rows(dsn, "SELECT completed_at - started_at FROM duly.executions")
    assert timedelta(seconds=took[0]) <= lasted < timedelta(seconds=took[0] + 5)


async def test_the_history_of_a_failing_job_is_one_row_for_each_run(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.8: insert-only; each run has an execution id of its own, and says when the next one is."""
    clock.freeze(START)

    async def work(ctx: JobContext) -> Done:
        if ctx.retry_count < 2:
            raise LookupError(f"attempt {ctx.retry_count}")
        return Done("at last")

    async with db.transaction() as tx:
        await schedule(tx, "work", "e", backoff=[60])
    for _ in range(3):
        await Worker(db, handlers(work)).run_once()
        clock.advance(minutes=1)
    found = rows(
        dsn,
        "SELECT retry_count, succeeded, outcome, message, next_run_at FROM duly.executions ORDER BY completed_at",
    )
    assert found == [
        (0, False, "retried", "LookupError: attempt 0", START + timedelta(minutes=1)),
        (1, False, "retried", "LookupError: attempt 1", START + timedelta(minutes=2)),
        (2, True, "done", "at last", None),
    ]
    assert value(dsn, "SELECT count(DISTINCT execution_id) FROM duly.executions") == 3
    assert value(dsn, "SELECT count(DISTINCT job_id) FROM duly.executions") == 1


async def test_runs_that_end_differently_are_settled_together(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.7: one batch of settlements with every kind of ending; each job ends as its own handler said."""
    clock.freeze(START)
    endings: list[Outcome | Exception] = [
        Done("ok"), Cancel("no need"), Snooze(timedelta(hours=1)), Fail("never"), RuntimeError("later"),
    ]  # fmt: skip
    together = asyncio.Barrier(len(endings))

    async def work(ctx: JobContext) -> Outcome:
        await together.wait()
        ending = endings[int(str(ctx.entity_id))]
        if isinstance(ending, Exception):
            raise ending
        return ending

    async with db.transaction() as tx:
        for number in range(len(endings)):
            await schedule(tx, "work", number, backoff=[60])
    await Worker(db, handlers(work)).run_once()
    ended = rows(dsn, "SELECT entity_id, outcome FROM duly.executions ORDER BY entity_id")
    assert ended == [("0", "done"), ("1", "cancelled"), ("2", "snoozed"), ("3", "buried"), ("4", "retried")]
    assert queue(dsn) == [("2", "Pending", 0), ("4", "Pending", 1), ("3", "DeadLetter", 0)]
    assert rows(dsn, "SELECT entity_id, run_at - duly.now() FROM duly.jobs ORDER BY id") == [
        ("2", timedelta(hours=1)),
        ("4", timedelta(minutes=1)),
    ]


async def test_lease_tokens_strictly_increase(db: Database, dsn: str) -> None:
    """E3.5, E3.8: of two runs of one job the later one has the higher token."""

    async def work(ctx: JobContext) -> None:
        if ctx.retry_count < 3:
            raise RuntimeError("again")

    worker = await run_now(db, work, backoff_seconds=[0])
    while not is_empty(dsn):
        await worker.run_once()
    found = rows(dsn, "SELECT lease_token FROM duly.executions ORDER BY retry_count")
    assert len(found) == 4
    assert found == sorted(set(found))


# -- what a handler sees and says ----------------------------------------------------------------------------------


async def test_the_context_says_what_which_run_when_and_how_late(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.9: entity_id, execution_id, started_at; and what was given when it was scheduled."""
    clock.freeze(START)
    seen: list[JobContext] = []

    async def work(ctx: JobContext) -> None:
        seen.append(ctx)

    async with db.transaction() as tx:
        job_id = await schedule(tx, "work", "e7", START + timedelta(minutes=1), payload={"a": {"b": [1, "x"]}})
    clock.advance(minutes=4)
    await Worker(db, handlers(work)).run_once()
    ctx = seen[0]
    assert (ctx.name, ctx.job_id, ctx.entity_id, ctx.payload) == ("work", job_id, "e7", {"a": {"b": [1, "x"]}})
    assert (ctx.due_at, ctx.retry_count) == (START + timedelta(minutes=1), 0)
    assert isinstance(ctx.execution_id, UUID)
    assert timedelta(minutes=3) <= ctx.late_by < timedelta(minutes=4)
    assert START + timedelta(minutes=4) <= ctx.started_at < START + timedelta(minutes=5)


@pytest.mark.parametrize("returned", [None, 42, {"any": "thing"}, Done()])
async def test_returning_is_success(db: Database, dsn: str, returned: Any) -> None:
    """E3.9, decided: a handler that returns without reporting succeeded, whatever it returns."""

    async def work() -> Any:
        return returned

    await run_now(db, work)
    assert rows(dsn, "SELECT succeeded, outcome, message FROM duly.executions") == [(True, "done", None)]


async def test_a_handler_may_take_nothing_and_needs_no_async(db: Database, dsn: str) -> None:
    """E3.9: plain functions with and without a context run too."""
    seen: list[str | None] = []

    def bare() -> None:
        seen.append("bare")

    def plain(ctx: JobContext) -> Done:
        seen.append(ctx.entity_id)
        return Done("by a thread")

    await run_now(db, bare)
    await run_now(db, plain)
    assert seen == ["bare", "e"]
    assert rows(dsn, "SELECT name, message FROM duly.executions ORDER BY name") == [
        ("bare", None),
        ("plain", "by a thread"),
    ]


@pytest.mark.parametrize(
    ("outcome", "row", "log", "dead"),
    [
        (Done("ok"), [], ("done", True, "ok"), []),
        (Cancel("withdrawn"), [], ("cancelled", True, "withdrawn"), []),
        (
            Snooze(timedelta(minutes=10), "not open yet"),
            [("snoozed", 0, 1, START + timedelta(minutes=10), None)],
            ("snoozed", True, "not open yet"),
            [],
        ),
        (Fail("never"), [], ("buried", False, "never"), [("failed_for_good", "never")]),
    ],
)
async def test_a_handler_says_how_it_ended_and_its_writes_commit_with_it(
    db: Database,
    dsn: str,
    clock: BusinessClock,
    outcome: Outcome,
    row: list[Any],
    log: tuple[Any, ...],
    dead: list[Any],
) -> None:
    """E3.9, E3.11: Done, Cancel, Snooze (no retry is counted) and Fail (no retry is made)."""
    clock.freeze(START)
    make_effects(dsn)

    async def work(ctx: JobContext, tx: Tx) -> Outcome:
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        return outcome

    await run_now(db, work)
    assert rows(dsn, "SELECT waits, retry_count, snoozes, run_at, lease_token FROM duly.jobs") == row
    assert rows(dsn, "SELECT outcome, succeeded, message FROM duly.executions") == [log]
    assert rows(dsn, "SELECT reason, error FROM duly.dead_letters") == dead
    assert effects(dsn) == {"e": 1}


async def test_a_snoozed_job_runs_again_with_all_its_retries(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.9: it may snooze more often than it may be retried."""
    clock.freeze(START)

    async def work(ctx: JobContext) -> Outcome:
        return Done() if len(outcomes(dsn)) == 5 else Snooze(timedelta(seconds=1))

    async with db.transaction() as tx:
        await schedule(tx, "work", "e", max_retries=0)
    for _ in range(6):
        await Worker(db, handlers(work)).run_once()
        clock.advance(seconds=1)
    assert outcomes(dsn) == [("e", "snoozed", 0)] * 5 + [("e", "done", 0)]


def test_a_snooze_has_bounds() -> None:
    """E3.9: neither back in time nor for ever."""
    with pytest.raises(Invalid):
        Snooze(timedelta(seconds=-1))
    with pytest.raises(Invalid):
        Snooze(timedelta(days=4_000))


async def test_a_reported_failure_is_retried_and_its_writes_are_rolled_back(db: Database, dsn: str) -> None:
    """E3.9: report_failure fails a run that returns; its sentence stands in the history as it was said."""
    make_effects(dsn)

    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        ctx.report_success("half done")
        ctx.report_failure("the bank said no")

    await run_now(db, work)
    assert queue(dsn) == [("e", "Pending", 1)]
    assert rows(dsn, "SELECT outcome, message FROM duly.executions") == [("retried", "the bank said no")]
    assert effects(dsn) == {}


async def test_raising_fails_the_run_whatever_was_reported_before(db: Database, dsn: str) -> None:
    """E3.9: a handler that raises is failed."""
    make_effects(dsn)

    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        ctx.report_success("done")
        raise KeyError("missing")

    await run_now(db, work)
    assert queue(dsn) == [("e", "Pending", 1)]
    assert rows(dsn, "SELECT succeeded, message FROM duly.executions") == [(False, "KeyError: 'missing'")]
    assert effects(dsn) == {}


async def test_progress_is_seen_while_the_handler_runs(db: Database, dsn: str) -> None:
    """E3.9: report_progress reaches the queue with the next heartbeat; the newest wins, and none outlives the run."""
    seen: list[str] = []

    def is_shown(sentence: str) -> bool:
        return bool(value(dsn, "SELECT progress FROM duly.queue") == sentence)

    async def work(ctx: JobContext) -> None:
        for sentence in ("1 of 2", "2 of 2"):
            ctx.report_progress(sentence)
            await until(partial(is_shown, sentence), what=sentence)
            seen.append(sentence)
        raise RuntimeError("broken")

    worker = Worker(db, handlers(work), lease_seconds=2)
    async with db.transaction() as tx:
        await schedule(tx, "work", "e")
    await worker.run_once()
    assert seen == ["1 of 2", "2 of 2"]
    assert rows(dsn, "SELECT status, progress FROM duly.queue") == [("Pending", None)]


async def test_hostile_messages_are_stored_clipped_and_printable(db: Database, dsn: str) -> None:
    """E3.8: NUL, half a surrogate pair or a megabyte in an error never keep a run from being recorded."""

    async def work(ctx: JobContext) -> None:
        raise RuntimeError("nul \x00 half \ud800 " + "x" * 1_000_000)

    await run_now(db, work)
    message = value(dsn, "SELECT message FROM duly.executions")
    assert message.startswith("RuntimeError: nul � half ? xxx")
    assert len(message) == 2_000
    assert queue(dsn) == [("e", "Pending", 1)]


class Unprintable(Exception):
    """An error that cannot even be shown."""

    def __str__(self) -> str:
        raise ValueError("no text for you")


async def surviving_neighbour(db: Database, dsn: str, known: dict[str, Handler]) -> None:
    """With one slot only: whatever the first handler did to its slot, the next job still runs."""
    async with db.transaction() as tx:
        await schedule(tx, "work", "e", priority=1)
        await schedule(tx, "neighbour", "n", priority=4)
    worker = Worker(db, known, concurrency=1)
    running = asyncio.create_task(worker.run_once())
    await asyncio.wait([running], timeout=5)
    ended = running.done()
    if not ended:
        rows(dsn, "DELETE FROM duly.jobs")
        running.cancel()
        await asyncio.wait([running], timeout=10)
    assert ended, "the slot died with its handler"
    assert ("n", "done", 0) in outcomes(dsn)


async def neighbour() -> None:
    """A job that does nothing."""


async def test_an_error_that_cannot_be_printed_is_a_failure_like_any_other(db: Database, dsn: str) -> None:
    """E3.9: a handler may raise anything; it costs itself an attempt and nobody else anything."""

    async def work() -> None:
        raise Unprintable

    await surviving_neighbour(db, dsn, handlers(work, neighbour))
    assert queue(dsn) == [("e", "Pending", 1)]


async def test_a_cancellation_that_nobody_asked_for_is_a_failure_like_any_other(db: Database, dsn: str) -> None:
    """E3.9: a handler that awaits something cancelled lets CancelledError out; its slot goes on."""

    async def work() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task

    await surviving_neighbour(db, dsn, handlers(work, neighbour))
    assert queue(dsn) == [("e", "Pending", 1)]
