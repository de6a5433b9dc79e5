"""E5.6: a COMMIT without an answer is looked up, and after a crash of the server not by its number alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from duly.db import Database
from duly.errors import OutcomeUnknown, Unavailable
from duly.runtime.embedded import EmbeddedPostgres
from duly.testing import TestServer
from tests.engine.jobs.wire import Cut, Wire, breaking_wire
from tests.support import rows, value

ENOUGH = 10_000


@pytest.fixture(scope="module")
def fragile() -> Iterator[TestServer]:
    """A PostgreSQL that may be crashed, and that brings nothing to the disk before somebody commits."""
    directory = Path(tempfile.mkdtemp(prefix="duly-outcome-"))
    made = TestServer(directory)
    lazy = (*made.postgres.parameters, "wal_writer_delay=10s", "bgwriter_delay=10s", "autovacuum=off")
    made.postgres = EmbeddedPostgres.at(directory, parameters=lazy)
    made.start()
    yield made
    made.stop()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def wire(fragile: TestServer) -> AsyncIterator[Wire]:
    with fragile.database() as dsn:
        rows(dsn, "CREATE TABLE notes (word text)")
        async with breaking_wire(dsn) as made:
            yield made


async def write(wire: Wire, numbers: list[int]) -> None:
    """Write a row in a transaction that is confirmed, and tell its number while it runs."""
    db = Database(wire.dsn)
    try:
        async with db.transaction(confirm=True) as tx:
            await tx.execute(text("INSERT INTO notes VALUES ('kept')"))
            numbers.append(int((await tx.execute(text("SELECT pg_current_xact_id()::text"))).scalar_one()))
    finally:
        await db.close()


def crash(dsn: str) -> None:
    """As when the kernel kills one of its processes: all others start anew, and what was in memory only is gone."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        os.kill(connection.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            psycopg.connect(dsn).close()
        except psycopg.OperationalError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the server did not recover")


def give_away(dsn: str, number: int) -> None:
    """Let somebody else have a number, and commit with it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(ENOUGH):
            row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
            assert row is not None
            if row[0] >= number:
                assert row[0] == number, "the number had reached the disk: this shows nothing"
                return
    raise AssertionError("it is too far away")


@pytest.mark.parametrize("cut", ["statement", "reply"])
async def test_without_a_crash_the_number_tells(wire: Wire, cut: Cut) -> None:
    wire.cut_next = cut
    if cut == "statement":
        with pytest.raises(Unavailable, match="nothing was written"):
            await write(wire, [])
    else:
        await write(wire, [])
    assert value(wire.direct, "SELECT count(*) FROM notes") == (cut == "reply")


async def test_a_number_that_was_given_away_after_a_crash_is_no_commit_of_ours(wire: Wire) -> None:
    """The one who has it now committed; we did not, and must not say so."""
    numbers: list[int] = []

    async def fall() -> None:
        wire.refuse_after_cut = ENOUGH  # whoever asks waits until it is somebody else's
        await asyncio.to_thread(crash, wire.direct)
        await asyncio.to_thread(give_away, wire.direct, *numbers)
        wire.refuse_after_cut = 0

    wire.cut_next, wire.before_cut = "statement", fall
    with pytest.raises(OutcomeUnknown):
        await write(wire, numbers)
    assert rows(wire.direct, "SELECT * FROM notes") == []


async def test_a_number_that_nobody_has_after_a_crash_was_lost(wire: Wire) -> None:
    async def fall() -> None:
        wire.refuse_after_cut = ENOUGH
        await asyncio.to_thread(crash, wire.direct)
        wire.refuse_after_cut = 0

    wire.cut_next, wire.before_cut = "statement", fall
    with pytest.raises(Unavailable, match="nothing was written"):
        await write(wire, [])
    assert rows(wire.direct, "SELECT * FROM notes") == []


async def test_a_clean_restart_forgets_nothing(wire: Wire, fragile: TestServer) -> None:
    """The reply is lost, and the server restarts before anybody asks: it still knows."""
    db = Database(wire.direct)
    async with db.transaction() as tx:
        await tx.execute(text("INSERT INTO notes VALUES ('kept')"))
        mark = (await tx.execute(text("SELECT duly.commit_mark()"))).scalar_one()
    await db.close()
    await asyncio.to_thread(fragile.postgres.stop, mode="fast")
    await asyncio.to_thread(fragile.postgres.start)
    assert value(wire.direct, "SELECT duly.commit_outcome(%(mark)s)", {"mark": mark}) == "committed"


async def test_who_wrote_nothing_has_no_mark(wire: Wire) -> None:
    assert value(wire.direct, "SELECT duly.commit_mark()") is None
