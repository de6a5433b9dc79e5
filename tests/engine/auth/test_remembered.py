"""E5.1, F14: a token that was believed is not verified anew with each request, and loses its rights all the same."""

from __future__ import annotations

import asyncio

import pytest

from duly.auth.jwks import JwksCache
from duly.auth.tokens import MOST_REMEMBERED, Verifier
from duly.errors import Unauthenticated
from tests.engine.auth.clock import MovedClock
from tests.engine.auth.forge import NOW, claims, rs256, rsa_key
from tests.engine.auth.provider import Provider, fixed
from tests.engine.auth.test_jwks import public, publish, refreshed

pytestmark = pytest.mark.asyncio(loop_scope="module")
MINUTE = 60


async def test_a_token_is_verified_once_for_as_long_as_its_key_was_not_fetched_again(
    verifier: Verifier, jwks: JwksCache, provider: Provider, clock: MovedClock
) -> None:
    token = provider.sign()
    first = await verifier.verify(token)
    assert await verifier.verify(token) is first
    clock.advance(10 * MINUTE)
    await verifier.verify(token)
    await refreshed(jwks)
    again = await verifier.verify(token)
    assert again == first
    assert again is not first
    assert await verifier.verify(token) is again


async def test_a_remembered_token_expires(verifier: Verifier, provider: Provider, wall: MovedClock) -> None:
    token = provider.sign(exp=NOW + 300)
    await verifier.verify(token)
    wall.seconds = NOW + 300 + 29.9
    await verifier.verify(token)
    wall.seconds = NOW + 300 + 30
    for _ in range(2):
        with pytest.raises(Unauthenticated, match="expired"):
            await verifier.verify(token)


@pytest.mark.parametrize("claim", ["nbf", "iat"])
async def test_a_remembered_token_is_not_valid_before_its_time_when_our_clock_is_put_back(
    claim: str, verifier: Verifier, provider: Provider, wall: MovedClock
) -> None:
    token = provider.sign(**{"nbf": NOW - 900, "iat": NOW - 900, claim: NOW})
    await verifier.verify(token)
    wall.seconds = NOW - 30
    await verifier.verify(token)
    wall.seconds = NOW - 31
    with pytest.raises(Unauthenticated, match="not valid yet"):
        await verifier.verify(token)


async def test_a_remembered_token_of_a_key_that_was_withdrawn_is_refused_once_the_keys_are_fetched(
    verifier: Verifier, jwks: JwksCache, provider: Provider, clock: MovedClock
) -> None:
    token = provider.sign()
    await verifier.verify(token)
    provider.keys = [rsa_key("second")]
    await verifier.verify(token)
    clock.advance(10 * MINUTE)
    await verifier.verify(token)  # starts the fetch, and does not wait for it: as with a token that is new
    await refreshed(jwks)
    with pytest.raises(Unauthenticated, match="not among the provider's"):
        await verifier.verify(token)


async def test_a_remembered_token_is_refused_when_its_key_became_another_of_the_same_name(
    verifier: Verifier, jwks: JwksCache, provider: Provider, clock: MovedClock
) -> None:
    token = provider.sign()
    await verifier.verify(token)
    publish(provider, public("second", kid="first"))
    clock.advance(10 * MINUTE)
    await verifier.verify(token)
    await refreshed(jwks)
    for _ in range(2):
        with pytest.raises(Unauthenticated, match="signature"):
            await verifier.verify(token)


async def test_after_a_long_silence_a_remembered_token_waits_for_the_keys(
    verifier: Verifier, provider: Provider, clock: MovedClock
) -> None:
    token = provider.sign()
    await verifier.verify(token)
    provider.keys = [rsa_key("second")]
    clock.advance(20 * MINUTE)
    with pytest.raises(Unauthenticated, match="not among the provider's"):
        await verifier.verify(token)


