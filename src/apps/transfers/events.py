"""The facts of transfers; the only door for other contexts."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from duly import EventBody

TOPIC = "product-events"


class ProductRegistered(EventBody, type="ProductRegistered", topic=TOPIC, aggregate="product_id"):
    """A product has its first owner."""

    product_id: UUID
    name: str
    owner_id: str


class OwnershipTransferStarted(EventBody, type="OwnershipTransferStarted", topic=TOPIC, aggregate="product_id"):
    """The owner offers the product to somebody."""

    product_id: UUID
    transfer_id: UUID
    from_user_id: str
    to_user_id: str
    expires_at: datetime


class OwnershipTransferAccepted(EventBody, type="OwnershipTransferAccepted", topic=TOPIC, aggregate="product_id"):
    """The recipient is the owner now."""

    product_id: UUID
    transfer_id: UUID
    from_user_id: str
    to_user_id: str


class OwnershipTransferRejected(EventBody, type="OwnershipTransferRejected", topic=TOPIC, aggregate="product_id"):
    """The recipient does not want it."""

    product_id: UUID
    transfer_id: UUID
    from_user_id: str
    to_user_id: str


class OwnershipTransferCancelled(EventBody, type="OwnershipTransferCancelled", topic=TOPIC, aggregate="product_id"):
    """The owner took the offer back."""

    product_id: UUID
    transfer_id: UUID
    from_user_id: str
    to_user_id: str


class OwnershipTransferExpired(EventBody, type="OwnershipTransferExpired", topic=TOPIC, aggregate="product_id"):
    """Nobody accepted in time; the product stays where it was."""

    product_id: UUID
    transfer_id: UUID
    from_user_id: str
    to_user_id: str
