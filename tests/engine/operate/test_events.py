"""Events in an operator's hands: E1.4 (states, requeue), E7.1 (outbox with its failures, every action audited)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from uuid import UUID, uuid4

import pytest

from duly.db import Database
from duly.errors import Conflict, Invalid, NotFound
from duly.operate import discard_event, list_events, requeue_event, requeue_events
from duly.operate.events import list_discarded
from duly.outbox.relay import Relay
from tests.engine.operate.conftest import WHO, Make, until_blocked


async def test_a_requeued_event_has_all_its_attempts_again(db: Database, make: Make) -> None:
    """E1.4: an operator can requeue a FAILED event; its error stays in the audit."""
    id = make.failed_event()
    async with db.transaction() as tx:
        await requeue_event(tx, id, **WHO)
    row = make.run("SELECT id, attempts, retry_at, failed_at, last_error, parked FROM duly.outbox")
    assert row == [(id, 0, None, None, None, False)]
    [entry] = make.audit()
    assert (entry["action"], entry["subject"], entry["actor"]) == ("event.requeued", f"event:{id}", "alice")
    assert entry["before"]["last_error"] == "broker said no"
    assert "payload" not in entry["before"]


async def test_requeueing_resolves_the_alert_of_that_event_only(db: Database, make: Make) -> None:
    id, other = make.failed_event("order-1"), make.failed_event("order-2")
    async with db.transaction() as tx:
        await requeue_event(tx, id, **WHO)
    assert make.run("SELECT subject FROM duly.alerts WHERE resolved_at IS NULL") == [(str(other),)]


async def test_requeueing_wakes_the_relay_after_its_commit(db: Database, make: Make) -> None:
    id = make.failed_event()
    listener = await db.connect()
    heard: asyncio.Queue[str] = asyncio.Queue()
    await listener.add_listener("duly", lambda *told: heard.put_nowait(told[3]))
    async with db.transaction() as tx:
        await requeue_event(tx, id, **WHO)
    assert await asyncio.wait_for(heard.get(), 10) == "outbox"
    await listener.close()


async def test_only_a_failed_event_can_be_requeued_or_discarded(db: Database, make: Make) -> None:
    pending, published = make.event(), make.published()
    async with db.transaction() as tx:
        for id in (pending, published):
            with pytest.raises(Conflict):
                await requeue_event(tx, id, **WHO)
            with pytest.raises(Conflict):
                await discard_event(tx, id, **WHO)
        with pytest.raises(NotFound):
            await requeue_event(tx, uuid4(), **WHO)
    assert make.audit() == []


async def test_an_event_that_is_still_retried_can_be_neither_requeued_nor_discarded(db: Database, make: Make) -> None:
    """E1.4: who tries is told so, and its attempts stay."""
    id = make.event(attempts=2, retry_at=make.clock.now(), last_error="busy")
    async with db.transaction() as tx:
        for action in (requeue_event, discard_event):
            with pytest.raises(Conflict, match="is PENDING"):
                await action(tx, id, **WHO)
        assert await requeue_events(tx, **WHO) == 0
    assert make.run("SELECT attempts FROM duly.outbox") == [(2,)]


async def test_many_failed_events_are_requeued_oldest_first_by_topic(db: Database, make: Make) -> None:
    ids = [make.failed_event(f"order-{number}") for number in range(4)]
    other = make.failed_event("order-9", topic="ledger")
    async with db.transaction() as tx:
        assert await requeue_events(tx, topic="shop", limit=3, **WHO) == 3
    failed = make.run("SELECT id FROM duly.outbox WHERE failed_at IS NOT NULL ORDER BY seq")
    assert failed == [(ids[3],), (other,)]
    assert [entry["subject"] for entry in make.audit()] == [f"event:{id}" for id in ids[:3]]
    async with db.transaction() as tx:
        assert await requeue_events(tx, **WHO) == 2
        assert await requeue_events(tx, **WHO) == 0


async def test_a_discarded_event_is_kept_whole_in_the_audit(db: Database, make: Make) -> None:
    id = make.failed_event()
    async with db.transaction() as tx:
        await discard_event(tx, id, **WHO)
    assert make.run("SELECT 1 FROM duly.outbox") == []
    [entry] = make.audit()
    assert (entry["action"], entry["before"]["id"], entry["before"]["payload"]) == (
        "event.discarded",
        str(id),
        {"card": "4111-SECRET"},
    )
    assert make.run("SELECT 1 FROM duly.alerts WHERE resolved_at IS NULL") == []


async def test_what_was_discarded_of_an_aggregate_is_found(db: Database, make: Make) -> None:
    """Nowhere else is it known that there was something to tell."""
    first, other, kept = make.failed_event("order-1"), make.failed_event("order-2"), make.failed_event("order-3")
    async with db.transaction() as tx:
        for id in (first, other):
            await discard_event(tx, id, **WHO)
        await requeue_event(tx, kept, **WHO)
        found = await list_discarded(tx, ["order-3", "order-1", "order-9"])
        assert [(one.id, one.aggregate_id) for one in found] == [(first, "order-1")]
        assert [one.id for one in await list_discarded(tx, ["order-2", "order-1"])] == [first, other]
        assert await list_discarded(tx, []) == []


async def test_after_a_discarded_event_the_next_of_its_aggregate_goes_first(db: Database, make: Make) -> None:
    """E1.4, E1.5: the aggregate goes on, in order, and no other is touched."""
    id = make.failed_event("order-1")
    first, second = make.event("order-1", parked=True), make.event("order-1", parked=True)
    make.failed_event("order-2")
    other = make.event("order-2", parked=True)
    async with db.transaction() as tx:
        await discard_event(tx, id, **WHO)
    parked = make.run("SELECT id, parked FROM duly.outbox WHERE failed_at IS NULL ORDER BY seq")
    assert parked == [(first, False), (second, True), (other, True)]


async def test_of_two_operators_who_requeue_one_event_one_wins(db: Database, make: Make) -> None:
    id = make.failed_event()
    held, go_on = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with db.transaction() as tx:
            await requeue_event(tx, id, **WHO)
            held.set()
            await go_on.wait()

    async def second() -> None:
        await held.wait()
        async with db.transaction() as tx:
            await discard_event(tx, id, **WHO)

    async def release_when_blocked() -> None:
        await held.wait()
        await until_blocked(make)
        go_on.set()

    results = await asyncio.gather(first(), second(), release_when_blocked(), return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], Conflict)
    assert make.run("SELECT id, failed_at FROM duly.outbox") == [(id, None)]
    assert len(make.audit()) == 1


async def test_an_event_is_not_discarded_while_a_relay_works_on_its_lane(db: Database, make: Make) -> None:
    """A relay that parks the next event behind it at this moment would park it behind nothing."""
    id = make.failed_event("order-1")
    relay = await db.connect()
    async with relay.transaction():
        await relay.execute(
            "SELECT 1 FROM duly.lanes WHERE lane = (SELECT lane FROM duly.outbox WHERE id = $1) FOR UPDATE", id
        )
        follower = make.event("order-1")

        async def discard() -> None:
            async with db.transaction() as tx:
                await discard_event(tx, id, **WHO)

        discarding = asyncio.create_task(discard())
        await until_blocked(make)
        await relay.execute("UPDATE duly.outbox SET parked = true WHERE id = $1", follower)
    await discarding
    await relay.close()
    assert make.run("SELECT id, parked FROM duly.outbox") == [(follower, False)]


async def test_what_is_emitted_after_a_requeue_goes_behind_those_that_were_held_back(db: Database, make: Make) -> None:
    """E1.5: the head is as good as new, so it is the parked ones that hold the next one back."""
    failed, held = make.failed_event("order-1"), make.event("order-1", parked=True)
    relay = Relay(db)
    await relay.run_once()  # its sweep for strays is behind it
    async with db.transaction() as tx:
        await requeue_event(tx, failed, **WHO)
    expected = [failed, held, make.event("order-1")]
    for _ in range(3):
        await relay.run_once()
        published = {row[0] for row in make.run("SELECT id FROM duly.events")}
        assert published == set(expected[: len(published)])
    assert make.run("SELECT 1 FROM duly.outbox") == []


@pytest.mark.parametrize("action", [requeue_event, discard_event])
async def test_the_relay_goes_on_with_the_aggregate_in_order(
    db: Database, make: Make, action: Callable[..., Awaitable[None]]
) -> None:
    """E1.4, E1.5: from the operator's command to the history."""
    failed = make.failed_event("order-1")
    later = [make.event("order-1", parked=True) for _ in range(3)]
    relay = Relay(db)
    await relay.run_once()
    assert make.value("SELECT count(*) FROM duly.events") == 0, "a failed event holds its aggregate back"
    async with db.transaction() as tx:
        await action(tx, failed, **WHO)
    published: list[UUID] = []
    for _ in range(5):
        await relay.run_once()
        rows = make.run("SELECT id FROM duly.events ORDER BY seq")
        assert [row[0] for row in rows][: len(published)] == published
        published = [row[0] for row in rows]
    assert published == ([failed, *later] if action is requeue_event else later)
    assert make.run("SELECT 1 FROM duly.outbox") == []


