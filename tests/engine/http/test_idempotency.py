"""E4: the same key with the same request has one effect and one answer, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import httpx2
import pytest
from fastapi import Depends, Header, Request
from fastapi.responses import Response, StreamingResponse
from sqlalchemy import text

from duly.auth.principals import Principal
from duly.db import Database
from duly.errors import Forbidden
from duly.http import RequestTx, Router, transactions
from duly.settings import Settings
from duly.testing import BusinessClock
from tests.engine.http.serving import served
from tests.engine.idempotency.shop import (
    ODD_BODY,
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
from tests.engine.jobs.witness import until
from tests.support import rows, value

Client = httpx2.AsyncClient
ONE, TWO, NONE = (1, 1, 1), (2, 2, 2), (0, 0, 0)
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def shop(dsn: str) -> AsyncIterator[Client]:
    make_tables(dsn)
    async with open_shop(dsn) as client:
        yield client


def with_key(key: str = "k", **headers: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **headers}


def is_replay(answer: httpx2.Response) -> bool:
    return bool(answer.headers.get("idempotent-replayed") == "true")


# -- the same answer ------------------------------------------------------------------------------------------------


async def test_a_replay_has_the_same_status_body_and_headers_and_only_it_says_so(shop: Client, dsn: str) -> None:
    """E4.2: effect, event and job once; the answer again and again."""
    first = await shop.post("/orders", json={"sku": "a"}, headers=with_key())
    assert first.status_code == 201
    assert "idempotent-replayed" not in first.headers
    for _ in range(2):
        again = await shop.post("/orders", json={"sku": "a"}, headers=with_key())
        assert (again.status_code, again.content) == (201, first.content)
        assert is_replay(again)
        for name in ("location", "content-type", "content-length"):
            assert again.headers[name] == first.headers[name]
        assert again.headers.get_list("link") == ["</a>; rel=prev", "</b>; rel=next"]
    assert effects(dsn) == ONE


async def test_what_belongs_to_one_exchange_only_is_not_replayed(shop: Client) -> None:
    """E4.2, E5.4: the correlation id is that of the replay, and a cookie is not handed out again."""
    first = await shop.post("/orders", json={}, headers=with_key())
    again = await shop.post("/orders", json={}, headers=with_key())
    assert "set-cookie" in first.headers
    assert "set-cookie" not in again.headers
    assert again.headers["x-correlation-id"] != first.headers["x-correlation-id"]
    assert len(again.headers.get_list("x-correlation-id")) == 1


async def test_an_answer_that_no_encoder_would_write_is_replayed_byte_for_byte(shop: Client, dsn: str) -> None:
    """E4.2: spaces, order, escapes, and the digits of numbers."""
    answers = [await shop.post("/orders/odd", headers=with_key()) for _ in range(2)]
    assert [answer.content for answer in answers] == [ODD_BODY, ODD_BODY]
    assert {(answer.status_code, answer.headers["content-type"]) for answer in answers} == {
        (202, "application/vnd.shop+json")
    }
    assert [is_replay(answer) for answer in answers] == [False, True]
    assert effects(dsn) == ONE


async def test_an_answer_without_a_body_is_replayed_without_one(shop: Client) -> None:
    answers = [await shop.delete("/orders/1", headers=with_key()) for _ in range(2)]
    assert [(answer.status_code, answer.content, is_replay(answer)) for answer in answers] == [
        (204, b"", False),
        (204, b"", True),
    ]
    assert "content-length" not in answers[1].headers


# -- the same request, and another ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"note":{"x":1,"y":[1.50,null]},"sku":"\xc3\xa9"}',
        b' {\n"sku" :\t"\xc3\xa9", "note": {"y": [1.50, null], "x": 1}}\r\n',
        b'{"sku":"\\u00e9","note":{"x":1,"y":[1.50,null]}}',
    ],
    ids=["as it was", "spaces and order", "escapes"],
)
async def test_spaces_order_and_escapes_do_not_make_another_request(shop: Client, dsn: str, body: bytes) -> None:
    """E4.2: the normalised body is what counts."""
    first = b'{"sku":"\xc3\xa9","note":{"x":1,"y":[1.50,null]}}'
    await shop.post("/orders", content=first, headers=with_key(**JSON))
    again = await shop.post("/orders", content=body, headers=with_key(**JSON))
    assert is_replay(again)
    assert effects(dsn) == ONE


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/orders/any/x?a=1", b'{"n":1.00}'),
        ("POST", "/orders/any/x?a=1", b'{"n":1}'),
        ("POST", "/orders/any/x?a=1", b'{"n":{"number":"1.0"}}'),
        ("POST", "/orders/any/x?a=1", b'{"n":"1.0"}'),
        ("POST", "/orders/any/x?a=1", b'{"n":1.0,"m":null}'),
        ("POST", "/orders/any/x?a=1", b""),
        ("POST", "/orders/any/x?a=1", b"no JSON"),
        ("POST", "/orders/any/x?a=2", b'{"n":1.0}'),
        ("POST", "/orders/any/x", b'{"n":1.0}'),
        ("POST", "/orders/any/y?a=1", b'{"n":1.0}'),
        ("PUT", "/orders/any/x?a=1", b'{"n":1.0}'),
        ("PATCH", "/orders/any/x?a=1", b'{"n":1.0}'),
        ("DELETE", "/orders/any/x?a=1", b'{"n":1.0}'),
    ],
)
async def test_another_value_method_path_or_query_with_the_same_key_is_a_conflict(
    shop: Client, dsn: str, method: str, path: str, body: bytes
) -> None:
    """E4.2: 409, and nothing runs."""
    await shop.post("/orders/any/x?a=1", content=b'{"n":1.0}', headers=with_key(**JSON))
    other = await shop.request(method, path, content=body, headers=with_key(**JSON))
    assert other.status_code == 409
    assert other.headers["content-type"] == "application/problem+json"
    assert other.json()["type"] == "urn:duly:problem:key-reused"
    assert "idempotent-replayed" not in other.headers
    assert effects(dsn) == ONE


@pytest.mark.parametrize(
    ("one", "other"), [("x%23a", "x%23b"), ("x%3Fa=1", "x?a=1"), ("x%23", "x"), ("x%2525", "x%25")]
)
async def test_a_path_with_escaped_signs_is_not_mistaken_for_another(
    shop: Client, dsn: str, one: str, other: str
) -> None:
    """E4.2: an escaped # or ? is part of the path, not its end."""
    assert (await shop.post(f"/orders/any/{one}", headers=with_key())).status_code == 200
    assert (await shop.post(f"/orders/any/{other}", headers=with_key())).status_code == 409
    assert effects(dsn) == ONE


