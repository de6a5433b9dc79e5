"""Filling duly's queue, draining it with worker processes, and what a claim costs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.application import ORDERED_AGGREGATES
from benchmarks.link import Child, Failed, children
from duly.clock import monotonic
from duly.jobs import sql
from duly.jobs.worker import CLAIM_BATCH

FILL_BATCH = 5_000
FILL = """
SELECT count(*) FROM duly.schedule_many(
    array_fill(%(name)s::text, ARRAY[%(count)s::int]), array_fill(NULL::text, ARRAY[%(count)s::int]),
    array_fill(NULL::timestamptz, ARRAY[%(count)s::int]), array_fill('{}'::jsonb, ARRAY[%(count)s::int]))
"""
EMIT = """
SELECT count(*) FROM duly.emit_many(
    array_fill('bench.event'::text, ARRAY[%(count)s::int]), array_fill(%(topic)s::text, ARRAY[%(count)s::int]),
    ARRAY(SELECT (n %% %(aggregates)s::int)::text FROM generate_series(1, %(count)s::int) AS n),
    array_fill('{}'::jsonb, ARRAY[%(count)s::int]), array_fill('{}'::jsonb, ARRAY[%(count)s::int]))
"""
EMPTY = "SELECT NOT EXISTS (SELECT 1 FROM duly.jobs WHERE name = ANY(%s))"
EXPLAIN_SAMPLES = 7


def fill(dsn: str, name: str, count: int) -> None:
    """Put jobs into the queue that are due now."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for start in range(0, count, FILL_BATCH):
            connection.execute(FILL, {"name": name, "count": min(FILL_BATCH, count - start)})
        connection.execute("ANALYZE duly.jobs")  # as the peers' queues are


def fill_outbox(dsn: str, topic: str, count: int) -> None:
    """Put events into the outbox, of a thousand aggregates in turn."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for start in range(0, count, FILL_BATCH):
            some = min(FILL_BATCH, count - start)
            connection.execute(EMIT, {"topic": topic, "count": some, "aggregates": ORDERED_AGGREGATES})


def rate_of(role: str, *, seconds: float, **arguments: Any) -> float:
    """A process that measures itself and says its rate."""
    count = arguments["count"]
    with Child(role, **arguments) as child:
        child.tell(go=True)
        found = child.hear("rate", seconds=seconds)
    if found["done"] < count:
        raise Failed(f"{role}: did {found['done']} of {count}")
    return float(found["rate"])


def drain(
    dsn: str, names: Sequence[str], count: int, *, seconds: float, processes: int = 1, empty: bool = True, **more: Any
) -> float:
    """Jobs a second by worker processes: from the first claim of any until the last settlement was committed.

    The workers themselves say how far they are; nobody asks the database while it is measured. Afterwards it is asked
    whether the queue is really empty.
    """
    with children(processes, "worker", dsn=dsn, names=list(names), **more) as workers:
        for worker in workers:
            worker.tell(go=True)
        rate = _until_done(workers, count, seconds)
    if empty:
        with psycopg.connect(dsn, autocommit=True) as connection:
            row = connection.execute(EMPTY, [list(names)]).fetchone()
        if row != (True,):
            raise Failed(f"{', '.join(names)}: the workers counted {count}, but the queue is not empty")
    return rate


def _until_done(workers: Sequence[Child], count: int, seconds: float) -> float:
    done, ended, began = [0] * len(workers), 0.0, float("inf")
    deadline = monotonic() + seconds
    place = 0
    while sum(done) < count:
        if monotonic() > deadline:
            raise Failed(f"worker: {sum(done)} of {count} jobs were done after {seconds:.0f} s")
        place = (place + 1) % len(workers)
        try:
            said = workers[place].hear("done", seconds=seconds if len(workers) == 1 else 0.02)
        except Failed:
            if len(workers) == 1 or workers[place].has_ended():
                raise
            continue
        done[place], ended, began = said["done"], max(ended, said["at"]), min(began, said["first_claim_at"])
    return sum(done) / (ended - began)


@dataclass(frozen=True)
class ClaimCost:
    """One claim of a full batch."""

    milliseconds: float
    buffers: int
    rows: int


def claim_cost(dsn: str, name: str, *, samples: int = EXPLAIN_SAMPLES) -> ClaimCost:
    """EXPLAIN (ANALYZE, BUFFERS) of the claim itself, rolled back each time; medians."""
    values = {"names": [name], "limit": CLAIM_BATCH, "worker": "explain", "lease_seconds": 300.0}
    statement = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {sql.CLAIM_JOBS.percent}".encode()
    times, buffers, rows = [], [], []
    with psycopg.connect(dsn) as connection:
        for _ in range(samples):
            row = connection.execute(statement, values).fetchone()
            connection.rollback()
            assert row is not None
            top = (json.loads(row[0]) if isinstance(row[0], str) else row[0])[0]
            times.append(float(top["Execution Time"]))
            buffers.append(int(top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"]))
            rows.append(int(top["Plan"]["Actual Rows"]))
    return ClaimCost(statistics.median(times), int(statistics.median(buffers)), int(statistics.median(rows)))
