"""The development issuer: a small OpenID provider with discovery, JWKS, client credentials and a sign-in page.

Its clients are public knowledge, which is why it refuses to start outside development:

================  =======================  ====================================================================
client            secret                   what its tokens may carry
================  =======================  ====================================================================
developer         developer-secret         any scope asked for, and any ``role`` asked for (a field of our own)
service           service-secret           any scope asked for, no role
transfers-worker  transfers-worker-secret  scope ``internal:transfers.expire``, no role
administrator     administrator-secret     scope ``console``, role ADMINISTRATOR
operator          operator-secret          scope ``console``, role OPERATOR
================  =======================  ====================================================================

Whoever serves it leaves its address beside the keys, so that a command which was not told the port can sign as it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote_plus

import structlog
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet, KeySetSerialization, RSAKey

from duly.auth.issuer_codes import HERE, PEOPLE, SIGN_IN_CLIENT, Codes, read_asked, send_back, show_people
from duly.auth.issuer_forms import NO_STORE, TokenError, one, read_form
from duly.clock import unix_milliseconds
from duly.errors import Invalid, Refused
from duly.ids import uuid7
from duly.settings import Settings

log = structlog.get_logger("duly.issuer")
MOUNT = "/dev-issuer"
FILE = "issuer.json"
URL_FILE = "issuer.url"
KEY_BITS = 2048
KEYS_KEPT = 3  # after a rotation the older keys are still published, so that their tokens stay valid
AUDIENCE = "duly"
TTL_SECONDS = 3600
LONGEST_TTL_SECONDS = 30 * 86400
EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::", "localhost"})  # noqa: S104 - compared with, not bound to
_URL = re.compile(rf"http://[\w.:\[\]-]{{1,255}}:([0-9]{{1,5}}){MOUNT}")
TOKEN_FORM = {
    "required": True,
    "content": {
        "application/x-www-form-urlencoded": {
            "schema": {
                "type": "object",
                "required": ["grant_type"],
                "properties": {
                    "grant_type": {"type": "string", "enum": ["client_credentials", "authorization_code"]},
                    "client_id": {"type": "string", "description": "With client_secret, unless HTTP Basic has both."},
                    "client_secret": {"type": "string"},
                    "scope": {"type": "string", "description": "Scopes, separated by spaces."},
                    "role": {"type": "array", "items": {"type": "string"}, "description": "A field of our own."},
                    "audience": {"type": "string"},
                    "code": {"type": "string", "description": "With authorization_code."},
                    "code_verifier": {"type": "string"},
                    "redirect_uri": {"type": "string"},
                },
            }
        }
    },
}
TOKEN_ANSWERS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The form, the grant or the scope is wrong (RFC 6749, section 5.2)"},
    401: {"description": "No such client, or a wrong secret"},
    413: {"description": "The body is too large"},
}
_WORD = re.compile(r"[\x21\x23-\x5B\x5D-\x7E]{1,200}")  # RFC 6749: what a scope may consist of


@dataclass(frozen=True)
class Client:
    """Who may ask the token endpoint, and for what. ``None`` means whatever is asked for."""

    secret: str
    scopes: frozenset[str] | None
    roles: frozenset[str] | None


CLIENTS: Mapping[str, Client] = {
    "developer": Client("developer-secret", None, None),
    "service": Client("service-secret", None, frozenset()),
    "transfers-worker": Client("transfers-worker-secret", frozenset({"internal:transfers.expire"}), frozenset()),
    "administrator": Client("administrator-secret", frozenset({"console"}), frozenset({"ADMINISTRATOR"})),
    "operator": Client("operator-secret", frozenset({"console"}), frozenset({"OPERATOR"})),
}


class Issuer:
    """Signs tokens with a key from the data directory, so that a command needs no server to sign."""

    def __init__(self, url: str, path: Path, *, audience: str = AUDIENCE) -> None:
        self.url = url
        self.audience = audience
        self._path = path
        self._keys: KeySet | None = None
        self._seen: tuple[int, int] | None = None

    @classmethod
    def open(cls, settings: Settings, *, port: int | None = None) -> Issuer:
        """The issuer of this data directory; its key is made when there is none."""
        if settings.env != "development":
            raise Refused(
                "the development issuer refuses to start outside development: "
                "unset DULY_ENV, or use the tokens of your own OpenID provider"
            )
        url = find_url(settings) if port is None else make_url(settings.host, port)
        issuer = cls(url, settings.data / FILE, audience=settings.oidc_audience)
        issuer.keys()
        return issuer

    def sign(
        self,
        sub: str,
        *,
        scopes: Iterable[str] = (),
        roles: Iterable[str] = (),
        audience: str | None = None,
        ttl_seconds: int = TTL_SECONDS,
        client_id: str = "developer",
    ) -> str:
        """An access token in Keycloak's layout."""
        if not 0 < ttl_seconds <= LONGEST_TTL_SECONDS:
            raise Invalid(f"a token lives between 1 and {LONGEST_TTL_SECONDS} seconds, not {ttl_seconds}")
        now = unix_milliseconds() // 1000
        claims = {
            "iss": self.url,
            "sub": sub,
            "aud": audience or self.audience,
            "azp": client_id,
            "typ": "Bearer",
            "jti": str(uuid7()),
            "iat": now,
            "nbf": now,
            "exp": now + ttl_seconds,
            "scope": " ".join(_words(scopes, "scope")),
            "realm_access": {"roles": _words(roles, "role")},
        }
        return self._encode(claims)

    def sign_identity(self, sub: str, *, name: str, client_id: str, nonce: str) -> str:
        """An ID token: who signed in, for the client alone."""
        now = unix_milliseconds() // 1000
        times = {"iat": now, "auth_time": now, "exp": now + TTL_SECONDS}
        about = {"iss": self.url, "sub": sub, "aud": client_id, "azp": client_id, "typ": "ID", "nonce": nonce}
        return self._encode({**about, **times, "name": name, "preferred_username": sub})

    def _encode(self, claims: dict[str, Any]) -> str:
        key = self.keys().keys[0]
        return jwt.encode({"alg": "RS256", "kid": key.kid}, claims, key, algorithms=["RS256"])

    def keys(self) -> KeySet:
        """The signing key, then older ones that are still published; read again when the file changed."""
        if not self._path.exists():
            _write_new(self._path, KeySet([_new_key()]))
        state = self._path.stat()
        seen = (state.st_mtime_ns, state.st_ino)
        if self._keys is None or seen != self._seen:
            self._keys, self._seen = _read(self._path), seen
        return self._keys

    def rotate(self) -> None:
        """Sign with a new key from now on; tokens of the last ones stay valid."""
        kept = self.keys().keys[: KEYS_KEPT - 1]
        with _written(self._path, _dump(KeySet([_new_key(), *kept]))) as temporary:
            temporary.replace(self._path)

    def announce(self) -> None:
        """Leave the address for commands that sign without a server; the last one to serve is the one they find."""
        path = self._path.with_name(URL_FILE)
        try:
            with _written(path, self.url) as temporary:
                temporary.replace(path)
        except OSError as error:
            log.warning("issuer_url_not_written", reason=error.strerror)

    def public_keys(self) -> KeySetSerialization:
        """What the JWKS endpoint shows."""
        return self.keys().as_dict(private=False)


