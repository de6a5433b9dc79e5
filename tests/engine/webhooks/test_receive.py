"""Webhooks of others: whose they are, how old, and whether they were here before (E6.3, FAULTS: Webhooks in)."""

# no "from __future__ import annotations": FastAPI cannot find the names of a function's own dependencies then

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import Depends, FastAPI
from pydantic import SecretStr
from sqlalchemy import text
from structlog.testing import capture_logs

from duly.db import Database
from duly.errors import Invalid, Refused
from duly.http import RequestTx, Router, install
from duly.http.receiver import Received, Receiver
from duly.telemetry import WEBHOOKS_REFUSED
from duly.testing import BusinessClock
from duly.webhooks.receive import Scheme, add_provider_secret, read_secrets
from tests.engine.http.serving import served
from tests.engine.webhooks.hooks import Hooks
from tests.support import rows, value

START = datetime(2026, 3, 1, 9, tzinfo=UTC)
NOW = int(START.timestamp())
SECRET = "whsec_" + base64.b64encode(b"p" * 32).decode()
OLDER = "whsec_" + base64.b64encode(b"o" * 32).decode()
CODED = "coded-secret-of-sixteen"
BODY = b'{"data": {"id": "evt-1"}, "amount": "10.00"}'


@dataclass
class Desk:
    """An application with four receivers, and what its endpoints did."""

    client: httpx2.AsyncClient
    hooks: Hooks
    api: FastAPI
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    fail: bool = False

    async def standard(self, body: bytes = BODY, **changes: Any) -> httpx2.Response:
        return await self.client.post("/standard", content=body, headers=standard_headers(body, **changes))

    async def plain(self, headers: dict[str, str], body: bytes = BODY, path: str = "/plain") -> httpx2.Response:
        return await self.client.post(path, content=body, headers=headers)

    def effects(self) -> list[str]:
        return [row[0] for row in rows(self.hooks.dsn, "SELECT key FROM effects ORDER BY id")]


def standard_headers(
    body: bytes, *, secret: str = SECRET, id: str = "evt-1", at: int = NOW, signature: str | None = None
) -> dict[str, str]:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    made = base64.b64encode(hmac.digest(key, f"{id}.{at}.".encode() + body, "sha256")).decode()
    return {"webhook-id": id, "webhook-timestamp": str(at), "webhook-signature": signature or f"v1,{made}"}


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in standard_headers(BODY).items() if key != name}


def hexed(secret: str, signed: bytes) -> str:
    return hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()


@contextlib.asynccontextmanager
async def opened(hooks: Hooks) -> AsyncIterator[Desk]:
    rows(hooks.dsn, "CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL)")
    api = FastAPI()
    install(api, hooks.db, body_bytes=400_000, body_seconds=1.0)
    api.state.settings = hooks.settings
    router = Router()
    desk: Desk
    standard = Receiver("payments", body_bytes=4_096)
    plain = Receiver("parcels", scheme=Scheme.plain(prefix="sha256="), event_id="data.id", secrets=[SecretStr(CODED)])
    stamped = Receiver(
        "stamped", scheme=Scheme.plain(timestamp_header="X-Timestamp"), event_id="data.id", secrets=[SecretStr(CODED)]
    )
    hashed = Receiver("hashed", scheme=Scheme.plain(), event_id="data.id", secrets=[SecretStr(CODED)], keeps_ids=False)

    async def act(received: Received, tx: RequestTx) -> dict[str, str]:
        await tx.execute(text("INSERT INTO effects (key) VALUES (:key)"), {"key": received.event_id})
        desk.entered.set()
        if desk.fail:
            await desk.gate.wait()
            raise RuntimeError("as planned")
        if received.event_id == "slow":
            await desk.gate.wait()
        return {"status": "done", "event": received.event_id}

    @router.post("/standard", openapi_extra={"x-idempotent": False})
    async def take_standard(received: Annotated[Received, Depends(standard)], tx: RequestTx) -> dict[str, str]:
        return await act(received, tx)

    @router.post("/plain", openapi_extra={"x-idempotent": False})
    async def take_plain(received: Annotated[Received, Depends(plain)], tx: RequestTx) -> dict[str, str]:
        return await act(received, tx)

    @router.post("/stamped", openapi_extra={"x-idempotent": False})
    async def take_stamped(received: Annotated[Received, Depends(stamped)], tx: RequestTx) -> dict[str, str]:
        return await act(received, tx)

    @router.post("/hashed", openapi_extra={"x-idempotent": False})
    async def take_hashed(received: Annotated[Received, Depends(hashed)], tx: RequestTx) -> dict[str, str]:
        return await act(received, tx)

    api.include_router(router)
    async with served(api) as client:
        desk = Desk(client, hooks, api)
        yield desk


