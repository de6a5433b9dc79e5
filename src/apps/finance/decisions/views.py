"""What the routes of decisions take and give."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from apps.finance.decisions.analysis import Finding, FindingKind
from apps.finance.decisions.dry_run import MOST_DECISIONS, DryRun, Tally
from apps.finance.decisions.language import FIELD_NAME, LIST_NAME, MOST_TEXT
from apps.finance.decisions.model import (
    LARGEST_SCORE,
    LONGEST_WINDOW_SECONDS,
    MOST_BY,
    MOST_FIELDS,
    MOST_MEMBERS_OF_A_LIST,
    MOST_VELOCITY,
    SHORTEST_WINDOW_SECONDS,
    Decision,
    Function,
    Matched,
    Mode,
    OnIncomplete,
    Outcome,
    RuleRecord,
    Status,
    Unanswered,
)
from apps.shared.text import EXACT, Name, Prose

NAME = f"^{LIST_NAME}$"
SetName = Annotated[str, StringConstraints(pattern=NAME)]
FieldName = Annotated[str, StringConstraints(pattern=f"^{FIELD_NAME}$")]
Version = Annotated[int, Field(ge=1, le=2_147_483_647, strict=True)]
Score = Annotated[int, Field(ge=-LARGEST_SCORE, le=LARGEST_SCORE, strict=True)]
Member = Annotated[str, StringConstraints(min_length=1, max_length=MOST_TEXT, pattern=EXACT)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class _View(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, from_attributes=True)


class NewVelocity(_Body):
    """A fact about what was observed before; it can be used in rules like a field."""

    name: FieldName
    function: Function
    stream: SetName
    by: list[FieldName] = Field(min_length=1, max_length=MOST_BY)
    of: FieldName | None = None
    window_seconds: int = Field(ge=SHORTEST_WINDOW_SECONDS, le=LONGEST_WINDOW_SECONDS, strict=True)
    include_current: bool = False


class NewAggregation(_Body):
    """How matched rules become one decision."""

    mode: Mode = Mode.WORST
    review: Score | None = None
    reject: Score | None = None


class NewMoney(_Body):
    """Which fields say how much is at stake, for dry runs."""

    amount: FieldName
    currency: FieldName


class Settings(_Body):
    """What the rules of a set share."""

    fields: dict[str, Literal["decimal", "integer", "string", "boolean", "instant", "strings"]] = Field(
        min_length=1, max_length=MOST_FIELDS
    )
    velocity: list[NewVelocity] = Field(default=[], max_length=MOST_VELOCITY)
    aggregation: NewAggregation = NewAggregation()
    default: Outcome = Outcome.APPROVE
    on_incomplete: OnIncomplete = OnIncomplete.REVIEW
    money: NewMoney | None = None


class NewRuleSet(_Body):
    """A rule set."""

    id: SetName
    description: Prose
    settings: Settings


class ChangedRuleSet(_Body):
    """Its new settings; ``expectedVersion`` guards against a change that one has not seen."""

    description: Prose
    settings: Settings
    expected_version: Version | None = None


class RuleSetView(_View):
    """A rule set as it is in force."""

    id: str
    description: str
    version: int
    settings: dict[str, Any]
    created_at: datetime
    updated_at: datetime


class RuleSetPage(_View):
    """By name; ``next`` is the ``after`` of the page after this one."""

    items: list[RuleSetView]
    next: str | None


class NewList(_Body):
    """All members of a list."""

    members: list[Member] = Field(max_length=MOST_MEMBERS_OF_A_LIST)


class ListView(_View):
    """A list at one version."""

    id: str
    version: int
    members: list[str]
    created_by: str
    created_at: datetime


class ChangedList(ListView):
    """A list, and the rule sets that got a new version because of it."""

    rule_sets: list[str]


class ListSummary(_View):
    """A list, where many are listed."""

    id: str
    version: int
    size: int
    updated_at: datetime


class ListPage(_View):
    """By name; ``next`` is the ``after`` of the page after this one."""

    items: list[ListSummary]
    next: str | None


class Action(_Body):
    """What a matched rule says."""

    decision: Outcome | None = None
    score: Score | None = None
    reason: Name | None = None


class ChangedRule(_Body):
    """A rule; the language of ``conditions`` is in the documentation, and checked against the rule set's fields."""

    name: Name
    conditions: dict[str, Any]
    action: Action
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000, strict=True)
    terminate: bool = Field(default=False, strict=True)
    expected_version: Version | None = None


