"""What rules, rule sets and decisions are, and how outcomes become one decision."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

from apps.finance.decisions.language import (
    FIELD_NAME,
    LARGEST_DECIMAL,
    LIST_NAME,
    MOST_FAULTS,
    BadRule,
    Kind,
    Node,
    refusal,
    suggest,
)
from duly.errors import Conflict, Fault, Invalid, NotFound

MOST_FIELDS = 200
MOST_VELOCITY = 20
MOST_RULES = 1_000
MOST_RULE_SETS = 500
MOST_BY = 3
MOST_MEMBERS_OF_A_LIST = 10_000
LONGEST_WINDOW_SECONDS = 31 * 86_400
SHORTEST_WINDOW_SECONDS = 60
LONGEST_KEY_BYTES = 200
MOST_OBSERVATIONS = 100
LARGEST_SCORE = 1_000_000
NOW = "now"
"""A fact that the engine adds: the moment of the evaluation, by the database's clock."""


class Outcome(StrEnum):
    """What a rule, or a whole rule set, says; the later the worse."""

    APPROVE = "APPROVE"
    REVIEW = "REVIEW"
    REJECT = "REJECT"


_SEVERITY = {outcome: place for place, outcome in enumerate(Outcome)}


class OnIncomplete(StrEnum):
    """What it means for a decision that a rule could not be answered."""

    REVIEW = "REVIEW"
    REJECT = "REJECT"
    IGNORE = "IGNORE"


class Mode(StrEnum):
    """How the matched rules become one decision."""

    WORST = "worst"
    SCORES = "scores"


class Function(StrEnum):
    """What is asked about the observations of a window."""

    COUNT = "count"
    SUM = "sum"
    MAX = "max"
    DISTINCT = "distinct"


class Status(StrEnum):
    """Where a rule stands."""

    DRAFT = "DRAFT"
    ACTIVE = "ACTIVE"
    DEPRECATED = "DEPRECATED"


class RuleSetNotFound(NotFound):
    """There is no such rule set."""


class RuleNotFound(NotFound):
    """There is no such rule, or no such version of it."""


class ListNotFound(NotFound):
    """There is no such list."""


class DecisionNotFound(NotFound):
    """There is no such decision, or it is older than the log."""


class RuleSetExists(Conflict):
    """A rule set with this id exists already."""


class RuleDeprecated(Conflict):
    """The rule is deprecated, which is final."""


class TooManyRuleSets(Conflict):
    """There are as many rule sets as there may be."""


class RuleSetFull(Conflict):
    """The rule set has as many active rules as one may have."""


class StillInUse(Conflict):
    """Active rules need what would go."""


class Changed(Conflict):
    """Somebody changed it meanwhile: read it again."""


class Unacknowledged(Conflict):
    """The rule has warnings: read them, then activate with acknowledgeWarnings."""


@dataclass(frozen=True)
class Velocity:
    """A fact about what was observed before: how many, how much, the largest, how many different ones."""

    name: str
    function: Function
    stream: str
    by: tuple[str, ...]
    window_seconds: int
    of: str | None = None
    include_current: bool = False

    @property
    def kind(self) -> Kind:
        """What its value is."""
        return Kind.INTEGER if self.function in {Function.COUNT, Function.DISTINCT} else Kind.DECIMAL


@dataclass(frozen=True)
class Observation:
    """Something that happened, for the velocity facts of what happens later; without a time, it happens now."""

    stream: str
    by: tuple[str, ...]
    amount: Decimal | None = None
    value: str | None = None
    at: datetime | None = None


@dataclass(frozen=True)
class Aggregation:
    """The worst outcome wins, or scores are added and compared with thresholds."""

    mode: Mode = Mode.WORST
    review: int | None = None
    reject: int | None = None


@dataclass(frozen=True)
class Settings:
    """What every rule of a set shares."""

    fields: Mapping[str, Kind]
    velocity: tuple[Velocity, ...] = ()
    aggregation: Aggregation = Aggregation()
    default: Outcome = Outcome.APPROVE
    on_incomplete: OnIncomplete = OnIncomplete.REVIEW
    money_amount: str | None = None
    money_currency: str | None = None

    @property
    def kinds(self) -> dict[str, Kind]:
        """Every fact that a rule may ask for."""
        return {**self.fields, **{fact.name: fact.kind for fact in self.velocity}, NOW: Kind.INSTANT}


@dataclass(frozen=True)
class Rule:
    """One version of a rule, as it is evaluated."""

    id: UUID
    version: int
    name: str
    priority: int
    terminate: bool
    conditions: Node
    decision: Outcome | None
    score: int
    reason: str = ""

    @property
    def place(self) -> tuple[int, str]:
        """Highest priority first; the id decides between equals, so that the order is always the same."""
        return (-self.priority, str(self.id))


