"""F10 in the console: officers find, claim, read, discuss, decide, confirm and reopen cases; nobody else sees them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
import pytest_asyncio

from apps.finance.compliance import console, opening, resolving, service, store
from apps.finance.compliance.copilot import Brief
from apps.finance.compliance.model import Kind, ReasonCode, Severity, Verdict
from apps.finance.decisions import console as decisions_console
from apps.finance.decisions import service as decisions
from apps.finance.ledger import console as ledger_console
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountType, Direction, NewEntry, Posting
from apps.finance.payments import console as payments_console
from apps.finance.payments import service as payments
from apps.wiring import app
from duly import Duly, Tx
from duly.db import Database
from duly.testing import BusinessClock
from tests.console.conftest import Site, csrf_of, post, serving
from tests.support import rows, value

LARGE = {"field": "amount", "op": "gt", "value": "1000.00"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


@dataclass
class Desk:
    """A console with payments on hold: one for one officer, one for two."""

    site: Site
    db: Database
    dsn: str
    small: UUID
    large: UUID
    accounts: Sequence[UUID]

    async def officer(self, name: str = "cora") -> httpx2.AsyncClient:
        """An officer's browser."""
        return await self.site.signed_in(name)

    def case(self, id: UUID) -> dict[str, Any]:
        """How a case stands."""
        names = ("status", "assignee", "decision", "effect", "resolved_by", "confirmed_by", "reason_code", "reason")
        found = rows(self.dsn, f"SELECT {', '.join(names)} FROM compliance.cases WHERE id = %(id)s", {"id": id})
        return dict(zip(names, found[0], strict=True))

    def payment(self, id: UUID) -> str:
        """How the payment of a case stands."""
        return str(value(self.dsn, "SELECT p.state FROM payments.payments p JOIN compliance.cases c ON c.payment_id = "
                                   "p.id WHERE c.id = %(id)s", {"id": id}))  # fmt: skip

    def audited(self) -> list[tuple[Any, ...]]:
        """What the audit says of cases."""
        return rows(self.dsn, "SELECT action, actor, subject, reason FROM duly.audit WHERE subject LIKE 'case:%%' "
                              "ORDER BY id", {})  # fmt: skip

    def lines(self, id: UUID) -> list[tuple[Any, ...]]:
        """A case's timeline."""
        return rows(self.dsn, "SELECT kind, actor FROM compliance.case_events WHERE case_id = %(id)s ORDER BY number",
                    {"id": id})  # fmt: skip


async def pay(tx: Tx, accounts: Sequence[UUID], amount: str, by: str = "teller") -> UUID:
    """A payment that the rules hold; its case."""
    made = await payments.initiate(
        tx, from_id=accounts[1], to_id=accounts[2], amount=Decimal(amount), currency="PLN", by=by, provider="bank",
        tell=service.open_for_payment,
    )  # fmt: skip
    (file,) = await service.read_cases_about(tx, payment_id=made.payment.id, transaction_ids=[])
    return file.case.id


async def fill(tx: Tx) -> list[UUID]:
    """Accounts with money, and a rule that holds what is large."""
    kinds = ((AccountType.ASSET, True), (AccountType.LIABILITY, False), (AccountType.LIABILITY, False))
    accounts = [
        (await ledger.create_account(tx, name=f"a{n}", kind=kind, currency="PLN", may_go_negative=negative)).id
        for n, (kind, negative) in enumerate(kinds)
    ]
    lines = [NewEntry(accounts[0], Decimal(90_000), Direction.DEBIT), NewEntry(accounts[1], Decimal(90_000),
             Direction.CREDIT)]  # fmt: skip
    await ledger.post(tx, Posting("deposit", lines))
    written = {"name": "Large", "conditions": LARGE, "priority": 0, "terminate": False,
               "action": {"decision": "REVIEW", "reason": "above the limit"}}  # fmt: skip
    rule, _ = await decisions.create_rule(tx, "payment-screening", written=written, actor="setup")
    await decisions.activate_rule(tx, rule.id, version=1, acknowledge_warnings=False, actor="setup")
    return accounts


