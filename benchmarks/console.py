"""Page times of the console over real HTTP: a million runs, events and deliveries, 200,000 jobs and dead letters.

python -m benchmarks.console [--rounds 20]; a page that takes longer than 200 ms (p95) is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import psycopg
from tests.console.conftest import serving
from tests.plans.test_operate_plans import FILL
from tests.plans.test_webhooks_plans import BUSY, DELIVERY, DOWN
from tests.plans.test_webhooks_plans import FILL as FILL_WEBHOOKS

from duly.db import Database
from duly.testing import TestServer

RECENT = """
INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded,
                             outcome, retry_count, worker, lease_token)
SELECT duly.uuid7(now() - n * interval '3.6 ms'), n, 'name-' || n % 5, 'order-' || n, 'Deferred',
       now() - n * interval '3.6 ms' - interval '20 ms', now() - n * interval '3.6 ms', true, 'done', 0, 'w1', 1
FROM generate_series(1, {count}) n
"""
MOST_MILLISECONDS = 200
PAGES = {
    "overview": "/console",
    "jobs": "/console/jobs",
    "jobs of a name": "/console/jobs?name=name-1",
    "running jobs": "/console/jobs?status=Running",
    "one job": "/console/jobs/1000",
    "schedules": "/console/schedules",
    "history": "/console/history",
    "history by outcome": "/console/history?outcome=buried",
    "dead letters": "/console/dead-letters",
    "dead letters of a group": "/console/dead-letters?name=name-1&kind=Kind1",
    "one dead letter": "/console/jobs/1000007",
    "outbox": "/console/outbox",
    "published events": "/console/outbox?status=PUBLISHED",
    "entity": "/console/entity?id=order-7",
    "search": "/console/search?q=order-7",
    "jobs of an entity": "/console/jobs?entity=order-7",
    "history of an entity": "/console/history?entity=order-7",
    "audit": "/console/audit",
    "audit by who": "/console/audit?who=nobody",
    "webhooks": "/console/webhooks",
    "one subscription": f"/console/webhooks/{BUSY}",
    "one that is down": f"/console/webhooks/{DOWN}",
    "its deliveries of a type": f"/console/webhooks/{DOWN}?type=none.such",
    "one delivery": f"/console/webhooks/deliveries/{DELIVERY}",
    "before a bulk retry": "/console/actions/dead.retry-all?name=name-1",
    "alerts": "/console/alerts",
    "processes": "/console/processes",
}


async def measure(dsn: str, rounds: int) -> dict[str, dict[str, float]]:
    """Each page ``rounds`` times, after one to warm up; the first overview counts its charts from nothing."""
    found: dict[str, dict[str, float]] = {}
    db = Database(dsn)
    with tempfile.TemporaryDirectory() as directory:
        async with serving(db, Path(directory)) as site:
            browser = await site.signed_in("ada")
            for name, path in PAGES.items():
                began = time.perf_counter()
                first = await browser.get(path)
                cold = (time.perf_counter() - began) * 1000
                assert first.status_code in (200, 303), (name, first.status_code)
                times = []
                for _ in range(rounds):
                    began = time.perf_counter()
                    await browser.get(path)
                    times.append((time.perf_counter() - began) * 1000)
                p95 = statistics.quantiles(times, n=20)[18]
                found[name] = {"first": cold, "p50": statistics.median(times), "p95": p95}
                print(
                    f"{name:26} first {cold:7.1f} ms   p50 {found[name]['p50']:7.1f} ms   p95 {p95:7.1f} ms", flush=True
                )
            began = time.perf_counter()
            for _ in range(100):
                await site.console.rollup.refresh(patience_seconds=1)
                async with site.console.reading() as look:
                    if site.console.rollup.is_complete(look.now):
                        break
            print(f"the whole hour of charts was known {time.perf_counter() - began:.1f} s later")
    await db.close()
    return found


def main() -> None:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--recent", type=int, default=1_000_000, help="runs in the last hour")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = TestServer(Path(directory))
        server.start()
        try:
            with server.database() as dsn:
                with psycopg.connect(dsn, autocommit=True) as connection:
                    connection.execute("SET synchronous_commit = off")
                    connection.execute(FILL.encode())
                    connection.execute(RECENT.format(count=int(options.recent)).encode())
                    connection.execute("SET session_replication_role = replica")
                    for statement in FILL_WEBHOOKS.split(";\n"):
                        connection.execute(statement.encode())
                    connection.execute("VACUUM ANALYZE")
                found = asyncio.run(measure(dsn, options.rounds))
                print(json.dumps(found, indent=None))
                if slow := [name for name, times in found.items() if times["p95"] > MOST_MILLISECONDS]:
                    raise SystemExit(f"longer than {MOST_MILLISECONDS} ms: {', '.join(slow)}")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
