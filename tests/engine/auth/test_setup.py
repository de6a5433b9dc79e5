"""E5.1, E5.2, E5.3: what the settings say becomes a verifier and service tokens, or a sentence that says what to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr, ValidationError

from duly.auth.client import ServiceAuth
from duly.auth.http import require
from duly.auth.issuer import Issuer, create_issuer_router
from duly.auth.setup import create_service_tokens, create_verifier, find_api_url
from duly.errors import Refused, Unauthenticated
from duly.settings import Settings
from tests.engine.auth.conftest import create_guarded_api
from tests.engine.auth.forge import rs256, rsa_key
from tests.engine.auth.provider import Provider
from tests.engine.cli.commands import duly, environment
from tests.engine.http.serving import served

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PORT", raising=False)


@asynccontextmanager
async def developing(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[Settings, httpx2.AsyncClient]]:
    """An API with the development issuer in it, on a port that nobody was told."""
    settings = Settings(data=tmp_path, **changes)
    api = create_guarded_api(None)

    @api.get("/expire", dependencies=[require("internal:transfers.expire")])
    async def expire() -> dict[str, bool]:
        return {"expired": True}

    async with served(api) as client:
        issuer = Issuer.open(settings, port=client.base_url.port)
        api.include_router(create_issuer_router(issuer))
        verifier = create_verifier(settings, issuer_url=issuer.url)
        api.state.verifier = verifier
        yield settings, client
        await verifier.close()


async def test_duly_token_needs_no_port_to_be_accepted(tmp_path: Path) -> None:
    """E5.3, E7.2: PORT=0 at the server, and no PORT, or 0, at the command; another PORT is believed."""
    async with developing(tmp_path, PORT=0) as (_, client):
        for settings, status in (({}, 200), ({"PORT": "0"}, 200), ({"PORT": "1"}, 401)):
            env = environment(DULY_DATA=str(tmp_path), **settings)
            if "PORT" not in settings:
                env.pop("PORT", None)
            done = duly("token", "--sub", "alice", "--scope", "quality", env=env)
            assert done.returncode == 0, done.stderr
            answer = await client.get("/me", headers={"Authorization": f"Bearer {done.stdout.strip()}"})
            assert answer.status_code == status, answer.text


async def test_a_service_finds_issuer_and_api_and_gets_in_with_its_own_token(tmp_path: Path) -> None:
    """E5.2, T4: the ready-made client of the transfers worker, and no right beyond its own."""
    async with developing(tmp_path) as (settings, client):
        worker = settings.model_copy(update={"client_id": "transfers-worker"})
        tokens = create_service_tokens(worker, scope="internal:transfers.expire")
        base = find_api_url(worker)
        assert base == str(client.base_url).rstrip("/")
        answer = await client.get(f"{base}/expire", auth=ServiceAuth(tokens))
        assert answer.status_code == 200, answer.text
        assert (await client.get("/me", auth=ServiceAuth(tokens))).status_code == 403
        await tokens.close()
        greedy = create_service_tokens(worker, scope="internal:transfers.expire console")
        with pytest.raises(Unauthenticated, match=r"transfers-worker \(invalid_scope\)"):
            await greedy.token()
        await greedy.close()


async def test_another_audience_is_everybodys(tmp_path: Path) -> None:
    async with developing(tmp_path, oidc_audience="shop") as (settings, client):
        tokens = create_service_tokens(settings, scope="quality")
        assert (await client.get("/me", auth=ServiceAuth(tokens))).status_code == 200
        await tokens.close()
        signed = Issuer.open(settings).sign("alice", scopes=["quality"], audience="duly")
        assert (await client.get("/me", headers={"Authorization": f"Bearer {signed}"})).status_code == 401


async def test_the_development_issuer_is_not_believed_beside_a_real_one(tmp_path: Path, provider: Provider) -> None:
    async with developing(tmp_path, oidc_issuer=provider.issuer) as (settings, client):
        signed = Issuer.open(settings).sign("alice", scopes=["quality"])
        assert (await client.get("/me", headers={"Authorization": f"Bearer {signed}"})).status_code == 401
        now = Issuer.open(settings)
        claims = {"iss": provider.issuer, "sub": "alice", "aud": "duly", "scope": "quality", "exp": 4_000_000_000}
        real = rs256(claims, rsa_key("first"))
        assert (await client.get("/me", headers={"Authorization": f"Bearer {real}"})).status_code == 200
        assert now.url != provider.issuer


async def test_the_settings_reach_the_verifier(provider: Provider, tmp_path: Path) -> None:
    settings = Settings(
        data=tmp_path,
        env="production",
        oidc_issuer="https://id.example/realm",
        oidc_allow_http=False,
        oidc_jwks_url=f"{provider.issuer}/keys",
        oidc_audience="shop",
        oidc_role_clients=("portal",),
    )
    verifier = create_verifier(settings, issuer_url=None)
    claims = {"iss": "https://id.example/realm", "sub": "alice", "aud": "shop", "exp": 4_000_000_000}
    roles = {name: {"roles": [name.upper()]} for name in ("shop", "portal", "other")}
    principal = await verifier.verify(rs256({**claims, "resource_access": roles}, rsa_key("first")))
    assert principal.roles == {"SHOP", "PORTAL"}
    assert provider.discoveries == 0
    await verifier.close()


@pytest.mark.parametrize("served_at", [None, "http://127.0.0.1:8000/dev-issuer"])
async def test_production_without_a_provider_is_refused(served_at: str | None, tmp_path: Path) -> None:
    """E5.3: also when somebody passes the development issuer's address."""
    settings = Settings(env="production", data=tmp_path)
    with pytest.raises(Refused, match="set DULY_OIDC_ISSUER"):
        create_verifier(settings, issuer_url=served_at)
    with pytest.raises(Refused, match="set DULY_OIDC_ISSUER"):
        create_service_tokens(settings, scope="a")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://id.example/realm", "DULY_OIDC_ALLOW_HTTP"),
        ("http://10.0.0.1/realm", "DULY_OIDC_ALLOW_HTTP"),
        ("http://127.0.0.1.example/realm", "DULY_OIDC_ALLOW_HTTP"),
        ("http://localhost.example/realm", "DULY_OIDC_ALLOW_HTTP"),
        ("id.example", "is not a URL"),
        ("ftp://id.example", "is not a URL"),
        ("https://", "is not a URL"),
        ("https://[", "is not a URL"),
        ("https://id.example:port/", "is not a URL"),
        ("https://id.example/a b", "is not a URL"),
        ("https://id.example/\n", "is not a URL"),
        ("https://user:canary@id.example/", "no user, password"),
        ("https://id.example/#canary", "fragment"),
    ],
)
@pytest.mark.parametrize("name", ["oidc_issuer", "oidc_jwks_url"])
async def test_an_address_that_will_not_do_is_refused_without_repeating_it(
    name: str, url: str, said: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"env": "production", "data": tmp_path, "oidc_issuer": "https://id.example", name: url}
    settings = Settings(**given)
    with pytest.raises(Refused, match=said) as raised:
        create_verifier(settings, issuer_url=None)
    assert f"DULY_{name.upper()}" in str(raised.value)
    assert "canary" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "allow"),
    [
        ("https://id.example/realms/main", False),
        ("http://127.0.0.1:8080/realm", False),
        ("http://127.9.9.9/realm", False),
        ("http://[::1]:8080/realm", False),
        ("http://localhost/realm", False),
        ("http://keycloak.internal/realm", True),
    ],
)
async def test_https_or_this_machine_or_by_permission(url: str, allow: bool, tmp_path: Path) -> None:
    settings = Settings(env="production", data=tmp_path, oidc_issuer=url, oidc_allow_http=allow)
    assert create_verifier(settings, issuer_url=None).issuer == url


