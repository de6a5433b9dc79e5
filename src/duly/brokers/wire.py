"""How an event looks on a broker: CloudEvents 1.0, binary where headers can carry it and structured where they cannot.

What comes back is believed only after a look: whatever cannot be an event raises Invalid, in a sentence for people.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote
from uuid import NAMESPACE_URL, UUID, uuid5

from duly.brokers import Message
from duly.clock import unix_milliseconds
from duly.errors import Invalid
from duly.messages import (
    MAX_ATTRIBUTE,
    MAX_PAYLOAD_BYTES,
    NAME,
    Event,
    check_text,
    encode_payload,
    header_names,
    storable,
    to_cloudevent,
)

KAFKA = "ce_"
NATS = "ce-"
AMQP = "cloudEvents:"
JSON = "application/json"
STRUCTURED = "application/cloudevents+json"
OUR_SOURCE = "/duly/"  # and the topic: of every service that uses duly
MAX_BODY_BYTES = 1024 * 1024
MAX_HEADERS_BYTES = MAX_PAYLOAD_BYTES  # as emit allows
MAX_TYPE = MAX_AGGREGATE = 200

_PREFIXES = ("ce_", "ce-", "cloudevents:", "cloudevents_")  # as they are in a message: in lower case
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_NOT_HEADERS = frozenset(
    {"specversion", "id", "source", "type", "subject", "time", "partitionkey", "dulyheaders"}
    | {"datacontenttype", "dataschema", "data", "data_base64"}
)


def encode(event: Event, prefix: str) -> tuple[dict[str, str], bytes]:
    """The event in binary mode: attributes as headers with this prefix, and its data as the body."""
    envelope = to_cloudevent(event)
    data, content_type = envelope.pop("data"), envelope.pop("datacontenttype")
    quoting = prefix == NATS
    headers = {prefix + name: _quoted(value) if quoting else value for name, value in envelope.items()}
    return {"content-type": content_type, **headers}, _dump(data)


def encode_structured(event: Event) -> tuple[dict[str, str], bytes]:
    """The event in structured mode: everything is in the body."""
    return {"content-type": STRUCTURED}, _dump(to_cloudevent(event))


def decode(message: Message) -> Event:
    """The event in a message, ours or a stranger's; Invalid says what is wrong with it.

    Its topic is the message's, or (where a broker knows none) the last part of its source, as we write it.
    """
    if len(message.body) > MAX_BODY_BYTES:
        raise Invalid(f"the message has {len(message.body)} bytes; at most {MAX_BODY_BYTES} are read")
    content_type = message.headers.get("content-type", "").partition(";")[0].strip().lower()
    prefix = next((one for one in _PREFIXES if one + "id" in message.headers or one + "type" in message.headers), None)
    if content_type.startswith("application/cloudevents-batch"):
        raise Invalid("a batch of CloudEvents is not read: send each event as a message of its own")
    if content_type.startswith("application/cloudevents") or prefix is None:
        attributes = _structured(message.body, content_type)
        data = _data_of(attributes)
    else:
        attributes = _binary(message.headers, prefix)
        _check_content_type(content_type or attributes.get("datacontenttype") or JSON)
        data = _read_json(message.body) if message.body else {}
    attributes.setdefault("traceparent", message.headers.get("traceparent"))
    return _as_event(attributes, data, message)


# -- the two modes ---------------------------------------------------------------------------------------------------


def _binary(headers: Mapping[str, str], prefix: str) -> dict[str, Any]:
    found = {name[len(prefix) :]: value for name, value in headers.items() if name.startswith(prefix)}
    return {name: unquote(value) for name, value in found.items()} if prefix == NATS else found


def _structured(body: bytes, content_type: str) -> dict[str, Any]:
    found = _read_json(body)
    if not isinstance(found, dict) or (not content_type.startswith("application/cloudevents") and "id" not in found):
        raise Invalid("this is no CloudEvent: it has neither the attributes as headers nor an envelope as its body")
    return found


def _data_of(attributes: dict[str, Any]) -> Any:
    if "data_base64" not in attributes:
        return attributes.get("data", {})
    _check_content_type(str(attributes.get("datacontenttype") or JSON))
    try:
        return _read_json(base64.b64decode(attributes["data_base64"], validate=True))
    except (binascii.Error, TypeError, ValueError):
        raise Invalid("data_base64 is no base64") from None


def _check_content_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != JSON and not kind.endswith("+json") and kind != "text/json":
        raise Invalid(f"the data is {_shown(kind)}; only JSON is read")


# -- the event -------------------------------------------------------------------------------------------------------


def _as_event(attributes: Mapping[str, Any], data: Any, message: Message) -> Event:
    version = _text(attributes, "specversion")
    if version is None or not version.startswith("1."):
        raise Invalid(f"specversion is {_shown(version)}; CloudEvents 1.0 is read")
    id_, source, type_ = (_required(attributes, name) for name in ("id", "source", "type"))
    aggregate = _text(attributes, "subject") or _text(attributes, "partitionkey") or _order_key(message.key) or id_
    if len(aggregate) > MAX_AGGREGATE or len(type_) > MAX_TYPE:
        raise Invalid(f"the type and the subject (or partitionkey) have at most {MAX_AGGREGATE} characters")
    payload = {} if data is None else data
    if not isinstance(payload, dict):
        raise Invalid(f"the data must be a JSON object, not {type(payload).__name__}")
    encode_payload(payload, max_bytes=MAX_BODY_BYTES)
    return Event(
        id=_id(id_, source),
        type=type_,
        topic=check_text(message.topic, "the topic") if message.topic else _topic(source),
        aggregate_id=aggregate,
        payload=payload,
        headers=_headers(attributes),
        created_at=_moment(_text(attributes, "time")),
    )


def _id(id_: str, source: str) -> UUID:
    """Ours is the UUID that it is, whichever service of ours emitted it; a stranger's is unique in its source only."""
    if source.startswith(OUR_SOURCE):
        with contextlib.suppress(ValueError):
            return UUID(id_)
    return uuid5(NAMESPACE_URL, f"{source}\n{id_}")


