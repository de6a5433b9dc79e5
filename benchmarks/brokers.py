"""Brokers: events a second from commit to acknowledgement, and to a consumer's commit; beside the bare producer.

``make bench-brokers`` (N, 5000 events; LEAVE_OUT). Ratios count; absolute times are this machine's. Order is checked:
a run whose ordered consumer saw a wrong number, or one twice, is no result. Latencies are between commits, by
PostgreSQL's own record of when each transaction was committed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
from sqlalchemy import text
from tests.brokers.servers import Kind, Raw, Server, chosen, find

from duly import Database, Duly, Event, Tx, emit
from duly.brokers import Transport, connect
from duly.brokers.wire import decode
from duly.clock import monotonic
from duly.ids import uuid7
from duly.messages import NewEvent
from duly.operate.consumers import move_consumer
from duly.settings import Settings
from duly.testing import TestServer

AGGREGATES = 500
EMITTED_AT_ONCE = 500
PACED = 400
PACED_SECONDS = 0.02
STALLED_SECONDS = 120.0
PADDING = "x" * 200
CREATE_EFFECTS = """
CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, aggregate text NOT NULL, n int NOT NULL,
                      event_id uuid NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp())
"""
RECORD = text("INSERT INTO effects (aggregate, n, event_id) VALUES (:aggregate, :n, :event_id)")
COUNT_PUBLISHED = "SELECT count(*) FROM duly.events WHERE type = 'bench.made'"
COUNT_EFFECTS = "SELECT count(*) FROM effects"
WRONG_ORDER = """
SELECT count(*) FROM (SELECT n, row_number() OVER (PARTITION BY aggregate ORDER BY id) AS place FROM effects) AS seen
WHERE n <> place
"""
CREATE_EMITTED = "CREATE TABLE emitted (aggregate text PRIMARY KEY)"
EMITTED = text("INSERT INTO emitted (aggregate) VALUES (:aggregate)")
ACKNOWLEDGED_MS = """
SELECT extract(epoch FROM pg_xact_commit_timestamp(p.xmin) - pg_xact_commit_timestamp(e.xmin))::float8 * 1000
FROM emitted e JOIN duly.events p ON p.aggregate_id = e.aggregate WHERE e.aggregate <> 'warm' ORDER BY 1
"""
HANDLED_MS = """
SELECT extract(epoch FROM pg_xact_commit_timestamp(f.xmin) - pg_xact_commit_timestamp(e.xmin))::float8 * 1000
FROM emitted e JOIN effects f USING (aggregate) WHERE e.aggregate <> 'warm' ORDER BY 1
"""

app = Duly()


@app.consumer("bench", on="bench.*", ordered=True)
async def consume(event: Event, tx: Tx) -> None:
    """The least that a consumer can do: one row."""
    values = {"aggregate": event.aggregate_id, "n": event.payload["n"], "event_id": event.id}
    await tx.execute(RECORD, values)


@dataclass(frozen=True)
class Bench:
    """A database, and a topic on a broker."""

    dsn: str
    kind: Kind
    url: str
    topic: str
    group: str

    @contextmanager
    def processes(self, *kinds: str) -> Iterator[None]:
        """Each in a process of its own, until the block ends."""
        env = {
            **os.environ, **self.kind.environment, "DATABASE_URL": self.dsn, "DULY_APP": "benchmarks.brokers:app",
            "DULY_LOG_LEVEL": "error", "DULY_BROKER": self.url, "DULY_RECEIVE": self.url,
            "DULY_RECEIVE_TOPICS": self.topic, "DULY_RECEIVE_GROUP": self.group, "DULY_RELAY_BATCH": "500",
            "DULY_RECEIVE_AHEAD": "1000000", "DULY_ALLOW_UNSAFE_DATABASE": "1",
        }  # fmt: skip
        started = [subprocess.Popen([sys.executable, "-m", "duly.cli.main", one], env=env) for one in kinds]
        try:
            yield
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(60)


def main() -> None:
    """Run everything over each broker and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5_000, help="how many events")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        postgres = TestServer(Path(directory) / "pg", durable=True)
        postgres.postgres = replace(postgres.postgres, parameters=("track_commit_timestamp=on",))
        postgres.start()
        try:
            for name in chosen():
                measure(find(name), Path(directory), postgres, options.count)
        finally:
            postgres.stop()


