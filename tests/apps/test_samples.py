"""What a fresh ``make run`` shows: sample data of every context, all of it as real as a customer's."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from apps import samples
from apps.sandbox import bank
from apps.wiring import app
from duly.db import Database
from duly.testing import BusinessClock, drain
from tests.apps.commerce.acting import check_consistent, count, runs_of
from tests.apps.conftest import Api
from tests.apps.finance.compliance.acting import check_cases
from tests.apps.finance.payments.acting import check_consistent as check_payments
from tests.support import rows, value


async def test_commerce_has_orders_in_every_state_and_the_rates_of_a_week(
    api: Api, db: Database, dsn: str, clock: BusinessClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1, C2, C3: some time out while one watches; the bank's stand-in is asked over HTTP."""
    monkeypatch.delenv("NBP_URL", raising=False)
    monkeypatch.setenv("DULY_DATA", str(tmp_path))
    for _ in range(2):
        await db.run(samples.load)  # the second time there is nothing to do
    check_consistent(dsn)
    by_status = "SELECT status, count(*) FROM commerce.orders GROUP BY 1 ORDER BY 1"
    assert rows(dsn, by_status) == [("AWAITING_PAYMENT", 4), ("EXPIRED", 1), ("PAID", 2)]
    first_due = value(dsn, "SELECT min(run_at) FROM duly.jobs WHERE name = 'PaymentTimeout'") - clock.now()
    assert timedelta(seconds=30) < first_due < timedelta(minutes=2)
    await drain(db, app.handlers)
    days = value(dsn, "SELECT array_agg(day ORDER BY day) FROM currencies.rate_tables")
    assert len(days) >= 3
    assert {day.isoweekday() for day in days} <= {1, 2, 3, 4, 5}
    assert [outcome for outcome, _ in runs_of(dsn, "CurrencyRateSync")] == ["done"] * 7
    rows(dsn, "SELECT duly.schedule('CartAbandonment')")
    clock.advance(minutes=6)
    await drain(db, app.handlers)
    assert rows(dsn, by_status) == [("AWAITING_PAYMENT", 1), ("EXPIRED", 4), ("PAID", 2)]
    assert rows(dsn, "SELECT status, count(*) FROM commerce.carts GROUP BY 1 ORDER BY 1") == [
        ("ABANDONED", 1), ("OPEN", 1)
    ]  # fmt: skip
    check_consistent(dsn)
    assert count(dsn, "transfers.products") == 4


async def test_payments_are_screened_by_rules_that_one_can_look_at(db: Database, dsn: str) -> None:
    """F11, F12: rules in two states, and decisions of each kind."""
    await db.run(samples.load)
    by_status = "SELECT status, count(*) FROM decisions.rules GROUP BY 1 ORDER BY 1"
    assert rows(dsn, by_status) == [("ACTIVE", 6), ("DRAFT", 2)]
    query = "SELECT decision FROM decisions.log WHERE subject LIKE 'sample-%%' ORDER BY subject"
    decided = [decision for (decision,) in rows(dsn, query, {})]
    assert decided == ["APPROVE", "REVIEW", "REJECT", "APPROVE", "REVIEW"]


async def test_payments_go_through_the_sandboxs_bank_and_back(
    api: Api, db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F5 to F7: settled, declined, failed later, busy, an answer that is lost, reviewed, and without cover."""
    monkeypatch.setenv("PAYMENTS_BANK_URL", api.url + bank.PATH)
    monkeypatch.setenv("PAYMENTS_CALLBACK_URL", api.url + "/v1/webhooks/payments")
    monkeypatch.setenv("PAYMENTS_BANK_TIMEOUT_SECONDS", "5")
    await db.run(samples.load)
    ours = {name: one for name, one in app.handlers.items() if name.startswith("payments.")}
    await drain(db, ours)
    by_state = "SELECT state, count(*)::int FROM payments.payments GROUP BY 1"
    wanted = {"COMPLETED": 3, "PERMANENTLY_FAILED": 2, "FAILED": 2, "PENDING_REVIEW": 1}
    async with asyncio.timeout(30):
        while dict(rows(dsn, by_state)) != wanted:  # the bank calls in its own time
            await asyncio.sleep(0.1)
    clock.advance(minutes=10)
    for _ in range(2):
        rows(dsn, "SELECT duly.schedule('payments.retry')")
        await drain(db, ours)
        clock.advance(minutes=10)
    async with asyncio.timeout(30):
        while dict(rows(dsn, by_state)) != {**wanted, "COMPLETED": 4, "FAILED": 1}:
            await asyncio.sleep(0.1)
    check_payments(dsn)


async def test_cases_are_there_to_be_decided(db: Database, dsn: str) -> None:
    """F9, F10: one of a held payment, which somebody works on; and what the screening finds in what was posted."""
    await app.prepare(db)
    await db.run(samples.load)
    ours = {name: one for name, one in app.handlers.items() if name == "consumer:aml-screening"}
    await drain(db, ours)
    by_kind = dict(rows(dsn, "SELECT kind, count(*)::int FROM compliance.cases GROUP BY 1"))
    assert by_kind["PAYMENT_REVIEW"] == 1
    assert by_kind["AML"] >= 1
    assert value(dsn, "SELECT assignee FROM compliance.cases WHERE kind = 'PAYMENT_REVIEW'") == "sample-officer"
    check_cases(dsn)
