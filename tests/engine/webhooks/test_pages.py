"""What the how-tos show is what works."""

from __future__ import annotations

import base64
import hmac
from typing import Any

from fastapi import FastAPI
from sqlalchemy import text

from duly.http import install
from duly.testing import BusinessClock
from duly.webhooks import add_provider_secret
from tests.engine.http.serving import served
from tests.engine.webhooks.hooks import SECRET, Hooks
from tests.engine.webhooks.subscriber import subscriber
from tests.test_docs import ROOT, blocks

HOWTO = ROOT / "docs" / "howto"


async def test_the_receiver_of_the_page_runs_as_printed(hooks: Hooks, clock: BusinessClock) -> None:
    """E6.3 in a few lines."""
    (code,) = blocks(HOWTO / "receive-webhooks.md")
    page: dict[str, Any] = {"__name__": "page"}
    exec(code, page)
    async with hooks.db.transaction() as tx:
        await tx.execute(text("CREATE TABLE payments (id text PRIMARY KEY, status text)"))
        await tx.execute(text("INSERT INTO payments VALUES ('p1', 'OPEN')"))
        await add_provider_secret(tx, hooks.keyring, "payments", secret=SECRET, actor="test")
    api = FastAPI()
    install(api, hooks.db)
    api.state.settings = hooks.settings
    for router in page["app"].routers:
        api.include_router(router)
    body = b'{"data": {"id": "p1", "status": "PAID"}}'
    at = int(clock.now().timestamp())
    mac = hmac.digest(base64.b64decode(SECRET[6:]), f"evt.{at}.".encode() + body, "sha256")
    headers = {"webhook-id": "evt", "webhook-timestamp": str(at)}
    headers["webhook-signature"] = "v1," + base64.b64encode(mac).decode()
    async with served(api) as client:
        answers = [(await client.post("/v1/webhooks/payments", content=body, headers=headers)).json() for _ in range(2)]
        assert (await client.post("/v1/webhooks/payments", content=body + b" ", headers=headers)).status_code == 401
    assert answers == [{"status": "done"}, {"status": "duplicate"}]
    async with hooks.db.transaction() as tx:
        assert (await tx.execute(text("SELECT status FROM payments"))).scalar() == "PAID"


async def test_the_verifier_of_the_page_accepts_what_we_send(hooks: Hooks) -> None:
    (code,) = blocks(HOWTO / "send-webhooks.md")
    page: dict[str, Any] = {}
    exec(code, page)
    async with subscriber() as one:
        for secret in (SECRET, "plain-secret-of-ours"):
            await hooks.subscribe(one.url, secret=secret)
        await hooks.emit()
        await hooks.drain()
    verdicts = [
        [
            page["is_ours"](secret, request.headers, request.body)
            for secret in (SECRET, "plain-secret-of-ours", "x" * 16)
        ]
        for request in one.requests
    ]
    assert sorted(verdicts) == [[False, True, False], [True, False, False]]
    assert not page["is_ours"](SECRET, one.requests[0].headers, one.requests[0].body + b" ")
