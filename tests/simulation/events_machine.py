"""Events: relays with and without a broker, lanes and their leases, retries, parked events, ordered consumers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from duly.db import Database, fetch
from duly.errors import Unavailable
from duly.jobs.handlers import Handler
from duly.messages import Event, NewEvent
from duly.operate.events import discard_event, requeue_event
from duly.outbox import sql
from duly.outbox.emit import emit
from duly.outbox.relay import Relay
from duly.settings import Settings
from tests.simulation.events_model import Batch, EventsModel, ModelEvent, ModelLane
from tests.simulation.line import START, drive
from tests.simulation.machine import Disagreement, Pick
from tests.simulation.queue_machine import QueueWorld, VirtualWorker

ATTEMPTS = 2
AGGREGATES = ("a", "b", "a", "c")  # few, so that events get into each other's way
CONSUMERS = {"first": ("*", True), "second": ("thing.made", True), "third": ("*", False)}
READ_EVENTS = """
WITH moved AS (DELETE FROM duly.events_default RETURNING *)
SELECT 'event', seq, aggregate_id, lane, attempts, retry_at, failed_at, parked, last_error FROM duly.outbox
UNION ALL
SELECT 'lane', lease_token, leased_by, lane, 0, NULL, NULL, lease_expires_at < clock_timestamp(), NULL
FROM duly.lanes WHERE lease_token IS NOT NULL
UNION ALL
SELECT 'moved', seq, NULL, 0, attempts, published_at, NULL, NULL, NULL FROM moved
"""


class Broker:
    """A broker whose answers are the machine's next steps."""

    name = "broker"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_down = False
        self.listen()

    def listen(self) -> None:
        """Wait for the next wave."""
        self.asked: asyncio.Future[list[str]] = self._loop.create_future()
        self.answer: asyncio.Future[list[str | None]] = self._loop.create_future()

    async def check(self) -> None:
        """It is what the machine says."""

    async def publish(self, events: Sequence[Event]) -> Sequence[str | None]:
        """Take a wave, and answer when the machine says so."""
        if self.is_down:
            raise OSError("away")
        self.asked.set_result([str(event.id) for event in events])
        return await self.answer

    async def close(self) -> None:
        """Nothing to hang up."""


@dataclass
class Flight:
    """A relay between its two transactions, and what the model knows of it."""

    broker: Broker
    task: asyncio.Task[Any]
    token: int
    lanes: set[int]
    batch: Batch
    queues: dict[str, list[ModelEvent]]
    sent: list[ModelEvent] = field(default_factory=list)
    failed: list[tuple[ModelEvent, str]] = field(default_factory=list)

    def wave(self) -> list[ModelEvent]:
        """The first of each aggregate."""
        return [queue[0] for queue in self.queues.values()]


