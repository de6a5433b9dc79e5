"""Rules and decisions in the console: what decides, since when, what was decided, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

from fastapi import Request
from fastapi.responses import Response

from apps.finance.decisions import service
from apps.finance.decisions.model import Outcome, Status
from duly import Duly
from duly.console import Pages, Query, Section, read, show

PAGE = 50
SETS = 100
STATUSES = tuple(status.value for status in Status)
OUTCOMES = tuple(outcome.value for outcome in Outcome)
pages = Pages()


def register(app: Duly) -> None:
    """Add the section."""
    app.include_console(Section("rules", "Rules", pages, templates=Path(__file__).parent / "templates"))


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
        statuses=STATUSES, after=following, is_first=before is None,
    )  # fmt: skip


@pages.get("/decisions")
async def decisions(request: Request) -> Response:
    """What a rule set decided, the newest first."""
    query = Query(request)
    rule_set, outcome, before = query.text("set", longest=100), query.choice("outcome", OUTCOMES), query.id("after")
    async with read(request) as look:
        sets, _ = await service.list_rule_sets(look.tx, after=None, limit=SETS)
        chosen = rule_set or (sets[0].id if sets else "")
        found, following = await service.list_decisions(
            look.tx, rule_set_id=chosen, decision=Outcome(outcome) if outcome else None, before=before, limit=PAGE
        )
    return show(
        request, "rules_decisions.html", now=look.now, found=found, sets=sets, chosen=chosen, outcome=outcome,
        outcomes=OUTCOMES, after=following, is_first=before is None,
    )  # fmt: skip


@pages.get("/decisions/{id}")
async def decision(request: Request, id: UUID) -> Response:
    """One, with what each rule said."""
    async with read(request) as look:
        found, trace = await service.read_decision(look.tx, id)
    return show(request, "rules_decision.html", now=look.now, one=found, trace=trace, pretty=_pretty)


@pages.get("/{id}")
async def rule(request: Request, id: UUID) -> Response:
    """One, with the versions it had."""
    before = Query(request).number("after")
    async with read(request) as look:
        found = await service.read_rule_record(look.tx, id)
        versions, following = await service.list_rule_versions(look.tx, id, before=before, limit=PAGE)
    return show(
        request, "rules_one.html", now=look.now, one=found, versions=versions, after=following,
        is_first=before is None, pretty=_pretty,
    )  # fmt: skip


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False)
