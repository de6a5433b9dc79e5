"""Events as values: what may be declared, what may be written down, and how it looks on the wire."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from duly.errors import BadPayload, Invalid
from duly.messages import (
    MAX_DEPTH,
    MAX_PAYLOAD_BYTES,
    Event,
    EventBody,
    NewEvent,
    encode_payload,
    from_cloudevent,
    to_cloudevent,
)


class OrderPlaced(EventBody, type="order.placed", topic="shop.orders", aggregate="order_id"):
    order_id: str
    amount: Decimal = Decimal("0")


def event(payload: Mapping[str, Any] | None = None, **headers: str) -> Event:
    return Event(
        id=UUID("01890a5d-ac96-774b-bcce-b302099a8057"),
        type="order.placed",
        topic="shop.orders",
        aggregate_id="o1",
        payload=dict(payload or {}),
        headers=dict(headers),
        created_at=datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
    )


# -- typed events ----------------------------------------------------------------------------------------------------


def test_a_class_statement_declares_the_envelope_and_the_fields_are_the_payload() -> None:
    """E1.2."""
    assert OrderPlaced(order_id="o1", amount=Decimal("12.30")).envelope() == NewEvent(
        type="order.placed",
        topic="shop.orders",
        aggregate_id="o1",
        payload={"order_id": "o1", "amount": Decimal("12.30")},
    )


def test_a_subclass_inherits_what_it_does_not_declare() -> None:
    """E1.2."""

    class OrderPlacedAbroad(OrderPlaced, type="order.placed-abroad"):
        country: str

    envelope = OrderPlacedAbroad(order_id="o1", country="PL").envelope()
    assert (envelope.type, envelope.topic, envelope.aggregate_id) == ("order.placed-abroad", "shop.orders", "o1")


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        ({}, "cannot be a type"),
        ({"type": "order placed", "topic": "t", "aggregate": "order_id"}, "'order placed' cannot be a type"),
        ({"type": "1order", "topic": "t", "aggregate": "order_id"}, "cannot be a type"),
        ({"type": "order.placed", "aggregate": "order_id"}, "cannot be a topic"),
        ({"type": "order.placed", "topic": "t" * 201, "aggregate": "order_id"}, "cannot be a topic"),
        ({"type": "order.placed", "topic": "t"}, "must name one of its fields: order_id"),
        ({"type": "order.placed", "topic": "t", "aggregate": "id"}, "aggregate='id' must name one of its fields"),
        (
            {"type": "order.placed", "topic": "t", "aggregate": "order_id", "key": "x"},
            r"declares type, topic, aggregate, internal and readers, not \['key'\]",
        ),
    ],
)
def test_a_declaration_that_could_never_be_emitted_is_refused_where_it_stands(
    declared: dict[str, str], complaint: str
) -> None:
    """E1.2: at import, with what to write instead, not at the first order."""
    with pytest.raises((TypeError, Invalid), match=complaint):
        types.new_class("Wrong", (EventBody,), declared, lambda body: body.update(__annotations__={"order_id": str}))


def test_an_event_is_read_back_as_what_it_was_and_unknown_fields_are_ignored() -> None:
    """E1.2: producers may add fields."""
    assert event({"order_id": "o1", "amount": "12.30", "added": 1}).body(OrderPlaced) == OrderPlaced(
        order_id="o1", amount=Decimal("12.30")
    )


def test_an_event_that_is_not_of_a_kind_says_where() -> None:
    """E1.2: the path of each wrong field, and never its value, which may be personal."""
    with pytest.raises(Invalid, match=r"is no OrderPlaced: \$\.order_id: .*; \$\.amount: ") as raised:
        event({"amount": "a secret"}).body(OrderPlaced)
    assert "a secret" not in str(raised.value)


def test_a_typed_event_of_every_kind_of_field_is_read_back_equal() -> None:
    """E1.2: exactly, or not at all."""

    class Colour(StrEnum):
        RED = "red"

    class Item(BaseModel):
        sku: str
        price: Decimal

    class Everything(EventBody, type="a.b", topic="t", aggregate="key"):
        key: UUID
        amount: Decimal
        share: float
        count: int
        day: date
        moment: datetime
        wait: timedelta
        colour: Colour
        tags: list[str]
        items: tuple[Item, ...]
        extra: dict[str, bool | None]

    body = Everything(
        key=uuid4(),
        amount=Decimal("1234567890.12345678901234567890"),
        share=0.1,
        count=2**80,
        day=date(2024, 2, 29),
        moment=datetime(2026, 10, 25, 2, 30, tzinfo=UTC),
        wait=timedelta(minutes=15),
        colour=Colour.RED,
        tags=["a"],
        items=(Item(sku="s", price=Decimal("0.10")),),
        extra={"gift": True, "note": None},
    )
    stored = json.loads(encode_payload(body.envelope().payload), parse_float=Decimal)
    assert event(stored).body(Everything) == body


def test_a_field_with_an_alias_is_read_back() -> None:
    """E1.2: what emit writes, ``body`` reads."""

    class Aliased(EventBody, type="a.b", topic="t", aggregate="order_id"):
        order_id: str = Field(alias="orderId")

    body = Aliased(orderId="o1")
    stored = json.loads(encode_payload(body.envelope().payload))
    assert event(stored).body(Aliased) == body


def test_an_event_without_an_aggregate_is_refused() -> None:
    """E1.5: otherwise every such event would wait in one line, for the aggregate called 'None'."""

    class Optional(EventBody, type="a.b", topic="t", aggregate="order_id"):
        order_id: str | None = None

    with pytest.raises(Invalid, match="aggregate"):
        Optional().envelope()


def test_the_aggregate_of_an_enum_is_its_value() -> None:
    """E1.5: the same aggregate as for a producer that writes plain text."""

    class Region(StrEnum):
        EU = "eu"

    class Legacy(Enum):
        EU = "eu"

    class Opened(EventBody, type="a.b", topic="t", aggregate="region"):
        region: Region | Legacy

    assert Opened(region=Region.EU).envelope().aggregate_id == "eu"
    assert Opened(region=Legacy.EU).envelope().aggregate_id == "eu"


@pytest.mark.parametrize("wrong", ["", "order placed", "9lives", "a" * 201, "zażółć", "a/b"])
def test_a_plain_event_with_a_name_nobody_could_carry_is_refused(wrong: str) -> None:
    """E1.2."""
    with pytest.raises(Invalid, match="cannot be a type"):
        NewEvent(type=wrong, topic="t", aggregate_id="a").envelope()
    with pytest.raises(Invalid, match="cannot be a topic"):
        NewEvent(type="a.b", topic=wrong, aggregate_id="a").envelope()


# -- payloads --------------------------------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


def endless() -> dict[str, Any]:
    loop: list[Any] = []
    loop.append(loop)
    return {"loop": loop}


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        ({"a": [1, {"b": math.nan}]}, r"\$\.a\[1\]\.b: nan is not a JSON number"),
        ({"a": math.inf}, r"\$\.a: inf is not a JSON number"),
        ({"a": -math.inf}, r"\$\.a: -inf is not a JSON number"),
        ({"a": Decimal("NaN")}, r"\$\.a: NaN is not a number"),
        ({"a": Decimal("Infinity")}, r"\$\.a: Infinity is not a number"),
        ({"a": ["x", "nul \x00"]}, r"\$\.a\[1\]: text with a NUL"),
        ({"nul \x00": 1}, r"\$: text with a NUL"),
        ({"a": "half \ud83d"}, r"\$\.a: text with half a surrogate pair"),
        ({"half \ude00": 1}, r"\$: text with half a surrogate pair"),
        ({"a": b"raw"}, r"\$\.a: bytes cannot be stored"),
        ({"a": object()}, r"\$\.a: object cannot be stored"),
        ({"a": datetime(2026, 1, 1)}, r"\$\.a: a datetime without a zone"),  # noqa: DTZ001 - the very mistake
        ({"a": {1: "x"}}, r"\$\.a: the key 1 is not text"),
        ({"a": {None: "x"}}, r"\$\.a: the key None is not text"),
        ({"a": {("x",): "x"}}, r"\$\.a: the key \('x',\) is not text"),
        (nested(MAX_DEPTH + 1), "nested deeper than 32 levels"),
        (endless(), "nested deeper than 32 levels"),
        ({"a": "x" * MAX_PAYLOAD_BYTES}, "larger than 262144 bytes"),
        ({"a": "ż" * (MAX_PAYLOAD_BYTES // 2)}, "larger than 262144 bytes"),
        ({"a": 10**5000}, r"\$\.a: "),
        ({"a": {"b": -(10**5000)}}, r"\$\.a\.b: "),
        ([1, 2], "must be an object"),
        ("text", "must be an object"),
        (None, "must be an object"),
    ],
    ids=lambda given: given[:40] if isinstance(given, str) else type(given).__name__,
)
def test_a_payload_that_cannot_be_kept_is_refused_with_its_path(payload: Any, complaint: str) -> None:
    """FAULTS: huge, deep, NaN, NUL, lone-surrogate payloads are the caller's error, and say where."""
    with pytest.raises(BadPayload, match=complaint):
        encode_payload(payload)


