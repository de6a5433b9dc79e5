"""Cron expressions in a time zone: when they run, and by which daylight-saving rule (pure).

The rule. A fixed time that the clocks skip runs once, right after the gap; one that comes twice runs once,
the first time. A wildcard schedule (its minute or hour field starts with ``*``) runs at every real moment that
matches its fields.

cronsim parses the expression and walks *local* times; which instants those are is decided here. Its own zone
handling loses runs in zones that move by half an hour, invents one at a skipped midnight, and steps back in a
repeated hour.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from duly.errors import BadCron, Invalid
from duly.zones import ONE_SECOND, find_gap_end, find_instant, find_zone, offset_of

DST_GAPS = ("after", "skip")
DST_OVERLAPS = ("first", "both")
MAX_EXPRESSION_CHARACTERS = 100
MAX_PREVIEW = 1000
# cronsim's own; the longest real wait is 40 years, for a 29 February on one weekday across the year 2100.
HORIZON_YEARS = 50
_REFERENCE = datetime(2000, 1, 1, tzinfo=UTC)
_FIELDS = (
    ("minute", "0-59", "*/15 * * * *"),
    ("hour", "0-23", "0 9 * * *"),
    ("day-of-month", "1-31, or L for the last day", "0 9 1 * *"),
    ("month", "1-12 or JAN-DEC", "0 9 1 JAN *"),
    ("day-of-week", "0-7 or SUN-SAT (0 and 7 are Sunday)", "0 9 * * MON-FRI"),
)


@dataclass(frozen=True)
class Occurrence:
    """One run that is to come, for people to read."""

    at: datetime
    local: datetime
    note: str | None = None


@dataclass(frozen=True)
class Cron:
    """A checked expression in a zone; making one raises BadCron or BadZone with a sentence on what to write.

    ``dst_gap="skip"`` drops fixed times that do not exist, ``dst_overlap="both"`` runs repeated ones twice;
    neither changes a wildcard schedule, which follows real time anyway.
    """

    expression: str
    timezone: str = "UTC"
    dst_gap: str = "after"
    dst_overlap: str = "first"
    _zone: ZoneInfo = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check everything, so that whoever holds a Cron holds one that runs."""
        object.__setattr__(self, "expression", _checked_expression(self.expression))
        object.__setattr__(self, "_zone", find_zone(self.timezone))
        _check_choice("dst_gap", self.dst_gap, DST_GAPS)
        _check_choice("dst_overlap", self.dst_overlap, DST_OVERLAPS)
        self.next_after(_REFERENCE)

    @functools.cached_property
    def is_wildcard(self) -> bool:
        """Whether it runs by real time: its minute or its hour field starts with ``*``."""
        minute, hour, *_ = self.expression.split()
        return minute.startswith("*") or hour.startswith("*")

    def next_after(self, after: datetime) -> datetime:
        """The first run later than an instant, in UTC."""
        try:
            return next(self._runs(after))
        except StopIteration:
            raise BadCron(
                f"{self.expression!r} never runs in {self.timezone}: no moment fits its fields together; "
                "change the day-of-month, month or day-of-week field, for example '0 9 1 * *'"
            ) from None

    def between(self, after: datetime, until: datetime, limit: int) -> list[datetime]:
        """The runs later than ``after`` and not later than ``until``, oldest first, at most ``limit``."""
        return list(islice(takewhile(lambda at: at <= until, self._runs(after)), limit))

    def latest(self, after: datetime, until: datetime) -> datetime | None:
        """The newest run later than ``after`` and not later than ``until``, without walking all of them."""
        found = self.next_after(after)
        if found > until:
            return None
        high = until
        while high - found > ONE_SECOND:
            middle = found + (high - found) / 2
            following = self.next_after(middle)
            if following <= until:
                found = following
            else:
                high = middle
        return found

    def preview(self, after: datetime, count: int) -> list[Occurrence]:
        """The next runs, with a note where the clocks change; at most ``MAX_PREVIEW``."""
        runs = islice(self._runs(after), max(0, min(count, MAX_PREVIEW)))
        return [Occurrence(at, at.astimezone(self._zone), self._note(at)) for at in runs]

    def interval_at(self, at: datetime) -> timedelta:
        """From a run to the one after it: a recurring job's original delay."""
        return self.next_after(at) - at

    def describe(self) -> str:
        """The expression in words, with its zone."""
        return f"{CronSim(self.expression, _REFERENCE).explain()}, {self.timezone} time"

    def _runs(self, after: datetime) -> Iterator[datetime]:
        """Every run later than an instant, strictly increasing.

        First passes and second passes of repeated hours are each in order; merged, they are real time.
        """
        if after.tzinfo is None:
            raise ValueError("a cron is asked with an aware datetime")
        both = (self.is_wildcard or self.dst_overlap == "both") and self.timezone != "UTC"  # whose clocks never change
        last = after
        with contextlib.suppress(OverflowError):  # the calendar ends in the year 9999, and so do the runs
            for at in heapq.merge(*(self._resolved(after, fold) for fold in ((0, 1) if both else (0,)))):
                if at > last:
                    last = at
                    yield at

    def _resolved(self, after: datetime, fold: int) -> Iterator[datetime]:
        """Matching local times as instants, read as the first (0) or second (1) of a repeated hour."""
        local = after.astimezone(self._zone)
        start = local.replace(tzinfo=None)
        if fold > local.fold:  # in a first pass: the second begins earlier on the wall clock
            start -= offset_of(local) - offset_of(local.replace(fold=1))
        found_year = start.year
        for naive in CronSim(self.expression, start):
            if naive.year > found_year + HORIZON_YEARS:
                return
            at = self._instant(naive, fold)
            if at is not None:
                found_year = naive.year
                yield at

    def _instant(self, naive: datetime, fold: int) -> datetime | None:
        at = find_instant(naive, self._zone, fold=fold)
        if at is not None or self.is_wildcard or self.dst_gap == "skip":
            return at
        return find_gap_end(naive, self._zone)

    def _note(self, at: datetime) -> str | None:
        local = at.astimezone(self._zone)
        naive = local.replace(tzinfo=None)
        if next(CronSim(self.expression, naive - ONE_SECOND)) != naive:
            gap_start = (at - ONE_SECOND).astimezone(self._zone).replace(tzinfo=None) + ONE_SECOND
            return f"moved: the clocks skip from {gap_start:%H:%M} to {local:%H:%M}, it runs right after"
        if offset_of(local) == offset_of(local.replace(fold=1 - local.fold)):
            return None
        if local.fold:
            return "the second time this hour comes that day"
        runs = "both times" if self.is_wildcard or self.dst_overlap == "both" else "only now"
        return f"the first of two times this hour comes that day; it runs {runs}"


