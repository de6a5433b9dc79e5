"""Events: what they are, how they are written down, and how they look on the wire (CloudEvents 1.0)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, ValidationError

from duly.errors import BadPayload, Invalid

MAX_PAYLOAD_BYTES = 256 * 1024
MAX_ATTRIBUTE = 2_000  # characters of an attribute of CloudEvents
MAX_DEPTH = 32
MAX_INTEGER_BITS = 1_024
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,199}")
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


B = TypeVar("B", bound="EventBody")


class EventBody(BaseModel):
    """A typed event. The class declares what the envelope needs, the fields are the payload::

    class OrderPlaced(EventBody, type="order.placed", topic="shop.orders", aggregate="order_id"):
        order_id: str

    ``internal=True``: for consumers here and on brokers, and never sent to whoever subscribed from outside.
    ``readers=("AUDITOR",)``: closed, too, to whoever runs the engine; in the console, people with one of these roles
    see that it exists, what it is about, and what it carries.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    event_type: ClassVar[str] = ""
    event_topic: ClassVar[str] = ""
    event_aggregate: ClassVar[str] = ""
    event_internal: ClassVar[bool] = False
    event_readers: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **declared: Any) -> None:
        """Let the class statement carry type, topic, aggregate, internal and readers; pydantic hands them on below."""
        super().__init_subclass__()

    @classmethod
    def __pydantic_init_subclass__(cls, **declared: Any) -> None:
        """Take what the class statement declares, and refuse what could never be emitted."""
        super().__pydantic_init_subclass__()
        if unknown := declared.keys() - {"type", "topic", "aggregate", "internal", "readers"}:
            raise TypeError(
                f"{cls.__name__}: an event declares type, topic, aggregate, internal and readers, not {sorted(unknown)}"
            )
        cls.event_type = check_name("type", declared.get("type", cls.event_type))
        cls.event_topic = check_name("topic", declared.get("topic", cls.event_topic))
        cls.event_aggregate = declared.get("aggregate", cls.event_aggregate)
        if cls.event_aggregate not in cls.model_fields:
            raise TypeError(
                f"{cls.__name__}: aggregate={cls.event_aggregate!r} must name one of its fields: "
                f"{', '.join(cls.model_fields) or 'it has none'}"
            )
        cls.event_readers = tuple(declared.get("readers", cls.event_readers))
        cls.event_internal = bool(declared.get("internal", cls.event_internal)) or bool(cls.event_readers)
        _DECLARED[cls.event_type] = cls
        if cls.event_internal:
            _INTERNAL.add(cls.event_type)
        if cls.event_readers:
            _READERS[cls.event_type] = _READERS.get(cls.event_type, frozenset(cls.event_readers)) & set(
                cls.event_readers
            )

    def envelope(self) -> NewEvent:
        """This event, ready to be emitted."""
        aggregate = getattr(self, self.event_aggregate)
        if aggregate is None:
            raise Invalid(f"{type(self).__name__}: the aggregate {self.event_aggregate!r} is None; order needs a name")
        return NewEvent(
            type=self.event_type,
            topic=self.event_topic,
            aggregate_id=str(aggregate.value if isinstance(aggregate, Enum) else aggregate),
            payload=self.model_dump(mode="python", by_alias=True),
        )


@dataclass(frozen=True)
class NewEvent:
    """An event that is not written yet; for those who prefer plain values to a class of their own."""

    type: str
    topic: str
    aggregate_id: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self) -> NewEvent:
        """Itself, after a look at its names."""
        check_name("type", self.type)
        check_name("topic", self.topic)
        return self


BodyClass = type[B]
_DECLARED: dict[str, type[EventBody]] = {}
_INTERNAL: set[str] = set()
_READERS: dict[str, frozenset[str]] = {}


def declared_events() -> dict[str, type[EventBody]]:
    """Every event that code which was imported declares, by its type."""
    return dict(sorted(_DECLARED.items()))


def is_internal(type_: str) -> bool:
    """Whether events of this type are never sent outside, whoever emits them: one class that says so is enough."""
    return type_ in _INTERNAL


def may_read(type_: str, roles: Set[str] | None) -> bool:
    """Whether somebody with these roles may know of events of this type; without roles it is who has the database."""
    return roles is None or type_ not in _READERS or not _READERS[type_].isdisjoint(roles)


@dataclass(frozen=True)
class Event:
    """An event as a consumer receives it."""

    id: UUID
    type: str
    topic: str
    aggregate_id: str
    payload: dict[str, Any]
    headers: dict[str, Any]
    created_at: datetime

    def body(self, kind: BodyClass[B]) -> B:
        """The payload as the typed event it was; unknown fields are ignored, so producers may add some."""
        try:
            return kind.model_validate(self.payload)
        except ValidationError as error:
            places = "; ".join(f"{_path(e['loc'])}: {e['msg']}" for e in error.errors(include_input=False)[:5])
            raise Invalid(f"event {self.id} is no {kind.__name__}: {places}") from None


def to_cloudevent(event: Event, *, source: str = "/duly") -> dict[str, Any]:
    """The CloudEvents 1.0 envelope, in structured JSON mode."""
    envelope: dict[str, Any] = {
        "specversion": "1.0",
        "id": str(event.id),
        "source": f"{source}/{event.topic}",
        "type": event.type,
        "subject": event.aggregate_id,
        "time": event.created_at.isoformat(),
        "datacontenttype": "application/json",
        "partitionkey": event.aggregate_id,
        "data": _wire(event.payload),
    }
    rest = {}
    for header, content in event.headers.items():
        attribute = _EXTENSIONS.get(header, header)
        if attribute in envelope or not _is_extension(header, attribute, str(content)):
            rest[header] = content
        else:
            envelope[attribute] = str(content)
    if rest:
        envelope[_OTHER_HEADERS] = _ENCODER.encode(_wire(rest))
    return envelope


