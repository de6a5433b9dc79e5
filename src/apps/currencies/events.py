"""The facts of currencies; the only door for other contexts."""

from __future__ import annotations

from datetime import date

from duly import EventBody

TOPIC = "currency-events"


class RatesPublished(EventBody, type="RatesPublished", topic=TOPIC, aggregate="day"):
    """The rates of a day are known; ``corrects`` is the number of the table that this one replaces."""

    day: date
    number: str
    count: int
    corrects: str | None