def _checked_expression(expression: str) -> str:
    if len(expression) > MAX_EXPRESSION_CHARACTERS or not expression.isascii():
        raise BadCron(
            f"a cron expression is plain text of at most {MAX_EXPRESSION_CHARACTERS} characters, "
            "for example '0 9 * * *'"
        )
    parts = expression.split()
    tidy = " ".join(parts)
    if len(parts) != len(_FIELDS):
        raise BadCron(
            f"{tidy!r} has {len(parts)} fields: write five (minute, hour, day of month, month, day of week; "
            "no seconds), for example '*/15 * * * *' for every 15 minutes"
        )
    for place, (name, allowed, example) in enumerate(_FIELDS):
        if not _parses(place, parts[place]):
            raise BadCron(
                f"the {name} field {parts[place]!r} of {tidy!r} is wrong: write {allowed}, a list (1,2), "
                f"a range (1-5) or a step (*/2), for example {example!r}"
            )
    try:
        CronSim(tidy, _REFERENCE)
    except CronSimError:  # each field is fine alone
        raise BadCron(
            f"{tidy!r} never runs: the day-of-month field {parts[2]!r} names a day that the month field "
            f"{parts[3]!r} does not have; write for example '0 0 28 2 *', or L for the last day: '0 0 L 2 *'"
        ) from None
    return tidy


def _parses(place: int, part: str) -> bool:
    fields = ["*"] * len(_FIELDS)
    fields[place] = part
    try:
        CronSim(" ".join(fields), _REFERENCE)
    except CronSimError:
        return False
    return True


def _check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise Invalid(f"{what}={value!r}: choose {' or '.join(allowed)}")