async def test_a_secret_is_assumed_for_clients_of_the_development_issuer_only(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": tmp_path}
    assert create_service_tokens(Settings(**given), scope="a").client_id == "service"
    refused: list[dict[str, Any]] = [
        {"client_id": "unknown"},
        {"oidc_issuer": "https://id.example"},
        {"env": "production", "oidc_issuer": "https://id.example"},
    ]
    for changes in refused:
        with pytest.raises(Refused, match="set DULY_CLIENT_SECRET"):
            create_service_tokens(Settings(**given, **changes), scope="a")
        create_service_tokens(Settings(**given, **changes, client_secret=SecretStr("s")), scope="a")


@pytest.mark.parametrize(
    ("changes", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"PORT": 9000}, "http://127.0.0.1:9000"),
        ({"env": "production", "PORT": 9000}, "http://127.0.0.1:9000"),
        ({"api_url": "https://api.example/base/"}, "https://api.example/base"),
    ],
)
async def test_where_the_api_is(changes: dict[str, Any], url: str, tmp_path: Path) -> None:
    assert find_api_url(Settings(data=tmp_path, **changes)) == url


@pytest.mark.parametrize(
    ("text", "clients"),
    [("", ()), ("a", ("a",)), (" a, b ,,", ("a", "b")), ('["a", "b"]', ("a", "b")), ("[]", ())],
)
async def test_role_clients_are_a_list_in_either_spelling(
    text: str, clients: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DULY_OIDC_ROLE_CLIENTS", text)
    assert Settings().oidc_role_clients == clients


async def test_settings_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"DULY_OIDC_ROLE_CLIENTS": "[1", "DULY_JWKS_STALE_SECONDS": "1", "DULY_OIDC_AUDIENCE": ""}
    for name, value in wrong.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(ValidationError):
                Settings()


async def test_the_secret_is_not_in_the_settings_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DULY_CLIENT_SECRET", "canary")
    settings = Settings()
    assert settings.client_secret.get_secret_value() == "canary"
    assert "canary" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
