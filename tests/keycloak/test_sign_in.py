"""People sign in to our console on Keycloak's own page: authorization code with PKCE, from end to end (E5.1)."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
import pytest

from tests.keycloak.pages import (
    CALLBACK,
    PEOPLE,
    Site,
    browser,
    code_in,
    come_back,
    csrf_of,
    fill_in,
    open_form,
    parts_of,
    serving,
    sign_in,
)
from tests.keycloak.server import Keycloak
from tests.support import rows, value

pytestmark = [pytest.mark.keycloak, pytest.mark.timeout(1800)]
SESSIONS = "SELECT count(*) FROM duly.console_sessions WHERE revoked_at IS NULL"
APP = "https://app.example.com/signed-in"


def authorize(keycloak: Keycloak, **changes: str) -> tuple[str, str]:
    """An address at which a customer's application sends people to sign in, and the verifier that it keeps."""
    verifier = secrets.token_urlsafe(32)
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
    asked = {
        "response_type": "code", "client_id": "duly-customers", "redirect_uri": APP, "scope": "openid commerce",
        "state": "s", "nonce": "n", "code_challenge": challenge, "code_challenge_method": "S256", **changes,
    }  # fmt: skip
    query = urlencode({name: given for name, given in asked.items() if given})
    return f"{keycloak.issuer}/protocol/openid-connect/auth?{query}", verifier


def redeem(keycloak: Keycloak, code: str, verifier: str) -> httpx2.Response:
    """What that application does with a code."""
    form = {"grant_type": "authorization_code", "client_id": "duly-customers", "code": code, "redirect_uri": APP}
    return keycloak.grant({**form, "code_verifier": verifier})


def test_an_administrator_signs_in_works_and_signs_out(site: Site, dsn: str) -> None:
    with browser(site) as ada:
        assert ada.get("/console/jobs").headers["location"] == "/console/sign-in?return_to=%2Fconsole%2Fjobs"
        back = sign_in(ada, "ada", "/console/jobs")
        assert (back.status_code, back.headers["location"]) == (303, "/console/jobs"), back.text
        assert "Ada Kowalska" in ada.get("/console/jobs").text
        assert rows(dsn, "SELECT name, roles FROM duly.console_sessions") == [("Ada Kowalska", ["ADMINISTRATOR"])]
        cookies = "".join(back.headers.get_list("set-cookie"))
        assert "eyJ" not in cookies, "no token in the browser"
        form = {"name": "duly.forget-audit", "csrf": csrf_of(ada), "confirmed": "yes"}
        assert ada.post("/console/actions/schedules.trigger", data=form).status_code == 303
        assert value(dsn, "SELECT actor LIKE 'Ada Kowalska (%%' FROM duly.audit ORDER BY at DESC LIMIT 1", {})
        out = ada.post("/console/sign-out", data={"csrf": csrf_of(ada)})
        assert (out.status_code, out.headers["location"]) == (303, "/console/signed-out")
        assert "/console/sign-in?again=1" in ada.get("/console/signed-out").text
        assert ada.get("/console").status_code == 302
        assert value(dsn, SESSIONS) == 0
    assert "eyJ" not in site.log.read_text(), "no token in the log"


def test_after_signing_out_the_password_is_asked_for_again(site: Site) -> None:
    """Keycloak still knows the browser: the link of our page must not let the next person in with one click."""
    with browser(site) as ada:
        sign_in(ada, "ada")
        ada.post("/console/sign-out", data={"csrf": csrf_of(ada)})
        remembered = ada.get(ada.get("/console/sign-in").headers["location"])
        assert remembered.status_code == 302, "single sign-on"
        again = ada.get("/console/sign-in?again=1").headers["location"]
        assert open_form(ada, again)


def test_each_person_sees_what_their_roles_open(site: Site, dsn: str) -> None:
    with browser(site) as otto, browser(site) as cora, browser(site) as nora:
        assert sign_in(otto, "otto").status_code == 303
        assert otto.get("/console/jobs").status_code == 200
        refused = otto.post("/console/actions/schedules.trigger", data={"csrf": csrf_of(otto), "name": "x"})
        assert refused.status_code == 403
        assert sign_in(cora, "cora", "/console/cases").status_code == 303
        assert cora.get("/console/cases").status_code == 200
        assert cora.get("/console/jobs").status_code == 403
        answer = sign_in(nora, "nora")
        assert answer.status_code == 403
        assert "no role that the console asks for" in answer.text
    held = rows(dsn, "SELECT roles FROM duly.console_sessions ORDER BY roles")
    assert held == [(["COMPLIANCE_OFFICER"],), (["OPERATOR"],)]


