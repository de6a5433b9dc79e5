"""Sends one webhook: the address that is dialled is one that was checked, and everything is bounded.

The name is resolved once, every address it leads to is checked, and one of those is dialled; TLS still asks for the
name's certificate. There are no redirects, proxies, cookies or kept connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpcore2

from duly.clock import monotonic
from duly.messages import storable
from duly.webhooks.addresses import Allowed, check_host_addresses, read_address

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
ANSWER_BYTES = 65_536
WIRE_BYTES = 8 * ANSWER_BYTES  # with headers, and whatever cuts the body into chunks
PIECE_BYTES = 16_384
MOST_PIECES = 4_096  # a body in chunks of one byte is as good as read long before
EXCERPT_CHARACTERS = 2_048
DNS_SECONDS = 5.0
MOST_DIALLED = 3
DEFAULT_PORTS = {"https": 443, "http": 80}
KEPT_HEADERS = frozenset({"content-type", "content-length", "date", "server", "retry-after", "location", "via"})
HEADER_CHARACTERS = 300
OWN_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}


@dataclass(frozen=True)
class Answer:
    """How one attempt went. ``error`` is None when it was delivered; no word of it comes from the other side."""

    error: str | None
    latency_ms: int
    http_status: int | None = None
    address: str | None = None
    response_headers: Mapping[str, str] = field(default_factory=dict)
    response_excerpt: str = ""
    retry_after: timedelta | None = None

    @property
    def delivered(self) -> bool:
        """Whether the receiver took it."""
        return self.error is None


class _AddressRefused(Exception):
    pass


class _NotResolved(Exception):
    pass


class _Checked(httpcore2.AsyncNetworkBackend):
    """Dials only what it has checked itself, and remembers what that was."""

    def __init__(self, resolve: Resolve, allowed: Allowed) -> None:
        self._resolve = resolve
        self._allowed = allowed
        self._backend = httpcore2.AnyIOBackend()
        self.dialled: str | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Resolve once, check every address, dial one of them."""
        addresses = await self._addresses(host, port)
        failure: Exception | None = None
        for address in addresses[:MOST_DIALLED]:
            self.dialled = str(address)
            try:
                return _Bounded(await self._backend.connect_tcp(str(address), port, timeout=timeout))
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure or _NotResolved

    async def _addresses(self, host: str, port: int) -> Sequence[object]:
        try:
            found: Sequence[str] = [str(read_address(host.strip("[]")))]
        except ValueError:
            try:
                async with asyncio.timeout(DNS_SECONDS):
                    found = await self._resolve(host, port)
            except (OSError, UnicodeError) as error:  # a timeout of ours is an OSError
                raise _NotResolved from error
        if not found:
            raise _NotResolved
        try:
            return check_host_addresses(found, self._allowed)
        except ValueError as error:
            raise _AddressRefused(str(error)) from None