def make_url(host: str, port: int) -> str:
    """Where an api that listens on this host and port serves the issuer, as seen from the same machine."""
    if host in EVERY_ADDRESS:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}{MOUNT}" if ":" in host else f"http://{host}:{port}{MOUNT}"


def find_url(settings: Settings) -> str:
    """The issuer's address: on PORT if that names one, else where it was served last, else on the default port."""
    served = _read_url(settings.data / URL_FILE)
    port = settings.port if "port" in settings.model_fields_set else 0
    if served is not None and port in (0, served[1]):
        return served[0]
    return make_url(settings.host, settings.port)


def create_issuer_router(issuer: Issuer, *, clients: Mapping[str, Client] = CLIENTS) -> APIRouter:
    """The endpoints of an OpenID provider, to be mounted in the api's process; its address is announced."""
    issuer.announce()
    router = APIRouter(prefix=MOUNT, tags=["development issuer"])
    codes = Codes()

    @router.get("/.well-known/openid-configuration")
    async def discovery() -> dict[str, Any]:
        """Where everything is (OpenID Connect Discovery)."""
        return _configuration(issuer.url)

    @router.get("/jwks")
    async def jwks() -> dict[str, Any]:
        """The public keys."""
        return dict(issuer.public_keys())

    @router.post("/token", responses=TOKEN_ANSWERS, openapi_extra={"requestBody": TOKEN_FORM})
    async def token(request: Request) -> JSONResponse:
        """A token for a client of the development set (RFC 6749, section 4.4), or for a person's code (4.1)."""
        try:
            form = await read_form(request)
            if one(form, "grant_type") == "authorization_code":
                return JSONResponse(_redeem(issuer, codes, form), headers=NO_STORE)
            client_id, client = _authenticate(request, form, clients)
            return JSONResponse(_grant(issuer, client_id, client, form), headers=NO_STORE)
        except TokenError as error:
            return error.response()

    router.include_router(_create_sign_in_router(issuer, codes))
    return router


def _create_sign_in_router(issuer: Issuer, codes: Codes) -> APIRouter:
    """The pages that a person sees."""
    router = APIRouter(include_in_schema=False)

    @router.get("/authorize")
    async def ask(request: Request) -> Response:
        try:
            return show_people(read_asked(request, parse_qs(request.url.query, keep_blank_values=True)))
        except TokenError as error:
            return _refuse(error)

    @router.post("/authorize")
    async def answer(request: Request) -> Response:
        try:
            form = await read_form(request)
            return send_back(codes, read_asked(request, form), one(form, "person"), issuer.url)
        except TokenError as error:
            return _refuse(error)

    @router.get("/sign-in.css")
    async def stylesheet() -> Response:
        return Response((HERE / "static" / "sign-in.css").read_bytes(), media_type="text/css")

    return router