@pytest_asyncio.fixture
async def desk(db: Database, dsn: str, tmp_path: Path) -> AsyncIterator[Desk]:
    """One for a test."""
    async with serving(db, tmp_path, app) as site:
        await app.prepare(db)
        accounts = await db.run(fill)
        small = await db.run(lambda tx: pay(tx, accounts, "2000.00"))
        large = await db.run(lambda tx: pay(tx, accounts, "20000.00"))
        yield Desk(site, db, dsn, small, large, accounts)


def main(page: httpx2.Response) -> str:
    """What a page says, without its tags."""
    text = page.text.split("<main")[1].split("</main>")[0]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", text)))


def problem_at(page: httpx2.Response, field: str) -> str:
    """What is said at a field."""
    assert f'aria-describedby="wrong-{field}"' in page.text
    return unescape(page.text.split(f'id="wrong-{field}">')[1].split("</label>")[0])


async def decide(browser: httpx2.AsyncClient, id: UUID, decision: str, code: str, **more: str) -> httpx2.Response:
    """Send the form of a decision, confirmed."""
    given = {"id": str(id), "decision": decision, "reason_code": code, "reason": "as agreed", **more}
    return await post(browser, "cases.resolve", **given)


async def test_cases_are_for_officers_alone(desk: Desk) -> None:
    cora = await desk.officer()
    assert (await cora.get("/console")).headers["location"] == "/console/cases"
    queue = await cora.get("/console/cases")
    assert re.findall(r'<li><a href="/console([^"]*)"', queue.text) == ["/cases"]
    page = await cora.get(f"/console/cases/{desk.large}")
    assert page.status_code == 200
    assert set(re.findall(r'href="/console/([a-z-]+)', page.text)) - {"static", "cases"} == set()
    for path in ("/payments", "/rules", "/accounts", "/jobs", "/audit"):
        assert (await cora.get(f"/console{path}")).status_code == 403
    for person in ("ada", "otto", "rita"):
        browser = await desk.site.signed_in(person)
        assert "/console/cases" not in (await browser.get("/console/rules")).text
        for path in ("", f"/{desk.small}"):
            assert (await browser.get(f"/console/cases{path}")).status_code == 403, person
    stranger = await desk.site.browser()
    assert (await stranger.get("/console/cases")).status_code == 302


GIVEN: dict[str, dict[str, str]] = {
    "cases.claim": {}, "cases.unclaim": {}, "cases.assign": {"assignee": "carl"}, "cases.comment": {"text": "Seen."},
    "cases.evidence": {"reference": "vault:2026/117"},
    "cases.resolve": {"decision": "REJECT", "reason_code": "FRAUD", "reason": "as agreed"}, "cases.confirm": {},
    "cases.refuse": {"reason": "not yet"}, "cases.reopen": {"reason": "new facts"},
}  # fmt: skip
WRITTEN = {
    "cases.claim": "case.claimed", "cases.unclaim": "case.unclaimed", "cases.assign": "case.assigned",
    "cases.comment": "case.commented", "cases.evidence": "case.evidence_added", "cases.resolve": "case.resolved",
    "cases.confirm": "case.resolved", "cases.refuse": "case.proposal_refused", "cases.reopen": "case.reopened",
}  # fmt: skip


async def reject(tx: Tx, id: UUID) -> resolving.Decided:
    """What carl thinks of it."""
    return await resolving.resolve(
        tx, id, decision=Verdict.REJECT, reason_code=ReasonCode.FRAUD, reason="so", actor="carl"
    )  # fmt: skip


async def prepare(desk: Desk, name: str) -> UUID:
    """A case to which this can be done by cora."""
    if name == "cases.unclaim":
        await desk.db.run(lambda tx: service.claim(tx, desk.small, actor="cora"))
    if name in ("cases.confirm", "cases.refuse"):
        await desk.db.run(lambda tx: reject(tx, desk.large))
        return desk.large
    if name == "cases.reopen":
        await desk.db.run(lambda tx: reject(tx, desk.small))
    return desk.small


