"""The use cases of the ledger: each gets a transaction and never ends it.

What is refused is an error of the model, raised after the database has answered: nothing was written, and the
transaction can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

from apps.finance.ledger import events, store, store_flows
from apps.finance.ledger.model import (
    DEFAULT_HOLD,
    LONGEST_HOLD,
    LONGEST_REFERENCE,
    MOST_ENTRIES_AT_ONCE,
    MOST_TRANSACTIONS,
    Account,
    AccountActive,
    AccountClosed,
    AccountNotEmpty,
    AccountNotFound,
    AccountStatus,
    AccountType,
    AlreadyReversed,
    BadHold,
    BadPosting,
    Balance,
    BalanceTooLarge,
    Direction,
    Entry,
    Flow,
    FlowQuestion,
    Hold,
    HoldEnded,
    HoldExceeded,
    HoldNotFound,
    HoldStatus,
    InsufficientFunds,
    MixedCurrencies,
    NewEntry,
    NotReversible,
    Posting,
    ReferenceTaken,
    Transaction,
    TransactionNotFound,
    TransactionStatus,
    UnknownAccount,
    at_path,
    check_posting,
)
from apps.shared.money import LARGEST_EXACT, BadAmount, show
from duly import Tx, cancel, emit, schedule
from duly.errors import DulyError
from duly.failpoints import failpoint
from duly.ids import uuid7

F = TypeVar("F", Account, Balance)
EXPIRE_HOLD = "ledger.expire-hold"
HOLDS_KEPT_DAYS = 400
FORGET_LIMIT = 10_000  # in one commit
MOST_FLOW_ENTRIES = 20_000  # of one account in one window
MOST_RECEIVER_ENTRIES = 500

REFUSALS: dict[str, Callable[[], DulyError]] = {
    "account_closed": lambda: AccountClosed("the account is closed: reopen it, or use another"),
    "currency_mixed": lambda: MixedCurrencies("its account has another currency than the first entry's"),
    "too_precise": lambda: BadAmount("the currency has fewer digits after the point"),
    "too_large": lambda: BalanceTooLarge("the balance would have more digits than can be kept"),
    "insufficient": lambda: InsufficientFunds("the account does not have so much available"),
}
"""What the database refuses about one line."""
AT_AMOUNT = frozenset({"too_precise", "too_large", "insufficient"})


@dataclass(frozen=True)
class Expiry:
    """What the timer of a hold found: it expired just now, ended before, or has so long yet."""

    hold: Hold
    has_expired: bool = False
    wait: timedelta = timedelta(0)


# -- accounts --------------------------------------------------------------------------------------------------------


async def create_account(
    tx: Tx, *, name: str, kind: AccountType, currency: str, may_go_negative: bool = True
) -> Account:
    """A new, empty account (F1)."""
    account = await store.open_account(
        tx, account_id=uuid7(), name=name, kind=kind, currency=currency, may_go_negative=may_go_negative
    )
    await emit(
        tx,
        events.AccountCreated(
            account_id=account.id, name=name, type=kind.value, currency=currency, may_go_negative=may_go_negative
        ),
    )
    return account


async def read_account(tx: Tx, account_id: UUID) -> Account:
    """One by its id."""
    return _found(await store.find_account(tx, account_id), account_id)


async def find_types(tx: Tx, account_ids: Sequence[UUID]) -> dict[UUID, AccountType]:
    """Of what kind each is; that never changes."""
    return await store.find_types(tx, account_ids) if account_ids else {}


async def list_accounts(tx: Tx, *, before: UUID | None = None, limit: int = 50) -> tuple[list[Account], UUID | None]:
    """A page, the newest first, and where the next one begins."""
    found = await store.list_accounts(tx, before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1].id if len(found) > limit else None


async def list_standings(
    tx: Tx, *, before: UUID | None = None, limit: int = 50
) -> tuple[list[tuple[Account, Balance]], UUID | None]:
    """A page, the newest first, each with how it stands; and where the next one begins."""
    found = await store.list_standings(tx, before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1][0].id if len(found) > limit else None


async def close_account(tx: Tx, account_id: UUID) -> Account:
    """It takes no more entries; only an empty one can be closed."""
    outcome = await store.change_status(tx, account_id, AccountStatus.CLOSED)
    if outcome == "not_empty":
        raise AccountNotEmpty("the account has a balance, or something on hold: move it first")
    if outcome == "unchanged":
        raise AccountClosed("the account was closed before")
    account = await read_account(tx, account_id)
    await emit(tx, events.AccountClosed(account_id=account_id))
    return account


async def reopen_account(tx: Tx, account_id: UUID) -> Account:
    """It takes entries again."""
    if await store.change_status(tx, account_id, AccountStatus.ACTIVE) == "unchanged":
        raise AccountActive("the account is open")
    account = await read_account(tx, account_id)
    await emit(tx, events.AccountReopened(account_id=account_id))
    return account


async def get_balance(tx: Tx, account_id: UUID, *, at: datetime | None = None) -> Balance:
    """How an account stands, or stood after the last entry up to that moment (F2)."""
    return _found(await store.find_balance(tx, account_id, at=at), account_id)


async def list_entries(
    tx: Tx, account_id: UUID, *, before: int | None = None, limit: int = 50
) -> tuple[list[tuple[Entry, str]], int | None]:
    """A page of the statement, the newest first, each with the balance after it; and where the next one begins (F2)."""
    found = await store.list_entries(tx, account_id, before=before, limit=limit + 1)
    if not found:
        await read_account(tx, account_id)  # or there is no such account
    page = found[:limit]
    return page, page[-1][0].version if len(found) > limit else None


# -- the journal -----------------------------------------------------------------------------------------------------


async def post(tx: Tx, posting: Posting, *, posted_by: str | None = None) -> Transaction:
    """Post one transaction, in one statement, event included (F3).

    ``posted_by`` is who wants it, where that is a person and nothing else says so: the same does not judge it later.
    """
    check_posting(posting)
    answer = await store.post(tx, [posting], [uuid7()], posted_by=posted_by)
    failpoint("handler.mid")
    if answer.outcome != "posted":
        raise _refusal(answer, [posting], ["$"])
    return answer.transactions[0]


async def post_many(
    tx: Tx, postings: Sequence[Posting], *, posted_by: str | None = None
) -> tuple[Transaction, ...]:  # fmt: skip
    """Post all of them or none, still in one statement: each account's balance is written once."""
    if not 1 <= len(postings) <= MOST_TRANSACTIONS:
        raise at_path(BadPosting(f"1 to {MOST_TRANSACTIONS} transactions are posted at once"), "$.transactions")
    paths = [f"$.transactions[{number}]" for number in range(len(postings))]
    for posting, path in zip(postings, paths, strict=True):
        check_posting(posting, path=path)
    if sum(len(posting.entries) for posting in postings) > MOST_ENTRIES_AT_ONCE:
        raise at_path(BadPosting(f"at most {MOST_ENTRIES_AT_ONCE} entries are posted at once"), "$.transactions")
    answer = await store.post(tx, postings, [uuid7() for _ in postings], posted_by=posted_by)
    if answer.outcome != "posted":
        raise _refusal(answer, postings, paths)
    return answer.transactions


