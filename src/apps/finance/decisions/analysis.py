"""Can a rule ever match, and does an earlier rule always stop it? Found by search, shown by an input that was tried.

The question is turned into literals about single facts and searched by cases (a tableau) within a budget. "Never" is
said only when every case contradicts itself; "it can" only with an input that the compiled rules were asked about;
whatever is left is undecided, and said to be so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any
from uuid import UUID

from apps.finance.decisions.compiled import CompiledSet
from apps.finance.decisions.domains import Solved, solve
from apps.finance.decisions.facts import WRONG_TYPE, show
from apps.finance.decisions.language import All, Compare, Kind, Node, Not, Op
from apps.finance.decisions.model import NOW, Function, Rule, Settings

MOST_STEPS = 2_000
MOST_STEPS_A_PAIR = 200
MOST_TRIES = 64
MOST_FINDINGS = 20
MOST_OF_ONE = 6


class FindingKind(StrEnum):
    """What is to be said about a rule."""

    NEVER_MATCHES = "never_matches"
    SHADOWED = "shadowed"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Finding:
    """Something about a rule that its author wants to know; ``witness`` is an input that shows it."""

    kind: FindingKind
    rule_id: UUID
    message: str
    by: UUID | None = None
    witness: Mapping[str, Any] | None = None

    @property
    def is_warning(self) -> bool:
        """Whether activation asks for an acknowledgement; what could not be decided is only said."""
        return self.kind is not FindingKind.UNDECIDED


def analyse(
    rule: Rule, others: Sequence[Rule], *, settings: Settings, lists: Mapping[str, frozenset[str]]
) -> list[Finding]:
    """What would be wrong with this rule among the others, and with the others because of it."""
    search = _Search(settings, lists, MOST_STEPS)
    found = search.run([_meaning(rule.conditions, _Want.TRUE)], lambda facts: _says(search, rule, facts))
    if found.is_empty:
        return [Finding(FindingKind.NEVER_MATCHES, rule.id, f"no input can match it: {found.reason}")]
    findings = []
    if found.witness is None:
        message = "it could not be decided whether some input matches it"
        findings.append(Finding(FindingKind.UNDECIDED, rule.id, message))
    pairs = [(rule, other) for other in others if other.id != rule.id and other.terminate and other.place < rule.place]
    if rule.terminate:
        pairs += [(other, rule) for other in others if other.id != rule.id and rule.place < other.place]
    for stopped, by in pairs:
        if search.steps <= 0 or len(findings) >= MOST_FINDINGS:
            message = f"there is too much to say about {len(pairs)} pairs of rules: this is not all of it"
            findings.append(Finding(FindingKind.UNDECIDED, rule.id, message))
            break
        findings += _shadow(search, stopped=stopped, by=by, match=found if stopped is rule else None)
    return findings


def _shadow(search: _Search, *, stopped: Rule, by: Rule, match: _Found | None) -> list[Finding]:
    """Whether everything that matches one is stopped by the other."""

    def gets_through(facts: Mapping[str, Any]) -> bool:
        return _says(search, stopped, facts) and not _says(search, by, facts)

    matches = _meaning(stopped.conditions, _Want.TRUE)
    wanted = [matches, _meaning(by.conditions, _Want.NOT_TRUE)]
    through = search.run(wanted, gets_through, most=MOST_STEPS_A_PAIR)
    if through.witness is not None:
        return []
    if not through.is_empty:
        message = f"it could not be decided whether the rule {by.name!r} always stops it"
        return [Finding(FindingKind.UNDECIDED, stopped.id, message, by.id)]
    if match is None:
        match = search.run([matches], lambda facts: _says(search, stopped, facts), most=MOST_STEPS_A_PAIR)
    if match.is_empty:
        return []  # it never matches anyway, which its own author was told
    message = f"whatever matches it is stopped before by the rule {by.name!r}, which terminates"
    return [Finding(FindingKind.SHADOWED, stopped.id, message, by.id, match.witness)]


def _says(search: _Search, rule: Rule, facts: Mapping[str, Any]) -> bool:
    compiled = search.compiled(rule)
    return compiled.rules[0].test(compiled.read(facts)) is True


class _Want(Enum):
    TRUE = auto()
    FALSE = auto()
    NOT_TRUE = auto()
    NOT_FALSE = auto()


_OPPOSITE = {
    _Want.TRUE: _Want.FALSE, _Want.FALSE: _Want.TRUE,
    _Want.NOT_TRUE: _Want.NOT_FALSE, _Want.NOT_FALSE: _Want.NOT_TRUE,
}  # fmt: skip
_GONE, _WRONG, _THERE = "gone", "wrong", "there"
_ALL_STATES = frozenset({_GONE, _WRONG, _THERE})


@dataclass(frozen=True)
class _Presence:
    field: str
    states: frozenset[str]


@dataclass(frozen=True)
class _Holds:
    node: Compare
    positive: bool


@dataclass(frozen=True)
class _And:
    parts: tuple[_Formula, ...]


@dataclass(frozen=True)
class _Or:
    parts: tuple[_Formula, ...]


_Formula = _Presence | _Holds | _And | _Or


def _meaning(node: Node, want: _Want) -> _Formula:
    """What must be so of the facts for a condition to say this."""
    if isinstance(node, Compare):
        return _meaning_of_compare(node, want)
    if isinstance(node, Not):
        return _meaning(node.part, _OPPOSITE[want])
    parts = tuple(_meaning(part, want) for part in node.parts)
    needs_every = isinstance(node, All) == (want in {_Want.TRUE, _Want.NOT_FALSE})
    return _And(parts) if needs_every else _Or(parts)


def _meaning_of_compare(node: Compare, want: _Want) -> _Formula:
    if node.op is Op.EXISTS:
        is_there = want in {_Want.TRUE, _Want.NOT_FALSE}
        return _Presence(node.field, frozenset({_WRONG, _THERE}) if is_there else frozenset({_GONE}))
    absent = frozenset({_GONE, _WRONG})
    without = tuple(_Presence(name, absent) for name in (node.field, node.other) if name is not None)
    positive = want in {_Want.TRUE, _Want.NOT_FALSE}
    says_so_without = {
        _Want.TRUE: node.otherwise is True, _Want.FALSE: node.otherwise is False,
        _Want.NOT_TRUE: node.otherwise is not True, _Want.NOT_FALSE: node.otherwise is not False,
    }[want]  # fmt: skip
    holds = _Holds(node, positive)
    return _Or((holds, *without)) if says_so_without else holds


@dataclass
class _State:
    """A case: what is supposed of each fact."""

    presence: dict[str, frozenset[str]] = field(default_factory=dict)
    holds: dict[str, list[_Holds]] = field(default_factory=dict)
    crossing: list[_Holds] = field(default_factory=list)

    def copy(self) -> _State:
        """The same case, to suppose more."""
        return _State(dict(self.presence), {name: list(held) for name, held in self.holds.items()}, [*self.crossing])


@dataclass(frozen=True)
class _Found:
    """An input that was tried, or that there is none, or neither."""

    witness: Mapping[str, Any] | None = None
    is_empty: bool = False
    reason: str = ""


class _Search:
    """Looks for an input, case by case, within a budget of steps."""

    def __init__(self, settings: Settings, lists: Mapping[str, frozenset[str]], steps: int) -> None:
        self._settings = settings
        self._kinds = settings.kinds
        self._lists = lists
        self.steps = steps
        self._left = 0
        self._compiled: dict[tuple[UUID, int], CompiledSet] = {}
        self._least = {
            fact.name: int(fact.include_current and fact.function in {Function.COUNT, Function.DISTINCT})
            for fact in settings.velocity
        }

    def compiled(self, rule: Rule) -> CompiledSet:
        """A set of this rule alone."""
        key = (rule.id, rule.version)
        if key not in self._compiled:
            self._compiled[key] = CompiledSet(self._settings, [rule], self._lists)
        return self._compiled[key]

    def run(
        self, wanted: Sequence[_Formula], holds: Callable[[Mapping[str, Any]], bool], *, most: int = MOST_STEPS
    ) -> _Found:
        """An input of which all this is so, and which ``holds`` says yes to."""
        self._left = min(most, self.steps)
        before = self._left
        found = self._cases(list(wanted), _State({NOW: frozenset({_THERE})}), holds)
        self.steps -= before - self._left
        return found

    def _cases(
        self, pending: list[_Formula], state: _State, holds: Callable[[Mapping[str, Any]], bool]
    ) -> _Found:  # fmt: skip
        choices: list[_Or] = []
        while pending:
            one = pending.pop()
            if isinstance(one, _And):
                pending.extend(one.parts)
            elif isinstance(one, _Or):
                choices.append(one)
            else:
                reason = self._suppose(one, state)
                if reason:
                    return _Found(is_empty=True, reason=reason)
        if not choices:
            return self._try(state, holds)
        choice = min(choices, key=lambda one: len(one.parts))
        choices.remove(choice)
        reasons, is_sure = [], True
        for part in choice.parts:
            self._left -= 1
            if self._left < 0:
                return _Found()
            found = self._cases([part, *choices], state.copy(), holds)
            if found.witness is not None:
                return found
            is_sure = is_sure and found.is_empty
            reasons.append(found.reason)
        return _Found(is_empty=is_sure, reason=" / ".join(dict.fromkeys(filter(None, reasons)))[:300])

    def _suppose(self, literal: _Presence | _Holds, state: _State) -> str:
        """Add it to the case; the reason, when that cannot be."""
        if isinstance(literal, _Presence):
            return self._restrict(literal.field, literal.states, state)
        node = literal.node
        for name in (node.field, node.other):
            if name is not None and (reason := self._restrict(name, frozenset({_THERE}), state)):
                return reason
        if node.other is not None:
            state.crossing.append(literal)
            return ""
        state.holds.setdefault(node.field, []).append(literal)
        return f"no {node.field} is all of what is asked of it" if self._solve(node.field, state).is_empty else ""

    def _restrict(self, name: str, states: frozenset[str], state: _State) -> str:
        left = state.presence.get(name, _ALL_STATES) & states
        state.presence[name] = left
        return "" if left else f"{name} would have to be there, and not to be there"

    def _solve(self, name: str, state: _State) -> Solved:
        asked = [(held.node, held.positive) for held in state.holds.get(name, [])]
        return solve(self._kinds[name], asked, self._lists, least=self._least.get(name))

    def _try(self, state: _State, holds: Callable[[Mapping[str, Any]], bool]) -> _Found:
        """Values for every fact of the case; and if facts are compared with each other, some combinations."""
        crossed = sorted({name for one in state.crossing for name in (one.node.field, one.node.other or "")})
        facts: dict[str, Any] = {}
        chosen: dict[str, list[Any]] = {}
        for name, states in state.presence.items():
            if name == NOW and name not in state.holds and name not in crossed:
                continue  # it is always there, and nobody asked
            if _THERE in states and (states == {_THERE} or name in state.holds):
                candidates = list(self._solve(name, state).candidates[:MOST_OF_ONE])
                if name in crossed:
                    chosen[name] = candidates
                elif not candidates:
                    return _Found()
                else:
                    facts[name] = show(candidates[0])
            elif _GONE not in states:
                facts[name] = {WRONG_TYPE: "object"}
        shared = [value for values in chosen.values() for value in values]
        pools = [
            [*values, *(one for one in shared if _is_of(self._kinds[name], one))] for name, values in chosen.items()
        ]
        for combination in itertools.islice(itertools.product(*pools), MOST_TRIES):
            tried = {**facts, **{name: show(value) for name, value in zip(chosen, combination, strict=True)}}
            if holds(tried):
                return _Found(witness=tried)
        return _Found()


def _is_of(kind: Kind, value: Any) -> bool:
    return type(value) is {Kind.INTEGER: int, Kind.STRING: str, Kind.BOOLEAN: bool}.get(kind, type(value))
