"""The facts of the ledger; the only door for other contexts.

What happens to one transaction, account or hold is published in order. A transaction touches several accounts: who
needs the order of one account's entries has their ``version``, which counts them without gaps.

Reversals say why, and holds are placed for reviews, too: both are internal, since they would tip off.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from duly import EventBody

TOPIC = "ledger.events"
CAMEL = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class AccountCreated(EventBody, type="account.created", topic=TOPIC, aggregate="account_id"):
    """An account can be posted to."""

    model_config = CAMEL
    account_id: UUID
    name: str
    type: str
    currency: str
    may_go_negative: bool


class AccountClosed(EventBody, type="account.closed", topic=TOPIC, aggregate="account_id"):
    """It is empty, and takes no more entries."""

    model_config = CAMEL
    account_id: UUID


class AccountReopened(EventBody, type="account.reopened", topic=TOPIC, aggregate="account_id"):
    """It takes entries again."""

    model_config = CAMEL
    account_id: UUID


class PostedEntry(BaseModel):
    """One line; ``version`` counts the entries of its account."""

    model_config = CAMEL
    account_id: UUID
    direction: str
    amount: str
    version: int


class TransactionPosted(EventBody, type="transaction.posted", topic=TOPIC, aggregate="transaction_id"):
    """Money moved: ``amount`` is the sum of the debits. The database writes this, in the statement that posts."""

    model_config = CAMEL
    transaction_id: UUID
    reference: str
    account_ids: list[UUID]
    amount: str
    currency: str
    posted_at: datetime
    entries: list[PostedEntry]
    hold_id: UUID | None = None


class TransactionReversed(
    EventBody, type="transaction.reversed", topic=TOPIC, aggregate="transaction_id", internal=True
):
    """It moved back: ``transaction_id`` is the original's; the entries are those of ``reversal_id``."""

    model_config = CAMEL
    transaction_id: UUID
    reversal_id: UUID
    reference: str
    reason: str
    account_ids: list[UUID]
    amount: str
    currency: str
    posted_at: datetime
    entries: list[PostedEntry]


class HoldPlaced(EventBody, type="hold.placed", topic=TOPIC, aggregate="hold_id", internal=True):
    """Money is set aside until then."""

    model_config = CAMEL
    hold_id: UUID
    account_id: UUID
    reference: str
    amount: str
    currency: str
    expires_at: datetime


class HoldCaptured(EventBody, type="hold.captured", topic=TOPIC, aggregate="hold_id", internal=True):
    """Some of it, or all, was paid; when it has not ended, the rest is still held."""

    model_config = CAMEL
    hold_id: UUID
    account_id: UUID
    transaction_id: UUID
    amount: str
    currency: str
    has_ended: bool


class HoldVoided(EventBody, type="hold.voided", topic=TOPIC, aggregate="hold_id", internal=True):
    """What was still held is available again, because somebody said so."""

    model_config = CAMEL
    hold_id: UUID
    account_id: UUID
    amount: str
    currency: str


class HoldExpired(EventBody, type="hold.expired", topic=TOPIC, aggregate="hold_id", internal=True):
    """What was still held is available again, because its time was over."""

    model_config = CAMEL
    hold_id: UUID
    account_id: UUID
    amount: str
    currency: str


class JournalSealed(EventBody, type="journal.sealed", topic=TOPIC, aggregate="journal"):
    """The head of the chain of hashes: kept somewhere else, it proves what the journal was."""

    model_config = CAMEL
    journal: str = "journal"
    number: int
    hash: str
    transactions: int
    entries: int
