"""The HTTP path with concurrent clients, beside the same inserts by a bare FastAPI route; and the hourly sweep's cost.

``make bench-http``. Ratios count; absolute times are this machine's.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import psycopg

from apps.wiring import app
from duly.auth.issuer import Issuer
from duly.clock import monotonic
from duly.settings import Settings
from duly.testing import TestServer

CLIENTS = 16
REQUESTS = 1_600
TRANSFERS = 1_000_000
DUE = (0, 100, 1_000, 10_000)
ROUNDS = 3
BARE = """
import os, uuid, asyncpg, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

class New(BaseModel):
    supplier_id: str
    severity: str
    description: str

api = FastAPI()

@api.get("/readyz")
async def ready():
    api.state.pool = api.state.pool if hasattr(api.state, "pool") else await asyncpg.create_pool(
        os.environ["DATABASE_URL"], min_size=10, max_size=10)

@api.post("/ncs", status_code=201)
async def create(new: New):
    async with api.state.pool.acquire() as connection, connection.transaction():
        row = await connection.fetchrow(
            "INSERT INTO quality.nonconformities (id, supplier_id, severity, description, created_by, created_at)"
            " VALUES ($1, $2, $3, $4, 'bare', now()) RETURNING *",
            uuid.uuid4(), new.supplier_id, new.severity, new.description)
        await connection.execute("SELECT duly.emit('quality.nc.created', 'quality.events', $1)", str(row["id"]))
    return dict(row)

uvicorn.run(api, port=int(os.environ["PORT"]), log_level="warning", loop="uvloop")
"""
FILL = """
INSERT INTO transfers.products (id, name, owner_id, created_at)
SELECT duly.uuid7(), 'p' || n, 'alice', duly.now() FROM generate_series(1, %(rows)s) n;
INSERT INTO transfers.transfers (id, product_id, from_user_id, to_user_id, status, created_at, updated_at)
SELECT duly.uuid7(), p.id, 'alice', 'bob', CASE WHEN n %% 5 = 0 THEN 'Pending' ELSE 'Accepted' END, m.at,
       CASE WHEN n %% 5 = 0 THEN m.at ELSE m.at + interval '1 minute' END
FROM (SELECT id, row_number() OVER () AS n FROM transfers.products) p,
     LATERAL (SELECT duly.now() - CASE WHEN n %% 5 = 0 THEN 1 ELSE n END * interval '1 minute' AS at) m
