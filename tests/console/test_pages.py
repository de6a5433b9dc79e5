"""E7.1: every page, for who may see it; empty, full, hostile, and asked with nonsense."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest
from fastapi import Request
from fastapi.responses import Response
from sqlalchemy import event, text

from duly.app import Duly
from duly.console import Pages, Section, show
from duly.console.words import breaks, capped, changes, duration, said
from duly.db import Database
from duly.errors import Invalid
from duly.operate.counts import Count
from duly.testing import BusinessClock
from tests.console.conftest import Site, post, serving
from tests.console.world import EVENT, HOSTILE, PAGES, RUN, fill
from tests.support import rows, value

STATEMENTS_LIMIT = 25


class Elements(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append(dict(attrs).get("src") or "inline")


@pytest.mark.parametrize("person", ["ada", "otto"])
async def test_every_page_is_there_for_both_roles(site: Site, dsn: str, person: str) -> None:
    fill(dsn)
    browser = await site.signed_in(person)
    for path in PAGES:
        page = await browser.get(path)
        assert page.status_code == 200, (path, page.text[-600:])
        assert page.text.count("<h1>") == page.text.count("<main") == 1, path
        assert page.headers["cache-control"] == "no-store"


async def test_an_empty_engine_has_pages_too(ada: httpx2.AsyncClient) -> None:
    for path in ("", "/jobs", "/schedules", "/history", "/dead-letters", "/outbox", "/audit", "/alerts", "/processes"):
        page = await ada.get(f"/console{path}")
        assert page.status_code == 200, path
    first = await ada.get("/console")
    for sentence in ("No worker is alive.", "No relay is alive.", "No scheduler is alive."):
        assert sentence in first.text


async def test_whatever_is_stored_is_shown_and_never_runs(ada: httpx2.AsyncClient, dsn: str) -> None:
    """FAULTS: stored XSS through names, entities, payloads, errors, messages, headers, reasons."""
    fill(dsn, HOSTILE)
    quoted = httpx2.QueryParams({"id": HOSTILE})
    shown = 0
    for path in (*PAGES, f"/console/entity?{quoted}", f"/console/search?q={httpx2.QueryParams({'q': HOSTILE})}"):
        page = await ada.get(path)
        assert page.status_code in (200, 303, 404), path
        found = Elements(page.text)
        assert {"img"} & set(found.names) <= {"img"}
        assert [script for script in found.scripts if not script.startswith("/console/static/")] == [], path
        assert not [name for name, _ in found.attributes if name.startswith("on") or name == "style"], path
        assert not [value for name, value in found.attributes if name in ("href", "src") and "alert" in value.lower()
                    and not value.startswith("/console")], path  # fmt: skip
        assert "<script>alert" not in page.text
        assert "<svg onload" not in page.text
        shown += page.text.count("&lt;script&gt;alert(1)")
    assert shown > 40


async def test_pages_allow_no_inline_script_no_frame_and_no_other_host(ada: httpx2.AsyncClient) -> None:
    page = await ada.get("/console")
    policy = page.headers["content-security-policy"]
    for part in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'",
                 "base-uri 'none'", "form-action 'self'"):  # fmt: skip
        assert part in policy
    assert "unsafe" not in policy
    assert page.headers["x-frame-options"] == "DENY"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["cross-origin-opener-policy"] == "same-origin"
    for address in re.findall(r'(?:src|href)="(/console/static/[^"]+)"', page.text):
        asset = await ada.get(address)
        assert asset.status_code == 200
        assert "immutable" in asset.headers["cache-control"]
    for wrong in ("/console/static/../app.py", "/console/static/%2e%2e%2fapp.py", "/console/static/manifest.json"):
        assert (await ada.get(wrong)).status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/jobs?status=Nonsense", "/jobs?since=yesterday", "/jobs?after=x", "/jobs?after=x_y", "/jobs?after=infinity_-1",
     "/jobs?after=infinity_99999999999999999999", "/jobs?name=%00", "/jobs?name=" + "a" * 300, "/history?job=x",
     "/history?job=99999999999999999999", "/history?outcome=x", "/history?after=2026-01-01_x",
     "/history?after=2026-01-01T00:00_019c0000-0000-7000-8000-000000000003", "/dead-letters?after=x_1",
     "/outbox?status=x", "/outbox?status=PUBLISHED&after=x", "/outbox?status=PENDING&after=x", "/audit?after=-1",
     "/alerts?after=x", "/audit?after=abc", "/entity?id=%00", "/search?q=%00", "/jobs?name=%ff%fe&x=%00" + "&a=1" * 60,
     "/schedules?after=%00"],
)  # fmt: skip
async def test_nonsense_in_an_address_is_a_page_that_says_so(ada: httpx2.AsyncClient, path: str) -> None:
    page = await ada.get(f"/console{path}")
    assert page.status_code == 400, page.text[-500:]
    assert "<h1>That cannot be read</h1>" in page.text


@pytest.mark.parametrize(
    "path",
    ["/jobs/0", "/jobs/abc", "/jobs/99999999999999999999", "/jobs/12345", "/events/abc", f"/events/{RUN}",
     f"/jobs/1/runs/{EVENT}", "/schedules/none.such", "/schedules/%00", "/nowhere", "/actions/none.such",
     "/entity?id=no",     "/search?q=no"],
)  # fmt: skip
async def test_what_is_not_there_is_a_page_that_says_so(ada: httpx2.AsyncClient, path: str) -> None:
    page = await ada.get(f"/console{path}")
    assert page.status_code == 404, page.text[-500:]
    assert '<nav aria-label="Pages">' in page.text


async def test_the_search_leads_to_the_page(ada: httpx2.AsyncClient, dsn: str) -> None:
    fill(dsn)
    copy = (
        "INSERT INTO duly.executions SELECT (jsonb_populate_record(e, jsonb_build_object('execution_id', "
        "duly.uuid7()))).* FROM duly.executions e RETURNING execution_id"
    )
    run = str(value(dsn, copy))
    for asked, target in (
        ("1", "/console/jobs/1"), ("7", "/console/jobs/7"), ("job:7", "/console/jobs/7"),
        (EVENT, f"/console/events/{EVENT}"), ("order:1", "/console/entity?id=order%3A1"),
        ("shop.remind", "/console/jobs?name=shop.remind"), ("shop.charge", "/console/dead-letters?name=shop.charge"),
        ("duly.forget-audit", "/console/schedules/duly.forget-audit"), (run, f"/console/jobs/1/runs/{run}"),
    ):  # fmt: skip
        answer = await ada.get("/console/search", params={"q": asked})
        assert (answer.status_code, answer.headers.get("location")) == (303, target), asked


async def test_a_search_for_a_part_of_a_name_says_what_may_be_meant(ada: httpx2.AsyncClient, dsn: str) -> None:
    fill(dsn)
    page = await ada.get("/console/search?q=SHOP.RE")
    assert page.status_code == 404
    assert 'Did you mean <a href="/console/jobs?name=shop.remind">shop.remind</a>?' in page.text
    assert "Did you mean" not in (await ada.get("/console/search?q=no")).text


async def test_recurring_jobs_are_merged_with_last_and_next_run_and_never_run_ones_show(
    ada: httpx2.AsyncClient, dsn: str
) -> None:
    fill(dsn)
    page = (await ada.get("/console/jobs")).text
    assert "shop.never" in page
    assert "never ran" in page
    assert "duly.forget-audit" in page
    assert "retried" in page


async def test_the_editor_shows_the_next_ten_runs_and_marks_the_clocks(
    ada: httpx2.AsyncClient, clock: BusinessClock
) -> None:
    """Daylight saving begins in Warsaw on 29 March 2026: 02:30 does not exist that day."""
    from datetime import UTC, datetime

    clock.freeze(datetime(2026, 3, 25, 12, 0, tzinfo=UTC))
    page = await ada.get("/console/schedules/new?name=a.b&cron=30+2+*+*+*&timezone=Europe/Warsaw")
    assert page.status_code == 200
    assert page.text.count("<li><time") == 10
    assert page.text.count("clocks change") == 1
    assert "Sun 2026-03-29 03:00 CEST" in page.text
    assert "Europe/Warsaw time" in page.text
    wrong = await ada.get("/console/schedules/new?name=a.b&cron=99+2+*+*+*")
    assert wrong.status_code == 200
    assert "the minute field" in wrong.text
    assert "disabled>Add what is previewed" in wrong.text
    assert "disabled>Add what is previewed" not in page.text


async def test_an_expression_that_is_too_long_is_not_read(ada: httpx2.AsyncClient) -> None:
    """FAULTS: a crafted cron cannot eat memory."""
    page = await ada.get("/console/schedules/new", params={"name": "a.b", "cron": "1," * 2_000 + "1 * * * *"})
    assert page.status_code == 200
    assert "at most 100 characters" in page.text
    assert "<li><time" not in page.text


async def test_the_last_run_of_a_name_is_the_newest(ada: httpx2.AsyncClient, dsn: str) -> None:
    """E7.1: of two runs of a schedule the list shows how the last one ended."""
    rows(dsn, "INSERT INTO duly.executions (execution_id, job_id, name, source, started_at, completed_at, succeeded, "
              "outcome, retry_count, worker, lease_token) SELECT duly.uuid7(), n, 'duly.forget-audit', 'Scheduled', "
              "duly.now(), duly.now() - n * interval '1 min', n = 2, CASE n WHEN 2 THEN 'done' ELSE 'lost' END, 0, "
              "'w', 1 FROM generate_series(1, 2) AS n")  # fmt: skip
    for path in ("/console/jobs", "/console/schedules"):
        page = (await ada.get(path)).text
        assert (page.count("/console/jobs/1/runs/"), page.count("/console/jobs/2/runs/")) == (1, 0), path


async def test_times_are_shown_in_the_schedules_zone_with_utc_in_the_title(
    ada: httpx2.AsyncClient, dsn: str, clock: BusinessClock
) -> None:
    from datetime import UTC, datetime

    clock.freeze(datetime(2026, 1, 5, 7, 30, tzinfo=UTC))
    rows(dsn, "INSERT INTO duly.schedules (name, cron, timezone, next_run_at) "
              "VALUES ('report', '0 9 * * *', 'Europe/Warsaw', '2026-01-05 08:00Z')")  # fmt: skip
    page = (await ada.get("/console/schedules")).text
    assert 'title="2026-01-05 08:00:00 UTC · in 30 min">2026-01-05 09:00:00 CET</time>' in page


async def test_the_record_is_searched_by_who_and_what(
    ada: httpx2.AsyncClient, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among so many at a time: the next page looks further."""
    rows(dsn, "INSERT INTO duly.audit (at, actor, action, subject) SELECT duly.now(), CASE WHEN n %% 100 = 0 THEN "
              "'Eve (eve)' ELSE 'bob' END, CASE WHEN n %% 2 = 0 THEN 'a.even' ELSE 'a.odd' END, 's:' || n %% 4 "
              "FROM generate_series(1, 1000) AS n", {})  # fmt: skip
    monkeypatch.setattr("duly.console.page_watch.AUDIT_SCAN", 300)
    for filters, number in (("who=EVE", 10), ("who=eve&what=odd", 0), ("what=even", 500), ("who=eve&subject=s:0", 10),
                            ("who=eve&subject=s:1", 0), ("who=%25", 0)):  # fmt: skip
        found, path = 0, f"/console/audit?{filters}"
        for _ in range(20):
            page = (await ada.get(path)).text
            found += page.count('<th scope="row">')
            following = re.search(r'<a href="([^"]+)" rel="next">', page)
            if following is None:
                break
            path = following[1].replace("&amp;", "&")
        assert (found, following) == (number, None), filters


