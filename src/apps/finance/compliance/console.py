"""Cases in the console, for compliance officers and nobody else: the queue, and a case with all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from fastapi import Request
from fastapi.responses import Response

from apps.finance.compliance import service, store
from apps.finance.compliance.actions import ACTIONS, EFFECTS, ROLE
from apps.finance.compliance.copilot import Copilot, Explainer
from apps.finance.compliance.model import (
    REASON_CODES,
    CaseFile,
    Effect,
    Kind,
    Line,
    LineKind,
    Severity,
    Status,
    Verdict,
    check_stranger,
)
from apps.finance.compliance.service import Filters
from apps.finance.decisions.wording import OUTCOMES, say
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import Transaction
from apps.finance.payments import service as payments
from apps.finance.payments.model import HistoryLine, Payment
from apps.shared import money
from duly import Duly, Tx
from duly.console import Pages, Query, Section, Wrong, read, show, signed_in
from duly.errors import NotFound
from duly.ids import parse_uuid
from duly.operate.counts import CAP, Count

PAGE = 50
LINES = 100
ANY = "any"
STATUSES = tuple(status.value for status in Status)
KINDS = tuple(kind.value for kind in Kind)
SEVERITIES = tuple(severity.value for severity in reversed(Severity))
WORDS: Mapping[LineKind, str] = {
    LineKind.OPENED: "opened the case", LineKind.ASSIGNED: "assigned it", LineKind.CLAIMED: "claimed it",
    LineKind.UNCLAIMED: "gave it back", LineKind.COMMENTED: "commented", LineKind.EVIDENCE_ADDED: "added a reference",
    LineKind.OVERDUE: "found it overdue", LineKind.PROPOSED: "proposed a decision",
    LineKind.PROPOSAL_REFUSED: "refused the proposal", LineKind.PROPOSAL_WITHDRAWN: "took the proposal back",
    LineKind.RESOLUTION_REFUSED: "tried to decide, and the books did not allow it",
    LineKind.RESOLVED: "decided it", LineKind.EXPIRED: "found that the review had ended by itself",
}  # fmt: skip
TONES: Mapping[LineKind, str] = {
    LineKind.OVERDUE: "warn", LineKind.PROPOSED: "warn", LineKind.RESOLUTION_REFUSED: "bad", LineKind.RESOLVED: "good",
    LineKind.PROPOSAL_REFUSED: "bad",
}  # fmt: skip


@dataclass(frozen=True)
class About:
    """What a case is about."""

    payment: Payment | None
    history: list[HistoryLine]
    transactions: list[Transaction]


def register(app: Duly, copilot: Copilot | None = None) -> None:
    """Add the section; a ``copilot`` explains cases, and without one the built-in does."""
    templates, pages = Path(__file__).parent / "templates", create_pages(Explainer(copilot))
    app.include_console(
        Section("cases", "Cases", pages, templates=templates, roles=(ROLE,), is_closed=True, actions=ACTIONS)
    )


def create_pages(explainer: Explainer) -> Pages:
    """The queue and the case; each form of a case is on its page."""
    pages = Pages()
    pages.get("")(show_queue)

    @pages.get("/{id}")
    async def case(request: Request, id: UUID) -> Response:
        return await show_case(request, id, explainer)

    @pages.form(*(action.name for action in ACTIONS))
    async def case_again(request: Request, wrong: Wrong) -> Response:
        id = parse_uuid(wrong.given.get("id", ""))
        if id is None:
            raise NotFound("there is no such case")
        return await show_case(request, id, explainer, wrong)

    return pages


async def show_queue(request: Request) -> Response:
    """The queue: what is open, unless other filters are given.

    What is about a payment of one's own is not in it, nor in its numbers.
    """
    query, subject = Query(request), signed_in(request).subject
    status = query.choice("status", (*STATUSES, ANY)) or Status.OPEN.value
    kind, severity = query.choice("kind", KINDS), query.choice("severity", SEVERITIES)
    assignee, overdue, before = query.text("assignee"), query.text("overdue"), query.id("after")
    filters = Filters(
        Status(status) if status != ANY else None, Kind(kind) if kind else None,
        Severity(severity) if severity else None, assignee, overdue is not None, subject,
    )  # fmt: skip
    async with read(request) as look:
        found, following = await service.list_cases(look.tx, filters, before=before, limit=PAGE)
        waiting = [Status.OPEN, Status.PROPOSED]
        counted = await store.count_by_status(look.tx, waiting, hidden_from=subject, cap=CAP + 1)
        late = await store.count_overdue(look.tx, hidden_from=subject, cap=CAP + 1)
    chosen = {"status": status, "kind": kind, "severity": severity, "assignee": assignee, "overdue": overdue}
    return show(
        request, "cases_list.html", now=look.now, found=found, chosen=chosen, statuses=STATUSES, kinds=KINDS,
        severities=SEVERITIES, open_count=Count.of(counted.get(Status.OPEN, 0)),
        proposed_count=Count.of(counted.get(Status.PROPOSED, 0)), late_count=Count.of(late), after=following,
        is_first=before is None, money=money.show, me=subject,
    )  # fmt: skip


async def show_case(request: Request, id: UUID, explainer: Explainer, wrong: Wrong | None = None) -> Response:
    """One, with why it is there, what it is about, what happened to it, and what can be done.

    What was refused is said with what was typed. Nobody sees a case about a payment of their own.
    """
    before = Query(request).number("before")
    subject = signed_in(request).subject
    async with read(request) as look:
        found = await service.read_case(look.tx, id)
        check_stranger(found.case, subject)
        lines, earlier = await service.read_timeline(look.tx, id, before=before, limit=LINES)
        about = await _read_about(look.tx, found)
    explanation = await explainer.explain(found.case, found.alert)  # no transaction waits for it
    return show(
        request, "cases_one.html", now=look.now, one=found.case, alert=found.alert, reopened_as=found.reopened_as,
        lines=[(line, WORDS[line.kind], TONES.get(line.kind, ""), tell(line)) for line in lines], earlier=earlier,
        about=about, explanation=explanation, wrong=wrong, me=subject, money=money.show, say=say, words=OUTCOMES,
        codes={verdict.value: [code.value for code in REASON_CODES[verdict]] for verdict in Verdict},
        effects={effect.value: sentence for effect, sentence in EFFECTS.items()}, is_first=before is None,
        status=wrong.status if wrong else 200,
    )  # fmt: skip


async def _read_about(tx: Tx, found: CaseFile) -> About:
    """The payment and what was posted; what is not there any more is not shown."""
    payment: Payment | None = None
    history: list[HistoryLine] = []
    wanted = [found.case.transaction_id]
    if found.case.payment_id is not None:
        try:
            payment, history = await payments.read_payment(tx, found.case.payment_id)
            wanted += [payment.transaction_id, payment.reversal_id]
        except NotFound:
            payment = None
    transactions: list[Transaction] = []
    for transaction_id in dict.fromkeys(one for one in wanted if one is not None):
        try:
            posted = await ledger.read_transaction(tx, transaction_id)
        except NotFound:
            continue
        transactions.append(posted)
        if posted.reversed_by_id is not None and posted.reversed_by_id not in wanted:
            transactions.append(await ledger.read_transaction(tx, posted.reversed_by_id))
    return About(payment, history, transactions)


def tell(line: Line) -> list[tuple[str, str]]:
    """What a line of the timeline says, by name; ids and texts as they were kept."""
    names = {
        "text": "", "reference": "kept as", "assignee": "to", "decision": "decision", "reasonCode": "because of",
        "reason": "", "effect": "", "proposedBy": "proposed by", "reopens": "follows",
    }  # fmt: skip
    said = []
    for name, label in names.items():
        if line.detail.get(name) is not None:
            value = str(line.detail[name])
            if name == "effect" and value in set(Effect):
                value = EFFECTS[Effect(value)]
            said.append((label, value.replace("_", " ") if name == "reasonCode" else value))
    return said
