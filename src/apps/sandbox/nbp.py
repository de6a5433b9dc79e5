"""The National Bank of Poland's web API as far as we call it: table A of any day, with invented rates.

The same day always has the same rates, weekends and fixed holidays have none, and a future day is a day like any other.
It can be told to answer badly (``PUT /sandbox/nbp/mode``), to see what comes of that.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import date, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

PATH = "/sandbox/nbp"
NO_DATA = "404 NotFound - Not Found - Brak danych"
MOST_STALL_SECONDS = 60.0
HOLIDAYS = frozenset({(1, 1), (1, 6), (5, 1), (5, 3), (8, 15), (11, 1), (11, 11), (12, 24), (12, 25), (12, 26)})
CURRENCIES = {
    "THB": ("bat (Tajlandia)", "0.1127"), "USD": ("dolar amerykański", "3.6543"),
    "AUD": ("dolar australijski", "2.3960"), "HKD": ("dolar Hongkongu", "0.4702"),
    "CAD": ("dolar kanadyjski", "2.6041"), "NZD": ("dolar nowozelandzki", "2.0877"),
    "SGD": ("dolar singapurski", "2.8114"), "EUR": ("euro", "4.2358"), "HUF": ("forint (Węgry)", "0.010962"),
    "CHF": ("frank szwajcarski", "4.5571"), "GBP": ("funt szterling", "4.8093"),
    "UAH": ("hrywna (Ukraina)", "0.0868"), "JPY": ("jen (Japonia)", "0.023654"),
    "CZK": ("korona czeska", "0.1744"), "DKK": ("korona duńska", "0.5672"), "ISK": ("korona islandzka", "0.029027"),
    "NOK": ("korona norweska", "0.3617"), "SEK": ("korona szwedzka", "0.3864"), "RON": ("lej rumuński", "0.8330"),
    "TRY": ("lira turecka", "0.0865"), "ILS": ("nowy izraelski szekel", "1.1318"),
    "CLP": ("peso chilijskie", "0.003914"), "PHP": ("peso filipińskie", "0.0621"),
    "MXN": ("peso meksykańskie", "0.1988"), "ZAR": ("rand (Republika Południowej Afryki)", "0.2134"),
    "BRL": ("real (Brazylia)", "0.6877"), "MYR": ("ringgit (Malezja)", "0.8842"),
    "IDR": ("rupia indonezyjska", "0.00021842"), "INR": ("rupia indyjska", "0.041207"),
    "KRW": ("won południowokoreański", "0.002491"), "CNY": ("yuan renminbi (Chiny)", "0.5134"),
    "XDR": ("SDR (MFW)", "4.9603"),
}  # fmt: skip


class Mode(StrEnum):
    """How a question is answered."""

    ANSWER = "answer"
    MALFORMED = "malformed"  # half of a table
    HTML = "html"  # a page that says it is fine
    FAIL = "fail"  # 503
    STALL = "stall"  # no answer for a while, then the table


class Orders(BaseModel):
    """How to answer from now on; ``count`` questions long, or until it is told otherwise."""

    model_config = ConfigDict(extra="forbid")

    mode: Mode
    count: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    seconds: Annotated[float, Field(gt=0, le=MOST_STALL_SECONDS)] = 30.0


class Bank:
    """Answers as it was told, in memory."""

    def __init__(self) -> None:
        self._orders = Orders(mode=Mode.ANSWER)
        self._left: int | None = None

    def order(self, orders: Orders) -> None:
        """Answer like this from now on."""
        self._orders = orders
        self._left = orders.count

    async def answer(self, day: date) -> Response:
        """What the bank says of this day."""
        orders = self._take()
        if orders.mode is Mode.STALL:
            await asyncio.sleep(orders.seconds)
        if orders.mode is Mode.FAIL:
            return PlainTextResponse("503 Service Unavailable", status_code=503)
        if orders.mode is Mode.HTML:
            return HTMLResponse("<html><body>Wszystko w porządku</body></html>")
        if not is_published(day):
            return PlainTextResponse(NO_DATA, status_code=404)
        text = write_table(day)
        if orders.mode is Mode.MALFORMED:
            text = text[: len(text) // 2]
        return Response(text, media_type="application/json; charset=utf-8")

    def _take(self) -> Orders:
        if self._left == 0:
            self.order(Orders(mode=Mode.ANSWER))
        if self._left is not None:
            self._left -= 1
        return self._orders


def create_router() -> APIRouter:
    """The routes of a bank of its own."""
    bank = Bank()
    router = APIRouter(prefix=PATH, include_in_schema=False)

    @router.get("/api/exchangerates/tables/{table}/{day}/")
    async def read_table(table: str, day: str) -> Response:
        try:
            wanted = date.fromisoformat(day)
        except ValueError:
            return PlainTextResponse("400 BadRequest - Błędny zakres dat / Invalid date range", status_code=400)
        if table.upper() != "A":
            return PlainTextResponse(NO_DATA, status_code=404)
        return await bank.answer(wanted)

    @router.put("/mode")
    async def order(orders: Orders) -> dict[str, Any]:
        bank.order(orders)
        return orders.model_dump()

    return router


def is_published(day: date) -> bool:
    """Whether the bank works on this day."""
    return day.isoweekday() <= 5 and (day.month, day.day) not in HOLIDAYS


def write_table(day: date) -> str:
    """The table as the bank writes it: one line, and rates with all their digits."""
    number = sum(is_published(date(day.year, 1, 1) + timedelta(days=n)) for n in range(day.timetuple().tm_yday))
    rates = ",".join(
        f'{{"currency":{json.dumps(name, ensure_ascii=False)},"code":"{code}","mid":{_vary(Decimal(mid), code, day)}}}'
        for code, (name, mid) in CURRENCIES.items()
    )
    head = f'"table":"A","no":"{number:03}/A/NBP/{day.year:04}","effectiveDate":"{day.isoformat()}"'
    return f'[{{{head},"rates":[{rates}]}}]'


def _vary(mid: Decimal, code: str, day: date) -> str:
    """Up to three percent up or down, by the day."""
    drawn = int.from_bytes(hashlib.sha256(f"{day.isoformat()}{code}".encode()).digest()[:4], "big") % 601 - 300
    return f"{(mid * (10_000 + drawn) / 10_000).quantize(mid):f}"