async def test_an_operator_searches_the_record_without_payloads(otto: httpx2.AsyncClient, dsn: str) -> None:
    rows(dsn, "INSERT INTO duly.audit (at, actor, action, subject, before) VALUES (duly.now(), 'bob', 'job.cancelled', "
              "'job:1', '{\"payload\": \"canary\"}')")  # fmt: skip
    page = (await otto.get("/console/audit?who=bob")).text
    assert "job.cancelled" in page
    assert "canary" not in page


async def test_runs_and_dead_letters_show_the_zone_of_their_schedule(
    ada: httpx2.AsyncClient, dsn: str, clock: BusinessClock
) -> None:
    """healthchecks #1160: the job's own zone, in every list."""
    from datetime import UTC, datetime

    clock.freeze(datetime(2026, 1, 5, 7, 30, tzinfo=UTC))
    fill(dsn)
    rows(dsn, "INSERT INTO duly.schedules (name, cron, timezone) VALUES ('shop.remind', '0 9 * * *', 'Asia/Tokyo'), "
              "('shop.charge', '0 9 * * *', 'Asia/Tokyo')")  # fmt: skip
    for path in ("/console/history", "/console/history?job=1", "/console/dead-letters", "/console/jobs/7",
                 f"/console/jobs/1/runs/{RUN}", "/console/jobs?name=shop.remind"):  # fmt: skip
        page = (await ada.get(path)).text
        assert re.search(r'title="2026-01-05 07:\d\d:00 UTC[^"]*">2026-01-05 16:\d\d:00 JST</time>', page), path