@dataclass(frozen=True)
class RuleVersion:
    """One version of a rule, as it was written."""

    rule_id: UUID
    version: int
    name: str
    priority: int
    terminate: bool
    conditions: Any
    action: Mapping[str, Any]
    created_by: str
    created_at: datetime


@dataclass(frozen=True)
class RuleRecord:
    """A rule with its newest version; ``active_version`` is the one that decides."""

    id: UUID
    rule_set_id: str
    status: Status
    version: int
    active_version: int | None
    created_by: str
    created_at: datetime
    updated_at: datetime
    newest: RuleVersion


@dataclass(frozen=True)
class RuleSetRecord:
    """A rule set at its current version."""

    id: str
    description: str
    version: int
    snapshot_id: UUID
    settings: Mapping[str, Any]
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True)
class Snapshot:
    """A version of a rule set with everything a decision needs: it never changes."""

    id: UUID
    rule_set_id: str
    version: int
    settings: Mapping[str, Any]
    rules: tuple[RuleVersion, ...]
    lists: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class ValueList:
    """A named list of texts at one version."""

    id: str
    version: int
    members: tuple[str, ...]
    created_by: str
    created_at: datetime


@dataclass(frozen=True)
class Matched:
    """A rule that said yes."""

    rule_id: UUID
    version: int
    name: str
    decision: Outcome | None
    score: int
    reason: str


@dataclass(frozen=True)
class Unanswered:
    """A rule that could not be answered, and the facts it lacked, each with the reason."""

    rule_id: UUID
    version: int
    name: str
    lacking: Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """What a rule set says about some facts."""

    decision: Outcome
    matched: tuple[Matched, ...]
    incomplete: tuple[Unanswered, ...]
    score: int | None
    evaluated: int


@dataclass(frozen=True)
class Decision:
    """A verdict that was logged, with what it was made of."""

    id: UUID
    rule_set_id: str
    rule_set_version: int
    snapshot_id: UUID
    engine: str
    subject: str | None
    at: datetime
    facts: Mapping[str, Any]
    verdict: Verdict
    latency_us: int
    ignored: tuple[str, ...] = field(default=())


def aggregate(settings: Settings, matched: Sequence[Matched], *, is_incomplete: bool) -> tuple[Outcome, int | None]:
    """One decision, and the score where scores are added."""
    said = [match.decision for match in matched if match.decision is not None]
    score: int | None = None
    rules = settings.aggregation
    if rules.mode is Mode.SCORES:
        score = sum(match.score for match in matched)
        if rules.reject is not None and score >= rules.reject:
            said.append(Outcome.REJECT)
        elif rules.review is not None and score >= rules.review:
            said.append(Outcome.REVIEW)
    decision = worst(said) if said else settings.default
    if is_incomplete and settings.on_incomplete is not OnIncomplete.IGNORE:
        decision = worst([decision, Outcome(settings.on_incomplete.value)])
    return decision, score


def key_of(parts: Sequence[str]) -> str:
    """One text for what observations are counted by; a long one as its hash, for it must fit into an index."""
    return short(json.dumps(list(parts), ensure_ascii=False, separators=(",", ":")))


def short(text: str) -> str:
    """The text, or its hash."""
    written = text.encode()
    return text if len(written) <= LONGEST_KEY_BYTES else f"sha256:{hashlib.sha256(written).hexdigest()}"


def check_observation(one: Observation) -> None:
    """Invalid, unless it can be counted: one that cannot would spoil every sum it is in."""
    amount = one.amount if one.amount is not None else Decimal(0)
    texts = [*one.by, *([one.value] if one.value is not None else [])]
    if not re.fullmatch(LIST_NAME, one.stream) or not 1 <= len(one.by) <= MOST_BY:
        raise Invalid(f"an observation has a stream, named like a list, and 1 to {MOST_BY} texts it is counted by")
    if not amount.is_finite() or not 0 <= amount < LARGEST_DECIMAL:
        raise Invalid("the amount of an observation is 0 or more, and has at most 18 digits before its point")
    if any("\x00" in text for text in texts):
        raise Invalid("what an observation is counted by has no NUL")
    if one.at is not None and one.at.tzinfo is None:
        raise Invalid("the moment of an observation has an offset")


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """REJECT before REVIEW before APPROVE."""
    return max(outcomes, key=_SEVERITY.__getitem__)


