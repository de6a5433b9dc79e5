"""The routes of the ledger."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import Query, Response
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from apps.finance.ledger import audit, service
from apps.finance.ledger.model import (
    LONGEST_REFERENCE,
    MOST_ENTRIES,
    MOST_TRANSACTIONS,
    Account,
    AccountStatus,
    AccountType,
    Balance,
    Direction,
    Entry,
    Hold,
    HoldStatus,
    NewEntry,
    Posting,
    Transaction,
    TransactionStatus,
)
from apps.shared.money import Currency, ExactAmount, show
from apps.shared.text import EXACT, Name, PageSize, Prose
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.http import RequestTx, Router

READ, WRITE = "ledger:read", "ledger:write"
WRITER, POSTER, REVERSER, READER = "LEDGER_WRITER", "LEDGER_POSTER", "LEDGER_REVERSER", "LEDGER_READER"
Writer = Annotated[Principal, require(WRITE, WRITER)]
Poster = Annotated[Principal, require(WRITE, POSTER)]
Reverser = Annotated[Principal, require(WRITE, REVERSER)]
Reader = Annotated[Principal, require(READ, READER, WRITER, POSTER, REVERSER)]

router = Router(prefix="/v1", tags=["ledger"])

Reference = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_REFERENCE, pattern=EXACT)]
"""What somebody else calls it; used once."""
VersionBefore = Annotated[int | None, Query(ge=1, le=2**63 - 1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class _View(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class NewAccount(_Body):
    """An account; with ``mayGoNegative`` false it is never overdrawn."""

    name: Name
    type: AccountType
    currency: Currency
    may_go_negative: bool = Field(default=True, strict=True)


class NewLine(_Body):
    """A line; the direction says which way, so that the amount is above zero."""

    account_id: UUID
    amount: ExactAmount
    direction: Direction


class NewTransaction(_Body):
    """Debits equal credits, in one currency; the reference is used once."""

    reference: Reference
    entries: list[NewLine] = Field(min_length=2, max_length=MOST_ENTRIES)


class NewTransactions(_Body):
    """All of them are posted, or none."""

    transactions: list[NewTransaction] = Field(min_length=1, max_length=MOST_TRANSACTIONS)


class NewReversal(_Body):
    """Why."""

    reason: Prose


class NewHold(_Body):
    """So much is set aside; for seven days, if nothing is said, and for 90 at most."""

    amount: ExactAmount
    reference: Reference
    expires_at: AwareDatetime | None = None


class NewCapture(_Body):
    """Whom to pay; all that is held, if nothing is said. With ``final`` false the rest stays on hold."""

    to_account_id: UUID
    reference: Reference
    amount: ExactAmount | None = None
    final: bool = Field(default=True, strict=True)


class AccountView(_View):
    """An account; ``version`` is the number of its entries."""

    id: UUID
    name: str
    type: AccountType
    currency: str
    status: AccountStatus
    may_go_negative: bool
    version: int
    created_at: datetime
    closed_at: datetime | None


class AccountPage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[AccountView]
    next: UUID | None


class BalanceView(_View):
    """On the normal side of the account's type; what was held in the past is not known."""

    account_id: UUID
    currency: str
    balance: str
    held: str | None
    available: str | None
    version: int
    as_of: datetime


class EntryView(_View):
    """A line of a transaction; ``balanceAfter`` is on the normal side of the account's type."""

    account_id: UUID
    version: int
    direction: Direction
    amount: str
    balance_after: str


class StatementLine(EntryView):
    """A line of an account's statement, with the balance after it."""

    transaction_id: UUID
    reference: str
    posted_at: datetime


