"""Around every request: its correlation id, its trace, its log line, its numbers, its limits, and a last resort."""

from __future__ import annotations

import asyncio
import contextlib
import re
import traceback
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any
from uuid import UUID

import structlog
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duly.clock import monotonic
from duly.errors import DulyError, Malformed, TooLarge, Unavailable
from duly.http.bodies import Unreadable
from duly.http.problems import database_facts, from_error, problem, translate
from duly.ids import uuid7
from duly.telemetry import HTTP_REQUESTS, HTTP_SECONDS, Origin, originating, span

log = structlog.get_logger("duly.http")
CORRELATION = b"x-correlation-id"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
MOST_FRAMES = 11
DEFAULT_BODY_BYTES = 1_048_576
DEFAULT_BODY_SECONDS = 30.0
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class RequestTimeout(DulyError):
    """The body did not arrive in time."""

    status = 408
    headers = MappingProxyType({"Connection": "close"})  # or whoever drips goes on dripping


class Boundary:
    """The outermost layer. Whatever happens inside, the client gets an answer and its correlation id."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        body_bytes: int = DEFAULT_BODY_BYTES,
        body_seconds: float = DEFAULT_BODY_SECONDS,
    ) -> None:
        self._app = app
        self._body_bytes = body_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        correlation_id = _correlation_id(headers)
        scope.setdefault("state", {})["correlation_id"] = correlation_id
        traceparent = _traceparent(headers)
        exchange = _Exchange(scope, send, correlation_id)
        method = scope["method"] if scope["method"] in METHODS else "other"
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # the server, which keeps the original, leaves the body out
        with (
            structlog.contextvars.bound_contextvars(correlation_id=str(correlation_id)),
            originating(Origin(correlation_id, None, traceparent)),
            _traced(method, traceparent, exchange),
        ):
            try:
                await self._answer(scope, receive, exchange)
            finally:
                exchange.note(method)

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        limited = _Limited(receive, self._body_bytes, self._body_seconds)
        try:
            limited.check_length(scope["headers"])
            await self._app(scope, limited.receive, exchange.send)
        except asyncio.CancelledError:
            if exchange.started:
                raise
            # The server stops and its grace is over: the task ends with this answer, which is all that is wanted of it.
            stopping = Unavailable("this process is stopping; what was asked may or may not be done: try again")
            await from_error(stopping, instance=f"urn:uuid:{exchange.correlation_id}")(scope, receive, exchange.send)
        except Exception as error:  # noqa: BLE001 - the last resort: everything becomes an answer
            known = error if isinstance(error, DulyError) else translate(error)
            if known is None or known.status == 500:
                # The frames, not the message: that may quote what was sent.
                where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in _frames(error)]
                log.error("request_failed", error=type(error).__name__, where=where, **database_facts(error))
            if exchange.started:
                # The connection must break, for half an answer is none; and the server logs what we raise.
                raise RuntimeError("an answer broke off in the middle: see request_failed") from None
            instance = f"urn:uuid:{exchange.correlation_id}"
            detail = "something went wrong on our side; the correlation id finds it in the logs"
            answer = from_error(known, instance=instance) if known else problem(500, detail=detail, instance=instance)
            await answer(scope, receive, exchange.send)


@contextlib.contextmanager
def _traced(method: str, traceparent: str | None, exchange: _Exchange) -> Iterator[None]:
    """A span for the request, unless somebody else's instrumentation has made one already."""
    if trace.get_current_span().get_span_context().is_valid:
        yield
        return
    with span(method, kind=SpanKind.SERVER, parent=traceparent, attributes={}) as traced:
        try:
            yield
        finally:
            traced.update_name(f"{method} {exchange.route}")
            traced.set_attributes({"http.request.method": method, "http.route": exchange.route})
            traced.set_attribute("http.response.status_code", exchange.status)
            if exchange.status >= 500:
                traced.set_status(StatusCode.ERROR)


def route_path(scope: Scope) -> str:
    """The template of the path, never the path: that has ids in it."""
    # A route that was included with a prefix knows its own part only; FastAPI keeps the whole beside it.
    included = scope.get("fastapi", {}).get("effective_route_context")
    for holder in (getattr(included, "starlette_route", None), included, scope.get("route")):
        if path := getattr(holder, "path", ""):
            return str(path)
    return "none"


class _Exchange:
    """What is known of one request and its answer."""

    def __init__(self, scope: Scope, send: Send, correlation_id: UUID) -> None:
        self._scope = scope
        self._send = send
        self._began = monotonic()
        self.correlation_id = correlation_id
        self.started = False
        self.status = 500

    @property
    def route(self) -> str:
        """Which of our routes it is."""
        return route_path(self._scope)

    async def send(self, message: Message) -> None:
        """Add the correlation id on the way out."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = [pair for pair in message.get("headers", []) if pair[0].lower() != CORRELATION]
            message["headers"] = [*headers, (CORRELATION, str(self.correlation_id).encode())]
        await self._send(message)

    def note(self, method: str) -> None:
        """Count it and log it."""
        seconds = monotonic() - self._began
        HTTP_REQUESTS.labels(method, self.route, str(self.status)).inc()
        HTTP_SECONDS.labels(method, self.route).observe(seconds)
        write: Any = log.debug if self.route in QUIET else log.info
        write("request", method=method, route=self.route, status=self.status, milliseconds=round(seconds * 1000, 1))


class _Limited:
    """A body of bounded size that arrives in bounded time."""

    def __init__(self, receive: Receive, most_bytes: int, most_seconds: float) -> None:
        self._receive = receive
        self._most_bytes = most_bytes
        self._deadline = monotonic() + most_seconds
        self._seen = 0
        self._complete = False

    def check_length(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Refuse at once what says of itself that it is too large."""
        length = _last(headers, b"content-length")
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 20):
            raise Malformed("Content-Length is not a number")
        if length is not None and int(length) > self._most_bytes:
            raise TooLarge(f"a body may have {self._most_bytes} bytes")

    async def receive(self) -> Message:
        """The next piece."""
        if self._complete:
            return await self._receive()  # from now on it only tells when the client leaves
        try:
            async with asyncio.timeout(max(0.0, self._deadline - monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise Unreadable(RequestTimeout("the body did not arrive in time")) from None
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._seen > self._most_bytes:
                raise Unreadable(TooLarge(f"a body may have {self._most_bytes} bytes"))
        return message


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The way to the error through code that is not a library's, and its last step, whoever's that is."""
    *way, last = traceback.extract_tb(error.__traceback__)
    return [*[frame for frame in way if "site-packages" not in frame.filename][-MOST_FRAMES:], last]


def _last(headers: list[tuple[bytes, bytes]], name: bytes) -> str | None:
    found = [value for key, value in headers if key.lower() == name]
    return found[-1].decode("latin-1") if found else None


def _traceparent(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The caller's, when it is one: it goes into rows, too."""
    given = _last(headers, b"traceparent")
    return given if given and _TRACEPARENT.fullmatch(given) else None


def _correlation_id(headers: list[tuple[bytes, bytes]]) -> UUID:
    """The client's, when it is a UUID; else a new one: it goes into logs and rows, so nothing else gets in."""
    given = _last(headers, CORRELATION)
    return UUID(given) if given and _UUID.fullmatch(given) else uuid7()
