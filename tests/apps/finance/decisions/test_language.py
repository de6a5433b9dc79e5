"""What is wrong with a rule is said with its JSON path; whatever is written, reading it is bounded (F12)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.finance.decisions import language
from apps.finance.decisions.language import BadRule, compile_pattern, parse
from apps.finance.decisions.model import read_settings
from duly.clock import monotonic
from duly.errors import Fault
from tests.apps.finance.decisions import oracle

KINDS = read_settings({"fields": oracle.FIELDS}).kinds
GOOD = {"field": "amount", "op": "gt", "value": "1"}


def refuse(conditions: Any) -> BadRule:
    with pytest.raises(BadRule) as refused:
        parse(conditions, kinds=KINDS, lists=oracle.LISTS)
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize(
    ("conditions", "path", "words"),
    [
        ({"all": [GOOD, {**GOOD, "field": "ammount"}]}, "$.conditions.all[1].field", "did you mean amount"),
        ({**GOOD, "op": "greater"}, "$.conditions.op", "write one of"),
        ({**GOOD, "op": "startswith"}, "$.conditions.op", "did you mean startsWith"),
        ({**GOOD, "value": "ten"}, "$.conditions.value", "a decimal as text"),
        ({**GOOD, "value": 1.5}, "$.conditions.value", "never a binary fraction"),
        ({**GOOD, "value": True}, "$.conditions.value", "a decimal"),
        ({**GOOD, "value": None}, "$.conditions.value", "a decimal"),
        ({**GOOD, "value": "NaN"}, "$.conditions.value", "a decimal"),
        ({**GOOD, "value": "Infinity"}, "$.conditions.value", "a decimal"),
        ({**GOOD, "value": "1e999999999"}, "$.conditions.value", "a decimal"),
        ({**GOOD, "value": "١٢"}, "$.conditions.value", "a decimal"),
        ({**GOOD, "value": 10**18}, "$.conditions.value", "a decimal"),
        ({"field": "count", "op": "eq", "value": "1"}, "$.conditions.value", "whole number"),
        ({"field": "count", "op": "eq", "value": 2**63}, "$.conditions.value", "64 bits"),
        ({"field": "currency", "op": "gt", "value": "PLN"}, "$.conditions.op", "not for a field of type string"),
        ({"field": "currency", "op": "eq", "value": 1}, "$.conditions.value", "a text"),
        ({"field": "currency", "op": "eq", "value": "a\x00"}, "$.conditions.value", "a text"),
        ({"field": "trusted", "op": "eq", "value": "true"}, "$.conditions.value", "true or false"),
        ({"field": "at", "op": "gt", "value": "2026-01-01T00:00:00"}, "$.conditions.value", "with its offset"),
        ({"field": "at", "op": "gt", "value": "2026-02-30T00:00:00Z"}, "$.conditions.value", "a moment"),
        ({"field": "amount", "op": "in", "value": ["1", 2.5]}, "$.conditions.value[1]", "a decimal"),
        ({"field": "amount", "op": "in", "value": []}, "$.conditions.value", "1 to 1000"),
        ({"field": "amount", "op": "between", "value": ["5", "1"]}, "$.conditions.value", "lowest value stands first"),
        ({"field": "amount", "op": "between", "value": ["5"]}, "$.conditions.value", "lowest and the highest"),
        ({"field": "amount", "op": "exists", "value": "1"}, "$.conditions.value", "compares with nothing"),
        ({"field": "amount", "op": "exists", "otherwise": True}, "$.conditions.otherwise", "not with exists"),
        ({"field": "amount", "op": "gt"}, "$.conditions", "needs one of"),
        ({**GOOD, "valueField": "limit"}, "$.conditions", "needs one of"),
        ({"field": "amount", "op": "gt", "valueField": "currency"}, "$.conditions.valueField", "not compared"),
        ({"field": "amount", "op": "gt", "valueField": "limitt"}, "$.conditions.valueField", "did you mean limit"),
        ({"field": "currency", "op": "in", "list": "sanctionned"}, "$.conditions.list", "did you mean sanctioned"),
        ({"field": "amount", "op": "in", "list": "sanctioned"}, "$.conditions.list", "of type string"),
        ({"field": "currency", "op": "in", "list": "'; DROP"}, "$.conditions.list", "name of a list"),
        ({"field": "to", "op": "matches", "value": "("}, "$.conditions.value", "RE2 refuses"),
        ({"field": "to", "op": "matches", "value": "(?=a)b"}, "$.conditions.value", "RE2 refuses"),
        ({"field": "to", "op": "matches", "value": r"(a)\1"}, "$.conditions.value", "RE2 refuses"),
        ({"field": "to", "op": "matches", "value": r"\pL{1000}"}, "$.conditions.value", "RE2 refuses"),
        ({"field": "to", "op": "matches", "value": "a" * 501}, "$.conditions.value", "at most 500"),
        ({**GOOD, "extra": 1}, "$.conditions.extra", "no such member"),
        ({"all": [GOOD], "any": [GOOD]}, "$.conditions", "stands alone"),
        ({"all": []}, "$.conditions.all", "at least one"),
        ({"any": GOOD}, "$.conditions.any", "a list"),
        ({"not": [GOOD]}, "$.conditions.not", "write an object"),
        ([], "$.conditions", "write an object"),
        (None, "$.conditions", "write an object"),
        ({"field": ["amount"], "op": {"a": 1}}, "$.conditions.field", "name of a field"),
    ],
)  # fmt: skip
def test_a_bad_rule_is_refused_with_the_path_of_what_is_wrong(conditions: Any, path: str, words: str) -> None:
    """F12."""
    bad = refuse(conditions)
    assert (bad.faults[0].where, bad.faults[0].path) == ("body", path)
    assert words in bad.faults[0].detail


def test_everything_that_is_wrong_is_said_at_once_up_to_a_limit() -> None:
    wrong = {"field": "ammount", "op": "gt", "value": "1"}
    assert [fault.path for fault in refuse({"all": [wrong, GOOD, wrong]}).faults] == [
        "$.conditions.all[0].field", "$.conditions.all[2].field"
    ]  # fmt: skip
    assert len(refuse({"all": [wrong] * 150}).faults) == 20


def nest(levels: int) -> Any:
    made: Any = GOOD
    for _ in range(levels):
        made = {"not": made}
    return made


def test_depth_and_number_are_bounded() -> None:
    parse(nest(language.MOST_DEPTH - 1), kinds=KINDS)
    assert "nested" in refuse(nest(language.MOST_DEPTH)).faults[0].detail
    refuse(nest(900))  # no recursion error
    parse({"all": [GOOD] * (language.MOST_CONDITIONS - 1)}, kinds=KINDS)
    assert "at most" in refuse({"all": [GOOD] * language.MOST_CONDITIONS}).faults[0].detail
    wide: Any = {"any": [{"all": [GOOD] * 20}] * 20}
    assert "at most" in refuse(wide).faults[0].detail
    refuse({"all": [GOOD] * 100_000})
    refuse({"field": "currency", "op": "in", "value": ["x"] * 100_000})


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*a){20}", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_a_pattern_that_would_run_for_years_elsewhere_takes_no_time(pattern: str) -> None:
    """Python's re needs minutes for these."""
    compiled = compile_pattern(pattern)
    began = monotonic()
    compiled.search("a" * 4_000 + "!")
    assert monotonic() - began < 1


