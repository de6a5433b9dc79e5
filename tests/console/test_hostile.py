"""FAULTS (Attacks): what a hostile or clumsy browser sends is answered with a page, and is never a mistake of ours."""

from __future__ import annotations

import base64
import json
from urllib.parse import urlencode

import httpx2
import pytest

from tests.console.conftest import Site, csrf_of, post
from tests.console.world import SUBSCRIPTION, fill
from tests.support import rows, value

UUID = "019c0000-0000-7000-8000-000000000003"
FIRST, LAST = "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"  # no such moments in UTC
LONG = "0" * 24 + "1" + "9" * 40  # a number whose beginning is small


def packed(given: str) -> str:
    """As our cookies are."""
    return base64.urlsafe_b64encode(given.encode()).decode()


@pytest.mark.parametrize(
    "query",
    [*({"since": edge} for edge in (FIRST, LAST)), *({"until": edge} for edge in (FIRST, LAST)),
     *({"after": f"{edge}_1"} for edge in (FIRST, LAST)), {"after": f"2026-01-01T00:00:00_{LONG}"},
     {"name": "\ud800".encode("utf-8", "surrogatepass")}],
)  # fmt: skip
async def test_times_and_numbers_at_the_edge_are_read_or_refused(
    ada: httpx2.AsyncClient, query: dict[str, str]
) -> None:
    page = await ada.get(f"/console/jobs?{urlencode(query)}")
    assert page.status_code in (200, 400), page.text[-500:]
    assert "<h1>" in page.text


@pytest.mark.parametrize(
    ("path", "query"),
    [("history", {"since": FIRST}), ("history", {"until": LAST}), ("history", {"after": f"{FIRST}_{UUID}"}),
     ("history", {"after": f"{LAST}_{UUID}"}), ("history", {"job": LONG}), ("dead-letters", {"after": f"{FIRST}_1"}),
     ("dead-letters", {"after": f"2026-01-01T00:00:00+00:00_{LONG}"}), ("audit", {"after": LONG}),
     ("outbox", {"status": "PENDING", "after": LONG}), (f"webhooks/{SUBSCRIPTION}", {"after": LONG}),
     ("search", {"q": LONG}), ("search", {"q": f"job:{LONG}"}), ("search", {"q": "job:" * 49}),
     ("schedules/new", {"payload": "[" * 19_000}), ("schedules/new", {"timezone": "../../etc/passwd"}),
     ("schedules/new", {"timezone": "a" * 19_000}), ("schedules/new", {"cron": "0-59/1," * 2_000 + "1 * * * *"}),
     ("actions/webhooks.redeliver-range", {"id": SUBSCRIPTION, "since": FIRST, "until": LAST}),
     ("actions/dead.retry-all", {"limit": "9" * 5_000}), ("actions/jobs.cancel", {"id": "9" * 5_000}),
     ("entity", {"id": "\N{PILE OF POO}" * 200})],
)  # fmt: skip
async def test_what_an_address_asks_for_is_answered_with_a_page(
    ada: httpx2.AsyncClient, dsn: str, path: str, query: dict[str, str]
) -> None:
    fill(dsn)
    page = await ada.get(f"/console/{path}?{urlencode(query)}")
    assert page.status_code in (200, 400, 404, 422), page.text[-500:]
    assert "<h1>" in page.text


