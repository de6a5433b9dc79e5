"""The routes of payments, and where banks call."""

# no "from __future__ import annotations": the routes are made in a function, and FastAPI finds names of modules only

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from apps.finance.payments import service
from apps.finance.payments.model import (
    INSUFFICIENT_BALANCE,
    TOLD_CAUSES,
    UNTOLD_CAUSES,
    Callback,
    HistoryLine,
    Payment,
    Resolution,
    State,
    is_reference,
    tell_reason,
)
from apps.finance.payments.service import TellHeld
from apps.finance.payments.store import Unmatched
from apps.shared.money import Currency, ExactAmount, show
from apps.shared.text import EXACT, Name, PageSize
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.errors import Fault, Invalid, NotFound
from duly.http import Received, Receiver, RequestTx, Router
from duly.http.problems import MEDIA_TYPE, problem
from duly.settings import Settings
from duly.webhooks.receive import Scheme

SCOPE, INITIATOR = "payments:initiate", "PAYMENTS_INITIATOR"
ADMIN_SCOPE, ADMIN = "payments:admin", "PAYMENTS_ADMIN"
Initiator = Annotated[Principal, require(SCOPE, INITIATOR)]
Admin = Annotated[Principal, require(ADMIN_SCOPE, ADMIN)]
SIGNED = Scheme.plain(signature_header="X-Provider-Signature", timestamp_header="X-Provider-Timestamp")
"""Hex of HMAC-SHA256 over ``timestamp.body``."""
SHOWN = (
    "id", "currency", "state", "reason", "retryable", "attempts", "next_retry_at", "provider", "provider_ref",
    "transaction_id", "reversal_id", "decision_id", "contradicted_at", "version", "created_at", "updated_at",
)  # fmt: skip
CALLBACK_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["providerEventId", "paymentRef", "status"],
                "properties": {
                    "providerEventId": {"type": "string", "minLength": 1, "maxLength": 255},
                    "paymentRef": {
                        "type": "string",
                        "maxLength": 200,
                        "description": "The bank's reference, or the key we gave it.",
                    },
                    "clientRef": {"type": "string", "description": "The key we gave it."},
                    "status": {"type": "string", "description": "PENDING, SETTLED or FAILED."},
                    "retryable": {"type": ["boolean", "null"]},
                    "amount": {"type": "string"},
                    "currency": {"type": "string"},
                    "reason": {"type": "string"},
                },
            }
        }
    },
}
_REASON = re.compile(r"[A-Za-z0-9_ .-]{1,60}")


class UnknownProvider(NotFound):
    """No bank of this name is plugged in."""


