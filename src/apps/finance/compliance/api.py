"""The routes of compliance, for officers alone."""

# no "from __future__ import annotations": the routes are made in a function, and FastAPI finds names of modules only

import json
from typing import Annotated
from uuid import UUID

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from apps.finance.compliance import resolving, service
from apps.finance.compliance.copilot import Copilot, Explainer
from apps.finance.compliance.model import (
    LONGEST_REFERENCE,
    Case,
    CaseFile,
    Kind,
    ReasonCode,
    Severity,
    Status,
    Verdict,
    check_stranger,
)
from apps.finance.compliance.resolving import Decided
from apps.finance.compliance.service import Filters
from apps.finance.compliance.views import (
    CaseDetail,
    CasePage,
    CaseView,
    LineView,
    TimelinePage,
    show_case,
    show_detail,
    show_line,
)
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import Transaction
from apps.finance.payments import service as payments
from apps.finance.payments.model import Payment
from apps.shared.text import EXACT, PageSize, Prose
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.db import Database, Tx
from duly.errors import DulyError
from duly.http import RequestTx, Router
from duly.http.problems import MEDIA_TYPE, problem

SCOPE, OFFICER = "compliance:resolve", "COMPLIANCE_OFFICER"
Officer = Annotated[Principal, require(SCOPE, OFFICER)]
Person = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=EXACT)]
LineNumber = Annotated[int, Field(ge=1, le=2_147_483_647)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class NewResolution(_Body):
    """APPROVE releases what is held, and leaves what was posted; REJECT voids the hold, or reverses the transaction."""

    decision: Verdict
    reason_code: ReasonCode
    reason: Prose


class Assignment(_Body):
    """Who is to work on it."""

    assignee: Person


class NewComment(_Body):
    """For the other officers."""

    text: Prose


class NewEvidence(_Body):
    """The name under which somebody else keeps it; nothing of it is kept here."""

    reference: Annotated[str, Field(min_length=1, max_length=LONGEST_REFERENCE)]


class Reason(_Body):
    """Why."""

    reason: Prose


def create_router(copilot: Copilot | None = None) -> Router:
    """The routes; a ``copilot`` explains cases, and without one the built-in does."""
    router = Router(prefix="/v1/compliance", tags=["compliance"])
    explainer = Explainer(copilot)

    @router.get("/cases")
    async def list_cases(
        caller: Officer,
        tx: RequestTx,
        status: Status | None = None,
        kind: Kind | None = None,
        severity: Severity | None = None,
        assignee: Person | None = None,
        overdue: bool = False,
        before: UUID | None = None,
        limit: PageSize = 50,
    ) -> CasePage:
        """A page of the queue; of cases about one's own payments nobody hears here."""
        filters = Filters(status, kind, severity, assignee, overdue, hidden_from=caller.subject)
        items, following = await service.list_cases(tx, filters, before=before, limit=limit)
        return CasePage(items=[show_case(case) for case in items], next=following)

    @router.get("/cases/{case_id}")
    async def read_case(case_id: UUID, caller: Officer, request: Request) -> CaseDetail:
        """One of them, with everything that is known of it, and why it is there in words."""
        db: Database = request.app.state.db
        async with db.transaction() as tx:
            file = await service.read_case(tx, case_id)
            check_stranger(file.case, caller.subject)
            transaction, payment = await _read_about(tx, file)
        explanation = await explainer.explain(file.case, file.alert)  # nothing is open, and nothing is held meanwhile
        return show_detail(file, transaction, payment, explanation)

    @router.get("/cases/{case_id}/timeline")
    async def read_timeline(
        case_id: UUID, caller: Officer, tx: RequestTx, before: LineNumber | None = None, limit: PageSize = 50
    ) -> TimelinePage:
        """A page of what happened, in order."""
        check_stranger(await service.find_case(tx, case_id), caller.subject)
        lines, following = await service.read_timeline(tx, case_id, before=before, limit=limit)
        items: list[LineView] = [show_line(line) for line in lines]
        return TimelinePage(items=items, next=following)

    _add_work(router)
    _add_decisions(router)
    return router


def _add_work(router: Router) -> None:
    """What officers do with a case before they decide it."""

    @router.post("/cases/{case_id}/claim")
    async def claim_case(case_id: UUID, caller: Officer, tx: RequestTx) -> CaseView:
        """Take it; 409 when somebody else has it."""
        return show_case(await service.claim(tx, case_id, actor=caller.subject))

    @router.post("/cases/{case_id}/unclaim")
    async def unclaim_case(case_id: UUID, caller: Officer, tx: RequestTx) -> CaseView:
        """Give it back."""
        return show_case(await service.unclaim(tx, case_id, actor=caller.subject))

    @router.post("/cases/{case_id}/assign")
    async def assign_case(case_id: UUID, new: Assignment, caller: Officer, tx: RequestTx) -> CaseView:
        """Give it to somebody, whoever had it."""
        return show_case(await service.assign(tx, case_id, assignee=new.assignee, actor=caller.subject))

    @router.post("/cases/{case_id}/comments", status_code=201)
    async def comment_case(case_id: UUID, new: NewComment, caller: Officer, tx: RequestTx) -> CaseView:
        """Say something about it."""
        return show_case(await service.comment(tx, case_id, text=new.text, actor=caller.subject))

    @router.post("/cases/{case_id}/evidence", status_code=201)
    async def add_evidence(case_id: UUID, new: NewEvidence, caller: Officer, tx: RequestTx) -> CaseView:
        """Say where something is kept that speaks for a decision."""
        return show_case(await service.add_evidence(tx, case_id, reference=new.reference, actor=caller.subject))


def _add_decisions(router: Router) -> None:
    """How a case ends, and begins again."""

    @router.post("/cases/{case_id}/resolve", response_model=CaseView)
    async def resolve_case(
        case_id: UUID, new: NewResolution, caller: Officer, tx: RequestTx, request: Request
    ) -> Response:
        """Decide it; above an amount, propose how. 409 when the books do not allow it: the timeline says so, too."""
        decided = await resolving.resolve(
            tx, case_id, decision=new.decision, reason_code=new.reason_code, reason=new.reason, actor=caller.subject
        )
        return _answer(decided, request)

    @router.post("/cases/{case_id}/confirm", response_model=CaseView)
    async def confirm_case(case_id: UUID, caller: Officer, tx: RequestTx, request: Request) -> Response:
        """Agree with what another officer has proposed: it is decided so."""
        return _answer(await resolving.confirm(tx, case_id, actor=caller.subject), request)

    @router.post("/cases/{case_id}/refuse")
    async def refuse_case(case_id: UUID, why: Reason, caller: Officer, tx: RequestTx) -> CaseView:
        """Do not agree with what is proposed, or take one's own proposal back: it is open again."""
        return show_case(await resolving.refuse(tx, case_id, reason=why.reason, actor=caller.subject))

    @router.post("/cases/{case_id}/reopen", status_code=201)
    async def reopen_case(
        case_id: UUID, why: Reason, caller: Officer, tx: RequestTx, response: Response
    ) -> CaseView:  # fmt: skip
        """A new case that follows one that has ended; the old one stays as it is."""
        made = await service.reopen(tx, case_id, reason=why.reason, actor=caller.subject)
        response.headers["Location"] = f"/v1/compliance/cases/{made.id}"
        return show_case(made)


async def _read_about(tx: Tx, file: CaseFile) -> tuple[Transaction | None, Payment | None]:
    """The transaction and the payment that a case is about."""
    case = file.case
    payment = await payments.find_payment(tx, case.payment_id) if case.payment_id else None
    posted = case.transaction_id or (payment.transaction_id if payment else None)
    return (await ledger.read_transaction(tx, posted) if posted else None), payment


def _answer(decided: Decided, request: Request) -> Response:
    if decided.refusal is not None:
        return _refused(decided.case, decided.refusal, request)
    return JSONResponse(show_case(decided.case).model_dump(mode="json", by_alias=True))


def _refused(case: Case, refusal: DulyError, request: Request) -> Response:
    """A problem that is an answer, and not a rollback: the line of the timeline and the key are kept."""
    correlation_id = request.scope.get("state", {}).get("correlation_id")
    said = problem(
        409, title="The books do not allow this decision now", kind="urn:duly:problem:resolution-refused",
        detail=f"the case stays {case.status.value}: {refusal}",
        instance=f"urn:uuid:{correlation_id}" if correlation_id else "",
    )  # fmt: skip
    members = {"caseId": str(case.id), "caseStatus": case.status.value}
    return JSONResponse({**json.loads(bytes(said.body)), **members}, 409, media_type=MEDIA_TYPE)
