"""Webhooks of others: is it theirs, is it fresh, and was it here before? The HTTP side is ``duly.http.receiver``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import SecretStr

from duly.db import Tx, fetch
from duly.errors import Invalid, Unauthenticated
from duly.operate.arguments import page_size, signed
from duly.webhooks import sql_operate as sql
from duly.webhooks.sealing import Keyring, Sealed, provider_place
from duly.webhooks.signing import check_secret, is_plain, is_standard, new_secret

TOLERANCE = timedelta(minutes=5)
LONGEST_EVENT_ID = 255
LONGEST_HEADER = 4_096
LONGEST_OVERLAP_HOURS = 24 * 30
_PROVIDER = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,89}")
_TIMESTAMP = re.compile(r"[0-9]{1,12}")
_SIGNATURE = re.compile(r"[!-~ ]{1,4096}")


class Refusal(Unauthenticated):
    """The signature is not right; the reason is for the log, and not for whoever sent it."""

    def __init__(self, reason: str) -> None:
        super().__init__("the webhook has no valid signature")
        self.reason = reason


@dataclass(frozen=True)
class Scheme:
    """How a provider signs: which headers, and over what."""

    kind: Literal["standard", "plain"] = "standard"
    signature_header: str = "webhook-signature"
    timestamp_header: str | None = "webhook-timestamp"
    id_header: str | None = "webhook-id"
    prefix: str = ""  # what stands before the hex, as in sha256=...

    @classmethod
    def plain(
        cls,
        *,
        signature_header: str = "X-Signature",
        timestamp_header: str | None = None,
        id_header: str | None = None,
        prefix: str = "",
    ) -> Scheme:
        """HMAC-SHA256 in hex over the body; with a timestamp header over ``timestamp.body``."""
        return cls("plain", signature_header, timestamp_header, id_header, prefix)


STANDARD = Scheme()


@dataclass(frozen=True)
class Signed:
    """What a request says of itself, before anything is believed."""

    signature: str = field(repr=False)
    timestamp: str | None
    id: str | None


def read_headers(scheme: Scheme, headers: Mapping[str, str]) -> Signed:
    """The headers of the scheme, or a Refusal: this costs nothing, and most noise ends here."""
    signature = headers.get(scheme.signature_header, "")
    if not signature:
        raise Refusal("no_signature")
    if not _SIGNATURE.fullmatch(signature) or not signature.startswith(scheme.prefix):
        raise Refusal("malformed_signature")
    timestamp = headers.get(scheme.timestamp_header) if scheme.timestamp_header else None
    if scheme.timestamp_header and (timestamp is None or not _TIMESTAMP.fullmatch(timestamp)):
        raise Refusal("no_timestamp")
    id = headers.get(scheme.id_header) if scheme.id_header else None
    if scheme.kind == "standard" and not id:
        raise Refusal("no_id")
    return Signed(signature.removeprefix(scheme.prefix), timestamp, id)


def verify(scheme: Scheme, given: Signed, body: bytes, secrets: Sequence[str], *, now: datetime) -> None:
    """Refuse whatever one of the secrets did not sign, or not lately."""
    if not secrets:
        raise Refusal("no_secret")
    if scheme.kind == "standard":
        is_right = is_standard(secrets, given.signature, id=given.id or "", timestamp=given.timestamp or "", body=body)
    else:
        stamped = body if given.timestamp is None else f"{given.timestamp}.".encode() + body
        is_right = is_plain(secrets, given.signature, stamped)
    if not is_right:
        raise Refusal("wrong_signature")
    if given.timestamp is not None and abs(now.timestamp() - int(given.timestamp)) > TOLERANCE.total_seconds():
        raise Refusal("old_timestamp" if int(given.timestamp) < now.timestamp() else "future_timestamp")


async def read_secrets(
    tx: Tx, provider: str, keyring: Keyring | None, given: Sequence[SecretStr] = ()
) -> tuple[datetime, list[str]]:
    """What time it is, and the provider's valid secrets: those in code, and those in the database."""
    rows = await fetch(tx, sql.READ_PROVIDER_SECRETS, provider=provider)
    secrets = [secret.get_secret_value() for secret in given]
    for _, number, key_id, sealed in rows:
        if number is not None and keyring is not None:
            secrets.append(keyring.unseal(Sealed(key_id, bytes(sealed)), place=provider_place(provider, number)))
    return rows[0][0], secrets


async def note_received(tx: Tx, provider: str, event_id: str) -> bool:
    """Write the inbox row in the effect's own transaction; False when the event was here before.

    While another request with the same event is under way this waits: for its commit, then it is a duplicate; for its
    rollback, then it is ours.
    """
    if not 1 <= len(event_id) <= LONGEST_EVENT_ID or "\x00" in event_id:
        raise Invalid(f"the provider's event id has 1 to {LONGEST_EVENT_ID} characters")
    return bool(await fetch(tx, sql.NOTE_RECEIVED, provider=provider, id=event_id))


async def add_provider_secret(
    tx: Tx,
    keyring: Keyring,
    provider: str,
    *,
    secret: str | None = None,
    overlap_hours: float = 24,
    actor: str,
    reason: str | None = None,
) -> str | None:
    """The provider's secret from now on; the last one stays valid for the overlap. A made one is returned, once."""
    signature = signed(actor=actor, reason=reason)
    check_provider(provider)
    if not 0 <= overlap_hours <= LONGEST_OVERLAP_HOURS:
        raise Invalid(f"overlap_hours={overlap_hours:g}: give 0 to {LONGEST_OVERLAP_HOURS}")
    used = check_secret(secret) if secret is not None else new_secret()
    await fetch(tx, sql.LOCK_PROVIDER, provider=provider)
    await fetch(tx, sql.END_PROVIDER_SECRETS, provider=provider, overlap_seconds=overlap_hours * 3600)
    number = (await fetch(tx, sql.NEXT_PROVIDER_SECRET, provider=provider))[0][0]
    sealed = keyring.seal(used, place=provider_place(provider, number))
    await fetch(
        tx, sql.ADD_PROVIDER_SECRET, provider=provider, number=number, key_id=sealed.key_id, sealed=sealed.sealed
    )
    await fetch(
        tx, sql.WRITE_AUDIT, action="webhook_provider.secret_added", subject=f"webhook_provider:{provider}",
        before=None, after=None, **signature,
    )  # fmt: skip
    return None if secret is not None else used


async def reseal_provider_secrets(tx: Tx, keyring: Keyring, *, limit: int) -> int:
    """Encrypt with the newest key what is encrypted with another; how many."""
    rows = await fetch(tx, sql.FIND_OTHER_PROVIDER_SECRETS, key_id=keyring.newest, limit=page_size(limit))
    for provider, number, key_id, sealed in rows:
        fresh = keyring.reseal(key_id, bytes(sealed), place=provider_place(provider, number))
        await fetch(
            tx, sql.RESEAL_PROVIDER_SECRET, provider=provider, number=number, key_id=fresh.key_id, sealed=fresh.sealed
        )
    return len(rows)


def check_provider(provider: str) -> str:
    """Refuse a name that cannot be one."""
    if not _PROVIDER.fullmatch(provider):
        raise Invalid("a provider's name is a letter, then up to 89 letters, digits or . _ -")
    return provider


def find_in(body: Any, path: str) -> str | None:
    """What stands at a path of member names (``data.id``) in JSON, if it is text or a whole number."""
    for name in path.split("."):
        if not isinstance(body, dict) or name not in body:
            return None
        body = body[name]
    if isinstance(body, bool) or not isinstance(body, str | int):
        return None
    return str(body)
