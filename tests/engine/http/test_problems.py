"""E5.5: every error is a problem of RFC 9457 that says what is wrong and where, and never what was sent."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal, Self
from uuid import UUID
from zoneinfo import ZoneInfo

import httpx2
import pytest
from fastapi import APIRouter, FastAPI, Header, HTTPException, Query
from pydantic import BaseModel, Field, Json, field_validator, model_validator
from sqlalchemy import text
from structlog.testing import capture_logs

from duly.db import Database
from duly.errors import DulyError, NotFound
from duly.http import RequestTx, Router
from tests.engine.http.serving import served
from tests.engine.idempotency.shop import create_shop, make_tables, open_shop, shop_process
from tests.support import rows

Client = httpx2.AsyncClient
JSON = {"Content-Type": "application/json"}
CANARY = "canary-7f3a9"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str] = []


class Line(BaseModel):
    sku: str = Field(max_length=5)
    amount: Decimal = Field(max_digits=5)


class Everything(BaseModel):
    """A field of each kind that can be wrong."""

    lines: list[Line] = []
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    plain: Cat | Dog | None = None
    id: UUID | None = None
    zone: ZoneInfo | None = None
    parsed: Json[Any] | None = None
    by_name: dict[str, int] = {}
    checked: str = ""
    number: int = 0
    anything: Any = None

    @model_validator(mode="after")
    def quote_all(self) -> Self:
        """And over the whole."""
        if isinstance(self.anything, dict):
            raise ValueError(f"we do not like {self.anything} either")
        return self

    @field_validator("checked")
    @classmethod
    def quote_it(cls, given: str) -> str:
        """As people write such things."""
        if given:
            raise ValueError(f"we do not like {given}")
        return given


router = Router(prefix="/problems")


@router.post("/everything")
async def everything(given: Everything) -> dict[str, Any]:
    return {"anything": given.anything}


@router.get("/read/{number}")
async def read(number: int, limit: Annotated[int, Query(le=10)] = 1, x_size: Annotated[int, Header()] = 1) -> None:
    """A value in the path, the query and a header."""


STATEMENTS = {
    "text": "SELECT CAST(:given AS text)",
    "uuid": "SELECT CAST(CAST(:given AS text) AS uuid)",
    "number": "SELECT CAST(:given AS bigint)",
    "json": "SELECT CAST(CAST(:given AS text) AS jsonb)",
    "duplicate": "INSERT INTO stock VALUES (:given, 1), (:given, 1)",
    "check": "INSERT INTO stock VALUES (:given, -1)",
    "indexed": "INSERT INTO stock VALUES (:given, 1)",
    "missing": "INSERT INTO stock VALUES (:given, NULL)",
    "division": "SELECT length(:given) / 0",
    "syntax": "SELECT FROM WHERE :given",
    "no table": "SELECT :given FROM nowhere",
    "excluded": "INSERT INTO rooms VALUES (:given, '[1,3)'), (:given, '[2,4)')",
    "raised": "DO $$ BEGIN RAISE EXCEPTION 'it said canary-7f3a9'; END $$",
}


class Given(BaseModel):
    """What goes into a statement."""

    given: Any


@router.post("/store/{how}")
async def store(how: str, body: Given, tx: RequestTx) -> None:
    await tx.execute(text(STATEMENTS[how]), {"given": body.given} if ":given" in STATEMENTS[how] else {})


class Unforeseen(Exception):
    """What nobody thought of."""


class OwnFault(DulyError):
    """A mistake of ours that has a name."""


class Odd(NotFound):
    status = 404


@router.post("/raise/{what}")
async def raise_it(what: str, body: Given) -> Any:
    errors: dict[str, Exception] = {
        "unforeseen": Unforeseen(f"about {body.given}"),
        "own": OwnFault(f"about {body.given}"),
        "odd": Odd("half a \ud800 pair"),
        "gone": HTTPException(410, "moved away"),
        "plain": HTTPException(404),
        "strange": HTTPException(499, {"not": "text"}),
        "elsewhere": HTTPException(307, headers={"Location": "/there"}),
        "unmodified": HTTPException(304),
    }
    if what == "response":
        return [Unforeseen(f"about {body.given}")]
    if what == "context":
        try:
            raise Unforeseen(f"about {body.given}")
        except Unforeseen:
            return dict[str, int]()["and then another"]
    if what == "translated":
        try:
            raise NotFound("the inner one")
        except NotFound as error:
            raise HTTPException(410, "the outer one") from error
    raise errors[what]


@router.post("/after-conflict")
async def after_conflict(tx: RequestTx) -> None:
    """A mistake while handling something that has a translation of its own."""
    try:
        await tx.execute(text("INSERT INTO stock VALUES ('a', 1)"))
    except Exception:  # noqa: BLE001 - as careless as it gets
        raise KeyError("missing")  # noqa: B904 - the context is the point


@pytest.fixture
async def shop(db: Database, dsn: str) -> AsyncIterator[Client]:
    make_tables(dsn)
    async with served(create_shop(db, router)) as client:
        yield client


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as captured:
        yield captured


def check_problem(answer: httpx2.Response, status: int, kind: str = "about:blank") -> dict[str, Any]:
    """That an answer has the form of RFC 9457; its members."""
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body.keys() <= {"type", "title", "status", "detail", "instance", "errors"}
    assert (answer.status_code, body["status"]) == (status, status)
    assert body["type"] == (kind if ":" in kind else f"urn:duly:problem:{kind}")
    assert body["title"]
    assert body["instance"] == f"urn:uuid:{answer.headers['x-correlation-id']}"
    return body


# -- where it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ({"lines": [{"sku": "a", "amount": 1}, {"sku": "toolong"}]}, ["$.lines[1].sku", "$.lines[1].amount"]),
        ({"lines": "none"}, ["$.lines"]),
        ({"lines": [[]]}, ["$.lines[0]"]),
        ({"pet": {"kind": "cat", "lives": 10}}, ["$.pet.lives"]),
        ({"pet": {"kind": "cat"}}, ["$.pet.lives"]),
        ({"pet": {"kind": "cow"}}, ["$.pet"]),
        ({"pet": {"kind": "dog", "tricks": ["sit", 1]}}, ["$.pet.tricks[1]"]),
        ({"plain": {"kind": "dog", "tricks": [1]}}, ["$.plain.kind", "$.plain.lives", "$.plain.tricks[0]"]),
        ({"by_name": {"a b": "x", "plain": "y", "it's": "z"}}, ["$.by_name['a b']", "$.by_name.plain",
                                                               "$.by_name['it\\'s']"]),
        ({"by_name": {"\u2028\x00" + "x" * 99: ""}}, ["$.by_name['??" + "x" * 58 + "']"]),
        ({"parsed": "{"}, ["$.parsed"]),
        ([], ["$"]),
        (None, ["$"]),
    ],
)  # fmt: skip
async def test_a_wrong_body_is_named_by_its_json_path(shop: Client, body: Any, paths: list[str]) -> None:
    """E5.5: in lists, in unions, in objects with any names."""
    answer = await shop.post("/problems/everything", content=json.dumps(body), headers=JSON)
    errors = check_problem(answer, 422, "invalid")["errors"]
    assert [error["path"] for error in errors] == paths
    assert {error["in"] for error in errors} == {"body"}
    assert all(error["detail"] for error in errors)


async def test_a_wrong_path_query_or_header_is_named_too(shop: Client) -> None:
    """E5.5."""
    answer = await shop.get("/problems/read/x?limit=11", headers={"X-Size": "y"})
    errors = check_problem(answer, 422, "invalid")["errors"]
    assert {(error["in"], error["path"]) for error in errors} == {
        ("path", "$.number"), ("query", "$.limit"), ("header", "$.x-size"),
    }  # fmt: skip


async def test_a_body_that_is_missing_is_said_to_be(shop: Client) -> None:
    answer = await shop.post("/problems/everything")
    assert check_problem(answer, 422, "invalid")["errors"][0]["path"] == "$"


async def test_the_list_of_errors_is_bounded(shop: Client) -> None:
    answer = await shop.post("/problems/everything", json={"lines": [{}] * 1000})
    assert len(check_problem(answer, 422, "invalid")["errors"]) == 20


# -- what cannot be read ---------------------------------------------------------------------------------------------

UNREADABLE = {
    "cut off": b'{"anything": ',
    "two": b"{}{}",
    "not UTF-8": b'{"anything": "\xff"}',
    "NaN": b'{"anything": NaN}',
    "minus infinity": b'{"anything": -Infinity}',
    "an infinite number": b'{"anything": 1e400}',
    "half a pair": b'{"anything": "\\ud800"}',
    "half a pair in bytes": b'{"anything": "\xed\xa0\x80"}',
    "half a pair in another encoding": '{"anything": "\\ud800"}'.encode("utf-16-le"),
    "another encoding": '{"anything": 1}'.encode("utf-32"),
    "half a pair as a name": b'{"a\\uDFFF": 1}',
    "a member twice": b'{"anything": 1, "anything": 2}',
    "a member twice, below": b'{"anything": [{"a": 1, "a": 1}]}',
    "65 levels": b'{"anything": ' + b"[" * 64 + b"]" * 64 + b"}",
    "a thousand levels": b'{"anything": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    "half a million levels": b"[" * 500_000,
    "five thousand digits": b'{"anything": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "k"}], ids=["no key", "key"])
async def test_a_body_that_cannot_be_read_is_400(shop: Client, body: bytes, key: dict[str, str]) -> None:
    """E5.5: what readers of JSON disagree about is not guessed at, and nothing falls over."""
    answer = await shop.post("/problems/everything", content=body, headers={**JSON, **key})
    assert "JSON" in check_problem(answer, 400, "malformed")["detail"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"anything": ' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"anything": [' + b",".join([b"{}"] * 200) + b"]}",
        b'{"anything": "\\ud834\\udd1e"}',
        b'{"anything": "\\u0000"}',
        b'\xef\xbb\xbf{"anything": "\xc3\xa9"}',
        b'{"anything": ' + b"9" * 4000 + b"}",
        b'{"anything": [1.50, -0.0, 1e300, true, null, "[[{{"]}',
    ],
    ids=["64 levels", "many of few levels", "a whole pair", "NUL", "a byte order mark", "4000 digits", "plain"],
)
async def test_what_is_json_is_read(shop: Client, body: bytes) -> None:
    answer = await shop.post("/problems/everything", content=body, headers=JSON)
    assert (answer.status_code, answer.json()) == (200, json.loads(body))


@pytest.mark.parametrize(
    ("how", "given"),
    [
        ("text", "a\x00b"), ("text", 5), ("number", 10**400), ("number", "x"), ("json", '"\\u0000"'), ("json", "{"),
        ("uuid", "x"), ("check", "c"), ("missing", "c"), ("division", "c"),
        ("indexed", random.Random(1).randbytes(9_000).hex()),
    ],
    ids=lambda given: repr(given)[:12],
)  # fmt: skip
async def test_what_cannot_be_stored_is_422(shop: Client, how: str, given: Any) -> None:
    """E5.5: NUL in text, a number too large, a value that a constraint forbids: never 500."""
    answer = await shop.post(f"/problems/store/{how}", json={"given": given})
    check_problem(answer, 422, "invalid")


@pytest.mark.parametrize("how", ["duplicate", "excluded"])
async def test_a_unique_violation_that_nobody_foresaw_is_409(shop: Client, dsn: str, how: str) -> None:
    """E5.5: and nothing of the statement stays."""
    rows(dsn, "CREATE TABLE rooms (name text, days int4range, EXCLUDE USING gist (days WITH &&))")
    check_problem(await shop.post(f"/problems/store/{how}", json={"given": "c"}), 409, "conflict")
    assert rows(dsn, "SELECT count(*) FROM stock") == [(2,)]


# -- what is not there -----------------------------------------------------------------------------------------------


async def test_an_unknown_route_is_404_and_a_wrong_method_405_with_what_is_allowed(shop: Client) -> None:
    """E5.5."""
    check_problem(await shop.get("/nowhere"), 404)
    wrong = await shop.put("/problems/everything")
    check_problem(wrong, 405)
    assert wrong.headers["allow"] == "POST"
    check_problem(await shop.request("BREW", "/problems/everything"), 405)


@pytest.mark.parametrize(
    ("what", "status", "detail"), [("gone", 410, "moved away"), ("plain", 404, None), ("strange", 499, None),
                                   ("translated", 410, "the outer one")]
)  # fmt: skip
async def test_an_http_exception_keeps_its_status(shop: Client, what: str, status: int, detail: str | None) -> None:
    """E5.5: an unusual one, too; and whatever it was caused by."""
    answer = await shop.post(f"/problems/raise/{what}", json={"given": 1})
    assert check_problem(answer, status).get("detail") == detail


async def test_an_exception_that_is_no_error_is_no_problem(shop: Client) -> None:
    """Not modified, and elsewhere."""
    there = await shop.post("/problems/raise/elsewhere", json={"given": 1})
    assert (there.status_code, there.headers["location"], there.content) == (307, "/there", b"")
    assert (await shop.post("/problems/raise/unmodified", json={"given": 1})).status_code == 304
    assert (await shop.post("/problems/raise/gone", json={"given": 1})).status_code == 410  # the connection is sound


async def test_a_text_that_cannot_be_written_does_not_break_the_problem(shop: Client) -> None:
    answer = await shop.post("/problems/raise/odd", json={"given": 1})
    assert check_problem(answer, 404, "odd")["detail"] == "half a ? pair"
    assert answer.json()["title"] == "Odd"


# -- what nobody foresaw ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("raise/unforeseen", "Unforeseen"), ("raise/own", "OwnFault"), ("raise/response", "PydanticSerializationError"),
        ("raise/context", "KeyError"), ("store/syntax", "ProgrammingError"), ("store/no table", "ProgrammingError"),
        ("after-conflict", "KeyError"),
    ],
)  # fmt: skip
async def test_an_unforeseen_error_is_500_says_nothing_and_is_logged_once(
    shop: Client, logs: list[Any], path: str, error: str
) -> None:
    """E5.5: the correlation id leads to one line that says where it was; its message stays out of both."""
    answer = await shop.post(f"/problems/{path}", json={"given": CANARY})
    body = check_problem(answer, 500, "own-fault" if error == "OwnFault" else "about:blank")
    assert "Unforeseen" not in answer.text
    assert CANARY not in answer.text
    failures = [line for line in logs if line["log_level"] in {"warning", "error"}]
    assert [(line["event"], line["error"]) for line in failures] == [("request_failed", error)]
    assert any("test_problems.py" in frame for frame in failures[0]["where"]) or path == "raise/response"
    assert CANARY not in str(logs)
    assert body["instance"]


async def test_a_databases_error_is_logged_by_its_code_and_names(shop: Client, logs: list[Any]) -> None:
    """E5.5: what an operator needs, and no value."""
    await shop.post("/problems/store/check", json={"given": CANARY})
    [line] = [line for line in logs if line["event"] == "database_said_no"]
    assert (line["state"], line["constraint"], line["table"]) == ("23514", "stock_amount_check", "stock")


@pytest.mark.parametrize("how", STATEMENTS)
async def test_no_error_of_the_database_repeats_a_value(shop: Client, logs: list[Any], how: str) -> None:
    """E5.5: its messages do quote; neither the answer nor the log does."""
    answer = await shop.post(f"/problems/store/{how}", json={"given": CANARY})
    assert CANARY not in answer.text
    assert CANARY not in str(logs)


@pytest.mark.parametrize(
    "body",
    [
        {"id": CANARY}, {"zone": CANARY}, {"number": CANARY}, {"checked": CANARY}, {"parsed": CANARY},
        {"pet": {"kind": CANARY}}, {"plain": {"kind": CANARY}}, {"lines": [{"sku": CANARY, "amount": CANARY}]},
        {"by_name": {"a": CANARY}}, CANARY, [CANARY], {"anything": {"a": [CANARY, {"b": CANARY + "\n'\u2028"}]}},
    ],
)  # fmt: skip
async def test_a_wrong_value_is_not_repeated(shop: Client, logs: list[Any], body: Any) -> None:
    """E5.5: not even by a message that Pydantic, or a validator, made of it."""
    answer = await shop.post("/problems/everything", json=body)
    check_problem(answer, 422, "invalid")
    assert CANARY not in answer.text
    assert CANARY not in str(logs)


def test_canaries_through_every_input_are_in_no_log_of_a_real_process(dsn: str) -> None:
    """E5.5: body, query, path, headers, key and caller, right and wrong ones; the lines are JSON, the server's too."""
    make_tables(dsn)
    with shop_process(dsn) as (url, process):
        with httpx2.Client(base_url=url) as client:
            headers = dict.fromkeys(
                ("X-Caller", "traceparent", "X-Correlation-Id", "User-Agent", "Authorization", "Cookie"), CANARY
            )
            paths = ("/orders", f"/orders/any/{CANARY}", f"/orders/failing/{CANARY}", f"/{CANARY}")
            bodies = ({"sku": CANARY, "quantity": CANARY}, {"sku": CANARY}, {"sku": f"{CANARY}\x00"})
            for key, (path, body) in enumerate(itertools.product(paths, bodies)):
                for _ in range(2):
                    keyed = {**headers, "Idempotency-Key": f"{CANARY}-{key}"}
                    answer = client.post(f"{path}?q={CANARY}", json=body, headers=keyed)
                    assert CANARY not in answer.text.replace(f'"sku":"{CANARY}', "")  # an order says what it is of
            client.get("/the-lines-of-those-before-are-written")
        process.terminate()
        said = process.communicate(timeout=10)[1]
    lines = [json.loads(line) for line in said.splitlines()]
    assert {"request", "request_failed", "database_said_no"} <= {line["event"] for line in lines}
    assert CANARY not in said


# -- for whom --------------------------------------------------------------------------------------------------------


async def test_routes_that_are_none_of_ours_answer_with_problems_too(db: Database) -> None:
    """E5.5: a plain APIRouter in an application on which we are installed."""
    others = APIRouter()

    @others.post("/others")
    async def other(number: int) -> None:
        raise Unforeseen(f"about {number}")

    api: FastAPI = create_shop(db)
    api.include_router(others)
    async with served(api) as client:
        check_problem(await client.post("/others?number=x"), 422, "invalid")
        check_problem(await client.post("/others?number=1"), 500)


async def test_many_errors_at_once_keep_their_ids_apart(dsn: str) -> None:
    """E5.4, E5.5."""
    async with open_shop(dsn, router) as shop:
        asked = [str(UUID(int=number)) for number in range(1, 30)]
        answers = await asyncio.gather(
            *(shop.post("/problems/raise/gone", json={"given": 1}, headers={"X-Correlation-Id": one}) for one in asked)
        )
        assert [answer.json()["instance"] for answer in answers] == [f"urn:uuid:{one}" for one in asked]
