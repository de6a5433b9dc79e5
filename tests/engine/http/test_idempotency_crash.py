"""E4.3, E4.4 and E5.6 when processes die and wires break: one effect, the right answer, and nobody is stuck."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx2
import pytest

import duly.db
from duly.db import Database
from duly.settings import Settings
from tests.engine.http.serving import served
from tests.engine.idempotency.shop import (
    closed_door,
    create_shop,
    effects,
    keys,
    make_tables,
    open_shop,
    shop_process,
    waiting_at,
)
from tests.engine.jobs.wire import Cut, Wire, breaking_wire
from tests.engine.jobs.witness import terminate_backends, until
from tests.support import value

KEY = {"Idempotency-Key": "k"}
ONE, NONE = (1, 1, 1), (0, 0, 0)
QUICKLY_SECONDS = 5.0


def is_replay(answer: httpx2.Response) -> bool:
    return bool(answer.headers.get("idempotent-replayed") == "true")


async def post(url: str, path: str = "/orders", **headers: str) -> httpx2.Response:
    """One request from a client of its own."""
    async with httpx2.AsyncClient(base_url=url, timeout=20) as client:
        return await client.post(path, json={"sku": "a"}, headers={**KEY, **headers})


# -- kill -9 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "happened"),
    [("idempotency.reserved", False), ("http.before_commit", False), ("http.before_response", True)],
)
async def test_a_client_that_retries_after_kill_9_gets_its_answer_and_one_effect(
    dsn: str, point: str, happened: bool
) -> None:
    """E4.3: wherever the process dies, another one resolves it at once: no lease, no time to live to wait for."""
    make_tables(dsn)
    with shop_process(dsn, failpoints=f"{point}=kill9") as (url, process):
        with pytest.raises(httpx2.TransportError):
            await post(url)
        assert process.wait(10) == -signal.SIGKILL
    with shop_process(dsn) as (url, _):
        async with asyncio.timeout(QUICKLY_SECONDS):
            answer = await post(url)
        assert (answer.status_code, is_replay(answer)) == (201, happened)
        assert answer.headers["location"].startswith("/orders/")
        assert (await post(url)).content == answer.content
    assert (effects(dsn), keys(dsn)) == (ONE, 1)


async def test_a_request_that_waits_for_a_process_that_is_killed_runs_itself(dsn: str) -> None:
    """E4.4: the wait ends with the other's connection."""
    make_tables(dsn)
    with closed_door(dsn) as door, shop_process(dsn) as (first, process), shop_process(dsn) as (second, _):
        lost = asyncio.create_task(post(first, "/orders/waiting"))
        await until(lambda: waiting_at(dsn, "advisory") == 1)
        waiting = asyncio.create_task(post(second, "/orders/waiting"))
        await until(lambda: waiting_at(dsn, "transactionid") == 1)
        process.kill()
        with pytest.raises(httpx2.TransportError):
            await lost
        terminate_backends(
            dsn, "wait_event = 'advisory'"
        )  # a backend that waits for a lock does not look at its client
        await until(lambda: waiting_at(dsn, "advisory") == 1)
        door.close()
        answer = await waiting
        assert (answer.status_code, is_replay(answer)) == (201, False)
    assert effects(dsn) == ONE


async def test_duplicates_in_two_processes_wait_in_the_database_and_replay(dsn: str) -> None:
    """E4.4: one runs; each of the other processes waits with one connection, however many duplicates it has."""
    make_tables(dsn)
    with closed_door(dsn) as door, shop_process(dsn) as (first, _), shop_process(dsn) as (second, _):
        posts = [asyncio.create_task(post(first, "/orders/waiting"))]
        await until(lambda: waiting_at(dsn, "advisory") == 1)
        posts += [asyncio.create_task(post(url, "/orders/waiting")) for url in (first, second) * 10]
        await until(lambda: waiting_at(dsn, "transactionid") == 1)
        await post(second, **{"Idempotency-Key": "other"})
        assert waiting_at(dsn, "transactionid") == 1
        door.close()
        answers = await asyncio.gather(*posts)
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}
    assert [is_replay(answer) for answer in answers] == [False] + [True] * 20
    assert effects(dsn) == (2, 2, 2)


