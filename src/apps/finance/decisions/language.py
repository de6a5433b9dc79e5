"""The rule language: JSON that people write, checked against a rule set's fields and read into a tree."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

import re2

from duly.errors import Fault, Invalid

MOST_DEPTH = 8
MOST_CONDITIONS = 200
MOST_VALUES = 1_000
MOST_TEXT = 1_000
MOST_PATTERN = 500
PATTERN_BYTES = 1 << 20
"""What RE2 may spend on one pattern; a pattern that needs more is refused when the rule is written."""
MOST_FAULTS = 20
LARGEST_INTEGER = 2**63
LARGEST_DECIMAL = 10**18
FIELD_NAME = r"[a-z][A-Za-z0-9]{0,39}(\.[a-z][A-Za-z0-9]{0,39}){0,3}"
LIST_NAME = r"[a-z0-9][a-z0-9-]{0,63}"

_DECIMAL = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")
_INSTANT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?(Z|[+-][0-9]{2}:[0-9]{2})"
)
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,60}")

Value = Decimal | int | str | bool | datetime | frozenset[str]
"""A fact, or what it is compared with."""


class Kind(StrEnum):
    """What a field holds."""

    DECIMAL = "decimal"
    INTEGER = "integer"
    STRING = "string"
    BOOLEAN = "boolean"
    INSTANT = "instant"
    STRINGS = "strings"


class Op(StrEnum):
    """How a fact is compared."""

    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LTE = "lte"
    GT = "gt"
    GTE = "gte"
    BETWEEN = "between"
    IN = "in"
    STARTS_WITH = "startsWith"
    ENDS_WITH = "endsWith"
    CONTAINS = "contains"
    MATCHES = "matches"
    EXISTS = "exists"


_ORDERED = frozenset({Kind.DECIMAL, Kind.INTEGER, Kind.INSTANT})
NUMBERS = frozenset({Kind.DECIMAL, Kind.INTEGER})
_TEXT = frozenset({Kind.STRING})
_SINGLE = _ORDERED | {Kind.STRING, Kind.BOOLEAN}
_SUITS: Mapping[Op, frozenset[Kind]] = {
    Op.EQ: _SINGLE, Op.NE: _SINGLE, Op.LT: _ORDERED, Op.LTE: _ORDERED, Op.GT: _ORDERED, Op.GTE: _ORDERED,
    Op.BETWEEN: _ORDERED, Op.IN: _ORDERED | _TEXT, Op.STARTS_WITH: _TEXT, Op.ENDS_WITH: _TEXT,
    Op.CONTAINS: _TEXT | {Kind.STRINGS}, Op.MATCHES: _TEXT, Op.EXISTS: frozenset(Kind),
}  # fmt: skip
_BETWEEN_FIELDS = frozenset({Op.EQ, Op.NE, Op.LT, Op.LTE, Op.GT, Op.GTE})
_MEMBERS = frozenset({"field", "op", "value", "valueField", "list", "otherwise"})


class BadRule(Invalid):
    """The rule cannot be used: errors says where and why."""

    status = 400


@dataclass(frozen=True)
class All:
    """True when every part is."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Any_:
    """True when some part is."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Not:
    """True when its part is false; what is unknown stays unknown."""

    part: Node


@dataclass(frozen=True)
class Compare:
    """One fact, compared with a value, with another fact, or with the members of a list."""

    field: str
    kind: Kind
    op: Op
    value: Value | tuple[Value, ...] | None = None
    other: str | None = None
    list_id: str | None = None
    otherwise: bool | None = None


Node = All | Any_ | Not | Compare


def parse(
    given: Any, *, kinds: Mapping[str, Kind], lists: Collection[str] | None = None, path: str = "$.conditions"
) -> Node:
    """The tree of some conditions; BadRule names every place that is wrong. Without ``lists``, any name will do."""
    reader = _Reader(kinds, lists)
    node = reader.read(given, path, 1)
    reader.check_size(path)
    if reader.faults or node is None:
        raise refusal(reader.faults)
    return node


def refusal(faults: Sequence[Fault]) -> BadRule:
    """The error with these faults; its sentence is about the first."""
    bad = BadRule(f"{faults[0].path}: {faults[0].detail}")
    bad.faults = tuple(faults[:MOST_FAULTS])
    return bad


def lists_of(node: Node) -> frozenset[str]:
    """The lists that a tree looks into."""
    if isinstance(node, Compare):
        return frozenset({node.list_id}) if node.list_id else frozenset()
    parts = (node.part,) if isinstance(node, Not) else node.parts
    return frozenset().union(*(lists_of(part) for part in parts))


def fields_of(node: Node) -> frozenset[str]:
    """The facts that a tree needs."""
    if isinstance(node, Compare):
        return frozenset({node.field} | ({node.other} if node.other else set()))
    parts = (node.part,) if isinstance(node, Not) else node.parts
    return frozenset().union(*(fields_of(part) for part in parts))


def compile_pattern(pattern: str) -> Any:
    """An RE2 that cannot run away, in time or in memory; ValueError says what is wrong with it."""
    options = re2.Options()
    options.max_mem = PATTERN_BYTES
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        said = error.args[0] if error.args else b""
        words = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        raise ValueError(words.partition(":")[0][:80] or "it cannot be read") from None


def read_decimal(given: Any) -> Decimal | None:
    """An exact decimal from text or a whole number; None for anything else, binary floats above all."""
    if type(given) is str:
        return Decimal(given) if _DECIMAL.fullmatch(given) else None
    if type(given) is int and -LARGEST_DECIMAL < given < LARGEST_DECIMAL:
        return Decimal(given)
    return None


def read_integer(given: Any) -> int | None:
    """A whole number of 64 bits."""
    return given if type(given) is int and -LARGEST_INTEGER <= given < LARGEST_INTEGER else None


def read_instant(given: Any) -> datetime | None:
    """A moment with its offset, in UTC."""
    if type(given) is not str or not _INSTANT.fullmatch(given):
        return None
    try:
        return datetime.fromisoformat(given).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def read_value(given: Any, kind: Kind) -> Value | None:
    """A literal of this kind; None when it is not one."""
    if kind is Kind.DECIMAL:
        return read_decimal(given)
    if kind is Kind.INTEGER:
        return read_integer(given)
    if kind is Kind.INSTANT:
        return read_instant(given)
    if kind is Kind.BOOLEAN:
        return given if type(given) is bool else None
    return given if type(given) is str and len(given) <= MOST_TEXT and "\x00" not in given else None


_WORDS: Mapping[Kind, str] = {
    Kind.DECIMAL: 'a decimal as text, such as "12.50", or a whole number; never a binary fraction',
    Kind.INTEGER: "a whole number of at most 64 bits",
    Kind.INSTANT: 'a moment with its offset, such as "2026-01-31T09:00:00Z"',
    Kind.BOOLEAN: "true or false",
    Kind.STRING: f"a text of at most {MOST_TEXT} characters",
    Kind.STRINGS: f"a text of at most {MOST_TEXT} characters",
}


def suggest(name: str, known: Collection[str]) -> str:
    """Half a sentence about the name that was probably meant."""
    close = difflib.get_close_matches(name[:100], known, n=1)
    return f": did you mean {close[0]}?" if close else ""


class _Wrong(Exception):
    """What is wrong with one condition; the reader goes on with the next one."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = Fault("body", path, detail)


