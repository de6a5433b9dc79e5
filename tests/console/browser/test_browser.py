"""E7.1 in a real Chromium: every page, every action, keyboard, colours, width, accessibility, and attacks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import compile_path

from apps.wiring import app
from duly.console import (
    Pages,
    page_actions,
    page_entity,
    page_events,
    page_history,
    page_jobs,
    page_overview,
    page_schedules,
    page_session,
    page_watch,
    page_webhooks,
)
from duly.console.routes import MOUNT
from tests.console.browser import png, showcase
from tests.console.browser.conftest import Tab, World
from tests.console.browser.showcase import BROKEN, FAILED_DELIVERY, HEALTHY
from tests.console.world import DELIVERY, EVENT, RUN, SUBSCRIPTION
from tests.support import rows, value

Open = Callable[..., Tab]
ENGINE = (page_actions, page_entity, page_events, page_history, page_jobs, page_overview, page_schedules, page_session,
          page_watch, page_webhooks)  # fmt: skip
ELSEWHERE = ("/console/sign", "/console/static/", "/console/live")
STRICTER = {"all": [{"field": "paid24h", "op": "gt", "value": "4000.00"},
                    {"field": "currency", "op": "eq", "value": "PLN"}]}  # fmt: skip
PICTURES = Path(__file__).parents[3] / "docs" / "console"
PAGES = (
    "/console", "/console/jobs", "/console/jobs?status=Running", "/console/jobs?name=payments.capture",
    "/console/jobs/900001", "/console/schedules", "/console/schedules/reports.nightly",
    "/console/schedules/reports.nightly/edit", "/console/schedules/new", "/console/history",
    "/console/history?outcome=buried", "/console/dead-letters",
    "/console/dead-letters?name=payments.capture&kind=ConnectTimeout", "/console/outbox",
    "/console/outbox?status=PUBLISHED",
    "/console/entity?id=order:4201", "/console/search?q=nothing", "/console/audit", "/console/alerts",
    "/console/processes", "/console/actions/dead.discard?id=900001",
    "/console/actions/dead.retry-all?name=payments.capture",
    "/console/nowhere", "/console/jobs?status=nonsense", "/console/webhooks", "/console/webhooks/new",
    f"/console/webhooks/{HEALTHY}", f"/console/webhooks/{BROKEN}", f"/console/webhooks/{BROKEN}?status=RETRYING",
    f"/console/webhooks/{BROKEN}/edit", f"/console/webhooks/deliveries/{FAILED_DELIVERY}",
    "/console/jobs?entity=order:4301", "/console/outbox?status=PENDING", "/console/outbox?aggregate=order:4201",
    "/console/alerts?all=1", "/console/entity", "/console/search", "/console/schedules/duly.forget-audit",
    "/console/actions/schedules.trigger?name=reports.nightly",
    f"/console/actions/webhooks.redeliver-range?id={BROKEN}&since=2020-01-01T00:00&until=2100-01-01T00:00",
    "/console/transfers", "/console/transfers?status=Pending", "/console/quality", "/console/birthdays",
    "/console/birthdays?status=FAILED", "/console/orders", "/console/orders?status=AWAITING_PAYMENT", "/console/rates",
    "/console/payments", "/console/payments?state=PENDING_REVIEW", "/console/accounts", "/console/rules",
    "/console/rules/decisions", "/console/rules/sets/payment-screening",
)  # fmt: skip
# Pages of what has an id: who looks at it, where, and how it is found.
PAGES_OF_ONE = (
    ("ada", "/console/jobs/{}", "SELECT id FROM duly.jobs WHERE progress IS NOT NULL LIMIT 1"),
    ("ada", "/console/jobs/{}", "SELECT id FROM duly.jobs WHERE waits = 'retry' LIMIT 1"),
    ("ada", "/console/jobs/{}", "SELECT job_id FROM duly.executions WHERE outcome = 'done' LIMIT 1"),
    ("ada", "/console/jobs/{}", "SELECT job_id || '/runs/' || execution_id FROM duly.executions LIMIT 1"),
    ("ada", "/console/events/{}", "SELECT id FROM duly.outbox WHERE failed_at IS NOT NULL LIMIT 1"),
    ("ada", "/console/events/{}", "SELECT event_id FROM duly.webhook_deliveries ORDER BY number DESC LIMIT 1"),
    ("ada", "/console/webhooks/{}", "SELECT id FROM duly.webhook_subscriptions WHERE status = 'DISABLED' LIMIT 1"),
    (
        "ada",
        "/console/webhooks/deliveries/{}",
        "SELECT id FROM duly.webhook_deliveries WHERE status = 'WAITING' LIMIT 1",
    ),
    ("ada", "/console/transfers/{}", "SELECT id FROM transfers.transfers LIMIT 1"),
    ("ada", "/console/quality/{}", "SELECT id FROM quality.nonconformities LIMIT 1"),
    ("ada", "/console/birthdays/{}", "SELECT id FROM users.users LIMIT 1"),
    ("ada", "/console/orders/{}", "SELECT id FROM commerce.orders LIMIT 1"),
    ("ada", "/console/rules/{}", "SELECT id FROM decisions.rules WHERE status = 'ACTIVE' LIMIT 1"),
    ("ada", "/console/rules/decisions/{}", "SELECT id FROM decisions.log ORDER BY id DESC LIMIT 1"),
    ("ada", "/console/payments/{}", "SELECT id FROM payments.payments WHERE state = 'PENDING_REVIEW' LIMIT 1"),
    ("ada", "/console/payments/{}", "SELECT id FROM payments.payments WHERE state <> 'PENDING_REVIEW' LIMIT 1"),
    ("ada", "/console/accounts/{}", "SELECT account_id FROM ledger.entries GROUP BY 1 ORDER BY count(*) DESC LIMIT 1"),
    ("ada", "/console/accounts/transactions/{}", "SELECT id FROM ledger.transactions ORDER BY id DESC LIMIT 1"),
    ("rita", "/console/rules", "SELECT 1"),
    ("rita", "/console/rules/new", "SELECT 1"),
    ("rita", "/console/rules/new?set=payment-screening", "SELECT 1"),
    ("rita", "/console/rules/sets/payment-screening/bench", "SELECT 1"),
    ("rita", "/console/rules/{}", "SELECT id FROM decisions.rules WHERE status = 'DRAFT' LIMIT 1"),
    ("rita", "/console/rules/{}/edit", "SELECT id FROM decisions.rules WHERE status = 'DRAFT' LIMIT 1"),
    ("rita", "/console/rules/{}/diff", "SELECT id FROM decisions.rules WHERE status = 'ACTIVE' LIMIT 1"),
    ("rita", "/console/rules/{}/dry-run", "SELECT id FROM decisions.rules WHERE status = 'DRAFT' LIMIT 1"),
    ("rita", "/console/rules/{}/activate", "SELECT id FROM decisions.rules WHERE status = 'DRAFT' LIMIT 1"),
    ("cora", "/console/cases", "SELECT 1"),
    ("cora", "/console/cases?status=any", "SELECT 1"),
    ("cora", "/console/cases/{}", "SELECT id FROM compliance.cases WHERE status = 'OPEN' LIMIT 1"),
    ("cora", "/console/cases/{}", "SELECT id FROM compliance.cases WHERE kind = 'AML' LIMIT 1"),
)


def pages_of(served: World, person: str) -> list[str]:
    """Every page that somebody looks at."""
    own = [path.format(value(served.dsn, query)) for whose, path, query in PAGES_OF_ONE if whose == person]
    return [*(PAGES if person == "ada" else ()), *own]


def test_every_page_there_is_is_among_those_that_are_looked_at() -> None:
    """Signing in and out, the stream and the page of every other address aside."""
    engine = Pages(prefix=MOUNT)
    for family in ENGINE:
        family.register(engine)
    routers = [("", engine), *((f"{MOUNT}/{section.name}", section.router) for section in app.sections)]
    looked_at = [path.partition("?")[0] for path in PAGES] + [f"/console/jobs/1/runs/{RUN}"]
    looked_at += [path.partition("?")[0].format("01990000-0000-7000-8000-000000000000") for _, path, _ in PAGES_OF_ONE]
    for prefix, router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            pattern = compile_path(prefix + route.path)[0]
            if route.methods == {"GET"} and not (prefix + route.path).startswith(ELSEWHERE):
                assert any(pattern.fullmatch(path) for path in looked_at), prefix + route.path


def expected(complaint: str) -> bool:
    """A page that is not there says so with its status, and the browser repeats it."""
    return "Failed to load resource" in complaint and ("404" in complaint or "400" in complaint)


@dataclass(frozen=True)
class Shot:
    """A picture for the documentation."""

    name: str
    path: str
    person: str = "ada"
    press: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


RULE = "SELECT rule_id FROM decisions.rule_versions WHERE name = 'Stricter limit' LIMIT 1"
DARK, NARROW, TALL = {"color_scheme": "dark"}, {"width": 360, "height": 780}, {"height": 1300}
SHOTS = (
    Shot("overview", "/console"), Shot("overview-dark", "/console", options=DARK),
    Shot("overview-narrow", "/console", options=NARROW), Shot("jobs", "/console/jobs"),
    Shot("jobs-narrow", "/console/jobs", options=NARROW), Shot("job", "/console/jobs/900001"),
    Shot("schedules", "/console/schedules"), Shot("schedule-edit", "/console/schedules/reports.nightly/edit"),
    Shot("dead-letters", "/console/dead-letters"), Shot("entity", "/console/entity?id=order:4201"),
    Shot("outbox-dark", "/console/outbox", options=DARK), Shot("audit", "/console/audit"),
    Shot("webhooks", "/console/webhooks"), Shot("subscription", f"/console/webhooks/{BROKEN}", options=TALL),
    Shot("delivery", f"/console/webhooks/deliveries/{FAILED_DELIVERY}", options=TALL),
    Shot("orders", "/console/orders"), Shot("transfers", "/console/transfers"),
    Shot("confirm", "/console/actions/dead.retry-all?name=payments.capture&error_kind=ConnectTimeout"),
    Shot("accounts", "/console/accounts"),
    Shot("account", "/console/accounts/"
         "{SELECT account_id FROM ledger.entries GROUP BY 1 ORDER BY count(*) DESC LIMIT 1}"),
    Shot("payments", "/console/payments"),
    Shot("payment", "/console/payments/{SELECT id FROM payments.payments WHERE state = 'PENDING_REVIEW' LIMIT 1}"),
    Shot("rules", "/console/rules", "rita"), Shot("rule-set", "/console/rules/sets/payment-screening", "rita"),
    Shot("rule-edit", f"/console/rules/{{{RULE}}}/edit", "rita"),
    Shot("rule-diff", f"/console/rules/{{{RULE}}}/edit", "rita", "form[aria-label=Rule] button"),
    Shot("rule-bench", "/console/rules/sets/payment-screening/bench?decision="
         "{SELECT id FROM decisions.log WHERE rule_set_id = 'payment-screening' AND decision = 'REVIEW' LIMIT 1}",
         "rita", "form[aria-label=Facts] button", TALL),
    Shot("rule-dry-run", f"/console/rules/{{{RULE}}}/dry-run", "rita", "form[aria-label='Dry run'] button"),
    Shot("rule", f"/console/rules/{{{RULE}}}", "rita"), Shot("cases", "/console/cases?status=any", "cora"),
    Shot("cases-narrow-dark", "/console/cases", "cora", options={**NARROW, **DARK}),
    Shot("case", "/console/cases/{SELECT id FROM compliance.cases WHERE kind = 'PAYMENT_REVIEW' LIMIT 1}", "cora",
         options=TALL),
)  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.environ.get("DULY_SCREENSHOTS"), reason="make screenshots takes them")
def test_pictures_for_the_documentation(open_tab: Open, served: World) -> None:
    """Each well below 150 kB. A path in braces is the id that a query finds; what is pressed is on the page before."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for shot in SHOTS:
        tab = open_tab(shot.person, **shot.options)
        tab.go(re.sub(r"\{(.+)\}", lambda found: str(value(served.dsn, found[1])), shot.path))
        if shot.name == "rule-diff":
            tab.page.fill('textarea[name="conditions"]', json.dumps(STRICTER, indent=2))
            tab.page.fill('input[name="reason"]', "losses in May")
        if shot.press:
            tab.page.click(shot.press)
            tab.page.wait_for_load_state("load")
        if shot.path == "/console":
            tab.page.wait_for_selector("#chart-latency canvas")
        target = PICTURES / f"{shot.name}.png"
        tab.page.screenshot(path=target)
        png.shrink(target)
        assert target.stat().st_size < 150_000, shot.name