def find_faults(conditions: Any) -> tuple[Fault, ...]:
    try:
        parse(conditions, kinds=KINDS, lists=oracle.LISTS)
    except BadRule as bad:
        return bad.faults
    return ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    | st.sampled_from(["amount", "gt", "in", "exists", "all", "not"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["all", "any", "not", "field", "op", "value", "list", "valueField", "x"]), inner),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=1_000, deadline=None)
@given(JSON)
def test_whatever_is_written_is_a_rule_or_a_refusal_with_a_path(conditions: Any) -> None:
    faults = find_faults(conditions)
    assert len(faults) <= language.MOST_FAULTS
    assert all(fault.path.startswith("$.conditions") for fault in faults)


@settings(max_examples=300, deadline=None)
@given(oracle.trees())
def test_every_rule_of_the_documentation_can_be_read(conditions: Any) -> None:
    tree = parse(conditions, kinds=KINDS, lists=oracle.LISTS)
    assert language.fields_of(tree) <= set(KINDS)


@pytest.mark.parametrize(
    ("given_settings", "path"),
    [
        ({"fields": {}}, "$.fields"),
        ({"fields": {"Amount": "decimal"}}, "$.fields"),
        ({"fields": {"now": "instant"}}, "$.fields"),
        ({"fields": {"a": "float"}}, "$.fields.a"),
        ({"fields": {"a": "string", "a.b": "string"}}, "$.fields.a"),
        ({"fields": {"a": "string"}, "money": {"amount": "a", "currency": "a"}}, "$.money.amount"),
        ({"fields": {"a": "string"}, "aggregation": {"mode": "scores"}}, "$.aggregation"),
        ({"fields": {"a": "string"}, "aggregation": {"mode": "worst", "review": 1}}, "$.aggregation"),
        ({"fields": {"a": "string"}, "aggregation": {"mode": "scores", "review": 5, "reject": 5}},
         "$.aggregation.reject"),
        ({"fields": {"a": "string"}, "velocity": [
            {"name": "a", "function": "count", "stream": "s", "by": ["a"], "windowSeconds": 60}]},
         "$.velocity[0].name"),
        ({"fields": {"a": "decimal"}, "velocity": [
            {"name": "v", "function": "count", "stream": "s", "by": ["a"], "windowSeconds": 60}]},
         "$.velocity[0].by[0]"),
        ({"fields": {"a": "string"}, "velocity": [
            {"name": "v", "function": "sum", "stream": "s", "by": ["a"], "windowSeconds": 60, "includeCurrent": True}]},
         "$.velocity[0].of"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_with_their_path(given_settings: Any, path: str) -> None:
    with pytest.raises(BadRule) as refused:
        read_settings(given_settings)
    assert refused.value.faults[0].path == path
