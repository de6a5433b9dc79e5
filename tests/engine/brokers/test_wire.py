"""Events on the wire: binary and structured CloudEvents, ours and strangers', and what cannot be one."""

from __future__ import annotations

import base64
import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duly.brokers import Message
from duly.brokers.wire import AMQP, KAFKA, MAX_BODY_BYTES, NATS, decode, encode, encode_structured
from duly.errors import Invalid
from duly.messages import MAX_PAYLOAD_BYTES, Event, encode_payload

AT_LEISURE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
PREFIXES = (KAFKA, NATS, AMQP)
RESERVED = {
    "specversion", "id", "source", "type", "subject", "time", "partitionkey", "datacontenttype", "dataschema", "data",
    "data_base64", "dulyheaders", "correlationid", "causationid", "correlation_id", "causation_id", "traceparent",
    "content-type", "ce_id", "ce-type",
}  # fmt: skip
TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
EVENTS = st.builds(
    Event,
    id=st.uuids(),
    type=st.just("order.placed"),
    topic=st.just("shop.orders"),
    aggregate_id=TEXT,
    payload=st.dictionaries(TEXT, VALUES, max_size=4),
    headers=st.dictionaries(
        st.sampled_from(["correlation_id", "causation_id", "traceparent", "shade", "Odd Name"]), TEXT
    ),
    created_at=st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001 - hypothesis adds the zone
)


# Whatever emit takes: names that CloudEvents or we use for something else, values that are empty, long or odd.
HEADERS = st.dictionaries(
    st.sampled_from(sorted(RESERVED)) | TEXT | st.just(""),
    TEXT | st.just("") | st.text('a"\\\x85\n \u00e9\u4e2d\U0001f600', max_size=50) | st.just("\u00e9" * 2_001),
    max_size=6,
)


def sent(headers: dict[str, str], body: bytes, topic: str = "shop.orders") -> Message:
    """As a source gives it: names of headers in lower case."""
    return Message(topic, {name.lower(): value for name, value in headers.items()}, body, "here")


def foreign(**changes: Any) -> Message:
    """A structured event of somebody else's."""
    envelope = {"specversion": "1.0", "id": "7", "source": "/theirs", "type": "t", "data": {"n": 1}} | changes
    body = json.dumps({name: value for name, value in envelope.items() if value is not None}).encode()
    return sent({"content-type": "application/cloudevents+json"}, body)


@AT_LEISURE
@given(EVENTS)
def test_an_event_of_ours_comes_back_as_it_was_in_every_mode(event: Event) -> None:
    """E1.7: whatever its text holds."""
    for prefix in PREFIXES:
        assert decode(sent(*encode(event, prefix))) == event
    assert decode(sent(*encode_structured(event))) == event
    assert decode(sent(*encode_structured(event), topic="")).topic == "shop.orders"


def every_way(event: Event) -> list[Event]:
    """What comes back of it, in each mode."""
    back = [decode(sent(*encode(event, prefix))) for prefix in PREFIXES]
    return [*back, decode(sent(*encode_structured(event)))]


@AT_LEISURE
@given(HEADERS)
def test_every_header_that_emit_takes_comes_back_as_it_was(headers: dict[str, str]) -> None:
    """E2.4: a consumer on a broker is given the headers that one on PostgreSQL is given."""
    encode_payload(headers, what="headers")
    event = Event(uuid4(), "order.placed", "shop.orders", "o1", {}, headers, datetime(2026, 1, 1, tzinfo=UTC))
    assert every_way(event) == [event] * 4