@pytest.mark.timeout(600)  # fifty pages
@pytest.mark.parametrize("person", ["ada", "rita", "cora"])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)])
def test_every_page_is_accessible_quiet_and_fits(
    open_tab: Open, served: World, scheme: str, width: int, person: str
) -> None:
    """axe finds nothing, nothing violates the policy; no page is wider than its window, and tables can be read."""
    tab = open_tab(person, width=width, color_scheme=scheme)
    found = []
    for path in pages_of(served, person):
        tab.go(path)
        tab.keep_picture(f"{person}{re.sub(r'[^a-z]+', '-', path.removeprefix('/console'))[:50]}-{scheme}-{width}")
        found += [(path, one) for one in [*tab.axe(), *tab.misfits()]]
    assert not found, "\n".join(map(str, found))
    assert [one for one in tab.complaints if not expected(one)] == []


def test_every_page_works_without_javascript(open_tab: Open, served: World) -> None:
    for person in ("rita", "cora", "ada"):
        tab = open_tab(person, java_script_enabled=False)
        for path in pages_of(served, person):
            tab.go(path)
            assert tab.page.locator("h1").count() == 1
    id = rows(served.dsn, "SELECT id FROM duly.jobs WHERE name = 'orders.expire' ORDER BY id DESC LIMIT 1")[0][0]
    tab.go(f"/console/jobs/{id}")
    tab.page.click("text=Run now…")
    tab.page.click("form.confirm button")
    assert "is due now" in tab.page.locator(".notice").inner_text()
    tab.page.click("text=Cancel…")
    tab.page.fill('input[name="reason"]', "no script needed")
    tab.page.click("button.solid")
    assert f"Cancelled job {id}." in tab.page.locator(".notice").inner_text()
    assert value(served.dsn, "SELECT reason FROM duly.audit ORDER BY id DESC LIMIT 1") == "no script needed"


