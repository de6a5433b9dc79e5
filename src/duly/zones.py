"""Time zones by their IANA names, and which instant a local time is (pure).

The rule, for cron and for whoever plans by local time: a time that the clocks skip is the first instant after the gap;
one that comes twice is the first of the two.
"""

from __future__ import annotations

import difflib
import functools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

from duly.errors import BadZone

MAX_ZONE_CHARACTERS = 50
ONE_SECOND = timedelta(seconds=1)
_NOT_ZONES = frozenset({"localtime", "posixrules", "Factory"})  # files beside the zones that name no place


def find_zone(name: str) -> ZoneInfo:
    """The zone of an IANA name; BadZone with a sentence on what to write for anything else."""
    if name in zone_names():
        return ZoneInfo(name)
    near = difflib.get_close_matches(name, zone_names(), n=1) if len(name) <= MAX_ZONE_CHARACTERS else []
    raise BadZone(
        f"{name[:MAX_ZONE_CHARACTERS]!r} is no IANA time zone: write a name such as 'Europe/Warsaw' or "
        "'UTC', not an offset" + (f"; did you mean {near[0]!r}?" if near else "")
    )


@functools.cache
def zone_names() -> frozenset[str]:
    """Every name that ``find_zone`` knows."""
    return frozenset(available_timezones() - _NOT_ZONES)


def first_instant(local: datetime, zone: ZoneInfo) -> datetime:
    """The instant of a local time by the rule, in UTC."""
    return find_instant(local, zone) or find_gap_end(local, zone)


def find_instant(local: datetime, zone: ZoneInfo, *, fold: int = 0) -> datetime | None:
    """The instant at which clocks in the zone show this time, the first (0) or second (1) of two; None in a gap."""
    if zone.key == "UTC":  # most schedules, and a third of the time
        return local.replace(tzinfo=UTC)
    at = local.replace(tzinfo=zone, fold=fold).astimezone(UTC)
    return at if at.astimezone(zone).replace(tzinfo=None) == local else None


def find_gap_end(local: datetime, zone: ZoneInfo) -> datetime:
    """The first instant after the gap that a local time fell into.

    In a gap, fold 1 gives an instant before the clocks change and fold 0 one after it.
    """
    low = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    high = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    before = offset_of(low.astimezone(zone))
    while high - low > ONE_SECOND:
        middle = low + timedelta(seconds=(high - low) // timedelta(seconds=2))
        if offset_of(middle.astimezone(zone)) == before:
            low = middle
        else:
            high = middle
    return high


def offset_of(local: datetime) -> timedelta:
    """How far a zone's clocks are ahead of UTC."""
    offset = local.utcoffset()
    assert offset is not None, "a datetime in a zone has an offset"
    return offset
