"""The relay: publishes pending events in order per aggregate, with any number of relays, through retries and crashes.

Lanes (a hash of the aggregate id) are served by one relay at a time. On PostgreSQL alone, everything is one
transaction: lock lanes, fetch, make the consumers' jobs, move the events to the history. With a broker the lanes are
leased, the events sent between two transactions, and the second one checks the lease; a crash in between sends again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from opentelemetry.trace import SpanKind

from duly.brokers import Later, Transport
from duly.brokers.checking import BrokerCheck
from duly.clock import monotonic
from duly.db import Database, atomic, fetch, load_json
from duly.duty import Cycle, Duty
from duly.errors import Unavailable
from duly.failpoints import failpoint
from duly.inbox.receive import JOB_PREFIX, as_event, wanting
from duly.jobs.sql import LOCK_ORDER
from duly.messages import Event, storable
from duly.outbox import sql
from duly.telemetry import EVENTS_POSTPONED, EVENTS_PUBLISHED, PUBLISH_FAILURES, span, tracing
from duly.wakeup import Wakeup

log = structlog.get_logger("duly.relay")
LANES = 64
LANE_LEASE_SECONDS = 60.0
RELEASE_SECONDS = 1.5  # less than what a process that is cut off is given to leave
RECOUNT_CYCLES = 20
SWEEP_SECONDS = 60.0
OUTAGE_CUTS = 3  # so many events in a row that cut the line: it is the broker, not they
Answer = str | Later | None  # of a broker for an event: an error, not now, or acknowledged


@dataclass(frozen=True)
class Pending:
    """An event that is to be published, as the row has it; it is decoded only to be sent outside."""

    seq: int
    row: Sequence[Any]
    type: str
    topic: str
    aggregate_id: str
    lane: int
    holds: bool  # later events of its aggregate are parked behind it


@dataclass(frozen=True)
class Lease:
    """Lanes that no other relay serves while we send."""

    token: int
    lanes: list[int]
    here: list[str]  # whose events the relay brought when it was taken
    enough_at: float  # nothing is sent after this


@dataclass
class Sent:
    """What became of a batch at the broker."""

    published: list[Pending] = field(default_factory=list)
    failures: list[tuple[Pending, str]] = field(default_factory=list)
    postponed: list[tuple[Pending, str]] = field(default_factory=list)
    away: str | None = None


class Relay(Duty):
    """One relay. Several may run, here and elsewhere."""

    name = "relay"
    channel = "outbox"

    def __init__(
        self,
        db: Database,
        *,
        wakeup: Wakeup | None = None,
        batch: int | None = None,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(db, wakeup=wakeup)
        self.batch = batch or db.settings.relay_batch
        self.transport = transport
        self.broker_check = BrokerCheck(transport) if transport is not None else None
        self.poll_seconds = min(db.settings.poll_seconds, 1.0)
        self._cycles = 0
        self._share = LANES
        self._swept_at = float("-inf")
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Repeat the cycle until ``stop``; a batch then ends with what is on its way, and the rest stays pending."""
        self._stop = stop
        await super().run(stop)

    async def cycle(self) -> Cycle:
        """Publish at most one batch; to a broker, not before it has passed its check."""
        if self.broker_check is not None:
            await self.broker_check.require()
        connection = await self.connection()
        if self._cycles % RECOUNT_CYCLES == 0:  # lanes are shared evenly among the relays alive
            relays = (await fetch(connection, sql.COUNT_RELAYS))[0][0]
            self._share = -(-LANES // relays)
        if monotonic() - self._swept_at > SWEEP_SECONDS:
            self._swept_at = monotonic()
            await fetch(connection, sql.UNPARK_STRAYS)
            await fetch(connection, sql.RELEASE_STRAYS)
        self._cycles += 1
        published, failed, held = await self._publish(connection)
        if published:
            self.db.poke("jobs")
        worked = published + failed + held
        wait = None if worked else (await fetch(connection, sql.SECONDS_TO_NEXT_EVENT))[0][0]
        if wait is not None and wait <= 0:  # due, but another relay has its lane
            wait = None
        return Cycle(worked, wait_seconds=wait, facts={"published": published, "failed": failed, "held": held})

    async def _publish(self, connection: Any) -> tuple[int, int, int]:
        """How many were published, failed, and were held back: in our share of the lanes, or else in all of them.

        The share moves on by a lane a cycle. What is beyond it would wait for as many polls, for whoever else is alive
        may look elsewhere as well, and whoever was counted may have died.
        """
        found = await self._publish_in(connection, self._share)
        if self._share < LANES and not any(found):
            found = await self._publish_in(connection, LANES)
        return found

    async def _publish_in(self, connection: Any, share: int) -> tuple[int, int, int]:
        if self.transport is not None:
            return await self._publish_outside(connection, self.transport, share)
        published, held = await self._publish_here(connection, share)
        return published, 0, held

    # -- PostgreSQL is the transport ----------------------------------------------------------------------------

    async def _publish_here(self, connection: Any, share: int) -> tuple[int, int]:
        async with atomic(connection):
            lanes = await self._lock_lanes(connection, share)
            pending, held = await self._fetch(connection, lanes)
            failpoint("relay.fetched")
            await self._settle(connection, pending, held, [])
            failpoint("relay.before_commit")
        failpoint("relay.committed")
        self._count(pending)
        return len(pending), len(held)

    # -- a broker is the transport ------------------------------------------------------------------------------

    async def _publish_outside(self, connection: Any, transport: Transport, share: int) -> tuple[int, int, int]:
        lease: Lease | None = None
        try:
            async with atomic(connection):
                lanes = await self._lock_lanes(connection, share)
                pending, held = await self._fetch(connection, lanes)
                await self._settle(connection, [], held, [])  # now: whoever discards their head finds them parked
                if not pending:
                    return 0, 0, len(held)
                lease = await self._lease(connection, pending)
            failpoint("relay.fetched")
            sent = await self._send(transport, pending, lease.enough_at)
            failpoint("relay.sent")
            if not await self._settle_sent(connection, lease, sent):
                return 0, 0, 0
        except BaseException:
            if lease is not None:
                await asyncio.shield(self._give_back(lease))
            raise
        failpoint("relay.committed")
        self._count(sent.published)
        if sent.away:
            raise Unavailable(f"{transport.name} is away: {sent.away}")
        return len(sent.published), len(sent.failures) + len(sent.postponed), len(held)

    async def _lease(self, connection: Any, pending: Sequence[Pending]) -> Lease:
        """In the caller's transaction. The time is read before: who stands still right after it has none left."""
        lanes = sorted({one.lane for one in pending})
        here = [row[0] for row in await fetch(connection, sql.READ_CONSUMERS, also=[])]
        token = (await fetch(connection, sql.NEXT_TOKEN))[0][0]
        lease = Lease(token, lanes, here, monotonic() + LANE_LEASE_SECONDS / 3)
        await fetch(
            connection, sql.LEASE_LANES, lanes=lanes, token=token, relay=self.identity,
            lease_seconds=LANE_LEASE_SECONDS,
        )  # fmt: skip
        return lease

    async def _settle_sent(self, connection: Any, lease: Lease, sent: Sent) -> bool:
        """Whether the lanes were still ours: else another relay serves them, and what we know changes nothing."""
        async with atomic(connection):
            ours = {row[0] for row in await fetch(connection, sql.RELEASE_LANES, token=lease.token)}
            if ours != set(lease.lanes):  # we were away for longer than the lease
                log.warning("lanes_lost", lanes=len(set(lease.lanes) - ours))
                return False
            await self._settle(connection, sent.published, [], sent.failures, also=lease.here)
            await self._postpone(connection, sent.postponed)
            failpoint("relay.before_commit")
        return True

    async def _give_back(self, lease: Lease) -> None:
        """We are cut off, or something broke: others need not wait for the lease. Our own line may be in any state."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                connection = await self.db.connect(application=f"duly-{self.name}")
                try:
                    await fetch(connection, sql.RELEASE_LANES, token=lease.token)
                finally:
                    connection.terminate()
        except Exception as error:  # noqa: BLE001 - the database may be why; then the lease runs out
            log.warning("lanes_kept", lanes=len(lease.lanes), error=type(error).__name__)

    async def _send(self, transport: Transport, pending: Sequence[Pending], enough_at: float) -> Sent:
        """In waves: one event of each aggregate at a time, none after one that failed, and no longer than the lease.

        What was not sent in time, or before we are to stop, stays pending: a slow broker makes the batches smaller, it
        does not lose the lanes.
        """
        queues: dict[str, list[Pending]] = {}
        for one in pending:
            queues.setdefault(one.aggregate_id, []).append(one)
        sent = Sent()
        while queues and monotonic() < enough_at and not self._stop.is_set():
            wave, unreadable = _read([queue.pop(0) for queue in queues.values()])
            answered, sent.away = await _publish_or_isolate(transport, wave, enough_at, self._stop)
            for one, answer in unreadable + answered:
                if answer is None:
                    sent.published.append(one)
                    continue
                queues.pop(one.aggregate_id)
                if isinstance(answer, Later):
                    sent.postponed.append((one, answer.reason))
                else:
                    sent.failures.append((one, answer))
            if sent.away is not None or len(answered) < len(wave):
                return sent
            queues = {aggregate: queue for aggregate, queue in queues.items() if queue}
        return sent

    # -- both ---------------------------------------------------------------------------------------------------

    async def _lock_lanes(self, connection: Any, share: int) -> list[int]:
        rows = await fetch(connection, sql.LOCK_LANES, turn=self._cycles, share=share, relay=self.identity)
        return [row[0] for row in rows]

    async def _fetch(self, connection: Any, lanes: Sequence[int]) -> tuple[list[Pending], list[int]]:
        bodies = self.transport is not None
        rows = await fetch(connection, sql.FETCH_EVENTS, lanes=lanes, batch=self.batch, bodies=bodies) if lanes else []
        rows = sorted(rows, key=lambda row: row[0])
        behind = {row[4] for row in rows if row[9]}  # parked by this cycle: whoever publishes their head frees them
        pending = [
            Pending(row[0], row[1:8], row[2], row[3], row[4], row[8], bool(row[10]) or row[4] in behind)
            for row in rows
            if not row[9]
        ]
        return pending, [row[0] for row in rows if row[9]]

    async def _settle(
        self,
        connection: Any,
        published: Sequence[Pending],
        held: Sequence[int],
        failures: Sequence[tuple[Pending, str]],
        also: Sequence[str] = (),
    ) -> None:
        """Inside the caller's transaction: move what was published, note what failed, hold back what follows it."""
        if published:
            await self._move(connection, published, also)
        if failures:
            await self._fail(connection, failures)
        if held:
            await fetch(connection, sql.PARK_EVENTS, seqs=held)
            failpoint("relay.parked")
        if freed := [one.aggregate_id for one in published if one.holds]:
            await fetch(connection, sql.UNPARK_AGGREGATES, aggregates=freed)
            failpoint("relay.unparked")

    async def _move(self, connection: Any, published: Sequence[Pending], also: Sequence[str]) -> None:
        routes = _routes(published, await fetch(connection, sql.READ_CONSUMERS, also=list(also)))
        keys = [(JOB_PREFIX + name, aggregate) for _, name, ordered, aggregate in routes if ordered]
        if keys:
            names, aggregates = [name for name, _ in keys], [aggregate for _, aggregate in keys]
            # Nobody lets the next job of these keys run until we have decided whether ours wait.
            await fetch(connection, LOCK_ORDER, names=names, keys=aggregates)
        await fetch(
            connection, sql.PUBLISH_EVENTS,
            seqs=[one.seq for one in published],
            routed_seqs=[route[0] for route in routes],
            consumers=[route[1] for route in routes],
            ordered=[route[2] for route in routes],
        )  # fmt: skip

    async def _fail(self, connection: Any, failures: Sequence[tuple[Pending, str]]) -> None:
        rows = await fetch(
            connection, sql.FAIL_EVENTS, seqs=[one.seq for one, _ in failures],
            errors=[storable(error[:2000]) for _, error in failures], attempts=self.db.settings.publish_attempts,
        )  # fmt: skip
        final = [row for row in rows if row[4]]
        for event_id, topic, _, attempts, is_final in rows:
            PUBLISH_FAILURES.labels(topic).inc()
            event = "event_failed" if is_final else "event_retried"
            (log.error if is_final else log.warning)(event, event_id=str(event_id), topic=topic, attempts=attempts)
        if final:
            await fetch(
                connection,
                sql.RAISE_ALERTS,
                subjects=[str(row[0]) for row in final],
                messages=[
                    f"{type_} could not be published to {topic} in {attempts} attempts; its aggregate is held back"
                    for _, topic, type_, attempts, _ in final
                ],
            )

    async def _postpone(self, connection: Any, postponed: Sequence[tuple[Pending, str]]) -> None:
        """One topic is not to be had: its events are tried again, for as long as it takes; other topics go on."""
        if not postponed:
            return
        await fetch(
            connection, sql.POSTPONE_EVENTS, seqs=[one.seq for one, _ in postponed],
            reasons=[storable(reason[:2000]) for _, reason in postponed],
        )  # fmt: skip
        for one, _ in postponed:
            EVENTS_POSTPONED.labels(one.topic).inc()
        reasons = {one.topic: reason for one, reason in postponed}
        for topic, reason in reasons.items():
            log.warning("topic_away", topic=topic, reason=reason[:300])

    def _count(self, published: Sequence[Pending]) -> None:
        traced = tracing()
        for one in published:
            EVENTS_PUBLISHED.labels(one.topic).inc()
            if traced:
                parent, attributes = _traceparent(one), {"duly.event.id": str(one.row[0])}
                with span(f"publish {one.type}", kind=SpanKind.PRODUCER, parent=parent, attributes=attributes):
                    pass

    async def close(self) -> None:
        """Hang up on the database, and on the broker."""
        await super().close()
        if self.transport is not None:
            await self.transport.close()


async def _publish_or_isolate(
    transport: Transport, wave: Sequence[tuple[Pending, Event]], enough_at: float, stop: asyncio.Event
) -> tuple[list[tuple[Pending, Answer]], str | None]:
    """The answers there are; and, when nothing gets through any more, why the broker is away.

    A line that is cut may be one event's doing (a message too large, say): then each is sent alone, and the one that
    cuts it is the one that failed. Cut a few times in a row, it is an outage, and nobody's failure. In any order, for
    they are of different aggregates: else a few that cut it, once in front, would look like an outage for ever. What
    there is no time for has no answer, and stays pending.
    """
    try:
        return await _publish(transport, wave), None
    except (OSError, TimeoutError) as error:
        away = f"{type(error).__name__}: {error}"
    answered: list[tuple[Pending, Answer]] = []
    is_there, cuts = False, 0
    for one in random.sample(wave, len(wave)) if len(wave) > 1 else ():
        if monotonic() > enough_at or stop.is_set():
            break
        try:
            answered += await _publish(transport, [one])
            is_there, cuts = True, 0
        except (OSError, TimeoutError) as error:
            answered.append((one[0], f"{type(error).__name__}: {error}"))
            cuts += 1
        if cuts == OUTAGE_CUTS:
            return answered[:-cuts], away
    return (answered, None) if is_there else ([], away)


async def _publish(transport: Transport, wave: Sequence[tuple[Pending, Event]]) -> list[tuple[Pending, Answer]]:
    """Each with its answer; OSError or TimeoutError when the line is cut."""
    if not wave:
        return []
    try:
        async with asyncio.timeout(LANE_LEASE_SECONDS / 2):
            answers = await transport.publish([event for _, event in wave])
        return [(one, answer) for (one, _), answer in zip(wave, answers, strict=True)]
    except (OSError, TimeoutError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a broker's client raises is a failed attempt
        return [(one, f"{type(error).__name__}: {error}") for one, _ in wave]


def _read(pending: Sequence[Pending]) -> tuple[list[tuple[Pending, Event]], list[tuple[Pending, Answer]]]:
    """The events in their rows; and those that Python cannot hold, each a failed attempt that no broker saw."""
    readable: list[tuple[Pending, Event]] = []
    unreadable: list[tuple[Pending, Answer]] = []
    for one in pending:
        try:
            readable.append((one, as_event(one.row)))
        except (ValueError, RecursionError) as error:
            unreadable.append((one, f"cannot be decoded: {type(error).__name__}: {error}"))
    return readable, unreadable


def _traceparent(one: Pending) -> str | None:
    try:
        found = load_json(one.row[5]).get("traceparent")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _routes(published: Sequence[Pending], consumers: Sequence[Sequence[Any]]) -> list[tuple[int, str, bool, str]]:
    known: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    routes: list[tuple[int, str, bool, str]] = []
    for one in published:
        kind = (one.type, one.topic)
        if kind not in known:
            known[kind] = wanting(consumers, type_=kind[0], topic=kind[1])
        routes += [(one.seq, name, ordered, one.aggregate_id) for name, ordered in known[kind]]
    return routes
