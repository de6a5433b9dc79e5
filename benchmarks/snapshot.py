"""Throughput while a snapshot is held open: what dies cannot be vacuumed away, and claims wade through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.link import Child
from benchmarks.queue import claim_cost
from benchmarks.results import Figures
from benchmarks.server import Databases

WINDOW_SECONDS = 30.0
DEPTH = 10_000
REFILL = 5_000
SAY_SECONDS = 30.0
DEAD = "SELECT n_dead_tup, pg_relation_size(relid) FROM pg_stat_user_tables WHERE relid = 'duly.jobs'::regclass"


class Load:
    """A worker at full speed, and a feeder that keeps the queue at some depth without ever asking the database."""

    def __init__(self, worker: Child, feeder: Child) -> None:
        self._worker = worker
        self._feeder = feeder
        self._asked = 0
        self.done = 0
        self.at = 0.0

    def step(self) -> None:
        """Hear how far the worker is; refill."""
        said = self._worker.hear("done", seconds=SAY_SECONDS)
        for later in self._worker.heard():
            said = later if "done" in later else said
        self.done, self.at = said["done"], said["at"]
        self._feeder.heard()  # a feeder that died says so here
        if self._asked - self.done < DEPTH:
            self._asked += REFILL
            self._feeder.tell(jobs={"noop": REFILL})

    def start(self) -> None:
        """Fill it up and go."""
        self._asked = DEPTH
        self._feeder.tell(jobs={"noop": DEPTH})
        self._worker.tell(go=True)


@dataclass
class HeldSnapshot:
    """One run: a minute without, ten with, a minute after."""

    server: Databases
    figures: Figures
    minutes: float = 10.0
    around_minutes: float = 1.0
    window_seconds: float = WINDOW_SECONDS

    def run(self) -> None:
        """Measure window by window."""
        with (
            self.server.database() as dsn,
            Child("worker", dsn=dsn, names=["noop"]) as worker,
            Child("feed", dsn=dsn) as feeder,
        ):
            load = Load(worker, feeder)
            load.start()
            self._windows(load, dsn, "warm-up", self.window_seconds)
            self._windows(load, dsn, "before", self.around_minutes * 60)
            with psycopg.connect(dsn) as holder:
                holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                holder.execute("SELECT count(*) FROM duly.schedules")  # from now on its snapshot is held
                self._windows(load, dsn, "held", self.minutes * 60)
                holder.rollback()
            self._windows(load, dsn, "after", self.around_minutes * 60)

    def _windows(self, load: Load, dsn: str, phase: str, seconds: float) -> None:
        count = max(1, round(seconds / self.window_seconds))
        for window in range(count):
            load.step()
            done, began = load.done, load.at
            while load.at - began < self.window_seconds:
                load.step()
            rate = (load.done - done) / (load.at - began)
            # A claim from the start takes seconds under a held snapshot: measured once a phase, beside the windows.
            facts = self._facts(dsn, with_claim=window == count - 1)
            number = len(self.figures.rounds("windows"))
            for name, value in {"phase": phase, "rate": rate, "at": load.at, **facts}.items():
                self.figures.add("windows", number, name, value)
            print(f"{phase:8} {rate:9,.0f} jobs/s  {_told(facts)}", flush=True)

    def _facts(self, dsn: str, *, with_claim: bool) -> dict[str, Any]:
        cost = claim_cost(dsn, "noop", samples=1) if with_claim else None
        with psycopg.connect(dsn, autocommit=True) as connection:
            row = connection.execute(DEAD).fetchone()
        dead, size = row or (0, 0)
        facts = {"dead": dead, "bytes": size}
        return facts | {"claim_ms": cost.milliseconds, "claim_buffers": cost.buffers} if cost else facts


def _told(facts: dict[str, Any]) -> str:
    told = f"{facts['dead']:>10,} dead rows, {facts['bytes'] / 2**20:,.0f} MiB"
    if "claim_ms" not in facts:
        return told
    return f"{told}; a claim from the start {facts['claim_ms']:.1f} ms, {facts['claim_buffers']:,} buffers"
