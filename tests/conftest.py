"""One embedded PostgreSQL for each test process, one fresh database for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from duly.db import Database
from duly.testing import BusinessClock, TestServer


@pytest.fixture(scope="session")
def server() -> Iterator[TestServer]:
    """A PostgreSQL of this test process alone."""
    directory = Path(tempfile.mkdtemp(prefix="duly-test-"))
    made = TestServer(directory)
    made.start()
    yield made
    made.stop()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def dsn(server: TestServer) -> Iterator[str]:
    """The address of a fresh, migrated database."""
    with server.database() as address:
        yield address


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[Database]:
    """A Database on it."""
    database = Database(dsn)
    yield database
    await database.close()


@pytest.fixture
def clock(dsn: str) -> BusinessClock:
    """The clock of that database."""
    return BusinessClock(dsn)
