"""The provider's public keys: cached, fetched by one at a time, and still there while the provider is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httpx2
import structlog
from joserfc.errors import JoseError
from joserfc.jwk import RSAKey
from joserfc.util import urlsafe_b64decode

from duly.auth.challenges import invalid_token
from duly.auth.provider import FAILURES, TIMEOUT_SECONDS, BadAnswer, create_client, describe, discover, fetch_object
from duly.clock import monotonic
from duly.errors import Unavailable
from duly.telemetry import PROVIDER_UP

log = structlog.get_logger("duly.jwks")
FRESH_SECONDS = 600.0
STALE_SECONDS = 3600.0
COOL_DOWN_SECONDS = 10.0
OVERDUE = 2  # keys of twice the age at which they are refreshed: nobody asked for a while, and one may be withdrawn
PAUSE_WITHOUT_KEYS_SECONDS = 2.0  # nobody gets in meanwhile; what Retry-After says
KEYS_LIMIT = 50
KID_LIMIT = 256
SMALLEST_BITS, LARGEST_BITS = 2048, 8192


class JwksCache:
    """Public keys by ``kid``. It holds what the provider last published, and nothing about kids it does not know."""

    def __init__(
        self,
        issuer: str,
        *,
        jwks_url: str | None = None,
        client: httpx2.AsyncClient | None = None,
        fresh_seconds: float = FRESH_SECONDS,
        stale_seconds: float = STALE_SECONDS,
        cool_down_seconds: float = COOL_DOWN_SECONDS,
        timeout_seconds: float = TIMEOUT_SECONDS,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self.issuer = issuer
        self._jwks_url = jwks_url
        self._client = client
        self._owned: httpx2.AsyncClient | None = None
        self._fresh_seconds, self._stale_seconds = fresh_seconds, max(stale_seconds, fresh_seconds)
        self._cool_down_seconds, self._timeout_seconds = cool_down_seconds, timeout_seconds
        self._now = now
        self._keys: Mapping[str, RSAKey] = {}
        self._fetched_at: float | None = None  # the last success
        self._tried_at: float | None = None  # the last attempt, whatever became of it
        self._failed = False  # the last attempt that ended
        self._fetching: asyncio.Task[None] | None = None
        self._closed = False

    async def key(self, kid: str) -> RSAKey:
        """The key of this name; Unauthenticated when there is none, Unavailable when that cannot be known."""
        if (found := self._known(kid)) is not None and not self._is_overdue():
            if self._age() >= self._fresh_seconds:
                self._start()  # in the background: this request does not wait
            return found
        if (fetching := self._start()) is not None:
            await asyncio.wait({fetching})  # a caller who leaves does not take the fetch from the others
        if (found := self._known(kid)) is not None:
            return found
        if self._failed or not self._usable():
            raise Unavailable("the identity provider's keys cannot be fetched: try again later")
        raise invalid_token("the key that signed the token is not among the provider's")

    def look(self) -> tuple[bool, str]:
        """Whether the provider answered when it was last asked, in words; if it did not, or long ago, ask it again."""
        if self._failed or self._age() >= self._fresh_seconds:
            self._start()  # in the background, and no more often than for a token
        if self._failed and self._usable():
            minutes = (self._stale_seconds - self._age()) // 60
            return False, f"away; the keys that are known are good for {minutes:.0f} more minutes"
        if self._failed:
            return False, "away, and none of its keys is known: whoever brings a token is answered 503"
        return True, "not asked yet" if self._fetched_at is None else "answers"

    async def close(self) -> None:
        """End a fetch that is under way, and the connections."""
        self._closed = True
        if (fetching := self._fetching) is not None:
            fetching.cancel()
            await asyncio.wait({fetching})
        if self._owned is not None:
            await self._owned.aclose()
            self._owned = None

    def _known(self, kid: str) -> RSAKey | None:
        return self._keys.get(kid) if self._usable() else None

    def _is_overdue(self) -> bool:
        return not self._failed and self._age() >= OVERDUE * self._fresh_seconds

    def _usable(self) -> bool:
        return self._age() < self._stale_seconds

    def _age(self) -> float:
        return float("inf") if self._fetched_at is None else self._now() - self._fetched_at

    def _start(self) -> asyncio.Task[None] | None:
        """The fetch that is under way, or a new one unless the last was too recent."""
        if self._fetching is not None and not self._fetching.done():
            return self._fetching
        pause = self._cool_down_seconds
        if not self._usable():
            pause = min(pause, PAUSE_WITHOUT_KEYS_SECONDS)
        if self._closed or (self._tried_at is not None and self._now() - self._tried_at < pause):
            return None
        self._tried_at = self._now()
        self._fetching = asyncio.create_task(self._refresh(), name="duly-jwks")
        return self._fetching

    async def _refresh(self) -> None:
        """Replace the keys, or keep what there is: a failure, whatever its kind, removes nothing."""
        succeeded = False
        try:
            async with asyncio.timeout(self._timeout_seconds):
                keys = await self._fetch()
            if keys.keys() != self._keys.keys():
                log.info("jwks_changed", issuer=self.issuer, keys=len(keys))
            self._keys, self._fetched_at, succeeded = keys, self._tried_at, True
        except FAILURES as error:
            log.warning("jwks_refresh_failed", issuer=self.issuer, reason=describe(error), keys_known=len(self._keys))
        finally:
            self._failed = not succeeded
            PROVIDER_UP.labels(self.issuer).set(succeeded)

    async def _fetch(self) -> Mapping[str, RSAKey]:
        if self._client is None:
            self._owned = self._owned or create_client()
        client = self._client or self._owned
        assert client is not None
        url = self._jwks_url or await discover(client, self.issuer, "jwks_uri")
        return read_keys(await fetch_object(client, url))


def read_keys(document: Mapping[str, Any]) -> Mapping[str, RSAKey]:
    """The keys that may verify RS256, by kid; what is for other purposes or cannot be read is skipped."""
    entries = document.get("keys")
    if not isinstance(entries, list):
        raise BadAnswer("the answer is not a key set")
    keys: dict[str, RSAKey] = {}
    for entry in entries:
        if len(keys) == KEYS_LIMIT:
            log.warning("jwks_has_too_many_keys", published=len(entries), used=KEYS_LIMIT)
            break
        if isinstance(entry, dict) and (key := _read_key(entry)) is not None:
            keys.setdefault(entry["kid"], key)
    if not keys:
        raise BadAnswer("the key set holds no key that can verify RS256")
    return keys


def _read_key(entry: Mapping[str, Any]) -> RSAKey | None:
    kid, operations = entry.get("kid"), entry.get("key_ops", ["verify"])
    if not isinstance(kid, str) or not 0 < len(kid) <= KID_LIMIT:
        return None
    if entry.get("kty") != "RSA" or entry.get("use", "sig") != "sig" or entry.get("alg", "RS256") != "RS256":
        return None
    if not isinstance(operations, list) or "verify" not in operations:
        return None
    n, e = entry.get("n"), entry.get("e")
    if not isinstance(n, str) or not isinstance(e, str) or len(n) > LARGEST_BITS:
        return None
    try:
        if not SMALLEST_BITS <= int.from_bytes(urlsafe_b64decode(n.encode())).bit_length() <= LARGEST_BITS:
            return None
        return RSAKey.import_key({"kty": "RSA", "n": n, "e": e})  # public parts only, whatever else is in there
    except (ValueError, JoseError):
        return None
