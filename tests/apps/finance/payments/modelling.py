"""What payments must do with money, as simply as it can be said: a model for the state machine to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from uuid import UUID

from apps.finance.payments.model import Report

ZERO = Decimal(0)


class Stands(Enum):
    """Where a payment stands, and the states that this may be."""

    DEAD = ("REJECTED", "FAILED")  # it never moved
    REVIEWED = ("PENDING_REVIEW",)
    MOVING = ("PROCESSING", "UNKNOWN", "FAILED")
    RETURNING = ("RETURNING",)
    COMPLETED = ("COMPLETED",)
    RETURNED = ("PERMANENTLY_FAILED",)


@dataclass(eq=False)
class Customer:
    """An account."""

    id: UUID
    balance: Decimal
    may_go_negative: bool = False
    held: Decimal = ZERO
    is_open: bool = True

    @property
    def spendable(self) -> Decimal:
        return self.balance - self.held


@dataclass
class Charge:
    """What the bank has of a payment."""

    status: str
    times: int = 1


@dataclass(eq=False)
class Known:
    """A payment."""

    id: UUID
    key: UUID
    payer: Customer
    payee: Customer
    amount: Decimal
    began_at: datetime
    stands: Stands = Stands.DEAD
    held: Decimal = ZERO  # at the recipient
    is_reversed: bool = False  # by a bookkeeper
    is_contradicted: bool = False
    is_disputed: bool = False  # a call named another amount, and nobody has looked at it
    was_given_up: bool = False

    @property
    def is_moving(self) -> bool:
        return self.stands in (Stands.MOVING, Stands.RETURNING)

    @property
    def is_stuck(self) -> bool:
        """Whether a person may decide."""
        return self.is_contradicted or self.stands is Stands.RETURNING

    @property
    def has_open_ends(self) -> bool:
        return self.payer.is_open and self.payee.is_open

    def hold(self) -> None:
        """For a review."""
        self.stands = Stands.REVIEWED
        self.payer.held += self.amount

    def end_review(self) -> None:
        self.stands = Stands.DEAD
        self.payer.held -= self.amount

    def post(self) -> None:
        """The money moves, and is held; of an overdrawn account, what lifts it above zero."""
        self.stands = Stands.MOVING
        self.move(self.amount)
        self.held = min(self.amount, max(ZERO, self.payee.spendable))
        self.payee.held += self.held

    def move(self, amount: Decimal) -> None:
        self.payer.balance -= amount
        self.payee.balance += amount

    def reverse(self) -> None:
        """By a bookkeeper: the hold stays until the payment is over."""
        self.is_reversed = True
        self.move(-self.amount)

    def tell(self, report: Report, amount: Decimal | None) -> None:
        """The bank says so."""
        is_settled, is_declined = report is Report.SETTLED, report is Report.DECLINED
        if self.is_contradicted or (self.is_moving and self.is_disputed and is_settled and amount is None):
            return
        is_back = self.is_reversed or self.stands in (Stands.RETURNING, Stands.RETURNED)
        is_other = amount is not None and amount != self.amount
        if is_other or (is_settled and is_back) or (is_declined and self.stands is Stands.COMPLETED):
            self.is_contradicted = True
        elif is_settled and self.stands is Stands.MOVING:
            self.complete()
        elif is_declined and self.stands is Stands.MOVING:
            self.give_back()

    def complete(self) -> None:
        self.stands = Stands.COMPLETED
        self.payee.held -= self.held

    def give_back(self) -> None:
        """Once; where an account is closed, it has to wait."""
        if not self.is_reversed and not self.has_open_ends:
            self.stands = Stands.RETURNING
            return
        if not self.is_reversed:
            self.move(-self.amount)
        self.stands = Stands.RETURNED
        self.payee.held -= self.held

    def can_be_resolved(self, *, is_return: bool) -> bool:
        if self.is_moving:
            return is_return or not self.is_reversed
        return is_return != (self.stands is Stands.COMPLETED)

    def resolve(self, *, is_return: bool) -> None:
        """By a person."""
        self.is_contradicted = False
        if self.is_moving and is_return:
            self.give_back()
        elif self.is_moving:
            self.complete()
