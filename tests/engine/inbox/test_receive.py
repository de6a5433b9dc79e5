"""Consumers: their writes, the inbox row and the job's end are one commit; a redelivery has no effect (E2.1, E2.2)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from duly import Cancel, Database, Done, Duly, Event, Fail, Outcome, Snooze, Tx, Worker, emit
from duly.errors import Invalid
from duly.messages import EventBody, NewEvent
from duly.testing import BusinessClock, drain
from tests.engine.inbox.effects import (
    INSERT_EFFECT,
    dead_letters_back_to_the_queue,
    effect,
    effects,
    outcomes,
    prepare,
    publish_numbers,
    record,
)
from tests.support import rows, value

REDELIVER = """
INSERT INTO duly.jobs (name, entity_id, event_id, run_at, due_at, created_at)
SELECT 'consumer:ledger', aggregate_id, id, duly.now(), duly.now(), duly.now() FROM duly.events
"""


def by_session(app: Duly, dsn: str) -> None:
    @app.consumer("ledger", on="*")
    async def ledger(event: Event, tx: Tx) -> None:
        await record(tx, "ledger", event)


def by_connection(app: Duly, dsn: str) -> None:
    @app.consumer("ledger", on="*")
    async def ledger(tx: AsyncConnection, event: Event) -> None:
        await tx.execute(INSERT_EFFECT, effect("ledger", event))


def by_asyncpg(app: Duly, dsn: str) -> None:
    @app.consumer("ledger", on="*")
    async def ledger(event: Event, connection: asyncpg.Connection) -> None:
        await connection.execute(
            "INSERT INTO effects (consumer, aggregate, n, event_id) VALUES ('ledger', $1, $2, $3)",
            event.aggregate_id,
            event.payload["n"],
            event.id,
        )


def by_plain_def(app: Duly, dsn: str) -> None:
    @app.consumer("ledger", on="*")
    def ledger(event: Event, tx: Session) -> None:
        assert threading.current_thread() is not threading.main_thread()
        tx.execute(INSERT_EFFECT, effect("ledger", event))


def by_batch(app: Duly, dsn: str) -> None:
    @app.consumer("ledger", on="*", batch=10)
    async def ledger(events: list[Event], tx: Tx) -> None:
        for event in events:
            await record(tx, "ledger", event)


INSERT = "INSERT INTO effects (consumer, aggregate, n, event_id) VALUES ('ledger', %(a)s, %(n)s, %(id)s)"


def without_transaction(app: Duly, dsn: str) -> None:
    """Its effects are outside of our transaction: here, on a connection of its own."""

    @app.consumer("ledger", on="*")
    async def ledger(event: Event) -> None:
        await asyncio.to_thread(rows, dsn, INSERT, {"a": event.aggregate_id, "n": event.payload["n"], "id": event.id})


def without_transaction_in_a_thread(app: Duly, dsn: str) -> None:
    @app.consumer("ledger", on="*")
    def ledger(event: Event) -> None:
        rows(dsn, INSERT, {"a": event.aggregate_id, "n": event.payload["n"], "id": event.id})


Kind = Callable[[Duly, str], None]
IN_A_TRANSACTION: list[Kind] = [by_session, by_connection, by_asyncpg, by_plain_def, by_batch]
ALL: list[Kind] = [*IN_A_TRANSACTION, without_transaction, without_transaction_in_a_thread]
every_kind = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
every_transaction = pytest.mark.parametrize("kind", IN_A_TRANSACTION, ids=lambda kind: kind.__name__)


async def application(kind: Kind, db: Database, dsn: str) -> Duly:
    app = Duly()
    kind(app, dsn)
    await prepare(app, db, dsn)
    return app


# -- once ------------------------------------------------------------------------------------------------------------


@every_kind
async def test_a_consumer_gets_each_event_once_whatever_kind_it_is(db: Database, dsn: str, kind: Kind) -> None:
    """E2.1: the inbox has a row for each, the queue none."""
    app = await application(kind, db, dsn)
    ids = await publish_numbers(db, ["a1", "a2"], [1, 2])
    await Worker(db, app.handlers).run_once()
    assert {aggregate: sorted(done) for aggregate, done in effects(dsn, "ledger").items()} == {
        "a1": [1, 2],
        "a2": [1, 2],
    }
    inbox = rows(dsn, "SELECT consumer, event_id FROM duly.processed_events")
    assert sorted(inbox) == sorted(("ledger", id_) for id_ in ids)
    assert outcomes(dsn) == ["done"] * 4
    assert rows(dsn, "SELECT count(*) FROM duly.jobs") == [(0,)]


@every_transaction
async def test_the_writes_the_inbox_row_and_the_jobs_end_are_one_commit(db: Database, dsn: str, kind: Kind) -> None:
    """E2.1: PostgreSQL itself says so: all three rows were written by the same transaction."""
    app = await application(kind, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, app.handlers).run_once()
    written_by = {
        value(dsn, f"SELECT xmin::text FROM {table}")
        for table in ("effects", "duly.processed_events", "duly.executions")
    }
    assert len(written_by) == 1


@every_kind
async def test_a_redelivery_is_skipped_without_side_effects_and_logged(db: Database, dsn: str, kind: Kind) -> None:
    """E2.2: its run is in the history as a duplicate, and it succeeded."""
    app = await application(kind, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, app.handlers).run_once()
    for _ in range(2):
        rows(dsn, REDELIVER)
        await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1]}
    assert outcomes(dsn) == ["done", "duplicate", "duplicate"]
    assert rows(dsn, "SELECT DISTINCT succeeded FROM duly.executions") == [(True,)]
    assert rows(dsn, "SELECT count(*) FROM duly.processed_events") == [(1,)]
    assert rows(dsn, "SELECT count(*) FROM duly.jobs") == [(0,)]


@every_transaction
async def test_two_deliveries_in_one_claim_are_handled_once(db: Database, dsn: str, kind: Kind) -> None:
    """E2.2: also when both run at the same time, or stand in the same batch."""
    app = await application(kind, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    for _ in range(4):
        rows(dsn, REDELIVER)
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1]}
    assert sorted(outcomes(dsn)) == ["done", *["duplicate"] * 4]


WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%processed_events%'
"""


