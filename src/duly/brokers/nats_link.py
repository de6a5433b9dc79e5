"""One connection to NATS, made when needed and given up at the first doubt: nothing is buffered while it is away."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import importlib.util
import itertools
import json
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.errors import APIError, ServiceUnavailableError

from duly.errors import Refused

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 5.0
PING_SECONDS = 10
MAX_TURNS = 100
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
_OPTIONS = {"stream", "replicas", "creds", "ca", "handshake_first"}
_EXAMPLE = "nats://user:password@host:4222"


@dataclass(frozen=True)
class Address:
    """What an address of NATS says."""

    servers: tuple[str, ...]
    shown: str
    user: str | None
    password: str | None
    tls: bool
    options: Mapping[str, str]


def parse(url: str) -> Address:
    """The parts of an address; what is wrong with it is said without what is secret in it."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    login, _, hosts = place.rstrip("/").rpartition("@")
    servers = [host.strip() for host in hosts.split(",")]
    if scheme not in ("nats", "nats+tls") or not all(_HOST.fullmatch(server) for server in servers):
        raise Refused(f"this is no address of NATS: write it as {_EXAMPLE}, with several hosts separated by commas")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - _OPTIONS):
        raise Refused(
            f"an address of NATS has no option {', '.join(unknown)}; there are: {', '.join(sorted(_OPTIONS))}"
        )
    if not re.fullmatch(r"[1-5]", options.get("replicas", "1")):
        raise Refused("an address of NATS: replicas is a number from 1 to 5")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", options.get("stream", "duly")):
        raise Refused("an address of NATS: stream is a name of letters, digits, _ and -")
    if "ca" in options and not Path(options["ca"]).is_file():
        raise Refused("an address of NATS: the file of ca cannot be read")
    if "creds" in options:
        _check_credentials(Path(options["creds"]))
    user, colon, password = login.partition(":")
    return Address(
        servers=tuple(f"{'tls' if scheme == 'nats+tls' else 'nats'}://{server}" for server in servers),
        shown=",".join(servers),
        user=unquote(user) or None,
        password=unquote(password) if colon else None,
        tls=scheme == "nats+tls",
        options=options,
    )


def _check_credentials(path: Path) -> None:
    """The client reads a file that holds none for ever."""
    try:
        text = path.read_text()
    except (OSError, ValueError):
        raise Refused("an address of NATS: the file of creds cannot be read") from None
    if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
        raise Refused("an address of NATS: the file of creds holds no credentials as `nsc` writes them")
    if importlib.util.find_spec("nkeys") is None:
        raise Refused("an address of NATS: creds need nkeys: pip install nkeys")