async def test_a_body_that_is_not_json_counts_by_its_bytes(shop: Client, dsn: str) -> None:
    """E4.2: also one that only says it is JSON."""
    for number, kind in enumerate(("text/plain", "application/octet-stream", "application/json", "")):
        headers = with_key(f"k{number}", **({"Content-Type": kind} if kind else {}))
        same = [await shop.post("/orders/any/x", content=b'{"a": 1} \xff', headers=headers) for _ in range(2)]
        assert [(answer.status_code, is_replay(answer)) for answer in same] == [(200, False), (200, True)]
        assert (await shop.post("/orders/any/x", content=b'{"a":1} \xff', headers=headers)).status_code == 409
    assert keys(dsn) == 4


# -- what leaves a key, and what does not -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "status"), [("404", 404), ("409", 409), ("422", 422), ("http", 418), ("500", 500), ("return-503", 503)]
)
async def test_a_route_that_fails_leaves_no_key_and_a_retry_runs_anew(
    shop: Client, dsn: str, how: str, status: int
) -> None:
    """E4.3: whatever it wrote is gone, too."""
    for _ in range(2):
        answer = await shop.post(f"/orders/failing/{how}", headers=with_key())
        assert answer.status_code == status
        assert "idempotent-replayed" not in answer.headers
    assert (effects(dsn), keys(dsn)) == (NONE, 0)
    assert value(dsn, "SELECT last_value FROM orders_id_seq") == 2  # it did run, twice
    assert (await shop.post("/orders", json={}, headers=with_key())).status_code == 201


