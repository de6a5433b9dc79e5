"""E5.2: a service's own tokens are fetched once, kept while they last, and never show the secret."""

from __future__ import annotations

import asyncio
import io
import logging
import traceback
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest
import pytest_asyncio
import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from duly.auth.client import ServiceAuth, ServiceTokens
from duly.errors import DulyError, Unauthenticated, Unavailable
from duly.telemetry import configure_logging
from tests.engine.auth.clock import MovedClock
from tests.engine.auth.conftest import UNREACHED_SECONDS
from tests.engine.auth.provider import Provider, fixed
from tests.engine.http.serving import served

pytestmark = pytest.mark.asyncio(loop_scope="module")
SECRET = "canary secret+/:%é"


@pytest_asyncio.fixture(loop_scope="module")
async def tokens(provider: Provider, clock: MovedClock) -> AsyncIterator[ServiceTokens]:
    made = ServiceTokens(provider.issuer, "wor:ker", SECRET, scope="a b", now=clock, timeout_seconds=UNREACHED_SECONDS)
    yield made
    await made.close()


async def test_the_grant_is_asked_for_as_the_protocol_says(tokens: ServiceTokens, provider: Provider) -> None:
    """RFC 6749, section 2.3.1: both parts are form-encoded before they are joined."""
    assert (await tokens.token()).startswith("token-")
    assert provider.grants == [
        {"grant_type": "client_credentials", "scope": "a b", "basic": "wor%3Aker:canary+secret%2B%2F%3A%25%C3%A9"}
    ]
    assert provider.discoveries == 1


async def test_with_the_address_of_the_endpoint_nothing_is_discovered(provider: Provider, clock: MovedClock) -> None:
    url = f"{provider.issuer}/token"
    tokens = ServiceTokens("https://id.example", "worker", SECRET, scope="a", token_url=url, now=clock)
    assert await tokens.token()
    assert provider.discoveries == 0
    await tokens.close()


@pytest.mark.parametrize(
    ("lifetime", "kept"),
    [
        (3600, 3570),
        (300, 270),
        (60, 54),
        (10, 9),
        (10**9, 86_370),
        (1e308, 86_370),
        (None, 54),
        ("3600", 54),
        (True, 54),
        (0, 54),
        (-5, 54),
        ([], 54),
    ],
)
async def test_a_token_is_kept_until_shortly_before_it_expires(
    lifetime: object, kept: float, tokens: ServiceTokens, provider: Provider, clock: MovedClock
) -> None:
    """E5.2: thirty seconds before, or a tenth of its life if that is less; a minute when it is not said."""
    provider.lifetime = lifetime
    first = await tokens.token()
    clock.advance(kept - 0.001)
    assert await tokens.token() == first
    assert len(provider.grants) == 1
    clock.advance(0.001)
    assert await tokens.token() != first
    assert len(provider.grants) == 2


async def test_a_hundred_callers_cause_one_grant(tokens: ServiceTokens, provider: Provider) -> None:
    got = await asyncio.gather(*(tokens.token() for _ in range(100)))
    assert len(set(got)) == 1
    assert len(provider.grants) == 1


async def test_a_caller_who_leaves_does_not_take_the_grant_along(tokens: ServiceTokens, provider: Provider) -> None:
    async def slow() -> Response:
        await provider.released.wait()
        return JSONResponse({"access_token": "slow", "token_type": "bearer", "expires_in": 60})

    provider.instead["token"] = slow
    first = asyncio.ensure_future(tokens.token())
    await provider.asked.wait()
    second = asyncio.ensure_future(tokens.token())
    first.cancel()
    await asyncio.wait({first})
    provider.released.set()
    assert await second == "slow"
    assert len(provider.grants) == 1


