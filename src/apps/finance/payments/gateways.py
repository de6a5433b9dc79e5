"""Calling a bank: a plug-in has three methods, and says of each answer what is certain.

``HttpBank`` speaks a small protocol (docs/howto/payments.md). Another bank is another class with the same methods.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx2
from pydantic import SecretStr

from apps.finance.payments.model import Heard, Order, Payment, Report, Source, is_reference
from duly.auth.setup import find_api_url
from duly.errors import Refused
from duly.settings import Settings
from duly.telemetry import current_origin

URL_VARIABLE = "PAYMENTS_BANK_URL"
CALLBACK_VARIABLE = "PAYMENTS_CALLBACK_URL"
TIMEOUT_VARIABLE = "PAYMENTS_BANK_TIMEOUT_SECONDS"
TOKEN_VARIABLE = "PAYMENTS_BANK_TOKEN"  # noqa: S105 - the variable's name
SANDBOX_PATH = "/sandbox/bank"
CALLBACK_PATH = "/v1/webhooks/payments"
KEY_HEADER = "Idempotency-Key"
DEFAULT_TRY_SECONDS = 15.0
CONNECT_SECONDS = 5.0
MOST_ANSWER_BYTES = 65_536
CONNECTIONS = 20
IDLE_SECONDS = 4.0  # less than most servers keep a connection that is not used
NOT_TAKEN = frozenset({400, 401, 403, 404, 405, 410, 413, 415, 429, 503})
DECLINED = frozenset({402, 422})
NO_SUCH_PAYMENT = "payment_not_found"
STATUSES = {
    "PENDING": Report.PENDING, "ACCEPTED": Report.PENDING, "SETTLED": Report.SETTLED, "COMPLETED": Report.SETTLED,
    "DECLINED": Report.DECLINED, "FAILED": Report.DECLINED,
}  # fmt: skip
UNREACHABLE, UNREADABLE = "unreachable", "unreadable"
NEVER_LEFT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
_REASON = re.compile(r"[A-Za-z0-9_ .-]{1,60}")
_AMOUNT = re.compile(r"[0-9]{1,15}(\.[0-9]{1,6})?", re.ASCII)
_TOKEN = re.compile(r"[!-~]{1,4096}")


class NoBank(Refused):
    """Nobody has said where payments go."""


@dataclass(frozen=True)
class Line:
    """How a bank is reached, and how it reaches us."""

    url: str
    callback_url: str
    seconds: float
    token: SecretStr | None


class Bank(Protocol):
    """A plug-in. None of its calls raises for what a bank or a network may do: that is what the answer says."""

    def check(self) -> None:
        """NoBank, if it cannot be called at all."""

    async def send(self, order: Order) -> Heard:
        """PENDING, SETTLED, DECLINED; NOT_TAKEN only when that is certain; otherwise UNCLEAR."""

    async def ask(self, payment: Payment) -> Heard:
        """PENDING, SETTLED, DECLINED; NOT_KNOWN only when the bank itself says so; otherwise UNCLEAR."""


Banks = Mapping[str, Bank]
"""By the provider's name, which is also the last part of the path of its callbacks."""


class HttpBank:
    """A bank behind a URL. Connections are kept open between calls, for each event loop its own."""

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self) -> None:
        """Whether everything is set that a call needs; before a try is counted."""
        read_line(self.provider)

    async def send(self, order: Order) -> Heard:
        """One request, never repeated here: whether it may be is decided elsewhere.

        That it was not taken, or declined, must be said in the bank's own words: a proxy's page may hide a payment.
        """
        status, body, problem = await self._call("POST", "/payments", order)
        heard = replace(_read_answer(Source.SEND, status, body, problem), attempt=order.attempt)
        if heard.report is not Report.UNCLEAR:
            return heard
        is_said = isinstance(body.get("code"), str)
        if problem == UNREACHABLE or (is_said and status in NOT_TAKEN):
            return replace(heard, report=Report.NOT_TAKEN)
        return replace(heard, report=Report.DECLINED) if is_said and status in DECLINED else heard

    async def ask(self, payment: Payment) -> Heard:
        """What became of it; that there is no such payment must be said in the bank's own words."""
        status, body, problem = await self._call("GET", f"/payments/{payment.bank_key}", None)
        heard = replace(_read_answer(Source.ASK, status, body, problem), version=payment.version)
        if status == 404 and body.get("code") == NO_SUCH_PAYMENT:
            return replace(heard, report=Report.NOT_KNOWN, detail=NO_SUCH_PAYMENT)
        return heard

    async def _call(self, method: str, path: str, order: Order | None) -> tuple[int, dict[str, Any], str | None]:
        """Status, JSON and what went wrong; an answer that is not JSON, or too long, is unreadable."""
        line = read_line(self.provider)
        try:
            async with asyncio.timeout(line.seconds):
                async with self._open().stream(
                    method, line.url + path, json=_body(order, line), headers=_headers(order, line)
                ) as response:
                    return response.status_code, await _read(response), None
        except NEVER_LEFT:
            return 0, {}, UNREACHABLE
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, ExceptionGroup):
            return 0, {}, UNREACHABLE  # a port that cannot be one comes as a group
        except (TimeoutError, httpx2.TimeoutException):
            return 0, {}, "timeout"
        except (httpx2.HTTPError, OSError):
            return 0, {}, "connection_lost"
        except ValueError:
            return 0, {}, UNREADABLE

    def _open(self) -> httpx2.AsyncClient:
        """One client for the loop that runs now; a loop that has ended took its connections with it."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx2.Limits(
                max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS
            )
            timeout = httpx2.Timeout(DEFAULT_TRY_SECONDS * 4, connect=CONNECT_SECONDS)
            self._client = httpx2.AsyncClient(
                timeout=timeout, limits=limits, trust_env=False, follow_redirects=False
            )  # fmt: skip
            self._loop = loop
        return self._client


def read_line(provider: str) -> Line:
    """All that a call needs, from the environment; NoBank says what is missing, or wrong."""
    settings = Settings()
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and not _TOKEN.fullmatch(token):
        raise NoBank(f"no payment is sent: {TOKEN_VARIABLE} cannot be a token")
    return Line(
        _find_bank_url(settings),
        _find_callback_url(provider, settings),
        find_try_seconds(),
        SecretStr(token) if token else None,
    )


def _find_bank_url(settings: Settings) -> str:
    """PAYMENTS_BANK_URL; in development without it the sandbox's bank."""
    if url := os.environ.get(URL_VARIABLE, ""):
        return _check_url(url, URL_VARIABLE, settings)
    if settings.env == "development":
        return find_api_url(settings) + SANDBOX_PATH
    raise NoBank(f"no payment is sent: set {URL_VARIABLE} to the address of the bank")


