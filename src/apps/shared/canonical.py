"""Canonical JSON: one spelling for each value, so that a hash of it means something; and reading what strangers wrote.

Objects with sorted names and without spaces, in UTF-8; text, whole numbers of 53 bits, true, false and null. There are
no fractions: programs write them differently. ``plain`` turns values of Python into such values, exactly.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

LARGEST = 2**53 - 1
MOST_DIGITS = 16
MOST_LEVELS = 64
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or one that never ends: each letter is looked at once, whatever a stranger wrote."""


class NotCanonical(ValueError):
    """This cannot be written, or read, as canonical JSON; the message repeats none of it."""


def encode(value: Any) -> bytes:
    """The one spelling of a value; NotCanonical if it has none."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
        return written.encode()
    except (TypeError, ValueError, RecursionError):  # a half of a surrogate pair is a ValueError, too
        raise NotCanonical("this has no canonical spelling") from None


def parse(content: bytes, *, most_parts: int) -> Any:
    """What canonical JSON may hold, in any spelling; NotCanonical, in words without values, for everything else."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise NotCanonical("it is not UTF-8") from None
    if _count_signs(text, 0, len(text)) > most_parts and count_parts(text, most=most_parts) > most_parts:
        raise NotCanonical(f"it has more than {most_parts} parts")
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_refuse, parse_int=_whole
        )
    except RecursionError:
        raise NotCanonical("it is nested too deeply") from None
    except json.JSONDecodeError:
        raise NotCanonical("it is not JSON, or not all of it") from None
    _check_levels(value)
    if _SURROGATE.search(text):
        encode(value)
    return value


def count_parts(text: str, *, most: int = LARGEST) -> int:
    """What reading JSON costs: its lists, objects and commas, and not what is written inside of its strings.

    Counted until there are more than ``most``; or more strings than so many parts can have, a name and a value each.
    """
    counted = place = 0
    for number, string in enumerate(_TEXT.finditer(text)):
        counted += _count_signs(text, place, string.start())
        if counted > most or number > 2 * most + 1:
            return most + 1
        place = string.end()
    return counted + _count_signs(text, place, len(text))


def _count_signs(text: str, start: int, end: int) -> int:
    return text.count("[", start, end) + text.count("{", start, end) + text.count(",", start, end)


def plain(value: Any) -> Any:
    """A value of Python as one that has a canonical spelling: names of fields in camel case, all else as it is."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= LARGEST else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(inner) for inner in value), key=encode)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {to_camel(field.name): plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="python", by_alias=True))
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> str:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise NotCanonical("a time without its offset")
        return value.astimezone(UTC).isoformat(timespec="microseconds")
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, timedelta):
        return str(value.total_seconds())
    if isinstance(value, UUID | date):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    raise NotCanonical(f"a {type(value).__name__} has no canonical spelling")


def _check_levels(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [outer for outer in level if isinstance(outer, dict | list)]
        if not level:
            return
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    raise NotCanonical(f"it is nested deeper than {MOST_LEVELS} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise NotCanonical("a member occurs twice")
    return made


def _refuse(_written: str) -> None:
    raise NotCanonical("it has a number that is not whole")


def _whole(digits: str) -> int:
    if len(digits.removeprefix("-")) > MOST_DIGITS or abs(int(digits)) > LARGEST:
        raise NotCanonical("it has a number that is too large")
    return int(digits)
