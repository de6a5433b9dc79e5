"""Each broker's server runs once for the whole run; each test has a topic and a database of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from duly.ids import uuid7
from tests.brokers.process import preload
from tests.brokers.servers import Kind, Server, chosen, find
from tests.brokers.world import World, create_world

if TYPE_CHECKING:
    from duly.brokers.rabbitmq import RabbitSource, RabbitTransport
    from tests.brokers.server_rabbitmq import RabbitMQServer


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


# -- RabbitMQ alone ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQServer]:
    """One node for the tests of what is RabbitMQ's own."""
    if "rabbitmq" not in chosen():
        pytest.skip("rabbitmq is left out")
    from tests.brokers.server_rabbitmq import RabbitMQServer

    node = RabbitMQServer(tmp_path_factory.mktemp("rabbitmq"))
    try:
        node.start()
        yield node
    finally:
        node.close()


@pytest.fixture
def rabbit_url(rabbit: RabbitMQServer) -> str:
    """An exchange, and so queues, of the test's own."""
    return f"{rabbit.url}?exchange=t{uuid7().hex}"


@pytest_asyncio.fixture
async def sends(rabbit_url: str) -> AsyncIterator[RabbitTransport]:
    """What publishes there; everything it needs is there."""
    from duly.brokers.rabbitmq import setup, transport
    from tests.brokers.rabbit_tools import GROUP, TOPIC

    await setup(rabbit_url, topics=[TOPIC], group=GROUP)
    made = transport(rabbit_url)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def reads(rabbit_url: str, sends: RabbitTransport) -> AsyncIterator[RabbitSource]:
    """What reads what was published."""
    from duly.brokers.rabbitmq import source
    from tests.brokers.rabbit_tools import GROUP, TOPIC

    made = source(rabbit_url, topics=[TOPIC], group=GROUP)
    yield made
    await made.close()