class NewRule(_Body):
    """A rule of a rule set; highest priority first."""

    rule_set_id: SetName
    name: Name
    conditions: dict[str, Any]
    action: Action
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000, strict=True)
    terminate: bool = Field(default=False, strict=True)


class Activation(_Body):
    """Which version is to decide: the newest, unless it says otherwise."""

    version: Version | None = None
    acknowledge_warnings: bool = Field(default=False, strict=True)


class FindingView(_View):
    """Something about a rule that its author wants to know, with an input that shows it."""

    kind: FindingKind
    rule_id: UUID
    by: UUID | None
    message: str
    witness: dict[str, Any] | None


class VersionView(_View):
    """One version of a rule."""

    version: int
    name: str
    priority: int
    terminate: bool
    conditions: dict[str, Any]
    action: dict[str, Any]
    created_by: str
    created_at: datetime


class VersionPage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[VersionView]
    next: int | None


class RuleView(_View):
    """A rule at its newest version; ``activeVersion`` decides."""

    id: UUID
    rule_set_id: str
    status: Status
    version: int
    active_version: int | None
    name: str
    priority: int
    terminate: bool
    conditions: dict[str, Any]
    action: dict[str, Any]
    created_by: str
    created_at: datetime
    updated_at: datetime


class RuleWithFindings(RuleView):
    """A rule, and what is to be said about it."""

    warnings: list[FindingView]


class RulePage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[RuleView]
    next: UUID | None


class Question(_Body):
    """What to decide about. Members of the context that are no fields of the rule set are ignored, and named."""

    rule_set_id: SetName
    context: dict[str, Any] = Field(max_length=500)
    subject: Name | None = None
    trace: bool = Field(default=False, strict=True)


class MatchedView(_View):
    """A rule that matched."""

    rule_id: UUID
    version: int
    name: str
    decision: Outcome | None
    score: int
    reason: str


class UnansweredView(_View):
    """A rule that could not be answered, and the facts it lacked: missing, null or wrong_type."""

    rule_id: UUID
    version: int
    name: str
    lacking: dict[str, str]


class DecisionView(_View):
    """A decision and what it rests on."""

    id: UUID
    rule_set_id: str
    rule_set_version: int
    engine: str
    subject: str | None
    at: datetime
    decision: Outcome
    score: int | None
    matched_rules: list[MatchedView]
    incomplete: list[UnansweredView]
    explanation: list[str]
    evaluated: int
    latency_us: int
    ignored: list[str]
    trace: list[dict[str, Any]] | None = None


class DecisionWithFacts(DecisionView):
    """A decision of the log with every fact."""

    facts: dict[str, Any]


class DecisionSummary(_View):
    """A decision, where many are listed."""

    id: UUID
    rule_set_version: int
    subject: str | None
    at: datetime
    decision: Outcome
    score: int | None
    latency_us: int


class DecisionPage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[DecisionSummary]
    next: UUID | None


class ReplayView(_View):
    """Whether the log still says the same; ``differences`` names what does not."""

    same: bool
    differences: list[str]
    recorded: DecisionView
    decision: Outcome
    engine_changed: bool


class DryRunOrder(_Body):
    """Over which decisions; ``without`` asks what would be if the rule were deprecated."""

    version: Version | None = None
    without: bool = Field(default=False, strict=True)
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    before: UUID | None = None
    limit: int = Field(default=1_000, ge=1, le=MOST_DECISIONS, strict=True)


