"""E5.1: keys are cached ten minutes, rotation is tolerated, an outage is bridged, and nobody can make us ask often."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse
from joserfc.jwk import ECKey, OctKey

from duly.auth.jwks import JwksCache
from duly.errors import Unauthenticated, Unavailable
from tests.engine.auth.clock import MovedClock
from tests.engine.auth.conftest import Ask
from tests.engine.auth.forge import claims, rs256, rsa_key
from tests.engine.auth.provider import Provider, fixed

pytestmark = pytest.mark.asyncio(loop_scope="module")
MINUTE = 60


def public(name: str, **changes: Any) -> dict[str, Any]:
    """A JWK; a change to None leaves a member out."""
    made = {**rsa_key(name).as_dict(private=False), **changes}
    return {member: value for member, value in made.items() if value is not None}


def publish(provider: Provider, *keys: object) -> None:
    provider.keys, provider.more = [], list(keys)


async def refreshed(jwks: JwksCache) -> None:
    """Wait for what runs in the background."""
    if (fetching := jwks._fetching) is not None:
        await asyncio.wait({fetching})


async def test_keys_are_fetched_once_in_ten_minutes(jwks: JwksCache, provider: Provider, clock: MovedClock) -> None:
    """E5.1."""
    for _ in range(10):
        await jwks.key("first")
        clock.advance(59)
    await refreshed(jwks)
    assert (provider.fetches, provider.discoveries) == (1, 1)
    clock.advance(MINUTE)
    await jwks.key("first")
    await refreshed(jwks)
    assert provider.fetches == 2


async def test_a_refresh_of_known_keys_keeps_nobody_waiting(
    jwks: JwksCache, provider: Provider, clock: MovedClock
) -> None:
    await jwks.key("first")
    clock.advance(11 * MINUTE)
    provider.instead["keys"] = provider.held
    provider.asked.clear()
    async with asyncio.timeout(1):
        for _ in range(10):
            assert await jwks.key("first")
        await provider.asked.wait()
    assert provider.fetches == 2
    provider.released.set()
    await refreshed(jwks)
    await jwks.key("first")
    assert provider.fetches == 2


async def test_after_a_long_silence_the_keys_are_fetched_before_one_is_believed(
    jwks: JwksCache, provider: Provider, clock: MovedClock
) -> None:
    """A key that was withdrawn meanwhile lets nobody in, however many come at once."""
    await jwks.key("first")
    provider.keys = [rsa_key("second")]
    provider.instead["keys"] = provider.held
    clock.advance(20 * MINUTE)
    waiting = [asyncio.ensure_future(jwks.key("first")) for _ in range(10)]
    await provider.asked.wait()
    provider.released.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(result) for result in results} == {Unauthenticated}
    assert provider.fetches == 2


async def test_after_a_long_silence_an_outage_keeps_one_caller_waiting_and_no_other(
    jwks: JwksCache, provider: Provider, clock: MovedClock
) -> None:
    await jwks.key("first")
    provider.instead["keys"] = OUTAGES["500"]
    clock.advance(20 * MINUTE)
    assert await jwks.key("first")
    assert provider.fetches == 2
    provider.instead["keys"] = provider.hang
    clock.advance(11)
    async with asyncio.timeout(1):
        assert await jwks.key("first")


async def test_a_look_says_whether_the_provider_answers_and_asks_it_when_it_does_not(
    jwks: JwksCache, provider: Provider, clock: MovedClock
) -> None:
    """What health says: it heals without a request, and asks no more often than a token makes us ask."""
    assert jwks.look() == (True, "not asked yet")
    await refreshed(jwks)
    assert jwks.look() == (True, "answers")
    provider.instead["keys"] = OUTAGES["500"]
    clock.advance(10 * MINUTE)
    assert jwks.look() == (True, "answers")  # that is what makes it ask again
    await refreshed(jwks)
    for _ in range(20):
        assert jwks.look() == (False, "away; the keys that are known are good for 50 more minutes")
    assert provider.fetches == 2
    clock.advance(50 * MINUTE)
    assert jwks.look()[1] == "away, and none of its keys is known: whoever brings a token is answered 503"
    await refreshed(jwks)
    del provider.instead["keys"]
    clock.advance(10)
    assert not jwks.look()[0]
    await refreshed(jwks)
    assert jwks.look() == (True, "answers")


async def test_after_a_rotation_old_and_new_tokens_work(ask: Ask, provider: Provider, clock: MovedClock) -> None:
    """E5.1: the new key is fetched when its first token comes, without waiting for ten minutes."""
    old = provider.sign()
    assert (await ask(old)).status_code == 200
    clock.advance(11)
    provider.keys.append(rsa_key("second"))
    new = provider.sign()
    assert [(await ask(token)).status_code for token in (new, old, new)] == [200, 200, 200]
    assert provider.fetches == 2


async def test_a_key_that_is_no_longer_published_is_forgotten(ask: Ask, provider: Provider, clock: MovedClock) -> None:
    old = provider.sign()
    assert (await ask(old)).status_code == 200
    clock.advance(11)
    provider.keys = [rsa_key("second")]
    assert (await ask(provider.sign())).status_code == 200
    assert (await ask(old)).status_code == 401


async def test_a_hundred_unknown_kids_cause_one_fetch(ask: Ask, provider: Provider, clock: MovedClock) -> None:
    """FAULTS: and within the cool-down not one more; after it, one."""
    assert (await ask(provider.sign())).status_code == 200
    forged = [
        rs256(claims(iss=provider.issuer), rsa_key("attacker"), {"alg": "RS256", "kid": f"forged-{n}"})
        for n in range(100)
    ]
    clock.advance(11)
    answers = await asyncio.gather(*(ask(token) for token in forged))
    assert {answer.status_code for answer in answers} == {401}
    assert (provider.fetches, provider.discoveries) == (2, 2)
    clock.advance(9)
    await asyncio.gather(*(ask(token) for token in forged[:10]))
    assert provider.fetches == 2
    clock.advance(1)
    await asyncio.gather(*(ask(token) for token in forged[:10]))
    assert provider.fetches == 3
    assert (await ask(provider.sign())).status_code == 200


async def test_a_hundred_callers_of_an_empty_cache_cause_one_fetch(jwks: JwksCache, provider: Provider) -> None:
    provider.instead["keys"] = provider.held
    waiting = [asyncio.ensure_future(jwks.key("first" if n % 2 else "forged")) for n in range(100)]
    await provider.asked.wait()
    provider.released.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(result, Unauthenticated) for result in results) == 50
    assert provider.fetches == 1


async def test_what_is_not_known_is_not_remembered(jwks: JwksCache, provider: Provider, clock: MovedClock) -> None:
    """Memory does not grow with the kids that strangers make up."""
    await jwks.key("first")
    for n in range(500):
        with pytest.raises(Unauthenticated):
            await jwks.key(f"forged-{n}" * 10)
        clock.advance(1)
    held = [value for value in vars(jwks).values() if isinstance(value, dict | list | set)]
    assert held == [{"first": jwks._keys["first"]}]
    assert provider.fetches <= 51


GOOD = json.dumps({"keys": [public("first")]}).encode()
OUTAGES = {
    "500": fixed(b"{}", 500),
    "503": fixed(b"{}", 503),
    "404": fixed(b"{}", 404),
    "204": fixed(b"", 204),
    "202 with keys": fixed(GOOD, 202),
    "302 with keys": fixed(GOOD, 302, location="/realm/elsewhere"),
    "html": fixed(b"<html>maintenance</html>"),
    "empty": fixed(b""),
    "null": fixed(b"null"),
    "list": fixed(b"[]"),
    "no keys": fixed(b"{}"),
    "keys null": fixed(b'{"keys": null}'),
    "keys object": fixed(b'{"keys": {}}'),
    "keys empty": fixed(b'{"keys": []}'),
    "keys of no use": fixed(b'{"keys": [1, null, "x", [], {}, {"kty": "RSA"}]}'),
    "not UTF-8": fixed(b'{"keys": "\xff"}'),
    "cut short": fixed(b'{"keys": [{"kty": "RSA", "kid"'),
    "nested": fixed(b"[" * 100_000),
    "a name twice": fixed(b'{"keys": [], "keys": []}'),
    "too large": fixed(b" " * 262_145 + b"{}"),
    "compressed": fixed(gzip.compress(GOOD), content_encoding="gzip"),
}


@pytest.mark.parametrize("outage", OUTAGES)
async def test_without_any_key_an_outage_is_503_and_heals(
    outage: str, ask: Ask, provider: Provider, clock: MovedClock
) -> None:
    """503, not 401: the token may be fine."""
    provider.instead["keys"] = OUTAGES[outage]
    for _ in range(5):
        answer = await ask(provider.sign())
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"] == "2"
        assert "www-authenticate" not in answer.headers
    assert provider.fetches == 1
    del provider.instead["keys"]
    clock.advance(2)
    assert (await ask(provider.sign())).status_code == 200


@pytest.mark.parametrize("outage", OUTAGES)
async def test_in_an_outage_known_keys_work_for_an_hour_and_forged_kids_lose_none(
    outage: str, ask: Ask, provider: Provider, clock: MovedClock, jwks: JwksCache
) -> None:
    """FAULTS: a bounded time, then 503; PyJWT's cache lost everything to one forged kid."""
    forged = rs256(claims(iss=provider.issuer), rsa_key("attacker"), {"alg": "RS256", "kid": "forged"})
    good = provider.sign()
    assert (await ask(good)).status_code == 200
    provider.instead["keys"] = OUTAGES[outage]
    for _ in range(5):
        clock.advance(11 * MINUTE)
        assert (await ask(forged)).status_code == 503  # it may be of a key that cannot be fetched now
        assert (await ask(good)).status_code == 200
        await refreshed(jwks)
    clock.advance(5 * MINUTE - 1)
    assert (await ask(good)).status_code == 200
    clock.advance(1)
    assert (await ask(good)).status_code == 503
    del provider.instead["keys"]
    clock.advance(2)
    assert (await ask(good)).status_code == 200
    assert (await ask(forged)).status_code == 401


