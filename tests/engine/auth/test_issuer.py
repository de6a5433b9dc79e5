"""E5.3: the development issuer speaks the protocol of a real one, and refuses to be one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from joserfc import jwt
from joserfc.errors import BadSignatureError, InvalidKeyIdError
from joserfc.jwk import KeySet

from duly.auth.issuer import CLIENTS, Issuer, create_issuer_router
from duly.errors import Invalid, Refused
from duly.settings import Settings
from tests.engine.http.serving import served

FORM = {"grant_type": "client_credentials"}


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer.open(Settings(data=tmp_path), port=8000)


@pytest.fixture
async def client(issuer: Issuer) -> AsyncIterator[httpx2.AsyncClient]:
    api = FastAPI()
    api.include_router(create_issuer_router(issuer))
    async with served(api) as made:
        yield made


async def test_a_client_finds_everything_by_discovery_and_verifies_what_it_gets(
    client: httpx2.AsyncClient, issuer: Issuer
) -> None:
    """E5.3: discovery, then token endpoint, then JWKS, as with any provider."""
    found = (await client.get("/dev-issuer/.well-known/openid-configuration")).json()
    assert found["issuer"] == issuer.url == "http://127.0.0.1:8000/dev-issuer"
    path = {name: found[name].removeprefix("http://127.0.0.1:8000") for name in ("token_endpoint", "jwks_uri")}
    form = {**FORM, "scope": "ledger:write ledger:read", "role": "LEDGER_POSTER"}
    answer = await client.post(path["token_endpoint"], data=form, auth=("developer", "developer-secret"))
    assert answer.headers["cache-control"] == "no-store"
    granted = answer.json()
    assert (granted["token_type"], granted["expires_in"]) == ("Bearer", 3600)
    keys = KeySet.import_key_set((await client.get(path["jwks_uri"])).json())
    token = jwt.decode(granted["access_token"], keys, algorithms=["RS256"])
    assert token.header["alg"] == "RS256"
    claims = token.claims
    assert claims["iss"] == issuer.url
    assert claims["sub"] == "service-account-developer"
    assert (claims["aud"], claims["azp"]) == ("duly", "developer")
    assert claims["scope"] == "ledger:write ledger:read"
    assert claims["realm_access"] == {"roles": ["LEDGER_POSTER"]}
    assert claims["nbf"] == claims["iat"] == claims["exp"] - 3600
    assert claims["jti"]


async def test_the_jwks_shows_no_private_part(client: httpx2.AsyncClient) -> None:
    (key,) = (await client.get("/dev-issuer/jwks")).json()["keys"]
    assert {"d", "p", "q", "dp", "dq", "qi"}.isdisjoint(key)
    assert (key["kty"], key["alg"], key["use"]) == ("RSA", "RS256", "sig")


@pytest.mark.parametrize("name", sorted(CLIENTS))
async def test_every_documented_client_gets_a_token_by_header_or_by_body(name: str, client: httpx2.AsyncClient) -> None:
    secret = CLIENTS[name].secret
    header = await client.post("/dev-issuer/token", data=FORM, auth=(name, secret))
    body = await client.post("/dev-issuer/token", data={**FORM, "client_id": name, "client_secret": secret})
    assert header.status_code == body.status_code == 200


@pytest.mark.parametrize(
    ("form", "auth", "status", "error"),
    [
        (FORM, None, 401, "invalid_client"),
        (FORM, ("developer", "wrong"), 401, "invalid_client"),
        (FORM, ("nobody", ""), 401, "invalid_client"),
        ({"grant_type": "password"}, ("developer", "developer-secret"), 400, "unsupported_grant_type"),
        ({}, ("developer", "developer-secret"), 400, "unsupported_grant_type"),
        ({**FORM, "scope": "ledger:write"}, ("operator", "operator-secret"), 400, "invalid_scope"),
        ({**FORM, "scope": 'a"b'}, ("developer", "developer-secret"), 400, "invalid_scope"),
        ({"grant_type": ["client_credentials", "password"]}, ("developer", "developer-secret"), 400, "invalid_request"),
        ({**FORM, "scope": "x" * 20_000}, ("developer", "developer-secret"), 413, "invalid_request"),
    ],
)
async def test_what_is_wrong_is_answered_as_the_protocol_says(
    form: dict[str, str], auth: tuple[str, str] | None, status: int, error: str, client: httpx2.AsyncClient
) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    basic = httpx2.BasicAuth(*auth) if auth else httpx2.Auth()
    answer = await client.post("/dev-issuer/token", data=form, auth=basic, headers=headers)
    assert (answer.status_code, answer.json()["error"]) == (status, error)
    assert ("www-authenticate" in answer.headers) == (status == 401)


@pytest.mark.parametrize("header", ["Basic", "Basic !!!", "Basic bm9jb2xvbg==", "Bearer abc", "Basic /////w=="])
async def test_a_broken_authorization_header_is_401(header: str, client: httpx2.AsyncClient) -> None:
    answer = await client.post("/dev-issuer/token", data=FORM, headers={"Authorization": header})
    assert answer.status_code == 401


async def test_a_body_that_is_no_form_is_refused(client: httpx2.AsyncClient) -> None:
    auth = ("developer", "developer-secret")
    assert (await client.post("/dev-issuer/token", json=FORM, auth=auth)).status_code == 400
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert (
        await client.post("/dev-issuer/token", content=b"\xff=\xff&&", auth=auth, headers=headers)
    ).status_code == 400


def test_outside_development_it_refuses_to_start_and_makes_no_key(tmp_path: Path) -> None:
    """E5.3."""
    with pytest.raises(Refused, match="outside development"):
        Issuer.open(Settings(env="production", data=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_key_is_kept_and_is_the_owners_alone(tmp_path: Path) -> None:
    first = Issuer.open(Settings(data=tmp_path)).sign("alice")
    again = Issuer.open(Settings(data=tmp_path))
    assert jwt.decode(first, again.keys(), algorithms=["RS256"]).claims["sub"] == "alice"
    assert (tmp_path / "issuer.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["issuer.json"]


def test_processes_that_start_together_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: Issuer.open(Settings(data=tmp_path)), range(8)))
    assert len({issuer.keys().keys[0].kid for issuer in made}) == 1


def test_after_a_rotation_old_tokens_stay_valid_and_new_ones_use_the_new_key(issuer: Issuer, tmp_path: Path) -> None:
    elsewhere = Issuer.open(Settings(data=tmp_path))  # a server that runs meanwhile
    old = issuer.sign("alice")
    issuer.rotate()
    new = issuer.sign("alice")
    published = KeySet.import_key_set(elsewhere.public_keys())
    tokens = [jwt.decode(token, published, algorithms=["RS256"]) for token in (old, new)]
    assert tokens[0].header["kid"] != tokens[1].header["kid"]
    for _ in range(3):
        issuer.rotate()
    assert len(issuer.keys().keys) == 3
    with pytest.raises(InvalidKeyIdError):
        jwt.decode(old, issuer.keys(), algorithms=["RS256"])


def test_a_token_of_another_key_does_not_verify(issuer: Issuer, tmp_path: Path) -> None:
    stranger = Issuer.open(Settings(data=tmp_path / "elsewhere"), port=8000)
    forged = stranger.sign("alice")
    with pytest.raises((BadSignatureError, InvalidKeyIdError)):
        jwt.decode(forged, issuer.keys(), algorithms=["RS256"])


def test_a_damaged_key_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "issuer.json").write_text(json.dumps({"keys": []}))
    with pytest.raises(Refused, match="delete it"):
        Issuer.open(Settings(data=tmp_path))


def test_whoever_serves_it_leaves_its_address_and_a_command_without_a_port_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5.3: the last one to serve; a PORT that names another one is believed."""
    monkeypatch.delenv("PORT", raising=False)
    settings = Settings(data=tmp_path)
    assert Issuer.open(settings).url == "http://127.0.0.1:8000/dev-issuer"
    for port in (40001, 40002):
        create_issuer_router(Issuer.open(settings, port=port))
        assert Issuer.open(settings).url == f"http://127.0.0.1:{port}/dev-issuer"
    monkeypatch.setenv("PORT", "0")
    assert Issuer.open(Settings(data=tmp_path)).url == "http://127.0.0.1:40002/dev-issuer"
    monkeypatch.setenv("PORT", "40001")
    assert Issuer.open(Settings(data=tmp_path)).url == "http://127.0.0.1:40001/dev-issuer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["issuer.json", "issuer.url"]