async def test_a_forgotten_token_is_fetched_anew_and_another_is_kept(tokens: ServiceTokens, provider: Provider) -> None:
    first = await tokens.token()
    tokens.forget("another")
    assert await tokens.token() == first
    tokens.forget(first)
    second = await tokens.token()
    assert second != first
    tokens.forget(first)  # somebody else who was refused with the old one
    assert await tokens.token() == second
    assert len(provider.grants) == 2


AWAY = {
    "500": fixed(b'{"error": "server_error"}', 500),
    "503": fixed(b"", 503),
    "429": fixed(b"", 429),
    "408": fixed(b"", 408),
    "302": fixed(b"", 302, location="/realm/elsewhere"),
    "307": fixed(b"", 307, location="/realm/elsewhere"),
    "not JSON": fixed(b"<html>"),
    "list": fixed(b"[]"),
    "no token": fixed(b'{"token_type": "Bearer"}'),
    "token null": fixed(b'{"access_token": null, "token_type": "Bearer"}'),
    "token empty": fixed(b'{"access_token": "", "token_type": "Bearer"}'),
    "token with line": fixed(b'{"access_token": "a\\r\\nX-Evil: 1", "token_type": "Bearer"}'),
    "token with space": fixed(b'{"access_token": "a b", "token_type": "Bearer"}'),
    "token not ASCII": fixed('{"access_token": "é", "token_type": "Bearer"}'.encode()),
    "token too long": fixed(b'{"access_token": "' + b"x" * 16_385 + b'", "token_type": "Bearer"}'),
    "other type": fixed(b'{"access_token": "x", "token_type": "DPoP"}'),
    "no type": fixed(b'{"access_token": "x"}'),
    "too large": fixed(b" " * 262_145),
}


@pytest.mark.parametrize("kind", AWAY)
async def test_without_a_usable_answer_it_is_unavailable_and_heals(
    kind: str, tokens: ServiceTokens, provider: Provider
) -> None:
    provider.instead["token"] = AWAY[kind]
    with pytest.raises(Unavailable, match="gave no service token"):
        await tokens.token()
    assert (len(provider.grants), provider.strayed) == (1, 0)
    del provider.instead["token"]
    assert await tokens.token()


@pytest.mark.parametrize("how", ["hang", "drip"])
async def test_a_slow_answer_is_given_up(how: str, provider: Provider) -> None:
    provider.instead["token"] = getattr(provider, how)
    tokens = ServiceTokens(provider.issuer, "worker", SECRET, scope="a", timeout_seconds=0.3)
    async with asyncio.timeout(3):
        with pytest.raises(Unavailable):
            await tokens.token()
    await tokens.close()


async def test_nobody_listens() -> None:
    tokens = ServiceTokens("http://127.0.0.1:9", "worker", SECRET, scope="a")
    with pytest.raises(Unavailable, match="cannot be reached"):
        await tokens.token()
    await tokens.close()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b'{"error": "invalid_client", "error_description": "canary secret"}', "(invalid_client)"),
        (400, b'{"error": "invalid_scope"}', "(invalid_scope)"),
        (400, b'{"error": "canary secret"}', "(no reason given)"),
        (400, b'{"error": ["invalid_scope"]}', "(no reason given)"),
        (403, b"canary secret", "(no reason given)"),
    ],
)
async def test_a_refused_client_is_told_so_in_safe_words(
    status: int, body: bytes, said: str, tokens: ServiceTokens, provider: Provider
) -> None:
    provider.instead["token"] = fixed(body, status)
    with pytest.raises(Unauthenticated) as raised:
        await tokens.token()
    assert str(raised.value) == f"the identity provider refused the client wor:ker {said}"


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Everything that is logged, down to the last detail of every library."""
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    configure_logging(level="debug", style="json")
    handler = root.handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    yield stream
    root.handlers[:], root.level = before
    structlog.reset_defaults()


async def test_the_secret_and_the_tokens_are_in_no_log_error_or_repr(
    logged: io.StringIO, tokens: ServiceTokens, provider: Provider
) -> None:
    """FAULTS: a canary, through success and every kind of failure."""
    seen = [repr(tokens), str(vars(tokens)), repr(ServiceAuth(tokens))]
    got = await tokens.token()
    seen += [str(vars(tokens))]
    for answer in [*AWAY.values(), fixed(b'{"error": "invalid_client"}', 401)]:
        tokens.forget(got)
        provider.instead["token"] = answer
        try:
            await tokens.token()
        except DulyError as error:
            seen += ["".join(traceback.format_exception(error)), repr(error), str(error.headers)]
    seen.append(logged.getvalue())
    assert "service_token_failed" in logged.getvalue()
    encoded = provider.grants[0]["basic"]
    for said in seen:
        for canary in ("canary", SECRET, encoded, got, "Y2FuYXJ5"):
            assert canary not in said


async def test_closing_ends_a_grant_and_answers_those_who_wait(tokens: ServiceTokens, provider: Provider) -> None:
    provider.instead["token"] = provider.hang
    waiting = asyncio.ensure_future(tokens.token())
    await provider.asked.wait()
    async with asyncio.timeout(1):
        await tokens.close()
    for call in (waiting, tokens.token()):
        with pytest.raises(Unavailable, match="closed"):
            await call


# -- ServiceAuth -----------------------------------------------------------------------------------


class Counter:
    """An API that refuses the tokens it is told to, and counts."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.bodies: list[bytes] = []
        self.seen: list[str] = []


