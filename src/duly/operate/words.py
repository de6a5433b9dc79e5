"""Times, spans and lists in plain words; nothing here reads a clock."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
SHOWN_CHARACTERS = 300
SHOWN_ITEMS = 10


def moment(at: datetime) -> str:
    """An instant to the second: ``2026-03-01 09:00:00 UTC``."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def span(seconds: float) -> str:
    """A length of time in its two largest units: ``4 min``, ``2 h 5 min``, ``3 d 4 h``."""
    rest = round(abs(seconds))
    if rest == 0:
        return "less than a second"
    for place, (unit, size) in enumerate(_UNITS):
        if rest >= size:
            whole, left = divmod(rest, size)
            smaller = _UNITS[place + 1 : place + 2]
            extra = [f"{left // s} {u}" for u, s in smaller if left >= s]
            return " ".join([f"{whole} {unit}", *extra])
    return "less than a second"


def when(at: datetime, now: datetime) -> str:
    """An instant with its distance from now: ``2026-03-01 09:00:00 UTC (in 4 min)``."""
    seconds = (at - now).total_seconds()
    distance = f"in {span(seconds)}" if seconds > 0 else f"{span(seconds)} ago"
    return f"{moment(at)} ({distance})"


def short(text: str | None) -> str:
    """The first line's worth of a message, on one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."


def listing(items: Sequence[object]) -> str:
    """``a, b and c``; a long list ends with how many were left out."""
    shown = [str(item) for item in items[:SHOWN_ITEMS]]
    left_out = len(items) - len(shown)
    if left_out:
        return f"{', '.join(shown)} and {left_out} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def plural(number: int, one: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{number} {one}" if number == 1 else f"{number} {one}s"
