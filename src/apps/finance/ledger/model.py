"""What accounts, transactions, holds and seals are, and what may happen to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

from apps.shared.money import LARGEST_EXACT, MINOR_UNITS, add_up
from duly.errors import Conflict, DulyError, Fault, Invalid, NotFound

MOST_ENTRIES = 500
"""Of one transaction; a constraint of the store says so, too."""
MOST_TRANSACTIONS = 1_000
"""Posted at once."""
MOST_ENTRIES_AT_ONCE = 5_000
LONGEST_REFERENCE = 200
REVERSAL_SUFFIX = "-rev"
DEFAULT_HOLD = timedelta(days=7)
LONGEST_HOLD = timedelta(days=90)
WINDOWS = ("hour", "day", "week")
"""Over which flows are measured."""
GENESIS = bytes(32)
"""What the first seal follows."""
SEAL_FORMAT = 2
"""What new seals are over; older ones are verified as they were made."""


class AccountType(StrEnum):
    """Assets and expenses grow with debits, the others with credits."""

    ASSET = "ASSET"
    LIABILITY = "LIABILITY"
    EQUITY = "EQUITY"
    INCOME = "INCOME"
    EXPENSE = "EXPENSE"

    @property
    def side(self) -> int:
        """1 where debits add, -1 where credits do."""
        return 1 if self in (AccountType.ASSET, AccountType.EXPENSE) else -1


class AccountStatus(StrEnum):
    """Whether an account takes entries."""

    ACTIVE = "ACTIVE"
    CLOSED = "CLOSED"


class Direction(StrEnum):
    """The two sides of an entry."""

    DEBIT = "DEBIT"
    CREDIT = "CREDIT"


class TransactionStatus(StrEnum):
    """A transaction is posted, and perhaps reversed; nothing else can happen to it."""

    POSTED = "POSTED"
    REVERSED = "REVERSED"


class HoldStatus(StrEnum):
    """Where a hold stands; all but the first are final."""

    ACTIVE = "ACTIVE"
    CAPTURED = "CAPTURED"
    VOIDED = "VOIDED"
    EXPIRED = "EXPIRED"


class AccountNotFound(NotFound):
    """There is no such account."""


class TransactionNotFound(NotFound):
    """There is no such transaction."""


class HoldNotFound(NotFound):
    """There is no such hold."""


class BadPosting(Invalid):
    """These entries cannot be a transaction."""


class Unbalanced(Invalid):
    """Debits and credits differ."""


class UnknownAccount(Invalid):
    """An entry names an account that does not exist."""


class MixedCurrencies(Invalid):
    """The accounts of one transaction have different currencies."""


class BalanceTooLarge(Invalid):
    """A balance would have more digits than can be kept."""


class BadHold(Invalid):
    """This cannot be held."""


class AccountClosed(Conflict):
    """The account is closed."""


class AccountActive(Conflict):
    """The account is not closed."""


class AccountNotEmpty(Conflict):
    """The account has a balance, or something on hold."""


class InsufficientFunds(Conflict):
    """The account would be overdrawn."""

    account_id: UUID | None = None


class ReferenceTaken(Conflict):
    """The reference was used before."""


class AlreadyReversed(Conflict):
    """The transaction was reversed before."""


class NotReversible(Conflict):
    """A reversal cannot be reversed."""


class HoldEnded(Conflict):
    """The hold was captured, voided, or has expired."""


class HoldExceeded(Conflict):
    """More than is held."""


def at_path(error: DulyError, path: str) -> DulyError:
    """The same error, which says where in the request's body the reason is."""
    error.faults = (Fault("body", path, str(error)),)
    return error


@dataclass(frozen=True)
class Account:
    """Whose money, of which kind; ``version`` is the number of its entries."""

    id: UUID
    name: str
    type: AccountType
    currency: str
    status: AccountStatus
    may_go_negative: bool
    version: int
    created_at: datetime
    closed_at: datetime | None = None


@dataclass(frozen=True)
class Balance:
    """How an account stands, on the normal side of its type; of the past, what was held is not known."""

    account_id: UUID
    currency: str
    balance: Decimal
    held: Decimal | None
    version: int
    as_of: datetime

    @property
    def available(self) -> Decimal | None:
        """What is not on hold."""
        return None if self.held is None else self.balance - self.held


@dataclass(frozen=True)
class NewEntry:
    """A line of a transaction that is not posted yet.

    With ``covered`` it must not overdraw its account, even where the account may go negative.
    """

    account_id: UUID
    amount: Decimal
    direction: Direction
    covered: bool = False

    @property
    def signed(self) -> Decimal:
        """Debits are positive."""
        return self.amount if self.direction is Direction.DEBIT else -self.amount


@dataclass(frozen=True)
class Posting:
    """A transaction that is not posted yet."""

    reference: str
    entries: Sequence[NewEntry]


@dataclass(frozen=True)
class Entry:
    """A line of the journal; ``balance_after`` is on the normal side of the account's type."""

    account_id: UUID
    version: int
    transaction_id: UUID
    direction: Direction
    amount: Decimal
    balance_after: Decimal
    posted_at: datetime
    reference: str


@dataclass(frozen=True)
class Transaction:
    """A heading of the journal, and its lines; ``amount`` is the sum of the debits."""

    id: UUID
    reference: str
    currency: str
    amount: Decimal
    status: TransactionStatus
    posted_at: datetime
    entries: tuple[Entry, ...]
    reverses_id: UUID | None = None
    reversed_by_id: UUID | None = None
    hold_id: UUID | None = None
    reason: str | None = None


