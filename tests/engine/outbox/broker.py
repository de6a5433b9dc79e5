"""A small broker on a real socket, in a thread of its own, and the transport that speaks to it.

It writes down what it receives before it answers, and can be told to refuse, to stall, to answer too late or never.
The protocol is one line of JSON a request ({"relay": ..., "events": [envelope, ...]}) and one a reply (for each event
null, an error, or {"later": why}). Who reads asks with {"read": after, "limit": ..., "wait": seconds}, and may keep its
place with {"commit": offset, "group": ...}.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duly.brokers import Later
from duly.messages import Event, to_cloudevent

WAIT_SECONDS = 30.0
LINE_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True)
class Received:
    """One event as the broker took it."""

    relay: str
    aggregate: str
    id: str
    n: int
    envelope: dict[str, Any]


@dataclass
class Rules:
    """How the broker behaves at the moment."""

    refuse: dict[str, str] = field(default_factory=dict)  # aggregate or type: the error it is told
    away: dict[str, str] = field(default_factory=dict)  # types that are not to be had now, and why
    hang_up_on: set[str] = field(default_factory=set)  # aggregates whose events make it cut the line, taking nothing
    refuse_share: float = 0.0
    drop_acks: int = 0  # so many requests are taken down, and the line is cut instead of an answer
    delay_seconds: float = 0.0
    hold_before: set[str] = field(default_factory=set)  # relays whose requests are neither taken down nor answered
    hold_after: set[str] = field(default_factory=set)  # relays whose requests are taken down and not answered
    drop_commits: int = 0  # so many commits of readers are lost, and the line is cut instead of an answer
    hold_next: bool = False  # the next one that has something taken down is treated so


class Broker:
    """Start it, tell it how to behave by changing ``rules``, and ask what it received."""

    def __init__(self, journal: Path) -> None:
        self.rules = Rules()
        self.port = 0
        self.requests: list[list[str]] = []  # the aggregates of each request
        self.held: set[str] = set()  # relays that are being kept waiting
        self.log: list[dict[str, Any]] = []  # topic, headers and body; an offset is a place here, from 1
        self.committed: dict[str, int] = {}  # how far each group of readers says it came
        self._journal = journal
        self._journal.touch()
        self._changed = threading.Condition()
        self._random = random.Random(7)
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()
        self._arrived = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker", daemon=True)
        self._thread.start()

    # -- from the test's thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the door; the same one as before, after an outage."""
        self._on_loop(self._open())

    def stop(self) -> None:
        """An outage: nobody can connect, and every line is cut."""
        self._on_loop(self._shut())

    def close(self) -> None:
        """The end."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def release(self) -> None:
        """Answer what was held."""
        self.rules.hold_before.clear()
        self.rules.hold_after.clear()
        self._loop.call_soon_threadsafe(self._released.set)

    def put(self, body: bytes | dict[str, Any], *, topic: str = "shop", key: str = "", **headers: str) -> None:
        """A message of somebody else's: any bytes, or a CloudEvent in structured mode."""
        if isinstance(body, dict):
            headers, body = {"content-type": "application/cloudevents+json"}, json.dumps(body).encode()
        entry = {"topic": topic, "headers": headers, "body": base64.b64encode(body).decode(), "key": key}
        self._on_loop(self._append([entry]))

    def received(self) -> list[Received]:
        """Everything that was ever taken down, in order, duplicates too."""
        found = []
        for line in self._journal.read_text().splitlines():
            relay, envelope = json.loads(line)
            data = envelope["data"]
            found.append(Received(relay, envelope["subject"], envelope["id"], data.get("n", 0), envelope))
        return found

    def first_deliveries(self) -> dict[str, list[int]]:
        """For each aggregate, the numbers of its events in the order in which the broker first saw them."""
        seen: dict[str, list[int]] = {}
        for one in self.received():
            if one.n not in seen.setdefault(one.aggregate, []):
                seen[one.aggregate].append(one.n)
        return seen

    def wait_until(self, fact: Callable[[], bool], seconds: float = WAIT_SECONDS) -> bool:
        """Wait for something to become true; looked at again after each request."""
        with self._changed:
            return self._changed.wait_for(fact, seconds)

    # -- on the broker's thread ---------------------------------------------------------------------------------

    def _on_loop(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=LINE_LIMIT)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _shut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for line in list(self._lines):
            line.transport.abort()
        if server is not None:
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lines.add(writer)
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                request = json.loads(line)
                answer = await (self._take(request) if "events" in request else self._serve_reader(request))
                if answer is None:
                    break
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        self._lines.discard(writer)
        writer.close()

    async def _take(self, request: dict[str, Any]) -> list[Any] | None:
        relay, envelopes = request["relay"], request["events"]
        rules = self.rules
        self.requests.append([envelope["subject"] for envelope in envelopes])
        if relay in rules.hold_before:
            await self._hold(relay)
        if rules.hang_up_on.intersection(envelope["subject"] for envelope in envelopes):
            return None
        if rules.delay_seconds:
            await asyncio.sleep(rules.delay_seconds)
        answers = [self._refusal(envelope) for envelope in envelopes]
        with self._journal.open("a") as journal:
            for envelope, refused in zip(envelopes, answers, strict=True):
                if refused is None:
                    journal.write(json.dumps([relay, envelope]) + "\n")
        taken = [one for one, refused in zip(envelopes, answers, strict=True) if refused is None]
        await self._append([_as_entry(envelope) for envelope in taken])
        self._tell()
        if relay in rules.hold_after or (rules.hold_next and None in answers):
            rules.hold_next = False
            await self._hold(relay)
        if rules.drop_acks > 0:
            rules.drop_acks -= 1
            return None
        return answers

    async def _append(self, entries: list[dict[str, Any]]) -> None:
        self.log += entries
        self._arrived.set()

    async def _serve_reader(self, request: dict[str, Any]) -> Any:
        group = request.get("group", "")
        if "commit" in request:
            if self.rules.drop_commits > 0:
                self.rules.drop_commits -= 1
                return None
            self.committed[group] = max(request["commit"], self.committed.get(group, 0))
            self._tell()
        if "read" not in request:
            return {"committed": self.committed.get(group, 0), "end": len(self.log)}
        after = request["read"]
        if after >= len(self.log):
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request["wait"]):
                    await self._arrived.wait()
        return [[after + 1 + place, one] for place, one in enumerate(self.log[after : after + request["limit"]])]

    def _refusal(self, envelope: dict[str, Any]) -> str | dict[str, str] | None:
        if envelope["type"] in self.rules.away:
            return {"later": self.rules.away[envelope["type"]]}
        if self._random.random() < self.rules.refuse_share:
            return "503 try again"
        refuse = self.rules.refuse
        return refuse.get(envelope["subject"], refuse.get(envelope["type"]))

    async def _hold(self, relay: str) -> None:
        self._released.clear()
        self.held.add(relay)
        self._tell()
        await self._released.wait()
        self.held.discard(relay)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _as_entry(envelope: dict[str, Any]) -> dict[str, Any]:
    """An event that a relay sent, as readers get it."""
    body = base64.b64encode(json.dumps(envelope).encode()).decode()
    headers = {"content-type": "application/cloudevents+json"}
    return {"topic": envelope["source"].rpartition("/")[2], "headers": headers, "body": body}


@contextlib.contextmanager
def running_broker(directory: Path) -> Iterator[Broker]:
    """A broker for one test."""
    broker = Broker(directory / "journal.jsonl")
    broker.start()
    try:
        yield broker
    finally:
        broker.release()
        broker.close()


class BrokerTransport:
    """The client: one line to the broker, opened when needed, dropped after any error."""

    name = "test-broker"

    def __init__(self, port: int, relay: str = "relay") -> None:
        self._port = port
        self._relay = relay
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def check(self) -> None:
        """Whether somebody is there."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.close()

    async def publish(self, events: Sequence[Event]) -> Sequence[str | Later | None]:
        """Send one request and wait for its answer."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=LINE_LIMIT)
            reader, writer = self._streams
            request = {"relay": self._relay, "events": [to_cloudevent(event) for event in events]}
            writer.write(json.dumps(request, default=str).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
            if not line:
                raise ConnectionResetError("the broker hung up")
            return [Later(answer["later"]) if isinstance(answer, dict) else answer for answer in json.loads(line)]
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Hang up."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(OSError):
                await streams[1].wait_closed()
