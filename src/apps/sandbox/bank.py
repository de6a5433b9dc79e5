"""A bank that speaks the protocol of docs/howto/payments.md: accepts, declines, is busy, loses answers, and calls.

The last two digits of an amount say how it behaves; ``PUT /sandbox/bank/mode`` says it for the next requests. It keeps
what it has charged, by key, so that one can see that nothing was charged twice: ``GET /sandbox/bank/charges``.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx2
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import text

from duly.clock import unix_milliseconds
from duly.webhooks.signing import sign_plain

PATH = "/sandbox/bank"
SECRET = "sandbox-bank-secret-that-everybody-knows"  # noqa: S105 - of development, where everybody may know it
MOST_CHARGES = 10_000
MOST_STALL_SECONDS = 60.0
CALLBACK_SECONDS = 0.5
CALL_TRIES = 5
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
READ_NOW = text("SELECT duly.now()")


class Behaviour(StrEnum):
    """What happens to a request."""

    ACCEPT = "accept"  # PENDING, and a call that it is settled
    SETTLE = "settle"  # SETTLED at once
    DECLINE = "decline"  # DECLINED at once
    FAIL = "fail"  # PENDING, and a call that it failed
    BUSY = "busy"  # 503, nothing is taken
    LOSE = "lose"  # taken, and no answer
    DROP = "drop"  # not taken, and no answer
    GARBLE = "garble"  # taken, and an answer that nobody can read
    BREAK = "break"  # taken, and 500
    TWICE = "twice"  # PENDING, and the same call twice
    DISORDER = "disorder"  # PENDING, called settled, and then called pending
    LATE = "late"  # taken after so many seconds, when nobody waits for the answer any more
    EARLY = "early"  # the call comes before the answer


BY_CENTS = {
    "01": Behaviour.DECLINE, "02": Behaviour.FAIL, "03": Behaviour.BUSY, "04": Behaviour.LOSE, "05": Behaviour.DROP,
    "06": Behaviour.TWICE, "07": Behaviour.DISORDER, "08": Behaviour.EARLY, "09": Behaviour.SETTLE,
    "10": Behaviour.GARBLE, "11": Behaviour.BREAK, "12": Behaviour.LATE,
}  # fmt: skip
CALLS = {
    Behaviour.ACCEPT: ("SETTLED",), Behaviour.FAIL: ("FAILED",), Behaviour.TWICE: ("SETTLED", "SETTLED"),
    Behaviour.DISORDER: ("SETTLED", "PENDING"), Behaviour.EARLY: ("SETTLED",), Behaviour.LOSE: ("SETTLED",),
    Behaviour.GARBLE: ("SETTLED",), Behaviour.BREAK: ("SETTLED",),
}  # fmt: skip
BUSY_TIMES = 2  # by amount; then it is accepted


class Instruction(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    reference: Annotated[str, Field(min_length=1, max_length=200)]
    from_: str = Field(alias="from")
    to: str
    amount: str
    currency: str
    valid_until: datetime = Field(alias="validUntil")
    callback_url: str = Field(alias="callbackUrl")


class Orders(BaseModel):
    """How to answer from now on; ``count`` requests long, or until it is told otherwise. None: by the amount."""

    model_config = ConfigDict(extra="forbid")

    behaviour: Behaviour | None = None
    count: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    seconds: Annotated[float, Field(gt=0, le=MOST_STALL_SECONDS)] = 20.0
    calls: bool = True
    forgets_keys: bool = False  # a bad bank: the same key charges again


@dataclass
class Charge:
    """What it has of one key."""

    reference: str
    status: str
    amount: str
    currency: str
    times: int = 1
    calls: list[str] = field(default_factory=list)


class Bank:
    """What it was told, what it has charged, and every request and question in order; all in memory."""

    def __init__(self) -> None:
        self.orders = Orders()
        self._left: int | None = None
        self.charges: OrderedDict[str, Charge] = OrderedDict()
        self.log: list[tuple[str, str]] = []
        self._busy: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def order(self, orders: Orders) -> None:
        """Behave like this from now on."""
        self.orders, self._left = orders, orders.count

    def choose(self, given: Instruction) -> Behaviour:
        """How this request is treated."""
        if self._left == 0:
            self.order(Orders(calls=self.orders.calls))
        if self._left is not None:
            self._left -= 1
        if self.orders.behaviour is not None:
            return self.orders.behaviour
        chosen = BY_CENTS.get(given.amount.partition(".")[2], Behaviour.ACCEPT)
        if chosen is Behaviour.BUSY:
            self._busy[given.reference] = self._busy.get(given.reference, 0) + 1
            return chosen if self._busy[given.reference] <= BUSY_TIMES else Behaviour.ACCEPT
        return chosen

    async def take(self, given: Instruction, request: Request) -> Response:
        """A request to pay."""
        self._note("send", given.reference)
        behaviour = self.choose(given)
        seconds = self.orders.seconds
        if unix_milliseconds() > given.valid_until.timestamp() * 1000:
            return JSONResponse({"code": "expired"}, 410)
        known = self.charges.get(given.reference)
        if known is not None and not self.orders.forgets_keys:
            return self._answer(known)
        if behaviour is Behaviour.BUSY:
            return JSONResponse({"code": "busy"}, 503, headers={"Retry-After": "30"})
        if behaviour is Behaviour.DROP:
            await asyncio.sleep(seconds)
            return PlainTextResponse("", 504)
        if behaviour is Behaviour.LATE:
            late = asyncio.create_task(self._take_late(given, seconds))
            self._tasks.add(late)
            late.add_done_callback(self._tasks.discard)
            await asyncio.shield(late)
            return PlainTextResponse("", 504)
        charge = self._charge(given, behaviour, known)
        if self.orders.calls:
            await self._call_later(given, charge, behaviour, request)
        if behaviour is Behaviour.LOSE:
            await asyncio.sleep(seconds)
        if behaviour is Behaviour.GARBLE:
            return PlainTextResponse("<html>everything is fine</html>", 200)
        if behaviour in (Behaviour.BREAK, Behaviour.LOSE):
            return PlainTextResponse("", 500)
        return self._answer(charge)

    async def _take_late(self, given: Instruction, seconds: float) -> None:
        """Whoever sent it has gone; as long as it is valid it is taken all the same."""
        await asyncio.sleep(seconds)
        if unix_milliseconds() <= given.valid_until.timestamp() * 1000:
            self._charge(given, Behaviour.LATE, self.charges.get(given.reference))

    def find(self, key: str) -> Response:
        """A question about a payment."""
        self._note("ask", key)
        charge = self.charges.get(key)
        return self._answer(charge) if charge else JSONResponse({"code": "payment_not_found"}, 404)

    def _charge(self, given: Instruction, behaviour: Behaviour, known: Charge | None) -> Charge:
        if known is not None:
            known.times += 1
            return known
        status = {Behaviour.SETTLE: "SETTLED", Behaviour.DECLINE: "DECLINED"}.get(behaviour, "PENDING")
        charge = Charge(f"bank-{uuid4().hex[:20]}", status, given.amount, given.currency)
        self.charges[given.reference] = charge
        while len(self.charges) > MOST_CHARGES:
            self.charges.popitem(last=False)
        return charge

    def _answer(self, charge: Charge) -> Response:
        answer = {"reference": charge.reference, "status": charge.status}
        answer |= {"amount": charge.amount, "currency": charge.currency}
        return JSONResponse(answer | ({"reason": "no_such_payee"} if charge.status == "DECLINED" else {}), 202)

    async def _call_later(self, given: Instruction, charge: Charge, behaviour: Behaviour, request: Request) -> None:
        """Calls in the background, or before the answer; only to this machine."""
        if urlsplit(given.callback_url).hostname not in LOCAL:
            return
        calling = self._call(given, charge, behaviour, getattr(request.app.state, "db", None))
        if behaviour is Behaviour.EARLY:
            await calling
            return
        task = asyncio.create_task(calling)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, given: Instruction, charge: Charge, behaviour: Behaviour, db: Any) -> None:
        if behaviour is not Behaviour.EARLY:
            await asyncio.sleep(CALLBACK_SECONDS)
        event_id = str(uuid4())
        for status in CALLS.get(behaviour, ()):
            charge.status = {"SETTLED": "SETTLED", "FAILED": "DECLINED"}.get(status, charge.status)
            body = describe_call(charge, given.reference, status, event_id=event_id)
            event_id = event_id if behaviour is Behaviour.TWICE else str(uuid4())
            if await call(given.callback_url, body, timestamp=await read_time(db)):
                charge.calls.append(status)

    def _note(self, what: str, key: str) -> None:
        self.log.append((what, key))
        del self.log[: -2 * MOST_CHARGES]


def create_router(bank: Bank | None = None) -> APIRouter:
    """The routes of a bank of its own."""
    bank = bank or Bank()
    router = APIRouter(prefix=PATH, include_in_schema=False)

    @router.post("/payments")
    async def take(given: Instruction, request: Request) -> Response:
        return await bank.take(given, request)

    @router.get("/payments/{key}")
    async def find(key: str) -> Response:
        return bank.find(key)

    @router.put("/mode")
    async def order(orders: Orders) -> dict[str, Any]:
        bank.order(orders)
        return orders.model_dump()

    @router.get("/charges")
    async def list_charges() -> dict[str, Any]:
        return {key: vars(charge) for key, charge in bank.charges.items()}

    return router


def describe_call(charge: Charge, key: str, status: str, *, event_id: str) -> bytes:
    """The body of a callback."""
    said = {"providerEventId": event_id, "paymentRef": charge.reference, "clientRef": key, "status": status}
    return json.dumps(said | {"amount": charge.amount, "currency": charge.currency}).encode()


def sign(body: bytes, *, timestamp: int, secret: str = SECRET) -> dict[str, str]:
    """The headers of a callback."""
    signature = sign_plain(secret, f"{timestamp}.".encode() + body)
    return {
        "Content-Type": "application/json",
        "X-Provider-Signature": signature,
        "X-Provider-Timestamp": str(timestamp),
    }


async def read_time(db: Any) -> int:
    """Of the sandbox's clock, which somebody may have moved; without a database, this machine's."""
    if db is None:
        return unix_milliseconds() // 1000
    async with db.transaction() as tx:
        return int((await tx.execute(READ_NOW)).scalar_one().timestamp())


async def call(url: str, body: bytes, *, timestamp: int, secret: str = SECRET) -> bool:
    """Tell whoever asked for it; a few times, until it is heard."""
    headers = sign(body, timestamp=timestamp, secret=secret)
    async with httpx2.AsyncClient(timeout=5, trust_env=False) as client:
        for attempt in range(CALL_TRIES):
            try:
                if (await client.post(url, content=body, headers=headers)).status_code < 300:
                    return True
            except httpx2.HTTPError:
                pass  # tried again
            await asyncio.sleep(0.2 * 2**attempt)
    return False
