"""Rules compiled to closures over a list of facts, and the trace that explains what they said.

A condition says True, False, or None when it cannot know (Kleene's logic): a rule that says None does not match, and
the decision says that it is incomplete.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apps.finance.decisions import facts as reading
from apps.finance.decisions.facts import Absent, Fact
from apps.finance.decisions.language import All, Compare, Node, Not, Op, compile_pattern, fields_of
from apps.finance.decisions.model import NOW, Matched, Rule, Settings, Unanswered, Verdict, aggregate

ENGINE = "1"
"""The version of what the language means: logged with each decision, and raised when an old log would read otherwise"""

Test = Callable[[Sequence[Fact]], bool | None]


@dataclass(frozen=True, slots=True)
class CompiledNode:
    """A condition that can be asked, and what it was made from."""

    node: Node
    test: Test
    parts: tuple[CompiledNode, ...] = ()
    shown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule that can be asked."""

    rule: Rule
    matched: Matched
    test: Test
    terminate: bool
    root: CompiledNode
    names: tuple[str, ...]


class CompiledSet:
    """A rule set at one version: immutable, safe to share between requests."""

    def __init__(self, settings: Settings, rules: Sequence[Rule], lists: Mapping[str, frozenset[str]]) -> None:
        self.settings = settings
        self.kinds = settings.kinds
        ordered = sorted(rules, key=lambda rule: rule.place)
        used: set[str] = set().union(*(fields_of(rule.conditions) for rule in ordered))
        self.names = tuple(sorted(used))
        self.is_timeless = used.isdisjoint({NOW, *(fact.name for fact in settings.velocity)})
        self._slots = {name: place for place, name in enumerate(self.names)}
        self.rules = tuple(self._compile_rule(rule, lists) for rule in ordered)
        self._tests = tuple((rule.test, rule.terminate, rule) for rule in self.rules)

    def read(self, recorded: Mapping[str, Any]) -> list[Fact]:
        """The facts that these rules need, from a record of them."""
        return reading.read(self.kinds, self.names, recorded)

    def decide(self, recorded: Mapping[str, Any]) -> Verdict:
        """Ask every rule in its order until one that terminates has matched."""
        facts = self.read(recorded)
        matched: list[Matched] = []
        unanswered: list[CompiledRule] = []
        evaluated = 0
        for test, terminate, rule in self._tests:
            evaluated += 1
            said = test(facts)
            if said:
                matched.append(rule.matched)
                if terminate:
                    break
            elif said is None:
                unanswered.append(rule)
        incomplete = tuple(self._lacking(rule, facts) for rule in unanswered)
        decision, score = aggregate(self.settings, matched, is_incomplete=bool(incomplete))
        return Verdict(decision, tuple(matched), incomplete, score, evaluated)

    def trace(self, recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rule and each of its conditions said; rules after one that terminated were not asked."""
        facts = self.read(recorded)
        told: list[dict[str, Any]] = []
        has_stopped = False
        for rule in self.rules:
            line: dict[str, Any] = {
                "ruleId": str(rule.rule.id), "version": rule.rule.version, "name": rule.rule.name,
            }  # fmt: skip
            told.append(line)
            if has_stopped:
                line["outcome"] = "not_asked"
                continue
            said, line["conditions"] = self._explain(rule.root, facts)
            line["outcome"] = _WORDS[said]
            has_stopped = said is True and rule.terminate
        return told

    def _compile_rule(self, rule: Rule, lists: Mapping[str, frozenset[str]]) -> CompiledRule:
        root = _compile(rule.conditions, self._slots, lists)
        matched = Matched(rule.id, rule.version, rule.name, rule.decision, rule.score, rule.reason)
        return CompiledRule(rule, matched, root.test, rule.terminate, root, tuple(sorted(fields_of(rule.conditions))))

    def _lacking(self, rule: CompiledRule, facts: Sequence[Fact]) -> Unanswered:
        lacking = {
            name: fact.reason for name in rule.names if isinstance(fact := facts[self._slots[name]], Absent)
        }  # fmt: skip
        return Unanswered(rule.rule.id, rule.rule.version, rule.rule.name, lacking)

    def _explain(self, compiled: CompiledNode, facts: Sequence[Fact]) -> tuple[bool | None, dict[str, Any]]:
        """What a condition says, put together from its parts, none of which is left out."""
        node = compiled.node
        if isinstance(node, Compare):
            return self._explain_compare(node, compiled, facts)
        parts = [self._explain(part, facts) for part in compiled.parts]
        answers, told = [said for said, _ in parts], [line for _, line in parts]
        if isinstance(node, Not):
            said = None if answers[0] is None else not answers[0]
            return said, {"not": told[0], "outcome": _WORDS[said]}
        is_all = isinstance(node, All)
        said = (not is_all) if (not is_all) in answers else None if None in answers else is_all
        return said, {"all" if is_all else "any": told, "outcome": _WORDS[said]}

    def _explain_compare(
        self, node: Compare, compiled: CompiledNode, facts: Sequence[Fact]
    ) -> tuple[bool | None, dict[str, Any]]:
        said, fact = compiled.test(facts), facts[self._slots[node.field]]
        line = {**compiled.shown, "outcome": _WORDS[said]}
        absent = fact if isinstance(fact, Absent) or node.other is None else facts[self._slots[node.other]]
        if isinstance(absent, Absent) and node.op is not Op.EXISTS:
            line["reason"] = absent.reason
            if said is None:
                line["outcome"] = absent.reason
        if not isinstance(fact, Absent):
            line["fact"] = reading.show(fact)
        return said, line


_WORDS: Mapping[bool | None, str] = {None: "unknown", True: "true", False: "false"}


def _show_compare(node: Compare) -> dict[str, Any]:
    """What a trace says of a comparison, whatever the facts are."""
    shown: dict[str, Any] = {"field": node.field, "op": node.op.value}
    if node.list_id is not None:
        shown["list"] = node.list_id
    elif node.other is not None:
        shown["valueField"] = node.other
    elif isinstance(node.value, tuple):
        shown["value"] = [reading.show(one) for one in node.value]
    elif node.value is not None:
        shown["value"] = reading.show(node.value)
    return shown


def _compile(node: Node, slots: Mapping[str, int], lists: Mapping[str, frozenset[str]]) -> CompiledNode:
    if isinstance(node, Compare):
        return CompiledNode(node, _compile_compare(node, slots, lists), shown=_show_compare(node))
    if isinstance(node, Not):
        part = _compile(node.part, slots, lists)
        return CompiledNode(node, _negate(part.test), (part,))
    parts = tuple(_compile(part, slots, lists) for part in node.parts)
    tests = tuple(part.test for part in parts)
    return CompiledNode(node, _all(tests) if isinstance(node, All) else _any(tests), parts)


def _all(tests: tuple[Test, ...]) -> Test:
    def test(facts: Sequence[Fact]) -> bool | None:
        said: bool | None = True
        for part in tests:
            answer = part(facts)
            if answer is None:
                said = None  # a later part may still be false, and then all of it is
            elif not answer:
                return False
        return said

    return test


def _any(tests: tuple[Test, ...]) -> Test:
    def test(facts: Sequence[Fact]) -> bool | None:
        said: bool | None = False
        for part in tests:
            answer = part(facts)
            if answer:
                return True
            if answer is None:
                said = None
        return said

    return test


def _negate(part: Test) -> Test:
    def test(facts: Sequence[Fact]) -> bool | None:
        answer = part(facts)
        return None if answer is None else not answer

    return test


def _compile_compare(node: Compare, slots: Mapping[str, int], lists: Mapping[str, frozenset[str]]) -> Test:
    slot = slots[node.field]
    if node.op is Op.EXISTS:
        return _exists(slot)
    compare, value = _comparison(node, lists)
    if node.other is not None:
        return _between_fields(slot, slots[node.other], compare, node.otherwise)
    return _with_value(slot, value, compare, node.otherwise)


def _with_value(slot: int, value: Any, compare: Callable[[Any, Any], bool], otherwise: bool | None) -> Test:
    def test(facts: Sequence[Fact]) -> bool | None:
        fact = facts[slot]
        return otherwise if fact.__class__ is Absent else compare(fact, value)

    return test


def _between_fields(slot: int, other: int, compare: Callable[[Any, Any], bool], otherwise: bool | None) -> Test:
    def test(facts: Sequence[Fact]) -> bool | None:
        fact, value = facts[slot], facts[other]
        if fact.__class__ is Absent or value.__class__ is Absent:
            return otherwise
        return compare(fact, value)

    return test


def _exists(slot: int) -> Test:
    def test(facts: Sequence[Fact]) -> bool:
        fact = facts[slot]
        return fact is not reading.MISSING and fact is not reading.NULL  # of the wrong type, something is there

    return test


_PLAIN: Mapping[Op, Callable[[Any, Any], bool]] = {
    Op.EQ: operator.eq, Op.NE: operator.ne, Op.LT: operator.lt, Op.LTE: operator.le, Op.GT: operator.gt,
    Op.GTE: operator.ge, Op.STARTS_WITH: str.startswith, Op.ENDS_WITH: str.endswith, Op.CONTAINS: operator.contains,
}  # fmt: skip


def _comparison(node: Compare, lists: Mapping[str, frozenset[str]]) -> tuple[Callable[[Any, Any], bool], Any]:
    """What is called with the fact and the value, and the value in the form it needs."""
    if node.op is Op.IN:
        given: Any = node.value
        return _is_in, lists[node.list_id] if node.list_id is not None else frozenset(given)
    if node.op is Op.BETWEEN:
        return _is_between, node.value
    if node.op is Op.MATCHES:
        return _matches, compile_pattern(str(node.value))
    return _PLAIN[node.op], node.value


def compare_with(node: Compare, lists: Mapping[str, frozenset[str]]) -> Callable[[Any], bool]:
    """One comparison as a question about a value, for whoever looks for values."""
    compare, value = _comparison(node, lists)
    return lambda fact: compare(fact, value)


def _is_in(fact: Any, members: frozenset[Any]) -> bool:
    return fact in members


def _is_between(fact: Any, ends: tuple[Any, Any]) -> bool:
    return bool(ends[0] <= fact <= ends[1])


def _matches(fact: str, pattern: Any) -> bool:
    return pattern.search(fact) is not None