@pytest.mark.parametrize("left", [b"", b"http://", b"\xff", b"http://127.0.0.1:40001/dev-issuer\n", b"https://evil/"])
def test_an_address_that_was_not_left_by_us_is_not_used(
    left: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PORT", raising=False)
    (tmp_path / "issuer.url").write_bytes(left)
    assert Issuer.open(Settings(data=tmp_path)).url == "http://127.0.0.1:8000/dev-issuer"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8001/dev-issuer"),
        ("localhost", "http://127.0.0.1:8001/dev-issuer"),
        ("0.0.0.0", "http://127.0.0.1:8001/dev-issuer"),
        ("::", "http://127.0.0.1:8001/dev-issuer"),
        ("::1", "http://[::1]:8001/dev-issuer"),
        ("192.168.1.5", "http://192.168.1.5:8001/dev-issuer"),
    ],
)
def test_its_address_is_one_that_the_server_answers_on(host: str, url: str, tmp_path: Path) -> None:
    issuer = Issuer.open(Settings(data=tmp_path, host=host), port=8001)
    assert issuer.url == url
    issuer.announce()
    assert Issuer.open(Settings(data=tmp_path, PORT=8001)).url == url  # type: ignore[call-arg]  # by its alias


def test_a_directory_that_cannot_be_written_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    issuer = Issuer.open(Settings(data=tmp_path), port=8001)
    (tmp_path / "issuer.url").mkdir()
    create_issuer_router(issuer)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("ttl", [0, -1, 10**9])
def test_a_token_does_not_live_for_ever(ttl: int, issuer: Issuer) -> None:
    with pytest.raises(Invalid):
        issuer.sign("alice", ttl_seconds=ttl)
