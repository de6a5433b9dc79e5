"""The facts of payments; the only door for other contexts. What would tip off whoever is looked at is internal."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from duly import EventBody

TOPIC = "payments.events"
CAMEL = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class PaymentCreated(EventBody, type="payment.created", topic=TOPIC, aggregate="payment_id"):
    """It was approved and posted, and is on its way to the bank."""

    model_config = CAMEL
    payment_id: UUID
    from_account_id: UUID
    to_account_id: UUID
    amount: str
    currency: str
    transaction_id: UUID


class PaymentRejected(EventBody, type="payment.rejected", topic=TOPIC, aggregate="payment_id", internal=True):
    """The rules, or whoever reviewed it, said no: no money moved."""

    model_config = CAMEL
    payment_id: UUID
    from_account_id: UUID
    to_account_id: UUID
    amount: str
    currency: str
    reason: str
    decision_id: UUID | None


class PaymentPendingReview(
    EventBody, type="payment.pending_review", topic=TOPIC, aggregate="payment_id", readers=("COMPLIANCE_OFFICER",)
):
    """The rules want a person to decide; until then the money is on hold."""

    model_config = CAMEL
    payment_id: UUID
    from_account_id: UUID
    to_account_id: UUID
    amount: str
    currency: str
    decision_id: UUID
    hold_id: UUID


class PaymentFailed(EventBody, type="payment.failed", topic=TOPIC, aggregate="payment_id"):
    """There was no cover; or the bank did not take it, and it is tried again at ``next_retry_at``."""

    model_config = CAMEL
    payment_id: UUID
    reason: str
    retryable: bool
    attempts: int
    next_retry_at: datetime | None


class PaymentRetried(EventBody, type="payment.retried", topic=TOPIC, aggregate="payment_id"):
    """It is on its way to the bank once more."""

    model_config = CAMEL
    payment_id: UUID
    attempts: int


class PaymentUnknown(EventBody, type="payment.unknown", topic=TOPIC, aggregate="payment_id"):
    """Nobody here knows whether the bank has it: the bank is asked before anything else happens."""

    model_config = CAMEL
    payment_id: UUID
    reason: str
    attempts: int


class PaymentCompleted(EventBody, type="payment.completed", topic=TOPIC, aggregate="payment_id"):
    """The bank has settled it; the recipient can spend the money."""

    model_config = CAMEL
    payment_id: UUID
    amount: str
    currency: str
    transaction_id: UUID
    provider_ref: str | None


class PaymentPermanentlyFailed(
    EventBody, type="payment.permanently_failed", topic=TOPIC, aggregate="payment_id"
):  # fmt: skip
    """It will not arrive, and the money is back where it came from."""

    model_config = CAMEL
    payment_id: UUID
    amount: str
    currency: str
    reason: str
    transaction_id: UUID
    reversal_id: UUID


class PaymentContradicted(EventBody, type="payment.contradicted", topic=TOPIC, aggregate="payment_id", internal=True):
    """The bank said something that cannot be true of how the payment ended here: a person must look."""

    model_config = CAMEL
    payment_id: UUID
    state: str
    heard: str