def test_the_largest_and_deepest_payload_is_taken() -> None:
    """The limits are what they say."""
    assert len(encode_payload({"a": "x" * (MAX_PAYLOAD_BYTES - 8)})) == MAX_PAYLOAD_BYTES
    encode_payload(nested(MAX_DEPTH))


def test_a_decimal_is_kept_to_the_last_digit() -> None:
    """F3: amounts never pass through binary floats."""
    amounts = ["0.10", "1.000", "1E+3", "-0.00", "123456789012345678901234567890.123456789"]
    stored = json.loads(encode_payload({"amounts": [Decimal(amount) for amount in amounts]}))
    assert stored == {"amounts": amounts}


def test_what_has_an_obvious_text_is_written_as_that_text() -> None:
    """E1.2."""

    class Level(IntEnum):
        HIGH = 3

    class Colour(Enum):
        RED = "red"

    key = uuid4()
    assert json.loads(
        encode_payload(
            {
                "key": key,
                "day": date(2024, 2, 29),
                "moment": datetime(2026, 1, 1, tzinfo=UTC),
                "level": Level.HIGH,
                "colour": Colour.RED,
                "pair": (1, 2),
                "yes": True,
                "nothing": None,
                "emoji": "😀",
            }
        )
    ) == {
        "key": str(key),
        "day": "2024-02-29",
        "moment": "2026-01-01T00:00:00+00:00",
        "level": 3,
        "colour": "red",
        "pair": [1, 2],
        "yes": True,
        "nothing": None,
        "emoji": "😀",
    }