def _order_key(key: str) -> str:
    """The broker's own key, which may be anything: one that cannot name an aggregate is named by its hash."""
    if len(key) <= MAX_AGGREGATE and key == storable(key):
        return key
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _topic(source: str) -> str:
    topic = source.rpartition("/")[2]
    if not NAME.fullmatch(topic):
        raise Invalid(f"its topic is not known: the source {_shown(source)} does not end in one")
    return topic


def _moment(text: str | None) -> datetime:
    if text is None:
        return datetime.fromtimestamp(unix_milliseconds() / 1000, UTC)
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise Invalid(f"the time {_shown(text)} is no RFC 3339 timestamp") from None


def _headers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Every extension attribute, under the name we know it by."""
    names = header_names()
    found = {
        names.get(name, name): _text(attributes, name)
        for name, value in attributes.items()
        if name not in _NOT_HEADERS and value is not None
    }
    more = _read_json((_text(attributes, "dulyheaders", most=MAX_HEADERS_BYTES) or "{}").encode())
    if not isinstance(more, dict):
        raise Invalid("dulyheaders is no JSON object")
    headers = {name: value for name, value in found.items() if value is not None} | more
    encode_payload(headers, what="headers", max_bytes=MAX_HEADERS_BYTES)
    return headers


def _required(attributes: Mapping[str, Any], name: str) -> str:
    found = _text(attributes, name)
    if found is None:
        raise Invalid(f"the attribute {name} is missing")
    return found


def _text(attributes: Mapping[str, Any], name: str, *, most: int = MAX_ATTRIBUTE) -> str | None:
    """An attribute as text; one that is empty counts as absent."""
    value = attributes.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, bool | int):
        value = str(value).lower()
    if not isinstance(value, str):
        raise Invalid(f"the attribute {_shown(name)} must be text, not {type(value).__name__}")
    if len(value) > most:
        raise Invalid(f"the attribute {_shown(name)} has {len(value)} characters; at most {most} are read")
    return check_text(value, f"the attribute {_shown(name)}")


# -- JSON ------------------------------------------------------------------------------------------------------------


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _read_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8-sig"), parse_float=_fraction, parse_constant=_no_number)
    except UnicodeDecodeError:
        raise Invalid("it is not UTF-8") from None
    except RecursionError:
        raise Invalid("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise Invalid(f"it is no JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # an integer of more digits than Python reads
        raise Invalid("it holds a number that is too long") from None


def _fraction(text: str) -> float | str:
    """A number where that is exact, text where it is not: what we write is read as it was."""
    number = float(text)
    return number if Decimal(repr(number)) == Decimal(text) else text


def _no_number(text: str) -> Any:
    raise Invalid(f"it is no JSON: {text} is not a number there")


def _quoted(value: str) -> str:
    """Headers of NATS are lines of ASCII; CloudEvents says how the rest is written."""
    return quote(value, safe=_SAFE)


def _shown(value: object) -> str:
    """Somebody else's text, short and on one line."""
    return repr(value)[:80] if value is not None else "missing"