async def test_when_the_first_one_fails_one_that_waits_in_another_process_runs(dsn: str) -> None:
    """E4.3, E4.4."""
    make_tables(dsn)
    with closed_door(dsn) as door, shop_process(dsn) as (first, _), shop_process(dsn) as (second, _):
        failing = asyncio.create_task(post(first, "/orders/waiting", **{"X-Fail-After": "1"}))
        await until(lambda: waiting_at(dsn, "advisory") == 1)
        waiting = asyncio.create_task(post(second, "/orders/waiting"))
        await until(lambda: waiting_at(dsn, "transactionid") == 1)
        door.close()
        assert ((await failing).status_code, (await waiting).status_code) == (409, 201)
        assert not is_replay(await waiting)
    assert effects(dsn) == ONE


async def test_a_request_that_waits_in_the_database_too_long_is_told_to_come_back(dsn: str) -> None:
    """E4.4: the other process hangs; the statement's time is over, 503 with Retry-After, and later it is answered."""
    make_tables(dsn)
    async with open_shop(dsn, statement_timeout_seconds=0.3) as shop:
        with closed_door(dsn) as door, shop_process(dsn) as (other, _):
            slow = asyncio.create_task(post(other, "/orders/waiting"))
            await until(lambda: waiting_at(dsn, "advisory") == 1)
            answer = await shop.post("/orders/waiting", json={"sku": "a"}, headers=KEY)
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:duly:problem:busy")
            assert answer.headers["retry-after"]
            door.close()
            first = await slow
        again = await shop.post("/orders/waiting", json={"sku": "a"}, headers=KEY)
        assert (again.content, is_replay(again)) == (first.content, True)
    assert effects(dsn) == ONE


# -- COMMIT without an answer -----------------------------------------------------------------------------------------


@asynccontextmanager
async def shop_behind(wire: Wire) -> AsyncIterator[httpx2.AsyncClient]:
    """The shop, with a connection in its pool, behind a wire that is armed next."""
    db = Database(wire.dsn, settings=Settings(connect_timeout_seconds=2))
    try:
        async with served(create_shop(db)) as shop:
            assert (await shop.get("/orders/0")).status_code == 404
            yield shop
    finally:
        await db.close()


either_cut = pytest.mark.parametrize("cut", ["statement", "reply"])


@either_cut
async def test_with_a_key_a_commit_without_an_answer_is_answered_by_the_key(dsn: str, cut: Cut) -> None:
    """E4.3: lost before it arrived, it runs again; lost after it took effect, it is replayed; the client sees 201."""
    make_tables(dsn)
    async with breaking_wire(dsn) as wire, shop_behind(wire) as shop:
        wire.cut_next = cut
        answer = await shop.post("/orders", json={"sku": "a"}, headers=KEY)
        assert wire.cuts == 1
        assert (answer.status_code, is_replay(answer)) == (201, cut == "reply")
        assert value(dsn, "SELECT id FROM orders") == answer.json()["number"]
        again = await shop.post("/orders", json={"sku": "a"}, headers=KEY)
        assert (again.content, is_replay(again)) == (answer.content, True)
    assert (effects(dsn), keys(dsn)) == (ONE, 1)


@either_cut
async def test_without_a_key_a_commit_without_an_answer_is_looked_up(dsn: str, cut: Cut) -> None:
    """E5.6: by the transaction's id: never a false failure, never a second effect, never a success without one."""
    make_tables(dsn)
    async with breaking_wire(dsn) as wire, shop_behind(wire) as shop:
        wire.cut_next = cut
        answer = await shop.post("/orders", json={"sku": "a"})
        assert wire.cuts == 1
        assert answer.status_code == 201
        assert value(dsn, "SELECT id FROM orders") == answer.json()["number"]
    assert effects(dsn) == ONE


@either_cut
async def test_with_a_key_and_a_database_that_stays_away_the_retry_of_the_client_resolves_it(
    dsn: str, cut: Cut
) -> None:
    """E4.3: 503 says nothing about the effect; the same key does."""
    make_tables(dsn)
    async with breaking_wire(dsn) as wire, shop_behind(wire) as shop:
        wire.refuse_after_cut = 2
        wire.cut_next = cut
        unknown = await shop.post("/orders", json={"sku": "a"}, headers=KEY)
        assert (unknown.status_code, bool(unknown.headers["retry-after"])) == (503, True)
        answer = await shop.post("/orders", json={"sku": "a"}, headers=KEY)
        while answer.status_code == 503:
            answer = await shop.post("/orders", json={"sku": "a"}, headers=KEY)
        assert (answer.status_code, is_replay(answer)) == (201, cut == "reply")
    assert (effects(dsn), keys(dsn)) == (ONE, 1)


