"""Evaluates the part of PromQL that the alert rules use, over samples of one a minute: it decides what fires when."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import promql_parser as ast

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Series = dict[Labels, list[float | None]]

LOOKBACK_MINUTES = 5
COMPARISONS: dict[str, Callable[[float, float], bool]] = {">": operator.gt, "<": operator.lt, "==": operator.eq}
SUMS: dict[str, Callable[[float, float], float]] = {"-": operator.sub, "/": operator.truediv}
AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": sum, "count": len}


def minutes(text: str) -> int:
    """Of a duration such as 1h40m."""
    return int(ast.parse_duration(text).total_seconds()) // 60


def labels_of(series: str) -> Labels:
    """Of a series as it is written: ``name{label="value"}``."""
    found = ast.parse(series)
    assert isinstance(found, ast.VectorSelector)
    listed = {(matcher.name, matcher.value) for matcher in found.matchers.matchers}
    return frozenset(listed | ({("__name__", found.name)} if found.name else set()))


def expand(values: str) -> list[float | None]:
    """The samples that promtool's notation means: 0+10x3 is 0 10 20 30."""
    found: list[float | None] = []
    for word in values.split():
        match = re.fullmatch(r"(\d+)(?:\+(\d+))?x(\d+)", word)
        assert match, f"teach this reader {word} first"
        start, step, times = (int(number or 0) for number in match.groups())
        found += [float(start + step * number) for number in range(times + 1)]
    return found


def firing(rules: Iterable[Mapping[str, Any]], series: Series, until: int) -> set[Labels]:
    """The alerts that fire at that minute, as the labels of ``ALERTS``."""
    found: set[Labels] = set()
    for rule in rules:
        since: dict[Labels, int] = {}
        for minute in range(until + 1):
            result = At(series, minute).evaluate(ast.parse(rule["expr"]))
            assert isinstance(result, dict)
            since = {labels: since.get(labels, minute) for labels in map(_unnamed, result)}
        own = {"__name__": "ALERTS", "alertname": rule["alert"], "alertstate": "firing", **rule["labels"]}
        found |= {
            frozenset({**dict(labels), **own}.items())
            for labels, began in since.items()
            if until - began >= minutes(rule["for"])
        }
    return found