def test_the_keyboard_leads_everywhere(open_tab: Open) -> None:
    tab = open_tab("otto")
    page = tab.page
    for key, path in (("j", "/jobs"), ("s", "/schedules"), ("h", "/history"), ("d", "/dead-letters"), ("e", "/outbox"),
                      ("w", "/webhooks"), ("a", "/audit"), ("l", "/alerts"), ("p", "/processes"),
                      ("o", "")):  # fmt: skip
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(f"**/console{path}")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "q"
    page.keyboard.type("g j ?")  # typed, not obeyed
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") != "q"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.keyboard.press("g")
    page.keyboard.press("d")
    page.wait_for_url("**/dead-letters")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    first = page.evaluate("document.activeElement.getAttribute('href')")
    assert first == page.locator("main a.row").first.get_attribute("href")
    page.keyboard.press("Enter")
    page.wait_for_url("**/dead-letters?name=**")
    assert tab.complaints == []


def test_numbers_and_charts_are_live(open_tab: Open, served: World) -> None:
    tab = open_tab("ada")
    tab.page.wait_for_selector("#chart-throughput canvas")
    tab.page.wait_for_selector("#liveness:not([hidden])")
    rows(served.dsn, "SELECT duly.schedule('live.proof')")
    tab.page.wait_for_selector("text=live.proof", timeout=10_000)
    rows(served.dsn, "DELETE FROM duly.jobs WHERE name = 'live.proof'")
    assert tab.complaints == []