@pytest.mark.parametrize("status", [400, 404, 409, 422])
async def test_a_refusal_that_the_route_returns_is_an_answer_like_any_other(
    shop: Client, dsn: str, status: int
) -> None:
    """E4.3: returned, not raised: what was written stays, and the refusal is replayed."""
    answers = [await shop.post(f"/orders/failing/return-{status}", headers=with_key()) for _ in range(2)]
    assert [(answer.status_code, is_replay(answer)) for answer in answers] == [(status, False), (status, True)]
    assert answers[0].content == answers[1].content
    assert effects(dsn) == ONE


async def test_a_request_that_is_not_valid_needs_no_database_at_all() -> None:
    """E4.3: nothing listens at that address."""
    async with open_shop("postgresql://nobody@127.0.0.1:1/none") as shop:
        wrong = await shop.post("/orders", json={"quantity": "many"}, headers=with_key())
        assert wrong.status_code == 422
        assert (await shop.post("/orders", json={}, headers=with_key("a b"))).status_code == 400
        assert (await shop.post("/orders", json={}, headers=with_key())).status_code == 503


async def test_a_request_that_is_not_valid_does_not_use_up_its_key(shop: Client, dsn: str) -> None:
    """E4.3: the corrected one may carry it."""
    assert (await shop.post("/orders", json={"quantity": "many"}, headers=with_key())).status_code == 422
    assert (await shop.post("/orders", json={"quantity": 2}, headers=with_key())).status_code == 201
    assert effects(dsn) == ONE


async def test_another_callers_key_never_replays(shop: Client, dsn: str) -> None:
    """E4.4: the same key, the same request, another caller: another effect and another answer."""
    alice = await shop.post("/orders", json={}, headers=with_key(**{"X-Caller": "alice"}))
    bob = await shop.post("/orders", json={}, headers=with_key(**{"X-Caller": "bob"}))
    assert (bob.status_code, is_replay(bob)) == (201, False)
    assert bob.content != alice.content
    again = await shop.post("/orders", json={}, headers=with_key(**{"X-Caller": "alice"}))
    assert (again.content, is_replay(again)) == (alice.content, True)
    other = await shop.post("/orders", json={"sku": "b"}, headers=with_key(**{"X-Caller": "carol"}))
    assert other.status_code == 201  # not even a conflict tells that the key is known
    assert sorted(rows(dsn, "SELECT caller FROM orders")) == [("alice",), ("bob",), ("carol",)]


async def test_the_caller_is_the_principal_of_the_token_where_there_is_one(dsn: str) -> None:
    """E4.4: issuer and subject; another provider's alice is another."""
    make_tables(dsn)
    async with open_shop(dsn, guarded) as shop:
        for number, issuer in enumerate(("https://a", "https://b"), 1):
            for caller in ("x", "y"):  # what else the request says of itself does not matter
                headers = with_key(**{"X-Issuer": issuer, "X-Caller": caller})
                assert (await shop.post("/guarded", headers=headers)).json() == {"number": number}
    assert sorted(rows(dsn, "SELECT caller FROM duly.idempotency_keys")) == [("https://a alice",), ("https://b alice",)]


async def test_whoever_lost_the_right_gets_no_replay(dsn: str) -> None:
    """E4.4: rights are checked before keys."""
    make_tables(dsn)
    async with open_shop(dsn, guarded) as shop:
        assert (await shop.post("/guarded", headers=with_key(**{"X-Issuer": "https://a"}))).status_code == 200
        refused = await shop.post("/guarded", headers=with_key(**{"X-Issuer": ""}))
        assert (refused.status_code, "number" in refused.text) == (403, False)