def _configuration(url: str) -> dict[str, Any]:
    return {
        "issuer": url,
        "authorization_endpoint": f"{url}/authorize",
        "token_endpoint": f"{url}/token",
        "jwks_uri": f"{url}/jwks",
        "grant_types_supported": ["authorization_code", "client_credentials"],
        "response_types_supported": ["code"],
        "code_challenge_methods_supported": ["S256"],
        "authorization_response_iss_parameter_supported": True,
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": ["RS256"],
        "token_endpoint_auth_methods_supported": ["client_secret_basic", "client_secret_post", "none"],
    }


def _refuse(error: TokenError) -> Response:
    headers = {**NO_STORE, "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'"}
    return HTMLResponse(error.description, status_code=error.status, headers=headers)


def _redeem(issuer: Issuer, codes: Codes, form: Mapping[str, list[str]]) -> dict[str, Any]:
    """Tokens for a code; the console is a public client, what it proves is that it began this sign-in (PKCE)."""
    if one(form, "client_id") != SIGN_IN_CLIENT:
        raise TokenError("invalid_client", "no such client", status=401)
    code = codes.redeem(form, SIGN_IN_CLIENT)
    person = PEOPLE[code.person]
    scopes = [scope for scope in code.scopes if scope != "openid"]
    try:
        signed = issuer.sign(code.person, scopes=scopes, roles=person.roles, client_id=SIGN_IN_CLIENT)
    except Invalid as error:
        raise TokenError("invalid_scope", str(error)) from error
    return {
        "access_token": signed,
        "id_token": issuer.sign_identity(code.person, name=person.name, client_id=SIGN_IN_CLIENT, nonce=code.nonce),
        "token_type": "Bearer",
        "expires_in": TTL_SECONDS,
        "scope": " ".join(scopes),
    }


def _grant(issuer: Issuer, client_id: str, client: Client, form: Mapping[str, list[str]]) -> dict[str, Any]:
    if one(form, "grant_type") != "client_credentials":
        raise TokenError("unsupported_grant_type", "client_credentials and authorization_code are supported")
    wanted = one(form, "scope").split()
    if client.scopes is not None and not client.scopes.issuperset(wanted):
        raise TokenError("invalid_scope", f"{client_id} may ask for: {' '.join(sorted(client.scopes))}")
    scopes = wanted or sorted(client.scopes or ())
    roles = form.get("role", []) if client.roles is None else sorted(client.roles)
    audience = one(form, "audience") or None
    try:
        signed = issuer.sign(
            f"service-account-{client_id}", scopes=scopes, roles=roles, audience=audience, client_id=client_id
        )
    except Invalid as error:
        raise TokenError("invalid_scope", str(error)) from error
    return {
        "access_token": signed,
        "token_type": "Bearer",
        "expires_in": TTL_SECONDS,
        "scope": " ".join(scopes),
    }


def _authenticate(request: Request, form: Mapping[str, list[str]], clients: Mapping[str, Client]) -> tuple[str, Client]:
    header = request.headers.get("authorization", "")
    if header:
        client_id, secret = _basic(header)
    else:
        client_id, secret = one(form, "client_id"), one(form, "client_secret")
    client = clients.get(client_id)
    right = client.secret if client else ""
    if not hmac.compare_digest(secret.encode(), right.encode()) or client is None:
        raise TokenError("invalid_client", "no such client, or a wrong secret", status=401)
    return client_id, client


def _basic(header: str) -> tuple[str, str]:
    scheme, _, encoded = header.partition(" ")
    try:
        client_id, colon, secret = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        client_id, colon, secret = "", "", ""
    if scheme.lower() != "basic" or not colon:
        raise TokenError("invalid_client", "the Authorization header is not HTTP Basic", status=401)
    return unquote_plus(client_id), unquote_plus(secret)


def _words(values: Iterable[str], kind: str) -> list[str]:
    words = list(dict.fromkeys(values))
    for word in words:
        if not _WORD.fullmatch(word):
            raise Invalid(f"{word!r} cannot be a {kind}: only visible ASCII characters, at most 200, no spaces")
    return words


# -- the files ---------------------------------------------------------------------------------


def _new_key() -> RSAKey:
    return RSAKey.generate_key(KEY_BITS, {"use": "sig", "alg": "RS256"}, private=True, auto_kid=True)


def _read(path: Path) -> KeySet:
    try:
        return KeySet.import_key_set(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, JoseError) as error:
        raise Refused(f"{path} does not hold the development issuer's keys: delete it, a new one is made") from error


def _write_new(path: Path, keys: KeySet) -> None:
    """Make the file unless another process just did; nobody ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _written(path, _dump(keys)) as temporary, contextlib.suppress(FileExistsError):
        os.link(temporary, path)
        log.info("issuer_key_made", kid=keys.keys[0].kid)


def _dump(keys: KeySet) -> str:
    return json.dumps(keys.as_dict(private=True))


def _read_url(path: Path) -> tuple[str, int] | None:
    """The address and its port, if there is one that can be used."""
    try:
        url = path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    match = _URL.fullmatch(url)
    return (url, int(match[1])) if match else None


@contextlib.contextmanager
def _written(path: Path, content: str) -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # made with mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
