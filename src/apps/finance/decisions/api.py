"""The routes of decisions."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Path, Query, Response

from apps.finance.decisions import service
from apps.finance.decisions.compiled import ENGINE
from apps.finance.decisions.dry_run import dry_run
from apps.finance.decisions.model import Outcome, Status
from apps.finance.decisions.views import (
    NAME,
    Activation,
    ChangedList,
    ChangedRule,
    ChangedRuleSet,
    DecisionPage,
    DecisionSummary,
    DecisionView,
    DecisionWithFacts,
    DryRunOrder,
    DryRunView,
    ListPage,
    ListSummary,
    ListView,
    NewList,
    NewRule,
    NewRuleSet,
    Question,
    ReplayView,
    RulePage,
    RuleSetPage,
    RuleSetView,
    RuleView,
    RuleWithFindings,
    VersionPage,
    VersionView,
    show_decision,
    show_dry_run,
    show_findings,
    show_rule,
    write_settings,
    written,
)
from apps.shared.text import PageSize
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.http import RequestTx, Router

Admin = Annotated[Principal, require("decision:admin", "DECISION_ADMIN")]
Caller = Annotated[Principal, require("decision:evaluate")]
NameInPath = Annotated[str, Path(pattern=NAME)]
NameInQuery = Annotated[str | None, Query(pattern=NAME)]
VersionInQuery = Annotated[int | None, Query(ge=1, le=2_147_483_647)]

router = Router(prefix="/v1/decision", tags=["decisions"], invalid_status=400)


@router.post("/evaluate")
async def evaluate(question: Question, _caller: Caller, tx: RequestTx) -> DecisionView:
    """Decide, and log it."""
    decision = await service.evaluate(tx, question.rule_set_id, question.context, subject=question.subject)
    shown = show_decision(decision)
    if question.trace:
        shown.trace = await service.trace(tx, decision)
    return shown


@router.get("/decisions")
async def list_decisions(
    _caller: Admin,
    tx: RequestTx,
    rule_set_id: Annotated[str, Query(pattern=NAME, alias="ruleSetId")],
    decision: Outcome | None = None,
    before: UUID | None = None,
    limit: PageSize = 50,
) -> DecisionPage:
    """A page of the log of one rule set."""
    rows, following = await service.list_decisions(
        tx, rule_set_id=rule_set_id, decision=decision, before=before, limit=limit
    )
    return DecisionPage(items=[DecisionSummary.model_validate(row) for row in rows], next=following)


@router.get("/decisions/{decision_id}")
async def read_decision(decision_id: UUID, _caller: Admin, tx: RequestTx) -> DecisionWithFacts:
    """One of the log, with its facts and the trace of every rule."""
    decision, told = await service.read_decision(tx, decision_id)
    shown = show_decision(decision)
    shown.trace = told
    return DecisionWithFacts(**shown.model_dump(), facts=dict(decision.facts))


@router.post("/decisions/{decision_id}/replay")
async def replay_decision(decision_id: UUID, _caller: Admin, tx: RequestTx) -> ReplayView:
    """Decide again from the log alone, and compare."""
    recorded, verdict, differences = await service.replay(tx, decision_id)
    return ReplayView(
        same=not differences, differences=differences, recorded=show_decision(recorded), decision=verdict.decision,
        engine_changed=recorded.engine != ENGINE,
    )  # fmt: skip


@router.post("/rules", status_code=201)
async def create_rule(new: NewRule, caller: Admin, tx: RequestTx, response: Response) -> RuleWithFindings:
    """A draft; it decides nothing until it is activated."""
    record, findings = await service.create_rule(tx, new.rule_set_id, written=written(new), actor=caller.subject)
    response.headers["Location"] = f"/v1/decision/rules/{record.id}"
    return show_findings(record, findings)


@router.get("/rules")
async def list_rules(
    _caller: Admin,
    tx: RequestTx,
    rule_set_id: Annotated[str | None, Query(pattern=NAME, alias="ruleSetId")] = None,
    status: Status | None = None,
    before: UUID | None = None,
    limit: PageSize = 50,
) -> RulePage:
    """A page of them."""
    items, following = await service.list_rules(
        tx, rule_set_id=rule_set_id, status=status, before=before, limit=limit
    )  # fmt: skip
    return RulePage(items=[show_rule(item) for item in items], next=following)


@router.get("/rules/{rule_id}")
async def read_rule(rule_id: UUID, _caller: Admin, tx: RequestTx) -> RuleView:
    """One of them."""
    return show_rule(await service.read_rule_record(tx, rule_id))


@router.put("/rules/{rule_id}")
async def change_rule(rule_id: UUID, new: ChangedRule, caller: Admin, tx: RequestTx) -> RuleWithFindings:
    """The next version; the one that is active stays active."""
    record, findings = await service.change_rule(
        tx, rule_id, written=written(new), expected_version=new.expected_version, actor=caller.subject
    )
    return show_findings(record, findings)


@router.get("/rules/{rule_id}/versions")
async def list_rule_versions(
    rule_id: UUID, _caller: Admin, tx: RequestTx, before: VersionInQuery = None, limit: PageSize = 50
) -> VersionPage:
    """Every version there ever was."""
    items, following = await service.list_rule_versions(tx, rule_id, before=before, limit=limit)
    return VersionPage(items=[VersionView.model_validate(item) for item in items], next=following)


@router.post("/rules/{rule_id}/activate")
async def activate_rule(
    rule_id: UUID, caller: Admin, tx: RequestTx, order: Activation | None = None
) -> RuleWithFindings:  # fmt: skip
    """From now on a version of the rule decides; 409 with the warnings unless they are acknowledged."""
    order = order or Activation()
    record, findings = await service.activate_rule(
        tx, rule_id, version=order.version, acknowledge_warnings=order.acknowledge_warnings, actor=caller.subject
    )
    return show_findings(record, findings)


@router.post("/rules/{rule_id}/deprecate")
async def deprecate_rule(rule_id: UUID, caller: Admin, tx: RequestTx) -> RuleView:
    """From now on it decides nothing; that is final."""
    return show_rule(await service.deprecate_rule(tx, rule_id, actor=caller.subject))


@router.post("/rules/{rule_id}/dry-run")
async def dry_run_rule(
    rule_id: UUID, _caller: Admin, tx: RequestTx, order: DryRunOrder | None = None
) -> DryRunView:  # fmt: skip
    """What the rule would have changed among recorded decisions, newest first."""
    order = order or DryRunOrder()
    return show_dry_run(await dry_run(tx, rule_id, **dict(order)))


@router.post("/rule-sets", status_code=201)
async def create_rule_set(new: NewRuleSet, caller: Admin, tx: RequestTx, response: Response) -> RuleSetView:
    """A rule set without rules."""
    made = await service.create_rule_set(
        tx, new.id, description=new.description, settings=write_settings(new.settings), actor=caller.subject
    )
    response.headers["Location"] = f"/v1/decision/rule-sets/{made.id}"
    return RuleSetView.model_validate(made)


@router.get("/rule-sets")
async def list_rule_sets(
    _caller: Admin, tx: RequestTx, after: NameInQuery = None, limit: PageSize = 50
) -> RuleSetPage:  # fmt: skip
    """A page of them."""
    items, following = await service.list_rule_sets(tx, after=after, limit=limit)
    return RuleSetPage(items=[RuleSetView.model_validate(item) for item in items], next=following)


@router.get("/rule-sets/{rule_set_id}")
async def read_rule_set(rule_set_id: NameInPath, _caller: Admin, tx: RequestTx) -> RuleSetView:
    """One as it is in force."""
    return RuleSetView.model_validate(await service.read_rule_set(tx, rule_set_id))


@router.put("/rule-sets/{rule_set_id}")
async def change_rule_set(
    rule_set_id: NameInPath, new: ChangedRuleSet, caller: Admin, tx: RequestTx
) -> RuleSetView:  # fmt: skip
    """Other settings; 409 when active rules need what would go."""
    changed = await service.change_rule_set(
        tx, rule_set_id, description=new.description, settings=write_settings(new.settings),
        expected_version=new.expected_version, actor=caller.subject,
    )  # fmt: skip
    return RuleSetView.model_validate(changed)


@router.get("/lists")
async def list_lists(_caller: Admin, tx: RequestTx, after: NameInQuery = None, limit: PageSize = 50) -> ListPage:
    """A page of them, with their sizes."""
    items, following = await service.list_lists(tx, after=after, limit=limit)
    return ListPage(items=[ListSummary.model_validate(item) for item in items], next=following)


@router.get("/lists/{list_id}")
async def read_list(
    list_id: NameInPath, _caller: Admin, tx: RequestTx, version: VersionInQuery = None
) -> ListView:  # fmt: skip
    """All its members, now or at a version."""
    return ListView.model_validate(await service.read_list(tx, list_id, version=version))


@router.put("/lists/{list_id}")
async def put_list(list_id: NameInPath, new: NewList, caller: Admin, tx: RequestTx) -> ChangedList:
    """Make it, or replace its members; the rule sets that use it get a new version in the same commit."""
    made, users = await service.put_list(tx, list_id, members=new.members, actor=caller.subject)
    return ChangedList(**ListView.model_validate(made).model_dump(), rule_sets=users)