async def test_what_came_from_a_schedule_can_be_run_again_from_its_run(ada: httpx2.AsyncClient, dsn: str) -> None:
    """By its schedule, or as the dead letter that it became."""
    run = "019c0000-0000-7000-8000-00000000000a"
    rows(dsn, "INSERT INTO duly.executions (execution_id, job_id, name, source, started_at, completed_at, succeeded, "
              "outcome, retry_count, worker, lease_token) VALUES (%(run)s, 50, 'duly.forget-audit', 'Scheduled', "
              "duly.now(), duly.now(), true, 'done', 0, 'w', 1), (duly.uuid7(), 51, 'duly.forget-audit', 'Deferred', "
              "duly.now(), duly.now(), true, 'done', 0, 'w', 1)", {"run": run})  # fmt: skip
    for path in ("/console/jobs/50", f"/console/jobs/50/runs/{run}"):
        page = (await ada.get(path)).text
        assert '<form class="act" action="/console/actions/schedules.trigger">' in page, path
    assert "schedules.trigger" not in (await ada.get("/console/jobs/51")).text
    fill(dsn)
    rows(dsn, "UPDATE duly.dead_letters SET id = 50 WHERE id = 7")
    assert "/console/actions/dead.retry" in (await ada.get(f"/console/jobs/50/runs/{run}")).text


