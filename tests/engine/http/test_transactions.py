"""E5.6: the route owns the transaction: one commit for each request, before the response leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated

import httpx2
import pytest
from fastapi import APIRouter, Depends, Request
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from starlette.routing import Match
from structlog.testing import capture_logs

from duly import poker
from duly.db import Database
from duly.errors import Busy, Unavailable
from duly.http import RequestTx, Router
from duly.runtime.embedded import EmbeddedPostgres
from duly.runtime.migrate import migrate
from duly.telemetry import HTTP_RETRIES
from tests.engine.http.serving import served
from tests.engine.idempotency.shop import (
    DOOR,
    add_order,
    closed_door,
    create_shop,
    effects,
    keys,
    make_tables,
    name_caller,
    open_shop,
    waiting_at,
)
from tests.engine.jobs.wire import Wire, breaking_wire
from tests.engine.jobs.witness import terminate_backends, until
from tests.support import rows, value

Client = httpx2.AsyncClient
ONE, TWO, NONE = (1, 1, 1), (2, 2, 2), (0, 0, 0)
TAKE = text("UPDATE stock SET amount = amount - 1 WHERE sku = :sku")
SERIALIZABLE = text("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
ran: list[str] = []
open_dependencies: list[str] = []

router = Router(prefix="/tx", dependencies=[Depends(name_caller)])


@router.post("/cross/{first}/{second}")
async def take_two(first: str, second: str, request: Request, tx: RequestTx) -> dict[str, int]:
    """Locks two rows in the order it is told: two of these deadlock, once."""
    ran.append(first)
    number = await add_order(tx, request, first)
    await tx.execute(TAKE, {"sku": first})
    if ran.count(first) == 1:
        await request.app.state.both.wait()
    await tx.execute(TAKE, {"sku": second})
    return {"number": number}


async def serializable(tx: RequestTx) -> None:
    """Set before anything else: a key is reserved in the same transaction."""
    await tx.execute(SERIALIZABLE)


@router.post("/skew/{sku}", dependencies=[Depends(serializable)])
async def take_if_both(sku: str, request: Request, tx: RequestTx) -> dict[str, int]:
    """The textbook's write skew: each reads what the other writes."""
    ran.append(sku)
    seen = int((await tx.execute(text("SELECT sum(amount) FROM stock"))).scalar_one())
    if ran.count(sku) == 1:
        await request.app.state.both.wait()
    await tx.execute(TAKE, {"sku": sku})
    return {"seen": seen, "number": await add_order(tx, request, sku)}


@router.post("/conflict/{state}")
async def conflict(state: str, request: Request, tx: RequestTx) -> None:
    """A conflict that never ends."""
    ran.append(state)
    await add_order(tx, request, state)
    await tx.execute(text(f"DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '{state}'; END $$"))


@router.post("/raises/{what}")
async def raise_it(what: str, request: Request, tx: RequestTx) -> None:
    """What a route may raise that only sounds like the database."""
    ran.append(what)
    await add_order(tx, request, what)
    errors = {
        "timeout": TimeoutError("a partner is slow"),
        "refused": ConnectionRefusedError("a partner is down"),
        "file": FileNotFoundError("no such template"),
        "unavailable": Unavailable("the bank is closed"),
        "busy": Busy("the clerk is busy"),
    }
    try:
        raise errors[what]
    except TimeoutError:
        raise RuntimeError("while handling it") from None


@router.post("/swallow")
async def swallow(request: Request, tx: RequestTx) -> str:
    """It should have used a savepoint."""
    await add_order(tx, request, "a")
    with contextlib.suppress(DBAPIError):
        await tx.execute(text("SELECT 1 / 0"))
    return "all is well"


async def hold() -> AsyncIterator[str]:
    """A dependency that can be open once at a time, as a lock or a file would be."""
    assert not open_dependencies
    open_dependencies.append("open")
    try:
        yield "held"
    finally:
        open_dependencies.remove("open")


@router.post("/held")
async def use_held(request: Request, tx: RequestTx, held: Annotated[str, Depends(hold)]) -> dict[str, str]:
    ran.append("held")
    body = b"".join([piece async for piece in request.stream()])
    await add_order(tx, request, "a")
    if len(ran) == 1:
        await tx.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))
    return {"held": held, "body": body.decode()}


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()
    open_dependencies.clear()


@pytest.fixture
async def shop(db: Database, dsn: str) -> AsyncIterator[Client]:
    make_tables(dsn)
    api = create_shop(db, router)
    api.state.both = asyncio.Barrier(2)
    async with served(api) as client:
        yield client


