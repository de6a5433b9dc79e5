"""A wire that understands PostgreSQL's protocol, for many connections at once; told at run time how to break.

It lives in a thread of its own, so that whatever its owner does blocks nobody's statements.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HEADER = struct.Struct("!cI")
READY = b"Z"
WRITES = re.compile(rb"\b(INSERT|UPDATE|DELETE)\b|duly\.(emit|schedule|cancel)", re.IGNORECASE)
COMMIT, CLAIM, SETTLE = b"COMMIT", b"nextval('duly.lease_tokens')", b"INTO duly.executions"


@dataclass(eq=False)
class Line:
    """One connection: who it is, and what its open transaction has done."""

    application: str
    to_client: asyncio.StreamWriter
    to_server: asyncio.StreamWriter
    prepared: dict[bytes, bytes] = field(default_factory=dict)
    in_transaction: bool = False
    has_written: bool = False
    mute: bool = False  # the statement went through; its answer will not


@dataclass
class Trap:
    """What is to break next: statements that contain ``text``, lost on the way there or on the way back."""

    text: bytes
    way: str  # "there": the statement never arrives; "back": it takes effect and nobody is told
    left: int
    applications: frozenset[str] = frozenset()
    alone: bool = False  # only outside a transaction, where the statement is its own commit
    hits: Counter[str] = field(default_factory=Counter)

    def wants(self, line: Line, statement: bytes) -> bool:
        """Whether this is one: a COMMIT counts only if its transaction wrote."""
        if self.left <= 0 or self.text not in statement:
            return False
        if self.applications and line.application not in self.applications:
            return False
        if self.alone and line.in_transaction:
            return False
        return line.has_written if self.text == COMMIT else True


class Proxy:
    """Listens on loopback, forwards to a server's Unix socket."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self.port = 0
        self.commit_delay_seconds = 0.0
        self.delayed = 0
        self._lines: set[Line] = set()
        self._traps: list[Trap] = []
        self._flowing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="proxy", daemon=True)

    def start(self) -> None:
        """Begin; the port is known afterwards."""
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the proxy did not start")

    def stop(self) -> None:
        """End, with every connection."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    @contextlib.contextmanager
    def trap(self, trap: Trap) -> Iterator[Trap]:
        """Armed for the length of the block; ``hits`` says what it caught, by application."""
        self._traps.append(trap)
        try:
            yield trap
        finally:
            self._traps.remove(trap)

    def cut(self, applications: frozenset[str] = frozenset()) -> Counter[str]:
        """Cut connections now; by application, how many of them were in the middle of a transaction."""
        return asyncio.run_coroutine_threadsafe(self._cut(applications), self._loop).result(5)

    def freeze(self, on: bool) -> int:
        """Half-open: nothing moves any more in either direction, or everything does again; how many are open."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._flowing.clear if on else self._flowing.set)
        return len(self._lines)

    # -- in the thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._flowing.set()
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        await self._cut(frozenset())
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cut(self, applications: frozenset[str]) -> Counter[str]:
        busy: Counter[str] = Counter()
        for line in list(self._lines):
            if not applications or line.application in applications:
                busy[line.application] += line.in_transaction
                _break(line)
        return +busy

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        line = None
        try:
            await self._flowing.wait()
            server, to_server = await asyncio.open_unix_connection(str(self._path))
            size = await client.readexactly(4)
            hello = size + await client.readexactly(struct.unpack("!I", size)[0] - 4)
            to_server.write(hello)
            line = Line(_application(hello), to_client, to_server)
            self._lines.add(line)
            await asyncio.gather(self._from_client(line, client), self._from_server(line, server))
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            to_client.close()
            if line is not None:
                self._lines.discard(line)
                line.to_server.close()

    async def _from_client(self, line: Line, client: asyncio.StreamReader) -> None:
        while True:
            header = await client.readexactly(5)
            kind, size = HEADER.unpack(header)
            body = await client.readexactly(size - 4)
            await self._flowing.wait()
            if (statement := _executed(line, kind, body)) is not None:
                if self._spring(line, statement):
                    raise ConnectionResetError("the statement is lost")
                if statement.startswith(COMMIT) and line.has_written and self.commit_delay_seconds:
                    self.delayed += 1
                    await asyncio.sleep(self.commit_delay_seconds)
                _follow(line, statement)
            line.to_server.write(header + body)
            await line.to_server.drain()

    def _spring(self, line: Line, statement: bytes) -> bool:
        """Whether a trap swallows it; one that swallows the answer mutes the line instead."""
        for trap in self._traps:
            if trap.wants(line, statement):
                trap.left -= 1
                trap.hits[line.application] += 1
                line.mute = trap.way == "back"
                return not line.mute
        return False

    async def _from_server(self, line: Line, server: asyncio.StreamReader) -> None:
        while True:
            header = await server.readexactly(5)
            kind, size = HEADER.unpack(header)
            message = header + await server.readexactly(size - 4)
            await self._flowing.wait()
            if line.mute:
                if kind == READY:  # the server is done with it: only now does the wire break
                    raise ConnectionResetError("the answer is lost")
                continue
            line.to_client.write(message)
            await line.to_client.drain()


def _break(line: Line) -> None:
    for writer in (line.to_client, line.to_server):
        writer.transport.abort()


def _application(hello: bytes) -> str:
    """The application_name of a start-up message."""
    words = hello[8:].split(b"\0")
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    return pairs.get(b"application_name", b"").decode()


def _executed(line: Line, kind: bytes, body: bytes) -> bytes | None:
    """The statement that this message begins to execute, if it does."""
    if kind == b"Q":
        return body.rstrip(b"\0")
    if kind == b"P":
        name, statement, _ = body.split(b"\0", 2)
        line.prepared[name] = statement
    if kind == b"B":
        return line.prepared.get(body.split(b"\0", 2)[1])
    return None


def _follow(line: Line, statement: bytes) -> None:
    word = statement.lstrip()[:8].upper()
    if word.startswith(b"BEGIN"):
        line.in_transaction, line.has_written = True, False
    elif word.startswith((b"COMMIT", b"ROLLBACK")) and not statement.upper().startswith(b"ROLLBACK TO"):
        line.in_transaction = False
    elif WRITES.search(statement):
        line.has_written = True
