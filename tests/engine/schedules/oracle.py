"""When a cron runs, found in another way (E3.14): it shares nothing with ``duly.schedules.cron``, nor with cronsim.

The expression is read by a parser of its own. A zone's clocks are found by looking at them: spans in which they run
steadily, by searching for the moments between. A run is then a matter of whole seconds: a matching minute of a local
day, minus the offset of the span it lies in. Whether it lies in no span (the clocks skip it) or in two (it comes twice)
is looked at, not inferred, and the written rule of docs/reference/cron.md says what follows.

``python -m tests.engine.schedules.oracle`` compares a sample of everything, ``--all`` everything: each zone there is,
each expression below, each day of ten years, each change of any zone's clocks since 1900. Names whose clocks have
never differed are one zone: the first of them is compared with everything, the others with a sample.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from multiprocessing.pool import Pool
from zoneinfo import ZoneInfo, available_timezones

from duly.schedules.cron import Cron  # what is under test

DAY = 86_400
HOUR = 3_600
EPOCH_DAY = date(1970, 1, 1).toordinal()
NO_ZONES = {"localtime", "posixrules", "Factory"}  # files beside the zones that name no place
FIRST, LAST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, tzinfo=UTC)
LONG_AGO = datetime(1900, 1, 1, tzinfo=UTC)
BEGIN, END = round(FIRST.timestamp()) - 4 * DAY, round(LAST.timestamp()) + 4 * DAY
MARGIN = 4 * DAY  # at both ends: what the clocks did there is known, and not compared
PROBES = (-HOUR, -1_800, -1, 0, 1, 1_800, HOUR)
POLICIES = (("after", "first"), ("skip", "first"), ("after", "both"), ("skip", "both"))
MANY = 1_000_000

FIXED = (
    "30 2 * * *", "0 0 * * *", "59 23 * * *", "0 3 * * *", "15 1,2,3 * * *", "0-59/20 1-3 * * *", "45 2 * * SUN",
    "0 9 * * MON-FRI", "30 0 1 * *", "0 12 L * *", "30 2 L * *", "0 8 * * MON#2", "30 2 * * SUN#1", "15 0 * * 7#5",
    "30 1 * * 0L", "0 0 29 2 *", "5 4 13 * FRI", "5 4 13,L * FRI#2", "0 0 */10 * MON", "30 0 1-7 * */7",
    "10 2 1,15,L * *", "0 6 LW * *", "20 2 * MAR,OCT SUN,7", "0 0 31 * *", "0 5/6 * * *", "1/20 2 * * *",
    "2-9/3 0,23 1/9 1-12/2 1-5/2", "0 1 * JAN-MAR,9-12 0-7/3", "30 23 28-31 * 5,6L", "7 2 29 FEB MON#5,3L",
)  # fmt: skip
WILDCARD = (
    "* * * * *", "*/15 * * * *", "0 * * * *", "30 * * * *", "*/7 2 * * *", "* 2 * * SUN", "*/30 0-4 * 3,4,9,10,11 *",
    "17 */2 * * *", "5 * 1 * MON", "*/20 1-3 * * *", "0 */5 * * *", "*/13 * L * *", "0 * 29 2 *", "*,5 0 13 * FRI",
    "45 */23 LW * *",
)  # fmt: skip
EXPRESSIONS = FIXED + WILDCARD
SPARSE = tuple(text for text in FIXED if text not in {"0-59/20 1-3 * * *", "15 1,2,3 * * *", "0 5/6 * * *"})
"""Fixed times of which every one of ten years is compared; the others have thousands a year, and are compared where
clocks change and in weeks drawn at random."""
RARE = tuple(text for text in SPARSE if not text.endswith("* * *"))
IN_HISTORY = ("30 2 * * *", "0 0 * * *", "59 23 * * *", "0-59/20 1-3 * * *", "*/15 * * * *", "0 * * * *", "* 2 * * SUN")


# -- expressions -----------------------------------------------------------------------------------------------------

NAMES = {
    name: number
    for names, first in (("SUN MON TUE WED THU FRI SAT", 0), ("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1))
    for number, name in enumerate(names.split(), first)
}


@functools.cache
def numbers(text: str, low: int, high: int) -> frozenset[int]:
    """The values of a list of numbers, ranges and steps."""
    found: set[int] = set()
    for item in text.split(","):
        body, _, step = item.partition("/")
        start, _, end = body.partition("-")
        if body == "*":
            first, last = low, high
        else:
            first = number(start)
            last = number(end) if end else (high if step else first)
        found.update(range(first, last + 1, int(step or 1)))
    assert found
    assert low <= min(found) <= max(found) <= high
    return frozenset(found)


def number(text: str) -> int:
    return NAMES[text] if text in NAMES else int(text)


@dataclass(frozen=True)
class Expression:
    """A cron expression as docs/reference/cron.md describes it."""

    text: str

    @functools.cached_property
    def is_wildcard(self) -> bool:
        """Whether it runs by real time."""
        minute, hour, *_ = self.text.split()
        return "*" in (minute[0], hour[0])

    @functools.cached_property
    def seconds(self) -> list[int]:
        """Where in a day it runs, in seconds of what the clocks show."""
        minute, hour, *_ = self.text.split()
        return sorted(h * HOUR + m * 60 for h in numbers(hour, 0, 23) for m in numbers(minute, 0, 59))

    def is_on(self, day: date) -> bool:
        """Whether a day is one of its days: both day fields must fit, or either, if neither starts with a star."""
        _, _, days, months, weekdays = self.text.split()
        if day.month not in numbers(months, 1, 12):
            return False
        fits = (self._fits_month_day(days, day), self._fits_weekday(weekdays, day))
        return all(fits) if "*" in (days[0], weekdays[0]) else any(fits)

    def days_of(self, year: int) -> list[int]:
        """Its days in a year, counted from 1970."""
        return _days_of(self, year)

    @staticmethod
    def _fits_month_day(text: str, day: date) -> bool:
        for item in text.split(","):
            if item == "L":
                fits = is_last(day)
            elif item == "LW":
                later = (day + timedelta(days=n) for n in range(1, 4))
                fits = day.isoweekday() <= 5 and not any(o.month == day.month and o.isoweekday() <= 5 for o in later)
            else:
                fits = day.day in numbers(item, 1, 31)
            if fits:
                return True
        return False

    @staticmethod
    def _fits_weekday(text: str, day: date) -> bool:
        for item in text.split(","):
            name, _, nth = item.partition("#")
            if nth:
                fits = number(name) % 7 == day.isoweekday() % 7 and (day.day - 1) // 7 + 1 == int(nth)
            elif name.endswith("L"):
                fits = int(name[:-1]) % 7 == day.isoweekday() % 7 and (day + timedelta(days=7)).month != day.month
            else:
                fits = day.isoweekday() % 7 in {value % 7 for value in numbers(item, 0, 7)}
            if fits:
                return True
        return False


@functools.cache
def expression_of(text: str) -> Expression:
    """Read once."""
    return Expression(text)


def is_last(day: date) -> bool:
    return (day + timedelta(days=1)).month != day.month


@functools.cache
def _days_of(expression: Expression, year: int) -> list[int]:
    first = date(year, 1, 1).toordinal()
    days = (date.fromordinal(first + n) for n in range(366))
    return [day.toordinal() - EPOCH_DAY for day in days if day.year == year and expression.is_on(day)]


# -- clocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """From one moment to another the clocks are this many seconds ahead of UTC."""

    begins: int
    ends: int
    offset: int


def find_spans(zone: str, begin: int, end: int, *, step: int = 6 * HOUR) -> list[Span]:
    """How the clocks run between two moments, by looking at them every few hours and searching where they changed."""
    clocks = ZoneInfo(zone)

    def ahead(moment: int) -> int:
        offset = datetime.fromtimestamp(moment, clocks).utcoffset()
        assert offset is not None
        return round(offset.total_seconds())

    spans = []
    began, offset = begin, ahead(begin)
    for moment in range(begin + step, end + step, step):
        if ahead(moment) == offset:
            continue
        low, high = moment - step, moment
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if ahead(middle) == offset else (low, middle)
        spans.append(Span(began, high, offset))
        began, offset = high, ahead(high)
    return [*spans, Span(began, end, offset)]


# -- the rule --------------------------------------------------------------------------------------------------------


def expected(
    expression: Expression, spans: Sequence[Span], *, after: int, until: int, gap: str, overlap: str
) -> list[int]:
    """Every run later than one moment and not later than another; the spans are known for days before and after."""
    here = [span for span in spans if span.begins <= until and span.ends > after]
    if expression.is_wildcard:
        runs = {
            local - span.offset
            for span in here
            for local in _matching(
                expression, max(span.begins, after + 1) + span.offset, min(span.ends, until + 1) + span.offset
            )
        }
        return sorted(runs)
    offsets = [span.offset for span in here]
    runs = set()
    for local in _matching(expression, after + min(offsets), until + max(offsets) + 1):
        moments = _moments(local, spans)
        if moments:
            runs.update(moments if overlap == "both" else moments[:1])
        elif gap == "after":
            runs.update(_after_gap(local, spans))
    return sorted(run for run in runs if after < run <= until)


def _matching(expression: Expression, begin: int, end: int) -> Iterator[int]:
    """The matching minutes of the wall clock, from one reading to before another."""
    for year in range(_year(begin), _year(end) + 1):
        days = expression.days_of(year)
        for day in days[bisect.bisect_left(days, begin // DAY) : bisect.bisect_right(days, end // DAY)]:
            yield from (local for second in expression.seconds if begin <= (local := day * DAY + second) < end)


def _year(moment: int) -> int:
    return date.fromordinal(EPOCH_DAY + moment // DAY).year


def _moments(local: int, spans: Sequence[Span]) -> list[int]:
    """When the clocks show this: never, once or twice; no clocks are more than a day and a half off."""
    low = bisect.bisect_left(spans, local - 3 * DAY // 2, key=lambda span: span.ends)
    moments = []
    for span in itertools.islice(spans, low, None):
        if span.begins > local + 3 * DAY // 2:
            break
        if span.begins <= local - span.offset < span.ends:
            moments.append(local - span.offset)
    return moments


def _after_gap(local: int, spans: Sequence[Span]) -> Iterable[int]:
    """The moment after which the clocks show more than this, before which they showed less."""
    for before, after in itertools.pairwise(spans):
        if before.ends + before.offset <= local < after.begins + after.offset:
            return [after.begins]
    return []


# -- the comparison --------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was compared, and what was not the same."""

    zones: set[str] = field(default_factory=set)
    expressions: set[str] = field(default_factory=set)
    windows: int = 0
    occurrences: int = 0
    changes: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.zones |= other.zones
        self.expressions |= other.expressions
        self.windows += other.windows
        self.occurrences += other.occurrences
        self.changes += other.changes
        self.differences += other.differences


