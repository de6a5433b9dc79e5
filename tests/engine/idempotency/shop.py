"""A shop of its own on duly.http: what the tests of the HTTP layer call, in their own process or in another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Annotated, Any

import httpx2
import psycopg
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import text

from duly import NewEvent, emit, schedule
from duly.db import Database
from duly.errors import Conflict, Invalid, NotFound
from duly.http import RequestTx, Router, install
from duly.runtime.supervisor import create_server
from duly.settings import Settings
from duly.telemetry import configure_logging
from tests.engine.http.serving import served
from tests.forking import Forked
from tests.support import python, rows, value

DOOR = 77  # the advisory lock at which POST /orders/waiting stands until the test opens it
TABLES = """
CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, caller text NOT NULL, sku text NOT NULL);
CREATE TABLE stock (sku text PRIMARY KEY, amount int NOT NULL CHECK (amount >= 0));
INSERT INTO stock VALUES ('a', 100), ('b', 100);
"""
ADD_ORDER = text("INSERT INTO orders (caller, sku) VALUES (:caller, :sku) RETURNING id")
WAIT_AT_DOOR = text(f"SELECT pg_advisory_xact_lock_shared({DOOR})")
ODD_BODY = '{ "z":1.10,\n\t"a" : "é\\u00e9 \\/ 𝄞", "a2":1e2,"big":12345678901234567890.0100 }\r\n '.encode()


async def name_caller(request: Request, x_caller: Annotated[str, Header()] = "alice") -> None:
    """Who calls: a header, for want of tokens."""
    request.state.caller = x_caller


router = Router(prefix="/orders", dependencies=[Depends(name_caller)])


class NewOrder(BaseModel):
    """What is ordered."""

    sku: str = "a"
    quantity: int = 1
    price: Decimal | None = None
    note: Any = None


async def add_order(tx: RequestTx, request: Request, sku: str) -> int:
    """The effect: a row, an event and a job; nothing forbids a second one, so that one would be seen."""
    added = await tx.execute(ADD_ORDER, {"caller": request.state.caller, "sku": sku})
    number = int(added.scalar_one())
    await emit(tx, NewEvent("order.placed", "orders", str(number)))
    await schedule(tx, "ship", number)
    return number


@router.post("", status_code=201)
async def place_order(order: NewOrder, request: Request, tx: RequestTx, response: Response) -> dict[str, Any]:
    """An order, as an application would write it."""
    number = await add_order(tx, request, order.sku)
    response.headers["Location"] = f"/orders/{number}"
    response.headers.append("Link", "</a>; rel=prev")
    response.headers.append("Link", "</b>; rel=next")
    response.headers.append("Set-Cookie", "session=secret")
    return {"number": number, "sku": order.sku}


@router.post("/odd", status_code=201)
async def place_oddly(request: Request, tx: RequestTx) -> Response:
    """An answer that no encoder would write like this."""
    await add_order(tx, request, "odd")
    return Response(ODD_BODY, 202, media_type="application/vnd.shop+json")


@router.post("/waiting", status_code=201)
async def place_after_waiting(order: NewOrder, request: Request, tx: RequestTx) -> dict[str, int]:
    """An order that takes as long as the test wants."""
    number = await add_order(tx, request, order.sku)
    await tx.execute(WAIT_AT_DOOR)
    if value_of(request, "X-Fail-After"):
        raise Conflict("told to fail")
    return {"number": number}


@router.post("/any/{sku}")
@router.put("/any/{sku}")
@router.patch("/any/{sku}")
@router.delete("/any/{sku}")
async def touch(sku: str, request: Request, tx: RequestTx) -> dict[str, int]:
    """Every method, a path, a query, and whatever body."""
    return {"number": await add_order(tx, request, sku)}


@router.post("/failing/{how}")
async def fail(how: str, request: Request, tx: RequestTx) -> Any:
    """The effect, and then an answer that is none."""
    number = await add_order(tx, request, how)
    if how == "404":
        raise NotFound("no such customer")
    if how == "409":
        raise Conflict("the shop is closed")
    if how == "422":
        raise Invalid("we do not sell that")
    if how == "http":
        raise HTTPException(418, "short and stout")
    if how == "500":
        raise RuntimeError("nobody thought of this")
    return JSONResponse({"number": number}, int(how.removeprefix("return-")))


@router.delete("/{number}", status_code=204)
async def cancel_order(number: int, tx: RequestTx) -> None:
    """An answer without a body."""
    await tx.execute(text("DELETE FROM orders WHERE id = :id"), {"id": number})


@router.get("/{number}")
async def read_order(number: int, tx: RequestTx) -> dict[str, Any]:
    """One order."""
    found = (await tx.execute(text("SELECT id, sku FROM orders WHERE id = :id"), {"id": number})).first()
    if found is None:
        raise NotFound("no such order")
    return {"number": found[0], "sku": found[1]}


def value_of(request: Request, header: str) -> str:
    """A header that tells a route what to do."""
    return request.headers.get(header, "")


def create_shop(db: Database, *others: Router, **options: Any) -> FastAPI:
    """The application; nothing in it is ours but ``install`` and ``Router``."""
    api = FastAPI(title="shop")
    install(api, db, **options)
    for other in (router, *others):
        api.include_router(other)
    return api


def make_tables(dsn: str) -> None:
    """What the shop writes to."""
    rows(dsn, TABLES)


def effects(dsn: str) -> tuple[int, int, int]:
    """(orders, events, jobs): one request makes one of each."""
    counts = (
        "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM duly.outbox), (SELECT count(*) FROM duly.jobs)"
    )
    found = rows(dsn, counts)[0]
    return (found[0], found[1], found[2])


def keys(dsn: str) -> int:
    """How many idempotency keys are kept."""
    return int(value(dsn, "SELECT count(*) FROM duly.idempotency_keys"))


@contextlib.contextmanager
def closed_door(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """While the block runs, or until the connection it gets is closed, POST /orders/waiting waits."""
    with psycopg.connect(dsn, autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(%s)", (DOOR,))
        yield holder


def waiting_at(dsn: str, event: str) -> int:
    """How many of our connections wait for a lock of this kind: advisory, transactionid, tuple."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND wait_event = %(event)s"
    )
    return int(value(dsn, query, {"event": event}))


@contextlib.asynccontextmanager
async def open_shop(
    dsn: str, *others: Router, pool_size: int = 5, **settings: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the shop in this process, on a pool of its own."""
    db = Database(dsn, settings=Settings(**settings), pool_size=pool_size)
    try:
        async with served(create_shop(db, *others)) as client:
            yield client
    finally:
        await db.close()


PROCESS = "from tests.engine.idempotency.shop import serve; serve()"


@contextlib.contextmanager
def shop_process(dsn: str, *, failpoints: str = "") -> Iterator[tuple[str, Forked]]:
    """The shop in a process of its own: its address, and the process to kill."""
    process = python(dsn, PROCESS, failpoints=failpoints)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, process.communicate(timeout=10)[1]
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.communicate(timeout=10)


def serve() -> None:
    """Serve the shop until killed; the first line of output is the port."""
    configure_logging(style="json")
    db = Database(os.environ["DATABASE_URL"])
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    asyncio.run(create_server(create_shop(db), Settings()).serve(sockets=[listener]))
