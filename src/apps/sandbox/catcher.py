"""A webhook's receiver to look at: keeps what arrives, and fails, stalls or refuses when it is told to.

It can be told for all messages (``PUT /sandbox/webhooks/mode``), or by a name in the message: who is called Fail, Stall
or Refuse is answered so, and everybody else is not.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from duly.http.bodies import read_json

PATH = "/sandbox/webhooks"
KEY_HEADER = "x-idempotency-key"
DELIVERY_HEADER = "x-delivery-id"  # of the engine's own webhooks
MOST_KEPT = 1_000
MOST_BYTES = 16_384
MOST_STALL_SECONDS = 60.0


class Mode(StrEnum):
    """How a message is answered."""

    ACCEPT = "accept"  # 202
    FAIL = "fail"  # 503: a later try may succeed
    STALL = "stall"  # no answer for a while, then 202
    REFUSE = "refuse"  # 410: never


class Orders(BaseModel):
    """How to answer from now on; ``count`` messages long, or until it is told otherwise."""

    model_config = ConfigDict(extra="forbid")

    mode: Mode
    count: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    seconds: Annotated[float, Field(gt=0, le=MOST_STALL_SECONDS)] = 20.0


@dataclass
class Caught:
    """What came under one key: the newest body, how often it came, and how that was answered."""

    number: int
    key: str
    body: Any
    count: int = 0
    statuses: list[int] = field(default_factory=list)


class Catcher:
    """The last thousand keys, in memory."""

    def __init__(self) -> None:
        self._caught: OrderedDict[str, Caught] = OrderedDict()
        self._orders = Orders(mode=Mode.ACCEPT)
        self._left: int | None = None
        self.total = 0

    def order(self, orders: Orders) -> None:
        """Answer like this from now on."""
        self._orders = orders
        self._left = orders.count

    def forget(self) -> None:
        """Start anew."""
        self._caught.clear()
        self.total = 0

    def newest(self, limit: int = MOST_KEPT) -> list[Caught]:
        """What arrived, the newest first."""
        return list(reversed(self._caught.values()))[:limit]

    async def catch(self, key: str, body: Any) -> int:
        """Take one message; the status to answer it with."""
        self.total += 1
        caught = self._caught.pop(key, None) or Caught(self.total, key, body)
        caught.body = body
        caught.count += 1
        self._caught[key] = caught
        while len(self._caught) > MOST_KEPT:
            self._caught.popitem(last=False)
        mode = self._mode_for(body)
        if mode is Mode.STALL:
            await asyncio.sleep(self._orders.seconds)
        status = {Mode.FAIL: 503, Mode.REFUSE: 410}.get(mode, 202)
        caught.statuses = [*caught.statuses[-9:], status]
        return status

    def _mode_for(self, body: Any) -> Mode:
        words = str(body.get("message", "")).lower() if isinstance(body, dict) else ""
        for mode in (Mode.FAIL, Mode.STALL, Mode.REFUSE):
            if f" {mode.value}!" in words:
                return mode
        if self._left is None:
            return self._orders.mode
        if self._left == 0:
            return Mode.ACCEPT
        self._left -= 1
        return self._orders.mode


def create_router(catcher: Catcher | None = None) -> APIRouter:
    """Its routes; whoever can reach a development server may use them."""
    router = APIRouter(prefix=PATH, include_in_schema=False)
    keeper = catcher or Catcher()

    @router.post("")
    async def catch(request: Request) -> Response:
        key = request.headers.get(KEY_HEADER) or request.headers.get(DELIVERY_HEADER, "")
        raw = await request.body()
        if not 1 <= len(key) <= 255 or len(raw) > MOST_BYTES:
            return Response(status_code=413 if key else 400)
        try:
            body = read_json(raw)  # what cannot be shown again is not kept
        except ValueError:
            return Response(status_code=400)
        return Response(status_code=await keeper.catch(key, body))

    @router.get("")
    async def show(limit: int = 50) -> JSONResponse:
        items = [vars(caught) for caught in keeper.newest(max(0, min(limit, MOST_KEPT)))]
        return JSONResponse({"total": keeper.total, "items": items})

    @router.put("/mode", status_code=204)
    async def order(orders: Orders) -> None:
        keeper.order(orders)

    @router.delete("", status_code=204)
    async def forget() -> None:
        keeper.forget()

    return router
