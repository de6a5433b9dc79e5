"""Many calls to the outside, one commit for what follows; each keeps the promises it has alone (E3.5, E3.11)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import text

from duly import Database, Duly, Event, Fail, JobContext, Snooze, ThenTogether, Tx, Worker
from duly.clock import monotonic
from duly.errors import OutcomeUnknown
from duly.jobs import run as run_module
from duly.jobs import sql
from duly.jobs import together as together_module
from duly.jobs.claim import Claims
from duly.jobs.outcomes import Cancel, Done, Outcome
from duly.jobs.run import ASKED_AT_ONCE
from duly.jobs.together import ALONE_AT_ONCE, Ended, Together
from duly.settings import Settings
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
)
from tests.support import handlers, rows, value

WRITE = text(EFFECT)
COMMITS = "SELECT count(DISTINCT xmin::text) FROM effects"
END_OPEN = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND state = 'idle in transaction'
"""
WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
COUNT = 20


class Partner:
    """Somebody outside whose answers all come at the same moment."""

    def __init__(self, count: int = COUNT, **options: Any) -> None:
        self.calls: list[str | None] = []
        self.turns: list[list[str]] = []
        self.returns: dict[str, Outcome | None] = {}
        self.before_write: Callable[[Sequence[str]], Any] = lambda _: None
        self.during: Callable[[Tx, Sequence[str]], Awaitable[None]] | None = None
        self._all_called = asyncio.Barrier(count)
        self.handlers = handlers(self._work(), max_retries=1, backoff_seconds=[3600], **options)

    def _work(self) -> Callable[..., Any]:
        async def work(ctx: JobContext) -> ThenTogether:
            self.calls.append(ctx.entity_id)
            if ctx.retry_count == 0 and len(self.calls) <= self._all_called.parties:
                await self._all_called.wait()
            return ThenTogether(self._write, ctx.entity_id)

        return work

    async def _write(self, tx: Tx, items: Sequence[str]) -> list[Outcome | None]:
        self.turns.append(list(items))
        for item in items:
            await tx.execute(WRITE, {"entity_id": item, "run": ""})
        await asyncio.to_thread(self.before_write, items)
        if self.during is not None:
            await self.during(tx, items)
        return [self.returns.get(item) for item in items]


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    make_effects(dsn)


async def work(db: Database, partner: Partner) -> dict[str, int]:
    """How many ended in which way."""
    worker = Worker(db, partner.handlers, concurrency=COUNT)
    await worker.run_once()
    return worker.counts


async def test_calls_that_ended_by_the_time_share_a_commit(db: Database, dsn: str) -> None:
    """The first goes at once; whoever comes while it commits goes together."""
    partner = Partner()
    schedule_numbers(dsn, "work", COUNT)
    await work(db, partner)
    assert len(partner.calls) == COUNT
    assert len(partner.turns) == value(dsn, COMMITS) <= 3
    assert effects(dsn) == each_once(COUNT)
    assert sorted(outcomes(dsn)) == sorted((str(number), "done", 0) for number in range(1, COUNT + 1))
    assert is_empty(dsn)


async def test_each_says_how_it_ended(db: Database, dsn: str) -> None:
    partner = Partner(5)
    partner.returns = {"1": Done("fine"), "2": Cancel("no"), "3": Fail("never"), "4": Snooze(timedelta(hours=1))}
    schedule_numbers(dsn, "work", 5)
    await work(db, partner)
    ended = {entity: outcome for entity, outcome, _ in outcomes(dsn)}
    assert ended == {"1": "done", "2": "cancelled", "3": "buried", "4": "snoozed", "5": "done"}
    assert effects(dsn) == each_once(5)
    assert sorted(queue(dsn)) == [("3", "DeadLetter", 0), ("4", "Pending", 0)]


async def test_one_that_spoils_the_commit_fails_alone(db: Database, dsn: str) -> None:
    partner = Partner()

    def spoil(items: Sequence[str]) -> None:
        if "7" in items:
            raise ValueError("poison")

    partner.before_write = spoil
    schedule_numbers(dsn, "work", COUNT)
    await work(db, partner)
    assert effects(dsn) == {number: 1 for number in each_once(COUNT) if number != "7"}
    assert len(partner.calls) == COUNT, "nobody else is called again for it"
    assert [(entity, retries) for entity, _, retries in queue(dsn)] == [("7", 1)]


async def cancelled(_tx: Tx, items: Sequence[str]) -> None:
    if "7" in items:
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task


