"""Our api as a process of its own, and browsers that sign in on Keycloak's page."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2

from tests.engine.cli.commands import ROOT, environment, free_port, running, status, wait_until
from tests.keycloak.server import FILE, Keycloak

EXPIRE = [sys.executable, "-c", "from apps.transfers.workers import main; main()"]
CALLBACK = "/console/sign-in/callback"
PEOPLE = {
    "ada": ("Ada", "Kowalska", "ada's long password", "ADMINISTRATOR"),
    "otto": ("Otto", "Lindqvist", "otto's long password", "OPERATOR"),
    "cora": ("Cora", "Lehmann", "cora's long password", "COMPLIANCE_OFFICER"),
    "nora": ("Nora", "Haddad", "nora's long password", "QUALITY_MANAGER"),  # a role, and none of the console's
    "eric": ("Eric", "Moreau", "eric's long password", "QUALITY_ENGINEER"),
    "vera": ("Vera", "Santos", "vera's long password", *(role["name"] for role in FILE["roles"]["realm"])),
}
APPS = {client["clientId"]: client for client in FILE["clients"] if client["publicClient"]}  # of people
_FORM = re.compile(r'<form[^>]*id="kc-form-login"[^>]*action="([^"]+)"')
_NAVIGATION = re.compile(r'<nav aria-label="Pages">(.*?)</nav>', re.DOTALL)
_CSRF = re.compile(r'<meta name="csrf-token" content="([0-9a-f]{64})">')


@dataclass(frozen=True)
class Site:
    """The api, and the log of its process."""

    url: str
    log: Path

    def get(self, path: str, token: str) -> httpx2.Response:
        """A request with a token."""
        return self.ask("GET", path, token)

    def ask(self, method: str, path: str, token: str, body: object = None) -> httpx2.Response:
        """A request with a token, and perhaps a body."""
        headers = {"Authorization": f"Bearer {token}"}
        return httpx2.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=30, trust_env=False)

    def identity(self) -> dict[str, Any]:
        """What ``/readyz``, which says 200, says about the provider."""
        answer = httpx2.get(f"{self.url}/readyz", timeout=30, trust_env=False)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["checks"]["identity"])


@contextlib.contextmanager
def serving(
    keycloak: Keycloak, dsn: str, directory: Path, *, public: bool = False, before: Callable[[], None] = lambda: None
) -> Iterator[Site]:
    """``duly api``, with this Keycloak as its provider and the console as its client; ``before`` it starts."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    keycloak.change_client("duly-console", redirectUris=[f"{url}{CALLBACK}"], publicClient=public)
    env = environment(
        DULY_APP="apps.wiring:app", DATABASE_URL=dsn, PORT=str(port), DULY_DATA=str(directory), DULY_LOG_FORMAT="json",
        DULY_ALLOW_UNSAFE_DATABASE="1", DULY_OIDC_ISSUER=keycloak.issuer,
        DULY_CONSOLE_CLIENT_SECRET="" if public else keycloak.secret("duly-console"),
    )  # fmt: skip
    log = directory / "api.log"
    before()
    with running("api", env=env, log=log):
        wait_until(lambda: status(f"{url}/readyz") == 200, seconds=120, what="/readyz is 200")
        yield Site(url, log)


