"""Working off birthdays that were missed: is the rate steady, is memory bounded, and what does a claim cost (B3, B7)?

``make bench-birthdays`` (N, 100000). Ratios count; absolute times are this machine's.
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psycopg

from apps.birthdays import service
from apps.birthdays.gateways import URL_VARIABLE
from apps.sandbox.catcher import PATH
from apps.wiring import app
from benchmarks.memory import resident_mib
from duly.clock import monotonic
from duly.db import Database
from duly.testing import TestServer

SIZES = (1_000, 10_000, 100_000, 1_000_000)
CLAIMS = 30
STEPS = 10
STALLED_SECONDS = 120.0
SAMPLE_SECONDS = 0.5
CATCHER = """
import sys, uvicorn
from fastapi import FastAPI
from apps.sandbox.catcher import create_router

api = FastAPI(openapi_url=None)
api.include_router(create_router())
uvicorn.run(api, port=int(sys.argv[1]), log_level="warning", loop="uvloop")
"""
# Everybody's birthday was in the last three days, by the clocks of Warsaw.
FILL = """
WITH numbered AS (
    SELECT duly.uuid7() AS id, date_trunc('day', duly.now() AT TIME ZONE 'Europe/Warsaw') - n %% 3 * interval '1 day'
                               - interval '1 day' AS day
    FROM generate_series(1, %(count)s) AS n
), people AS (
    INSERT INTO birthdays.people SELECT id, 'Ada', 'Lovelace', day::date - interval '30 years', 'Europe/Warsaw'
    FROM numbered
)
INSERT INTO birthdays.events (id, user_id, year, target_local, timezone, target_utc, created_at, updated_at)
SELECT duly.uuid7(), id, date_part('year', day), day + '09:00', 'Europe/Warsaw',
       (day + '09:00') AT TIME ZONE 'Europe/Warsaw', duly.now(), duly.now()
FROM numbered
"""
COUNTS = """
SELECT count(*) FILTER (WHERE status = 'COMPLETED'), count(*) FILTER (WHERE status = 'PROCESSING') FROM birthdays.events
"""
LEFT = "SELECT count(*) FROM birthdays.events WHERE status <> 'COMPLETED' AND target_utc < duly.now()"


class _Undone(Exception):
    """Rolls a claim back."""


def main() -> None:
    """Run everything and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="how many birthdays were missed")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="how many wait when a claim is timed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = TestServer(Path(directory) / "pg", durable=True)
        server.start()
        try:
            measure_claims(server, options.sizes)
            measure_recovery(server, Path(directory), options.count)
        finally:
            server.stop()


# -- one claim --------------------------------------------------------------------------------------------------------


def measure_claims(server: TestServer, sizes: list[int]) -> None:
    """What a claim of a hundred costs, by how many wait; all sizes in turn, so that all have the same machine."""
    if not sizes:
        return
    with ExitStack() as stack:
        dsns = [stack.enter_context(server.database(app)) for _ in sizes]
        for dsn, size in zip(dsns, sizes, strict=True):
            _fill(dsn, size)
        taken = asyncio.run(_time_claims(dsns))
    print("one claim of 100, all four of its statements, by how many wait")
    for size, costs in zip(sizes, taken, strict=True):
        ratio = statistics.median(cost / first for cost, first in zip(costs, taken[0], strict=True))
        print(f"  {size:>9,} waiting: {statistics.median(costs):>6.2f} ms, {ratio:.2f} of the first", flush=True)


async def _time_claims(dsns: list[str]) -> list[list[float]]:
    """Milliseconds, in each database as often; each claim is rolled back, so that the next finds the same."""
    dbs = [Database(dsn) for dsn in dsns]
    turns = [[await _time_claim(db) for db in dbs] for _ in range(CLAIMS + 3)]
    for db in dbs:
        await db.close()
    return [list(costs) for costs in zip(*turns[3:], strict=True)]


async def _time_claim(db: Database) -> float:
    with suppress(_Undone):
        async with db.transaction() as tx:
            await tx.connection()
            began = monotonic()
            claim = await service.claim_ready(tx, looks_for_missed=False)
            taken = (monotonic() - began) * 1000
            assert len(claim.claimed) == service.BATCH
            raise _Undone
    return taken


# -- the recovery -----------------------------------------------------------------------------------------------------


def measure_recovery(server: TestServer, home: Path, count: int) -> None:
    """A real worker, a real webhook, and everybody's birthday long past."""
    with server.database(app) as dsn, ExitStack() as stack:
        _fill(dsn, count)
        worker = stack.enter_context(_processes(dsn, home))
        with psycopg.connect(dsn, autocommit=True) as connection:
            _watch(connection, worker, count)


def _watch(connection: psycopg.Connection[Any], worker: subprocess.Popen[bytes], count: int) -> None:
    step = max(1, count // STEPS)
    connection.execute("SELECT duly.schedule('birthdays.claim')")
    began = last = changed = monotonic()
    marks: list[float] = []
    memory: list[float] = []
    most, before = 0, 0
    print(f"\n{count:,} missed birthdays, one worker, ten at a time")
    while len(marks) < count // step:
        time.sleep(SAMPLE_SECONDS)
        done, under_way = _read(connection, COUNTS)
        most = max(most, under_way)
        memory.append(resident_mib(worker.pid))
        now = monotonic()
        changed = now if done != before else changed
        before = done
        assert worker.poll() is None, "the worker died"
        assert now - changed < STALLED_SECONDS, f"nothing was delivered for {STALLED_SECONDS:g} s"
        while len(marks) < count // step and done >= (len(marks) + 1) * step:
            marks.append(step / max(now - last, SAMPLE_SECONDS))
            last = now
            print(f"  {len(marks) * step:>9,}: {marks[-1]:>6.0f}/s, worker {memory[-1]:.0f} MiB", flush=True)
    rest = _read(connection, LEFT)[0]
    print(
        f"  all in {monotonic() - began:.0f} s; slowest {min(marks) / statistics.median(marks):.2f} and fastest "
        f"{max(marks) / statistics.median(marks):.2f} of the median step; worker {memory[0]:.0f} MiB at first, "
        f"{max(memory):.0f} at most, {memory[-1]:.0f} at the end; at most {most:,} under way; {rest} left"
    )


def _read(connection: psycopg.Connection[Any], query: str) -> tuple[int, ...]:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row


@contextmanager
def _processes(dsn: str, home: Path) -> Any:
    """The webhook and one worker, until the block ends."""
    port = _free_port()
    env = {**os.environ, "DATABASE_URL": dsn, "DULY_DATA": str(home), "DULY_LOG_LEVEL": "error"}
    env |= {"DULY_APP": "apps.wiring:app", URL_VARIABLE: f"http://127.0.0.1:{port}{PATH}"}
    catcher = subprocess.Popen([sys.executable, "-c", CATCHER, str(port)], env=env)
    worker = subprocess.Popen([sys.executable, "-m", "duly.cli.main", "worker"], env=env)
    try:
        _until_there(f"http://127.0.0.1:{port}{PATH}")
        yield worker
    finally:
        for process in (worker, catcher):
            process.terminate()
        for process in (worker, catcher):
            process.wait(30)


def _until_there(url: str) -> None:
    deadline = monotonic() + 30
    while monotonic() < deadline:
        try:
            httpx2.get(url, timeout=5)
        except httpx2.TransportError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"nobody answers at {url}")


def _fill(dsn: str, count: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET statement_timeout = 0")
        connection.execute(FILL, {"count": count})
        connection.execute("VACUUM ANALYZE")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
