"""A time zone from outside: an IANA name, and in the answer what to write when it is none."""

from __future__ import annotations

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