class Statement(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[StatementLine]
    next: int | None


class TransactionSummary(_View):
    """A transaction without its lines; ``amount`` is the sum of the debits."""

    id: UUID
    reference: str
    currency: str
    amount: str
    status: TransactionStatus
    posted_at: datetime


class TransactionView(TransactionSummary):
    """A transaction; what was reversed, and what reverses it, name each other."""

    reverses_id: UUID | None
    reversed_by_id: UUID | None
    hold_id: UUID | None
    reason: str | None
    entries: list[EntryView]


class TransactionList(_View):
    """What was posted, in the order given."""

    transactions: list[TransactionSummary]


class HoldView(_View):
    """A hold; ``remaining`` is what is still set aside."""

    id: UUID
    account_id: UUID
    reference: str
    currency: str
    amount: str
    captured: str
    remaining: str
    status: HoldStatus
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None


class ViolationView(_View):
    """The first row that breaks a rule."""

    rule: str
    table: str
    row: str


class CheckView(_View):
    """What a check found; ``next`` is the ``after`` of the page that follows."""

    is_sound: bool
    checked: int
    first_violation: ViolationView | None
    next: str | None


# -- accounts --------------------------------------------------------------------------------------------------------


@router.post("/accounts", status_code=201)
async def create_account(new: NewAccount, _caller: Writer, tx: RequestTx, response: Response) -> AccountView:
    """Open an account."""
    account = await service.create_account(
        tx, name=new.name, kind=new.type, currency=new.currency, may_go_negative=new.may_go_negative
    )
    response.headers["Location"] = f"/v1/accounts/{account.id}"
    return _show_account(account)


@router.get("/accounts")
async def list_accounts(
    _caller: Reader, tx: RequestTx, before: UUID | None = None, limit: PageSize = 50
) -> AccountPage:
    """A page of them."""
    items, following = await service.list_accounts(tx, before=before, limit=limit)
    return AccountPage(items=[_show_account(account) for account in items], next=following)


@router.get("/accounts/{account_id}")
async def read_account(account_id: UUID, _caller: Reader, tx: RequestTx) -> AccountView:
    """One of them."""
    return _show_account(await service.read_account(tx, account_id))


@router.get("/accounts/{account_id}/balance")
async def read_balance(
    account_id: UUID,
    _caller: Reader,
    tx: RequestTx,
    as_of: Annotated[AwareDatetime | None, Query(alias="asOf")] = None,
) -> BalanceView:
    """What it has; with ``asOf``, what it had after the last entry up to that moment."""
    return _show_balance(await service.get_balance(tx, account_id, at=as_of))


@router.get("/accounts/{account_id}/entries")
async def list_entries(
    account_id: UUID, _caller: Reader, tx: RequestTx, before: VersionBefore = None, limit: PageSize = 50
) -> Statement:
    """A page of its statement."""
    items, following = await service.list_entries(tx, account_id, before=before, limit=limit)
    lines = [
        StatementLine(
            **dict(_show_entry(entry, currency)), transaction_id=entry.transaction_id, reference=entry.reference,
            posted_at=entry.posted_at,
        )
        for entry, currency in items
    ]  # fmt: skip
    return Statement(items=lines, next=following)


@router.post("/accounts/{account_id}/close")
async def close_account(account_id: UUID, _caller: Writer, tx: RequestTx) -> AccountView:
    """Close an empty one; 409 when it has a balance, or something on hold."""
    return _show_account(await service.close_account(tx, account_id))


@router.post("/accounts/{account_id}/reopen")
async def reopen_account(account_id: UUID, _caller: Writer, tx: RequestTx) -> AccountView:
    """Open a closed one again."""
    return _show_account(await service.reopen_account(tx, account_id))


# -- the journal -----------------------------------------------------------------------------------------------------


@router.post("/transactions", status_code=201)
async def post_transaction(new: NewTransaction, caller: Poster, tx: RequestTx, response: Response) -> TransactionView:
    """Post a transaction; 409 when an account is closed or would be overdrawn, or the reference was used before."""
    return _located(await service.post(tx, _posting(new), posted_by=caller.subject), response)


@router.post("/transactions/batch", status_code=201)
async def post_transactions(new: NewTransactions, caller: Poster, tx: RequestTx) -> TransactionList:
    """Post up to a thousand, all of them or none."""
    made = await service.post_many(tx, [_posting(one) for one in new.transactions], posted_by=caller.subject)
    return TransactionList(transactions=[_summarise(one) for one in made])


@router.get("/transactions/{transaction_id}")
async def read_transaction(transaction_id: UUID, _caller: Reader, tx: RequestTx) -> TransactionView:
    """One of them."""
    return _show_transaction(await service.read_transaction(tx, transaction_id))


@router.post("/transactions/{transaction_id}/reverse", status_code=201)
async def reverse_transaction(
    transaction_id: UUID, new: NewReversal, caller: Reverser, tx: RequestTx, response: Response
) -> TransactionView:
    """Post its mirror image; 409 when it was reversed before, or when that would overdraw an account."""
    made = await service.reverse(tx, transaction_id, reason=new.reason, posted_by=caller.subject)
    return _located(made, response)


# -- holds -----------------------------------------------------------------------------------------------------------


@router.post("/accounts/{account_id}/holds", status_code=201)
async def place_hold(account_id: UUID, new: NewHold, _caller: Poster, tx: RequestTx, response: Response) -> HoldView:
    """Set money aside; 409 when it is not there."""
    hold = await service.place_hold(tx, account_id, amount=new.amount, reference=new.reference, until=new.expires_at)
    response.headers["Location"] = f"/v1/holds/{hold.id}"
    return _show_hold(hold)


@router.get("/holds/{hold_id}")
async def read_hold(hold_id: UUID, _caller: Reader, tx: RequestTx) -> HoldView:
    """One of them."""
    return _show_hold(await service.read_hold(tx, hold_id))


@router.post("/holds/{hold_id}/capture", status_code=201)
async def capture_hold(
    hold_id: UUID, new: NewCapture, caller: Poster, tx: RequestTx, response: Response
) -> TransactionView:
    """Pay what is held, or some of it; 409 when it has ended, or so much is not held."""
    transaction = await service.capture_hold(
        tx, hold_id, to=new.to_account_id, reference=new.reference, amount=new.amount, final=new.final,
        posted_by=caller.subject,
    )  # fmt: skip
    return _located(transaction, response)


@router.post("/holds/{hold_id}/void")
async def void_hold(hold_id: UUID, _caller: Poster, tx: RequestTx) -> HoldView:
    """Let go of what is still held; 409 when it has ended."""
    return _show_hold(await service.void_hold(tx, hold_id))


# -- the audit -------------------------------------------------------------------------------------------------------


@router.get("/ledger/check")
async def check_ledger(
    _caller: Reader,
    tx: RequestTx,
    after: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=audit.MOST_ROWS)] = audit.CHECK_LIMIT,
) -> CheckView:
    """Check every rule on what is stored, a page of rows at a time, each page as of one moment."""
    found = await audit.check(tx, after=after, limit=limit)
    wrong = found.first_violation
    shown = ViolationView(rule=wrong.rule, table=wrong.table, row=wrong.row) if wrong else None
    return CheckView(is_sound=found.is_sound, checked=found.checked, first_violation=shown, next=found.next)


