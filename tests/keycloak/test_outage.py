"""Keycloak is away, hangs, and comes back: what goes on, what is said, and that it heals by itself (E5.1, E3.15)."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.engine.cli.commands import status, wait_until
from tests.keycloak.pages import Site, browser, csrf_of, run_hourly_task, serving, sign_in, with_kid
from tests.keycloak.server import Keycloak

pytestmark = [pytest.mark.keycloak, pytest.mark.timeout(1800)]
ORDERS = "/v1/orders"


def lasting_token(keycloak: Keycloak) -> str:
    """One that outlives a restart of the server, also on a machine where that takes longer than five minutes."""
    before = keycloak.find_client("orders-service")["attributes"]
    keycloak.change_client("orders-service", attributes={**before, "access.token.lifespan": "1800"})
    try:
        return keycloak.token("orders-service", "commerce")
    finally:
        keycloak.change_client("orders-service", attributes=before)


def check_away(site: Site, token: str) -> None:
    """Known keys serve; whatever needs the provider says so, with a status that means: try again."""
    assert site.get(ORDERS, token).status_code == 200, "known keys go on verifying"
    unknown = site.get(ORDERS, with_kid(token, "a-key-nobody-knows"))
    assert unknown.status_code in (401, 503), unknown.text
    wait_until(
        lambda: site.get(ORDERS, with_kid(token, "a-key-nobody-knows")).status_code == 503, seconds=60,
        what="an unknown key is 503: it may be a new one",
    )  # fmt: skip
    unknown = site.get(ORDERS, with_kid(token, "a-key-nobody-knows"))
    assert unknown.headers["content-type"] == "application/problem+json"
    assert int(unknown.headers["retry-after"]) > 0
    assert unknown.json()["detail"] == "the identity provider's keys cannot be fetched: try again later"
    said = site.identity()
    assert (said["ok"], said["detail"].startswith("away; the keys that are known are good for ")) == (False, True)
    assert f'duly_identity_provider_up{{issuer="{token_issuer(site)}"}} 0.0' in httpx2.get(f"{site.url}/metrics").text
    assert site.get(ORDERS, token).status_code == 200, "a forged key took none from us"


def token_issuer(site: Site) -> str:
    """Whose keys are meant in the numbers."""
    text = httpx2.get(f"{site.url}/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("duly_identity_provider_up{")]
    return line.partition('issuer="')[2].partition('"')[0]


def test_while_it_is_stopped_known_keys_serve_and_afterwards_everything_does(site: Site, keycloak: Keycloak) -> None:
    token = lasting_token(keycloak)
    assert site.get(ORDERS, token).status_code == 200
    assert site.identity() == {"ok": True, "detail": "answers"}
    with browser(site) as ada, browser(site) as otto:
        assert sign_in(ada, "ada").status_code == 303
        key = keycloak.add_key(4_000)
        rotated = lasting_token(keycloak)  # the last thing it does: we have not seen this key
        secret = keycloak.secret("transfers-worker")
        keycloak.stop()
        check_away(site, token)
        assert site.get(ORDERS, rotated).status_code == 503
        assert ada.get("/console/jobs").status_code == 200, "who is signed in stays so"
        away = otto.get("/console/sign-in")
        assert away.status_code == 503
        assert "identity provider cannot be reached" in away.text
        assert status(f"{site.url}/healthz") == 200
        code, said = run_hourly_task(site, keycloak, secret)
        assert code == 1
        assert "gave no service token: it cannot be reached" in said
        assert "Traceback" not in said
        keycloak.start()
        wait_until(lambda: site.identity()["ok"], seconds=60, what="health says that it is back, without a request")
        assert site.get(ORDERS, token).status_code == 200, "its keys are still the same"
        assert site.get(ORDERS, rotated).status_code == 200, "and the new one is believed as soon as it can be had"
        assert site.get(ORDERS, keycloak.token("orders-service", "commerce")).status_code == 200
        forged = site.get(ORDERS, with_kid(token, "a-key-nobody-knows"))
        assert forged.status_code == 401, "now it can be known that there is no such key"
        assert sign_in(otto, "otto").status_code == 303
        assert run_hourly_task(site, keycloak, secret)[0] == 0, "its secret is still the same"
        assert ada.post("/console/sign-out", data={"csrf": csrf_of(ada)}).status_code == 303
        keycloak.remove_key(key)
    assert "Traceback" not in site.log.read_text()


def test_an_api_that_starts_without_it_waits_and_heals(keycloak: Keycloak, dsn: str, tmp_path: Path) -> None:
    """Killed, as by a machine that went away; the api has never seen a key."""
    token = lasting_token(keycloak)
    with serving(keycloak, dsn, tmp_path, before=keycloak.kill) as site:
        answer = site.get(ORDERS, token)
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
        assert "retry-after" in answer.headers
        said = site.identity()
        assert (said["ok"], said["detail"]) == (
            False, "away, and none of its keys is known: whoever brings a token is answered 503"
        )  # fmt: skip
        keycloak.start()
        wait_until(lambda: site.get(ORDERS, token).status_code == 200, seconds=60, what="the token is accepted")
        assert site.identity()["ok"]
        assert "Traceback" not in site.log.read_text()


def test_while_it_hangs_nobody_waits_longer_than_the_bound(site: Site, keycloak: Keycloak) -> None:
    """Connections are taken and nothing is said: five seconds, then the same answers as if it were away."""
    token = lasting_token(keycloak)
    assert site.get(ORDERS, token).status_code == 200
    with keycloak.held(), browser(site) as client:
        check_away(site, token)
        assert client.get("/console/sign-in").status_code == 503
    wait_until(lambda: site.identity()["ok"], seconds=60, what="health says that it is back")
    assert site.get(ORDERS, keycloak.token("orders-service", "commerce")).status_code == 200
