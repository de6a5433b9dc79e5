"""A wire between duly and PostgreSQL: counts statements, and breaks at one, before or after it took effect."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qs, urlsplit

Cut = Literal["statement", "reply"]
READY_FOR_QUERY = ord("Z")
HEADER = struct.Struct("!cI")


@dataclass
class Wire:
    """A proxy in front of a server. ``cut_next`` arms it; ``cuts`` counts how often it really broke.

    After a cut, as many new connections are refused as ``refuse_after_cut`` says: an outage, not a hiccup.
    ``sent`` counts what was executed, by its text, whichever driver and protocol sent it; ``most`` how many connections
    of an application were open at once. ``before_cut`` is awaited while the server still knows of nothing.
    """

    dsn: str
    statement: bytes = b"COMMIT"
    cut_next: Cut | None = None
    cuts: int = 0
    refuse_after_cut: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    before_cut: Callable[[], Awaitable[None]] | None = None
    open: Counter[str] = field(default_factory=Counter)
    direct: str = ""  # the server's own address


@contextlib.asynccontextmanager
async def breaking_wire(dsn: str) -> AsyncIterator[Wire]:
    """A wire to the server of this address, which must be one with a socket directory."""
    parts = urlsplit(dsn)
    directory = parse_qs(parts.query)["host"][0]
    open_writers: set[asyncio.StreamWriter] = set()

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if wire.cuts and wire.refuse_after_cut:
            wire.refuse_after_cut -= 1
            to_client.close()
            return
        server, to_server = await asyncio.open_unix_connection(f"{directory}/.s.PGSQL.5432")
        open_writers.update((to_client, to_server))
        broken = asyncio.Event()
        try:
            both = asyncio.gather(
                _forward_client(wire, client, to_server, broken), _forward_server(server, to_client, broken)
            )
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await both
        finally:
            for writer in (to_client, to_server):
                open_writers.discard(writer)
                writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    wire = Wire(f"postgresql://postgres@127.0.0.1:{port}{parts.path}?sslmode=disable", direct=dsn)
    try:
        yield wire
    finally:
        listener.close()
        for writer in open_writers:
            writer.close()


async def _forward_client(
    wire: Wire, client: asyncio.StreamReader, to_server: asyncio.StreamWriter, broken: asyncio.Event
) -> None:
    length = await client.readexactly(4)  # the start-up message has no type
    start_up = await client.readexactly(struct.unpack("!I", length)[0] - 4)
    to_server.write(length + start_up)
    application = _application(start_up)
    wire.open[application] += 1
    wire.most[application] = max(wire.most[application], wire.open[application])
    try:
        await _forward_messages(wire, client, to_server, broken)
    finally:
        wire.open[application] -= 1


def _application(start_up: bytes) -> str:
    words = start_up[4:].split(b"\0")
    return dict(zip(words[::2], words[1::2], strict=False)).get(b"application_name", b"").decode()


async def _forward_messages(
    wire: Wire, client: asyncio.StreamReader, to_server: asyncio.StreamWriter, broken: asyncio.Event
) -> None:
    prepared: dict[bytes, bytes] = {}
    while True:
        header = await client.readexactly(5)
        kind, size = HEADER.unpack(header)
        body = await client.readexactly(size - 4)
        executed = _executed(kind, body, prepared)
        if executed is not None:
            wire.sent[executed.decode()] += 1
            if wire.cut_next is not None and wire.statement in executed:
                cut, wire.cut_next = wire.cut_next, None
                wire.cuts += 1
                if wire.before_cut is not None:
                    await wire.before_cut()
                if cut == "statement":
                    raise ConnectionResetError("the wire broke before the statement arrived")
                broken.set()  # the statement goes through; its answer does not
        to_server.write(header + body)
        await to_server.drain()


def _executed(kind: bytes, body: bytes, prepared: dict[bytes, bytes]) -> bytes | None:
    """The statement that this message begins to execute, if it does: a simple query, or a prepared one being bound."""
    if kind == b"Q":
        return body.rstrip(b"\0")
    if kind == b"P":
        name, statement, _ = body.split(b"\0", 2)
        prepared[name] = statement
    if kind == b"B":
        return prepared.get(body.split(b"\0", 2)[1])
    return None


async def _forward_server(server: asyncio.StreamReader, to_client: asyncio.StreamWriter, broken: asyncio.Event) -> None:
    while True:
        header = await server.readexactly(5)
        kind, size = HEADER.unpack(header)
        message = header + await server.readexactly(size - 4)
        if broken.is_set():
            if kind[0] == READY_FOR_QUERY:  # the server is done with it: only now does the wire break
                raise ConnectionResetError("the wire broke before the answer arrived")
            continue
        to_client.write(message)
        await to_client.drain()