def _posting(new: NewTransaction) -> Posting:
    return Posting(new.reference, [NewEntry(line.account_id, line.amount, line.direction) for line in new.entries])


def _show_account(account: Account) -> AccountView:
    return AccountView(
        id=account.id, name=account.name, type=account.type, currency=account.currency, status=account.status,
        may_go_negative=account.may_go_negative, version=account.version, created_at=account.created_at,
        closed_at=account.closed_at,
    )  # fmt: skip


def _show_balance(balance: Balance) -> BalanceView:
    return BalanceView(
        account_id=balance.account_id,
        currency=balance.currency,
        balance=show(balance.balance, balance.currency),
        held=None if balance.held is None else show(balance.held, balance.currency),
        available=None if balance.available is None else show(balance.available, balance.currency),
        version=balance.version,
        as_of=balance.as_of,
    )


def _show_entry(entry: Entry, currency: str) -> EntryView:
    return EntryView(
        account_id=entry.account_id, version=entry.version, direction=entry.direction,
        amount=show(entry.amount, currency), balance_after=show(entry.balance_after, currency),
    )  # fmt: skip


def _summarise(transaction: Transaction) -> TransactionSummary:
    return TransactionSummary(
        id=transaction.id, reference=transaction.reference, currency=transaction.currency,
        amount=show(transaction.amount, transaction.currency), status=transaction.status,
        posted_at=transaction.posted_at,
    )  # fmt: skip


def _show_transaction(transaction: Transaction) -> TransactionView:
    return TransactionView(
        **dict(_summarise(transaction)),
        reverses_id=transaction.reverses_id,
        reversed_by_id=transaction.reversed_by_id,
        hold_id=transaction.hold_id,
        reason=transaction.reason,
        entries=[_show_entry(entry, transaction.currency) for entry in transaction.entries],
    )


def _located(transaction: Transaction, response: Response) -> TransactionView:
    response.headers["Location"] = f"/v1/transactions/{transaction.id}"
    return _show_transaction(transaction)


def _show_hold(hold: Hold) -> HoldView:
    return HoldView(
        id=hold.id, account_id=hold.account_id, reference=hold.reference, currency=hold.currency,
        amount=show(hold.amount, hold.currency), captured=show(hold.captured, hold.currency),
        remaining=show(hold.remaining, hold.currency), status=hold.status, created_at=hold.created_at,
        expires_at=hold.expires_at, ended_at=hold.ended_at,
    )  # fmt: skip
