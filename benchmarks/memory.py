"""Resident memory of a worker, a relay and a scheduler over a long run under steady load."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.link import Child
from benchmarks.results import Figures
from benchmarks.server import Databases
from duly.clock import monotonic

SAMPLE_SECONDS = 10.0
BEAT_SECONDS = 1.0
TICKS = 50
FED_SECONDS = 60.0
JOBS_A_BEAT = {"noop": 700, "each": 100, "group-100": 200}
EVENTS_A_BEAT = {"bench.single": 50, "bench.many": 100, "bench.ordered": 50}
KINDS = ("worker", "relay", "scheduler")
FILL_SCHEDULES = """
INSERT INTO duly.schedules (name, cron)
SELECT 'tick-' || n, '* * * * *' FROM generate_series(0, %(rows)s::int - 1) AS n
"""


@dataclass
class Memory:
    """One run: three processes, each with a duty of its own, a thousand jobs and two hundred events a second."""

    server: Databases
    figures: Figures
    minutes: float = 60.0
    sample_seconds: float = SAMPLE_SECONDS

    def run(self) -> None:
        """Feed, sample, feed."""
        with self.server.database() as dsn, ExitStack() as stack:
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(FILL_SCHEDULES, {"rows": TICKS})
            duties = {
                kind: stack.enter_context(Child("duty", dsn=dsn, kind=kind, ticks=TICKS)) for kind in KINDS
            }  # fmt: skip
            feeder = stack.enter_context(Child("feed", dsn=dsn))
            for child in duties.values():
                child.tell(go=True)
            self._watch(duties, feeder)

    def _watch(self, duties: dict[str, Child], feeder: Child) -> None:
        began, sampled_at, beat = monotonic(), float("-inf"), 0
        while (passed := monotonic() - began) < self.minutes * 60:
            for child in duties.values():
                child.heard()  # one that died ends the run here, with its last words
            feeder.tell(jobs=JOBS_A_BEAT, events=EVENTS_A_BEAT)
            feeder.hear("fed", seconds=FED_SECONDS)
            if passed - sampled_at >= self.sample_seconds:
                sampled_at = passed
                number = len(self.figures.rounds("memory"))
                self.figures.add("memory", number, "seconds", passed)
                for kind, child in duties.items():
                    self.figures.add("memory", number, kind, resident_mib(child.pid))
                if number % 6 == 0:
                    row = self.figures.rounds("memory")[number]
                    print("  ".join(f"{name} {value:,.1f}" for name, value in row.items()), flush=True)
            beat += 1
            time.sleep(max(0.0, began + beat * BEAT_SECONDS - monotonic()))


def resident_mib(pid: int) -> float:
    """What the process holds in memory now."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True, timeout=10)
    return int(done.stdout) / 1024