@pytest.mark.parametrize("first_fails", [False, True])
async def test_a_second_delivery_at_the_same_moment_waits_for_the_first(
    db: Database, dsn: str, first_fails: bool
) -> None:
    """E2.2: it is a duplicate if the first commits, and it takes over if the first fails."""
    app = Duly()
    runs = 0

    @app.consumer("ledger", on="*", backoff=[3600])
    async def ledger(event: Event, tx: Tx) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            async with asyncio.timeout(10):  # until the other one stands before the inbox row
                while not await asyncio.to_thread(value, dsn, WAITING):
                    pass
            if first_fails:
                raise ConnectionError("the first one failed")
        await record(tx, "ledger", event)

    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    rows(dsn, REDELIVER)
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1]}
    assert sorted(outcomes(dsn)) == (["done", "retried"] if first_fails else ["done", "duplicate"])
    assert runs == (2 if first_fails else 1)


async def test_each_consumer_has_an_inbox_of_its_own(db: Database, dsn: str) -> None:
    """E2.2: one consumer's mark does not hide the event from another."""
    app = Duly()
    for name in ("ledger", "mail"):

        @app.consumer(name, on="*")
        async def consume(event: Event, tx: Tx, name: str = name) -> None:
            await record(tx, name, event)

    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == effects(dsn, "mail") == {"a1": [1]}


async def test_what_one_consumer_has_processed_is_not_hidden_from_one_without_a_transaction(
    db: Database, dsn: str
) -> None:
    """E2.2: that one asks the inbox before it is called."""
    app = Duly()
    called: list[str] = []
    for name in ("ledger", "mail"):

        @app.consumer(name, on="*")
        async def consume(event: Event, name: str = name) -> None:
            called.append(name)

    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    for name in ("ledger", "mail", "ledger"):
        await Worker(db, {f"consumer:{name}": app.handlers[f"consumer:{name}"]}).run_once()
    assert called == ["ledger", "mail"]
    assert outcomes(dsn) == ["done", "done"]


async def test_a_consumer_that_snoozes_leaves_the_inbox_of_another_alone(db: Database, dsn: str) -> None:
    """E2.2: else a redelivery would find the other one's event unprocessed."""
    app = Duly()

    @app.consumer("ledger", on="*")
    async def ledger(event: Event, tx: Tx) -> None:
        await record(tx, "ledger", event)

    @app.consumer("mail", on="*")
    async def mail(event: Event, tx: Tx) -> Outcome:
        return Snooze(timedelta(minutes=5), "the partner sleeps")

    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    for name in ("ledger", "mail"):
        await Worker(db, {f"consumer:{name}": app.handlers[f"consumer:{name}"]}).run_once()
    assert outcomes(dsn) == ["done", "snoozed"]
    assert rows(dsn, "SELECT consumer FROM duly.processed_events") == [("ledger",)]
    rows(dsn, REDELIVER)
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1]}


# -- nothing or everything -------------------------------------------------------------------------------------------


