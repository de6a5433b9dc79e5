"""Identity checks under load: F14's budget of a webhook's ingest, over the whole HTTP path with concurrency.

``make bench-kyc``. Ratios count; absolute times are this machine's. One api process, no worker: what follows from a
callback is not part of its budget. A new session has no budget of its own, and is shown beside that of a payment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import httpx2

from apps.sandbox.bank import sign
from apps.sandbox.identity import SECRET
from apps.wiring import KYC, app
from benchmarks.ledger import Work, timed, until_ready
from duly.auth.issuer import Issuer
from duly.clock import unix_milliseconds
from duly.settings import Settings
from duly.testing import TestServer

PORT = 18244
BUDGETS = {
    "new session": (150, 500), "webhook: in progress": (100, 500), "webhook: approved": (100, 500),
    "webhook: rejected": (100, 500), "webhook: duplicate": (100, 500), "webhook: about nobody": (100, 500),
}  # fmt: skip


def main() -> None:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=800)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = TestServer(Path(directory) / "pg", durable=True)
        server.start()
        try:
            with server.database(app) as dsn:
                run(dsn, Path(directory), given)
        finally:
            server.stop()


def run(dsn: str, home: Path, given: argparse.Namespace) -> None:
    """The api in a process of its own."""
    env = {**os.environ, "DATABASE_URL": dsn, "DULY_DATA": str(home), "DULY_LOG_LEVEL": "error", "PORT": str(PORT)}
    api = subprocess.Popen([sys.executable, "-m", "duly.cli.main", "api"], env={**env, "DULY_APP": "apps.wiring:app"})
    try:
        asyncio.run(measure(home, given))
    finally:
        api.kill()
        api.wait()


async def measure(home: Path, given: argparse.Namespace) -> None:
    """F14: p50 and p99 of each, as a ratio to its budget."""
    url = f"http://127.0.0.1:{PORT}"
    await until_ready(url)
    token = Issuer.open(Settings(data=home), port=PORT).sign("agent", scopes=["compliance:kyc"], roles=["KYC_AGENT"])
    limits = httpx2.Limits(max_connections=given.clients, max_keepalive_connections=given.clients)
    headers = {"Authorization": f"Bearer {token}"}
    sessions: list[str] = []
    async with httpx2.AsyncClient(base_url=url, timeout=30, limits=limits, headers=headers) as client:

        async def make(_number: int) -> httpx2.Response:
            key = {"Idempotency-Key": str(uuid4())}
            answer = await client.post("/v1/kyc/sessions", json={"userId": str(uuid4())}, headers=key)
            assert answer.status_code == 201, answer.text
            sessions.append(answer.json()["sessionId"])
            return answer

        print(f"HTTP, one api process, {given.clients} clients; median of {given.rounds} rounds")
        print(f"{'':<26} {'req/s':>7} {'p50 ms':>8} {'p99 ms':>8} {'p50/budget':>11} {'p99/budget':>11}")
        await show("new session", make, given)
        while len(sessions) < 2 * (given.requests + 1) * given.rounds:
            await asyncio.gather(*(make(0) for _ in range(given.clients)))
        begun, ended, last = list(sessions), list(sessions), [b""]

        def call(status: str, expected: str, left: list[str] | None) -> Work:
            async def work(_number: int) -> httpx2.Response:
                if expected != "duplicate":
                    last[0] = write(status, left.pop() if left is not None else str(uuid4()))
                signed = sign(last[0], timestamp=unix_milliseconds() // 1000, secret=SECRET)
                answer = await client.post(f"/v1/webhooks/kyc/{KYC}", content=last[0], headers=signed)
                assert answer.json().get("status") == expected, answer.text
                return answer

            return work

        await show("webhook: in progress", call("IN_PROGRESS", "applied", begun), given)
        await show("webhook: approved", call("APPROVED", "applied", ended), given)
        await show("webhook: rejected", call("REJECTED", "applied", ended), given)
        await show("webhook: duplicate", call("REJECTED", "duplicate", None), given)
        await show("webhook: about nobody", call("APPROVED", "kept", None), given)


def write(status: str, session: str) -> bytes:
    """What a provider calls to say."""
    said = {"providerEventId": str(uuid4()), "clientRef": session, "status": status}
    if status in ("APPROVED", "REJECTED"):
        said["evidenceRef"] = str(uuid4())
    return json.dumps(said).encode()


async def show(name: str, work: Work, given: argparse.Namespace) -> None:
    """One line of the table."""
    found = [await timed(work, given.requests, given.clients) for _ in range(given.rounds)]
    per_second, p50, p99 = (statistics.median(column) for column in zip(*found, strict=True))
    half, most = BUDGETS[name]
    print(f"{name:<26} {per_second:>7.0f} {p50:>8.1f} {p99:>8.1f} {p50 / half:>11.2f} {p99 / most:>11.2f}")


if __name__ == "__main__":
    main()
