"""The realm file for Keycloak holds what the code asks for: a new scope or role fails here until it is in the file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from apps.transfers.gateways import EXPIRE_SCOPE
from duly.auth.issuer import CLIENTS as DEVELOPMENT_CLIENTS
from duly.auth.issuer_codes import PEOPLE, SIGN_IN_CLIENT
from duly.console.app import Console
from duly.console.sign_in import SCOPE as CONSOLE_SCOPE
from duly.settings import Settings
from tests.apps.conftest import Api
from tests.apps.test_rights import rights_declared, routes_of

REALM_FILE = Path(__file__).parents[2] / "deploy" / "keycloak" / "duly-realm.json"
REALM: dict[str, Any] = json.loads(REALM_FILE.read_text())
SCOPES: dict[str, dict[str, Any]] = {scope["name"]: scope for scope in REALM["clientScopes"]}
CLIENTS: dict[str, dict[str, Any]] = {client["clientId"]: client for client in REALM["clients"]}
ROLES = {role["name"] for role in REALM["roles"]["realm"]}
GIVES = {mapping["clientScope"]: set(mapping["roles"]) for mapping in REALM["scopeMappings"]}
MACHINES = {name for name, client in CLIENTS.items() if client["serviceAccountsEnabled"]}
CARRIED = "duly"  # the scope without a name in tokens: audience, subject, roles


def asked_for(api: Api) -> dict[str, set[str]]:
    """Every scope that a route or the console asks for, and the roles that count together with it."""
    found: dict[str, set[str]] = {}
    for _, _, context in routes_of(api):
        for right in rights_declared(context.dependant):
            found.setdefault(right.scope, set()).update(right.roles)
    console: Console = api.fastapi.state.console
    found.setdefault(CONSOLE_SCOPE, set()).update(console.rights.roles)
    found.setdefault(EXPIRE_SCOPE, set())
    return found


def named() -> set[str]:
    """The scopes of the file that are rights: those that stand in tokens."""
    return {name for name, scope in SCOPES.items() if scope["attributes"]["include.in.token.scope"] == "true"}


def mappers(scope: str) -> dict[str, dict[str, str]]:
    """What a scope puts into tokens, by the kind of the mapper."""
    return {mapper["protocolMapper"]: mapper["config"] for mapper in SCOPES[scope]["protocolMappers"]}


async def test_the_scopes_are_those_that_the_code_asks_for(api: Api) -> None:
    assert named() == asked_for(api).keys()
    assert {scope["protocol"] for scope in SCOPES.values()} == {"openid-connect"}


async def test_each_scope_lets_those_roles_through_that_count_with_it(api: Api) -> None:
    """No client has its users' roles in every token: each comes with the scope that it is for."""
    asked = asked_for(api)
    assert {name: roles for name, roles in asked.items() if roles} == GIVES
    assert set().union(*asked.values()) == ROLES
    assert not any(client["fullScopeAllowed"] for client in CLIENTS.values())


def test_every_scope_can_be_had_by_some_client_and_only_when_asked_for() -> None:
    optional = [scope for client in CLIENTS.values() for scope in client["optionalClientScopes"]]
    assert set(optional) == named()
    for name, client in CLIENTS.items():
        assert CARRIED in client["defaultClientScopes"], name
        assert named().isdisjoint(client["defaultClientScopes"]), name
    holders = Counter(optional)
    assert holders[EXPIRE_SCOPE] == 1, "what is internal is for one client alone"


def test_people_can_be_given_every_right_but_those_of_programs() -> None:
    """What nobody's application could ask for would be a route that nobody can use."""
    of_people = {scope for name, client in CLIENTS.items() if name not in MACHINES
                 for scope in client["optionalClientScopes"]}  # fmt: skip
    assert named() - of_people == {EXPIRE_SCOPE}


