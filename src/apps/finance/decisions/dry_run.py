"""What a rule would have changed: recorded decisions decided again, with the rules in force and with the candidate."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from apps.finance.decisions import service, store
from apps.finance.decisions.compiled import CompiledSet
from apps.finance.decisions.language import read_decimal
from apps.finance.decisions.loading import Loaded
from apps.finance.decisions.model import Outcome, Settings, Verdict
from duly import Tx

BATCH = 200
MOST_DECISIONS = 10_000
MOST_EXAMPLES = 10
NO_CURRENCY = ""


@dataclass
class Tally:
    """How many, and how much money in each currency."""

    count: int = 0
    money: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))

    def add(self, amount: Decimal | None, currency: str) -> None:
        """One more."""
        self.count += 1
        if amount is not None:
            self.money[currency] += amount


@dataclass(frozen=True)
class Example:
    """A decision that would have been another."""

    decision_id: UUID
    before: Outcome
    after: Outcome


@dataclass
class DryRun:
    """The difference that a candidate makes."""

    version: int
    examined: int = 0
    matched: Tally = field(default_factory=Tally)
    unanswered: int = 0
    drifted: int = 0
    changes: dict[tuple[Outcome, Outcome], Tally] = field(default_factory=lambda: defaultdict(Tally))
    examples: list[Example] = field(default_factory=list)
    next: UUID | None = None


async def dry_run(
    tx: Tx,
    rule_id: UUID,
    *,
    version: int | None = None,
    without: bool = False,
    since: datetime | None = None,
    until: datetime | None = None,
    before: UUID | None = None,
    limit: int = 1_000,
) -> DryRun:
    """Decide recorded facts twice, newest first: as the rules in force do, and with this version of the rule.

    ``without`` asks what would be if the rule were deprecated. Velocity facts are those that were recorded; one that
    no rule used then is missing, and counts as unanswered.
    """
    record = await service.read_rule_record(tx, rule_id)
    written = await service.find_version(tx, record, version)
    in_force = await service.find_loaded(tx, record.rule_set_id)
    rule, lists = await service.join(tx, in_force, written)
    others = [other for other in in_force.rules if other.id != rule_id]
    candidate = CompiledSet(in_force.settings, others if without else [*others, rule], lists)
    first, last = await store.find_ids_of_window(tx, since, until)
    result = DryRun(written.version)
    at = min(before, last) if before is not None else last
    left = min(limit, MOST_DECISIONS)
    while left > 0:
        rows = await store.find_facts(
            tx, rule_set_id=record.rule_set_id, since=first, before=at, limit=min(BATCH, left)
        )  # fmt: skip
        await asyncio.to_thread(_decide, result, rule_id, in_force, candidate, rows)  # others are served meanwhile
        at = rows[-1][0] if rows else at
        left -= len(rows)
        if len(rows) < BATCH:
            break
    result.next = at if left <= 0 else None
    return result


def _decide(
    result: DryRun, rule_id: UUID, in_force: Loaded, candidate: CompiledSet, rows: Sequence[tuple[UUID, Any, str]]
) -> None:
    for decision_id, facts, recorded in rows:
        said = (recorded, in_force.compiled.decide(facts), candidate.decide(facts))
        _compare(result, rule_id, decision_id, said, _money(in_force.settings, facts))


def _compare(
    result: DryRun,
    rule_id: UUID,
    decision_id: UUID,
    said: tuple[str, Verdict, Verdict],
    money: tuple[Decimal | None, str],
) -> None:
    recorded, now, then = said
    result.examined += 1
    result.drifted += recorded != now.decision.value
    result.unanswered += any(one.rule_id == rule_id for one in then.incomplete)
    if any(one.rule_id == rule_id for one in then.matched):
        result.matched.add(*money)
    if now.decision is not then.decision:
        result.changes[now.decision, then.decision].add(*money)
        if len(result.examples) < MOST_EXAMPLES:
            result.examples.append(Example(decision_id, now.decision, then.decision))


def _money(settings: Settings, facts: Mapping[str, Any]) -> tuple[Decimal | None, str]:
    """How much it was about, where the rule set says which facts hold that."""
    amount = read_decimal(facts.get(settings.money_amount)) if settings.money_amount else None
    currency = facts.get(settings.money_currency) if settings.money_currency else NO_CURRENCY
    return amount, currency if isinstance(currency, str) else NO_CURRENCY
