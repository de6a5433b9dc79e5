"""Tokens that Keycloak gives to services, at our api: who gets in, who does not, what they are told (E5.1, E5.2)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from uuid import uuid4

import httpx2
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jwt
from joserfc.jwk import RSAKey

from duly.auth.jwks import JwksCache
from duly.auth.tokens import Verifier
from tests.apps.test_rights import RIGHTS, Right
from tests.engine.cli.commands import wait_until
from tests.keycloak.pages import Site, parts_of, run_hourly_task
from tests.keycloak.server import FILE, GIVES, PATIENCE_SECONDS, Keycloak

pytestmark = [pytest.mark.keycloak, pytest.mark.timeout(1800)]
MACHINES = [client for client in FILE["clients"] if client.get("serviceAccountsEnabled")]
ROLES = {user["serviceAccountClientId"]: set(user["realmRoles"]) for user in FILE["users"]}
ORDERS = "/v1/orders"


def detail(answer: httpx2.Response) -> str:
    """Why, in the words of a problem."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return str(answer.json()["detail"])


def encode(part: object) -> str:
    """A part of a token."""
    content = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def find_route(scope: str, roles: set[str]) -> tuple[tuple[str, str], Right]:
    """A route that this scope and one of these roles open; one that reads, if there is one."""
    fitting = [
        (key, right)
        for key, right in RIGHTS.items()
        if right.scope == scope and (not right.roles or roles & set(right.roles))
    ]
    return min(fitting, key=lambda one: (one[0][0] != "GET", "{" in one[0][1]))


async def test_each_client_gets_the_scopes_and_roles_of_the_realm_file_and_no_other(keycloak: Keycloak) -> None:
    verifier = Verifier(keycloak.issuer, "duly", JwksCache(keycloak.issuer, timeout_seconds=PATIENCE_SECONDS))
    for client in MACHINES:
        name, scopes = client["clientId"], client["optionalClientScopes"]
        all_of_them = await verifier.verify(keycloak.token(name, " ".join(scopes)))
        assert (all_of_them.client_id, set(all_of_them.scopes)) == (name, set(scopes))
        assert all_of_them.roles == ROLES[name], "what its scopes let through of its account's roles"
        for scope in scopes:
            one = await verifier.verify(keycloak.token(name, scope))
            assert (set(one.scopes), set(one.roles)) == ({scope}, ROLES[name] & GIVES.get(scope, set()))
            assert one.caller == all_of_them.caller
        bare = await verifier.verify(keycloak.token(name))
        assert (bare.scopes, bare.roles) == (frozenset(), frozenset())
    await verifier.close()


def test_the_applications_let_each_client_in_where_its_scope_says(site: Site, keycloak: Keycloak) -> None:
    """E5.1: real tokens by client credentials, one for each scope that a service has."""
    for client in MACHINES:
        name = client["clientId"]
        for scope in client["optionalClientScopes"]:
            (method, template), right = find_route(scope, ROLES[name])
            path = re.sub(r"\{[^}]+\}", lambda _: str(uuid4()), template)
            let_in = site.ask(method, path, keycloak.token(name, scope), right.body)
            assert let_in.status_code in right.expected | {400, 422}, (name, scope, let_in.text)
            without = site.ask(method, path, keycloak.token(name), right.body)
            assert without.status_code == 403, (name, scope)
            assert without.headers["www-authenticate"] == f'Bearer error="insufficient_scope", scope="{scope}"'


def test_a_role_that_the_account_has_not_is_403(site: Site, keycloak: Keycloak) -> None:
    token = keycloak.token("operator", "console")
    assert site.get("/v1/console/status", token).status_code == 200
    refused = site.ask("POST", "/v1/console/actions/schedules.trigger", token, {"name": "duly.forget-audit"})
    assert (refused.status_code, detail(refused)) == (403, "this needs the role ADMINISTRATOR")
    again = site.ask(
        "POST", "/v1/console/actions/schedules.trigger", keycloak.token("administrator", "console"),
        {"name": "duly.forget-audit"},
    )  # fmt: skip
    assert again.status_code == 200, again.text


def test_a_scope_that_a_client_was_not_given_is_refused_by_the_provider(keycloak: Keycloak) -> None:
    answer = keycloak.ask("transfers-worker", "ledger:write")
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid_scope")


def test_a_token_for_another_audience_is_401(site: Site, keycloak: Keycloak) -> None:
    """A client of the same realm, with the same key and scope, whose tokens are for somebody else."""
    mapper = {"name": "audience", "protocol": "openid-connect", "protocolMapper": "oidc-audience-mapper"}
    client = {
        "clientId": "stranger", "publicClient": False, "serviceAccountsEnabled": True, "standardFlowEnabled": False,
        "fullScopeAllowed": False, "defaultClientScopes": [], "optionalClientScopes": ["commerce"],
        "protocolMappers": [
            {**mapper, "config": {"included.custom.audience": "another", "access.token.claim": "true"}},
            {**mapper, "name": "sub", "protocolMapper": "oidc-sub-mapper", "config": {"access.token.claim": "true"}},
        ],
    }  # fmt: skip
    keycloak.admin("POST", "/clients", client)
    try:
        token = keycloak.token("stranger", "commerce")
    finally:
        keycloak.admin("DELETE", f"/clients/{keycloak.find_client('stranger')['id']}")
    assert (parts_of(token)[1]["aud"], parts_of(token)[1]["scope"]) == ("another", "commerce")
    answer = site.get(ORDERS, token)
    assert (answer.status_code, detail(answer)) == (401, "the token is for another audience")


