"""People sign in to our console on Keycloak's own page: authorization code with PKCE, from end to end (E5.1)."""

from __future__ import annotations

import base64
import json
import secrets
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

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
    navigation,
    open_form,
    serving,
    sign_in,
)
from tests.keycloak.server import Keycloak
from tests.support import rows, value

pytestmark = [pytest.mark.keycloak, pytest.mark.timeout(1800)]
CASES = "/console/cases"
SESSIONS = "SELECT count(*) FROM duly.console_sessions WHERE revoked_at IS NULL"


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


def test_everything_in_the_navigation_opens_and_what_is_not_there_does_not(site: Site) -> None:
    """A walk through the console, as each person whom Keycloak vouches for."""
    with browser(site) as ada, browser(site) as otto, browser(site) as cora:
        shown = {}
        for client, person, home in ((ada, "ada", "/console"), (otto, "otto", "/console"), (cora, "cora", CASES)):
            assert sign_in(client, person, home).status_code == 303
            shown[person] = navigation(client, home)
            for path in shown[person]:
                page = client.get(path)
                assert (path, page.status_code) == (path, 200)
                assert f"{PEOPLE[person][0]} {PEOPLE[person][1]}" in page.text
        assert len(shown["ada"]) > 15, "the engine's pages, and a section for each application"
        assert shown["otto"] == shown["ada"], "who looks sees the same"
        assert shown["cora"] == [CASES]
        assert CASES not in shown["ada"], "cases are for compliance officers"
        assert ada.get(CASES).status_code == 403
        assert cora.get("/console").headers["location"] == CASES, "her home"
        for path in shown["ada"]:
            assert (path, cora.get(path).status_code) == (path, 303 if path == "/console" else 403)
    assert "Traceback" not in site.log.read_text()


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


def test_a_secret_of_the_console_may_hold_anything(keycloak: Keycloak, dsn: str, tmp_path: Path) -> None:
    """RFC 6749, section 2.3.1: it is form-encoded before it is sent."""
    keycloak.change_client("duly-console", secret="a+b c:d/e%20=ä&?", publicClient=False)
    with serving(keycloak, dsn, tmp_path) as site, browser(site) as client:
        assert keycloak.secret("duly-console") == "a+b c:d/e%20=ä&?"
        assert sign_in(client, "ada").status_code == 303


def test_a_secret_that_is_wrong_is_said_and_not_repeated(keycloak: Keycloak, dsn: str, tmp_path: Path) -> None:
    with serving(keycloak, dsn, tmp_path) as site, browser(site) as client:
        back = come_back(client, "ada")
        keycloak.change_client("duly-console", secret=secrets.token_urlsafe(16))
        answer = client.get(back)
        assert answer.status_code == 400
        assert "did not accept the code" in answer.text
        assert code_in(back) not in site.log.read_text()