def retries(reason: str) -> float:
    return float(HTTP_RETRIES.labels(reason)._value.get())


# -- commit, then answer ----------------------------------------------------------------------------------------------


async def test_the_answer_leaves_after_commit(shop: Client, dsn: str) -> None:
    """E5.6: a commit that takes its time, for a deferred trigger waits in it, holds the answer back."""
    rows(
        dsn,
        f"""CREATE FUNCTION wait_at_door() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_advisory_xact_lock_shared({DOOR}); RETURN NULL; END $$;
            CREATE CONSTRAINT TRIGGER late AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION wait_at_door()""",
    )
    with closed_door(dsn) as door:
        post = asyncio.create_task(shop.post("/orders", json={}))
        await until(lambda: waiting_at(dsn, "advisory") == 1)
        assert value(dsn, "SELECT query FROM pg_stat_activity WHERE wait_event = 'advisory'").startswith("COMMIT")
        assert not post.done()
        assert effects(dsn) == NONE
        door.close()
        assert (await post).status_code == 201
        assert effects(dsn) == ONE


async def test_whoever_has_the_answer_sees_the_rows(shop: Client, dsn: str) -> None:
    """E5.6: on another connection, at once, every time."""
    for number in range(1, 21):
        assert (await shop.post("/orders", json={})).status_code == 201
        assert effects(dsn) == (number, number, number)


@pytest.mark.parametrize("how", ["404", "409", "422", "http", "500", "return-500"])
async def test_a_route_that_fails_leaves_nothing(shop: Client, dsn: str, how: str) -> None:
    """E5.6: no row, no event, no job."""
    assert (await shop.post(f"/orders/failing/{how}")).status_code >= 400
    assert effects(dsn) == NONE


async def test_what_only_commit_finds_out_is_an_answer_too(shop: Client, dsn: str) -> None:
    """E5.6: a deferred constraint fails at COMMIT: 409, and nothing is kept, the key included."""
    rows(dsn, "ALTER TABLE orders ADD CONSTRAINT one_each UNIQUE (sku) DEFERRABLE INITIALLY DEFERRED")
    assert (await shop.post("/orders", json={"sku": "a"})).status_code == 201
    for headers in ({}, {"Idempotency-Key": "k"}):
        assert (await shop.post("/orders", json={"sku": "a"}, headers=headers)).status_code == 409
    assert (effects(dsn), keys(dsn)) == (ONE, 0)


@pytest.mark.parametrize("keyed", [True, False], ids=["key", "no key"])
async def test_an_error_of_the_database_cannot_be_swallowed_into_a_success(shop: Client, dsn: str, keyed: bool) -> None:
    """E5.6: PostgreSQL turns the COMMIT of a failed transaction into a ROLLBACK without a word; we notice."""
    answer = await shop.post("/tx/swallow", headers=headers_of(1, keyed))
    assert answer.status_code == 500
    assert (effects(dsn), keys(dsn)) == (NONE, 0)


# -- lost races -------------------------------------------------------------------------------------------------------

with_and_without_key = pytest.mark.parametrize("keyed", [True, False], ids=["key", "no key"])


def headers_of(number: int, keyed: bool) -> dict[str, str]:
    return {"Idempotency-Key": f"k{number}"} if keyed else {}


@with_and_without_key
async def test_a_deadlock_between_two_requests_is_won_by_both(shop: Client, dsn: str, keyed: bool) -> None:
    """E5.6: PostgreSQL ends one of them; it runs again, and nobody hears of it."""
    before = retries("conflict")
    answers = await asyncio.gather(
        shop.post("/tx/cross/a/b", headers=headers_of(1, keyed)),
        shop.post("/tx/cross/b/a", headers=headers_of(2, keyed)),
    )
    assert [answer.status_code for answer in answers] == [200, 200]
    assert rows(dsn, "SELECT amount FROM stock") == [(98,), (98,)]
    assert effects(dsn) == TWO
    lost = len(ran) - 2  # whoever runs again may meet the other one again, if that one is slow to wake up
    assert lost >= 1
    assert retries("conflict") == before + lost


@with_and_without_key
async def test_a_serialization_failure_is_run_again(shop: Client, dsn: str, keyed: bool) -> None:
    """E5.6: the second one sees what the first one wrote."""
    answers = await asyncio.gather(
        *(shop.post(f"/tx/skew/{sku}", headers=headers_of(n, keyed)) for n, sku in enumerate("ab"))
    )
    assert [answer.status_code for answer in answers] == [200, 200]
    assert {answer.json()["seen"] for answer in answers} == {200, 199}
    assert effects(dsn) == TWO


