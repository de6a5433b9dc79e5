"""What the tests of the queue see by: a table of effects, leases that end on demand, and waiting with a bound."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from duly.jobs.worker import Worker
from duly.wakeup import Wakeup
from tests.support import rows, value

POLL_SECONDS = 0.01

EFFECT = "INSERT INTO effects (entity_id, run) VALUES (:entity_id, :run)"


def make_effects(dsn: str) -> None:
    """The table into which handlers write; nothing in it forbids a second effect, so that one would be seen."""
    rows(dsn, "CREATE TABLE effects (entity_id text NOT NULL, run text NOT NULL DEFAULT '')")


def effects(dsn: str) -> Counter[str]:
    """How often each entity was worked on."""
    return Counter(row[0] for row in rows(dsn, "SELECT entity_id FROM effects"))


def each_once(count: int) -> Counter[str]:
    """What the effects of the entities 1 to count should be."""
    return Counter({str(number): 1 for number in range(1, count + 1)})


def schedule_numbers(dsn: str, name: str, count: int, **options: int) -> None:
    """Jobs for the entities 1 to count, due now, the first of them the oldest."""
    given = {"priority": 3, "max_retries": None, **options}
    rows(
        dsn,
        f"""
        SELECT duly.schedule('{name}', n::text, duly.now() - make_interval(secs => {count} - n),
                             priority => %(priority)s, max_retries => %(max_retries)s)
        FROM generate_series(1, {count}) AS n
        """,
        given,
    )


def schedule_twins(dsn: str) -> None:
    """Two jobs of one (name, entity), as after a run that failed while its next timer was being set."""
    rows(dsn, "SELECT duly.schedule('work', 'twin', on_conflict => 'allow'), duly.schedule('work', 'twin')")
    rows(dsn, "UPDATE duly.jobs SET is_unique = true WHERE entity_id = 'twin'")


def expire_leases(dsn: str) -> None:
    """Let every lease end now; rows that are locked are being settled at this moment and are left alone."""
    rows(
        dsn,
        """
        UPDATE duly.jobs SET lease_expires_at = clock_timestamp() - interval '1 second'
        WHERE id IN (SELECT id FROM duly.jobs WHERE lease_token IS NOT NULL FOR UPDATE SKIP LOCKED)
        """,
    )


def queue(dsn: str) -> list[tuple[Any, ...]]:
    """(entity, status, retries) of everything in the queue and among the dead letters."""
    return rows(dsn, "SELECT entity_id, status, retry_count FROM duly.queue ORDER BY status = 'DeadLetter', id")


def outcomes(dsn: str) -> list[tuple[Any, ...]]:
    """(entity, outcome, retries before it) of every run, in the order in which the runs were claimed."""
    return rows(dsn, "SELECT entity_id, outcome, retry_count FROM duly.executions ORDER BY lease_token, entity_id")


def is_empty(dsn: str) -> bool:
    """Whether nothing is left to do."""
    return not value(dsn, "SELECT count(*) FROM duly.jobs")


def terminate_backends(dsn: str, which: str) -> list[int]:
    """End the server's side of the connections to this database that the condition names; their process ids."""
    return [
        row[0]
        for row in rows(
            dsn,
            f"""
            WITH chosen AS MATERIALIZED (
                SELECT pid FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid() AND ({which})
            )
            SELECT pid FROM chosen WHERE pg_terminate_backend(pid)
            """,
        )
    ]


async def until(condition: Callable[[], Any], *, seconds: float = 15.0, what: str = "") -> None:
    """Poll for what another process, thread or server does; the bound is a failure, never a measure of time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {seconds:g} s: {what or condition}")
        await asyncio.sleep(POLL_SECONDS)


async def be_deaf(until_let_go: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """What a handler does that will not be cancelled; bounded, so that a test that fails does not hang."""
    deadline = time.monotonic() + seconds
    while not until_let_go() and time.monotonic() < deadline:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(POLL_SECONDS)


@contextlib.asynccontextmanager
async def working(worker: Worker, *, wakeup: Wakeup | None = None) -> AsyncIterator[asyncio.Event]:
    """The long-running worker, and its listener, for the length of the block; what is yielded stops it early."""
    stop = asyncio.Event()
    tasks = [asyncio.create_task(worker.run(stop))]
    if wakeup is not None:
        tasks.append(asyncio.create_task(wakeup.run(stop)))
        await until(lambda: wakeup.listening, what="the listener listens")
    try:
        yield stop
    finally:
        stop.set()
        done, late = await asyncio.wait(tasks, timeout=40)
        for task in late:
            task.cancel()
        for task in done:
            task.result()
        assert not late, "the worker did not stop"
