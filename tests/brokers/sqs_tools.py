"""What the tests of SQS share: one stand-in for the whole run, in good health before each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from tests.brokers.server_sqs import ENVIRONMENT, SqsServer
from tests.brokers.servers import Server


@pytest.fixture(scope="session")
def sqs_server(running: Callable[[str], Server]) -> SqsServer:
    """One SQS for the run: queues have names of their own in each test."""
    server = running("sqs")
    assert isinstance(server, SqsServer)
    return server


@pytest.fixture
def sqs(sqs_server: SqsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqsServer]:
    """SQS, in good health, with credentials where AWS clients look for them."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield sqs_server
    sqs_server.recover()


@pytest.fixture
def prefix() -> str:
    """What this test's queues begin with."""
    return f"t{uuid4().hex[:12]}-"