def test_a_job_that_runs_is_live(open_tab: Open, served: World) -> None:
    tab = open_tab("ada")
    id = value(served.dsn, "SELECT id FROM duly.jobs WHERE progress IS NOT NULL ORDER BY id DESC LIMIT 1")
    tab.go(f"/console/jobs/{id}")
    assert tab.page.locator("h1 .badge").inner_text() == "Running"
    rows(served.dsn, f"UPDATE duly.jobs SET progress = 'page 6 of 7' WHERE id = {id}")
    tab.page.wait_for_selector("text=page 6 of 7", timeout=10_000)
    rows(served.dsn, "UPDATE duly.jobs SET lease_token = NULL, lease_expires_at = NULL, leased_by = NULL, claimed_at = "
                     f"NULL, run_at = now() + interval '1 h' WHERE id = {id}")  # fmt: skip
    tab.page.wait_for_selector("h1 .badge:has-text('Pending')", timeout=10_000)
    assert tab.page.locator("#moving[hx-get]").count() == 0
    assert tab.axe() == []
    assert tab.complaints == []


def test_the_colours_can_be_chosen(open_tab: Open) -> None:
    tab = open_tab("ada", color_scheme="light")
    for theme in ("dark", "light", "auto"):
        tab.page.click(".person summary")
        with tab.page.expect_navigation():
            tab.page.click(f'button[value="{theme}"]')
        assert tab.page.evaluate("document.documentElement.dataset.theme") == theme
    assert tab.complaints == []


