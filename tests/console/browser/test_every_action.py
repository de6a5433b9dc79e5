"""E7.1: every action of the registry in a real Chromium, by pressing its button and saying why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from duly.operate.actions import ACTIONS
from tests.console.browser.conftest import Tab, World
from tests.support import rows, value

Open = Callable[..., Tab]
JOB = "/console/jobs/{SELECT id FROM duly.jobs WHERE name = 'pressed.job'}"
OF_ALL = "SELECT id FROM duly.webhook_subscriptions WHERE url = 'http://127.0.0.1:8010/pressed'"
HOOK = f"/console/webhooks/{{{OF_ALL}}}"
DELIVERY = f"SELECT id FROM duly.webhook_deliveries WHERE subscription_id = ({OF_ALL})"
FAIL_DELIVERY = (
    "UPDATE duly.webhook_deliveries SET status = 'PERMANENTLY_FAILED', attempts = 8, tries = 8, last_error = "
    f"'timeout', next_attempt_at = NULL, finished_at = now() WHERE subscription_id = ({OF_ALL})"
)
MAKE_JOB = (
    "INSERT INTO duly.jobs (name, run_at, due_at, created_at) VALUES ('pressed.job', now() + interval '1 h', now(), "
    "now())"
)
MAKE_DEAD = (
    "INSERT INTO duly.dead_letters (id, name, payload, priority, due_at, created_at, original_delay, retry_count, "
    "source, reason, error, error_kind, buried_at) SELECT 920000 + n, 'pressed.dead', '{}', 3, now(), now(), '0', 3, "
    "'Deferred', 'retries_used_up', 'no', 'Kind' || n % 2, now() FROM generate_series(1, 6) AS n"
)
MAKE_EVENTS = (
    "INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, created_at, attempts, failed_at, last_error) "
    "SELECT duly.uuid7(), 'pressed.event', 'pressed', 'pressed:' || n || now(), '{}', now(), 5, now(), 'no' "
    "FROM generate_series(1, 3) AS n"
)
MAKE_ALERT = (
    "INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at) VALUES ('application', 'pressed', 'look', "
    "now() + interval '1 min', now())"
)


@dataclass(frozen=True)
class Case:
    """Where a button is, and what the record then says; a path in braces is the id that a query finds.

    The button is that of the action, unless it is named; the form around it is filled in first.
    """

    path: str
    audit: str
    before: str = ""
    press: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "jobs.run-now": Case(JOB, "job.run_now", MAKE_JOB),
    "jobs.cancel": Case(JOB, "job.cancelled"),
    "dead.retry": Case("/console/dead-letters?name=pressed.dead", "dead_letter.retried", MAKE_DEAD),
    "dead.discard": Case("/console/dead-letters?name=pressed.dead", "dead_letter.discarded"),
    "dead.retry-all": Case("/console/dead-letters?name=pressed.dead&kind=Kind0", "dead_letter.retried"),
    "dead.discard-all": Case("/console/dead-letters?name=pressed.dead&kind=Kind1", "dead_letter.discarded"),
    "events.requeue": Case("/console/outbox?status=FAILED", "event.requeued", MAKE_EVENTS),
    "events.discard": Case("/console/outbox?status=FAILED", "event.discarded"),
    "events.requeue-all": Case("/console/outbox?status=FAILED", "event.requeued"),
    "events.discard-all": Case("/console/outbox?status=FAILED", "event.discarded", MAKE_EVENTS),
    "alerts.resolve": Case("/console/alerts", "alert.resolved", MAKE_ALERT),
    "consumers.via": Case(
        "/console/outbox", "consumer.moved", "", "form[action$='/consumers.via'] button",
        {"select[name=name]": "mailer", "select[name=via]": "kafka"},
    ),
    "schedules.add": Case(
        "/console/schedules/new?name=pressed.schedule&cron=5+4+*+*+*", "schedule.added", "",
        "form[action$='/schedules.add'] button",
    ),
    "schedules.edit": Case(
        "/console/schedules/pressed.schedule/edit?cron=6+4+*+*+*", "schedule.edited", "",
        "form[action$='/schedules.edit'] button",
    ),
    "schedules.trigger": Case("/console/schedules/pressed.schedule", "schedule.triggered"),
    "schedules.disable": Case("/console/schedules/pressed.schedule", "schedule.disabled"),
    "schedules.enable": Case("/console/schedules/pressed.schedule", "schedule.enabled"),
    "schedules.remove": Case("/console/schedules/pressed.schedule", "schedule.removed"),
    "webhooks.add": Case(
        "/console/webhooks/new", "webhook_subscription.created", "", "form[action$='/webhooks.add'] button",
        {"input[name=url]": "http://127.0.0.1:8010/pressed", "textarea[name=events]": "pressed.*"},
    ),
    "webhooks.edit": Case(
        HOOK + "/edit", "webhook_subscription.edited", "", "form[action$='/webhooks.edit'] button",
        {"input[name=description]": "pressed"},
    ),
    "webhooks.rotate": Case(HOOK, "webhook_subscription.secret_rotated", "", "form[action$='/webhooks.rotate'] button"),
    "webhooks.provider-secret": Case(
        "/console/webhooks", "webhook_provider.secret_added", "", "form[action$='/webhooks.provider-secret'] button",
        {"input[name=provider]": "pressed"},
    ),
    "webhooks.test": Case(HOOK, "webhook_subscription.tested"),
    "webhooks.redeliver": Case(
        f"/console/webhooks/deliveries/{{{DELIVERY}}}", "webhook_delivery.redelivered", FAIL_DELIVERY
    ),
    "webhooks.redeliver-range": Case(
        HOOK, "webhook_subscription.redelivered", FAIL_DELIVERY, "form[action$='/webhooks.redeliver-range'] button"
    ),
    "webhooks.pause": Case(HOOK, "webhook_subscription.paused"),
    "webhooks.resume": Case(HOOK, "webhook_subscription.resumed"),
    "webhooks.disable": Case(HOOK, "webhook_subscription.disabled"),
    "webhooks.delete": Case(HOOK, "webhook_subscription.deleted"),
}  # fmt: skip


def test_every_action_has_a_button_that_is_pressed_here() -> None:
    assert set(CASES) == set(ACTIONS)


@pytest.mark.timeout(600)
def test_every_action_is_done_from_its_page_and_leaves_who_and_why(open_tab: Open, served: World) -> None:
    """The page that asks why is accessible and fits; what was done is said, and is in the record."""
    tab = open_tab("ada")
    for name, case in CASES.items():
        if case.before:
            rows(served.dsn, case.before)
        tab.go(re.sub(r"\{(.+)\}", lambda found: str(value(served.dsn, found[1])), case.path))
        press(tab, name, case, reason := f"because of {name}")
        assert tab.page.locator(".notice.good, .message pre").count() == 1, name
        newest = "SELECT action, actor, reason FROM duly.audit ORDER BY id DESC LIMIT 1"
        assert rows(served.dsn, newest) == [(case.audit, "Ada Kowalska (ada)", reason)], name
    assert tab.complaints == []


def press(tab: Tab, name: str, case: Case, reason: str) -> None:
    """Fill in the form, press its button, and answer the page that asks why, if there is one."""
    page = tab.page
    page.evaluate("document.querySelectorAll('main details').forEach((one) => one.open = true)")
    for place, text in case.fields.items():
        (page.select_option if place.startswith("select") else page.fill)(place, text)
    button = page.locator(case.press or f"form.act[action$='/actions/{name}'] button").first
    given = page.locator(f"form[action$='/actions/{name}'] input[name=reason]")
    if given.count():
        given.first.fill(reason)
    button.click()
    page.wait_for_load_state("load")
    if page.locator("form[aria-label=Confirm]").count():
        tab.keep_picture(f"ask-{name}")
        assert tab.axe() == [], name
        assert tab.misfits() == [], name
        page.fill("form[aria-label=Confirm] input[name=reason]", reason)
        page.click("form[aria-label=Confirm] button")
        page.wait_for_load_state("load")
