"""A webhook over a real socket, and a frozen clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from structlog.testing import capture_logs
from structlog.typing import EventDict

from apps.birthdays.gateways import URL_VARIABLE
from apps.wiring import app
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.birthdays.acting import Receiver, receiving

SPRING = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest_asyncio.fixture
async def hook(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    """Where messages go."""
    async with receiving(Receiver()) as receiver:
        monkeypatch.setenv(URL_VARIABLE, receiver.url)
        yield receiver


@pytest_asyncio.fixture
async def db(duly_db: Database) -> Database:
    """The consumers are registered, so that events reach them."""
    await app.prepare(duly_db)
    return duly_db


@pytest.fixture
def clock(duly_clock: BusinessClock) -> BusinessClock:
    """It stands still, in spring: all birthdays of these tests are to come."""
    duly_clock.freeze(SPRING)
    return duly_clock


@pytest.fixture
def log() -> Iterator[list[EventDict]]:
    """What was logged."""
    with capture_logs() as lines:
        yield lines
