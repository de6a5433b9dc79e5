"""Canonical JSON: one spelling of each value, and nothing that readers understand differently."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.shared.canonical import LARGEST, NotCanonical, count_parts, encode, parse, plain

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-LARGEST, LARGEST) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcéż\u2028", max_size=3), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_read_back_and_has_one_spelling(value: object) -> None:
    spelled = encode(value)
    assert parse(spelled, most_parts=1_000) == value
    assert encode(parse(json.dumps(value, indent=2).encode(), most_parts=1_000)) == spelled


@given(VALUES, VALUES)
def test_different_values_have_different_spellings(one: object, other: object) -> None:
    def is_same(a: object, b: object) -> bool:
        return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)

    assert (encode(one) == encode(other)) == is_same(one, other)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b'{"a": 1', b"\xff", b"\xef\xbb\xbf{}", b'{"a": 1, "a": 1}', b"1.0", b"1e3", b"NaN", b"Infinity",
        b"9007199254740992", b"-9007199254740992", b"9" * 10_000, b"[" * 100_000, b'{"a":' * 100_000,
        b"[" * 65 + b"]" * 65, b'"\\ud800"', b'{"\\udfff": 1}', b"[" + b"1," * 1_001 + b"1]", b"'a'", b"[1,]", b"//x",
        b"{}{}", b'"\x01"', "{}".encode("utf-16"),
    ],
)  # fmt: skip
def test_what_readers_understand_differently_is_refused_in_words_of_ours(content: bytes) -> None:
    with pytest.raises(NotCanonical) as refused:
        parse(content, most_parts=1_000)
    assert len(str(refused.value)) < 100


def count_values(value: object) -> int:
    """The lists, objects and commas of a value, from what it is and not from how it is written."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values() if isinstance(value, dict) else value)
    return 1 + max(len(inner) - 1, 0) + sum(map(count_values, inner))


@given(VALUES)
def test_what_counts_is_what_there_is_to_read_and_not_what_is_written_in_it(value: object) -> None:
    told = {"said": ',[{"\\,"', 'a",{': value}
    for spelled in (encode(told).decode(), json.dumps(told, indent=1)):
        assert count_parts(spelled) == count_values(told)
        assert parse(spelled.encode(), most_parts=count_values(told)) == told
        with pytest.raises(NotCanonical, match="parts"):
            parse(spelled.encode(), most_parts=count_values(told) - 1)


@pytest.mark.parametrize("content", ['"' + '\\"' * 500_000, '"\\' * 500_000, '"' * 1_000_000, '"' + "\\" * 999_999])
def test_strings_that_never_end_are_looked_at_once(content: str) -> None:
    """Not once for each quote in them: that would take hours."""
    assert count_parts(content) == 0
    with pytest.raises(NotCanonical):
        parse((content + "," * 11).encode(), most_parts=10)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"x", "\ud800", {1: 2, "a": object()}, {"a"}])
def test_what_has_no_spelling_is_refused(value: object) -> None:
    with pytest.raises(NotCanonical):
        encode(value)


class Colour(StrEnum):
    """For the test."""

    RED = "RED"


@dataclass(frozen=True)
class Thing:
    """For the test."""

    some_name: Decimal
    at: datetime
    colour: Colour
    parts: tuple[UUID, ...]


def test_values_of_python_are_written_exactly() -> None:
    at = datetime(2026, 3, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    thing = Thing(Decimal("10.00"), at, Colour.RED, (UUID(int=7),))
    assert plain(thing) == {
        "someName": "10.00", "at": "2026-03-01T10:00:00.000000+00:00", "colour": "RED", "parts": [str(UUID(int=7))],
    }  # fmt: skip
    assert plain({"as_it_is": 2**60, "b": frozenset({"y", "x"}), "c": b"\x01", "d": 0.1}) == {
        "as_it_is": str(2**60), "b": ["x", "y"], "c": "01", "d": "0.1",
    }  # fmt: skip
    assert plain(Decimal("1E+3")) == "1000"
    with pytest.raises(NotCanonical):
        plain(datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None))
    with pytest.raises(NotCanonical):
        plain(object())