@pytest.mark.parametrize(
    ("action", "fields"),
    [("schedules.trigger", {"name": "a\0b"}), ("schedules.add", {"name": "a.b", "cron": "0 9 * * *\0"}),
     ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "payload": '{"a": "\\u0000"}'}),
     ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "payload": '{"a": "\\ud800"}'}),
     ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "payload": '{"a": NaN}'}),
     ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "payload": '{"a": 1e999999999}'}),
     ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "payload": '{"a": ' + "9" * 5_000 + "}"}),
     ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "payload": '{"a":' * 9_000}),
     ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "max_retries": "9" * 30}),
     ("schedules.edit", {"name": "duly.forget-audit", "cron": "1 1 * * *", "expected_version": "9" * 30}),
     ("dead.retry-all", {"name": "a\0b"}), ("events.requeue-all", {"topic": "a\0b"}),
     ("webhooks.add", {"url": "HTTPS://EXAMPLE.COM/x", "events": "a"}),
     ("webhooks.add", {"url": "https://example.com/x", "events": "a\0"}),
     ("webhooks.add", {"url": "https://example.com/x", "events": "a", "description": "a\0"}),
     ("webhooks.add", {"url": "https://example.com/x", "events": "a", "owner": "a\0"}),
     ("webhooks.add", {"url": "https://[::1", "events": "a"}),
     ("webhooks.add", {"url": "https://\uff0e/", "events": "a"}),
     ("webhooks.edit", {"id": SUBSCRIPTION, "description": "x", "expected_version": "9" * 30}),
     ("webhooks.rotate", {"id": SUBSCRIPTION, "overlap_hours": "nan"}),
     ("webhooks.rotate", {"id": SUBSCRIPTION, "overlap_hours": "1e400"}),
     ("webhooks.redeliver-range", {"id": SUBSCRIPTION, "since": FIRST, "until": LAST}),
     ("webhooks.redeliver-range", {"id": SUBSCRIPTION, "since": "0001-01-01T00:00", "until": "9999-12-31T23:59"}),
     ("jobs.cancel", {"id": "1", "reason": "a\0b"}), ("jobs.cancel", {"id": "1", "reason": "x" * 3_000}),
     ("jobs.cancel", {"id": "1", "once": "\0"}), ("jobs.cancel", {"id": "\u0661"})],
)  # fmt: skip
async def test_what_a_form_says_is_answered_with_a_page(
    ada: httpx2.AsyncClient, dsn: str, action: str, fields: dict[str, str]
) -> None:
    fill(dsn)
    before = value(dsn, "SELECT count(*) FROM duly.audit")
    page = await post(ada, action, **fields)
    assert page.status_code in (200, 303, 400, 404, 409, 422), page.text[-500:]
    if page.status_code >= 400:
        assert "<h1>" in page.text
        assert value(dsn, "SELECT count(*) FROM duly.audit") == before


@pytest.mark.parametrize(
    ("headers", "body"),
    [({"Origin": "http://["}, None), ({"Origin": "http://[::1"}, None), ({"Origin": "\xe4"}, None),
     ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x--"),
     ({"Content-Type": "text/plain"}, b"id=1"), ({"Content-Type": "application/json"}, b"{}"),
     ({"Content-Type": "application/x-www-form-urlencoded"}, b"a=" + b"x" * 200_000),
     ({"Content-Type": "application/x-www-form-urlencoded"}, b"a=1&" * 60),
     ({"Content-Type": "application/x-www-form-urlencoded"}, b"\xff\xfe=\x00"),
     ({"Content-Type": "application/x-www-form-urlencoded"}, b"id=1&id=2")],
)  # fmt: skip
async def test_a_form_that_is_none_is_refused_with_a_page(
    ada: httpx2.AsyncClient, dsn: str, headers: dict[str, str], body: bytes | None
) -> None:
    fill(dsn)
    token = await csrf_of(ada)
    content = urlencode({"csrf": token, "id": "1"}).encode() if body is None else body
    kind = {"Content-Type": "application/x-www-form-urlencoded", "X-CSRF-Token": token}
    raw = [(name.encode(), text.encode("latin-1")) for name, text in (kind | headers).items()]
    page = await ada.post("/console/actions/jobs.run-now", content=content, headers=raw)
    assert page.status_code in (400, 403, 413), page.text[-500:]
    assert "<h1>" in page.text
    assert value(dsn, "SELECT count(*) FROM duly.audit WHERE action = 'job.run_now'") == 0


COOKIES = ["[" * 2_500, "1" * 2_500, "null", "[]", '{"sentence": "\\ud800", "tone": "good"}', '{"sentence": 1}',
           '{"sentence": "x", "tone": "\\" onload=alert(1)"}', "\x00"]  # fmt: skip


@pytest.mark.parametrize("cookie", [*(packed(one) for one in COOKIES), "=", "a", "\\303\\244", "x" * 3_900])
async def test_a_cookie_that_we_did_not_make_changes_nothing(site: Site, ada: httpx2.AsyncClient, cookie: str) -> None:
    session = ada.cookies["duly"]
    page = await ada.get("/console/processes", headers={"Cookie": f"duly={session}; duly-notice={cookie}"})
    assert page.status_code == 200, page.text[-500:]
    assert "onload=" not in page.text.replace("&#34; onload=alert(1)", "")
    for name in ("duly-sign-in", "duly", "duly-theme"):
        stranger = await site.browser()
        page = await stranger.get(
            "/console/sign-in/callback?state=x&code=y", headers={"Cookie": f"{name}={cookie}"}
        )  # fmt: skip
        assert page.status_code == 400, page.text[-500:]
        assert (await stranger.get("/console", headers={"Cookie": f"{name}={cookie}"})).status_code == 302