async def test_another_caller_does_not_wait_for_the_same_key(shop: Client, dsn: str) -> None:
    """E4.4."""
    with closed_door(dsn) as door:
        slow = asyncio.create_task(shop.post("/orders/waiting", json={}, headers=with_key()))
        await until(lambda: waiting_at(dsn, "advisory") == 1)
        bob = await shop.post("/orders", json={}, headers=with_key(**{"X-Caller": "bob"}))
        assert bob.status_code == 201
        door.close()
        assert (await slow).status_code == 201


@pytest.mark.parametrize(
    "given", [[b""], [b"x" * 256], [b"a b"], [b"a\tb"], [b"\xc3\xa9"], [b"\x80"], [b"a", b"a"], [b"a", b"b"]]
)
async def test_a_key_that_cannot_be_one_is_refused(shop: Client, dsn: str, given: list[bytes]) -> None:
    """E4.2: empty, too long, with spaces, not ASCII, or two of them: 400, and nothing runs."""
    answer = await shop.post("/orders", json={}, headers=[(b"Idempotency-Key", key) for key in given])
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:duly:problem:malformed")
    assert effects(dsn) == NONE


@pytest.mark.parametrize("key", ["x" * 255, "!", "~", '"8e03978e-40d5-43dd-bc93-6894a57f9324"'])
async def test_a_key_of_visible_ascii_is_taken_as_it_is(shop: Client, key: str) -> None:
    answers = [await shop.post("/orders", json={}, headers=with_key(key)) for _ in range(2)]
    assert [is_replay(answer) for answer in answers] == [False, True]


guarded = Router(prefix="/guarded", dependencies=[Depends(name_caller)])


async def check_rights(request: Request, x_issuer: Annotated[str, Header()]) -> None:
    """A token, for want of one."""
    if not x_issuer:
        raise Forbidden("not any more")
    request.state.principal = Principal("alice", x_issuer, frozenset(), frozenset(), None)


@guarded.post("", dependencies=[Depends(check_rights)])
async def place_guarded(request: Request, tx: RequestTx) -> dict[str, int]:
    return {"number": await add_order(tx, request, "a")}


# -- time to live -----------------------------------------------------------------------------------------------------


async def test_after_its_time_a_key_runs_anew_before_any_clean_up(shop: Client, dsn: str, clock: BusinessClock) -> None:
    """E4.5: 24 h; the second life is as long as the first."""
    clock.freeze(clock.now())
    assert (await shop.post("/orders", json={"sku": "a"}, headers=with_key())).status_code == 201
    clock.advance(hours=23, minutes=59)
    assert is_replay(await shop.post("/orders", json={"sku": "a"}, headers=with_key()))
    clock.advance(minutes=1)
    anew = await shop.post("/orders", json={"sku": "b"}, headers=with_key())
    assert (anew.status_code, is_replay(anew)) == (201, False)
    clock.advance(hours=23)
    assert is_replay(await shop.post("/orders", json={"sku": "b"}, headers=with_key()))
    assert (effects(dsn), keys(dsn)) == (TWO, 1)


async def test_an_expired_key_that_fails_anew_keeps_no_old_answer(shop: Client, dsn: str, clock: BusinessClock) -> None:
    """E4.3, E4.5: the take-over is rolled back with the rest, and the row is still an expired one."""
    await shop.post("/orders", json={}, headers=with_key())
    clock.advance(hours=25)
    assert (await shop.post("/orders/failing/404", headers=with_key())).status_code == 404
    anew = await shop.post("/orders", json={}, headers=with_key())
    assert (anew.status_code, is_replay(anew)) == (201, False)


