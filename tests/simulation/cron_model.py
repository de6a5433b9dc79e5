"""When a cron expression runs, found by walking every minute of some days and looking at the clock on the wall."""

from __future__ import annotations

import calendar
import functools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
DAYS = {name: number for number, name in enumerate(("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"))}


@dataclass(frozen=True)
class Stretch:
    """Some days of one zone, minute by minute."""

    zone: str
    start: datetime
    days: int

    @property
    def end(self) -> datetime:
        """The first instant that is no longer in it."""
        return self.start + timedelta(days=self.days)


@functools.lru_cache(maxsize=16)
def _minutes(stretch: Stretch) -> list[tuple[datetime, datetime, int]]:
    """(instant, what the wall clock shows, whether it shows that for the second time) of every minute."""
    zone = ZoneInfo(stretch.zone)
    made = []
    for number in range(stretch.days * 1440):
        instant = stretch.start + number * MINUTE
        wall = instant.astimezone(zone)
        made.append((instant, wall.replace(tzinfo=None, fold=0), wall.fold))
    return made


def _values(field: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            begin, finish = low, high
        else:
            begin = DAYS[first] if first in DAYS else int(first)
            finish = (DAYS[last] if last in DAYS else int(last)) if last else (high if step else begin)
        found.update(range(begin, finish + 1, int(step or 1)))
    return found


class Matcher:
    """Whether a wall clock fits the five fields."""

    def __init__(self, expression: str) -> None:
        minute, hour, self.day, month, self.weekday = expression.split()
        self.minutes, self.hours = _values(minute, 0, 59), _values(hour, 0, 23)
        self.months = _values(month, 1, 12)
        self.weekdays = {number % 7 for number in _values(self.weekday, 0, 7)}
        self.days = set() if self.day == "L" else _values(self.day, 1, 31)
        self.follows_real_time = minute.startswith("*") or hour.startswith("*")

    def fits(self, wall: datetime) -> bool:
        """Minute, hour and month, and the day by Debian's rule: two restricted day fields are alternatives."""
        if wall.minute not in self.minutes or wall.hour not in self.hours or wall.month not in self.months:
            return False
        last = self.day == "L" and wall.day == calendar.monthrange(wall.year, wall.month)[1]
        by_day, by_weekday = last or wall.day in self.days, wall.isoweekday() % 7 in self.weekdays
        if self.day.startswith("*") or self.weekday.startswith("*"):
            return by_day and by_weekday
        return by_day or by_weekday


class Occurrences:
    """All runs of an expression within a stretch."""

    def __init__(
        self, expression: str, stretch: Stretch, *, dst_gap: str = "after", dst_overlap: str = "first"
    ) -> None:
        matcher = Matcher(expression)
        found: list[datetime] = []
        before: datetime | None = None
        for instant, wall, second_time in _minutes(stretch):
            runs = matcher.fits(wall)
            if second_time and not matcher.follows_real_time and dst_overlap == "first":
                runs = False
            if before is not None and wall > before + MINUTE and not matcher.follows_real_time and dst_gap == "after":
                skipped = int((wall - before) / MINUTE) - 1
                runs = runs or any(matcher.fits(before + number * MINUTE) for number in range(1, skipped + 1))
            if runs:
                found.append(instant)
            before = wall
        self.all = found

    def next_after(self, at: datetime) -> datetime | None:
        """The first one later, if the stretch has it."""
        place = bisect_right(self.all, at)
        return self.all[place] if place < len(self.all) else None

    def between(self, after: datetime, until: datetime) -> list[datetime]:
        """Later than one instant and not later than another."""
        return self.all[bisect_right(self.all, after) : bisect_right(self.all, until)]

    def from_until(self, start: datetime, until: datetime) -> list[datetime]:
        """Not earlier than one instant and not later than another."""
        return self.all[bisect_left(self.all, start) : bisect_right(self.all, until)]


@functools.lru_cache(maxsize=64)
def occurrences(expression: str, stretch: Stretch) -> Occurrences:
    """Remembered: a machine asks for few expressions and often."""
    return Occurrences(expression, stretch)


@dataclass(frozen=True)
class ModelPlan:
    """What a tick should do about one schedule."""

    runs: list[tuple[datetime, timedelta]]
    next_run_at: datetime
    missed: tuple[int, datetime, datetime] | None


def plan(
    known: Occurrences, *, due_at: datetime, now: datetime, misfire: str, limit: int, reported_until: datetime | None
) -> ModelPlan | None:
    """What to do about all that is due; None where the stretch is too short to say."""
    due = known.from_until(due_at, now)
    late = [at for at in due if now - at > MINUTE]
    if late and misfire == "run_once":
        chosen = due[-1:]
    elif late and misfire == "skip":
        chosen = [at for at in due if now - at <= MINUTE][:limit]
    else:
        chosen = due[:limit]
    following = [known.next_after(at) for at in chosen]
    next_run_at = following[-1] if chosen else known.next_after(now)
    if next_run_at is None:
        return None
    if reported_until is not None:
        late = [at for at in late if at > reported_until]
    missed = (min(len(late), 1000), late[0], late[-1]) if late else None
    runs = [(at, after - at) for at, after in zip(chosen, following, strict=True) if after is not None]
    return ModelPlan(runs, next_run_at, missed)


def utc(year: int, month: int, day: int) -> datetime:
    """Midnight in UTC."""
    return datetime(year, month, day, tzinfo=UTC)