def test_every_action_of_the_section_is_tried_here() -> None:
    section = next(section for section in app.sections if section.name == "cases")
    assert {action.name for action in section.actions} == set(GIVEN) == set(WRITTEN)


@pytest.mark.parametrize("name", GIVEN)
async def test_each_action_is_for_officers_with_a_token_and_once_a_click(desk: Desk, name: str) -> None:
    id = await prepare(desk, name)
    fields, path = {**GIVEN[name], "id": str(id), "confirmed": "yes"}, f"/console/actions/{name}"
    before = desk.lines(id)
    for person in ("ada", "otto", "rita"):
        assert (await post(await desk.site.signed_in(person), name, **fields)).status_code == 403, person
    cora = await desk.officer()
    assert (await cora.post(path, data=fields)).status_code == 403
    assert (await cora.post(path, data={**fields, "csrf": "0" * 64})).status_code == 403
    assert desk.audited() == []
    assert desk.lines(id) == before
    sent = {**fields, "csrf": await csrf_of(cora), "once": "w1"}
    answers = await asyncio.gather(*(cora.post(path, data=sent) for _ in range(4)))
    assert {answer.status_code for answer in answers} == {303}
    assert len({answer.headers["location"] for answer in answers}) == 1
    ((action, actor, subject, reason),) = desk.audited()
    assert (action, actor, reason) == (WRITTEN[name], "cora", None)  # why is the officers' business
    assert (subject == f"case:{id}") == (name != "cases.reopen")
    if name != "cases.reopen":
        assert len(desk.lines(id)) == len(before) + 1
    page = await cora.get(answers[0].headers["location"])
    assert page.status_code == 200
    assert 'role="status"' in page.text


async def test_the_queue_is_filtered_marks_what_is_overdue_and_hides_ones_own(desk: Desk, clock: BusinessClock) -> None:
    own = await desk.db.run(lambda tx: pay(tx, desk.accounts, "30000.00", by="cora"))
    await desk.db.run(lambda tx: service.claim(tx, desk.large, actor="carl"))
    cora, carl = await desk.officer(), await desk.officer("carl")

    async def listed(browser: httpx2.AsyncClient, query: str = "") -> set[str]:
        page = await browser.get(f"/console/cases{query}")
        assert page.status_code == 200, main(page)
        return set(re.findall(r'class="row" href="/console/cases/([0-9a-f-]+)"', page.text))

    small, large = str(desk.small), str(desk.large)
    assert await listed(cora) == {small, large}
    assert await listed(carl) == {small, large, str(own)}
    assert "Open 2 Wait" in main(await cora.get("/console/cases")), "a number tells of it as a list would"
    assert "Open 3 Wait" in main(await carl.get("/console/cases"))
    assert await listed(cora, "?assignee=carl") == {large}
    assert await listed(cora, "?severity=HIGH") == {large}
    assert await listed(cora, "?severity=MEDIUM&kind=PAYMENT_REVIEW") == {small}
    assert await listed(cora, "?status=RESOLVED") == await listed(cora, "?kind=AML") == set()
    assert await listed(cora, "?status=any&overdue=1") == set()
    assert "overdue" not in main(await cora.get(f"/console/cases/{desk.large}"))
    clock.advance(hours=30)
    for late in (desk.large, own):
        await desk.db.run(partial(service.come_due, case_id=late))
    assert await listed(cora, "?status=any&overdue=1") == {large}
    assert "Overdue 1 " in main(await cora.get("/console/cases"))
    assert "Overdue 2 " in main(await carl.get("/console/cases"))
    assert "overdue" in main(await cora.get(f"/console/cases/{desk.large}"))
    refused = await cora.get(f"/console/cases/{own}")
    assert refused.status_code == 403
    assert "30000.00" not in main(refused)
    assert (await post(cora, "cases.claim", id=str(own))).status_code == 403
    for query in ("?status=x", "?kind=x", "?severity=x", "?after=x", "?assignee=%00"):
        assert (await cora.get(f"/console/cases{query}")).status_code == 400, query
    for id in ("019c0000-0000-7000-8000-000000000003", "nonsense"):
        assert (await cora.get(f"/console/cases/{id}")).status_code == 404
    for before in (0, 1, 2**31, 2**63 - 1):
        assert (await cora.get(f"/console/cases/{desk.large}?before={before}")).status_code == 200, before
    assert (await cora.get(f"/console/cases/{desk.large}?before={2**63}")).status_code == 400


