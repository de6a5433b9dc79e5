"""Facts: what a caller says, as it is written into the log, and as the rules read it back from there.

Live evaluation and replay read the same record, so they cannot see different things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from apps.finance.decisions.language import (
    LARGEST_INTEGER,
    Kind,
    Value,
    read_decimal,
    read_instant,
    read_integer,
)
from duly.errors import Fault, Invalid

MOST_TEXT = 4_000
MOST_MEMBERS = 1_000
WRONG_TYPE = "wrongType"
_LARGEST_EXPONENT = 40


class BadFacts(Invalid):
    """The facts cannot be read: errors says where and why."""

    status = 400


class Absent:
    """Why there is no value: it is missing, it is null, or it is of the wrong type."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<{self.reason}>"


MISSING = Absent("missing")
NULL = Absent("null")
WRONG = Absent("wrong_type")
Fact = Value | Absent


def record(kinds: Mapping[str, Kind], given: Mapping[str, Any], *, path: str = "$.context") -> dict[str, Any]:
    """The given values of the declared fields as flat, bounded JSON; what is not declared is left out.

    A value that cannot be of its field's kind is recorded by what it is, not by its content.
    """
    recorded: dict[str, Any] = {}
    for name, kind in kinds.items():
        raw = given.get(name, MISSING)
        if raw is MISSING and "." in name:
            raw = _step_down(given, name.split("."))
        if raw is not MISSING:
            recorded[name] = _clean(raw, kind, f"{path}.{name}")
    return recorded


def find_ignored(kinds: Mapping[str, Kind], given: Mapping[str, Any]) -> list[str]:
    """The names of what was given and is no declared field, nor on the way to one."""
    known = set(kinds) | {name.partition(".")[0] for name in kinds}
    return sorted(name for name in given if name not in known)


def read(kinds: Mapping[str, Kind], names: Sequence[str], recorded: Mapping[str, Any]) -> list[Fact]:
    """The facts in the order of ``names``, each a value of its kind or the reason why there is none."""
    facts: list[Fact] = []
    for name in names:
        raw = recorded.get(name, MISSING)
        if raw is MISSING:
            facts.append(MISSING)
        elif raw is None:
            facts.append(NULL)
        else:
            value = _READERS[kinds[name]](raw)
            facts.append(WRONG if value is None else value)
    return facts


def show(fact: Fact) -> Any:
    """A fact as JSON shows it."""
    if isinstance(fact, Decimal):
        return format(fact, "f")
    if isinstance(fact, datetime):
        return fact.isoformat()
    if isinstance(fact, frozenset):
        return sorted(fact)
    return None if isinstance(fact, Absent) else fact


def _step_down(given: Mapping[str, Any], steps: Sequence[str]) -> Any:
    here: Any = given
    for step in steps:
        if here is None:
            return None
        if not isinstance(here, Mapping):
            return {}  # something else than an object is on the way: the wrong type
        here = here.get(step, MISSING)
        if here is MISSING:
            return MISSING
    return here


def _clean(raw: Any, kind: Kind, path: str) -> Any:
    """As JSON that the log can hold and that reads back as the same fact."""
    if raw is None or isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        return _check_text(str(raw), path)
    if isinstance(raw, int):
        return raw if -LARGEST_INTEGER <= raw < LARGEST_INTEGER else {WRONG_TYPE: "number"}
    if isinstance(raw, Decimal):
        is_sane = raw.is_finite() and abs(raw.adjusted()) < _LARGEST_EXPONENT
        return (
            format(raw, "f") if is_sane and len(raw.as_tuple().digits) < _LARGEST_EXPONENT else {WRONG_TYPE: "number"}
        )
    if isinstance(raw, datetime):
        return raw.isoformat() if raw.tzinfo is not None else {WRONG_TYPE: "local time"}
    if isinstance(raw, UUID):
        return str(raw)
    if isinstance(raw, list | tuple | set | frozenset):
        return _clean_list(list(raw), kind, path)
    return {WRONG_TYPE: "number" if isinstance(raw, float) else "object"}


def _clean_list(raw: list[Any], kind: Kind, path: str) -> Any:
    if kind is not Kind.STRINGS or not all(isinstance(one, str) for one in raw):
        return {WRONG_TYPE: "array"}
    if len(raw) > MOST_MEMBERS:
        raise _bad(path, f"a list has at most {MOST_MEMBERS} members")
    return [_check_text(str(one), path) for one in raw]


def _check_text(text: str, path: str) -> str:
    if len(text) > MOST_TEXT:
        raise _bad(path, f"a text has at most {MOST_TEXT} characters")
    if "\x00" in text or not _is_unicode(text):
        raise _bad(path, "a text has no NUL and no halves of surrogate pairs")
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bad(path: str, detail: str) -> BadFacts:
    bad = BadFacts(f"{path}: {detail}")
    bad.faults = (Fault("body", path, detail),)
    return bad


def _read_boolean(raw: Any) -> bool | None:
    return raw if type(raw) is bool else None


def _read_text(raw: Any) -> str | None:
    return raw if type(raw) is str else None


def _read_texts(raw: Any) -> frozenset[str] | None:
    return frozenset(raw) if type(raw) is list else None


_READERS: Mapping[Kind, Callable[[Any], Value | None]] = {
    Kind.DECIMAL: read_decimal,
    Kind.INTEGER: read_integer,
    Kind.STRING: _read_text,
    Kind.BOOLEAN: _read_boolean,
    Kind.INSTANT: read_instant,
    Kind.STRINGS: _read_texts,
}
