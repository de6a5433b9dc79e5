"""Secrets at rest: AES-256-GCM under keys that the database never sees.

``DULY_ENCRYPTION_KEYS`` is ``id:base64`` of 32 bytes, several separated by commas, the newest first: that one seals,
all of them open. In development a key is made beside the issuer's, readable by its owner alone.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from duly.errors import Refused
from duly.settings import Settings

FILE = "encryption.keys"
NONCE_BYTES = 12
KEY_BYTES = 32
_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,40}")


@dataclass(frozen=True)
class Sealed:
    """A secret as it is stored."""

    key_id: str
    sealed: bytes = field(repr=False)


class Keyring:
    """The keys, newest first. They are in no repr and no error."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        self._keys = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self.newest = next(iter(keys), "")

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._keys)})"

    @classmethod
    def open(cls, settings: Settings) -> Keyring:
        """Those of the settings; in development a file's, made if there is none."""
        given = settings.encryption_keys.get_secret_value()
        if given:
            return cls(_parse(given, "DULY_ENCRYPTION_KEYS"))
        if settings.env != "development":
            return cls({})
        path = settings.data / FILE
        _make(path)
        return cls(_parse(path.read_text().strip(), str(path)))

    def seal(self, secret: str, *, place: str) -> Sealed:
        """Encrypt; ``place`` says whose secret it is, and opens nobody else's."""
        if not self._keys:
            raise Refused("there is no key to encrypt secrets with: set DULY_ENCRYPTION_KEYS to id:base64 of 32 bytes")
        nonce = os.urandom(NONCE_BYTES)
        return Sealed(self.newest, nonce + self._keys[self.newest].encrypt(nonce, secret.encode(), place.encode()))

    def unseal(self, sealed: Sealed, *, place: str) -> str:
        """Decrypt, or Refused: the key is not known, or the row is not what was stored."""
        key = self._keys.get(sealed.key_id)
        if key is None:
            raise Refused(f"a secret is encrypted with the key {sealed.key_id!r}, which DULY_ENCRYPTION_KEYS has not")
        nonce, rest = sealed.sealed[:NONCE_BYTES], sealed.sealed[NONCE_BYTES:]
        try:
            return key.decrypt(nonce, rest, place.encode()).decode()
        except InvalidTag:
            raise Refused("a secret cannot be decrypted: it was changed, moved, or its key is another one") from None

    def reseal(self, key_id: str, sealed: bytes, *, place: str) -> Sealed:
        """The same secret under the newest key."""
        return self.seal(self.unseal(Sealed(key_id, sealed), place=place), place=place)


def subscription_place(subscription_id: object, number: int) -> str:
    """What binds a secret to its subscription."""
    return f"webhook_secrets {subscription_id} {number}"


def provider_place(provider: str, number: int) -> str:
    """What binds a secret to its provider."""
    return f"webhook_provider_secrets {provider} {number}"


def _parse(text: str, where: str) -> dict[str, bytes]:
    keys: dict[str, bytes] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key_id, _, encoded = part.partition(":")
        try:
            key = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not _KEY_ID.fullmatch(key_id) or len(key) != KEY_BYTES or key_id in keys:
            raise Refused(f"{where} cannot be read: write id:base64 of {KEY_BYTES} bytes, the newest first")
        keys[key_id] = key
    return keys


def _make(path: Path) -> None:
    """Make the file unless it is there; nobody ever sees half of it, or may read it but its owner."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # made with mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"development:{base64.b64encode(os.urandom(KEY_BYTES)).decode()}\n")
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
