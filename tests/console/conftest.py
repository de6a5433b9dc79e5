"""A console on a real socket, and people who sign in to it as a browser does."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx2
import pytest_asyncio
from fastapi import FastAPI

from duly.app import Duly
from duly.auth.issuer import Issuer
from duly.cli.process import build_api
from duly.console.app import Console
from duly.db import Database
from duly.runtime.supervisor import create_server
from duly.settings import Settings
from tests.engine.http.serving import listen

HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')
CSRF = re.compile(r'<meta name="csrf-token" content="([0-9a-f]{64})">')


@dataclass
class Site:
    """The server, and who looks at it."""

    url: str
    fastapi: FastAPI
    issuer: Issuer
    _open: contextlib.AsyncExitStack

    @property
    def console(self) -> Console:
        """What the server shows."""
        console: Console = self.fastapi.state.console
        return console

    async def browser(self) -> httpx2.AsyncClient:
        """A browser that follows no redirect by itself, so that each can be looked at."""
        return await self._open.enter_async_context(httpx2.AsyncClient(base_url=self.url, timeout=30))

    async def signed_in(self, person: str) -> httpx2.AsyncClient:
        """A browser in which somebody has signed in."""
        browser = await self.browser()
        answer = await sign_in(browser, person)
        assert answer.status_code == 303, answer.text
        return browser

    def headers(self, *roles: str, scope: str = "console") -> dict[str, str]:
        """A token, for the API."""
        return {"Authorization": f"Bearer {self.issuer.sign('tess', scopes=[scope], roles=roles)}"}


async def ask(browser: httpx2.AsyncClient, path: str = "/console") -> tuple[str, dict[str, str]]:
    """Go as far as the provider's page: where its form goes, and what is hidden in it."""
    begun = await browser.get(f"/console/sign-in?return_to={path}")
    assert begun.status_code == 302
    page = await browser.get(begun.headers["location"])
    assert page.status_code == 200
    fields = {name: unescape(value) for name, value in HIDDEN.findall(page.text)}
    return urljoin(begun.headers["location"], "authorize"), fields


async def choose(browser: httpx2.AsyncClient, target: str, fields: dict[str, str], person: str) -> str:
    """Choose a person there; the address to which the browser is sent back."""
    chosen = await browser.post(target, data={**fields, "person": person})
    assert chosen.status_code == 303, chosen.text
    return str(chosen.headers["location"])


async def sign_in(browser: httpx2.AsyncClient, person: str, path: str = "/console") -> httpx2.Response:
    """All of it; the answer to coming back."""
    target, fields = await ask(browser, path)
    return await browser.get(await choose(browser, target, fields, person))


async def csrf_of(browser: httpx2.AsyncClient) -> str:
    """The token that this browser's pages carry."""
    found = CSRF.search((await browser.get("/console/processes")).text)
    assert found is not None
    return found[1]


async def post(browser: httpx2.AsyncClient, action: str, **fields: Any) -> httpx2.Response:
    """Send the form of an action, as a page does."""
    token = await csrf_of(browser)
    return await browser.post(f"/console/actions/{action}", data={"csrf": token, "confirmed": "yes", **fields})


@contextlib.asynccontextmanager
async def serving(db: Database, directory: Path, app: Duly | None = None, **options: Any) -> AsyncIterator[Site]:
    """The console as ``duly api`` serves it."""
    listener = listen()
    port = listener.getsockname()[1]
    settings = Settings(data=directory, shutdown_grace_seconds=1, **options)
    db.settings = settings  # as a command opens it
    stop = asyncio.Event()
    api = build_api(db, [], settings, app or Duly(), port=port, stop=stop)
    server = create_server(api, settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with contextlib.AsyncExitStack() as opened:
            issuer = Issuer.open(settings.model_copy(update={"env": "development"}), port=port)
            yield Site(f"http://127.0.0.1:{port}", api, issuer, opened)
    finally:
        stop.set()
        server.should_exit = True
        await task


@pytest_asyncio.fixture
async def site(db: Database, tmp_path: Path) -> AsyncIterator[Site]:
    """One for a test."""
    async with serving(db, tmp_path) as served:
        yield served


@pytest_asyncio.fixture
async def ada(site: Site) -> httpx2.AsyncClient:
    """The browser of an administrator."""
    return await site.signed_in("ada")


@pytest_asyncio.fixture
async def otto(site: Site) -> httpx2.AsyncClient:
    """The browser of an operator."""
    return await site.signed_in("otto")
