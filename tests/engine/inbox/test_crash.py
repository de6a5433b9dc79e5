"""A worker that is killed at each step of a consumer's run leaves nothing or everything (E2.2, FAULTS).

A step that was never reached is a failure of the test.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from duly import Database, Duly, Event, Worker
from duly.testing import BusinessClock
from tests.engine.inbox.effects import EXPIRE_LEASES, effects, prepare, publish_numbers, register_shop
from tests.support import finish, python, rows

ROOT = Path(__file__).parents[3]
VICTIM = """
    import asyncio, os
    from sqlalchemy.orm import Session
    from duly import Database, Duly, Event, Worker
    from tests.engine.inbox.effects import INSERT_EFFECT, effect, register_shop

    app = Duly()
    register_shop(app)
    if os.environ["SYNC"]:
        app = Duly()

        @app.consumer("ledger", on="order.*", ordered=True)
        def ledger(event: Event, tx: Session) -> None:
            tx.execute(INSERT_EFFECT, effect("ledger", event))

    async def main():
        await Worker(Database(os.environ["DATABASE_URL"]), app.handlers, concurrency=1).run_once()

    asyncio.run(main())
    """
NOTHING = {"worker.claimed", "inbox.marked", "worker.before_handler", "worker.handler_done", "worker.before_settle",
           "worker.before_commit"}  # fmt: skip
EVERYTHING = {"worker.committed"}
CASES = [(point, False) for point in sorted(NOTHING | EVERYTHING)] + [
    ("worker.before_handler", True),
    ("worker.before_commit", True),
    ("worker.committed", True),
]
COUNTS = """
SELECT (SELECT count(*) FROM effects), (SELECT count(*) FROM duly.processed_events),
       (SELECT count(*) FROM duly.executions WHERE outcome = 'done'), (SELECT count(*) FROM duly.jobs)
"""


@pytest.mark.parametrize(("point", "synchronous"), CASES)
async def test_a_worker_that_is_killed_leaves_nothing_or_everything(
    db: Database, dsn: str, clock: BusinessClock, point: str, synchronous: bool
) -> None:
    """E2.2: and after its lease the event has its effect exactly once, the next of its aggregate after it."""
    app = Duly()
    register_shop(app)
    await prepare(app, db, dsn)
    rows(dsn, "UPDATE duly.consumers SET enabled = false WHERE name = 'mail'")
    await publish_numbers(db, ["a1"], [1, 2])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    env = {"PYTHONPATH": path, "SYNC": "yes" if synchronous else ""}
    code, written = await asyncio.to_thread(finish, python(dsn, VICTIM, failpoints=f"{point}=kill9", env=env))
    assert code == -signal.SIGKILL, f"{point} was never reached: {written}"
    assert rows(dsn, COUNTS) == [(0, 0, 0, 2) if point in NOTHING else (1, 1, 1, 1)]
    rows(dsn, EXPIRE_LEASES)
    await Worker(db, app.handlers).run_once()
    assert effects(dsn, "ledger") == {"a1": [1, 2]}
    assert rows(dsn, COUNTS) == [(2, 2, 2, 0)]
    lost = rows(dsn, "SELECT count(*) FROM duly.executions WHERE outcome = 'lost'")
    assert lost == [(1 if point in NOTHING else 0,)]


async def test_an_effect_outside_the_transaction_may_happen_again_after_a_crash(db: Database, dsn: str) -> None:
    """E2.2: a consumer without a transaction is at least once: the crash came after its effect, before our row."""
    app = Duly()
    calls: list[int] = []

    @app.consumer("ledger", on="order.*")
    async def ledger(event: Event) -> None:
        calls.append(int(event.payload["n"]))

    await prepare(app, db, dsn)
    await publish_numbers(db, ["a1"], [1])
    code = """
        import asyncio, os
        from duly import Database, Duly, Event, Worker

        app = Duly()

        @app.consumer("ledger", on="order.*")
        async def ledger(event: Event) -> None:
            print("called", flush=True)

        asyncio.run(Worker(Database(os.environ["DATABASE_URL"]), app.handlers).run_once())
        """
    status, written = await asyncio.to_thread(finish, python(dsn, code, failpoints="worker.handler_done=kill9"))
    assert (status, written) == (-signal.SIGKILL, "called\n")
    assert rows(dsn, "SELECT count(*) FROM duly.processed_events") == [(0,)]
    rows(dsn, EXPIRE_LEASES)
    await Worker(db, app.handlers).run_once()
    assert calls == [1]
    assert rows(dsn, "SELECT count(*) FROM duly.processed_events") == [(1,)]