@either_cut
async def test_without_a_key_and_a_database_that_stays_away_for_a_moment_it_is_looked_up_later(
    dsn: str, cut: Cut
) -> None:
    """E5.6: the answer waits for the look-up."""
    make_tables(dsn)
    async with breaking_wire(dsn) as wire, shop_behind(wire) as shop:
        wire.refuse_after_cut = 2
        wire.cut_next = cut
        answer = await shop.post("/orders", json={"sku": "a"})
        assert (wire.cuts, wire.refuse_after_cut) == (1, 0)
        assert answer.status_code == 201
    assert effects(dsn) == ONE


@either_cut
async def test_without_a_key_and_a_database_that_does_not_come_back_the_outcome_is_said_to_be_unknown(
    dsn: str, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5.6: 503, neither a failure nor a success, and it is not tried again: that could be a second effect."""
    make_tables(dsn)
    in_no_time = SimpleNamespace(**{**vars(asyncio), "sleep": lambda _seconds: asyncio.sleep(0)})
    async with breaking_wire(dsn) as wire, shop_behind(wire) as shop:
        monkeypatch.setattr(duly.db, "asyncio", in_no_time)  # between its looks at the database, half a minute in all
        wire.refuse_after_cut = 1_000
        wire.cut_next = cut
        answer = await shop.post("/orders", json={"sku": "a"})
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:duly:problem:outcome-unknown")
        assert answer.headers["retry-after"]
    assert effects(dsn) == (ONE if cut == "reply" else NONE)
    assert value(dsn, "SELECT last_value FROM orders_id_seq") == 1


@either_cut
@pytest.mark.parametrize("statement", [b"INTO duly.idempotency_keys", b"INTO orders", b"UPDATE duly.idempotency_keys"])
@pytest.mark.parametrize("headers", [KEY, {}], ids=["key", "no key"])
async def test_a_connection_that_is_lost_before_commit_costs_no_error_and_no_second_effect(
    dsn: str, cut: Cut, statement: bytes, headers: dict[str, str]
) -> None:
    """E5.6: its transaction went with it, so the request runs again, once."""
    make_tables(dsn)
    async with breaking_wire(dsn) as wire, shop_behind(wire) as shop:
        wire.statement, wire.cut_next = statement, cut
        answer = await shop.post("/orders", json={"sku": "a"}, headers=headers)
        assert wire.cuts == (1 if headers or statement == b"INTO orders" else 0)
        assert (answer.status_code, is_replay(answer)) == (201, False)
    assert effects(dsn) == ONE


async def test_a_read_whose_commit_got_no_answer_is_read_again(dsn: str) -> None:
    """E5.6: there is nothing to resolve."""
    make_tables(dsn)
    async with breaking_wire(dsn) as wire, shop_behind(wire) as shop:
        number = (await shop.post("/orders", json={})).json()["number"]
        wire.cut_next = "reply"
        answer = await shop.get(f"/orders/{number}")
        assert (wire.cuts, answer.status_code) == (1, 200)


async def test_a_stopped_process_does_not_keep_others_from_the_key_for_ever(dsn: str) -> None:
    """E4.4: SIGSTOP while it holds the key: another one is told to come back, and the end of the first frees it."""
    make_tables(dsn)
    with shop_process(dsn, failpoints="http.before_commit=stop") as (first, process):
        lost = asyncio.create_task(post(first))
        await until(lambda: open(f"/proc/{process.pid}/stat").read().split()[2] == "T")  # noqa: SIM115 - one line
        async with open_shop(dsn, statement_timeout_seconds=0.3) as shop:
            waiting = await shop.post("/orders", json={"sku": "a"}, headers=KEY)
            assert waiting.status_code == 503
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(httpx2.TransportError):
                await lost
            async with asyncio.timeout(QUICKLY_SECONDS):
                answer = await shop.post("/orders", json={"sku": "a"}, headers=KEY)
            assert (answer.status_code, is_replay(answer)) == (201, False)
    assert effects(dsn) == ONE