async def test_only_a_job_that_moves_is_looked_at_again_and_again(ada: httpx2.AsyncClient, dsn: str) -> None:
    fill(dsn)
    later = value(dsn, "SELECT duly.schedule('shop.remind', 'later', run_at => duly.now() + interval '1 h')")
    for id, is_moving in ((1, True), (2, True), (later, False), (7, False)):
        page = (await ada.get(f"/console/jobs/{id}")).text
        assert (f'hx-get="/console/jobs/{id}"' in page) == is_moving, id


async def test_a_schedule_and_a_name_say_why_they_run_or_do_not(ada: httpx2.AsyncClient, dsn: str) -> None:
    await post(ada, "schedules.disable", name="duly.forget-audit", reason="not on Sundays")
    for path in ("/console/schedules/duly.forget-audit", "/console/jobs?name=duly.forget-audit"):
        page = (await ada.get(path)).text
        assert "It is disabled by Ada Kowalska (ada) since" in page, path
        assert "not on Sundays" in page
        assert "Live workers that know it: none." in page
    assert 'class="why"' not in (await ada.get("/console/jobs?name=no.such")).text


async def test_one_dead_letter_is_one(ada: httpx2.AsyncClient, dsn: str) -> None:
    fill(dsn)
    page = (await ada.get("/console")).text
    assert "1 dead letter waits for a decision.</strong> A job of shop.charge failed for good. Retry it once" in page
    rows(dsn, "INSERT INTO duly.dead_letters SELECT (jsonb_populate_record(d, jsonb_build_object('id', 8))).* "
              "FROM duly.dead_letters d WHERE d.id = 7")  # fmt: skip
    page = (await ada.get("/console")).text
    assert "2 dead letters wait for a decision.</strong> They failed for good; most are of shop.charge." in page


async def test_more_alerts_than_are_counted_are_said_to_be_more(ada: httpx2.AsyncClient, dsn: str) -> None:
    rows(dsn, "INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at) SELECT 'application', 's' || n, "
              "'m', duly.now(), duly.now() FROM generate_series(1, 201) AS n")  # fmt: skip
    page = (await ada.get("/console")).text
    assert "50+ alerts are open." in page
    assert re.search(r">Alerts</a></dt><dd>50\+</dd>", page)
    rows(dsn, "UPDATE duly.alerts SET resolved_at = duly.now() WHERE subject <> 's1'")
    page = (await ada.get("/console")).text
    assert "1 alert is open." in page


