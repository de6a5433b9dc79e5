"""Signatures of webhooks, made and checked; nothing here reads a clock or a database.

Two schemes. Standard Webhooks signs ``id.timestamp.body`` with HMAC-SHA256 and writes ``v1,<base64>``; a secret that
starts with ``whsec_`` is base64 of the key, any other one is the key itself. Plain signs the body alone, keyed with the
secret's text as it is, and writes hex.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Sequence

from duly.errors import Invalid

PREFIX = "whsec_"
KEY_BYTES = 32
SHORTEST_KEY_BYTES, LONGEST_KEY_BYTES = 16, 128
LONGEST_SECRET = 200
MOST_SIGNATURES = 16
VERSION = "v1"
_SECRET = re.compile(r"[!-~]{16,200}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")


def new_secret() -> str:
    """A secret of 32 random bytes, as Standard Webhooks writes it."""
    return PREFIX + base64.b64encode(os.urandom(KEY_BYTES)).decode()


def check_secret(secret: str) -> str:
    """Refuse a secret that is too short to be one; the message never repeats it."""
    if not _SECRET.fullmatch(secret):
        raise Invalid(f"a secret has 16 to {LONGEST_SECRET} visible ASCII characters and no spaces")
    if secret.startswith(PREFIX) and not SHORTEST_KEY_BYTES <= len(_decoded(secret) or b"") <= LONGEST_KEY_BYTES:
        raise Invalid(
            f"a secret that starts with {PREFIX} is base64 of {SHORTEST_KEY_BYTES} to {LONGEST_KEY_BYTES} bytes"
        )
    return secret


def sign_plain(secret: str, signed: bytes) -> str:
    """HMAC-SHA256 in hex, keyed with the secret's text."""
    return hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()


def sign_standard(secret: str, *, id: str, timestamp: int, body: bytes) -> str:
    """One signature of the ``webhook-signature`` header."""
    return f"{VERSION},{base64.b64encode(_standard_mac(secret, id, str(timestamp), body)).decode()}"


def headers_for(
    secrets: Sequence[str], *, event_id: str, event_type: str, delivery_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """What a receiver needs to know that the body is ours; the newest secret first, the one before it while valid."""
    signed = [sign_standard(secret, id=event_id, timestamp=timestamp, body=body) for secret in secrets]
    headers = {
        "Content-Type": "application/json",
        "X-Signature": sign_plain(secrets[0], body),
        "X-Event-Id": event_id,
        "X-Event-Type": event_type,
        "X-Delivery-Id": delivery_id,
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signed),
    }
    if len(secrets) > 1:
        headers["X-Signature-Previous"] = sign_plain(secrets[1], body)
    return headers


def is_plain(secrets: Sequence[str], given: str, signed: bytes) -> bool:
    """Whether one of the secrets made this hex signature; every one is tried, whichever fits."""
    if not _HEX.fullmatch(given):
        return False
    found = False
    for secret in secrets:
        found |= hmac.compare_digest(sign_plain(secret, signed).encode(), given.lower().encode())
    return found


def is_standard(secrets: Sequence[str], given: str, *, id: str, timestamp: str, body: bytes) -> bool:
    """Whether one of the secrets made one of the signatures; every pair is tried, whichever fits."""
    macs = [_read_signature(part) for part in given.split(" ")[:MOST_SIGNATURES]]
    found = False
    for secret in secrets:
        right = _standard_mac(secret, id, timestamp, body)
        for mac in macs:
            found |= hmac.compare_digest(right, mac)
    return found


def _read_signature(part: str) -> bytes:
    version, _, encoded = part.partition(",")
    if version != VERSION:
        return b""
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _standard_mac(secret: str, id: str, timestamp: str, body: bytes) -> bytes:
    key = (_decoded(secret) or b"") if secret.startswith(PREFIX) else secret.encode()
    return hmac.new(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256).digest()


def _decoded(secret: str) -> bytes | None:
    try:
        return base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