@pytest.mark.parametrize("character", ["x", '"', "\\", "\x01", "\x85", "\u00e9", "\u4e2d", "\U0001f600"])
@pytest.mark.parametrize("names", [1, 500])
def test_as_much_as_emit_takes_is_read_again(character: str, names: int) -> None:
    """Headers and payload as large as can be: none of it is buried by our own receiver."""
    cost = len(encode_payload({"": character}).encode()) - len(encode_payload({"": ""}).encode())
    fitting = (MAX_PAYLOAD_BYTES - 20 * names) // (cost * names)
    headers = {f"h {n}": character * fitting for n in range(names)}
    payload = {"a": "x" * (MAX_PAYLOAD_BYTES - 8)}
    encode_payload(headers, what="headers")
    encode_payload(payload)
    event = Event(uuid4(), "order.placed", "shop.orders", "o1", payload, headers, datetime(2026, 1, 1, tzinfo=UTC))
    assert every_way(event) == [event] * 4


@AT_LEISURE
@given(EVENTS)
def test_headers_of_nats_are_printable_ascii(event: Event) -> None:
    headers, _ = encode(event, NATS)
    assert all(" " < character < "\x7f" for value in headers.values() for character in value)


def test_attributes_are_headers_with_the_prefix_and_the_body_is_the_data_alone() -> None:
    event = Event(uuid4(), "order.placed", "shop", "o1", {"n": Decimal("1.50")}, {}, datetime(2026, 1, 1, tzinfo=UTC))
    headers, body = encode(event, KAFKA)
    assert body == b'{"n":1.5}'
    assert headers == {
        "content-type": "application/json",
        "ce_specversion": "1.0",
        "ce_id": str(event.id),
        "ce_source": "/duly/shop",
        "ce_type": "order.placed",
        "ce_subject": "o1",
        "ce_time": "2026-01-01T00:00:00+00:00",
        "ce_partitionkey": "o1",
    }


# -- strangers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id_", ["7", "01890a5d-ac96-774b-bcce-b302099a8057"])
def test_an_id_of_a_stranger_is_unique_in_its_source(id_: str) -> None:
    """As CloudEvents says: two of them may count in the same way, or take another's UUID for what they tell of it."""
    one, other = decode(foreign(id=id_)).id, decode(foreign(id=id_, source="/others")).id
    assert one != other
    assert decode(foreign(id=id_)).id == one
    assert str(one) != id_


def test_an_id_of_ours_is_the_uuid_that_it_is() -> None:
    """Of any service that uses duly: its history, its log and ours know an event by one id."""
    known = uuid4()
    assert decode(foreign(id=str(known), source="/duly/shop.orders")).id == known
    assert decode(foreign(id="7", source="/duly/shop.orders")).id != decode(foreign(id="7")).id


def test_what_a_stranger_leaves_out_is_made_up() -> None:
    before = datetime.now(UTC)
    event = decode(foreign())
    assert event.aggregate_id == "7"
    assert (event.created_at - before).total_seconds() < 60
    assert decode(foreign(partitionkey="p")).aggregate_id == "p"
    assert decode(foreign(subject="s", partitionkey="p")).aggregate_id == "s"
    assert decode(foreign(data=None)).payload == {}
    assert decode(foreign(time="2026-01-01T00:00:00Z")).created_at == datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("is_binary", [False, True])
def test_the_brokers_own_key_keeps_the_order_where_a_stranger_names_no_subject(is_binary: bool) -> None:
    """Else its events would each be an aggregate of its own, and an ordered consumer would see them in any order."""

    def keyed(key: str, **attributes: str) -> str:
        if not is_binary:
            return decode(replace(foreign(**attributes), key=key)).aggregate_id
        given = {"specversion": "1.0", "id": "7", "source": "/theirs", "type": "t", **attributes}
        headers = {KAFKA + name: text for name, text in given.items()}
        return decode(Message("shop", headers, b"{}", "here", key=key)).aggregate_id

    assert keyed("k") == "k"
    assert keyed("") == "7"
    assert keyed("k", partitionkey="p") == "p"
    assert keyed("k", subject="s") == "s"
    for odd in ("k" * 201, "\x00", "\ud800"):
        assert keyed(odd) == keyed(odd)
        assert len({keyed(odd), keyed(odd + "x"), "7"}) == 3