def test_a_token_is_accepted_until_it_expires(site: Site, keycloak: Keycloak) -> None:
    """Half a minute of leeway, and not a second more than that and the time a request takes."""
    before = keycloak.find_client("orders-service")["attributes"]
    keycloak.change_client("orders-service", attributes={**before, "access.token.lifespan": "1"})
    try:
        token = keycloak.token("orders-service", "commerce")
    finally:
        keycloak.change_client("orders-service", attributes=before)
    claims = parts_of(token)[1]
    assert claims["exp"] - claims["iat"] == 1
    assert site.get(ORDERS, token).status_code == 200
    wait_until(lambda: site.get(ORDERS, token).status_code == 401, seconds=60, what="the token has expired")
    answer = site.get(ORDERS, token)
    assert detail(answer) == "the token has expired"
    assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    assert site.get(ORDERS, keycloak.token("orders-service", "commerce")).status_code == 200


def test_a_token_of_another_realm_is_401_even_with_the_same_key(site: Site, keycloak: Keycloak) -> None:
    """The same file under another name: audience, scope and client are right; then the key is, too."""
    keycloak.admin("POST", "", {**FILE, "realm": "other"}, realm="")
    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    key = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    shared = ""
    try:
        foreign = keycloak.token("orders-service", "commerce", realm="other")
        assert parts_of(foreign)[1]["aud"] == "duly"
        answer = site.get(ORDERS, foreign)
        assert (answer.status_code, detail(answer)) == (
            401, "the key that signed the token is not among the provider's"
        )  # fmt: skip
        shared = keycloak.add_key(500, private_key=key)
        keycloak.add_key(500, private_key=key, realm="other")
        ours, theirs = (keycloak.token("orders-service", "commerce", realm=realm) for realm in ("duly", "other"))
        assert parts_of(ours)[0]["kid"] == parts_of(theirs)[0]["kid"]
        wait_until(lambda: site.get(ORDERS, ours).status_code == 200, seconds=30, what="the new key is known")
        answer = site.get(ORDERS, theirs)
        assert (answer.status_code, detail(answer)) == (401, "the token is of another issuer")
        _check_forged(site, ours, key)
    finally:
        if shared:
            keycloak.remove_key(shared)
        keycloak.admin("DELETE", "", realm="other")


def _check_forged(site: Site, token: str, key: str) -> None:
    """With the provider's own key in hand: only what is wrong with the claims is left to refuse a token."""
    header, claims = parts_of(token)
    signing = RSAKey.import_key(key)
    for changes, reason in [
        ({}, ""),
        ({"exp": claims["iat"] - 31}, "the token has expired"),
        ({"iat": claims["iat"] + 600}, "the token is not valid yet"),
        ({"typ": "ID"}, "the token is not an access token"),
        ({"aud": "account"}, "the token is for another audience"),
    ]:
        forged = jwt.encode(header, {**claims, **changes}, signing, algorithms=["RS256"])
        answer = site.get(ORDERS, forged)
        assert answer.status_code == (401 if reason else 200), (changes, answer.text)
        assert not reason or detail(answer) == reason


def test_a_token_does_not_choose_how_it_is_verified(site: Site, keycloak: Keycloak) -> None:
    """``alg: none``, and a MAC whose secret is the provider's public key, in each form that a library might use."""
    token = keycloak.token("orders-service", "commerce")
    assert site.get(ORDERS, token).status_code == 200
    header, claims = parts_of(token)
    keys = keycloak.client.get(f"{keycloak.issuer}/protocol/openid-connect/certs").json()["keys"]
    (jwk,) = [one for one in keys if one["kid"] == header["kid"]]
    public = RSAKey.import_key(jwk)
    pem, der = (public.as_pem(private=False), public.as_der(private=False))
    for name in ("none", "None", "NONE"):
        unsigned = f"{encode({**header, 'alg': name})}.{encode(claims)}."
        assert site.get(ORDERS, unsigned).status_code == 401
        assert site.get(ORDERS, unsigned + token.rpartition(".")[2]).status_code == 401
    for secret in (pem, pem.strip(), der, json.dumps(jwk).encode(), jwk["n"].encode(), jwk["x5c"][0].encode()):
        signed = f"{encode({**header, 'alg': 'HS256'})}.{encode(claims)}"
        mac = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
        answer = site.get(ORDERS, f"{signed}.{encode(mac)}")
        assert (answer.status_code, detail(answer)) == (401, "the token is not signed with RS256")
    tampered = f"{encode(header)}.{encode({**claims, 'scope': 'commerce ledger:write'})}.{token.rpartition('.')[2]}"
    answer = site.get(ORDERS, tampered)
    assert (answer.status_code, detail(answer)) == (401, "the token's signature is wrong")


def test_tokens_of_the_development_issuer_count_for_nothing_here(site: Site) -> None:
    """It is served in development, whatever the provider is; its secrets are in our documentation."""
    form = {"grant_type": "client_credentials", "scope": "commerce"}
    granted = httpx2.post(f"{site.url}/dev-issuer/token", data=form, auth=("service", "service-secret"), timeout=30)
    assert site.get(ORDERS, granted.json()["access_token"]).status_code == 401


@pytest.mark.parametrize("secret", ["", "a+b c:d/e%20=ä&?"], ids=["made by the server", "with every nuisance"])
def test_our_own_client_fetches_its_token_there(site: Site, keycloak: Keycloak, secret: str) -> None:
    """E5.2: the hourly task as a process, with the client that the realm file gives it."""
    if secret:
        keycloak.change_client("transfers-worker", secret=secret)
    held = secret or keycloak.secret("transfers-worker")
    code, said = run_hourly_task(site, keycloak, held)
    assert code == 0, said
    assert held not in said
    code, said = run_hourly_task(site, keycloak, "wrong")
    assert code == 1
    assert "refused the client transfers-worker" in said
