"""The use cases of payments: each gets a transaction and never ends it.

A payment's posting puts the money on the recipient's account, and holds it there: it cannot be spent while it may
still go back, so that giving it back can never overdraw anybody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import structlog

from apps.finance.decisions import service as decisions
from apps.finance.decisions.model import Observation
from apps.finance.decisions.model import Outcome as Decided
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import (
    Account,
    AccountClosed,
    AccountNotFound,
    AccountStatus,
    InsufficientFunds,
    UnknownAccount,
    at_path,
)
from apps.finance.payments import effects, events, model, store
from apps.finance.payments.effects import ASK, EXPIRE_REVIEW, RETURN, SEND
from apps.finance.payments.effects import returned_reason as returned_reason
from apps.finance.payments.hearing import doubt, listen, tell_reference
from apps.finance.payments.model import (
    INSUFFICIENT_BALANCE,
    RETURN_WAIT,
    REVIEW_WINDOW,
    SCREENING,
    VALIDITY,
    Callback,
    CallbackDealtWith,
    CallbackNotFound,
    Delivery,
    DifferentSides,
    Heard,
    HistoryLine,
    NotResolvable,
    Order,
    Payment,
    PaymentNotFound,
    Question,
    Report,
    Resolution,
    SelfPayment,
    Source,
    State,
    WrongCurrency,
    is_worrying,
    may_arrive_until,
    speaks_of_another,
    wait_before_asking,
)
from apps.finance.payments.reviews import expire_review as expire_review
from apps.finance.payments.reviews import lock as lock
from apps.finance.payments.reviews import lock_held as lock_held
from apps.finance.payments.reviews import recall as recall
from apps.finance.payments.reviews import reject as reject
from apps.finance.payments.reviews import release as release
from apps.finance.payments.reviews import said
from apps.shared.money import LARGEST_EXACT, BadAmount, fit, show
from duly import NewJob, Tx, cancel, emit, find_queued, schedule, schedule_many
from duly.errors import DulyError
from duly.failpoints import failpoint
from duly.ids import parse_uuid, uuid7
from duly.operate.alerts import raise_alert

log = structlog.get_logger("apps.payments")
RULE_SET = "payment-screening"
STREAM = "payments"
RETRY_MORE, RECOVER_MORE = "payments.retry-more", "payments.recover-more"
RETRY_BATCH = 100
IDLE = timedelta(minutes=15)
OPEN_PAGE = 1_000
OPEN_PAGES = 20  # in one commit
FIRST = UUID(int=0)
HOLD_MARGIN = timedelta(days=1)  # a review ends before its hold does
CALLBACKS_KEPT_DAYS = 400
FORGET_LIMIT = 10_000
WAITED_FOR = {
    State.PENDING_REVIEW: (EXPIRE_REVIEW,), State.PROCESSING: (SEND, ASK), State.UNKNOWN: (ASK,),
    State.RETURNING: (RETURN,),
}  # fmt: skip
"""The jobs of which an open payment has one, by its state; the last is the one that can be made up for."""


TellHeld = Callable[[Tx, events.PaymentPendingReview], Awaitable[None]]


@dataclass(frozen=True)
class Initiated:
    """A payment, and the error that its initiator hears although it is kept."""

    payment: Payment
    has_cover: bool = True


# -- beginning -------------------------------------------------------------------------------------------------------


async def initiate(
    tx: Tx, *, from_id: UUID, to_id: UUID, amount: Decimal, currency: str, by: str, provider: str, tell: TellHeld
) -> Initiated:
    """Screen, hold or post, and send (F5); what the rules refuse, or what has no cover, is kept and told.

    ``tell`` hears in the same transaction of what the rules want a person to decide.
    """
    if from_id == to_id:
        raise at_path(SelfPayment("a payment goes to another account"), "$.to")
    if not amount.is_finite() or not 0 < amount <= LARGEST_EXACT:
        raise at_path(BadAmount(f"an amount is above zero and at most {LARGEST_EXACT}"), "$.amount")
    amount = fit(amount, currency, path="$.amount")
    await store.take_turn(tx, from_id)
    payer, payee = await _read_accounts(tx, from_id, to_id, currency)
    values: dict[str, Any] = {
        "id": uuid7(), "from_account_id": from_id, "to_account_id": to_id, "amount": amount, "currency": currency,
        "initiated_by": by, "provider": provider, "bank_key": uuid7(), "state": State.PROCESSING, "reason": None,
        "decision_id": None, "review_hold_id": None, "incoming_hold_id": None, "transaction_id": None, "delivery": None,
    }  # fmt: skip
    available = (await ledger.get_balance(tx, from_id)).available
    if available is None or available < amount:
        return await _refuse_uncovered(tx, values)
    decision = await decisions.evaluate(
        tx,
        RULE_SET,
        {
            "paymentId": str(values["id"]), "amount": amount, "currency": currency, "from": str(from_id),
            "to": str(to_id), "fromType": payer.type.value, "toType": payee.type.value, "initiatedBy": by,
        },
        subject=str(values["id"]),
    )  # fmt: skip
    values["decision_id"] = decision.id
    failpoint("handler.mid")
    if decision.verdict.decision is Decided.REJECT:
        return Initiated(await effects.create(tx, {**values, "state": State.REJECTED, "reason": SCREENING}))
    try:
        if decision.verdict.decision is Decided.REVIEW:
            until = decision.at + REVIEW_WINDOW + HOLD_MARGIN
            hold = await ledger.place_hold(
                tx, from_id, amount=amount, reference=f"payment {values['id']} review", until=until
            )
            values |= {"state": State.PENDING_REVIEW, "review_hold_id": hold.id}
        else:
            values |= await effects.post(tx, values, payer, now=decision.at)
    except InsufficientFunds:  # somebody else was quicker since we looked
        return await _refuse_uncovered(tx, values)
    except DulyError as refused:
        raise _at_body(refused) from None
    await decisions.observe(
        tx,
        Observation(STREAM, (str(from_id),), amount, str(to_id)),
        Observation(STREAM, (str(from_id), currency), amount),
    )
    payment = await effects.create(tx, values)
    if payment.state is State.PENDING_REVIEW:
        await tell(tx, effects.held(payment))
    return Initiated(payment)


# -- sending, asking, hearing ----------------------------------------------------------------------------------------


async def begin_sending(tx: Tx, payment_id: UUID) -> Order | None:
    """Count one more try before the bank is called; None when there is nothing to send (any more).

    A try that began and of which nothing was heard since, because a worker died over it, is not repeated: the bank is
    asked.
    """
    found = await lock(tx, payment_id)
    was = found.payment
    if was.contradicted_at is not None:
        return None
    if was.delivery is Delivery.UNDER_WAY:
        await listen(tx, found, Heard(Report.UNCLEAR, Source.SEND, attempt=was.attempts))
    if was.delivery is not Delivery.DUE:
        return None
    if (reversal_id := (await store.lock_posting(tx, was)).reversal_id) is not None:
        await effects.end_reversed(tx, was, reversal_id)
        return None
    payment, valid_until = await store.begin_sending(tx, was, validity=VALIDITY)
    return Order(
        payment.id, payment.bank_key, payment.attempts, payment.provider, payment.from_account_id,
        payment.to_account_id, show(payment.amount, payment.currency), payment.currency, valid_until,
    )  # fmt: skip


async def begin_asking(tx: Tx, payment_id: UUID) -> Question | timedelta | None:
    """What the bank is to be asked; or how long to wait; None when there is nothing to ask."""
    found = await lock(tx, payment_id)
    payment = found.payment
    if not payment.is_open or payment.contradicted_at is not None:
        return None
    if payment.delivery is Delivery.DUE and found.now - payment.since < IDLE:
        return IDLE
    if payment.attempts and (rest := may_arrive_until(payment) - found.now) > timedelta(0):
        return rest
    return Question(payment, found.now)


async def note_answer(tx: Tx, payment_id: UUID, heard: Heard) -> tuple[Payment, timedelta | None]:
    """What the bank said to a request or a question, and when to ask (again); None when that is not needed."""
    found = await lock(tx, payment_id)
    payment = await listen(tx, found, heard)
    if not payment.is_open or payment.contradicted_at is not None:
        return payment, None
    if heard.source is Source.ASK and is_worrying(payment, now=found.now):
        log.warning("payment_open_for_long", payment_id=str(payment.id), state=payment.state.value)
        await raise_alert(
            tx,
            subject=f"payments.open:{payment.id}",
            message=f"payment {payment.id} is {payment.state.value} since {payment.since:%Y-%m-%d %H:%M} UTC: "
            "ask the bank",
        )
    return payment, wait_before_asking(payment, now=found.now)


async def receive(tx: Tx, callback: Callback) -> str:
    """What a provider called to say (F6): applied, or ignored because it is old, or kept for a person."""
    by_us, by_bank = parse_uuid(callback.client_ref or ""), parse_uuid(callback.payment_ref)
    keys = [key for key in (by_us, by_bank) if key is not None]
    found, named = await store.lock_referred(tx, callback.provider, reference=callback.payment_ref, keys=keys)
    report = callback.report
    if found is None:
        return await _keep(tx, callback, "unknown_reference", None)
    payment = found.payment
    if named > 1 or (callback.client_ref is not None and by_us != payment.bank_key):
        return await _keep(tx, callback, "names_differ", None)
    if report is None:
        return await _keep(tx, callback, "unknown_status", found)
    if speaks_of_another(payment, amount=callback.amount, currency=callback.currency):
        return await _keep(tx, callback, "amount_differs", found)
    reference = callback.payment_ref if by_bank != payment.bank_key else None
    if None not in (reference, payment.provider_ref) and reference != payment.provider_ref:
        await tell_reference(tx, payment, "the bank called with a second reference")
        return await _keep(tx, callback, "reference_differs", found)
    failpoint("handler.mid")
    heard = Heard(
        report, Source.CALLBACK, reference, callback.reason, amount=callback.amount, currency=callback.currency
    )
    after = await listen(tx, found, heard)
    return "applied" if after.version != payment.version else "ignored"


# -- a person decides ------------------------------------------------------------------------------------------------


async def resolve(tx: Tx, payment_id: UUID, *, resolution: Resolution, actor: str, reason: str) -> Payment:
    """End what was contradicted, or does not go back by itself; once. Its alerts are closed with it."""
    found = await lock(tx, payment_id)
    was = found.payment
    after = model.resolve(was, resolution)
    is_complete = after.state is State.COMPLETED and was.state is not State.COMPLETED
    if is_complete and (await store.lock_posting(tx, was)).reversal_id is not None:
        raise NotResolvable("its posting was reversed, so the recipient has nothing: return it, and post anew")
    saved = await effects.apply(
        tx, was, after, cause="resolve", detail=said(actor, f"{resolution.value}: {reason}"),
        closing=effects.Closing(actor, reason),
    )  # fmt: skip
    for name in (ASK, RETURN):
        await cancel(tx, name, payment_id)
    if saved.state is State.RETURNING:
        await schedule(tx, RETURN, payment_id, found.now + RETURN_WAIT)
    return saved


async def dismiss_callback(tx: Tx, callback_id: UUID, *, actor: str, reason: str) -> store.Unmatched:
    """A person has dealt with a callback that was kept; once."""
    dismissed = await store.dismiss_callback(tx, callback_id, actor=actor, reason=reason)
    if dismissed is not None:
        return dismissed
    if await store.has_callback(tx, callback_id):
        raise CallbackDealtWith("the callback was dealt with before")
    raise CallbackNotFound(f"no callback has the id {callback_id}")


# -- trying again, looking after -------------------------------------------------------------------------------------


async def retry_due(tx: Tx) -> tuple[int, bool]:
    """Send again what is due (F7): four statements, however many there are. How many, and whether there may be more."""
    claimed = await store.claim_due(tx, limit=RETRY_BATCH)
    failpoint("handler.mid")
    if claimed:
        await schedule_many(tx, [NewJob(SEND, payment_id) for payment_id, _ in claimed])
        await emit(tx, *(events.PaymentRetried(payment_id=one, attempts=attempts) for one, attempts in claimed))
    has_more = len(claimed) == RETRY_BATCH
    if has_more:
        await schedule(tx, RETRY_MORE, "next")
    return len(claimed), has_more


async def recover(tx: Tx, *, after: UUID = FIRST) -> tuple[int, bool]:
    """Give what waits without a job one that goes on with it: its own was lost, or is a dead letter.

    How many, and whether there are more to look at: another job goes on where this one stopped.
    """
    recovered = 0
    for _ in range(OPEN_PAGES):
        page = await store.read_open(tx, after=after, idle=IDLE, limit=OPEN_PAGE)
        recovered += await _recover(tx, [(one, state) for one, state, is_idle in page if is_idle])
        if len(page) < OPEN_PAGE:
            return recovered, False
        after = page[-1][0]
    await schedule(tx, RECOVER_MORE, "next", payload={"after": str(after)}, on_conflict="keep")
    return recovered, True


async def _recover(tx: Tx, idle: Sequence[tuple[UUID, State]]) -> int:
    lost: list[NewJob] = []
    for state, names in WAITED_FOR.items():
        mine = [payment_id for payment_id, its in idle if its is state]
        queued = {one for name in names for one in await find_queued(tx, name, mine)} if mine else set()
        lost += [NewJob(names[-1], one) for one in mine if str(one) not in queued]
    if lost:
        log.warning("payments_recovered", count=len(lost), payment_ids=[str(job.entity_id) for job in lost[:100]])
        await schedule_many(tx, lost, on_conflict="keep")
    return len(lost)


async def return_money(tx: Tx, payment_id: UUID) -> bool:
    """Try once more to give back what the ledger refused to; whether there is nothing left to try."""
    found = await lock(tx, payment_id)
    was = found.payment
    if was.state is not State.RETURNING or was.contradicted_at is not None:
        return True
    after = await effects.give_back(tx, was.move(State.PERMANENTLY_FAILED, reason=was.reason))
    if after.state is State.RETURNING:
        return False
    await effects.apply(tx, was, after, cause="return", closing=effects.Closing(RETURN, "the money is back"))
    return True


async def forget_callbacks(tx: Tx, *, days: int = CALLBACKS_KEPT_DAYS, limit: int = FORGET_LIMIT) -> int:
    """Drop old ones that nobody could match; how many. Payments and their history stay, as the journal does."""
    return await store.forget_callbacks(tx, days=days, limit=limit)


# -- looking ---------------------------------------------------------------------------------------------------------


async def read_payment(tx: Tx, payment_id: UUID) -> tuple[Payment, list[HistoryLine]]:
    """One by its id, with its history."""
    return await find_payment(tx, payment_id), await store.read_history(tx, payment_id)


async def find_payment(tx: Tx, payment_id: UUID) -> Payment:
    """One by its id."""
    found = await store.find_payment(tx, payment_id)
    if found is None:
        raise PaymentNotFound(f"no payment has the id {payment_id}")
    return found


async def find_posted(tx: Tx, transaction_ids: Sequence[UUID]) -> dict[UUID, Payment]:
    """The payments whose postings these are, by posting."""
    found = await store.find_posted(tx, transaction_ids)
    return {payment.transaction_id: payment for payment in found if payment.transaction_id is not None}


async def list_payments(
    tx: Tx, *, state: State | None = None, before: UUID | None = None, limit: int = 50
) -> tuple[list[Payment], UUID | None]:
    """A page, the newest first, and where the next one begins."""
    found = await store.list_payments(tx, state=state, before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1].id if len(found) > limit else None


async def list_unmatched(
    tx: Tx, *, is_open: bool = True, before: UUID | None = None, limit: int = 50
) -> tuple[list[store.Unmatched], UUID | None]:
    """A page of callbacks that a person should look at, and where the next one begins."""
    found = await store.list_unmatched(tx, is_open=is_open, before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1].id if len(found) > limit else None


async def _refuse_uncovered(tx: Tx, values: dict[str, Any]) -> Initiated:
    refused = {**values, "state": State.FAILED, "reason": INSUFFICIENT_BALANCE}
    return Initiated(await effects.create(tx, refused), has_cover=False)


async def _keep(tx: Tx, callback: Callback, problem: str, found: store.Locked | None) -> str:
    """For a person; and what it speaks of is asked about before anything is sent."""
    log.warning("payment_callback_kept", provider=callback.provider, event_id=callback.event_id, problem=problem)
    await store.keep_callback(tx, callback, problem=problem, payment_id=found.payment.id if found else None)
    about = f":{found.payment.id}" if found else ""
    await raise_alert(
        tx,
        subject=f"payments.callbacks.{callback.provider}{about}",
        message=f"a callback of {callback.provider} is kept for a person: {problem} (event {callback.event_id})",
    )
    if found is not None:
        await doubt(tx, found, problem)
    return "kept"


async def _read_accounts(tx: Tx, from_id: UUID, to_id: UUID, currency: str) -> tuple[Account, Account]:
    """Both, if money can go from one to the other."""
    found = []
    for account_id, path in ((from_id, "$.from"), (to_id, "$.to")):
        try:
            account = await ledger.read_account(tx, account_id)
        except AccountNotFound:
            raise at_path(UnknownAccount(f"no account has the id {account_id}"), path) from None
        if account.status is not AccountStatus.ACTIVE:
            raise at_path(AccountClosed("the account is closed"), path)
        if account.currency != currency:
            raise at_path(WrongCurrency(f"the account has the currency {account.currency}"), path)
        found.append(account)
    payer, payee = found
    if payer.type.side != payee.type.side:
        reason = f"money does not go from an account of type {payer.type.value} to one of type {payee.type.value}"
        raise at_path(DifferentSides(reason), "$.to")
    return payer, payee


def _at_body(refused: DulyError) -> DulyError:
    """What the ledger refused about a line, at the member of the request that it came from."""
    where = refused.faults[0].path if refused.faults else ""
    if where.endswith(".amount"):
        return at_path(refused, "$.amount")
    return at_path(refused, "$.from" if "entries[0]" in where else "$.to")
