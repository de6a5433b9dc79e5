"""kill -9 of real processes while a session is made, opened, called about and expired (F8, FAULTS)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from apps.finance.kyc.gateways import CALLBACK_PATH, URL_VARIABLE
from apps.sandbox import bank, identity
from duly.auth.issuer import Issuer
from duly.settings import Settings
from tests.apps.finance.kyc.acting import Desk
from tests.apps.finance.payments.test_crashes import armed
from tests.apps.transfers.acting import new_key
from tests.engine.cli.commands import environment, free_port, running, status, wait_until
from tests.engine.jobs.witness import expire_leases
from tests.support import finish, python, rows, value

pytestmark = pytest.mark.timeout(240)
WORK = """
    import asyncio, os
    from apps.wiring import app
    from duly.db import Database
    from duly.jobs.worker import Worker

    async def main():
        db = Database(os.environ["DATABASE_URL"])
        ours = {name: one for name, one in app.handlers.items() if name.startswith("kyc.")}
        await Worker(db, ours).run_once()
        await db.close()

    asyncio.run(main())
"""


class Process:
    """A real ``duly api`` with failpoints, and an agent."""

    def __init__(self, dsn: str, home: Path, *, provider_url: str, callback_url: str) -> None:
        self.env = environment(
            DULY_APP="apps.wiring:app", DATABASE_URL=dsn, DULY_DATA=str(home), PORT=str(free_port()),
            DULY_ALLOW_UNSAFE_DATABASE="1", KYC_PROVIDER_URL=provider_url,
            KYC_CALLBACK_URL=callback_url,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.env['PORT']}"
        self.log = home.with_suffix(".log")
        issuer = Issuer.open(Settings(data=home), port=int(self.env["PORT"]))
        token = issuer.sign("agent", scopes=["compliance:kyc"], roles=["KYC_AGENT"])
        self.headers = {"Authorization": f"Bearer {token}"}

    def run(self, failpoints: str = "") -> Any:
        return running("api", env={**self.env, "DULY_FAILPOINTS": failpoints}, log=self.log)

    def wait(self) -> None:
        wait_until(lambda: status(f"{self.url}/readyz") == 200, what="/readyz is 200")

    def create(self, key: str) -> httpx2.Response:
        headers = {**self.headers, "Idempotency-Key": key}
        return httpx2.post(f"{self.url}/v1/kyc/sessions", json={"userId": "user-7"}, headers=headers, timeout=30)

    def visit(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=30)

    def call(self, body: bytes, timestamp: int) -> httpx2.Response:
        headers = bank.sign(body, timestamp=timestamp, secret=identity.SECRET)
        return httpx2.post(f"{self.url}/v1/webhooks/kyc/sandbox", content=body, headers=headers, timeout=30)


@pytest.fixture
def process(desk: Desk, dsn: str, tmp_path: Path) -> Process:
    """The provider calls one that lives on."""
    ours = str(desk.api.client.base_url).rstrip("/") + CALLBACK_PATH
    return Process(dsn, tmp_path / "api", provider_url=os.environ[URL_VARIABLE], callback_url=ours)


@pytest.mark.parametrize(
    ("point", "kept"),
    [("handler.mid", 0), ("idempotency.stored", 0), ("http.before_commit", 0), ("http.before_response", 1)],
)
async def test_an_api_killed_while_a_session_is_made_has_made_it_once_or_not_at_all(
    desk: Desk, dsn: str, process: Process, point: str, kept: int
) -> None:
    """Session, timer, fact and key are one commit; the client comes again with its key."""
    key = new_key()
    with process.run(armed(point)) as api:
        await asyncio.to_thread(process.wait)
        with pytest.raises(httpx2.TransportError):
            await asyncio.to_thread(process.create, key)
        assert api.wait(10) == -signal.SIGKILL
    assert value(dsn, "SELECT count(*) FROM kyc.sessions") == kept
    desk.check()
    with process.run():
        await asyncio.to_thread(process.wait)
        again = await asyncio.to_thread(process.create, key)
    assert (again.status_code, again.headers.get("idempotent-replayed", "false")) == (201, "true" if kept else "false")
    assert value(dsn, "SELECT count(*) FROM kyc.sessions") == 1
    desk.check()


@pytest.mark.parametrize(("point", "asked"), [("handler.mid", 0), ("handler.mid@2", 1), ("handler.mid@3", 1)])
async def test_an_api_killed_while_a_page_is_opened_leaves_one_session_at_the_provider(
    desk: Desk, dsn: str, process: Process, point: str, asked: int
) -> None:
    """Before the call, after it, and in the transaction that notes it."""
    made = await desk.create()
    path = made["hostedUrl"].partition("/v1/")[2]
    with process.run(armed(point)) as api:
        await asyncio.to_thread(process.wait)
        with pytest.raises(httpx2.TransportError):
            await asyncio.to_thread(process.visit, f"/v1/{path}")
        assert api.wait(10) == -signal.SIGKILL
    assert (desk.status(made["sessionId"]), len(desk.provider.log)) == ("PENDING", asked)
    desk.check()
    await desk.submit(await desk.start(made))
    assert (desk.status(made["sessionId"]), len(desk.provider.checks)) == ("APPROVED", 1)
    desk.check()


@pytest.mark.parametrize("said", ["APPROVED", "REJECTED"])
@pytest.mark.parametrize(
    ("point", "kept"),
    [("handler.mid", 0), ("handler.mid@2", 0), ("http.before_commit", 0), ("http.before_response", 1)],
)
async def test_an_api_killed_by_a_callback_has_applied_it_once_or_not_at_all(
    desk: Desk, dsn: str, process: Process, point: str, kept: int, said: str
) -> None:
    """E6.3: the provider calls again with the same event."""
    made = await desk.create()
    event = {"providerEventId": str(uuid4()), "clientRef": made["sessionId"], "status": said}
    body = json.dumps(event | {"evidenceRef": str(uuid4())}).encode()
    with process.run(armed(point)) as api:
        await asyncio.to_thread(process.wait)
        with pytest.raises(httpx2.TransportError):
            await asyncio.to_thread(process.call, body, int(desk.clock.now().timestamp()))
        assert api.wait(10) == -signal.SIGKILL
    assert desk.status(made["sessionId"]) == (said if kept else "PENDING")
    desk.check()
    again = await desk.call_raw(body)
    assert (again.status_code, again.json()["status"]) == (200, "duplicate" if kept else "applied")
    assert desk.status(made["sessionId"]) == said
    desk.check()


@pytest.mark.parametrize("point", ["worker.claimed", "handler.mid", "worker.before_commit", "worker.committed"])
async def test_a_session_expires_once_although_its_worker_is_killed(desk: Desk, dsn: str, point: str) -> None:
    made = await desk.create()
    desk.clock.advance(hours=24.1)
    code, output = await asyncio.to_thread(finish, python(dsn, WORK, failpoints=armed(point)), 90)
    assert code == -signal.SIGKILL, output
    assert desk.status(made["sessionId"]) == ("EXPIRED" if point == "worker.committed" else "PENDING")
    desk.check()
    expire_leases(dsn)
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE waits = 'retry'")
    await desk.run(hours=0.1)
    assert desk.status(made["sessionId"]) == "EXPIRED"
    desk.check()
