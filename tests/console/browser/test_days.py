"""Days in the life of the people at the desks, in a real Chromium: what they open, read, type and press, in order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.console.browser.conftest import Tab, World
from tests.support import rows, value

Open = Callable[..., Tab]
SHOTS = os.environ.get("DULY_DAYS")
"""Where to leave a picture of each step, for somebody to look at."""


def check(tab: Tab, name: str) -> None:
    """What must be true of every page: one heading, no wider than its window, nothing that axe minds."""
    page = tab.page
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)
    assert page.locator("h1").count() == 1, name
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, name
    assert tab.axe() == [], name


def sign_in(tab: Tab, person: str, section: str) -> None:
    """Who sees one section only lands there."""
    tab.go("/console")
    tab.page.click(f'button[value="{person}"]')
    tab.page.wait_for_url(f"**/console/{section}")


def refused(complaint: str) -> bool:
    """A form that is shown again comes with the status of its refusal, and the browser repeats it."""
    return "Failed to load resource" in complaint and any(word in complaint for word in ("400", "409", "422", "403"))


def test_a_day_of_a_risk_administrator(open_tab: Open, served: World) -> None:
    """F11, F12: edit a rule, compare, try, dry-run, activate; the record says who and why."""
    for scheme, width, day in (("light", 1280, "wide"), ("dark", 360, "narrow")):
        tab = open_tab(width=width, color_scheme=scheme)
        page = tab.page
        sign_in(tab, "rita", "rules")
        assert page.locator("nav[aria-label=Pages] a").all_inner_texts() == ["Rules"]
        check(tab, f"rules-{day}")
        page.click("a:has-text('Stricter limit')")
        check(tab, f"rule-{day}")
        before = page.locator("tbody tr").count()
        page.click("a.button:has-text('Edit')")
        check(tab, f"rule-edit-{day}")

        page.fill('textarea[name="conditions"]', '{"all": [{"field": "amuont", "op": "gt", "value": "40.00"}]}')
        page.click("form[aria-label=Rule] button")
        assert (
            "$.conditions.all[0].field: the rule set has no such field: did you mean amount?"
            in page.locator("#wrong-conditions").inner_text()
        )
        assert "amuont" in page.input_value('textarea[name="conditions"]')
        check(tab, f"rule-refused-{day}")

        limit = {"wide": "50.00", "narrow": "40.00"}[day]
        conditions = {"all": [{"field": "amount", "op": "gt", "value": limit},
                              {"field": "currency", "op": "eq", "value": "PLN"}]}  # fmt: skip
        page.fill('textarea[name="conditions"]', json.dumps(conditions, indent=2))
        page.fill('input[name="says"]', "above the stricter limit")
        page.fill('input[name="reason"]', "losses in May")
        page.click("form[aria-label=Rule] button")
        page.wait_for_url("**/diff?from=*")
        assert f"amount is more than {limit}" in page.locator(".diff .new").all_inner_texts().__str__()
        check(tab, f"rule-diff-{day}")

        page.click("a.button:has-text('Test bench')")
        page.fill('textarea[name="facts"]', '{"amount": "60.00", "currency": "PLN", "from": "acc-1", "to": "acc-3"}')
        page.click("form[aria-label=Facts] button")
        said = page.locator("main").inner_text()
        assert "Stricter limit, version" in page.locator(".why").inner_text()
        assert "it is 60.00" in said
        check(tab, f"rule-bench-{day}")

        page.go_back()
        page.go_back()
        page.click("a.button:has-text('Dry run')")
        page.click("form[aria-label='Dry run'] button")
        assert "Would be another" in page.locator(".tiles").inner_text()
        check(tab, f"rule-dry-run-{day}")

        page.click("a.button:has-text('Activate version')")
        check(tab, f"rule-activate-{day}")
        page.fill('input[name="reason"]', "agreed on Monday")
        if page.locator('input[name="acknowledge_warnings"]').count():
            page.check('input[name="acknowledge_warnings"]')
        page.click("form[aria-label=Activate] button")
        assert "decides now" in page.locator(".notice").inner_text()
        assert page.locator("h1 .badge").inner_text() == "ACTIVE"
        assert page.locator("#versions ~ div tbody tr").count() == before + 1
        assert "agreed on Monday" in page.locator("#record ~ div").inner_text()
        check(tab, f"rule-active-{day}")
        assert [one for one in tab.complaints if not refused(one)] == []
    found = rows(
        served.dsn, "SELECT action, actor, reason FROM duly.audit WHERE subject LIKE 'rule:%%' ORDER BY id", {}
    )
    one_day = [("rule.changed", "rita", "losses in May"), ("rule.activated", "rita", "agreed on Monday")]
    assert found == one_day * 2


def test_a_risk_administrator_needs_no_scripts(open_tab: Open, served: World) -> None:
    tab = open_tab(java_script_enabled=False)
    page = tab.page
    sign_in(tab, "rita", "rules")
    page.click("a.button:has-text('New rule')")
    page.click("a.row:has-text('payment-screening')")
    page.fill('input[name="name"]', "Tiny")
    page.fill('textarea[name="conditions"]', '{"field": "amount", "op": "lt", "value": "0.05"}')
    page.click("form[aria-label=Rule] button")
    assert "Made Tiny as a draft." in page.locator(".notice").inner_text()
    page.click("text=Deprecate…")
    page.fill('input[name="reason"]', "it was a test")
    page.click("button.solid")
    assert page.locator("h1 .badge").inner_text() == "DEPRECATED"
    assert value(served.dsn, "SELECT reason FROM duly.audit WHERE action = 'rule.deprecated'") == "it was a test"
