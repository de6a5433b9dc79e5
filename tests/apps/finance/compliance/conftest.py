"""Officers, two customers and a bank; whatever is large is looked at."""

from __future__ import annotations

import pytest_asyncio

from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.conftest import Api
from tests.apps.finance.compliance.acting import LARGE, Office, add_rule
from tests.apps.finance.payments.acting import Payers
from tests.apps.finance.payments.conftest import bank as bank
from tests.apps.finance.payments.conftest import payers as payers


@pytest_asyncio.fixture
async def office(api: Api, db: Database, dsn: str, clock: BusinessClock, payers: Payers) -> Office:
    """Ann has 100.00, Ben has nothing; payments of 50.00 and more are held, and what was posted is screened."""
    made = Office(api, db, dsn, clock, payers)
    for _ in range(20):  # on a busy machine, until the server has the issuer's keys
        if (await made.ask("GET", "")).status_code == 200:
            break
    await made.screen()  # the deposit, which nobody has rules for yet
    await add_rule(db, LARGE, rule_set="payment-screening", name="Large payment")
    await add_rule(db, LARGE, name="Large transaction")
    return made
