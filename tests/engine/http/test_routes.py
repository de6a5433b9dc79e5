"""E4, E5.6: a ``Router`` is FastAPI's own in every other way: what people do with one goes on working."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import httpx2
import jsonschema_rs
import pytest
import schemathesis
from fastapi import APIRouter, BackgroundTasks, Cookie, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from structlog.testing import capture_logs

from duly.db import Database
from duly.errors import Invalid
from duly.http import RequestTx, Router, install
from duly.http.problems import PROBLEM_SCHEMA
from duly.http.transactions import Route
from tests.engine.http.serving import served
from tests.engine.idempotency.shop import add_order, create_shop, effects, keys, make_tables, name_caller, open_shop
from tests.support import rows

Client = httpx2.AsyncClient
NOWHERE = "postgresql://nobody@127.0.0.1:1/none"
KEY = {"Idempotency-Key": "k"}
done_afterwards: list[int] = []
ended: list[str] = []


class Named(BaseModel):
    """Annotations of this module are text, for it says ``from __future__ import annotations``."""

    name: str


router = Router(prefix="/routes", dependencies=[Depends(name_caller)])


@router.post("/sync", status_code=201)
def not_a_coroutine(named: Named, response: Response) -> Named:
    """Runs in a thread, as FastAPI's do."""
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    response.headers["X-Seen"] = named.name
    return named


class Greeter:
    """An endpoint that is an object."""

    async def __call__(self, named: Named) -> Named:
        return named


router.post("/object")(Greeter())


@router.post("/no-database")
async def without_database(named: Named) -> Named:
    return named


@router.post("/background", status_code=201)
async def work_afterwards(request: Request, tx: RequestTx, after: BackgroundTasks) -> dict[str, int]:
    number = await add_order(tx, request, "a")
    after.add_task(done_afterwards.append, number)
    return {"number": number}


async def session_of(tx: RequestTx) -> AsyncSession:
    return tx


async def ending(tx: RequestTx) -> AsyncIterator[str]:
    """A dependency with yield, in the same transaction."""
    try:
        yield "during"
    except Exception as error:
        ended.append(type(error).__name__)
        raise
    else:
        ended.append("well")


@router.post("/shared")
async def share_the_session(
    tx: RequestTx, same: Annotated[AsyncSession, Depends(session_of)], when: Annotated[str, Depends(ending)]
) -> dict[str, Any]:
    return {"same": tx is same, "when": when}


@router.post("/rolled-back")
async def roll_back(request: Request, tx: RequestTx) -> str:
    """What services and routes never do."""
    await add_order(tx, request, "a")
    await tx.rollback()
    return "as if nothing had happened"


async def swallowing() -> AsyncIterator[None]:
    """What FastAPI tells people not to write."""
    with contextlib.suppress(ValueError):
        yield


@router.post("/swallowed", dependencies=[Depends(swallowing)])
@router.post("/failing", dependencies=[Depends(ending)])
async def fail(request: Request, tx: RequestTx) -> None:
    await add_order(tx, request, "a")
    raise ValueError("after the write")


@router.get("/stream")
async def stream(tx: RequestTx) -> StreamingResponse:
    found = [str(row[0]) for row in await tx.execute(text("SELECT generate_series(1, 3)"))]

    async def pieces() -> AsyncIterator[str]:
        for piece in found:
            yield piece

    return StreamingResponse(pieces(), media_type="text/plain")


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    done_afterwards.clear()
    ended.clear()


@pytest.fixture
async def shop(db: Database, dsn: str) -> AsyncIterator[Client]:
    make_tables(dsn)
    async with served(create_shop(db, router)) as client:
        yield client


def is_replay(answer: httpx2.Response) -> bool:
    return bool(answer.headers.get("idempotent-replayed") == "true")


# -- endpoints of every kind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "status"), [("sync", 201), ("object", 200), ("no-database", 200)])
async def test_functions_objects_and_coroutines_are_endpoints_alike(shop: Client, path: str, status: int) -> None:
    """E4: with a key, without, and again."""
    assert (await shop.post(f"/routes/{path}", json={"name": "x"})).status_code == status
    answers = [await shop.post(f"/routes/{path}", json={"name": "x"}, headers=KEY) for _ in range(2)]
    assert [(answer.status_code, answer.json(), is_replay(answer)) for answer in answers] == [
        (status, {"name": "x"}, False),
        (status, {"name": "x"}, True),
    ]
    assert [answer.headers.get("x-seen") for answer in answers] == (["x", "x"] if path == "sync" else [None, None])