async def add_secret(db: Database, hooks: Hooks, secret: str, **options: Any) -> None:
    async with db.transaction() as tx:
        await add_provider_secret(tx, hooks.keyring, "payments", secret=secret, actor="test", **options)


@pytest.fixture
async def desk(hooks: Hooks, clock: BusinessClock) -> AsyncIterator[Desk]:
    clock.freeze(START)
    await add_secret(hooks.db, hooks, SECRET)
    async with opened(hooks) as made:
        yield made


async def test_a_signed_webhook_takes_effect_and_its_replay_is_200_and_nothing_more(desk: Desk) -> None:
    """E6.3, in and after the window."""
    first = await desk.standard()
    assert (first.status_code, first.json()) == (200, {"status": "done", "event": "evt-1"})
    again = await desk.standard()
    assert (again.status_code, again.json()) == (200, {"status": "duplicate"})
    later = await desk.standard(at=NOW + 200)  # the provider signs its retry anew
    assert later.json() == {"status": "duplicate"}
    assert desk.effects() == ["evt-1"]


async def test_a_replay_after_the_window_is_refused(desk: Desk, clock: BusinessClock) -> None:
    await desk.standard()
    clock.advance(seconds=301)
    assert (await desk.standard()).status_code == 401
    assert desk.effects() == ["evt-1"]


