"""What products, transfers and service requests are, and what may happen to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from duly.errors import Conflict, Forbidden, Invalid, NotFound

ACCEPTANCE_WINDOW = timedelta(hours=72)
"""How long the recipient has; the statements and constraints of the store say '72 hours', and a test compares."""


class TransferStatus(StrEnum):
    """Where a transfer stands; all but the first are final."""

    PENDING = "Pending"
    ACCEPTED = "Accepted"
    REJECTED = "Rejected"
    CANCELLED = "Cancelled"
    EXPIRED = "Expired"


class RequestStatus(StrEnum):
    """Where a service request stands."""

    IN_PROGRESS = "InProgress"
    PAUSED = "Paused"
    CANCELLED = "Cancelled"


class NoticeKind(StrEnum):
    """What a user is told."""

    TRANSFER_EXPIRED = "TransferExpired"


class ProductNotFound(NotFound):
    """There is no such product."""


class TransferNotFound(NotFound):
    """There is no such transfer."""


class ServiceRequestNotFound(NotFound):
    """There is no such service request."""


class TooManyRequests(Conflict):
    """The product has as many open service requests as it may have."""


class NotOwner(Forbidden):
    """Only the product's owner may do this."""


class NotRecipient(Forbidden):
    """Only the recipient of the transfer may do this."""


class NotStarter(Forbidden):
    """Only the owner who started the transfer may do this."""


class NotYours(Forbidden):
    """Only those whom it concerns may see this."""


class SelfTransfer(Invalid):
    """A product cannot be transferred to its owner."""


class TransferPending(Conflict):
    """A transfer of this product is pending already."""


class TransferClosed(Conflict):
    """The transfer has ended before."""


class TransferExpired(Conflict):
    """The transfer was not accepted within 72 hours."""


@dataclass(frozen=True)
class Product:
    """Something that belongs to somebody."""

    id: UUID
    name: str
    owner_id: str
    created_at: datetime

    def check_owner(self, by: str) -> None:
        """Refuse everybody else."""
        if by != self.owner_id:
            raise NotOwner("the product belongs to somebody else")

    def check_offer(self, *, by: str, to: str) -> None:
        """Refuse an offer that is not the owner's to make, or that would change nothing."""
        self.check_owner(by)
        if to == self.owner_id:
            raise SelfTransfer("toUserId is the owner: name another user")


@dataclass(frozen=True)
class Transfer:
    """An offer of one product to one user. Each step is a new value; a step that is not allowed raises."""

    id: UUID
    product_id: UUID
    from_user_id: str
    to_user_id: str
    status: TransferStatus
    created_at: datetime
    updated_at: datetime

    @property
    def expires_at(self) -> datetime:
        """The last moment at which it can be accepted."""
        return self.created_at + ACCEPTANCE_WINDOW

    def is_overdue(self, now: datetime) -> bool:
        """Whether the window is over; at the last moment itself it is not."""
        return self.created_at < now - ACCEPTANCE_WINDOW

    def accept(self, by: str, now: datetime) -> Transfer:
        """The recipient takes the product."""
        self._check_recipient(by)
        return self._end(TransferStatus.ACCEPTED, now)

    def reject(self, by: str, now: datetime) -> Transfer:
        """The recipient does not want it."""
        self._check_recipient(by)
        return self._end(TransferStatus.REJECTED, now)

    def cancel(self, by: str, now: datetime) -> Transfer:
        """Who started it takes it back."""
        if by != self.from_user_id:
            raise NotStarter("somebody else started this transfer")
        return self._end(TransferStatus.CANCELLED, now)

    def expire(self, now: datetime) -> Transfer:
        """The window is over; while it is not, another transfer has to wait."""
        self._check_open()
        if not self.is_overdue(now):
            raise TransferPending(f"the transfer {self.id} is pending until {self.expires_at.isoformat()}")
        return replace(self, status=TransferStatus.EXPIRED, updated_at=now)

    def check_reader(self, by: str) -> None:
        """Only the two whom it concerns."""
        if by not in (self.from_user_id, self.to_user_id):
            raise NotYours("the transfer is between other users")

    def _end(self, status: TransferStatus, now: datetime) -> Transfer:
        self._check_open()
        if self.is_overdue(now):
            raise TransferExpired(f"the transfer expired at {self.expires_at.isoformat()}")
        return replace(self, status=status, updated_at=now)

    def _check_recipient(self, by: str) -> None:
        if by != self.to_user_id:
            raise NotRecipient("the product is offered to somebody else")

    def _check_open(self) -> None:
        if self.status is TransferStatus.EXPIRED:
            raise TransferExpired(f"the transfer expired at {self.expires_at.isoformat()}")
        if self.status is not TransferStatus.PENDING:
            raise TransferClosed(f"the transfer is {self.status.value}")


@dataclass(frozen=True)
class ServiceRequest:
    """Work on a product that its owner asked for."""

    id: UUID
    product_id: UUID
    requested_by: str
    description: str
    status: RequestStatus
    created_at: datetime
    updated_at: datetime

    def check_reader(self, by: str, *, owner_id: str) -> None:
        """Only who owns the product now."""
        if by != owner_id:
            raise NotOwner("the product belongs to somebody else")


@dataclass(frozen=True)
class RequestMove:
    """What becomes of a product's service requests: those that were like this are like that."""

    was: tuple[RequestStatus, ...]
    becomes: RequestStatus


REQUEST_MOVES = {
    TransferStatus.PENDING: RequestMove((RequestStatus.IN_PROGRESS,), RequestStatus.PAUSED),
    TransferStatus.ACCEPTED: RequestMove((RequestStatus.IN_PROGRESS, RequestStatus.PAUSED), RequestStatus.CANCELLED),
    TransferStatus.REJECTED: RequestMove((RequestStatus.PAUSED,), RequestStatus.IN_PROGRESS),
    TransferStatus.CANCELLED: RequestMove((RequestStatus.PAUSED,), RequestStatus.IN_PROGRESS),
    TransferStatus.EXPIRED: RequestMove((RequestStatus.PAUSED,), RequestStatus.IN_PROGRESS),
}
"""T2, by what the transfer has become."""


def status_of_new_request(pending: Transfer | None) -> RequestStatus:
    """One that is made while the product is on offer waits like the others."""
    return RequestStatus.IN_PROGRESS if pending is None else RequestStatus.PAUSED


@dataclass(frozen=True)
class ProductDetails:
    """A product, the transfer that is pending, and its newest service requests, all of the same moment."""

    product: Product
    pending_transfer_id: UUID | None
    pending_for: str | None
    service_requests: tuple[ServiceRequest, ...]

    def shown_to(self, by: str) -> ProductDetails:
        """All of it to the owner; to whoever may become the owner, not what the owner asked for."""
        if by == self.product.owner_id:
            return self
        if by != self.pending_for:
            raise NotYours("the product belongs to somebody else")
        return replace(self, service_requests=())


@dataclass(frozen=True)
class Notice:
    """Something a user is told."""

    id: UUID
    event_id: UUID
    user_id: str
    kind: NoticeKind
    transfer_id: UUID
    product_id: UUID
    created_at: datetime
