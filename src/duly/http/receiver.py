"""A webhook of somebody else, as a dependency of any route of a ``Router``::

    payments = Receiver("payments", event_id="data.id")

    @router.post("/payments", openapi_extra={"x-idempotent": False})
    async def payment_changed(received: Annotated[Received, Depends(payments)], tx: RequestTx) -> None:
        await service.settle(tx, received.json()["data"])

The body is checked as it came, byte for byte. The provider's event id is written in the request's own transaction: a
second one answers 200 and does nothing; of two at once the second waits for the first.
"""

# no "from __future__ import annotations": some FastAPIs we allow cannot resolve the names in a callable object's hints

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import structlog
from fastapi import Request
from pydantic import SecretStr

from duly.errors import DulyError, Invalid, Malformed, TooLarge
from duly.http.bodies import read_json
from duly.http.transactions import Replay, RequestTx
from duly.idempotency.guard import Answer
from duly.settings import Settings
from duly.telemetry import WEBHOOKS_REFUSED
from duly.webhooks.receive import (
    STANDARD,
    Refusal,
    Scheme,
    check_provider,
    find_in,
    note_received,
    read_headers,
    read_secrets,
    verify,
)
from duly.webhooks.sealing import Keyring

log = structlog.get_logger("duly.webhooks")
DEFAULT_BODY_BYTES = 262_144
DUPLICATE = Answer(200, [("content-type", "application/json")], b'{"status":"duplicate"}')


@dataclass(frozen=True)
class Received:
    """A webhook whose signature was right, and that was not here before."""

    provider: str
    event_id: str
    body: bytes = field(repr=False)

    def json(self) -> Any:
        """The body as JSON, or 400."""
        try:
            return read_json(self.body)
        except ValueError:
            raise Malformed("the body is not JSON that can be read") from None


class Receiver:
    """Checks the webhooks of one provider. Its secrets are those in the database and those given here."""

    def __init__(
        self,
        provider: str,
        *,
        scheme: Scheme = STANDARD,
        event_id: str | None = None,
        secrets: Sequence[SecretStr] = (),
        body_bytes: int = DEFAULT_BODY_BYTES,
        keeps_ids: bool = True,
    ) -> None:
        """``event_id`` is a path of names in the JSON body; without it the scheme's id header names the event.

        ``keeps_ids=False`` is for providers who may write anything into an id: a SHA-256 of it is kept in its place.
        """
        self.provider = check_provider(provider)
        self.scheme = scheme
        self._event_id = event_id
        self._secrets = tuple(secrets)
        self._body_bytes = body_bytes
        self._keeps_ids = keeps_ids
        self._keyring: Keyring | None = None
        if event_id is None and scheme.id_header is None:
            raise Invalid(f"receiver {provider!r}: say where the provider's event id is, for example event_id='id'")

    async def __call__(self, request: Request, tx: RequestTx) -> Received:
        """What came, if it is theirs, fresh and new."""
        body = await request.body()
        try:
            if len(body) > self._body_bytes:
                raise TooLarge(f"a webhook of {self.provider} may have {self._body_bytes} bytes")
            given = read_headers(self.scheme, request.headers)
            now, secrets = await read_secrets(tx, self.provider, self._keys(request), self._secrets)
            verify(self.scheme, given, body, secrets, now=now)
        except (Refusal, TooLarge) as refusal:
            self._tell(request, refusal, body)
            raise
        received = Received(self.provider, "", body)
        event_id = given.id if self._event_id is None else find_in(received.json(), self._event_id)
        if not event_id:
            raise Malformed("the webhook does not say which event it is")
        if not self._keeps_ids:
            event_id = hashlib.sha256(event_id.encode()).hexdigest()
        if not await note_received(tx, self.provider, event_id):
            raise Replay(DUPLICATE)
        return Received(self.provider, event_id, body)

    def _keys(self, request: Request) -> Keyring:
        if self._keyring is None:
            self._keyring = Keyring.open(getattr(request.app.state, "settings", None) or Settings())
        return self._keyring

    def _tell(self, request: Request, refusal: DulyError, body: bytes) -> None:
        """Enough to find out who it was; never the body or the signature."""
        WEBHOOKS_REFUSED.labels(self.provider).inc()
        log.warning(
            "webhook_refused",
            provider=self.provider,
            reason=getattr(refusal, "reason", "too_large"),
            remote_address=_read_address(request),
            body_sha256=hashlib.sha256(body).hexdigest(),
            body_bytes=len(body),
        )


def _read_address(request: Request) -> str | None:
    """Who called, if that is an address: behind a proxy it is what a header says, and that may be anything."""
    try:
        return str(ip_address(request.client.host)) if request.client else None
    except ValueError:
        return None