async def test_a_case_says_why_it_is_there_and_what_it_is_about(desk: Desk) -> None:
    cora = await desk.officer()
    page = main(await cora.get(f"/console/cases/{desk.small}"))
    for words in ("2000.00 PLN", "OPEN", "MEDIUM", "payment on hold", "one officer", "Said by the rules themselves",
                  "Rule that matched: “Large”", "amount is more than 1000.00 yes it is 2000.00", "PENDING REVIEW",
                  str(desk.accounts[1]), "opened the case", "teller"):  # fmt: skip
        assert words in page, words
    assert "two officers" in main(await cora.get(f"/console/cases/{desk.large}"))


async def test_one_officer_rejects_a_payment_that_is_on_hold(desk: Desk) -> None:
    cora = await desk.officer()
    assert (await post(cora, "cases.claim", id=str(desk.small))).status_code == 303
    form = {"id": str(desk.small), "decision": "REJECT", "reason_code": "FRAUD", "reason": "a known pattern"}
    asked = await cora.post("/console/actions/cases.resolve", data={**form, "csrf": await csrf_of(cora)})
    assert asked.status_code == 200
    assert 'value="a known pattern"' in asked.text
    assert "Decide a case" in main(asked)
    assert desk.case(desk.small)["status"] == "OPEN"
    done = await post(cora, "cases.resolve", **form)
    assert done.headers["location"] == f"/console/cases/{desk.small}"
    page = main(await cora.get(f"/console/cases/{desk.small}"))
    for words in ("Decided REJECT about 2000.00 PLN", "the payment is rejected", "a known pattern", "By cora",
                  "REJECTED", "Reopen…"):  # fmt: skip
        assert words in page, words
    assert desk.payment(desk.small) == "REJECTED"
    assert desk.case(desk.small) == {
        "status": "RESOLVED", "assignee": "cora", "decision": "REJECT", "effect": "HOLD_VOIDED", "resolved_by": "cora",
        "confirmed_by": None, "reason_code": "FRAUD", "reason": "a known pattern",
    }  # fmt: skip
    again = await decide(cora, desk.small, "APPROVE", "OTHER")
    assert again.status_code == 409
    assert "the case is RESOLVED" in main(again).replace("The case", "the case")


async def test_above_an_amount_a_second_officer_confirms(desk: Desk) -> None:
    cora, carl = await desk.officer(), await desk.officer("carl")
    assert "Propose a decision" in main(await cora.get(f"/console/cases/{desk.large}"))
    proposed = await decide(cora, desk.large, "APPROVE", "KNOWN_CUSTOMER")
    assert proposed.status_code == 303
    mine, theirs = [await one.get(f"/console/cases/{desk.large}") for one in (cora, carl)]
    assert "cases.confirm" not in mine.text
    assert "Take it back" in main(mine)
    assert "Confirm APPROVE" in main(theirs)
    own = await post(cora, "cases.confirm", id=str(desk.large))
    assert own.status_code == 403
    assert "You have proposed it: a second officer confirms it" in main(own)
    assert desk.payment(desk.large) == "PENDING_REVIEW"
    done = await post(carl, "cases.confirm", id=str(desk.large))
    assert done.status_code == 303
    assert "By cora, confirmed by carl" in main(await carl.get(f"/console/cases/{desk.large}"))
    assert desk.payment(desk.large) == "PROCESSING"
    assert [action for action, *_ in desk.audited()] == ["case.proposed", "case.resolved"]


