"""Products, transfers and service requests over HTTP (T1, T2)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.transfers.acting import (
    Users,
    check_consistent,
    counting,
    events_of,
    made,
    new_key,
    owner_of,
    requests_of,
    status_of,
)
from tests.support import rows, value


async def test_registering_writes_the_product_and_its_event_in_one_commit(users: Users, dsn: str) -> None:
    """T1."""
    answer = await users.post("alice", "/v1/products", {"name": "  Lathe  "})
    product = made(answer)
    assert answer.headers["location"] == f"/v1/products/{product['id']}"
    assert set(product) == {"id", "name", "ownerId", "createdAt", "pendingTransferId", "serviceRequests"}
    assert (product["name"], product["ownerId"]) == ("Lathe", "alice")
    assert (product["pendingTransferId"], product["serviceRequests"]) == (None, [])
    assert rows(dsn, "SELECT id, xmin::text FROM transfers.products") == [
        (UUID(product["id"]), value(dsn, "SELECT xmin::text FROM duly.outbox"))
    ]
    assert rows(dsn, "SELECT type, topic, aggregate_id, payload FROM duly.outbox") == [
        (
            "ProductRegistered", "product-events", product["id"],
            {"product_id": product["id"], "name": "Lathe", "owner_id": "alice"},
        )
    ]  # fmt: skip
    assert (await users.get("alice", answer.headers["location"])).json() == product


async def test_a_transfer_starts_pending_with_72_hours_to_accept(users: Users, dsn: str) -> None:
    """T1: everybody whom it concerns sees the same."""
    product = await users.register()
    answer = await users.post("alice", f"/v1/products/{product}/transfers", {"toUserId": "bob"})
    transfer = made(answer)
    assert answer.headers["location"] == f"/v1/transfers/{transfer['id']}"
    created, expires = (datetime.fromisoformat(transfer[name]) for name in ("createdAt", "expiresAt"))
    assert expires - created == timedelta(hours=72)
    assert transfer == {
        "id": transfer["id"], "productId": product, "fromUserId": "alice", "toUserId": "bob", "status": "Pending",
        "createdAt": transfer["createdAt"], "expiresAt": transfer["expiresAt"], "updatedAt": transfer["createdAt"],
    }  # fmt: skip
    for user in ("alice", "bob"):
        assert (await users.get(user, f"/v1/transfers/{transfer['id']}")).json() == transfer
        assert (await users.get(user, f"/v1/products/{product}")).json()["pendingTransferId"] == transfer["id"]
    payload = value(dsn, "SELECT payload FROM duly.outbox WHERE type = 'OwnershipTransferStarted'")
    assert payload.pop("expires_at") == expires.isoformat()
    assert payload == {
        "product_id": product, "transfer_id": transfer["id"], "from_user_id": "alice", "to_user_id": "bob"
    }  # fmt: skip


async def test_accepting_moves_the_ownership_and_cancels_what_the_old_owner_asked_for(users: Users, dsn: str) -> None:
    """T1, T2."""
    product = await users.register()
    for _ in range(2):
        await users.request(product)
    transfer = await users.offer(product)
    assert requests_of(dsn, product) == ["Paused", "Paused"]
    answer = await users.end("bob", transfer, "accept")
    assert answer.status_code == 200
    assert answer.json()["status"] == "Accepted"
    assert answer.json()["updatedAt"] > answer.json()["createdAt"]
    shown = (await users.get("bob", f"/v1/products/{product}")).json()
    assert (shown["ownerId"], shown["pendingTransferId"]) == ("bob", None)
    assert [request["status"] for request in shown["serviceRequests"]] == ["Cancelled", "Cancelled"]
    assert (await users.get("alice", f"/v1/products/{product}")).status_code == 403
    assert events_of(dsn, product) == [
        "ProductRegistered", "OwnershipTransferStarted", "OwnershipTransferAccepted"
    ]  # fmt: skip
    check_consistent(dsn)


@pytest.mark.parametrize(("by", "how", "status"), [("bob", "reject", "Rejected"), ("alice", "cancel", "Cancelled")])
async def test_an_offer_that_comes_to_nothing_leaves_the_product_and_resumes_its_requests(
    users: Users, dsn: str, by: str, how: str, status: str
) -> None:
    """T1, T2: and the next offer can be made."""
    product = await users.register()
    await users.request(product)
    transfer = await users.offer(product)
    assert requests_of(dsn, product) == ["Paused"]
    answer = await users.end(by, transfer, how)
    assert (answer.status_code, answer.json()["status"]) == (200, status)
    assert (owner_of(dsn, product), requests_of(dsn, product)) == ("alice", ["InProgress"])
    assert events_of(dsn, product)[-1] == f"OwnershipTransfer{status}"
    await users.offer(product, to="carol")
    assert requests_of(dsn, product) == ["Paused"]
    check_consistent(dsn)


async def test_a_cancelled_request_stays_cancelled_under_the_next_owner(users: Users, dsn: str) -> None:
    """T2."""
    product = await users.register()
    await users.request(product)
    await users.end("bob", await users.offer(product), "accept")
    await users.request(product, owner="bob")
    transfer = await users.offer(product, owner="bob", to="carol")
    assert requests_of(dsn, product) == ["Cancelled", "Paused"]
    await users.end("carol", transfer, "reject")
    assert requests_of(dsn, product) == ["Cancelled", "InProgress"]


async def test_other_products_are_left_alone(users: Users, dsn: str) -> None:
    """T2: whatever happens to one product, the requests of another go on."""
    product, other = await users.register(), await users.register()
    await users.request(product)
    await users.request(other)
    transfer = await users.offer(product)
    assert requests_of(dsn, other) == ["InProgress"]
    await users.end("bob", transfer, "accept")
    assert (requests_of(dsn, other), owner_of(dsn, other)) == (["InProgress"], "alice")


async def test_a_product_has_one_pending_transfer(users: Users, dsn: str) -> None:
    """T1."""
    product = await users.register()
    first = await users.offer(product)
    answer = await users.post("alice", f"/v1/products/{product}/transfers", {"toUserId": "carol"})
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:duly:problem:transfer-pending"
    assert rows(dsn, "SELECT id::text FROM transfers.transfers") == [(first,)]
    check_consistent(dsn)


@pytest.mark.parametrize("how", ["accept", "reject", "cancel"])
@pytest.mark.parametrize("ended", ["accept", "reject", "cancel"])
async def test_what_has_ended_cannot_end_again(users: Users, dsn: str, ended: str, how: str) -> None:
    """T1: 409, and nothing changes."""
    product = await users.register()
    transfer = await users.offer(product)
    who = {"accept": "bob", "reject": "bob", "cancel": "alice"}
    await users.end(who[ended], transfer, ended)
    before = (status_of(dsn, transfer), owner_of(dsn, product), events_of(dsn, product))
    answer = await users.end(who[how], transfer, how)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:transfer-closed")
    assert (status_of(dsn, transfer), owner_of(dsn, product), events_of(dsn, product)) == before


@pytest.mark.parametrize("how", ["accept", "reject", "cancel"])
@pytest.mark.parametrize("is_swept", [False, True])
async def test_after_72_hours_nothing_can_be_done_swept_or_not(
    users: Users, dsn: str, clock: BusinessClock, how: str, is_swept: bool
) -> None:
    """T1: at the last moment it still works; a microsecond later it is 409, whoever asks."""
    clock.freeze(datetime.fromisoformat("2033-05-01T12:00:00+00:00"))
    who = "alice" if how == "cancel" else "bob"
    late, in_time = await users.register(), await users.register()
    late_transfer, transfer = await users.offer(late), await users.offer(in_time)
    clock.advance(hours=72)
    assert await users.expire() == 0
    assert (await users.end(who, transfer, how)).status_code == 200
    clock.advance(microseconds=1)
    assert await users.expire() == 1 if is_swept else status_of(dsn, late_transfer) == "Pending"
    answer = await users.end(who, late_transfer, how)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:transfer-expired")
    assert owner_of(dsn, late) == "alice"
    check_consistent(dsn)


async def test_a_new_transfer_replaces_one_that_is_overdue_and_not_swept_yet(
    users: Users, dsn: str, clock: BusinessClock
) -> None:
    """T1: in one transaction, with both events; the requests stay paused for the new one."""
    product = await users.register()
    await users.request(product)
    old = await users.offer(product)
    clock.advance(hours=72, seconds=1)
    new = await users.offer(product, to="carol")
    assert (status_of(dsn, old), status_of(dsn, new)) == ("Expired", "Pending")
    assert events_of(dsn, product) == [
        "ProductRegistered", "OwnershipTransferStarted", "OwnershipTransferExpired", "OwnershipTransferStarted"
    ]  # fmt: skip
    assert requests_of(dsn, product) == ["Paused"]
    assert await users.expire() == 0
    check_consistent(dsn)


async def test_a_request_made_while_a_transfer_is_pending_waits(users: Users, dsn: str, clock: BusinessClock) -> None:
    """T2: also while an overdue one is not swept yet; the sweep resumes it."""
    product = await users.register()
    await users.offer(product)
    request = await users.request(product)
    clock.advance(hours=73)
    await users.request(product)
    assert requests_of(dsn, product) == ["Paused", "Paused"]
    assert await users.expire() == 1
    assert requests_of(dsn, product) == ["InProgress", "InProgress"]
    assert (await users.get("alice", f"/v1/service-requests/{request}")).json()["status"] == "InProgress"


async def test_a_service_request_is_shown_to_who_owns_the_product_now(users: Users) -> None:
    """T2."""
    product = await users.register()
    answer = await users.post("alice", f"/v1/products/{product}/service-requests", {"description": "Oil it,\nplease"})
    request = made(answer)
    assert answer.headers["location"] == f"/v1/service-requests/{request['id']}"
    assert request == {
        "id": request["id"], "productId": product, "requestedBy": "alice", "description": "Oil it,\nplease",
        "status": "InProgress", "createdAt": request["createdAt"], "updatedAt": request["createdAt"],
    }  # fmt: skip
    assert (await users.get("alice", answer.headers["location"])).json() == request
    await users.end("bob", await users.offer(product), "accept")
    assert (await users.get("bob", answer.headers["location"])).json()["status"] == "Cancelled"
    assert (await users.get("alice", answer.headers["location"])).status_code == 403


async def test_a_product_shows_its_newest_hundred_requests(users: Users, dsn: str, clock: BusinessClock) -> None:
    """A limit on everything."""
    product = await users.register()
    rows(
        dsn,
        """INSERT INTO transfers.service_requests
           SELECT gen_random_uuid(), %(id)s, 'alice', 'r' || n, 'Cancelled', duly.now() + n * interval '1 second',
                  duly.now() FROM generate_series(1, 150) AS n""",
        {"id": product},
    )
    shown = (await users.get("alice", f"/v1/products/{product}")).json()["serviceRequests"]
    assert [request["description"] for request in shown] == [f"r{n}" for n in range(150, 50, -1)]
    assert set(shown[0]) == {"id", "description", "status", "createdAt", "updatedAt"}


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/products/{}", None),
        ("/v1/products/{}/transfers", {"toUserId": "bob"}),
        ("/v1/products/{}/service-requests", {"description": "Oil it"}),
        ("/v1/transfers/{}", None),
        ("/v1/transfers/{}/accept", {}),
        ("/v1/transfers/{}/reject", {}),
        ("/v1/transfers/{}/cancel", {}),
        ("/v1/service-requests/{}", None),
    ],
)
async def test_what_does_not_exist_is_404(users: Users, path: str, body: Any) -> None:
    """T1."""
    where = path.format(uuid4())
    answer = await (users.get("alice", where) if body is None else users.post("alice", where, body))
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


async def test_the_owner_cannot_be_the_recipient(users: Users, dsn: str) -> None:
    """T1: 422; and 403 for who is not the owner, whatever they ask for."""
    product = await users.register()
    answer = await users.post("alice", f"/v1/products/{product}/transfers", {"toUserId": "alice"})
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:duly:problem:self-transfer")
    answer = await users.post("alice", f"/v1/products/{product}/transfers", {"toUserId": " alice "})
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "$.toUserId")
    answer = await users.post("bob", f"/v1/products/{product}/transfers", {"toUserId": "alice"})
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:duly:problem:not-owner")
    assert value(dsn, "SELECT count(*) FROM transfers.transfers") == 0


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/products", {}, "$.name"),
        ("/v1/products", {"name": ""}, "$.name"),
        ("/v1/products", {"name": "a\nb"}, "$.name"),
        ("/v1/products", {"name": "x" * 201}, "$.name"),
        ("/v1/products", {"name": "Lathe", "ownerId": "mallory"}, "$.ownerId"),
        ("/v1/products/{}/transfers", {}, "$.toUserId"),
        ("/v1/products/{}/transfers", {"to_user_id": "bob"}, "$.toUserId"),
        ("/v1/products/{}/transfers", {"toUserId": "x" * 256}, "$.toUserId"),
        ("/v1/products/{}/transfers", {"toUserId": "b\u0000b"}, "$.toUserId"),
        ("/v1/products/{}/transfers", {"toUserId": 7}, "$.toUserId"),
        ("/v1/products/{}/transfers", {"toUserId": "bob", "status": "Accepted"}, "$.status"),
        ("/v1/products/{}/service-requests", {"description": " "}, "$.description"),
        ("/v1/products/{}/service-requests", {"description": "\u0000"}, "$.description"),
        ("/v1/products/{}/service-requests", {"description": "x" * 4001}, "$.description"),
    ],
)
async def test_what_cannot_be_stored_is_422_and_says_where(users: Users, path: str, body: Any, where: str) -> None:
    """E5.5."""
    answer = await users.post("alice", path.format(uuid4()), body)
    assert answer.status_code == 422
    assert where in [fault["path"] for fault in answer.json()["errors"]]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/products", "name"),
        ("/v1/products/{}/transfers", "toUserId"),
        ("/v1/products/{}/service-requests", "description"),
    ],
)
async def test_half_a_surrogate_pair_is_refused(users: Users, path: str, name: str) -> None:
    """FAULTS: valid JSON that no database can hold."""
    body = f'{{"{name}": "a\\ud800"}}'
    headers = users.headers("alice") | {"Content-Type": "application/json"}
    answer = await users.api.client.post(path.format(await users.register()), content=body, headers=headers)
    assert answer.status_code in (400, 422), answer.text


async def test_the_longest_names_are_stored(users: Users, dsn: str) -> None:
    """A subject may have 255 characters, of any kind that can be printed."""
    owner, to = "ä" * 255, "б" * 255
    product = await users.register(owner, name="x" * 200)
    await users.end(to, await users.offer(product, owner, to), "accept")
    assert owner_of(dsn, product) == to


# -- idempotency and statements ----------------------------------------------------------------------------------------


async def test_the_same_key_gets_the_same_answer_and_one_effect(users: Users, dsn: str) -> None:
    """E4.2: for each route that changes something."""
    key = new_key()
    product = await users.register()
    steps: list[tuple[str, str, Any]] = [
        ("alice", "/v1/products", {"name": "Drill"}),
        ("alice", f"/v1/products/{product}/service-requests", {"description": "Oil it"}),
        ("alice", f"/v1/products/{product}/transfers", {"toUserId": "bob"}),
    ]
    for user, path, body in steps:
        first, again = [await users.post(user, path, body, **{"Idempotency-Key": f"{key}{path}"}) for _ in range(2)]
        assert (again.status_code, again.content) == (201, first.content)
        assert (again.headers["location"], again.headers["idempotent-replayed"]) == (first.headers["location"], "true")
    transfer = first.json()["id"]
    accepted, replayed = [
        await users.post("bob", f"/v1/transfers/{transfer}/accept", **{"Idempotency-Key": key}) for _ in range(2)
    ]
    assert (accepted.status_code, replayed.content) == (200, accepted.content)
    assert events_of(dsn, product).count("OwnershipTransferAccepted") == 1
    assert value(dsn, "SELECT count(*) FROM transfers.products") == 2


@pytest.mark.parametrize(
    ("step", "most"),
    [("register", 3), ("offer", 6), ("request", 4), ("accept", 7), ("reject", 6), ("product", 1), ("transfer", 1)],
)
async def test_each_request_sends_a_known_number_of_statements(
    users: Users, db: Database, step: str, most: int
) -> None:
    """A gate: whoever adds a statement changes a number here. One of them asks for the transaction's id."""
    product = await users.register()
    transfer = "" if step in {"offer", "register"} else await users.offer(product)
    async with counting(db) as sent:
        match step:
            case "register":
                await users.register()
            case "offer":
                await users.offer(product)
            case "request":
                await users.request(product)
            case "accept" | "reject":
                assert (await users.end("bob", transfer, step)).status_code == 200
            case "product":
                assert (await users.get("alice", f"/v1/products/{product}")).status_code == 200
            case _:
                assert (await users.get("alice", f"/v1/transfers/{transfer}")).status_code == 200
    assert len(sent) == most, sent


