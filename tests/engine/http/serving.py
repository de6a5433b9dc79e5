"""A real HTTP server in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from fastapi import FastAPI

from duly.runtime.supervisor import create_server
from duly.settings import Settings


def listen() -> socket.socket:
    """A socket on a free port; its protocol is named, or asyncio sets no TCP_NODELAY and each answer takes 40 ms."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    return listener


@asynccontextmanager
async def served(api: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the api, over a real socket."""
    listener = listen()
    server = create_server(api, Settings(shutdown_grace_seconds=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx2.AsyncClient(base_url=base, timeout=10) as client:
            yield client
    finally:
        server.should_exit = True
        await task
