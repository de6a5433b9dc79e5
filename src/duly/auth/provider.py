"""Speaking to an OpenID provider: every answer is bounded in time and size, and no redirect is followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from duly.auth.strict_json import parse_object

TIMEOUT_SECONDS = 5.0
ANSWER_LIMIT_BYTES = 262_144
HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity"}  # a small answer must not unpack to a big one
FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, RuntimeError)  # timeouts are OSErrors


class BadAnswer(ValueError):
    """The provider answered with something that cannot be used; the message is safe to log."""


def create_client() -> httpx2.AsyncClient:
    """A client that takes nothing from the environment: no proxy, no .netrc."""
    return httpx2.AsyncClient(
        timeout=TIMEOUT_SECONDS,
        trust_env=False,
        follow_redirects=False,
        limits=httpx2.Limits(max_connections=4, max_keepalive_connections=1),
    )


async def fetch(
    client: httpx2.AsyncClient,
    url: str,
    *,
    form: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """GET, or POST a form; the status and the body. The caller's time for everything together is the only limit."""
    async with client.stream(
        "GET" if form is None else "POST",
        url,
        data=form,
        headers={**HEADERS, **(headers or {})},
        follow_redirects=False,
        timeout=None,
    ) as response:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise BadAnswer("the answer is compressed, which was not asked for")
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > ANSWER_LIMIT_BYTES:
                raise BadAnswer(f"the answer is larger than {ANSWER_LIMIT_BYTES} bytes")
        return response.status_code, bytes(body)


async def fetch_object(client: httpx2.AsyncClient, url: str) -> dict[str, Any]:
    """GET a JSON object; anything but 200 is a failure, also a redirect."""
    status, body = await fetch(client, url)
    if status != 200:
        raise BadAnswer(f"the answer is {status}")
    try:
        return parse_object(body)
    except ValueError:
        raise BadAnswer("the answer is not a JSON object") from None


async def discover(client: httpx2.AsyncClient, issuer: str, name: str) -> str:
    """One endpoint from the provider's configuration (OpenID Connect Discovery 1.0)."""
    found = await fetch_object(client, f"{issuer.removesuffix('/')}/.well-known/openid-configuration")
    if found.get("issuer") != issuer:
        raise BadAnswer("the configuration names another issuer")
    url = found.get(name)
    if not isinstance(url, str) or not _is_as_safe(url, issuer):
        raise BadAnswer(f"the configuration has no usable {name}")
    return url


def _is_as_safe(url: str, issuer: str) -> bool:
    """An https issuer does not send us to http."""
    scheme = urlsplit(url).scheme
    return scheme == "https" or (scheme == "http" and urlsplit(issuer).scheme == "http")


def describe(error: BaseException) -> str:
    """Why a call failed, without anything that came over the wire."""
    return str(error) if isinstance(error, BadAnswer) else type(error).__name__
