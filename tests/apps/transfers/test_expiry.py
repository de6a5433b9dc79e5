"""The sweep: everything that is due, in one transaction, or nothing (T3, T4)."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from uuid import UUID, uuid4

import httpx2
import pytest
from fastapi import FastAPI

from apps.transfers import service
from apps.wiring import app
from duly import failpoints
from duly.auth.issuer import Issuer
from duly.cli.process import build_api
from duly.db import Database
from duly.runtime.supervisor import create_server
from duly.settings import Settings
from duly.testing import BusinessClock
from tests.apps.transfers.acting import (
    EXPIRE,
    Users,
    check_consistent,
    counting,
    events_of,
    fill,
    holding,
    new_key,
    owner_of,
    requests_of,
    status_of,
    until_waiting,
)
from tests.support import rows, value

STATUSES = "SELECT status, count(*) FROM transfers.transfers GROUP BY 1 ORDER BY 1"
EXPIRED_EVENTS = "SELECT count(*) FROM duly.event_log WHERE type = 'OwnershipTransferExpired'"


async def test_what_is_due_expires_with_its_event_and_its_requests_go_on(
    users: Users, dsn: str, clock: BusinessClock
) -> None:
    """T3, T2: the product stays with its owner; what is not due is not touched."""
    due, live = await users.register(), await users.register()
    await users.request(due)
    await users.request(live)
    old = await users.offer(due)
    clock.advance(hours=24)
    young = await users.offer(live)
    clock.advance(hours=48, seconds=1)
    answer = await users.sweep()
    assert (answer.status_code, answer.json()) == (200, {"expiredCount": 1})
    assert "duly-more" not in answer.headers
    assert (status_of(dsn, old), status_of(dsn, young)) == ("Expired", "Pending")
    assert (owner_of(dsn, due), requests_of(dsn, due), requests_of(dsn, live)) == ("alice", ["InProgress"], ["Paused"])
    payload = {"product_id": due, "transfer_id": old, "from_user_id": "alice", "to_user_id": "bob"}
    assert rows(dsn, "SELECT topic, aggregate_id, payload FROM duly.outbox WHERE type LIKE '%%Expired'", {}) == [
        ("product-events", due, payload)
    ]
    shown = (await users.get("alice", f"/v1/transfers/{old}")).json()
    assert shown["status"] == "Expired"
    assert shown["updatedAt"] > shown["expiresAt"]
    check_consistent(dsn)


async def test_all_of_it_is_one_commit(users: Users, dsn: str) -> None:
    """T3: transfers, requests and events carry the same transaction's id."""
    fill(dsn, 30)
    assert await users.expire() == 30
    written = """
        SELECT xmin::text FROM transfers.transfers UNION SELECT xmin::text FROM transfers.service_requests
        UNION SELECT xmin::text FROM duly.outbox WHERE type = 'OwnershipTransferExpired'"""
    assert len(rows(dsn, written)) == 1


async def test_the_second_run_finds_nothing(users: Users, dsn: str) -> None:
    """T3: each expires once."""
    fill(dsn, 20)
    assert [await users.expire() for _ in range(3)] == [20, 0, 0]
    assert value(dsn, EXPIRED_EVENTS) == 20
    check_consistent(dsn)


async def test_requests_of_a_product_without_a_due_transfer_are_not_resumed(users: Users, dsn: str) -> None:
    """T2."""
    fill(dsn, 3, hours=71)
    fill(dsn, 2)
    assert await users.expire() == 2
    assert rows(dsn, "SELECT status, count(*) FROM transfers.service_requests GROUP BY 1 ORDER BY 1") == [
        ("InProgress", 2), ("Paused", 3)
    ]  # fmt: skip
    check_consistent(dsn)


@pytest.mark.parametrize("body", ["{}", ""])
async def test_the_body_says_nothing(users: Users, body: str) -> None:
    """T3: an empty object, or not even that."""
    headers = users.headers("service-account-x", "internal:transfers.expire")
    answer = await users.api.client.post(
        EXPIRE, content=body, headers=headers | ({"Content-Type": "application/json"} if body else {})
    )
    assert (answer.status_code, answer.content) == (200, b'{"expiredCount":0}')


async def test_a_body_with_something_in_it_is_422(users: Users) -> None:
    """E5.5."""
    headers = users.headers("service-account-x", "internal:transfers.expire")
    answer = await users.api.client.post(EXPIRE, json={"limit": 5}, headers=headers)
    assert answer.status_code == 422


# -- any failure undoes everything -----------------------------------------------------------------------------------


FAIL_ON_ONE = """
CREATE FUNCTION transfers.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'the disk of this row is broken' USING ERRCODE = 'XX001';
END $$;
CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW WHEN (NEW.{column}::text = '{value}')
    EXECUTE FUNCTION transfers.fail();
"""


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("transfers.transfers", "product_id"),
        ("transfers.service_requests", "product_id"),
        ("duly.outbox", "aggregate_id"),
    ],
)
async def test_a_failure_at_one_row_rolls_back_all_of_them(users: Users, dsn: str, table: str, column: str) -> None:
    """T3: a real error of the database, at the update, at the requests, at the events; then it heals."""
    products = fill(dsn, 25)
    rows(dsn, FAIL_ON_ONE.format(table=table, column=column, value=products[17]))
    before = (rows(dsn, STATUSES), rows(dsn, "SELECT * FROM transfers.service_requests ORDER BY id"))
    answer = await users.sweep()
    assert answer.status_code == 500
    assert "disk" not in answer.text
    assert (rows(dsn, STATUSES), rows(dsn, "SELECT * FROM transfers.service_requests ORDER BY id")) == before
    assert value(dsn, EXPIRED_EVENTS) == 0
    rows(dsn, f"DROP TRIGGER fail ON {table}")
    assert await users.expire() == 25
    check_consistent(dsn)


