"""The development issuer's sign-in page and its codes (RFC 6749, section 4.1, with PKCE: RFC 7636).

Whoever opens the page chooses one of these people; nobody has a password, which is why it is for development only.

======  ==================  ==================================================================
person  roles               for
======  ==================  ==================================================================
ada     ADMINISTRATOR       the whole console
otto    OPERATOR            the console, to look at
nora    none                seeing what a person without a role sees
mona    QUALITY_MANAGER     non-conformities
eric    QUALITY_ENGINEER    non-conformities, except closing them
rita    DECISION_ADMIN      rules: versions, test bench, dry run
cora    COMPLIANCE_OFFICER  cases
carl    COMPLIANCE_OFFICER  cases, as the second pair of eyes
alice   none                owns products, orders
bob     none                gets transfers
======  ==================  ==================================================================
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from duly.auth.issuer_forms import NO_STORE, TokenError, one
from duly.clock import monotonic

HERE = Path(__file__).parent
SIGN_IN_CLIENT = "duly-console"
CODE_SECONDS = 60.0
CODES_LIMIT = 1_000
FIELD_LIMIT = 2_000
ASKED = ("client_id", "redirect_uri", "scope", "state", "nonce", "code_challenge")
_CHALLENGE = re.compile(r"[A-Za-z0-9_-]{43}")
_templates = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined)


@dataclass(frozen=True)
class Person:
    """Somebody who can sign in here."""

    name: str
    roles: tuple[str, ...] = ()
    about: str = ""


PEOPLE: Mapping[str, Person] = {
    "ada": Person("Ada Kowalska", ("ADMINISTRATOR",), "runs the console"),
    "otto": Person("Otto Lindqvist", ("OPERATOR",), "looks at the console"),
    "nora": Person("Nora Haddad", (), "has no role in the console"),
    "mona": Person("Mona Silva", ("QUALITY_MANAGER",), "closes non-conformities"),
    "eric": Person("Eric Moreau", ("QUALITY_ENGINEER",), "reports non-conformities"),
    "rita": Person("Rita Okafor", ("DECISION_ADMIN",), "writes the rules"),
    "cora": Person("Cora Lehmann", ("COMPLIANCE_OFFICER",), "decides about cases"),
    "carl": Person("Carl Novak", ("COMPLIANCE_OFFICER",), "confirms what others decide"),
    "alice": Person("Alice Tan", (), "owns products and orders"),
    "bob": Person("Bob Mensah", (), "gets transfers"),
}


def name_people() -> str:
    """Whoever can sign in, with what they may do, on one line."""
    return ", ".join(
        f"{id} ({', '.join(role.lower().replace('_', ' ') for role in person.roles) or 'no role'})"
        for id, person in PEOPLE.items()
    )


@dataclass(frozen=True)
class Code:
    """Who signed in, and for whom: a code is good for this client, address and verifier, once, for a minute."""

    person: str
    client_id: str
    redirect_uri: str
    challenge: str
    scopes: tuple[str, ...]
    nonce: str
    until: float


class Codes:
    """The codes that were handed out and not redeemed yet."""

    def __init__(self, *, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._held: dict[str, Code] = {}

    def make(self, person: str, asked: Mapping[str, str]) -> str:
        """A new code for what was asked; the oldest is forgotten when there are too many."""
        while len(self._held) >= CODES_LIMIT:
            del self._held[next(iter(self._held))]
        code = secrets.token_urlsafe(32)
        self._held[code] = Code(
            person, asked["client_id"], asked["redirect_uri"], asked["code_challenge"],
            tuple(asked["scope"].split()), asked["nonce"], self._now() + CODE_SECONDS,
        )  # fmt: skip
        return code

    def redeem(self, form: Mapping[str, list[str]], client_id: str) -> Code:
        """The code of a token request; whatever is wrong with the rest, it is used up."""
        code = self._held.pop(one(form, "code"), None)
        digest = hashlib.sha256(one(form, "code_verifier").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if (
            code is None
            or self._now() > code.until
            or code.client_id != client_id
            or code.redirect_uri != one(form, "redirect_uri")
            or not hmac.compare_digest(challenge, code.challenge)
        ):
            raise TokenError("invalid_grant", "the code is unknown, used, too old, or was made for another request")
        return code


def read_asked(request: Request, given: Mapping[str, list[str]]) -> dict[str, str]:
    """What an authorization request asks for; TokenError when it cannot even be answered with a redirect."""
    asked = {name: one(given, name) for name in ASKED}
    if any(len(value) > FIELD_LIMIT for value in asked.values()):
        raise TokenError("invalid_request", "a parameter is too long")
    if asked["client_id"] != SIGN_IN_CLIENT:
        raise TokenError("invalid_client", f"people sign in for the client {SIGN_IN_CLIENT} only")
    if not _is_ours(asked["redirect_uri"], request.url.hostname):
        raise TokenError("invalid_request", "the redirect_uri is neither on this machine nor on this server")
    if one(given, "response_type") != "code":
        raise TokenError("unsupported_response_type", "the response_type is code")
    if one(given, "code_challenge_method") != "S256" or not _CHALLENGE.fullmatch(asked["code_challenge"]):
        raise TokenError("invalid_request", "PKCE is required, with S256")
    if not asked["state"]:
        raise TokenError("invalid_request", "a state is required")
    return asked


def show_people(asked: Mapping[str, str]) -> HTMLResponse:
    """The page on which a person chooses who to be."""
    page = _templates.get_template("sign_in.html").render(people=PEOPLE, asked=asked)
    parts = urlsplit(asked["redirect_uri"])
    policy = (
        "default-src 'none'; style-src 'self'; base-uri 'none'; frame-ancestors 'none'; "
        f"form-action 'self' {parts.scheme}://{parts.netloc}"  # a browser checks where the form is redirected to, too
    )
    headers = {**NO_STORE, "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(page, headers={**headers, "Referrer-Policy": "no-referrer"})


def send_back(codes: Codes, asked: Mapping[str, str], person: str, issuer: str) -> Response:
    """Back to the client, with a code; its issuer is named (RFC 9207)."""
    if person not in PEOPLE:
        raise TokenError("access_denied", "there is no such person")
    query = urlencode({"code": codes.make(person, asked), "state": asked["state"], "iss": issuer})
    joint = "&" if urlsplit(asked["redirect_uri"]).query else "?"
    return RedirectResponse(f"{asked['redirect_uri']}{joint}{query}", status_code=303, headers=NO_STORE)


def _is_ours(redirect_uri: str, host: str | None) -> bool:
    """On this machine, or on the host that the page itself was asked for."""
    try:
        parts = urlsplit(redirect_uri)
        target, _ = parts.hostname, parts.port
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not target or parts.username is not None or "#" in redirect_uri:
        return False
    if not redirect_uri.isascii() or not redirect_uri.isprintable() or ";" in parts.netloc or " " in redirect_uri:
        return False
    return target == host or target == "localhost" or _is_loopback(target)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
