"""Signing in with the OpenID provider: authorization code, PKCE, state and nonce; every answer is checked twice.

What must be remembered between leaving and coming back is in a cookie of ten minutes, which scripts cannot read: a
stranger who opens the page writes nothing into the database.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote_plus, urlencode

import httpx2
import structlog

from duly.auth.principals import Principal
from duly.auth.provider import FAILURES, TIMEOUT_SECONDS, create_client, describe, discover, fetch
from duly.auth.strict_json import parse_object
from duly.auth.tokens import TOKEN_LIMIT, Verifier
from duly.errors import Forbidden, Malformed, Unauthenticated, Unavailable
from duly.settings import Settings

log = structlog.get_logger("duly.console")
SCOPE = "console"
COOKIE_SECONDS = 600
COOKIE_LIMIT = 4_000
CODE_LIMIT = 4_000
RETURN_LIMIT = 1_000
# A path of ours: no scheme, no second slash, no backslash (which browsers take for one), nothing invisible.
_LOCAL = re.compile(r"/console(?:[/?][\x21-\x5B\x5D-\x7E]*)?")


@dataclass(frozen=True)
class Attempt:
    """A sign-in that was begun in this browser."""

    state: str
    nonce: str
    verifier: str
    return_to: str

    def dump(self) -> str:
        """For the cookie."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def load(cls, cookie: str) -> Attempt:
        """From the cookie; Malformed when there is none, or one that we did not make."""
        try:
            if not 0 < len(cookie) <= COOKIE_LIMIT:
                raise ValueError
            found = parse_object(base64.urlsafe_b64decode(cookie))
            attempt = cls(**found)
            if not all(isinstance(value, str) and value.isascii() and value for value in found.values()):
                raise ValueError
        except (ValueError, TypeError):
            raise Malformed("this sign-in was not begun here, or too long ago: sign in again") from None
        return attempt


class SignIn:
    """One provider, and the console as its client."""

    def __init__(self, settings: Settings, verifier: Verifier, *, client: httpx2.AsyncClient | None = None) -> None:
        self._client_id = settings.console_client_id
        self._secret = settings.console_client_secret
        self._verifier = verifier
        self._client = client
        self._owned: httpx2.AsyncClient | None = None

    async def begin(self, *, redirect_uri: str, return_to: str, again: bool = False) -> tuple[str, Attempt]:
        """Where to send the browser, and what it must bring back."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        attempt = Attempt(state, nonce, verifier, local_path(return_to))
        digest = hashlib.sha256(attempt.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": redirect_uri,
            "scope": f"openid {SCOPE}",
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        } | ({"prompt": "login"} if again else {})
        endpoint = await self._discover("authorization_endpoint")
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}", attempt

    async def finish(self, attempt: Attempt, answer: Mapping[str, str], *, redirect_uri: str) -> tuple[Principal, str]:
        """Who came back, and what to call them; Forbidden when they have no business here."""
        if not hmac.compare_digest(answer.get("state", "").encode(), attempt.state.encode()):
            raise Malformed("this answer belongs to another sign-in: sign in again")
        if answer.get("iss", self._verifier.issuer) != self._verifier.issuer:  # RFC 9207: not from a mixed-up provider
            raise Malformed("this answer is of another provider: sign in again")
        if "error" in answer:
            raise Forbidden("the identity provider did not let you in")
        code = answer.get("code", "")
        if not 0 < len(code) <= CODE_LIMIT:
            raise Malformed("the identity provider sent no code: sign in again")
        grant = await self._redeem(code, attempt, redirect_uri)
        principal = await self._verifier.verify(_token(grant, "access_token"))
        subject, name = await self._verifier.verify_identity(
            _token(grant, "id_token"), client_id=self._client_id, nonce=attempt.nonce
        )
        if subject != principal.subject:
            raise Unauthenticated("the identity provider's tokens are about two people")
        return principal, name

    async def close(self) -> None:
        """Close the connections."""
        if self._owned is not None:
            await self._owned.aclose()

    async def _redeem(self, code: str, attempt: Attempt, redirect_uri: str) -> dict[str, Any]:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "client_id": self._client_id,
            "code_verifier": attempt.verifier,
        }
        headers = {}
        if secret := self._secret.get_secret_value():
            pair = f"{quote_plus(self._client_id)}:{quote_plus(secret)}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        endpoint = await self._discover("token_endpoint")
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                status, body = await fetch(self._http(), endpoint, form=form, headers=headers)
        except FAILURES as error:
            log.warning("console_sign_in_failed", reason=describe(error))
            raise Unavailable("the identity provider cannot be reached: try again later") from None
        if status != 200:
            log.warning("console_sign_in_refused", status=status)
            raise Malformed("the identity provider did not accept the code: sign in again")
        try:
            return parse_object(body)
        except ValueError:
            raise Unavailable("the identity provider's answer cannot be read") from None

    async def _discover(self, name: str) -> str:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await discover(self._http(), self._verifier.issuer, name)
        except FAILURES as error:
            log.warning("console_discovery_failed", reason=describe(error))
            raise Unavailable("the identity provider cannot be reached: try again later") from None

    def _http(self) -> httpx2.AsyncClient:
        if self._client is not None:
            return self._client
        self._owned = self._owned or create_client()
        return self._owned


def local_path(given: str) -> str:
    """Where to go after signing in: a page of the console, whatever was asked for."""
    path = given.partition("?")[0]
    fine = len(given) <= RETURN_LIMIT and _LOCAL.fullmatch(given) and "//" not in path and "/." not in path
    return given if fine else "/console"


def _token(grant: Mapping[str, Any], name: str) -> str:
    token = grant.get(name)
    if not isinstance(token, str) or not 0 < len(token) <= TOKEN_LIMIT:
        raise Unavailable(f"the identity provider sent no usable {name}")
    return token
