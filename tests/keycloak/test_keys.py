"""Keycloak's keys change under a running api: new ones are believed at once, withdrawn ones no longer (E5.1)."""

from __future__ import annotations

import pytest

from duly.auth.jwks import COOL_DOWN_SECONDS, FRESH_SECONDS, OVERDUE, JwksCache
from duly.auth.tokens import Verifier
from duly.errors import Unauthenticated
from tests.engine.auth.clock import MovedClock
from tests.engine.cli.commands import wait_until
from tests.keycloak.pages import Site, browser, parts_of, sign_in
from tests.keycloak.server import PATIENCE_SECONDS, Keycloak

pytestmark = [pytest.mark.keycloak, pytest.mark.timeout(1800)]
ORDERS = "/v1/orders"
SLACK_SECONDS = 20.0  # for a busy machine


def test_a_rotation_needs_no_restart_and_a_withdrawn_key_is_refused(site: Site, keycloak: Keycloak) -> None:
    """Old tokens work until their key is removed; then the next fetch ends them."""
    before = keycloak.token("orders-service", "commerce")
    assert site.get(ORDERS, before).status_code == 200
    second = keycloak.add_key(1_000)
    with browser(site) as ada:
        old = keycloak.token("orders-service", "commerce")
        assert parts_of(old)[0]["kid"] != parts_of(before)[0]["kid"]
        wait_until(
            lambda: site.get(ORDERS, old).status_code == 200, seconds=COOL_DOWN_SECONDS + SLACK_SECONDS,
            what="the token of the new key is accepted",
        )  # fmt: skip
        assert site.get(ORDERS, before).status_code == 200, "the old key is still published"
        assert sign_in(ada, "ada").status_code == 303, "ID tokens, too"
    third = keycloak.add_key(2_000)
    try:
        keycloak.remove_key(second)
        new = keycloak.token("orders-service", "commerce")
        assert site.get(ORDERS, old).status_code == 200, "nobody has told us yet"
        wait_until(
            lambda: site.get(ORDERS, new).status_code == 200, seconds=COOL_DOWN_SECONDS + SLACK_SECONDS,
            what="the token of the newest key is accepted",
        )  # fmt: skip
        refused = site.get(ORDERS, old)
        assert refused.status_code == 401
        assert refused.json()["detail"] == "the key that signed the token is not among the provider's"
        assert site.get(ORDERS, before).status_code == 200, "the first key was not removed"
    finally:
        keycloak.remove_key(third)


async def test_a_rotation_is_noticed_by_the_first_token_and_a_withdrawal_within_the_bound(keycloak: Keycloak) -> None:
    """The same with the cache's own clock moved: no wait, and no token of the new key to tell us."""
    clock = MovedClock()
    verifier = Verifier(
        keycloak.issuer, "duly", JwksCache(keycloak.issuer, now=clock, timeout_seconds=PATIENCE_SECONDS)
    )
    first = keycloak.token("orders-service", "commerce")
    await verifier.verify(first)
    key = keycloak.add_key(1_500)
    try:
        clock.advance(COOL_DOWN_SECONDS)
        rotated = keycloak.token("orders-service", "commerce")
        assert (await verifier.verify(rotated)).client_id == "orders-service", "at once"
    finally:
        keycloak.remove_key(key)
    clock.advance(FRESH_SECONDS - 1)
    assert await verifier.verify(rotated), "within the ten minutes it is believed"
    clock.advance(OVERDUE * FRESH_SECONDS)
    with pytest.raises(Unauthenticated, match="not among the provider's"):
        await verifier.verify(rotated)
    assert await verifier.verify(first)
    await verifier.close()


def test_keys_for_other_purposes_are_not_used(site: Site, keycloak: Keycloak) -> None:
    """Keycloak publishes a key for encryption beside the one for signatures, under the same address."""
    keys = keycloak.client.get(f"{keycloak.issuer}/protocol/openid-connect/certs").json()["keys"]
    assert {key["use"] for key in keys} == {"sig", "enc"}
    assert site.get(ORDERS, keycloak.token("orders-service", "commerce")).status_code == 200
