"""An OpenID provider over real HTTP that can be told to misbehave."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from joserfc.jwk import RSAKey

from tests.engine.auth.forge import claims, rs256, rsa_key
from tests.engine.http.serving import served

Answer = Callable[[], Awaitable[Response]]


class Provider:
    """Keys, a token endpoint, counters of what was asked, and answers to give instead."""

    def __init__(self, issuer: str = "") -> None:
        self.issuer = issuer
        self.keys: list[RSAKey] = [rsa_key("first")]
        self.more: list[Any] = []
        self.fetches = 0
        self.strayed = 0
        self.discoveries = 0
        self.grants: list[dict[str, str]] = []
        self.lifetime: object = 300
        self.instead: dict[str, Answer] = {}
        self.claimed_issuer: str | None = None
        self.claimed_jwks_uri: str | None = None
        self.released = asyncio.Event()
        self.asked = asyncio.Event()

    def sign(self, **changes: Any) -> str:
        """A token of this provider's newest key."""
        return rs256(claims(**{"iss": self.issuer, **changes}), self.keys[-1])

    def document(self) -> dict[str, Any]:
        return {"keys": [*(key.as_dict(private=False) for key in self.keys), *self.more]}

    async def hang(self) -> Response:
        """No answer until the test ends."""
        await self.released.wait()
        return Response(status_code=500)

    async def drip(self) -> Response:
        """An answer that never ends, and never pauses for long."""

        async def drops() -> AsyncIterator[bytes]:
            while not self.released.is_set():
                yield b" "
                await asyncio.sleep(0.01)

        return StreamingResponse(drops(), media_type="application/json")

    async def held(self) -> Response:
        """The right answer, once it is released."""
        await self.released.wait()
        return JSONResponse(self.document())


def fixed(content: bytes, status: int = 200, **headers: str) -> Answer:
    """This answer, whoever asks."""

    async def answer() -> Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Response(content, status_code=status, headers=named, media_type="application/json")

    return answer


class Reception:
    """Where the server finds the provider of the test that runs now."""

    def __init__(self) -> None:
        self.provider = Provider()


@asynccontextmanager
async def providing() -> AsyncIterator[Reception]:
    """A provider on a port of its own; each test puts a new one there."""
    reception = Reception()
    async with served(_create_provider_api(reception)) as client:
        reception.provider.issuer = f"{client.base_url}".rstrip("/") + "/realm"
        yield reception


def _create_provider_api(reception: Reception) -> FastAPI:
    api = FastAPI()
    numbers = itertools.count(1)

    @api.get("/realm/.well-known/openid-configuration")
    async def configuration() -> Response:
        provider = reception.provider
        provider.discoveries += 1
        if "discovery" in provider.instead:
            return await provider.instead["discovery"]()
        return JSONResponse(
            {
                "issuer": provider.claimed_issuer or provider.issuer,
                "jwks_uri": provider.claimed_jwks_uri or f"{provider.issuer}/keys",
                "token_endpoint": f"{provider.issuer}/token",
            }
        )

    @api.get("/realm/keys")
    async def keys() -> Response:
        provider = reception.provider
        provider.fetches += 1
        provider.asked.set()
        if "keys" in provider.instead:
            return await provider.instead["keys"]()
        return JSONResponse(provider.document())

    @api.get("/realm/elsewhere")
    async def elsewhere() -> Response:
        """Where nobody should be led: the keys of an attacker."""
        reception.provider.strayed += 1
        return JSONResponse({"keys": [rsa_key("attacker").as_dict(private=False)]})

    @api.post("/realm/token")
    async def token(request: Request) -> Response:
        provider = reception.provider
        form = dict(parse_qsl((await request.body()).decode()))
        basic = base64.b64decode(request.headers.get("authorization", "").removeprefix("Basic ")).decode()
        provider.grants.append({**form, "basic": basic})
        provider.asked.set()
        if "token" in provider.instead:
            return await provider.instead["token"]()
        granted = {"access_token": f"token-{next(numbers)}", "token_type": "Bearer", "expires_in": provider.lifetime}
        return JSONResponse(granted)

    return api
