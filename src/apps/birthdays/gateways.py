"""Delivering a message: one POST to the webhook, with a key that all tries of it share (B4)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import httpx2

from apps.birthdays.model import Delivery, whole_seconds
from duly.auth.setup import find_api_url
from duly.errors import DulyError, Refused
from duly.settings import Settings
from duly.telemetry import current_origin

URL_VARIABLE = "BIRTHDAYS_WEBHOOK_URL"
SANDBOX_PATH = "/sandbox/webhooks"
KEY_HEADER = "X-Idempotency-Key"
TRY_SECONDS = 15.0
BODY_SECONDS = 2.0
MOST_ANSWER_BYTES = 65_536
CONNECTIONS = 20
IDLE_SECONDS = 4.0  # less than most servers keep a connection that is not used
TRANSIENT = frozenset({408, 429})
BROKEN = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)


class WebhookAway(DulyError):
    """The webhook did not take the message this time; it may another time."""

    def __init__(self, reason: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class WebhookRefused(DulyError):
    """The webhook does not want the message, and will not want it a second time."""


class NoWebhook(Refused):
    """Nobody has said where messages go."""


class Webhook:
    """The receiver of all messages. Connections are kept open between them, for each event loop its own."""

    def __init__(self) -> None:
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def send(self, delivery: Delivery) -> None:
        """Deliver it once more; WebhookAway when another try makes sense, WebhookRefused when none does."""
        client, url = self._open(), find_webhook_url()
        try:
            async with asyncio.timeout(TRY_SECONDS):
                status, headers = await _post_again_if_broken(client, url, delivery)
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, httpx2.LocalProtocolError, ExceptionGroup):
            # A port that cannot be one comes as a group.
            raise NoWebhook(f"{URL_VARIABLE} is not an address that can be called") from None
        except (TimeoutError, httpx2.TimeoutException):
            raise WebhookAway(f"the webhook did not answer within {TRY_SECONDS:g} s") from None
        except (httpx2.HTTPError, OSError) as error:  # of others only the kind: theirs may quote an address
            raise WebhookAway(f"the webhook cannot be reached ({type(error).__name__})") from None
        if status >= 500 or status in TRANSIENT:
            raise WebhookAway(f"the webhook answered {status}", retry_after_seconds=_retry_after_seconds(headers))
        if not 200 <= status < 300:
            raise WebhookRefused(f"the webhook answered {status}")

    def _open(self) -> httpx2.AsyncClient:
        """One client for the loop that runs now; a loop that has ended took its connections with it."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx2.Limits(
                max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS
            )
            self._client = httpx2.AsyncClient(
                timeout=TRY_SECONDS, limits=limits, trust_env=False, follow_redirects=False
            )
            self._loop = loop
        return self._client


def find_webhook_url() -> str:
    """BIRTHDAYS_WEBHOOK_URL; in development without it the sandbox's catcher."""
    if url := os.environ.get(URL_VARIABLE, ""):
        return url
    settings = Settings()
    if settings.env == "development":
        return find_api_url(settings) + SANDBOX_PATH
    raise NoWebhook(f"nobody is told of birthdays: set {URL_VARIABLE} to the address that gets the messages")


async def _post_again_if_broken(client: httpx2.AsyncClient, url: str, delivery: Delivery) -> tuple[int, httpx2.Headers]:
    """A connection that was kept may be closed in the moment it is used again: once more, then, over another."""
    try:
        return await _post(client, url, delivery)
    except BROKEN:
        return await _post(client, url, delivery)


async def _post(client: httpx2.AsyncClient, url: str, delivery: Delivery) -> tuple[int, httpx2.Headers]:
    """Status and headers. They count; of the body no more is read than it takes to use the connection again."""
    async with client.stream("POST", url, json=_body(delivery), headers=_headers(delivery)) as response:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_SECONDS):
                await _read_off(response)
        return response.status_code, response.headers


async def _read_off(response: httpx2.Response) -> None:
    read = 0
    async for piece in response.aiter_raw():
        read += len(piece)
        if read > MOST_ANSWER_BYTES:
            break


def _body(delivery: Delivery) -> dict[str, Any]:
    event = delivery.event
    return {
        "eventId": str(event.id),
        "userId": str(event.user_id),
        "message": delivery.message,
        "targetLocal": event.target_local.isoformat(),
        "timezone": event.timezone,
        "targetUtc": event.target_utc.isoformat(),
        "lateSeconds": whole_seconds(delivery.late_by),
    }


def _headers(delivery: Delivery) -> dict[str, str]:
    """The key, and the ids that tie the call to whatever caused it."""
    origin = current_origin()
    known = {"X-Correlation-Id": origin.correlation_id, "traceparent": origin.traceparent}
    return {KEY_HEADER: str(delivery.event.id)} | {name: str(value) for name, value in known.items() if value}


def _retry_after_seconds(headers: httpx2.Headers) -> float:
    """Whole seconds; a date is not read, our own waits do for it."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0.0
