"""A time zone from outside, an IANA name; and local times for answers, which have no offset."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, StringConstraints, WithJsonSchema

from duly.errors import BadZone
from duly.zones import MAX_ZONE_CHARACTERS, find_zone, zone_names


def _check(name: str) -> str:
    try:
        find_zone(name)
    except BadZone as error:
        raise ValueError(str(error)) from None
    return name


_SCHEMA: dict[str, Any] = {
    "type": "string",
    "enum": sorted(zone_names()),
    "description": "The name of an IANA time zone.",
    "examples": ["Europe/Warsaw"],
}
ZoneName = Annotated[
    str, StringConstraints(max_length=MAX_ZONE_CHARACTERS), AfterValidator(_check), WithJsonSchema(_SCHEMA)
]
"""An IANA name such as ``Europe/Warsaw``; offsets and abbreviations are refused."""

LocalTime = Annotated[
    datetime,
    WithJsonSchema(
        {
            "type": "string",
            "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}$",
            "description": "What the clocks of a zone show: no offset.",
            "examples": ["2027-03-28T09:00:00"],
        }
    ),
]
"""A local time in an answer; JSON Schema's date-time would promise an offset."""
