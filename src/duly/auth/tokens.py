"""Verifying access tokens: RS256 JWTs of one issuer for one audience (RFC 7519, RFC 8725, RFC 9068)."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from joserfc.jwk import RSAKey
from joserfc.jws import JWSRegistry
from joserfc.util import urlsafe_b64decode

from duly.auth.challenges import invalid_token
from duly.auth.jwks import KID_LIMIT, JwksCache
from duly.auth.principals import Principal
from duly.auth.strict_json import parse_object
from duly.clock import unix_milliseconds

TOKEN_LIMIT = 16_384
MOST_REMEMBERED = 1_000  # tokens that were believed, a kilobyte or so each; the one that was used longest ago goes
NAME_LIMIT = 255  # OpenID Connect's own limit for a subject
LATEST_SECONDS = 253_402_300_799  # the year 9999; a time in milliseconds is beyond it
TYPES = frozenset({"jwt", "at+jwt"})
OTHER_TOKENS = frozenset({"at_hash", "c_hash", "events"})  # claims of ID tokens and of security events
RS256 = JWSRegistry(algorithms=["RS256"]).get_alg("RS256")  # ours, never the token's choice
_WORD = re.compile(r"[\x21\x23-\x5B\x5D-\x7E]{1,200}")  # RFC 6749: what a scope may consist of


def wall_seconds() -> float:
    """Now, for comparing with a token's times: those are another machine's wall clock too."""
    return unix_milliseconds() / 1000


@dataclass(frozen=True, slots=True)
class _Believed:
    """What remains of a token that was right in everything: who it is for, and what may change about that."""

    kid: str
    key: RSAKey
    begins: float
    ends: float
    principal: Principal


class Verifier:
    """Turns a token into a Principal, or says why not."""

    def __init__(
        self,
        issuer: str,
        audience: str,
        jwks: JwksCache,
        *,
        leeway_seconds: float = 30,
        role_clients: Iterable[str] = (),
        now: Callable[[], float] = wall_seconds,
    ) -> None:
        if not issuer or not issuer.isprintable() or " " in issuer or not audience:
            raise ValueError("a verifier needs an issuer, which is a URL, and an audience")
        self.issuer, self.audience = issuer, audience
        self._jwks = jwks
        self._leeway_seconds = leeway_seconds
        self._role_clients = frozenset({audience, *role_clients})
        self._now = now
        self._believed: OrderedDict[bytes, _Believed] = OrderedDict()  # by digest: no token is kept

    async def verify(self, token: str) -> Principal:
        """Who the token is for; Unauthenticated when it is not valid, Unavailable when that cannot be known.

        Of a token that was believed before, its key and its times are checked again, and nothing else: the rest of it
        cannot have changed, nor can what it is compared with.
        """
        written = _encode(token)
        digest = hashlib.sha256(written).digest()
        known = self._believed.get(digest)
        if known is None or await self._jwks.key(known.kid) is not known.key:  # each refresh makes its keys anew
            known = await self._believe(written)
        else:
            self._check_times(known.begins, known.ends)
        self._remember(digest, known)
        return known.principal

    async def verify_identity(self, token: str, *, client_id: str, nonce: str) -> tuple[str, str]:
        """Whom an ID token is about, and what to call them; it must be for this client, and for this sign-in."""
        signed, header, payload, signature = _split(_encode(token))
        key = await self._jwks.key(_check_header(header))
        if not _is_signed(signed, signature, key):
            raise invalid_token("the ID token's signature is wrong")
        claims = _parse(payload, "the ID token's payload is not a JSON object")
        if claims.get("iss") != self.issuer:
            raise invalid_token("the ID token is of another issuer")
        audience = claims.get("aud")
        if audience not in (client_id, [client_id]) and not (
            isinstance(audience, list) and client_id in audience and claims.get("azp") == client_id
        ):
            raise invalid_token("the ID token is for another client")
        if _time(claims, "exp", required=True) <= self._now() - self._leeway_seconds:
            raise invalid_token("the ID token has expired")
        said = claims.get("nonce")
        if not isinstance(said, str) or not hmac.compare_digest(said.encode("utf-8", "replace"), nonce.encode()):
            raise invalid_token("the ID token was made for another sign-in")
        subject = _subject(claims)
        names = (claims.get("name"), claims.get("preferred_username"))
        return subject, next((str(name) for name in names if _is_name(name)), subject)

    def look(self) -> tuple[bool, str]:
        """Whether the provider gives its keys, in words that anybody may read."""
        return self._jwks.look()

    async def close(self) -> None:
        """Close the key cache."""
        await self._jwks.close()

    async def _believe(self, token: bytes) -> _Believed:
        signed, header, payload, signature = _split(token)
        kid = _check_header(header)
        key = await self._jwks.key(kid)
        if not _is_signed(signed, signature, key):
            raise invalid_token("the token's signature is wrong")
        claims = _parse(payload, "the token's payload is not a JSON object")
        begins, ends = self._check_claims(claims)
        principal = Principal(
            subject=_subject(claims),
            issuer=self.issuer,
            scopes=_scopes(claims),
            roles=_roles(claims, self._role_clients),
            client_id=_client_id(claims),
        )
        return _Believed(kid, key, begins, ends, principal)

    def _remember(self, digest: bytes, known: _Believed) -> None:
        self._believed[digest] = known
        self._believed.move_to_end(digest)
        if len(self._believed) > MOST_REMEMBERED:
            self._believed.popitem(last=False)

    def _check_claims(self, claims: Mapping[str, Any]) -> tuple[float, float]:
        """Refuse what is not for us or not of now; from when to when it is good."""
        if claims.get("iss") != self.issuer:
            raise invalid_token("the token is of another issuer")
        if claims.get("typ", "Bearer") != "Bearer" or not OTHER_TOKENS.isdisjoint(claims):
            raise invalid_token("the token is not an access token")
        self._check_audience(claims.get("aud"))
        ends = _time(claims, "exp", required=True)
        begins = max(_time(claims, name, required=False) for name in ("nbf", "iat"))
        self._check_times(begins, ends)
        return begins, ends

    def _check_times(self, begins: float, ends: float) -> None:
        now = self._now()
        if ends <= now - self._leeway_seconds:
            raise invalid_token("the token has expired")
        if begins > now + self._leeway_seconds:
            raise invalid_token("the token is not valid yet")

    def _check_audience(self, audience: object) -> None:
        audiences = audience if isinstance(audience, list) else [audience]
        if not all(isinstance(one, str) for one in audiences) or self.audience not in audiences:
            raise invalid_token("the token is for another audience")


def _encode(token: str) -> bytes:
    if len(token) > TOKEN_LIMIT:
        raise invalid_token("the token is too long")
    return token.encode("utf-8", "replace")


def _split(token: bytes) -> tuple[bytes, dict[str, Any], bytes, bytes]:
    """What was signed, the header, the payload, the signature; nothing in it is believed yet."""
    parts = token.split(b".")
    if len(parts) == 5:
        raise invalid_token("the token is encrypted, and only signed ones are accepted")
    if len(parts) != 3:
        raise invalid_token("the token is not a signed JWT")
    try:
        header, payload, signature = (urlsafe_b64decode(part) for part in parts)
    except ValueError:
        raise invalid_token("the token is not a signed JWT") from None
    return parts[0] + b"." + parts[1], _parse(header, "the token's header is not a JSON object"), payload, signature


def _parse(content: bytes, reason: str) -> dict[str, Any]:
    try:
        return parse_object(content)
    except ValueError:
        raise invalid_token(reason) from None


def _check_header(header: Mapping[str, Any]) -> str:
    """The kid, once the rest has been found harmless. Keys that a token brings along (jwk, jku, x5c) are not read."""
    if header.get("alg") != "RS256":
        raise invalid_token("the token is not signed with RS256")
    if "crit" in header or "b64" in header:
        raise invalid_token("the token uses an extension that is not supported")
    kind = header.get("typ", "JWT")
    if not isinstance(kind, str) or kind.lower().removeprefix("application/") not in TYPES:
        raise invalid_token("the token is not an access token")
    kid = header.get("kid")
    if not isinstance(kid, str) or not 0 < len(kid) <= KID_LIMIT:
        raise invalid_token("the token does not name the key that signed it")
    return kid


def _is_signed(signed: bytes, signature: bytes, key: RSAKey) -> bool:
    RS256.check_key(key)
    return RS256.verify(signed, signature, key)


def _time(claims: Mapping[str, Any], name: str, *, required: bool) -> float:
    """A NumericDate. The range also keeps out NaN, infinity, and milliseconds, with which nothing would ever expire."""
    value = claims.get(name)
    if name not in claims and not required:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST_SECONDS:
        raise invalid_token(f"the token's {name} is not a time in seconds")
    return value


def _subject(claims: Mapping[str, Any]) -> str:
    subject = claims.get("sub")
    if not _is_name(subject):
        raise invalid_token("the token does not say whom it is for")
    return str(subject)


def _client_id(claims: Mapping[str, Any]) -> str | None:
    client_id = claims.get("azp", claims.get("client_id"))
    return str(client_id) if _is_name(client_id) else None


def _is_name(value: object) -> bool:
    """Printable also means: no control characters, and nothing that UTF-8 cannot carry."""
    return isinstance(value, str) and 0 < len(value) <= NAME_LIMIT and value.isprintable()


def _scopes(claims: Mapping[str, Any]) -> frozenset[str]:
    """What ``scope`` says, or ``scp`` where there is none; of a malformed one, nothing."""
    name = "scope" if "scope" in claims else "scp"
    value = claims.get(name)
    words = value.split(" ") if isinstance(value, str) else _strings(value) if name == "scp" else []
    return frozenset(word for word in words if _WORD.fullmatch(word))


def _roles(claims: Mapping[str, Any], clients: Iterable[str]) -> frozenset[str]:
    """Keycloak's layout: roles of the realm, and of the clients that count."""
    resources = claims.get("resource_access")
    holders = [claims.get("realm_access")]
    if isinstance(resources, dict):
        holders += [resources.get(client) for client in clients]
    named = (_strings(holder.get("roles")) for holder in holders if isinstance(holder, dict))
    return frozenset(role for roles in named for role in roles if _is_name(role))


def _strings(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
