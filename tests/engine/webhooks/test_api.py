"""The routes of webhooks over real HTTP, as every application serves them (F13)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
import pytest_asyncio

from duly import Duly
from duly.auth.issuer import Issuer
from duly.cli.process import build_api
from duly.runtime.supervisor import create_server
from tests.engine.http.serving import listen
from tests.engine.webhooks.hooks import SECRET, Hooks, make_settings
from tests.engine.webhooks.subscriber import answering, subscriber
from tests.support import rows, value

ROOT = "/v1/webhooks/subscriptions"
NEW = {"url": "https://hooks.example.com/duly", "events": ["order.*"], "secret": SECRET}


@dataclass
class Client:
    """One caller of the API."""

    http: httpx2.AsyncClient
    headers: dict[str, str]

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return await self.http.request(method, path, json=body, headers={**self.headers, **headers})


@dataclass
class Served:
    """An API, and two callers of it."""

    hooks: Hooks
    alice: Client
    bob: Client


@pytest_asyncio.fixture
async def api(hooks: Hooks, tmp_path: Path) -> AsyncIterator[Served]:
    listener = listen()
    port = listener.getsockname()[1]
    settings = make_settings(data=tmp_path, shutdown_grace_seconds=1)
    server = create_server(build_api(hooks.db, [], settings, Duly(), port=port), settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    issuer = Issuer.open(settings, port=port)

    def caller(http: httpx2.AsyncClient, sub: str) -> Client:
        token = issuer.sign(sub, scopes=["webhooks"], roles=["WEBHOOK_ADMIN"])
        return Client(http, {"Authorization": f"Bearer {token}"})

    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            yield Served(hooks, caller(http, "alice"), caller(http, "bob"))
    finally:
        server.should_exit = True
        await task


async def test_a_subscription_is_made_shown_changed_and_deleted(api: Served) -> None:
    """F13: an application without routes of its own has these."""
    made = await api.alice("POST", ROOT, NEW)
    assert made.status_code == 201, made.text
    body = made.json()
    assert (body["status"], body["events"], body["validSecrets"], body["secret"]) == ("ACTIVE", ["order.*"], 1, None)
    assert SECRET not in made.text
    path = made.headers["location"]
    shown = await api.alice("GET", path)
    assert "secret" not in shown.json()
    changed = await api.alice("PATCH", path, {"url": "https://other.example.com/", "maxInFlight": 9})
    assert (changed.json()["url"], changed.json()["maxInFlight"], changed.json()["version"]) == (
        "https://other.example.com/", 9, 2,
    )  # fmt: skip
    assert [one["id"] for one in (await api.alice("GET", ROOT)).json()["items"]] == [body["id"]]
    assert (await api.alice("DELETE", path)).status_code == 204
    assert (await api.alice("GET", path)).status_code == 404
    assert (await api.alice("GET", ROOT)).json() == {"items": [], "next": None}
    actions = rows(api.hooks.dsn, "SELECT action, actor FROM duly.audit WHERE action LIKE 'webhook%' ORDER BY id")
    assert [action for action, _ in actions] == [
        "webhook_subscription.created", "webhook_subscription.edited", "webhook_subscription.deleted",
    ]  # fmt: skip
    assert {actor for _, actor in actions} == {"alice"}


async def test_a_made_secret_is_in_the_answer_that_made_it_and_in_no_other(api: Served) -> None:
    made = await api.alice("POST", ROOT, {key: NEW[key] for key in ("url", "events")})
    secret = made.json()["secret"]
    assert secret.startswith("whsec_")
    assert made.headers["cache-control"] == "no-store"
    path = made.headers["location"]
    rotated = await api.alice("POST", f"{path}/rotate", {"overlapHours": 1})
    assert rotated.json()["secret"] not in (None, secret)
    assert rotated.json()["validSecrets"] == 2
    for answer in (await api.alice("GET", path), await api.alice("GET", ROOT)):
        assert "whsec_" not in answer.text


async def test_a_stored_answer_never_holds_a_secret(api: Served) -> None:
    """E4 and E6.4: with a key the answer is kept in clear, so the caller brings the secret."""
    key = {"Idempotency-Key": "k"}
    without = {name: NEW[name] for name in ("url", "events")}
    refused = await api.alice("POST", ROOT, without, **key)
    assert (refused.status_code, refused.headers["content-type"]) == (422, "application/problem+json")
    first = await api.alice("POST", ROOT, NEW, **key)
    second = await api.alice("POST", ROOT, NEW, **key)
    assert (first.status_code, second.headers["idempotent-replayed"]) == (201, "true")
    assert first.content == second.content
    assert value(api.hooks.dsn, "SELECT count(*) FROM duly.webhook_subscriptions") == 1
    stored = b"".join(bytes(row[0]) for row in rows(api.hooks.dsn, "SELECT body FROM duly.idempotency_keys"))
    assert b"whsec_" not in stored


async def test_nobody_sees_or_touches_what_is_somebody_elses(api: Served) -> None:
    path = (await api.alice("POST", ROOT, NEW)).headers["location"]
    delivery = (await api.alice("POST", f"{path}/test")).json()["id"]
    times = {"since": "2026-01-01T00:00:00Z", "until": "2026-01-02T00:00:00Z"}
    for method, target, body in [
        ("GET", path, None), ("PATCH", path, {"description": "mine"}), ("DELETE", path, None),
        ("POST", f"{path}/rotate", {}), ("POST", f"{path}/pause", None), ("POST", f"{path}/resume", None),
        ("POST", f"{path}/test", None), ("GET", f"{path}/deliveries", None), ("POST", f"{path}/redeliver", times),
        ("GET", f"/v1/webhooks/deliveries/{delivery}", None),
        ("POST", f"/v1/webhooks/deliveries/{delivery}/redeliver", None),
    ]:  # fmt: skip
        answer = await api.bob(method, target, body)
        assert (method, target, answer.status_code) == (method, target, 403)
    assert (await api.bob("GET", ROOT)).json()["items"] == []
    missing = await api.bob("GET", f"{ROOT}/{uuid4()}")
    assert missing.status_code == 404


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "http://127.0.0.1:25/"}, {"url": "https://169.254.169.254/latest"}, {"url": "https://10.0.0.1/"},
        {"url": "https://0x7f.1/"}, {"url": "ftp://example.com/"}, {"url": "https://user@example.com/"}, {"url": ""},
        {"events": []}, {"events": ["no spaces"]}, {"events": ["x"] * 101}, {"secret": "short"},
        {"secret": "whsec_notbase64notbase64!"}, {"maxInFlight": 0}, {"maxInFlight": 101}, {"timeoutSeconds": 31},
        {"maxInFlight": True}, {"maxInFlight": "5"}, {"timeoutSeconds": "5"},
        {"description": "x" * 501}, {"description": "nul\x00"}, {"unknown": 1},
    ],
)  # fmt: skip
async def test_what_cannot_work_is_refused_with_a_problem(api: Served, changes: dict[str, Any]) -> None:
    answer = await api.alice("POST", ROOT, NEW | changes)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert SECRET not in answer.text
    assert "notbase64" not in answer.text
    assert value(api.hooks.dsn, "SELECT count(*) FROM duly.webhook_subscriptions") == 0


@pytest.mark.parametrize("url", ["https://169.254.169.254/latest", "https://10.0.0.1/", "https://user@example.com/"])
async def test_a_change_is_refused_for_what_the_beginning_is(api: Served, url: str) -> None:
    """E6.4: nobody gets inside by subscribing outside first."""
    path = (await api.alice("POST", ROOT, NEW)).headers["location"]
    changed = await api.alice("PATCH", path, {"url": url})
    assert (changed.status_code, changed.headers["content-type"]) == (422, "application/problem+json")
    assert (await api.alice("GET", path)).json()["url"] == NEW["url"]


async def test_the_same_name_at_another_issuer_is_somebody_else(api: Served) -> None:
    made = await api.hooks.subscribe("https://hooks.example.com/", owner="https://other.example alice")
    assert (await api.alice("GET", f"{ROOT}/{made.id}")).status_code == 403
    assert (await api.alice("GET", ROOT)).json()["items"] == []


async def test_the_log_of_a_delivery_and_sending_it_again(api: Served) -> None:
    async with subscriber(answering(500, body=b"broken")) as one:
        made = await api.alice("POST", ROOT, NEW | {"url": one.url})
        path = made.headers["location"]
        await api.alice("POST", f"{path}/test")
        await api.hooks.drain()
        page = (await api.alice("GET", f"{path}/deliveries?status=RETRYING")).json()
        (delivery,) = page["items"]
        found = (await api.alice("GET", f"/v1/webhooks/deliveries/{delivery['id']}")).json()
        (attempt,) = found["log"]
        assert (attempt["httpStatus"], attempt["error"], attempt["responseExcerpt"]) == (500, "status", "broken")
        assert attempt["requestHeaders"]["X-Delivery-Id"] == delivery["id"]
        assert found["body"].encode() == one.requests[0].body
        one.behave = answering(204)
        again = await api.alice("POST", f"/v1/webhooks/deliveries/{delivery['id']}/redeliver")
        assert (again.status_code, again.json()["status"]) == (200, "QUEUED")
        await api.hooks.drain()
        assert (await api.alice("GET", f"{path}/deliveries")).json()["items"][0]["status"] == "DELIVERED"
        times = {"since": "2020-01-01T00:00:00Z", "until": "2090-01-01T00:00:00Z", "onlyFailed": False}
        assert (await api.alice("POST", f"{path}/redeliver", times)).json() == {"count": 1, "next": None}
        backwards = {"since": times["until"], "until": times["since"]}
        assert (await api.alice("POST", f"{path}/redeliver", backwards)).status_code == 422


async def test_pausing_and_resuming(api: Served) -> None:
    path = (await api.alice("POST", ROOT, NEW)).headers["location"]
    assert (await api.alice("POST", f"{path}/resume")).status_code == 409
    assert (await api.alice("POST", f"{path}/pause")).json()["status"] == "PAUSED"
    assert (await api.alice("POST", f"{path}/pause")).status_code == 409
    assert (await api.alice("POST", f"{path}/resume")).json()["status"] == "ACTIVE"


async def test_pages_follow_each_other(api: Served) -> None:
    for n in range(5):
        await api.alice("POST", ROOT, NEW | {"description": str(n)})
    seen, before = [], ""
    for _ in range(4):
        page = (await api.alice("GET", f"{ROOT}?limit=2{before}")).json()
        seen += [one["description"] for one in page["items"]]
        if page["next"] is None:
            break
        before = f"&before={page['next']}"
    assert seen == ["4", "3", "2", "1", "0"]
