"""Calling a provider of identity checks: a plug-in has one method, which makes a page for a person, or finds it again.

``HttpProvider`` speaks a small protocol (docs/howto/kyc.md). Another provider is another class with the same method.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import UUID

import httpx2
import structlog

from apps.finance.kyc.model import is_opaque
from duly.auth.setup import find_api_url
from duly.errors import Refused, Unavailable
from duly.settings import Settings
from duly.telemetry import current_origin

log = structlog.get_logger("apps.kyc")
URL_VARIABLE = "KYC_PROVIDER_URL"
TOKEN_VARIABLE = "KYC_PROVIDER_TOKEN"  # noqa: S105 - the variable's name
HOSTS_VARIABLE = "KYC_HOSTED_HOSTS"
CALLBACK_VARIABLE = "KYC_CALLBACK_URL"
HOSTED_VARIABLE = "KYC_HOSTED_URL"
SANDBOX_PATH = "/sandbox/kyc"
CALLBACK_PATH = "/v1/webhooks/kyc"
HOSTED_PATH = "/v1/kyc/start"
KEY_HEADER = "Idempotency-Key"
TRY_SECONDS = 10.0
CONNECT_SECONDS = 5.0
MOST_ANSWER_BYTES = 16_384
LONGEST_URL = 2_000
AT_ONCE = 20
IDLE_SECONDS = 4.0  # less than most servers keep a connection that is not used
_URL = re.compile(r"https?://[!-~]+")
_TOKEN = re.compile(r"[!-~]{1,4096}")


class NoProvider(Unavailable):
    """The provider cannot be asked now; the page can be opened later."""


@dataclass(frozen=True)
class Opening:
    """What a provider is asked for. The session's id is the key: the same one gets the same page, however often."""

    session_id: UUID
    seconds: int
    callback_url: str


@dataclass(frozen=True)
class Opened:
    """Where the person goes, and what the provider calls the session, if that may be kept. The page is not kept."""

    url: str
    reference: str | None


class Provider(Protocol):
    """A plug-in."""

    async def open(self, opening: Opening, settings: Settings) -> Opened:
        """Make the page, or find it again; NoProvider when there is no answer that can be used."""


Providers = Mapping[str, Provider]
"""By name, which is also the last part of the path of its callbacks."""


