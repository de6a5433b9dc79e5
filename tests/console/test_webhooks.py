"""E7.1, E6: webhooks in the console: why nothing is sent, each attempt, sending again, and secrets that stay secret."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import httpx2
import pytest

from duly.db import Database
from duly.operate.actions import perform
from duly.operate.why import why
from duly.testing import BusinessClock, drain
from tests.console.conftest import Site, csrf_of, post
from tests.console.world import DELIVERY, DISABLED, EVENT, PUBLISHED, RETRYING, SUBSCRIPTION, fill
from tests.engine.webhooks.hooks import Hooks
from tests.engine.webhooks.subscriber import answering, subscriber
from tests.support import rows, value

MADE = re.compile(r"whsec_[A-Za-z0-9+/=]{40,}")
MANY = (
    "INSERT INTO duly.webhook_deliveries (id, subscription_id, event_id, event_type, aggregate_id, event_created_at, "
    "status, attempts, tries, created_at, finished_at) SELECT duly.uuid7(), %(id)s, duly.uuid7(), "
    "CASE WHEN n %% 2 = 0 THEN 'even' ELSE 'odd' END, 'a', duly.now(), 'PERMANENTLY_FAILED', 8, 8, "
    "duly.now() - interval '1 h', duly.now() FROM generate_series(1, %(count)s) AS n"
)


@pytest.fixture(autouse=True)
def world(dsn: str) -> None:
    """Two subscribers in trouble."""
    fill(dsn)


def said(page: str) -> str:
    """The text of a page."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page.replace("<wbr>", ""))).split())


async def test_a_made_secret_is_shown_once_and_kept_nowhere(site: Site, ada: httpx2.AsyncClient, dsn: str) -> None:
    for action, fields in (
        ("webhooks.add", {"url": "http://127.0.0.1:8009/", "events": "order.*\nparcel.*", "owner": "shop"}),
        ("webhooks.rotate", {"id": SUBSCRIPTION}),
        ("webhooks.provider-secret", {"provider": "bank"}),
    ):
        page = await post(ada, action, **fields, return_to="/console/webhooks")
        assert page.status_code == 200, page.text
        assert page.headers["cache-control"] == "no-store"
        assert "set-cookie" not in page.headers
        (secret,) = set(MADE.findall(page.text))
        assert secret not in (await ada.get("/console/webhooks")).text
        everything = rows(dsn, "SELECT before::text, after::text, reason FROM duly.audit")
        assert secret not in str(everything)
    assert value(dsn, "SELECT patterns FROM duly.webhook_subscriptions WHERE owner = 'shop'") == ["order.*", "parcel.*"]
    client = await site.browser()
    body = {"id": SUBSCRIPTION}
    keyed = {**site.headers("ADMINISTRATOR"), "Idempotency-Key": "k"}
    refused = await client.post("/v1/console/actions/webhooks.rotate", json=body, headers=keyed)
    assert refused.status_code == 422
    assert "Idempotency-Key" in refused.json()["detail"]
    made = await client.post("/v1/console/actions/webhooks.rotate", json=body, headers=site.headers("ADMINISTRATOR"))
    assert MADE.fullmatch(made.json()["secret"])
    assert made.headers["cache-control"] == "no-store"


async def test_a_given_secret_is_never_repeated(site: Site, ada: httpx2.AsyncClient) -> None:
    secret = "sesame-open-the-door"
    refusal = await post(ada, "webhooks.add", url="ftp://nowhere", events="*", secret=secret)
    assert refusal.status_code == 422
    asked = await ada.get("/console/actions/webhooks.rotate", params={"id": SUBSCRIPTION, "secret": secret})
    assert asked.status_code == 400
    done = await post(ada, "webhooks.rotate", id=SUBSCRIPTION, secret=secret, return_to="/console/webhooks")
    assert done.status_code == 303
    short = await post(ada, "webhooks.rotate", id=SUBSCRIPTION, secret="short-secret")
    assert short.status_code == 422
    client = await site.browser()
    problem = await client.post(
        "/v1/console/actions/webhooks.rotate", json={"id": SUBSCRIPTION, "secret": "short-secret"},
        headers=site.headers("ADMINISTRATOR"),
    )  # fmt: skip
    assert problem.status_code == 422
    for text in (refusal.text, done.text, short.text, problem.text):
        assert secret not in text
        assert "short-secret" not in text