@pytest.mark.parametrize("part", ["state", "nonce", "verifier", "return_to"])
async def test_a_sign_in_with_half_a_character_is_refused(site: Site, part: str) -> None:
    attempt = {"state": "x", "nonce": "n", "verifier": "v", "return_to": "/console", part: "\ud800"}
    stranger = await site.browser()
    page = await stranger.get(
        "/console/sign-in/callback?state=x&code=y", headers={"Cookie": f"duly-sign-in={packed(json.dumps(attempt))}"}
    )  # fmt: skip
    assert page.status_code == 400, page.text[-500:]


@pytest.mark.parametrize(
    "path",
    [f"executions?before_at={FIRST.replace('+', '%2B')}&before_id={UUID}",
     f"executions?before_at={LAST}&before_id={UUID}", f"dead-letters?before_at={LAST}&before_id=1",
     "jobs?name=%00", "why?id=%00", "entity?id=%00", "schedules/%00", "audit?subject=%00",
     "schedules/preview?cron=%00", "schedules/preview?cron=0+9+*+*+*&timezone=%00",
     "schedules/preview?cron=0+9+*+*+*&timezone=" + "a" * 9_000,
     "schedules/preview?cron=" + "1," * 20_000 + "1+9+*+*+*", "schedules?after=%00", "events?topic=%00"],
)  # fmt: skip
async def test_the_api_answers_the_edges_with_a_problem_or_a_list(site: Site, path: str) -> None:
    client = await site.browser()
    answer = await client.get(f"/v1/console/{path}", headers=site.headers("OPERATOR"))
    assert answer.status_code in (200, 400, 404, 422), answer.text
    assert answer.status_code == 200 or answer.headers["content-type"] == "application/problem+json"


async def test_an_operator_finds_no_payload_and_no_address_in_any_record(
    site: Site, ada: httpx2.AsyncClient, otto: httpx2.AsyncClient, dsn: str
) -> None:
    """What an action changed is kept whole; whoever may not see payloads, nor where a webhook goes, sees none here."""
    fill(dsn)
    rows(dsn, 'UPDATE duly.dead_letters SET payload = \'{"note": "canary"}\'')
    rows(dsn, 'UPDATE duly.outbox SET payload = \'{"note": "canary"}\', headers = \'{"x": "canary"}\'')
    rows(dsn, 'UPDATE duly.jobs SET payload = \'{"note": "canary"}\'')
    event = value(dsn, "SELECT id FROM duly.outbox")
    for action, fields in (
        ("dead.discard", {"id": "7"}), ("events.discard", {"id": str(event)}), ("jobs.cancel", {"id": "1"}),
        ("schedules.edit", {"name": "duly.forget-audit", "payload": '{"note": "canary"}', "cron": "1 1 * * *"}),
        ("webhooks.edit", {"id": SUBSCRIPTION, "url": "https://hooks.example.com/canary"}),
    ):  # fmt: skip
        assert (await post(ada, action, **fields)).status_code == 303, action
    pages = ("/console", "/console/audit", f"/console/webhooks/{SUBSCRIPTION}", "/console/jobs/7", "/console/jobs/1",
             f"/console/events/{event}", "/console/schedules/duly.forget-audit",
             "/console/schedules/duly.forget-audit/edit")  # fmt: skip
    seen = "".join([(await ada.get(path)).text for path in pages])
    assert seen.count("canary") > 4
    for path in pages:
        page = await otto.get(path)
        assert page.status_code == 200, path
        assert "canary" not in page.text, path
        assert "sesame" not in page.text, path
    assert "1 1 * * *" in (await otto.get("/console/schedules/duly.forget-audit")).text
    client = await site.browser()
    for path in ("audit", "schedules", "schedules/duly.forget-audit", "jobs", "dead-letters", "events",
                 f"why?id={SUBSCRIPTION}", "entity?id=order:1"):  # fmt: skip
        answer = await client.get(f"/v1/console/{path}", headers=site.headers("OPERATOR"))
        assert answer.status_code == 200, path
        assert "canary" not in answer.text, path
        assert "sesame" not in answer.text, path
    for path in ("audit", "schedules/duly.forget-audit"):
        answer = await client.get(f"/v1/console/{path}", headers=site.headers("ADMINISTRATOR"))
        assert "canary" in answer.text, path


async def test_a_description_can_be_emptied(ada: httpx2.AsyncClient, dsn: str) -> None:
    fill(dsn)
    answer = await post(ada, "webhooks.edit", id=SUBSCRIPTION, description="")
    assert answer.status_code == 303
    assert value(dsn, f"SELECT description FROM duly.webhook_subscriptions WHERE id = '{SUBSCRIPTION}'") == ""
