"""Years of birthdays as they should be: what people do, when the system is down, and which message must come when.

It shares nothing with ``apps.birthdays``: the calendar is counted day by day, nine o'clock is found by looking at the
clocks from UTC, and the rules are those of docs/howto/time-rules.md, written a second time.
"""

from __future__ import annotations

import functools
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
QUARTER = timedelta(minutes=15)
DAY = timedelta(days=1)
LONG_AGO = datetime(1900, 1, 1, tzinfo=UTC)
# Around every kind of clock change, the leap day, the turn of the year, and the day that Samoa skipped.
CLASSIC_DAYS = (
    "01-01", "02-28", "02-29", "03-01", "03-08", "03-09", "03-13", "03-14", "03-25", "03-27", "03-28", "03-29", "03-30",
    "03-31", "04-01", "04-03", "04-05", "05-01", "06-15", "08-31", "09-24", "09-25", "10-02", "10-04", "10-25", "10-26",
    "10-28", "10-30", "10-31", "11-01", "11-04", "11-07", "12-09", "12-24", "12-29", "12-30", "12-31",
)  # fmt: skip
DATE_LINE = (
    "Pacific/Kiritimati",
    "Pacific/Apia",
    "Pacific/Pago_Pago",
    "Pacific/Honolulu",
    "Pacific/Auckland",
    "Etc/GMT+12",
)


@dataclass(frozen=True)
class Downtime:
    """Nobody works from ``start`` until ``end``; the API is up, people go on living."""

    start: datetime
    end: datetime


@dataclass(frozen=True)
class Deed:
    """What somebody does: registers, moves, corrects a date, renames, leaves."""

    at: datetime
    person: int
    kind: str
    born: date | None = None
    zone: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Message:
    """What must arrive: whose, for which year, at which instant; and when it was due."""

    person: int
    year: int
    local: datetime
    zone: str
    due: datetime
    at: datetime


@dataclass
class Life:
    """One person, as far as the story has come."""

    number: int
    born: date
    zone: str
    year: int = 0  # of the message that is to come
    day: date = date.min
    planned_in: str = ""
    known_at: datetime = LONG_AGO
    last_year: int = 0
    is_gone: bool = False

    @property
    def due(self) -> datetime:
        return nine_oclock(self.planned_in, self.day)


@dataclass
class Story:
    """Everything that happens, and everything that must."""

    start: datetime
    end: datetime
    downtimes: list[Downtime]
    restarts: list[datetime]
    deeds: list[Deed] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    expecting: dict[int, tuple[int, datetime]] = field(default_factory=dict)  # at the end: year and instant by person

    def share(self, part: int, parts: int) -> Story:
        """What happens to every so many-th person; the system is down at the same times for all of them."""
        return replace(
            self,
            deeds=[deed for deed in self.deeds if deed.person % parts == part],
            messages=[message for message in self.messages if message.person % parts == part],
            expecting={person: plan for person, plan in self.expecting.items() if person % parts == part},
        )


# -- time -------------------------------------------------------------------------------------------------------------


@functools.cache
def nine_oclock(zone: str, day: date) -> datetime:
    """The first instant at which clocks there show nine o'clock of the day, or have passed it."""
    there = ZoneInfo(zone)
    wanted = datetime.combine(day, time(9))
    at = wanted.replace(tzinfo=UTC) - timedelta(hours=25)
    while at.astimezone(there).replace(tzinfo=None) < wanted - timedelta(
        hours=5
    ):  # no clocks go back further than that
        at += 4 * QUARTER
    while at.astimezone(there).replace(tzinfo=None) < wanted:
        at += QUARTER
    while (at - MINUTE).astimezone(there).replace(tzinfo=None) >= wanted:
        at -= MINUTE
    return at


def birthday(born: date, year: int) -> date:
    """By counting: the day with that month and number, or the last of February."""
    day = date(year, born.month, 1) + (born.day - 1) * DAY
    return day if day.month == born.month else day - DAY


def next_minute(at: datetime) -> datetime:
    """That instant, or the next whole minute."""
    whole = at.replace(second=0, microsecond=0)
    return whole if whole == at else whole + MINUTE


class Calendar:
    """When the system is up."""

    def __init__(self, downtimes: Sequence[Downtime]) -> None:
        self._starts = [downtime.start for downtime in downtimes]
        self._downtimes = downtimes

    def first_up(self, at: datetime) -> datetime:
        """That instant, or the end of the downtime it falls into."""
        index = bisect_right(self._starts, at) - 1
        return self._downtimes[index].end if index >= 0 and at < self._downtimes[index].end else at