async def test_the_secret_of_a_provider_is_set_and_its_age_is_seen(site: Site, ada: httpx2.AsyncClient) -> None:
    """E6.3: from the page, with the last one valid for the overlap; by a program, the same."""
    client, secret = await site.browser(), "sesame-open-the-door"
    for given in ({"secret": secret, "overlap_hours": "2"}, {"secret": secret + "-2", "overlap_hours": "2"}):
        done = await post(ada, "webhooks.provider-secret", provider="bank", **given, return_to="/console/webhooks")
        assert done.status_code == 303
    page = said((await ada.get("/console/webhooks")).text)
    assert re.search(r"bank 2 \S.* current .*bank 1 \S.* until ", page)
    reading = site.headers("OPERATOR")
    listed = (await client.get("/v1/console/webhooks/providers", headers=reading)).json()["items"]
    assert [(one["provider"], one["number"], one["expires_at"] is None) for one in listed] == [
        ("bank", "2", True),
        ("bank", "1", False),
    ]
    assert secret not in page + str(listed)
    wrong = await post(ada, "webhooks.provider-secret", provider="no provider!", secret=secret)
    assert wrong.status_code == 422
    assert secret not in wrong.text
    body = {"provider": "bank"}
    refused = await client.post("/v1/console/actions/webhooks.provider-secret", json=body, headers=reading)
    assert refused.status_code == 403


async def test_an_operator_sees_neither_the_address_nor_what_was_sent(
    otto: httpx2.AsyncClient, ada: httpx2.AsyncClient
) -> None:
    """The path of a receiver may be its secret; payloads are for administrators."""
    for path in ("/console/webhooks", f"/console/webhooks/{SUBSCRIPTION}", f"/console/webhooks/deliveries/{DELIVERY}"):
        page = (await otto.get(path)).text
        assert "hooks.example.com" in page
        for hidden in ("sesame", "X-Note", "Request headers", "Body, as it is sent", "specversion",
                       'method="post" action="/console/actions'):  # fmt: skip
            assert hidden not in page.split("<main")[1], (path, hidden)
    assert "sesame" in (await ada.get(f"/console/webhooks/{SUBSCRIPTION}")).text
    shown = (await ada.get(f"/console/webhooks/deliveries/{DELIVERY}")).text
    assert "X-Note: order:1" in shown
    assert "specversion" in shown
    for path in ("/console/webhooks/new", f"/console/webhooks/{SUBSCRIPTION}/edit"):
        assert (await otto.get(path)).status_code == 403
        assert (await ada.get(path)).status_code == 200


async def test_a_subscription_says_why_nothing_is_sent(ada: httpx2.AsyncClient, dsn: str) -> None:
    page = said((await ada.get(f"/console/webhooks/{SUBSCRIPTION}")).text)
    assert "Its circuit is open until" in page
    assert "after 6 failures in a row" in page
    assert "Deliveries: 0 WAITING, 0 QUEUED, 1 RETRYING, 1 PERMANENTLY_FAILED." in page
    page = said((await ada.get(f"/console/webhooks/{DISABLED}")).text)
    assert "It is DISABLED: order:1. Nothing is sent" in page
    assert "no valid secret" in page
    rows(dsn, "UPDATE duly.webhook_subscriptions SET status = 'PAUSED', open_until = NULL WHERE id = %(id)s",
         {"id": SUBSCRIPTION})  # fmt: skip
    assert "It is PAUSED since" in said((await ada.get(f"/console/webhooks/{SUBSCRIPTION}")).text)
    await post(ada, "webhooks.delete", id=SUBSCRIPTION)
    page = said((await ada.get(f"/console/webhooks/{SUBSCRIPTION}")).text)
    assert "It is deleted" in page
    assert "webhook_subscription.deleted" in page
    assert (await ada.get(f"/console/webhooks/deliveries/{DELIVERY}")).status_code == 200
    assert SUBSCRIPTION not in (await ada.get("/console/webhooks")).text


async def test_the_overview_says_who_is_in_trouble_and_where_to_go(ada: httpx2.AsyncClient) -> None:
    page = (await ada.get("/console")).text
    text = said(page)
    for sentence in (
        "1 webhook subscriber is disabled. gone.example.com: order:1.",
        "1 webhook delivery has failed for good. hooks.example.com: order:1.",
        "1 webhook subscriber does not answer. hooks.example.com: 6 failures in a row since 1 h.",
    ):
        assert sentence in text, sentence
    assert f'href="/console/webhooks/{SUBSCRIPTION}?status=PERMANENTLY_FAILED"' in page
    assert f'href="/console/webhooks/{DISABLED}"' in page
    assert "sesame" not in page