def run_hourly_task(site: Site, keycloak: Keycloak, secret: str) -> tuple[int, str]:
    """As a process, with the client that the realm file gives it; its exit code, and all it said."""
    env = environment(
        DULY_OIDC_ISSUER=keycloak.issuer, DULY_API_URL=site.url, DULY_CLIENT_ID="transfers-worker",
        DULY_CLIENT_SECRET=secret, DULY_LOG_FORMAT="json",
    )  # fmt: skip
    done = subprocess.run(EXPIRE, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@contextlib.contextmanager
def browser(site: Site) -> Iterator[httpx2.Client]:
    """One that follows no redirect by itself, so that each can be looked at.

    As real ones do, it brings cookies that are for TLS only to this machine itself without: Keycloak counts on it.
    """
    jar = CookieJar(DefaultCookiePolicy(secure_protocols=("https", "http")))
    with httpx2.Client(base_url=site.url, timeout=60, trust_env=False, cookies=jar) as client:
        yield client


def open_form(client: httpx2.Client, address: str) -> str:
    """Keycloak's page for a name and a password; where its form goes."""
    page = client.get(address)
    assert page.status_code == 200, page.text
    found = _FORM.search(page.text)
    assert found is not None, page.text
    return unescape(found[1])


def fill_in(client: httpx2.Client, form: str, person: str, password: str = "") -> httpx2.Response:
    """Send the form of that page."""
    return client.post(form, data={"username": person, "password": password or PEOPLE[person][2], "credentialId": ""})


def come_back(client: httpx2.Client, person: str, path: str = "/console") -> str:
    """Begin at our console, sign in at Keycloak; the address that it sends the browser back to."""
    begun = client.get(f"/console/sign-in?{urlencode({'return_to': path})}")
    assert begun.status_code == 302, begun.text
    sent = fill_in(client, open_form(client, begun.headers["location"]), person)
    assert sent.status_code == 302, sent.text
    return str(sent.headers["location"])


def sign_in(client: httpx2.Client, person: str, path: str = "/console") -> httpx2.Response:
    """All of it: our answer to coming back."""
    return client.get(come_back(client, person, path))


def csrf_of(client: httpx2.Client) -> str:
    """The token that the forms of this browser carry."""
    found = _CSRF.search(client.get("/console/processes").text)
    assert found is not None
    return found[1]


def navigation(client: httpx2.Client, path: str = "/console") -> list[str]:
    """Where the console's navigation leads this browser."""
    page = client.get(path)
    found = _NAVIGATION.search(page.text)
    assert found is not None, page.text
    return re.findall(r'href="([^"]+)"', found[1])


def authorize(keycloak: Keycloak, client_id: str, scope: str, **changes: str) -> tuple[str, str]:
    """An address at which an application in a browser sends people to sign in, and the verifier that it keeps."""
    verifier = secrets.token_urlsafe(32)
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
    asked = {
        "response_type": "code", "client_id": client_id, "redirect_uri": APPS[client_id]["redirectUris"][0],
        "scope": f"openid {scope}", "state": "s", "nonce": "n", "code_challenge": challenge,
        "code_challenge_method": "S256", **changes,
    }  # fmt: skip
    query = urlencode({name: given for name, given in asked.items() if given})
    return f"{keycloak.issuer}/protocol/openid-connect/auth?{query}", verifier


def redeem(keycloak: Keycloak, client_id: str, code: str, verifier: str) -> httpx2.Response:
    """What that application does with a code."""
    form = {"grant_type": "authorization_code", "client_id": client_id, "code": code, "code_verifier": verifier}
    return keycloak.grant({**form, "redirect_uri": APPS[client_id]["redirectUris"][0]})


def obtain(client: httpx2.Client, keycloak: Keycloak, client_id: str, scope: str, person: str = "") -> dict[str, Any]:
    """The tokens of a sign-in; without a person, of the one whom Keycloak knows this browser to be."""
    address, verifier = authorize(keycloak, client_id, scope)
    sent = fill_in(client, open_form(client, address), person) if person else client.get(address)
    assert sent.status_code == 302, sent.text
    granted = redeem(keycloak, client_id, code_in(sent.headers["location"]), verifier)
    return dict(granted.raise_for_status().json())


def code_in(address: str) -> str:
    """The code that Keycloak sent along."""
    return parse_qs(urlsplit(address).query)["code"][0]


def with_kid(token: str, kid: str) -> str:
    """The same token under the name of another key."""
    header = json.dumps({**parts_of(token)[0], "kid": kid}).encode()
    return f"{base64.urlsafe_b64encode(header).rstrip(b'=').decode()}.{token.partition('.')[2]}"


def parts_of(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header and the claims of a token; nothing is verified."""
    header, claims = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in token.split(".")[:2])
    return json.loads(header), json.loads(claims)
