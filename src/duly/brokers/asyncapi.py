"""Our events as an AsyncAPI 3 document, and whether a change of them would break those who listen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from duly.errors import BadPayload, Invalid
from duly.messages import EventBody, encode_payload

Schema = Mapping[str, Any]
_MAX_DEPTH = 30
_NO_SHAPE = frozenset({"title", "description", "default", "examples", "deprecated"})
_SCHEMAS = "#/components/schemas/"
_ENVELOPE = "CloudEvent"
_OF_ARRAYS = ("minItems", "maxItems", "uniqueItems")
_ATTRIBUTES = {
    "id": "The event's id, a UUID: whoever sees it twice sees the same event twice.",
    "source": "/duly/ and the topic.",
    "type": "The event's type.",
    "subject": "The aggregate: events of one arrive in order.",
    "time": "When it was emitted, as in RFC 3339.",
    "partitionkey": "The same as the subject.",
    "correlationid": "What everything of one request shares.",
    "causationid": "The event or job that caused it.",
    "traceparent": "The W3C trace it belongs to.",
}


def describe(events: Mapping[str, type[EventBody]], *, title: str = "duly") -> dict[str, Any]:
    """The document: a channel for each topic, a message for each event, a schema for each payload."""
    channels: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    schemas: dict[str, Any] = {_ENVELOPE: _cloudevent()}
    for type_, kind in sorted(events.items()):
        key = _key(type_)
        messages[key] = _message(key, kind)
        payload = _payload(key, kind)
        if taken := payload.keys() & schemas.keys():
            raise Invalid(f"{type_}: another event, or a model of one, is {min(taken)} in AsyncAPI too: rename one")
        schemas |= payload
        channel = channels.setdefault(_key(kind.event_topic), {"address": kind.event_topic, "messages": {}})
        if channel["address"] != kind.event_topic:
            topics = f"{channel['address']} and {kind.event_topic}"
            raise Invalid(f"the topics {topics} have one name in AsyncAPI, which knows no colon: rename one")
        channel["messages"][key] = {"$ref": f"#/components/messages/{key}"}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": title,
            "version": version("duly"),
            "description": "Events, as CloudEvents 1.0. Each arrives at least once, in order within its subject.",
        },
        "defaultContentType": "application/json",
        "channels": dict(sorted(channels.items())),
        "operations": {f"send.{key}": _operation(key, channel) for key, channel in sorted(channels.items())},
        "components": {"messages": messages, "schemas": dict(sorted(schemas.items()))},
    }


def render(document: Mapping[str, Any]) -> str:
    """As a file has it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def find_breaks(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What those who listen by the old document would trip over in the new one: a sentence each."""
    before, after = _events_of(old), _events_of(new)
    said: list[str] = []
    for type_, (topic, aggregate, payload) in sorted(before.items()):
        if type_ not in after:
            said.append(f"{type_} is gone: whoever listens for it hears nothing more")
            continue
        new_topic, new_aggregate, new_payload = after[type_]
        if new_topic != topic:
            said.append(f"{type_} moved from the topic {topic} to {new_topic}")
        if new_aggregate != aggregate:
            said.append(f"{type_} is ordered by {new_aggregate}, and was by {aggregate}")
        said += [f"{type_}: {sentence}" for sentence in _compare(payload, new_payload, (old, new), "", 0)]
    return said


# -- the document ----------------------------------------------------------------------------------------------------


def _key(name: str) -> str:
    """A name of ours as a key of AsyncAPI's components, which know no colon."""
    return name.replace(":", "_")


def _operation(key: str, channel: Mapping[str, Any]) -> dict[str, Any]:
    sent = [{"$ref": f"#/channels/{key}/messages/{name}"} for name in channel["messages"]]
    return {"action": "send", "channel": {"$ref": f"#/channels/{key}"}, "messages": sent}


def _message(key: str, kind: type[EventBody]) -> dict[str, Any]:
    about = (kind.__doc__ or "").strip().partition("\n")[0]
    found: dict[str, Any] = {"name": kind.event_type, "title": kind.__name__}
    if about and kind.__doc__ != EventBody.__doc__:
        found["summary"] = about
    return found | {
        "contentType": "application/json",
        "headers": {"$ref": f"{_SCHEMAS}{_ENVELOPE}"},
        "payload": {"$ref": f"{_SCHEMAS}{key}"},
        "x-aggregate": kind.event_aggregate,
    }


def _payload(key: str, kind: type[EventBody]) -> dict[str, Any]:
    """The payload's schema, and beside it those of the models within, under names of their own."""
    schema = kind.model_json_schema(
        mode="serialization", by_alias=True, ref_template=f"{_SCHEMAS}{key}.{{model}}", schema_generator=_AsEmitted
    )
    inner = schema.pop("$defs", {})
    return {key: schema} | {f"{key}.{name}": one for name, one in inner.items()}


class _AsEmitted(GenerateJsonSchema):
    """Schemas of what ``emit`` writes, where that is not what pydantic's own JSON would be.

    A model's settings for JSON (of times, and serializers for JSON alone) do not apply: ``emit`` takes Python's values.
    """

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        """Seconds."""
        return {"type": "number", "description": "seconds"}

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> JsonSchemaValue:
        """RFC 3339."""
        return {"type": "string", "format": "date-time"}

    def date_schema(self, schema: core_schema.DateSchema) -> JsonSchemaValue:
        """A day."""
        return {"type": "string", "format": "date"}

    def time_schema(self, schema: core_schema.TimeSchema) -> JsonSchemaValue:
        """A time of the day."""
        return {"type": "string", "format": "time"}

    def ser_schema(
        self, schema: core_schema.SerSchema | core_schema.IncExSeqSerSchema | core_schema.IncExDictSerSchema
    ) -> JsonSchemaValue | None:
        """A serializer that is for JSON alone is not asked."""
        is_for_json = str(schema.get("when_used", "always")).startswith("json")
        return None if is_for_json else super().ser_schema(schema)

    def encode_default(self, dft: Any) -> Any:
        """As it would be emitted; what cannot be has no default worth showing."""
        try:
            return json.loads(encode_payload({"default": dft}))["default"]
        except BadPayload:
            return super().encode_default(dft)


def _cloudevent() -> dict[str, Any]:
    properties = {name: {"type": "string", "description": about} for name, about in _ATTRIBUTES.items()}
    required = ["id", "source", "type", "subject", "time"]
    about = "Attributes of CloudEvents 1.0; a broker's headers carry them with its prefix, such as ce_ on Kafka."
    return {"type": "object", "description": about, "properties": properties, "required": required}


# -- what breaks -----------------------------------------------------------------------------------------------------


def _events_of(document: Mapping[str, Any]) -> dict[str, tuple[str, str, Schema]]:
    """By type: the topic, the aggregate and the payload's schema."""
    found: dict[str, tuple[str, str, Schema]] = {}
    try:
        for channel in document["channels"].values():
            for reference in channel["messages"].values():
                message = _resolve(reference, document)
                found[message["name"]] = (channel["address"], message.get("x-aggregate", ""), message["payload"])
    except (KeyError, TypeError, AttributeError):
        raise Invalid("this is no AsyncAPI 3 document of our events: `duly asyncapi` prints one") from None
    return found


def _resolve(schema: Schema, document: Mapping[str, Any]) -> Schema:
    for _ in range(_MAX_DEPTH):
        if "$ref" not in schema:
            return schema
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    raise Invalid("the document refers to itself without end")


def _compare(
    old: Schema, new: Schema, documents: tuple[Mapping[str, Any], Mapping[str, Any]], path: str, depth: int
) -> Iterator[str]:
    old, new = _resolve(old, documents[0]), _resolve(new, documents[1])
    if depth > _MAX_DEPTH:  # a model within itself: it was compared above
        return
    old_choices, new_choices = _choices(old), _choices(new)
    if old_choices and new_choices and len(old_choices) == len(new_choices) and _nullable(old) == _nullable(new):
        for before, after in zip(old_choices, new_choices, strict=True):
            yield from _compare(before, after, documents, path, depth + 1)
    elif "properties" in old and "properties" in new:
        yield from _compare_fields(old, new, documents, path, depth)
        yield from _compare_others(old, new, documents, path, depth)
    elif _is_dictionary(old) and _is_dictionary(new):
        yield from _compare_others(old, new, documents, path, depth)
    elif old.get("type") == new.get("type") == "array" and "items" in old and "items" in new:
        yield from _compare(old["items"], new["items"], documents, f"{path}[]", depth + 1)
        if any(old.get(name) != new.get(name) for name in _OF_ARRAYS):
            yield f"{path or 'the payload'} changed from {_word(old, documents[0])} to {_word(new, documents[1])}"
    elif _shape(old, documents[0]) != _shape(new, documents[1]):
        yield f"{path or 'the payload'} changed from {_word(old, documents[0])} to {_word(new, documents[1])}"


def _compare_fields(
    old: Schema, new: Schema, documents: tuple[Mapping[str, Any], Mapping[str, Any]], path: str, depth: int
) -> Iterator[str]:
    before, after = old["properties"], new["properties"]
    for name, schema in before.items():
        place = f"{path}.{name}" if path else name
        if name not in after:
            yield f"the field {place} is removed"
        else:
            yield from _compare(schema, after[name], documents, place, depth + 1)
    for name in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
        yield f"the field {path + '.' if path else ''}{name} is required now: events that were emitted lack it"


def _compare_others(
    old: Schema, new: Schema, documents: tuple[Mapping[str, Any], Mapping[str, Any]], path: str, depth: int
) -> Iterator[str]:
    """Fields without a name of their own: of a dictionary, or of a model that lets others in, or none."""
    before, after = (schema.get("additionalProperties", True) for schema in (old, new))
    place = path or "the payload"
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        yield from _compare(before, after, documents, f"{path}.*" if path else "*", depth + 1)
    elif before != after:
        yield f"{place} takes {_others(after, documents[1])} now, and took {_others(before, documents[0])}"
    added = sorted(new.get("properties", {}).keys() - old.get("properties", {}).keys())
    if before is False and added:
        yield f"{place} has {', '.join(added)} now, and took no other fields"


def _others(allowed: Schema | bool, document: Mapping[str, Any]) -> str:
    if isinstance(allowed, Mapping):
        return f"other fields of {_word(allowed, document)}"
    return "any other field" if allowed else "no other fields"


def _is_dictionary(schema: Schema) -> bool:
    return schema.get("type") == "object" and "properties" not in schema


def _choices(schema: Schema) -> list[Schema]:
    return [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]


def _nullable(schema: Schema) -> bool:
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


def _shape(schema: Any, document: Mapping[str, Any], depth: int = 0) -> Any:
    """A schema without its words, and with what it refers to."""
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(schema, Mapping):
        schema = _resolve(schema, document)
        return {k: _shape(v, document, depth + 1) for k, v in sorted(schema.items()) if k not in _NO_SHAPE}
    if isinstance(schema, list):
        return [_shape(one, document, depth + 1) for one in schema]
    return schema


def _word(schema: Schema, document: Mapping[str, Any]) -> str:
    """A schema in a word or two."""
    schema = _resolve(schema, document)
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))[:100]
    if "anyOf" in schema:
        return " or ".join(_word(one, document) for one in schema["anyOf"])
    words = [str(schema.get("format", schema.get("type", "anything")))]
    words += [
        f"{name} {value}" for name, value in sorted(schema.items()) if re.match("m(ax|in)|pattern|const|unique", name)
    ]
    return " with ".join([words[0], ", ".join(words[1:])]) if words[1:] else words[0]