async def test_in_an_outage_the_provider_is_asked_every_ten_seconds_at_most(
    jwks: JwksCache, provider: Provider, clock: MovedClock
) -> None:
    await jwks.key("first")
    provider.instead["keys"] = OUTAGES["500"]
    clock.advance(10 * MINUTE)
    for _ in range(60):
        await jwks.key("first")
        await refreshed(jwks)
        clock.advance(1)
    assert provider.fetches == 1 + 6


async def test_how_long_old_keys_serve_is_a_setting(provider: Provider, clock: MovedClock) -> None:
    jwks = JwksCache(provider.issuer, stale_seconds=20 * MINUTE, now=clock)
    await jwks.key("first")
    provider.instead["keys"] = OUTAGES["500"]
    clock.advance(20 * MINUTE - 1)
    assert await jwks.key("first")
    clock.advance(11)
    with pytest.raises(Unavailable):
        await jwks.key("first")
    await jwks.close()


async def test_nobody_listens(clock: MovedClock) -> None:
    jwks = JwksCache("http://127.0.0.1:9/realm", now=clock)
    with pytest.raises(Unavailable, match="cannot be fetched"):
        await jwks.key("first")
    await jwks.close()


# -- answers that are too slow, too large, or somewhere else ---------------------------------------


@pytest.mark.parametrize("where", ["keys", "discovery"])
@pytest.mark.parametrize("how", ["hang", "drip"])
async def test_a_slow_provider_is_given_up(how: str, where: str, provider: Provider, clock: MovedClock) -> None:
    """The time is for everything together: a drop now and then does not prolong it."""
    provider.instead[where] = getattr(provider, how)
    jwks = JwksCache(provider.issuer, now=clock, timeout_seconds=0.3)
    async with asyncio.timeout(3):
        with pytest.raises(Unavailable):
            await jwks.key("first")
    await jwks.close()


