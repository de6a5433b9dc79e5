"""What payments does because it is time, and calling the bank: between two transactions, never inside one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from uuid import UUID

from apps.finance.payments import service
from apps.finance.payments.effects import ASK, EXPIRE_REVIEW, RETURN, SEND
from apps.finance.payments.gateways import Bank, Banks, NoBank
from apps.finance.payments.model import RETURN_WAIT, Heard, Payment, PaymentNotFound, Question
from apps.finance.payments.reviews import TellExpired
from duly import Cancel, Database, Done, Duly, Fail, JobContext, Outcome, Snooze, Then, Tx, schedule
from duly.failpoints import failpoint
from duly.ids import parse_uuid

AT_ONCE = 10
LONGEST_TRY = timedelta(seconds=60)
WITHOUT_BANK = timedelta(minutes=10)
RETRIES = 20  # of the job itself, when the database is away: what the bank answers is no failure of it
REST = "rest"  # the entity of a run that goes on where the one before it reached its limit
NO_ID = Fail("the job's entity is not a payment's id")


def register(app: Duly, banks: Banks, *, on_review_expired: TellExpired) -> None:
    """Add the jobs, and who hears of a review that nobody ended; what recurs has its schedule from the migration."""

    @app.job(SEND, limit=AT_ONCE, max_retries=RETRIES, timeout=LONGEST_TRY)
    async def send(ctx: JobContext, db: Database) -> Outcome | Then:
        payment_id = parse_uuid(ctx.entity_id or "")
        return NO_ID if payment_id is None else await _send(db, banks, payment_id)

    @app.job(ASK, limit=AT_ONCE, max_retries=RETRIES, timeout=LONGEST_TRY)
    async def ask(ctx: JobContext, db: Database) -> Outcome | Then:
        payment_id = parse_uuid(ctx.entity_id or "")
        return NO_ID if payment_id is None else await _ask(db, banks, payment_id)

    @app.job(RETURN, max_retries=RETRIES)
    async def return_money(ctx: JobContext, tx: Tx) -> Outcome:
        payment_id = parse_uuid(ctx.entity_id or "")
        if payment_id is None:
            return NO_ID
        if await service.return_money(tx, payment_id):
            return Done("the money is back, or a person decides")
        return Snooze(RETURN_WAIT, "the ledger does not take the money back yet")

    @app.job(EXPIRE_REVIEW, max_retries=RETRIES)
    async def expire_review(ctx: JobContext, tx: Tx) -> Outcome:
        payment_id = parse_uuid(ctx.entity_id or "")
        if payment_id is None:
            return NO_ID
        wait = await service.expire_review(tx, payment_id, tell=on_review_expired)
        return Snooze(wait, "it may still be reviewed") if wait else Done("no review is under way any more")

    @app.job("payments.retry")
    async def retry(tx: Tx) -> Done:
        return _describe(*await service.retry_due(tx))

    @app.job(service.RETRY_MORE)
    async def retry_more(tx: Tx) -> Done:
        return _describe(*await service.retry_due(tx))

    @app.job("payments.recover")
    async def recover(tx: Tx) -> Done:
        return _describe_recovery(*await service.recover(tx))

    @app.job(service.RECOVER_MORE)
    async def recover_more(ctx: JobContext, tx: Tx) -> Done:
        after = parse_uuid(str(ctx.payload.get("after", ""))) or service.FIRST
        return _describe_recovery(*await service.recover(tx, after=after))

    @app.job("payments.forget-callbacks")
    async def forget_callbacks(ctx: JobContext, tx: Tx) -> Done:
        gone = await service.forget_callbacks(tx)
        if gone == service.FORGET_LIMIT:
            await schedule(tx, ctx.name, REST)
        return Done(f"forgot {gone} callbacks")


async def _send(db: Database, banks: Banks, payment_id: UUID) -> Outcome | Then:
    """Count the try and commit, call, and return what follows from the answer."""
    try:
        async with db.transaction() as tx:
            bank = _find_bank(banks, await service.find_payment(tx, payment_id))
            bank.check()
            order = await service.begin_sending(tx, payment_id)
    except NoBank as unset:
        return Snooze(WITHOUT_BANK, str(unset))
    except PaymentNotFound as absent:
        return Cancel(str(absent))
    if order is None:
        return Done("there is nothing to send")
    failpoint("handler.mid")
    heard = await bank.send(order)
    failpoint("handler.mid")
    return Then(partial(_note_sent, payment_id=payment_id, heard=heard))


async def _ask(db: Database, banks: Banks, payment_id: UUID) -> Outcome | Then:
    """Ask, and return what follows; the same job asks again for as long as it must."""
    try:
        async with db.transaction() as tx:
            question = await service.begin_asking(tx, payment_id)
            if isinstance(question, Question):
                bank = _find_bank(banks, question.payment)
                bank.check()
    except NoBank as unset:
        return Snooze(WITHOUT_BANK, str(unset))
    except PaymentNotFound as absent:
        return Cancel(str(absent))
    if question is None:
        return Done("there is nothing to ask")
    if isinstance(question, timedelta):
        return Snooze(question, "a request may still arrive")
    failpoint("handler.mid")
    heard = replace(await bank.ask(question.payment), asked_at=question.asked_at)
    failpoint("handler.mid")
    return Then(partial(_note_asked, payment_id=payment_id, heard=heard))


async def _note_sent(tx: Tx, *, payment_id: UUID, heard: Heard) -> Outcome:
    payment, _ = await service.note_answer(tx, payment_id, heard)
    return Done(f"the bank said {heard.report.value}: {payment.state.value}")


async def _note_asked(tx: Tx, *, payment_id: UUID, heard: Heard) -> Outcome:
    payment, wait = await service.note_answer(tx, payment_id, heard)
    said = f"the bank said {heard.report.value}: {payment.state.value}"
    return Done(said) if wait is None else Snooze(wait, said)


def _find_bank(banks: Banks, payment: Payment) -> Bank:
    found = banks.get(payment.provider)
    if found is None:
        raise NoBank(f"no bank is plugged in under the name {payment.provider}")
    return found


def _describe_recovery(count: int, has_more: bool) -> Done:
    return Done(f"gave a job to {count} that had none" + (", more to look at" if has_more else ""))


def _describe(count: int, has_more: bool) -> Done:
    return Done(f"sent {count} again" + (", more to come" if has_more else ""))