def test_dead_letters_are_retried_in_bulk_after_a_page_that_says_how_many(open_tab: Open, served: World) -> None:
    tab = open_tab("ada")
    page = tab.page
    tab.go("/console/dead-letters?name=consumer:mailer&kind=SMTPRecipientsRefused")
    page.click("text=Retry all 3…")
    assert "This touches 3 of them" in page.locator("form.confirm").inner_text()
    page.fill('input[name="reason"]', "mailboxes are back")
    page.click("form.confirm button")
    assert "Retried 3 dead letters." in page.locator(".notice").inner_text()
    assert value(served.dsn, "SELECT count(*) FROM duly.dead_letters WHERE name = 'consumer:mailer'") == 0
    assert tab.complaints == []


def test_a_schedule_is_previewed_saved_disabled_and_run(open_tab: Open, served: World) -> None:
    tab = open_tab("ada")
    page = tab.page
    tab.go("/console/schedules/reports.nightly/edit")
    page.fill('input[name="reason"]', "later is better")
    page.fill('input[name="cron"]', "99 3 * * *")
    page.wait_for_selector("#previewed [role=alert]")
    assert page.locator("#save-it").is_disabled()
    page.fill('input[name="cron"]', "45 3 * * *")
    page.wait_for_selector("text=03:45 CE")
    assert page.locator("ol.preview li").count() == 10
    assert tab.axe() == []
    page.click("text=Save what is previewed")
    assert "Changed reports.nightly: 45 3 * * * in Europe/Warsaw" in page.locator(".notice").inner_text()
    assert "later is better" in page.locator("#record ~ div").inner_text()
    page.click("text=Run now…")
    page.fill('input[name="reason"]', "the auditors are here")
    page.keyboard.press("Enter")
    assert "Queued reports.nightly" in page.locator(".notice").inner_text()
    assert "the auditors are here" in page.locator("#record ~ div").inner_text()
    page.click("text=Disable…")
    page.click("button.solid")
    assert page.locator("h1 .badge").inner_text() == "disabled"
    page.click("text=Enable…")
    page.click("form.confirm button")
    assert page.locator("h1 .badge").inner_text() == "enabled"
    rows(served.dsn, "DELETE FROM duly.jobs WHERE name = 'reports.nightly'")
    assert tab.complaints == []


