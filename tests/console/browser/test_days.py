"""Days in the life of the people at the desks, in a real Chromium: what they open, read, type and press, in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from uuid import uuid4

import httpx2

from tests.console.browser.conftest import Tab, World
from tests.support import rows, value

Open = Callable[..., Tab]


def check(tab: Tab, name: str) -> None:
    """What must be true of every page: one heading, nothing that does not fit, nothing that axe minds."""
    page = tab.page
    tab.keep_picture(name)
    assert page.locator("h1").count() == 1, name
    assert tab.misfits() == [], name
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
        before = page.locator("#versions ~ div tbody tr").count()
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
        assert f"amount is more than {limit}" in " ".join(page.locator(".diff .new").all_inner_texts())
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


def hold_payment(served: World, amount: str) -> str:
    """A payment that the rules hold, made by a teller through the API; the id of its case."""
    payer, payee = rows(served.dsn, "SELECT from_account_id, to_account_id FROM payments.payments "
                                    "WHERE initiated_by = 'sample-teller' LIMIT 1")[0]  # fmt: skip
    token = token_for(served, "developer", "payments:initiate", "PAYMENTS_INITIATOR")
    body = {"from": str(payer), "to": str(payee), "amount": amount, "currency": "PLN"}
    made = httpx2.post(f"{served.url}/v1/payments", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=10)
    assert made.status_code in (201, 202), made.text
    return str(
        value(served.dsn, "SELECT id FROM compliance.cases WHERE payment_id = %(id)s", {"id": made.json()["id"]})
    )


def token_for(served: World, client: str, scope: str, role: str) -> str:
    """As a program gets one."""
    form = {"grant_type": "client_credentials", "client_id": client, "client_secret": f"{client}-secret",
            "scope": scope, "role": role}  # fmt: skip
    answer = httpx2.post(f"{served.url}/dev-issuer/token", data=form, timeout=10)
    return str(answer.json()["access_token"])


def test_a_day_of_a_compliance_officer(open_tab: Open, served: World) -> None:
    """F10: queue, claim, read why, comment, propose; a second officer confirms; the payment is rejected; reopened."""
    deposit(served, "200000.00")
    for scheme, width, day in (("light", 1280, "wide"), ("dark", 360, "narrow")):
        case = hold_payment(served, "16000.00")
        first, second = (open_tab(width=width, color_scheme=scheme) for _ in range(2))
        page = first.page
        sign_in(first, "cora", "cases")
        assert page.locator("nav[aria-label=Pages] a").all_inner_texts() == ["Cases"]
        check(first, f"cases-{day}")
        page.select_option('select[name="severity"]', "HIGH")
        page.click("form[aria-label=Filters] button")
        page.click(f"a.row:has-text('{case}')")
        said = page.locator("main").inner_text()
        assert "16000.00 PLN" in page.locator("h1").inner_text()
        assert "two officers" in said
        assert "“Large”" in page.locator("section:has(#because)").inner_text()
        assert "amount is more than 10000.00" in said
        assert "it is 16000.00" in said
        check(first, f"case-{day}")

        page.click("button:has-text('Claim')")
        assert "You work on the case now." in page.locator(".notice").inner_text()
        page.fill('textarea[name="text"]', "Asked the customer for the invoice.\nThey have none.")
        page.click("form[aria-label=Comment] button")
        assert "They have none." in page.locator(".timeline").inner_text()
        page.fill('input[name="reference"]', "vault:2026/117")
        page.click("form[aria-label=Evidence] button")
        assert "vault:2026/117" in page.locator(".timeline").inner_text()

        page.select_option('select[name="decision"]', "REJECT")
        page.select_option('select[name="reason_code"]', "KNOWN_CUSTOMER")
        page.fill('textarea[name="reason"]', "No invoice, and the payee is new.")
        page.click("form[aria-label=Decision] button")
        assert "is no reason to REJECT" in page.locator("#wrong-reason_code").inner_text()
        assert page.input_value('textarea[name="reason"]') == "No invoice, and the payee is new."
        check(first, f"case-refused-{day}")
        page.select_option('select[name="reason_code"]', "SOURCE_OF_FUNDS_UNKNOWN")
        page.click("form[aria-label=Decision] button")
        assert page.input_value('[name="reason"]') == "No invoice, and the payee is new."
        check(first, f"case-confirm-{day}")
        page.click("button.solid")
        assert "a second officer confirms or refuses it" in page.locator(".notice").inner_text()
        assert page.locator("button:has-text('Confirm')").count() == 0
        check(first, f"case-proposed-{day}")

        page = second.page
        sign_in(second, "carl", "cases")
        page.click("a:has-text('Wait for a second officer')")
        page.click(f"a.row:has-text('{case}')")
        page.click("button:has-text('Confirm REJECT')")
        page.click("button.solid")
        assert "the payment is rejected" in page.locator(".notice").inner_text()
        said = page.locator("main").inner_text()
        assert "By cora, confirmed by carl." in said
        assert page.locator("h2:has-text('The payment') .badge").inner_text() == "REJECTED"
        check(second, f"case-resolved-{day}")

        first.page.reload()
        first.page.click("button:has-text('Reopen')")
        first.page.fill('[name="reason"]', "The invoice has come.")
        first.page.click("button.solid")
        assert "This case follows the one that had ended." in first.page.locator(".notice").inner_text()
        assert "The invoice has come." in first.page.locator(".timeline").inner_text()
        assert first.page.locator(f"dd a:has-text('{case}')").count() == 1
        check(first, f"case-reopened-{day}")
        for tab in (first, second):
            assert [one for one in tab.complaints if not refused(one)] == []
        found = "SELECT status, resolved_by, confirmed_by, effect FROM compliance.cases WHERE id = %(id)s"
        assert rows(served.dsn, found, {"id": case}) == [("RESOLVED", "cora", "carl", "HOLD_VOIDED")]


def test_money_that_was_posted_goes_back_when_two_officers_reject_it(open_tab: Open, served: World) -> None:
    """F10: the case of a transaction, decided by two; the books show both, and the page says so."""
    posted = deposit(served, "31000.00", reference="posted before it was screened")
    case = flag(served, posted)
    tabs = []
    for person, press in (("cora", "form[aria-label=Decision] button"), ("carl", "button:has-text('Confirm REJECT')")):
        tab = open_tab()
        tabs.append(tab)
        sign_in(tab, person, "cases")
        tab.go(f"/console/cases/{case}")
        if person == "cora":
            tab.page.select_option('select[name="decision"]', "REJECT")
            tab.page.select_option('select[name="reason_code"]', "SOURCE_OF_FUNDS_UNKNOWN")
            tab.page.fill('textarea[name="reason"]', "Nobody knows where it is from.")
        assert value(served.dsn, "SELECT status FROM ledger.transactions WHERE id = %(id)s", {"id": posted}) == "POSTED"
        tab.page.click(press)
        tab.page.click("button.solid")
    page = tabs[-1].page
    assert "what was posted is reversed" in page.locator(".notice").inner_text()
    assert "Reverses: " in page.locator("main").inner_text()
    check(tabs[-1], "case-reversed")
    assert value(served.dsn, "SELECT status FROM ledger.transactions WHERE id = %(id)s", {"id": posted}) == "REVERSED"
    found = "SELECT resolved_by, confirmed_by, effect FROM compliance.cases WHERE id = %(id)s"
    assert rows(served.dsn, found, {"id": case}) == [("cora", "carl", "REVERSED")]
    assert [one for tab in tabs for one in tab.complaints if not refused(one)] == []


def flag(served: World, transaction: str) -> str:
    """A case about this transaction, as the screening opens one; two officers decide it."""
    case = str(uuid4())
    given = {"id": case, "transaction": transaction}
    rows(
        served.dsn,
        "INSERT INTO compliance.alerts (id, source, transaction_id, rule_set_id, rule_set_version, outcome, severity, "
        "facts, matched, incomplete, trace, raised_at) SELECT %(id)s, 'AML', %(transaction)s, rule_set_id, "
        "rule_set_version, outcome, severity, facts, matched, incomplete, trace, now() FROM compliance.alerts "
        "WHERE source = 'AML' LIMIT 1",
        given,
    )
    rows(
        served.dsn,
        "INSERT INTO compliance.cases (id, kind, status, severity, alert_id, transaction_id, amount, currency, "
        "needs_two, due_at, created_at, updated_at) VALUES (%(id)s, 'AML', 'OPEN', 'HIGH', %(id)s, %(transaction)s, "
        "3100000, 'PLN', true, now() + interval '2 d', now(), now())",
        given,
    )
    return case


def deposit(served: World, amount: str, *, reference: str = "for the days") -> str:
    """Money for the payer of the samples; the id of its transaction."""
    payer = value(served.dsn, "SELECT from_account_id FROM payments.payments WHERE initiated_by = 'sample-teller' "
                              "LIMIT 1")  # fmt: skip
    cash = value(served.dsn, "SELECT id FROM ledger.accounts WHERE name = 'Cash of payments'")
    lines = [{"accountId": str(cash), "amount": amount, "direction": "DEBIT"},
             {"accountId": str(payer), "amount": amount, "direction": "CREDIT"}]  # fmt: skip
    token = token_for(served, "developer", "ledger:write", "LEDGER_POSTER")
    made = httpx2.post(
        f"{served.url}/v1/transactions", json={"reference": reference, "entries": lines},
        headers={"Authorization": f"Bearer {token}"}, timeout=10,
    )  # fmt: skip
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


def test_an_officer_needs_no_scripts(open_tab: Open, served: World) -> None:
    case = value(served.dsn, "SELECT id FROM compliance.cases WHERE status = 'OPEN' AND NOT needs_two LIMIT 1")
    tab = open_tab(java_script_enabled=False)
    page = tab.page
    sign_in(tab, "cora", "cases")
    page.click(f"a.row:has-text('{case}')")
    page.fill('input[name="assignee"]', "cora")
    page.click("form[aria-label=Assign] button")
    assert "cora works on the case now." in page.locator(".notice").inner_text().replace("Cora", "cora")
    page.select_option('select[name="decision"]', "APPROVE")
    page.select_option('select[name="reason_code"]', "WITHIN_PROFILE")
    page.fill('textarea[name="reason"]', "As every month.")
    page.click("form[aria-label=Decision] button")
    page.click("button.solid")
    assert page.locator("h1 .badge").first.inner_text() == "RESOLVED"
