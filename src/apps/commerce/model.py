"""What orders, payments and carts are, and what may happen to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

from apps.shared import money
from duly.errors import Conflict, Forbidden, Invalid, NotFound

PAYMENT_WINDOW = timedelta(minutes=15)
"""How long a customer has to pay; constraints of the store say '15 minutes', and a test compares."""
LAST_NET = timedelta(hours=48)
"""After this an order that is still unpaid is closed, whatever went wrong with its payment's timer."""
ABANDONED_AFTER = timedelta(hours=24)
"""Untouched for so long, a cart is abandoned; statements and constraints of the store say '24 hours'."""
MOST_LINES = 100
MOST_OF_ONE = 10_000


class OrderStatus(StrEnum):
    """Where an order stands; all but the first are final."""

    AWAITING_PAYMENT = "AWAITING_PAYMENT"
    PAID = "PAID"
    EXPIRED = "EXPIRED"


class PaymentStatus(StrEnum):
    """Where a payment stands; it ends as its order does."""

    PENDING = "PENDING"
    PAID = "PAID"
    EXPIRED = "EXPIRED"


class CartStatus(StrEnum):
    """Where a cart stands; all but the first are final."""

    OPEN = "OPEN"
    CHECKED_OUT = "CHECKED_OUT"
    ABANDONED = "ABANDONED"


class OrderNotFound(NotFound):
    """There is no such order."""


class CartNotFound(NotFound):
    """There is no such cart."""


class LinkNotFound(NotFound):
    """There is no such link, or it has expired."""


class NotYours(Forbidden):
    """Only the customer whose it is may do this."""


class AlreadyPaid(Conflict):
    """The order is paid already."""


class AlreadyExpired(Conflict):
    """The order was not paid in time and has expired."""


class CartClosed(Conflict):
    """The cart was checked out or abandoned."""


class CartEmpty(Conflict):
    """There is nothing in the cart."""


class CartFull(Conflict):
    """The cart has as many lines as it may have."""


class TooManyCarts(Conflict):
    """The customer has as many open carts as one may have."""


class TooManyLinks(Conflict):
    """The order has as many links as it may have."""


class BadLines(Invalid):
    """The lines cannot be an order's."""


@dataclass(frozen=True)
class Line:
    """So much of one thing at this price."""

    sku: str
    quantity: int
    unit_price: Decimal

    @property
    def amount(self) -> Decimal:
        """What the line costs."""
        return self.unit_price * self.quantity


def check_lines(lines: Sequence[Line], currency: str) -> Decimal:
    """What they cost together; refuses lines that no order may have."""
    if not 1 <= len(lines) <= MOST_LINES or not all(1 <= line.quantity <= MOST_OF_ONE for line in lines):
        raise BadLines(f"an order has 1 to {MOST_LINES} items, of each 1 to {MOST_OF_ONE}")
    for number, line in enumerate(lines):
        money.fit(line.unit_price, currency, path=f"$.items[{number}].unitPrice")
    return money.add_up(line.amount for line in lines)


@dataclass(frozen=True)
class Order:
    """What a customer ordered, and its payment."""

    id: UUID
    customer_id: str
    currency: str
    total: Decimal
    status: OrderStatus
    created_at: datetime
    updated_at: datetime
    payment_status: PaymentStatus
    due_at: datetime
    settled_at: datetime | None
    lines: tuple[Line, ...] = ()

    @property
    def is_settled(self) -> bool:
        """Whether it was paid or has expired."""
        return self.status is not OrderStatus.AWAITING_PAYMENT

    @property
    def closes_at(self) -> datetime:
        """When the last net closes it."""
        return self.created_at + LAST_NET

    def check_customer(self, by: str) -> None:
        """Refuse everybody else."""
        if by != self.customer_id:
            raise NotYours("the order is somebody else's")

    def check_payable(self) -> None:
        """It can be paid until it has expired; whether its time is over is for the timer to say, not for the clock."""
        if self.status is OrderStatus.EXPIRED:
            raise AlreadyExpired(f"the order has expired: it was to be paid by {self.due_at.isoformat()}")
        if self.is_settled:
            raise AlreadyPaid("the order was paid before")


@dataclass(frozen=True)
class Cart:
    """What a customer may order."""

    id: UUID
    customer_id: str
    currency: str
    status: CartStatus
    order_id: UUID | None
    created_at: datetime
    touched_at: datetime
    closed_at: datetime | None
    lines: tuple[Line, ...] = ()

    @property
    def total(self) -> Decimal:
        """What it would cost."""
        return money.add_up(line.amount for line in self.lines)

    def check_customer(self, by: str) -> None:
        """Refuse everybody else."""
        if by != self.customer_id:
            raise NotYours("the cart is somebody else's")

    def check_open(self) -> None:
        """What was checked out or abandoned is not changed any more."""
        if self.status is not CartStatus.OPEN:
            raise CartClosed(f"the cart is {self.status.value}: start a new one")


@dataclass(frozen=True)
class Link:
    """The secret of an order, shown once: whoever has it may read the order while it is valid."""

    token: str
    expires_at: datetime