class BadCallback(Invalid):
    """The callback does not say what happened to which payment."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class _View(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class NewPayment(_Body):
    """Money from one account to another of the same currency."""

    from_: UUID = Field(alias="from")
    to: UUID
    amount: ExactAmount
    currency: Currency


class PaymentView(_View):
    """A payment; a ``retryable`` one that FAILED is sent again at ``nextRetryAt``.

    ``contradictedAt``: the bank and the books disagree, and nothing happens until a person resolves it.
    """

    id: UUID
    from_: UUID = Field(alias="from")
    to: UUID
    amount: str
    currency: str
    state: State
    reason: str | None
    retryable: bool
    attempts: int
    next_retry_at: datetime | None
    provider: str
    provider_ref: str | None
    transaction_id: UUID | None
    reversal_id: UUID | None
    decision_id: UUID | None
    contradicted_at: datetime | None
    version: int
    created_at: datetime
    updated_at: datetime


class HistoryView(_View):
    """One thing that happened; a line that changes no state is something that was noted."""

    number: int
    at: datetime
    from_state: State | None
    to_state: State
    cause: str
    detail: str | None


class PaymentDetail(PaymentView):
    """A payment, and what happened to it; ``hasMoreHistory``: there are older lines than these."""

    history: list[HistoryView]
    has_more_history: bool


class PaymentPage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[PaymentView]
    next: UUID | None


class UnmatchedView(_View):
    """A callback that fits no payment, or that nobody understands."""

    id: UUID
    provider: str
    event_id: str
    payment_ref: str
    client_ref: str | None
    status: str
    amount: str | None
    currency: str | None
    problem: str
    payment_id: UUID | None
    received_at: datetime
    matched_at: datetime | None
    dismissed_at: datetime | None
    dismissed_by: str | None
    dismiss_reason: str | None


class NewResolution(_Body):
    """RETURN: the money goes back. COMPLETE: the recipient has it."""

    outcome: Resolution
    reason: Name


class Dismissal(_Body):
    """Why a callback needs nothing more."""

    reason: Name


class UnmatchedPage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[UnmatchedView]
    next: UUID | None


class CallbackView(_View):
    """What became of a callback: applied, ignored (it is old), kept (for a person), or duplicate."""

    status: str


def _check_reference(name: str) -> str:
    if not is_reference(name):
        raise ValueError("this is no reference")
    return name


Reference = Annotated[str, AfterValidator(_check_reference)]


class _Called(BaseModel):
    """What a provider's body must say; whatever else it says is nobody's business here."""

    model_config = ConfigDict(extra="ignore", alias_generator=to_camel)

    payment_ref: Reference
    status: Annotated[str, StringConstraints(min_length=1, max_length=50, pattern=EXACT)]
    client_ref: Reference | None = None
    retryable: bool | None = Field(default=None, strict=True)
    amount: ExactAmount | None = None
    currency: Currency | None = None
    reason: Any = None


class Receivers:
    """A receiver for each bank; in development, some have a secret that everybody knows."""

    def __init__(self, development_secrets: Mapping[str, str]) -> None:
        self._secrets = development_secrets
        self._made: dict[tuple[str, str, str], Receiver] = {}

    def find(self, provider: str, settings: Settings) -> Receiver:
        """That of a bank that is plugged in."""
        if provider not in self._secrets:
            raise UnknownProvider("no such provider")
        key = (provider, settings.env, str(settings.data))  # the secrets in the database are sealed by a key in there
        if key not in self._made:
            known = settings.env == "development" and self._secrets[provider]
            secrets = [SecretStr(self._secrets[provider])] if known else []
            self._made[key] = Receiver(provider, scheme=SIGNED, event_id="providerEventId", secrets=secrets)
        return self._made[key]


def create_router(development_secrets: Mapping[str, str], *, provider: str, on_review: TellHeld) -> Router:
    """The routes; ``development_secrets`` names the banks that call, ``provider`` is where new payments go.

    ``on_review`` hears in the same transaction of each that a person has to decide about.
    """
    router = Router(prefix="/v1", tags=["payments"])
    receivers = Receivers(development_secrets)

    async def receive(provider_id: str, request: Request, tx: RequestTx) -> Received:
        settings = getattr(request.app.state, "settings", None) or Settings()
        return await receivers.find(provider_id, settings)(request, tx)

    @router.post("/payments", status_code=202, response_model=PaymentView)
    async def initiate_payment(new: NewPayment, caller: Initiator, tx: RequestTx, request: Request) -> Response:
        """Pay; 422 without cover: the payment is kept as FAILED all the same, and the answer says where."""
        made = await service.initiate(
            tx, from_id=new.from_, to_id=new.to, amount=new.amount, currency=new.currency, by=caller.subject,
            provider=provider, tell=on_review,
        )  # fmt: skip
        location = {"Location": f"/v1/payments/{made.payment.id}"}
        if not made.has_cover:
            return _without_cover(made.payment, request, location)
        return JSONResponse(_show(made.payment).model_dump(mode="json", by_alias=True), 202, headers=location)

    @router.get("/payments")
    async def list_payments(
        _caller: Initiator, tx: RequestTx, state: State | None = None, before: UUID | None = None, limit: PageSize = 50
    ) -> PaymentPage:
        """A page of them; with ``state``, of those in that state."""
        items, following = await service.list_payments(tx, state=state, before=before, limit=limit)
        return PaymentPage(items=[_show(payment) for payment in items], next=following)

    @router.get("/payments/callbacks/unmatched")
    async def list_unmatched(
        _caller: Initiator,
        tx: RequestTx,
        all_: Annotated[bool, Query(alias="all")] = False,
        before: UUID | None = None,
        limit: PageSize = 50,
    ) -> UnmatchedPage:
        """A page of callbacks that somebody should look at; with ``all=true``, also those that were dealt with."""
        items, following = await service.list_unmatched(tx, is_open=not all_, before=before, limit=limit)
        return UnmatchedPage(items=[_show_unmatched(one) for one in items], next=following)

    @router.get("/payments/{payment_id}")
    async def read_payment(payment_id: UUID, _caller: Initiator, tx: RequestTx) -> PaymentDetail:
        """One of them, with its history."""
        payment, history = await service.read_payment(tx, payment_id)
        lines = [_show_line(line) for line in history]
        more = {"history": lines, "has_more_history": bool(lines) and lines[0].number > 1}
        return PaymentDetail.model_validate(_values(payment) | more)

    @router.post(
        "/webhooks/payments/{provider_id}", openapi_extra={"x-idempotent": False, "requestBody": CALLBACK_BODY}
    )
    async def receive_callback(
        provider_id: str, received: Annotated[Received, Depends(receive)], tx: RequestTx
    ) -> CallbackView:
        """A bank says what became of a payment; its signature is the credential."""
        return CallbackView(status=await service.receive(tx, _read_callback(received)))

    _add_decisions(router)
    return router


def _add_decisions(router: Router) -> None:
    """What a person decides."""

    @router.post("/payments/callbacks/{callback_id}/dismiss")
    async def dismiss_callback(callback_id: UUID, why: Dismissal, caller: Admin, tx: RequestTx) -> UnmatchedView:
        """Somebody has dealt with it."""
        done = await service.dismiss_callback(tx, callback_id, actor=caller.subject, reason=why.reason)
        return _show_unmatched(done)

    @router.post("/payments/{payment_id}/resolve")
    async def resolve_payment(payment_id: UUID, new: NewResolution, caller: Admin, tx: RequestTx) -> PaymentView:
        """Decide what becomes of a payment that is contradicted, or RETURNING."""
        resolved = await service.resolve(
            tx, payment_id, resolution=new.outcome, actor=caller.subject, reason=new.reason
        )  # fmt: skip
        return _show(resolved)


def _read_callback(received: Received) -> Callback:
    body: Any = received.json()
    try:
        said = _Called.model_validate(body)
    except ValidationError as error:
        refused = BadCallback("the callback does not say what happened to which payment: see errors")
        refused.faults = tuple(
            Fault("body", "$" + "".join(f".{part}" for part in one["loc"]), "this is missing, or not as it must be")
            for one in error.errors(include_input=False, include_url=False)[:20]
        )
        raise refused from None
    reason = said.reason if isinstance(said.reason, str) and _REASON.fullmatch(said.reason) else None
    return Callback(
        received.provider, received.event_id, said.payment_ref, said.status, bool(said.retryable), said.client_ref,
        said.amount, said.currency, reason,
    )  # fmt: skip


def _without_cover(payment: Payment, request: Request, headers: Mapping[str, str]) -> Response:
    """A problem that is an answer, and not a rollback: the payment, its event and the key are kept."""
    correlation_id = request.scope.get("state", {}).get("correlation_id")
    fault = Fault("body", "$.amount", "the account does not have so much available")
    said = problem(
        422, title="The account does not have so much available", kind="urn:duly:problem:insufficient-balance",
        detail=f"the payment is kept as FAILED: {INSUFFICIENT_BALANCE}", faults=[fault],
        instance=f"urn:uuid:{correlation_id}" if correlation_id else "",
    )  # fmt: skip
    members = {"paymentId": str(payment.id), "state": payment.state.value, "reason": payment.reason}
    return JSONResponse({**json.loads(bytes(said.body)), **members}, 422, headers=dict(headers), media_type=MEDIA_TYPE)


def _show(payment: Payment) -> PaymentView:
    return PaymentView.model_validate(_values(payment))


def _values(payment: Payment) -> dict[str, Any]:
    values = {name: getattr(payment, name) for name in SHOWN} | {"reason": tell_reason(payment.reason)}
    ends = {"from": payment.from_account_id, "to": payment.to_account_id}
    return values | ends | {"amount": show(payment.amount, payment.currency)}


def _show_unmatched(one: Unmatched) -> UnmatchedView:
    return UnmatchedView(**vars(one) | {"amount": None if one.amount is None else str(one.amount)})


def _show_line(line: HistoryLine) -> HistoryView:
    return HistoryView(
        number=line.number, at=line.at, from_state=line.from_state, to_state=line.to_state,
        cause=TOLD_CAUSES.get(line.cause, line.cause),
        detail=None if line.cause in UNTOLD_CAUSES else tell_reason(line.detail),
    )  # fmt: skip
