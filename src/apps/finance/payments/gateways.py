"""Calling a bank: a plug-in has two methods, and says of each answer what is certain.

``HttpBank`` speaks a small protocol (docs/howto/payments.md). Another bank is another class with the same two methods.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from typing import Any, Protocol

import httpx2

from apps.finance.payments.model import VALIDITY, Heard, Order, Payment, Report, Source
from duly.auth.setup import find_api_url
from duly.clock import monotonic
from duly.errors import Refused
from duly.settings import Settings
from duly.telemetry import current_origin

URL_VARIABLE = "PAYMENTS_BANK_URL"
CALLBACK_VARIABLE = "PAYMENTS_CALLBACK_URL"
TIMEOUT_VARIABLE = "PAYMENTS_BANK_TIMEOUT_SECONDS"
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
NEVER_LEFT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
_REFERENCE = re.compile(r"[!-~]{1,100}")
_REASON = re.compile(r"[A-Za-z0-9_ .-]{1,60}")


class NoBank(Refused):
    """Nobody has said where payments go."""


class Bank(Protocol):
    """A plug-in. Neither method raises for what a bank or a network may do: that is what the answer says."""

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
        """Whether there is a URL."""
        find_bank_url()

    async def send(self, order: Order) -> Heard:
        """One request, never repeated here: whether it may be is decided elsewhere."""
        began = monotonic()
        status, body, problem = await self._call("POST", "/payments", began, order)
        heard = _read_answer(status, body, problem)
        report, reference, detail = heard
        if report is None:
            report = Report.NOT_TAKEN if status in NOT_TAKEN or problem == "unreachable" else Report.UNCLEAR
            report = Report.DECLINED if status in DECLINED else report
        return Heard(report, Source.SEND, reference, detail, attempt=order.attempt)

    async def ask(self, payment: Payment) -> Heard:
        """What became of it; that there is no such payment must be said in the bank's own words."""
        status, body, problem = await self._call("GET", f"/payments/{payment.bank_key}", monotonic(), None)
        report, reference, detail = _read_answer(status, body, problem)
        if report is None:
            is_absent = status == 404 and body.get("code") == NO_SUCH_PAYMENT
            report = Report.NOT_KNOWN if is_absent else Report.UNCLEAR
            detail = NO_SUCH_PAYMENT if is_absent else detail
        return Heard(report, Source.ASK, reference, detail, version=payment.version)

    async def _call(
        self, method: str, path: str, began: float, order: Order | None
    ) -> tuple[int, dict[str, Any], str | None]:
        """Status, JSON and what went wrong; an answer that is not JSON, or too long, is unreadable."""
        url, seconds = find_bank_url() + path, find_try_seconds()
        if monotonic() - began > VALIDITY.total_seconds() - seconds:
            return 0, {}, "unreachable"  # this process stood still meanwhile: the bank would have to refuse it
        try:
            async with asyncio.timeout(seconds):
                async with self._open().stream(method, url, json=_body(order), headers=_headers(order)) as response:
                    return response.status_code, await _read(response), None
        except NEVER_LEFT:
            return 0, {}, "unreachable"
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, httpx2.LocalProtocolError, ExceptionGroup):
            return 0, {}, "unreachable"  # a port that cannot be one comes as a group
        except (TimeoutError, httpx2.TimeoutException):
            return 0, {}, "timeout"
        except (httpx2.HTTPError, OSError):
            return 0, {}, "connection_lost"
        except ValueError:
            return 0, {}, "unreadable"

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


def find_bank_url() -> str:
    """PAYMENTS_BANK_URL; in development without it the sandbox's bank."""
    if url := os.environ.get(URL_VARIABLE, ""):
        return url.rstrip("/")
    settings = Settings()
    if settings.env == "development":
        return find_api_url(settings) + SANDBOX_PATH
    raise NoBank(f"no payment is sent: set {URL_VARIABLE} to the address of the bank")


def find_callback_url(provider: str) -> str:
    """Where the bank tells us what became of a payment: PAYMENTS_CALLBACK_URL, or our own API."""
    base = os.environ.get(CALLBACK_VARIABLE, "") or find_api_url(Settings()) + CALLBACK_PATH
    return f"{base.rstrip('/')}/{provider}"


def find_try_seconds() -> float:
    """PAYMENTS_BANK_TIMEOUT_SECONDS, within bounds."""
    given = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(given) if given else DEFAULT_TRY_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 30.0:
        raise Refused(f"{TIMEOUT_VARIABLE} is no number of seconds from 0.05 to 30")
    return seconds


def _body(order: Order | None) -> dict[str, Any] | None:
    if order is None:
        return None
    return {
        "reference": str(order.key),
        "from": str(order.from_account_id),
        "to": str(order.to_account_id),
        "amount": order.amount,
        "currency": order.currency,
        "validUntil": order.valid_until.isoformat(),
        "callbackUrl": find_callback_url(order.provider),
    }


def _headers(order: Order | None) -> dict[str, str]:
    """The key, and the ids that tie the call to whatever caused it."""
    origin = current_origin()
    known = {"X-Correlation-Id": origin.correlation_id, "traceparent": origin.traceparent}
    headers = {name: str(value) for name, value in known.items() if value}
    return headers | {KEY_HEADER: str(order.key)} if order is not None else headers


async def _read(response: httpx2.Response) -> dict[str, Any]:
    """The body, within bounds; ValueError when it is none that can be read. What is refused may have any body."""
    read = bytearray()
    async for piece in response.aiter_raw():
        read += piece
        if len(read) > MOST_ANSWER_BYTES:
            raise ValueError("the answer is too long")
    try:
        body = json.loads(read)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        return body
    if response.status_code < 300:
        raise ValueError("the answer is not JSON")
    return {}


def _read_answer(
    status: int, body: Mapping[str, Any], problem: str | None
) -> tuple[Report | None, str | None, str | None]:
    """What a 2xx says, if it can be read; the bank's reference; and a short reason."""
    given = body.get("reason") or body.get("code")
    reason = given if isinstance(given, str) and _REASON.fullmatch(given) else None
    if not 200 <= status < 300:
        return None, None, problem or reason or f"answered {status}"
    reference, told = body.get("reference"), body.get("status")
    report = STATUSES.get(told.upper()) if isinstance(told, str) else None
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
        reference = None
    if report is None or (reference is None and report is not Report.DECLINED):
        return None, None, "unreadable"
    return report, reference, reason
