"""Plain functions run in threads of their own: one that hangs takes neither another's place nor the process's end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from duly import Duly
from duly.db import Database
from duly.jobs import worker as worker_module
from duly.jobs.handlers import JobContext
from duly.jobs.worker import Worker
from tests.engine.cli.commands import end, environment, running, wait_until
from tests.engine.jobs.witness import is_empty, outcomes, queue, schedule_numbers, until, working
from tests.support import handlers, rows, value

HUNG = 40
SLOTS = 4
app = Duly()  # for the real processes below


@app.job("hang")
def hang_for_ever() -> None:
    """Nobody lets go of it, and no signal reaches it."""
    Path(os.environ["HANGING"]).touch()
    threading.Event().wait()


@app.job("hang_in_transaction")
def hang_for_ever_in_transaction(tx: Session) -> None:
    """The same with a connection in its hands."""
    tx.execute(text("SELECT 1"))
    hang_for_ever()


class Hanging:
    """Handlers that hang until the end of the test, and a count of those that do."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.hung: list[str] = []

    def hang(self) -> None:
        self.hung.append(threading.current_thread().name)
        assert self.let_go.wait(60)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """A worker's own patience in hundredths of seconds, and no thread left behind."""
    monkeypatch.setattr(worker_module, "WATCH_SECONDS", 0.02)
    made = Hanging()
    yield made
    made.let_go.set()
    wait_until(lambda: not job_threads(), seconds=20, what="the threads have ended")


def job_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "duly-job"]


@pytest.mark.parametrize("limit", [None, SLOTS])
async def test_functions_that_hang_do_not_keep_another_from_running(
    db: Database, dsn: str, hanging: Hanging, limit: int | None
) -> None:
    """E3.5, E3.10: ten times as many as there are slots hang at once; each has lost its slot to its time limit."""
    ran: list[str | None] = []

    def hang() -> None:
        hanging.hang()

    def quick(ctx: JobContext) -> None:
        ran.append(ctx.entity_id)

    schedule_numbers(dsn, "hang", HUNG, priority=1, max_retries=0)
    known = handlers(hang, timeout_seconds=0.05, limit=limit) | handlers(quick)
    async with working(Worker(db, known, concurrency=SLOTS)):
        await until(lambda: len(hanging.hung) == HUNG, what="every one of them hangs")
        await until(lambda: is_empty(dsn), what="every one of them has failed")
        assert len(job_threads()) == HUNG
        assert all(thread.daemon for thread in job_threads())
        schedule_numbers(dsn, "quick", 2 * SLOTS)
        await until(lambda: is_empty(dsn), what="the others run")
    assert len(ran) == 2 * SLOTS
    assert len(job_threads()) == HUNG
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters WHERE error LIKE 'TimeoutError: %'") == HUNG


async def test_as_many_hung_transactions_as_there_are_slots_do_not_keep_another_from_beginning(
    db: Database, dsn: str, hanging: Hanging
) -> None:
    """E3.5: each still holds a connection; there are as many again."""

    def hang(tx: Session) -> None:
        tx.execute(text("SELECT 1"))
        hanging.hang()

    def quick(tx: Session) -> None:
        tx.execute(text("SELECT 1"))

    schedule_numbers(dsn, "hang", SLOTS, priority=1, max_retries=0)
    known = handlers(hang, timeout_seconds=0.05) | handlers(quick)
    async with working(Worker(db, known, concurrency=SLOTS)):
        await until(lambda: len(hanging.hung) == SLOTS and is_empty(dsn), what="every one of them hangs and has failed")
        schedule_numbers(dsn, "quick", 2 * SLOTS)
        await until(lambda: is_empty(dsn), what="the others run")
    assert [outcome for _, outcome, _ in outcomes(dsn)].count("done") == 2 * SLOTS


async def test_a_function_that_hangs_until_after_the_worker_is_gone_disturbs_nobody(dsn: str, hanging: Hanging) -> None:
    """E3.5: its end comes when nobody waits for it, to a loop that has gone on."""
    db = Database(dsn)
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))

    def hang() -> None:
        hanging.hang()

    rows(dsn, "SELECT duly.schedule('hang', 'e', max_retries => 0)")
    await Worker(db, handlers(hang, timeout_seconds=0.05)).run_once()
    await db.close()
    [thread] = job_threads()
    hanging.let_go.set()
    await until(lambda: not thread.is_alive())
    await asyncio.sleep(0)  # what the thread told the loop is heard by now
    assert complaints == []
    assert outcomes(dsn) == [("e", "buried", 0)]


@pytest.mark.parametrize("name", ["hang", "hang_in_transaction"])
@pytest.mark.parametrize("once", [[], ["--once"]], ids=["forever", "once"])
def test_a_process_with_a_function_that_hangs_ends_within_its_grace(
    dsn: str, tmp_path: Path, name: str, once: list[str]
) -> None:
    """E3.5: nobody can end a thread but the end of its process, which does not wait for it; the job is given back."""
    rows(dsn, "SELECT duly.schedule(%(name)s, 'e', max_retries => 0)", {"name": name})
    env = environment(
        DATABASE_URL=dsn,
        DULY_APP="tests.engine.jobs.test_threads:app",
        DULY_ALLOW_UNSAFE_DATABASE="1",
        DULY_SHUTDOWN_GRACE_SECONDS="0.5",
        HANGING=str(tmp_path / "hanging"),
    )
    log = tmp_path / "log"
    with running("worker", *once, env=env, log=log) as process:
        wait_until((tmp_path / "hanging").exists, what="it hangs")
        assert queue(dsn) == [("e", "Running", 0)]
        code = end(process, signal.SIGTERM, seconds=10)
    assert code == (128 + signal.SIGTERM if once else 0), log.read_text()
    assert queue(dsn) == [("e", "Pending", 0)]
    assert outcomes(dsn) == [("e", "released", 0)]
    assert rows(dsn, "SELECT waits, lease_token, run_at <= duly.now() FROM duly.jobs") == [("released", None, True)]
    assert "Traceback" not in log.read_text()