# -- the rules --------------------------------------------------------------------------------------------------------


def plan_anew(life: Life, now: datetime) -> None:
    """The first nine o'clock that is not before now, of a year that had no message, and not the day of birth."""
    year = max(now.year - 2, life.last_year, life.born.year) + 1
    while nine_oclock(life.zone, birthday(life.born, year)) < now:
        year += 1
    life.year, life.day, life.planned_in, life.known_at = year, birthday(life.born, year), life.zone, now


def apply(life: Life, deed: Deed) -> None:
    """What a deed changes, at once: others hear of it before anything is claimed."""
    if deed.kind == "leave":
        life.is_gone = True
        return
    life.zone = deed.zone or life.zone
    if deed.born not in (None, life.born):
        assert deed.born is not None
        life.born = deed.born
        plan_anew(life, deed.at)
    elif deed.zone is not None:
        life.planned_in, life.known_at = life.zone, deed.at  # the same day and hour by other clocks


def deliver_until(life: Life, until: datetime, calendar: Calendar) -> Iterator[Message]:
    """The messages of one person that come before an instant."""
    while not life.is_gone:
        at = calendar.first_up(next_minute(max(life.due, life.known_at)))  # there is a claim every minute
        if at >= until:
            return
        local = datetime.combine(life.day, time(9))
        yield Message(life.number, life.year, local, life.planned_in, life.due, at)
        life.last_year = life.year
        life.year += 1
        life.day, life.planned_in, life.known_at = birthday(life.born, life.year), life.zone, at


# -- the story --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Classic:
    """Somebody who is in every story, whatever the seed; what they do is counted from their first birthday."""

    zone: str
    born: str
    after: timedelta = timedelta(0)
    moves_to: str | None = None
    corrected_to: str | None = None


CLASSICS = (
    Classic("Pacific/Apia", "1980-12-30"),  # the day that was not there in 2011
    Classic("Europe/Warsaw", "1988-02-29"),
    Classic("Europe/Warsaw", "1990-03-28", 20 * DAY, corrected_to="1990-10-04"),  # the year has had its message
    Classic("Europe/Warsaw", "1990-04-05", timedelta(hours=-1), moves_to="Asia/Tokyo"),  # due at once, and late
    Classic(
        "Pacific/Kiritimati", "1990-04-01", timedelta(hours=2), moves_to="Pacific/Pago_Pago"
    ),  # still to come there
    Classic("America/New_York", "1990-03-14", timedelta(hours=-6), "America/Los_Angeles", "1990-03-15"),
    Classic("Europe/Warsaw", "1990-05-01", 5 * DAY, moves_to="America/Caracas"),
)


class Whims:
    """What people do, by chance."""

    def __init__(self, chance: random.Random, zones: Sequence[str]) -> None:
        self._chance = chance
        self._zones = zones
        self._days = [*CLASSIC_DAYS, *(f"{chance.randint(1, 12):02}-{chance.randint(1, 28):02}" for _ in range(3))]
        self._by_offset: dict[timedelta | None, list[str]] = {}

    def born(self, zone: str) -> date:
        """A day for somebody who lives there, of a leap year, so that every day exists.

        Zones with the same distance from UTC share a dozen days, so that many are due at one instant.
        """
        offset = datetime(2010, 1, 1, tzinfo=ZoneInfo(zone)).utcoffset()
        some = self._by_offset.setdefault(offset, self._chance.sample(self._days, 12))
        return date.fromisoformat(f"{self._chance.choice([1952, 1960, 1976, 1984, 1996])}-{self._chance.choice(some)}")

    def next_deed(self, life: Life, after: datetime) -> Deed:
        """On average one every five years, many of them in the hour that matters."""
        chance = self._chance
        at = after + chance.expovariate(1 / (5 * 365)) * DAY
        at = at.replace(hour=12, minute=0, second=7, microsecond=0)  # so that many happen at one instant
        if at <= after:
            at += DAY
        kind = chance.choices(["move", "close", "correct", "both", "rename", "leave"], [4, 12, 6, 2, 3, 1])[0]
        zone = chance.choice(DATE_LINE) if chance.random() < 0.3 else chance.choice(list(self._zones))
        if kind == "close":  # a minute before it is due, a minute after, or some hours
            due = nine_oclock(life.zone, birthday(life.born, at.year + 1))
            minutes = chance.choice([-1, 1, -1, 1, -180, 120, 300, 660])
            return Deed(due + minutes * MINUTE + timedelta(seconds=7), life.number, "move", zone=zone)
        if kind == "rename":
            return Deed(at, life.number, kind, name=f"R{chance.randint(0, 999)}")
        if kind == "leave":
            return Deed(at, life.number, kind)
        if kind == "move":
            return Deed(at, life.number, kind, zone=zone)
        there = zone if kind == "both" else None
        return Deed(at, life.number, "correct", born=self.born(there or life.zone), zone=there)


