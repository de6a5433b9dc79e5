"""E5.5: a body has a size and a time; whoever exceeds them gets an answer and costs nothing more."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, FastAPI, Request
from sqlalchemy import text

from duly.db import Database
from duly.http import Router
from duly.http.api import create_api
from duly.http.install import install
from duly.http.transactions import RequestTx
from duly.runtime.supervisor import create_server
from duly.settings import Settings
from duly.telemetry import HTTP_REQUESTS
from tests.engine.cli.sample import app
from tests.engine.http.serving import listen, served
from tests.engine.idempotency.shop import create_shop, effects, make_tables
from tests.support import rows

Client = httpx2.AsyncClient
LIMIT = 2_000
SECONDS = 1.0
read_by_route: list[int] = []

router = Router(prefix="/limits")
plain = APIRouter(prefix="/plain")


@router.post("/body")
async def keep(request: Request) -> int:
    """A route of ours has its body read for it."""
    read_by_route.append(len(await request.body()))
    return read_by_route[-1]


@plain.post("/body")
async def take(request: Request) -> int:
    """A route of anybody's reads by itself, piece by piece."""
    total = 0
    async for piece in request.stream():
        total += len(piece)
    read_by_route.append(total)
    return total


@plain.post("/unread")
async def leave_unread() -> str:
    return "not interested"


@pytest.fixture
async def shop(db: Database, dsn: str) -> AsyncIterator[Client]:
    make_tables(dsn)
    async with _served(db, body_bytes=LIMIT) as client:
        yield client


@pytest.fixture
async def hasty(db: Database, dsn: str) -> AsyncIterator[Client]:
    """A server that gives a body one second; a busy machine may take longer for an honest one."""
    make_tables(dsn)
    async with _served(db, body_bytes=LIMIT, body_seconds=SECONDS) as client:
        yield client


@asynccontextmanager
async def _served(db: Database, **limits: Any) -> AsyncIterator[Client]:
    read_by_route.clear()
    api = create_shop(db, router, **limits)
    api.include_router(plain)
    async with served(api) as client:
        yield client


class Raw:
    """A client that says what it is told to, and reads what comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return int(first.split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def is_closed(self) -> bool:
        """Whether the server hangs up at once, rather than wait for more."""
        return await asyncio.wait_for(self.reader.read(), 2) == b""


@asynccontextmanager
async def raw(client: Client) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def counted_timeouts() -> float:
    return float(HTTP_REQUESTS.labels("POST", "/limits/body", "408")._value.get())


either_route = pytest.mark.parametrize("path", ["/limits/body", "/plain/body"])


@either_route
async def test_a_body_of_exactly_the_limit_is_read(shop: Client, path: str) -> None:
    assert (await shop.post(path, content=b"x" * LIMIT)).json() == LIMIT

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(LIMIT // 100):
            yield b"x" * 100

    assert (await shop.post(path, content=pieces())).json() == LIMIT


@either_route
async def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_read(shop: Client, path: str) -> None:
    """413, without a byte of it, and without the 100 that asks for it."""
    async with raw(shop) as client:
        await client.send(head(path, f"Content-Length: {LIMIT + 1}", "Expect: 100-continue"))
        status, headers, body = await client.answer()
    assert (status, headers["content-type"]) == (413, "application/problem+json")
    assert b"urn:duly:problem:too-large" in body
    assert headers["x-correlation-id"]
    assert read_by_route == []


@either_route
@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "k"}], ids=["no key", "key"])
async def test_a_body_in_pieces_that_grows_too_large_is_413(shop: Client, path: str, key: dict[str, str]) -> None:
    """It does not say its length, so it is counted."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(LIMIT // 100 + 1):
            yield b"x" * 100

    answer = await shop.post(path, content=pieces(), headers=key)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:duly:problem:too-large")
    assert read_by_route == []


