"""Each broker's server runs once for the whole run; each test has a topic and a database of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
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
    from tests.brokers.server_kafka import KafkaServer
    from tests.brokers.server_rabbitmq import RabbitMQServer


OF_ONE = {
    "nats": ("test_nats",),
    "kafka": ("test_kafka", "test_kafka_group", "test_kafka_login", "test_screening"),
    "rabbitmq": ("test_rabbitmq", "test_rabbitmq_checks", "test_transfers"),
    "sqs": ("test_sqs", "test_moto_sqs", "test_birthdays"),
}
BROKER_OF = {module: name for name, modules in OF_ONE.items() for module in modules}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of a broker that is left out."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        name = _broker_of(item) if item.path.parent == Path(__file__).parent else None
        (kept if name is None or name in chosen() else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _broker_of(item: pytest.Item) -> str | None:
    """The broker that a test needs, if it needs one."""
    given = getattr(item, "callspec", None)
    return given.params["broker"] if given and "broker" in given.params else BROKER_OF.get(item.path.stem)


@pytest.fixture(scope="session")
def running() -> Iterator[Callable[[str], Server]]:
    """The server of a broker, started when somebody first asks for it: one for the whole run, whoever else asks."""
    started: dict[str, Server] = {}
    with contextlib.ExitStack() as ends:

        def run(name: str) -> Server:
            if name not in started:
                directory = Path(tempfile.mkdtemp(prefix=f"duly-{name}-"))
                ends.callback(shutil.rmtree, directory, ignore_errors=True)
                server = find(name).make(directory)
                ends.callback(server.close)
                server.start()
                started[name] = server
            return started[name]

        yield run


@pytest.fixture(scope="session", params=chosen())
def broker(request: pytest.FixtureRequest, running: Callable[[str], Server]) -> Iterator[tuple[Kind, Server]]:
    """One after the other, each broker that is not left out, and its server, running."""
    kind = find(request.param)
    preload(kind.name)
    before = dict(os.environ)
    os.environ.update(kind.environment)
    try:
        yield kind, running(kind.name)
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest_asyncio.fixture
async def world(broker: tuple[Kind, Server], dsn: str, tmp_path: Path) -> AsyncIterator[World]:
    """A topic that was set up, a database whose consumers listen to the broker, and no process yet."""
    async with create_world(*broker, dsn, tmp_path) as made:
        yield made


# -- Kafka alone -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kafka_server(running: Callable[[str], Server]) -> KafkaServer:
    """The server, for the tests of what is Kafka's own: their topics and groups have names of their own."""
    from tests.brokers.server_kafka import KafkaServer

    server = running("kafka")
    assert isinstance(server, KafkaServer)
    return server


# -- RabbitMQ alone ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def rabbit(running: Callable[[str], Server]) -> RabbitMQServer:
    """The node, for the tests of what is RabbitMQ's own."""
    from tests.brokers.server_rabbitmq import RabbitMQServer

    node = running("rabbitmq")
    assert isinstance(node, RabbitMQServer)
    return node


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
