"""A handler calls the outside; what follows from the answer and the job's end are one commit (E3.11)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from duly import Database, Duly, Event, Fail, JobContext, Snooze, Then, Tx, Worker
from duly.jobs.outcomes import Cancel, Done, Outcome
from tests.engine.inbox.effects import publish_numbers
from tests.engine.jobs.wire import Cut, breaking_wire
from tests.engine.jobs.witness import (
    EFFECT,
    each_once,
    effects,
    expire_leases,
    is_empty,
    make_effects,
    outcomes,
    queue,
    schedule_numbers,
    until,
    working,
)
from tests.support import handlers, rows

WRITE = text(EFFECT)


class Partner:
    """Somebody outside who counts its calls, and what is written of each answer."""

    def __init__(self, *, kind: str = "async") -> None:
        self.calls: list[str | None] = []
        self.writes = 0
        self.returns: Outcome | None = None
        self.before_write: Callable[[], Any] = lambda: None
        self.handlers = handlers({"async": self._async, "own": self._own, "sync": self._sync}[kind](), max_retries=1)

    def _async(self) -> Callable[..., Any]:
        async def work(ctx: JobContext) -> Then:
            self.calls.append(ctx.entity_id)
            return Then(lambda tx: self._write(tx, ctx))

        return work

    def _own(self) -> Callable[..., Any]:
        async def work(db: Database, ctx: JobContext) -> Then:
            async with db.transaction() as tx:
                found: str = (await tx.execute(text("SELECT 'asked before'"))).scalar_one()
            assert found == "asked before"
            self.calls.append(ctx.entity_id)
            return Then(lambda tx: self._write(tx, ctx))

        return work

    def _sync(self) -> Callable[..., Any]:
        def write(tx: Session, ctx: JobContext) -> Outcome | None:
            self.writes += 1
            self.before_write()
            tx.execute(WRITE, {"entity_id": ctx.entity_id, "run": ""})
            return self.returns

        def work(ctx: JobContext) -> Then:
            self.calls.append(ctx.entity_id)
            return Then(lambda tx: write(tx, ctx))

        return work

    async def _write(self, tx: Tx, ctx: JobContext) -> Outcome | None:
        self.writes += 1
        await asyncio.to_thread(self.before_write)
        await tx.execute(WRITE, {"entity_id": ctx.entity_id, "run": ""})
        return self.returns


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    make_effects(dsn)


@pytest.mark.parametrize("kind", ["async", "own", "sync"])
async def test_what_follows_from_a_call_commits_with_the_jobs_end(db: Database, dsn: str, kind: str) -> None:
    partner = Partner(kind=kind)
    schedule_numbers(dsn, "work", 3)
    await Worker(db, partner.handlers).run_once()
    assert effects(dsn) == each_once(3)
    assert outcomes(dsn) == [(str(number), "done", 0) for number in (1, 2, 3)]
    assert is_empty(dsn)


@pytest.mark.parametrize("kind", ["async", "own", "sync"])
async def test_writes_of_a_zombie_are_refused_after_its_call(db: Database, dsn: str, kind: str) -> None:
    """E3.5: the lease ended while the outside was being called and somebody else took the job."""
    zombie, successor = Partner(kind=kind), Partner(kind=kind)

    def lose() -> None:
        assert rows(dsn, "UPDATE duly.jobs SET lease_token = nextval('duly.lease_tokens') RETURNING id")

    zombie.before_write = lose
    schedule_numbers(dsn, "work", 1)
    await Worker(db, zombie.handlers).run_once()
    assert zombie.calls == ["1"]
    assert effects(dsn) == {}
    expire_leases(dsn)
    await Worker(db, successor.handlers).run_once()
    assert effects(dsn) == each_once(1)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("cut", ["statement", "reply"])
async def test_a_commit_without_an_answer_is_resolved_and_the_call_is_not_repeated(
    db: Database, dsn: str, cut: Cut, kind: str
) -> None:
    """E3.11: lost before it arrived, what follows is written again; lost after it took effect, it is found."""
    partner = Partner(kind=kind)
    schedule_numbers(dsn, "work", 1)
    async with breaking_wire(dsn) as wire:
        behind = Database(wire.dsn)

        def arm() -> None:
            wire.cut_next = cut if wire.cuts == 0 else None

        partner.before_write = arm
        await Worker(behind, partner.handlers).run_once()
        await behind.close()
        assert wire.cuts == 1
    assert partner.calls == ["1"]
    assert partner.writes == (2 if cut == "statement" else 1)
    assert effects(dsn) == each_once(1)
    assert outcomes(dsn) == [("1", "done", 0)]


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_conflict_repeats_what_follows_and_not_the_call(db: Database, dsn: str, kind: str) -> None:
    rows(
        dsn,
        """
        CREATE SEQUENCE tries;
        CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF nextval('tries') < 3 THEN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER conflict BEFORE INSERT ON effects FOR EACH ROW EXECUTE FUNCTION conflict()
        """,
    )
    partner = Partner(kind=kind)
    schedule_numbers(dsn, "work", 1)
    await Worker(db, partner.handlers).run_once()
    assert (partner.calls, partner.writes) == (["1"], 3)
    assert effects(dsn) == each_once(1)
    assert outcomes(dsn) == [("1", "done", 0)]


@pytest.mark.parametrize("kind", ["async", "own", "sync"])
async def test_what_follows_may_fail_and_is_retried_with_the_call(db: Database, dsn: str, kind: str) -> None:
    partner = Partner(kind=kind)

    def fail_once() -> None:
        if partner.writes == 1:
            raise RuntimeError("not this time")

    partner.before_write = fail_once
    schedule_numbers(dsn, "work", 1)
    await Worker(db, partner.handlers).run_once()
    assert [retries for _, _, retries in queue(dsn)] == [1]
    assert effects(dsn) == {}
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now()")
    await Worker(db, partner.handlers).run_once()
    assert partner.calls == ["1", "1"]
    assert effects(dsn) == each_once(1)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize(
    ("returned", "outcome", "left"),
    [
        (None, "done", []),
        (Done("fine"), "done", []),
        (Cancel("no need"), "cancelled", []),
        (Fail("refused"), "buried", [("1", "DeadLetter", 0)]),
        (Snooze(timedelta(hours=1)), "snoozed", [("1", "Pending", 0)]),
    ],
)
async def test_what_follows_says_how_it_ended_and_its_writes_stay(
    db: Database, dsn: str, returned: Outcome | None, outcome: str, left: list[Any], kind: str
) -> None:
    partner = Partner(kind=kind)
    partner.returns = returned
    schedule_numbers(dsn, "work", 1)
    await Worker(db, partner.handlers).run_once()
    assert outcomes(dsn) == [("1", outcome, 0)]
    assert effects(dsn) == each_once(1)
    assert queue(dsn) == left


async def test_inside_a_transaction_there_is_nothing_to_put_off(db: Database, dsn: str) -> None:
    async def work(ctx: JobContext, tx: Tx) -> Then:
        await tx.execute(WRITE, {"entity_id": ctx.entity_id, "run": ""})
        return Then(lambda _: None)

    schedule_numbers(dsn, "work", 1, max_retries=0)
    await Worker(db, handlers(work)).run_once()
    assert "Then is for handlers without a transaction" in rows(dsn, "SELECT error FROM duly.dead_letters")[0][0]
    assert effects(dsn) == {}


async def test_a_consumer_writes_what_follows_with_its_inbox_row(db: Database, dsn: str) -> None:
    """E2.2: and an event that was processed in the meantime is not applied a second time."""
    app = Duly()
    seen: list[int] = []

    @app.consumer("partner", on="order.*")
    async def call(event: Event, db: Database) -> Then:
        number = int(event.payload["n"])
        seen.append(number)
        if number == 2:  # another way to the same consumer was quicker
            rows(
                dsn,
                "INSERT INTO duly.processed_events VALUES ('partner', %(id)s, duly.now())",
                {"id": event.id},
            )

        async def write(tx: Tx) -> None:
            await tx.execute(WRITE, {"entity_id": str(number), "run": ""})

        return Then(write)

    await app.prepare(db)
    await publish_numbers(db, ["a1"], [1, 2])
    await Worker(db, app.handlers).run_once()
    assert sorted(seen) == [1, 2]
    assert effects(dsn) == each_once(1)
    assert rows(dsn, "SELECT count(*) FROM duly.processed_events") == [(2,)]
    assert sorted(rows(dsn, "SELECT outcome FROM duly.executions")) == [("done",), ("duplicate",)]


async def test_a_worker_that_goes_on_settles_what_follows_beside_ordinary_jobs(db: Database, dsn: str) -> None:
    partner = Partner()
    done: list[str | None] = []

    async def plain(ctx: JobContext) -> None:
        done.append(ctx.entity_id)

    schedule_numbers(dsn, "work", 20)
    schedule_numbers(dsn, "plain", 20)
    async with working(Worker(db, partner.handlers | handlers(plain), concurrency=4)):
        await until(lambda: is_empty(dsn), what="all is done")
    assert effects(dsn) == each_once(20)
    assert len(done) == 20