async def test_a_route_that_does_not_use_the_database_does_not_need_it() -> None:
    """E5.6: no connection, no statement, no 503; with a key, of course, it does."""
    async with open_shop(NOWHERE, router) as shop:
        assert (await shop.post("/routes/no-database", json={"name": "x"})).json() == {"name": "x"}
        assert (await shop.post("/routes/no-database", json={"name": "x"}, headers=KEY)).status_code == 503


async def test_all_of_a_request_shares_one_session(shop: Client) -> None:
    """E5.6: the endpoint's and its dependencies'; one with yield ends after COMMIT."""
    answer = await shop.post("/routes/shared")
    assert answer.json() == {"same": True, "when": "during"}
    assert ended == ["well"]


async def test_a_dependency_with_yield_sees_a_failure_and_not_a_replay(shop: Client, dsn: str) -> None:
    """E5.6: a replay is a success for it."""
    assert (await shop.post("/routes/failing")).status_code == 500
    assert ended == ["ValueError"]
    for _ in range(2):
        assert (await shop.post("/routes/shared", headers=KEY)).status_code == 200
    assert ended == ["ValueError", "well", "well"]
    assert effects(dsn) == (0, 0, 0)


async def test_a_dependency_that_swallows_the_failure_does_not_turn_it_into_a_success(shop: Client, dsn: str) -> None:
    """E5.6: nothing was committed, so nothing may be answered but 500."""
    assert (await shop.post("/routes/swallowed", headers=KEY)).status_code == 500
    assert (effects(dsn), keys(dsn)) == ((0, 0, 0), 0)


async def test_a_route_that_ends_the_transaction_itself_gets_no_stored_answer(shop: Client, dsn: str) -> None:
    """E4.3: its key went with what it rolled back, so there is nothing to replay, and it is told so."""
    answer = await shop.post("/routes/rolled-back", headers=KEY)
    assert (answer.status_code, "idempotency key was lost" in answer.json()["detail"]) == (503, True)
    assert (effects(dsn), keys(dsn)) == ((0, 0, 0), 0)


async def test_work_for_afterwards_is_done_after_commit_and_not_at_a_replay(shop: Client, dsn: str) -> None:
    """E4.2: a background task is part of what runs once."""
    for _ in range(2):
        assert (await shop.post("/routes/background", headers=KEY)).status_code == 201
    assert done_afterwards == [1]
    assert effects(dsn) == (1, 1, 1)


async def test_a_streamed_answer_of_a_read_is_streamed(shop: Client) -> None:
    answer = await shop.get("/routes/stream", headers=KEY)
    assert (answer.text, answer.headers.get("transfer-encoding")) == ("123", "chunked")


@pytest.mark.parametrize("kind", ["generator", "asynchronous generator"])
def test_an_endpoint_that_yields_is_refused_when_it_is_declared(kind: str) -> None:
    """E5.6: it would run after COMMIT, with a transaction that has ended."""

    def generator() -> Iterator[int]:
        yield 1

    async def asynchronous_generator() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="runs after COMMIT"):
        Router().get("/x")(generator if kind == "generator" else asynchronous_generator)


async def test_a_transaction_is_for_routes_of_a_router_only(db: Database) -> None:
    """E5.6: elsewhere nobody would commit it; the log says what to do."""
    api, plain = create_shop(db), APIRouter()

    @plain.post("/plain")
    async def use(tx: RequestTx) -> None:
        """Never reached."""

    api.include_router(plain)
    async with served(api) as client:
        with capture_logs() as logs:
            assert (await client.post("/plain")).status_code == 500
    [line] = [line for line in logs if line["event"] == "request_failed"]
    assert line["error"] == "TypeError"
    assert any("current_tx" in frame for frame in line["where"])


def test_annotations_that_are_text_are_read_where_they_were_written() -> None:
    """E4: not every FastAPI looks behind a wrapper for the module of the endpoint."""
    found = {route.path: inspect.signature(route.endpoint) for route in router.routes if isinstance(route, Route)}
    assert found["/routes/sync"].parameters["named"].annotation is Named
    assert found["/routes/object"].return_annotation is Named


# -- included elsewhere -----------------------------------------------------------------------------------------------