async def test_what_one_audience_or_issuer_believed_another_does_not(
    provider: Provider, jwks: JwksCache, wall: MovedClock
) -> None:
    """Each verifier remembers for itself, also where they share the keys."""
    ours = Verifier(provider.issuer, "duly", jwks, now=wall)
    other_audience = Verifier(provider.issuer, "billing", jwks, now=wall)
    other_issuer = Verifier(f"{provider.issuer}/", "duly", jwks, now=wall)
    token = provider.sign()
    await ours.verify(token)
    for verifier, reason in ((other_audience, "another audience"), (other_issuer, "another issuer")):
        for _ in range(2):
            with pytest.raises(Unauthenticated, match=reason):
                await verifier.verify(token)
    roles = {"portal": {"roles": ["CLERK"]}}
    shared = provider.sign(aud=["duly", "billing"], resource_access=roles)
    with_roles = Verifier(provider.issuer, "billing", jwks, role_clients=["portal"], now=wall)
    assert "CLERK" not in (await ours.verify(shared)).roles
    assert "CLERK" in (await with_roles.verify(shared)).roles
    assert "CLERK" not in (await ours.verify(shared)).roles


async def test_a_token_that_differs_from_a_remembered_one_is_another(verifier: Verifier, provider: Provider) -> None:
    token = provider.sign()
    await verifier.verify(token)
    head, payload, signature = token.split(".")
    _, other_payload, _ = provider.sign(sub="mallory").split(".")
    for forged in (f"{head}.{other_payload}.{signature}", f"{head}.{payload}.", f"{head}.{payload}.{signature[::-1]}"):
        with pytest.raises(Unauthenticated):
            await verifier.verify(forged)
    assert (await verifier.verify(token)).subject == "alice"


async def test_what_is_refused_is_not_remembered(verifier: Verifier, provider: Provider) -> None:
    """Memory does not grow with what strangers make up."""
    header = {"alg": "RS256", "kid": "first"}
    refused = [
        rs256(claims(iss=provider.issuer, sub=f"forged-{number}"), rsa_key("attacker"), header) for number in range(20)
    ]
    refused += [provider.sign(exp=NOW - 31), provider.sign(aud="billing"), "a.b.c", "x" * 20_000]
    for token in refused:
        with pytest.raises(Unauthenticated):
            await verifier.verify(token)
    assert not verifier._believed


async def test_so_many_are_remembered_and_those_that_are_used_stay(
    verifier: Verifier, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_REMEMBERED == 1_000
    monkeypatch.setattr("duly.auth.tokens.MOST_REMEMBERED", 3)
    tokens = [provider.sign(sub=f"caller-{number}") for number in range(10)]
    often = await verifier.verify(tokens[0])
    for number, token in enumerate(tokens[1:], 1):
        assert (await verifier.verify(token)).subject == f"caller-{number}"
        assert await verifier.verify(tokens[0]) is often
        assert len(verifier._believed) <= 3
    assert [known.principal.subject for known in verifier._believed.values()] == ["caller-8", "caller-9", "caller-0"]
    assert (await verifier.verify(tokens[1])).subject == "caller-1"


async def test_a_token_that_is_forgotten_while_its_key_is_waited_for_is_believed_all_the_same(
    verifier: Verifier, provider: Provider, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys are old and the provider is away: both wait for the same fetch, and there is room for one."""
    monkeypatch.setattr("duly.auth.tokens.MOST_REMEMBERED", 1)
    forgotten, remembered = provider.sign(sub="ann"), provider.sign(sub="bob")
    await verifier.verify(forgotten)
    await verifier.verify(remembered)
    clock.advance(20 * MINUTE)
    provider.instead["keys"] = provider.hang
    provider.asked.clear()
    waiting = [asyncio.ensure_future(verifier.verify(token)) for token in (forgotten, remembered)]
    await provider.asked.wait()
    provider.released.set()
    assert [found.subject for found in await asyncio.gather(*waiting)] == ["ann", "bob"]
    assert len(verifier._believed) == 1


async def test_no_token_is_kept(verifier: Verifier, provider: Provider) -> None:
    """A dump of the memory shows who called, and nothing that calls."""
    token = provider.sign()
    await verifier.verify(token)
    held = repr(verifier._believed)
    assert "alice" in held
    assert not any(part in held for part in token.split("."))


async def test_a_provider_that_is_away_takes_nothing_from_a_remembered_token_for_an_hour(
    verifier: Verifier, jwks: JwksCache, provider: Provider, clock: MovedClock
) -> None:
    token = provider.sign()
    first = await verifier.verify(token)
    provider.instead["keys"] = fixed(b"{}", 500)
    clock.advance(10 * MINUTE)
    await verifier.verify(token)
    await refreshed(jwks)
    assert await verifier.verify(token) is first