def test_an_event_is_requeued_and_an_alert_resolved(open_tab: Open, served: World) -> None:
    tab = open_tab("ada")
    tab.go("/console/outbox?status=FAILED")
    tab.page.locator("button:has-text('Requeue')").nth(1).click()
    tab.page.click("form.confirm button")
    assert "Requeued event" in tab.page.locator(".notice").inner_text()
    rows(
        served.dsn,
        "UPDATE duly.outbox SET attempts = 5, failed_at = now(), last_error = 'again' WHERE failed_at IS NULL",
    )
    tab.go("/console/alerts")
    tab.page.locator("button:has-text('Resolve')").last.click()
    tab.page.click("form.confirm button")
    assert "Resolved alert" in tab.page.locator(".notice").inner_text()
    assert tab.complaints == []


def test_an_operator_sees_no_buttons_and_is_refused_at_the_handler(open_tab: Open) -> None:
    tab = open_tab("otto")
    tab.go("/console/dead-letters")
    assert tab.page.locator("main form.act").count() == 0
    token = tab.page.get_attribute('meta[name="csrf-token"]', "content")
    answer = tab.page.evaluate(
        """async (token) => (await fetch('/console/actions/dead.discard', {method: 'POST', headers:
        {'Content-Type': 'application/x-www-form-urlencoded'}, body:
        `id=900001&confirmed=yes&csrf=${token}`})).status""",
        token,
    )
    assert answer == 403
    tab.go("/console/jobs/900001")
    assert tab.page.locator("text=Payload").count() == 0


def test_each_of_the_applications_has_a_page_of_one(open_tab: Open) -> None:
    """From the list by its first row, in the dark and narrow: accessible, quiet, and no wider than the window."""
    for scheme, width in (("light", 1280), ("dark", 360)):
        tab = open_tab("otto", width=width, color_scheme=scheme)
        for name in ("transfers", "quality", "birthdays", "orders", "payments", "accounts", "rules", "rules/decisions"):
            tab.go(f"/console/{name}" + ("?set=payment-screening" if name == "rules/decisions" else ""))
            tab.page.locator("main a.row").first.click()
            tab.page.wait_for_url(f"**/console/{name}/*")
            assert tab.axe() == [], (name, scheme)
            assert tab.misfits() == [], name
        assert tab.complaints == []


def test_a_subscription_is_made_tested_paused_and_deleted(open_tab: Open, served: World) -> None:
    tab = open_tab("ada")
    page = tab.page
    tab.go("/console/webhooks/new")
    page.fill('input[name="url"]', "http://127.0.0.1:8009/in")
    page.fill('textarea[name="events"]', "order.*")
    page.fill('input[name="reason"]', "a new shop")
    page.click("button:has-text('Subscribe')")
    secret = page.locator("pre").inner_text()
    assert secret.startswith("whsec_")
    assert tab.axe() == []
    page.click("text=I have it")
    page.wait_for_url("**/console/webhooks")
    page.click("a.row:has-text('127.0.0.1:8009')")
    assert secret not in page.content()
    page.click("button:has-text('Send a test')")
    page.click("form.confirm button")
    assert "is QUEUED" in page.locator(".notice").inner_text()
    page.click("button:has-text('Pause')")
    page.click("form.confirm button")
    assert page.locator("h1 .badge").first.inner_text() == "PAUSED"
    page.click("button:has-text('Resume')")
    page.click("form.confirm button")
    assert page.locator("h1 .badge").first.inner_text() == "ACTIVE"
    page.click("text=Delete…")
    page.click("button.solid")
    page.wait_for_url("**/console/webhooks")
    assert value(served.dsn, "SELECT count(*) FROM duly.webhook_secrets k JOIN duly.webhook_subscriptions s "
                             "ON s.id = k.subscription_id WHERE s.url = 'http://127.0.0.1:8009/in'") == 0  # fmt: skip
    assert tab.complaints == []


