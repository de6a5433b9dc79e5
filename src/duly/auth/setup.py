"""The verifier and the service tokens of a process, as the settings say."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from pydantic import SecretStr

from duly.auth.client import ServiceTokens
from duly.auth.issuer import CLIENTS, MOUNT, find_url
from duly.auth.jwks import JwksCache
from duly.auth.tokens import Verifier
from duly.errors import Refused
from duly.settings import Settings


class NoCredentials(Refused):
    """This process has no secret of its own."""


def create_verifier(settings: Settings, *, issuer_url: str | None) -> Verifier:
    """Verifies tokens of DULY_OIDC_ISSUER, or in development those of the issuer served at ``issuer_url``."""
    issuer = _issuer(settings, issuer_url)
    if settings.oidc_jwks_url:
        _check_url(settings.oidc_jwks_url, "DULY_OIDC_JWKS_URL", settings)
    jwks = JwksCache(issuer, jwks_url=settings.oidc_jwks_url or None, stale_seconds=settings.jwks_stale_seconds)
    return Verifier(issuer, settings.oidc_audience, jwks, role_clients=settings.oidc_role_clients)


def create_service_tokens(settings: Settings, *, scope: str) -> ServiceTokens:
    """Tokens of this service, as DULY_CLIENT_ID, for calls to others."""
    issuer = _issuer(settings, None)
    return ServiceTokens(issuer, settings.client_id, _secret(settings), scope=scope)


def find_api_url(settings: Settings) -> str:
    """Where the API is, without a slash at the end: DULY_API_URL, or the port of this machine that serves it."""
    if settings.api_url:
        return settings.api_url.rstrip("/")
    if settings.env == "development":
        return find_url(settings).removesuffix(MOUNT)
    return f"http://127.0.0.1:{settings.port}"


def _issuer(settings: Settings, served: str | None) -> str:
    if settings.oidc_issuer:
        return _check_url(settings.oidc_issuer, "DULY_OIDC_ISSUER", settings)
    if settings.env == "development":
        return served or find_url(settings)
    raise Refused(
        "there is nobody whose tokens could be verified: set DULY_OIDC_ISSUER to the URL of your OpenID provider, "
        "as in https://id.example.com/realms/main"
    )


def _check_url(url: str, name: str, settings: Settings) -> str:
    """Refuse what is not a plain https URL; what it says is not repeated, it might hold a password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        raise Refused(f"{name} is not a URL: write it as https://id.example.com/...")
    if parts.username is not None or parts.password is not None or "#" in url:
        raise Refused(f"{name} must hold no user, password or fragment")
    if parts.scheme == "http" and not settings.oidc_allow_http and not _is_loopback(host):
        raise Refused(
            f"{name} is http://, and whoever is on the way could hand out keys of their own: "
            "use https://, or set DULY_OIDC_ALLOW_HTTP=true if that network is yours alone"
        )
    return url


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _secret(settings: Settings) -> SecretStr:
    """DULY_CLIENT_SECRET; those of the development issuer's clients are known."""
    if settings.client_secret.get_secret_value():
        return settings.client_secret
    known = CLIENTS.get(settings.client_id)
    if settings.env == "development" and not settings.oidc_issuer and known is not None:
        return SecretStr(known.secret)
    raise NoCredentials(f"the client {settings.client_id} has no secret: set DULY_CLIENT_SECRET (and DULY_CLIENT_ID)")
