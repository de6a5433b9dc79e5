"""A bank on a real socket that answers as a test wants, and else as the real one does."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import date

from starlette.types import Receive, Scope, Send

from apps.sandbox.nbp import NO_DATA, is_published, write_table
from duly.runtime.supervisor import create_server
from duly.settings import Settings
from tests.engine.http.serving import listen

JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
MOST_PARTS = 1_000


@dataclass(frozen=True)
class Reply:
    """One answer; an endless one goes on until the client hangs up."""

    status: int = 200
    body: bytes = b""
    kind: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    stall: bool = False
    endless: bool = False


class Bank:
    """What was asked, what is answered next, and how many bytes were sent."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.replies: deque[Reply] = deque()
        self.always: Callable[[date], Reply] = honest
        self.sent_bytes = 0
        self.let_go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        self.asked.append(f"{scope['path']}?{scope['query_string'].decode()}")
        reply = (
            self.replies.popleft() if self.replies else self.always(date.fromisoformat(scope["path"].split("/")[-2]))
        )
        if reply.stall:
            await self.let_go.wait()
        headers = {"content-type": reply.kind, **reply.headers}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": encoded})
        if reply.endless:
            await self._drip(reply.body, receive, send)
        await send({"type": "http.response.body", "body": b"" if reply.endless else reply.body})

    async def _drip(self, part: bytes, receive: Receive, send: Send) -> None:
        """Send until the client hangs up."""

        async def is_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.create_task(is_gone())
        for _ in range(MOST_PARTS):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self.sent_bytes += len(part)
            await asyncio.sleep(0.001)
            if gone.done():
                break
        gone.cancel()


def honest(day: date) -> Reply:
    """As the real one."""
    return table_reply(day) if is_published(day) else Reply(404, NO_DATA.encode(), TEXT)


def table_reply(day: date, *changes: tuple[str, str]) -> Reply:
    """The day's table, with some of its text replaced; what is to be replaced must be there."""
    text = write_table(day)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    return Reply(body=text.encode())


@contextlib.asynccontextmanager
async def serving_bank() -> AsyncIterator[Bank]:
    """One for the length of the block."""
    bank = Bank()
    listener = listen()
    server = create_server(bank, Settings(shutdown_grace_seconds=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    bank.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield bank
    finally:
        bank.let_go.set()
        server.should_exit = True
        await task
