"""A wave whose line is cut is sent one by one: what is acknowledged counts; an outage is nobody's attempt (E1.4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest

import duly.outbox.relay as relay_module
from duly import Database, Relay
from duly.errors import Unavailable
from duly.messages import Event
from duly.testing import BusinessClock
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


async def test_an_outage_that_begins_while_events_are_sent_one_by_one_is_nobodys_attempt(
    db: Database, dsn: str
) -> None:
    """Two were acknowledged before it, and are published; the others keep all their attempts."""

    def answer_twice(number: int, _event: Event) -> None:
        if number > 2:
            raise ConnectionRefusedError("nobody is there")

    broker = Cutting(answer_twice)
    await emit_wave(db)
    with pytest.raises(Unavailable, match="cutting is away"):
        await Relay(db, transport=broker).run_once()
    assert len(broker.alone) == 2 + relay_module.OUTAGE_CUTS
    assert {row[0] for row in rows(dsn, "SELECT aggregate_id FROM duly.events")} == {
        event.aggregate_id for event in broker.alone[:2]
    }
    assert rows(dsn, PENDING) == [(0, None)]


async def test_an_outage_is_nobodys_attempt_however_few_events_there_are_to_show_it(db: Database, dsn: str) -> None:
    """E1.4: fewer than look like an outage by themselves; but none of them got through."""

    def refuse(_number: int, _event: Event) -> None:
        raise ConnectionRefusedError("nobody is there")

    for aggregate in ("a0", "a1"):
        await emit_numbers(db, aggregate, [1])
    with pytest.raises(Unavailable, match="cutting is away"):
        await Relay(db, transport=Cutting(refuse)).run_once()
    assert rows(dsn, PENDING) == [(0, None)]


async def test_a_refusal_shows_that_the_broker_is_there_too(db: Database, dsn: str) -> None:
    """Of two events one is refused and one cuts the line: each is a failed attempt, and not an outage without end."""

    def refuse_or_cut(_number: int, event: Event) -> str:
        if event.aggregate_id == "a0":
            raise ConnectionResetError("cut")
        return "no such topic"

    for aggregate in ("a0", "a1"):
        await emit_numbers(db, aggregate, [1])
    assert (await Relay(db, transport=Cutting(refuse_or_cut)).run_once()).facts["failed"] == 2
    assert rows(dsn, "SELECT aggregate_id, attempts, last_error FROM duly.outbox ORDER BY 1") == [
        ("a0", 1, "ConnectionResetError: cut"),
        ("a1", 1, "no such topic"),
    ]


async def test_events_that_cut_the_line_do_not_stand_in_front_of_the_others_for_ever(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """As many as look like an outage, emitted first: the others get through, and in the end these are found out."""
    poison = AGGREGATES[: relay_module.OUTAGE_CUTS]

    def cut_at_poison(_number: int, event: Event) -> None:
        if event.aggregate_id in poison:
            raise ConnectionResetError("cut")

    await emit_wave(db)
    relay = Relay(db, transport=Cutting(cut_at_poison))
    for n in range(200):
        with contextlib.suppress(Unavailable):
            await relay.cycle()
        if not rows(dsn, "SELECT 1 FROM duly.outbox WHERE failed_at IS NULL"):
            break
        clock.advance(seconds=60)
        await emit_numbers(db, AGGREGATES[-1], [n])  # life goes on
    await relay.close()
    assert rows(dsn, "SELECT aggregate_id FROM duly.outbox WHERE failed_at IS NOT NULL ORDER BY 1") == [
        (aggregate,) for aggregate in poison
    ]