async def missing(_tx: Tx, items: Sequence[str]) -> None:
    if "7" in items:
        raise FileNotFoundError("not the database's fault")


@pytest.mark.parametrize("spoil", [cancelled, missing])
async def test_whatever_one_of_them_does_the_others_are_written_soon(db: Database, dsn: str, spoil: Any) -> None:
    """A cancellation inside, an error that looks like an outage: each is that job's own."""
    partner = Partner()
    partner.during = spoil
    schedule_numbers(dsn, "work", COUNT)
    async with asyncio.timeout(30):
        await work(db, partner)
    assert effects(dsn) == {number: 1 for number in each_once(COUNT) if number != "7"}
    assert len(partner.calls) == COUNT
    assert [(entity, retries) for entity, _, retries in queue(dsn)] == [("7", 1)]


async def test_work_that_takes_long_for_one_of_them_holds_up_nobody_else(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "TOGETHER_SECONDS", 0.5)
    partner = Partner()
    others = {number: 1 for number in each_once(COUNT) if number != "7"}
    go_on = asyncio.Event()

    async def wait(_tx: Tx, items: Sequence[str]) -> None:
        if "7" in items:
            await go_on.wait()

    partner.during = wait
    schedule_numbers(dsn, "work", COUNT)
    working = asyncio.create_task(work(db, partner))
    await until(lambda: effects(dsn) == others, what="the others are written")
    assert not working.done()
    go_on.set()
    await working
    assert effects(dsn) == each_once(COUNT)
    assert len(partner.calls) == COUNT


async def test_a_commit_with_others_takes_a_part_of_the_time_that_a_job_has(db: Database, dsn: str) -> None:
    """Else one of them could take the others' time with it, and they would be called again."""
    partner = Partner(timeout_seconds=4)

    async def hang(_tx: Tx, items: Sequence[str]) -> None:
        if "7" in items:
            await asyncio.Event().wait()

    partner.during = hang
    schedule_numbers(dsn, "work", COUNT)
    await work(db, partner)
    assert effects(dsn) == {number: 1 for number in each_once(COUNT) if number != "7"}
    assert len(partner.calls) == COUNT
    assert [(entity, retries) for entity, _, retries in queue(dsn)] == [("7", 1)]


async def test_a_lock_that_one_of_them_waits_for_holds_up_nobody_else(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "TOGETHER_SECONDS", 60.0)
    partner = Partner()
    others = {number: 1 for number in each_once(COUNT) if number != "7"}

    async def take_lock(tx: Tx, items: Sequence[str]) -> None:
        if "7" in items:
            await tx.execute(text("SELECT pg_advisory_xact_lock(7)"))

    partner.during = take_lock
    schedule_numbers(dsn, "work", COUNT)
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(7)")
        working = asyncio.create_task(work(db, partner))
        await until(lambda: effects(dsn) == others, what="the others are written")
        assert not working.done()
        holder.rollback()
    await working
    assert effects(dsn) == each_once(COUNT)
    assert len(partner.calls) == COUNT
    assert sum(len(turn) > 1 for turn in partner.turns) == 1, "they have waited for it once"
    assert {outcome for _, outcome, _ in outcomes(dsn)} == {"done"}


