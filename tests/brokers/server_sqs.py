"""SQS for tests: moto's server behind a front that can be stopped, killed and paused (see moto_sqs)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from tests.brokers.servers import Foreign, Kind, ProcessServer, Raw, Server

PROGRAM = Path(__file__).with_name("moto_sqs.py")
REGION = "eu-central-1"
IN_ONE_REQUEST = 10
CONNECTIONS = 10
SECRET = "nobody-may-read-this"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIATESTINGTESTING",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


class _Back(ProcessServer):
    """SQS itself, which lives on whatever becomes of the way to it."""

    name = "moto's server"

    def command(self) -> Sequence[str]:
        """moto, with what our tests need of it."""
        return [sys.executable, str(PROGRAM), "back", str(self.port)]


class SqsServer(ProcessServer):
    """One SQS on a port that is kept; what was acknowledged survives everything but the end of the test run."""

    name = "the front of SQS"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (directory / "back").mkdir(exist_ok=True)
        self._back = _Back(directory / "back")
        self._has_back = False

    def command(self) -> Sequence[str]:
        """What carries bytes to SQS and back."""
        return [sys.executable, str(PROGRAM), "front", str(self.port), str(self._back.port)]

    def url(self, *, prefix: str = "duly-", visibility: int = 5) -> str:
        """The broker's URL; credentials are in the environment, as for any AWS client (see ENVIRONMENT)."""
        options = {"endpoint": f"http://127.0.0.1:{self.port}", "prefix": prefix, "visibility": visibility}
        return f"sqs://{REGION}?{urlencode(options)}"

    def start(self) -> None:
        """Open the way to SQS; the first time, SQS itself begins."""
        if not self._has_back:
            self._back.start()
            self._has_back = True
        super().start()

    def close(self) -> None:
        """The end of it, and of every message."""
        super().close()
        self._back.close()
        self._has_back = False

    # -- orders of tests, which need no front ---------------------------------------------------------------------

    def order(self, what: str, order: Any = None) -> Any:
        """Ask the stand-in itself for something; see ``Orders``."""
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self._back.port}/stand-in/{what}", data=json.dumps(order).encode(), method="POST"
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.load(answer)

    def answer(self, operation: str, status: int, code: str, *, times: int = 1, **rest: Any) -> None:
        """Let the next requests of this operation (``*``: of any) be answered so; ``done=True``: after doing it."""
        self.order("answers", [{"operation": operation, "status": status, "code": code, "times": times, **rest}])

    def recover(self) -> None:
        """As it was: running, and with no orders."""
        if self._process is None:
            self.start()
        self.resume()
        self.order("answers", [])
        self.order("entries", {})
        self.order("pauses", {})
        self.order("calls")


class SqsForeign:
    """A plain client. Whoever reads a queue takes from it, so it reads a copy, as one would have by way of SNS."""

    def __init__(self, server: SqsServer) -> None:
        self._server = server
        self._open = AsyncExitStack()
        self._client: Any = None
        self._copy = ""
        self._seen: list[Raw] = []

    async def _connected(self) -> Any:
        if self._client is None:
            made = get_session().create_client(
                "sqs",
                region_name=REGION,
                endpoint_url=f"http://127.0.0.1:{self._server.port}",
                aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=SECRET,
                config=AioConfig(connect_timeout=5, read_timeout=30),
            )
            self._client = await self._open.enter_async_context(made)
        return self._client

    async def watch(self, topic: str) -> None:
        """Have a queue of its own beside the topic's."""
        name = queue_name(topic)
        attributes = {"FifoQueue": "true", "MaximumMessageSize": "1048576"}
        made = await (await self._connected()).create_queue(QueueName=f"copy-{name}", Attributes=attributes)
        self._copy = made["QueueUrl"]
        self._server.order("copies", {name: f"copy-{name}"})

    async def read(self, count: int, *, seconds: float = 30.0) -> list[Raw]:
        """What came there."""
        client = await self._connected()
        ends_at = time.monotonic() + seconds
        while len(self._seen) < count and (left := ends_at - time.monotonic()) > 0:
            answer = await client.receive_message(
                QueueUrl=self._copy, MaxNumberOfMessages=10, WaitTimeSeconds=min(5, int(left)),
                MessageAttributeNames=["All"], MessageSystemAttributeNames=["MessageGroupId"],
            )  # fmt: skip
            for message in answer.get("Messages", []):
                attributes = message.get("MessageAttributes", {})
                headers = {name.lower(): value.get("StringValue", "") for name, value in attributes.items()}
                key = message["Attributes"]["MessageGroupId"]
                self._seen.append(Raw(headers, message["Body"].encode(), key))
                await client.delete_message(QueueUrl=self._copy, ReceiptHandle=message["ReceiptHandle"])
        return list(self._seen)

    async def write(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """Send them one by one."""
        client = await self._connected()
        queue = (await client.get_queue_url(QueueName=queue_name(topic)))["QueueUrl"]
        for message in messages:
            await client.send_message(QueueUrl=queue, **_as_entry(message))

    async def flood(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """Ten to a request, and as many requests at once as the library has connections."""
        client = await self._connected()
        queue = (await client.get_queue_url(QueueName=queue_name(topic)))["QueueUrl"]
        batches = [messages[first : first + IN_ONE_REQUEST] for first in range(0, len(messages), IN_ONE_REQUEST)]

        async def send(some: Sequence[Sequence[Raw]]) -> None:
            for batch in some:
                entries = [{"Id": str(number), **_as_entry(one)} for number, one in enumerate(batch)]
                answer = await client.send_message_batch(QueueUrl=queue, Entries=entries)
                assert len(answer["Successful"]) == len(batch), answer

        await asyncio.gather(*(send(batches[first::CONNECTIONS]) for first in range(CONNECTIONS)))

    async def close(self) -> None:
        """Hang up."""
        self._client = None
        await self._open.aclose()


def _as_entry(message: Raw) -> dict[str, Any]:
    return {
        "MessageBody": message.body.decode(),
        "MessageAttributes": {
            name: {"DataType": "String", "StringValue": value} for name, value in message.headers.items()
        },
        "MessageGroupId": message.key or "stranger",
        "MessageDeduplicationId": str(uuid4()),
    }


def queue_name(topic: str) -> str:
    """What a stranger was told of how queues are named."""
    return f"duly-{re.sub('[^A-Za-z0-9]', '-', topic)}.fifo"


def _make(directory: Path) -> Server:
    return SqsServer(directory)


def _url(server: Server) -> str:
    assert isinstance(server, SqsServer)
    return server.url()


def _foreign(server: Server) -> Foreign:
    assert isinstance(server, SqsServer)
    return SqsForeign(server)


def _lose_acknowledgement(server: Server) -> None:
    """Done, and answered by an error: aiobotocore asks and hears in one call, which nothing can come in between of."""
    assert isinstance(server, SqsServer)
    server.answer("SendMessageBatch", 500, "InternalFailure", done=True)


KIND = Kind(
    "sqs",
    _make,
    _url,
    _foreign,
    binding="",
    carries_bytes=False,
    shows_repetitions=False,
    lose_acknowledgement=_lose_acknowledgement,
    environment=ENVIRONMENT,
)