class _Bounded(httpcore2.AsyncNetworkStream):
    """Reads a little at a time, and so much in all: headers, chunks and trailers without end are parsed by nobody.

    A piece is small, because nobody else's webhook moves while it is parsed.
    """

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream
        self._left = WIRE_BYTES

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """The next piece."""
        if self._left <= 0:
            raise httpcore2.RemoteProtocolError("the answer has more bytes than any answer needs")
        piece = await self._stream.read(min(max_bytes, PIECE_BYTES), timeout)
        self._left -= len(piece)
        return piece

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """As it is."""
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """As it is."""
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        """The bound is on what TLS brings."""
        return _Bounded(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        """As it is."""
        return self._stream.get_extra_info(info)


class Sender:
    """Sends webhooks for one worker. Names are resolved in threads of its own: a slow name server takes nobody's."""

    def __init__(
        self,
        allowed: Allowed,
        *,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
        threads: int = 50,
    ) -> None:
        self._allowed = allowed
        self._resolve = resolve or self._ask_system
        self._ssl_context = ssl_context
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None

    async def send(self, url: str, *, headers: Mapping[str, str], body: bytes, timeout_seconds: float) -> Answer:
        """POST the body; never raises for what the other side does."""
        backend = _Checked(self._resolve, self._allowed)
        began = monotonic()
        seen = _Seen()
        error: str | None
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._post(
                    backend, url, {"Host": host_of(url), **headers, **OWN_HEADERS}, body, timeout_seconds, seen
                )
            error = _refusal(seen.status)
        except Exception as failure:
            error = _describe(failure, seen.status)
            if error is None:
                raise
        return Answer(
            error,
            round((monotonic() - began) * 1000),
            seen.status,
            backend.dialled,
            seen.headers,
            seen.excerpt(),
            _retry_after(seen.headers),
        )

    async def _post(
        self,
        backend: _Checked,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        timeout_seconds: float,
        seen: _Seen,
    ) -> None:
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout_seconds)
        async with (
            httpcore2.AsyncConnectionPool(
                ssl_context=self._tls(), network_backend=backend, max_connections=1, max_keepalive_connections=0
            ) as pool,
            pool.stream(
                "POST",
                _target(url),
                headers=[(name.encode(), value.encode()) for name, value in headers.items()],
                content=body,
                extensions={"timeout": timeouts},
            ) as response,
        ):
            seen.begin(response.status, response.headers)
            async with contextlib.aclosing(response.aiter_stream()) as stream:
                async for chunk in stream:
                    if not seen.take(chunk):
                        break  # the rest is never read

    def _tls(self) -> ssl.SSLContext:
        """Made once: reading the certificates of all authorities takes longer than sending."""
        if self._ssl_context is None:
            self._ssl_context = httpcore2.default_ssl_context()
        return self._ssl_context

    async def _ask_system(self, host: str, port: int) -> Sequence[str]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="duly-dns")
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, _getaddrinfo, host, port)
        return [str(one[4][0]) for one in found]


class _Seen:
    """What has arrived of an answer."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self._body = bytearray()
        self._pieces = 0

    def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """The first lines; of the headers only some are kept."""
        self.status = status
        for name, value in headers:
            key = name.decode("latin-1").lower()
            if key in KEPT_HEADERS:
                self.headers[key] = storable(value.decode("latin-1")[:HEADER_CHARACTERS])

    def take(self, chunk: bytes) -> bool:
        """One piece of the body; False when that is enough."""
        self._body += chunk[: ANSWER_BYTES - len(self._body)]
        self._pieces += 1
        return len(self._body) < ANSWER_BYTES and self._pieces < MOST_PIECES

    def excerpt(self) -> str:
        """The beginning of the body, as text that can be stored."""
        text = bytes(self._body[: 4 * EXCERPT_CHARACTERS]).decode("utf-8", "replace")
        return storable(text[:EXCERPT_CHARACTERS])


def _getaddrinfo(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _target(url: str) -> httpcore2.URL:
    """From the same reading of the URL as the one that was checked: two readers may see two hosts."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    return httpcore2.URL(scheme=parts.scheme.encode(), host=host.encode(), port=port, target=path.encode())


def host_of(url: str) -> str:
    """The value of the Host header."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return host if parts.port in (None, DEFAULT_PORTS.get(parts.scheme)) else f"{host}:{parts.port}"


def _refusal(status: int | None) -> str | None:
    if status is None:
        return "no_answer"
    if 200 <= status < 300:
        return None
    return "redirect" if 300 <= status < 400 else "status"


def _describe(error: BaseException, status: int | None) -> str | None:
    """One word for what went wrong; None for a mistake of ours."""
    if isinstance(error, _AddressRefused):
        return "refused_address"
    if isinstance(error, _NotResolved):
        return "dns"
    if isinstance(error, TimeoutError | httpcore2.TimeoutException):
        return "timeout" if status is None else "slow_body"
    if isinstance(error, httpcore2.ConnectError):
        causes = (error.__cause__, error.__context__, *error.args)
        return "tls" if any(isinstance(cause, ssl.SSLError | ssl.CertificateError) for cause in causes) else "connect"
    if isinstance(error, httpcore2.ProtocolError):
        return "protocol"
    if isinstance(error, httpcore2.NetworkError | OSError):
        return "connection_lost"
    return None


def _retry_after(headers: Mapping[str, str]) -> timedelta | None:
    """Seconds, or a date (RFC 9110, section 10.2.3) measured by the answer's own clock."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit() and len(value) < 10:
        return timedelta(seconds=int(value))
    try:
        at, now = (_date(text) for text in (value, headers.get("date", "")))
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(at - now, timedelta(0))


def _date(text: str) -> datetime:
    parsed = parsedate_to_datetime(text)
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