@pytest_asyncio.fixture(loop_scope="module")
async def counter() -> AsyncIterator[tuple[Counter, httpx2.AsyncClient]]:
    made = Counter()
    api = FastAPI()

    @api.post("/work")
    async def work(request: Request) -> Response:
        token = request.headers["authorization"].removeprefix("Bearer ")
        made.seen.append(token)
        made.bodies.append(await request.body())
        return Response(status_code=401 if token in made.refused or "*" in made.refused else 200)

    async with served(api) as client:
        yield made, client


async def test_requests_carry_the_token(counter: tuple[Counter, httpx2.AsyncClient], tokens: ServiceTokens) -> None:
    """E5.2."""
    made, client = counter
    for _ in range(3):
        assert (await client.post("/work", auth=ServiceAuth(tokens))).status_code == 200
    assert made.seen == [await tokens.token()] * 3


async def test_a_401_is_tried_once_more_with_a_fresh_token_and_the_same_body(
    counter: tuple[Counter, httpx2.AsyncClient], tokens: ServiceTokens, provider: Provider
) -> None:
    made, client = counter
    first = await tokens.token()
    made.refused.add(first)

    async def body() -> AsyncIterator[bytes]:
        yield b"once "
        yield b"only"

    answer = await client.post("/work", content=body(), auth=ServiceAuth(tokens))
    assert answer.status_code == 200
    assert made.seen[0] == first != made.seen[1]
    assert made.bodies == [b"once only"] * 2
    assert len(provider.grants) == 2


async def test_a_second_401_is_the_answer(
    counter: tuple[Counter, httpx2.AsyncClient], tokens: ServiceTokens, provider: Provider
) -> None:
    made, client = counter
    made.refused.add("*")
    assert (await client.post("/work", auth=ServiceAuth(tokens))).status_code == 401
    assert (len(made.seen), len(provider.grants)) == (2, 2)


async def test_fifty_requests_refused_together_cause_one_new_grant(
    counter: tuple[Counter, httpx2.AsyncClient], tokens: ServiceTokens, provider: Provider
) -> None:
    made, client = counter
    made.refused.add(await tokens.token())
    answers = await asyncio.gather(*(client.post("/work", auth=ServiceAuth(tokens)) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(provider.grants) == 2


async def test_a_client_that_is_not_async_is_refused_rather_than_left_without_a_token(tokens: ServiceTokens) -> None:
    with httpx2.Client(auth=ServiceAuth(tokens)) as client, pytest.raises(RuntimeError, match="AsyncClient"):
        client.get("http://127.0.0.1:9/")
