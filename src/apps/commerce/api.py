"""The routes of commerce."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import Path, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from apps.commerce import service
from apps.commerce.model import (
    MOST_LINES,
    MOST_OF_ONE,
    Cart,
    CartStatus,
    Line,
    Order,
    OrderStatus,
    PaymentStatus,
)
from apps.shared import money
from apps.shared.money import Amount, Currency
from apps.shared.text import PageSize
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.http import RequestTx, Router

Customer = Annotated[Principal, require("commerce")]
SKU = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Sku = Annotated[str, StringConstraints(pattern=SKU)]
SkuInPath = Annotated[str, Path(pattern=SKU)]
TokenInPath = Annotated[str, Path(min_length=1, max_length=200)]
NO_STORE = {"Cache-Control": "no-store"}

router = Router(prefix="/v1", tags=["commerce"])


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class _View(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class NewLine(_Body):
    """So much of one thing at this price."""

    sku: Sku
    quantity: int = Field(ge=1, le=MOST_OF_ONE, strict=True)
    unit_price: Amount


class NewOrder(_Body):
    """What is ordered; all prices are in one currency."""

    currency: Currency
    items: list[NewLine] = Field(min_length=1, max_length=MOST_LINES)


class NewCart(_Body):
    """All prices in it will be in this currency."""

    currency: Currency


class NewQuantity(_Body):
    """How much of it, at which price; with a quantity of 0 it is taken out, and needs no price."""

    quantity: int = Field(ge=0, le=MOST_OF_ONE, strict=True)
    unit_price: Amount | None = None

    @model_validator(mode="after")
    def _is_priced(self) -> NewQuantity:
        if self.quantity and self.unit_price is None:
            raise ValueError("unitPrice is missing")
        return self


class LineView(_View):
    """A line, and what it costs."""

    sku: str
    quantity: int
    unit_price: str
    amount: str


class PaymentView(_View):
    """An order's payment; the order can be paid until it has expired."""

    status: PaymentStatus
    due_at: datetime
    settled_at: datetime | None


class OrderSummary(_View):
    """An order, where many are listed; amounts are exact decimals as text."""

    id: UUID
    status: OrderStatus
    currency: str
    total: str
    payment: PaymentView
    created_at: datetime
    updated_at: datetime


class OrderView(OrderSummary):
    """An order."""

    items: list[LineView]


class OrderPage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[OrderSummary]
    next: UUID | None


class CartView(_View):
    """A cart; when it was checked out, ``orderId`` is what became of it."""

    id: UUID
    status: CartStatus
    currency: str
    total: str
    items: list[LineView]
    order_id: UUID | None
    created_at: datetime
    touched_at: datetime


class LinkView(_View):
    """A secret that is shown once: whoever has it may read the order until it expires."""

    token: str
    expires_at: datetime


@router.post("/orders", status_code=201)
async def place_order(new: NewOrder, caller: Customer, tx: RequestTx, response: Response) -> OrderView:
    """Order something; it is to be paid within 15 minutes."""
    lines = [Line(item.sku, item.quantity, item.unit_price) for item in new.items]
    order = await service.place_order(tx, customer=caller.subject, currency=new.currency, lines=lines)
    response.headers["Location"] = f"/v1/orders/{order.id}"
    return _show_order(order)


@router.get("/orders")
async def list_orders(caller: Customer, tx: RequestTx, before: UUID | None = None, limit: PageSize = 50) -> OrderPage:
    """A page of the caller's own."""
    items, following = await service.list_orders(tx, customer=caller.subject, before=before, limit=limit)
    return OrderPage(items=[_summarise(order) for order in items], next=following)


@router.get("/orders/{order_id}")
async def read_order(order_id: UUID, caller: Customer, tx: RequestTx) -> OrderView:
    """One of the caller's own."""
    return _show_order(await service.read_order(tx, order_id, by=caller.subject))


