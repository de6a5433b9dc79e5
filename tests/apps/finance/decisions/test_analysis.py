"""Warnings before activation: rules that can never match, rules that another one always stops (F12)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings

from apps.finance.decisions import analysis
from apps.finance.decisions.analysis import Finding, FindingKind
from apps.finance.decisions.model import Rule, read_settings
from duly.clock import monotonic
from tests.apps.finance.decisions import oracle
from tests.apps.finance.decisions.test_compiled import LISTS, SETTINGS, compile_rules, make_rule

NEVER, SHADOWED, UNDECIDED = FindingKind.NEVER_MATCHES, FindingKind.SHADOWED, FindingKind.UNDECIDED


def analyse(rule: Rule, *others: Rule) -> list[Finding]:
    return analysis.analyse(rule, others, settings=SETTINGS, lists=LISTS)


def compare(field: str, op: str, value: Any = None, **more: Any) -> dict[str, Any]:
    return {"field": field, "op": op, **({"value": value} if value is not None else {}), **more}


@pytest.mark.parametrize(
    "conditions",
    [
        {"all": [compare("amount", "gt", "100"), compare("amount", "lt", "50")]},
        {"all": [compare("amount", "gte", "5"), compare("amount", "lte", "5"), compare("amount", "ne", "5.0")]},
        {"all": [compare("count", "gt", 1), compare("count", "lt", 2)]},
        {"all": [compare("amount", "in", ["1", "2"]), compare("amount", "gt", "2")]},
        {"all": [compare("currency", "eq", "PLN"), compare("currency", "eq", "EUR")]},
        {"all": [compare("currency", "eq", "PLN"), compare("currency", "matches", "^E")]},
        {"all": [compare("currency", "startsWith", "PL"), compare("currency", "startsWith", "E")]},
        {"all": [compare("currency", "endsWith", "x"), compare("currency", "endsWith", "yy")]},
        {"all": [compare("currency", "startsWith", "PL"), {"not": compare("currency", "contains", "L")}]},
        {"all": [compare("currency", "in", list="sanctioned"), compare("currency", "startsWith", "PL")]},
        compare("currency", "in", list="empty"),
        {"all": [compare("trusted", "eq", True), compare("trusted", "ne", True)]},
        {"all": [compare("tags", "contains", "a"), {"not": compare("tags", "contains", "a")}]},
        {"all": [compare("amount", "gt", "1"), {"not": compare("amount", "exists")}]},
        {"all": [compare("at", "gt", "2026-01-02T00:00:00Z"), compare("at", "lt", "2026-01-02T00:00:00.000001Z")]},
        {"any": [{"all": [compare("count", "eq", 1), compare("count", "eq", 2)]},
                 {"not": {"any": [compare("amount", "exists"), {"not": compare("amount", "exists")}]}}]},
    ],
)  # fmt: skip
def test_a_rule_that_no_input_can_match_is_named(conditions: Any) -> None:
    [finding] = analyse(make_rule(conditions))
    assert finding.kind is NEVER
    assert finding.is_warning


@pytest.mark.parametrize(
    "conditions",
    [
        {"all": [compare("amount", "gt", "1"), compare("amount", "lt", "1.000000000000000002")]},
        {"all": [compare("count", "gte", 1), compare("count", "lte", 3), {"not": compare("count", "in", [1, 2])}]},
        {"all": [compare("currency", "startsWith", "PL"), compare("currency", "endsWith", "N")]},
        {"not": compare("amount", "between", ["0", "100"])},
        compare("amount", "gt", "1", otherwise=True),
        {"not": {"all": [compare("amount", "exists"), compare("count", "exists")]}},
        {"field": "amount", "op": "gt", "valueField": "limit"},
        compare("at", "lt", "0001-01-01T00:00:01Z"),
    ],
)
def test_nothing_is_said_about_a_rule_that_some_input_matches(conditions: Any) -> None:
    assert analyse(make_rule(conditions)) == []


def test_what_cannot_be_decided_is_said_to_be_undecided_and_is_no_warning() -> None:
    [finding] = analyse(make_rule(compare("to", "matches", "^q[0-9]{7}$")))
    assert (finding.kind, finding.is_warning) == (UNDECIDED, False)


def test_a_rule_behind_one_that_always_stops_is_shadowed_and_shown_an_input() -> None:
    first = make_rule(compare("amount", "gte", "10"), number=1, priority=9, terminate=True)
    behind = make_rule({"all": [compare("amount", "gt", "20"), compare("currency", "eq", "PLN")]}, number=2)
    [finding] = analyse(behind, first)
    assert (finding.kind, finding.rule_id, finding.by) == (SHADOWED, behind.id, first.id)
    assert finding.witness is not None
    verdict = compile_rules(first, behind).decide(dict(finding.witness))
    assert [one.rule_id for one in verdict.matched] == [first.id]
    assert compile_rules(behind).decide(dict(finding.witness)).matched
    [same] = analyse(first, behind)  # and the author of the first one hears about it, too
    assert (same.kind, same.rule_id, same.by) == (SHADOWED, behind.id, first.id)


def test_a_rule_is_not_shadowed_by_one_that_lets_something_through() -> None:
    behind = make_rule(compare("amount", "gt", "20"), number=2)
    narrow = make_rule(compare("amount", "gt", "20.01"), number=1, priority=9, terminate=True)
    other_fact = make_rule(
        {"all": [compare("amount", "gt", "10"), compare("currency", "eq", "PLN")]}, number=3, priority=9, terminate=True
    )
    goes_on = make_rule(compare("amount", "gt", "10"), number=4, priority=9)
    later = make_rule(compare("amount", "gt", "10"), number=5, priority=-9, terminate=True)
    assert analyse(behind, narrow, other_fact, goes_on, later) == []


def test_a_missing_fact_gets_past_a_rule_that_needs_it() -> None:
    """Were the logic two-valued, the second rule would seem to be shadowed."""
    low = make_rule(compare("amount", "lte", "10"), number=1, priority=9, terminate=True)
    high = make_rule(compare("amount", "gt", "10"), number=2, priority=8, terminate=True)
    behind = make_rule(compare("currency", "eq", "PLN"), number=3)
    assert analyse(behind, low, high) == []
    without = make_rule({"not": compare("amount", "exists")}, number=4)
    assert analyse(without, low, high) == [], "neither of them can say anything about it"


def test_velocity_is_never_negative() -> None:
    chosen = read_settings(
        {"fields": {"to": "string"},
         "velocity": [{"name": "v", "function": "count", "stream": "s", "by": ["to"], "windowSeconds": 60,
                       "includeCurrent": True}]}
    )  # fmt: skip
    for value, kinds in ((0, [NEVER]), (1, [])):
        rule = make_rule(compare("v", "lte", value), settings=chosen)
        found = analysis.analyse(rule, [], settings=chosen, lists={})
        assert [finding.kind for finding in found] == kinds


# Few facts with few values, so that all inputs can be tried.
SMALL = {"amount": "decimal", "currency": "string", "trusted": "boolean"}
POOLS: dict[str, list[Any]] = {
    "amount": [
        ...,
        None,
        1.5,
        "0",
        "1",
        "9.99",
        "10",
        "10.000000000000000001",
        "1000000",
        "-5",
        "-6",
        "5",
        7,
        "2000000",
    ],
    "currency": [..., None, 3, "", "a", "ab", "abc", "PLN", "EUR", "KP", "acc-13", "ż", "zz", "Ω", "ab\n"],
    "trusted": [..., None, "x", True, False],
}
INPUTS = [
    {name: value for name, value in zip(POOLS, values, strict=True) if value is not ...}
    for values in itertools.product(*POOLS.values())
]


@settings(max_examples=150, deadline=None)
@given(oracle.trees(SMALL))
def test_never_is_never_said_of_a_rule_that_something_matches(conditions: Any) -> None:
    """Soundness, by trying a thousand inputs; and a rule that none of them matches is rarely left undecided."""
    kinds = {finding.kind for finding in analyse(make_rule(conditions))}
    matching = [one for one in INPUTS if oracle.ask(conditions, one, SMALL) == "yes"]
    if matching:
        assert NEVER not in kinds
    elif not kinds:
        assert find_match(conditions), "neither a warning nor an input"


def find_match(conditions: Any) -> bool:
    """The analysis found an input that is not among ours: it has tried it, so there is one."""
    rule = make_rule(conditions)
    search = analysis._Search(SETTINGS, LISTS, analysis.MOST_STEPS)
    wanted = [analysis._meaning(rule.conditions, analysis._Want.TRUE)]
    found = search.run(wanted, lambda facts: analysis._says(search, rule, facts))
    return found.witness is not None and oracle.ask(conditions, dict(found.witness)) == "yes"


@settings(max_examples=150, deadline=None)
@given(oracle.trees(SMALL), oracle.trees(SMALL))
def test_shadowed_is_said_only_when_nothing_gets_through(first: Any, second: Any) -> None:
    earlier = make_rule(first, number=1, priority=1, terminate=True)
    later = make_rule(second, number=2)
    shadowed = [finding for finding in analyse(later, earlier) if finding.kind is SHADOWED]
    through = [
        one for one in INPUTS
        if oracle.ask(second, one, SMALL) == "yes" and oracle.ask(first, one, SMALL) != "yes"
    ]  # fmt: skip
    assert not (shadowed and through)
    for finding in shadowed:
        if finding.witness is None:
            continue  # nothing gets through, and what would be stopped was not found
        assert oracle.ask(first, dict(finding.witness)) == oracle.ask(second, dict(finding.witness)) == "yes"


def test_a_thousand_rules_are_looked_at_in_bounded_time() -> None:
    hard = {"any": [{"all": [compare("amount", "ne", str(n)), compare("count", "ne", n)]} for n in range(60)]}
    others = [make_rule(hard, number=number, priority=5, terminate=True) for number in range(2, 1_000)]
    began = monotonic()
    found = analyse(make_rule({"not": hard}, number=1), *others)
    assert monotonic() - began < 20
    assert {finding.kind for finding in found} <= {UNDECIDED, NEVER}
    assert len(found) <= analysis.MOST_FINDINGS + 1