async def test_one_person_is_one_person_in_the_console_and_in_the_api(desk: Desk) -> None:
    """Four eyes: who proposed through the API is refused here, by the same name."""
    client = await desk.site.browser()
    token = desk.site.issuer.sign("cora", scopes=["compliance:resolve"], roles=["COMPLIANCE_OFFICER"])
    body = {"decision": "REJECT", "reasonCode": "FRAUD", "reason": "so"}
    answer = await client.post(
        f"/v1/compliance/cases/{desk.large}/resolve", json=body, headers={"Authorization": f"Bearer {token}"}
    )
    assert answer.status_code == 200, answer.text
    assert (await post(await desk.officer(), "cases.confirm", id=str(desk.large))).status_code == 403
    assert (await post(await desk.officer("carl"), "cases.confirm", id=str(desk.large))).status_code == 303


async def test_a_proposal_is_refused_or_taken_back_with_a_reason(desk: Desk) -> None:
    cora, carl = await desk.officer(), await desk.officer("carl")
    await decide(cora, desk.large, "REJECT", "STRUCTURING")
    unsaid = await post(carl, "cases.refuse", id=str(desk.large), asked="yes")
    assert unsaid.status_code == 422
    assert "say why" in problem_at(unsaid, "reason")
    assert "/actions/cases.refuse" in unsaid.text
    assert desk.case(desk.large)["status"] == "PROPOSED"
    assert (await post(carl, "cases.refuse", id=str(desk.large), reason="no pattern here")).status_code == 303
    assert "no pattern here" in main(await cora.get(f"/console/cases/{desk.large}"))
    await decide(cora, desk.large, "REJECT", "STRUCTURING")
    assert (await post(cora, "cases.refuse", id=str(desk.large), reason="thought again")).status_code == 303
    kinds = [kind for kind, _ in desk.lines(desk.large)]
    assert kinds[-4:] == ["PROPOSED", "PROPOSAL_REFUSED", "PROPOSED", "PROPOSAL_WITHDRAWN"]


async def test_a_case_that_has_ended_is_reopened_as_a_new_one(desk: Desk) -> None:
    cora = await desk.officer()
    await decide(cora, desk.small, "REJECT", "FRAUD")
    made = await post(cora, "cases.reopen", id=str(desk.small), reason="the customer has called")
    new = made.headers["location"].rpartition("/")[2]
    assert new != str(desk.small)
    page = await cora.get(made.headers["location"])
    assert f'href="/console/cases/{desk.small}"' in page.text
    assert "the customer has called" in main(page)
    old = await cora.get(f"/console/cases/{desk.small}")
    assert f'href="/console/cases/{new}"' in old.text
    assert "/actions/cases.reopen" not in old.text
    twice = await post(cora, "cases.reopen", id=str(desk.small), reason="again")
    assert twice.status_code == 409
    assert "Somebody has reopened the case before" in main(twice)
    assert desk.case(desk.small)["status"] == "RESOLVED"


@pytest.mark.parametrize(
    ("name", "given", "field", "said"),
    [("cases.resolve", {"decision": "APPROVE", "reason_code": "FRAUD", "reason": "x"}, "reason_code",
      "is no reason to"),
     ("cases.resolve", {"reason_code": "FRAUD", "reason": "x"}, "decision", "Field required"),
     ("cases.resolve", {"decision": "REJECT", "reason": "x"}, "reason_code", "Field required"),
     ("cases.resolve", {"decision": "REJECT", "reason_code": "FRAUD", "reason": " "}, "reason", "say why"),
     ("cases.resolve", {"decision": "REJECT", "reason_code": "FRAUD", "reason": "x" * 4_001}, "reason", "4000"),
     ("cases.resolve", {"decision": "REJECT", "reason_code": "FRAUD", "reason": "a\x00b"}, "reason", "pattern"),
     ("cases.resolve", {"decision": "MAYBE", "reason_code": "FRAUD", "reason": "x"}, "decision", "Input should be"),
     ("cases.comment", {"text": ""}, "text", "Field required"),
     ("cases.comment", {"text": "x" * 4_001}, "text", "4000"),
     ("cases.evidence", {"reference": "two words"}, "reference", "no spaces"),
     ("cases.evidence", {"reference": "x" * 201}, "reference", "200"),
     ("cases.assign", {"assignee": " carl"}, "assignee", "pattern")],
)  # fmt: skip
async def test_what_is_refused_is_said_at_the_field_of_its_form(
    desk: Desk, name: str, given: dict[str, str], field: str, said: str
) -> None:
    cora = await desk.officer()
    before = desk.lines(desk.small)
    page = await post(cora, name, id=str(desk.small), **given)
    assert page.status_code == 422, main(page)
    assert said in problem_at(page, field)
    assert page.text.count('role="alert"') == 1
    alert = page.text.index('role="alert"')
    assert f"/actions/{name}" in page.text[page.text.rindex("<form", 0, alert) : alert]
    typed = [text.strip() for name, text in given.items() if name in ("reason", "text", "reference", "assignee")]
    assert all(text in unescape(page.text) for text in typed)
    assert desk.lines(desk.small) == before
    assert desk.audited() == []