async def test_one_timeline_tells_an_entitys_story_in_order(ada: httpx2.AsyncClient, dsn: str) -> None:
    fill(dsn)
    page = (await ada.get("/console/entity?id=order:1")).text
    for word in (
        "Event order.paid",
        "Published order.paid",
        "Job 1 shop.remind",
        "shop.remind retried",
        "Job 7 shop.charge",
    ):
        assert word in page, word
    times = re.findall(r'<li class="[^"]*">\s*<time datetime="([^"]+)"', page)
    assert times == sorted(times)


async def test_the_lists_page_by_key_and_keep_their_filters(ada: httpx2.AsyncClient, dsn: str) -> None:
    rows(dsn, "SELECT duly.schedule('many.jobs', run_at => duly.now() + n * interval '1 s') "
              "FROM generate_series(1, 120) AS n")  # fmt: skip
    seen: list[str] = []
    path = "/console/jobs?name=many.jobs&status=Pending"
    for _ in range(5):
        page = await ada.get(path)
        seen += re.findall(r'class="row" href="/console/jobs/(\d+)"', page.text)
        following = re.search(r'<a href="([^"]+)" rel="next">', page.text)
        if following is None:
            break
        path = following[1].replace("&amp;", "&")
        assert "name=many.jobs" in path
        assert "status=Pending" in path
    assert len(seen) == len(set(seen)) == 120


async def test_history_and_dead_letters_page_by_time_and_id(ada: httpx2.AsyncClient, dsn: str) -> None:
    rows(dsn, "INSERT INTO duly.executions (execution_id, job_id, name, source, started_at, completed_at, succeeded, "
              "outcome, retry_count, worker, lease_token) SELECT duly.uuid7(), n, 'many.' || n %% 3, 'Deferred', "
              "duly.now(), duly.now() - (n / 10) * interval '1 s', true, 'done', 0, 'w', 1 "
              "FROM generate_series(1, 120) AS n", {})  # fmt: skip
    rows(dsn, "INSERT INTO duly.dead_letters (id, name, payload, priority, due_at, created_at, original_delay, "
              "retry_count, source, reason, error, error_kind, buried_at) SELECT n, 'many', '{}', 3, duly.now(), "
              "duly.now(), '0', 3, 'Deferred', 'retries_used_up', 'e', 'K', duly.now() "
              "FROM generate_series(1, 120) AS n")  # fmt: skip
    for start, pattern in (
        ("/console/history", r"/console/jobs/(\d+)/runs/"),
        ("/console/dead-letters?name=many", r'class="row" href="/console/jobs/(\d+)"'),
    ):
        seen: list[str] = []
        path: str | None = start
        for _ in range(5):
            page = await ada.get(path or "")
            seen += re.findall(pattern, page.text)
            following = re.search(r'<a href="([^"]+)" rel="next">', page.text)
            path = following[1].replace("&amp;", "&") if following else None
            if path is None:
                break
        assert len(seen) == len(set(seen)) == 120


@pytest.mark.parametrize(
    ("number", "seconds", "shown"), [(0, 1, "0.0"), (12, 240, "2.4"), (12, 301, "0.0"), (600, 100, "120"),
                                     (9_000, 60, r"(1,000|9[0-9][0-9])")])  # fmt: skip
async def test_the_outbox_says_how_much_it_publishes_a_minute(
    ada: httpx2.AsyncClient, dsn: str, number: int, seconds: int, shown: str
) -> None:
    """CONSOLE: lag, rate, failures. Of more than it counts, the rate of those that it counted."""
    rows(dsn, "DELETE FROM duly.events")
    published = f"duly.now() - make_interval(secs => {seconds})"
    values = f"n, {published}, 1"
    made = EVENTS.format(table="events", more="seq, published_at, attempts", values=values)
    rows(dsn, made.replace("generate_series(1, 120)", f"generate_series(1, {number})"))
    page = await ada.get("/console/outbox")
    assert re.search(rf"Published a minute</a></dt><dd>{shown}<", page.text)


SUBSCRIPTIONS = (
    "INSERT INTO duly.webhook_subscriptions (id, owner, url, patterns, created_at, updated_at) SELECT duly.uuid7(), "
    "'o', 'https://example.com/', '{a}', duly.now(), duly.now() FROM generate_series(1, 120)"
)
ALERTS = (
    "INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at, resolved_at) SELECT 'application', "
    "'alert-' || n, 'm', duly.now(), duly.now(), CASE WHEN n % 2 = 0 THEN duly.now() END FROM generate_series(1, 240) n"
)
EVENTS = (
    "INSERT INTO duly.{table} (id, type, topic, aggregate_id, payload, headers, created_at, {more}) SELECT "
    "duly.uuid7(), 'a.b', 't', n::text, '{{}}', '{{}}', duly.now(), {values} FROM generate_series(1, 120) AS n"
)


