"""The use cases of transfers: each gets a transaction and never ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from apps.transfers import store
from apps.transfers.events import (
    OwnershipTransferAccepted,
    OwnershipTransferCancelled,
    OwnershipTransferExpired,
    OwnershipTransferRejected,
    OwnershipTransferStarted,
    ProductRegistered,
)
from apps.transfers.model import (
    REQUEST_MOVES,
    Notice,
    NoticeKind,
    Product,
    ProductDetails,
    ProductNotFound,
    ServiceRequest,
    ServiceRequestNotFound,
    TooManyRequests,
    Transfer,
    TransferNotFound,
    TransferPending,
    TransferStatus,
    status_of_new_request,
)
from duly import Event, EventBody, Tx, emit
from duly.ids import uuid7

EXPIRE_LIMIT = 10_000  # in one call and one commit; also the most that can be emitted at once
REQUESTS_SHOWN = 100
MOST_OPEN_REQUESTS = 100
NOTICES_KEPT_DAYS = 90
NOTICES_FORGOTTEN = 10_000  # a night

ENDINGS: dict[TransferStatus, Callable[..., EventBody]] = {
    TransferStatus.ACCEPTED: OwnershipTransferAccepted,
    TransferStatus.REJECTED: OwnershipTransferRejected,
    TransferStatus.CANCELLED: OwnershipTransferCancelled,
    TransferStatus.EXPIRED: OwnershipTransferExpired,
}


@dataclass(frozen=True)
class Sweep:
    """What one call expired, and whether there may be more."""

    expired_count: int
    has_more: bool


async def start_transfer(tx: Tx, product_id: UUID, *, by: str, to: str) -> Transfer:
    """Offer a product to another user (T1); an overdue offer that nobody swept yet ends here."""
    product = await _lock_product(tx, product_id)
    product.check_offer(by=by, to=to)
    events: list[EventBody] = []
    if (found := await store.lock_pending_transfer(tx, product_id)) is not None:
        pending, now = found
        expired = pending.expire(now)
        await store.end_transfer(tx, expired)  # its requests stay paused, for the new one
        events.append(_ending(expired))
    started = await store.insert_transfer(
        tx, transfer_id=uuid7(), product_id=product_id, from_user_id=by, to_user_id=to
    )
    if started is None:
        raise TransferPending("another transfer of this product has just been started")
    await store.move_requests(tx, [product_id], REQUEST_MOVES[started.status])
    events.append(
        OwnershipTransferStarted(
            product_id=product_id, transfer_id=started.id, from_user_id=by, to_user_id=to, expires_at=started.expires_at
        )
    )
    await emit(tx, *events)
    return started


async def accept_transfer(tx: Tx, transfer_id: UUID, *, by: str) -> Transfer:
    """The recipient becomes the owner (T1)."""
    return await _end_transfer(tx, transfer_id, lambda transfer, now: transfer.accept(by, now))


async def reject_transfer(tx: Tx, transfer_id: UUID, *, by: str) -> Transfer:
    """The recipient declines (T1)."""
    return await _end_transfer(tx, transfer_id, lambda transfer, now: transfer.reject(by, now))


async def cancel_transfer(tx: Tx, transfer_id: UUID, *, by: str) -> Transfer:
    """The owner who started it takes it back (T1)."""
    return await _end_transfer(tx, transfer_id, lambda transfer, now: transfer.cancel(by, now))


async def expire_pending(tx: Tx, *, limit: int = EXPIRE_LIMIT) -> Sweep:
    """Expire what nobody accepted in time, all of it or nothing; four statements however many there are (T3)."""
    locked = await store.lock_products_of_due_transfers(tx, limit=limit)
    expired = await store.expire_due_transfers(tx, locked) if locked else []
    if expired:
        product_ids = [transfer.product_id for transfer in expired]
        await store.move_requests(tx, product_ids, REQUEST_MOVES[TransferStatus.EXPIRED])
        await emit(tx, *map(_ending, expired))
    return Sweep(len(expired), has_more=len(locked) == limit)


async def register_product(tx: Tx, *, name: str, owner: str) -> Product:
    """A product, owned by whoever registers it (T1)."""
    product = await store.insert_product(tx, product_id=uuid7(), name=name, owner_id=owner)
    await emit(tx, ProductRegistered(product_id=product.id, name=name, owner_id=owner))
    return product


async def request_service(tx: Tx, product_id: UUID, *, by: str, description: str) -> ServiceRequest:
    """The owner asks for work on it; while it is on offer the request waits (T2)."""
    product = await _lock_product(tx, product_id)  # so that no transfer starts or ends between our statements
    product.check_owner(by)
    found = await store.lock_pending_transfer(tx, product_id)
    request = await store.insert_request(
        tx,
        request_id=uuid7(),
        product_id=product_id,
        requested_by=by,
        description=description,
        status=status_of_new_request(found[0] if found else None),
        most=MOST_OPEN_REQUESTS,
    )
    if request is None:  # the sweep moves all of a product's requests in one statement: there is a limit to them
        raise TooManyRequests(f"{MOST_OPEN_REQUESTS} service requests of this product are open already")
    return request


async def read_product(tx: Tx, product_id: UUID, *, by: str) -> ProductDetails:
    """For its owner, and without its service requests for whom it is offered to."""
    details = await store.find_product_details(tx, product_id, limit=REQUESTS_SHOWN)
    if details is None:
        raise ProductNotFound(f"no product has the id {product_id}")
    return details.shown_to(by)


async def read_transfer(tx: Tx, transfer_id: UUID, *, by: str) -> Transfer:
    """For the two whom it concerns."""
    transfer = await store.find_transfer(tx, transfer_id)
    if transfer is None:
        raise TransferNotFound(f"no transfer has the id {transfer_id}")
    transfer.check_reader(by)
    return transfer


async def read_request(tx: Tx, request_id: UUID, *, by: str) -> ServiceRequest:
    """For the product's owner."""
    found = await store.find_request(tx, request_id)
    if found is None:
        raise ServiceRequestNotFound(f"no service request has the id {request_id}")
    request, owner_id = found
    request.check_reader(by, owner_id=owner_id)
    return request


