"""What values one fact may have under several comparisons: none for certain, or some to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, localcontext
from typing import Any

from apps.finance.decisions.compiled import compare_with
from apps.finance.decisions.language import LARGEST_DECIMAL, LARGEST_INTEGER, Compare, Kind, Op, Value

MOST_CANDIDATES = 6
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FINEST = Decimal(1).scaleb(-18)
_SAMPLES = ("", "a", "A", "abc", "ABC", "0", "1", "12", "123", "x1", "PL", "~")

Asked = Sequence[tuple[Compare, bool]]


@dataclass(frozen=True)
class Solved:
    """``is_empty`` is certain; the candidates fulfil every comparison; without either, nothing is known."""

    candidates: tuple[Value, ...] = ()
    is_empty: bool = False


_EMPTY = Solved(is_empty=True)


def solve(kind: Kind, asked: Asked, lists: Mapping[str, frozenset[str]], *, least: int | None = None) -> Solved:
    """The values of this kind for which each comparison holds, or does not, as asked; ``least`` is known of it."""
    if kind is Kind.STRINGS:
        return _solve_members(asked)
    tests = [(compare_with(node, lists), positive) for node, positive in asked]

    def fits(value: Any) -> bool:
        return all(test(value) is positive for test, positive in tests) and (least is None or value >= least)

    listed = _listed(asked, lists)
    if kind is Kind.BOOLEAN:
        listed = [True, False] if listed is None else listed
    if listed is not None:
        found = tuple(value for value in listed if fits(value))[:MOST_CANDIDATES]
        return Solved(found, is_empty=not found)
    if kind is Kind.STRING:
        return _solve_text(asked, fits)
    return _solve_range(kind, asked, fits, least)


def _listed(asked: Asked, lists: Mapping[str, frozenset[str]]) -> list[Value] | None:
    """When only these values come into question: the shortest such list."""
    found: list[list[Value]] = []
    for node, positive in asked:
        if positive and node.op is Op.EQ and node.value is not None and not isinstance(node.value, tuple):
            found.append([node.value])
        elif positive and node.op is Op.IN:
            given: Any = node.value
            found.append(sorted(lists[node.list_id]) if node.list_id else list(given))
    return min(found, key=len) if found else None


def _solve_members(asked: Asked) -> Solved:
    needed = {str(node.value) for node, positive in asked if positive}
    refused = {str(node.value) for node, positive in asked if not positive}
    return _EMPTY if needed & refused else Solved((frozenset(needed),))


def _solve_text(asked: Asked, fits: Callable[[Value], bool]) -> Solved:
    wanted: dict[Op, list[str]] = {op: [] for op in Op}
    for node, positive in asked:
        if positive:
            wanted[node.op].append(str(node.value))
    starts, ends = sorted(wanted[Op.STARTS_WITH], key=len), sorted(wanted[Op.ENDS_WITH], key=len)
    if starts and not all(starts[-1].startswith(start) for start in starts):
        return _EMPTY
    if ends and not all(ends[-1].endswith(end) for end in ends):
        return _EMPTY
    start, end = starts[-1] if starts else "", ends[-1] if ends else ""
    for node, positive in asked:
        if not positive and _is_certain(node, start, end, wanted[Op.CONTAINS]):
            return _EMPTY
    middle = "".join(wanted[Op.CONTAINS])
    plain = [_plain(pattern) for pattern in wanted[Op.MATCHES]]
    tried = [start + middle + end, start + end, start, end, *plain]
    tried += [start + middle + sample + end for sample in (*_SAMPLES, *plain)]
    return Solved(_first(tried, fits))


def _is_certain(node: Compare, start: str, end: str, inside: Sequence[str]) -> bool:
    """Whether a text that has these parts has this one, too."""
    text = str(node.value)
    if node.op is Op.STARTS_WITH:
        return start.startswith(text)
    if node.op is Op.ENDS_WITH:
        return end.endswith(text)
    return node.op is Op.CONTAINS and any(text in part for part in (start, end, *inside))


def _plain(pattern: str) -> str:
    """What a pattern without much in it means literally; only worth a try."""
    return pattern.removeprefix("(?i)").removeprefix("^").removesuffix("$").replace("\\", "").replace(".*", "")


def _solve_range(kind: Kind, asked: Asked, fits: Callable[[Value], bool], least: int | None) -> Solved:
    """The ends of the interval that is left, and what lies between."""
    number, back = _scale(kind)
    step = _FINEST if kind is Kind.DECIMAL else Decimal(1)
    points: set[Decimal] = set()
    with localcontext() as context:
        context.prec = 80
        low, high = _bounds(kind)
        low = low if least is None else max(low, Decimal(least))
        for node, positive in asked:
            low, high = _narrow(node, positive, number, low, high, step)
            points |= {number(value) for value in _values(node)}
        if low > high:
            return _EMPTY
        middle = (low + high) / 2
        near = [point + shift for point in sorted(points)[:50] for shift in (0, 1, -1, step, -step)]
        tried = [*near, Decimal(0), Decimal(1), low, high, middle.quantize(step)]
        inside = [back(one) for one in dict.fromkeys(tried) if low <= one <= high]
    found = _first((one for one in inside if one is not None), fits)
    return Solved(found, is_empty=not found and low == high)


def _narrow(
    node: Compare, positive: bool, number: Callable[[Any], Decimal], low: Decimal, high: Decimal, step: Decimal
) -> tuple[Decimal, Decimal]:
    """What is left of an interval; every value is a multiple of the step, so an open end is a closed one further in."""
    op, values = node.op, [number(value) for value in _values(node)]
    if op is Op.BETWEEN and positive:
        return max(low, values[0]), min(high, values[1])
    if not positive:
        op = {Op.LT: Op.GTE, Op.LTE: Op.GT, Op.GT: Op.LTE, Op.GTE: Op.LT, Op.NE: Op.EQ}.get(op, Op.EXISTS)
    if op is Op.EQ:
        return max(low, values[0]), min(high, values[0])
    if op is Op.LT:
        high = min(high, values[0] - step)
    elif op is Op.LTE:
        high = min(high, values[0])
    elif op is Op.GT:
        low = max(low, values[0] + step)
    elif op is Op.GTE:
        low = max(low, values[0])
    return low, high


def _values(node: Compare) -> tuple[Value, ...]:
    if isinstance(node.value, tuple):
        return node.value
    return () if node.value is None else (node.value,)


def _bounds(kind: Kind) -> tuple[Decimal, Decimal]:
    if kind is Kind.INTEGER:
        return Decimal(-LARGEST_INTEGER), Decimal(LARGEST_INTEGER - 1)
    if kind is Kind.INSTANT:
        first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
        return Decimal((first - _EPOCH) // _MICROSECOND), Decimal((last - _EPOCH) // _MICROSECOND)
    return _FINEST - LARGEST_DECIMAL, LARGEST_DECIMAL - _FINEST


def _scale(kind: Kind) -> tuple[Callable[[Any], Decimal], Callable[[Decimal], Value | None]]:
    """To numbers and back: moments are microseconds."""
    if kind is Kind.INSTANT:
        return (lambda value: Decimal((value - _EPOCH) // _MICROSECOND)), _moment
    if kind is Kind.INTEGER:
        return Decimal, math.floor
    return Decimal, lambda one: one


def _moment(microseconds: Decimal) -> Value | None:
    try:
        return _EPOCH + timedelta(microseconds=int(microseconds))
    except OverflowError:
        return None


def _first(tried: Iterable[Value], fits: Callable[[Value], bool]) -> tuple[Value, ...]:
    found: list[Value] = []
    for value in tried:
        if value not in found and fits(value):
            found.append(value)
            if len(found) == MOST_CANDIDATES:
                break
    return tuple(found)