async def reverse(tx: Tx, transaction_id: UUID, *, reason: str, posted_by: str | None = None) -> Transaction:
    """Post the mirror image, once (F4)."""
    answer = await store.reverse(tx, transaction_id, transaction_id=uuid7(), reason=reason, posted_by=posted_by)
    match answer.outcome:
        case "posted":
            return answer.transactions[0]
        case "transaction_unknown":
            raise TransactionNotFound(f"no transaction has the id {transaction_id}")
        case "already_reversed":
            raise AlreadyReversed("the transaction was reversed before")
        case "is_reversal":
            raise NotReversible("this is a reversal: post the transaction anew instead")
        case "reference_taken":
            raise ReferenceTaken("the reference of the reversal was used before")
        case refused:
            raise REFUSALS[refused]()


async def read_transaction(tx: Tx, transaction_id: UUID) -> Transaction:
    """One by its id, with its entries."""
    found = await store.find_transaction(tx, transaction_id)
    if found is None:
        raise TransactionNotFound(f"no transaction has the id {transaction_id}")
    return found


async def lock_transaction(tx: Tx, transaction_id: UUID) -> TransactionStatus:
    """How it stands: nobody reverses it until the commit."""
    found = await store.lock_transaction(tx, transaction_id)
    if found is None:
        raise TransactionNotFound(f"no transaction has the id {transaction_id}")
    return found