class Link:
    """A client that does not reconnect by itself: what it held back would come out behind what was sent since."""

    def __init__(self, url: str, *, name: str) -> None:
        self._address = parse(url)
        self._name = name
        self._client: Client | None = None
        self._js: JetStreamContext | None = None
        self._inbox = ""
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._listeners: list[asyncio.Queue[Msg | None]] = []
        self._first = 0
        self._last_error = ""

    @property
    def shown(self) -> str:
        """The servers, for people."""
        return self._address.shown

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as anybody knows."""
        return self._client is not None and self._client.is_connected

    @property
    def js(self) -> JetStreamContext:
        """JetStream on the open connection."""
        assert self._js is not None, "open() comes first"
        return self._js

    @property
    def max_bytes(self) -> int:
        """The largest message, with its headers, that the server takes."""
        assert self._client is not None, "open() comes first"
        return self._client.max_payload

    def said(self) -> str:
        """What the server complained about last, as an end of a sentence: a missing permission is told nowhere else."""
        return f"; it said: {self._last_error}" if self._last_error else ""

    async def open(self) -> None:
        """Connect to the first server that answers; OSError or TimeoutError when none does."""
        if self.is_open:
            return
        await self.close(0.1)
        failures = []
        for turn in range(len(self._address.servers)):
            index = (self._first + turn) % len(self._address.servers)
            try:
                await self._connect(self._address.servers[index])
            except (OSError, TimeoutError, NatsError) as error:
                await self.close(0.1)
                failures.append(error)
            else:
                self._first = index
                return
        text = "; ".join(str(error) or type(error).__name__ for error in failures)
        if "authorization" in text.lower() or "authentication" in text.lower():
            raise PermissionError(f"NATS at {self.shown} does not let us in")
        raise ConnectionError(f"no NATS answers at {self.shown}: {text or self._last_error}")

    async def _connect(self, server: str) -> None:
        address, client = self._address, Client()
        self._client, self._last_error = client, ""
        options: dict[str, Any] = {}
        if address.tls or "ca" in address.options:
            options["tls"] = ssl.create_default_context(cafile=address.options.get("ca"))
            options["tls_handshake_first"] = address.options.get("handshake_first", "").lower() in ("1", "true")
        if "creds" in address.options:
            options["user_credentials"] = address.options["creds"]
        if address.password is not None:
            options |= {"user": address.user, "password": address.password}
        elif address.user is not None:
            options["token"] = address.user

        async def lost() -> None:
            self._lose(client)

        async with asyncio.timeout(2 * CONNECT_SECONDS):
            await client.connect(
                server,
                name=self._name,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=int(CONNECT_SECONDS),
                ping_interval=PING_SECONDS,
                max_outstanding_pings=1,
                pending_size=0,  # a full buffer is waited for in a way that swallows cancellation
                error_cb=self._complained,
                closed_cb=lost,
                **options,
            )
            self._js = client.jetstream(timeout=ANSWER_SECONDS)
            self._inbox = client.new_inbox()
            await client.subscribe(f"{self._inbox}.*", cb=self._answered)

    async def _complained(self, error: Exception) -> None:
        self._last_error = str(error)[:200] or type(error).__name__

    async def _answered(self, reply: Msg) -> None:
        future = self._waiting.pop(reply.subject, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def _lose(self, client: Client) -> None:
        """Whoever waits for this connection is told at once."""
        if client is not self._client:
            return
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError(f"NATS at {self.shown} hung up{self.said()}"))
                future.exception()  # perhaps nobody waits for it any more
        self._waiting.clear()
        for listener in self._listeners:
            listener.put_nowait(None)

    async def send(self, subject: str, body: bytes, reply: str, headers: Mapping[str, str] | None = None) -> None:
        """Send, without waiting for anything."""
        if self._client is None:
            raise ConnectionResetError(f"NATS at {self.shown} hung up")
        await self._client.publish(subject, body, reply=reply, headers=dict(headers) if headers else None)

    async def ask(self, subject: str, body: bytes, headers: Mapping[str, str]) -> asyncio.Future[Msg]:
        """Send; the future is its answer."""
        reply = f"{self._inbox}.{next(self._numbers)}"
        future = self._waiting[reply] = asyncio.get_running_loop().create_future()
        await self.send(subject, body, reply, headers)
        return future

    def forget(self, futures: Iterable[asyncio.Future[Msg]]) -> None:
        """Their answers come too late."""
        late = set(futures)
        self._waiting = {reply: future for reply, future in self._waiting.items() if future not in late}

    async def flush(self) -> None:
        """Let the client write what it has: a few turns of the loop, and not a round trip."""
        for _ in range(MAX_TURNS):
            if self._client is None or not self._client.pending_data_size:
                return
            await asyncio.sleep(0)

    async def get(self, subject: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """One question to the server's API, and its answer."""
        assert self._client is not None, "open() comes first"
        try:
            reply = await self._client.request(subject, json.dumps(request).encode(), timeout=ANSWER_SECONDS)
        except NoRespondersError:
            raise ServiceUnavailableError from None
        found: dict[str, Any] = json.loads(reply.data)
        if "error" in found:
            APIError.from_error(found["error"])  # it raises
        return found

    async def listen(self, queue: asyncio.Queue[Msg | None]) -> str:
        """An inbox: what is sent to it, and below it, comes into the queue, and None when the connection is lost."""
        assert self._client is not None, "open() comes first"
        inbox = self._client.new_inbox()
        self._listeners = [queue]

        async def came(message: Msg) -> None:
            queue.put_nowait(message)

        await self._client.subscribe(f"{inbox}.*", cb=came, pending_msgs_limit=0, pending_bytes_limit=0)
        return inbox

    async def close(self, seconds: float) -> None:
        """Hang up; what was asked and not answered fails."""
        client, self._js = self._client, None
        if client is None:
            return
        self._lose(client)
        self._client, self._listeners = None, []
        # Whatever waits in the socket's buffer must not come out later; the client itself would wait for that.
        writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                await client.close()


def read_stored(message: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
    """Headers, names in lower case, and body of a message as the server's API tells it."""
    try:
        lines = base64.b64decode(message.get("hdrs") or "").split(b"\r\n")[1:]
        body = base64.b64decode(message.get("data") or "")
    except (binascii.Error, ValueError):
        raise ConnectionError("NATS answered with something that is no message") from None
    pairs = (line.decode("utf-8", "replace").partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}, body
