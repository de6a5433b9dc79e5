"""Killed in the middle: one winner all the same, and everything agrees (C2)."""

from __future__ import annotations

import signal
from pathlib import Path
from uuid import uuid4

import httpx2
import pytest

from apps.wiring import app
from duly.auth.issuer import Issuer
from duly.db import Database
from duly.settings import Settings
from duly.testing import BusinessClock, drain
from tests.apps.commerce.acting import Customers, check_consistent, events_of, fill, statuses, timers_of
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
WAITING, EXPIRED, PAID = ("AWAITING_PAYMENT", "PENDING"), ("EXPIRED", "EXPIRED"), ("PAID", "PAID")


@pytest.mark.parametrize(
    ("point", "kept"),
    [
        ("worker.claimed", WAITING),
        ("worker.before_handler", WAITING),
        ("worker.handler_done", WAITING),
        ("settle.written", WAITING),
        ("worker.before_commit", WAITING),
        ("worker.committed", EXPIRED),
    ],
)
async def test_a_worker_killed_in_the_timeout_expires_once_or_not_at_all(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock, point: str, kept: tuple[str, str]
) -> None:
    """C2: kill -9; then the customer and another worker both come, and one of them wins."""
    first, second = await shop.place(), await shop.place()
    rows(dsn, "DELETE FROM duly.jobs WHERE entity_id = %(id)s AND name = 'PaymentTimeout'", {"id": second})
    clock.advance(minutes=16)
    code, output = finish(python(dsn, WORK, failpoints=f"{point}=kill9"), 60)
    assert code == -signal.SIGKILL, output
    assert statuses(dsn, first) == kept
    assert (await shop.pay(first)).status_code == (200 if kept == WAITING else 409)
    expire_leases(dsn)
    await drain(db, app.handlers)
    clock.advance(minutes=10)  # what was taken over waits before it is retried
    await drain(db, app.handlers)
    winner = PAID if kept == WAITING else EXPIRED
    assert (statuses(dsn, first), timers_of(dsn, first)) == (winner, [])
    rows(dsn, "SELECT duly.schedule('PaymentTimeout', %(id)s)", {"id": second})
    await drain(db, app.handlers)
    assert statuses(dsn, second) == EXPIRED
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 0
    check_consistent(dsn)


async def test_a_worker_killed_in_the_timeout_is_taken_over(db: Database, dsn: str, clock: BusinessClock) -> None:
    """C2: nobody pays, so it expires after all, once."""
    orders = fill(dsn, 3, minutes=16, timers=True)
    code, output = finish(python(dsn, WORK, failpoints="worker.before_commit=kill9"), 60)
    assert code == -signal.SIGKILL, output
    expire_leases(dsn)
    await drain(db, app.handlers)
    clock.advance(minutes=10)
    await drain(db, app.handlers)
    assert [statuses(dsn, order) for order in orders] == [EXPIRED] * 3
    check_consistent(dsn)


@pytest.mark.parametrize(
    ("point", "kept"),
    [("http.before_commit", WAITING), ("http.before_response", PAID)],
)
async def test_an_api_killed_in_a_payment_has_paid_once_or_not_at_all(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock, tmp_path: Path, point: str, kept: tuple[str, str]
) -> None:
    """C2: kill -9; the timer comes next, then the customer with the same key: the answer tells who won."""
    order = await shop.place()
    env = environment(
        DULY_APP="apps.wiring:app", DATABASE_URL=dsn, DULY_DATA=str(tmp_path / "api"), PORT=str(free_port()),
        DULY_ALLOW_UNSAFE_DATABASE="1",
    )  # fmt: skip
    url = f"http://127.0.0.1:{env['PORT']}"
    token = Issuer.open(Settings(data=tmp_path / "api"), port=int(env["PORT"])).sign("ann", scopes=["commerce"])
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": str(uuid4())}
    with running("api", env={**env, "DULY_FAILPOINTS": f"{point}=kill9"}, log=tmp_path / "log") as api:
        wait_until(lambda: status(f"{url}/readyz") == 200, what="/readyz is 200")
        with pytest.raises(httpx2.TransportError):
            httpx2.post(f"{url}/v1/orders/{order}/pay", headers=headers, timeout=20)
        assert api.wait(10) == -signal.SIGKILL
    assert statuses(dsn, order) == kept
    clock.advance(minutes=16)
    await drain(db, app.handlers)
    with running("api", env=env, log=tmp_path / "log"):
        wait_until(lambda: status(f"{url}/readyz") == 200, what="/readyz is 200")
        again = httpx2.post(f"{url}/v1/orders/{order}/pay", headers=headers, timeout=20)
    if kept == PAID:
        assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
        assert events_of(dsn, order) == ["OrderPlaced", "OrderPaid"]
    else:
        assert (again.status_code, again.json()["type"]) == (409, "urn:duly:problem:already-expired")
        assert events_of(dsn, order) == ["OrderPlaced", "OrderExpired"]
    check_consistent(dsn)