async def test_events_are_listed_by_status_topic_and_aggregate_newest_first(db: Database, make: Make) -> None:
    """E1.4: PENDING, PUBLISHED and FAILED are what a person sees."""
    published = make.published("order-1")
    failed = make.failed_event("order-1")
    parked = make.event("order-1", parked=True)
    pending = make.event("order-2", topic="ledger")
    async with db.transaction() as tx:
        everything = await list_events(tx)
        assert [(event.id, event.status) for event in everything] == [
            (pending, "PENDING"),
            (parked, "PENDING"),
            (failed, "FAILED"),
            (published, "PUBLISHED"),
        ]
        assert everything[2].last_error == "broker said no"
        assert everything[3].published_at is not None
        assert [event.id for event in await list_events(tx, status="FAILED")] == [failed]
        assert [event.id for event in await list_events(tx, topic="ledger")] == [pending]
        assert [event.id for event in await list_events(tx, aggregate_id="order-2")] == [pending]
        assert [event.id for event in await list_events(tx, aggregate_id="order-1")] == [parked, failed, published]
        for status, expected in (("PENDING", parked), ("FAILED", failed), ("PUBLISHED", published)):
            found = await list_events(tx, aggregate_id="order-1", status=status)
            assert [event.id for event in found] == [expected]
        assert [event.id for event in await list_events(tx, limit=1)] == [pending]
        with pytest.raises(Invalid):
            await list_events(tx, status="LOST")