"""
MAKE_DUE = """
UPDATE transfers.transfers
SET created_at = duly.now() - interval '73 hours', updated_at = duly.now() - interval '73 hours'
WHERE id = ANY(ARRAY(SELECT id FROM transfers.transfers WHERE status = 'Pending' LIMIT %s))
"""


def main() -> None:
    """Run everything and print a table."""
    with tempfile.TemporaryDirectory() as directory:
        server = TestServer(Path(directory) / "pg", durable=True)
        server.start()
        try:
            with server.database(app) as dsn:
                compare(dsn, Path(directory))
        finally:
            server.stop()


def compare(dsn: str, home: Path) -> None:
    """The figures of duly's API and of the bare one, then the sweep's."""
    env = {**os.environ, "DATABASE_URL": dsn, "DULY_DATA": str(home), "DULY_LOG_LEVEL": "warning"}
    ours = subprocess.Popen(
        [sys.executable, "-m", "duly.cli.main", "api"], env={**env, "PORT": "18231", "DULY_APP": "apps.wiring:app"}
    )
    bare = subprocess.Popen([sys.executable, "-c", BARE], env={**env, "PORT": "18232"})
    try:
        asyncio.run(measure(dsn, home))
    finally:
        ours.kill()
        bare.kill()


async def measure(dsn: str, home: Path) -> None:
    """Everything, once both servers answer."""
    for port in (18231, 18232):
        await _ready(f"http://127.0.0.1:{port}/readyz")
    issuer = Issuer.open(Settings(data=home), port=18231)
    token = issuer.sign("alice", scopes=["quality", "transfers"], roles=["QUALITY_ENGINEER"])
    await measure_requests(token)
    await measure_sweep(dsn, issuer.sign("worker", scopes=["internal:transfers.expire"]))


async def measure_requests(token: str) -> None:
    """p50 and p99 of creating, ours beside bare."""
    body = {"supplier_id": "ACME-7", "severity": "HIGH", "description": "Burrs on the flange"}
    auth = {"Authorization": f"Bearer {token}"}

    def create(client: httpx2.AsyncClient) -> Awaitable[httpx2.Response]:
        return client.post("/ncs", json=body, headers=auth)

    def create_with_key(client: httpx2.AsyncClient) -> Awaitable[httpx2.Response]:
        return client.post("/ncs", json=body, headers={**auth, "Idempotency-Key": str(uuid4())})

    async def transfer(client: httpx2.AsyncClient) -> httpx2.Response:
        product = (await client.post("/v1/products", json={"name": "Lathe"}, headers=auth)).json()["id"]
        return await timed_post(client, f"/v1/products/{product}/transfers", {"toUserId": "bob"}, auth)

    print(f"{'what':<44} {'req/s':>7} {'p50 ms':>8} {'p99 ms':>8}   ({CLIENTS} clients)")
    bare = [await load("http://127.0.0.1:18232", create) for _ in range(ROUNDS)]
    plain = [await load("http://127.0.0.1:18231", create) for _ in range(ROUNDS)]
    keyed = [await load("http://127.0.0.1:18231", create_with_key) for _ in range(ROUNDS)]
    moved = [await load("http://127.0.0.1:18231", transfer, own_times=True) for _ in range(ROUNDS)]
    for name, found in (
        ("POST /ncs, bare FastAPI + asyncpg", bare), ("POST /ncs", plain), ("POST /ncs with a key", keyed),
        ("POST /v1/products/{id}/transfers", moved),
    ):  # fmt: skip
        rate, p50, p99 = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:<44} {rate:>7.0f} {p50:>8.1f} {p99:>8.1f}")
    ratio = statistics.median(one[0] for one in plain) / statistics.median(one[0] for one in bare)
    print(f"POST /ncs has {ratio:.2f} of the bare route's rate (which checks no token, keeps no key, binds no trace)")


OWN_TIMES: list[float] = []


async def timed_post(client: httpx2.AsyncClient, path: str, body: Any, headers: dict[str, str]) -> httpx2.Response:
    """A post whose own time counts, not that of what prepared it."""
    began = monotonic()
    answer = await client.post(path, json=body, headers=headers)
    OWN_TIMES.append(monotonic() - began)
    return answer


async def load(
    url: str, request: Callable[[httpx2.AsyncClient], Awaitable[httpx2.Response]], *, own_times: bool = False
) -> tuple[float, float, float]:
    """Requests a second, p50 and p99 in milliseconds."""
    times: list[float] = []
    OWN_TIMES.clear()
    limits = httpx2.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with httpx2.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        (await request(client)).raise_for_status()

        async def one_client() -> None:
            for _ in range(REQUESTS // CLIENTS):
                began = monotonic()
                answer = await request(client)
                times.append(monotonic() - began)
                assert answer.status_code == 201, answer.text

        began = monotonic()
        await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
        seconds = monotonic() - began
    cuts = statistics.quantiles(OWN_TIMES if own_times else times, n=100)
    return REQUESTS / seconds, cuts[49] * 1000, cuts[98] * 1000


async def measure_sweep(dsn: str, token: str) -> None:
    """How long the whole call takes, by how many are due among a million."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE transfers.products, transfers.transfers, transfers.service_requests CASCADE")
        for statement in FILL.split(";"):
            connection.execute(statement.encode(), {"rows": TRANSFERS})
        connection.execute("VACUUM ANALYZE")
        headers = {"Authorization": f"Bearer {token}"}
        url = "http://127.0.0.1:18231/internal/v1/transfers/expire-pending"
        print(f"\nexpire-pending among {TRANSFERS:,} transfers, median of {ROUNDS}")
        async with httpx2.AsyncClient(timeout=120) as client:
            for due in DUE:
                taken = []
                for _ in range(ROUNDS):
                    connection.execute(MAKE_DUE, (due,))
                    connection.execute("VACUUM ANALYZE transfers.transfers")
                    began = monotonic()
                    answer = await client.post(url, json={}, headers=headers)
                    taken.append(monotonic() - began)
                    assert answer.json() == {"expiredCount": due}, answer.text
                print(f"  {due:>6} due: {statistics.median(taken) * 1000:>7.0f} ms")


async def _ready(url: str) -> None:
    async with httpx2.AsyncClient() as client:
        for _ in range(200):
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not become ready")


if __name__ == "__main__":
    main()
