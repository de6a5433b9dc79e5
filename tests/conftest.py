"""Short names for the fixtures that duly gives its users too."""

from __future__ import annotations

import gc
import os

import pytest

from duly.db import Database
from duly.testing import BusinessClock, TestServer

os.environ["DULY_ALLOW_UNSAFE_DATABASE"] = "1"  # the test server runs without fsync
pytest_plugins = ["duly.testing.plugin"]


@pytest.fixture(scope="session")
def server(duly_server: TestServer) -> TestServer:
    """One PostgreSQL for each test process."""
    return duly_server


@pytest.fixture
def dsn(duly_dsn: str) -> str:
    """One fresh database for each test."""
    return duly_dsn


@pytest.fixture
def db(duly_db: Database) -> Database:
    """A Database on it."""
    return duly_db


@pytest.fixture
def clock(duly_clock: BusinessClock) -> BusinessClock:
    """The clock of that database."""
    return duly_clock


def pytest_collection_finish() -> None:
    """What is imported by now stays: going through it again and again takes a tenth of the whole run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Collect what the tests left: Python 3.11 fails when that happens while a plugin is being parsed (106905)."""
    gc.collect()