@pytest.mark.parametrize(
    ("made", "start", "pattern", "number"),
    [("SELECT duly.schedule('same.time', run_at => '2036-01-01Z', priority => 4 - mod(n, 4)) "
      "FROM generate_series(1, 120) AS n",
      "/console/jobs?name=same.time", r'class="row" href="/console/jobs/(\d+)"', 120),
     (EVENTS.format(table="outbox", more="attempts", values="0"), "/console/outbox?status=PENDING",
      r'class="row" href="/console/events/([0-9a-f-]+)"', 120),
     (EVENTS.format(table="outbox", more="attempts, failed_at, last_error", values="1, duly.now(), 'e'"),
      "/console/outbox?status=FAILED", r'class="row" href="/console/events/([0-9a-f-]+)"', 120),
     (EVENTS.format(table="events", more="seq, published_at, attempts", values="n, duly.now(), 1"),
      "/console/outbox?status=PUBLISHED", r'class="row" href="/console/events/([0-9a-f-]+)"', 120),
     ("INSERT INTO duly.audit (at, actor, action, subject) SELECT duly.now(), 'a', 'b', 's:' || n "
      "FROM generate_series(1, 120) AS n", "/console/audit", r"subject=s%3A(\d+)", 120),
     (ALERTS, "/console/alerts", r"q=alert-(\d+)", 120), (ALERTS, "/console/alerts?all=1", r"q=alert-(\d+)", 240),
     (SUBSCRIPTIONS, "/console/webhooks", r'class="row" href="/console/webhooks/([0-9a-f-]{36})"', 120),
     ("INSERT INTO duly.schedules (name, cron) SELECT 'many.' || n, '0 9 * * *' FROM generate_series(1, 420) AS n",
      "/console/schedules", r'class="row" href="/console/schedules/(many\.\d+)"', 420)],
    ids=["same time", "pending", "failed", "published", "audit", "alerts", "all alerts", "subscriptions",
         "schedules"],
)  # fmt: skip
async def test_every_list_pages_by_key(
    ada: httpx2.AsyncClient, dsn: str, made: str, start: str, pattern: str, number: int
) -> None:
    rows(dsn, made)
    seen: list[str] = []
    path: str | None = start
    for _ in range(5):
        page = await ada.get(path or "")
        assert page.status_code == 200, page.text[-300:]
        seen += re.findall(pattern, page.text)
        following = re.search(r'<a href="([^"]+)" rel="next">', page.text)
        path = following[1].replace("&amp;", "&") if following else None
        if path is None:
            break
    assert len(seen) == len(set(seen)) == number


async def test_the_runs_of_a_job_are_filtered_before_they_are_paged(ada: httpx2.AsyncClient, dsn: str) -> None:
    rows(dsn, "INSERT INTO duly.executions (execution_id, job_id, name, source, started_at, completed_at, succeeded, "
              "outcome, retry_count, worker, lease_token) SELECT duly.uuid7(), 5, 'many', 'Deferred', duly.now(), "
              "duly.now() - n * interval '1 min', true, CASE WHEN n = 80 THEN 'done' ELSE 'snoozed' END, 0, 'w', 1 "
              "FROM generate_series(1, 80) AS n")  # fmt: skip
    page = (await ada.get("/console/history?job=5&outcome=done")).text
    assert page.count("/console/jobs/5/runs/") == 1
    page = (await ada.get("/console/history?job=5&until=2020-01-01T00:00")).text
    assert page.count("/console/jobs/5/runs/") == 0


def test_a_sentence_is_escaped_with_and_without_its_commands() -> None:
    assert said("<b> `<i>` &") == "&lt;b&gt; <code>&lt;i&gt;</code> &amp;"
    assert said("<b> `<i> &") == "&lt;b&gt; `&lt;i&gt; &amp;"


def test_a_long_name_may_go_on_after_a_part_of_it_and_is_escaped() -> None:
    assert breaks("orders.expire") == "orders.expire"
    assert breaks("<b>") == "&lt;b&gt;"
    assert breaks("webhook_subscription:<b>/7") == (
        '<span class="long">webhook_<wbr>subscription:<wbr>&lt;b&gt;/<wbr>7</span>'
    )