def tell_story(*, people: int, years: int, seed: int, zones: Sequence[str], first_year: int) -> Story:
    """Make up who lives where, what they do and when the system is down; and say what must come of it."""
    chance = random.Random(seed)
    start = datetime(first_year, 1, 10, 12, tzinfo=UTC)
    end = start.replace(year=first_year + years)
    downtimes = _downtimes(chance, start, end)
    restarts = sorted(start + chance.random() * (end - start) for _ in range(3 * years))
    story = Story(start, end, downtimes, restarts)
    calendar, whims = Calendar(downtimes), Whims(chance, zones)
    shuffled = chance.sample(list(zones), len(zones))
    for number in range(people):
        if number < len(CLASSICS):
            _live_as_told(story, number, CLASSICS[number], calendar)
            continue
        zone = shuffled[number % len(shuffled)]
        is_late = number % 10 == 9  # some come later
        came = start + chance.randint(1, 365 * years - 30) * DAY if is_late else start
        _live(story, Life(number, whims.born(zone), zone), came, whims.next_deed, calendar)
    story.deeds.sort(key=lambda deed: (deed.at, deed.person))
    story.messages.sort(key=lambda message: (message.at, message.due, message.person))
    return story


def _live_as_told(story: Story, number: int, classic: Classic, calendar: Calendar) -> None:
    """One of those who are in every story."""
    born = date.fromisoformat(classic.born)
    corrected = date.fromisoformat(classic.corrected_to) if classic.corrected_to else None
    at = nine_oclock(classic.zone, birthday(born, story.start.year)) + classic.after + timedelta(seconds=7)
    deed = Deed(at, number, "correct", born=corrected, zone=classic.moves_to)
    told = iter([deed] if corrected or classic.moves_to else [])
    _live(story, Life(number, born, classic.zone), story.start, lambda *_: next(told, None), calendar)


def _live(
    story: Story,
    life: Life,
    came: datetime,
    next_deed: Callable[[Life, datetime], Deed | None],
    calendar: Calendar,
) -> None:
    """One person's life: each deed is chosen when the story has come there, so that it can be close to what is due."""
    story.deeds.append(Deed(came, life.number, "register", life.born, life.zone, f"P{life.number}"))
    plan_anew(life, came)
    at = came
    while (deed := next_deed(life, at)) is not None and deed.at < story.end:
        story.messages += deliver_until(life, deed.at, calendar)
        story.deeds.append(deed)
        apply(life, deed)
        at = deed.at
        if life.is_gone:
            return
    story.messages += deliver_until(life, story.end, calendar)
    story.expecting[life.number] = (life.year, life.due)


def _downtimes(chance: random.Random, start: datetime, end: datetime) -> list[Downtime]:
    """One in each half year or so: hours, days or weeks."""
    found: list[Downtime] = []
    at = start + 60 * DAY
    while at < end - 60 * DAY:
        at += chance.randint(100, 250) * DAY
        length = chance.choice([timedelta(hours=5), 1 * DAY, 3 * DAY, 9 * DAY, 25 * DAY])
        begin = at.replace(hour=chance.randint(0, 23), minute=chance.randint(0, 59), second=11)
        if begin + length < end - 30 * DAY:
            found.append(Downtime(begin, (begin + length).replace(second=0)))
        at = begin + length
    return found


def describe_lateness(late: timedelta) -> str:
    """The words that a late message must end with; none within five minutes."""
    seconds = int(late.total_seconds())
    if seconds <= 300:
        return ""
    unit, size = next((u, s) for u, s in (("day", 86_400), ("hour", 3_600), ("minute", 60)) if seconds >= s)
    return f"{seconds // size} {unit}{'s' if seconds // size > 1 else ''} late."
