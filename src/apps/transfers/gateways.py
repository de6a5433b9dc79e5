"""Calling the API to expire transfers, as the hourly task does: over HTTP, with a token of the service's own (T6)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx2
import structlog

from duly.auth.client import ServiceAuth, ServiceTokens
from duly.auth.setup import create_service_tokens, find_api_url
from duly.errors import DulyError, Unavailable
from duly.ids import uuid7
from duly.settings import Settings
from duly.telemetry import current_origin

log = structlog.get_logger("apps.transfers")
EXPIRE_SCOPE = "internal:transfers.expire"
EXPIRE_PATH = "/internal/v1/transfers/expire-pending"
MORE_HEADER = "Duly-More"  # "true" when one call could not expire everything
WAITS_SECONDS = (0.5, 1.0, 2.0)  # before each retry
LONGEST_RETRY_AFTER_SECONDS = 10.0
TRY_SECONDS = 40.0  # longer than the server gives a statement, so that its answer is the one that counts
TRANSIENT = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ProxyError)


class ExpiryRefused(DulyError):
    """The API does not want this call, and will not want it a second time."""


class ExpiryFailed(DulyError):
    """The API did not answer, however often it was asked."""


@dataclass(frozen=True)
class Expired:
    """What one call came to."""

    count: int
    has_more: bool


class _Transient(Exception):
    def __init__(self, reason: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class ExpiryClient:
    """Asks for one batch at a time; what may pass is tried again with the same key, so that it happens once."""

    def __init__(
        self,
        api_url: str,
        tokens: ServiceTokens,
        *,
        waits_seconds: Sequence[float] = WAITS_SECONDS,
        try_seconds: float = TRY_SECONDS,
    ) -> None:
        self._url = f"{api_url}{EXPIRE_PATH}"
        self._tokens = tokens
        self._waits_seconds = waits_seconds
        self._try_seconds = try_seconds
        self._client = httpx2.AsyncClient(
            auth=ServiceAuth(tokens), timeout=try_seconds, trust_env=False, follow_redirects=False
        )

    @classmethod
    def open(cls, settings: Settings, *, waits_seconds: Sequence[float] = WAITS_SECONDS) -> Self:
        """The client that the settings describe."""
        tokens = create_service_tokens(settings, scope=EXPIRE_SCOPE)
        return cls(find_api_url(settings), tokens, waits_seconds=waits_seconds)

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hang up."""
        await self._client.aclose()
        await self._tokens.close()

    async def expire(self) -> Expired:
        """One batch; ExpiryRefused when it makes no sense to ask again, ExpiryFailed when that was done enough."""
        key = str(uuid7())
        for retry, wait_seconds in enumerate(self._waits_seconds, 1):
            try:
                return await self._try(key)
            except _Transient as failure:
                pause = pause_seconds(wait_seconds, asked_seconds=failure.retry_after_seconds)
                log.warning("transfers_expire_retried", retry=retry, reason=str(failure), wait_seconds=round(pause, 3))
                await asyncio.sleep(pause)
        try:
            return await self._try(key)
        except _Transient as failure:
            tries = len(self._waits_seconds) + 1
            raise ExpiryFailed(f"gave up after {tries} tries: {failure}") from None

    async def _try(self, key: str) -> Expired:
        try:
            async with asyncio.timeout(self._try_seconds):
                response = await self._client.post(self._url, json={}, headers=_headers(key))
        except (*TRANSIENT, Unavailable, OSError) as error:  # a timeout of our own is an OSError
            raise _Transient(_describe(error)) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, DulyError) as error:
            raise ExpiryRefused(_describe(error)) from None
        if response.status_code >= 500:
            raise _Transient(f"the API answered {response.status_code}", _retry_after_seconds(response))
        return _read(response)


def pause_seconds(wait_seconds: float, *, asked_seconds: float = 0.0) -> float:
    """Our own wait, and up to half as much again so that many do not come back at once; or what the API asked for."""
    own = wait_seconds * random.uniform(1.0, 1.5)  # noqa: S311 - jitter, not a secret
    return max(own, min(asked_seconds, LONGEST_RETRY_AFTER_SECONDS))


def _headers(key: str) -> dict[str, str]:
    """The ids that tie the call to whatever caused it."""
    origin = current_origin()
    headers = {"Idempotency-Key": key, "X-Correlation-Id": str(origin.correlation_id or uuid7())}
    return headers | {"traceparent": origin.traceparent} if origin.traceparent else headers


def _read(response: httpx2.Response) -> Expired:
    if response.status_code != 200:
        raise ExpiryRefused(f"the API answered {response.status_code}")
    try:
        count = response.json()["expiredCount"]
    except (ValueError, KeyError, TypeError):
        count = None
    if isinstance(count, bool) or not isinstance(count, int):
        raise ExpiryRefused("the API's answer does not say how many: is DULY_API_URL the API's address?")
    return Expired(count, has_more=response.headers.get(MORE_HEADER) == "true")


def _retry_after_seconds(response: httpx2.Response) -> float:
    """Whole seconds; a date is not read, our own waits do for it."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0.0


def _describe(error: BaseException) -> str:
    """Our own sentences; of others only the kind, since theirs may quote an address or a header."""
    return str(error) if isinstance(error, DulyError) else f"the API cannot be reached ({type(error).__name__})"