@dataclass(frozen=True)
class At:
    """Series, seen at one minute."""

    series: Series
    minute: int

    def evaluate(self, node: ast.Expr) -> Vector | float:
        """The value of an expression."""
        if isinstance(node, ast.NumberLiteral):
            return float(node.val)
        if isinstance(node, ast.ParenExpr):
            return self.evaluate(node.expr)
        if isinstance(node, ast.VectorSelector):
            seen = {labels: self._window(samples) for labels, samples in self._select(node).items()}
            return {labels: window[-1] for labels, window in seen.items() if window}
        if isinstance(node, ast.AggregateExpr):
            return self._aggregate(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        assert isinstance(node, ast.BinaryExpr), f"teach this reader {node} first"
        return self._combine(node)

    def _vector(self, node: ast.Expr) -> Vector:
        found = self.evaluate(node)
        assert isinstance(found, dict)
        return found

    def _select(self, node: ast.VectorSelector) -> Series:
        return {labels: samples for labels, samples in self.series.items() if _matches(node, dict(labels))}

    def _window(self, samples: list[float | None]) -> list[float]:
        recent = samples[max(0, self.minute + 1 - LOOKBACK_MINUTES) : self.minute + 1]
        return [sample for sample in recent if sample is not None]

    def _aggregate(self, node: ast.AggregateExpr) -> Vector:
        by = _only(node.modifier, "By") if node.modifier else set()
        groups: dict[Labels, list[float]] = defaultdict(list)
        for labels, value in self._vector(node.expr).items():
            groups[frozenset(pair for pair in labels if pair[0] in by)].append(value)
        return {labels: AGGREGATIONS[str(node.op)](values) for labels, values in groups.items()}

    def _call(self, node: ast.Call) -> Vector | float:
        name = node.func.name
        if name == "time":
            return self.minute * 60.0
        if name == "absent":
            return {} if self._vector(node.args[0]) else {_said(node.args[0]): 1.0}
        if name == "rate":
            return self._rate(node.args[0])
        assert name == "histogram_quantile", f"teach this reader {name} first"
        share, buckets = self.evaluate(node.args[0]), self._vector(node.args[1])
        assert isinstance(share, float)
        groups: dict[Labels, dict[float, float]] = defaultdict(dict)
        for labels, count in buckets.items():
            groups[frozenset(pair for pair in labels if pair[0] != "le")][float(dict(labels)["le"])] = count
        return {labels: _quantile(share, counts) for labels, counts in groups.items()}

    def _rate(self, node: ast.Expr) -> Vector:
        assert isinstance(node, ast.MatrixSelector)
        assert node.range.total_seconds() == LOOKBACK_MINUTES * 60
        seen = {
            _unnamed(labels): self._window(samples) for labels, samples in self._select(node.vector_selector).items()
        }
        return {
            labels: (window[-1] - window[0]) / (60 * (len(window) - 1))
            for labels, window in seen.items()
            if len(window) > 1
        }

    def _combine(self, node: ast.BinaryExpr) -> Vector | float:
        name, left, right = str(node.op), self.evaluate(node.lhs), self.evaluate(node.rhs)
        if isinstance(left, dict) and isinstance(right, dict):
            on = _only(node.modifier.matching, "Include") if node.modifier and node.modifier.matching else None
            others = {_key(labels, on): value for labels, value in right.items()}
            if name == "or":
                keys = {_key(labels, on) for labels in left}
                return left | {labels: value for labels, value in right.items() if _key(labels, on) not in keys}
            if name == "and":
                return {labels: value for labels, value in left.items() if _key(labels, on) in others}
            pairs = {
                labels: (value, others[_key(labels, on)])
                for labels, value in left.items()
                if _key(labels, on) in others
            }
        elif isinstance(left, dict):
            assert isinstance(right, float)
            pairs = {labels: (value, right) for labels, value in left.items()}
        else:
            assert isinstance(right, dict), f"teach this reader {node} first"
            pairs = {labels: (left, value) for labels, value in right.items()}
        if name in COMPARISONS:
            assert isinstance(left, dict), "which side's value to keep"
            return {labels: one for labels, (one, two) in pairs.items() if COMPARISONS[name](one, two)}
        return {_unnamed(labels): SUMS[name](one, two) for labels, (one, two) in pairs.items()}


def _matches(node: ast.VectorSelector, labels: dict[str, str]) -> bool:
    if node.name and labels.get("__name__") != node.name:
        return False
    for matcher in node.matchers.matchers:
        value = labels.get(matcher.name, "")
        regular = matcher.op in (ast.MatchOp.Re, ast.MatchOp.NotRe)
        same = bool(re.fullmatch(matcher.value, value)) if regular else value == matcher.value
        if same == (matcher.op in (ast.MatchOp.NotEqual, ast.MatchOp.NotRe)):
            return False
    return True


def _only(modifier: Any, kind: str) -> set[str]:
    assert str(modifier.type).endswith(f".{kind}"), f"teach this reader {modifier.type} first"
    return set(modifier.labels)


def _key(labels: Labels, on: set[str] | None) -> Labels:
    return _unnamed(labels) if on is None else frozenset(pair for pair in labels if pair[0] in on)


def _unnamed(labels: Labels) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != "__name__")


def _said(node: ast.Expr) -> Labels:
    """The labels that absent() can tell of what is not there."""
    assert isinstance(node, ast.VectorSelector)
    equal = [matcher for matcher in node.matchers.matchers if matcher.op == ast.MatchOp.Equal]
    return frozenset((matcher.name, matcher.value) for matcher in equal)


def _quantile(share: float, counts: Mapping[float, float]) -> float:
    """Within the bucket that the rank falls into, evenly spread."""
    bounds = sorted(counts)
    rank = share * counts[bounds[-1]]
    for lower, upper in pairwise([0.0, *bounds]):
        if counts[upper] >= rank:
            before = counts.get(lower, 0.0)
            return (
                lower if upper == float("inf") else lower + (upper - lower) * (rank - before) / (counts[upper] - before)
            )
    raise AssertionError("the last bucket holds everything")
