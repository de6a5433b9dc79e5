"""Money: exact decimals, with as many digits after the point as their currency has (ISO 4217)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from duly.errors import Fault, Invalid

_NONE = "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX VND VUV XAF XOF XPF"
_TWO = (
    "AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BMD BND BOB BRL BSD BTN BWP BYN BZD CAD CDF CHF CNY COP CRC CUP "
    "CVE CZK DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GTQ GYD HKD HNL HTG HUF IDR ILS INR IRR JMD KES "
    "KGS KHR KPW KYD KZT LAK LBP LKR LRD LSL MAD MDL MGA MKD MMK MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK "
    "NPR NZD PAB PEN PGK PHP PKR PLN QAR RON RSD RUB SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC SYP SZL THB "
    "TJS TMT TOP TRY TTD TWD TZS UAH USD UYU UZS VED VES WST XCD XCG YER ZAR ZMW ZWG"
)
_THREE = "BHD IQD JOD KWD LYD OMR TND"
MINOR_UNITS = MappingProxyType(
    {code: digits for digits, codes in ((0, _NONE), (2, _TWO), (3, _THREE)) for code in codes.split()}
)
"""Digits after the point, of every currency of ISO 4217 that people pay with: no metals, funds or units of account."""

MOST_DIGITS = max(MINOR_UNITS.values())
LARGEST = Decimal("999999999.999")
"""Of one amount that is given to us; sums of ten thousand times a hundred of them still have 18 digits."""

LARGEST_EXACT = Decimal("999999999999.999")
"""Of one amount that only text may give."""

_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,3})?")
_EXACT = re.compile(r"[0-9]{1,12}(\.[0-9]{1,3})?")


class BadAmount(Invalid):
    """The amount cannot be one of this currency."""


def read_amount(given: Any) -> Decimal:
    """A positive decimal from text or from a number of JSON; ValueError for anything else.

    A number is taken by the shortest digits that mean it: 0.1 is a tenth, and never 0.1000000000000000055. Whatever has
    up to 15 digits comes through a float unchanged, and nothing that is taken here has more than 12.
    """
    if isinstance(given, float | int) and not isinstance(given, bool):
        given = _plain(repr(given))
    if not isinstance(given, str) or not _DECIMAL.fullmatch(given) or not Decimal(given):
        raise ValueError(
            f"write a decimal above zero, such as 12.50: up to nine digits, and up to {MOST_DIGITS} after the point"
        )
    return Decimal(given)


def read_exact(given: Any) -> Decimal:
    """A positive decimal from text alone, for books: a number of JSON has been a binary float somewhere."""
    if not isinstance(given, str) or not _EXACT.fullmatch(given) or not Decimal(given):
        raise ValueError(
            f'write a decimal above zero as text, such as "12.50": up to twelve digits, and up to {MOST_DIGITS} after '
            "the point"
        )
    return Decimal(given)


def check_currency(code: str) -> str:
    """The code of a currency one can pay with; ValueError otherwise."""
    if code not in MINOR_UNITS:
        raise ValueError("write the code of a currency, such as PLN, EUR or JPY")
    return code


def fit(amount: Decimal, currency: str, *, path: str = "$") -> Decimal:
    """The same amount with the currency's digits; BadAmount, which names the JSON path, when that would change it."""
    digits = MINOR_UNITS[currency]
    fitted = amount.quantize(Decimal(1).scaleb(-digits))
    if fitted != amount:
        refused = BadAmount(f"an amount in {currency} has {digits or 'no'} digits after the point")
        refused.faults = (Fault("body", path, str(refused)),)
        raise refused
    return fitted


def show(amount: Decimal, currency: str) -> str:
    """As text with the currency's digits: ``12.50``."""
    return f"{fit(amount, currency):f}"


def add_up(amounts: Iterable[Decimal]) -> Decimal:
    """The exact sum."""
    return sum(amounts, Decimal(0))


def _plain(digits: str) -> str:
    """Without an exponent, if it is short enough that this cannot grow without bounds."""
    if len(digits) > 30 or "e" not in digits.lower():
        return digits
    number = Decimal(digits)
    return f"{number:f}" if abs(number.adjusted()) < 30 else ""


Currency = Annotated[str, AfterValidator(check_currency), WithJsonSchema({"type": "string", "enum": [*MINOR_UNITS]})]
"""A currency one can pay with."""

Amount = Annotated[
    Decimal,
    BeforeValidator(read_amount),
    WithJsonSchema(
        {
            "description": "An exact decimal above zero, with the currency's digits at most; text or a number.",
            "anyOf": [
                {"type": "string", "pattern": f"^{_DECIMAL.pattern}$"},
                {"type": "number", "exclusiveMinimum": 0, "maximum": float(LARGEST)},
            ],
        }
    ),
]
"""An amount in a request's body."""

ExactAmount = Annotated[
    Decimal,
    BeforeValidator(read_exact),
    WithJsonSchema(
        {
            "description": "An exact decimal above zero as text, with the currency's digits at most.",
            "type": "string",
            "pattern": f"^{_EXACT.pattern}$",
        }
    ),
]
"""An amount in a request's body, where numbers are refused."""
