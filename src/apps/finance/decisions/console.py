"""Rules and decisions in the console: what decides, since when, what was decided and why; and for who writes rules, the
editor, the diff, the test bench, the dry run and the activation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fastapi import Request
from fastapi.responses import Response

from apps.finance.decisions import service
from apps.finance.decisions.actions import ACTIONS, LARGEST_VERSION, ROLE, parse_json
from apps.finance.decisions.bench import PATH, example, try_facts
from apps.finance.decisions.dry_run import MOST_DECISIONS, DryRun, dry_run
from apps.finance.decisions.model import Mode, Outcome, RuleRecord, RuleVersion, Status, read_settings
from apps.finance.decisions.wording import OPERATORS, OUTCOMES, compare, say
from duly import Duly, Tx
from duly.console import (
    BadQuery,
    Pages,
    Query,
    Section,
    Wrong,
    check_may_act,
    may_act,
    read,
    read_audit,
    read_moment,
    read_wrong,
    show,
    signed_in,
)
from duly.errors import Fault, Invalid, NotFound
from duly.ids import parse_uuid

if TYPE_CHECKING:
    from duly.console.app import Look

PAGE = 50
SETS = 100
LISTS = 100
LONGEST_FACTS = 20_000
DRY_RUNS = (100, 1_000, 5_000, MOST_DECISIONS)
STATUSES = tuple(status.value for status in Status)
OUTCOMES_OF_A_SET = tuple(outcome.value for outcome in Outcome)
pages = Pages()


def register(app: Duly) -> None:
    """Add the section: to look at for whoever runs the engine, to change for risk administrators."""
    templates = Path(__file__).parent / "templates"
    app.include_console(Section("rules", "Rules", pages, templates=templates, roles=(ROLE,), actions=ACTIONS))


@pages.get("")
async def rules(request: Request) -> Response:
    """The newest first, by rule set or status."""
    query = Query(request)
    status, rule_set, before = query.choice("status", STATUSES), query.text("set", longest=100), query.id("after")
    async with read(request) as look:
        sets, _ = await service.list_rule_sets(look.tx, after=None, limit=SETS)
        found, following = await service.list_rules(
            look.tx, rule_set_id=rule_set, status=Status(status) if status else None, before=before, limit=PAGE
        )
    return show(
        request, "rules_list.html", now=look.now, found=found, sets=sets, chosen=rule_set, wanted=status,
        statuses=STATUSES, after=following, is_first=before is None, may_act=may_act(request),
    )  # fmt: skip


@pages.get("/decisions")
async def decisions(request: Request) -> Response:
    """What a rule set decided, the newest first."""
    query = Query(request)
    rule_set, before = query.text("set", longest=100), query.id("after")
    outcome = query.choice("outcome", OUTCOMES_OF_A_SET)
    async with read(request) as look:
        sets, _ = await service.list_rule_sets(look.tx, after=None, limit=SETS)
        chosen = rule_set or (sets[0].id if sets else "")
        found, following = await service.list_decisions(
            look.tx, rule_set_id=chosen, decision=Outcome(outcome) if outcome else None, before=before, limit=PAGE
        )
    return show(
        request, "rules_decisions.html", now=look.now, found=found, sets=sets, chosen=chosen, outcome=outcome,
        outcomes=OUTCOMES_OF_A_SET, after=following, is_first=before is None,
    )  # fmt: skip


@pages.get("/decisions/{id}")
async def decision(request: Request, id: UUID) -> Response:
    """One, with what each rule said; the facts are for whoever may act, here or anywhere."""
    async with read(request) as look:
        found, trace = await service.read_decision(look.tx, id)
    return show(
        request, "rules_decision.html", now=look.now, one=found, trace=trace, pretty=_pretty, say=say, words=OUTCOMES,
        may_act=may_act(request), may_see_facts=may_act(request) or signed_in(request).may_act,
    )  # fmt: skip


@pages.get("/sets/{id}")
async def rule_set(request: Request, id: str) -> Response:
    """One rule set: which facts it knows, how its rules become one decision, and which rules decide, in their order."""
    async with read(request) as look:
        found = await service.read_rule_set(look.tx, id)
        loaded = await service.find_loaded(look.tx, id)
    return show(
        request, "rules_set.html", now=look.now, one=found, settings=loaded.settings,
        rules=sorted(loaded.rules, key=lambda rule: rule.place), may_act=may_act(request),
    )  # fmt: skip


# -- the test bench ---------------------------------------------------------------------------------------------------


@pages.get("/sets/{id}/bench")
async def bench(request: Request, id: str) -> Response:
    """Facts to try: those of a decision, or one of each kind."""
    check_may_act(request)
    query = Query(request)
    decision_id, rule_id, version = query.id("decision"), query.id("rule"), query.number("version")
    async with read(request) as look:
        found = await service.read_rule_set(look.tx, id)
        facts = example(read_settings(found.settings))
        if decision_id is not None:
            facts = {**(await service.read_decision(look.tx, decision_id))[0].facts}
        candidate = await _find_candidate(look.tx, id, rule_id, version)
        return await _show_bench(request, look, id, _pretty(facts), candidate)


@pages.post("/sets/{id}/bench")
async def try_out(request: Request, id: str) -> Response:
    """What the rules say about these facts, and why; nothing is written."""
    form: Mapping[str, str] = request.state.form
    text = form.get("facts", "")
    rule_id, version = parse_uuid(form.get("rule", "")), form.get("version", "")
    number = int(version) if version.isascii() and version.isdigit() and len(version) < 10 else None
    async with read(request) as look:
        candidate = await _find_candidate(look.tx, id, rule_id, number)
        try:
            tried = await try_facts(look.tx, id, _read_facts(text), candidate=candidate)
        except Invalid as error:
            wrong = read_wrong(error, form, {"facts"})
            return await _show_bench(request, look, id, text, candidate, wrong=wrong)
        return await _show_bench(request, look, id, text, candidate, tried=tried)


async def _find_candidate(tx: Tx, rule_set_id: str, rule_id: UUID | None, version: int | None) -> RuleVersion | None:
    if rule_id is None:
        return None
    record = await service.read_rule_record(tx, rule_id)
    if record.rule_set_id != rule_set_id:
        raise NotFound("this rule is of another rule set")
    return await service.find_version(tx, record, _number(version))


async def _show_bench(
    request: Request, look: Look, id: str, facts: str, candidate: RuleVersion | None, **more: Any
) -> Response:
    found = await service.read_rule_set(look.tx, id)
    wrong: Wrong | None = more.get("wrong")
    return show(
        request, "rules_bench.html", now=look.now, set=found, settings=read_settings(found.settings), facts=facts,
        candidate=candidate, wrong=wrong, tried=more.get("tried"), pretty=_pretty, say=say, words=OUTCOMES,
        status=wrong.status if wrong else 200,
    )  # fmt: skip


def _read_facts(text: str) -> dict[str, Any]:
    try:
        if len(text) > LONGEST_FACTS:
            raise ValueError(f"at most {LONGEST_FACTS} characters")
        found = parse_json(text)
        if not isinstance(found, dict):
            raise ValueError("write a JSON object with a member for each fact")
    except ValueError as error:
        bad = Invalid(str(error))
        bad.faults = (Fault("body", PATH, str(error)),)
        raise bad from None
    return found


# -- one rule ---------------------------------------------------------------------------------------------------------


@pages.get("/new")
async def new_rule(request: Request) -> Response:
    """The editor, empty."""
    check_may_act(request)
    chosen = Query(request).text("set", longest=100)
    async with read(request) as look:
        if chosen is None:
            sets, _ = await service.list_rule_sets(look.tx, after=None, limit=SETS)
            return show(request, "rules_choose.html", now=look.now, sets=sets)
        return await _editor(request, look, chosen, {})


@pages.get("/{id}")
async def rule(request: Request, id: UUID) -> Response:
    """One, with the versions it had and what people did to it."""
    before = Query(request).number("after")
    async with read(request) as look:
        found = await service.read_rule_record(look.tx, id)
        versions, following = await service.list_rule_versions(look.tx, id, before=before, limit=PAGE)
        audit = await read_audit(request, look, subject=f"rule:{id}", limit=20)
    return show(
        request, "rules_one.html", now=look.now, one=found, versions=versions, after=following, audit=audit,
        is_first=before is None, pretty=_pretty, say=say, may_act=may_act(request),
    )  # fmt: skip


@pages.get("/{id}/edit")
async def edit_rule(request: Request, id: UUID) -> Response:
    """The editor, with the newest version or the one that is named."""
    check_may_act(request)
    version = Query(request).number("version")
    async with read(request) as look:
        record = await service.read_rule_record(look.tx, id)
        written = await service.find_version(look.tx, record, _number(version))
        return await _editor(request, look, record.rule_set_id, _values(written), record=record)


@pages.form("rules.create", "rules.change")
async def edit_again(request: Request, wrong: Wrong) -> Response:
    """The editor as it was sent, with what is wrong at each field."""
    async with read(request) as look:
        if (id := parse_uuid(wrong.given.get("id", ""))) is not None:
            record = await service.read_rule_record(look.tx, id)
            return await _editor(request, look, record.rule_set_id, wrong.given, record=record, wrong=wrong)
        return await _editor(request, look, wrong.given.get("rule_set_id", ""), wrong.given, wrong=wrong)


async def _editor(
    request: Request,
    look: Look,
    rule_set_id: str,
    values: Mapping[str, str],
    *,
    record: RuleRecord | None = None,
    wrong: Wrong | None = None,
) -> Response:
    found = await service.read_rule_set(look.tx, rule_set_id)
    settings = read_settings(found.settings)
    lists, _ = await service.list_lists(look.tx, after=None, limit=LISTS)
    return show(
        request, "rules_edit.html", now=look.now, set=found, settings=settings, values=values, one=record,
        wrong=wrong, lists=lists, outcomes=OUTCOMES_OF_A_SET, operators=OPERATORS,
        adds_scores=settings.aggregation.mode is Mode.SCORES, status=wrong.status if wrong else 200,
        expected=values.get("expected_version") or (record.version if record else None),
    )  # fmt: skip


@pages.get("/{id}/diff")
async def diff(request: Request, id: UUID) -> Response:
    """What differs between two versions: the newest and the one before it, unless others are named."""
    query = Query(request)
    first, second = query.number("from"), query.number("to")
    async with read(request) as look:
        record = await service.read_rule_record(look.tx, id)
        after = await service.find_version(look.tx, record, _number(second))
        first = first if first is not None else after.version - 1
        before = await service.find_version(look.tx, record, _number(first)) if first else None
        versions, _ = await service.list_rule_versions(look.tx, id, before=None, limit=200)
    return show(
        request, "rules_diff.html", now=look.now, one=record, before=before, after=after,
        numbers=[version.version for version in versions], difference=compare(before, after),
        may_act=may_act(request),
    )  # fmt: skip


@pages.get("/{id}/activate")
async def ask_to_activate(request: Request, id: UUID) -> Response:
    """What would decide from now on, what that changes, and what is to be said about it."""
    check_may_act(request)
    return await _show_activation(request, id, Query(request).number("version"), None)


@pages.form("rules.activate")
async def activate_again(request: Request, wrong: Wrong) -> Response:
    """The same, with what is wrong."""
    id, version = parse_uuid(wrong.given.get("id", "")), wrong.given.get("version", "")
    if id is None or not (version.isascii() and version.isdigit()) or len(version) > 10:
        raise NotFound("there is no such rule")
    return await _show_activation(request, id, int(version), wrong)


async def _show_activation(request: Request, id: UUID, version: int | None, wrong: Wrong | None) -> Response:
    async with read(request) as look:
        record = await service.read_rule_record(look.tx, id)
        after = await service.find_version(look.tx, record, _number(version))
        active = record.active_version
        before = await service.find_version(look.tx, record, active) if active is not None else None
        findings = await service.review(look.tx, record, after)
    return show(
        request, "rules_activate.html", now=look.now, one=record, before=before, after=after, findings=findings,
        difference=compare(before, after), wrong=wrong, pretty=_pretty, status=wrong.status if wrong else 200,
    )  # fmt: skip


# -- the dry run ------------------------------------------------------------------------------------------------------


@pages.get("/{id}/dry-run")
async def ask_to_dry_run(request: Request, id: UUID) -> Response:
    """Which version, over which decisions."""
    check_may_act(request)
    version = Query(request).number("version")
    return await _show_dry_run(request, id, {"version": str(version or "")})


@pages.post("/{id}/dry-run")
async def run_dry(request: Request, id: UUID) -> Response:
    """What the rule would have changed; nothing is written."""
    form: Mapping[str, str] = request.state.form
    return await _show_dry_run(request, id, form, is_asked=True)


async def _show_dry_run(request: Request, id: UUID, form: Mapping[str, str], *, is_asked: bool = False) -> Response:
    wrong, result = None, None
    async with read(request) as look:
        record = await service.read_rule_record(look.tx, id)
        versions, _ = await service.list_rule_versions(look.tx, id, before=None, limit=200)
        if is_asked:
            try:
                result = await _run(look.tx, id, form)
            except Invalid as error:
                wrong = read_wrong(error, form, {"since", "until"})
    return show(
        request, "rules_dry_run.html", now=look.now, one=record, versions=versions, values=form, result=result,
        wrong=wrong, sizes=DRY_RUNS, status=wrong.status if wrong else 200,
    )  # fmt: skip


async def _run(tx: Tx, id: UUID, form: Mapping[str, str]) -> DryRun:
    faults, moments = [], {}
    for name in ("since", "until"):
        given = form.get(name, "").strip()
        moments[name] = read_moment(given) if given else None
        if given and moments[name] is None:
            faults.append(Fault("body", f"$.{name}", "write a time such as 2026-03-01T09:00; it is UTC"))
    if faults:
        bad = Invalid("the times cannot be read")
        bad.faults = tuple(faults)
        raise bad
    sizes = {str(size): size for size in DRY_RUNS}
    version = form.get("version", "")
    number = int(version) if version.isascii() and version.isdigit() and len(version) < 10 else None
    return await dry_run(
        tx, id, version=_number(number), without=form.get("without") == "on", **moments,
        before=parse_uuid(form.get("before", "")), limit=sizes.get(form.get("limit", ""), DRY_RUNS[1]),
    )  # fmt: skip


def _number(version: int | None) -> int | None:
    if version is not None and not 1 <= version <= LARGEST_VERSION:
        raise BadQuery("a version is a number from 1 on")
    return version


def _values(version: RuleVersion) -> dict[str, str]:
    action = version.action
    return {
        "name": version.name, "conditions": _pretty(version.conditions), "priority": str(version.priority),
        "decision": str(action.get("decision") or ""), "says": str(action.get("reason") or ""),
        "score": str(action["score"]) if action.get("score") is not None else "",
        "terminate": "on" if version.terminate else "",
    }  # fmt: skip


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False, default=str)
