"""Users who own, offer and accept, over real HTTP; and what must be true of the database whatever they did."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID, uuid4

import httpx2
import psycopg
from sqlalchemy import event

from duly.db import Database
from tests.apps.conftest import Api
from tests.support import rows, value

EXPIRE = "/internal/v1/transfers/expire-pending"

# Each of these lists what is wrong; all of them are empty in a database that nobody can complain about.
INVARIANTS = {
    "a request is paused without a pending transfer": """
        SELECT r.id FROM transfers.service_requests r WHERE r.status = 'Paused' AND NOT EXISTS (
            SELECT 1 FROM transfers.transfers t WHERE t.product_id = r.product_id AND t.status = 'Pending')""",
    "a request goes on while a transfer is pending": """
        SELECT r.id FROM transfers.service_requests r WHERE r.status = 'InProgress' AND EXISTS (
            SELECT 1 FROM transfers.transfers t WHERE t.product_id = r.product_id AND t.status = 'Pending')""",
    "an owner is not who accepted last": """
        SELECT p.id FROM transfers.products p
        CROSS JOIN LATERAL (SELECT t.to_user_id FROM transfers.transfers t
                            WHERE t.product_id = p.id AND t.status = 'Accepted'
                            ORDER BY t.updated_at DESC, t.id DESC LIMIT 1) AS last
        WHERE p.owner_id <> last.to_user_id""",
    "a transfer has other events than one start and its end": """
        SELECT t.id, t.status, e.types FROM transfers.transfers t
        CROSS JOIN LATERAL (SELECT array_agg(l.type ORDER BY l.type) AS types FROM duly.event_log l
                            WHERE l.aggregate_id = t.product_id::text AND l.payload->>'transfer_id' = t.id::text) AS e
        WHERE e.types IS DISTINCT FROM ARRAY(
            SELECT 'OwnershipTransfer' || kind FROM unnest(ARRAY[nullif(t.status, 'Pending'), 'Started']) AS kind
            WHERE kind IS NOT NULL ORDER BY 1)""",
}


class Users:
    """Calls of the API in somebody's name."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._headers: dict[tuple[str, str], dict[str, str]] = {}

    def headers(self, user: str, scope: str = "transfers") -> dict[str, str]:
        """Signed once for each user."""
        if (user, scope) not in self._headers:
            self._headers[user, scope] = self.api.headers(user, scope)
        return self._headers[user, scope]

    async def get(self, user: str, path: str) -> httpx2.Response:
        return await self.api.client.get(path, headers=self.headers(user))

    async def post(self, user: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return await self.api.client.post(path, json=body, headers=self.headers(user) | headers)

    async def register(self, owner: str = "alice", name: str = "Lathe") -> str:
        """A product's id."""
        return str(made(await self.post(owner, "/v1/products", {"name": name}))["id"])

    async def offer(self, product: str, owner: str = "alice", to: str = "bob") -> str:
        """A transfer's id."""
        return str(made(await self.post(owner, f"/v1/products/{product}/transfers", {"toUserId": to}))["id"])

    async def request(self, product: str, owner: str = "alice", description: str = "Oil it") -> str:
        """A service request's id."""
        path = f"/v1/products/{product}/service-requests"
        return str(made(await self.post(owner, path, {"description": description}))["id"])

    async def end(self, user: str, transfer: str, how: str) -> httpx2.Response:
        """Accept, reject or cancel."""
        return await self.post(user, f"/v1/transfers/{transfer}/{how}")

    async def sweep(self, **headers: str) -> httpx2.Response:
        """What the hourly task asks for."""
        right = self.headers("service-account-transfers-worker", "internal:transfers.expire")
        return await self.api.client.post(EXPIRE, json={}, headers=right | headers)

    async def expire(self) -> int:
        """The same, when it works."""
        answer = await self.sweep()
        assert answer.status_code == 200, answer.text
        return int(answer.json()["expiredCount"])


def made(answer: httpx2.Response) -> dict[str, Any]:
    """The body of a 201."""
    assert answer.status_code == 201, answer.text
    body: dict[str, Any] = answer.json()
    return body


def check_consistent(dsn: str) -> None:
    """T1, T2, T3: ownership, requests and events agree with the transfers."""
    wrong = {rule: found for rule, query in INVARIANTS.items() if (found := rows(dsn, query))}
    assert not wrong, wrong


def status_of(dsn: str, transfer: str) -> str:
    return str(value(dsn, "SELECT status FROM transfers.transfers WHERE id = %(id)s", {"id": transfer}))


def owner_of(dsn: str, product: str) -> str:
    return str(value(dsn, "SELECT owner_id FROM transfers.products WHERE id = %(id)s", {"id": product}))


def requests_of(dsn: str, product: str) -> list[str]:
    found = rows(
        dsn, "SELECT status FROM transfers.service_requests WHERE product_id = %(id)s ORDER BY id", {"id": product}
    )
    return [status for (status,) in found]


def events_of(dsn: str, product: str) -> list[str]:
    """The types of a product's events, in their order."""
    query = "SELECT type FROM duly.event_log WHERE aggregate_id = %(id)s AND topic = 'product-events' ORDER BY seq"
    return [kind for (kind,) in rows(dsn, query, {"id": product})]


def fill(dsn: str, count: int, *, hours: float = 73, requests: int = 1) -> list[UUID]:
    """Products with a pending transfer that was started so long ago, and with requests that are paused."""
    return [
        product
        for (product,) in rows(
            dsn,
            """
            WITH made AS (
                INSERT INTO transfers.products
                SELECT duly.uuid7(), 'p' || n, 'alice', duly.now() - make_interval(secs => %(seconds)s)
                FROM generate_series(1, %(count)s) AS n RETURNING id, created_at
            ), offered AS (
                INSERT INTO transfers.transfers (id, product_id, from_user_id, to_user_id, created_at, updated_at)
                SELECT duly.uuid7(), id, 'alice', 'bob', created_at, created_at FROM made
                RETURNING id, product_id
            ), told AS (
                SELECT duly.emit('OwnershipTransferStarted', 'product-events', product_id::text,
                    jsonb_build_object('product_id', product_id, 'transfer_id', id)) FROM offered
            ), asked AS (
                INSERT INTO transfers.service_requests
                SELECT duly.uuid7(), id, 'alice', 'Oil it', 'Paused', created_at, created_at
                FROM made CROSS JOIN generate_series(1, %(requests)s)
            )
            SELECT product_id FROM offered CROSS JOIN (SELECT count(*) FROM told) AS all_of_them
            """,
            {"count": count, "seconds": hours * 3600, "requests": requests},
        )
    ]


@contextlib.contextmanager
def holding(dsn: str, *products: UUID | str) -> Iterator[psycopg.Connection[Any]]:
    """Products that somebody else has locked; the lock ends with the block, or with a rollback."""
    with psycopg.connect(dsn) as rival:
        rival.execute(
            "SELECT 1 FROM transfers.products WHERE id = ANY(%s::uuid[]) ORDER BY id FOR NO KEY UPDATE",
            [[str(product) for product in products]],
        )
        yield rival
        rival.rollback()


async def until_waiting(dsn: str, count: int, *, seconds: float = 20) -> None:
    """Wait until so many sessions wait for a lock."""
    query = """
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()"""
    async with asyncio.timeout(seconds):
        while value(dsn, query) < count:
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def counting(db: Database) -> AsyncIterator[list[str]]:
    """The statements that are sent through a Database while the block runs."""
    sent: list[str] = []

    def note(*given: Any) -> None:
        sent.append(" ".join(str(given[2]).split())[:70])

    event.listen(db.engine.sync_engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(db.engine.sync_engine, "before_cursor_execute", note)


def new_key() -> str:
    return str(uuid4())