async def notify_owner(tx: Tx, event: Event) -> None:
    """Tell the original owner that nobody accepted (T7); the inbox sees to it that it is once."""
    expired = event.body(OwnershipTransferExpired)
    await store.insert_notice(
        tx,
        notice_id=uuid7(),
        event_id=event.id,
        user_id=expired.from_user_id,
        kind=NoticeKind.TRANSFER_EXPIRED,
        transfer_id=expired.transfer_id,
        product_id=expired.product_id,
    )


async def forget_notices(tx: Tx, *, days: int = NOTICES_KEPT_DAYS, limit: int = NOTICES_FORGOTTEN) -> int:
    """Drop what users were told long ago; how many."""
    return await store.forget_notices(tx, days=days, limit=limit)


async def list_notices(
    tx: Tx, *, user: str, before: UUID | None = None, limit: int = 50
) -> tuple[list[Notice], UUID | None]:
    """A page of a user's own, and where the next one begins (T7)."""
    found = await store.list_notices(tx, user_id=user, before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1].id if len(found) > limit else None


async def _end_transfer(tx: Tx, transfer_id: UUID, decide: Callable[[Transfer, datetime], Transfer]) -> Transfer:
    product = await store.lock_product_of(tx, transfer_id)
    if product is None:
        raise TransferNotFound(f"no transfer has the id {transfer_id}")
    transfer, now = await store.lock_transfer(tx, transfer_id)
    ended = decide(transfer, now)
    await store.end_transfer(tx, ended)
    if ended.status is TransferStatus.ACCEPTED:
        await store.change_owner(tx, product.id, owner_id=ended.to_user_id)
    await store.move_requests(tx, [product.id], REQUEST_MOVES[ended.status])
    await emit(tx, _ending(ended))
    return ended


def _ending(ended: Transfer) -> EventBody:
    return ENDINGS[ended.status](
        product_id=ended.product_id,
        transfer_id=ended.id,
        from_user_id=ended.from_user_id,
        to_user_id=ended.to_user_id,
    )


async def _lock_product(tx: Tx, product_id: UUID) -> Product:
    product = await store.lock_product(tx, product_id)
    if product is None:
        raise ProductNotFound(f"no product has the id {product_id}")
    return product