def test_a_range_of_deliveries_is_sent_again_after_a_page_that_says_how_many(open_tab: Open, served: World) -> None:
    tab = open_tab("ada")
    page = tab.page
    tab.go(f"/console/webhooks/{HEALTHY}")
    page.check('input[name="everything"]')
    page.click("text=Say how many…")
    assert "This touches 120 of them" in page.locator("form.confirm").inner_text()
    page.click("form.confirm button")
    assert "Sent 120 deliveries again." in page.locator(".notice").inner_text()
    assert value(served.dsn, "SELECT count(*) FROM duly.webhook_deliveries WHERE redeliveries = 1") == 120
    assert tab.complaints == []


def test_without_a_role_the_console_says_so(open_tab: Open) -> None:
    tab = open_tab()
    tab.go("/console")
    tab.page.click('button[value="nora"]')
    assert "no role that the console asks for" in tab.page.locator("main").inner_text()
    assert tab.page.locator("nav").count() == 0
    assert tab.axe() == []


def test_signing_out_is_signing_out(open_tab: Open) -> None:
    tab = open_tab("ada")
    tab.page.click(".person summary")
    tab.page.click("text=Sign out")
    assert "You are signed out" in tab.page.locator("h1").inner_text()
    tab.go("/console/jobs")
    assert "/dev-issuer/authorize" in tab.page.url
    assert tab.axe() == []


def test_stored_text_never_runs(open_tab: Open, served: World) -> None:
    """Stored XSS: names, entities, payloads, errors, messages, reasons, headers."""
    showcase.fill_hostile(served.dsn)
    tab = open_tab("ada")
    for path in ("/console", "/console/jobs", "/console/jobs/1", "/console/jobs/7", f"/console/jobs/1/runs/{RUN}",
                 f"/console/events/{EVENT}", "/console/dead-letters", "/console/outbox", "/console/audit",
                 "/console/alerts", "/console/processes", "/console/history", "/console/schedules",
                 "/console/schedules/duly.drop-history", f"/console/webhooks/{SUBSCRIPTION}", "/console/webhooks",
                 f"/console/webhooks/deliveries/{DELIVERY}"):  # fmt: skip
        tab.go(path)
        tab.page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        assert "<script>alert(2)" in tab.page.content() or "&lt;script&gt;" in tab.page.content()
        assert tab.page.locator("main img, main script").count() == 0
    assert tab.complaints == []


# The second is of the same site as the console, which is at another port: the browser sends its cookies along.
@pytest.mark.parametrize(("site", "status"), [("http://evil.test/", 401), ("http://127.0.0.1:8099/", 403)])
def test_another_origin_can_neither_frame_nor_post(open_tab: Open, served: World, site: str, status: int) -> None:
    """Clickjacking and CSRF, from a page of another origin in the same browser."""
    tab = open_tab("ada")
    before = value(served.dsn, "SELECT count(*) FROM duly.audit")
    other = tab.page.context.new_page()
    other.route(site, lambda route: route.fulfill(content_type="text/html", body=(
        f'<iframe src="{served.url}/console"></iframe><iframe src="{served.url}/console/signed-out"></iframe>'
        f'<form method="post" action="{served.url}/console/actions/dead.discard"><input name="id" value="900001">'
        '<input name="confirmed" value="yes"><button>win</button></form>')))  # fmt: skip
    other.goto(site, wait_until="load")
    frames = [frame for frame in other.frames if frame != other.main_frame]
    assert len(frames) == 2
    assert not [frame for frame in frames if re.search("Overview|You are signed out", frame.content())]
    with other.expect_response("**/actions/**") as answered:
        other.click("button")
    assert answered.value.status == status  # without its cookie a stranger; with it, refused by origin and token
    assert value(served.dsn, "SELECT count(*) FROM duly.audit") == before
