"""Money is exact: what is written is what is meant, in the digits of its currency (C2)."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from apps.commerce.model import MOST_LINES, MOST_OF_ONE, BadLines, Line, check_lines
from apps.shared.money import LARGEST, MINOR_UNITS, Amount, BadAmount, Currency, add_up, fit, read_amount, show
from duly.http.bodies import read_json

currencies = st.sampled_from(sorted(MINOR_UNITS))
digits = st.integers(0, 3)


@st.composite
def amounts(draw: st.DrawFn, places: int | None = None) -> Decimal:
    """Anything that may be given, with so many digits after the point."""
    number = draw(digits) if places is None else places
    most = int(LARGEST.scaleb(3)) // 10 ** (3 - number)
    return Decimal(draw(st.integers(1, most))).scaleb(-number)


@st.composite
def lines(draw: st.DrawFn, currency: str) -> list[Line]:
    prices = draw(st.lists(amounts(MINOR_UNITS[currency]), min_size=1, max_size=8))
    return [Line("s", draw(st.integers(1, MOST_OF_ONE)), price) for price in prices]


def sent(text: str) -> Decimal:
    """A number as it comes over HTTP."""
    [given] = read_json(f"[{text}]".encode())
    return read_amount(given)


@given(amounts())
def test_text_and_number_are_the_same_amount(amount: Decimal) -> None:
    """C2: however it is written in JSON; no amount that is taken has more digits than a float keeps."""
    assert read_amount(f"{amount:f}") == amount
    assert sent(f"{amount:f}") == amount
    assert sent(f"{amount:E}") == amount
    assert sent(json.dumps(float(amount))) == amount
    assert read_amount(float(amount)) == amount


@given(amounts(3), st.integers(1, 9), st.integers(4, 6))
def test_a_number_between_two_amounts_is_refused_and_not_rounded(amount: Decimal, digit: int, place: int) -> None:
    """C2: as text, too."""
    between = f"{amount + Decimal(digit).scaleb(-place):f}"
    for read in (sent, read_amount):
        with pytest.raises(ValueError, match="decimal"):
            read(between)


@given(currencies, st.data())
def test_what_is_shown_reads_back_as_the_same(currency: str, data: st.DataObject) -> None:
    """C2: with exactly the currency's digits."""
    amount = data.draw(amounts(MINOR_UNITS[currency]))
    text = show(amount, currency)
    assert (read_amount(text), len(text.partition(".")[2])) == (amount, MINOR_UNITS[currency])
    assert fit(amount, currency) == amount


@given(currencies, amounts())
def test_more_digits_than_the_currency_has_are_refused(currency: str, amount: Decimal) -> None:
    """C2: unless they are zeros."""
    scaled = amount.scaleb(MINOR_UNITS[currency])
    if scaled == scaled.to_integral_value():
        assert fit(amount, currency) == amount
    else:
        with pytest.raises(BadAmount, match="digits after the point") as refused:
            fit(amount, currency, path="$.unitPrice")
        assert refused.value.faults[0].path == "$.unitPrice"


@given(currencies.flatmap(lambda code: st.tuples(st.just(code), lines(code))))
def test_a_total_is_the_sum_in_whole_minor_units(given_lines: tuple[str, list[Line]]) -> None:
    """C2: as integers say."""
    currency, ordered = given_lines
    scale = 10 ** MINOR_UNITS[currency]
    expected = sum(int(line.unit_price * scale) * line.quantity for line in ordered)
    assert check_lines(ordered, currency) * scale == expected


def test_the_largest_total_fits_eighteen_digits() -> None:
    """C2: what the column holds."""
    total = check_lines([Line("s", MOST_OF_ONE, LARGEST)] * MOST_LINES, "KWD")
    assert total == LARGEST * MOST_OF_ONE * MOST_LINES
    assert len(total.as_tuple().digits) <= 18
    assert total < Decimal(10) ** 15


@pytest.mark.parametrize("count", [0, MOST_LINES + 1])
def test_an_order_has_lines_but_not_too_many(count: int) -> None:
    """C2: whoever calls, not only over HTTP."""
    with pytest.raises(BadLines):
        check_lines([Line("s", 1, Decimal(1))] * count, "PLN")
    with pytest.raises(BadLines):
        check_lines([Line("s", MOST_OF_ONE + 1, Decimal(1))], "PLN")


@given(st.one_of(st.text(max_size=20), st.floats(), st.integers(), st.booleans(), st.none(), st.lists(st.integers())))
def test_whatever_is_given_is_an_amount_within_bounds_or_refused(given_value: object) -> None:
    """FAULTS: nothing else comes out, and nothing else is raised."""
    try:
        amount = TypeAdapter(Amount).validate_python(given_value)
    except ValidationError:
        return
    assert isinstance(amount, Decimal)
    assert 0 < amount <= LARGEST


@pytest.mark.parametrize(
    ("code", "places"), [("PLN", 2), ("EUR", 2), ("JPY", 0), ("KRW", 0), ("ISK", 0), ("CLP", 0), ("KWD", 3), ("HUF", 2)]
)
def test_currencies_have_the_digits_of_iso_4217(code: str, places: int) -> None:
    """C2."""
    assert MINOR_UNITS[code] == places
    assert TypeAdapter(Currency).validate_python(code) == code


@pytest.mark.parametrize("code", ["XDR", "XAU", "XXX", "", "pln", "PLN ", "ZŁ", "BTC"])
def test_what_nobody_can_pay_with_is_no_currency(code: str) -> None:
    """C2."""
    with pytest.raises(ValidationError):
        TypeAdapter(Currency).validate_python(code)


def test_table_a_of_the_bank_can_be_paid_with() -> None:
    """C2: all of it but the fund's special drawing rights."""
    table = (
        "THB USD AUD HKD CAD NZD SGD EUR HUF CHF GBP UAH JPY CZK DKK ISK NOK SEK RON TRY ILS CLP PHP MXN ZAR BRL MYR "
        "IDR INR KRW CNY"
    )
    assert set(table.split()) | {"PLN"} <= set(MINOR_UNITS)


def test_the_sum_of_nothing_is_nothing() -> None:
    assert add_up([]) == 0