@with_and_without_key
@pytest.mark.parametrize("state", ["40001", "40P01"])
async def test_a_conflict_that_survives_three_retries_is_busy(shop: Client, dsn: str, state: str, keyed: bool) -> None:
    """E5.5: 503 with Retry-After, and nothing is kept."""
    answer = await shop.post(f"/tx/conflict/{state}", headers=headers_of(1, keyed))
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:duly:problem:busy")
    assert int(answer.headers["retry-after"]) > 0
    assert len(ran) == 4
    assert (effects(dsn), keys(dsn)) == (NONE, 0)


async def test_a_second_try_has_its_own_dependencies_and_the_same_body(shop: Client, dsn: str) -> None:
    """E5.6: a dependency with yield ends with its try, so that the next one can take what it held."""
    answer = await shop.post("/tx/held", content=b"read twice")
    assert (answer.status_code, answer.json()) == (200, {"held": "held", "body": "read twice"})
    assert (len(ran), open_dependencies) == (2, [])
    assert effects(dsn) == ONE


# -- the database goes away -------------------------------------------------------------------------------------------


async def fill_pool(shop: Client) -> None:
    answers = await asyncio.gather(*(shop.get("/orders/0") for _ in range(10)))
    assert {answer.status_code for answer in answers} == {404}


