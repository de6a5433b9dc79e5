"""Webhooks out: deliveries a second beside a loop that only sends, and what one dead receiver costs the others (E6).

``make bench-webhooks`` (N, 5000 events to four receivers). Ratios count; absolute times are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psycopg

from apps.wiring import app
from duly.clock import monotonic
from duly.db import Database
from duly.messages import NewEvent
from duly.outbox.emit import emit
from duly.settings import Settings
from duly.testing import TestServer
from duly.webhooks import Keyring, create_subscription
from duly.webhooks.deliver import allowed_by
from duly.webhooks.sender import Sender
from duly.webhooks.signing import headers_for

RECEIVERS = 4
AT_ONCE = 12
SLOTS = 50
EMITTED_AT_ONCE = 500
PACED = 400
PACED_SECONDS = 0.02
STALLED_SECONDS = 120.0
BODY = b'{"specversion":"1.0","type":"bench.made","data":{"number":1,"text":"' + b"x" * 200 + b'"}}'
RECEIVER = """
import asyncio, sys, uvicorn

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/stall":
        await asyncio.sleep(60)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})

uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", lifespan="off")
"""
DONE = "SELECT count(*) FROM duly.webhook_deliveries d WHERE d.status = 'DELIVERED'"
LATENCY = """
SELECT extract(epoch FROM d.finished_at - d.event_created_at)::float8 * 1000 FROM duly.webhook_deliveries d
JOIN duly.webhook_subscriptions s ON s.id = d.subscription_id
WHERE d.status = 'DELIVERED' AND s.url NOT LIKE '%/stall' AND d.aggregate_id <> 'bench:-1' ORDER BY 1
"""


@dataclass(frozen=True)
class Bench:
    """Where things are."""

    dsn: str
    home: Path
    port: int

    @property
    def settings(self) -> Settings:
        """Those of every process here."""
        return Settings(
            data=self.home, webhook_allow_http=True, webhook_allow_private=("true",), webhook_concurrency=SLOTS
        )


def main() -> None:
    """Run everything and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5_000, help="how many events")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, _receiver() as port:
        server = TestServer(Path(directory) / "pg", durable=True)
        server.start()
        try:
            sent = asyncio.run(_send_only(port, options.count * RECEIVERS))
            print(f"a loop that only signs and sends, {SLOTS} at once: {sent:,.0f}/s", flush=True)
            with server.database(app) as dsn:
                rate = measure_rate(Bench(dsn, Path(directory), port), options.count)
            print(f"delivered, from event to record: {rate:,.0f}/s, {rate / sent:.2f} of that loop", flush=True)
            measure_isolation(server, Path(directory), port)
        finally:
            server.stop()


async def _send_only(port: int, count: int) -> float:
    """What the sender does in the best case: no database at all."""
    sender = Sender(allowed_by(Settings(webhook_allow_http=True, webhook_allow_private=("true",))), threads=SLOTS)
    left = iter(range(count))

    async def work() -> None:
        for number in left:
            headers = headers_for(
                ["a-secret-of-sixteen-and-more"], event_id=str(number), event_type="bench.made", delivery_id="d",
                timestamp=1_700_000_000, body=BODY,
            )  # fmt: skip
            answer = await sender.send(f"http://127.0.0.1:{port}/", headers=headers, body=BODY, timeout_seconds=15)
            assert answer.delivered, answer

    began = monotonic()
    await asyncio.gather(*(work() for _ in range(SLOTS)))
    return count / (monotonic() - began)


def measure_rate(bench: Bench, count: int) -> float:
    """All events are there before anybody delivers."""
    asyncio.run(_subscribe_and_emit(bench, ["/"] * RECEIVERS, count))
    with psycopg.connect(bench.dsn, autocommit=True) as connection, _processes(bench):
        began = monotonic()
        _wait_for(connection, count * RECEIVERS)
        return count * RECEIVERS / (monotonic() - began)


