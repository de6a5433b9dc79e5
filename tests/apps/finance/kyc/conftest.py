"""An agent, and a provider on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from apps.finance.kyc.gateways import URL_VARIABLE
from apps.sandbox.identity import Provider
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.conftest import Api
from tests.apps.finance.kyc.acting import Desk, serving_provider


@pytest_asyncio.fixture
async def provider(db: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Provider]:
    """Who checks people; it calls when they have answered."""
    made = Provider()
    async with serving_provider(made, db) as url:
        monkeypatch.setenv(URL_VARIABLE, url)
        yield made


@pytest.fixture
def desk(api: Api, db: Database, dsn: str, clock: BusinessClock, provider: Provider) -> Desk:
    """Where people are checked."""
    return Desk(api, db, dsn, clock, provider)