async def find_posters(tx: Tx, transaction_ids: Sequence[UUID]) -> dict[UUID, str]:
    """Who posted each, where it was a person and is known."""
    return await store.find_posters(tx, transaction_ids)


async def read_flows(tx: Tx, asked: Sequence[FlowQuestion], *, most: int = MOST_FLOW_ENTRIES) -> list[Flow]:
    """What moved on each account over windows that end at one of its entries, as it was then, by whoever asks."""
    return await store_flows.read_flows(tx, asked, most=most) if asked else []


async def count_receivers(
    tx: Tx, asked: Sequence[FlowQuestion], *, most: int = MOST_RECEIVER_ENTRIES
) -> list[int | None]:  # fmt: skip
    """To how many other accounts the money of each went in the week until that entry; None where it is too busy."""
    return await store_flows.count_receivers(tx, asked, most=most) if asked else []


# -- holds -----------------------------------------------------------------------------------------------------------


async def place_hold(
    tx: Tx, account_id: UUID, *, amount: Decimal, reference: str, until: datetime | None = None
) -> Hold:
    """Set money aside that is there, with the timer that ends it."""
    if not amount.is_finite() or not 0 < amount <= LARGEST_EXACT:
        raise at_path(BadHold(f"an amount is above zero and at most {LARGEST_EXACT}"), "$.amount")
    if not 1 <= len(reference) <= LONGEST_REFERENCE:
        raise at_path(BadHold(f"a reference has 1 to {LONGEST_REFERENCE} characters"), "$.reference")
    placed = await store.place_hold(
        tx, hold_id=uuid7(), account_id=account_id, amount=amount, reference=reference, until=until,
        lasting=DEFAULT_HOLD, longest=LONGEST_HOLD,
    )  # fmt: skip
    hold = placed.hold
    if hold is None:
        raise _hold_refusal(placed.outcome, account_id)
    await schedule(tx, EXPIRE_HOLD, hold.id, hold.expires_at)
    await emit(
        tx,
        events.HoldPlaced(
            hold_id=hold.id, account_id=account_id, reference=reference, amount=show(hold.amount, hold.currency),
            currency=hold.currency, expires_at=hold.expires_at,
        ),
    )  # fmt: skip
    return hold


async def capture_hold(
    tx: Tx,
    hold_id: UUID,
    *,
    to: UUID,
    reference: str,
    amount: Decimal | None = None,
    final: bool = True,
    posted_by: str | None = None,
) -> Transaction:
    """Pay what is held to an account, or so much of it; the rest is let go, unless this is not the final capture."""
    hold, side = await _read_hold(tx, hold_id)
    if hold.status is not HoldStatus.ACTIVE:
        raise HoldEnded(f"the hold is {hold.status.value}")
    amount = hold.remaining if amount is None else amount
    lowers, raises = (Direction.CREDIT, Direction.DEBIT) if side == 1 else (Direction.DEBIT, Direction.CREDIT)
    posting = Posting(reference, [NewEntry(hold.account_id, amount, lowers), NewEntry(to, amount, raises)])
    if to == hold.account_id:
        raise at_path(BadHold("the money is to go to another account"), "$.toAccountId")
    check_posting(posting)
    answer = await store.post(tx, [posting], [uuid7()], posted_by=posted_by, hold_id=hold_id, is_final=final)
    if answer.outcome != "posted":
        raise _capture_refusal(answer)
    transaction = answer.transactions[0]
    has_ended = (await read_hold(tx, hold_id)).status is not HoldStatus.ACTIVE  # others may have captured some before
    if has_ended:
        await cancel(tx, EXPIRE_HOLD, hold_id)
    await emit(
        tx,
        events.HoldCaptured(
            hold_id=hold_id, account_id=hold.account_id, transaction_id=transaction.id,
            amount=show(amount, hold.currency), currency=hold.currency, has_ended=has_ended,
        ),
    )  # fmt: skip
    return transaction


async def void_hold(tx: Tx, hold_id: UUID) -> Hold:
    """Let go of what is still held."""
    outcome, _ = await store.end_hold(tx, hold_id, HoldStatus.VOIDED)
    hold, _ = await _read_hold(tx, hold_id)
    if outcome == "hold_ended":
        raise HoldEnded(f"the hold is {hold.status.value}")
    await cancel(tx, EXPIRE_HOLD, hold_id)
    await emit(tx, events.HoldVoided(**_released(hold)))
    return hold


