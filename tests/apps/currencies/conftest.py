"""A bank to ask."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.apps.currencies.bank import Bank, serving_bank


@pytest_asyncio.fixture
async def bank(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bank]:
    """The one that NBP_URL names."""
    async with serving_bank() as served:
        monkeypatch.setenv("NBP_URL", served.url)
        yield served