async def test_a_form_without_a_case_is_a_page_that_says_so(desk: Desk) -> None:
    cora = await desk.officer()
    for id in ("", "x", "019c0000-0000-7000-8000-000000000003"):
        assert (await post(cora, "cases.comment", id=id, text="hello")).status_code == 404, id


async def test_somebody_elses_case_is_not_decided_until_it_is_assigned(desk: Desk) -> None:
    cora, carl = await desk.officer(), await desk.officer("carl")
    await post(cora, "cases.claim", id=str(desk.small))
    page = await carl.get(f"/console/cases/{desk.small}")
    assert "/actions/cases.resolve" not in page.text
    assert "/actions/cases.unclaim" not in page.text
    for name in ("cases.claim", "cases.unclaim"):
        refused = await post(carl, name, id=str(desk.small))
        assert refused.status_code == 409
        assert "omebody else works on the case" in main(refused)
    assert (await decide(carl, desk.small, "REJECT", "FRAUD")).status_code == 409
    assert (await post(carl, "cases.assign", id=str(desk.small), assignee="carl")).status_code == 303
    assert (await decide(carl, desk.small, "REJECT", "FRAUD")).status_code == 303


async def test_posted_money_is_reversed_and_both_are_shown_with_their_entries(desk: Desk) -> None:
    lines = [NewEntry(desk.accounts[1], Decimal("700.00"), Direction.DEBIT),
             NewEntry(desk.accounts[2], Decimal("700.00"), Direction.CREDIT)]  # fmt: skip

    async def flag(tx: Tx) -> UUID:
        posted = await ledger.post(tx, Posting("wire 7", lines))
        trace = [{"ruleId": str(posted.id), "version": 1, "name": "Odd", "outcome": "true", "conditions": {
            "field": "amount", "op": "gt", "value": "500.00", "fact": "700.00", "outcome": "true"}}]  # fmt: skip
        (made,) = await opening.open_cases(tx, Kind.AML, "aml-screening", [store.NewCase(
            None, posted.id, None, 1, "REVIEW", Severity.MEDIUM, {"amount": "700.00"}, [{"name": "Odd"}], [], trace,
            Decimal("700.00"), "PLN", None, False, 72)])  # fmt: skip
        return made.id

    id = await desk.db.run(flag)
    cora = await desk.officer()
    page = main(await cora.get(f"/console/cases/{id}"))
    for words in ("money that was posted", "Posted: wire 7", "Odd", "amount is more than 500.00 yes it is 700.00"):
        assert words in page, words
    await decide(cora, id, "REJECT", "SUSPECTED_LAUNDERING")
    page = main(await cora.get(f"/console/cases/{id}"))
    for words in ("what was posted is reversed", "Posted: wire 7", "Reverses:", "REVERSED"):
        assert words in page, words
    assert desk.case(id)["effect"] == "REVERSED"