async def test_connections_that_died_while_idle_cost_no_error(shop: Client, dsn: str) -> None:
    """E5.6: all of the pool is dead; each request is repeated once at most."""
    await fill_pool(shop)
    before = retries("connection_lost")
    assert len(terminate_backends(dsn, "application_name = 'duly' AND state = 'idle'")) > 1
    answers = await asyncio.gather(*(shop.post("/orders", json={}) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert effects(dsn) == (20, 20, 20)
    assert retries("connection_lost") > before


@pytest.mark.parametrize(
    ("what", "status"), [("timeout", 500), ("refused", 500), ("file", 500), ("unavailable", 503), ("busy", 503)]
)
async def test_an_error_that_only_sounds_like_the_database_is_not_taken_for_it(
    shop: Client, dsn: str, what: str, status: int
) -> None:
    """E5.6: a partner's outage and a missing file are no reason to run the route a second time."""
    with capture_logs() as logs:
        answer = await shop.post(f"/tx/raises/{what}")
    assert answer.status_code == status
    assert ran == [what]
    assert "database" not in answer.text.replace("The database cannot be reached", "")  # the title of Unavailable
    assert sum(line["event"] == "request_failed" for line in logs) == (status == 500)
    assert effects(dsn) == NONE


async def test_an_exhausted_pool_is_503_and_recovers(dsn: str) -> None:
    """E5.5: with Retry-After, within the time that waiting for a connection may take."""
    make_tables(dsn)
    async with open_shop(dsn, pool_size=2, connect_timeout_seconds=0.3) as shop:
        with closed_door(dsn) as door:
            slow = [asyncio.create_task(shop.post("/orders/waiting", json={})) for _ in range(2)]
            await until(lambda: waiting_at(dsn, "advisory") == 2)
            began = time.monotonic()
            for headers in ({}, {"Idempotency-Key": "k"}):
                answer = await shop.post("/orders", json={}, headers=headers)
                assert (answer.status_code, answer.json()["type"]) == (503, "urn:duly:problem:busy")
                assert int(answer.headers["retry-after"]) > 0
            assert time.monotonic() - began < 2
            door.close()
            await asyncio.gather(*slow)
        assert (await shop.post("/orders", json={}, headers={"Idempotency-Key": "k"})).status_code == 201
    assert effects(dsn) == (3, 3, 3)


@pytest.fixture
def postgres() -> Iterator[EmbeddedPostgres]:
    """A server of this test's own, to be stopped."""
    directory = Path(tempfile.mkdtemp(prefix="duly-tx-"))
    server = EmbeddedPostgres.at(directory, parameters=("fsync=off",))
    server.start()
    migrate(server.dsn())
    yield server
    server.stop(mode="immediate")
    shutil.rmtree(directory, ignore_errors=True)


async def test_a_database_that_is_away_is_503_at_once_and_heals_without_a_restart(postgres: EmbeddedPostgres) -> None:
    """E5.5: for reads and writes, with a key and without."""
    make_tables(postgres.dsn())
    async with open_shop(postgres.dsn()) as shop:
        await fill_pool(shop)
        await asyncio.to_thread(postgres.stop, mode="immediate")
        for headers in ({}, {"Idempotency-Key": "k"}):
            for ask in (shop.get("/orders/0"), shop.post("/orders", json={}, headers=headers)):
                began = time.monotonic()
                answer = await ask
                assert time.monotonic() - began < 2
                assert (answer.status_code, answer.json()["type"]) == (503, "urn:duly:problem:unavailable")
                assert int(answer.headers["retry-after"]) > 0
        await asyncio.to_thread(postgres.start)
        assert (await shop.post("/orders", json={}, headers={"Idempotency-Key": "k"})).status_code == 201
    assert effects(postgres.dsn()) == ONE


async def test_a_database_that_falls_silent_is_503_in_bounded_time(dsn: str) -> None:
    """E5.5: half-open: the backend is stopped, and no word comes; the driver's own limit ends the wait."""
    make_tables(dsn)
    async with open_shop(dsn, pool_size=1, statement_timeout_seconds=0.2) as shop:
        await fill_pool(shop)
        [(pid,)] = rows(
            dsn, "SELECT pid FROM pg_stat_activity WHERE application_name = 'duly' AND datname = current_database()"
        )
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            answer = await shop.post("/orders", json={}, timeout=30)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert time.monotonic() - began < 12
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:duly:problem:unavailable")
        assert answer.headers["retry-after"]
        assert (await shop.post("/orders", json={})).status_code == 201
    assert effects(dsn) == ONE


# -- what it costs ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def counted(dsn: str) -> AsyncIterator[tuple[Client, Wire]]:
    """The shop behind a wire that counts, with everything prepared that is prepared once."""
    make_tables(dsn)
    async with breaking_wire(dsn) as wire:
        db = Database(wire.dsn, pool_size=1)
        try:
            async with served(create_shop(db, router)) as shop:
                for headers in ({}, {"Idempotency-Key": "warm"}, {"Idempotency-Key": "warm"}):
                    await shop.post("/orders/odd", headers=headers)
                yield shop, wire
        finally:
            await db.close()


def spoken(wire: Wire) -> list[str]:
    """The statements of one request, each by the words it is known by."""
    words = ("BEGIN", "COMMIT", "ROLLBACK", "INTO duly.idempotency_keys", "FROM duly.idempotency_keys",
             "UPDATE duly.idempotency_keys", "INTO orders", "FROM orders", "emit_many", "schedule_many",
             "commit_mark")  # fmt: skip
    sent = [
        next((word for word in words if word in text), text) for text, count in wire.sent.items() for _ in range(count)
    ]
    wire.sent.clear()
    return sorted(sent)


EFFECT = ["INTO orders", "emit_many", "schedule_many"]


async def test_the_statements_of_a_request_are_counted(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E4, E5.6: a key costs two statements, a replay four in all, and without a key the commit is confirmed by one."""
    monkeypatch.setattr(poker, "QUIET_SECONDS", 0.0)  # wake-ups are part of the statements, however quick the client is
    async with counted(dsn) as (shop, wire):
        spoken(wire)
        await shop.post("/orders/odd", headers={"Idempotency-Key": "k"})
        first = [*EFFECT, "BEGIN", "COMMIT", "INTO duly.idempotency_keys", "UPDATE duly.idempotency_keys"]
        assert spoken(wire) == sorted(first)
        await shop.post("/orders/odd", headers={"Idempotency-Key": "k"})
        assert spoken(wire) == sorted(["BEGIN", "ROLLBACK", "INTO duly.idempotency_keys", "FROM duly.idempotency_keys"])
        await shop.post("/orders/odd")
        assert spoken(wire) == sorted([*EFFECT, "BEGIN", "COMMIT", "commit_mark"])
        assert (await shop.get("/orders/1")).status_code == 200
        assert spoken(wire) == ["BEGIN", "COMMIT", "FROM orders"]
        await shop.post("/orders", json={"quantity": "many"}, headers={"Idempotency-Key": "k2"})
        assert spoken(wire) == []


def test_a_router_whose_routes_cannot_match_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: FastAPI tries every route of every router for every request."""
    tried: list[str] = []

    def matches(_: APIRouter, scope: dict[str, str]) -> tuple[Match, dict[str, str]]:
        tried.append(scope["path"])
        return Match.NONE, {}

    monkeypatch.setattr(APIRouter, "matches", matches)
    router = Router(prefix="/v1")
    router.add_api_route("/orders/{order_id}", lambda order_id: order_id)
    for path in ("/v1/carts/7", "/v1/orders/7", "/mounted/v1/orders/7"):
        router.matches({"type": "http", "path": path})
    router.add_api_route("/carts", lambda: None)  # what comes later counts, too
    router.matches({"type": "http", "path": "/v1/carts"})
    assert tried == ["/v1/orders/7", "/mounted/v1/orders/7", "/v1/carts"]