async def test_sending_the_last_failed_one_again_closes_its_alert(ada: httpx2.AsyncClient, dsn: str) -> None:
    said = "webhook delivery has failed for good."
    assert said in (await ada.get("/console")).text
    await post(ada, "webhooks.redeliver", id=DELIVERY)
    assert said not in (await ada.get("/console")).text
    assert value(dsn, "SELECT resolved_at IS NOT NULL FROM duly.alerts WHERE kind = 'webhook_failed'")


async def test_a_range_is_counted_confirmed_and_continued(ada: httpx2.AsyncClient, dsn: str) -> None:
    """More than one commit may touch: the rest is asked about again, and nothing is sent twice."""
    rows(dsn, MANY, {"id": DISABLED, "count": 1_200})
    given = {"id": DISABLED, "since": "2020-01-01T00:00", "until": "2100-01-01T00:00", "return_to": "/console/webhooks"}
    page = await ada.get("/console/actions/webhooks.redeliver-range", params=given)
    assert "This touches <strong>1,200</strong>" in page.text
    seen = []
    for expected in ("303", "303"):
        fields = {name: unescape(text) for name, text in
                  re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', page.text)}  # fmt: skip
        done = await ada.post("/console/actions/webhooks.redeliver-range", data=fields)
        assert str(done.status_code) == expected, done.text
        seen.append(done.headers["location"])
        page = await ada.get(done.headers["location"])
    assert seen[0].startswith("/console/actions/webhooks.redeliver-range?")
    assert seen[1] == "/console/webhooks"
    assert value(dsn, "SELECT count(*) FROM duly.webhook_deliveries WHERE redeliveries = 1") == 1_200
    assert "Sent 200 deliveries again." in page.text


async def test_a_range_that_is_none_is_refused(ada: httpx2.AsyncClient) -> None:
    for since, until in (("2030-01-01T00:00", "2020-01-01T00:00"), ("x", "2020-01-01T00:00"), ("", "")):
        given = {"id": SUBSCRIPTION, "since": since, "until": until}
        page = await ada.get("/console/actions/webhooks.redeliver-range", params=given)
        assert page.status_code in (400, 422), page.text[-300:]
        assert "<h1>" in page.text
    missing = {"id": EVENT, "since": "2020-01-01T00:00", "until": "2030-01-01T00:00"}
    assert (await ada.get("/console/actions/webhooks.redeliver-range", params=missing)).status_code == 404


async def test_deliveries_are_filtered_by_state_and_type_and_paged_by_key(ada: httpx2.AsyncClient, dsn: str) -> None:
    rows(dsn, MANY, {"id": DISABLED, "count": 240})
    for filters, number in (("", 240), ("?type=odd", 120), ("?status=PERMANENTLY_FAILED&type=even", 120),
                            ("?status=DELIVERED", 0), ("?type=other", 0)):  # fmt: skip
        seen: list[str] = []
        path: str | None = f"/console/webhooks/{DISABLED}{filters}"
        for _ in range(8):
            page = (await ada.get(path or "")).text
            seen += re.findall(r'class="row" href="/console/webhooks/deliveries/([0-9a-f-]+)"', page)
            following = re.search(r'<a href="([^"]+)" rel="next">', page)
            path = unescape(following[1]) if following else None
            if path is None:
                break
        assert len(seen) == len(set(seen)) == number, filters


async def test_a_rare_type_is_looked_for_so_far_and_then_further(
    ada: httpx2.AsyncClient, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.webhooks.look.SCAN", 100)
    rows(dsn, MANY.replace("CASE WHEN n %% 2 = 0", "CASE WHEN n = 1"), {"id": DISABLED, "count": 250})
    path, pages = f"/console/webhooks/{DISABLED}?type=even", 0
    for _ in range(5):
        page = (await ada.get(path)).text
        pages += 1
        if 'class="row" href="/console/webhooks/deliveries/' in page:
            break
        assert "among the newest that were looked through" in page
        path = unescape(re.findall(r'<a href="([^"]+)" rel="next">', page)[0])
    assert pages == 3


@pytest.mark.parametrize(
    ("path", "status"),
    [("/webhooks?after=x", 400), (f"/webhooks/{SUBSCRIPTION}?status=x", 400),
     (f"/webhooks/{SUBSCRIPTION}?after=x", 400),
     (f"/webhooks/{SUBSCRIPTION}?type=%00", 400), ("/webhooks/x", 404), (f"/webhooks/{EVENT}", 404),
     ("/webhooks/deliveries/x", 404), (f"/webhooks/deliveries/{EVENT}", 404), (f"/webhooks/{EVENT}/edit", 404)],
)  # fmt: skip
async def test_nonsense_is_a_page_that_says_so(ada: httpx2.AsyncClient, path: str, status: int) -> None:
    page = await ada.get(f"/console{path}")
    assert page.status_code == status, page.text[-300:]
    assert "<h1>" in page.text


async def test_the_event_the_entity_and_the_search_lead_to_deliveries(ada: httpx2.AsyncClient) -> None:
    event = (await ada.get(f"/console/events/{PUBLISHED}")).text
    assert f'href="/console/webhooks/deliveries/{DELIVERY}"' in event
    line = said((await ada.get("/console/entity?id=order:1")).text)
    assert "Delivery of order:1 to hooks.example.com" in line
    assert "Attempt 8: order:1 to hooks.example.com 500, 1234 ms" in line
    for asked, target in (
        (DELIVERY, f"/console/webhooks/deliveries/{DELIVERY}"), (SUBSCRIPTION, f"/console/webhooks/{SUBSCRIPTION}"),
        (f"webhook_subscription:{SUBSCRIPTION}", f"/console/webhooks/{SUBSCRIPTION}"),
    ):  # fmt: skip
        answer = await ada.get("/console/search", params={"q": asked})
        assert (answer.status_code, answer.headers.get("location")) == (303, target), asked


async def test_why_answers_for_a_delivery_and_a_subscription(db: Database) -> None:
    async with db.transaction() as tx:
        delivery = await why(tx, DELIVERY)
        retrying = await why(tx, f"webhook_delivery:{RETRYING}")
        subscription = await why(tx, SUBSCRIPTION)
    assert delivery[0].startswith(f"{DELIVERY} is the delivery of event {PUBLISHED} (order:1, of order:1) to hooks.")
    assert any(one.startswith("It is PERMANENTLY_FAILED since") for one in delivery)
    assert any("failed (http_status): it answered 500 within 1234 ms, from 192.0.2.1." in one for one in delivery)
    assert any(one.startswith("It is RETRYING: 1 of 8 tries failed, the next is at") for one in retrying)
    assert any(one.startswith("Its subscription: Its circuit is open until") for one in retrying)
    assert any(one.startswith("Its circuit is open until") for one in subscription)
    assert not any("sesame" in one for one in (*delivery, *retrying, *subscription))


async def test_a_program_finds_what_to_send_again_page_by_page(site: Site, dsn: str) -> None:
    rows(dsn, MANY, {"id": DISABLED, "count": 120})
    client, headers = await site.browser(), site.headers("ADMINISTRATOR")
    seen: list[str] = []
    query: dict[str, str] | None = {"status": "PERMANENTLY_FAILED"}
    while query is not None:
        answer = (await client.get(f"/v1/console/webhooks/{DISABLED}/deliveries", params=query, headers=headers)).json()
        seen += [one["id"] for one in answer["items"]]
        query = {"status": "PERMANENTLY_FAILED", **answer["next"]} if answer["next"] else None
    assert len(seen) == len(set(seen)) == 120
    two = (await client.get("/v1/console/webhooks?limit=1", headers=headers)).json()
    rest = (await client.get("/v1/console/webhooks?limit=1", params=two["next"], headers=headers)).json()
    assert {two["items"][0]["id"], rest["items"][0]["id"]} == {SUBSCRIPTION, DISABLED}


async def test_a_program_of_an_operator_sees_hosts_and_no_contents(site: Site) -> None:
    client = await site.browser()
    for role, is_seen in (("ADMINISTRATOR", True), ("OPERATOR", False)):
        for path, words in (("webhooks", "sesame"), (f"webhooks/{SUBSCRIPTION}", "sesame"),
                            (f"webhooks/deliveries/{DELIVERY}", "X-Note")):  # fmt: skip
            answer = await client.get(f"/v1/console/{path}", headers=site.headers(role))
            assert answer.status_code == 200, answer.text
            assert (words in answer.text) == is_seen, (role, path)
    missing = await client.get(f"/v1/console/webhooks/deliveries/{EVENT}", headers=site.headers("OPERATOR"))
    assert missing.status_code == 404


async def test_why_is_said_in_words_and_without_contradiction(ada: httpx2.AsyncClient, dsn: str) -> None:
    """What fails and is not left alone is tried one by one: it does not go at once."""
    rows(dsn, "UPDATE duly.webhook_deliveries SET last_error = 'status', last_http_status = 502 WHERE finished_at "
              "IS NOT NULL")  # fmt: skip
    rows(dsn, "UPDATE duly.webhook_subscriptions SET open_until = NULL WHERE status = 'ACTIVE'")
    page = said((await ada.get(f"/console/webhooks/{SUBSCRIPTION}")).text)
    assert "It is ACTIVE, but fails." in page
    assert "One delivery at a time is tried until one is taken." in page
    assert "is sent at once" not in page
    assert "no answer in time" in page
    page = said((await ada.get(f"/console/webhooks/deliveries/{DELIVERY}")).text)
    assert re.search(r"It is PERMANENTLY_FAILED since [^:]+:\d\d:\d\d UTC [^:]+: not a 2xx answer\.", page)
    rows(dsn, "UPDATE duly.webhook_subscriptions SET failures = 0, failing_since = NULL WHERE status = 'ACTIVE'")
    assert "what comes is sent at once" in (await ada.get(f"/console/webhooks/{SUBSCRIPTION}")).text


async def test_an_open_circuit_is_closed_by_resuming_and_the_page_shows_real_attempts(
    site: Site, ada: httpx2.AsyncClient, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """The whole way, over a real socket: subscribe, test, fail, look, repair, send again."""
    rows(dsn, "DELETE FROM duly.jobs")
    hooks = Hooks(db, dsn, settings=site.console.settings)
    async with subscriber(answering(500, body=b"<b>broken</b>")) as receiver:
        made = await post(ada, "webhooks.add", url=receiver.url, events="none.such", secret="a-secret-of-sixteen")
        assert made.status_code == 303
        id = value(dsn, "SELECT id FROM duly.webhook_subscriptions ORDER BY id DESC LIMIT 1")
        await post(ada, "webhooks.test", id=str(id))
        await drain(db, hooks.handlers)
        delivery = value(dsn, f"SELECT id FROM duly.webhook_deliveries WHERE subscription_id = '{id}'")
        page = (await ada.get(f"/console/webhooks/deliveries/{delivery}")).text
        assert "&lt;b&gt;broken&lt;/b&gt;" in page
        assert "127.0.0.1" in page
        assert "X-Signature" in page
        assert "RETRYING" in page
        receiver.behave = answering(204)
        again = await post(ada, "webhooks.redeliver", id=str(delivery), return_to=f"/console/webhooks/{id}")
        assert again.status_code == 303
        await drain(db, hooks.handlers)
        page = (await ada.get(f"/console/webhooks/deliveries/{delivery}")).text
        assert "It was DELIVERED at" in said(page)
        assert "204" in page
        assert len(receiver.requests) == 2


async def test_an_edit_of_an_older_page_is_refused(ada: httpx2.AsyncClient, db: Database) -> None:
    async with db.transaction() as tx:
        await perform(tx, "webhooks.edit", {"id": SUBSCRIPTION, "max_in_flight": 2}, actor="somebody else")
    page = await post(ada, "webhooks.edit", id=SUBSCRIPTION, max_in_flight="9", expected_version="1")
    assert page.status_code == 409


async def test_an_operator_is_refused_at_the_handler(otto: httpx2.AsyncClient, dsn: str) -> None:
    before: Any = value(dsn, "SELECT count(*) FROM duly.audit")
    token = await csrf_of(otto)
    for name in ("webhooks.pause", "webhooks.delete", "webhooks.test", "webhooks.rotate"):
        answer = await otto.post(
            f"/console/actions/{name}", data={"csrf": token, "id": SUBSCRIPTION, "confirmed": "yes"}
        )  # fmt: skip
        assert answer.status_code == 403
    assert value(dsn, "SELECT count(*) FROM duly.audit") == before