class _Reader:
    """Reads one rule and collects what is wrong with it."""

    def __init__(self, kinds: Mapping[str, Kind], lists: Collection[str] | None) -> None:
        self._kinds = kinds
        self._lists = lists
        self._count = 0
        self.faults: list[Fault] = []

    def check_size(self, path: str) -> None:
        """Note it when there was more than a rule may have."""
        if self._count > MOST_CONDITIONS:
            self._note(Fault("body", path, f"a rule has at most {MOST_CONDITIONS} conditions"))

    def read(self, given: Any, path: str, depth: int) -> Node | None:
        """A condition, or None when something is wrong with it or enough has been said."""
        self._count += 1
        if self._count > MOST_CONDITIONS or len(self.faults) >= MOST_FAULTS:
            return None
        try:
            return self._read(given, path, depth)
        except _Wrong as wrong:
            self._note(wrong.fault)
            return None

    def _note(self, fault: Fault) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(fault)

    def _read(self, given: Any, path: str, depth: int) -> Node | None:
        if not isinstance(given, dict):
            raise _Wrong(path, "write an object: all, any, not, or field with op")
        if depth > MOST_DEPTH:
            raise _Wrong(path, f"conditions are nested at most {MOST_DEPTH} deep")
        joined = [name for name in ("all", "any", "not") if name in given]
        if not joined:
            return self._read_compare(given, path)
        if len(given) > 1:
            raise _Wrong(path, f"{joined[0]} stands alone in its object")
        inner, below = given[joined[0]], f"{path}.{joined[0]}"
        if joined[0] == "not":
            part = self.read(inner, below, depth + 1)
            return Not(part) if part is not None else None
        if not isinstance(inner, list) or not inner:
            raise _Wrong(below, "write a list of at least one condition")
        parts = [self.read(one, f"{below}[{place}]", depth + 1) for place, one in enumerate(inner[:MOST_CONDITIONS])]
        if len(inner) > MOST_CONDITIONS:
            self._count = MOST_CONDITIONS + 1
        found = tuple(part for part in parts if part is not None)
        return All(found) if joined[0] == "all" else Any_(found)

    def _read_compare(self, given: Mapping[str, Any], path: str) -> Compare:
        for name in given:
            if name not in _MEMBERS:
                shown = f".{name}" if _PLAIN.fullmatch(name) else ""
                raise _Wrong(path + shown, f"a condition has no such member{suggest(name, _MEMBERS)}")
        field, kind = self._read_field(given.get("field"), f"{path}.field")
        op = _read_op(given.get("op"), f"{path}.op")
        if kind not in _SUITS[op]:
            raise _Wrong(f"{path}.op", f"{op.value} is not for a field of type {kind.value}")
        otherwise = given.get("otherwise")
        if "otherwise" in given and (op is Op.EXISTS or not isinstance(otherwise, bool)):
            raise _Wrong(f"{path}.otherwise", "true or false, and not with exists, which always has an answer")
        sources = [name for name in ("value", "valueField", "list") if name in given]
        if op is Op.EXISTS:
            if sources:
                raise _Wrong(f"{path}.{sources[0]}", "exists compares with nothing")
            return Compare(field, kind, op)
        if len(sources) != 1:
            raise _Wrong(path, f"{op.value} needs one of value, valueField and list")
        source, here = sources[0], f"{path}.{sources[0]}"
        if source == "list":
            return Compare(field, kind, op, list_id=self._read_list(given["list"], kind, op, here), otherwise=otherwise)
        if source == "valueField":
            other = self._read_other(given["valueField"], kind, op, here)
            return Compare(field, kind, op, other=other, otherwise=otherwise)
        return Compare(field, kind, op, value=_read_literal(given["value"], kind, op, here), otherwise=otherwise)

    def _read_list(self, name: Any, kind: Kind, op: Op, path: str) -> str:
        if op is not Op.IN or kind is not Kind.STRING:
            raise _Wrong(path, "a list is for in, with a field of type string")
        if not isinstance(name, str) or not re.fullmatch(LIST_NAME, name):
            raise _Wrong(path, "write the name of a list")
        if self._lists is not None and name not in self._lists:
            raise _Wrong(path, f"there is no such list{suggest(name, self._lists)}")
        return name

    def _read_other(self, name: Any, kind: Kind, op: Op, path: str) -> str:
        other, other_kind = self._read_field(name, path)
        if op not in _BETWEEN_FIELDS:
            raise _Wrong(path, f"{op.value} compares with a value, not with a field")
        if other_kind is not kind and not {other_kind, kind} <= NUMBERS:
            raise _Wrong(path, f"a field of type {kind.value} is not compared with one of {other_kind.value}")
        return other

    def _read_field(self, name: Any, path: str) -> tuple[str, Kind]:
        if not isinstance(name, str) or not name:
            raise _Wrong(path, "write the name of a field")
        if name not in self._kinds:
            raise _Wrong(path, f"the rule set has no such field{suggest(name, self._kinds)}")
        return name, self._kinds[name]


