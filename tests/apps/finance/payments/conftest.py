"""Two customers, a teller, and a bank on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from apps.finance.payments.gateways import TIMEOUT_VARIABLE, URL_VARIABLE
from apps.sandbox.bank import Bank, Behaviour
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.conftest import Api
from tests.apps.finance.payments.acting import Payers, open_account, serving_bank


@pytest_asyncio.fixture
async def bank(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bank]:
    """Where payments go; it tells nobody of what it does unless it is asked."""
    made = Bank()
    async with serving_bank(made) as url:
        monkeypatch.setenv(URL_VARIABLE, url)
        monkeypatch.setenv(TIMEOUT_VARIABLE, "10")
        yield made


@pytest_asyncio.fixture
async def payers(api: Api, db: Database, dsn: str, clock: BusinessClock, bank: Bank) -> Payers:
    """Ann has 100.00, Ben has nothing."""
    async with db.transaction() as tx:
        ann, ben = await open_account(tx, "100.00"), await open_account(tx)
    made = Payers(api, db, dsn, clock, bank, ann, ben)
    made.order(Behaviour.ACCEPT)
    return made
