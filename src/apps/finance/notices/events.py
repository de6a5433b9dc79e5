"""Facts for whoever subscribed from outside: that something happened, and never why.

Which events of the financial core are public, and which are internal, is in docs/architecture/finance.md.
"""

from __future__ import annotations

from uuid import UUID

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from duly import EventBody

TOPIC = "notices.events"
CAMEL = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class PaymentDeclined(EventBody, type="payment.declined", topic=TOPIC, aggregate="payment_id"):
    """No money moved. Whether rules or a person said so, and which, would tip off whoever is looked at."""

    model_config = CAMEL
    payment_id: UUID
    amount: str
    currency: str


class TransactionReturned(EventBody, type="transaction.returned", topic=TOPIC, aggregate="transaction_id"):
    """It moved back. Why is between the books and whoever keeps them."""

    model_config = CAMEL
    transaction_id: UUID
    reversal_id: UUID
    amount: str
    currency: str