def _read_op(name: Any, path: str) -> Op:
    known = [op.value for op in Op]
    if not isinstance(name, str) or name not in known:
        meant = suggest(name, known) if isinstance(name, str) else ""
        raise _Wrong(path, f"write one of {', '.join(known)}{meant}")
    return Op(name)


def _read_literal(given: Any, kind: Kind, op: Op, path: str) -> Value | tuple[Value, ...]:
    if op is Op.IN:
        return _read_values(given, kind, path)
    if op is Op.BETWEEN:
        if not isinstance(given, list) or len(given) != 2:
            raise _Wrong(path, "between needs the lowest and the highest value")
        ends: Any = _read_values(given, kind, path)
        if ends[0] > ends[1]:
            raise _Wrong(path, "the lowest value stands first")
        return tuple(ends)
    value = read_value(given, kind)
    if value is None:
        raise _Wrong(path, f"write {_WORDS[kind]}")
    return _read_pattern(str(value), path) if op is Op.MATCHES else value


def _read_values(given: Any, kind: Kind, path: str) -> tuple[Value, ...]:
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_VALUES:
        raise _Wrong(path, f"write a list of 1 to {MOST_VALUES} values")
    values = []
    for place, one in enumerate(given):
        value = read_value(one, kind)
        if value is None:
            raise _Wrong(f"{path}[{place}]", f"write {_WORDS[kind]}")
        values.append(value)
    return tuple(values)


def _read_pattern(pattern: str, path: str) -> str:
    if len(pattern) > MOST_PATTERN:
        raise _Wrong(path, f"a pattern has at most {MOST_PATTERN} characters")
    try:
        compile_pattern(pattern)
    except ValueError as error:
        raise _Wrong(path, f"RE2 refuses the pattern: {error}") from None
    return pattern