@every_transaction
async def test_a_handler_that_fails_leaves_nothing_behind(db: Database, dsn: str, kind: Kind) -> None:
    """E2.2: no write, no inbox row, no follow-up event; only that it was tried."""
    app = await application(kind, db, dsn)
    rows(dsn, "ALTER TABLE effects ADD CONSTRAINT never CHECK (n <> 1) NOT VALID")
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {}
    assert rows(dsn, "SELECT count(*) FROM duly.processed_events") == [(0,)]
    assert outcomes(dsn) == ["retried"]
    assert rows(dsn, "SELECT waits, retry_count FROM duly.jobs") == [("retry", 1)]


async def test_what_a_handler_emits_commits_with_it_and_names_its_cause(db: Database, dsn: str) -> None:
    """E1.1, E1.2, E5.7: a handler that fails after emitting has emitted nothing."""
    app = Duly()
    fail = True

    @app.consumer("ledger", on="order.*", backoff=[1])
    async def ledger(event: Event, tx: Tx) -> None:
        await emit(tx, NewEvent("payment.due", "shop", event.aggregate_id, {"n": event.payload["n"]}))
        if fail:
            raise ConnectionError("after emitting")

    await prepare(app, db, dsn)
    ((id_,),) = [await publish_numbers(db, ["a1"], [1])]
    await Worker(db, app.handlers).run_once()
    assert rows(dsn, "SELECT count(*) FROM duly.outbox") == [(0,)]
    fail = False
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now()")
    await Worker(db, app.handlers).run_once()
    cause = value(dsn, "SELECT headers FROM duly.events")
    effect_ = value(dsn, "SELECT headers FROM duly.outbox")
    assert effect_["causation_id"] == str(id_)
    assert effect_["correlation_id"] == cause["correlation_id"]


async def test_a_worker_that_lost_its_lease_cannot_write(db: Database, dsn: str) -> None:
    """E3.5, E2.2: the handler of a zombie finishes, and all of it is rolled back; the event is handled once."""
    app = Duly()
    inside, go_on = asyncio.Event(), asyncio.Event()
    runs = 0

    @app.consumer("ledger", on="*")
    async def ledger(event: Event, tx: Tx) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            inside.set()
            await go_on.wait()
        await record(tx, "ledger", event)
        await emit(tx, NewEvent("payment.due", "shop", "a1"))

    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    zombie = Worker(db, app.handlers, lease_seconds=3600)
    running = asyncio.create_task(zombie.run_once())
    await asyncio.wait_for(inside.wait(), 10)
    rows(
        dsn,
        "UPDATE duly.jobs SET lease_token = nextval('duly.lease_tokens'), leased_by = 'another',"
        " lease_expires_at = clock_timestamp() + interval '1 hour'",
    )
    go_on.set()
    await asyncio.wait_for(running, 30)
    rows(dsn, "UPDATE duly.jobs SET lease_expires_at = clock_timestamp() - interval '1 ms'")
    assert zombie.counts == {"lost": 1}
    assert effects(dsn, "ledger") == {}
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1]}
    assert rows(dsn, "SELECT count(*) FROM duly.outbox") == [(1,)]
    assert rows(dsn, "SELECT count(*) FROM duly.jobs") == [(0,)]


async def test_an_event_that_is_gone_from_the_history_is_a_dead_letter(db: Database, dsn: str) -> None:
    """E2.3: somebody dropped a partition by hand; the job says so instead of running without an event."""
    app = await application(by_session, db, dsn)
    await publish_numbers(db, ["a1", "a2"], [1])
    rows(dsn, "DELETE FROM duly.events WHERE aggregate_id = 'a1'")
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a2": [1]}
    assert rows(dsn, "SELECT entity_id, reason FROM duly.dead_letters") == [("a1", "event_missing")]


# -- what a consumer may return --------------------------------------------------------------------------------------


def returning(outcome: Callable[[], Outcome | None], synchronous: bool) -> Duly:
    app = Duly()
    if synchronous:

        @app.consumer("ledger", on="*")
        def ledger(event: Event, tx: Session) -> Outcome | None:
            if (given := outcome()) is None:
                tx.execute(INSERT_EFFECT, effect("ledger", event))
            return given
    else:

        @app.consumer("ledger", on="*")
        async def ledger_async(event: Event, tx: Tx) -> Outcome | None:
            if (given := outcome()) is None:
                await record(tx, "ledger", event)
            return given

    return app


both_colours = pytest.mark.parametrize("synchronous", [False, True], ids=["async_def", "def"])


@both_colours
async def test_a_consumer_that_snoozes_is_given_the_event_again(
    db: Database, dsn: str, clock: BusinessClock, synchronous: bool
) -> None:
    """E2.1: not yet is not done; the inbox must not have it."""
    answers: list[Outcome | None] = [Snooze(timedelta(minutes=5), "the partner sleeps"), None]
    app = returning(lambda: answers.pop(0), synchronous)
    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, app.handlers).run_once()
    assert rows(dsn, "SELECT count(*) FROM duly.processed_events") == [(0,)]
    clock.advance(minutes=6)
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1]}
    assert outcomes(dsn) == ["snoozed", "done"]


