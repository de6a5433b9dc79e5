"""Killed in the middle of a posting: all of it or nothing, and the same key never posts twice (F3, FAULTS)."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from apps.wiring import app
from duly.auth.issuer import Issuer
from duly.db import Database
from duly.settings import Settings
from duly.testing import BusinessClock, drain
from tests.apps.finance.ledger.acting import ROLES, Books, check_consistent, count, events_of, move
from tests.apps.finance.ledger.test_races import holding
from tests.apps.transfers.acting import made, new_key, until_waiting
from tests.engine.cli.commands import environment, free_port, running, status, wait_until
from tests.engine.jobs.witness import expire_leases
from tests.support import finish, python, rows, value

WORK = """
    import asyncio, os
    from apps.wiring import app
    from duly.db import Database
    from duly.jobs.worker import Worker

    async def main():
        db = Database(os.environ["DATABASE_URL"])
        await Worker(db, app.handlers).run_once()
        await db.close()

    asyncio.run(main())
"""
# Between any two statements of the whole function: this is where the backend dies.
DIE = """
CREATE FUNCTION public.die() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_terminate_backend(pg_backend_pid());
    RETURN NULL;
END $$;
"""


class Process:
    """A real ``duly api``, with failpoints, and a client that has every right."""

    def __init__(self, dsn: str, home: Path) -> None:
        self.env = environment(
            DULY_APP="apps.wiring:app", DATABASE_URL=dsn, DULY_DATA=str(home), PORT=str(free_port()),
            DULY_ALLOW_UNSAFE_DATABASE="1",
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.env['PORT']}"
        self.log = home.with_suffix(".log")
        issuer = Issuer.open(Settings(data=home), port=int(self.env["PORT"]))
        token = issuer.sign("clerk", scopes=["ledger:read", "ledger:write"], roles=list(ROLES))
        self.headers = {"Authorization": f"Bearer {token}"}

    def run(self, failpoints: str = "") -> Any:
        return running("api", env={**self.env, "DULY_FAILPOINTS": failpoints}, log=self.log)

    def wait(self) -> None:
        wait_until(lambda: status(f"{self.url}/readyz") == 200, what="/readyz is 200")

    def post(self, body: dict[str, Any], key: str) -> httpx2.Response:
        headers = {**self.headers, "Idempotency-Key": key}
        return httpx2.post(f"{self.url}/v1/transactions", json=body, headers=headers, timeout=30)


@pytest.mark.parametrize(
    ("point", "kept"),
    [
        ("idempotency.reserved", 0),
        ("handler.mid", 0),
        ("idempotency.stored", 0),
        ("http.before_commit", 0),
        ("http.before_response", 1),
    ],
)
async def test_an_api_killed_while_posting_has_posted_once_or_not_at_all(
    books: Books, dsn: str, tmp_path: Path, point: str, kept: int
) -> None:
    """FAULTS, ledger mid-post: kill -9; the client comes again with its key, and there is one transaction."""
    a, b = await books.open(), await books.open("LIABILITY")
    body, key = {"reference": "crash", "entries": move(a, b, "5.00")}, new_key()
    process = Process(dsn, tmp_path / "api")
    with process.run(f"{point}=kill9") as api:
        process.wait()
        with pytest.raises(httpx2.TransportError):
            process.post(body, key)
        assert api.wait(10) == -signal.SIGKILL
    assert count(dsn, "ledger.transactions") == kept
    check_consistent(dsn)
    with process.run():
        process.wait()
        again = process.post(body, key)
    assert again.status_code == 201, again.text
    assert again.headers.get("idempotent-replayed", "false") == ("true" if kept else "false")
    assert (count(dsn, "ledger.transactions"), (await books.balance(b))["balance"]) == (1, "5.00")
    check_consistent(dsn)


async def test_an_api_killed_while_it_waits_for_the_second_account_leaves_nothing(
    books: Books, dsn: str, tmp_path: Path
) -> None:
    """Mid-post in the database: one account is locked, the other not yet."""
    a, b = sorted([await books.open(), await books.open("LIABILITY")])
    process = Process(dsn, tmp_path / "api")
    with process.run() as api:
        process.wait()
        with holding(dsn, b):
            body = {"reference": "crash", "entries": move(a, b, "5.00")}
            trying = asyncio.create_task(asyncio.to_thread(process.post, body, new_key()))
            await until_waiting(dsn, 1)
            api.kill()
            with pytest.raises(httpx2.TransportError):
                await trying
    await books.post(a, b, "1.00")  # nobody holds the locks any more
    assert count(dsn, "ledger.transactions") == 1
    check_consistent(dsn)


@pytest.mark.parametrize(
    "table", ["transactions AFTER INSERT", "entries AFTER INSERT", "balances AFTER UPDATE", "balances BEFORE UPDATE"]
)
async def test_a_backend_that_dies_inside_the_posting_leaves_nothing(books: Books, dsn: str, table: str) -> None:
    """Mid-post, between the statements of the function; the same request with the same key then posts once."""
    a, b = await books.open(), await books.open("LIABILITY")
    name, _, when = table.partition(" ")
    rows(dsn, DIE)
    rows(dsn, f"CREATE TRIGGER die {when} ON ledger.{name} FOR EACH STATEMENT EXECUTE FUNCTION public.die()")
    key = {"Idempotency-Key": new_key()}
    first = await books.try_post(move(a, b, "5.00"), "crash", **key)
    assert first.status_code == 503, first.text
    assert (count(dsn, "ledger.transactions"), count(dsn, "ledger.entries")) == (0, 0)
    check_consistent(dsn)
    rows(dsn, f"DROP TRIGGER die ON ledger.{name}")
    assert (await books.try_post(move(a, b, "5.00"), "crash", **key)).status_code == 201
    assert (await books.balance(b))["balance"] == "5.00"
    check_consistent(dsn)


@pytest.mark.parametrize(
    ("point", "kept"),
    [("worker.handler_done", "ACTIVE"), ("worker.before_commit", "ACTIVE"), ("worker.committed", "EXPIRED")],
)
async def test_a_worker_killed_while_a_hold_expires_lets_go_once(
    books: Books, db: Database, dsn: str, clock: BusinessClock, point: str, kept: str
) -> None:
    """The hold and its timer end in one commit; another worker takes over."""
    account = await books.open_with("10.00")
    hold = await books.hold(account, "4.00")
    clock.advance(days=8)
    code, output = finish(python(dsn, WORK, failpoints=f"{point}=kill9"), 60)
    assert code == -signal.SIGKILL, output
    assert value(dsn, "SELECT status FROM ledger.holds") == kept
    expire_leases(dsn)
    await drain(db, app.handlers)
    clock.advance(hours=1)
    await drain(db, app.handlers)
    assert (await books.balance(account))["available"] == "10.00"
    assert events_of(dsn, hold["id"]) == ["hold.placed", "hold.expired"]
    check_consistent(dsn)


async def test_a_worker_killed_while_sealing_seals_once(books: Books, db: Database, dsn: str) -> None:
    """The seal and its event are one commit."""
    made(await books.try_post(move(await books.open(), await books.open(), "1.00"), str(uuid4())))
    rows(dsn, "SELECT duly.schedule('ledger.seal')")
    code, output = finish(python(dsn, WORK, failpoints="worker.before_commit=kill9"), 60)
    assert code == -signal.SIGKILL, output
    assert count(dsn, "ledger.seals") == 0
    expire_leases(dsn)  # one at a time seals: the dead one counts until its lease ends
    rows(dsn, "SELECT duly.schedule('ledger.seal')")
    await drain(db, app.handlers)
    assert (count(dsn, "ledger.seals"), events_of(dsn, "journal")) == (1, ["journal.sealed"])
