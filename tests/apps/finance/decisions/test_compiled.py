"""Compiled rules say what a plain interpreter says, of any input; their traces explain it (F11)."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.finance.decisions import facts as reading
from apps.finance.decisions.compiled import CompiledSet
from apps.finance.decisions.deciding import decide
from apps.finance.decisions.language import parse
from apps.finance.decisions.loading import Loaded
from apps.finance.decisions.model import Outcome, Rule, Settings, read_settings
from duly.clock import monotonic
from duly.db import load_json
from tests.apps.finance.decisions import oracle

SETTINGS = read_settings({"fields": oracle.FIELDS})
LISTS = {name: frozenset(members) for name, members in oracle.LISTS.items()}
WORDS = {True: "yes", False: "no", None: "unknown"}


def make_rule(conditions: Any, *, number: int = 1, settings: Settings = SETTINGS, **options: Any) -> Rule:
    values: dict[str, Any] = {
        "version": 1, "name": f"rule {number}", "priority": 0, "terminate": False, "decision": Outcome.REVIEW,
        "score": 0, **options,
    }  # fmt: skip
    tree = parse(conditions, kinds=settings.kinds, lists=LISTS)
    return Rule(id=UUID(int=number), conditions=tree, **values)


def compile_rules(*rules: Rule, settings: Settings = SETTINGS) -> CompiledSet:
    return CompiledSet(settings, rules, LISTS)


def say(conditions: Any, context: dict[str, Any]) -> str:
    compiled = compile_rules(make_rule(conditions))
    return WORDS[compiled.rules[0].test(compiled.read(reading.record(SETTINGS.fields, context)))]


@settings(max_examples=1_500, deadline=None)
@given(oracle.trees(), oracle.contexts())
def test_a_compiled_rule_says_what_a_plain_interpreter_says(conditions: Any, context: dict[str, Any]) -> None:
    """F11: over random trees and inputs with things missing, null and of wrong types."""
    compiled = compile_rules(make_rule(conditions))
    recorded = reading.record(SETTINGS.fields, context)
    said = WORDS[compiled.rules[0].test(compiled.read(recorded))]
    assert said == oracle.ask(conditions, context)
    verdict = compiled.decide(recorded)
    assert (said == "yes") == bool(verdict.matched)
    assert (said == "unknown") == bool(verdict.incomplete)


@settings(max_examples=500, deadline=None)
@given(oracle.trees(), oracle.contexts())
def test_what_is_read_back_from_the_log_says_the_same(conditions: Any, context: dict[str, Any]) -> None:
    """F11: replay is exact, because live evaluation reads the record, too."""
    compiled = compile_rules(make_rule(conditions))
    recorded = reading.record(SETTINGS.fields, context)
    stored = load_json(json.dumps(recorded))
    assert compiled.decide(stored) == compiled.decide(recorded)
    assert compiled.trace(stored) == compiled.trace(recorded)


def combine(told: dict[str, Any]) -> str:
    """What a trace says by itself, from its leaves up."""
    if "all" in told or "any" in told:
        parts = [combine(part) for part in told["all" if "all" in told else "any"]]
        strong, weak = ("false", "true") if "all" in told else ("true", "false")
        said = strong if strong in parts else "unknown" if "unknown" in parts else weak
    elif "not" in told:
        said = {"true": "false", "false": "true", "unknown": "unknown"}[combine(told["not"])]
    else:
        said = told["outcome"] if told["outcome"] in {"true", "false"} else "unknown"
        assert (said == "unknown") == (told["outcome"] in {"missing", "null", "wrong_type"})
        return said
    assert said == told["outcome"]
    return said


@settings(max_examples=500, deadline=None)
@given(oracle.trees(), oracle.contexts())
def test_a_trace_adds_up_and_ends_in_what_the_rule_said(conditions: Any, context: dict[str, Any]) -> None:
    compiled = compile_rules(make_rule(conditions))
    recorded = reading.record(SETTINGS.fields, context)
    [told] = compiled.trace(recorded)
    said = {"yes": "true", "no": "false", "unknown": "unknown"}[oracle.ask(conditions, context)]
    assert combine(told["conditions"]) == told["outcome"] == said


@pytest.mark.parametrize(
    ("context", "reason"),
    [({}, "missing"), ({"amount": None}, "null"), ({"amount": 1.5}, "wrong_type"), ({"amount": "12,5"}, "wrong_type"),
     ({"amount": True}, "wrong_type"), ({"amount": "NaN"}, "wrong_type"), ({"amount": "1e5"}, "wrong_type"),
     ({"amount": "1e999999999"}, "wrong_type"), ({"amount": [1]}, "wrong_type"), ({"amount": 10**19}, "wrong_type")],
)  # fmt: skip
def test_missing_null_and_wrong_type_are_three_outcomes_and_never_false(context: Any, reason: str) -> None:
    compiled = compile_rules(make_rule({"field": "amount", "op": "gt", "value": "10"}))
    recorded = reading.record(SETTINGS.fields, context)
    [told] = compiled.trace(recorded)
    assert told["conditions"]["outcome"] == reason
    verdict = compiled.decide(recorded)
    assert (verdict.decision, verdict.matched) == (Outcome.REVIEW, ())
    assert [one.lacking for one in verdict.incomplete] == [{"amount": reason}]


def test_not_leaves_what_is_unknown_unknown() -> None:
    assert say({"not": {"field": "amount", "op": "gt", "value": "10"}}, {}) == "unknown"
    assert say({"not": {"field": "amount", "op": "exists"}}, {}) == "yes"


def test_all_is_false_and_any_is_true_whatever_else_is_unknown() -> None:
    unknown, yes = {"field": "amount", "op": "gt", "value": "1"}, {"field": "count", "op": "eq", "value": 1}
    assert say({"all": [unknown, {"not": yes}]}, {"count": 1}) == "no"
    assert say({"any": [unknown, yes]}, {"count": 1}) == "yes"
    assert say({"all": [unknown, yes]}, {"count": 1}) == "unknown"
    assert say({"any": [unknown, {"not": yes}]}, {"count": 1}) == "unknown"


def test_otherwise_answers_for_a_fact_that_is_not_there_and_the_trace_says_why() -> None:
    conditions = {"field": "amount", "op": "gt", "value": "1", "otherwise": False}
    assert say(conditions, {}) == "no"
    [told] = compile_rules(make_rule(conditions)).trace({})
    assert (told["conditions"]["outcome"], told["conditions"]["reason"]) == ("false", "missing")


def test_decimals_are_exact() -> None:
    third = {"field": "amount", "op": "eq", "value": "0.3"}
    assert say(third, {"amount": "0.30"}) == "yes"
    assert say(third, {"amount": Decimal("0.1") + Decimal("0.2")}) == "yes"
    assert say(third, {"amount": 0.1 + 0.2}) == "unknown"
    wide = {"field": "amount", "op": "gt", "value": "100000000000000000.000000000000000001"}
    assert say(wide, {"amount": "100000000000000000.000000000000000002"}) == "yes"
    assert say(wide, {"amount": "100000000000000000.000000000000000001"}) == "no"
    assert say({"field": "amount", "op": "eq", "value": "0"}, {"amount": "-0.00"}) == "yes"


def test_rules_run_by_priority_then_id_and_one_that_terminates_ends_it() -> None:
    always = {"any": [{"field": "amount", "op": "exists"}, {"not": {"field": "amount", "op": "exists"}}]}
    low = make_rule(always, number=1, priority=1)
    second = make_rule(always, number=3, priority=5, terminate=True)
    first = make_rule(always, number=2, priority=5)
    for order in ([low, second, first], [first, low, second]):
        verdict = compile_rules(*order).decide({})
        assert [one.rule_id for one in verdict.matched] == [first.id, second.id]
        assert verdict.evaluated == 2
        assert [line["outcome"] for line in compile_rules(*order).trace({})] == ["true", "true", "not_asked"]


OUTCOMES = st.sampled_from([None, *Outcome])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(OUTCOMES, st.integers(-100, 100), st.booleans()), max_size=6), st.sampled_from(Outcome))
def test_scores_add_up_and_the_worst_of_everything_counts(rules: Any, default: Outcome) -> None:
    """F11: by threshold, by what a rule says outright, or the default."""
    scores = read_settings(
        {"fields": {"amount": "decimal"}, "aggregation": {"mode": "scores", "review": 50, "reject": 100},
         "default": default.value}
    )  # fmt: skip
    made = [
        make_rule({"field": "amount", "op": "gt", "value": "1" if matches else "3"}, number=number, settings=scores,
                  decision=decision, score=score)
        for number, (decision, score, matches) in enumerate(rules, 1)
    ]  # fmt: skip
    verdict = compile_rules(*made, settings=scores).decide({"amount": "2"})
    total = sum(score for _, score, matches in rules if matches)
    said = [decision for decision, _, matches in rules if matches and decision is not None]
    said += [Outcome.REJECT] if total >= 100 else [Outcome.REVIEW] if total >= 50 else []
    severity = ["APPROVE", "REVIEW", "REJECT"]
    expected = max((severity.index(one.value) for one in said), default=severity.index(default.value))
    assert (verdict.score, verdict.decision.value) == (total, severity[expected])


@pytest.mark.parametrize(
    ("policy", "expected"), [("REVIEW", Outcome.REVIEW), ("REJECT", Outcome.REJECT), ("IGNORE", Outcome.APPROVE)]
)
def test_what_incomplete_means_is_the_rule_sets_decision(policy: str, expected: Outcome) -> None:
    chosen = read_settings({"fields": {"amount": "decimal"}, "onIncomplete": policy})
    rule = make_rule({"field": "amount", "op": "gt", "value": "1"}, settings=chosen)
    verdict = compile_rules(rule, settings=chosen).decide({})
    assert (verdict.decision, len(verdict.incomplete)) == (expected, 1)


def test_what_could_not_be_answered_makes_no_decision_milder() -> None:
    """F11: one rule says REJECT, another lacks its fact."""
    says = make_rule({"field": "count", "op": "eq", "value": 1}, decision=Outcome.REJECT)
    lacks = make_rule({"field": "amount", "op": "gt", "value": "1"}, number=2)
    verdict = compile_rules(says, lacks).decide({"count": 1})
    assert (verdict.decision, len(verdict.matched), len(verdict.incomplete)) == (Outcome.REJECT, 1, 1)


def test_how_long_a_decision_took_is_noted_in_microseconds() -> None:
    """F11: as somebody says who looks at a clock before and after."""
    rules = tuple(make_rule({"field": "amount", "op": "exists"}, number=number) for number in range(1, 500))
    loaded = Loaded(UUID(int=1), "s", 1, SETTINGS, rules, LISTS, compile_rules(*rules))
    shares = []
    for _ in range(20):
        began = monotonic()
        decided = decide(loaded, {}, None)
        shares.append(decided.latency_us / ((monotonic() - began) * 1_000_000))
    assert 0.5 < max(shares) < 1.05, "some of them are not interrupted"


def test_python_values_of_callers_are_recorded_exactly() -> None:
    """Payments gives Decimals, ids and moments, not JSON."""
    given_facts = {"amount": Decimal("1E+3"), "limit": Decimal("NaN"), "to": UUID(int=7), "count": 2**70}
    assert reading.record(SETTINGS.fields, given_facts) == {
        "amount": "1000", "limit": {"wrongType": "number"}, "to": str(UUID(int=7)), "count": {"wrongType": "number"},
    }  # fmt: skip


@pytest.mark.parametrize("bad", ["a\x00b", "\ud800", "x" * 4_001])
def test_text_that_cannot_be_kept_is_refused_with_its_path(bad: str) -> None:
    with pytest.raises(reading.BadFacts) as refused:
        reading.record(SETTINGS.fields, {"currency": bad})
    assert (refused.value.status, refused.value.faults[0].path) == (400, "$.context.currency")
