"""The applications over real HTTP: a server of their API, and tokens of the development issuer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from fastapi import FastAPI

from apps.wiring import app
from duly.app import Duly
from duly.auth.issuer import Issuer
from duly.cli.process import build_api
from duly.db import Database
from duly.runtime.supervisor import create_server
from duly.settings import Settings
from tests.engine.http.serving import listen


@pytest.fixture(scope="session")
def duly_app() -> Duly:
    """Every database of these tests has the applications' schemas."""
    return app


@dataclass(frozen=True)
class Api:
    """A server on a real socket, a client of it, and the issuer whose tokens it accepts."""

    client: httpx2.AsyncClient
    issuer: Issuer
    url: str
    fastapi: FastAPI

    def headers(self, sub: str, scope: str, *roles: str) -> dict[str, str]:
        """A valid token's header."""
        return {"Authorization": f"Bearer {self.issuer.sign(sub, scopes=scope.split(), roles=roles)}"}


@contextlib.asynccontextmanager
async def serving(db: Database, directory: Path) -> AsyncIterator[Api]:
    """The applications' API, served as ``duly api`` serves it."""
    listener = listen()
    port = listener.getsockname()[1]
    settings = Settings(data=directory, shutdown_grace_seconds=1)
    db.settings = settings  # as a command opens it
    await app.prepare(db)
    served = build_api(db, [], settings, app, port=port)
    server = create_server(served, settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
            yield Api(client, Issuer.open(settings, port=port), url, served)
    finally:
        server.should_exit = True
        await task


@pytest_asyncio.fixture
async def api(db: Database, tmp_path: Path) -> AsyncIterator[Api]:
    """A server for one test."""
    async with serving(db, tmp_path) as served:
        yield served