def measure(kind: Kind, directory: Path, postgres: TestServer, count: int) -> None:
    """One broker, one line a figure."""
    home = directory / kind.name
    home.mkdir()
    os.environ.update(kind.environment)
    server = kind.make(home)
    server.start()
    try:
        raw = asyncio.run(_bare_rate(kind, server, count))
        print(f"{kind.name}: a producer and nothing else {raw:,.0f}/s", flush=True)
        alone = asyncio.run(_transport_rate(kind, server, count))
        print(f"{kind.name}: our transport alone {alone:,.0f}/s, {alone / raw:.2f} of that", flush=True)
        for figure, sample in (
            ("from commit to acknowledgement", measure_acknowledged),
            ("from commit to a consumer's commit, in order", measure_handled),
        ):
            with postgres.database(app) as dsn:
                rate = sample(asyncio.run(_prepare(dsn, kind, server)), count)
            print(f"{kind.name}: {figure} {rate:,.0f}/s, {rate / raw:.2f} of the producer", flush=True)
        with postgres.database(app) as dsn:
            measure_latency(asyncio.run(_prepare(dsn, kind, server)))
    finally:
        server.close()


async def _prepare(dsn: str, kind: Kind, server: Server) -> Bench:
    mark = uuid4().hex[:8]
    bench = Bench(dsn, kind, kind.url(server), f"bench-{mark}", f"bench-{mark}")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(CREATE_EFFECTS)
        connection.execute(CREATE_EMITTED)
    await connect.setup(bench.url, topics=[bench.topic], group=bench.group)
    db = Database(dsn)
    await app.prepare(db)
    async with db.transaction() as tx:
        await move_consumer(tx, "bench", via=kind.name, actor="bench")
    await db.close()
    return bench


# -- without a database ----------------------------------------------------------------------------------------------


async def _bare_rate(kind: Kind, server: Server, count: int) -> float:
    """What the broker's own library does when it has nothing else to do, each message acknowledged."""
    topic = f"bare-{uuid4().hex[:8]}"
    await connect.setup(kind.url(server), topics=[topic], group=topic)
    stranger = kind.foreign(server)
    messages = [Raw({"x-number": str(n)}, f'{{"n":{n},"text":"{PADDING}"}}'.encode(), f"b-{n}") for n in range(count)]
    try:
        await stranger.write(topic, "bench.made", messages[:1])
        began = monotonic()
        await stranger.flood(topic, "bench.made", messages[1:])
        return (count - 1) / (monotonic() - began)
    finally:
        await stranger.close()


async def _transport_rate(kind: Kind, server: Server, count: int) -> float:
    """The same through our transport, in waves as the relay sends them."""
    topic = f"waves-{uuid4().hex[:8]}"
    await connect.setup(kind.url(server), topics=[topic], group=topic)
    transport: Transport = connect.transport(kind.url(server))
    moment = datetime.now(UTC)
    events = [
        Event(uuid7(), "bench.made", topic, f"b-{n}", {"n": n, "text": PADDING}, {}, moment) for n in range(count)
    ]
    try:
        await transport.publish(events[:1])
        began = monotonic()
        for first in range(1, count, EMITTED_AT_ONCE):
            answers = await transport.publish(events[first : first + EMITTED_AT_ONCE])
            assert not any(answers), next(answer for answer in answers if answer)
        return (count - 1) / (monotonic() - began)
    finally:
        await transport.close()


# -- with everything -------------------------------------------------------------------------------------------------


def measure_acknowledged(bench: Bench, count: int) -> float:
    """All events are there before the relay begins; from the first that it moved to the last. Then, their order."""
    asyncio.run(_emit_at_once(bench, count))
    with psycopg.connect(bench.dsn, autocommit=True) as connection, bench.processes("relay"):
        done, began = _wait_for(connection, COUNT_PUBLISHED, 1)
        _, ended = _wait_for(connection, COUNT_PUBLISHED, count)
    asyncio.run(_check_order(bench, count))
    return (count - done) / (ended - began)