def _is_extension(header: str, attribute: str, content: str) -> bool:
    """Whether CloudEvents can carry a header as an attribute of its own, and nobody takes it for another's."""
    is_taken = attribute in _CONTEXT or (header not in _EXTENSIONS and header in _EXTENSIONS.values())
    return not is_taken and bool(_ATTRIBUTE.fullmatch(attribute) and _ATTRIBUTE_TEXT.fullmatch(content))


def from_cloudevent(envelope: Mapping[str, Any]) -> Event:
    """The event inside a CloudEvents envelope of ours."""
    try:
        names = header_names()
        headers = {
            names.get(attribute, attribute): content
            for attribute, content in envelope.items()
            if attribute not in _CONTEXT and content is not None
        } | json.loads(envelope.get(_OTHER_HEADERS, "{}"))
        return Event(
            id=UUID(envelope["id"]),
            type=envelope["type"],
            topic=str(envelope["source"]).rpartition("/")[2],
            aggregate_id=envelope["subject"],
            payload=dict(envelope["data"]),
            headers=headers,
            created_at=datetime.fromisoformat(envelope["time"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise Invalid(f"not a CloudEvents 1.0 envelope of an event: {error!r}") from None


def header_names() -> dict[str, str]:
    """Which of our headers an extension attribute of CloudEvents is."""
    return {attribute: header for header, attribute in _EXTENSIONS.items()}


_CONTEXT = frozenset(
    [
        "specversion",
        "id",
        "source",
        "type",
        "subject",
        "time",
        "datacontenttype",
        "dataschema",
        "partitionkey",
        "data",
        "data_base64",
        "dulyheaders",
    ]
)
_OTHER_HEADERS = "dulyheaders"  # what CloudEvents does not allow, or a reader would not take, as one JSON text
_ATTRIBUTE = re.compile(r"[a-z0-9]{1,20}")
_ATTRIBUTE_TEXT = re.compile(rf"[^\x00-\x1f\x7f-\x9f]{{1,{MAX_ATTRIBUTE}}}")
_EXTENSIONS = {"correlation_id": "correlationid", "causation_id": "causationid", "traceparent": "traceparent"}


def _wire(value: Any) -> Any:
    """JSON's own types again: a fraction that was read as Decimal is a number where that is exact, text where not."""
    if isinstance(value, Decimal):
        number = float(value)
        return number if Decimal(repr(number)) == value else str(value)
    if isinstance(value, dict):
        return {key: _wire(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_wire(inner) for inner in value]
    return value


def check_name(what: str, name: str) -> str:
    """A type, topic or job name that every part of the system can carry."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Invalid(
            f"{name!r} cannot be a {what}: use a letter, then up to 199 letters, digits or . _ : -, "
            "for example 'order.placed'"
        )
    return name


def encode_payload(payload: Mapping[str, Any], *, what: str = "payload", max_bytes: int = MAX_PAYLOAD_BYTES) -> str:
    """The payload as JSON text, or a BadPayload that says where it is wrong, in the caller's face."""
    plain = _plain(payload, "$", 0)
    if not isinstance(plain, dict):
        raise BadPayload(f"the {what} must be an object (a mapping), not {type(payload).__name__}")
    encoded = _ENCODER.encode(plain)
    if len(encoded) > max_bytes or len(encoded.encode()) > max_bytes:
        raise BadPayload(
            f"the {what} is larger than {max_bytes} bytes: store the document elsewhere and send its reference"
        )
    return encoded


def _plain(value: Any, path: str, depth: int) -> Any:
    """The value in JSON's own types; exact, or refused."""
    if depth > MAX_DEPTH:
        raise BadPayload(f"{path[:80]}: nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, path, depth + 1)
    if isinstance(value, str):
        return _storable(value, path)
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise BadPayload(f"{path}: an integer of more than {MAX_INTEGER_BITS} bits; send it as text")
        return value
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise BadPayload(f"{path}: {value} is not a JSON number")
        return value
    if isinstance(value, (dict, Mapping)):  # a dict is found at once, before the slow question
        return {_key(key, path): _plain(inner, f"{path}.{key}", depth + 1) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # the same set is the same text, in every process
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{path}[{index}]", depth + 1) for index, inner in enumerate(value)]
    return _plain_scalar(value, path, depth)


def _plain_scalar(value: Any, path: str, depth: int) -> Any:
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise BadPayload(f"{path}: {value} is not a number")
        return str(value)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise BadPayload(f"{path}: a datetime without a zone; use an aware one")
        return value.isoformat()
    if isinstance(value, date | time | UUID):
        return value.isoformat() if not isinstance(value, UUID) else str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="python"), path, depth)
    raise BadPayload(f"{path}: {type(value).__name__} cannot be stored as JSON; convert it to text or a number")


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise BadPayload(f"{path}: the key {key!r} is not text")
    return _storable(key, path)


def check_text(text: str, what: str) -> str:
    """Text that PostgreSQL can store, or a BadPayload that says why not."""
    return _storable(text, what)


def storable(text: str) -> str:
    """The text with whatever PostgreSQL cannot store replaced: for error messages of others."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _storable(text: str, path: str) -> str:
    if "\x00" in text:
        raise BadPayload(f"{path}: text with a NUL character cannot be stored")
    if _LONE_SURROGATE.search(text):
        raise BadPayload(f"{path}: text with half a surrogate pair is not valid Unicode")
    return text


def _path(location: tuple[int | str, ...]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
