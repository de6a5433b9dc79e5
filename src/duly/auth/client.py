"""Calling other services: tokens by client credentials (RFC 6749, section 4.4), kept for as long as they last."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote_plus

import httpx2
import structlog
from pydantic import SecretStr

from duly.auth.provider import FAILURES, TIMEOUT_SECONDS, create_client, describe, discover, fetch
from duly.auth.strict_json import parse_object
from duly.clock import monotonic
from duly.errors import DulyError, Unauthenticated, Unavailable

log = structlog.get_logger("duly.service_tokens")
MARGIN_SECONDS, MARGIN_SHARE = 30.0, 0.1  # whichever is less
UNSAID_SECONDS = 60.0  # how long a token is kept when the provider does not say how long it lives
LONGEST_SECONDS = 86_400.0
TOKEN_LIMIT = 16_384
TRY_LATER = frozenset({408, 425, 429})
CODES = frozenset(
    {"invalid_request", "invalid_client", "invalid_grant", "unauthorized_client", "invalid_scope"}
    | {"unsupported_grant_type"}
)  # RFC 6749, section 5.2: of the provider's words only these are repeated


@dataclass(frozen=True)
class _Held:
    token: str = field(repr=False)
    until: float


class ServiceTokens:
    """A service's own access token. The secret is in no repr, log line or error."""

    def __init__(
        self,
        issuer: str,
        client_id: str,
        client_secret: SecretStr | str,
        *,
        scope: str,
        token_url: str | None = None,
        client: httpx2.AsyncClient | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self.issuer, self.client_id, self.scope = issuer, client_id, scope
        self._secret = client_secret if isinstance(client_secret, SecretStr) else SecretStr(client_secret)
        self._token_url = token_url
        self._client = client
        self._owned: httpx2.AsyncClient | None = None
        self._timeout_seconds = timeout_seconds
        self._now = now
        self._held: _Held | None = None
        self._fetching: asyncio.Task[_Held | DulyError] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"ServiceTokens(client_id={self.client_id!r}, scope={self.scope!r})"

    async def token(self) -> str:
        """A token that lasts a little longer; Unavailable or Unauthenticated when there is none to be had."""
        if self._held is not None and self._now() < self._held.until:
            return self._held.token
        if self._closed:
            raise Unavailable("the service's tokens are closed")
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch(), name="duly-service-token")
        fetching = self._fetching
        await asyncio.wait({fetching})  # a caller who leaves does not take the fetch from the others
        if fetching.cancelled():
            raise Unavailable("the service's tokens are closed")
        result = fetching.result()
        if isinstance(result, DulyError):
            raise type(result)(*result.args)  # each caller gets its own, with its own traceback
        return result.token

    def forget(self, token: str) -> None:
        """Fetch a new one next time, if this is still the one in use."""
        if self._held is not None and self._held.token == token:
            self._held = None

    async def close(self) -> None:
        """End a fetch that is under way, and the connections."""
        self._closed = True
        if (fetching := self._fetching) is not None:
            fetching.cancel()
            await asyncio.wait({fetching})
        if self._owned is not None:
            await self._owned.aclose()
            self._owned = None

    async def _fetch(self) -> _Held | DulyError:
        started = self._now()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                status, body = await self._ask()
        except FAILURES as error:
            log.warning("service_token_failed", client_id=self.client_id, reason=describe(error))
            return Unavailable("the identity provider gave no service token: it cannot be reached")
        if status != 200:
            return self._refusal(status, body)
        try:
            self._held = _read_grant(body, started)
        except ValueError as error:
            log.warning("service_token_failed", client_id=self.client_id, reason=str(error))
            return Unavailable(f"the identity provider gave no service token: {error}")
        return self._held

    async def _ask(self) -> tuple[int, bytes]:
        if self._client is None:
            self._owned = self._owned or create_client()
        client = self._client or self._owned
        assert client is not None
        url = self._token_url or await discover(client, self.issuer, "token_endpoint")
        form = {"grant_type": "client_credentials", "scope": self.scope}
        return await fetch(client, url, form=form, headers={"Authorization": self._basic()})

    def _basic(self) -> str:
        pair = f"{quote_plus(self.client_id)}:{quote_plus(self._secret.get_secret_value())}"
        return f"Basic {base64.b64encode(pair.encode()).decode()}"

    def _refusal(self, status: int, body: bytes) -> DulyError:
        code = _error_code(body)
        log.warning("service_token_refused", client_id=self.client_id, status=status, code=code)
        if 400 <= status < 500 and status not in TRY_LATER:
            return Unauthenticated(f"the identity provider refused the client {self.client_id} ({code})")
        return Unavailable(f"the identity provider gave no service token: it answered {status}")


class ServiceAuth(httpx2.Auth):
    """Adds a service token to each request; a 401 gets one more try, with a fresh token."""

    requires_request_body = True  # so that it can be sent twice

    def __init__(self, tokens: ServiceTokens) -> None:
        self._tokens = tokens

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Called by httpx2 for each request of an AsyncClient."""
        await request.aread()
        token = await self._tokens.token()
        request.headers["Authorization"] = f"Bearer {token}"
        response = yield request
        if response.status_code == 401:
            self._tokens.forget(token)
            request.headers["Authorization"] = f"Bearer {await self._tokens.token()}"
            yield request

    def sync_auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Refused: the base class would send the request without a token."""
        raise RuntimeError("ServiceAuth is for httpx2.AsyncClient")


def _read_grant(body: bytes, started: float) -> _Held:
    """The token of a 200 (RFC 6749, section 5.1); its time counts from before it was asked for."""
    try:
        grant = parse_object(body)
    except ValueError:
        raise ValueError("its answer is not a JSON object") from None
    token, kind = grant.get("access_token"), grant.get("token_type")
    if not isinstance(token, str) or not 0 < len(token) <= TOKEN_LIMIT or not _is_visible(token):
        raise ValueError("its answer holds no usable access_token")
    if not isinstance(kind, str) or kind.lower() != "bearer":
        raise ValueError("its answer is not a bearer token")
    lifetime = _lifetime_seconds(grant.get("expires_in"))
    return _Held(token, started + lifetime - min(MARGIN_SECONDS, lifetime * MARGIN_SHARE))


def _lifetime_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return UNSAID_SECONDS
    return min(value, LONGEST_SECONDS)


def _is_visible(token: str) -> bool:
    return token.isascii() and token.isprintable() and " " not in token


def _error_code(body: bytes) -> str:
    try:
        answer: dict[str, Any] = parse_object(body)
    except ValueError:
        return "no reason given"
    code = answer.get("error")
    return code if isinstance(code, str) and code in CODES else "no reason given"