@pytest.mark.parametrize(
    ("name", "headers", "body", "reason"),
    [
        ("wrong", standard_headers(BODY, secret=OLDER), BODY, "wrong_signature"),
        ("missing", without("webhook-signature"), BODY, "no_signature"),
        ("empty", standard_headers(BODY) | {"webhook-signature": ""}, BODY, "no_signature"),
        ("garbage", standard_headers(BODY, signature="v1,%%%"), BODY, "wrong_signature"),
        ("another version", standard_headers(BODY, signature="v2,AAAA"), BODY, "wrong_signature"),
        ("re-serialised", standard_headers(BODY), json.dumps(json.loads(BODY), separators=(",", ":")).encode(),
         "wrong_signature"),
        ("one byte", standard_headers(BODY), BODY.replace(b"10.00", b"90.00"), "wrong_signature"),
        ("empty body", standard_headers(BODY), b"", "wrong_signature"),
        ("another id", standard_headers(BODY) | {"webhook-id": "evt-2"}, BODY, "wrong_signature"),
        ("no id", without("webhook-id"), BODY, "no_id"),
        ("another time", standard_headers(BODY) | {"webhook-timestamp": str(NOW + 1)}, BODY, "wrong_signature"),
        ("no time", without("webhook-timestamp"), BODY, "no_timestamp"),
        ("time in words", standard_headers(BODY) | {"webhook-timestamp": "now"}, BODY, "no_timestamp"),
        ("old", standard_headers(BODY, at=NOW - 301), BODY, "old_timestamp"),
        ("of the future", standard_headers(BODY, at=NOW + 301), BODY, "future_timestamp"),
        ("of the far future", standard_headers(BODY, at=10**11), BODY, "future_timestamp"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
async def test_what_is_not_signed_right_is_401_with_a_forensic_line(
    desk: Desk, name: str, headers: dict[str, str], body: bytes, reason: str
) -> None:
    with capture_logs() as logs:
        answer = await desk.client.post("/standard", content=body, headers=headers)
    assert answer.status_code == 401, name
    assert answer.headers["content-type"] == "application/problem+json"
    (line,) = [entry for entry in logs if entry["event"] == "webhook_refused"]
    assert (line["provider"], line["reason"], line["remote_address"]) == ("payments", reason, "127.0.0.1")
    assert (line["body_sha256"], line["body_bytes"]) == (hashlib.sha256(body).hexdigest(), len(body))
    assert reason not in answer.text
    said = json.dumps(logs, default=str)
    assert "evt-1" not in said
    assert headers.get("webhook-signature", "none") == "" or headers.get("webhook-signature", "none") not in said
    assert desk.effects() == []
    assert value(desk.hooks.dsn, "SELECT count(*) FROM duly.received_webhooks") == 0


async def test_a_timestamp_at_the_edge_is_taken(desk: Desk) -> None:
    assert (await desk.standard(at=NOW - 300)).status_code == 200
    assert (await desk.standard(at=NOW + 300, id="evt-2")).status_code == 200


async def test_a_rotated_secret_is_valid_for_its_overlap_and_no_longer(desk: Desk, clock: BusinessClock) -> None:
    newer = "whsec_" + base64.b64encode(b"n" * 32).decode()
    await add_secret(desk.hooks.db, desk.hooks, newer, overlap_hours=1)
    assert (await desk.standard(id="a")).status_code == 200
    assert (await desk.standard(id="b", secret=newer)).status_code == 200
    clock.advance(minutes=59)
    assert (await desk.standard(id="e", at=NOW + 3540)).status_code == 200
    clock.advance(minutes=1)
    assert (await desk.standard(id="c", at=NOW + 3600)).status_code == 401
    assert (await desk.standard(id="d", secret=newer, at=NOW + 3600)).status_code == 200


async def test_a_third_secret_of_a_provider_ends_the_first(desk: Desk) -> None:
    """Two are valid at most: one that was stolen is gone after two rotations, whatever the overlap."""
    newer, newest = ("whsec_" + base64.b64encode(letter * 32).decode() for letter in (b"n", b"o"))
    await add_secret(desk.hooks.db, desk.hooks, newer, overlap_hours=24)
    await add_secret(desk.hooks.db, desk.hooks, newest, overlap_hours=24)
    assert (await desk.standard(id="a")).status_code == 401
    assert (await desk.standard(id="b", secret=newer)).status_code == 200
    assert (await desk.standard(id="c", secret=newest)).status_code == 200
    valid = "SELECT number FROM duly.webhook_provider_secrets WHERE expires_at IS NULL OR expires_at > duly.now()"
    assert sorted(rows(desk.hooks.dsn, valid)) == [(2,), (3,)]


async def test_a_made_secret_of_a_provider_is_returned_once_and_a_given_one_is_not(hooks: Hooks) -> None:
    async with hooks.db.transaction() as tx:
        assert await add_provider_secret(tx, hooks.keyring, "parcels", secret=SECRET, actor="test") is None
        made = await add_provider_secret(tx, hooks.keyring, "parcels", actor="test")
    assert made is not None
    assert made.startswith("whsec_")


async def test_a_provider_without_a_secret_is_refused(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with opened(hooks) as desk:
        for secret in (SECRET, "whsec_"):
            assert (await desk.standard(secret=secret)).status_code == 401


async def test_two_at_once_take_effect_once(desk: Desk) -> None:
    """The second waits for the first, and answers that it was here before."""
    first = asyncio.create_task(desk.standard(id="slow"))
    await desk.entered.wait()
    second = asyncio.create_task(desk.standard(id="slow"))
    await _until_blocked(desk.hooks)
    assert not second.done()
    desk.gate.set()
    assert (await first).json()["status"] == "done"
    assert (await second).json() == {"status": "duplicate"}
    assert desk.effects() == ["slow"]


async def test_when_the_first_fails_the_second_takes_effect(desk: Desk) -> None:
    desk.fail = True
    first = asyncio.create_task(desk.standard(id="e"))
    await desk.entered.wait()
    second = asyncio.create_task(desk.standard(id="e"))
    await _until_blocked(desk.hooks)
    desk.fail = False
    desk.gate.set()
    assert (await first).status_code == 500
    assert (await second).json()["status"] == "done"
    assert desk.effects() == ["e"]


async def test_a_webhook_whose_effect_fails_may_come_again(desk: Desk) -> None:
    """E6.3: the id and the effect are one transaction, so that neither is there without the other."""
    desk.gate.set()
    desk.fail = True
    assert (await desk.standard()).status_code == 500
    assert value(desk.hooks.dsn, "SELECT count(*) FROM duly.received_webhooks") == 0
    desk.fail = False
    assert (await desk.standard()).json()["status"] == "done"
    assert desk.effects() == ["evt-1"]


async def _until_blocked(hooks: Hooks) -> None:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(10):
        while not value(hooks.dsn, waiting):
            await asyncio.sleep(0.01)


async def test_fifty_at_once_take_effect_once(desk: Desk) -> None:
    answers = await asyncio.gather(*(desk.standard(id="many") for _ in range(50)))
    assert sorted(answer.json()["status"] for answer in answers) == ["done"] + ["duplicate"] * 49
    assert desk.effects() == ["many"]


async def test_a_body_of_a_hundred_megabytes_is_refused_without_being_read(desk: Desk) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1_600):
            yield b"x" * 65_536

    headers = standard_headers(b"") | {"Content-Length": str(1_600 * 65_536)}
    with contextlib.suppress(httpx2.TransportError):
        answer = await desk.client.post("/standard", content=chunks(), headers=headers)
        assert answer.status_code == 413
    with contextlib.suppress(httpx2.TransportError):
        answer = await desk.client.post("/standard", content=chunks(), headers=standard_headers(b""))
        assert answer.status_code == 413
    assert desk.effects() == []


async def test_a_body_larger_than_the_receivers_limit_is_413_with_a_forensic_line(desk: Desk) -> None:
    body = b"{" + b" " * 5_000 + b"}"
    refused = WEBHOOKS_REFUSED.labels("payments")._value.get()
    with capture_logs() as logs:
        assert (await desk.standard(body)).status_code == 413
    (line,) = [entry for entry in logs if entry["event"] == "webhook_refused"]
    assert (line["reason"], line["body_bytes"]) == ("too_large", len(body))
    assert WEBHOOKS_REFUSED.labels("payments")._value.get() == refused + 1


async def test_a_body_as_large_as_the_receivers_limit_is_taken(desk: Desk) -> None:
    assert (await desk.standard(b" " * 4_096)).status_code == 200


async def test_a_receiver_that_keeps_no_ids_knows_an_event_by_its_hash(desk: Desk) -> None:
    """A provider may write a name into an id: it is in no table, and a replay is found all the same."""
    right = {"X-Signature": hexed(CODED, BODY)}
    answers = [(await desk.plain(right, path="/hashed")).json()["status"] for _ in range(2)]
    assert answers == ["done", "duplicate"]
    kept = rows(desk.hooks.dsn, "SELECT provider_event_id FROM duly.received_webhooks")
    assert kept == [(hashlib.sha256(b"evt-1").hexdigest(),)]


async def test_a_caller_that_is_no_address_is_not_in_the_log(desk: Desk) -> None:
    """Behind a proxy the caller is what a header says."""
    transport = httpx2.ASGITransport(desk.api, client=("evil\nline", 1))
    async with httpx2.AsyncClient(transport=transport, base_url="http://proxied") as proxied:
        with capture_logs() as logs:
            assert (await proxied.post("/standard", content=BODY)).status_code == 401
    (line,) = [entry for entry in logs if entry["event"] == "webhook_refused"]
    assert line["remote_address"] is None


async def test_a_slow_body_is_408(desk: Desk) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", desk.client.base_url.port)
    lines = [f"{name}: {value}" for name, value in standard_headers(b"{}").items()]
    head = "\r\n".join(["POST /standard HTTP/1.1", "Host: x", "Content-Length: 2", *lines, "", "{"])
    writer.write(head.encode())
    async with asyncio.timeout(10):
        assert (await reader.readline()).split()[1] == b"408"
    writer.close()
    assert desk.effects() == []


async def test_plain_signatures_over_the_body_and_over_timestamp_and_body(desk: Desk) -> None:
    right = {"X-Signature": "sha256=" + hexed(CODED, BODY)}
    assert (await desk.plain(right)).json() == {"status": "done", "event": "evt-1"}
    assert (await desk.plain(right)).json() == {"status": "duplicate"}
    assert (await desk.plain({"X-Signature": hexed(CODED, BODY)})).status_code == 401
    assert (await desk.plain({"X-Signature": "sha256=" + hexed(SECRET, BODY)})).status_code == 401
    assert (await desk.plain(right, BODY + b" ")).status_code == 401
    stamped = {"X-Timestamp": str(NOW), "X-Signature": hexed(CODED, f"{NOW}.".encode() + BODY)}
    assert (await desk.plain(stamped, path="/stamped")).json()["status"] == "done"
    old = {"X-Timestamp": str(NOW - 301), "X-Signature": hexed(CODED, f"{NOW - 301}.".encode() + BODY)}
    assert (await desk.plain(old, path="/stamped")).status_code == 401
    unsigned_time = {"X-Timestamp": str(NOW), "X-Signature": hexed(CODED, BODY)}
    assert (await desk.plain(unsigned_time, path="/stamped")).status_code == 401


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"data":{}}',
        b'{"data":{"id":null}}',
        b'{"data":{"id":""}}',
        b"\xff",
        b"{",
        b'{"data":{"id":true}}',
        b'{"data":{"id":1.5}}',
        b'{"data":{"id":["evt-1"]}}',
    ],
)
async def test_a_signed_body_that_names_no_event_is_400(desk: Desk, body: bytes) -> None:
    answer = await desk.plain({"X-Signature": "sha256=" + hexed(CODED, body)}, body)
    assert answer.status_code == 400
    assert desk.effects() == []