async def test_the_time_to_live_can_be_configured(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E4.5: as idempotency_ttl_hours."""
    make_tables(dsn)
    api = create_shop(db)
    api.state.settings = Settings(idempotency_ttl_hours=1)
    async with served(api) as shop:
        await shop.post("/orders", json={}, headers=with_key())
        assert is_replay(await shop.post("/orders", json={}, headers=with_key()))
        clock.advance(hours=1)
        assert not is_replay(await shop.post("/orders", json={}, headers=with_key()))


# -- duplicates at the same time --------------------------------------------------------------------------------------


def in_transaction(dsn: str) -> int:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'duly'"
        " AND xact_start IS NOT NULL"
    )
    return int(value(dsn, query))


async def test_fifty_duplicates_of_a_slow_request_have_one_effect_and_one_answer(shop: Client, dsn: str) -> None:
    """E4.4: with five connections; while they wait they hold none, and others are served."""
    with closed_door(dsn) as door:
        posts = [
            asyncio.create_task(shop.post("/orders/waiting", json={"sku": "a"}, headers=with_key())) for _ in range(50)
        ]
        await until(lambda: waiting_at(dsn, "advisory") == 1 and transactions._turns._waiting == 49)
        unrelated = [shop.post("/orders", json={"sku": "b"}, headers=with_key(f"other{n}")) for n in range(10)]
        assert {answer.status_code for answer in await asyncio.gather(*unrelated)} == {201}
        assert in_transaction(dsn) == 1
        door.close()
        answers = await asyncio.gather(*posts)
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}
    assert sorted(is_replay(answer) for answer in answers) == [False] + [True] * 49
    assert rows(dsn, "SELECT sku, count(*) FROM orders GROUP BY 1 ORDER BY 1") == [("a", 1), ("b", 10)]
    assert transactions._turns._locks == {}
    assert transactions._turns._waiting == 0


reading = Router(prefix="/reading", dependencies=[Depends(name_caller)])


async def look(tx: RequestTx) -> int:
    """A dependency that uses the transaction before the key is reserved, as one that loads the user would."""
    return int((await tx.execute(text("SELECT 1"))).scalar_one())


@reading.post("/waiting")
async def read_and_wait(request: Request, tx: RequestTx, seen: Annotated[int, Depends(look)]) -> dict[str, int]:
    number = await add_order(tx, request, "a")
    await tx.execute(text("SELECT pg_advisory_xact_lock_shared(77)"))
    return {"number": number, "seen": seen}


async def test_duplicates_hold_no_connection_even_when_a_dependency_used_one(dsn: str) -> None:
    """E4.4: what the dependency read is given back; the request starts again when its turn has come."""
    make_tables(dsn)
    async with open_shop(dsn, reading, connect_timeout_seconds=2) as shop:
        with closed_door(dsn) as door:
            posts = [asyncio.create_task(shop.post("/reading/waiting", headers=with_key())) for _ in range(20)]
            await until(lambda: waiting_at(dsn, "advisory") == 1 and transactions._turns._waiting == 19)
            assert (await shop.post("/orders", json={}, headers=with_key("other"))).status_code == 201
            assert in_transaction(dsn) == 1
            door.close()
            answers = await asyncio.gather(*posts)
        assert {(answer.status_code, answer.content) for answer in answers} == {(200, answers[0].content)}
        assert effects(dsn) == TWO


async def test_when_the_first_one_fails_a_waiting_one_runs(shop: Client, dsn: str) -> None:
    """E4.3, E4.4: in one process; its failure is its own, and not replayed."""
    with closed_door(dsn) as door:
        first = asyncio.create_task(shop.post("/orders/waiting", json={}, headers=with_key(**{"X-Fail-After": "1"})))
        await until(lambda: waiting_at(dsn, "advisory") == 1)
        second = asyncio.create_task(shop.post("/orders/waiting", json={}, headers=with_key()))
        await until(lambda: transactions._turns._waiting == 1)
        door.close()
        assert ((await first).status_code, (await second).status_code) == (409, 201)
    assert not is_replay(await second)
    assert effects(dsn) == ONE


async def test_waiting_for_another_is_bounded_in_time_and_number(
    shop: Client, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4.4: then it is 503 with Retry-After, once, and the key is not lost."""
    monkeypatch.setattr(transactions, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(transactions, "MOST_WAITING", 3)
    with closed_door(dsn) as door:
        slow = asyncio.create_task(shop.post("/orders/waiting", json={}, headers=with_key()))
        await until(lambda: waiting_at(dsn, "advisory") == 1)
        late = [shop.post("/orders/waiting", json={}, headers=with_key()) for _ in range(5)]
        answers = await asyncio.gather(*late)
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.json()["type"] for answer in answers} == {"urn:duly:problem:still-running"}
        assert all(answer.headers["retry-after"] for answer in answers)
        assert sum("too many" in answer.json()["detail"] for answer in answers) == 2
        assert (await shop.post("/orders", json={}, headers=with_key("other"))).status_code == 201
        door.close()
        assert (await slow).status_code == 201
    assert is_replay(await shop.post("/orders/waiting", json={}, headers=with_key()))


# -- where keys do not count, and what cannot be stored ----------------------------------------------------------------

special = Router(prefix="/special", dependencies=[Depends(name_caller)])


@special.post("/not-idempotent", openapi_extra={"x-idempotent": False})
async def not_idempotent(request: Request, tx: RequestTx) -> dict[str, int]:
    return {"number": await add_order(tx, request, "a")}


@special.api_route("/mixed", methods=["GET", "POST"])
async def mixed(request: Request, tx: RequestTx) -> dict[str, int]:
    return {"number": await add_order(tx, request, "a")}


@special.post("/large")
async def answer_at_large(request: Request, tx: RequestTx, size: int) -> Response:
    await add_order(tx, request, "a")
    return Response(memoryview(b"x" * size), media_type="text/plain")


@special.post("/stream")
async def answer_in_pieces(request: Request, tx: RequestTx) -> StreamingResponse:
    await add_order(tx, request, "a")
    return StreamingResponse(iter([b"one", b"two"]))


@pytest.fixture
async def specials(dsn: str) -> AsyncIterator[Client]:
    make_tables(dsn)
    async with open_shop(dsn, special) as client:
        yield client


async def test_a_route_can_leave_keys_out(specials: Client, dsn: str) -> None:
    """E4.1: and says so in the document."""
    for _ in range(2):
        answer = await specials.post("/special/not-idempotent", headers=with_key("any thing"))
        assert (answer.status_code, is_replay(answer)) == (200, False)
    assert (effects(dsn), keys(dsn)) == (TWO, 0)


async def test_a_safe_method_takes_no_key_also_beside_an_unsafe_one(specials: Client, dsn: str) -> None:
    """E4.1: POST, PUT, PATCH and DELETE do."""
    for _ in range(2):
        assert not is_replay(await specials.get("/special/mixed", headers=with_key("not a key")))
    assert (effects(dsn), keys(dsn)) == (TWO, 0)
    answers = [await specials.post("/special/mixed", headers=with_key()) for _ in range(2)]
    assert [is_replay(answer) for answer in answers] == [False, True]


async def test_an_answer_that_cannot_be_stored_leaves_no_effect(specials: Client, dsn: str) -> None:
    """E4.3: too large, or streamed: a mistake of the route, so 500, and nothing is kept."""
    largest = await specials.post("/special/large?size=1048576", headers=with_key("fits"))
    again = await specials.post("/special/large?size=1048576", headers=with_key("fits"))
    assert (largest.status_code, largest.content == again.content, is_replay(again)) == (200, True, True)
    for path in ("/special/large?size=1048577", "/special/stream"):
        assert (await specials.post(path, headers=with_key("k"))).status_code == 500
    assert (effects(dsn), keys(dsn)) == (ONE, 1)
    assert (await specials.post("/special/stream")).content == b"onetwo"  # without a key nothing is stored
    assert effects(dsn) == TWO