async def test_a_json_body_that_is_too_large_is_413_not_400(shop: Client, dsn: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"sku": "'
        for _ in range(LIMIT // 100 + 1):
            yield b"x" * 100

    answer = await shop.post("/orders", content=pieces(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["title"]) == (413, "There are more bytes than are allowed")
    assert effects(dsn) == (0, 0, 0)


@either_route
@pytest.mark.parametrize("how", ["a length", "pieces"])
async def test_a_body_that_does_not_arrive_in_time_is_408_and_the_connection_ends(
    hasty: Client, path: str, how: str
) -> None:
    """Slow, or a length that promises more than comes: other requests do not wait for it."""
    started = ["Content-Length: 100"] if how == "a length" else ["Transfer-Encoding: chunked"]
    async with raw(hasty) as client:
        await client.send(head(path, *started), b"5\r\nhello\r\n")
        assert (await hasty.post(path, content=b"another")).status_code == 200
        status, _, body = await client.answer()
        assert (status, b"urn:duly:problem:request-timeout" in body) == (408, True)
        assert await client.is_closed()
    assert read_by_route == [7]


async def test_a_body_that_drips_for_ever_is_408_too(hasty: Client) -> None:
    """The limit is for the whole body: each byte in time does not help, and the connection ends under the dripping."""
    before = counted_timeouts()
    async with raw(hasty) as client:
        await client.send(head("/limits/body", "Content-Length: 1000"))
        dripped = 0
        with contextlib.suppress(ConnectionError):
            while not client.reader.at_eof():
                await client.send(b"x")
                dripped += 1
                await asyncio.sleep(SECONDS / 10)
        assert 5 <= dripped < 100
    assert counted_timeouts() == before + 1


@either_route
async def test_a_client_that_leaves_in_the_middle_harms_nobody(shop: Client, path: str, dsn: str) -> None:
    async with raw(shop) as client:
        await client.send(head(path, "Content-Length: 100"), b"half")
    assert (await shop.post(path, content=b"next")).json() == 4
    assert read_by_route == [4]


async def test_more_than_the_length_that_was_said_is_not_part_of_the_body(shop: Client) -> None:
    """What comes after it is the next request, or nonsense: 400, and the connection ends."""
    async with raw(shop) as client:
        await client.send(head("/limits/body", "Content-Length: 4"), b"bodyand more that is no request\r\n\r\n")
        status, _, body = await client.answer()
        assert (status, body) == (200, b"4")
        assert b" 400 " in await asyncio.wait_for(client.reader.readline(), 10)


@pytest.mark.parametrize("length", ["-1", "1e3", "x", "9" * 30, "1, 2", "+5", "0x10"])
async def test_a_length_that_is_no_number_is_400_or_413(shop: Client, length: str) -> None:
    async with raw(shop) as client:
        await client.send(head("/limits/body", f"Content-Length: {length}"))
        line = await asyncio.wait_for(client.reader.readline(), 10)
        assert int(line.split()[1]) in {400, 413}
    assert read_by_route == []


async def test_a_refused_body_leaves_the_server_as_it_was(shop: Client, dsn: str) -> None:
    """A hundred large ones, one after the other and at once, cost no memory that stays, and the next one is served."""
    large = b"x" * 1_000_000
    tracemalloc.start()
    try:
        answers = await asyncio.gather(*(shop.post("/limits/body", content=large) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {413}
        assert tracemalloc.get_traced_memory()[0] < 20_000_000
    finally:
        tracemalloc.stop()
    assert (await shop.post("/limits/body", content=b"small")).json() == 5


async def test_a_route_that_does_not_read_its_body_answers_and_keeps_the_connection_usable(shop: Client) -> None:
    for _ in range(3):
        assert (await shop.post("/plain/unread", content=b"x" * LIMIT)).status_code == 200


async def test_the_size_is_a_setting(db: Database) -> None:
    """E5.5: DULY_BODY_BYTES."""

    async def ask(client: Client, size: int) -> Any:
        return (await client.post("/sample", content=b"x" * size)).status_code

    async with served(create_api(db, [], Settings(body_bytes=5_000), app)) as client:
        assert [await ask(client, size) for size in (5_000, 5_001)] == [405, 413]
    async with served(create_api(db, [], Settings(), app)) as client:
        assert [await ask(client, size) for size in (1_048_576, 1_048_577)] == [405, 413]


async def test_a_request_that_a_shutdown_cuts_off_is_503_and_leaves_nothing(dsn: str) -> None:
    """E5.5: its grace is over; the client is told to try again, and another process will serve it."""
    db = Database(dsn)
    asked = asyncio.Event()
    router = Router()

    @router.post("/slow")
    async def slow(tx: RequestTx) -> dict[str, str]:
        await tx.execute(text("CREATE TABLE left_behind ()"))
        asked.set()
        await tx.execute(text("SELECT pg_sleep(30)"))
        return {}

    api = FastAPI()
    install(api, db)
    api.include_router(router)
    listener = listen()
    server = create_server(api, Settings(shutdown_grace_seconds=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx2.AsyncClient(base_url=address, timeout=20) as client:
        asking = asyncio.create_task(client.post("/slow"))
        await asyncio.wait_for(asked.wait(), 10)
        server.should_exit = True
        answer = await asking
    await serving
    await db.close()
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert "retry-after" in answer.headers
    assert rows(dsn, "SELECT to_regclass('left_behind')") == [(None,)]
