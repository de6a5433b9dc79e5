"""E5.1: routes say which rights they need; 401 without a valid token, 403 without the right."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from duly.auth.http import Require, require
from duly.auth.principals import Principal
from duly.errors import Forbidden
from tests.engine.auth.conftest import Ask, create_guarded_api
from tests.engine.auth.provider import Provider, fixed
from tests.engine.http.serving import served

pytestmark = pytest.mark.asyncio(loop_scope="module")
MANAGER = {"roles": ["QUALITY_MANAGER"]}


@pytest.mark.parametrize("header", [None, "", "Basic YTpi", "Digest x", "Bearerx", "token", "Bea rer x"])
async def test_without_a_bearer_token_the_challenge_is_bare(header: str | None, client: httpx2.AsyncClient) -> None:
    """RFC 6750, section 3.1: no error code for who did not know that a token is needed."""
    answer = await client.get("/me", headers={} if header is None else {"Authorization": header})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("header", ["Bearer", "bearer"])
async def test_a_header_without_a_token_is_401(header: str, client: httpx2.AsyncClient) -> None:
    answer = await client.get("/me", headers={"Authorization": header})
    assert answer.status_code == 401
    assert 'error="invalid_request"' in answer.headers["www-authenticate"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEARER"])
async def test_the_scheme_is_written_in_any_case(scheme: str, client: httpx2.AsyncClient, provider: Provider) -> None:
    answer = await client.get("/me", headers={"Authorization": f"{scheme} {provider.sign()}"})
    assert answer.status_code == 200


async def test_two_authorization_headers_are_refused(client: httpx2.AsyncClient, provider: Provider) -> None:
    """Two readers might believe two different ones."""
    good = f"Bearer {provider.sign()}"
    for pair in ((good, good), (good, "Bearer x"), ("Basic YTpi", good)):
        answer = await client.get("/me", headers=[("Authorization", value) for value in pair])
        assert answer.status_code == 401
        assert "more than one" in answer.json()["detail"]
    joined = await client.get("/me", headers={"Authorization": f"{good}, {good}"})
    assert joined.status_code == 401


async def test_a_token_elsewhere_is_not_found(client: httpx2.AsyncClient, provider: Provider) -> None:
    token = provider.sign()
    client.cookies.set("access_token", token)
    answer = await client.get("/me", params={"access_token": token}, headers={"Proxy-Authorization": f"Bearer {token}"})
    client.cookies.clear()
    assert answer.status_code == 401


async def test_without_the_scope_it_is_403_and_says_which(ask: Ask, provider: Provider) -> None:
    answer = await ask(provider.sign(scope="ledger:read qualit quality2"))
    assert answer.status_code == 403
    assert answer.json()["detail"] == "this needs a token with the scope quality"
    assert answer.headers["www-authenticate"] == 'Bearer error="insufficient_scope", scope="quality"'


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"realm_access": MANAGER}, 200),
        ({"realm_access": {"roles": ["ADMINISTRATOR", "OTHER"]}}, 200),
        ({"realm_access": {}, "resource_access": {"duly": MANAGER}}, 200),
        ({"realm_access": {}, "resource_access": {"portal": MANAGER}}, 200),
        ({"realm_access": {}, "resource_access": {"another-client": MANAGER}}, 403),
        ({"realm_access": {"roles": ["QUALITY_ENGINEER"]}}, 403),
        ({"realm_access": {"roles": ["quality_manager"]}}, 403),
        ({"realm_access": {"roles": ["QUALITY_MANAGER "]}}, 403),
        ({"realm_access": {"roles": "QUALITY_MANAGER"}}, 403),
        ({"realm_access": MANAGER, "scope": "ledger:read"}, 403),
        ({"realm_access": None}, 403),
        ({"realm_access": None, "roles": ["QUALITY_MANAGER"], "groups": ["ADMINISTRATOR"]}, 403),
    ],
)
async def test_one_of_the_roles_is_enough_and_needed(
    changes: dict[str, Any], status: int, ask: Ask, provider: Provider
) -> None:
    answer = await ask(provider.sign(**changes), "/close")
    assert answer.status_code == status, answer.text


async def test_the_refusal_names_the_roles(ask: Ask, provider: Provider) -> None:
    answer = await ask(provider.sign(), "/close")
    assert answer.json()["detail"] == "this needs the role ADMINISTRATOR or QUALITY_MANAGER"
    assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]


async def test_when_the_provider_is_away_it_is_503(ask: Ask, provider: Provider) -> None:
    provider.instead["discovery"] = fixed(b"", 502)
    answer = await ask(provider.sign())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


async def test_a_server_without_a_verifier_lets_nobody_in() -> None:
    async with served(create_guarded_api(None)) as client:
        answer = await client.get("/me", headers={"Authorization": "Bearer x"})
    assert answer.status_code == 503


def requirements(route: APIRoute) -> list[Require]:
    """As a test that walks all routes finds them."""
    return [one.call for one in route.dependant.dependencies if isinstance(one.call, Require)]


async def test_the_rights_of_every_route_can_be_read() -> None:
    api = create_guarded_api(None)
    routes = {route.path: requirements(route) for route in api.routes if isinstance(route, APIRoute)}
    assert {path: [(one.scope, one.roles) for one in found] for path, found in routes.items()} == {
        "/me": [("quality", frozenset())],
        "/close": [("quality", frozenset({"QUALITY_MANAGER", "ADMINISTRATOR"}))],
    }


async def test_the_documentation_shows_a_bearer_token() -> None:
    document = create_guarded_api(None).openapi()
    scheme = document["components"]["securitySchemes"]["bearer"]
    assert (scheme["type"], scheme["scheme"], scheme["bearerFormat"]) == ("http", "bearer", "JWT")
    for path in ("/me", "/close"):
        operation = document["paths"][path]["get"]
        assert operation["security"] == [{"bearer": []}]
        assert "parameters" not in operation
        assert "requestBody" not in operation


async def test_a_right_can_be_asked_for_in_the_middle_of_a_route() -> None:
    alice = Principal("alice", "https://id.example", frozenset({"quality"}), frozenset(), None)
    Require("quality").check(alice)
    with pytest.raises(Forbidden):
        Require("quality", "QUALITY_MANAGER").check(alice)
    assert repr(Require("quality", "B", "A")) == "Require('quality', 'A', 'B')"


@pytest.mark.parametrize("arguments", [("",), ("a b",), ('a"b',), ("a\n",), ("quality", "")])
async def test_a_right_without_a_name_is_a_mistake(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be asked for"):
        require(*arguments)


async def test_callers_of_two_providers_are_two() -> None:
    """E4.4: idempotency keys are scoped to this."""
    rights: tuple[frozenset[str], frozenset[str], None] = (frozenset(), frozenset(), None)
    callers = {Principal(sub, iss, *rights).caller for sub in ("a", "b a") for iss in ("https://x", "https://x/b")}
    assert len(callers) == 4


async def test_routes_work_with_postponed_annotations_too() -> None:
    api = FastAPI(dependencies=[require("quality")])

    @api.get("/plain")
    async def plain() -> None: ...

    assert api.openapi()["paths"]["/plain"]["get"]["security"] == [{"bearer": []}]