async def test_a_router_can_be_included_anywhere_and_more_than_once(db: Database, dsn: str) -> None:
    """E4: under a prefix, below another router, in a mounted application: each path is a request of its own."""
    make_tables(dsn)
    api, mounted, outer = FastAPI(), FastAPI(), Router(prefix="/outer")
    outer.include_router(router, prefix="/a")
    install(api, db)
    api.include_router(router, prefix="/v1", dependencies=[Depends(session_of)])
    api.include_router(outer)
    install(mounted, db)
    mounted.include_router(router)
    api.mount("/mounted", mounted)
    async with served(api) as client:
        paths = ["/v1/routes/background", "/outer/a/routes/background", "/mounted/routes/background"]
        for number, path in enumerate(paths, 1):
            answers = [await client.post(path, headers={"Idempotency-Key": path}) for _ in range(2)]
            assert [(answer.status_code, answer.json()) for answer in answers] == [(201, {"number": number})] * 2
            assert is_replay(answers[1])
        assert (await client.post(paths[0], headers={"Idempotency-Key": paths[1]})).status_code == 409
    assert (effects(dsn), keys(dsn)) == ((3, 3, 3), 3)


async def test_a_route_that_is_made_anew_from_the_parts_of_another_enters_once(db: Database, dsn: str) -> None:
    """E4: as older FastAPIs include routers: the key is reserved once, and what was left out stays left out."""
    make_tables(dsn)
    api = FastAPI()
    install(api, db)
    original = Router(dependencies=[Depends(name_caller)])

    @original.post("/keyed")
    async def keyed(request: Request, tx: RequestTx) -> int:
        return await add_order(tx, request, "a")

    @original.post("/free", openapi_extra={"x-idempotent": False})
    async def free(request: Request, tx: RequestTx) -> int:
        return await add_order(tx, request, "a")

    for route in list(original.routes):
        assert isinstance(route, Route)
        api.router.routes.append(
            Route(
                f"/again{route.path}", route.endpoint, methods=route.methods, dependencies=route.dependencies,
                responses=copy.copy(route.responses), openapi_extra=route.openapi_extra,
            )
        )  # fmt: skip
    async with served(api) as client:
        answers = [await client.post("/again/keyed", headers=KEY) for _ in range(2)]
        assert [(answer.status_code, is_replay(answer)) for answer in answers] == [(200, False), (200, True)]
        for _ in range(2):
            assert not is_replay(await client.post("/again/free", headers=KEY))
        document = (await client.get("/openapi.json")).json()
    names = [one["name"] for one in document["paths"]["/again/keyed"]["post"]["parameters"]]
    assert names.count("Idempotency-Key") == 1
    assert effects(dsn) == (3, 3, 3)


# -- the document -----------------------------------------------------------------------------------------------------


@pytest.fixture
def document(db: Database) -> dict[str, Any]:
    plain = APIRouter()

    @plain.post("/plain/{number}")
    async def other(number: int, session: Annotated[str, Cookie()] = "") -> None:
        """A route of others."""

    special = Router()

    @special.post(
        "/special", openapi_extra={"x-idempotent": False, "x-own": 1}, responses={404: {"description": "Own"}}
    )
    async def free(named: Named) -> Named:
        return named

    api = create_shop(db, router, special)
    api.include_router(plain)
    assert api.openapi() == api.openapi()
    return api.openapi()


def test_the_document_is_one_of_openapi(document: dict[str, Any]) -> None:
    """E5.7."""
    schema = schemathesis.openapi.from_dict(document)
    schema.validate()
    assert document["openapi"].startswith("3.1")
    for component in document["components"]["schemas"].values():
        jsonschema_rs.meta.validate(component)


def test_the_document_says_which_routes_take_a_key(document: dict[str, Any]) -> None:
    """E4.1: those that change something, unless they say otherwise."""
    taking = {
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if any(one["name"] == "Idempotency-Key" and one["in"] == "header" for one in operation.get("parameters", []))
    }
    assert {"POST /orders", "PUT /orders/any/{sku}", "DELETE /orders/{number}", "POST /routes/sync"} <= taking
    assert taking.isdisjoint({"GET /orders/{number}", "POST /special", "POST /plain/{number}", "GET /routes/stream"})
    assert document["paths"]["/special"]["post"]["x-own"] == 1


