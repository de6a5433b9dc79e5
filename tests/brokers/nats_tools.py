"""What the tests of NATS share: events, streams by hand, and bytes that no client would send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import nats
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig, StreamInfo

from duly.brokers import Message
from duly.brokers.nats import NatsSource
from duly.ids import uuid7
from duly.messages import Event


def event(
    n: int, *, topic: str = "shop.orders", type_: str = "order.placed", aggregate: str = "o-1", **payload: Any
) -> Event:
    """The n-th of an aggregate."""
    headers = {"correlation_id": "c-1", "note to self": "ü"}
    return Event(uuid7(), type_, topic, aggregate, {"n": n, **payload}, headers, datetime.now(UTC))


@contextlib.asynccontextmanager
async def jetstream(url: str) -> AsyncIterator[JetStreamContext]:
    """A plain client's view."""
    client = await nats.connect(url, allow_reconnect=False, connect_timeout=5)
    try:
        yield client.jetstream(timeout=10)
    finally:
        await client.close()


async def add_stream(url: str, name: str = "duly", subjects: Iterable[str] = ("duly.>",), **config: Any) -> StreamInfo:
    """A stream as we would make it, but for what is given."""
    given: dict[str, Any] = {
        "storage": StorageType.FILE, "retention": RetentionPolicy.LIMITS, "duplicate_window": 120.0, **config,
    }  # fmt: skip
    async with jetstream(url) as stream:
        return await stream.add_stream(StreamConfig(name=name, subjects=list(subjects), **given))


async def remove_streams(url: str) -> None:
    """Begin with nothing."""
    async with jetstream(url) as stream:
        for info in await stream.streams_info():
            assert info.config.name
            await stream.delete_stream(info.config.name)


async def receive(source: NatsSource, count: int, *, limit: int = 100, seconds: float = 20.0) -> list[Message]:
    """So many messages, and an error when they do not come; an outage in between is waited out, as a receiver does."""
    found: list[Message] = []
    async with asyncio.timeout(seconds):
        while len(found) < count:
            try:
                found += await source.receive(limit, wait_seconds=0.5)
            except OSError:
                await asyncio.sleep(0.05)
    return found


def write_certificate(directory: Path) -> Path:
    """A certificate for this machine, signed by itself, with its key; where it is."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1)).add_extension(address, critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "key.pem").write_bytes(secret)
    (directory / "cert.pem").write_bytes(made.public_bytes(pem))
    return directory / "cert.pem"


def send_raw(port: int, subject: bytes, headers: bytes, body: bytes) -> None:
    """Publish bytes as they are, and wait until the server has seen them."""
    with socket.create_connection(("127.0.0.1", port), 5) as line:
        line.settimeout(5)
        line.recv(8192)
        line.sendall(b'CONNECT {"verbose":false,"headers":true,"protocol":1,"lang":"raw","version":"1"}\r\n')
        line.sendall(
            b"HPUB %b %d %d\r\n%b%b\r\nPING\r\n" % (subject, len(headers), len(headers) + len(body), headers, body)
        )
        answer = b""
        while b"PONG" not in answer:
            more = line.recv(4096)
            assert more, answer
            answer += more
        assert b"-ERR" not in answer, answer