@pytest.mark.parametrize("id", ["x" * 256, "nul\x00"])
async def test_an_event_id_that_cannot_be_stored_is_refused(desk: Desk, id: str) -> None:
    body = json.dumps({"data": {"id": id}}).encode()
    answer = await desk.plain({"X-Signature": "sha256=" + hexed(CODED, body)}, body)
    assert answer.status_code in (400, 422)


async def test_the_same_event_id_of_two_providers_is_two_events(desk: Desk) -> None:
    assert (await desk.standard()).json()["status"] == "done"
    assert (await desk.plain({"X-Signature": "sha256=" + hexed(CODED, BODY)})).json()["status"] == "done"


def test_a_receiver_says_where_the_event_id_is() -> None:
    with pytest.raises(Invalid, match="event id"):
        Receiver("parcels", scheme=Scheme.plain())
    with pytest.raises(Invalid, match="name"):
        Receiver("no good")


async def test_the_secret_of_a_provider_is_in_no_table_in_clear(desk: Desk) -> None:
    sealed = bytes(value(desk.hooks.dsn, "SELECT sealed FROM duly.webhook_provider_secrets"))
    assert SECRET.encode() not in sealed
    assert b"p" * 32 not in sealed


async def test_a_secret_of_one_provider_is_not_anothers(desk: Desk) -> None:
    """E6.4: whoever can write the table cannot make one provider speak for another."""
    rows(desk.hooks.dsn, "UPDATE duly.webhook_provider_secrets SET provider = 'stamped'")
    async with desk.hooks.db.transaction() as tx:
        with pytest.raises(Refused, match="cannot be decrypted"):
            await read_secrets(tx, "stamped", desk.hooks.keyring)


