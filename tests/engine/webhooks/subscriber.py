"""A subscriber on a real socket: keeps what it is sent, and answers as it is told, well or badly."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """What arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Behave = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def answering(status: int = 200, *, headers: str = "", body: bytes = b"") -> Behave:
    """Always the same answer."""

    async def behave(_request: Request, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        writer.write(head.encode() + body)

    return behave


@dataclass
class Subscriber:
    """Its address, and what came."""

    url: str
    port: int
    behave: Behave = field(default_factory=answering)
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    most_open: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.strip().split("\r\n")
            method, target, _ = first.split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            request = Request(method, target, headers, body)
            self.requests.append(request)
            self.arrived.set()
            await self.behave(request, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            self.open -= 1
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    @property
    def bodies(self) -> list[bytes]:
        return [request.body for request in self.requests]


@contextlib.asynccontextmanager
async def subscriber(
    behave: Behave | None = None, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, port: int = 0
) -> AsyncIterator[Subscriber]:
    """One that listens for the block."""
    made = Subscriber("", 0)
    if behave is not None:
        made.behave = behave
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await made.serve(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, host, port, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    scheme = "https" if tls else "http"
    shown = f"[{host}]" if ":" in host else host
    made.url = f"{scheme}://{shown}:{made.port}/hook"
    try:
        yield made
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
