"""People at applications in browsers and telephones: authorization code with PKCE, what their tokens open (E5.1)."""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import pytest

from duly.auth.jwks import COOL_DOWN_SECONDS
from tests.apps.test_rights import RIGHTS
from tests.engine.cli.commands import wait_until
from tests.keycloak.pages import (
    APPS,
    PEOPLE,
    Site,
    authorize,
    browser,
    code_in,
    fill_in,
    obtain,
    open_form,
    parts_of,
    redeem,
)
from tests.keycloak.server import GIVES, Keycloak

pytestmark = [pytest.mark.keycloak, pytest.mark.timeout(1800)]
SLACK_SECONDS = 20.0  # for a busy machine
CUSTOMERS, STAFF = "duly-customers", "duly-staff"
(APP,) = APPS[CUSTOMERS]["redirectUris"]
each_app = pytest.mark.parametrize("app", APPS)


def roles_in(claims: dict[str, dict[str, list[str]]]) -> set[str]:
    """Of the realm; there are no others."""
    assert "resource_access" not in claims
    return set(claims.get("realm_access", {}).get("roles", []))


def fill(template: str) -> str:
    """A path with ids of nothing in it."""
    return re.sub(r"\{[^}]+\}", lambda _: str(uuid4()), template)


@each_app
def test_each_scope_opens_its_routes_and_brings_its_roles_and_no_others(
    site: Site, keycloak: Keycloak, app: str
) -> None:
    """Vera has every role: a token carries those that its scope lets through, and opens every route that wants them."""
    scopes = APPS[app]["optionalClientScopes"]
    with browser(site) as vera:
        for scope in scopes:
            token = obtain(vera, keycloak, app, scope, "vera" if scope == scopes[0] else "")["access_token"]
            claims = parts_of(token)[1]
            assert (claims["aud"], claims["azp"], set(claims["scope"].split())) == ("duly", app, {"openid", scope})
            assert roles_in(claims) == GIVES.get(scope, set())
            for (method, template), right in RIGHTS.items():
                if right.scope == scope:
                    answer = site.ask(method, fill(template), token, right.body)
                    assert answer.status_code in right.expected, (method, template, answer.text)
                elif method == "GET":
                    assert (template, site.get(fill(template), token).status_code) == (template, 403)


def test_without_the_role_a_scope_opens_nothing_that_wants_one(site: Site, keycloak: Keycloak) -> None:
    """Eric reports non-conformities. Keycloak leaves out of his token a scope whose roles he has none of."""
    scopes = APPS[STAFF]["optionalClientScopes"]
    with browser(site) as eric:
        for scope in scopes:
            token = obtain(eric, keycloak, STAFF, scope, "eric" if scope == scopes[0] else "")["access_token"]
            claims, held = parts_of(token)[1], GIVES.get(scope, set()) & {"QUALITY_ENGINEER"}
            given = {scope} if held or scope not in GIVES else set()
            assert (roles_in(claims), set(claims["scope"].split())) == (held, {"openid", *given})
            for (method, template), right in RIGHTS.items():
                if right.scope != scope:
                    continue
                answer = site.ask(method, fill(template), token, right.body)
                if given and (not right.roles or held & set(right.roles)):
                    assert answer.status_code in right.expected, (method, template, answer.text)
                    continue
                needed = f"the role {' or '.join(sorted(right.roles))}" if given else f"a token with the scope {scope}"
                assert (answer.status_code, answer.json()["detail"]) == (403, f"this needs {needed}"), template


def test_an_application_gets_no_scope_that_it_was_not_given(keycloak: Keycloak) -> None:
    """An administrator who signs in at the customers' application does not carry the console with her."""
    for scope in ("console", "internal:transfers.expire", "ledger:write", "offline_access"):
        answer = keycloak.client.get(authorize(keycloak, CUSTOMERS, scope)[0])
        assert answer.status_code == 302
        assert parse_qs(urlsplit(answer.headers["location"]).query)["error"] == ["invalid_scope"], scope


