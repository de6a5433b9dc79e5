"""How the console writes numbers, times and lengths of time."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from markupsafe import Markup, escape

from duly.errors import Invalid
from duly.operate.counts import Count
from duly.operate.words import span
from duly.schedules.cron import Cron
from duly.zones import find_zone

CAP = 10_000
SHORT_NAME = 24  # characters of a name that stays in one line
_PARTS = re.compile(r"(?<=[:._/?&=])")


def capped(count: int | Count) -> str:
    """A count with thousands separated; beyond the cap only that it is more."""
    if isinstance(count, Count):
        return str(count)
    return f"{CAP:,}+" if count > CAP else f"{count:,}"


def duration(seconds: float | None) -> str:
    """A length of time in one or two units, as a person says it."""
    if seconds is None:
        return "–"
    sign, seconds = ("in ", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        return f"{sign}{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{sign}{seconds:.1f} s"
    minutes, whole = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {whole:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{sign}{hours} h {minutes:02d} min"
    return f"{sign}{hours // 24:,} d"


def when(moment: datetime | None, zone: str = "UTC") -> str:
    """An instant to the second, on the clocks of a zone; UTC is not said, any other is."""
    if moment is None:
        return "–"
    try:
        local = moment.astimezone(find_zone(zone))
    except (Invalid, OverflowError):
        local, zone = moment.astimezone(UTC), "UTC"
    said = local.strftime("%Y-%m-%d %H:%M:%S")
    return said if zone == "UTC" else f"{said} {local.strftime('%Z')}"


def iso(moment: datetime | None) -> str:
    """An instant for machines."""
    return "" if moment is None else moment.astimezone(UTC).isoformat()


def relative(moment: datetime, now: datetime) -> str:
    """How far away it is: ``4 min ago``, ``in 2 h``."""
    seconds = (moment - now).total_seconds()
    if abs(seconds) < 1:
        return "now"
    if abs(seconds) >= 600:
        seconds -= math.fmod(seconds, 60)  # nobody reads the seconds of half an hour
    return f"in {span(seconds)}" if seconds > 0 else f"{span(seconds)} ago"


def took(started: datetime, completed: datetime) -> float:
    """How long a run took, in seconds."""
    return (completed - started).total_seconds()


def cron_words(row: Any) -> str:
    """A schedule's expression in words; of a broken one, the expression."""
    try:
        return Cron(row.cron, row.timezone, row.dst_gap, row.dst_overlap).describe().rpartition(",")[0]
    except Invalid:
        return str(row.cron)


def spark(values: list[int]) -> str:
    """The points of a small line, for an SVG of 100 by 20."""
    top = max([*values, 1])
    step = 100 / max(1, len(values) - 1)
    return " ".join(f"{place * step:.1f},{19 - 18 * value / top:.1f}" for place, value in enumerate(values))


def changes(before: str | None, after: str | None) -> list[tuple[str, str, str]]:
    """What an action changed, field by field; numbers as they were written."""
    was, is_now = _fields(before), _fields(after)
    return [
        (name, was.get(name, ""), is_now.get(name, ""))
        for name in {**was, **is_now}
        if was.get(name) != is_now.get(name)
    ]


def _fields(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    try:
        found = json.loads(text, parse_float=str, parse_int=str)
    except ValueError:
        return {"": text}
    if not isinstance(found, dict):
        return {"": text}
    return {
        str(name): value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in found.items()
    }


def breaks(name: str | UUID) -> Markup:
    """A name or an id; one that is long may go on in the next line, after a part of it."""
    text = str(name)
    if len(text) <= SHORT_NAME:
        return escape(text)
    return Markup('<span class="long">{}</span>').format(Markup("<wbr>").join(_PARTS.split(text)))


def said(sentence: str) -> Markup:
    """A sentence with its `commands` set apart; everything in it is escaped."""
    parts = sentence.split("`")
    if len(parts) % 2 == 0:
        return escape(sentence)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)
    )


FILTERS = {
    "capped": capped, "duration": duration, "when": when, "iso": iso, "relative": relative, "cron_words": cron_words,
    "spark": spark, "changes": changes, "said": said, "breaks": breaks,
}  # fmt: skip