async def test_those_who_wait_for_a_lock_alone_leave_sessions_to_the_others_and_stay_alone(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than may be alone at once: each waits for a moment, and comes again by itself."""
    monkeypatch.setattr(together_module, "TOGETHER_SECONDS", 60.0)
    monkeypatch.setattr(together_module, "ALONE_LOCK_SECONDS", 0.3)
    partner, most = Partner(), 0
    locked = {str(number) for number in range(1, 2 * ALONE_AT_ONCE + 1)}
    others = {number: 1 for number in each_once(COUNT) if number not in locked}

    async def take_lock(tx: Tx, items: Sequence[str]) -> None:
        if locked & set(items):
            await tx.execute(text("SELECT pg_advisory_xact_lock(7)"))

    def all_came_again() -> bool:
        nonlocal most
        most = max(most, value(dsn, WAITING))
        return effects(dsn) == others and all(partner.turns.count([one]) >= 3 for one in locked)

    partner.during = take_lock
    schedule_numbers(dsn, "work", COUNT)
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(7)")
        working = asyncio.create_task(work(db, partner))
        await until(all_came_again, seconds=40, what="the others are written, and each of the rest came again")
        holder.rollback()
    await working
    assert most == ALONE_AT_ONCE
    assert sum(len(turn) > 1 for turn in partner.turns) == 1, "nobody joins the others again"
    assert effects(dsn) == each_once(COUNT)
    assert len(partner.calls) == COUNT


async def test_writes_of_a_zombie_are_refused_and_the_others_kept(db: Database, dsn: str) -> None:
    """E3.5: one of them was taken over while the outside was being called."""
    partner = Partner()

    def lose(_: Sequence[str]) -> None:
        rows(dsn, "UPDATE duly.jobs SET lease_token = nextval('duly.lease_tokens') WHERE entity_id = '5' RETURNING id")

    partner.before_write = lose
    schedule_numbers(dsn, "work", COUNT)
    await work(db, partner)
    assert effects(dsn) == {number: 1 for number in each_once(COUNT) if number != "5"}
    expire_leases(dsn)
    heir = Partner(1)
    await work(db, heir)
    assert heir.calls == ["5"]
    assert effects(dsn) == each_once(COUNT)


@pytest.mark.parametrize("cut", ["statement", "reply"])
async def test_a_commit_without_an_answer_is_resolved_for_each_and_no_call_is_repeated(dsn: str, cut: Cut) -> None:
    partner = Partner()
    schedule_numbers(dsn, "work", COUNT)
    async with breaking_wire(dsn) as wire:
        behind = Database(wire.dsn)

        def arm(items: Sequence[str]) -> None:
            wire.cut_next = cut if wire.cuts == 0 and len(items) > 1 else None

        partner.before_write = arm
        counts = await work(behind, partner)
        await behind.close()
        assert wire.cuts == 1
    assert len(partner.calls) == COUNT
    assert counts == {"done": COUNT}, "whoever was committed is known to be"
    assert effects(dsn) == each_once(COUNT)
    assert {outcome for _, outcome, _ in outcomes(dsn)} == {"done"}
    assert is_empty(dsn)


async def test_few_at_a_time_ask_what_became_of_a_commit(dsn: str) -> None:
    """A commit of many without an answer is no flood of connections on a server that has just had trouble."""
    partner = Partner()
    schedule_numbers(dsn, "work", COUNT)
    async with breaking_wire(dsn) as wire:
        behind = Database(wire.dsn)

        def arm(items: Sequence[str]) -> None:
            wire.cut_next = "reply" if wire.cuts == 0 and len(items) > ASKED_AT_ONCE else None

        partner.before_write = arm
        await work(behind, partner)
        await behind.close()
        assert wire.cuts == 1
        assert 0 < wire.most["duly-resolve"] <= ASKED_AT_ONCE
    assert effects(dsn) == each_once(COUNT)


async def test_who_asks_what_became_of_a_commit_waits_for_a_lock_longer_than_its_session_may(dsn: str) -> None:
    """E3.5: a lock time-out of the database is no answer, and no reason to run the job again."""
    rows(dsn, f"ALTER DATABASE \"{conninfo_to_dict(dsn)['dbname']}\" SET lock_timeout = '200ms'")
    partner = Partner(1)
    schedule_numbers(dsn, "work", 1)
    async with breaking_wire(dsn) as wire:
        behind = Database(wire.dsn)
        with psycopg.connect(dsn, options="-c lock_timeout=0") as holder:

            async def take_row() -> None:
                """Who waits for the row now, has it as soon as the broken transaction is gone."""
                holding.append(
                    asyncio.create_task(asyncio.to_thread(holder.execute, "SELECT id FROM duly.jobs FOR UPDATE"))
                )
                await until(lambda: value(dsn, WAITING) == 1, what="somebody waits for the row")

            holding: list[asyncio.Task[Any]] = []
            wire.before_cut = take_row
            partner.before_write = lambda _: setattr(wire, "cut_next", "statement" if wire.cuts == 0 else None)
            working = asyncio.create_task(work(behind, partner))
            await until(lambda: wire.sent[sql.LOCK_HELD_JOB.numbered] >= 2, what="it asked again")
            await holding[0]
            assert not working.done()
            holder.rollback()
            assert await working == {"done": 1}
        await behind.close()
    assert partner.calls == ["1"]
    assert effects(dsn) == each_once(1)


async def test_a_worker_that_stops_leaves_no_commit_under_way(dsn: str) -> None:
    """Who would write for a worker that is gone would hold its locks, and write for nobody."""
    db = Database(dsn, settings=Settings(shutdown_grace_seconds=0))
    partner, began, ended = Partner(1), asyncio.Event(), asyncio.Event()

    async def hang(_tx: Tx, _items: Sequence[str]) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    partner.during = hang
    schedule_numbers(dsn, "work", 1)
    stop = asyncio.Event()
    working = asyncio.create_task(Worker(db, partner.handlers).run(stop))
    async with asyncio.timeout(20):
        await began.wait()
        stop.set()
        await working
    assert ended.is_set()
    await db.close()
    assert effects(dsn) == {}
    assert [(entity, status) for entity, status, _ in queue(dsn)] == [("1", "Pending")]


class Unanswered(Database):
    """A database that commits and then stays away, so that nobody learns of it."""

    @contextlib.asynccontextmanager
    async def transaction(self, *, confirm: bool = False) -> AsyncIterator[Tx]:
        """As ever, but for the answer."""
        async with super().transaction(confirm=confirm) as tx:
            yield tx
        raise OutcomeUnknown("the database stayed away")


async def test_a_commit_whose_outcome_cannot_be_learned_is_not_tried_again_by_each_of_them(dsn: str) -> None:
    db = Unanswered(dsn)
    turns: list[list[str]] = []

    async def write(_: Tx, items: Sequence[str]) -> list[None]:
        turns.append(list(items))
        return [None] * len(items)

    try:
        together, finishing = await ending_together(db, dsn, write)
        found = await asyncio.gather(*finishing, return_exceptions=True)
        await together.close()
    finally:
        await db.close()
    assert [type(one) for one in found] == [OutcomeUnknown, OutcomeUnknown]
    assert turns == [["1", "2"]]


async def test_who_is_ended_in_the_middle_of_a_commit_does_not_begin_it_again_alone(db: Database, dsn: str) -> None:
    turns: list[list[str]] = []
    entered = asyncio.Event()

    async def write(_: Tx, items: Sequence[str]) -> list[None]:
        turns.append(list(items))
        entered.set()
        await asyncio.Event().wait()
        return [None] * len(items)

    together, finishing = await ending_together(db, dsn, write)
    await entered.wait()
    await together.close()
    await asyncio.wait(finishing, timeout=5)
    assert [one.cancelled() for one in finishing] == [True, True]
    assert turns == [["1", "2"]]


async def ending_together(
    db: Database, dsn: str, write: Callable[[Tx, Sequence[str]], Awaitable[Sequence[None]]]
) -> tuple[Together, list[asyncio.Task[Any]]]:
    """Two calls that ended at the same moment, and their one commit."""

    async def call() -> None:
        """Somebody was called."""

    schedule_numbers(dsn, "call", 2)
    [handler] = handlers(call).values()
    connection = await db.connect()
    try:
        jobs = await Claims({"call": handler}, worker="w", lease_seconds=60).take(connection, 2)
    finally:
        await connection.close()
    together = Together(db, worker="w", time_limit_seconds=60)
    ended = [Ended(job, ThenTogether(write, str(job.entity_id)), monotonic()) for job in jobs]
    return together, [asyncio.create_task(together.finish(handler, one)) for one in ended]


async def test_a_conflict_repeats_what_follows_and_no_call(db: Database, dsn: str) -> None:
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
    partner = Partner()
    schedule_numbers(dsn, "work", COUNT)
    await work(db, partner)
    assert len(partner.calls) == COUNT
    assert len(partner.turns) <= 8, "they stay together"
    assert effects(dsn) == each_once(COUNT)
    assert {outcome for _, outcome, _ in outcomes(dsn)} == {"done"}


async def test_a_conflict_that_does_not_pass_is_a_failure_with_its_reason(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "MAX_LOOK_UP_SECONDS", 1.0)

    async def write(tx: Tx, items: Sequence[str]) -> list[Outcome | None]:
        await tx.execute(text("DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$"))
        return [None] * len(items)

    async def work(ctx: JobContext) -> ThenTogether:
        return ThenTogether(write, ctx.entity_id)

    schedule_numbers(dsn, "work", 1, max_retries=0)
    await Worker(db, handlers(work)).run_once()
    ((error,),) = rows(dsn, "SELECT error FROM duly.dead_letters")
    assert "lost" in error or "Serialization" in error


async def test_a_conflict_of_one_of_them_that_does_not_pass_is_not_the_others(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They try together a few times, and then each by itself."""
    monkeypatch.setattr(run_module, "MAX_LOOK_UP_SECONDS", 30.0)
    partner = Partner()
    others = {number: 1 for number in each_once(COUNT) if number != "7"}
    is_over = False

    async def conflict(tx: Tx, items: Sequence[str]) -> None:
        if "7" in items and not is_over:
            await tx.execute(text("DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$"))

    partner.during = conflict
    schedule_numbers(dsn, "work", COUNT)
    working = asyncio.create_task(work(db, partner))
    await until(lambda: effects(dsn) == others, seconds=20, what="the others are written")
    assert not working.done()
    is_over = True
    await working
    assert effects(dsn) == each_once(COUNT)
    assert len(partner.calls) == COUNT


async def test_a_database_that_goes_away_repeats_what_follows_and_no_call(db: Database, dsn: str) -> None:
    partner = Partner()
    ended: list[Any] = []

    def end_session(items: Sequence[str]) -> None:
        if len(items) > 1 and not ended:
            ended.extend(rows(dsn, END_OPEN))

    partner.before_write = end_session
    schedule_numbers(dsn, "work", COUNT)
    await work(db, partner)
    assert len(ended) == 1
    assert len(partner.calls) == COUNT
    assert len(partner.turns) <= 8, "they stay together"
    assert effects(dsn) == each_once(COUNT)
    assert is_empty(dsn)


async def test_too_few_outcomes_are_an_error_that_says_so(db: Database, dsn: str) -> None:
    async def forget(tx: Tx, items: Sequence[Any]) -> list[Outcome | None]:
        return []

    async def work(ctx: JobContext) -> ThenTogether:
        return ThenTogether(forget, ctx.entity_id)

    schedule_numbers(dsn, "work", 1, max_retries=0)
    await Worker(db, handlers(work)).run_once()
    assert "1 items and 0 outcomes" in rows(dsn, "SELECT error FROM duly.dead_letters")[0][0]


async def test_a_handler_may_return_a_function_of_its_own_each_time(db: Database, dsn: str) -> None:
    async def work(ctx: JobContext) -> ThenTogether:
        async def write(tx: Tx, items: Sequence[str]) -> list[Outcome | None]:
            assert items == [ctx.entity_id]
            await tx.execute(WRITE, {"entity_id": ctx.entity_id, "run": ""})
            return [None]

        return ThenTogether(write, ctx.entity_id)

    schedule_numbers(dsn, "work", 5)
    await Worker(db, handlers(work)).run_once()
    assert effects(dsn) == each_once(5)


async def test_consumers_write_what_follows_with_their_inbox_rows(db: Database, dsn: str) -> None:
    """E2.2: an event that was processed in the meantime is not applied a second time, one put off is not marked."""
    app = Duly()

    async def write(tx: Tx, items: Sequence[int]) -> list[Outcome | None]:
        for number in items:
            await tx.execute(WRITE, {"entity_id": str(number), "run": ""})
        return [Snooze(timedelta(hours=1)) if number == 3 else None for number in items]

    @app.consumer("partner", on="order.*")
    async def call(event: Event) -> ThenTogether:
        number = int(event.payload["n"])
        if number == 2:  # another way to the same consumer was quicker
            rows(dsn, "INSERT INTO duly.processed_events VALUES ('partner', %(id)s, duly.now())", {"id": event.id})
        return ThenTogether(write, number)

    await app.prepare(db)
    await publish_numbers(db, ["a1"], [1, 2, 3])
    await Worker(db, app.handlers).run_once()
    assert set(effects(dsn)) == {"1", "3"}
    assert value(dsn, "SELECT count(*) FROM duly.processed_events") == 2
    assert sorted(rows(dsn, "SELECT outcome FROM duly.executions")) == [("done",), ("duplicate",), ("snoozed",)]


async def test_what_it_schedules_has_nobodys_origin(db: Database, dsn: str) -> None:
    """It is written for all of them: the first one's correlation would be a lie for the rest."""
    from duly import schedule

    async def write(tx: Tx, items: Sequence[str]) -> list[Outcome | None]:
        for item in items:
            await schedule(tx, "next", item)
        return [None] * len(items)

    async def work(ctx: JobContext) -> ThenTogether:
        return ThenTogether(write, ctx.entity_id)

    rows(
        dsn,
        "SELECT duly.schedule('work', '1', NULL, correlation_id => '00000000-0000-7000-8000-000000000001') IS NOT NULL",
    )
    await Worker(db, handlers(work)).run_once()
    assert rows(dsn, "SELECT entity_id, causation_id FROM duly.jobs WHERE name = 'next'") == [("1", None)]
