"""Schedules: what a tick fires, counts as missed and plans next, however long nobody ticked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar

from duly.db import Database
from duly.schedules import tick
from duly.schedules.tick import Scheduler
from tests.simulation.cron_model import Stretch, occurrences, plan
from tests.simulation.line import START, Line, drive
from tests.simulation.machine import Machine, Pick

STRETCH = Stretch("UTC", START - timedelta(days=1), 21)
LAST_DAY = START + timedelta(days=12)  # so that the next run of every expression here is known
EXPRESSIONS = ("*/10 * * * *", "0 * * * *", "30 6 * * *", "0 12 * * MON-FRI", "* * * * *", "5,35 */2 * * *")
BROKEN = "0 0 31 2 *"
READ_ALL = """
WITH gone AS (DELETE FROM duly.jobs RETURNING *)
SELECT 'schedule', name, cron, misfire, enabled, next_run_at, last_run_at, missed_count, missed_oldest, missed_newest,
       last_error IS NOT NULL, NULL
FROM duly.schedules
UNION ALL
SELECT 'job', name, source, waits, true, run_at, due_at, max_retries, created_at, NULL, NULL, original_delay FROM gone
"""


@dataclass
class ModelSchedule:
    """One row of the schedules; the fields stand in the order in which the machine reads them."""

    name: str
    cron: str
    misfire: str
    enabled: bool
    next_run_at: datetime | None = None
    last_run_at: datetime | None = None
    missed_count: int = 0
    missed_oldest: datetime | None = None
    missed_newest: datetime | None = None
    is_broken: bool = False


class TicksMachine(Machine):
    """Four schedules that people edit, a clock that jumps, and ticks now and then."""

    name = "ticks"
    steps_in_example = 60

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self.line = Line(dsn)
        self.scheduler = Scheduler(Database(dsn))

    def begin(self) -> None:
        """No schedules."""
        self.line.begin()
        self.now = START
        self.schedules: dict[str, ModelSchedule] = {}
        self.fired: list[tuple[Any, ...]] = []
        self.runs_per_tick = tick.RUNS_PER_TICK
        tick.RUNS_PER_TICK = 200  # a long backlog takes more than one tick

    def end(self) -> None:
        """Undo it."""
        tick.RUNS_PER_TICK = self.runs_per_tick
        self.line.end()

    def close(self) -> None:
        """Hang up."""
        self.line.close()

    def check(self) -> None:
        """Every schedule, and the jobs that this step made."""
        found: dict[str, ModelSchedule] = {}
        fired = []
        for kind, *row in self.line.ask(READ_ALL):
            if kind == "schedule":
                found[row[0]] = ModelSchedule(*row[:10])
            else:
                fired.append((row[0], row[1], row[2], row[4], row[5], row[6], row[7], row[10]))
        for name in sorted(found.keys() | self.schedules.keys()):
            if found.get(name) != self.schedules.get(name):
                self.agree("a schedule", found.get(name), self.schedules.get(name))
        self.agree("the jobs of this tick", sorted(fired), sorted(self.fired))
        self.fired.clear()

    # -- rules --------------------------------------------------------------------------------------------------

    def write(self, pick: Pick) -> None:
        """Somebody adds a schedule or changes it with plain SQL; one in nine expressions never runs."""
        name, cron = pick.of(("one", "two", "three", "four")), pick.of((*EXPRESSIONS, *EXPRESSIONS[:2], BROKEN))
        misfire, enabled = pick.of(("run_once", "run_all", "skip")), pick.below(8) > 0
        self.tell("write", name, cron, misfire, enabled)
        before = self.schedules.get(name)
        if before is None:
            self.schedules[name] = ModelSchedule(name, cron, misfire, enabled)
        else:
            if before.cron != cron:
                before.next_run_at = None
            before.cron, before.misfire, before.enabled = cron, misfire, enabled
        self.line.ask(
            "INSERT INTO duly.schedules (name, cron, misfire, enabled, max_retries) VALUES ($1, $2, $3, $4, 7) "
            "ON CONFLICT (name) DO UPDATE SET cron = $2, misfire = $3, enabled = $4",
            [name, cron, misfire, enabled],
        )

    def advance(self, pick: Pick) -> None:
        """Time passes: half a minute, or a long downtime."""
        seconds = pick.of((30, 30, 60, 90, 600, 7_200, 90_000)) + pick.of((0, 0, 0.000001, 7))
        if self.now + timedelta(seconds=seconds) < LAST_DAY:
            self.now += timedelta(seconds=seconds)
            self.tell("advance", self.now)
            self.line.set_clock(self.now)

    def tick(self, pick: Pick) -> None:
        """A scheduler ticks."""
        due = [
            one
            for one in self.schedules.values()
            if one.enabled and (one.next_run_at is None or one.next_run_at <= self.now)
        ]
        self.tell("tick", [one.name for one in due])
        for schedule in due:
            self._expect(schedule, limit=200 // len(due))
        drive(self.scheduler._tick(self.line))

    def _expect(self, schedule: ModelSchedule, *, limit: int) -> None:
        if schedule.cron == BROKEN:
            schedule.is_broken, schedule.next_run_at = True, self.now + timedelta(minutes=5)
            return
        known = occurrences(schedule.cron, STRETCH)
        if schedule.next_run_at is None or schedule.is_broken:  # new, or mended: it begins from now
            schedule.is_broken, schedule.next_run_at = False, known.next_after(self.now)
            return
        told = schedule.missed_newest
        still_late = told is not None and schedule.next_run_at <= told
        wanted = plan(
            known, due_at=schedule.next_run_at, now=self.now, misfire=schedule.misfire, limit=limit,
            reported_until=told if still_late else None,
        )  # fmt: skip
        assert wanted is not None, "the stretch is long enough"
        for at, interval in wanted.runs:
            self.fired.append((schedule.name, "Scheduled", "due", at, at, 7, self.now, interval))
            schedule.last_run_at = at
        if wanted.missed:
            count, oldest, schedule.missed_newest = wanted.missed
            schedule.missed_count = count + (schedule.missed_count if still_late else 0)
            schedule.missed_oldest = schedule.missed_oldest if still_late else oldest
        schedule.next_run_at = wanted.next_run_at

    rules: ClassVar[Any] = (write, advance, advance, tick, tick)