def measure_isolation(server: TestServer, home: Path, port: int) -> None:
    """Event to delivered, for the good receivers: alone, and beside one that never answers."""
    found = []
    for paths in (["/"] * RECEIVERS, ["/"] * RECEIVERS + ["/stall"]):
        with server.database(app) as dsn:
            bench = Bench(dsn, home, port)
            asyncio.run(_subscribe_and_emit(bench, paths, 0))
            with psycopg.connect(dsn, autocommit=True) as connection, _processes(bench):
                asyncio.run(_emit(bench, [-1]))
                _wait_for(connection, RECEIVERS)  # the processes are there
                asyncio.run(_emit(bench, range(PACED)))
                _wait_for(connection, (PACED + 1) * RECEIVERS)
                times = [row[0] for row in connection.execute(LATENCY)]
        found.append((statistics.median(times), times[int(len(times) * 0.99)]))
        beside = "beside one that never answers" if len(paths) > RECEIVERS else "alone"
        print(f"event to delivered at {1 / PACED_SECONDS:.0f} events/s to {RECEIVERS} receivers, {beside}: "
              f"p50 {found[-1][0]:.1f} ms, p99 {found[-1][1]:.1f} ms", flush=True)  # fmt: skip
    (p50, p99), (p50_beside, p99_beside) = found
    print(f"a dead receiver makes it {p50_beside / p50:.2f} (p50) and {p99_beside / p99:.2f} (p99) times as long")


async def _subscribe_and_emit(bench: Bench, paths: list[str], count: int) -> None:
    db = Database(bench.dsn, settings=bench.settings)
    for path in paths:
        async with db.transaction() as tx:
            await create_subscription(
                tx, bench.settings, Keyring.open(bench.settings), owner="bench",
                url=f"http://127.0.0.1:{bench.port}{path}", patterns=["bench.*"], max_in_flight=AT_ONCE, actor="bench",
            )  # fmt: skip
    for first in range(0, count, EMITTED_AT_ONCE):
        async with db.transaction() as tx:
            await emit(tx, *(_event(number) for number in range(first, min(first + EMITTED_AT_ONCE, count))))
    await db.close()


async def _emit(bench: Bench, numbers: Iterable[int]) -> None:
    db = Database(bench.dsn, settings=bench.settings)
    for number in numbers:
        async with db.transaction() as tx:
            await emit(tx, _event(number))
        await asyncio.sleep(PACED_SECONDS)
    await db.close()


def _event(number: int) -> NewEvent:
    return NewEvent("bench.made", "bench", f"bench:{number}", {"number": number, "text": "x" * 200})


def _wait_for(connection: psycopg.Connection[Any], count: int) -> None:
    before, changed = 0, monotonic()
    while True:
        row = connection.execute(DONE).fetchone()
        done = row[0] if row else 0
        if done >= count:
            return
        changed, before = (monotonic(), done) if done != before else (changed, before)
        assert monotonic() - changed < STALLED_SECONDS, f"{done} of {count} were delivered, and then none"
        time.sleep(0.1)


@contextmanager
def _processes(bench: Bench) -> Iterator[None]:
    """A relay and a worker, until the block ends."""
    env = {
        **os.environ, "DATABASE_URL": bench.dsn, "DULY_DATA": str(bench.home), "DULY_LOG_LEVEL": "error",
        "DULY_APP": "apps.wiring:app",
        "DULY_WEBHOOK_ALLOW_HTTP": "true", "DULY_WEBHOOK_ALLOW_PRIVATE": "true",
        "DULY_WEBHOOK_CONCURRENCY": str(SLOTS), "DULY_SHUTDOWN_GRACE_SECONDS": "1",
    }  # fmt: skip
    started = [subprocess.Popen([sys.executable, "-m", "duly.cli.main", kind], env=env) for kind in ("relay", "worker")]
    try:
        yield
    finally:
        for process in started:
            process.kill()  # what is under way at a receiver that never answers would be waited for
        for process in started:
            process.wait(30)


@contextmanager
def _receiver() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    process = subprocess.Popen([sys.executable, "-c", RECEIVER, str(port)])
    try:
        for _ in range(300):
            try:
                httpx2.get(f"http://127.0.0.1:{port}/", timeout=5)
                break
            except httpx2.TransportError:
                time.sleep(0.1)
        yield port
    finally:
        process.kill()  # it may be stalling somebody still
        process.wait(30)


if __name__ == "__main__":
    main()