def read_settings(given: Mapping[str, Any], *, path: str = "$") -> Settings:
    """Settings from the JSON in which they are written and kept; BadRule names every place that is wrong."""
    faults: list[Fault] = []
    fields = _read_fields(given.get("fields"), f"{path}.fields", faults)
    velocity = _read_velocity(given.get("velocity") or [], fields, f"{path}.velocity", faults)
    aggregation = _read_aggregation(given.get("aggregation") or {}, f"{path}.aggregation", faults)
    money = given.get("money") or {}
    for member, kind in (("amount", Kind.DECIMAL), ("currency", Kind.STRING)):
        if money and fields.get(str(money.get(member))) is not kind:
            faults.append(Fault("body", f"{path}.money.{member}", f"write the name of a field of type {kind.value}"))
    if faults:
        raise refusal(faults)
    return Settings(
        fields, velocity, aggregation, Outcome(given.get("default") or Outcome.APPROVE),
        OnIncomplete(given.get("onIncomplete") or OnIncomplete.REVIEW), money.get("amount"), money.get("currency"),
    )  # fmt: skip


def read_action(given: Mapping[str, Any], settings: Settings, *, path: str = "$.action") -> tuple[Outcome | None, int]:
    """What a matched rule says: a decision where the worst wins; where scores count a score, and perhaps a decision."""
    decision = Outcome(given["decision"]) if given.get("decision") is not None else None
    score = given.get("score")
    if settings.aggregation.mode is Mode.WORST:
        if decision is None:
            raise _bad(f"{path}.decision", "the rule set takes the worst decision: write APPROVE, REVIEW or REJECT")
        if score is not None:
            raise _bad(f"{path}.score", "the rule set adds no scores")
    elif score is None:
        raise _bad(f"{path}.score", "the rule set adds scores: write a whole number")
    return decision, score or 0


def _bad(path: str, detail: str) -> BadRule:
    return refusal([Fault("body", path, detail)])


def _read_fields(given: Any, path: str, faults: list[Fault]) -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    if not isinstance(given, Mapping) or not 1 <= len(given) <= MOST_FIELDS:
        faults.append(Fault("body", path, f"write 1 to {MOST_FIELDS} fields with their types"))
        return found
    for name, kind in given.items():
        if not re.fullmatch(FIELD_NAME, name) or name == NOW:
            faults.append(Fault("body", path, "a name is as in amount or customer.country, and not now, which is ours"))
        elif kind not in set(Kind):
            faults.append(Fault("body", f"{path}.{name}", f"write one of {', '.join(kind.value for kind in Kind)}"))
        else:
            found[name] = Kind(kind)
        if len(faults) >= MOST_FAULTS:
            break
    tops = [name for name in found if any(other.startswith(name + ".") for other in found)]
    faults += [Fault("body", f"{path}.{name}", "a field that holds other fields has no type") for name in tops]
    return found


def _read_velocity(
    given: Any, fields: Mapping[str, Kind], path: str, faults: list[Fault]
) -> tuple[Velocity, ...]:  # fmt: skip
    if len(given) > MOST_VELOCITY:
        faults.append(Fault("body", path, f"a rule set has at most {MOST_VELOCITY} velocity facts"))
        return ()
    found: list[Velocity] = []
    for place, one in enumerate(given):
        here = f"{path}[{place}]"
        fact = Velocity(
            one["name"], Function(one["function"]), one["stream"], tuple(one["by"]), one["windowSeconds"],
            one.get("of"), bool(one.get("includeCurrent")),
        )  # fmt: skip
        if not re.fullmatch(FIELD_NAME, fact.name) or fact.name in {*fields, NOW, *(other.name for other in found)}:
            faults.append(Fault("body", f"{here}.name", "a name of its own, written like a field's"))
        for step, name in enumerate(fact.by):
            if fields.get(name) is not Kind.STRING:
                detail = f"write a field of type string{suggest(name, fields)}"
                faults.append(Fault("body", f"{here}.by[{step}]", detail))
        wanted = Kind.STRING if fact.function is Function.DISTINCT else Kind.DECIMAL
        needs = fact.include_current and fact.function is not Function.COUNT
        if (fact.of is not None or needs) and fields.get(fact.of or "") is not wanted:
            detail = f"write the field of type {wanted.value} that holds what the current event adds"
            faults.append(Fault("body", f"{here}.of", detail))
        found.append(fact)
    return tuple(found)


def _read_aggregation(given: Mapping[str, Any], path: str, faults: list[Fault]) -> Aggregation:
    mode = Mode(given.get("mode") or Mode.WORST)
    review, reject = given.get("review"), given.get("reject")
    if mode is Mode.WORST and (review is not None or reject is not None):
        faults.append(Fault("body", path, "thresholds are for scores"))
    if mode is Mode.SCORES and review is None and reject is None:
        faults.append(Fault("body", path, "scores need a threshold: review, reject or both"))
    if review is not None and reject is not None and review >= reject:
        faults.append(Fault("body", f"{path}.reject", "the threshold of REJECT is above that of REVIEW"))
    return Aggregation(mode, review, reject)