@both_colours
async def test_a_dead_letter_of_a_consumer_that_gave_up_can_be_retried(
    db: Database, dsn: str, synchronous: bool
) -> None:
    """E2.3: an operator can requeue, whether the handler raised or returned Fail."""
    answers: list[Outcome | None] = [Fail("the account is closed"), None]
    app = returning(lambda: answers.pop(0), synchronous)
    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, app.handlers).run_once()
    assert rows(dsn, "SELECT reason, error FROM duly.dead_letters") == [("failed_for_good", "the account is closed")]
    dead_letters_back_to_the_queue(dsn)
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1]}


@both_colours
async def test_a_consumer_that_cancels_is_done_with_the_event(db: Database, dsn: str, synchronous: bool) -> None:
    """E2.2: a redelivery of it is a duplicate."""
    app = returning(lambda: Cancel("nobody asked for it"), synchronous)
    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, app.handlers).run_once()
    rows(dsn, REDELIVER)
    await Worker(db, app.handlers).run_once()
    assert outcomes(dsn) == ["cancelled", "duplicate"]


async def test_a_consumers_message_is_in_the_history(db: Database, dsn: str) -> None:
    """E3.8."""
    app = returning(lambda: Done("booked"), synchronous=False)
    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    await Worker(db, app.handlers).run_once()
    assert rows(dsn, "SELECT message, source FROM duly.executions") == [("booked", "Deferred")]


# -- what a consumer is given ----------------------------------------------------------------------------------------


class Priced(EventBody, type="order.priced", topic="shop", aggregate="order_id"):
    order_id: str
    amount: Decimal
    share: float


async def test_a_consumer_reads_exactly_what_was_emitted(db: Database, dsn: str) -> None:
    """E1.2, F3: decimals to the last digit."""
    app = Duly()
    seen: list[tuple[Event, Priced]] = []

    @app.consumer("ledger", on="order.priced")
    async def ledger(event: Event, tx: Tx) -> None:
        seen.append((event, event.body(Priced)))

    await app.prepare(db)
    body = Priced(order_id="o1", amount=Decimal("0.10000000000000000000001"), share=0.1)
    async with db.transaction() as tx:
        (id_,) = await emit(tx, body)
    await drain(db, app.handlers)
    ((event, read),) = seen
    assert read == body
    assert (event.id, event.type, event.topic, event.aggregate_id) == (id_, "order.priced", "shop", "o1")
    assert event.created_at == value(dsn, "SELECT created_at FROM duly.events")
    assert UUID(event.headers["correlation_id"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"name": "led ger", "on": "*"}, "cannot name a consumer"),
        ({"name": "l" * 91, "on": "*"}, "cannot name a consumer"),
        ({"name": "ledger", "on": []}, "say which events it wants"),
        ({"name": "ledger", "on": ["a"] * 101}, "say which events it wants"),
        ({"name": "ledger", "on": "a b"}, "'a b' is no pattern"),
        ({"name": "ledger", "on": "order.[ab]"}, "is no pattern"),
        ({"name": "ledger", "on": "*", "batch": 0}, "batch=0"),
    ],
)
def test_a_consumer_that_could_never_work_is_refused_where_it_is_declared(
    arguments: dict[str, Any], complaint: str
) -> None:
    """E2.1."""
    with pytest.raises(Invalid, match=complaint):
        Duly().consumer(arguments.pop("name"), **arguments)


async def test_two_processes_may_register_the_same_consumers_at_once(db: Database, dsn: str) -> None:
    """E3.4: and a change of patterns takes effect."""
    app = await application(by_session, db, dsn)
    other = Database(dsn)
    await asyncio.gather(*(app.prepare(one) for one in (db, other) for _ in range(3)))
    await other.close()
    changed = Duly()

    @changed.consumer("ledger", on=["order.*", "payment.*"], ordered=True)
    async def ledger(event: Event) -> None:
        return None

    await changed.prepare(db)
    assert rows(dsn, "SELECT name, patterns, ordered, enabled FROM duly.consumers") == [
        ("ledger", ["order.*", "payment.*"], True, True)
    ]


async def test_a_consumer_that_an_operator_switched_off_stays_off(db: Database, dsn: str) -> None:
    """E7.1: a restart does not switch it on again, and it gets no jobs meanwhile."""
    app = await application(by_session, db, dsn)
    rows(dsn, "UPDATE duly.consumers SET enabled = false")
    await app.prepare(db)
    await publish_numbers(db, ["a1"], [1])
    assert rows(dsn, "SELECT count(*) FROM duly.jobs") == [(0,)]
