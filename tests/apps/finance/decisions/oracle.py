"""A second implementation of the rule language: slow, plain, read straight from the documentation; and random rules.

It shares nothing with the compiler but the JSON: it interprets what was written, with its own reading of values.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

FIELDS = {
    "amount": "decimal", "limit": "decimal", "count": "integer", "currency": "string", "to": "string",
    "trusted": "boolean", "at": "instant", "tags": "strings", "customer.country": "string",
}  # fmt: skip
LISTS = {"sanctioned": ["KP", "XX", "acc-13"], "empty": []}
MISSING = "missing"


def lookup(context: dict[str, Any], field: str) -> Any:
    """What is there: a raw value, or MISSING."""
    if field in context:
        return context[field]
    here: Any = context
    for step in field.split("."):
        if here is None:
            return None
        if not isinstance(here, dict):
            return {}
        if step not in here:
            return MISSING
        here = here[step]
    return here


def typed(raw: Any, kind: str) -> tuple[str, Any]:
    """('value', it), or the reason why there is none."""
    if raw is MISSING:
        return "missing", None
    if raw is None:
        return "null", None
    good: Any = None
    if kind == "decimal":
        is_text = isinstance(raw, str) and re.match(r"\A-?\d{1,18}(\.\d{1,18})?\Z", raw, re.ASCII)
        is_whole = isinstance(raw, int) and not isinstance(raw, bool) and abs(raw) < 10**18
        good = Decimal(raw) if is_text or is_whole else None
    elif kind == "integer":
        if isinstance(raw, int) and not isinstance(raw, bool) and -(2**63) <= raw < 2**63:
            good = raw
    elif kind == "string":
        good = raw if isinstance(raw, str) else None
    elif kind == "boolean":
        good = raw if isinstance(raw, bool) else None
    elif kind == "instant":
        good = read_moment(raw) if isinstance(raw, str) else None
    elif kind == "strings" and isinstance(raw, list) and all(isinstance(one, str) for one in raw):
        good = raw
    return ("value", good) if good is not None else ("wrong_type", None)


def read_moment(raw: str) -> datetime | None:
    """A date, a time of the day, and an offset."""
    if not re.match(r"\A\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d)\Z", raw, re.ASCII):
        return None
    try:
        return datetime.fromisoformat(raw).astimezone(UTC)
    except ValueError:
        return None


def literal(given: Any, kind: str) -> Any:
    """A value of a rule."""
    return typed(given, "string" if kind == "strings" else kind)[1]


def ask(condition: dict[str, Any], context: dict[str, Any], fields: dict[str, str] = FIELDS) -> str:
    """'yes', 'no' or 'unknown'."""
    if "all" in condition:
        answers = [ask(part, context, fields) for part in condition["all"]]
        return "no" if "no" in answers else "unknown" if "unknown" in answers else "yes"
    if "any" in condition:
        answers = [ask(part, context, fields) for part in condition["any"]]
        return "yes" if "yes" in answers else "unknown" if "unknown" in answers else "no"
    if "not" in condition:
        return {"yes": "no", "no": "yes", "unknown": "unknown"}[ask(condition["not"], context, fields)]
    field, op = condition["field"], condition["op"]
    state, fact = typed(lookup(context, field), fields[field])
    if op == "exists":
        return "no" if state in {"missing", "null"} else "yes"
    if "valueField" in condition:
        other = condition["valueField"]
        other_state, against = typed(lookup(context, other), fields[other])
        state = state if state != "value" else other_state
    else:
        against = None
    if state != "value":
        return {None: "unknown", True: "yes", False: "no"}[condition.get("otherwise")]
    return "yes" if compare(condition, fields[field], fact, against) else "no"


def compare(condition: dict[str, Any], kind: str, fact: Any, against: Any) -> bool:
    """Whether it holds of a value that is there."""
    op = condition["op"]
    if op == "in":
        members = LISTS[condition["list"]] if "list" in condition else condition["value"]
        return any(fact == literal(member, kind) for member in members)
    if op == "between":
        low, high = (literal(end, kind) for end in condition["value"])
        return bool(low <= fact <= high)
    if against is None:
        against = literal(condition["value"], kind)
    if op == "eq":
        return bool(fact == against)
    if op == "ne":
        return bool(fact != against)
    if op == "lt":
        return bool(fact < against)
    if op == "lte":
        return bool(fact < against or fact == against)
    if op == "gt":
        return bool(against < fact)
    if op == "gte":
        return not fact < against
    if op == "startsWith":
        return bool(fact[: len(against)] == against)
    if op == "endsWith":
        return bool(against == "" or fact[-len(against) :] == against)
    if op == "contains":
        return against in fact
    assert op == "matches"
    end = str(against).replace("$", r"\Z")  # in RE2 it is the end of the text, and not also before a last newline
    return re.search(end, fact) is not None


# -- random rules and inputs -------------------------------------------------------------------------------------------

DECIMALS = st.sampled_from(["0", "-0", "0.00", "1", "1.0", "-5", "9.99", "10", "10.000000000000000001", "1000000", 7])
INTEGERS = st.sampled_from([-1, 0, 1, 2, 10, 2**62])
STRINGS = st.sampled_from(["", "a", "ab", "abc", "PLN", "EUR", "KP", "acc-13", "ż", "ab\n", "Ω"])
BOOLEANS = st.booleans()
INSTANTS = st.sampled_from(
    ["2026-01-01T00:00:00Z", "2026-01-01T01:00:00+01:00", "2026-03-29T02:30:00.5Z", "1999-12-31T23:59:59-11:00"]
)
PATTERNS = st.sampled_from(["^a", "b$", "[A-Z]{3}", "^$", "a.c", "(?i)pln", "x*"])
VALUES = {
    "decimal": DECIMALS, "integer": INTEGERS, "string": STRINGS, "boolean": BOOLEANS, "instant": INSTANTS,
    "strings": st.lists(STRINGS, max_size=3),
}  # fmt: skip
OPS = {
    "decimal": ["eq", "ne", "lt", "lte", "gt", "gte", "between", "in", "exists"],
    "string": ["eq", "ne", "in", "startsWith", "endsWith", "contains", "matches", "exists", "list"],
    "boolean": ["eq", "ne", "exists"],
    "strings": ["contains", "exists"],
}
OPS["integer"] = OPS["instant"] = OPS["decimal"]
ORDERED = {"eq", "ne", "lt", "lte", "gt", "gte"}


@st.composite
def comparisons(draw: st.DrawFn, fields: dict[str, str] = FIELDS) -> dict[str, Any]:
    """One valid condition without parts."""
    field = draw(st.sampled_from(sorted(fields)))
    kind = fields[field]
    op = draw(st.sampled_from(OPS[kind]))
    if op == "exists":
        return {"field": field, "op": "exists"}
    made: dict[str, Any] = {"field": field, "op": op}
    if op == "list":
        made = {"field": field, "op": "in", "list": draw(st.sampled_from(sorted(LISTS)))}
    elif op == "in":
        made["value"] = draw(st.lists(VALUES[kind], min_size=1, max_size=4))
    elif op == "between":
        ends = [draw(VALUES[kind]), draw(VALUES[kind])]
        made["value"] = sorted(ends, key=lambda end: typed(end, kind)[1])
    elif op == "matches":
        made["value"] = draw(PATTERNS)
    elif op in ORDERED and draw(st.integers(0, 4)) == 0:
        same = [name for name in sorted(fields) if fields[name] == kind and kind != "strings"]
        made["valueField"] = draw(st.sampled_from(same))
    else:
        made["value"] = draw(STRINGS if kind == "strings" else VALUES[kind])
    if draw(st.integers(0, 5)) == 0:
        made["otherwise"] = draw(st.booleans())
    return made


def trees(fields: dict[str, str] = FIELDS) -> st.SearchStrategy[dict[str, Any]]:
    """Valid conditions."""
    return st.recursive(
        comparisons(fields),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"all": parts}),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"any": parts}),
            inner.map(lambda part: {"not": part}),
        ),
        max_leaves=8,
    )


JUNK = st.sampled_from(
    [None, 1.5, -0.0, True, 3, "", "NaN", "Infinity", "1e3", "1e999999999", " 1", "1 ", "+1", "0x1", "١٢", [], [1], {},
     {"a": 1}, 10**30, -(10**18), "2026-01-01", "2026-13-01T00:00:00Z", "12345678901234567890", "\u202e", "é" * 300]
)  # fmt: skip


@st.composite
def contexts(draw: st.DrawFn, fields: dict[str, str] = FIELDS) -> dict[str, Any]:
    """Inputs in which things are missing, null, or of the wrong type."""
    made: dict[str, Any] = {}
    for field, kind in fields.items():
        how = draw(st.integers(0, 9))
        if how == 0:
            continue
        raw = None if how == 1 else draw(JUNK) if how == 2 else draw(VALUES[kind])
        top, _, below = field.partition(".")
        if below and draw(st.booleans()):
            made[top] = {below: raw} if how != 3 else draw(JUNK)
        else:
            made[field] = raw
    return made