async def test_an_answer_may_take_the_time_that_the_caller_gives(
    jwks: JwksCache, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no second limit below it, for a part of the work, that would end a fetch sooner."""
    monkeypatch.setattr("duly.auth.provider.TIMEOUT_SECONDS", 0.05)
    provider.instead["keys"] = provider.held
    asyncio.get_running_loop().call_later(0.3, provider.released.set)
    assert await jwks.key("first")


async def test_an_endless_answer_is_cut_off_while_it_comes(jwks: JwksCache, provider: Provider) -> None:
    sent = 0

    async def endless() -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            nonlocal sent
            while sent < 100_000_000:
                sent += 65_536
                yield b" " * 65_536
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    provider.instead["keys"] = endless
    async with asyncio.timeout(1.5):  # sooner than the time-out of the fetch
        with pytest.raises(Unavailable):
            await jwks.key("first")
    assert sent < 50_000_000  # what fits into the buffers of two sockets, and not more


async def test_a_set_just_below_the_limit_is_read(jwks: JwksCache, provider: Provider) -> None:
    content = json.dumps(provider.document()).encode()
    provider.instead["keys"] = fixed(content + b" " * (262_144 - len(content)))
    assert await jwks.key("first")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("where", ["keys", "discovery"])
async def test_redirects_are_not_followed(status: int, where: str, jwks: JwksCache, provider: Provider) -> None:
    provider.instead[where] = fixed(b"", status, location=f"{provider.issuer}/elsewhere")
    with pytest.raises(Unavailable):
        await jwks.key("attacker")
    assert provider.strayed == 0


async def test_redirects_are_not_followed_by_a_client_that_would(provider: Provider, clock: MovedClock) -> None:
    provider.instead["keys"] = fixed(b"", 302, location=f"{provider.issuer}/elsewhere")
    async with httpx2.AsyncClient(follow_redirects=True, timeout=2) as client:
        jwks = JwksCache(provider.issuer, client=client, now=clock)
        with pytest.raises(Unavailable):
            await jwks.key("attacker")
        await jwks.close()
        assert not client.is_closed
    assert provider.strayed == 0


async def test_a_proxy_of_the_environment_is_not_used(jwks: JwksCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert await jwks.key("first")


# -- discovery -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["/", "x", "/../realm", " "])
async def test_a_configuration_of_another_issuer_is_not_believed(
    suffix: str, jwks: JwksCache, provider: Provider
) -> None:
    provider.claimed_issuer = provider.issuer + suffix
    with pytest.raises(Unavailable):
        await jwks.key("first")
    assert provider.fetches == 0


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/keys", "keys", "//127.0.0.1/keys", "http://["])
async def test_keys_come_over_http(url: str, jwks: JwksCache, provider: Provider) -> None:
    provider.claimed_jwks_uri = url
    with pytest.raises(Unavailable):
        await jwks.key("first")


@pytest.mark.parametrize(("url", "found"), [("http://id.example/keys", False), ("https://id.example/keys", True)])
async def test_an_https_issuer_does_not_lead_to_http(url: str, found: bool, clock: MovedClock) -> None:
    issuer = "https://id.example/realm"

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("openid-configuration"):
            return httpx2.Response(200, json={"issuer": issuer, "jwks_uri": url})
        return httpx2.Response(200, json={"keys": [public("first")]})

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        jwks = JwksCache(issuer, client=client, now=clock)
        if found:
            assert await jwks.key("first")
        else:
            with pytest.raises(Unavailable):
                await jwks.key("first")


async def test_with_the_address_of_the_keys_nothing_is_discovered(provider: Provider, clock: MovedClock) -> None:
    jwks = JwksCache("https://id.example/realm", jwks_url=f"{provider.issuer}/keys", now=clock)
    assert await jwks.key("first")
    assert provider.discoveries == 0
    await jwks.close()


async def test_an_issuer_with_a_slash_at_its_end_is_found(provider: Provider, clock: MovedClock) -> None:
    """OpenID Connect Discovery, section 4: the slash is not doubled, and is part of the name."""
    jwks = JwksCache(provider.issuer + "/", now=clock)
    provider.claimed_issuer = provider.issuer + "/"
    assert await jwks.key("first")
    await jwks.close()


# -- which keys ------------------------------------------------------------------------------------


def weak() -> dict[str, Any]:
    """1024 bits: half of a good modulus."""
    return public("first", n=str(public("first")["n"])[:171] + "A", kid="odd")


@pytest.mark.parametrize(
    "odd",
    [
        lambda: public("second", kid="odd", use="enc"),
        lambda: public("second", kid="odd", use=1),
        lambda: public("second", kid="odd", alg="RS512"),
        lambda: public("second", kid="odd", alg="PS256"),
        lambda: public("second", kid="odd", alg="RSA-OAEP"),
        lambda: public("second", kid="odd", alg=["RS256"]),
        lambda: public("second", kid="odd", key_ops=["sign"]),
        lambda: public("second", kid="odd", key_ops="verify"),
        lambda: public("second", kid="odd", kty="rsa"),
        lambda: public("second", kid="odd", kty=None),
        lambda: public("second", kid="odd", n=None),
        lambda: public("second", kid="odd", e=None),
        lambda: public("second", kid="odd", e=65537),
        lambda: public("second", kid="odd", e="AQ"),
        lambda: public("second", kid="odd", e="AA"),
        lambda: public("second", kid="odd", n="!!!"),
        lambda: public("second", kid="odd", n="é" * 400),
        lambda: public("second", kid="odd", n="A" * 100_000),
        lambda: public("second", kid="odd", n="_" * 2_000),
        weak,
        lambda: {**ECKey.generate_key("P-256").as_dict(private=False), "kid": "odd"},
        lambda: {**OctKey.generate_key(256).as_dict(private=True), "kid": "odd"},
        lambda: {"kty": "RSA", "kid": "odd"},
    ],
)
async def test_a_key_that_cannot_verify_rs256_is_skipped_and_the_others_serve(
    odd: Any, jwks: JwksCache, provider: Provider
) -> None:
    publish(provider, 1, None, "x", [], odd(), public("first"))
    assert await jwks.key("first")
    with pytest.raises(Unauthenticated):
        await jwks.key("odd")


@pytest.mark.parametrize("kid", [None, "", 1, "k" * 257, ["first"]])
async def test_a_key_without_a_usable_name_is_skipped(kid: Any, jwks: JwksCache, provider: Provider) -> None:
    publish(provider, {**public("second", kid=None), **({} if kid is None else {"kid": kid})}, public("first"))
    assert await jwks.key("first")
    assert len(jwks._keys) == 1


async def test_a_key_may_leave_out_use_and_alg(jwks: JwksCache, provider: Provider) -> None:
    publish(provider, public("first", use=None, alg=None), public("second", key_ops=["verify"], use=None))
    assert await jwks.key("first")
    assert await jwks.key("second")


async def test_of_two_keys_with_one_name_the_first_counts(ask: Ask, provider: Provider) -> None:
    good = provider.sign()
    publish(provider, public("first"), public("attacker", kid="first"))
    assert (await ask(good)).status_code == 200
    assert (await ask(rs256(claims(iss=provider.issuer), rsa_key("attacker"), None))).status_code == 401


async def test_at_most_fifty_keys_are_kept(jwks: JwksCache, provider: Provider) -> None:
    publish(provider, *(public("first", kid=f"key-{n}") for n in range(60)))
    assert await jwks.key("key-49")
    with pytest.raises(Unauthenticated):
        await jwks.key("key-50")
    assert len(jwks._keys) == 50


async def test_a_private_key_that_a_provider_publishes_by_mistake_is_not_kept(
    jwks: JwksCache, provider: Provider
) -> None:
    publish(provider, rsa_key("first").as_dict(private=True))
    assert not (await jwks.key("first")).is_private


# -- ends ------------------------------------------------------------------------------------------


async def test_a_caller_who_leaves_does_not_take_the_fetch_along(jwks: JwksCache, provider: Provider) -> None:
    provider.instead["keys"] = provider.held
    first = asyncio.ensure_future(jwks.key("first"))
    await provider.asked.wait()
    second = asyncio.ensure_future(jwks.key("first"))
    first.cancel()
    await asyncio.wait({first})
    provider.released.set()
    assert await second
    assert provider.fetches == 1


@pytest.mark.parametrize("is_owned", [True, False])
async def test_closing_ends_a_fetch_and_answers_those_who_wait(
    is_owned: bool, provider: Provider, clock: MovedClock, client: httpx2.AsyncClient
) -> None:
    jwks = JwksCache(provider.issuer, client=None if is_owned else client, now=clock)
    provider.instead["keys"] = provider.hang
    waiting = asyncio.ensure_future(jwks.key("first"))
    await provider.asked.wait()
    async with asyncio.timeout(1):
        await jwks.close()
        await jwks.close()
        with pytest.raises(Unavailable):
            await waiting
    clock.advance(11)
    with pytest.raises(Unavailable):
        await jwks.key("first")
    assert provider.fetches == 1
    assert [task for task in asyncio.all_tasks() if task.get_name() == "duly-jwks"] == []