async def test_counts_stop_at_a_cap(ada: httpx2.AsyncClient, dsn: str) -> None:
    """good_job #1366: a page over a long queue costs no more than one over a short one."""
    rows(dsn, "SELECT count(duly.schedule('many.jobs')) FROM generate_series(1, 10100)")
    assert "10,000+" in (await ada.get("/console")).text


async def test_no_page_needs_many_statements(site: Site, ada: httpx2.AsyncClient, db: Database, dsn: str) -> None:
    fill(dsn)
    seen: list[str] = []
    event.listen(db.engine.sync_engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
    for path in PAGES:
        seen.clear()
        assert (await ada.get(path)).status_code == 200
        assert len(seen) <= STATEMENTS_LIMIT, (path, len(seen))


async def test_a_page_cannot_write(site: Site, db: Database) -> None:
    async with site.console.reading() as look:
        with pytest.raises(Exception, match="read-only transaction"):
            await look.tx.execute(text("DELETE FROM duly.audit"))


async def test_a_database_that_is_too_slow_is_said_and_not_waited_for(ada: httpx2.AsyncClient, db: Database) -> None:
    async with db.transaction() as tx:
        await tx.execute(text("LOCK TABLE duly.outbox IN ACCESS EXCLUSIVE MODE"))
        page = await ada.get("/console/outbox")
    assert page.status_code == 503
    assert "The database does not answer" in page.text


async def test_colours_are_remembered(ada: httpx2.AsyncClient) -> None:
    from tests.console.conftest import csrf_of

    token = await csrf_of(ada)
    for theme, expected in (("dark", "dark"), ("light", "light"), ("nonsense", "auto")):
        answer = await ada.post("/console/theme", data={"csrf": token, "theme": theme, "return_to": "/console/jobs"})
        assert answer.headers["location"] == "/console/jobs"
        assert f'data-theme="{expected}"' in (await ada.get("/console/jobs")).text


async def test_an_application_adds_a_section_that_is_closed_like_the_rest(db: Database, tmp_path: Path) -> None:
    (tmp_path / "shop.html").write_text(
        '{% extends "base.html" %}{% block content %}<h1>Orders: {{ n }}</h1>{% endblock %}'
    )
    pages = Pages()

    @pages.get("")
    async def orders(request: Request) -> Response:
        return show(request, "shop.html", n=3)

    @pages.post("/close")
    async def close(request: Request) -> Response:
        return show(request, "shop.html", n=0)

    app = Duly()
    app.include_console(Section("orders", "Orders", pages, templates=tmp_path))
    with pytest.raises(Invalid):
        app.include_console(Section("orders", "Again", pages))
    with pytest.raises(Invalid):
        Section("Not a path!", "x", pages)
    async with serving(db, tmp_path, app) as site:
        stranger = await site.browser()
        assert (await stranger.get("/console/orders")).status_code == 302
        ada, otto = await site.signed_in("ada"), await site.signed_in("otto")
        page = await ada.get("/console/orders")
        assert "<h1>Orders: 3</h1>" in page.text
        assert '<a href="/console/orders" aria-current="page">Orders</a>' in page.text
        assert (await otto.get("/console/orders")).status_code == 200
        assert (await otto.post("/console/orders/close", data={})).status_code == 403
        assert (await ada.post("/console/orders/close", data={})).status_code == 403


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "–"), (0.0123, "12 ms"), (5.25, "5.2 s"), (61, "1 min 01 s"), (7260, "2 h 01 min"), (-5, "in 5.0 s"),
     (86400 * 3 + 3600, "3 d")],
)  # fmt: skip
def test_lengths_of_time_are_said_in_one_or_two_units(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_counts_are_said_with_their_cap() -> None:
    assert [capped(count) for count in (0, 1234, 10_000, 10_001)] == ["0", "1,234", "10,000", "10,000+"]
    assert capped(Count(10, True)) == "10+"


def test_changes_are_said_field_by_field_with_numbers_as_they_were_written() -> None:
    assert changes('{"a": 1.10, "b": 1}', '{"a": 1.1, "b": 1, "c": null}') == [("a", "1.10", "1.1"), ("c", "", "null")]