@router.post("/orders/{order_id}/pay")
async def pay_order(order_id: UUID, caller: Customer, tx: RequestTx) -> OrderView:
    """Pay it; 409 when it was paid before, or has expired."""
    return _show_order(await service.pay_order(tx, order_id, by=caller.subject))


# The answer is a secret, and what is answered to a key is stored: this route takes none. Asked twice, it makes two.
@router.post("/orders/{order_id}/links", status_code=201, openapi_extra={"x-idempotent": False})
async def make_link(order_id: UUID, caller: Customer, tx: RequestTx, response: Response) -> LinkView:
    """A secret link, valid for seven days, by which another customer may read the order."""
    link = await service.make_link(tx, order_id, by=caller.subject)
    response.headers.update(NO_STORE)
    return LinkView(token=link.token, expires_at=link.expires_at)


@router.get("/order-links/{token}")
async def follow_link(token: TokenInPath, _caller: Customer, tx: RequestTx, response: Response) -> OrderView:
    """The order of a link; 404 when it has expired, as when it never was."""
    response.headers.update(NO_STORE)
    return _show_order(await service.follow_link(tx, token))


@router.post("/carts", status_code=201)
async def open_cart(new: NewCart, caller: Customer, tx: RequestTx, response: Response) -> CartView:
    """An empty cart."""
    cart = await service.open_cart(tx, customer=caller.subject, currency=new.currency)
    response.headers["Location"] = f"/v1/carts/{cart.id}"
    return _show_cart(cart)


@router.get("/carts/{cart_id}")
async def read_cart(cart_id: UUID, caller: Customer, tx: RequestTx) -> CartView:
    """One of the caller's own."""
    return _show_cart(await service.read_cart(tx, cart_id, by=caller.subject))


@router.put("/carts/{cart_id}/items/{sku}")
async def put_item(cart_id: UUID, sku: SkuInPath, new: NewQuantity, caller: Customer, tx: RequestTx) -> CartView:
    """So much of it is in the cart from now on; none, with a quantity of 0."""
    if not new.quantity or new.unit_price is None:
        return _show_cart(await service.remove_item(tx, cart_id, sku, by=caller.subject))
    line = Line(sku, new.quantity, new.unit_price)
    return _show_cart(await service.put_item(tx, cart_id, line, by=caller.subject))


@router.post("/carts/{cart_id}/checkout", status_code=201)
async def check_out(cart_id: UUID, caller: Customer, tx: RequestTx, response: Response) -> OrderView:
    """Order what is in the cart, once; it is to be paid within 15 minutes."""
    order = await service.check_out(tx, cart_id, by=caller.subject)
    response.headers["Location"] = f"/v1/orders/{order.id}"
    return _show_order(order)


def _summarise(order: Order) -> OrderSummary:
    return OrderSummary(
        id=order.id,
        status=order.status,
        currency=order.currency,
        total=money.show(order.total, order.currency),
        payment=PaymentView(status=order.payment_status, due_at=order.due_at, settled_at=order.settled_at),
        created_at=order.created_at,
        updated_at=order.updated_at,
    )


def _show_order(order: Order) -> OrderView:
    summary = _summarise(order)
    return OrderView(**dict(summary), items=_show_lines(order.lines, order.currency))


def _show_cart(cart: Cart) -> CartView:
    return CartView(
        id=cart.id,
        status=cart.status,
        currency=cart.currency,
        total=money.show(cart.total, cart.currency),
        items=_show_lines(cart.lines, cart.currency),
        order_id=cart.order_id,
        created_at=cart.created_at,
        touched_at=cart.touched_at,
    )


def _show_lines(lines: Iterable[Line], currency: str) -> list[LineView]:
    return [
        LineView(
            sku=line.sku,
            quantity=line.quantity,
            unit_price=money.show(line.unit_price, currency),
            amount=money.show(line.amount, currency),
        )
        for line in lines
    ]
