"""pytest fixtures: ``pytest_plugins = ["duly.testing.plugin"]``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from duly.app import Duly
from duly.db import Database
from duly.testing import BusinessClock, TestServer, find_place

RUNNING_SERVER = "DULY_TEST_SERVER"  # the directory of a TestServer that runs already; for one test process at a time


@pytest.fixture(scope="session")
def duly_server() -> Iterator[TestServer]:
    """An embedded PostgreSQL of this test process alone; or one that somebody keeps running, to save its start."""
    if running := os.environ.get(RUNNING_SERVER):
        yield TestServer(Path(running), is_running=True)
        return
    directory = Path(tempfile.mkdtemp(prefix="duly-test-", dir=find_place()))
    made = TestServer(directory)
    made.start()
    yield made
    made.stop()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def duly_app() -> Duly | None:
    """Override this to return your application: each database then has its schema, too."""
    return None


@pytest.fixture
def duly_dsn(duly_server: TestServer, duly_app: Duly | None) -> Iterator[str]:
    """The address of a fresh, migrated database."""
    with duly_server.database(duly_app) as address:
        yield address


@pytest_asyncio.fixture
async def duly_db(duly_dsn: str) -> AsyncIterator[Database]:
    """A Database on it."""
    database = Database(duly_dsn)
    yield database
    await database.close()


@pytest.fixture
def duly_clock(duly_dsn: str) -> BusinessClock:
    """The clock of that database."""
    return BusinessClock(duly_dsn)