def test_a_set_is_the_same_text_in_every_process_or_refused_in_every_process() -> None:
    """E4.2: what is hashed or compared must not depend on a process's hash seed."""
    code = "from duly.messages import encode_payload; print(encode_payload({'tags': {'a', 'b', 'c', 'd', 'e'}}))"
    written = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(written) == 1, written


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(payload=st.dictionaries(st.text(), json_values, max_size=6))
def test_whatever_is_taken_comes_back_equal_and_the_rest_is_a_bad_payload(payload: dict[str, Any]) -> None:
    """FAULTS: never an error of another kind."""
    try:
        encoded = encode_payload(payload)
    except BadPayload:
        return
    assert json.loads(encoded) == payload


# -- on the wire -----------------------------------------------------------------------------------------------------


def test_the_envelope_is_cloudevents_one() -> None:
    """E1.2: the required attributes, ours as extensions, all of them lower-case letters and digits."""
    envelope = to_cloudevent(
        event({"order_id": "o1"}, correlation_id="c1", causation_id="c2", traceparent="00-1-2-01"), source="/shop"
    )
    assert envelope == {
        "specversion": "1.0",
        "id": "01890a5d-ac96-774b-bcce-b302099a8057",
        "source": "/shop/shop.orders",
        "type": "order.placed",
        "subject": "o1",
        "time": "2026-03-29T01:30:00+00:00",
        "datacontenttype": "application/json",
        "partitionkey": "o1",
        "correlationid": "c1",
        "causationid": "c2",
        "traceparent": "00-1-2-01",
        "data": {"order_id": "o1"},
    }
    assert all(name.isalnum() and name == name.lower() and len(name) <= 20 for name in envelope)


def test_an_event_survives_the_wire() -> None:
    """E1.2."""
    sent = event({"order_id": "o1", "lines": [1, None]}, correlation_id="c1", traceparent="00-1-2-01")
    assert from_cloudevent(json.loads(json.dumps(to_cloudevent(sent)))) == sent


def test_a_header_of_the_callers_own_survives_the_wire() -> None:
    """E2.4: a consumer on a broker is given the headers that one on PostgreSQL is given."""
    sent = event({}, correlation_id="c1", tenant="acme")
    assert from_cloudevent(json.loads(json.dumps(to_cloudevent(sent)))).headers == sent.headers


def test_an_event_as_the_relay_reads_it_can_be_written_to_the_wire() -> None:
    """E1.2: the relay reads fractions as Decimal; the envelope must be JSON all the same, and a number a number."""
    read = json.loads(encode_payload({"share": 0.25, "amount": Decimal("0.10")}), parse_float=Decimal)
    received = from_cloudevent(json.loads(json.dumps(to_cloudevent(event(read))), parse_float=Decimal))
    assert received.payload == {"share": Decimal("0.25"), "amount": "0.10"}


def test_a_fraction_that_no_float_can_hold_is_exact_on_the_wire() -> None:
    """E1.2: plain SQL may emit any number; one that JSON's readers would round goes as text."""
    read = json.loads('{"amount": 0.10000000000000000000001, "share": 0.5}', parse_float=Decimal)
    assert to_cloudevent(event(read))["data"] == {"amount": "0.10000000000000000000001", "share": 0.5}


@pytest.mark.parametrize(
    "change",
    [
        {"id": "not-a-uuid"},
        {"id": None},
        {"time": "yesterday"},
        {"data": "text"},
        {"data": None},
        {"type": ...},
        {"subject": ...},
        {"source": ...},
    ],
    ids=str,
)
def test_what_is_no_event_of_ours_is_refused(change: dict[str, Any]) -> None:
    """E2.2: a foreign message on our topic is an Invalid, not a crash of the consumer."""
    envelope = to_cloudevent(event()) | change
    with pytest.raises(Invalid, match="not a CloudEvents"):
        from_cloudevent({name: value for name, value in envelope.items() if value is not ...})
