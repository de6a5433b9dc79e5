"""The keys that sign dossiers: Ed25519, from the settings.

``DOSSIER_SIGNING_KEYS`` is ``id:base64`` of 32 secret bytes, several separated by commas, the newest first: that one
signs, and the public keys of all are what receivers trust. In development a key is made in a file that only its owner
may read.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from apps.finance.dossier.model import ALGORITHM, KEY_BYTES, signed_text
from duly.errors import Refused
from duly.settings import Settings

VARIABLE = "DOSSIER_SIGNING_KEYS"
FILE = "dossier.keys"
_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,40}")


class Signer:
    """The keys, newest first. The secret parts are in no repr and no error."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        self._keys = {key_id: Ed25519PrivateKey.from_private_bytes(seed) for key_id, seed in keys.items()}

    def __repr__(self) -> str:
        return f"Signer({', '.join(self._keys)})"

    @classmethod
    def open(cls, settings: Settings) -> Signer:
        """Those of the environment; in development a file's, made if there is none."""
        if given := os.environ.get(VARIABLE, ""):
            return cls(_parse(given, VARIABLE))
        if settings.env != "development":
            raise Refused(f"dossiers cannot be signed: set {VARIABLE} to id:base64 of {KEY_BYTES} bytes")
        path = settings.data / FILE
        _make(path)
        return cls(_parse(path.read_text().strip(), FILE))

    def sign(self, head: str) -> dict[str, Any]:
        """The signature of a dossier with this head, by the newest key."""
        key_id, key = next(iter(self._keys.items()))
        return {
            "algorithm": ALGORITHM,
            "keyId": key_id,
            "publicKey": base64.b64encode(key.public_key().public_bytes_raw()).decode(),
            "value": base64.b64encode(key.sign(signed_text(key_id, head))).decode(),
        }

    def public_keys(self) -> dict[str, str]:
        """What receivers need, by the id of each key."""
        return {
            key_id: base64.b64encode(key.public_key().public_bytes_raw()).decode() for key_id, key in self._keys.items()
        }


def _parse(text: str, where: str) -> dict[str, bytes]:
    keys: dict[str, bytes] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key_id, _, encoded = part.partition(":")
        try:
            seed = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            seed = b""
        if not _KEY_ID.fullmatch(key_id) or len(seed) != KEY_BYTES or key_id in keys:
            raise Refused(f"{where} cannot be read: write id:base64 of {KEY_BYTES} bytes, the newest first")
        keys[key_id] = seed
    if not keys:
        raise Refused(f"{where} has no key: write id:base64 of {KEY_BYTES} bytes")
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
