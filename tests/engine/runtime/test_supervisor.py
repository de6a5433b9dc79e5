"""E3.15: a process keeps its duties running, says that they are alive, and ends them in time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from duly.db import Database
from duly.duty import Cycle, Duty
from duly.runtime import supervisor
from duly.runtime.supervisor import Attendance, Supervisor, run_processes
from duly.settings import Settings
from tests.engine.cli.commands import children_of
from tests.support import rows, value


class Quiet(Duty):
    """A duty that has nothing to do."""

    name = "worker"

    async def cycle(self) -> Cycle:
        return Cycle()


class Relaying(Quiet):
    name = "relay"


class Falling(Quiet):
    """Falls over once in a way that no duty should."""

    runs = 0

    async def run(self, stop: asyncio.Event) -> None:
        self.runs += 1
        if self.runs == 1:
            raise ZeroDivisionError
        await super().run(stop)


class Deaf(Quiet):
    """Does not listen to anybody."""

    async def run(self, stop: asyncio.Event) -> None:
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(supervisor, "RELEASE_SECONDS", 0.2)
    monkeypatch.setattr(Attendance, "poll_seconds", 0.05)


@asynccontextmanager
async def supervised(db: Database, *duties: Duty, names: tuple[str, ...] = ()) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(Supervisor(db, duties, names=names).run(stop))
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(20):
            await task


async def until(fact: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not fact():
            await asyncio.sleep(0.01)


async def test_a_duty_that_falls_over_is_started_again(db: Database) -> None:
    """E3.15."""
    duty = Falling(db)
    async with supervised(db, duty):
        await until(lambda: duty.runs == 2 and duty.health.detail == "working")
        assert duty.health.up


async def test_a_duty_that_does_not_stop_is_cut_off(dsn: str) -> None:
    db = Database(dsn, settings=Settings(shutdown_grace_seconds=0.1))
    async with asyncio.timeout(10), supervised(db, Deaf(db)):
        pass
    await db.close()


async def test_duties_are_written_down_while_they_run_and_leave_on_a_clean_stop(db: Database, dsn: str) -> None:
    worker, relay = Quiet(db), Relaying(db)
    query = "SELECT id, kind, names, seen_at >= started_at FROM duly.processes ORDER BY kind DESC"
    async with supervised(db, worker, relay, names=("b.job", "a.job")):
        await until(lambda: rows(dsn, query))
        assert rows(dsn, query) == [
            (worker.identity, "worker", ["a.job", "b.job"], True),
            (relay.identity, "relay", [], True),
        ]
    assert rows(dsn, query) == []


async def test_what_froze_in_the_middle_of_a_statement_is_ended_and_its_locks_are_free(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3.11: PostgreSQL takes such a session for an active one, and would wait for its process for ever."""
    monkeypatch.setattr(Settings, "idle_transaction_seconds", 1.0)
    frozen, working = await db.connect(), await db.connect()
    await frozen.execute("BEGIN; LOCK TABLE duly.schedules IN ACCESS EXCLUSIVE MODE")
    await frozen.prepare("SELECT 1")  # half of a statement; the other half never comes
    query = "SELECT state, wait_event FROM pg_stat_activity WHERE pid = %(pid)s"
    pid = {"pid": frozen.get_server_pid()}
    assert rows(dsn, query, pid) == [("active", "ClientRead")]
    busy = asyncio.create_task(working.execute("SELECT pg_sleep(3)"))  # longer than that, and at work
    async with supervised(db, Quiet(db)):
        await until(lambda: not rows(dsn, query, pid))
        await busy
    rows(dsn, "SELECT count(*) FROM duly.schedules")  # nobody has it locked
    await working.close()
    frozen.terminate()


async def test_attendance_goes_on_after_an_outage_and_in_physical_time(db: Database, dsn: str) -> None:
    """E3.15: its connection is cut, and the business clock stands still; neither stops it."""
    rows(dsn, "UPDATE duly.business_clock SET frozen_at = '2020-01-01Z'")
    cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'duly-attendance'"
    async with supervised(db, Quiet(db)):
        await until(lambda: rows(dsn, "SELECT id FROM duly.processes"))
        await until(lambda: value(dsn, cut))
        before = value(dsn, "SELECT clock_timestamp()")
        await until(lambda: value(dsn, "SELECT seen_at FROM duly.processes") > before)


async def test_rows_of_processes_long_dead_are_forgotten(db: Database, dsn: str) -> None:
    rows(
        dsn,
        "INSERT INTO duly.processes (id, kind, version, started_at, seen_at) "
        "VALUES ('old', 'worker', '0', now() - interval '9 days', now() - interval '2 days'), "
        "       ('new', 'worker', '0', now() - interval '9 days', now() - interval '2 minutes')",
    )
    async with supervised(db, Quiet(db)):
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.processes WHERE id = 'old'") == 0)
    assert rows(dsn, "SELECT id FROM duly.processes") == [("new",)]


READY_CHILD = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, {handler})
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
while True:
    signal.pause()
"""


def ready(directory: Path) -> set[int]:
    """The children that live and have set their signal handler."""
    return children_of(os.getpid()) & {int(path.name) for path in directory.iterdir()}


async def test_a_child_that_dies_is_started_again_and_all_end_after_the_stop(tmp_path: Path) -> None:
    stop = asyncio.Event()
    command = [sys.executable, "-c", READY_CHILD.format(handler="lambda *_: sys.exit(0)"), str(tmp_path)]
    parent = asyncio.create_task(run_processes(2, command, grace_seconds=5, stop=stop))
    await until(lambda: len(ready(tmp_path)) == 2)
    victim, other = ready(tmp_path)
    os.kill(victim, signal.SIGKILL)
    await until(lambda: len(ready(tmp_path) - {victim, other}) == 1)
    stop.set()
    async with asyncio.timeout(20):
        assert await parent == 0
    assert ready(tmp_path) == set()


async def test_a_child_that_will_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", 0.1)
    stop = asyncio.Event()
    command = [sys.executable, "-c", READY_CHILD.format(handler="signal.SIG_IGN"), str(tmp_path)]
    parent = asyncio.create_task(run_processes(1, command, grace_seconds=0, stop=stop))
    await until(lambda: len(ready(tmp_path)) == 1)
    stop.set()
    async with asyncio.timeout(20):
        assert await parent == 1
    assert ready(tmp_path) == set()