def test_a_refresh_token_is_good_once_and_survives_a_rotation(site: Site, keycloak: Keycloak) -> None:
    """RFC 9700, section 4.14: a public client's must be; whoever brings a used one, thief or owner, gets nothing."""
    with browser(site) as client:
        first = obtain(client, keycloak, CUSTOMERS, "commerce", "nora")
    form = {"grant_type": "refresh_token", "client_id": CUSTOMERS}
    key = keycloak.add_key(3_000)
    try:
        second = keycloak.grant({**form, "refresh_token": first["refresh_token"]}).raise_for_status().json()
        (old, _), (new, claims) = parts_of(first["access_token"]), parts_of(second["access_token"])
        assert new["kid"] != old["kid"]
        assert (claims["sub"], claims["aud"]) == (parts_of(first["access_token"])[1]["sub"], "duly")
        assert set(claims["scope"].split()) == {"openid", "commerce"}
        wait_until(
            lambda: site.get("/v1/orders", second["access_token"]).status_code == 200,
            seconds=COOL_DOWN_SECONDS + SLACK_SECONDS, what="the token of the new key is accepted",
        )  # fmt: skip
        again = keycloak.grant({**form, "refresh_token": first["refresh_token"]})
        assert (again.status_code, again.json()["error"]) == (400, "invalid_grant")
    finally:
        keycloak.remove_key(key)


def test_clients_of_keycloaks_own_open_nothing_here(site: Site, keycloak: Keycloak) -> None:
    """It makes some in every realm; one takes passwords. Their tokens have another audience and no scope of ours."""
    form = {"grant_type": "password", "client_id": "admin-cli", "username": "ada", "password": PEOPLE["ada"][2]}
    for scope in ("commerce", "console"):
        refused = keycloak.grant({**form, "scope": scope})
        assert (refused.status_code, refused.json()["error"]) == (400, "invalid_scope")
    token = keycloak.grant(form).raise_for_status().json()["access_token"]
    assert "duly" not in json.dumps(parts_of(token)[1].get("aud", ""))
    for path in ("/v1/orders", "/v1/console/status"):
        answer = site.get(path, token)
        assert (answer.status_code, answer.json()["detail"]) == (401, "the token is for another audience")


@each_app
@pytest.mark.parametrize("changes", [{"code_challenge": "", "code_challenge_method": ""},
                                     {"code_challenge_method": "plain"}], ids=["none", "plain"])  # fmt: skip
def test_the_realm_wants_pkce_with_s256(keycloak: Keycloak, app: str, changes: dict[str, str]) -> None:
    scope = APPS[app]["optionalClientScopes"][0]
    answer = keycloak.client.get(authorize(keycloak, app, scope, **changes)[0])
    assert answer.status_code == 302
    sent = parse_qs(urlsplit(answer.headers["location"]).query)
    assert sent["error"] == ["invalid_request"]


def test_the_realm_sends_nobody_elsewhere(keycloak: Keycloak) -> None:
    for wrong in ("https://evil.example/signed-in", f"{APP}/../evil", f"{APP}@evil.example", f"{APP}?x=1"):
        answer = keycloak.client.get(authorize(keycloak, CUSTOMERS, "commerce", redirect_uri=wrong)[0])
        assert answer.status_code == 400, wrong
        assert "location" not in answer.headers


def test_of_the_tokens_of_a_sign_in_only_the_access_token_opens_the_api(site: Site, keycloak: Keycloak) -> None:
    """A customer's application: the ID token and the refresh token are signed by the same provider, and are 401."""
    with browser(site) as client:
        address, verifier = authorize(keycloak, CUSTOMERS, "commerce")
        sent = fill_in(client, open_form(client, address), "nora")
        wrong = redeem(keycloak, CUSTOMERS, code_in(sent.headers["location"]), "x" * 43)
        assert (wrong.status_code, wrong.json()["error"]) == (400, "invalid_grant")
        address, verifier = authorize(keycloak, CUSTOMERS, "commerce")
        code = code_in(client.get(address).headers["location"])  # Keycloak knows the browser by now
    granted = redeem(keycloak, CUSTOMERS, code, verifier).raise_for_status().json()
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
