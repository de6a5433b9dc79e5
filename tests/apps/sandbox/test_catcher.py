"""The sandbox's webhook: catches, counts, misbehaves on demand, and is not there in production (B4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from fastapi import FastAPI

from apps.birthdays.gateways import SANDBOX_PATH
from apps.sandbox.catcher import MOST_BYTES, MOST_KEPT, PATH, create_router
from apps.wiring import app
from duly.clock import monotonic
from duly.db import Database
from duly.http.api import create_api
from duly.settings import Settings
from duly.testing import BusinessClock, drain
from tests.apps.birthdays.acting import NINE_IN_WARSAW, claim, events_of, register
from tests.apps.conftest import Api
from tests.engine.http.serving import served
from tests.support import rows


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """A catcher of its own."""
    api = FastAPI()
    api.include_router(create_router())
    async with served(api) as made:
        yield made


async def send(client: httpx2.AsyncClient, key: str, message: str = "Happy birthday, Ada Lovelace!") -> int:
    answer = await client.post(PATH, json={"message": message}, headers={"X-Idempotency-Key": key})
    return answer.status_code


async def shown(client: httpx2.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(PATH)).json()
    return found


async def test_it_shows_what_arrived_and_how_often(client: httpx2.AsyncClient) -> None:
    assert [await send(client, key) for key in ("a", "b", "a")] == [202, 202, 202]
    found = await shown(client)
    assert found["total"] == 3
    assert [(item["key"], item["count"], item["statuses"]) for item in found["items"]] == [
        ("a", 2, [202, 202]), ("b", 1, [202])
    ]  # fmt: skip
    assert (await client.delete(PATH)).status_code == 204
    assert await shown(client) == {"total": 0, "items": []}


async def test_it_fails_stalls_and_refuses_when_it_is_told_to(client: httpx2.AsyncClient) -> None:
    for mode, status in (("fail", 503), ("refuse", 410), ("accept", 202)):
        assert (await client.put(f"{PATH}/mode", json={"mode": mode})).status_code == 204
        assert await send(client, mode) == status
    await client.put(f"{PATH}/mode", json={"mode": "fail", "count": 2})
    assert [await send(client, "x") for _ in range(3)] == [503, 503, 202]
    await client.put(f"{PATH}/mode", json={"mode": "stall", "seconds": 0.2})
    began = monotonic()
    assert await send(client, "y") == 202
    assert monotonic() - began >= 0.2


@pytest.mark.parametrize(("name", "status"), [("Fail", 503), ("Refuse", 410), ("Failure", 202), ("Lovelace", 202)])
async def test_some_names_are_answered_in_their_own_way(client: httpx2.AsyncClient, name: str, status: int) -> None:
    assert await send(client, "k", f"Happy birthday, Any {name}!") == status
    assert await send(client, "k", f"Happy birthday, Any {name}! Sorry to be 2 hours late.") == status


@pytest.mark.parametrize(
    ("content", "key", "status"),
    [
        (b"{", "k", 400), (b"{}", "", 400), (b"{}", "k" * 256, 413), (b"[" * 5_000, "k", 400),
        (b'"' + b"x" * MOST_BYTES + b'"', "k", 413), (b"\xff\xfe", "k", 400),
        (b'{"a": NaN}', "k", 400), (b"1e999", "k", 400), (b'"\\ud800"', "k", 400), (b"[" * 900 + b"]" * 900, "k", 400),
    ],
)  # fmt: skip
async def test_what_is_no_message_is_refused(client: httpx2.AsyncClient, content: bytes, key: str, status: int) -> None:
    answer = await client.post(PATH, content=content, headers={"X-Idempotency-Key": key})
    assert answer.status_code == status
    assert await shown(client) == {"total": 0, "items": []}, "nor is it shown"


async def test_it_keeps_a_thousand(client: httpx2.AsyncClient) -> None:
    """A limit on everything."""
    for number in range(MOST_KEPT + 5):
        await send(client, str(number))
    found = (await client.get(f"{PATH}?limit=100000")).json()
    assert (found["total"], len(found["items"])) == (MOST_KEPT + 5, MOST_KEPT)
    assert found["items"][-1]["key"] == "5"


@pytest.mark.parametrize("orders", [{}, {"mode": "x"}, {"mode": "fail", "count": 0}, {"mode": "stall", "seconds": 1e9}])
async def test_orders_that_make_no_sense_are_refused(client: httpx2.AsyncClient, orders: dict[str, Any]) -> None:
    assert (await client.put(f"{PATH}/mode", json=orders)).status_code == 422


async def test_in_development_messages_go_to_it_unless_told_otherwise(
    api: Api, db: Database, dsn: str, clock: BusinessClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4: through the address that the API left in its data directory; whose name says so is refused."""
    assert SANDBOX_PATH == PATH
    monkeypatch.delenv("BIRTHDAYS_WEBHOOK_URL", raising=False)
    monkeypatch.setenv("DULY_DATA", str(tmp_path))
    clock.freeze(NINE_IN_WARSAW.replace(month=5))
    await api.client.delete(PATH)
    user_id, event_id = await register(db)
    refused, _ = await register(db, name="Any")
    rows(dsn, "UPDATE birthdays.people SET last_name = 'Refuse' WHERE first_name = 'Any'")
    clock.freeze(NINE_IN_WARSAW)
    await claim(db, dsn)
    await drain(db, app.handlers)
    caught = {item["body"]["userId"]: item for item in (await api.client.get(PATH)).json()["items"]}
    assert caught[str(user_id)]["key"] == str(event_id)
    assert caught[str(refused)]["statuses"] == [410]
    assert (events_of(dsn, user_id)[0][1], events_of(dsn, refused)[0][1]) == ("COMPLETED", "FAILED")


@pytest.mark.parametrize(("env", "status"), [("development", 200), ("production", 404)])
async def test_it_is_served_in_development_only(db: Database, env: Any, status: int) -> None:
    """A router that is included with development_only is not there otherwise."""
    async with served(create_api(db, [], Settings(env=env), app)) as client:
        assert (await client.get(PATH)).status_code == status
        assert PATH not in (await client.get("/openapi.json")).json()["paths"]
