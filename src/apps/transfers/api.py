"""The routes of transfers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import Response
from pydantic import BaseModel, ConfigDict, StringConstraints
from pydantic.alias_generators import to_camel

from apps.shared.text import EXACT, Name, PageSize, Prose
from apps.transfers import service
from apps.transfers.gateways import EXPIRE_PATH, EXPIRE_SCOPE, MORE_HEADER
from apps.transfers.model import NoticeKind, ProductDetails, RequestStatus, TransferStatus
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.http import RequestTx, Router

SCOPE = "transfers"
User = Annotated[Principal, require(SCOPE)]
Service = Annotated[Principal, require(EXPIRE_SCOPE)]

router = Router(tags=["transfers"])


UserId = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=EXACT)]
"""As long as a token's subject may be."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class _View(BaseModel):
    model_config = ConfigDict(from_attributes=True, alias_generator=to_camel, populate_by_name=True)


class NewProduct(_Body):
    """Something to own."""

    name: Name


class NewTransfer(_Body):
    """Whom to offer it to."""

    to_user_id: UserId


class NewServiceRequest(_Body):
    """What is to be done."""

    description: Prose


class Nothing(_Body):
    """There is nothing to say."""


class RequestInProduct(_View):
    """A service request, where its product is shown."""

    id: UUID
    description: str
    status: RequestStatus
    created_at: datetime
    updated_at: datetime


class ServiceRequestView(RequestInProduct):
    """A service request."""

    product_id: UUID
    requested_by: str


class ProductView(_View):
    """A product, with the transfer that is pending and the newest of its service requests."""

    id: UUID
    name: str
    owner_id: str
    created_at: datetime
    pending_transfer_id: UUID | None
    service_requests: list[RequestInProduct]


class TransferView(_View):
    """A transfer; it can be accepted until ``expiresAt``."""

    id: UUID
    product_id: UUID
    from_user_id: str
    to_user_id: str
    status: TransferStatus
    created_at: datetime
    expires_at: datetime
    updated_at: datetime


class NoticeView(_View):
    """What happened."""

    id: UUID
    kind: NoticeKind
    transfer_id: UUID
    product_id: UUID
    created_at: datetime


class NoticePage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[NoticeView]
    next: UUID | None


class ExpiredView(_View):
    """How many expired in this call."""

    expired_count: int


@router.post("/v1/products", status_code=201)
async def register_product(new: NewProduct, caller: User, tx: RequestTx, response: Response) -> ProductView:
    """Register a product of the caller's."""
    product = await service.register_product(tx, name=new.name, owner=caller.subject)
    response.headers["Location"] = f"/v1/products/{product.id}"
    return _show(ProductDetails(product, None, None, ()))


@router.get("/v1/products/{product_id}")
async def read_product(product_id: UUID, caller: User, tx: RequestTx) -> ProductView:
    """One of the caller's, or one that is offered to the caller."""
    return _show(await service.read_product(tx, product_id, by=caller.subject))


@router.post("/v1/products/{product_id}/transfers", status_code=201)
async def start_transfer(
    product_id: UUID, new: NewTransfer, caller: User, tx: RequestTx, response: Response
) -> TransferView:
    """Offer it to another user, who has 72 hours to accept."""
    transfer = await service.start_transfer(tx, product_id, by=caller.subject, to=new.to_user_id)
    response.headers["Location"] = f"/v1/transfers/{transfer.id}"
    return TransferView.model_validate(transfer)


@router.get("/v1/transfers/{transfer_id}")
async def read_transfer(transfer_id: UUID, caller: User, tx: RequestTx) -> TransferView:
    """One from or to the caller."""
    return TransferView.model_validate(await service.read_transfer(tx, transfer_id, by=caller.subject))


@router.post("/v1/transfers/{transfer_id}/accept")
async def accept_transfer(transfer_id: UUID, caller: User, tx: RequestTx) -> TransferView:
    """The caller, to whom it is offered, becomes the owner; open service requests are cancelled."""
    return TransferView.model_validate(await service.accept_transfer(tx, transfer_id, by=caller.subject))


@router.post("/v1/transfers/{transfer_id}/reject")
async def reject_transfer(transfer_id: UUID, caller: User, tx: RequestTx) -> TransferView:
    """The caller, to whom it is offered, declines; paused service requests go on."""
    return TransferView.model_validate(await service.reject_transfer(tx, transfer_id, by=caller.subject))


@router.post("/v1/transfers/{transfer_id}/cancel")
async def cancel_transfer(transfer_id: UUID, caller: User, tx: RequestTx) -> TransferView:
    """The caller, who started it, takes it back; paused service requests go on."""
    return TransferView.model_validate(await service.cancel_transfer(tx, transfer_id, by=caller.subject))


@router.post("/v1/products/{product_id}/service-requests", status_code=201)
async def request_service(
    product_id: UUID, new: NewServiceRequest, caller: User, tx: RequestTx, response: Response
) -> ServiceRequestView:
    """Ask for work on a product of the caller's; it is paused while a transfer is pending."""
    request = await service.request_service(tx, product_id, by=caller.subject, description=new.description)
    response.headers["Location"] = f"/v1/service-requests/{request.id}"
    return ServiceRequestView.model_validate(request)


@router.get("/v1/service-requests/{request_id}")
async def read_request(request_id: UUID, caller: User, tx: RequestTx) -> ServiceRequestView:
    """One for a product of the caller's."""
    return ServiceRequestView.model_validate(await service.read_request(tx, request_id, by=caller.subject))


@router.get("/v1/notices")
async def list_notices(caller: User, tx: RequestTx, before: UUID | None = None, limit: PageSize = 50) -> NoticePage:
    """A page of what the caller was told."""
    items, following = await service.list_notices(tx, user=caller.subject, before=before, limit=limit)
    return NoticePage(items=[NoticeView.model_validate(item) for item in items], next=following)


@router.post(EXPIRE_PATH)
async def expire_pending(
    _caller: Service, tx: RequestTx, response: Response, _body: Nothing | None = None
) -> ExpiredView:
    """Expire what nobody accepted in 72 hours; the header ``Duly-More: true`` says that there may be more."""
    sweep = await service.expire_pending(tx)
    if sweep.has_more:
        response.headers[MORE_HEADER] = "true"
    return ExpiredView(expired_count=sweep.expired_count)


def _show(details: ProductDetails) -> ProductView:
    return ProductView(
        id=details.product.id,
        name=details.product.name,
        owner_id=details.product.owner_id,
        created_at=details.product.created_at,
        pending_transfer_id=details.pending_transfer_id,
        service_requests=[RequestInProduct.model_validate(request) for request in details.service_requests],
    )
