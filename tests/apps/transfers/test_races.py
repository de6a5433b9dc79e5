"""Two at once: exactly one wins, and ownership, requests and events agree afterwards (T1, T2, T3).

A rival session holds a product's lock as the barrier: everybody queues behind it, and runs when it lets go.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from uuid import UUID

import psycopg
import pytest
from prometheus_client import REGISTRY

from apps.transfers import service
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.transfers.acting import (
    Users,
    check_consistent,
    events_of,
    fill,
    holding,
    owner_of,
    requests_of,
    status_of,
    until_waiting,
)
from tests.support import rows, value

ROUNDS = 100
PENDING_OF = "SELECT id::text FROM transfers.transfers WHERE product_id = %(id)s AND status = 'Pending'"
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


def conflicts() -> float:
    """How many requests of this process ran again because they lost a deadlock."""
    return REGISTRY.get_sample_value("duly_http_retries_total", {"reason": "conflict"}) or 0.0


def pending_of(dsn: str, product: UUID | str) -> str:
    return str(value(dsn, PENDING_OF, {"id": product}))


# -- accept and expire -----------------------------------------------------------------------------------------------


async def test_accepting_and_expiring_at_the_last_moment_has_one_winner(users: Users, dsn: str) -> None:
    """T1, T3: a hundred transfers whose window ends while both are under way, over HTTP, on the running clock."""
    outcomes: Counter[str] = Counter()
    for _ in range(ROUNDS):
        left_seconds = random.uniform(0.0, 0.03)
        (product,) = fill(dsn, 1, hours=72 - left_seconds / 3600)
        transfer = pending_of(dsn, product)
        accepted, swept = await asyncio.gather(users.end("bob", transfer, "accept"), users.sweep())
        while status_of(dsn, transfer) == "Pending":  # both were early or late by a moment: the next sweep decides
            swept = await users.sweep()
        outcome = status_of(dsn, transfer)
        outcomes[outcome] += 1
        assert accepted.status_code == (200 if outcome == "Accepted" else 409)
        assert swept.json() == {"expiredCount": 0 if outcome == "Accepted" else 1}
        assert owner_of(dsn, str(product)) == ("bob" if outcome == "Accepted" else "alice")
        assert requests_of(dsn, str(product)) == ["Cancelled" if outcome == "Accepted" else "InProgress"]
    check_consistent(dsn)
    assert set(outcomes) == {"Accepted", "Expired"}, f"the race never went the other way: {outcomes}"


async def test_a_sweep_that_waited_for_an_acceptance_leaves_it_alone(
    users: Users, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """T3: it saw the transfer pending, waited for the product, and must look again."""
    product = await users.register()
    transfer = await users.offer(product)
    async with db.transaction() as tx:
        await service.accept_transfer(tx, UUID(transfer), by="bob")
        clock.advance(hours=73)
        sweeping = asyncio.create_task(users.expire())
        await until_waiting(dsn, 1)
    assert await sweeping == 0
    assert (status_of(dsn, transfer), owner_of(dsn, product)) == ("Accepted", "bob")
    check_consistent(dsn)


async def test_an_acceptance_that_waited_for_a_sweep_is_refused(
    users: Users, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """T1: it decides after it has the lock, not before."""
    product = await users.register()
    transfer = await users.offer(product)
    clock.advance(hours=73)
    async with db.transaction() as tx:
        assert (await service.expire_pending(tx)).expired_count == 1
        accepting = asyncio.create_task(users.end("bob", transfer, "accept"))
        await until_waiting(dsn, 1)
    answer = await accepting
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:transfer-expired")
    assert owner_of(dsn, product) == "alice"
    check_consistent(dsn)


async def test_an_acceptance_that_waits_past_the_window_is_refused(
    users: Users, dsn: str, clock: BusinessClock
) -> None:
    """T1: the time that counts is the one after the wait."""
    product = await users.register()
    transfer = await users.offer(product)
    with holding(dsn, product):
        accepting = asyncio.create_task(users.end("bob", transfer, "accept"))
        await until_waiting(dsn, 1)
        clock.advance(hours=73)
    assert (await accepting).status_code == 409
    assert owner_of(dsn, product) == "alice"


# -- two of a kind ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_overdue", [False, True])
async def test_of_many_starts_at_once_one_wins(users: Users, dsn: str, clock: BusinessClock, is_overdue: bool) -> None:
    """T1: also when an overdue one has to make room first; that one ends once."""
    product = await users.register()
    await users.request(product)
    if is_overdue:
        await users.offer(product)
        clock.advance(hours=73)
    starts = [users.post("alice", f"/v1/products/{product}/transfers", {"toUserId": f"u{n}"}) for n in range(8)]
    with holding(dsn, product):
        racing = [asyncio.create_task(start) for start in starts]
        await until_waiting(dsn, len(racing))
    statuses = Counter(answer.status_code for answer in await asyncio.gather(*racing))
    assert statuses == {201: 1, 409: 7}
    assert events_of(dsn, product).count("OwnershipTransferExpired") == is_overdue
    check_consistent(dsn)


@pytest.mark.parametrize("commits", [True, False])
async def test_a_rival_who_knows_no_locks_makes_it_a_conflict_and_no_accident(
    users: Users, dsn: str, commits: bool
) -> None:
    """T1: plain SQL starts a transfer at the same moment; the index decides, and it is never a 500."""
    product = await users.register()
    with psycopg.connect(dsn) as rival:
        rival.execute(
            "INSERT INTO transfers.transfers (id, product_id, from_user_id, to_user_id, created_at, updated_at)"
            " VALUES (gen_random_uuid(), %s, 'alice', 'carol', duly.now(), duly.now())",
            [product],
        )
        starting = asyncio.create_task(users.post("alice", f"/v1/products/{product}/transfers", {"toUserId": "bob"}))
        await until_waiting(dsn, 1)
        rival.commit() if commits else rival.rollback()
    answer = await starting
    assert answer.status_code == (409 if commits else 201)
    assert answer.json().get("type") == ("urn:duly:problem:transfer-pending" if commits else None)
    assert value(dsn, "SELECT count(*) FROM transfers.transfers WHERE status = 'Pending'") == 1


async def test_sweeps_at_once_expire_each_transfer_once(users: Users, dsn: str) -> None:
    """T3."""
    products = fill(dsn, 200)
    with holding(dsn, products[100], products[101]):
        sweeps = [asyncio.create_task(users.expire()) for _ in range(4)]
        await until_waiting(dsn, len(sweeps))
    counts = await asyncio.gather(*sweeps)
    assert sorted(counts) == [0, 0, 0, 200]
    query = "SELECT count(*), count(DISTINCT aggregate_id) FROM duly.event_log WHERE type = 'OwnershipTransferExpired'"
    assert rows(dsn, query) == [(200, 200)]
    check_consistent(dsn)


async def test_a_bounded_sweep_beside_another_goes_on_with_the_rest(db: Database, dsn: str) -> None:
    """T3: both want the same oldest ones; the second waits, finds them done, and says that there is more."""
    fill(dsn, 30)
    async with db.transaction() as first:
        assert (await service.expire_pending(first, limit=20)).expired_count == 20

        async def sweep() -> service.Sweep:
            async with db.transaction() as tx:
                return await service.expire_pending(tx, limit=20)

        second = asyncio.create_task(sweep())
        await until_waiting(dsn, 1)
    found = await second
    assert (found.expired_count, found.has_more) == (0, True)
    assert (await sweep()).expired_count == 10
    check_consistent(dsn)


async def test_accepting_and_cancelling_at_once_has_one_winner(users: Users, dsn: str) -> None:
    """T1: owner and recipient, each way round."""
    winners: Counter[str] = Counter()
    for number in range(40):
        product = await users.register()
        await users.request(product)
        transfer = await users.offer(product)
        steps = [users.end("bob", transfer, "accept"), users.end("alice", transfer, "cancel")]
        racing = []
        with holding(dsn, product):
            for waiting, index in enumerate((0, 1) if number % 2 else (1, 0), 1):
                racing.append((index, asyncio.create_task(steps[index])))
                await until_waiting(dsn, waiting)
        answers = {index: (await task).status_code for index, task in racing}
        assert sorted(answers.values()) == [200, 409]
        winner = status_of(dsn, transfer)
        winners[winner] += 1
        assert answers[0 if winner == "Accepted" else 1] == 200
        assert owner_of(dsn, product) == ("bob" if winner == "Accepted" else "alice")
    check_consistent(dsn)
    assert set(winners) == {"Accepted", "Cancelled"}


# -- service requests ------------------------------------------------------------------------------------------------


async def test_a_request_that_is_being_made_is_resumed_by_the_sweep_that_waited(
    users: Users, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """T2: written as paused, not committed yet when the sweep began."""
    product = await users.register()
    await users.offer(product)
    clock.advance(hours=73)
    async with db.transaction() as tx:
        await service.request_service(tx, UUID(product), by="alice", description="Oil it")
        sweeping = asyncio.create_task(users.expire())
        await until_waiting(dsn, 1)
    assert await sweeping == 1
    assert requests_of(dsn, product) == ["InProgress"]
    check_consistent(dsn)


async def test_a_request_that_waited_for_the_sweep_is_not_paused(
    users: Users, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """T2."""
    product = await users.register()
    await users.offer(product)
    clock.advance(hours=73)
    async with db.transaction() as tx:
        await service.expire_pending(tx)
        asking = asyncio.create_task(users.request(product))
        await until_waiting(dsn, 1)
    await asking
    assert requests_of(dsn, product) == ["InProgress"]


async def test_a_request_and_a_start_at_once_leave_nothing_running(users: Users, db: Database, dsn: str) -> None:
    """T2: whichever is first, the request is paused in the end."""
    for starts_first in (True, False):
        product = await users.register()
        async with db.transaction() as tx:
            if starts_first:
                await service.start_transfer(tx, UUID(product), by="alice", to="bob")
                second = asyncio.create_task(users.request(product))
            else:
                await service.request_service(tx, UUID(product), by="alice", description="Oil it")
                second = asyncio.create_task(users.offer(product))
            await until_waiting(dsn, 1)
        await second
        assert requests_of(dsn, product) == ["Paused"]
    check_consistent(dsn)


async def test_requests_and_sweeps_at_once_never_leave_one_paused_for_good(users: Users, dsn: str) -> None:
    """T2: over HTTP, without a barrier."""
    for product in fill(dsn, 40):
        await asyncio.gather(users.request(str(product)), users.sweep(), users.request(str(product)))
    await users.expire()
    assert rows(dsn, "SELECT DISTINCT status FROM transfers.service_requests") == [("InProgress",)]
    check_consistent(dsn)


# -- the checker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "rule"),
    [
        ("UPDATE transfers.service_requests SET status = 'InProgress'", "a request goes on while"),
        (
            "UPDATE transfers.transfers SET status = 'Expired', updated_at = created_at + interval '73 hours'",
            "a request is paused without",
        ),
        ("UPDATE transfers.transfers SET status = 'Accepted'", "an owner is not who accepted last"),
        ("UPDATE transfers.transfers SET status = 'Accepted'", "a transfer has other events"),
        (
            "SELECT duly.emit(type, topic, aggregate_id, payload) FROM duly.outbox WHERE type LIKE '%Started'",
            "a transfer has other events",
        ),
        ("DELETE FROM duly.outbox", "a transfer has other events"),
    ],
)
async def test_the_checker_of_these_tests_sees_what_is_wrong(users: Users, dsn: str, harm: str, rule: str) -> None:
    """A checker that cannot fail proves nothing."""
    product = await users.register()
    await users.request(product)
    await users.offer(product)
    check_consistent(dsn)
    rows(dsn, harm)
    with pytest.raises(AssertionError, match=rule):
        check_consistent(dsn)


# -- everything at once ----------------------------------------------------------------------------------------------


async def test_a_storm_of_everything_has_no_deadlock_and_adds_up(users: Users, dsn: str) -> None:
    """One lock order: products by id, transfers, requests. Nobody gets anything but an answer."""
    random.seed(7)
    before = conflicts()
    products = [str(product) for product in fill(dsn, 12)]

    async def act(number: int) -> int:
        product = random.choice(products)
        owner = owner_of(dsn, product)
        found = rows(dsn, PENDING_OF, {"id": product})
        transfer = str(found[0][0]) if found else ""
        other = "bob" if owner != "bob" else "carol"
        match number % 6:
            case 0:
                return (await users.sweep()).status_code
            case 1 | 2:
                path = f"/v1/products/{product}/transfers"
                return (await users.post(owner, path, {"toUserId": other})).status_code
            case 3:
                path = f"/v1/products/{product}/service-requests"
                return (await users.post(owner, path, {"description": "Oil it"})).status_code
            case _:
                how = random.choice(["accept", "reject", "cancel"])
                who = owner if how == "cancel" else other
                return (await users.end(who, transfer, how)).status_code if transfer else 200

    for _ in range(25):
        statuses = await asyncio.gather(*(act(number) for number in range(12)))
        assert set(statuses) <= {200, 201, 403, 409}, statuses
        rows(
            dsn,  # some grow old, so that sweeps have work
            "UPDATE transfers.transfers SET created_at = created_at - interval '73 hours',"
            " updated_at = updated_at - interval '73 hours' WHERE status = 'Pending' AND random() < 0.4",
        )
    assert (value(dsn, DEADLOCKS), conflicts()) == (0, before)
    check_consistent(dsn)
