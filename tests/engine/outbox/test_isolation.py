"""A wave whose line is cut is sent one by one: what was acknowledged counts, and an outage is nobody's attempt (E1.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import duly.outbox.relay as relay_module
from duly import Database, Relay
from duly.messages import Event
from tests.engine.outbox.test_publishing import emit_numbers
from tests.support import rows

AGGREGATES = [f"a{n}" for n in range(6)]
PENDING = "SELECT DISTINCT attempts, last_error FROM duly.outbox"


class Cutting:
    """A broker that cuts the line at more than one event at a time, and behaves as told with each alone."""

    name = "cutting"

    def __init__(self, answer: Callable[[int, Event], str | None]) -> None:
        self._answer = answer
        self.alone: list[Event] = []

    async def check(self) -> None:
        """It is there."""

    async def publish(self, events: Sequence[Event]) -> Sequence[str | None]:
        if len(events) > 1:
            raise ConnectionResetError("cut")
        self.alone += events
        return [self._answer(len(self.alone), events[0])]

    async def close(self) -> None:
        return None


async def emit_wave(db: Database) -> None:
    for aggregate in AGGREGATES:
        await emit_numbers(db, aggregate, [1])


async def test_what_was_acknowledged_before_the_time_was_over_is_published_and_the_rest_stays_pending(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow broker makes the batches smaller: what it took is not sent again and again."""
    passed = [0.0]
    monkeypatch.setattr(relay_module, "monotonic", lambda: passed[0])

    def answer_slowly(_number: int, _event: Event) -> None:
        passed[0] += relay_module.LANE_LEASE_SECONDS / 8

    broker = Cutting(answer_slowly)
    await emit_wave(db)
    assert (await Relay(db, transport=broker).run_once()).facts == {"published": 3, "failed": 0, "held": 0}
    assert len(broker.alone) == 3
    assert rows(dsn, PENDING) == [(0, None)]
    assert (await Relay(db, transport=broker).run_once()).facts["published"] == 3
    assert sorted(event.aggregate_id for event in broker.alone) == AGGREGATES  # each once
