"""Each broker's server runs once for the whole run; each test has a topic and a database of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.brokers.process import preload
from tests.brokers.servers import Kind, Server, chosen, find
from tests.brokers.world import World, create_world


@pytest.fixture(scope="session", params=chosen())
def broker(request: pytest.FixtureRequest) -> Iterator[tuple[Kind, Server]]:
    """One after the other, each broker that is not left out, and its server, running."""
    preload()
    kind = find(request.param)
    directory = Path(tempfile.mkdtemp(prefix=f"duly-{kind.name}-"))
    before = dict(os.environ)
    os.environ.update(kind.environment)
    server = kind.make(directory)
    try:
        server.start()
        yield kind, server
    finally:
        server.close()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(directory, ignore_errors=True)


@pytest_asyncio.fixture
async def world(broker: tuple[Kind, Server], dsn: str, tmp_path: Path) -> AsyncIterator[World]:
    """A topic that was set up, a database whose consumers listen to the broker, and no process yet."""
    async with create_world(*broker, dsn, tmp_path) as made:
        yield made
