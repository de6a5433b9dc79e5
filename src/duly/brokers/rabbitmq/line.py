"""The line to RabbitMQ: its address, one connection, and what its client raises turned into what we expect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import (
    CONNECTION_EXCEPTIONS,
    AuthenticationError,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from aiormq.exceptions import ChannelClosed

from duly.errors import Refused
from duly.messages import check_name

EXCHANGE = "duly.events"
ANSWER_SECONDS = 10.0
QUESTION_SECONDS = 25.0  # to make a queue on several nodes takes its time
CLOSE_SECONDS = 2.0
HEARTBEAT_SECONDS = 10  # a server that is frozen is noticed after three of them
OURS = {"exchange", "queue", "unroutable"}
THE_CLIENTS = {"auth", "cadata", "cafile", "capath", "certfile", "heartbeat", "keyfile", "no_verify_ssl"}


@dataclass(frozen=True)
class Address:
    """Where RabbitMQ is, and how it is used; only ``shown`` and ``user`` are for people."""

    url: str = field(repr=False)
    shown: str
    user: str
    exchange: str = EXCHANGE
    quorum: bool = False
    drops_unroutable: bool = False


def read_address(url: str) -> Address:
    """The address in an URL; Refused says what is wrong, and never repeats it: it holds a password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (5671 if parts.scheme == "amqps" else 5672)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise Refused("the address of RabbitMQ cannot be read; it looks like amqp://user:password@host:5672/") from None
    if parts.scheme not in ("amqp", "amqps") or not host:
        raise Refused("the address of RabbitMQ looks like amqp://user:password@host:5672/ (or amqps://)")
    if unknown := sorted(options.keys() - OURS - THE_CLIENTS):
        raise Refused(f"RabbitMQ has no option {unknown[0]!r}; there are: {', '.join(sorted(OURS | THE_CLIENTS))}")
    kind = _choice(options, "queue", ("classic", "quorum"))
    unroutable = _choice(options, "unroutable", ("wait", "drop"))
    passed_on = {"heartbeat": str(HEARTBEAT_SECONDS)} | {key: options[key] for key in THE_CLIENTS & options.keys()}
    vhost = unquote(parts.path[1:]) or "/"
    return Address(
        url=parts._replace(query=urlencode(passed_on), fragment="").geturl(),
        shown=f"{host}:{port}" + ("" if vhost == "/" else f" (vhost {vhost})"),
        user=unquote(parts.username or "guest"),
        exchange=check_name("exchange", options.get("exchange", EXCHANGE)),
        quorum=kind == "quorum",
        drops_unroutable=unroutable == "drop",
    )


def _choice(options: dict[str, str], name: str, known: tuple[str, str]) -> str:
    chosen = options.get(name, known[0])
    if chosen not in known:
        raise Refused(f"RabbitMQ's option {name} is {known[0]} or {known[1]}")
    return chosen


class Rejected(ConnectionError):
    """RabbitMQ answers, and says no: a start-up check refuses, and what runs waits until somebody mends it."""


class Line:
    """One connection, made when it is needed and again when it was lost; nothing is remembered over a loss."""

    def __init__(self, address: Address, purpose: str) -> None:
        self.address = address
        self.number = 0  # grows with each connection
        self._url = f"{address.url}&{urlencode({'name': f'duly {purpose}'})}"
        self._connection: AbstractConnection | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> AbstractConnection:
        """The connection; Rejected, another OSError or TimeoutError when there can be none."""
        async with self._turn:
            if self._connection is not None and self._connection.connected.is_set():
                return self._connection
            await self.drop()
            self._connection = await self._connect()
            self.number += 1
            return self._connection

    async def _connect(self) -> AbstractConnection:
        at = self.address
        async with asking(at):
            try:
                return await aio_pika.connect(self._url)
            except (ProbableAuthenticationError, AuthenticationError):
                raise Rejected(
                    f"RabbitMQ at {at.shown} does not let the user {at.user!r} in: the name or the password is wrong"
                ) from None
            except InvalidFrameError:  # it closes instead of opening
                raise Rejected(
                    f"RabbitMQ at {at.shown} does not let the user {at.user!r} use this vhost, or there is none"
                ) from None

    async def drop(self) -> None:
        """Hang up, in a few seconds at most."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*CONNECTION_EXCEPTIONS):  # whatever is wrong with it, it is gone now
                async with asking(self.address, seconds=CLOSE_SECONDS):
                    await connection.close()

    async def channel(self, *, confirms: bool = False) -> AbstractChannel:
        """A new channel, whose end is the caller's to see to: whatever RabbitMQ refuses closes it."""
        connection = await self.open()
        async with asking(self.address):
            channel = connection.channel(publisher_confirms=confirms)
            await channel.initialize()
            return channel

    @contextlib.asynccontextmanager
    async def brief_channel(self) -> AsyncIterator[AbstractChannel]:
        """A channel for one question."""
        channel = await self.channel()
        try:
            async with asking(self.address, seconds=QUESTION_SECONDS):
                yield channel
        finally:
            await self.close_channel(channel)

    async def close_channel(self, channel: AbstractChannel) -> None:
        """Close it, so that what it was given and did not acknowledge goes back; hang up if even that fails."""
        if channel.is_closed:
            return
        try:
            async with asking(self.address, seconds=CLOSE_SECONDS):
                await channel.close()
        except CONNECTION_EXCEPTIONS:
            await self.drop()

    async def is_blocked(self, *, wait_seconds: float = 0.05) -> bool:
        """Whether RabbitMQ has stopped reading what we publish (an alarm of memory or disk), after waiting so long."""
        connection = self._connection
        if connection is None or connection.transport is None:
            return False
        try:
            async with asyncio.timeout(wait_seconds):
                await connection.transport.ready()
        except TimeoutError:
            return True
        return False


@contextlib.asynccontextmanager
async def asking(address: Address, *, seconds: float = ANSWER_SECONDS) -> AsyncIterator[None]:
    """A question within a bound: OSError or TimeoutError when there is no answer; ``ChannelClosed`` is one, a no."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except asyncio.CancelledError:
        if was_cancelled():
            raise
        raise ConnectionResetError(f"the connection to RabbitMQ at {address.shown} was lost") from None
    except TimeoutError:
        raise TimeoutError(f"RabbitMQ at {address.shown} did not answer in {seconds:g} seconds") from None
    except (ChannelClosed, Rejected):
        raise
    except CONNECTION_EXCEPTIONS as error:
        raise ConnectionError(f"RabbitMQ at {address.shown} cannot be reached: {plain(error)}") from None


def was_cancelled() -> bool:
    """Whether it is us who are cancelled: the client also ends what waits for a lost connection by CancelledError."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def plain(error: BaseException) -> str:
    """What a client's error says, on one line; no error of it holds the address."""
    said = " ".join(" ".join(str(part) for part in error.args if part is not None).split())
    return f"{type(error).__name__}: {said}"[:500]
