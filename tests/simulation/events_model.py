"""The outbox, its lanes and the jobs of ordered consumers, as a person would explain them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tests.simulation.queue_model import ModelJob, QueueModel

LANES = 64


@dataclass
class ModelEvent:
    """One row of the outbox; the fields stand in the order in which the machine reads them."""

    seq: int
    aggregate: str
    lane: int
    attempts: int = 0
    retry_at: datetime | None = None
    failed_at: datetime | None = None
    parked: bool = False
    last_error: str | None = None
    type: str = field(default="", compare=False)
    id: str = field(default="", compare=False)

    @property
    def is_in_the_way(self) -> bool:
        """Whether later events of its aggregate must wait."""
        return self.parked or self.attempts > 0 or self.retry_at is not None


@dataclass
class ModelLane:
    """A lane that a relay has leased."""

    token: int
    relay: str
    lane: int
    expired: bool = False


@dataclass
class Batch:
    """What one relay fetched."""

    events: list[ModelEvent]
    held: list[ModelEvent]
    frees: set[str]  # aggregates with parked events, as seen or parked when the batch was fetched


@dataclass
class EventsModel(QueueModel):
    """The queue, and what is still to be published."""

    outbox: dict[int, ModelEvent] = field(default_factory=dict)
    lanes: dict[int, ModelLane] = field(default_factory=dict)
    published: list[tuple[int, int, datetime]] = field(default_factory=list)
    delivered: set[int] = field(default_factory=set)
    out_of_order: list[str] = field(default_factory=list)
    consumers: dict[str, tuple[str, bool]] = field(default_factory=dict)  # name: (type or *, ordered), the enabled ones

    def free_lanes(self, relay: str, turn: int, share: int) -> list[int]:
        """Those that nobody else has leased, beginning at another one each turn."""
        free = [
            number
            for number in range(LANES)
            if (lane := self.lanes.get(number)) is None or lane.expired or lane.relay == relay
        ]
        return sorted(free, key=lambda number: (number + turn) % LANES)[:share]

    def fetch(self, lanes: Sequence[int], size: int) -> Batch:
        """Lane by lane, the oldest first; what has something in its way is only noted."""
        ready = [
            event
            for lane in lanes
            for event in self.in_order()
            if event.lane == lane and not event.parked and event.failed_at is None
            and (event.retry_at is None or event.retry_at <= self.now)
        ][:size]  # fmt: skip
        held = [event for event in ready if self._has_one_in_its_way(event)]
        events = sorted((event for event in ready if event not in held), key=lambda event: event.seq)
        frees = {event.aggregate for event in self.outbox.values() if event.parked or event in held}
        return Batch(events, held, frees)

    def in_order(self) -> list[ModelEvent]:
        """All events that are still to be published."""
        return [self.outbox[seq] for seq in sorted(self.outbox)]

    def _has_one_in_its_way(self, event: ModelEvent) -> bool:
        return any(
            other.aggregate == event.aggregate and other.seq < event.seq and other.is_in_the_way
            for other in self.outbox.values()
        )

    def deliver(self, event: ModelEvent) -> None:
        """Somebody outside sees it, for the first time or again."""
        if event.seq not in self.delivered:
            self.delivered.add(event.seq)
            for other in self.outbox.values():
                if other.aggregate == event.aggregate and other.seq < event.seq and other.seq not in self.delivered:
                    self.out_of_order.append(f"event {event.seq} was delivered before {other.seq}")

    def settle_batch(self, batch: Batch, sent: Sequence[ModelEvent], failed: Sequence[tuple[ModelEvent, str]],
                     *, attempts: int) -> list[ModelJob]:  # fmt: skip
        """Move what was sent, note what failed, free what was behind it; the jobs that are made, in their order."""
        made: list[ModelJob] = []
        for event in sorted(sent, key=lambda event: event.seq):
            if self.outbox.pop(event.seq, None) is not None:
                self.published.append((event.seq, event.attempts, self.now))
                made += self._jobs_of(event, made)
        for event, error in failed:
            if event.seq in self.outbox:  # a relay without a broker, which leases no lane, may have published it since
                self._fail(event, error, attempts)
        self.unpark({event.aggregate for event in sent} & batch.frees)
        return made

    def park(self, batch: Batch) -> None:
        """Hold back what has something in its way, in the transaction that found it."""
        for event in batch.held:
            event.parked = True

    def _fail(self, event: ModelEvent, error: str, attempts: int) -> None:
        event.retry_at = self.now + timedelta(seconds=min(2**event.attempts, 3600))
        event.attempts += 1
        event.last_error = error
        if event.attempts >= attempts:
            event.failed_at = self.now
            self.alerts["event_failed", event.id] = self.alerts.get(("event_failed", event.id), 0) + 1

    def _jobs_of(self, event: ModelEvent, made: Collection[ModelJob]) -> list[ModelJob]:
        """One for each consumer; for an ordered one it waits for all that is before it."""
        jobs = []
        for consumer, (wanted, ordered) in sorted(self.consumers.items()):
            if wanted in ("*", event.type):
                name, key = f"consumer:{consumer}", event.aggregate
                before = [job for job in [*self.jobs.values(), *made] if job.name == name and job.order_key == key]
                behind = ordered and bool(before or self.is_held_by_dead(name, key))
                jobs.append(
                    ModelJob(
                        0, name, event.aggregate, 3, None if behind else self.now, self.now, self.now,
                        waits="behind" if behind else "due", order_key=key if ordered else None,
                    )
                )  # fmt: skip
        return jobs

    def unpark(self, aggregates: Collection[str]) -> None:
        """What was held back may go."""
        for event in self.outbox.values():
            if event.aggregate in aggregates:
                event.parked = False

    def strays(self) -> list[ModelEvent]:
        """Parked events with nothing at all before them."""
        firsts: dict[str, ModelEvent] = {}
        for event in self.in_order():
            firsts.setdefault(event.aggregate, event)
        return [event for event in firsts.values() if event.parked]

    def sweep(self) -> None:
        """Free the aggregates in which nothing but parked events is in the way."""
        firsts: dict[str, ModelEvent] = {}
        for event in self.in_order():
            if event.is_in_the_way:
                firsts.setdefault(event.aggregate, event)
        self.unpark({event.aggregate for event in firsts.values() if event.parked})

    def requeue(self, seq: int) -> None:
        """An operator gives a FAILED event all its attempts again."""
        event = self.outbox[seq]
        event.attempts, event.retry_at, event.failed_at, event.last_error = 0, None, None, None
        self.alerts.pop(("event_failed", event.id), None)

    def discard(self, seq: int) -> None:
        """An operator gives up a FAILED event: the next one of its aggregate may go."""
        event = self.outbox.pop(seq)
        self.alerts.pop(("event_failed", event.id), None)
        blockers = [one for one in self.in_order() if one.aggregate == event.aggregate and one.is_in_the_way]
        if blockers:
            blockers[0].parked = False