async def test_a_failure_right_before_commit_rolls_back_and_leaves_no_key(users: Users, dsn: str) -> None:
    """T3, E4.3: the retry with the same key runs anew."""
    fill(dsn, 5)
    key = new_key()
    failpoints.arm("http.before_commit=raise")
    try:
        assert (await users.sweep(**{"Idempotency-Key": key})).status_code == 500
    finally:
        failpoints.arm("")
    assert rows(dsn, STATUSES) == [("Pending", 5)]
    assert value(dsn, "SELECT count(*) FROM duly.idempotency_keys") == 0
    answer = await users.sweep(**{"Idempotency-Key": key})
    assert answer.json() == {"expiredCount": 5}
    replayed = await users.sweep(**{"Idempotency-Key": key})
    assert (replayed.json(), replayed.headers["idempotent-replayed"]) == ({"expiredCount": 5}, "true")
    assert value(dsn, EXPIRED_EVENTS) == 5


async def test_a_connection_that_is_cut_in_the_middle_loses_nothing(users: Users, dsn: str) -> None:
    """T3: the sweep runs again in a new transaction, and each expires once."""
    products = fill(dsn, 10)
    with holding(dsn, products[3]):
        sweeping = asyncio.create_task(users.expire())
        await until_waiting(dsn, 1)
        rows(
            dsn,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        await until_waiting(dsn, 1)  # it came back
    assert await sweeping == 10
    assert value(dsn, EXPIRED_EVENTS) == 10
    check_consistent(dsn)


# -- statements and bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("due", "statements"), [(0, 2), (1, 5), (10, 5), (500, 5)])
async def test_the_number_of_statements_does_not_depend_on_how_many_are_due(
    users: Users, dsn: str, db: Database, due: int, statements: int
) -> None:
    """T5: lock, expire, resume, emit, and one that asks for the transaction's id."""
    fill(dsn, due, requests=3)
    async with counting(db) as sent:
        assert await users.expire() == due
    assert len(sent) == statements, sent


async def test_one_call_is_bounded_and_takes_the_oldest_first(db: Database, dsn: str, clock: BusinessClock) -> None:
    """T3: the rest is for the next call."""
    oldest = {*fill(dsn, 3, hours=100), *fill(dsn, 2, hours=90)}
    fill(dsn, 4, hours=80)
    async with db.transaction() as tx:
        sweep = await service.expire_pending(tx, limit=5)
    assert (sweep.expired_count, sweep.has_more) == (5, True)
    expired = rows(dsn, "SELECT product_id FROM transfers.transfers WHERE status = 'Expired'")
    assert {product for (product,) in expired} == oldest
    async with db.transaction() as tx:
        sweep = await service.expire_pending(tx, limit=5)
    assert (sweep.expired_count, sweep.has_more) == (4, False)
    check_consistent(dsn)


async def test_events_are_emitted_the_oldest_first(db: Database, dsn: str) -> None:
    """T3."""
    order = [fill(dsn, 1, hours=hours)[0] for hours in (80, 100, 90)]
    async with db.transaction() as tx:
        await service.expire_pending(tx)
    query = "SELECT aggregate_id::uuid FROM duly.outbox WHERE type = 'OwnershipTransferExpired' ORDER BY seq"
    assert [product for (product,) in rows(dsn, query)] == [order[1], order[2], order[0]]


# -- identity, correlation, outage ------------------------------------------------------------------------------------


async def test_the_correlation_id_is_carried_into_every_event(users: Users, dsn: str) -> None:
    """T4: and back to the caller."""
    fill(dsn, 3)
    correlation_id = uuid4()
    answer = await users.sweep(**{"X-Correlation-ID": str(correlation_id)})
    assert answer.headers["x-correlation-id"] == str(correlation_id)
    query = "SELECT DISTINCT headers->>'correlation_id' FROM duly.outbox WHERE type = 'OwnershipTransferExpired'"
    assert rows(dsn, query) == [(str(correlation_id),)]


async def serve_without_database(tmp_path: Path) -> tuple[FastAPI, socket.socket, Issuer, Database]:
    """The API as it starts anywhere, on a database that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    db = Database(f"postgresql://postgres@127.0.0.1:{nobody}/none")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    settings = Settings(data=tmp_path, shutdown_grace_seconds=1)
    return build_api(db, [], settings, app, port=port), listener, Issuer.open(settings, port=port), db


async def test_it_is_503_when_the_database_is_away(tmp_path: Path) -> None:
    """T4: with a time after which to try again."""
    api, listener, issuer, db = await serve_without_database(tmp_path)
    server = create_server(api, Settings(shutdown_grace_seconds=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    token = issuer.sign("service-account-x", scopes=["internal:transfers.expire"])
    try:
        async with httpx2.AsyncClient(timeout=20) as client:
            answer = await client.post(
                f"http://127.0.0.1:{listener.getsockname()[1]}{EXPIRE}",
                json={},
                headers={"Authorization": f"Bearer {token}"},
            )
    finally:
        server.should_exit = True
        await serving
        await db.close()
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert int(answer.headers["retry-after"]) > 0


async def test_an_expired_transfer_is_told_to_nobody_twice(users: Users, dsn: str) -> None:
    """T3: the events of one product, whatever runs after them."""
    product: UUID = fill(dsn, 1)[0]
    await users.expire()
    await users.offer(str(product), to="carol")
    await users.expire()
    assert events_of(dsn, str(product)) == [
        "OwnershipTransferStarted", "OwnershipTransferExpired", "OwnershipTransferStarted"
    ]  # fmt: skip