async def _check_order(bench: Bench, count: int) -> None:
    """Read what was published, as the broker has it: each aggregate's numbers in order, repetitions aside."""
    source = connect.source(bench.url, topics=[bench.topic], group=bench.group)
    last: dict[str, int] = {}
    known: set[UUID] = set()
    try:
        await source.resume({})
        async with asyncio.timeout(STALLED_SECONDS):
            while len(known) < count:
                messages = await source.receive(EMITTED_AT_ONCE, wait_seconds=1)
                for event in map(decode, messages):
                    if event.id not in known:
                        expected = last.get(event.aggregate_id, 0) + 1
                        assert event.payload["n"] == expected, f"{bench.kind.name}: {event} came instead of {expected}"
                        last[event.aggregate_id] = expected
                        known.add(event.id)
                await source.acknowledge(messages)
    finally:
        await source.close()


def measure_handled(bench: Bench, count: int) -> float:
    """The same, to the last effect; and each aggregate's numbers in order, each once."""
    asyncio.run(_emit_at_once(bench, count))
    with psycopg.connect(bench.dsn, autocommit=True) as connection, bench.processes("relay", "receive", "worker"):
        done, began = _wait_for(connection, COUNT_EFFECTS, 1)
        _, ended = _wait_for(connection, COUNT_EFFECTS, count)
        wrong = connection.execute(WRONG_ORDER).fetchone()
        assert wrong == (0,), f"{bench.kind.name}: {wrong} effects are out of order"
        return (count - done) / (ended - began)


def measure_latency(bench: Bench) -> None:
    """One event at a time, as a person would cause them."""
    with psycopg.connect(bench.dsn, autocommit=True) as connection, bench.processes("relay", "receive", "worker"):
        asyncio.run(_emit_paced(bench, [_event(bench, "warm", 1)]))
        _wait_for(connection, COUNT_EFFECTS, 1)
        asyncio.run(_emit_paced(bench, [_event(bench, f"b-{n}", 1) for n in range(PACED)]))
        _wait_for(connection, COUNT_EFFECTS, PACED + 1)
        for name, query in (("acknowledged", ACKNOWLEDGED_MS), ("handled", HANDLED_MS)):
            times = [row[0] for row in connection.execute(query)]
            assert len(times) == PACED, f"{len(times)} of {PACED} events have a time"
            p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
            print(
                f"{bench.kind.name}: commit to {name} at {1 / PACED_SECONDS:.0f}/s: p50 {p50:.1f} ms, p99 {p99:.1f} ms",
                flush=True,
            )


async def _emit_at_once(bench: Bench, count: int) -> None:
    """Numbered from one in each aggregate."""
    db = Database(bench.dsn, settings=Settings())
    for first in range(0, count, EMITTED_AT_ONCE):
        places = range(first, min(first + EMITTED_AT_ONCE, count))
        async with db.transaction() as tx:
            await emit(tx, *(_event(bench, f"b-{n % AGGREGATES}", n // AGGREGATES + 1) for n in places))
    await db.close()


async def _emit_paced(bench: Bench, events: Sequence[NewEvent]) -> None:
    db = Database(bench.dsn, settings=Settings())
    for event in events:
        async with db.transaction() as tx:
            await emit(tx, event)
            await tx.execute(EMITTED, {"aggregate": event.aggregate_id})
        await asyncio.sleep(PACED_SECONDS)
    await db.close()


def _event(bench: Bench, aggregate: str, n: int) -> NewEvent:
    return NewEvent("bench.made", bench.topic, aggregate, {"n": n, "text": PADDING})


def _wait_for(connection: psycopg.Connection[Any], query: str, count: int) -> tuple[int, float]:
    """How many there are, and when, as soon as they are so many."""
    before, changed = 0, monotonic()
    while True:
        row = connection.execute(query.encode()).fetchone()
        done, at = (row[0] if row else 0), monotonic()
        if done >= count:
            return done, at
        changed, before = (at, done) if done != before else (changed, before)
        assert at - changed < STALLED_SECONDS, f"{done} of {count}, and then none"
        time.sleep(0.02)


if __name__ == "__main__":
    main()
