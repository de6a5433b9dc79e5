"""Two customers, a bank, and workers that can open the secrets of subscribers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from apps.finance.payments.gateways import TIMEOUT_VARIABLE, URL_VARIABLE
from apps.sandbox.bank import Bank, Behaviour
from apps.wiring import app
from duly.db import Database
from duly.testing import BusinessClock, drain
from duly.webhooks.admit import DELIVER_JOB
from duly.webhooks.deliver import Deliverer
from tests.apps.conftest import Api
from tests.apps.finance.payments.acting import HANDLERS, Payers, open_account, serving_bank


@pytest_asyncio.fixture
async def payers(
    api: Api, db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Payers]:
    """Ann has 100.00, Ben has nothing; and whatever that brought about is over."""
    bank = Bank()
    for handlers in (app.handlers, HANDLERS):
        monkeypatch.setitem(handlers, DELIVER_JOB, Deliverer(api.fastapi.state.settings).create_handler())
    async with serving_bank(bank) as url:
        monkeypatch.setenv(URL_VARIABLE, url)
        monkeypatch.setenv(TIMEOUT_VARIABLE, "10")
        async with db.transaction() as tx:
            ann, ben = await open_account(tx, "100.00"), await open_account(tx)
        made = Payers(api, db, dsn, clock, bank, ann, ben)
        made.order(Behaviour.ACCEPT)
        await drain(db, app.handlers)
        yield made