def test_the_document_shows_problems_and_no_errors_of_fastapi(document: dict[str, Any]) -> None:
    """E5.5: also for routes of others; what a route says itself stays."""
    assert document["components"]["schemas"]["Problem"] == PROBLEM_SCHEMA
    assert "HTTPValidationError" not in str(document)
    place = document["paths"]["/orders"]["post"]["responses"]
    reference = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    assert {code for code, said in place.items() if said.get("content") == reference} == {
        "400", "401", "403", "404", "408", "409", "413", "422", "503",
    }  # fmt: skip
    assert document["paths"]["/plain/{number}"]["post"]["responses"]["422"]["content"] == reference
    assert document["paths"]["/special"]["post"]["responses"]["404"] == {"description": "Own"}
    assert "409" not in document["paths"]["/routes/stream"]["get"]["responses"]


async def test_problems_are_as_the_document_says(shop: Client) -> None:
    """E5.5: each validates against its schema."""
    answers = [
        await shop.post("/routes/sync", json={}),
        await shop.post("/routes/sync", content=b"{", headers={"Content-Type": "application/json"}),
        await shop.get("/nowhere"),
        await shop.post("/orders/failing/500"),
        await shop.post("/orders/failing/409"),
        await shop.post("/orders", json={}, headers={"Idempotency-Key": "a b"}),
    ]
    assert [answer.status_code for answer in answers] == [422, 400, 404, 500, 409, 400]
    for answer in answers:
        jsonschema_rs.validate(PROBLEM_SCHEMA, answer.json())


# -- an API that promises 400 for bad values --------------------------------------------------------------------------


class TooSmall(Invalid):
    """There is too little of it."""


class Amount(BaseModel):
    amount: int = Field(ge=1)


def create_strict_api(db: Database) -> FastAPI:
    """One router of each kind, the strict one behind another prefix."""
    api = FastAPI()
    install(api, db)
    for status, prefix in ((400, "/strict"), (422, "/usual")):
        router = Router(invalid_status=status)

        @router.put("/amounts/{number}")
        async def put(number: int, amount: Amount, tx: RequestTx) -> int:
            await tx.execute(text("INSERT INTO notes (note) VALUES ('put')"))
            if amount.amount < 10:
                raise TooSmall("give ten")
            return amount.amount

        @router.get("/lists")
        async def show(tx: RequestTx, size: int = 3) -> int:
            return size

        api.include_router(router, prefix=prefix)
    return api


@pytest.mark.parametrize(("prefix", "status"), [("/strict", 400), ("/usual", 422)])
async def test_a_router_says_with_which_status_bad_values_are_refused(
    db: Database, dsn: str, prefix: str, status: int
) -> None:
    """E5.5: those that the schema refuses and those that a rule does; nothing is written, and the rest is as ever."""
    rows(dsn, "CREATE TABLE notes (note text)")
    async with served(create_strict_api(db)) as client:
        refused = [
            await client.put(f"{prefix}/amounts/1", json={"amount": 0}),
            await client.put(f"{prefix}/amounts/one", json={"amount": 10}),
            await client.get(f"{prefix}/lists?size=x"),
            await client.put(f"{prefix}/amounts/1", json={"amount": 5}),
        ]
        malformed = await client.put(f"{prefix}/amounts/1", content=b"{", headers={"Content-Type": "application/json"})
        key = {"Idempotency-Key": "k"}
        first = await client.put(f"{prefix}/amounts/1", json={"amount": 10}, headers=key)
        reused = await client.put(f"{prefix}/amounts/1", json={"amount": 11}, headers=key)
    assert [(answer.status_code, answer.json()["status"]) for answer in refused] == [(status, status)] * 4
    assert [answer.json()["errors"][0]["path"] for answer in refused[:3]] == ["$.amount", "$.number", "$.size"]
    assert refused[3].json()["type"] == "urn:duly:problem:too-small"
    assert (malformed.status_code, malformed.json()["type"]) == (400, "urn:duly:problem:malformed")
    assert (first.status_code, reused.status_code) == (200, 409)
    assert rows(dsn, "SELECT count(*)::int FROM notes") == [(1,)]
    assert TooSmall("another").status == 422  # one answer's status is not the next one's


def test_the_document_promises_that_status_and_no_other(db: Database) -> None:
    """E5.7."""
    paths = create_strict_api(db).openapi()["paths"]
    for path, method in (("/amounts/{number}", "put"), ("/lists", "get")):
        assert "422" not in paths[f"/strict{path}"][method]["responses"]
        assert {"400", "422"} <= paths[f"/usual{path}"][method]["responses"].keys()
        assert "400" in paths[f"/strict{path}"][method]["responses"]