class EventsMachine(QueueWorld):
    """Two relays and two workers."""

    name = "events"
    steps_in_example = 120  # a FAILED event with others behind it takes some steps to come about
    model: EventsModel

    def __init__(self, dsn: str) -> None:
        self.loop = asyncio.new_event_loop()
        super().__init__(dsn)
        self.db = Database(dsn, settings=Settings(publish_attempts=ATTEMPTS))
        self.relays = [Relay(self.db), Relay(self.db)]
        self.flights: dict[int, Flight] = {}
        for place, relay in enumerate(self.relays, 1):
            relay.identity = f"r{place}"

    def make_workers(self) -> list[VirtualWorker]:
        """Both know all consumers."""
        handlers = {name: Handler(name, print, max_retries=1) for name in (f"consumer:{one}" for one in CONSUMERS)}
        return [VirtualWorker(handlers, "w1"), VirtualWorker(handlers, "w2")]

    def begin_model(self) -> None:
        """An empty model."""
        self.model = EventsModel(START, consumers=dict(CONSUMERS))

    def begin(self) -> None:
        """No events, three consumers."""
        super().begin()
        names, types = list(CONSUMERS), [wanted for wanted, _ in CONSUMERS.values()]
        ordered = [ordered for _, ordered in CONSUMERS.values()]
        self.line.ask(
            "INSERT INTO duly.consumers SELECT n, ARRAY[p], o, true, duly.now() "
            "FROM unnest($1::text[], $2::text[], $3::boolean[]) AS c(n, p, o)", [names, types, ordered],
        )  # fmt: skip
        for relay in self.relays:
            relay._cycles = 0

    def end(self) -> None:
        """Whoever is in between is killed."""
        for place in list(self.flights):
            self._kill(place)
        super().end()

    def close(self) -> None:
        """Hang up."""
        super().close()
        self.loop.close()

    def _kill(self, place: int) -> None:
        flight = self.flights.pop(place)
        flight.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Unavailable):
            self.loop.run_until_complete(flight.task)
        self.relays[place].transport = None

    def check(self) -> None:
        """The queue, and the outbox, the lanes and what was moved to the history."""
        super().check()
        outbox: dict[int, ModelEvent] = {}
        lanes: dict[int, ModelLane] = {}
        moved = []
        for kind, *row in self.line.ask(READ_EVENTS):
            if kind == "event":
                outbox[row[0]] = ModelEvent(*row)
            elif kind == "lane":
                lanes[row[2]] = ModelLane(row[0], row[1], row[2], row[6])
            else:
                moved.append((row[0], row[3], row[4]))
        if outbox != self.model.outbox:
            self._differ("an event", outbox, self.model.outbox)
        if lanes != self.model.lanes:
            self._differ("a lane", lanes, self.model.lanes)
        self.agree("what was published", sorted(moved), sorted(self.model.published))
        self.model.published.clear()
        if self.model.out_of_order:
            raise Disagreement("; ".join(self.model.out_of_order))
        if self.model.strays():
            raise Disagreement(f"parked behind nothing: {self.model.strays()}")

    # -- rules --------------------------------------------------------------------------------------------------

    def emit(self, pick: Pick) -> None:
        """A caller emits one to three events."""
        kinds = [(pick.of(("thing.made", "thing.gone")), pick.of(AGGREGATES)) for _ in range(1 + pick.below(3))]
        self.tell("emit", *kinds)
        ids = drive(emit(self.line, *(NewEvent(type, "thing", aggregate) for type, aggregate in kinds)))
        rows = self.line.ask("SELECT id, seq, aggregate_id, lane FROM duly.outbox WHERE id = ANY($1)", [ids])
        found = {row[0]: row[1:] for row in rows}
        self.agree("the order of seq", sorted(found[id][0] for id in ids), [found[id][0] for id in ids])
        for id, (type, aggregate) in zip(ids, kinds, strict=True):
            seq, stored, lane = found[id]
            self.agree("the aggregate", stored, aggregate)
            self.model.outbox[seq] = ModelEvent(seq, aggregate, lane, type=type, id=str(id))

    def _next_batch(self, relay: Relay, pick: Pick) -> tuple[list[int], Batch]:
        relay.batch, relay._share = pick.of((100, 1, 2, 4)), pick.of((64, 64, 32))
        relay._cycles += 1 + pick.below(64)
        lanes = self.model.free_lanes(relay.identity, relay._cycles, relay._share)
        return lanes, self.model.fetch(lanes, relay.batch)

    def relay(self, pick: Pick) -> None:
        """A relay without a broker: one transaction."""
        place = pick.below(2)
        relay = self.relays[place]
        if place in self.flights:
            return
        _, batch = self._next_batch(relay, pick)
        self.tell("relay", relay.identity, relay.batch, relay._share, relay._cycles)
        for event in batch.events:
            self.model.deliver(event)
        self.model.park(batch)
        made = self.model.settle_batch(batch, batch.events, [], attempts=ATTEMPTS)
        found = drive(relay._publish_here(self.line, relay._share))
        self.agree("how many", found, (len(batch.events), len(batch.held)))
        self._made(made)

    def _made(self, expected: list[Any]) -> None:
        """Give the model's new jobs the ids they got, which must be in the order of the events."""
        rows = self.line.ask(
            "SELECT id FROM duly.jobs WHERE id <> ALL($1::bigint[]) ORDER BY id", [list(self.model.jobs)]
        )
        self.agree("how many jobs were made", len(rows), len(expected))
        for (id,), job in zip(rows, expected, strict=True):
            job.id = id
            self.model.add(job)

    def begin_flight(self, pick: Pick) -> None:
        """A relay with a broker: it leases lanes, and sends the first wave."""
        place = pick.below(2)
        relay = self.relays[place]
        if place in self.flights:
            return
        _, batch = self._next_batch(relay, pick)
        self.tell("begin_flight", relay.identity, relay.batch, relay._share, relay._cycles)
        broker = Broker(self.loop)
        relay.transport = broker
        task = self.loop.create_task(relay._publish_outside(self.line, broker, relay._share))
        self._run(task, broker)
        self.model.park(batch)
        if not batch.events:
            self.agree("nothing to send", task.done() and task.result(), (0, 0, len(batch.held)))
            return
        lanes = {event.lane for event in batch.events}
        token = self.line.ask("SELECT last_value FROM duly.lease_tokens")[0][0]
        for lane in lanes:
            self.model.lanes[lane] = ModelLane(token, relay.identity, lane)
        queues: dict[str, list[ModelEvent]] = {}
        for event in batch.events:
            queues.setdefault(event.aggregate, []).append(event)
        self.flights[place] = Flight(broker, task, token, lanes, batch, queues)
        self._asked(self.flights[place])

    def _run(self, task: asyncio.Task[Any], broker: Broker) -> None:
        waiting = asyncio.wait({task, broker.asked}, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        self.loop.run_until_complete(waiting)

    def _asked(self, flight: Flight) -> None:
        wanted = [event.id for event in flight.wave()]
        self.agree("the next wave", flight.broker.asked.done() and flight.broker.asked.result(), wanted)

    def answer(self, pick: Pick) -> None:
        """The broker answers a wave, refuses some of it, or goes away."""
        if not self.flights:
            return
        place = pick.of(sorted(self.flights))
        flight = self.flights[place]
        wave = flight.wave()
        down = not pick.below(9)
        errors = [None if pick.below(2) else "refused" for _ in wave]
        self.tell("answer", self.relays[place].identity, "away" if down else errors)
        answer, flight.broker.is_down = flight.broker.answer, down
        flight.broker.listen()
        if down:
            answer.set_exception(OSError("away"))
            flight.queues = {}
        else:
            answer.set_result(errors)
            self._take_answers(flight, wave, errors)
        self._run(flight.task, flight.broker)
        if flight.queues:
            self._asked(flight)
        else:
            self._land(place, down)

    def _take_answers(self, flight: Flight, wave: list[ModelEvent], errors: Sequence[str | None]) -> None:
        for event, error in zip(wave, errors, strict=True):
            queue = flight.queues[event.aggregate]
            queue.pop(0)
            if error is None:
                flight.sent.append(event)
                self.model.deliver(event)
            else:
                flight.failed.append((event, error))
                queue.clear()
        flight.queues = {aggregate: queue for aggregate, queue in flight.queues.items() if queue}

    def _land(self, place: int, down: bool) -> None:
        """The second transaction: only who still has all its lanes may write."""
        flight = self.flights.pop(place)
        ours = {number for number, lane in self.model.lanes.items() if lane.token == flight.token}
        for lane in ours:
            del self.model.lanes[lane]
        made, said = [], (0, 0, 0)
        if ours == flight.lanes:
            made = self.model.settle_batch(flight.batch, flight.sent, flight.failed, attempts=ATTEMPTS)
            said = (len(flight.sent), len(flight.failed), len(flight.batch.held))
        self.agree("the relay is done", flight.task.done(), True)
        self.relays[place].transport = None
        error = flight.task.exception()
        if error is not None and not isinstance(error, Unavailable):
            raise error
        self.agree("whether the broker is away", error is not None, down and ours == flight.lanes)
        if error is None:
            self.agree("what it says", flight.task.result(), said)
        self._made(made)

    def crash(self, pick: Pick) -> None:
        """A relay dies between its transactions; its lanes stay leased."""
        if self.flights:
            place = pick.of(sorted(self.flights))
            self.tell("crash", self.relays[place].identity)
            self._kill(place)

    def expire_lanes(self, pick: Pick) -> None:
        """Time passes for the lease of a lane."""
        if self.model.lanes:
            lane = pick.of([*sorted(self.model.lanes), None])
            self.tell("expire_lanes", lane)
            for one in self.model.lanes.values():
                one.expired = one.expired or lane is None or one.lane == lane
            self.line.ask(
                "UPDATE duly.lanes SET lease_expires_at = clock_timestamp() - interval '1 second' "
                "WHERE lease_token IS NOT NULL AND ($1::int IS NULL OR lane = $1)", [lane],
            )  # fmt: skip

    def operate(self, pick: Pick) -> None:
        """An operator requeues or discards a FAILED event."""
        failed = [event for event in self.model.in_order() if event.failed_at is not None]
        if failed:
            event, keep = pick.of(failed), pick.below(2)
            self.tell("requeue" if keep else "discard", event.seq)
            (self.model.requeue if keep else self.model.discard)(event.seq)
            act = requeue_event if keep else discard_event
            drive(act(self.line, event.id, actor="machine"))  # type: ignore[arg-type] # a line serves as one

    def sweep(self, pick: Pick) -> None:
        """Somebody's SQL left something behind nothing; the sweep finds it."""
        self.tell("sweep")
        heads = [
            job for job in self.model.jobs.values() if job.order_key and job.token is None and job.waits != "behind"
        ]
        if heads:
            job = pick.of(heads)
            self.line.ask("UPDATE duly.jobs SET waits = 'behind', run_at = 'infinity' WHERE id = $1", [job.id])
            job.waits, job.run_at = "due", self.model.now
        self._sweep()

    def _sweep(self) -> None:
        self.model.sweep()
        drive(fetch(self.line, sql.UNPARK_STRAYS))
        drive(fetch(self.line, sql.RELEASE_STRAYS))

    def switch(self, pick: Pick) -> None:
        """A consumer is disabled or enabled."""
        name = pick.of(list(CONSUMERS))
        on = name not in self.model.consumers
        self.tell("switch", name, on)
        if on:
            self.model.consumers[name] = CONSUMERS[name]
        else:
            del self.model.consumers[name]
        self.line.ask("UPDATE duly.consumers SET enabled = $2 WHERE name = $1", [name, on])

    def cancel(self, pick: Pick) -> None:
        """Somebody deletes what waits for one aggregate, in whatever order it stands."""
        name, entity = pick.of(sorted(self.workers[0].handlers)), pick.of(AGGREGATES)
        self.tell("cancel", name, entity)
        found = self.line.ask("SELECT duly.cancel($1, $2)", [name, entity])[0][0]
        self.agree("how many", found, self.model.cancel(name, entity))

    def next_event(self, _pick: Pick) -> None:
        """How long until a failed attempt is tried again."""
        self.tell("next_event")
        waits = [
            e.retry_at for e in self.model.outbox.values() if e.attempts > 0 and e.failed_at is None and e.retry_at
        ]
        found = drive(fetch(self.line, sql.SECONDS_TO_NEXT_EVENT))[0][0]
        wanted = (min(waits) - self.model.now) / timedelta(seconds=1) if waits else None
        self.agree("the seconds to the next event", found, wanted)

    rules: ClassVar[Any] = (
        emit, emit, emit, relay, relay, begin_flight, begin_flight, answer, answer, answer, crash, expire_lanes,
        operate, operate, sweep, switch, cancel, next_event, QueueWorld.claim, QueueWorld.claim, QueueWorld.settle,
        QueueWorld.settle, QueueWorld.end_all, QueueWorld.expire, QueueWorld.advance, QueueWorld.advance,
        QueueWorld.retry_dead, QueueWorld.discard_dead, QueueWorld.release, QueueWorld.look,
    )  # fmt: skip
