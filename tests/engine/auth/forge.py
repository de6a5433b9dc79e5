"""Tokens by hand, right and wrong: a library would refuse to make most of these."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from joserfc.jwk import RSAKey

NOW = 1_800_000_000


@cache
def rsa_key(name: str, bits: int = 2048) -> RSAKey:
    """A key of the test run; its name is its kid."""
    made = rsa.generate_private_key(public_exponent=65537, key_size=bits)
    return RSAKey.import_key(made, {"kid": name, "use": "sig", "alg": "RS256"})


def b64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def dump(value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def claims(**changes: Any) -> dict[str, Any]:
    """Valid ones; a change to None leaves a claim out."""
    made = {
        "iss": "set by the caller",
        "sub": "alice",
        "aud": "duly",
        "azp": "web",
        "typ": "Bearer",
        "iat": NOW,
        "nbf": NOW,
        "exp": NOW + 300,
        "scope": "quality ledger:read",
        "realm_access": {"roles": ["QUALITY_ENGINEER"]},
    }
    return {name: value for name, value in {**made, **changes}.items() if value is not None}


def assemble(header: object, payload: object, signature: bytes) -> str:
    return f"{b64(dump(header))}.{b64(dump(payload))}.{b64(signature)}"


def signing_input(header: object, payload: object) -> bytes:
    return f"{b64(dump(header))}.{b64(dump(payload))}".encode()


def rs256(payload: object, key: RSAKey, header: object | None = None) -> str:
    """Signed as it should be, whatever the header says."""
    head = {"alg": "RS256", "typ": "JWT", "kid": key.kid} if header is None else header
    assert key.private_key is not None
    signature = key.private_key.sign(signing_input(head, payload), padding.PKCS1v15(), SHA256())
    return assemble(head, payload, signature)


def ps256(payload: object, key: RSAKey, header: Mapping[str, Any]) -> str:
    assert key.private_key is not None
    scheme = padding.PSS(padding.MGF1(SHA256()), salt_length=32)
    return assemble(header, payload, key.private_key.sign(signing_input(header, payload), scheme, SHA256()))


def hs256(payload: object, secret: bytes, header: Mapping[str, Any]) -> str:
    return assemble(header, payload, hmac.digest(secret, signing_input(header, payload), hashlib.sha256))


def es256(payload: object, header: Mapping[str, Any], curve: ec.EllipticCurve) -> str:
    der = ec.generate_private_key(curve).sign(signing_input(header, payload), ec.ECDSA(SHA256()))
    size = (curve.key_size + 7) // 8
    return assemble(header, payload, b"".join(number.to_bytes(size) for number in decode_dss_signature(der)))