def test_structured_mode_is_known_by_its_body_where_headers_say_nothing() -> None:
    message = foreign()
    assert decode(Message("shop", {}, message.body, "here")).payload == {"n": 1}


def test_data_in_base64_is_read() -> None:
    data = base64.b64encode(b'{"n": 2}').decode()
    assert decode(foreign(data=None, data_base64=data)).payload == {"n": 2}


def test_extensions_are_headers_and_a_plain_traceparent_counts() -> None:
    message = foreign(correlationid="c", shade="dark", weight=3)
    assert decode(message).headers == {"correlation_id": "c", "shade": "dark", "weight": "3"}
    traced = Message("shop", {**message.headers, "traceparent": "00-1"}, message.body, "here")
    assert decode(traced).headers["traceparent"] == "00-1"


def test_a_fraction_that_no_float_holds_is_text() -> None:
    body = foreign().body.replace(b"1}", b"0.1234567890123456789}")
    assert decode(Message("shop", {}, body, "here")).payload == {"n": "0.1234567890123456789"}


# -- what is no event ------------------------------------------------------------------------------------------------

UNREADABLE: dict[str, tuple[Message, str]] = {
    "another version": (foreign(specversion="0.3"), "specversion is '0.3'"),
    "no version": (foreign(specversion=None), "specversion is missing"),
    "no id": (foreign(id=None), "the attribute id is missing"),
    "no type": (foreign(type=""), "the attribute type is missing"),
    "an id that is a list": (foreign(id=[1]), "must be text, not list"),
    "data that is a list": (foreign(data=[1]), "must be a JSON object, not list"),
    "no base64": (foreign(data_base64="?"), "no base64"),
    "a time that is none": (foreign(time="soon"), "no RFC 3339"),
    "a time before time": (foreign(time="0001-01-01T00:00:00+14:00"), "no RFC 3339"),
    "a long subject": (foreign(subject="x" * 201), "at most 200"),
    "a NUL": (foreign(data={"a": "\x00"}), "NUL"),
    "a NUL in an attribute": (foreign(shade="\x00"), "NUL"),
    "half a pair": (foreign(data={"a": "\ud800"}), "surrogate"),
    "headers of ours that are none": (foreign(dulyheaders="[]"), "no JSON object"),
    "no topic": (Message("", {}, foreign(source="/theirs/?").body, "here"), "topic is not known"),
    "nothing": (Message("shop", {}, b"", "here"), "no JSON"),
    "bytes": (Message("shop", {}, b"\xff", "here"), "not UTF-8"),
    "deep": (Message("shop", {}, b"[" * 200_000, "here"), "nested too deeply"),
    "a long number": (Message("shop", {}, b"9" * 5_000, "here"), "too long"),
    "no number": (Message("shop", {}, b'{"a": NaN}', "here"), "NaN is not a number"),
    "something else": (Message("shop", {}, b"{}", "here"), "no CloudEvent"),
    "a batch": (sent({"content-type": "application/cloudevents-batch+json"}, b"[]"), "batch"),
    "not JSON": (sent({"ce_id": "1", "ce_type": "t", "content-type": "text/xml"}, b"<a/>"), "only JSON"),
    "huge": (Message("shop", {}, b" " * (MAX_BODY_BYTES + 1), "here"), "bytes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_is_no_event_is_refused_in_a_sentence(kind: str) -> None:
    message, sentence = UNREADABLE[kind]
    with pytest.raises(Invalid, match=sentence):
        decode(message)


@AT_LEISURE
@given(
    st.dictionaries(st.sampled_from(["ce_id", "ce_type", "ce_source", "ce_specversion", "content-type"]), st.text()),
    st.binary(),
)
def test_whatever_comes_is_an_event_or_invalid(headers: dict[str, str], body: bytes) -> None:
    with contextlib.suppress(Invalid):
        assert isinstance(decode(Message("shop", headers, body, "here")).id, UUID)