def _find_callback_url(provider: str, settings: Settings) -> str:
    """Where the bank tells us what became of a payment: PAYMENTS_CALLBACK_URL, or our own API."""
    base = os.environ.get(CALLBACK_VARIABLE, "") or find_api_url(settings) + CALLBACK_PATH
    return f"{_check_url(base, CALLBACK_VARIABLE, settings)}/{provider}"


def _check_url(url: str, variable: str, settings: Settings) -> str:
    """An address without a slash at its end; in production https, and where the bank calls, one that it can reach."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_whole = is_whole and not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        is_whole = False
    if not is_whole:
        raise NoBank(f"no payment is sent: {variable} is no address")
    if settings.env == "production" and parts.scheme != "https":
        raise NoBank(f"no payment is sent: {variable} must be an https address")
    if settings.env == "production" and variable == CALLBACK_VARIABLE and _is_loopback(parts.hostname or ""):
        raise NoBank(f"no payment is sent: {variable} must be an address that the bank can reach")
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def find_try_seconds() -> float:
    """PAYMENTS_BANK_TIMEOUT_SECONDS, within bounds."""
    given = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(given) if given else DEFAULT_TRY_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 30.0:
        raise NoBank(f"no payment is sent: {TIMEOUT_VARIABLE} is no number of seconds from 0.05 to 30")
    return seconds


def _body(order: Order | None, line: Line) -> dict[str, Any] | None:
    if order is None:
        return None
    return {
        "reference": str(order.key),
        "from": str(order.from_account_id),
        "to": str(order.to_account_id),
        "amount": order.amount,
        "currency": order.currency,
        "validUntil": order.valid_until.isoformat(),
        "callbackUrl": line.callback_url,
    }


def _headers(order: Order | None, line: Line) -> dict[str, str]:
    """The key, the token, and the ids that tie the call to whatever caused it; nothing that must be unpacked."""
    origin = current_origin()
    known = {
        "Accept-Encoding": "identity",
        "X-Correlation-Id": origin.correlation_id,
        "traceparent": origin.traceparent,
        KEY_HEADER: order.key if order is not None else None,
        "Authorization": f"Bearer {line.token.get_secret_value()}" if line.token is not None else None,
    }
    return {name: str(value) for name, value in known.items() if value}


async def _read(response: httpx2.Response) -> dict[str, Any]:
    """The body, within bounds; ValueError when it is none that can be read. What is refused may have any body."""
    read = bytearray()
    async for piece in response.aiter_raw():
        read += piece
        if len(read) > MOST_ANSWER_BYTES:
            raise ValueError("the answer is too long")
    try:
        body = json.loads(read, parse_float=_read_number)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        return body
    if response.status_code < 300:
        raise ValueError("the answer is not JSON")
    return {}


def _read_answer(source: Source, status: int, body: Mapping[str, Any], problem: str | None) -> Heard:
    """What a 2xx says, if it can be read; with the bank's reference, the amount it speaks of, and a short reason."""
    given = body.get("reason") or body.get("code")
    reason = given if isinstance(given, str) and _REASON.fullmatch(given) else None
    if not 200 <= status < 300:
        return Heard(Report.UNCLEAR, source, detail=problem or reason or f"answered {status}")
    reference, told, currency = body.get("reference"), body.get("status"), body.get("currency")
    report = STATUSES.get(told.upper()) if isinstance(told, str) else None
    if not isinstance(reference, str) or not is_reference(reference):
        reference = None
    try:
        amount = _read_amount(body.get("amount"))
    except ValueError:
        report = None
    if not isinstance(currency, str | None):
        report = None
    if report is None or (reference is None and report is not Report.DECLINED):
        return Heard(Report.UNCLEAR, source, detail=UNREADABLE)
    return Heard(
        report, source, reference, reason, amount=amount, currency=currency.upper() if currency else None
    )  # fmt: skip


def _read_amount(given: Any) -> Decimal | None:
    """As text or as a number; ValueError when it is neither."""
    if given is None or isinstance(given, Decimal):
        return given
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise ValueError("this is no amount")
    return _read_number(str(given))


def _read_number(given: str) -> Decimal:
    """Exactly, within bounds."""
    if not _AMOUNT.fullmatch(given):
        raise ValueError("this is no amount")
    return Decimal(given)