class HttpProvider:
    """A provider behind a URL. Connections are kept open between calls, for each event loop its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def open(self, opening: Opening, settings: Settings) -> Opened:
        """One request, with the session's id as its key; nothing about a person is in it."""
        url, token = _find_provider_url(settings), _read_token()
        asked = {
            "clientRef": str(opening.session_id),
            "callbackUrl": opening.callback_url,
            "expiresInSeconds": opening.seconds,
        }
        body = await self._call(f"{url}/sessions", asked, _headers(opening, token))
        page, reference = body.get("hostedUrl"), body.get("sessionRef")
        if not isinstance(page, str) or not _is_page(page, url, settings):
            raise self._refuse("unusable_page")
        return Opened(page, str(reference) if is_opaque(reference) else None)

    async def _call(self, url: str, asked: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        """What it said; NoProvider for everything else. Nothing of an answer is ever logged."""
        client = self._open()
        try:
            async with (
                asyncio.timeout(TRY_SECONDS),
                self._slots,
                client.stream("POST", url, json=asked, headers=headers) as response,
            ):
                if not 200 <= response.status_code < 300:
                    raise self._refuse(f"answered_{response.status_code}")
                return await _read(response)
        except (TimeoutError, httpx2.TimeoutException):
            raise self._refuse("timeout") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, ExceptionGroup, OSError):
            raise self._refuse("unreachable") from None
        except ValueError:
            raise self._refuse("unreadable") from None

    def _refuse(self, reason: str) -> NoProvider:
        log.warning("kyc_provider_failed", provider=self.name, reason=reason)
        return NoProvider("the provider of the check does not answer as it should: try again in a minute")

    def _open(self) -> httpx2.AsyncClient:
        """One client for the loop that runs now; a loop that has ended took its connections with it."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx2.Limits(
                max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE, keepalive_expiry=IDLE_SECONDS
            )
            timeout = httpx2.Timeout(TRY_SECONDS, connect=CONNECT_SECONDS)
            self._client = httpx2.AsyncClient(timeout=timeout, limits=limits, trust_env=False, follow_redirects=False)
            self._loop, self._slots = loop, asyncio.Semaphore(AT_ONCE)
        return self._client


def find_callback_url(provider: str, settings: Settings) -> str:
    """Where a provider tells us how a check ended: KYC_CALLBACK_URL, or our own API."""
    base = os.environ.get(CALLBACK_VARIABLE, "") or find_api_url(settings) + CALLBACK_PATH
    return f"{_check_url(base, CALLBACK_VARIABLE, settings)}/{provider}"


def find_hosted_url(settings: Settings) -> str:
    """Where people come to begin: KYC_HOSTED_URL, or our own API."""
    base = os.environ.get(HOSTED_VARIABLE, "") or find_api_url(settings) + HOSTED_PATH
    return _check_url(base, HOSTED_VARIABLE, settings)


def check_addresses(settings: Settings) -> None:
    """Refused for what is set and cannot be meant: people would be sent there with a secret in the address.

    Nothing needs to be set where nobody is checked.
    """
    for variable in (URL_VARIABLE, CALLBACK_VARIABLE, HOSTED_VARIABLE):
        if url := os.environ.get(variable, ""):
            try:
                _check_url(url, variable, settings)
            except NoProvider as wrong:
                raise Refused(str(wrong)) from None


def _find_provider_url(settings: Settings) -> str:
    """KYC_PROVIDER_URL; in development without it the sandbox's provider."""
    if url := os.environ.get(URL_VARIABLE, ""):
        return _check_url(url, URL_VARIABLE, settings)
    if settings.env == "development":
        return find_api_url(settings) + SANDBOX_PATH
    raise NoProvider(f"nobody can be checked: set {URL_VARIABLE} to the address of the provider")


def _check_url(url: str, variable: str, settings: Settings) -> str:
    """An address without a slash at its end; in production https."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_whole = is_whole and not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        is_whole = False
    if not is_whole:
        raise NoProvider(f"nobody can be checked: {variable} is no address")
    if settings.env == "production" and parts.scheme != "https":
        raise NoProvider(f"nobody can be checked: {variable} must be an https address")
    return url.rstrip("/")


def _is_page(page: str, provider_url: str, settings: Settings) -> bool:
    """Whether we may send a person there: an address of the provider's host, or of one that is allowed."""
    if len(page) > LONGEST_URL or not _URL.fullmatch(page):
        return False
    try:
        parts, own = urlsplit(page), urlsplit(provider_url)
        named = parts.hostname, parts.port
    except ValueError:
        return False
    if parts.username or parts.password or (settings.env == "production" and parts.scheme != "https"):
        return False
    allowed = {host.strip().lower() for host in os.environ.get(HOSTS_VARIABLE, "").split(",") if host.strip()}
    return named == (own.hostname, own.port) or (parts.hostname or "") in allowed


def _read_token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and not _TOKEN.fullmatch(token):
        raise NoProvider(f"nobody can be checked: {TOKEN_VARIABLE} cannot be a token")
    return token


def _headers(opening: Opening, token: str) -> dict[str, str]:
    """The key, the token, and the ids that tie the call to whatever caused it; nothing that must be unpacked."""
    origin = current_origin()
    known = {
        "Accept-Encoding": "identity",
        "X-Correlation-Id": origin.correlation_id,
        "traceparent": origin.traceparent,
        KEY_HEADER: opening.session_id,
        "Authorization": f"Bearer {token}" if token else None,
    }
    return {name: str(value) for name, value in known.items() if value}


async def _read(response: httpx2.Response) -> dict[str, Any]:
    """The body, within bounds; ValueError when it is none that can be read."""
    read = bytearray()
    async for piece in response.aiter_raw():
        read += piece
        if len(read) > MOST_ANSWER_BYTES:
            raise ValueError("the answer is too long")
    try:
        body = json.loads(read)
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None
    if not isinstance(body, dict):
        raise ValueError("the answer is no object")
    return body
