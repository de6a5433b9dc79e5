"""How throughput and the cost of a claim change with what waits, what has been, and how many schedules there are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import psycopg

from benchmarks.link import Child, Failed
from benchmarks.queue import claim_cost, drain, fill
from benchmarks.results import Figures, short
from benchmarks.server import Databases, settle_down
from duly.clock import monotonic

SIZES = (1_000, 100_000, 1_000_000, 10_000_000)
SCHEDULES = (100, 100_000)
VARIANTS = ("due", "future", "history", "schedules")
DRAINED = 100_000
CHUNK = 1_000_000
TICKS = 50
TICK_SECONDS = 300.0
BATCH_DUE = 100

# Straight into the tables: ten million rows through the functions would take an hour and be the same rows.
FILL_JOBS = """
INSERT INTO duly.jobs (name, run_at, due_at, created_at, correlation_id)
SELECT 'noop', w.at, w.at, now(), duly.uuid7()
FROM generate_series(1, %(rows)s::int) AS n
CROSS JOIN LATERAL (SELECT now() + %(shift)s::interval + n * interval '1 microsecond' AS at) AS w
"""
FILL_HISTORY = """
INSERT INTO duly.executions (execution_id, job_id, name, source, started_at, completed_at, succeeded, outcome,
    retry_count, worker, lease_token, correlation_id)
SELECT duly.uuid7(), n, 'noop', 'Deferred', now(), now(), true, 'done', 0, 'filler', n, gen_random_uuid()
FROM generate_series(1, %(rows)s::int) AS n
"""
FILL_SCHEDULES = """
INSERT INTO duly.schedules (name, cron, next_run_at)
SELECT 'filler-' || n, '0 0 1 1 *', date_trunc('year', now()) + interval '1 year'
FROM generate_series(1, %(rows)s::int) AS n
"""
MAKE_DUE = """
UPDATE duly.schedules SET cron = '* * * * *', next_run_at = date_trunc('minute', now())
WHERE name IN (SELECT 'filler-' || n FROM generate_series(1, %(rows)s::int) AS n)
"""
SHIFTS = {"due": "-1 hour", "future": "1 year"}
TABLES = {"due": "duly.jobs", "future": "duly.jobs", "history": "duly.executions", "schedules": "duly.schedules"}


@dataclass
class Growth:
    """One run of these variants at these sizes; at each, a database of its own, all measured in turn."""

    server: Databases
    figures: Figures
    rounds: int = 3
    sizes: Sequence[int] = SIZES
    schedules: Sequence[int] = SCHEDULES
    drained: int = DRAINED
    timeout_seconds: float = 600.0

    def run(self, variants: Sequence[str]) -> None:
        """One variant after the other: ten million rows of each kind at once would fill a disk."""
        for variant in variants:
            sizes = self.schedules if variant == "schedules" else self.sizes
            with ExitStack() as stack:
                databases = {}
                for size in sizes:
                    databases[size] = stack.enter_context(self.server.database())
                    self._fill(databases[size], variant, size)
                for number in range(self.rounds):
                    for size, dsn in databases.items():
                        self._measure(number, variant, size, dsn)
                if variant == "schedules":
                    for size, dsn in databases.items():
                        self._tick(size, dsn)

    def _fill(self, dsn: str, variant: str, size: int) -> None:
        began = monotonic()
        with psycopg.connect(dsn, autocommit=True) as connection:
            for start in range(0, size, CHUNK):
                rows = min(CHUNK, size - start)
                if variant in SHIFTS:
                    connection.execute(FILL_JOBS, {"rows": rows, "shift": SHIFTS[variant]})
                else:
                    statement = FILL_HISTORY if variant == "history" else FILL_SCHEDULES
                    connection.execute(statement, {"rows": rows})
            connection.execute(f"VACUUM ANALYZE {TABLES[variant]}".encode())
        print(f"{variant}: {size:,} rows filled in {monotonic() - began:.0f} s", flush=True)

    def _measure(self, number: int, variant: str, size: int, dsn: str) -> None:
        """Some thousands more that are due, the cost of one claim among them, then all of them worked off."""
        fill(dsn, "noop", self.drained + (size - _count(dsn) if variant == "due" else 0))
        settle_down(dsn)
        try:
            cost = claim_cost(dsn, "noop")
            rate = drain(
                dsn, ["noop"], self.drained, seconds=self.timeout_seconds, empty=variant not in SHIFTS
            )  # fmt: skip
        except Failed as error:
            self.figures.note("missing", f"growth, {variant}, {size}", short(str(error)))
            print(f"growth {variant} {size:,}: left out: {error}", flush=True)
            return
        self.figures.add(f"claim_ms:{variant}", number, str(size), cost.milliseconds)
        self.figures.add(f"claim_buffers:{variant}", number, str(size), cost.buffers)
        self.figures.add(f"throughput:{variant}", number, str(size), rate)
        print(
            f"{variant:9} {size:>11,}  round {number + 1}  claim of {cost.rows}: {cost.milliseconds:6.2f} ms,"
            f" {cost.buffers:,} buffers; {rate:,.0f} jobs/s",
            flush=True,
        )

    def _tick(self, size: int, dsn: str) -> None:
        """What a scheduler's tick costs among so many schedules: nothing due, then a batch due at each."""
        try:
            with Child("tick", dsn=dsn, cycles=TICKS) as child:
                child.tell(go=True)
                replanned = child.hear("replanned_seconds", seconds=TICK_SECONDS)["replanned_seconds"]
                idle = child.hear("idle_ms", seconds=TICK_SECONDS)["idle_ms"]
                with psycopg.connect(dsn, autocommit=True) as connection:
                    connection.execute(MAKE_DUE, {"rows": min(size, TICKS * BATCH_DUE)})
                child.tell(go=True)
                said = child.hear("busy_ms", seconds=TICK_SECONDS)
        except Failed as error:
            self.figures.note("missing", f"ticks, {size}", short(str(error)))
            return
        busy = said["busy_ms"][: max(1, said["fired"] // BATCH_DUE)]  # those that had a batch to do
        self.figures.add("tick_ms:idle", 0, str(size), statistics.median(idle))
        self.figures.add("tick_ms:busy", 0, str(size), statistics.median(busy))
        self.figures.add("replan_seconds", 0, str(size), replanned)
        print(
            f"tick among {size:,} schedules: {statistics.median(idle):.2f} ms idle, {statistics.median(busy):.2f} ms"
            f" with {BATCH_DUE} due; the first look at all plans {replanned:.1f} s",
            flush=True,
        )


def _count(dsn: str) -> int:
    """A worker takes some more before it is told to end: those are put back."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT count(*) FROM duly.jobs").fetchone()
    return int(row[0]) if row else 0