async def expire_hold(tx: Tx, hold_id: UUID) -> Expiry:
    """The timer of this hold has fired: let go of what is still held, once."""
    outcome, wait = await store.end_hold(tx, hold_id, HoldStatus.EXPIRED)
    hold, _ = await _read_hold(tx, hold_id)
    if outcome == "early":
        return Expiry(hold, wait=wait)
    if outcome == "ended":
        await emit(tx, events.HoldExpired(**_released(hold)))
    return Expiry(hold, has_expired=outcome == "ended")


async def read_hold(tx: Tx, hold_id: UUID) -> Hold:
    """One by its id."""
    return (await _read_hold(tx, hold_id))[0]


async def list_active_holds(tx: Tx, account_id: UUID, *, limit: int = 50) -> list[Hold]:
    """What is set aside on an account, the soonest to expire first."""
    return await store.list_active_holds(tx, account_id, limit=limit)


async def forget_holds(tx: Tx, *, days: int = HOLDS_KEPT_DAYS, limit: int = FORGET_LIMIT) -> int:
    """Drop what ended long ago; how many."""
    return await store.forget_holds(tx, days=days, limit=limit)


async def _read_hold(tx: Tx, hold_id: UUID) -> tuple[Hold, int]:
    found = await store.find_hold(tx, hold_id)
    if found is None:
        raise HoldNotFound(f"no hold has the id {hold_id}")
    return found


def _released(hold: Hold) -> dict[str, Any]:
    rest = show(hold.amount - hold.captured, hold.currency)
    return {"hold_id": hold.id, "account_id": hold.account_id, "amount": rest, "currency": hold.currency}


def _found(found: F | None, account_id: UUID) -> F:
    if found is None:
        raise AccountNotFound(f"no account has the id {account_id}")
    return found


def _refusal(answer: store.Answer, postings: Sequence[Posting], paths: Sequence[str]) -> DulyError:
    """The database's no, as an error that says which part of the request it is about."""
    if answer.outcome == "reference_taken":
        taken = ReferenceTaken("the reference was used before: a transaction is posted once")
        return at_path(taken, f"{paths[answer.place - 1]}.reference")
    lines = [
        (f"{path}.entries[{number}]", entry)
        for posting, path in zip(postings, paths, strict=True)
        for number, entry in enumerate(posting.entries)
    ]
    path, entry = lines[answer.place - 1]
    if answer.outcome == "account_unknown":
        return at_path(UnknownAccount(f"no account has the id {entry.account_id}"), f"{path}.accountId")
    error = REFUSALS[answer.outcome]()
    if isinstance(error, InsufficientFunds):
        error.account_id = entry.account_id
    return at_path(error, f"{path}.amount" if answer.outcome in AT_AMOUNT else f"{path}.accountId")


def _capture_refusal(answer: store.Answer) -> DulyError:
    match answer.outcome:
        case "hold_ended" | "hold_unknown":  # whoever was quicker, or its time is over
            return HoldEnded("the hold has ended")
        case "hold_exceeded":
            return at_path(HoldExceeded("so much is not held any more"), "$.amount")
        case "reference_taken":
            taken = ReferenceTaken("the reference was used before: a transaction is posted once")
            return at_path(taken, "$.reference")
        case "account_unknown":
            return at_path(UnknownAccount("no account has this id"), "$.toAccountId")
        case refused:
            return at_path(REFUSALS[refused](), "$.amount" if refused in AT_AMOUNT else "$.toAccountId")


def _hold_refusal(outcome: str, account_id: UUID) -> DulyError:
    match outcome:
        case "account_unknown":
            return AccountNotFound(f"no account has the id {account_id}")
        case "too_late":
            return at_path(BadHold("a hold ends in the future"), "$.expiresAt")
        case "too_long":
            return at_path(BadHold(f"a hold lasts {LONGEST_HOLD.days} days at most"), "$.expiresAt")
        case "reference_taken":
            return at_path(ReferenceTaken("the reference was used before: a hold is placed once"), "$.reference")
        case "account_closed":
            return REFUSALS[outcome]()
        case refused:
            return at_path(REFUSALS[refused](), "$.amount")