# -- the schema ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("to_user_id = from_user_id", "transfers_users_are_two"),
        ("status = 'Lost'", "transfers_status_is_known"),
        ("from_user_id = ''", "transfers_users_are_named"),
        ("updated_at = updated_at + interval '1 second'", "transfers_pending_is_unchanged"),
        ("status = 'Expired', updated_at = created_at + interval '72 hours'", "transfers_window_is_kept"),
        ("status = 'Accepted', updated_at = created_at + interval '72:00:00.000001'", "transfers_window_is_kept"),
        ("product_id = gen_random_uuid()", "transfers_product_exists"),
    ],
)
async def test_the_database_refuses_what_is_impossible(users: Users, dsn: str, change: str, constraint: str) -> None:
    """T1: also for somebody with psql."""
    await users.offer(await users.register())
    with pytest.raises(psycopg.errors.IntegrityError) as refused:
        rows(dsn, f"UPDATE transfers.transfers SET {change}")
    assert refused.value.diag.constraint_name == constraint


def test_the_schedule_comes_with_the_migration(dsn: str) -> None:
    """T6: hourly; what was missed is one run."""
    query = "SELECT cron, timezone, enabled, misfire FROM duly.schedules WHERE name = 'transfers.expire-pending'"
    assert rows(dsn, query) == [("0 * * * *", "UTC", True, "run_once")]