class TallyView(_View):
    """How many, and how much in each currency, as exact decimals."""

    count: int
    money: dict[str, str]


class ChangeView(TallyView):
    """Decisions that would have been others."""

    before: Outcome
    after: Outcome


class ExampleView(_View):
    """One of them."""

    decision_id: UUID
    before: Outcome
    after: Outcome


class DryRunView(_View):
    """The difference a rule makes. ``drifted``: recorded decisions that the rules in force would not repeat."""

    version: int
    examined: int
    matched: TallyView
    unanswered: int
    drifted: int
    changes: list[ChangeView]
    examples: list[ExampleView]
    next: UUID | None


def written(new: NewRule | ChangedRule) -> dict[str, Any]:
    """A rule as it is stored."""
    return {
        "name": new.name, "conditions": new.conditions, "priority": new.priority, "terminate": new.terminate,
        "action": new.action.model_dump(mode="json", exclude_none=True),
    }  # fmt: skip


def write_settings(given: Settings) -> dict[str, Any]:
    """Settings as they are stored."""
    return given.model_dump(mode="json", by_alias=True, exclude_none=True)


def _members(record: RuleRecord) -> dict[str, Any]:
    newest = record.newest
    return {
        "id": record.id, "rule_set_id": record.rule_set_id, "status": record.status, "version": record.version,
        "active_version": record.active_version, "name": newest.name, "priority": newest.priority,
        "terminate": newest.terminate, "conditions": newest.conditions, "action": dict(newest.action),
        "created_by": record.created_by, "created_at": record.created_at, "updated_at": record.updated_at,
    }  # fmt: skip


def show_rule(record: RuleRecord) -> RuleView:
    """A rule."""
    return RuleView(**_members(record))


def show_findings(record: RuleRecord, findings: list[Finding]) -> RuleWithFindings:
    """A rule with what is to be said about it."""
    shown = [FindingView.model_validate(finding) for finding in findings]
    return RuleWithFindings(**_members(record), warnings=shown)


def show_decision(decision: Decision) -> DecisionView:
    """A decision."""
    verdict = decision.verdict
    return DecisionView(
        id=decision.id, rule_set_id=decision.rule_set_id, rule_set_version=decision.rule_set_version,
        engine=decision.engine, subject=decision.subject, at=decision.at, decision=verdict.decision,
        score=verdict.score, matched_rules=[MatchedView.model_validate(one) for one in verdict.matched],
        incomplete=[UnansweredView.model_validate(one) for one in verdict.incomplete],
        explanation=[*map(_say_matched, verdict.matched), *map(_say_unanswered, verdict.incomplete)],
        evaluated=verdict.evaluated, latency_us=decision.latency_us, ignored=list(decision.ignored),
    )  # fmt: skip


def _say_matched(one: Matched) -> str:
    said = one.decision.value if one.decision is not None else f"score {one.score}"
    return f"{one.name} (version {one.version}): {said}" + (f", {one.reason}" if one.reason else "")


def _say_unanswered(one: Unanswered) -> str:
    lacking = ", ".join(f"{name} ({reason})" for name, reason in one.lacking.items())
    return f"{one.name} (version {one.version}) could not be answered without {lacking}"


def _show_tally(tally: Tally) -> dict[str, Any]:
    return {"count": tally.count, "money": {name: format(sum_, "f") for name, sum_ in sorted(tally.money.items())}}


def show_dry_run(run: DryRun) -> DryRunView:
    """The difference a rule makes."""
    return DryRunView(
        version=run.version, examined=run.examined, matched=TallyView(**_show_tally(run.matched)),
        unanswered=run.unanswered, drifted=run.drifted, next=run.next,
        changes=[
            ChangeView(before=before, after=after, **_show_tally(tally))
            for (before, after), tally in sorted(run.changes.items())
        ],
        examples=[ExampleView.model_validate(one) for one in run.examples],
    )  # fmt: skip
