"""Fetching a day's table A from the National Bank of Poland (C1)."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import date
from decimal import Decimal
from types import TracebackType
from typing import Any, Self

import httpx2

from apps.currencies.model import RateTable, read_table
from duly.auth.setup import find_api_url
from duly.errors import DulyError
from duly.settings import Settings

NBP = "https://api.nbp.pl"
STAND_IN = "/sandbox/nbp"  # served in development, apps/sandbox/nbp.py
TRY_SECONDS = 20.0
LARGEST_BODY_BYTES = 262_144  # of the bank's own it has 2,500
NO_DATA = "404 NotFound"
HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity"}  # what is not packed cannot burst


class RatesFailed(DulyError):
    """The bank did not answer, or not in a way that could be understood."""


class Nbp:
    """The bank's web API."""

    def __init__(self, url: str, *, try_seconds: float = TRY_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._try_seconds = try_seconds
        self._client = httpx2.AsyncClient(timeout=try_seconds, trust_env=False, follow_redirects=False, headers=HEADERS)

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """At NBP_URL; without it, the bank itself, and in development our stand-in for it."""
        known = f"{find_api_url(settings)}{STAND_IN}" if settings.env == "development" else NBP
        return cls(os.environ.get("NBP_URL") or known)

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hang up."""
        await self._client.aclose()

    async def fetch(self, day: date) -> RateTable | None:
        """The day's table, or None when the bank says that it has none; whatever else it says is an error."""
        url = f"{self.url}/api/exchangerates/tables/A/{day.isoformat()}/"
        try:
            async with (
                asyncio.timeout(self._try_seconds),
                self._client.stream("GET", url, params={"format": "json"}) as response,
            ):
                body = await _read(response)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ExceptionGroup) as error:
            # A timeout of our own is an OSError; a port that cannot be one comes as a group.
            raise RatesFailed(f"the bank cannot be reached ({type(error).__name__}): is NBP_URL right?") from None
        if response.status_code == 404 and _says_no_data(response, body):
            return None
        if response.status_code != 200:
            raise RatesFailed(f"the bank answered {response.status_code}")
        return read_table(parse(body), day)


async def _read(response: httpx2.Response) -> bytes:
    """The body, within bounds, as it came over the wire."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise RatesFailed("the bank's answer is packed, although it was asked not to be")
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > LARGEST_BODY_BYTES:
            raise RatesFailed(f"the bank's answer has more than {LARGEST_BODY_BYTES} bytes")
    return bytes(body)


def parse(body: bytes) -> Any:
    """JSON with exact decimals, each member once, and no NaN."""
    try:
        return json.loads(
            body.decode("utf-8-sig"), object_pairs_hook=_unique, parse_float=Decimal, parse_constant=_refuse
        )
    except (ValueError, ArithmeticError, RecursionError):  # an exponent may be too large even for a decimal
        raise RatesFailed("the bank's answer is not JSON") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a member occurs twice")
    return made


def _refuse(_constant: str) -> None:
    raise ValueError("not a number of JSON")


def _says_no_data(response: httpx2.Response, body: bytes) -> bool:
    """In the bank's own words; the page of somebody who does not know the address means something else."""
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return kind == "text/plain" and body.decode("utf-8", "replace").lstrip("\ufeff").startswith(NO_DATA)