async def test_what_the_books_refuse_is_said_and_stays_in_the_timeline(desk: Desk) -> None:
    """The money has gone on: nothing can be reversed."""

    async def flag(tx: Tx) -> UUID:
        def move(debit: UUID, credit: UUID) -> list[NewEntry]:
            amount = Decimal("700.00")
            return [NewEntry(debit, amount, Direction.DEBIT), NewEntry(credit, amount, Direction.CREDIT)]

        posted = await ledger.post(tx, Posting("wire 8", move(desk.accounts[1], desk.accounts[2])))
        await ledger.post(tx, Posting("gone on", move(desk.accounts[2], desk.accounts[0])))
        (made,) = await opening.open_cases(tx, Kind.AML, "aml-screening", [store.NewCase(
            None, posted.id, None, 1, "REVIEW", Severity.LOW, {}, [], [], [], Decimal("700.00"), "PLN", None, False,
            72)])  # fmt: skip
        return made.id

    id = await desk.db.run(flag)
    cora = await desk.officer()
    answer = await decide(cora, id, "REJECT", "STRUCTURING")
    assert answer.status_code == 303
    page = await cora.get(answer.headers["location"])
    assert "notice bad" in page.text
    assert "The books do not allow it, and the case is as it was" in main(page)
    assert "tried to decide, and the books did not allow it" in main(page)
    assert desk.case(id)["status"] == "OPEN"


async def test_two_officers_at_once_decide_once(desk: Desk) -> None:
    cora, carl = await desk.officer(), await desk.officer("carl")
    answers = await asyncio.gather(
        *(decide(one, desk.small, word, "OTHER") for one, word in ((cora, "APPROVE"), (carl, "REJECT")) * 3)
    )
    assert sorted(answer.status_code for answer in answers) == [303, 409, 409, 409, 409, 409]
    assert [kind for kind, _ in desk.lines(desk.small)].count("RESOLVED") == 1
    assert len(desk.audited()) == 1


class Slow:
    """A copilot that never answers."""

    name = "slow"

    async def explain(self, brief: Brief) -> str:
        """Never."""
        await asyncio.Event().wait()
        return ""


class Broken:
    """A copilot that fails."""

    name = "broken"

    async def explain(self, brief: Brief) -> str:
        """Fails."""
        raise RuntimeError("no model")


class Hostile:
    """A copilot that would run something in the officer's browser."""

    name = HOSTILE

    async def explain(self, brief: Brief) -> str:
        """Markup."""
        return HOSTILE


@pytest.mark.parametrize(
    ("copilot", "said"),
    [(Slow(), "The copilot did not answer (too slow)"), (Broken(), "The copilot did not answer (failed)"),
     (Hostile(), "check it against the rules below")],
)  # fmt: skip
async def test_the_page_is_there_whatever_the_copilot_does(
    db: Database, dsn: str, tmp_path: Path, copilot: Any, said: str
) -> None:
    plugged = Duly()
    for section in (payments_console, ledger_console, decisions_console):
        section.register(plugged)
    console.register(plugged, copilot)
    accounts = await db.run(fill)
    id = await db.run(lambda tx: pay(tx, accounts, "2000.00"))
    async with serving(db, tmp_path, plugged) as site:
        page = await (await site.signed_in("cora")).get(f"/console/cases/{id}")
        assert page.status_code == 200
        assert said in main(page)
        assert "2000.00 PLN" in main(page)
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text


async def test_stored_text_is_shown_and_never_runs(desk: Desk) -> None:
    cora = await desk.officer()
    await post(cora, "cases.comment", id=str(desk.small), text=f"{HOSTILE}\nsecond line")
    await post(cora, "cases.assign", id=str(desk.small), assignee=HOSTILE)
    for path in ("", f"/{desk.small}"):
        page = await cora.get(f"/console/cases{path}")
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text
        assert "&lt;script&gt;alert(1)" in page.text


async def test_a_long_timeline_is_paged(desk: Desk) -> None:
    async def talk(tx: Tx) -> None:
        for number in range(130):
            await service.comment(tx, desk.small, text=f"word-{number}-", actor="carl")

    await desk.db.run(talk)
    cora = await desk.officer()
    latest = await cora.get(f"/console/cases/{desk.small}")
    assert "word-129-" in latest.text
    assert "word-3-" not in latest.text
    following = re.search(r'href="(/console/cases/[^"]+before=\d+)#timeline"', latest.text)
    assert following is not None
    earlier = await cora.get(following[1])
    assert "word-3-" in earlier.text
    assert "word-129-" not in earlier.text
