"""A consumer without a transaction did its work and the database went away: it is noted, and never called again."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from duly import Database, Duly, Event, Worker
from duly.clock import monotonic
from duly.jobs import run as run_module
from duly.testing import TestServer
from tests.engine.inbox.effects import outcomes, publish_numbers
from tests.engine.jobs.wire import Cut, breaking_wire
from tests.engine.jobs.witness import is_empty, terminate_backends, until, working
from tests.support import rows

OURS = "application_name LIKE 'duly%'"


class Partner:
    """A consumer whose effect is outside the database; ``at_end`` of its last event something goes wrong."""

    def __init__(self, *, plain: bool = False) -> None:
        self.app = Duly()
        self.calls: list[int] = []
        self.last = 1
        self.ended = False
        self.at_end: Callable[[], None] = lambda: None

        def record(event: Event) -> None:
            self.calls.append(int(event.payload["n"]))
            if event.payload["n"] == self.last:
                self.at_end()
                self.ended = True

        if plain:
            self.app.consumer("partner", on="order.*", max_retries=0)(record)
            return

        @self.app.consumer("partner", on="order.*", max_retries=0)
        async def call(event: Event) -> None:
            await asyncio.to_thread(record, event)


def check_noted(dsn: str, events: int) -> None:
    """Each event is in the inbox once, its run is done, and nothing is left to run."""
    assert rows(dsn, "SELECT count(*), count(DISTINCT event_id) FROM duly.processed_events") == [(events, events)]
    assert outcomes(dsn) == ["done"] * events
    assert is_empty(dsn)
    assert rows(dsn, "SELECT error FROM duly.dead_letters") == []


@pytest.fixture
def fragile() -> Iterator[TestServer]:
    """A PostgreSQL that may be crashed: no other test uses it."""
    directory = Path(tempfile.mkdtemp(prefix="duly-noted-"))
    made = TestServer(directory)
    made.start()
    yield made
    made.stop()
    shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[Database]:
    db = Database(dsn)
    yield db
    await db.close()


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_call_that_ended_as_every_connection_was_cut_is_noted_and_not_repeated(
    db: Database, dsn: str, plain: bool
) -> None:
    """E2.2, E3.15: the connection that would write the inbox row is in the pool already, and dead."""
    partner = Partner(plain=plain)
    cut: list[int] = []
    pooled = "application_name = 'duly' AND state = 'idle'"
    partner.last = 2

    def cut_all() -> None:
        cut.extend(terminate_backends(dsn, pooled))
        terminate_backends(dsn, OURS)

    partner.at_end = cut_all
    async with opened(dsn) as own:  # so that what is idle later is the worker's
        await partner.app.prepare(own)
        await publish_numbers(own, ["a1"], [1, 2])
    async with working(Worker(db, partner.app.handlers, concurrency=1)):
        await until(lambda: len(partner.calls) >= 2 and is_empty(dsn), what="both events are noted")
    assert len(cut) == 1, "the first event left no connection in the pool"
    assert partner.calls == [1, 2]
    check_noted(dsn, 2)


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_call_that_ended_while_postgres_was_down_is_noted_when_it_is_back(
    fragile: TestServer, plain: bool
) -> None:
    """E2.2, E3.15: the server crashes at the very end of the call; it comes back after the worker has noticed."""
    partner = Partner(plain=plain)
    partner.at_end = lambda: fragile.postgres.stop(mode="immediate")
    with fragile.database() as dsn:
        async with opened(dsn) as db:
            await partner.app.prepare(db)
            await publish_numbers(db, ["a1"], [1])
            worker = Worker(db, partner.app.handlers)
            async with working(worker):
                await until(lambda: partner.ended and not worker.health.up, what="the worker says that it is down")
                await asyncio.to_thread(fragile.postgres.start)
                await until(lambda: is_empty(dsn), seconds=30, what="the call is noted")
        assert partner.calls == [1]
        check_noted(dsn, 1)


@pytest.mark.parametrize("refused", [0, 2])
@pytest.mark.parametrize("cut", ["statement", "reply"])
async def test_a_note_whose_commit_got_no_answer_is_looked_up_and_written_once(
    db: Database, dsn: str, cut: Cut, refused: int
) -> None:
    """E2.2: lost before it arrived, the note is written again; lost after it took effect, it is found."""
    partner = Partner()
    await partner.app.prepare(db)
    await publish_numbers(db, ["a1"], [1])
    async with breaking_wire(dsn) as wire, opened(wire.dsn) as behind:
        wire.refuse_after_cut = refused

        def arm() -> None:
            wire.cut_next = cut

        partner.at_end = arm
        await Worker(behind, partner.app.handlers).run_once()
        assert (wire.cuts, wire.refuse_after_cut) == (1, 0)
    assert partner.calls == [1]
    check_noted(dsn, 1)


async def test_a_note_that_was_lost_in_the_middle_is_written_again(db: Database, dsn: str) -> None:
    """E2.2: the connection breaks between the inbox row and the job's end: neither is kept, both are written anew."""
    partner = Partner()
    await partner.app.prepare(db)
    await publish_numbers(db, ["a1"], [1])
    async with breaking_wire(dsn) as wire, opened(wire.dsn) as behind:
        wire.statement = b"INSERT INTO duly.processed_events"

        def arm() -> None:
            wire.cut_next = "reply"

        partner.at_end = arm
        await Worker(behind, partner.app.handlers).run_once()
        assert wire.cuts == 1
    assert partner.calls == [1]
    check_noted(dsn, 1)


async def test_a_call_that_took_longer_than_an_outage_may_last_is_noted_too(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2.2: the time for writing the note down begins when the call has ended, however long that took."""
    partner = Partner()
    passed: list[float] = [0.0]
    monkeypatch.setattr(run_module, "monotonic", lambda: monotonic() + sum(passed))

    def take_long() -> None:
        passed.append(run_module.MAX_LOOK_UP_SECONDS + 1)

    partner.at_end = take_long
    await partner.app.prepare(db)
    await publish_numbers(db, ["a1"], [1])
    worker = Worker(db, partner.app.handlers)
    await worker.run_once()
    assert worker.counts == {"done": 1}
    assert partner.calls == [1]
    check_noted(dsn, 1)


async def test_a_commit_after_a_long_run_is_looked_up_too(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3.11: the same for the answer of a COMMIT: after a long run there is as much time to ask as after a short."""
    partner = Partner()
    passed: list[float] = [0.0]
    monkeypatch.setattr(run_module, "monotonic", lambda: monotonic() + sum(passed))
    await partner.app.prepare(db)
    await publish_numbers(db, ["a1"], [1])
    async with breaking_wire(dsn) as wire, opened(wire.dsn) as behind:

        def take_long() -> None:
            passed.append(run_module.MAX_LOOK_UP_SECONDS + 1)
            wire.cut_next = "reply"

        partner.at_end = take_long
        worker = Worker(behind, partner.app.handlers)
        await worker.run_once()
        assert wire.cuts == 1
        assert worker.counts == {"done": 1}
    check_noted(dsn, 1)
