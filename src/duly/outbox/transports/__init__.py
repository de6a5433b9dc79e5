"""Where events go beside our own consumers. PostgreSQL itself needs none: the relay makes the jobs directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from duly.messages import Event


class Transport(Protocol):
    """A broker. The relay hands over at most one event of an aggregate at a time, so order survives any failure."""

    name: str

    async def publish(self, events: Sequence[Event]) -> Sequence[str | None]:
        """Send each and wait for its acknowledgement: None where it came, otherwise the error of that event.

        Raise OSError or TimeoutError when the broker cannot be reached: that is an outage, and no event's attempt.
        """
        ...

    async def close(self) -> None:
        """Hang up."""
        ...
