"""What any broker does for us: the relay publishes to a Transport, a receiver reads a Source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from duly.messages import Event


@dataclass(frozen=True)
class Later:
    """An event that could not be sent now through no fault of its own: it stays pending, and no attempt is counted."""

    reason: str


@dataclass(frozen=True)
class Message:
    """What came from a broker, as it came: nothing of it has been believed yet."""

    topic: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    position: str  # for people: which partition and offset, which queue and tag
    token: Any = None  # what its source needs to acknowledge it
    shard: str = ""  # for a source that keeps no position: the stream this came from
    offset: int = 0  # and its number there, growing
    key: str = ""  # what the broker itself keeps the order by, where it does: the key of Kafka, the group of SQS


class Transport(Protocol):
    """A broker to publish to. It gets at most one event of an aggregate at a time, so order survives any failure."""

    name: str

    async def check(self) -> None:
        """Refuse what could not work, or would lose what was acknowledged, with a sentence that says what to do."""
        ...

    async def publish(self, events: Sequence[Event]) -> Sequence[str | Later | None]:
        """Send each and wait for its acknowledgement: None where it came, otherwise the error of that event, or Later.

        Raise OSError or TimeoutError when the broker cannot be reached: that is an outage, and no event's attempt.
        """
        ...

    async def close(self) -> None:
        """Hang up. What is under way is waited for, no longer than a few seconds."""
        ...


class Source(Protocol):
    """A broker to read from. One receiver reads a source, one batch at a time, and acknowledges after its commit."""

    name: str
    keeps_position: bool  # False: the database holds how far each shard was read, and resume() is told

    async def check(self) -> None:
        """Refuse what could not work, or would lose messages, with a sentence that says what to do."""
        ...

    async def resume(self, positions: Mapping[str, int]) -> None:
        """Begin, or begin again, after these offsets; whatever was received and not acknowledged comes again."""
        ...

    async def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Message]:
        """What is there, in order, waiting so long for a first one; OSError or TimeoutError when the broker is away."""
        ...

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """They are in the database. When this is lost they come again, and are known."""
        ...

    async def release(self, messages: Sequence[Message]) -> None:
        """They could not be stored: give them back, to come again in the same order."""
        ...

    async def lag(self) -> int | None:
        """How many messages wait to be read; None where the broker cannot tell."""
        ...

    async def close(self) -> None:
        """Hang up, and leave to others at once what was received and not acknowledged."""
        ...
