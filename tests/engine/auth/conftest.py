"""A provider, an API that trusts it, and a clock for both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

import httpx2
import pytest
import pytest_asyncio
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from duly.auth.http import Require, require
from duly.auth.jwks import JwksCache
from duly.auth.principals import Principal
from duly.auth.tokens import Verifier
from duly.errors import DulyError
from tests.engine.auth.clock import MovedClock
from tests.engine.auth.forge import NOW
from tests.engine.auth.provider import Provider, Reception, providing
from tests.engine.http.serving import served

Ask = Callable[..., Awaitable[httpx2.Response]]
UNREACHED_SECONDS = 100.0
"""For fetches that are answered: provider, api and callers share an event loop, and a busy machine slows them all."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def reception() -> AsyncIterator[Reception]:
    async with providing() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def provider(reception: Reception) -> AsyncIterator[Provider]:
    """A new one for each test, at the same address."""
    reception.provider = Provider(reception.provider.issuer)
    yield reception.provider
    reception.provider.released.set()


@pytest.fixture
def clock() -> MovedClock:
    """For the cache of keys: seconds since some start."""
    return MovedClock()


@pytest.fixture
def wall() -> MovedClock:
    """For the times in tokens."""
    return MovedClock(NOW + 1)


@pytest_asyncio.fixture(loop_scope="module")
async def jwks(provider: Provider, clock: MovedClock) -> AsyncIterator[JwksCache]:
    made = JwksCache(provider.issuer, now=clock, timeout_seconds=UNREACHED_SECONDS)
    yield made
    await made.close()


@pytest.fixture
def verifier(provider: Provider, jwks: JwksCache, wall: MovedClock) -> Verifier:
    return Verifier(provider.issuer, "duly", jwks, role_clients=["portal"], now=wall)


def create_guarded_api(verifier: Verifier | None) -> FastAPI:
    """Two routes with rights; errors as they are, for a look at their headers."""
    api = FastAPI()
    if verifier is not None:
        api.state.verifier = verifier

    @api.exception_handler(DulyError)
    async def _on_error(_request: Request, error: DulyError) -> Response:
        return JSONResponse({"detail": str(error)}, status_code=error.status, headers=dict(error.headers))

    @api.get("/me")
    async def me(request: Request, caller: Annotated[Principal, Depends(Require("quality"))]) -> dict[str, Any]:
        assert request.state.principal is caller
        return {
            "caller": caller.caller,
            "subject": caller.subject,
            "scopes": sorted(caller.scopes),
            "roles": sorted(caller.roles),
            "client_id": caller.client_id,
        }

    @api.get("/close", dependencies=[require("quality", "QUALITY_MANAGER", "ADMINISTRATOR")])
    async def close() -> dict[str, bool]:
        return {"closed": True}

    return api


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def guarded() -> AsyncIterator[tuple[FastAPI, httpx2.AsyncClient]]:
    api = create_guarded_api(None)
    async with served(api) as made:
        yield api, made


@pytest.fixture
def client(guarded: tuple[FastAPI, httpx2.AsyncClient], verifier: Verifier) -> httpx2.AsyncClient:
    api, made = guarded
    api.state.verifier = verifier
    return made


@pytest.fixture
def ask(client: httpx2.AsyncClient) -> Ask:
    """GET with a token."""

    async def asked(token: str, path: str = "/me") -> httpx2.Response:
        return await client.get(path, headers={b"Authorization": f"Bearer {token}".encode("latin-1")})

    return asked