@dataclass(frozen=True)
class FlowQuestion:
    """What is asked of an account: how much moved until this entry of it, which is of this moment.

    ``most`` is in how many entries, where that is fewer than for anybody.
    """

    account_id: UUID
    version: int
    at: datetime
    most: int = 2**63 - 1


@dataclass(frozen=True)
class Moved:
    """How many entries lowered an account, by how much in minor units, and how many raised it, by how much."""

    outs: int
    out_minor: int
    ins: int
    in_minor: int


@dataclass(frozen=True)
class Flow:
    """What moved by window; None where there was more than is read."""

    windows: Mapping[str, Moved | None]


@dataclass(frozen=True)
class Hold:
    """Money that is set aside on an account, until it is captured, voided or expires."""

    id: UUID
    account_id: UUID
    reference: str
    currency: str
    amount: Decimal
    captured: Decimal
    status: HoldStatus
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None = None

    @property
    def remaining(self) -> Decimal:
        """What is still set aside."""
        return self.amount - self.captured if self.status is HoldStatus.ACTIVE else Decimal(0)


def check_posting(posting: Posting, *, path: str = "$") -> None:
    """Refuse what no transaction can be, before the database is asked; ``path`` is where it is in a request."""
    if not 2 <= len(posting.entries) <= MOST_ENTRIES:
        raise at_path(BadPosting(f"a transaction has 2 to {MOST_ENTRIES} entries"), f"{path}.entries")
    for number, entry in enumerate(posting.entries):
        if not entry.amount.is_finite() or not 0 < entry.amount <= LARGEST_EXACT:
            reason = f"an amount is above zero and at most {LARGEST_EXACT}; the direction says which way"
            raise at_path(BadPosting(reason), f"{path}.entries[{number}].amount")
    check_reference(posting.reference, path=f"{path}.reference")
    debits = add_up(entry.amount for entry in posting.entries if entry.direction is Direction.DEBIT)
    credits = add_up(entry.amount for entry in posting.entries if entry.direction is Direction.CREDIT)
    if debits != credits:
        reason = f"debits are {debits:f} and credits {credits:f}: they must be equal"
        raise at_path(Unbalanced(reason), f"{path}.entries")


def check_reference(reference: str, *, path: str) -> None:
    """A reference is short, and does not pass for that of a reversal."""
    if not 1 <= len(reference) <= LONGEST_REFERENCE:
        raise at_path(BadPosting(f"a reference has 1 to {LONGEST_REFERENCE} characters"), path)
    if reference.endswith(REVERSAL_SUFFIX):
        raise at_path(BadPosting(f"references of reversals end in {REVERSAL_SUFFIX}: choose another"), path)


def to_decimal(minor: int, currency: str) -> Decimal:
    """Minor units as an amount."""
    return Decimal(minor).scaleb(-MINOR_UNITS[currency])


@dataclass(frozen=True)
class Seal:
    """A link of the chain: what the database transactions in this range wrote, and the link before."""

    number: int
    first_xid: int
    next_xid: int
    transactions: int
    entries: int
    previous_hash: bytes
    hash: bytes
    format: int = SEAL_FORMAT


@dataclass(frozen=True)
class JournalLine:
    """An entry with its heading, as the seals cover it; whether it was reversed later is no part of it."""

    xid: int
    transaction_id: UUID
    reference: str
    currency: str
    total: int
    reverses_id: UUID | None
    hold_id: UUID | None
    reason: str | None
    posted_at: datetime
    line: int
    account_id: UUID
    version: int
    amount: int
    balance_after: int
    posted_by: str | None

    def digest(self, format: int) -> bytes:
        """Its fields, each with its length in front, so that none can pass for a part of another.

        Seals of format 1 are older than ``posted_by``.
        """
        fields = [
            str(self.xid), self.transaction_id.hex, self.reference, self.currency, str(self.total),
            self.reverses_id.hex if self.reverses_id else "", self.hold_id.hex if self.hold_id else "",
            self.reason or "", self.posted_at.astimezone(UTC).isoformat(timespec="microseconds"), str(self.line),
            self.account_id.hex, str(self.version), str(self.amount), str(self.balance_after),
        ]  # fmt: skip
        if format > 1:
            fields.append(self.posted_by or "")
        encoded = [field.encode() for field in fields]
        return hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in encoded)).digest()


class ChainHash:
    """The hash of one seal, line by line, so that a long range needs no memory."""

    def __init__(self, previous_hash: bytes, format: int) -> None:
        self._hash = hashlib.sha256(previous_hash)
        self._format = format
        self._last: UUID | None = None
        self.transactions = 0
        self.entries = 0

    def add(self, lines: Iterable[JournalLine]) -> None:
        """The next lines, in the order of the journal."""
        for line in lines:
            self._hash.update(line.digest(self._format))
            self.entries += 1
            self.transactions += line.transaction_id != self._last
            self._last = line.transaction_id

    def digest(self) -> bytes:
        """The seal's hash."""
        return self._hash.digest()


@dataclass(frozen=True)
class Violation:
    """The first row that breaks a rule."""

    rule: str
    table: str
    row: str


@dataclass(frozen=True)
class CheckResult:
    """What a check has found so far; ``next`` is where the following page begins."""

    is_sound: bool
    checked: int
    first_violation: Violation | None
    next: str | None