def test_the_development_issuer_gives_its_clients_what_the_realm_gives_them() -> None:
    """E5.3: nothing knows the difference. Two of its clients are for trying things out, and are nowhere else."""
    accounts = {user["serviceAccountClientId"]: set(user["realmRoles"]) for user in REALM["users"]}
    for name, client in DEVELOPMENT_CLIENTS.items():
        if client.scopes is None:
            assert name not in CLIENTS, name
            continue
        assert client.scopes == set(CLIENTS[name]["optionalClientScopes"]), name
        assert set(client.roles or ()) == accounts[name], name
    assert {role for person in PEOPLE.values() for role in person.roles} <= ROLES
    assert Settings.model_fields["console_client_id"].default == SIGN_IN_CLIENT
    assert SIGN_IN_CLIENT in CLIENTS.keys() - MACHINES


def test_the_claims_that_are_read_are_written() -> None:
    found = mappers(CARRIED)
    audience = Settings.model_fields["oidc_audience"].default
    assert found["oidc-audience-mapper"]["included.custom.audience"] == audience
    assert found["oidc-usermodel-realm-role-mapper"]["claim.name"] == "realm_access.roles"
    for config in found.values():
        assert config["access.token.claim"] == "true"
    console = CLIENTS[Settings.model_fields["console_client_id"].default]
    names = [mapper["claim.name"] for scope in console["defaultClientScopes"] for mapper in mappers(scope).values()
             if mapper.get("id.token.claim") == "true" and "claim.name" in mapper]  # fmt: skip
    assert names == ["preferred_username"]
    assert any("oidc-full-name-mapper" in mappers(scope) for scope in console["defaultClientScopes"])
    assert REALM["defaultSignatureAlgorithm"] == "RS256"


def test_people_sign_in_by_code_with_pkce_and_services_by_their_secret() -> None:
    for name, client in CLIENTS.items():
        assert not client["implicitFlowEnabled"], name
        assert not client["directAccessGrantsEnabled"], name
        assert client["standardFlowEnabled"] == (name not in MACHINES), name
        if name in MACHINES:
            assert not client["publicClient"], name
            continue
        assert client["attributes"]["pkce.code.challenge.method"] == "S256", name
        assert client["redirectUris"], name
        assert all(uri.startswith("https://") and "*" not in uri for uri in client["redirectUris"]), name
    (console,) = CLIENTS["duly-console"]["redirectUris"]
    assert console.endswith("/console/sign-in/callback")
    assert CLIENTS["duly-console"]["optionalClientScopes"] == [CONSOLE_SCOPE]


def test_tokens_are_short_lived_and_a_refresh_token_is_good_once() -> None:
    """RFC 9700, section 4.14: those of public clients rotate. The console and services get none at all."""
    assert (REALM["revokeRefreshToken"], REALM["refreshTokenMaxReuse"]) == (True, 0)
    assert REALM["accessTokenLifespan"] == 300
    assert CLIENTS["duly-console"]["attributes"]["use.refresh.tokens"] == "false"
    for name in MACHINES:
        assert CLIENTS[name]["attributes"]["client_credentials.use_refresh_token"] == "false", name
        assert CLIENTS[name]["attributes"]["access.token.lifespan"] == "300", name


def test_the_accounts_of_services_have_roles_that_their_scopes_let_through() -> None:
    accounts = {user["serviceAccountClientId"]: set(user["realmRoles"]) for user in REALM["users"]}
    assert accounts.keys() == MACHINES
    for name, roles in accounts.items():
        given = set().union(*(GIVES.get(scope, set()) for scope in CLIENTS[name]["optionalClientScopes"]))
        assert roles <= given, name


def test_the_file_holds_no_secret_no_key_and_no_person() -> None:
    """Keycloak makes its keys and the clients' secrets when it reads the file."""
    text = REALM_FILE.read_text()
    for word in ('"secret"', '"credentials"', "privateKey", "password", "BEGIN "):
        assert word not in text, word
    assert "components" not in REALM
    assert all(user["username"] == f"service-account-{user['serviceAccountClientId']}" for user in REALM["users"])