class Comparison:
    """One zone's crons against the oracle."""

    def __init__(self, zone: str) -> None:
        self.zone = zone
        self.tally = Tally({zone})
        self._crons: dict[tuple[str, str, str], Cron] = {}

    def window(
        self, text: str, spans: Sequence[Span], after: int, until: int, *, gap: str = "after", overlap: str = "first"
    ) -> None:
        """All runs between two moments, and what is next from moments around each change of the clocks."""
        key = (text, gap, overlap)
        cron = self._crons.get(key)
        if cron is None:
            cron = self._crons[key] = Cron(text, self.zone, gap, overlap)
        runs = expected(expression_of(text), spans, after=after, until=until, gap=gap, overlap=overlap)
        found = [round(at.timestamp()) for at in cron.between(_at(after), _at(until), MANY)]
        self.tally.windows += 1
        self.tally.occurrences += len(runs)
        self.tally.expressions.add(text)
        if found != runs:
            only = [str(_at(run)) for run in sorted(set(found) ^ set(runs))[:3]]
            self._differs(key, f"{len(found)} runs, not {len(runs)}: {only}")
        for span in spans:
            if after < span.begins <= until:
                self._next(key, cron, runs, span.begins, until)

    def _next(self, key: tuple[str, str, str], cron: Cron, runs: Sequence[int], change: int, until: int) -> None:
        for start in (change + seconds for seconds in PROBES):
            place = bisect.bisect_right(runs, start)
            if place < len(runs) and start < until:
                found = cron.next_after(_at(start))
                self.tally.occurrences += 1
                if found != _at(runs[place]):
                    self._differs(key, f"after {_at(start)} comes {found}, not {_at(runs[place])}")

    def around(
        self, text: str, spans: Sequence[Span], index: int, *, gap: str = "after", overlap: str = "first"
    ) -> None:
        """Some days around a change; hours, where there are many runs."""
        change = spans[index].begins
        some = max(3 * HOUR, min(3 * DAY, 40 * DAY // len(expression_of(text).seconds)))
        known = cut(spans, change - 6 * DAY, change + 6 * DAY)
        self.window(text, known, change - some, change + some, gap=gap, overlap=overlap)

    def _differs(self, key: tuple[str, str, str], how: str) -> None:
        text, gap, overlap = key
        self.tally.differences.append(f"{self.zone} {text!r} gap={gap} overlap={overlap}: {how}")


def _at(moment: int) -> datetime:
    return datetime.fromtimestamp(moment, UTC)


def cut(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """The part of the spans between two moments."""
    return [
        Span(max(span.begins, begin), min(span.ends, end), span.offset)
        for span in spans
        if span.begins < end and span.ends > begin
    ]


def zones() -> list[str]:
    """Every name that duly takes."""
    return sorted(available_timezones() - NO_ZONES)


def compare_sample(zone: str, *, seed: int = 1) -> Tally:
    """Each change of ten years with some expressions, one of them over all ten years, and some days anywhere."""
    drawn = random.Random(f"{zone} {seed}")
    compared = Comparison(zone)
    spans = find_spans(zone, BEGIN, END, step=12 * HOUR)
    compared.tally.changes = len(spans) - 1
    chosen = [drawn.choice(FIXED), drawn.choice(WILDCARD)]
    gap, overlap = drawn.choice(POLICIES)
    for index in range(1, len(spans)):
        for text in chosen:
            compared.around(text, spans, index, gap=gap, overlap=overlap)
    compared.window(drawn.choice(RARE), spans, BEGIN + MARGIN, END - MARGIN)
    begin = drawn.randrange(BEGIN + MARGIN, END - MARGIN - 3 * DAY)
    for text in drawn.sample(EXPRESSIONS, 2):
        compared.window(text, spans, begin, begin + 3 * DAY)
    return compared.tally


def compare_all(zone: str) -> Tally:
    """Everything."""
    drawn = random.Random(zone)
    compared = Comparison(zone)
    spans = find_spans(zone, BEGIN, END)
    for text in SPARSE:
        compared.window(text, spans, BEGIN + MARGIN, END - MARGIN)
    for index in range(1, len(spans)):
        for text in EXPRESSIONS:
            for gap, overlap in POLICIES:
                compared.around(text, spans, index, gap=gap, overlap=overlap)
    for text in EXPRESSIONS:
        begin = drawn.randrange(BEGIN + MARGIN, END - MARGIN - 9 * DAY)
        compared.window(text, spans, begin, begin + 9 * DAY)
    compare_history(compared, LONG_AGO.year, FIRST.year)
    compared.tally.changes += len(spans) - 1
    return compared.tally


def compare_history(compared: Comparison, first_year: int, end_year: int, texts: Sequence[str] = IN_HISTORY) -> None:
    """Each change of a zone's clocks in these years."""
    begin, end = (round(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (first_year, end_year))
    spans = find_spans(compared.zone, begin - 2 * MARGIN, end + 2 * MARGIN, step=DAY // 2)
    for index in range(1, len(spans)):
        if begin <= spans[index].begins < end:
            for text in texts:
                compared.around(text, spans, index)
            compared.tally.changes += 1


def compare_whole(task: tuple[str, bool]) -> Tally:
    """A zone with everything, or a sample of it for another name of the same clocks."""
    zone, is_first = task
    return compare_all(zone) if is_first else compare_sample(zone)


def find_clocks(zone: str) -> tuple[Span, ...]:
    """How a zone's clocks ever ran, as far as it is compared."""
    return tuple(find_spans(zone, round(LONG_AGO.timestamp()) - 2 * MARGIN, END, step=DAY // 2))


def name_clocks(names: Sequence[str], pool: Pool) -> list[tuple[str, bool]]:
    """Each name, and whether it is the first of its clocks."""
    seen: set[tuple[Span, ...]] = set()
    named = []
    for name, clocks in zip(names, pool.map(find_clocks, names), strict=True):
        named.append((name, clocks not in seen))
        seen.add(clocks)
    return named


def main() -> None:
    """The command; 1 when anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="everything, not a sample of it")
    parser.add_argument("--zone", action="append", help="these only")
    parser.add_argument("--part", default="1/1", help="the first of twenty parts of all zones is 1/20")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    began = time.monotonic()
    total = Tally()
    with multiprocessing.Pool(given.processes) as pool:
        named = (
            name_clocks(given.zone or zones(), pool) if given.all else [(zone, False) for zone in given.zone or zones()]
        )
        chosen = named[part - 1 :: parts]
        print(f"{sum(first for _, first in chosen)} of {len(chosen)} zones with everything", file=sys.stderr)
        for tally in pool.imap_unordered(compare_whole, chosen):
            total.add(tally)
            if sys.stderr.isatty():
                print(f"\r{len(total.zones)} zones, {total.occurrences} occurrences", end="", file=sys.stderr)
    print(
        f"{len(total.zones)} zones, {len(total.expressions)} expressions, {total.changes} changes of clocks, "
        f"{total.windows} windows, {total.occurrences} occurrences compared in {time.monotonic() - began:.0f} s: "
        f"{len(total.differences)} differences"
    )
    print("\n".join(total.differences[:50]))
    sys.exit(1 if total.differences else 0)


if __name__ == "__main__":
    main()