def test_a_wrong_password_brings_nobody_back(site: Site, dsn: str) -> None:
    with browser(site) as client:
        form = open_form(client, client.get("/console/sign-in").headers["location"])
        answer = fill_in(client, form, "ada", "wrong")
        assert answer.status_code == 200
        assert "Invalid username or password" in answer.text
    assert value(dsn, SESSIONS) == 0


def test_a_code_needs_the_verifier_it_was_asked_with(site: Site, dsn: str) -> None:
    """Whoever catches a code cannot use it: not even we, with another verifier."""
    with browser(site) as client:
        back = come_back(client, "ada")
        begun = json.loads(base64.urlsafe_b64decode(client.cookies["duly-sign-in"]))
        changed = base64.urlsafe_b64encode(json.dumps({**begun, "verifier": "x" * 43}).encode()).decode()
        answer = client.get(back, headers={"Cookie": f"duly-sign-in={changed}"})
        assert answer.status_code == 400
        assert "did not accept the code" in answer.text
        assert client.get(back).status_code == 400, "the code is used up, also for the right one"
    assert value(dsn, SESSIONS) == 0


def test_a_code_is_good_once(site: Site, dsn: str) -> None:
    with browser(site) as client:
        back = come_back(client, "ada")
        kept = client.cookies["duly-sign-in"]
        assert client.get(back).status_code == 303
        assert client.get(back, headers={"Cookie": f"duly-sign-in={kept}"}).status_code == 400
    assert value(dsn, SESSIONS) == 1


def test_the_console_may_be_a_public_client(keycloak: Keycloak, dsn: str, tmp_path: Path) -> None:
    """Without DULY_CONSOLE_CLIENT_SECRET: PKCE is what is left, and is enough."""
    with serving(keycloak, dsn, tmp_path, public=True) as site, browser(site) as client:
        assert sign_in(client, "ada").status_code == 303
        back = parse_qs(urlsplit(client.get("/console/sign-in").headers["location"]).query)
        assert back["redirect_uri"] == [f"{site.url}{CALLBACK}"]


def test_a_secret_that_is_wrong_is_said_and_not_repeated(keycloak: Keycloak, dsn: str, tmp_path: Path) -> None:
    with serving(keycloak, dsn, tmp_path) as site, browser(site) as client:
        back = come_back(client, "ada")
        keycloak.change_client("duly-console", secret=secrets.token_urlsafe(16))
        answer = client.get(back)
        assert answer.status_code == 400
        assert "did not accept the code" in answer.text
        assert code_in(back) not in site.log.read_text()


@pytest.mark.parametrize("changes", [{"code_challenge": "", "code_challenge_method": ""},
                                     {"code_challenge_method": "plain"}], ids=["none", "plain"])  # fmt: skip
def test_the_realm_wants_pkce_with_s256(keycloak: Keycloak, changes: dict[str, str]) -> None:
    answer = keycloak.client.get(authorize(keycloak, **changes)[0])
    assert answer.status_code == 302
    sent = parse_qs(urlsplit(answer.headers["location"]).query)
    assert sent["error"] == ["invalid_request"]


def test_the_realm_sends_nobody_elsewhere(keycloak: Keycloak) -> None:
    for wrong in ("https://evil.example/signed-in", f"{APP}/../evil", f"{APP}@evil.example", f"{APP}?x=1"):
        answer = keycloak.client.get(authorize(keycloak, redirect_uri=wrong)[0])
        assert answer.status_code == 400, wrong
        assert "location" not in answer.headers


def test_of_the_tokens_of_a_sign_in_only_the_access_token_opens_the_api(site: Site, keycloak: Keycloak) -> None:
    """A customer's application: the ID token and the refresh token are signed by the same provider, and are 401."""
    with browser(site) as client:
        address, verifier = authorize(keycloak)
        sent = fill_in(client, open_form(client, address), "nora")
        wrong = redeem(keycloak, code_in(sent.headers["location"]), "x" * 43)
        assert (wrong.status_code, wrong.json()["error"]) == (400, "invalid_grant")
        address, verifier = authorize(keycloak)
        code = code_in(client.get(address).headers["location"])  # Keycloak knows the browser by now
    granted = redeem(keycloak, code, verifier).raise_for_status().json()
    header, claims = parts_of(granted["access_token"])
    assert (header["alg"], claims["aud"], claims["azp"]) == ("RS256", "duly", "duly-customers")
    assert set(claims["scope"].split()) == {"openid", "commerce"}
    assert "realm_access" not in claims, "her role is for another scope"
    names = {PEOPLE["nora"][0].lower(), "nora@example.com"}
    assert not any(name in json.dumps(claims).lower() for name in names), "a token for services names no person"
    assert site.get("/v1/orders", granted["access_token"]).status_code == 200
    assert site.get("/v1/products/x", granted["access_token"]).status_code == 403, "it has no scope transfers"
    for other in ("id_token", "refresh_token"):
        assert site.get("/v1/orders", granted[other]).status_code == 401, other