async def test_a_replay_is_known_for_as_long_as_webhooks_are_kept(desk: Desk, clock: BusinessClock) -> None:
    """E6.3: a signature without a time is good for ever, so the id has to be remembered."""
    right = {"X-Signature": "sha256=" + hexed(CODED, BODY)}
    assert (await desk.plain(right)).json()["status"] == "done"
    clock.advance(days=30)
    rows(desk.hooks.dsn, "SELECT duly.schedule('duly.forget-webhooks')")
    await desk.hooks.drain()
    assert (await desk.plain(right)).json()["status"] == "duplicate"
    clock.advance(seconds=1)
    rows(desk.hooks.dsn, "SELECT duly.schedule('duly.forget-webhooks')")
    await desk.hooks.drain()
    assert value(desk.hooks.dsn, "SELECT count(*) FROM duly.received_webhooks") == 0


async def test_a_refusal_without_headers_costs_no_connection(desk: Desk) -> None:
    """Noise is answered before the database is asked."""
    taken = desk.hooks.db.engine.pool.checkedin() + desk.hooks.db.engine.pool.checkedout()  # type: ignore[attr-defined]  # of a queue pool
    answer = await desk.client.post("/standard", content=BODY)
    assert answer.status_code == 401
    assert desk.hooks.db.engine.pool.checkedin() + desk.hooks.db.engine.pool.checkedout() == taken  # type: ignore[attr-defined]  # of a queue pool
